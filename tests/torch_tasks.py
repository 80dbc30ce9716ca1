"""A batched physics task in torch with the interfaces of Gymnasium, ManiSkill and Isaac Lab."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor


class Cart(VectorEnv):
    """A cart on a rail (position in m, velocity in m/s) falls off at 2 m; else the time limit ends.

    Semi-implicit Euler with 0.1 s: v += 0.1 * 3 a, x += 0.1 v; reward 2 - |x|. All operations are
    in place and asynchronous, so that tests detect adapters that return a buffer or synchronise.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space: Any = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs: int, seed: int, device: str, max_episode_steps: int = 20) -> None:
        self.num_envs, self.device, self.limit = num_envs, torch.device(device), max_episode_steps
        self.generators: list[Any] = [torch.Generator(device).manual_seed(seed)] * num_envs
        self.state = torch.zeros(num_envs, 2, device=device)
        self.clock = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.reward = torch.zeros(num_envs, device=device)

    def draw(self) -> Tensor:
        """Draw initial states [N, 2] of all environments, also of those that are not reset."""
        if self.generators[0] is self.generators[-1]:
            shape = (self.num_envs, 2)
            return torch.rand(shape, generator=self.generators[0], device=self.device) * 2 - 1
        return torch.stack(
            [torch.rand(2, generator=g, device=self.device) * 2 - 1 for g in self.generators]
        )

    def begin(self, where: Tensor) -> None:
        """Start new episodes where bool [N] is True."""
        self.state.copy_(torch.where(where.unsqueeze(1), self.draw(), self.state))
        self.clock.masked_fill_(where, 0)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if isinstance(seed, list):
            raise TypeError("one seed")
        if seed is not None:
            self.generators = [torch.Generator(self.device).manual_seed(seed)] * self.num_envs
        self.begin(torch.ones_like(self.clock, dtype=torch.bool))
        return self.state, {}

    def physics(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Advance one step without a reset; return terminated [N] and truncated [N]."""
        assert action.shape == (self.num_envs, 1) and action.dtype == torch.float32
        self.state[:, 1] += 0.3 * action.clamp_(-1, 1)[:, 0]
        self.state[:, 0] += 0.1 * self.state[:, 1]
        self.clock += 1
        self.reward.copy_(2 - self.state[:, 0].abs())
        return self.state[:, 0].abs() > 2, self.clock >= self.limit

    def step(self, actions: Tensor) -> Any:
        """Step as Gymnasium does, with info["final_obs"]."""
        fell, out = self.physics(actions)
        info = {"final_obs": self.state.clone(), "is_success": self.state[:, 0].abs() < 0.1}
        self.begin(fell | out)
        return self.state, self.reward, fell, out, info

    def render(self) -> Any:
        return torch.full((self.num_envs, 8, 8, 3), 7, dtype=torch.uint8, device=self.device)


class ManiSkillLike(Cart):
    """Interface of ManiSkill's vector.

    It has nested observations, final_observation, final_info, env_idx and a list of seeds, and no
    metadata.
    """

    metadata: dict[str, Any] = {}  # noqa: RUF012
    single_observation_space = spaces.Dict(
        {
            "agent": spaces.Dict(
                {"qpos": spaces.Box(-9, 9, (1,)), "qvel": spaces.Box(-9, 9, (1,), np.float64)}
            ),
            "extra": spaces.Dict(
                {"near": spaces.Box(0, 1, (), np.int8), "where": spaces.Discrete(3, start=-1)}
            ),
            "rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        }
    )
    spec = EnvSpec("test/Cart-v0", max_episode_steps=20)

    def obs(self) -> dict[str, Any]:
        x = self.state[:, 0]
        image = (x * 100).clamp(0, 255).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 4, 4, 3)
        return {
            "agent": {"qpos": self.state[:, :1], "qvel": self.state[:, 1:].double()},
            "extra": {"near": x.abs() < 0.1, "where": x.sign().long()},
            "rgb": image.contiguous(),
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        where = torch.ones_like(self.clock, dtype=torch.bool)
        if seed is not None:
            assert isinstance(seed, list) and len(seed) == self.num_envs
            self.generators = [torch.Generator(self.device).manual_seed(s) for s in seed]
        if options is not None:
            where = torch.zeros_like(where).index_fill_(0, options["env_idx"], True)
        keep = [g.get_state() for g in self.generators]
        self.begin(where)
        for i in (~where).nonzero().flatten().tolist():
            self.generators[i].set_state(keep[i])
        return self.obs(), {"reconfigure": False}

    def step(self, actions: Tensor) -> Any:
        fell, out = self.physics(actions)
        reward, obs = self.reward.clone(), self.obs()
        success = self.state[:, 0].abs() < 0.1
        info: dict[str, Any] = {"success": success, "elapsed_steps": self.clock.clone()}
        done = fell | out
        if bool(done.any()):
            final = {
                "final_observation": {k: v if k == "rgb" else dict(v) for k, v in obs.items()},
                "final_info": info,
            }
            final["final_observation"]["agent"]["qpos"] = obs["agent"]["qpos"].clone()
            obs, info = self.reset(options={"env_idx": done.nonzero().flatten()})
            info |= final | {"_final_observation": done, "_final_info": done}
        return obs, reward, fell, out, info


class IsaacLike:
    """Interface of Isaac Lab: observation groups, buffers, global seed, final_obs on request."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Dict(
        {"policy": Cart.single_observation_space, "critic": spaces.Box(-9, 9, (3,))}
    )
    single_action_space = spaces.Box(-np.inf, np.inf, (1,))

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.unwrapped, self.extras = cfg, self, {}
        self.cart = Cart(cfg.num_envs, cfg.seed, cfg.device)
        self.cart.generators = [None]  # torch's global generator
        torch.manual_seed(cfg.seed)
        self.num_envs, self.device = cfg.num_envs, cfg.device
        self.fell, self.out = (
            torch.zeros(cfg.num_envs, dtype=torch.bool, device=cfg.device) for _ in range(2)
        )

    def obs(self) -> dict[str, Tensor]:
        return {
            "policy": self.cart.state,
            "critic": torch.cat([self.cart.state, self.cart.state[:, :1]], 1),
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        self.cart.reset()
        return self.obs(), self.extras

    def step(self, action: Tensor) -> Any:
        self.fell[:], self.out[:] = self.cart.physics(action)
        if self.cfg.compute_final_obs:
            self.extras["final_obs"] = {k: v.clone() for k, v in self.obs().items()}
        self.extras["log"] = {"Episode_Termination/fell": self.fell.float().mean()}
        self.cart.begin(self.fell | self.out)
        return self.obs(), self.cart.reward, self.fell, self.out, self.extras

    def render(self) -> Any:
        return np.full((4, 8, 3), 9, dtype=np.uint8)

    def close(self) -> None:
        pass


class StudentLike(IsaacLike):
    """Observation groups without Isaac Lab's name of the policy's group."""

    single_observation_space = spaces.Dict(
        {"student": Cart.single_observation_space, "critic": spaces.Box(-9, 9, (3,))}
    )

    def obs(self) -> dict[str, Tensor]:
        return {"student": self.cart.state, "critic": super().obs()["critic"]}


class Hidden:
    """The reward of every step is a number that was drawn at the start of the episode.

    Only the group "critic" holds it; "policy" is the elapsed share of 8 steps. ``offset`` is added
    to the critic's group in the observation, which changes no reward.
    """

    single_observation_space = spaces.Dict(
        {"policy": spaces.Box(0, 1, (1,)), "critic": spaces.Box(-9, 9, (1,))}
    )
    single_action_space = spaces.Box(-1, 1, (1,))
    limit = 8

    def __init__(self, num_envs: int, seed: int, device: str, offset: float = 0.0) -> None:
        self.num_envs, self.device, self.offset = num_envs, device, offset
        self.generator = torch.Generator(device).manual_seed(seed)
        self.hidden = torch.zeros(num_envs, 1)
        self.clock = torch.arange(num_envs).remainder(self.limit)

    def obs(self) -> dict[str, Tensor]:
        elapsed = self.clock.unsqueeze(1) / self.limit
        return {"policy": elapsed, "critic": self.hidden + self.offset}

    def draw(self) -> Tensor:
        return 2 * torch.rand(self.num_envs, 1, generator=self.generator) - 1

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if isinstance(seed, list):
            raise TypeError("one seed")
        if seed is not None:
            self.generator.manual_seed(seed)
        self.hidden = self.draw()
        return self.obs(), {}

    def step(self, action: Tensor) -> Any:
        reward = self.hidden.squeeze(1)
        self.clock = self.clock + 1
        out = self.clock >= self.limit
        info = {"final_obs": self.obs()}
        self.hidden = torch.where(out.unsqueeze(1), self.draw(), self.hidden)
        self.clock = self.clock.masked_fill(out, 0)
        return self.obs(), reward, out, torch.zeros_like(out), info

    def close(self) -> None:
        pass


def hidden(num_envs: int, seed: int, device: str, **kwargs: Any) -> Hidden:
    return Hidden(num_envs, seed, device, **kwargs)


class Config:
    def __init__(self, **options: Any) -> None:
        self.is_finite_horizon = self.compute_final_obs = False
        self.__dict__ |= options


def cart(num_envs: int, seed: int, device: str, **kwargs: Any) -> Cart:
    kwargs.pop("render_mode", None)
    return Cart(num_envs, seed, device, **kwargs)


def maniskill(num_envs: int, seed: int, device: str, max_episode_steps: int = 20) -> Cart:
    return ManiSkillLike(num_envs, seed, device, max_episode_steps)


def isaac(
    num_envs: int,
    seed: int,
    device: str,
    render_mode: str | None = None,
    critic: bool = False,
    **kwargs: Any,
) -> IsaacLike:
    env = IsaacLike(Config(num_envs=num_envs, seed=seed, device=device, **kwargs))
    if not critic:
        env.single_observation_space = spaces.Dict({"policy": Cart.single_observation_space})
    return env


def student(num_envs: int, seed: int, device: str) -> IsaacLike:
    return StudentLike(Config(num_envs=num_envs, seed=seed, device=device, compute_final_obs=True))


def next_step(num_envs: int, seed: int, device: str) -> Cart:
    env = Cart(num_envs, seed, device)
    env.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    return env


def one(num_envs: int, seed: int, device: str) -> Cart:
    return Cart(1, seed, device)
