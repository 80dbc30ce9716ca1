"""`embodied-ppo distill`: train a student to act as a trained teacher, from other observations."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "distill")


def run(args: argparse.Namespace) -> None:
    """Distil a student and print the summary."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    arguments.check_checkpoints(loaded.config)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        summary = api.distill_loaded(loaded, quiet=args.quiet)
    output.print_result(summary, args)
