"""`embodied-ppo bisect`: find where a condition on a metric first held in a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError

ORDERS = {
    "log_ratio": "|log ratio|",
    "advantage": "|advantage|",
    "value_error": "|value error|",
    "reward": "distance of the reward from the median",
}
"""What samples are ordered by -> how the table calls it."""


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
    """Find update, minibatch and samples; print them."""
    if args.run is None or not args.condition:
        raise UsageError(
            'no condition; write embodied-ppo bisect RUN "policy/approx_kl > 0.1", in quotes'
        )
    arguments.check_run(args.run)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        result = api.bisect(args.run, " ".join(args.condition), progress=not args.quiet)
    if args.json:
        print(output.as_json(result), flush=True)
    else:
        print_result(result)


def print_result(result: Mapping[str, Any]) -> None:
    """Print where the condition held."""
    condition, update, value = (result[key] for key in ("condition", "update", "value"))
    if not result["held"]:
        metric = condition.partition(" ")[0]
        print(
            f"{condition}: never held; the {result['extreme']} {metric} is {value:.6g} at update"
            f" {update}"
        )
        for note in result["notes"]:
            print(f"note: {note}")
        return
    print(f"{condition}: first held in update {update}, where it is {value:.6g}")
    if (minibatch := result["minibatch"]) is not None:
        print(
            f"first minibatch: {minibatch['number']} of {minibatch['count']} (epoch"
            f" {minibatch['epoch']}, minibatch {minibatch['position']},"
            f" {minibatch['samples']} samples), where it is {minibatch['value']:.6g}"
        )
    place = "this minibatch" if minibatch else "the rollout"
    order = ORDERS.get(result["ranked_by"], "")
    _print_samples(f"\nsamples of {place} with the largest {order}", result["samples"])
    _print_samples("\nrewards of the rollout furthest from their median", result["rewards"])
    for note in result["notes"]:
        print(f"note: {note}")


def _print_samples(title: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of samples; nothing without any."""
    if not samples:
        return
    columns = [name for name in samples[0] if name not in ("environment", "step", "env_step")]
    rows = [["environment", "step", "env step", *columns]]
    for sample in samples:
        position = [str(sample[key]) for key in ("environment", "step", "env_step")]
        rows.append([*position, *(f"{sample[name]:.4g}" for name in columns)])
    output.table(rows, title=title)
