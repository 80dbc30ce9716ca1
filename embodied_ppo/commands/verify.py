"""`embodied-ppo verify`: execute updates of a run again; compare tensors, metrics and reports.

Example: verify runs/NAME/DATE-SEED --updates 5
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from embodied_envs.base.errors import show
from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import PROBLEM_FOUND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_runs(
        parser,
        "RUN | option=value",
        "the directory of a run; then seed=N, which chooses the updates (default 0), and out=DIR"
        " for certificate.json (default: RUN)",
    )
    meaning = (
        "number of updates to execute again, in intervals between two checkpoints; 0: only files"
        " and reports are verified (default: 5)"
    )
    parser.add_argument("--updates", metavar="N | all", type=_number, default=5, help=meaning)


def _number(text: str) -> int | str:
    """Parse a number of updates, or all."""
    return text if text == "all" else arguments.whole(0, 10**9)(text)


def run(args: argparse.Namespace) -> int | None:
    """Verify a run, print the result, return 1 if there is a difference."""
    path, values, lines = arguments.split_run(args.items, "verify", ("seed", "out"))
    seed = arguments.whole_number(values, "seed", "verify", "0")
    arguments.refuse_lines(lines, "verify")
    from embodied_ppo.tools.verification import verify

    with output.stdout_to_stderr():
        content = verify(
            path, updates=args.updates, seed=seed, out=values.get("out"), progress=not args.quiet
        )
    output.print_result(content, args, print_certificate)
    return None if content["verdict"] == "verified" else PROBLEM_FOUND


def print_certificate(content: Mapping[str, Any]) -> None:
    """Print the checks and the verdict of a certificate."""
    rows = [["check", "result", "detail"]]
    rows += [[c["check"], c["result"], c["detail"]] for c in content["checks"]]
    output.table(rows)
    print()
    if content["first_difference"]:
        print(f"first difference: {content['first_difference']}")
    for note in content["notes"]:
        print(f"note: {note}")
    executed, total = content["executed_updates"], content["completed_updates"]
    repeated = f"{content['evaluations']} evaluation{'s' * (content['evaluations'] != 1)} repeated"
    done = f"{executed} of {total} updates executed again, {repeated}"
    print(f"verdict: {content['verdict']} ({done})")
    print(f"certificate: {show(content['certificate'])}")
