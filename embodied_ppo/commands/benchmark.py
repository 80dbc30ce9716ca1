"""`embodied-ppo benchmark`: train and measure methods on tabletop-bench."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "benchmark")


def run(args: argparse.Namespace) -> None:
    """Train and measure the methods, and print the table."""
    loaded = arguments.resolve(args)
    from embodied_ppo.tools import benchmark_table

    with output.stdout_to_stderr():
        summary = benchmark_table.benchmark(loaded.config, quiet=args.quiet)
    if not args.json:
        output.table(summary.pop("table"))
        print()
    output.print_result(summary, args)
