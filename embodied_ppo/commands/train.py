"""`embodied-ppo train`: train a robot policy or a language model; with -m, a sweep of runs."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import multirun, prepare

if TYPE_CHECKING:
    from embodied_ppo.config.loader import Loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "train")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="one run per combination of a=1,2 b=3,4"
    )


def run(args: argparse.Namespace) -> None:
    """Train one run, or one for each combination of the options of a sweep."""
    if args.multirun:
        _sweep(args)
    else:
        _train(prepare(args, args.overrides), args, {})


def _sweep(args: argparse.Namespace) -> None:
    """Train one run per combination; print a table by arm, also after a failed job."""
    results: list[dict[str, Any]] = []
    try:
        multirun(args, lambda *job: results.append(_train(*job)))
    finally:
        if not args.json and len(results) > 1:
            print()
            print_arms(results)


def _train(loaded: Loaded, args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Train one run, print and return its summary together with the entries of ``job``."""
    output.print_aliases(loaded, args)
    from embodied_ppo import api

    since_s = 0.0
    if job.get("job"):  # not the first job of a sweep, which includes the start of the process
        from embodied_ppo.training.logging import process_age_s

        since_s = process_age_s()
    with output.stdout_to_stderr():
        summary = api.train_loaded(loaded, quiet=args.quiet, since_s=since_s)
    output.print_result({**job, **summary}, args)
    return {**job, **summary}


def print_arms(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the results of a sweep by arm: the options that differ except the seed.

    Args:
        results: Summaries of runs, each with ``options``, those that differ between the runs.
    """
    arms: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for result in results:
        arm = tuple((key, value) for key, value in result["options"].items() if key != "seed")
        arms.setdefault(arm, []).append(result)
    tags = ("final_return", "final_success")
    tags = [tag for tag in tags if any(result.get(tag) is not None for result in results)]
    columns = [f"{tag} {part}" for tag in tags for part in ("mean", "std", "min", "max")]
    rows = [["arm", "runs", *columns]]
    for arm, runs in arms.items():
        cells = [", ".join(f"{key}={value}" for key, value in arm) or "all", str(len(runs))]
        for tag in tags:
            values = [float(result[tag]) for result in runs if result.get(tag) is not None]
            extremes = (min(values), max(values)) if values else (math.nan, math.nan)
            mean = statistics.mean(values) if values else math.nan
            std = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
            cells += [f"{mean:.4g}", std, *(f"{x:.4g}" for x in extremes)]
        rows.append(cells)
    output.table(rows)
