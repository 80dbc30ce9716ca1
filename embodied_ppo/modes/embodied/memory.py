"""Estimate the memory of a robot policy's run on the CPU, before the run is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.config import placement
from embodied_ppo.config.schema import AlgorithmConfig, Config
from embodied_ppo.core import tree
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import Trajectory
from embodied_ppo.modes.base import MemoryNeeds
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.components import share_of
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.remote_envs import EnvDescription, describe_env


class EmbodiedMemoryEstimator:
    """See ``MemoryEstimator``. The memory of simulators is not counted."""

    def __init__(self, config: Config) -> None:
        """Build the policy on the CPU, and one simulator for its spaces.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """
        self.config, self.cpu = config, torch.device("cpu")
        env = components.make_env(
            env_seeds(0, 0, 1),
            config=components.training_env(config),
            device=self.cpu,
            model=config.model,
        )
        try:
            self.spaces = EnvDescription(describe_env(env), self.cpu)
        finally:
            env.close()
        self.policy = components.make_policy(config, self.spaces)
        self._acting_by_parts: dict[int, tuple[int, Any, Any]] = {}
        self._updating_by_learners: dict[tuple[int, int | None], memory_estimate.Memory] = {}

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> MemoryNeeds:
        """See ``MemoryEstimator.needs``."""
        peak, trajectory = self._acting(placed.processes("rollout") * placed.stages)
        learners = placed.processes("actor")
        update = self._updating(learners, micro)
        if self.config.cluster.shard if shard is None else shard:
            acts = placed.fused("rollout", "actor")
            update = replace(update, **memory_estimate.sharded(self.policy, learners, acts=acts))
        weights = memory_estimate.nbytes([*self.policy.parameters(), *self.policy.buffers()])
        experience = memory_estimate.nbytes(trajectory) * placed.stages
        needs: MemoryNeeds = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(vars(update), 0)
            if "rollout" in group.roles:
                need.update(weights=weights, experience=experience, activations=peak)
            # Rollout and update follow one another, so the larger one counts.
            if "actor" in group.roles:
                need = {purpose: max(need[purpose], size) for purpose, size in vars(update).items()}
            needs[group.name] = need
        return needs

    @property
    def micro_batch_size(self) -> int | None:
        """See ``MemoryEstimator.micro_batch_size``."""
        return self.config.algorithm.micro_batch_size

    def with_micro_batch_size(self, algorithm: AlgorithmConfig, size: int) -> AlgorithmConfig:
        """See ``MemoryEstimator.with_micro_batch_size``."""
        return replace(algorithm, micro_batch_size=size)

    def _acting(self, parts: int) -> tuple[int, Trajectory]:
        """Return the peak bytes and the trajectory of one of ``parts`` equal rollouts."""
        if parts not in self._acting_by_parts:
            rows = self.config.env.num_envs // parts
            spec = self.spaces.obs_spec
            peak, obs, decision = memory_estimate.acting(self.policy, spec, self.cpu, rows)
            limit = self.config.algorithm.rollout_micro_batch_size
            if limit is not None and limit < rows:
                peak = memory_estimate.acting(self.policy, spec, self.cpu, limit)[0]
            self._acting_by_parts[parts] = peak, obs, decision
        peak, obs, decision = self._acting_by_parts[parts]
        return peak, memory_estimate.experience(obs, decision, self.config.algorithm.horizon)

    def _updating(self, learners: int, micro: int | None) -> memory_estimate.Memory:
        """Return the memory of an update in one of ``learners`` processes."""
        key = (learners, micro)
        if key not in self._updating_by_learners:
            a, num_envs = self.config.algorithm, self.config.env.num_envs
            share = share_of(replace(a, micro_batch_size=micro or a.micro_batch_size), learners)
            _, trajectory = self._acting(1)
            columns = num_envs // learners
            local = tree.map(lambda x: x.new_empty(x.shape[0], columns, *x.shape[2:]), trajectory)
            learner = actor_critic_learner(self.policy, share, num_envs=num_envs, updates=1, seed=0)
            memory = memory_estimate.predicted(self.policy, learner, self.cpu, local)
            self._updating_by_learners[key] = memory
        return self._updating_by_learners[key]
