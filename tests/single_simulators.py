"""Simulators that can exist once in a process: a vector of Gymnasium, and a batch of tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch_tasks import Cart


class Once:
    """Counts its objects; a second one is an error, also after the first was closed."""

    built: ClassVar[list[str]] = []

    def claim(self) -> None:
        if Once.built:
            raise RuntimeError("a process can have one simulation")
        Once.built.append("open")

    def close(self, **_: Any) -> None:
        Once.built[-1] = "closed"


class OnceVector(Once, gymnasium.vector.VectorEnv):
    """Points on a line; the reward is -|x|, episodes have 10 steps."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, max_episode_steps: int = 10) -> None:
        self.claim()
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-9, 9, (2,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators = [np.random.default_rng(i) for i in range(num_envs)]
        self.x, self.clock = np.zeros(num_envs), np.zeros(num_envs, dtype=int)

    def begin(self, where: np.ndarray) -> None:
        for i in np.flatnonzero(where):
            self.x[i], self.clock[i] = self.generators[i].uniform(-1, 1), 0

    def obs(self) -> np.ndarray:
        return np.stack([self.x, self.clock / 10], axis=1).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.generators = [np.random.default_rng(s) for s in seed]
        self.begin(np.ones(self.num_envs, dtype=bool))
        return self.obs(), {}

    def step(self, actions: np.ndarray) -> Any:
        over = self.clock >= 10
        self.x += 0.1 * actions[:, 0]
        self.clock += 1
        self.begin(over)
        none = np.zeros(self.num_envs, dtype=bool)
        return self.obs(), -np.abs(self.x), none, self.clock >= 10, {}


class Robot(Once, gymnasium.Env):
    """One point on a line."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.claim()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        gymnasium.Env.reset(self, seed=seed)
        self.x, self.clock = self.np_random.uniform(-1, 1, 1).astype(np.float32), 0
        return self.x, {}

    def step(self, action: Any) -> Any:
        self.x = self.x + np.float32(0.1) * action
        self.clock += 1
        return self.x, -abs(float(self.x[0])), False, self.clock >= 8, {}


class OnceCart(Once, Cart):
    """The cart of tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.claim()
        super().__init__(*args, **kwargs)


gymnasium.register("single/Once-v0", vector_entry_point=OnceVector, max_episode_steps=10)


def cart(num_envs: int, seed: int, device: str, **kwargs: Any) -> OnceCart:
    return OnceCart(num_envs, seed, device, **kwargs)
