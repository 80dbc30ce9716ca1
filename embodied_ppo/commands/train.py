"""`embodied-ppo train`: train a robot policy or a language model; with -m, a sweep of runs."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare
from embodied_ppo.core.errors import UsageError

MOST_JOBS = 1024
"""Largest number of runs at the same time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "train")
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="one run per combination of a=1,2 b=3,4, then compare; resume=FOLDER continues",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="with --multirun: runs at the same time (default: one per core or CUDA device)",
    )
    parser.add_argument(
        "--no-compare",
        dest="compare",
        action="store_false",
        help="with --multirun: do not compare the methods at the end",
    )


def run(args: argparse.Namespace) -> int | None:
    """Train one run, or one for each combination of the options of a sweep."""
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise UsageError(f"--jobs {args.jobs}: must be 1 to {MOST_JOBS}")
    if args.multirun:
        from embodied_ppo.commands import sweep

        return sweep.run(args)
    for flag, given in ("--jobs", args.jobs is not None), ("--no-compare", not args.compare):
        if given:
            raise UsageError(f"{flag} is read with --multirun only; leave it out")
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    arguments.check_checkpoints(loaded.config)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        summary = api.train_loaded(loaded, quiet=args.quiet)
    output.print_result(summary, args)
    return None
