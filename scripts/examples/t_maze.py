"""Train a policy with memory: a T-maze whose first observation shows the way at its end.

    cd scripts/examples && embodied-ppo train env.id=t_maze:make env.simulator=torch
    env.num_envs=64 env_steps=160000 algorithm.horizon=64 algorithm.update_epoch=4
    algorithm.minibatch_unit=column algorithm.global_batch_size=1024 algorithm.entropy_bonus=0.05
    algorithm.normalize_advantages=true model.recurrent=gru model.recurrent_size=32

The success of a policy without memory stays at one half. ``env.kwargs.corridor`` is the number of
steps that the policy has to remember the sign for (after Bakker 2002, "Reinforcement Learning with
Long Short-Term Memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

FORWARD, LEFT, RIGHT = 0, 1, 2


class TMaze:
    """Walk along a corridor and turn to the side that the first observation names.

    Observation [N, 2]: the sign, -1 (left) or 1 (right), in the first step and 0 afterwards; and
    whether the junction is reached. Actions: forward, left, right; a turn in the corridor has no
    effect. Reward: 1 for the right turn, -1 for the wrong one, -0.1 for other steps that do not
    move. An episode ends with the turn, at the latest after 2·corridor steps.
    """

    single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, num_envs: int, corridor: int) -> None:
        self.num_envs, self.corridor = num_envs, corridor
        self.position = torch.zeros(num_envs, dtype=torch.int64)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)

    def reset(
        self, *, seed: Sequence[int] | None = None, options: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return observations [N, 2]. ``seed``: one for each environment."""
        if seed is not None:
            self.generators = [torch.Generator().manual_seed(s) for s in seed]
        self.position, self.steps = torch.zeros_like(self.position), torch.zeros_like(self.steps)
        self.sign = self._draw()
        return self._observe(), {}

    def _draw(self) -> Tensor:
        """Return -1 or 1 for each environment, [N]."""
        return torch.stack([2 * torch.randint(2, (), generator=g) - 1 for g in self.generators])

    def _observe(self) -> Tensor:
        sign = torch.where(self.steps == 0, self.sign, 0)
        return torch.stack([sign, self.position == self.corridor], dim=1).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return observation, reward, terminated, truncated and info; finished environments start
        anew at once.
        """
        action, at_junction = action.cpu(), self.position == self.corridor
        moves = (action == FORWARD) & ~at_junction
        terminated = (action != FORWARD) & at_junction
        success = terminated & (action == torch.where(self.sign < 0, LEFT, RIGHT))
        turn = torch.where(success, 1.0, -1.0)
        reward = torch.where(terminated, turn, torch.where(moves, 0.0, -0.1))
        self.position, self.steps = self.position + moves, self.steps + 1
        truncated = (self.steps >= 2 * self.corridor) & ~terminated
        ended = terminated | truncated
        info = {"final_obs": self._observe(), "_final_obs": ended.clone(), "success": success}
        self.position = torch.where(ended, 0, self.position)
        self.steps = torch.where(ended, 0, self.steps)
        self.sign = torch.where(ended, self._draw(), self.sign)
        return self._observe(), reward, terminated, truncated, info

    def close(self) -> None:
        """Nothing to release."""


def make(num_envs: int, seed: int, device: str, corridor: int = 20) -> TMaze:
    """Return ``num_envs`` mazes; the trainer passes a seed for each to ``reset``."""
    return TMaze(num_envs, corridor)
