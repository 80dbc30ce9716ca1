"""Estimate the memory of a robot policy's run on the CPU, before the run is built."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from embodied_envs.adapters import libero_env
from embodied_envs.base.errors import ConfigError
from embodied_envs.base.host_memory import free_memory
from embodied_envs.base.random import env_seeds
from embodied_envs.types import EnvInfo
from embodied_ppo.cluster import memory_estimate
from embodied_ppo.cluster.memory_estimate import MemoryEstimator, MemoryNeeds, nbytes
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import placement
from embodied_ppo.options.batch_sizes import episodes
from embodied_ppo.options.reward_groups import reward_groups
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.initialization import skip_orthogonal_matrices
from embodied_ppo.policies.vla.vla_policy import VLAPolicy
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.rollout import group_filter
from embodied_ppo.rollout.environments import make_env, training_env


class RobotMemoryEstimator(MemoryEstimator):
    """See ``MemoryEstimator``. The memory of simulators is not counted.

    Attributes:
        bound: Whether results are upper bounds; only if ``is_small``. They need no fake tensors,
            for which torch imports its compiler, a third of the start of a run.
    """

    def __init__(self, config: Config) -> None:
        """Build the policy on the CPU without weights of a checkpoint, and read the spaces.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """
        self.config = config
        self.spaces = describe_spaces(config)
        # Memory does not depend on the values of weights.
        with skip_orthogonal_matrices():
            # A network larger than the free memory would end this process without a message.
            self.bound = False
            self.is_small = config.model.policy == "actor_critic" and config.model.network is None
            if self.is_small:
                _check_weights(config, replace(self.spaces, device=torch.device("meta")))
            self.policy: Any = robot_policy.make_policy(config, self.spaces, weights=False)
        # Environments, memory of the device in GB, ``bound`` -> result of ``estimate_acting``.
        self._acting_by_rows: dict[Any, tuple[int, Any, Any]] = {}

    def estimate_memory(
        self, placed: placement.Plan, micro_batch_size: int | None = None
    ) -> MemoryNeeds:
        """See ``MemoryEstimator.estimate_memory``."""
        hardware, a = placed.hardware, self.config.algorithm
        if isinstance(self.policy, VLAPolicy):
            # A frozen vision-language model keeps features instead of images if they fit on the
            # device.
            memory = None if hardware.kind == "cpu" else hardware.memory
            self.policy.planned_memory_gb = memory and memory / 1e9
        copies, surplus = 1.0, 0.0
        # Distillation does not filter groups.
        refills = a.group_filter is not None and a.group_filter_rounds > 1
        if refills and self.config.teacher is None:
            groups = episodes(self.config) // a.group_size
            copies, surplus = group_filter.peak_copies(groups, a.group_filter_rounds)
        learns = self._updating(placed, micro_batch_size or a.micro_batch_size, surplus)
        # Pipeline stages divide the environments of a rollout process further.
        peak, trajectory = self._acting(placed.processes("rollout") * placed.stages)
        # The steps are stacked after the last one, when nothing acts: each tensor is then there
        # twice, or as often as the group filter holds it.
        collected = nbytes(trajectory) * placed.stages
        experience = round(max(2.0, copies) * collected)
        acts = dict.fromkeys(learns, 0) | {
            "weights": memory_estimate.model_bytes(self.policy)["weights"],
            "experience": experience,
            "activations": max(0, peak - (experience - collected)),
        }
        needs: MemoryNeeds = {}
        for group in placed.groups:
            need = dict.fromkeys(learns, 0)
            if "rollout" in group.roles:
                need = acts
            if "actor" in group.roles and self.config.pipeline:
                # Both run at the same time. Beside the weights of the learner there are those that
                # act and those that the next rollout will copy.
                need = {name: learns[name] + size for name, size in acts.items()}
                need["weights"] += acts["weights"]
            elif "actor" in group.roles:
                # Rollout and update follow one another, so the larger one counts.
                larger = max(learns, need, key=lambda x: x["experience"] + x["activations"])
                names = ("experience", "activations")
                weights = max(need["weights"], learns["weights"])
                need = learns | {name: larger[name] for name in names} | {"weights": weights}
            needs[group.name] = need
        return needs

    def _acting(self, parts: int) -> tuple[int, Trajectory]:
        """Return the peak bytes and the trajectory of one of ``parts`` equal rollouts."""
        a, rows = self.config.algorithm, self.config.env.num_envs // parts
        peak, obs, decision = self._act(rows)
        # In parts, acting has the peak of one part, while the trajectory holds all environments.
        if a.rollout_micro_batch_size is not None:
            peak = self._act(min(a.rollout_micro_batch_size, rows))[0]
        return peak, memory_estimate.empty_trajectory(
            obs, decision, a.horizon, passes=a.rollout_epoch, groups=len(reward_groups(a))
        )

    def _act(self, rows: int) -> tuple[int, Any, Any]:
        """Return ``memory_estimate.estimate_acting`` of ``rows`` environments."""
        key = rows, getattr(self.policy, "planned_memory_gb", None), self.bound
        if key not in self._acting_by_rows:
            self._acting_by_rows[key] = memory_estimate.estimate_acting(
                self.policy, self.spaces.obs_spec, rows, bound=self.bound
            )
        return self._acting_by_rows[key]

    def _updating(
        self, placed: placement.Plan, micro_batch_size: int | None, surplus: float
    ) -> dict[str, int]:
        """Return the memory of an update in one of the learners.

        Args:
            placed: The plan.
            micro_batch_size: Samples of a micro-batch.
            surplus: See ``memory_estimate.estimate_update``.
        """
        config, learners = self.config, placed.processes("actor")
        # A learner alone with a share of the batch has the shapes of one of several learners.
        batch = max(1, config.algorithm.global_batch_size // learners)
        micro = min(micro_batch_size or batch, batch)
        if config.algorithm.symmetry is not None:  # each sample has an image
            batch, micro = 2 * batch, 2 * micro
        share = replace(config.algorithm, global_batch_size=batch, micro_batch_size=micro)
        # Only the loss of this learner is computed, so that updates and seed do not matter.
        learner = robot_ppo(self.policy, share, num_envs=episodes(config), updates=1, seed=0)
        _, trajectory = self._acting(learners)
        update = memory_estimate.estimate_update(
            self.policy, learner, trajectory, surplus=surplus, bound=self.bound
        )
        # Sharding divides weights, gradients and optimiser, but no experience and activations.
        if config.cluster.shard:
            acts = placed.fused("rollout", "actor")
            update |= memory_estimate.sharded_bytes(self.policy, learners, acts=acts)
        return update


def _check_weights(config: Config, spaces: EnvInfo) -> None:
    """Raise ConfigError if this machine has less memory than the weights need."""
    with torch.device("meta"):
        policy = robot_policy.make_policy(config, spaces, weights=False)
    size, free = nbytes(list(policy.parameters())), free_memory()
    if free is not None and size > free:
        raise ConfigError(
            f"model: the weights alone need {size / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB"
            " are free on this machine; lower model.hidden"
        )


def describe_spaces(config: Config) -> EnvInfo:
    """Return spaces and instructions of the environments, on the CPU.

    LIBERO's are known without its package; otherwise one simulator is built and closed.

    Raises:
        EnvError: The task is unknown, or refuses its options.
    """
    options = training_env(config)
    # A history changes the observations, which only the wrapped environment describes.
    can_be_libero = options.simulator in ("auto", "libero") and options.tasks is None
    if can_be_libero and libero_env.has_task(options.title) and config.model.history == 1:
        return libero_env.describe(
            options.title,
            obs_keys=options.obs_keys,
            cameras=options.cameras,
            image_size=(options.image_size, options.image_size),
            action_chunk=options.action_chunk,
            max_episode_steps=options.max_episode_steps,
        )
    # One environment suffices, because spaces describe one environment.
    seeds, cpu = env_seeds(0, 0, 1), torch.device("cpu")
    with closing(make_env(seeds, config=options, device=cpu, model=config.model)) as env:
        return env.info
