"""`embodied-ppo fork`: train a branch of a run from one of its updates, with changed options."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import quoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN update=N | option=value",
        help="the run, the number of completed updates at the branch, and changed options of"
        " `embodied-ppo config`; run_dir=DIR names the branch (default: RUN-fork-N)",
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Train a branch and print its summary."""
    path, values, lines = arguments.split_run(args.items, "fork", ("update",))
    update = arguments.whole_number(values, "update", "fork")
    from embodied_ppo import api

    with output.stdout_to_stderr():
        summary = api.fork_path(path, update, [quoted(x) for x in lines], quiet=args.quiet)
    output.print_result(summary, args)
