"""`embodied-ppo clone`: train a policy by cloning demonstrations only.

Example: clone experiment=tabletop_token cloning.dataset=demos/reach
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import FLAGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "clone")


def run(args: argparse.Namespace) -> None:
    """Clone demonstrations and print the summary."""
    loaded = arguments.resolve(args)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        api.check_files(loaded.config)
        from embodied_ppo.programs import runs

        summary = runs.clone(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    output.print_result(summary, args)
