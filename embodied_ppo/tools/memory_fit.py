"""Adapt a recipe to other devices, which may be absent.

The optimiser steps stay equal: the gradients of the micro-batches of a minibatch are added. Where
the smallest micro-batch does not fit, activations are computed again, or the model is sharded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

import torch
import yaml

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.memory_estimate import MemoryNeeds
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import batch_sizes, loader, placement, placement_memory, readers
from embodied_ppo.options.rules.base import one_process
from embodied_ppo.options.schema import ClusterConfig, Config


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
        plan: Where the roles run.
        changes: Options that differ from the original recipe.
        needs: Memory of one process of each group.
        notes: Further lines for the user.
    """

    config: Config
    plan: placement.Plan
    changes: list[Change]
    needs: MemoryNeeds
    notes: list[str]


def fit(config: Config, devices: int) -> FittedRecipe:
    """Return the recipe ``config`` for ``devices`` devices of one machine.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: Even the smallest micro-batch does not fit. The message lists the memory.
    """
    if config.resume is not None:
        hint = "remove it here, give it to train"
        raise ConfigError(f"resume = {config.resume}: fit writes a recipe; {hint}")
    # A recipe for a GPU may be written on a machine without one.
    if config.device.startswith("cuda"):
        device = torch.device("cuda")
    else:
        device = select_device(config.device, config.threads)
    placed, plan, placement_reason = _fit_placement(config, devices, device)
    if plan.hardware.memory is None:
        hint = "write cluster.device_memory_gb=24"
        raise ConfigError(f"device = {config.device}: there is none here to measure; {hint}")
    fitted, needs, batch_reason = _fit_memory(placed, plan)
    # The memory of a device is an input of fit, which train does not need.
    original, fitted = (
        replace(c, cluster=replace(c.cluster, device_memory_gb=0.0)) for c in (config, fitted)
    )
    before, after = (loader.flat(loader.dump(c)) for c in (original, fitted))
    changes = []
    for path in dict.fromkeys((*before, *after)):
        if (old := before.get(path)) != (new := after.get(path)):
            placed = path.startswith(("placement", "cluster"))
            changes.append(Change(path, old, new, placement_reason if placed else batch_reason))
    learners, used = plan.processes("actor"), plan.hardware.total
    notes = [f"uses {used} of {devices} devices"] if used < devices else []
    moved = (original.placement, original.cluster) != (fitted.placement, fitted.cluster)
    if moved and batch_sizes.batches(config).actor.minibatches > 1:
        notes.append(
            f"{learners} learning now: other samples share a minibatch, because each process draws"
            " from its own environments or prompts; minibatch size, epochs and learning rate stay"
        )
    return FittedRecipe(fitted, plan, changes, needs, notes)


def _fit_placement(
    config: Config, devices: int, device: torch.device
) -> tuple[Config, placement.Plan, str]:
    """Return the recipe with a placement for ``devices`` devices, its plan, and the reason.

    Raises ConfigError.
    """
    reason = ""
    for candidate in _placements(config, devices):
        try:
            plan = run_plan.resolve_plan(candidate, device)
        except PlacementError as error:
            reason = reason or f": {error}"
        else:
            return candidate, plan, f"--devices {devices}{reason}"
    raise AssertionError("a run in one process has a plan")


def _placements(config: Config, devices: int) -> Iterator[Config]:
    """Yield the recipe in the placements that are tried, the preferred one first.

    The placement is that of the recipe if possible, else fused on the largest number of devices
    that divides the work, else local.
    """
    c = config.cluster
    if one_process(config):
        yield config
        return
    yield replace(config, cluster=replace(c, num_nodes=1, devices_per_node=devices))
    fused = replace(c, num_nodes=1, node_groups={}, component_placement={}, max_lag=0)
    # Each learner needs an environment or a prompt.
    a = config.algorithm
    learners = a.rollout_batch_size if config.mode == "reasoning" else config.env.num_envs
    for count in range(min(devices, learners), 1, -1):
        yield replace(config, placement="fused", cluster=replace(fused, devices_per_node=count))
    local = ClusterConfig(device_memory_gb=c.device_memory_gb)
    yield replace(config, placement="local", cluster=local)


