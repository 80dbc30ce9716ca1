"""`embodied-ppo demos`: record demonstrations of a task's scripted expert.

Example: demos experiment=tabletop_token out=demos/reach episodes=2000
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "demos")


def run(args: argparse.Namespace) -> None:
    """Record demonstrations and print the summary."""
    loaded = arguments.resolve(args)
    from embodied_ppo.imitation.expert_demos import record_demos

    with output.stdout_to_stderr():
        summary = record_demos(loaded.config, quiet=args.quiet)
    if not args.json:  # the table of a summary leaves nested entries out
        families = (f"{name} {count}" for name, count in summary["families"].items())
        summary["families"] = ", ".join(families) or None
    output.print_result(summary, args)
