"""`embodied-ppo train`: train a robot policy or a language model; with -m, a sweep of runs.

Example: train experiment=quickstart seed=1 algorithm.gamma=0.98
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import GIVEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "train")
    combined = "one run per combination of a=1,2 b=3,4, then compare; resume=FOLDER continues"
    parser.add_argument("-m", "--multirun", action="store_true", help=combined)
    jobs = "with --multirun: runs at the same time (default: one per core or CUDA device)"
    parser.add_argument("--jobs", type=arguments.whole(1, 1024), metavar="N", help=jobs)
    silent = "with --multirun: do not compare the methods at the end"
    parser.add_argument("--no-compare", dest="compare", action="store_false", help=silent)


def run(args: argparse.Namespace) -> int | None:
    """Train one run, or one for each combination of the options of a sweep."""
    if args.multirun:
        from embodied_ppo.commands import sweep

        return sweep.run(args)
    for flag, given in ("--jobs", args.jobs is not None), ("--no-compare", not args.compare):
        if given:
            raise UsageError(f"add --multirun, or remove {flag}: a single run ignores it")
    loaded = arguments.resolve(args)
    from embodied_ppo import api

    with output.stdout_to_stderr():
        api.check_files(loaded.config)
        from embodied_ppo.programs import runs

        summary = runs.train(loaded.config, explicit=loaded.deliberate(GIVEN), quiet=args.quiet)
    output.print_result(summary, args)
    return None
