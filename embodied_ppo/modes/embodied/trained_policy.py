"""A trained robot policy outside of training: observations in, actions in the simulator's units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Generator, Tensor

from embodied_ppo.config.schema import Config
from embodied_ppo.core import tree
from embodied_ppo.core.types import ActionSpec, Obs, ObsSpec, Policy
from embodied_ppo.evaluation.episodes import GROUP, policy_device


class TrainedPolicy:
    """The policy of a checkpoint. It acts as ``embodied-ppo evaluate`` does.

    Attributes:
        config: Options that the policy was trained with.
        checkpoint: Directory of the checkpoint.
        update: Updates that were completed.
        obs_spec: What the policy reads of one observation.
        action_spec: Bounds of one action in the simulator's units, or the number of choices.
        network: The policy as a ``torch.nn.Module`` (``core.types.Policy``), with its normaliser.
    """

    def __init__(
        self,
        network: Policy,
        *,
        config: Config,
        checkpoint: Path,
        update: int,
        action_spec: ActionSpec,
        obs_spec: ObsSpec,
        read: Callable[[Any], tuple[Obs, bool]],
        to_simulator: Callable[[Tensor], Tensor],
        seed: int = 0,
    ) -> None:
        """Wrap a policy with its weights.

        Args:
            network: The policy, in evaluation mode.
            config: Options of the training.
            checkpoint: Directory of the checkpoint.
            update: Updates that were completed.
            action_spec: See the class.
            obs_spec: See the class.
            read: Converts observations; returns tensors [N, ..], and whether there was a dimension
                N (``embodied_envs.observation_reader``).
            to_simulator: Maps the policy's actions [N, ..] to the simulator's units.
            seed: Seed of sampled actions.
        """
        self.network, self.config = network, config
        self.checkpoint, self.update = checkpoint, update
        self.obs_spec, self.action_spec = obs_spec, action_spec
        self._read, self._to_simulator = read, to_simulator
        self._generator = Generator(device=policy_device(network)).manual_seed(seed)
        # ``evaluate`` computes GROUP rows at a time, and the last bits of a matrix product depend
        # on their number. For a large model the rows cost more than equal bits are worth.
        self._rows = GROUP if config.model.policy == "actor_critic" else None

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
                them, an array [..] or [N, ..] or a dictionary of arrays. Tensors: float32, and
                uint8 for images, of the shapes of ``obs_spec``.
            deterministic: Return the mode of the distribution; False: sample.

        Returns:
            Numpy for numpy, a tensor on the observation's device for tensors. Continuous actions
            are float32 [A] or [N, A] ([C, A], [N, C, A] with ``env.action_chunk`` C > 1), discrete
            ones int64 [] or [N].

        Raises:
            EnvError: The observation has another shape, or an entry is missing.
        """
        inputs, is_batched = self._read(obs)
        first = next(tree.leaves(inputs))
        device, n = policy_device(self.network), len(first)
        size = self._rows or n
        actions: list[Tensor] = []
        for start in range(0, n, size):
            rows = torch.arange(start, start + size).clamp(max=n - 1)
            part = tree.map(lambda x, rows=rows: x[rows.to(x.device)].to(device), inputs)
            noise = None if deterministic else self.network.noise(size, self._generator)
            actions.append(self.network.act(self.network.encode(part), noise=noise).action)
        action = self._to_simulator(torch.cat(actions)[:n]).to(first.device)
        action = action if is_batched else action[0]
        is_tensor = any(isinstance(x, Tensor) for x in _values(obs))
        return action if is_tensor else action.cpu().numpy()[()]  # np.int64 instead of shape []


def _values(obs: Any) -> list[Any]:
    """Return the arrays of nested dictionaries."""
    if isinstance(obs, Mapping):
        return [x for value in obs.values() for x in _values(value)]
    return [obs]
