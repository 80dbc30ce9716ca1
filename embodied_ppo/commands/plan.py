"""`embodied-ppo plan`: show the devices and the predicted memory of the roles of a run.

Example: plan placement=hybrid cluster.num_nodes=2
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import ConfigError
from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import PROGRAM, override_lines, prepare

if TYPE_CHECKING:
    from embodied_ppo.options.loader import Loaded
    from embodied_ppo.options.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "plan")
    machine = "plan for N GPUs of a machine that may be another one"
    parser.add_argument("--devices", type=arguments.whole(1, 1024), metavar="N", help=machine)
    memory = "memory of each of these GPUs"
    parser.add_argument("--device-gb", type=float, metavar="GB", help=memory)


def run(args: argparse.Namespace) -> None:
    """Compute and print the placement of a run."""
    if (args.devices is None) != (args.device_gb is None):
        raise ConfigError("write --devices and --device-gb together, as --devices 1 --device-gb 80")
    if args.device_gb is not None and not 0.1 <= args.device_gb <= 10_000:
        raise ConfigError(f"--device-gb {args.device_gb:g}: write GB from 0.1 to 10,000")
    loaded = _prepare(args)
    output.print_aliases(loaded, args)
    if args.devices is not None:
        plan = _plan_machine(loaded.config, args)
    else:
        from embodied_ppo.cluster.run_plan import describe_plan

        plan = describe_plan(loaded.config)
    output.print_result(plan, args, print_plan)


def _prepare(args: argparse.Namespace) -> Loaded:
    """Return the options; a shipped recipe without a checkpoint gets the sizes of its model."""
    loaded = prepare(args, args.overrides, partial=True)
    if "model.checkpoint" in loaded.missing:
        from embodied_ppo.policies.vla.published import PREFIX, RECIPES

        name = RECIPES.get(loaded.config.name)
        if name is not None:
            checkpoint = f"model.checkpoint={PREFIX}{name}"
            if not args.quiet:
                print(f"{checkpoint}: the published sizes, without weights", file=sys.stderr)
            return prepare(args, [*args.overrides, checkpoint])
    return loaded if not loaded.missing else prepare(args, args.overrides)


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print the devices, memory, weight transport and batch sizes of a placement."""
    for rows in (plan["devices"], plan["memory"]):
        output.table(rows)
        print()
    transports = list(plan["weights"].values())
    counts = ", ".join(f"{name} ({transports.count(name)})" for name in dict.fromkeys(transports))
    rows = [["weight transfer", counts]]
    for name, value in plan["facts"].items():
        text = (", ".join(value) or "none") if isinstance(value, list) else f"{value:,}"
        rows.append([name, text])
    output.table(rows)
    if "command" in plan:
        print(f"\n{plan['command']}")


# -------------------------------------------------------------------------------- another machine
def _plan_machine(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Return placement, memory and the command that trains on another machine."""
    from embodied_ppo.cluster.run_plan import plan_summary
    from embodied_ppo.tools import memory_fit

    machine = {"devices_per_node": args.devices, "device_memory_gb": args.device_gb}
    cluster = replace(config.cluster, num_nodes=1, **machine)
    planned = replace(config, device="cuda", cluster=cluster)
    if config.placement == "local" and args.devices > 1 and not cluster.component_placement:
        planned = replace(planned, placement="fused")
    fitted = memory_fit.fit(planned, args.devices)
    changes = {change.option: change.new for change in fitted.changes}
    changes |= {"device": "cuda"} if config.device == "cpu" else {}
    changes |= {"cluster.num_nodes": 1} if config.cluster.num_nodes > 1 else {}
    summary = plan_summary(fitted.config, fitted.plan, fitted.needs)
    summary |= {"placement": fitted.config.placement, "changes": changes}
    return summary | {"command": _train_command(fitted.config, changes, args)}


def _train_command(config: Config, changes: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Return the command that trains on the machine."""
    overrides = list(args.overrides)
    if config.model.checkpoint is not None:
        if not any(line.startswith("model.checkpoint=") for line in overrides):
            overrides.append("model.checkpoint=DIR")
    options = {k: value for k, value in changes.items() if k not in ("placement", "device")}
    overrides += ["device=cuda"] if "device" in changes else []
    if config.placement != "local" or "placement" in changes:
        overrides.append(f"placement={config.placement}")
    if config.placement != "local":
        options["cluster.devices_per_node"] = config.cluster.devices_per_node
    overrides += override_lines("train", options)
    return shlex.join([PROGRAM, "train", *arguments.config_flags(args), *overrides])
