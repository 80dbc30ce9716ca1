"""A trained robot policy outside of training: observations in, actions in the simulator's units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError, EnvError
from embodied_envs.observation_reader import ObservationReader
from embodied_envs.types import Obs, VectorEnv
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.finite import finite_rows, is_finite, wrong_number
from embodied_ppo.core.recurrent_state import EpisodeMemory, memory_size
from embodied_ppo.core.types import Policy
from embodied_ppo.evaluation import robot_evaluation
from embodied_ppo.evaluation.episodes import GROUP, act, policy_device
from embodied_ppo.options.schema import RealismConfig
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.trained_run import TrainedRun, open_run


class TrainedPolicy:
    """The policy of a checkpoint. It acts as ``embodied-ppo evaluate`` does.

    A policy with memory (``model.history`` or ``model.recurrent``) remembers the steps of its
    episodes: call ``act`` once per control step and ``reset`` where an episode starts.

    Attributes:
        config: Options that the policy was trained with.
        checkpoint: Directory of the checkpoint.
        update: Updates that were completed.
        obs_spec: What the policy reads of one observation.
        action_spec: Bounds of one action in the simulator's units, or the number of choices.
        step_s: Control period, seconds of one call of ``act``; None if unknown.
        network: The policy as a ``torch.nn.Module`` (``core.types.Policy``), with its normaliser.
    """

    def __init__(self, network: Policy, run: TrainedRun, env: VectorEnv, *, seed: int) -> None:
        """Wrap a policy with its weights.

        Args:
            network: The policy, in evaluation mode.
            run: The run that trained it.
            env: The simulator, which converts observations and actions and is not stepped.
            seed: Seed of sampled actions.
        """
        # Builds what the policy reads from the last observations; None: it reads the newest one.
        self.history = env.history if isinstance(env, HistoryEnv) else None
        self._memory: EpisodeMemory | None = None
        self._previous: dict[str, Tensor] = {}
        self.network, self.config = network, run.config
        self.checkpoint, self.update = run.source.path, run.source.update
        self.obs_spec = env.obs_spec if self.history is None else self.history.raw_spec
        self.action_spec, self.step_s = env.action_spec, env.step_s
        self._read, self.to_simulator = ObservationReader(env), env.to_simulator
        self._seed, self._calls = seed, 0

    @property
    def has_memory(self) -> bool:
        """Whether actions depend on earlier steps of the episode."""
        return self.history is not None or memory_size(self.network) > 0

    def reset(self, where: Any = None) -> None:
        """Start new episodes; without effect for a policy without memory.

        Args:
            where: bool [N], the environments whose next observation is the first of an episode;
                None: all, and the next call of ``act`` may have another N.

        Raises:
            EnvError: ``where`` has another length than the last observations.
        """
        if where is None or self._memory is None or not self.has_memory:
            self._memory = None
            return
        marks = torch.as_tensor(where, dtype=torch.bool, device=self._memory.start.device)
        if marks.shape != self._memory.start.shape:
            raise EnvError(
                f"reset: where has shape {list(marks.shape)}; the last call of act had"
                f" {len(self._memory.start)} observations"
            )
        self._memory.start = self._memory.start | marks
        if self.history is not None:
            self._previous = self.history.restart(self._previous, marks)

    def _with_history(self, obs: Obs) -> tuple[Obs, EpisodeMemory]:
        """Return observations [N, ..] with those before them, and the memory of the N episodes."""
        n, device = len(next(tree.leaves(obs))), policy_device(self.network)
        if self._memory is None or not self.has_memory:
            self._memory = EpisodeMemory(self.network, n, device)
            if self.history is not None:
                self._previous = self.history.empty(n, device)
        if n != len(self._memory.start):
            raise EnvError(
                f"act: {n} observations, and {len(self._memory.start)} in the step before; the"
                " policy has memory, so call reset() first"
            )
        if self.history is not None:
            obs = self.history.stack(self._previous, obs)
        return obs, self._memory

    @overload
    def act(self, obs: Tensor | dict[str, Tensor], *, deterministic: bool = True) -> Tensor: ...

    @overload
    def act(
        self, obs: np.ndarray | float | Mapping[str, Any], *, deterministic: bool = True
    ) -> np.ndarray: ...

    @torch.no_grad()
    def act(self, obs: Any, *, deterministic: bool = True) -> np.ndarray | Tensor:
        """Return the action for one observation, or for a batch of N.

        Observations are normalised with the statistics of the training, which do not change.
        Actions are mapped to the simulator's bounds (``env.action_mapping``), so
        ``env.step(policy.act(obs))`` of a Gymnasium environment works. Deterministic actions of
        ``model.policy=actor_critic`` equal those of ``evaluate`` bit for bit.

        Args:
            obs: Numpy: what the simulator's ``reset`` and ``step`` return, one observation or N of
                them, an array [..] or [N, ..], or a dictionary or tuple of arrays. Tensors:
                float32, and uint8 for images, of the shapes of ``obs_spec``. A mask of choices that
                the simulator returns in its info is the entry "action_mask".
            deterministic: Return the mode of the distribution; False: sample.

        Returns:
            Numpy for numpy, a tensor on the observation's device for tensors: what ``env.step``
            receives, with the shape, dtype and ``start`` of the action space, nested as it is; with
            the dimension N first if the observation has it ([C, ..], [N, C, ..] with
            ``env.action_chunk`` C > 1).

        Raises:
            CheckpointError: The action is not finite.
            EnvError: The observation has another shape, is not finite, or an entry is missing; or
                the policy has memory, and N differs from that of the step before.
        """
        inputs, is_batched = self._read(obs)
        if not is_finite(inputs):
            row = int((~finite_rows(inputs)).nonzero()[0])
            raise EnvError(f"act: {wrong_number(inputs, 'observation', row)}; pass finite numbers")
        first = next(tree.leaves(inputs))
        device = policy_device(self.network)
        observed: Obs = tree.map(lambda x: x.to(device), inputs)
        inputs, memory = self._with_history(observed)
        # The last bits of a matrix product depend on the number of rows. For a large model the rows
        # of an evaluation cost more than equal bits are worth.
        size = GROUP if self.config.model.policy == "actor_critic" else len(first)
        numbers = {"first_episode": 0, "t": self._calls, "seed": self._seed, "size": size}
        action, state = act(self.network, inputs, memory, **numbers, deterministic=deterministic)
        self._calls += 1
        memory.store(state)
        if self.history is not None:
            self._previous = self.history.push(self._previous, observed, action)
        is_tensor = any(isinstance(x, Tensor) for x in tree.leaves(obs))

        def convert(x: Tensor) -> Any:
            x = x.to(first.device) if is_batched else x[0].to(first.device)
            return x if is_tensor else x.cpu().numpy()[()]  # np.int64 instead of shape []

        return tree.map(convert, self.to_simulator(action))


def load_policy(
    path: str, *, device: str = "cpu", seed: int = 0, allow_changed_task: bool = False
) -> TrainedPolicy:
    """Return the policy of a checkpoint of a robot.

    Args:
        path: Directory of a run or of a checkpoint.
        device: Value of the option device.
        seed: Seed of sampled actions.
        allow_changed_task: Whether the task's files may differ from those of the training.

    Raises:
        CheckpointError, ConfigError, EnvError: The checkpoint or its task cannot be used.
    """
    run = open_run(path, say=Progress(quiet=False).say)
    selected = select_device(device, 0, deterministic=run.config.deterministic, notice=run.say)
    return policy_of(run, selected, seed=seed, allow_changed_task=allow_changed_task)


def policy_of(
    run: TrainedRun, device: torch.device, *, seed: int = 0, allow_changed_task: bool = False
) -> TrainedPolicy:
    """Return the policy of a run, see ``load_policy``."""
    if run.config.mode == "reasoning":
        raise ConfigError(
            f"checkpoint={run.source.path.name}: is a language model; write embodied-ppo export"
            f" checkpoint={run.run_dir} out=DIR, and load DIR with transformers"
        )
    env_config = replace(environments.evaluation_env(run.config), realism=RealismConfig())
    config = replace(run.config, env=env_config)
    factory = robot_evaluation.env_factory(run, config, device, allow=allow_changed_task)
    policy, env = robot_evaluation.restore(run, config, factory, allow=allow_changed_task)
    return TrainedPolicy(policy.eval(), run, env, seed=seed)
