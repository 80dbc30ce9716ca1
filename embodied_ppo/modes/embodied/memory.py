"""Estimate the memory of a robot policy's run on the CPU, before the run is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.config import placement
from embodied_ppo.config.schema import AlgorithmConfig, Config
from embodied_ppo.core import tree
from embodied_ppo.core.host_memory import free_memory
from embodied_ppo.core.types import ConfigError, Trajectory
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.trunk import VLAPolicy
from embodied_ppo.modes.base import MemoryNeeds
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.components import share_of
from embodied_ppo.placement import memory_estimate, update_time
from embodied_ppo.placement.remote_envs import EnvDescription
from embodied_ppo.rollout import group_filter


class EmbodiedMemoryEstimator:
    """See ``MemoryEstimator``. The memory of simulators is not counted."""

    def __init__(self, config: Config) -> None:
        """Build the policy on the CPU without weights of a checkpoint, and read the spaces.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """
        self.config, self.cpu = config, torch.device("cpu")
        spaces = components.describe_spaces(config)
        self.spaces = EnvDescription(spaces, self.cpu)
        # Memory does not depend on the values of weights. Orthogonal ones take minutes to compute
        # for layers of ten thousand units.
        sizes = replace(config, model=replace(config.model, orthogonal_init=False))
        if config.model.policy == "actor_critic" and config.model.network is None:
            _check_weights(sizes, EnvDescription(spaces, torch.device("meta")))
        self.policy: Any = components.make_policy(sizes, self.spaces, weights=False)
        self._acting_by_rows: dict[tuple[int, float | None], tuple[int, Any, Any]] = {}
        """Environments and memory of the device in GB -> ``memory_estimate.estimate_acting``."""
        self._updating_by_learners: dict[
            tuple[int, int | None, float | None], memory_estimate.Memory
        ] = {}

    def use_config(self, config: Config) -> None:
        """Continue with options that do not change the policy or the spaces."""

        def sizes(c: Config) -> tuple[Any, ...]:
            a = replace(c.algorithm, micro_batch_size=None, rollout_micro_batch_size=None)
            return c.env.num_envs, a

        if sizes(config) != sizes(self.config):
            self._updating_by_learners.clear()
        self.config = config

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> MemoryNeeds:
        """See ``MemoryEstimator.needs``."""
        _set_memory(self.policy, self._device_gb(placed))
        peak, trajectory = self._acting(placed.processes("rollout") * placed.stages)
        copies, _ = self._filter_copies()
        learners = placed.processes("actor")
        update = self._updating(learners, micro, self._device_gb(placed))
        if self.config.cluster.shard if shard is None else shard:
            acts = placed.fused("rollout", "actor")
            update = replace(
                update, **memory_estimate.sharded_bytes(self.policy, learners, acts=acts)
            )
        weights = memory_estimate.nbytes([*self.policy.parameters(), *self.policy.buffers()])
        # The steps are stacked after the last one, when nothing acts: each tensor is then there
        # twice, or as often as the group filter holds it.
        collected = memory_estimate.nbytes(trajectory) * placed.stages
        experience = round(max(2.0, copies) * collected)
        acting = max(0, peak - (experience - collected))
        needs: MemoryNeeds = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(vars(update), 0)
            rolls = "rollout" in group.roles
            if rolls:
                need.update(weights=weights, experience=experience, activations=acting)
            if "actor" in group.roles:
                learns = vars(update)
                if self.config.pipeline:
                    # Both run at the same time. Beside the weights of the learner there are those
                    # that act and those that the next rollout will copy.
                    need["weights"] *= 2
                    needs[group.name] = {name: need[name] + size for name, size in learns.items()}
                    continue
                # Rollout and update follow one another, so the larger one counts.
                if learns["experience"] + learns["activations"] < experience + acting and rolls:
                    learns = learns | {"experience": experience, "activations": acting}
                need = learns | {"weights": max(need["weights"], learns["weights"])}
            needs[group.name] = need
        return needs

    def work(self, placed: placement.Plan) -> update_time.Work:
        """Return what an update of a plan computes. The plan's devices are GPUs."""
        a, policy, learners = self.config.algorithm, self.policy, placed.processes("actor")
        _set_memory(policy, self._device_gb(placed))
        num_envs, decisions = self.config.env.num_envs, a.horizon * self.config.env.num_envs
        learner = actor_critic_learner(
            policy, share_of(a, learners), num_envs=num_envs, updates=1, seed=0
        )
        rows = decisions // learners
        kept = placed.fused("rollout", "actor") and a.group_filter is None
        kept = kept and _keeps(policy, a.horizon, num_envs // learners)
        _, obs, decision = self._act(num_envs // placed.processes("rollout"))
        operations = memory_estimate.count_operations(
            policy, learner, obs, decision, rows, kept=kept
        )
        share = a.global_batch_size // learners
        steps = a.update_epoch * decisions // a.global_batch_size
        trained = [p for p in policy.parameters() if p.requires_grad]
        weights = memory_estimate.nbytes(list(policy.parameters()))
        return update_time.Work(
            decisions=decisions,
            horizon=a.horizon,
            chunk=self.config.env.action_chunk,
            epochs=a.update_epoch,
            steps=steps,
            micro_batches=steps * -(-share // min(share, a.micro_batch_size or share)),
            operations=operations,
            weight_bytes=weights,
            trained=sum(p.numel() for p in trained),
            sharded_bytes=weights if self.config.cluster.shard else 0,
        )

    @property
    def micro_batch_size(self) -> int | None:
        """See ``MemoryEstimator.micro_batch_size``."""
        return self.config.algorithm.micro_batch_size

    def with_micro_batch_size(self, algorithm: AlgorithmConfig, size: int) -> AlgorithmConfig:
        """See ``MemoryEstimator.with_micro_batch_size``."""
        return replace(algorithm, micro_batch_size=size)

    def _acting(self, parts: int) -> tuple[int, Trajectory]:
        """Return the peak bytes and the trajectory of one of ``parts`` equal rollouts."""
        rows = self.config.env.num_envs // parts
        peak, obs, decision = self._act(rows)
        limit = self.config.algorithm.rollout_micro_batch_size
        if limit is not None and limit < rows:
            peak = self._act(limit)[0]
        return peak, memory_estimate.empty_trajectory(obs, decision, self.config.algorithm.horizon)

    def _act(self, rows: int) -> tuple[int, Any, Any]:
        """Return ``memory_estimate.estimate_acting`` of ``rows`` environments."""
        key = rows, getattr(self.policy, "planned_memory_gb", None)
        if key not in self._acting_by_rows:
            spec = self.spaces.obs_spec
            self._acting_by_rows[key] = memory_estimate.estimate_acting(
                self.policy, spec, self.cpu, rows
            )
        return self._acting_by_rows[key]

    def _filter_copies(self) -> tuple[float, float]:
        """Return ``group_filter.peak_copies``; (1, 0) without a filter."""
        a = self.config.algorithm
        if a.group_filter is None or self.config.teacher is not None:
            return 1.0, 0.0
        groups = self.config.env.num_envs // a.group_size
        return group_filter.peak_copies(groups, a.group_filter_rounds)

    @staticmethod
    def _device_gb(placed: placement.Plan) -> float | None:
        """Return the memory of a device of the plan in GB; None: unknown, or a CPU's."""
        memory = placed.hardware.memory
        return None if memory is None or placed.hardware.kind == "cpu" else memory / 1e9

    def _updating(
        self, learners: int, micro: int | None, device_gb: float | None
    ) -> memory_estimate.Memory:
        """Return the memory of an update in one of ``learners`` processes, after ``_set_memory``.

        Args:
            learners: Number of learners.
            micro: Samples of a micro-batch; None: as the options say.
            device_gb: Memory of the device, which limits the features of a frozen trunk.
        """
        key = (learners, micro or self.config.algorithm.micro_batch_size, device_gb)
        if key not in self._updating_by_learners:
            a, num_envs = self.config.algorithm, self.config.env.num_envs
            share = share_of(replace(a, micro_batch_size=micro or a.micro_batch_size), learners)
            _, trajectory = self._acting(1)
            columns = num_envs // learners
            local = tree.map(lambda x: x.new_empty(x.shape[0], columns, *x.shape[2:]), trajectory)
            learner = actor_critic_learner(self.policy, share, num_envs=num_envs, updates=1, seed=0)
            surplus = self._filter_copies()[1]
            memory = memory_estimate.estimate_update(
                self.policy, learner, self.cpu, local, surplus=surplus
            )
            self._updating_by_learners[key] = memory
        return self._updating_by_learners[key]


def _check_weights(config: Config, spaces: EnvDescription) -> None:
    """Raise ConfigError if this machine has less memory than the weights need.

    Args:
        config: The options.
        spaces: Spaces on the device meta, on which a policy has no memory.
    """
    with torch.device("meta"):
        policy = components.make_policy(config, spaces, weights=False)
    size, free = memory_estimate.nbytes(list(policy.parameters())), free_memory()
    if free is not None and size > free:
        raise ConfigError(
            f"model: the weights alone need {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB"
            " are free on this machine; lower model.hidden"
        )


def _set_memory(policy: Any, device_gb: float | None) -> None:
    """Set the memory of the device that a policy of a published model is planned for, in GB."""
    if isinstance(policy, VLAPolicy):
        policy.planned_memory_gb = device_gb


def _keeps(policy: Any, steps: int, num_envs: int) -> bool:
    """Return whether a learner uses the features that acting has computed."""
    return isinstance(policy, PI0) and bool(policy.kept_inputs(steps, num_envs))
