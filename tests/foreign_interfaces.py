"""Environments in the interfaces of other packages, on one line: x moves by 0.1 a, reward -|x|."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

LIMIT = 5
OBS, ACTION = spaces.Box(-9, 9, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)


class Line:
    """The state of one environment; the observation is (x, step)."""

    def __init__(self) -> None:
        self.generator, self.x, self.t = np.random.default_rng(), 0.0, 0

    def begin(self, seed: int | None = None) -> np.ndarray:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.x, self.t = float(self.generator.uniform(-1, 1)), 0
        return self.obs()

    def obs(self) -> np.ndarray:
        return np.array([self.x, self.t], dtype=np.float32)

    def move(self, action: Any) -> tuple[np.ndarray, float, bool]:
        self.x += 0.1 * float(np.asarray(action).reshape(-1)[0])
        self.t += 1
        return self.obs(), -abs(self.x), self.t >= LIMIT


class Modern(Line, gymnasium.Env):
    """An unregistered class of Gymnasium."""

    observation_space, action_space = OBS, ACTION

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        gymnasium.Env.reset(self, seed=seed)
        return self.begin(seed), {}

    def step(self, action: Any) -> Any:
        obs, reward, over = self.move(action)
        return obs, reward * self.scale, False, over, {}


gymnasium.register("foreign/Modern-v0", entry_point=Modern)


class OldBox:
    """Gym's Box, which is no space of Gymnasium."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...]) -> None:
        self.low, self.high = np.full(shape, low), np.full(shape, high)
        self.shape, self.dtype = shape, np.dtype(np.float32)


OldBox.__name__ = "Box"


