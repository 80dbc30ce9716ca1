"""`embodied-ppo fit`: rewrite a recipe for other devices, with smaller micro-batches.

Example: fit experiment=tabletop_token --devices 1 > my_configs/experiment/small.yaml
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from embodied_envs.base.errors import show
from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import PROGRAM, prepare

if TYPE_CHECKING:
    from embodied_ppo.tools.memory_fit import FittedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "fit")
    number = {"type": arguments.whole(1, 1024), "metavar": "N", "required": True}
    parser.add_argument("--devices", **number, help="number of devices of one machine")


def run(args: argparse.Namespace) -> None:
    """Fit a recipe to fewer devices; print it to stdout and the changes to stderr."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.options.placement_memory import memory_rows
    from embodied_ppo.tools import memory_fit

    fitted = memory_fit.fit(loaded.config, args.devices)
    if args.json:
        summary = {
            "changes": [vars(change) for change in fitted.changes],
            "notes": fitted.notes,
            "memory": memory_rows(fitted.plan, fitted.needs),
            "recipe": memory_fit.settings(fitted.config),
        }
        print(output.as_json(summary))
        return
    if not args.quiet:
        print_fitted(fitted)
    flags = [*arguments.config_flags(args), "--devices", str(args.devices)]
    command = shlex.join([PROGRAM, "fit", *args.overrides, *flags])
    print(memory_fit.format_yaml(fitted, command), end="")


def print_fitted(fitted: FittedRecipe) -> None:
    """Print every changed option with the reason, and the sizes of an update, to stderr."""
    from embodied_ppo.options import batch_sizes

    lines = [f"{x.option}: {show(x.old)} -> {show(x.new)}  ({x.why})" for x in fitted.changes]
    lines = lines or ["nothing has to change"]
    sizes = [f"  {line}" for line in batch_sizes.lines(fitted.config)]
    print("\n".join([*lines, *fitted.notes, "a run:", *sizes]), file=sys.stderr)
