"""EnvPool's C++ simulators (Atari, MuJoCo, MetaWorld, Fetch, Playground, ...) as a ``VectorEnv``."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.types import EnvError, Obs, Step

from embodied_envs import spaces

_OURS = ("num_envs", "batch_size", "seed", "env_seed", "env_type", "num_threads", "max_episode_steps", "render_mode")
"""Arguments of envpool.make that have an option of their own, or that the adapter depends on."""

_MB_PER_ENV = {"playground": 60, "metaworld": 19, "dmc": 13, "robotics": 12}
"""Measured resident memory of one environment by EnvPool family: each holds its own copy of the robot's meshes."""

_egl: str | None = None
"""Why MuJoCo pictures cannot be drawn in this process; "" if they can, None before EnvPool was loaded."""


def load() -> Any:
    """The ``envpool`` module, imported at the first call (1 to 3 s); raises ImportError where it is not installed.

    EnvPool's MuJoCo renderer needs libEGL's symbols to be global *before* EnvPool is loaded; without them it ends the
    whole process at the first picture. So they are loaded here even if nobody asks for pictures yet.
    """
    global _egl
    if _egl is None:
        if "envpool" in sys.modules:
            _egl = "envpool was imported before embodied_envs; import embodied_envs first"
        else:
            try:
                ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
                _egl = ""
            except OSError:
                _egl = "libEGL.so.1 is missing; apt-get install libegl1 libegl-mesa0"
    import envpool

    return envpool


def knows(id: str) -> bool:
    """Whether EnvPool is installed and has this task."""
    return id in ids()


def ids() -> list[str]:
    """Every task of EnvPool, aliases included; empty where EnvPool is not installed."""
    try:
        return load().list_all_envs()
    except ImportError:
        return []


class EnvPoolEnv:
    """``num_envs`` copies of an EnvPool task, stepped by EnvPool's own threads. See ``VectorEnv`` for the contract.

    EnvPool resets an ended episode on the step *after* it: the row that ends carries the true final observation (so
    ``final_obs`` is None), and the next row is a dummy (mask False, reward 0, action ignored).
    The simulators are built by the first ``reset`` and not before: ``restart`` costs nothing by itself.
    """

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seeds: list[int],
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        action_mapping: str = "rescale",
        success_key: str | None = None,
        render: bool = False,
        render_size: tuple[int, int] = (240, 320),
        kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._envpool = load()
        self.id = id
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._seeds = list(seeds)
        self._pool: Any = None
        self._closed = False

        arguments = dict(kwargs or {})
        if taken := sorted(set(arguments) & set(_OURS)):
            raise EnvError(f"env.id={id}: kwargs {', '.join(taken)} are set by the adapter; use the option of its own")
        arguments |= {"num_envs": num_envs, "num_threads": num_threads or min(num_envs, _cores())}
        if max_episode_steps is not None:
            arguments["max_episode_steps"] = max_episode_steps
        self._render = render
        if render:
            height, width = render_size
            arguments |= {"render_mode": "rgb_array", "render_height": height, "render_width": width}
        self._arguments = arguments

        spec = self._spec()
        config = dict(zip(spec._config_keys, spec._config_values, strict=True))
        if config.get("max_num_players", 1) != 1:
            raise EnvError(
                f"env.id={id}: a game of {config['max_num_players']} players, and only single-player tasks are supported; "
                "choose another id"
            )
        self.max_episode_steps: int | None = config.get("max_episode_steps")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's remark that EnvPool's bounds are rounded to float32.
            observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        self.obs_spec, self._obs = spaces.observations(observation_space, id=id, device=self.device)
        self.action_spec, self._action = spaces.actions(
            action_space, id=id, mapping=action_mapping, device=self.device
        )
        info = sorted(key.removeprefix("info:") for key in spec.state_array_spec if key.startswith("info:"))
        if success_key is not None and success_key not in info:
            raise EnvError(f"env.id={id}: success_key={success_key!r} is not in its info; it has {', '.join(info)}")
        self._success = success_key or next((key for key in ("success", "is_success") if key in info), None)

    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]; the first call builds the simulators."""
        self._open()
        if self._pool is None:
            self._pool = self._make()
        return self._obs(self._pool.reset()[0])

    def step(self, action: Tensor) -> Step:
        """Act in every environment: float32 [N, A] or int64 [N]."""
        if self._pool is None:
            self._open()
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        obs, reward, terminated, truncated, info = self._pool.step(self._action(action))
        acted = info["elapsed_step"] != 0
        reward *= acted  # Some families (dm_control) repeat the last reward on the row that only resets.
        mask = torch.from_numpy(acted)
        success = None
        if self._success is not None:
            success = torch.from_numpy(info[self._success] != 0).logical_and_(mask)
        step = Step(
            obs=self._obs(obs),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            mask=mask,
            success=success,
        )
        return step if self.device.type == "cpu" else _to(step, self.device)

    def restart(self, seeds: list[int]) -> None:
        """Begin again as if newly made with these seeds; ``reset`` must follow (and builds the simulators again)."""
        self._open()
        if len(seeds) != self.num_envs:
            raise EnvError(f"env.id={self.id}: {len(seeds)} seeds for {self.num_envs} environments; give one each")
        self._pool = None
        self._seeds = list(seeds)

    def state(self) -> None:
        """None: EnvPool cannot save a simulator's state."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Always raises EnvError, see ``state``."""
        raise EnvError(f"env.id={self.id}: EnvPool cannot load a simulator's state; use restart(seeds) instead")

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0."""
        if not self._render:
            raise EnvError(f"env.id={self.id}: made without pictures; make it with render=True")
        if self._pool is None:
            self._open()
            raise EnvError(f"env.id={self.id}: render() before reset(); call reset() first")
        return torch.from_numpy(self._pool.render()[0])

    def close(self) -> None:
        """Free the simulators and their threads; may be called twice."""
        self._pool = None
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")

    def _spec(self) -> Any:
        """EnvPool's description of the task: nothing is simulated yet, so a wrong argument costs nothing."""
        try:
            return self._envpool.make_spec(self.id, seed=self._seeds, **self._arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
            raise EnvError(f"env.id={self.id}: EnvPool refuses it with {self._arguments}: {error}") from error

    def _make(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # As above; EnvPool keeps the space it asks for here.
            pool = self._envpool.make_gymnasium(self.id, seed=self._seeds, **self._arguments)
            _ = pool.observation_space
        return pool


def _to(step: Step, device: torch.device) -> Step:
    """A step whose flags and rewards are moved to ``device``; observations already are there."""
    return Step(
        obs=step.obs,
        reward=step.reward.to(device, non_blocking=True),
        terminated=step.terminated.to(device, non_blocking=True),
        truncated=step.truncated.to(device, non_blocking=True),
        mask=step.mask.to(device, non_blocking=True),
        success=None if step.success is None else step.success.to(device, non_blocking=True),
    )


def _cores() -> int:
    """Cores this process may use (EnvPool's own default counts the whole machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