class OldGym(Line):
    """Gym before 0.22: seed(), reset without arguments, 4 values."""

    observation_space: Any = OldBox(-9, 9, (2,))
    action_space: Any = OldBox(-1, 1, (1,))
    metadata = {"render.modes": ["rgb_array"]}  # noqa: RUF012

    def seed(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        return self.begin()

    def step(self, action: Any) -> Any:
        obs, reward, over = self.move(action)
        return obs, reward, over, {"TimeLimit.truncated": over}

    def render(self, mode: str = "human") -> Any:
        return np.full((4, 4, 3), 7, dtype=np.uint8)


class OldInNew(OldGym, gymnasium.Env):
    """A port that changed only the import."""

    observation_space, action_space = OBS, ACTION
    metadata = {"render_modes": []}  # noqa: RUF012


gymnasium.register("foreign/Old-v0", entry_point=OldInNew)


class FourValues(Modern):
    """A port that forgot step."""

    def step(self, action: Any) -> Any:
        return OldGym.step(self, action)  # type: ignore[arg-type]


gymnasium.register("foreign/Values-v0", entry_point=FourValues)


class Numbers(gymnasium.vector.VectorEnv):
    """An unregistered vector of arrays."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = OBS, ACTION

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.lines = num_envs, [Line() for _ in range(num_envs)]
        self.observation_space, self.action_space = (
            batch_space(x, num_envs) for x in (OBS, ACTION)
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        return np.stack([x.begin(s) for x, s in zip(self.lines, seeds, strict=True)]), {}

    def step(self, actions: Any) -> Any:
        rows = [
            (x.begin(), 0.0, False) if x.t >= LIMIT else x.move(a)
            for x, a in zip(self.lines, actions, strict=True)
        ]
        obs, reward, over = (np.array(x) for x in zip(*rows, strict=True))
        return obs, reward, np.zeros_like(over), over, {}


class Columns(Numbers):
    """Rewards and flags are columns [N, 1]."""

    def step(self, actions: Any) -> Any:
        obs, *results, info = super().step(actions)
        return obs, *(x[:, None] for x in results), info


def numbers(num_envs: int) -> Numbers:
    return Numbers(num_envs)


def one(scale: float = 1.0) -> Modern:
    return Modern(scale)


def several(num_envs: int) -> list[Modern]:
    return [Modern() for _ in range(num_envs)]


# ---------------------------------------------------------------------------- legged_gym and rsl_rl
class Legged:
    """legged_gym: 5 values, privileged observations, num_envs of its configuration."""

    def __init__(self, num_envs: int = 4, privileged: bool = True) -> None:
        self.num_envs, self.num_actions, self.num_obs = num_envs, 1, 2
        self.max_episode_length, self.device = float(LIMIT), "cpu"
        self.privileged, self.x = privileged, torch.zeros(num_envs)
        self.t = torch.zeros(num_envs, dtype=torch.int64)

    def begin(self, where: Tensor) -> None:
        self.x = torch.where(where, torch.rand(self.num_envs) * 2 - 1, self.x)
        self.t[where] = 0

    def reset(self) -> Any:
        self.begin(torch.ones(self.num_envs, dtype=torch.bool))
        return self.get_observations(), self.get_privileged_observations()

    def get_observations(self) -> Any:
        return torch.stack([self.x, self.t.float()], dim=1)

    def get_privileged_observations(self) -> Any:
        return self.x.unsqueeze(1) if self.privileged else None

    def physics(self, actions: Tensor) -> Any:
        self.x = self.x + 0.1 * actions[:, 0]
        self.t += 1
        reward, fell, out = -self.x.abs(), self.x.abs() > 0.9, self.t >= LIMIT
        self.begin(fell | out)
        return reward, (fell | out).long(), {"time_outs": out & ~fell}

    def step(self, actions: Tensor) -> Any:
        reward, dones, infos = self.physics(actions)
        return self.get_observations(), self.get_privileged_observations(), reward, dones, infos


class RslRl2(Legged):
    """rsl_rl 2: 4 values, the critic's observations in extras."""

    def extras(self) -> dict[str, Any]:
        return {"observations": {"critic": self.x.unsqueeze(1)}}

    def get_observations(self) -> Any:
        return super().get_observations(), self.extras()

    def get_privileged_observations(self) -> Any:
        raise AssertionError

    def reset(self) -> Any:
        self.begin(torch.ones(self.num_envs, dtype=torch.bool))
        return self.get_observations()

    def step(self, actions: Tensor) -> Any:
        reward, dones, extras = self.physics(actions)
        return super().get_observations(), reward, dones, {**extras, **self.extras()}


RslRl2.get_privileged_observations = None  # type: ignore[assignment, method-assign]


class Groups:
    """A TensorDict, as far as it is used."""

    def __init__(self, **groups: Tensor) -> None:
        self.groups = groups

    def items(self) -> Any:
        return self.groups.items()


class RslRl3(Legged):
    """rsl_rl 3: 4 values, groups of observations in a TensorDict."""

    def get_observations(self) -> Any:
        obs = torch.stack([self.x, self.t.float()], dim=1)
        return Groups(policy=obs, critic=self.x.unsqueeze(1))

    def step(self, actions: Tensor) -> Any:
        reward, dones, extras = self.physics(actions)
        return self.get_observations(), reward, dones, extras


# ------------------------------------------------------------------------------- named, not adapted
class Sb3Vec(Numbers):
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(num_envs=2, step_async=0, step_wait=0, env_method=0, reset=0)


class DeepMind:
    def observation_spec(self) -> None: ...
    def action_spec(self) -> None: ...
    def reset(self) -> None: ...
    def step(self, action: Any) -> None: ...


class Brax:
    observation_size = action_size = 1

    def reset(self, rng: Any) -> None: ...
    def step(self, state: Any, action: Any) -> None: ...


class Team:
    """PettingZoo's ParallelEnv."""

    possible_agents = ("a", "b")


INSTANCE, TEXT = Modern(), "text"


class Constructed(OldGym):
    """Its constructor alone takes a seed."""

    seed = None  # type: ignore[assignment]  # without the function of OldGym

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = np.random.default_rng(seed)
