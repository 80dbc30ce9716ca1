"""`embodied-ppo search`: find better options of a run within a time or a number of trials."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import INTERRUPTED
from embodied_ppo.config.compose import PROGRAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "search")
    parser.add_argument("--trials", type=int, default=9, metavar="N", help="sets of options (9)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="runs of each trial, with the seeds S to S + N - 1 of --seed S (1)",
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="wall time for training all runs, for example 30min, 2h or 90s",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at the same time (default: one per core)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the draws and first seed of the runs (0)",
    )
    parser.add_argument("--out", metavar="DIR", help="folder of all runs; continues what it holds")


def run(args: argparse.Namespace) -> None:
    """Search, print the trials and the command that trains with the best options."""
    from embodied_ppo import api

    try:
        with output.stdout_to_stderr():
            result = api.search_lines(
                args.overrides,
                trials=args.trials,
                seeds=args.seeds,
                budget=args.budget,
                jobs=args.jobs,
                seed=args.seed,
                out=args.out,
                config_dir=args.config_dir,
                config_name=args.config_name,
                quiet=args.quiet,
            )
    except KeyboardInterrupt as interrupt:
        if not str(interrupt):
            raise
        print(interrupt, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if args.json:
        print(output.as_json(result), flush=True)
    else:
        print_search(result)


def print_search(result: Mapping[str, Any]) -> None:
    """Print the trials, best first, and the command of the best one."""
    rungs = max(len(trial["scores"]) for trial in result["trials"])
    rows = [["trial", *(f"score {i + 1}" for i in range(rungs)), "CPU s", "options"]]
    for trial in result["trials"]:
        scores = [
            " ".join(f"{trial['scores'][i][name]:.4g}" for name in ("success", "return")
                     if name in trial["scores"][i])
            if i < len(trial["scores"])
            else "-"
            for i in range(rungs)
        ]  # fmt: skip
        options = trial["error"] or " ".join(trial["lines"]) or "the options without search"
        rows.append([str(trial["number"]), *scores, f"{trial['cpu_s']:.0f}", options])
    output.table(rows)
    print(f"\n{result['cpu_s']:.0f} CPU s; runs of the best trial: {', '.join(result['run_dirs'])}")
    print(f"train its first run again: {shlex.join([PROGRAM, 'train', *result['command']])}")
