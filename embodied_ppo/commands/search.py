"""`embodied-ppo search`: find better options with Optuna, in a time or a number of trials."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import INTERRUPTED
from embodied_ppo.options.compose import PROGRAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "search")
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="sets of options (9; with --budget as many as it permits)",
    )
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
        help="time after which the search ends, for example 30min, 2h or 90s",
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
    from embodied_ppo.tools.option_search import search

    try:
        with output.stdout_to_stderr():
            result = search(
                overrides=args.overrides,
                trials=args.trials,
                seeds=args.seeds,
                budget=args.budget,
                jobs=args.jobs,
                seed=args.seed,
                out=args.out,
                config_dir=args.config_dir,
                config_name=args.config_name,
                progress=not args.quiet,
            )
    except KeyboardInterrupt as interrupt:
        if not str(interrupt):
            raise
        print(interrupt, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    output.print_result(result, args, print_search)


def print_search(result: Mapping[str, Any]) -> None:
    """Print the trials, best first, and the command of the best one."""
    rows = [["trial", "state", "evaluations", "score", "options"]]
    for trial in result["trials"]:
        scores = trial["scores"]
        options = trial["error"] or " ".join(trial["lines"]) or "the options without search"
        score = f"{scores[-1]:.4g}" if scores else "-"
        rows.append([str(trial["number"]), trial["state"], str(len(scores)), score, options])
    output.table(rows)
    print(f"\nruns of the best trial: {', '.join(result['run_dirs'])}")
    print(f"train its first run again: {shlex.join([PROGRAM, 'train', *result['command']])}")
