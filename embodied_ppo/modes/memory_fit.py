"""Adapt a recipe to other devices by smaller micro-batches.

The optimiser steps stay equal: the gradients of the micro-batches of a minibatch are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml

from embodied_ppo.config import batch_sizes, loader, placement, readers, validation
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.core.types import ConfigError, PlacementError
from embodied_ppo.modes.base import MemoryNeeds, hardware_of, select_device
from embodied_ppo.modes.registry import mode


@dataclass(frozen=True)
class Change:
    """An option that had to change, and the reason."""

    option: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True)
class FittedRecipe:
    """A recipe for other devices.

    Attributes:
        config: The recipe.
        batch_sizes: Lines about the sizes of an update.
        changes: Options that differ from the original recipe.
        memory: Table of the memory of one process of each group.
        notes: Further lines for the user.
    """

    config: Config
    batch_sizes: Sequence[str]
    changes: tuple[Change, ...]
    memory: Sequence[tuple[str, ...]]
    notes: tuple[str, ...]


def fit(config: Config, devices: int) -> FittedRecipe:
    """Return the recipe ``config`` for ``devices`` devices of one machine.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: Even the smallest micro-batch does not fit. The message lists the memory.
    """
    if config.resume is not None:
        raise ConfigError(
            f"resume = {config.resume}: fit writes a recipe; leave it out here, give it to train"
        )
    # A recipe for a GPU may be written on a machine without one.
    if config.device.startswith("cuda"):
        device = torch.device("cuda")
    else:
        device = select_device(config.device, config.threads)
    cluster = replace(config.cluster, num_nodes=1, devices_per_node=devices, node_groups={})
    limit = hardware_of(replace(config, cluster=cluster), device).memory
    if limit is None:
        raise ConfigError(
            f"device = {config.device}: there is none here to measure; write"
            " cluster.device_memory_gb=24"
        )
    fitted, plan, placement_reason = _fit_placement(config, devices, device)
    plan = replace(plan, hardware=replace(plan.hardware, memory=limit))
    fitted, needs, batch_reason = _fit_micro_batches(fitted, plan)
    learners, used = plan.processes("actor"), plan.hardware.total
    notes = [f"uses {used} of {devices} devices"] if used < devices else []
    if batch_sizes.batches(config).actor.minibatches > 1 and learners != _learners(config, device):
        notes.append(
            f"{learners} learning now: other samples share a minibatch, because each process draws"
            " from its own environments or prompts; minibatch size, epochs and learning rate stay"
        )
    cuts_minibatches = fitted.algorithm != config.algorithm and config.compile != "never"
    if cuts_minibatches and mode(config).compiles_complete_minibatches_only:
        notes.append("compiled code is not used where micro-batches cut minibatches")
    before, after = loader.flat(loader.dump(config)), loader.flat(loader.dump(fitted))
    changes = [
        Change(
            path,
            before.get(path),
            after.get(path),
            placement_reason if path.startswith(("placement", "cluster")) else batch_reason,
        )
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path)
        and path != "cluster.device_memory_gb"  # an input of fit, which train does not need
    ]
    return FittedRecipe(
        config=fitted,
        batch_sizes=batch_sizes.lines(fitted),
        changes=tuple(changes),
        memory=placement.memory_rows(plan, needs),
        notes=tuple(notes),
    )


def _learners(config: Config, device: torch.device) -> int:
    """Return the original recipe's number of learners; 0 if this machine lacks its devices."""
    try:
        return mode(config).resolve_plan(config, device).processes("actor")
    except PlacementError:
        return 0


