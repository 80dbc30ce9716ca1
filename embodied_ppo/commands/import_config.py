"""`embodied-ppo import-config`: turn options of other trainers into an experiment.

Example: import-config verl ppo_trainer.yaml --out my_configs/experiment/mine.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from embodied_envs.base.errors import shorten, show
from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError

NO_COUNTERPART = "no counterpart"  # label of the options that have no meaning in this package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    source = "rlinf, verl, roll, trl, openrlhf or slime; its YAML, overrides or flags"
    parser.add_argument("overrides", nargs="*", metavar="FRAMEWORK FILE", help=source)
    out = "experiment to write, a new file (default: stdout)"
    parser.add_argument("--out", metavar="FILE", help=out)
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Convert a file of another framework and print what each of its options became."""
    if len(args.overrides) != 2:
        raise UsageError(
            "import-config needs a framework and a file; write import-config verl FILE.yaml --out"
            " NEW.yaml"
        )
    from embodied_ppo.tools.import_config import convert

    framework, file = args.overrides
    migration = convert.migrate(framework, file, args.out)
    if args.json:
        print(output.as_json(migration))
        return
    if args.out is None:
        print(migration["yaml"], end="")
    if not args.quiet:
        # Without --out the experiment itself goes to stdout, so the tables go to stderr.
        with contextlib.redirect_stdout(sys.stdout if args.out else sys.stderr):
            print_migration(migration)


def print_migration(migration: Mapping[str, Any]) -> None:
    """Print which option became which, and the options without a counterpart with the reason."""

    def option(row: Mapping[str, Any]) -> str:
        return shorten(f"{show(row['theirs'])} = {show(row['value'])}", 120)

    def reasons(name: str) -> list[list[str]]:
        return [[option(row), row["why"]] for row in migration[name]]

    peer, conflict = migration["peer"], migration["conflict"]
    mapped = []
    for row in migration["mapped"]:
        theirs = option(row) + (f" (default of {peer})" if row["default"] else "")
        mapped += [[theirs, f"{path} = {show(value)}"] for path, value in row["ours"].items()]
    sections = [
        (f"mapped: {peer} -> embodied_ppo", mapped),
        ("differences that remain", reasons("differences")),
        (NO_COUNTERPART, reasons("meaningless")),
        ("refused", reasons("refused")),
        ("unknown", reasons("unknown")),
        ("to be set by hand", [[path, text] for path, text in migration["to_write"].items()]),
        ("conflict between options", [["message of train", conflict]] if conflict else []),
    ]
    for title, rows in sections:
        if rows:
            output.table(rows, title=title)
            print()
    labels = {"mapped": "mapped", "meaningless": NO_COUNTERPART}
    labels |= {"refused": "refused", "unknown": "unknown"}
    counts = [[label, str(len(migration[name]))] for name, label in labels.items()]
    output.table([*counts, ["written", migration["out"] or "to stdout"]])
