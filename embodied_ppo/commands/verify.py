"""`embodied-ppo verify`: execute updates of a run again; compare tensors, metrics and reports."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import PROBLEM_FOUND
from embodied_ppo.core.errors import UsageError, choose, show

OPTIONS = ("seed", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run",
        nargs="*",
        metavar="RUN | option=value",
        help="the directory of a run; then seed=N, which chooses the updates (default 0), and"
        " out=DIR for certificate.json (default: RUN)",
    )
    parser.add_argument(
        "--updates",
        metavar="N | all",
        type=_number,
        default=5,
        help="number of updates to execute again, in intervals between two checkpoints; 0: only"
        " files and reports are verified (default: 5)",
    )
    arguments.add_output_arguments(parser)


def _number(text: str) -> int | None:
    """Parse a number of updates, None for all."""
    if text == "all":
        return None
    if not (text.isdecimal() and text.isascii()):
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 0, nor all")
    return int(text)


def run(args: argparse.Namespace) -> int | None:
    """Verify a run, print the result, return 1 if there is a difference."""
    # The folder of a sweep's job has an equals sign in its name.
    paths = [text for text in args.run if "=" not in text or Path(text).exists()]
    if len(paths) != 1:
        count = "no run" if not paths else f"{len(paths)} runs"
        raise UsageError(f"{count}; write embodied-ppo verify RUN, the directory of one run")
    arguments.check_run(paths[0])
    options: dict[str, str] = {}
    for text in args.run:
        name, _, value = text.partition("=")
        if text in paths:
            continue
        if name == "updates":
            raise UsageError(f"{text}: write --updates {value}")
        if name not in OPTIONS:
            raise UsageError(f"{name}: no such option; {choose(name, OPTIONS, 'options: ')}")
        options[name] = value
    seed = options.get("seed", "0")
    if not (seed.isdecimal() and seed.isascii()):
        raise UsageError(f"seed={seed}: is not an integer >= 0")
    from embodied_ppo import api

    updates = "all" if args.updates is None else args.updates
    with output.stdout_to_stderr():
        content = api.verify(
            paths[0],
            updates=updates,
            seed=int(seed),
            out=options.get("out"),
            progress=not args.quiet,
        )
    if args.json:
        print(output.as_json(content), flush=True)
    else:
        print_certificate(content)
    return None if content["verdict"] == "verified" else PROBLEM_FOUND


def print_certificate(content: Mapping[str, Any]) -> None:
    """Print the checks and the verdict of a certificate."""
    rows = [["check", "result", "detail"]]
    rows += [[c["check"], c["result"], c["detail"]] for c in content["checks"]]
    output.table(rows)
    print()
    if content["first_difference"]:
        print(f"first difference: {content['first_difference']}")
        print(f"cause: {content['cause']}")
    for note in content["notes"]:
        print(f"note: {note}")
    executed, total = content["executed_updates"], content["completed_updates"]
    repeated = content["evaluations"]
    print(
        f"verdict: {content['verdict']} ({executed} of {total} updates executed again, {repeated}"
        f" {'evaluation' if repeated == 1 else 'evaluations'} repeated)"
    )
    print(f"certificate: {show(content['certificate'])}")
