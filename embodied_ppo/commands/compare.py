"""`embodied-ppo compare`: evaluate runs on the same initial states; differences with intervals.

Example: compare runs/A runs/B episodes=100
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.training.run_files import check_compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_runs(
        parser,
        "RUN | option=value",
        "runs, checkpoints, or folders of runs that differ in their seed; then options of"
        " `embodied-ppo config evaluate` (for example episodes, seed, out)",
    )
    score = "score of an episode; auto: success if the task reports it"
    choices = ("auto", "return", "success")
    parser.add_argument("--metric", choices=choices, default="auto", help=score)


def run(args: argparse.Namespace) -> None:
    """Compare runs; print tables and verdicts."""
    paths, lines = arguments.split_runs(args.items)
    if not paths:
        raise UsageError("no runs; write embodied-ppo compare RUN RUN, or a folder of runs")
    for path in paths:
        check_compared(path)  # before torch is loaded
    from embodied_ppo.tools.policy_comparison import compare_lines

    with output.stdout_to_stderr():
        content = compare_lines(paths, args.metric, lines, quiet=args.quiet)
    output.print_result(content, args, print_comparison)


def print_comparison(content: Mapping[str, Any]) -> None:
    """Print the tables of a comparison."""
    # The mean of runs of several tasks has no interval of its own.
    several = "tasks" in content
    head = ["method", "runs", f"mean {content['metric']}", "95 %", "interquartile mean"]
    rows = [[*head[:3], "interquartile mean", "95 %"] if several else head]
    for method in content["methods"]:
        low, high = method["interquartile_mean_ci95" if several else "ci95"]
        interval, centre = f"{low:.4g} to {high:.4g}", f"{method['interquartile_mean']:.4g}"
        cells = [method["label"], str(len(method["runs"])), f"{method['mean']:.4g}"]
        rows.append([*cells, *((centre, interval) if several else (interval, centre))])
    output.table(rows)
    rows = [["difference", "mean", "95 %", "runs won"]]
    for d in content["differences"]:
        low, high = d["ci95"]
        name, mean = f"{d['b']} - {d['a']}", f"{d['mean']:+.4g}"
        rows.append([name, mean, f"{low:+.4g} to {high:+.4g}", f"{d['win_rate']:.0%}"])
    print()
    output.table(rows)
    if several:
        rows = [["task", "references", *(method["label"] for method in content["methods"])]]
        for task in content["tasks"]:
            ends = " to ".join(f"{x:.4g}" for x in content["references"][task["task"]])
            rows.append([task["task"], ends, *(f"{m['mean']:.4g}" for m in task["methods"])])
        print()
        output.table(rows)
    if content["options"]:
        print()
        head = ["option", *(method["label"] for method in content["methods"])]
        options = [
            [row["option"], *("not read" if x is None else x for x in row["values"])]
            for row in content["options"]
        ]
        output.table([head, *options])
    print()
    for difference in content["differences"]:
        print(difference["verdict"])
    print(f"page: {content['page']}")