def _fit_memory(config: Config, plan: placement.Plan) -> tuple[Config, MemoryNeeds, str]:
    """Return the first variant of the recipe that fits, its memory, and the reason.

    Raises PlacementError, that of the recipe itself, if no variant fits.
    """
    first = None
    for variant in _variants(config, plan):
        try:
            return _fit_micro_batches(variant, plan)
        except PlacementError as error:
            first = first or error
    assert first is not None
    raise first


def _variants(config: Config, plan: placement.Plan) -> Iterator[Config]:
    """Yield the recipe with options that save memory, in ascending order of their cost in time."""
    yield config
    m, c = config.model, config.cluster
    recomputed = replace(config, model=replace(m, gradient_checkpointing=True))
    if m.checkpoint is not None and not m.gradient_checkpointing:
        yield recomputed
    sharded = replace(recomputed, cluster=replace(c, shard=True))
    if m.checkpoint is not None and not c.shard and not run_plan.shard_obstacle(sharded, plan):
        yield sharded


def _fit_micro_batches(config: Config, plan: placement.Plan) -> tuple[Config, MemoryNeeds, str]:
    """Return the recipe with the largest micro-batches that fit, their memory, and the reason.

    Raises PlacementError if the smallest micro-batches do not fit.
    """
    estimator = run_plan.memory_estimator(config)
    a, samples = config.algorithm, run_plan.minibatch_samples(config)
    # With minibatch_unit=column, a micro-batch consists of complete columns of T samples.
    unit = a.horizon if config.mode != "reasoning" and a.minibatch_unit == "column" else 1
    # Sizes below are numbers of units in one forward and backward pass of one learner.
    complete = samples // plan.processes("actor") // unit
    current = min(complete, (estimator.micro_batch_size or complete * unit) // unit)

    def check(size: int) -> MemoryNeeds:
        needs = estimator.estimate_memory(plan, size * unit)
        placement_memory.check_memory(plan, needs)
        return needs

    def fits(passes: int) -> bool:
        try:
            return bool(check(-(-complete // passes)))
        except PlacementError:
            return False

    try:
        return config, check(current), ""
    except PlacementError as error:
        reason = str(error).rpartition("; each ")[0]
    check(1)
    # The smallest number of passes that fits.
    passes = bisect_left(range(complete), True, lo=-(-complete // current) + 1, key=fits)
    size = -(-complete // passes)
    algorithm = estimator.with_micro_batch_size(size * unit)
    # Compiled minibatches have one shape, which micro-batches of different sizes have not.
    compiled = "auto" if config.compile == "always" else config.compile
    reason = f"{reason}; now {passes} passes to an optimiser step, and their gradients are added"
    return replace(config, algorithm=algorithm, compile=compiled), check(size), reason


# --------------------------------------------------------------------------------------------- file
def settings(config: Config) -> dict[str, Any]:
    """Return the name and every option that is read and differs from its default."""
    unread = {path for path, _ in readers.unread(config, config.mode)}
    values, defaults, changed = loader.dump(config), loader.dump(Config()), dict[str, Any]()
    for path in loader.describe(Config):
        *parents, leaf = path.split(".")
        value, default = (reduce(getitem, [*parents, leaf], x) for x in (values, defaults))
        unused = readers.mode_of(path) not in (None, config.mode) or path in unread
        if path == "name" or not (unused or value == default):
            reduce(lambda node, part: node.setdefault(part, {}), parents, changed)[leaf] = value
    return changed


def format_yaml(fitted: FittedRecipe, command: str) -> str:
    """Return the YAML of a complete experiment, which needs no other file.

    Args:
        fitted: The recipe.
        command: The command line, which becomes the first comment.
    """
    changes = [f"{x.option}: {x.old} -> {x.new}" for x in fitted.changes] or [
        "nothing had to change"
    ]
    head = "".join(f"# {' '.join(line.split())}\n" for line in (command, *changes))
    return f"# @package _global_\n{head}{yaml.safe_dump(settings(fitted.config), sort_keys=False)}"
