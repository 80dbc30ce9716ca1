"""Plan a recipe for another machine: placement, micro-batches, memory and time.

Options that affect learning (batch size, epochs, learning rates, environments) keep the values of
the recipe. Options that change only speed and memory are varied until the run fits: devices,
micro-batches, gradient checkpointing, the number of environments that act at a time, shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodied_ppo.config import loader, placement
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.core.types import ConfigError, PlacementError
from embodied_ppo.modes.base import MemoryNeeds
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator
from embodied_ppo.modes.registry import mode
from embodied_ppo.placement import update_time

EFFICIENT_ROWS = 8
"""Smallest micro-batch, in samples, that is used before other ways to save memory are tried."""
ACTING_ROWS = 8
"""Environments that act at a time if acting in one forward pass needs too much memory."""


@dataclass(frozen=True)
class MachinePlan:
    """A recipe with the options for a machine.

    Attributes:
        config: The recipe with the options of the machine.
        plan: Where the roles run.
        needs: Memory of one process of each group.
        changes: Option -> its value, for options that differ from the recipe.
        device: Data sheet of the GPU; None: no device of ``update_time.DEVICES`` has this memory.
        seconds: Predicted time of an update; None: not predicted.
        operations: Operations of an update on all devices together; None: not counted.
    """

    config: Config
    plan: placement.Plan
    needs: MemoryNeeds
    changes: Mapping[str, Any]
    device: update_time.Device | None
    seconds: update_time.Seconds | None
    operations: float | None

    @property
    def micro_batch(self) -> int:
        """Samples of one forward and backward pass of one learner."""
        a = self.config.algorithm
        share = a.global_batch_size // self.plan.processes("actor")
        return min(a.micro_batch_size or share, share)


def plan_for(
    config: Config,
    devices: int,
    device_gb: float,
    estimators: dict[bool, EmbodiedMemoryEstimator] | None = None,
) -> MachinePlan:
    """Plan a recipe of a robot policy for ``devices`` GPUs of one machine.

    Args:
        config: The recipe. Its placement is kept, except that ``local`` becomes ``fused`` (each
            device has all roles) if there are several devices.
        devices: Number of GPUs.
        device_gb: Memory of each GPU, GB.
        estimators: Value of model.gradient_checkpointing -> estimator of earlier plans of this
            recipe; new ones are added. None: no earlier plans.

    Raises:
        ConfigError, EnvError: An option is invalid.
        PlacementError: Numbers cannot be divided evenly over the devices, or the recipe does not
            fit; then the message names the smallest change that fits.
    """
    if config.mode != "embodied":
        raise ConfigError(
            f"--devices {devices}: plans robot policies, and mode={config.mode}; write"
            f" cluster.devices_per_node={devices}, or use embodied-ppo fit"
        )
    estimators = {} if estimators is None else estimators
    _plan(_placed(config, devices), _hardware(devices, device_gb))  # whatever the memory
    try:
        fitted = _fit(config, devices, device_gb, estimators)
    except PlacementError as error:
        reason = str(error).rpartition("; ")[0]
        change = _smallest_change(config, devices, device_gb, estimators)
        raise PlacementError(f"{reason}; {change}") from error
    device = update_time.device_with(device_gb)
    chosen, plan, needs, estimator = fitted
    seconds = operations = None
    if config.model.checkpoint is not None:
        work = estimator.work(plan)
        o = work.operations
        operations = work.decisions * (o.act + o.encode + work.epochs * o.learn)
        if device is not None:
            seconds = update_time.predict(plan, work, device, chosen.env.id.partition("/")[0])
    before, after = loader.flat(loader.dump(config)), loader.flat(loader.dump(chosen))
    changes = {
        path: after.get(path)
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path) and path != "cluster.device_memory_gb"
    }
    return MachinePlan(chosen, plan, needs, changes, device, seconds, operations)


Fitted = tuple[Config, placement.Plan, MemoryNeeds, EmbodiedMemoryEstimator]


def _variants(config: Config, devices: int) -> Iterator[Config]:
    """Yield the recipe with options that save memory, in ascending order of their cost in time."""
    m, a, c = config.model, config.algorithm, config.cluster
    vla = m.checkpoint is not None
    acting = [a.rollout_micro_batch_size]
    if a.rollout_micro_batch_size is None and config.env.num_envs // devices > ACTING_ROWS:
        acting.append(ACTING_ROWS)
    shards = [c.shard] if c.shard or devices == 1 else [False, True]
    for shard in shards:
        for recompute in (m.gradient_checkpointing, True) if vla else (m.gradient_checkpointing,):
            for rows in acting:
                yield replace(
                    config,
                    model=replace(m, gradient_checkpointing=recompute),
                    algorithm=replace(a, rollout_micro_batch_size=rows),
                    cluster=replace(c, shard=shard),
                )


def _fit(
    config: Config,
    devices: int,
    device_gb: float,
    estimators: dict[bool, EmbodiedMemoryEstimator],
) -> Fitted:
    """Return the first variant of the recipe that fits, with its plan and memory.

    Raises:
        PlacementError: No variant fits; the error is that of the first variant.
    """
    hardware = _hardware(devices, device_gb)
    placed = _placed(config, devices)
    first: PlacementError | None = None
    fallback: Fitted | None = None
    tried: list[Config] = []
    for variant in _variants(placed, devices):
        if variant in tried:
            continue
        tried.append(variant)
        implementation = mode(variant)
        plan = _plan(variant, hardware)
        if variant.cluster.shard and implementation.shard_obstacle(variant, plan):
            continue
        recompute = variant.model.gradient_checkpointing
        if recompute not in estimators:
            estimators[recompute] = EmbodiedMemoryEstimator(variant)
        estimator = estimators[recompute]
        estimator.use_config(variant)
        try:
            chosen, needs = _fit_micro_batches(variant, plan, estimator)
        except PlacementError as error:
            first = first or error
            continue
        estimator.use_config(chosen)
        fitted = chosen, plan, needs, estimator
        size = chosen.algorithm.micro_batch_size
        if size is None or size >= min(EFFICIENT_ROWS, placed.algorithm.micro_batch_size or size):
            return fitted
        fallback = fallback or fitted
    if fallback is None:
        assert first is not None
        raise first
    fallback[3].use_config(fallback[0])
    return fallback


def _fit_micro_batches(
    config: Config, plan: placement.Plan, estimator: EmbodiedMemoryEstimator
) -> tuple[Config, MemoryNeeds]:
    """Halve the micro-batches of the recipe until they fit; return it and the memory it needs.

    Raises:
        PlacementError: The smallest micro-batch, one unit, does not fit.
    """
    unit = mode(config).micro_batch_unit(config)
    share = config.algorithm.global_batch_size // plan.processes("actor")
    size = min(config.algorithm.micro_batch_size or share, share) // unit
    chosen = config
    while True:
        needs = estimator.needs(plan, size * unit)
        try:
            placement.check_memory(plan, needs, least=size == 1)
            return chosen, needs
        except PlacementError:
            fixed = {g: {**need, "activations": 0} for g, need in needs.items()}
            placement.check_memory(plan, fixed)
            if size == 1:
                raise
        size //= 2
        algorithm = replace(config.algorithm, micro_batch_size=size * unit)
        chosen = replace(config, algorithm=algorithm)


def _placed(config: Config, devices: int) -> Config:
    """Return the recipe with the placement and the cluster options of the machine."""
    if devices == 1:
        return replace(config, placement="local", cluster=ClusterConfig())
    cluster = replace(config.cluster, num_nodes=1, devices_per_node=devices, node_groups={})
    if config.placement == "local" and not cluster.component_placement:
        return replace(config, placement="fused", cluster=cluster)
    return replace(config, cluster=cluster)


def _hardware(devices: int, device_gb: float) -> placement.Hardware:
    """Return the description of a machine with ``devices`` GPUs of ``device_gb`` GB each."""
    return placement.Hardware((devices,), "cuda", {}, round(device_gb * 1e9))


def _plan(config: Config, hardware: placement.Hardware) -> placement.Plan:
    """Return the checked plan for the described hardware."""
    implementation, c = mode(config), config.cluster
    if config.placement == "local" and not c.component_placement:
        return placement.plan({",".join(implementation.roles(config)): 0}, hardware)
    plan = placement.plan(
        c.component_placement or config.placement,
        hardware,
        stages=c.stages,
        max_lag=c.max_lag,
        weights=c.weights,
    )
    implementation.check_plan(config, plan)
    return plan


# --------------------------------------------------------------------------------- smaller recipes
MEMORY_GB = (24, 40, 48, 80, 141)
"""Memory of the devices that an error message proposes, GB."""


def _smallest_change(
    config: Config,
    devices: int,
    device_gb: float,
    estimators: dict[bool, EmbodiedMemoryEstimator],
) -> str:
    """Return the smallest change that makes the recipe fit, as the end of an error message."""
    for num_envs in _fewer_environments(config, devices):
        smaller = replace(config, env=replace(config.env, num_envs=num_envs))
        if _fits(smaller, devices, device_gb, estimators):
            return (
                f"the smallest change that fits: env.num_envs={num_envs}, which makes an update of"
                f" {config.algorithm.horizon * num_envs} decisions"
            )
    for memory in MEMORY_GB:
        if memory > device_gb and _fits(config, devices, memory, estimators):
            return f"the smallest change that fits: --device-gb {memory}"
    return "no device of up to 141 GB is enough; use a smaller model or model.lora_rank"


def _fits(
    config: Config,
    devices: int,
    device_gb: float,
    estimators: dict[bool, EmbodiedMemoryEstimator],
) -> bool:
    """Return whether a variant of the recipe fits, see ``_variants``."""
    try:
        _fit(config, devices, device_gb, estimators)
    except PlacementError:
        return False
    return True


def _fewer_environments(config: Config, devices: int) -> Sequence[int]:
    """Return smaller numbers of environments that the batch sizes permit, largest first."""
    a, counts = config.algorithm, list[int]()
    num_envs = config.env.num_envs // 2
    while num_envs >= max(1, devices):
        divides = not a.horizon * num_envs % a.global_batch_size
        if divides and not num_envs % (devices * a.group_size):
            counts.append(num_envs)
        num_envs //= 2
    return counts
