"""Train in an environment of your own: N copies of it in one batch of tensors.

    cd scripts/examples && embodied-ppo train env.id=own_environment:make env.simulator=torch
    env.num_envs=64 updates=20

``env.id=MODULE:FUNCTION`` names a function that returns N environments which take and return
tensors in the shape of ``gymnasium.vector``. For an environment that steps one at a time, register
it with Gymnasium in your module instead and write ``env.id=MODULE:ID``. For a robot, `embodied-ppo
new-task` starts from its MJCF.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch


class Cursor:
    """Move a cursor to the origin of a plane: 50 steps of at most 0.1 m in each direction."""

    single_observation_space = gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)
    single_action_space = gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float32)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(
        self, *, seed: Sequence[int] | None = None, options: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return observations [N, 2], metres. ``seed``: one for each environment."""
        if seed is not None:
            self.generators = [torch.Generator().manual_seed(s) for s in seed]
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64)
        self.position = self._start()
        return self.position.clone(), {}

    def _start(self) -> torch.Tensor:
        return torch.stack([2.0 * torch.rand(2, generator=g) - 1.0 for g in self.generators])

    def step(
        self, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        """Return observation, reward, terminated, truncated and info; finished environments start
        anew at once.
        """
        self.position = (self.position + action.cpu()).clamp(-2.0, 2.0)
        self.steps += 1
        reward = -self.position.norm(dim=-1)
        terminated = self.position.norm(dim=-1) < 0.05
        truncated = (self.steps >= 50) & ~terminated
        ended = terminated | truncated
        info = {"final_obs": self.position.clone(), "_final_obs": ended.clone()}
        self.position = torch.where(ended[:, None], self._start(), self.position)
        self.steps = torch.where(ended, 0, self.steps)
        return self.position.clone(), reward, terminated, truncated, info

    def close(self) -> None:
        """Nothing to release."""


def make(num_envs: int, seed: int, device: str) -> Cursor:
    """Return ``num_envs`` environments; the trainer passes a seed for each to ``reset``."""
    return Cursor(num_envs)
