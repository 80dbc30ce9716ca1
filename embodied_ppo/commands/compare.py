"""`embodied-ppo compare`: evaluate runs on the same initial states; differences with intervals."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import quoted
from embodied_ppo.core.errors import UsageError
from embodied_ppo.training.run_files import check_compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN | option=value",
        help="runs, checkpoints, or folders of runs that differ in their seed; then options of"
        " `embodied-ppo config evaluate` (episodes, seed, out, env.NAME, ..)",
    )
    parser.add_argument(
        "--metric",
        choices=("auto", "return", "success"),
        default="auto",
        help="score of an episode; auto: success if the task reports it",
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Compare runs; print tables and verdicts."""
    # The folder of a sweep's job has an equals sign in its name.
    paths = [text for text in args.runs if "=" not in text or Path(text).exists()]
    if not paths:
        raise UsageError("no runs; write embodied-ppo compare RUN RUN, or a folder of runs")
    for path in paths:
        check_compared(path)  # before torch is loaded
    from embodied_ppo import api

    lines = [quoted(text) for text in args.runs if text not in paths]
    with output.stdout_to_stderr():
        content = api.compare_paths(paths, args.metric, lines, quiet=args.quiet)
    if args.json:
        print(output.as_json(content), flush=True)
    else:
        print_comparison(content)


def print_comparison(content: Mapping[str, Any]) -> None:
    """Print the tables of a comparison."""
    rows = [["method", "runs", f"mean {content['metric']}", "95 %", "interquartile mean"]]
    for method in content["methods"]:
        low, high = method["ci95"]
        rows.append(
            [
                method["label"],
                str(len(method["runs"])),
                f"{method['mean']:.4g}",
                f"{low:.4g} to {high:.4g}",
                f"{method['interquartile_mean']:.4g}",
            ]
        )
    output.table(rows)
    rows = [["difference", "mean", "95 % (paired)", "95 % (unpaired)", "P(better)", "runs won"]]
    for d in content["differences"]:
        intervals = [f"{low:+.4g} to {high:+.4g}" for low, high in (d["ci95"], d["ci95_unpaired"])]
        rows.append(
            [
                f"{d['b']} - {d['a']}",
                f"{d['mean']:+.4g}",
                *intervals,
                f"{d['probability_b_better']:.3f}",
                f"{d['win_rate']:.0%}",
            ]
        )
    print()
    output.table(rows)
    if content["options"]:
        print()
        head = ["option", *(method["label"] for method in content["methods"])]
        options = [[row["option"], *map(_cell, row["values"])] for row in content["options"]]
        output.table([head, *options])
    print()
    for line in (*(d["verdict"] for d in content["differences"]), *content["notes"]):
        print(line)
    print(f"page: {content['page']}")


def _cell(value: str | None) -> str:
    return "not read" if value is None else value
