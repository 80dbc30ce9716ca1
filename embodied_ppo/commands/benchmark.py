"""`embodied-ppo benchmark`: train and measure methods on tabletop-bench."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "benchmark")


def run(args: argparse.Namespace) -> None:
    """Train and measure the methods, and print the table."""
    arguments.reject_paths(args)
    loaded = prepare(args, args.overrides)
    from embodied_ppo import benchmark

    with output.stdout_to_stderr():
        summary = benchmark.benchmark(loaded.config, quiet=args.quiet)
    if args.json:
        print(output.as_json(summary), flush=True)
        return
    output.table(summary["table"])
    print()
    output.print_summary({k: v for k, v in summary.items() if k != "table"})
