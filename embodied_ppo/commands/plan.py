"""`embodied-ppo plan`: show the devices and the predicted memory of the roles of a run."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config import placement
from embodied_ppo.config.compose import PROGRAM, override_lines, prepare
from embodied_ppo.core.errors import ConfigError

if TYPE_CHECKING:
    from embodied_ppo.config.loader import Loaded
    from embodied_ppo.modes.machine_plan import MachinePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "plan")
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        help="plan for N GPUs of a machine that may be another one",
    )
    parser.add_argument(
        "--device-gb", type=_gigabytes, metavar="GB", help="memory of each of these GPUs"
    )


def _count(text: str) -> int:
    """Parse an integer from 1 to 1024."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"{text} is not an integer from 1 to 1024")
    return int(text)


def _gigabytes(text: str) -> float:
    """Parse a number from 0.1 to 10,000."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GB from 0.1 to 10,000")
    return value


def run(args: argparse.Namespace) -> None:
    """Compute and print the placement of a run."""
    if (args.devices is None) != (args.device_gb is None):
        given, other = ("--devices", "--device-gb 80")
        if args.devices is None:
            given, other = ("--device-gb", "--devices 1")
        raise ConfigError(f"{given}: needs {other.split()[0]}, too; add {other}")
    loaded = _prepare(args)
    output.print_aliases(loaded, args)
    if args.devices is not None:
        from embodied_ppo.modes import machine_plan

        planned = machine_plan.plan_for(loaded.config, args.devices, args.device_gb)
        if args.json:
            print(output.as_json(_machine_summary(planned, args)))
        else:
            _print_machine_plan(planned, args)
        return
    from embodied_ppo import run

    plan = run.planned(loaded.config)
    if args.json:
        print(output.as_json(plan))
    else:
        print_plan(plan)


def _prepare(args: argparse.Namespace) -> Loaded:
    """Return the options; a shipped recipe without a checkpoint gets the sizes of its model."""
    loaded = prepare(args, args.overrides, partial=True)
    if "model.checkpoint" in loaded.missing:
        from embodied_ppo.models.vla.published import PREFIX, RECIPES

        name = RECIPES.get(loaded.config.name)
        if name is not None:
            checkpoint = f"model.checkpoint={PREFIX}{name}"
            if not args.quiet:
                print(f"{checkpoint}: the published sizes, without weights", file=sys.stderr)
            return prepare(args, [*args.overrides, checkpoint])
    return loaded if not loaded.missing else prepare(args, args.overrides)


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


# -------------------------------------------------------------------------------- another machine
def _train_command(planned: MachinePlan, args: argparse.Namespace) -> str:
    """Return the command that trains on the machine."""
    overrides = [line for line in args.overrides if not line.startswith("model.checkpoint=")]
    checkpoint = [line for line in args.overrides if line.startswith("model.checkpoint=")]
    if planned.config.model.checkpoint is not None and not checkpoint:
        checkpoint = ["model.checkpoint=DIR"]
    config_name = ["--config-name", args.config_name] if args.config_name else []
    config_dir = ["--config-dir", args.config_dir] if args.config_dir else []
    changes = [
        f"{path}={value}" if path == "placement" else override_lines("train", {path: value})[0]
        for path, value in planned.changes.items()
    ]
    return shlex.join(
        [PROGRAM, "train", *config_dir, *config_name, *overrides, *checkpoint, *changes]
    )


def _machine_summary(planned: MachinePlan, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result as JSON."""
    seconds = planned.seconds
    return {
        "placement": planned.config.placement,
        "changes": dict(planned.changes),
        "micro_batch": planned.micro_batch,
        "devices": planned.plan.rows(),
        "memory": placement.memory_rows(planned.plan, planned.needs),
        "needs": planned.needs,
        "device": None if planned.device is None else planned.device.name,
        "operations": planned.operations,
        "seconds": None if seconds is None else {**vars(seconds), "total": seconds.total},
        "command": _train_command(planned, args),
    }


def _print_machine_plan(planned: MachinePlan, args: argparse.Namespace) -> None:
    """Print placement, memory and predicted time on another machine."""
    output.table(planned.plan.rows())
    print()
    output.table(placement.memory_rows(planned.plan, planned.needs))
    context = placement.amount(placement.CUDA_CONTEXT)
    usable = placement.USABLE_MEMORY * args.device_gb
    print(f"and {context} of each process for CUDA; {usable:.3g} of {args.device_gb:g} GB are used")
    print()
    rows = [["micro-batch", f"{planned.micro_batch} samples"]]
    if planned.operations is not None:
        rows.append(["operations of an update", f"{planned.operations / 1e15:.3g} PFLOP"])
    output.table(rows)
    print()
    if planned.seconds is not None and planned.device is not None:
        s = planned.seconds
        simulate = "unknown" if s.simulate is None else f"{s.simulate:.3g}"
        output.table(
            [
                ["seconds of an update", planned.device.name],
                ["simulate", simulate],
                ["act", f"{s.act:.3g}"],
                ["train", f"{s.learn:.3g}"],
                ["exchange", f"{s.exchange:.3g}"],
                ["total", f"{s.total:.3g} ({s.low:.3g} to {s.high:.3g})"],
            ]
        )
        print("predicted, not measured: docs/scaling.md has the formula and its assumptions")
    else:
        print("seconds of an update: not predicted; docs/scaling.md lists the GPUs and models")
    print()
    print(_train_command(planned, args))