def _fit_placement(
    config: Config, devices: int, device: torch.device
) -> tuple[Config, placement.Plan, str]:
    """Return the recipe with a placement for ``devices`` devices, its plan, and the reason.

    The placement is that of the recipe if possible, else fused on the largest number of devices
    that divides the work, else local. Raises ConfigError.
    """
    c, implementation = config.cluster, mode(config)
    local = replace(config, placement="local", cluster=ClusterConfig())
    if config.placement == "local" and not c.component_placement:
        plan = implementation.resolve_plan(local, device)
        return local, plan, "for placements of several processes"
    same = replace(config, cluster=replace(c, num_nodes=1, devices_per_node=devices))
    try:
        return same, implementation.resolve_plan(same, device), f"--devices {devices}"
    except PlacementError as error:
        reason = f"--devices {devices}: {error}"
    fused_cluster = replace(
        c,
        num_nodes=1,
        node_groups={},
        component_placement={},
        max_lag=0,
        weights="auto" if c.max_lag else c.weights,
    )
    for count in range(min(devices, implementation.max_learners(config)), 1, -1):
        cluster = replace(fused_cluster, devices_per_node=count)
        fused = replace(config, placement="fused", cluster=cluster)
        try:
            return fused, implementation.resolve_plan(fused, device), reason
        except PlacementError:  # fewer processes may divide the work evenly
            continue
    return local, implementation.resolve_plan(local, device), reason


def _fit_micro_batches(config: Config, plan: placement.Plan) -> tuple[Config, MemoryNeeds, str]:
    """Return the recipe with the largest micro-batches that fit, their memory, and the reason.

    Raises PlacementError if the smallest micro-batches do not fit.
    """
    implementation = mode(config)
    estimator = implementation.memory_estimator(config)
    unit = implementation.micro_batch_unit(config)
    # Sizes below are numbers of units in one forward and backward pass of one learner.
    complete = implementation.minibatch_samples(config) // plan.processes("actor") // unit
    current = min(complete, (estimator.micro_batch_size or complete * unit) // unit)

    def needs(size: int) -> MemoryNeeds:
        return estimator.needs(plan, size * unit)

    try:
        placement.check_memory(plan, needs(current))
        return config, needs(current), ""
    except PlacementError as error:
        reason = str(error).rpartition("; one process of ")[0]
    placement.check_memory(plan, needs(1), least=True)
    # Bisect the number of passes: `too_few` does not fit, `passes` does.
    too_few, passes = -(-complete // current), complete
    while passes - too_few > 1:
        middle = (too_few + passes) // 2
        try:
            placement.check_memory(plan, needs(-(-complete // middle)))
            passes = middle
        except PlacementError:
            too_few = middle
    size = -(-complete // passes)
    algorithm = estimator.with_micro_batch_size(config.algorithm, size * unit)
    # Compiled minibatches have one shape, which micro-batches of different sizes have not.
    compiled = "auto" if config.compile == "always" else config.compile
    reason = f"{reason}; now {passes} passes to an optimiser step, and their gradients are added"
    return replace(config, algorithm=algorithm, compile=compiled), needs(size), reason


# --------------------------------------------------------------------------------------------- file
def settings(config: Config) -> dict[str, Any]:
    """Return the name and every option that is read and differs from its default."""
    unread = {path for path, _ in readers.unread(config, config.mode)}
    default, changed = loader.flat(loader.dump(Config())), dict[str, Any]()
    values = loader.dump(config)
    for path in loader.describe(Config):
        *parents, leaf = path.split(".")
        value: Any = values
        for part in (*parents, leaf):
            value = value[part]
        unused = readers.mode_of(path) not in (None, config.mode) or path in unread
        if path != "name" and (unused or value == default.get(path, {})):
            continue
        node = changed
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return changed


def format_yaml(fitted: FittedRecipe, command: str) -> str:
    """Return the YAML of a complete experiment, which needs no other file.

    Args:
        command: The command line, which becomes the first comment.
    """
    options = settings(fitted.config)
    changes = [f"{x.option}: {x.old} -> {x.new}" for x in fitted.changes] or [
        "nothing had to change"
    ]
    head = "".join(f"# {' '.join(line.split())}\n" for line in (command, *changes))
    content = f"# @package _global_\n{head}{yaml.safe_dump(options, sort_keys=False)}"
    loaded = loader.read(Config, [("fit", yaml.safe_load(content))])
    validation.check(loaded.config, explicit=loaded.deliberate())
    assert settings(loaded.config) == options
    return content
