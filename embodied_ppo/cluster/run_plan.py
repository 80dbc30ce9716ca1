"""Where the roles of a run are placed, and whether its memory fits."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError
from embodied_envs.factory import is_users_simulator
from embodied_ppo.cluster.language_memory import LanguageMemoryEstimator
from embodied_ppo.cluster.memory_estimate import MemoryEstimator, MemoryNeeds
from embodied_ppo.cluster.offload import Residency
from embodied_ppo.cluster.robot_memory import RobotMemoryEstimator
from embodied_ppo.core.devices import device_memory_gb, select_device
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import placement, placement_memory, validation
from embodied_ppo.options.batch_sizes import batches
from embodied_ppo.options.placement import Hardware, Plan
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.language_models import critic_config
from embodied_ppo.ppo.language_actor import full_kl
from embodied_ppo.rollout.environments import builds_once

# Why offloaded roles are not compiled: a CUDA graph contains the addresses of its tensors.
OFFLOADING_OBSTACLE = "processes that time-share a GPU offload their tensors"


# --------------------------------------------------------------------------------------------- plan
def plan_run(config: Config, device: torch.device) -> Plan | None:
    """Return where the roles run; None: all in this process.

    Raises:
        ConfigError: compile=always or pipeline is impossible in this placement.
        PlacementError: The placement is not valid for these options.
    """
    c = config.cluster
    # Without Ray: one process has all roles, and there is no plan.
    if config.placement == "local" and not c.component_placement:
        # It runs two computations at the same time on the cores of a CPU.
        if device.type != "cpu" and config.pipeline:
            fact = f"pipeline = true and device = {device}: only threads of a CPU work like this"
            raise ConfigError(f"{fact}; write device=cpu, or leave the option out")
        return None
    # Roles that this run does not have, such as an unused critic, get no process.
    plan = placement.plan(
        c.component_placement or config.placement,
        hardware_of(config, device),
        roles=validation.roles(config),
        stages=c.stages,
        max_lag=c.max_lag,
    )
    # The plan itself is valid. Batches, sharding and compilation must be possible in it, too.
    check_batches(config, plan)
    if c.shard and (reason := shard_obstacle(config, plan)):
        raise PlacementError(f"cluster.shard = true: {reason}; or write cluster.shard=false")
    check_compile(config, plan)
    return plan


def plan_on_one_device(config: Config, device: torch.device) -> Plan:
    """Return the plan of all roles of this run together on one device."""
    one = replace(hardware_of(config, device), per_node=(1,))
    return placement.plan("fused", one, roles=validation.roles(config))


def resolve_plan(config: Config, device: torch.device) -> Plan:
    """Return the plan of the roles. A run in one process has all of them on one device.

    Raises ConfigError, PlacementError.
    """
    return plan_run(config, device) or plan_on_one_device(config, device)


def hardware_of(config: Config, device: torch.device) -> Hardware:
    """Return the devices that a placement can use, as set in section cluster.

    Defaults are those of this machine.

    Raises:
        PlacementError: There are too many, or cluster.node_groups names nodes that do not exist.
    """
    c, is_gpu = config.cluster, device.type == "cuda"
    # In a placement on CPUs each core counts as a device.
    local_count = torch.cuda.device_count() if is_gpu else os.cpu_count() or 1
    memory = None
    if c.device_memory_gb:  # devices of another machine, as for planning a cluster
        memory = int(c.device_memory_gb * 1e9)
    elif local_count:
        memory = int(device_memory_gb(device) * 1e9)
    # A plan lists every device, so that a typing error could create millions of them.
    count = (per_node := c.devices_per_node or local_count) * c.num_nodes
    if count > placement.MAX_DEVICES:
        raise PlacementError(
            f"cluster.num_nodes x cluster.devices_per_node = {count} devices, more than "
            f"{placement.MAX_DEVICES}; write the numbers of your cluster"
        )
    # Label -> numbers of the nodes, which component_placement can name by this label.
    nodes = range(c.num_nodes)
    labels = {
        name: placement.ranges(value, nodes, f"cluster.node_groups = {{{name}: {value}}}", "node")
        for name, value in c.node_groups.items()
    }
    return Hardware((per_node,) * c.num_nodes, device.type, labels, memory)


def check_batches(config: Config, plan: Plan) -> None:
    """Raise PlacementError where batches or roles do not divide as planned."""
    a = config.algorithm
    if config.mode == "embodied":
        # Environments and samples must divide evenly over the processes.
        placement.check_numbers(
            plan,
            num_envs=config.env.num_envs,
            group_size=a.group_size,
            global_batch_size=a.global_batch_size,
            tasks=config.env.period,
        )
        return
    # Actor and critic may have minibatches of different sizes, both in prompts.
    prompts = {"algorithm.global_batch_size": a.global_batch_size}
    if plan.has("critic"):
        prompts["critic.global_batch_size"] = critic_config(a, config.critic).global_batch_size
    placement.check_sequences(
        plan, prompts=a.rollout_batch_size, group_size=a.group_size, batches=prompts
    )
    # The sum over the vocabulary needs all logits [N, T, V]; k1 and k3 need one number per token.
    if full_kl(a) and plan.has("reference") and not plan.fused("actor", "reference"):
        raise PlacementError(
            "cluster.component_placement: the full KL divergence needs the reference's logits,"
            " which are not sent between processes; join them, as 'actor,reference', or write"
            " algorithm.kl_loss_type=k3 and algorithm.kl_penalty=k1"
        )
    # vLLM reserves a share of the memory of its device, so two processes do not fit on one.
    if config.rollout.engine == "vllm" and plan.group("rollout").processes > plan.hardware.total:
        raise PlacementError("rollout.engine = vllm: one process on a device; leave out processes")


def check_compile(config: Config, plan: Plan) -> None:
    """Raise ConfigError where compile=always is impossible in a plan."""
    # compile=auto leaves out what is impossible, so only compile=always can be refused.
    if config.compile != "always":
        return
    residency, learners = Residency(plan), plan.processes("actor")
    reason = f"{learners} processes learn together" if learners > 1 else ""
    groups = [plan.group(role) for role in ("rollout", "actor", "critic") if plan.has(role)]
    if any(map(residency.offloads, groups)):
        reason = OFFLOADING_OBSTACLE
    if reason:
        raise ConfigError(f"compile=always: {reason}; use compile=auto")


def shard_obstacle(config: Config, plan: Plan) -> str:
    """Return why the model cannot be sharded, and a fix; "" where it can."""
    language, version = config.mode == "reasoning", [*map(int, torch.__version__.split(".")[:2])]
    # All models are sharded over the same ranks, so they must be in the same processes.
    models = [role for role in ("critic", "reference") if plan.has(role)]
    separate = [role for role in models if not plan.fused("actor", role)]
    own_weights = config.rollout.engine == "vllm" and plan.fused("rollout", "actor")
    obstacles = {
        f"needs torch 2.13, this is {torch.__version__}": version < [2, 13],
        "sharding needs at least two actor processes, this plan has one; give actor more devices"
        " (cluster.devices_per_node, cluster.component_placement)": plan.processes("actor") == 1,
        f"{' and '.join(separate)} in processes of its own; join it to actor": separate,
        "the full KL divergence reads policy and reference at once; use k3"
        " (algorithm.kl_loss_type, kl_penalty)": language and full_kl(config.algorithm),
        "vLLM has weights of its own; give rollout its own processes"
        " (placement=disaggregated)": language and own_weights,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


# ------------------------------------------------------------------------------------------- memory
def can_estimate(config: Config, *, in_process: bool = False) -> bool:
    """Return whether memory can be estimated in this process before the run is built.

    Args:
        config: Options of the run.
        in_process: Whether the run will be built in this process, too.
    """
    # An estimate would load the weights of a checkpoint.
    if config.mode == "reasoning":
        return config.actor.model.path is None
    # Other simulators than those of this package, EnvPool and Gymnasium may start only once in a
    # process.
    once = config.env.simulator not in ("auto", "mujoco", "warp", "envpool", "gymnasium")
    once = once or builds_once(config)
    once = once or (in_process and is_users_simulator(config.env.title))
    # The estimate must not use the only start that such a simulator has in this process.
    return config.model.checkpoint is None and not (in_process and once)


def memory_estimator(config: Config) -> MemoryEstimator:
    """Build the models of the run on the CPU to estimate memory.

    Raises ConfigError, EnvError.
    """
    if config.mode == "reasoning":
        return LanguageMemoryEstimator(config)
    return RobotMemoryEstimator(config)


def check_memory(config: Config, plan: Plan) -> None:
    """Raise PlacementError if a run does not fit, from an upper bound where that is enough."""
    estimator = memory_estimator(config)
    if isinstance(estimator, RobotMemoryEstimator) and estimator.is_small:
        estimator.bound = True
        with suppress(PlacementError):
            return placement_memory.check_memory(plan, estimator.estimate_memory(plan))
        estimator.bound = False
    placement_memory.check_memory(plan, estimator.estimate_memory(plan))


def minibatch_samples(config: Config) -> int:
    """Return the samples (responses) of the largest minibatch of all learners together."""
    b = batches(config)
    # Minibatches of language models count prompts, each with ``group_size`` responses.
    size = max(parts.size for parts in (b.actor, b.critic) if parts is not None)
    return size * config.algorithm.group_size if config.mode == "reasoning" else size


# ------------------------------------------------------------------------------------------- report
def describe_plan(config: Config) -> dict[str, Any]:
    """Return where the roles of a run would run, and their memory; nothing is started.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: The placement is not valid, or does not fit in memory.
    """
    plan = resolve_plan(config, select_device(config.device, config.threads))
    needs = memory_estimator(config).estimate_memory(plan)
    placement_memory.check_memory(plan, needs)
    return plan_summary(config, plan, needs)


def plan_summary(config: Config, plan: Plan, needs: MemoryNeeds) -> dict[str, Any]:
    """Return the tables and numbers that ``embodied-ppo plan`` prints."""
    # Groups with common devices take turns.
    others = {group.name: [x.name for x in plan.sharing(group)] for group in plan.groups}
    time_sharing = [f"{name} with {' and '.join(names)}" for name, names in others.items() if names]
    ranks = range(plan.processes("rollout"))
    return {
        "devices": plan.rows(),
        "memory": placement_memory.memory_rows(plan, needs),
        "weights": {f"rollout rank {i}": plan.weights_path(i) for i in ranks},
        "facts": {"time sharing": time_sharing, **_update_sizes(config, plan)},
    }


def _update_sizes(config: Config, plan: Plan) -> dict[str, int]:
    """Return the sizes of an update in this plan."""
    a, b = config.algorithm, batches(config)
    learners, rollouts = plan.processes("actor"), plan.processes("rollout")
    sources, source, unit, size = config.env.num_envs, "environments", "samples", b.actor.size
    if config.mode == "reasoning":
        sources, source, unit = a.rollout_batch_size, "prompts", "responses"
        size *= a.group_size
    # The divisions have no remainder, because the batches of this plan were checked.
    return {
        f"{source} per rollout process": sources // rollouts,
        f"{unit} per update": b.samples,
        "optimiser steps per update": b.actor.steps,
        f"{unit} per optimiser step and actor process": size // learners,
    }
