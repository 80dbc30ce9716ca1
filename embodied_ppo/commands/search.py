"""`embodied-ppo search`: find better options of a run within a time or a number of trials."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import INTERRUPTED
from embodied_ppo.config.compose import PROGRAM, prepare, search_ranges
from embodied_ppo.core.errors import ConfigError, UsageError

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of --budget."""
CHANGE = 0.5
"""Probability with which a trial changes an option of the default ranges."""
SET_BY_SEARCH = ("seed", "run_dir", "resume", "eval_every", "save_every")
"""Options that the search sets for each run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "search")
    parser.add_argument("--trials", type=int, default=9, metavar="N", help="sets of options (9)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each trial (1)")
    parser.add_argument(
        "--budget", metavar="TIME", help="time of the whole search, for example 30min, 2h or 90s"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at the same time (default: one per core)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws (0)")
    parser.add_argument("--out", metavar="DIR", help="folder of all runs; continues what it holds")


def run(args: argparse.Namespace) -> None:
    """Search, print the trials and the command that trains with the best options."""
    limits = {"trials": (2, 729), "seeds": (1, 64), "jobs": (1, 1024), "seed": (0, 2**31)}
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise UsageError(f"--{name} {value}: must be {low} to {high}")
    budget_s = None if args.budget is None else seconds(args.budget)
    for line in args.overrides:
        name = line.partition("=")[0].lstrip("+~")
        if name in SET_BY_SEARCH or (budget_s and name in ("updates", "env_steps")):
            cure = "use --seed or --seeds" if name == "seed" else "leave it out"
            raise UsageError(f"{line}: is set by the search for each run; {cure}")
    train = argparse.Namespace(**{**vars(args), "command": "train"})
    lines, ranges = search_ranges(train)
    config = prepare(train, lines).config
    if config.placement != "local":
        raise ConfigError(
            f"placement = {config.placement}: a search starts several runs at the same time, and"
            " one with this placement uses all devices; write placement=local"
        )
    from embodied_ppo.analysis import search

    change = 1.0 if ranges else CHANGE
    ranges = ranges or search.default_ranges(config)
    flags = []
    if args.config_dir is not None:
        flags += ["--config-dir", args.config_dir]
    if args.config_name is not None:
        flags += ["--config-name", args.config_name]
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, config.threads))
    settings = search.Settings(
        lines,
        ranges,
        change,
        args.trials,
        args.seeds,
        min(args.jobs or cores, args.trials * args.seeds),
        budget_s,
        args.seed,
        flags,
    )
    out = Path(
        args.out or Path("runs") / "searches" / config.name / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    ).absolute()
    try:
        with output.stdout_to_stderr():
            result = search.search(settings, out, quiet=args.quiet)
    except KeyboardInterrupt:
        print(f"interrupted; the same command with --out {out} continues", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if args.json:
        print(output.as_json(result), flush=True)
    else:
        print_search(result, len(search.marks(args.trials)))


def seconds(text: str) -> float:
    """Return a duration such as ``30min`` in seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if match is None or not 1 <= (value := float(match[1]) * UNITS[match[2]]) <= 3e7:
        raise UsageError(f"--budget {text}: is no duration of at least 1s; write 90s, 30min or 2h")
    return value


def print_search(result: Mapping[str, Any], marks: int) -> None:
    """Print the trials, best first, and the command of the best one."""
    rows = [["trial", *(f"score {i + 1}" for i in range(marks)), "CPU s", "options"]]
    for trial in result["trials"]:
        scores = [
            " ".join(f"{trial['scores'][i][name]:.4g}" for name in ("success", "return")
                     if name in trial["scores"][i])
            if i < len(trial["scores"])
            else "-"
            for i in range(marks)
        ]  # fmt: skip
        options = trial["error"] or " ".join(trial["lines"]) or "the options without search"
        rows.append([str(trial["number"]), *scores, f"{trial['cpu_s']:.0f}", options])
    output.table(rows)
    print(f"\n{result['cpu_s']:.0f} CPU s; runs of the best trial: {', '.join(result['run_dirs'])}")
    print(f"train with its options: {shlex.join([PROGRAM, 'train', *result['command']])}")
