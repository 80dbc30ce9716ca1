"""`embodied-ppo evaluate`: measure a checkpoint and write a report.

Example: evaluate checkpoint=runs/NAME/DATE-SEED episodes=100
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import GIVEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "evaluate")


def run(args: argparse.Namespace) -> None:
    """Evaluate a checkpoint and print the summary."""
    loaded = arguments.resolve(args)
    with output.stdout_to_stderr():
        from embodied_ppo.evaluation import checkpoint_evaluation

        summary = checkpoint_evaluation.evaluate(
            loaded.config, explicit=loaded.deliberate(GIVEN), quiet=args.quiet
        )
    output.print_result(summary, args)
    if "paired" in summary and not args.json:
        from embodied_ppo.evaluation import paired

        content = summary["paired"]
        title = f"\npaired: {content['metric']} of the same {content['episodes']} episodes"
        output.table(paired.rows(content), title=title)
        for line in paired.undecided(content):
            print(line)
    if "robustness" in summary and not args.json:
        from embodied_ppo.evaluation import robustness

        card = summary["robustness"]
        title = f"\nrobustness: {card['metric']} of {card['episodes']} episodes at each value"
        title += f"; no score: {card['no_score']}" if card["no_score"] else ""
        output.table(robustness.rows(card), title=title)
