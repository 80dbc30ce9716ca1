"""`embodied-ppo bisect`: find where a condition on a metric first held in a run.

Example: bisect runs/NAME/DATE-SEED "policy/approx_kl > 0.1"
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run")
    parser.add_argument(
        "condition",
        nargs="*",
        metavar="CONDITION",
        help='a metric, one of > >= < <= == !=, and a number: "policy/approx_kl > 0.1"; or'
        ' "policy/loss nonfinite"',
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Find update and minibatch; print them."""
    if args.run is None or not args.condition:
        raise UsageError(
            'no condition; write embodied-ppo bisect RUN "policy/approx_kl > 0.1", in quotes'
        )
    arguments.check_run(args.run)
    from embodied_ppo.tools.bisection import bisect

    with output.stdout_to_stderr():
        result = bisect(args.run, " ".join(args.condition), progress=not args.quiet)
    output.print_result(result, args, print_result)


def print_result(result: Mapping[str, Any]) -> None:
    """Print where the condition held."""
    condition, update, value = (result[key] for key in ("condition", "update", "value"))
    if not result["held"]:
        metric = condition.partition(" ")[0]
        print(
            f"{condition}: never held; the {result['extreme']} {metric} is {value:.6g} at update"
            f" {update}"
        )
    else:
        print(f"{condition}: first held in update {update}, where it is {value:.6g}")
    if (m := result.get("minibatch")) is not None:
        place = f"{m['number']} of {m['count']} (epoch {m['epoch']}, minibatch {m['position']})"
        print(f"first minibatch: {place}, where it is {m['value']:.6g}")
    for note in result["notes"]:
        print(f"note: {note}")
