"""`embodied-ppo fork`: train a branch of a run from one of its updates, with changed options.

Example: fork runs/NAME/DATE-SEED update=40 algorithm.lr=1e-4
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_runs(
        parser,
        "RUN update=N | option=value",
        "the run, the number of completed updates at the branch, and changed options of"
        " `embodied-ppo config`; run_dir=DIR names the branch (default: RUN-fork-N)",
    )


def run(args: argparse.Namespace) -> None:
    """Train a branch and print its summary."""
    path, values, lines = arguments.split_run(args.items, "fork", ("update",))
    update = arguments.whole_number(values, "update", "fork")
    from embodied_ppo.tools.run_fork import fork_lines

    with output.stdout_to_stderr():
        summary = fork_lines(path, update, lines, quiet=args.quiet)
    output.print_result(summary, args)
