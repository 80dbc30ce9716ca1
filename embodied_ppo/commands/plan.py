"""`embodied-ppo plan`: show the devices and the predicted memory of the roles of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "plan")


def run(args: argparse.Namespace) -> None:
    """Compute and print the placement of a run."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo import run

    plan = run.planned(loaded.config)
    if args.json:
        print(output.as_json(plan))
    else:
        print_plan(plan)


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the devices, memory, weight transport and batch sizes of a placement."""
    output.table(plan["devices"])
    print()
    output.table(plan["memory"])
    print()
    transports = list(plan["weights"].values())
    counts = ", ".join(f"{name} ({transports.count(name)})" for name in dict.fromkeys(transports))
    rows = [["weight transfer", counts]]
    for name, value in plan["facts"].items():
        if isinstance(value, list):
            rows.append([name, ", ".join(value) or "none"])
        else:
            rows.append([name, f"{value:,}"])
    output.table(rows)
