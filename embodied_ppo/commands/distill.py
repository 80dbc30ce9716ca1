"""`embodied-ppo distill`: train a student to act as a trained teacher, from other observations.

Example: distill teacher=runs/NAME/DATE-SEED experiment=tabletop_pixels
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import GIVEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "distill")


def run(args: argparse.Namespace) -> None:
    """Distil a student and print the summary."""
    loaded = arguments.resolve(args)
    with output.stdout_to_stderr():
        from embodied_ppo.programs import runs

        summary = runs.distill(loaded.config, explicit=loaded.deliberate(GIVEN), quiet=args.quiet)
    output.print_result(summary, args)
