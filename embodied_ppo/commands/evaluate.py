"""`embodied-ppo evaluate`: measure a checkpoint and write a report."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "evaluate")


def run(args: argparse.Namespace) -> None:
    """Evaluate a checkpoint and print the summary."""
    arguments.reject_paths(args)
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    arguments.check_checkpoints(loaded.config)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        summary = api.evaluate_loaded(loaded, quiet=args.quiet)
    output.print_result(summary, args)
    if "robustness" in summary and not args.json:
        from embodied_ppo.evaluation import robustness

        card = summary["robustness"]
        title = f"\nrobustness: {card['metric']} of {card['episodes']} episodes at each value"
        output.table(robustness.rows(card), title=title)
