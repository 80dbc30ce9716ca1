"""EnvPool's C++ simulators (Atari, MuJoCo, MetaWorld, Fetch, Playground, ...) as a ``VectorEnv``."""

from __future__ import annotations

import ctypes
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_ppo.core.types import EnvError, Obs, Step

_OURS = ("num_envs", "batch_size", "seed", "env_seed", "num_threads", "max_episode_steps", "render_mode")
"""Arguments of envpool.make that have an option of their own, or that the adapter depends on."""

_HEAVY = ("envpool.mujoco.playground", "envpool.mujoco.myosuite", "envpool.mujoco.dmc", "envpool.mujoco.robotics",
          "envpool.mujoco.metaworld")  # fmt: skip
"""Families whose every environment holds its own copy of the robot's meshes: 8 to 170 MB (others: 1 MB)."""

_OWN_CLOCK = ("envpool.highway", "envpool.jumanji")
"""Families that ignore max_episode_steps; so do tasks that come without a limit (CliffWalking, Blackjack, 2048)."""

_SMALL_POOL = 16
"""Up to so many environments nobody asks whether they fit: at most 3 GB."""

_NO_LIMIT = 2**31 - 1
"""EnvPool's word for a task without a clock."""

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
            _egl = "envpool was imported before embodied_envs loaded it; let embodied_envs.make be the first"
        else:
            try:
                ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
                _egl = ""
            except OSError:
                _egl = "libEGL.so.1 is missing; apt-get install libegl1 libegl-mesa0"
    import envpool

    return envpool


def ids() -> list[str]:
    """Every task of EnvPool, aliases included; empty where EnvPool is not installed."""
    try:
        return load().list_all_envs()
    except ImportError:
        return []


def knows(id: str) -> bool:
    """Whether EnvPool is installed and has this task."""
    return id in ids()


class EnvPoolEnv:
    """``num_envs`` copies of an EnvPool task, stepped by EnvPool's own threads. See ``VectorEnv`` for the contract.

    EnvPool resets an ended episode on the step *after* it: the row that ends carries the true final observation (so
    ``final_obs`` is None), and the next row is a dummy (mask False, reward 0, action ignored).
    The simulators are built by the first ``reset`` and not before: ``restart`` costs nothing by itself.
    Where the task ends in the very step in which the clock does, EnvPool says truncated.
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
        obs_keys: Sequence[str] | None = None,
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
        self._render = render
        self._pool: Any = None
        self._closed = False

        arguments = dict(kwargs or {})
        if taken := sorted(set(arguments) & set(_OURS)):
            raise EnvError(f"env.id={id}: kwargs {', '.join(taken)} are set by the adapter; use the option of its own")
        arguments["num_threads"] = min(num_envs, _cores()) if num_threads is None else num_threads
        if max_episode_steps is not None:
            arguments["max_episode_steps"] = max_episode_steps
        if render:
            height, width = render_size
            arguments |= {"render_mode": "rgb_array", "render_height": height, "render_width": width}
        self._arguments = arguments

        spec = self._spec()
        config = spec.config._asdict()
        if config["max_num_players"] != 1:
            raise EnvError(
                f"env.id={id}: a game of {config['max_num_players']} players, and only single-player tasks are "
                "supported; choose another id"
            )
        family: str = self._envpool.registration.registry.specs[id][0]
        self.max_episode_steps = self._clock(family, config["max_episode_steps"], max_episode_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's remark that EnvPool's bounds are rounded to float32.
            observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        self.obs_spec, leaves = spaces.observations(observation_space, id=id, device=self.device, keys=obs_keys)
        self.action_spec, self._action = spaces.actions(action_space, id=id, mapping=action_mapping, device=self.device)
        self._action_shape = spaces.action_shape(self.action_spec, num_envs)
        self._wire(spec, leaves, success_key)

        if _egl and family.startswith("envpool.mujoco") and (render or arguments.get("from_pixels")):
            raise EnvError(f"env.id={id}: no pictures, {_egl}")
        if family in _HEAVY and num_envs > _SMALL_POOL:
            self._check_memory()

    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]; the first call builds the simulators."""
        self._check_open()
        if self._pool is None:
            self._pool = self._make(self.num_envs)
        self._pool.async_reset()
        return self._obs(self._pool._recv())

    def step(self, action: Tensor) -> Step:
        """Act in every environment: float32 [N, A] or int64 [N]."""
        if self._pool is None:
            self._check_open()
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.wrong_actions(self.id, action, self._action_shape)
        actions = self._action(action).astype(self._action_dtype)
        self._pool._send([actions if mine else self._env_ids for mine in self._sent])
        state = self._pool._recv()
        acted = state[self._elapsed] != 0
        reward, truncated = state[self._reward], state[self._trunc]
        reward *= acted  # Some families (dm_control) repeat the last reward on the row that only resets.
        step = Step(
            obs=self._obs(state),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(state[self._done] & ~truncated),
            truncated=torch.from_numpy(truncated),
            mask=torch.from_numpy(acted),
            success=None if self._success is None else torch.from_numpy((state[self._success] != 0) & acted),
        )
        return step if self.device.type == "cpu" else _to(step, self.device)

    def reset_where(self, where: Tensor) -> Obs:
        """Begin a new episode where bool [N]; rows of the other environments hold nothing."""
        env_ids = where.nonzero().flatten()
        self._pool._reset(env_ids.cpu().numpy().astype(np.int32))
        rows = self._obs(self._pool._recv())  # of these environments only, in their order

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros((self.num_envs, *x.shape[1:])).index_copy_(0, env_ids, x)

        return {name: spread(x) for name, x in rows.items()} if isinstance(rows, dict) else spread(rows)

    def restart(self, seeds: list[int]) -> None:
        """Begin again as if newly made with these seeds; ``reset`` must follow (and builds the simulators again)."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._pool = None
        self._seeds = list(seeds)

    def state(self) -> None:
        """None: EnvPool cannot save a simulator's state."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Always raises EnvError, see ``state``."""
        raise EnvError(f"env.id={self.id}: EnvPool cannot load a simulator's state; use restart(seeds) instead")

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0. MuJoCo tasks without a GPU: 5 to 30 pictures a second."""
        self._check_open()
        if not self._render:
            raise EnvError(f"env.id={self.id}: made without pictures; make it with render=True")
        if self._pool is None:
            raise EnvError(f"env.id={self.id}: render() before reset(); call reset() first")
        try:
            return torch.from_numpy(self._pool.render()[0].copy())
        except RuntimeError as error:
            raise EnvError(f"env.id={self.id}: EnvPool has no picture of it ({error}); use render=False") from error

    def close(self) -> None:
        """Free the simulators and their threads; may be called twice."""
        self._pool = None
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")

    def _spec(self) -> Any:
        """EnvPool's description of the task: nothing is simulated yet, so a wrong argument costs nothing."""
        try:
            return self._envpool.make_spec(self.id, num_envs=self.num_envs, seed=self._seeds, **self._arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
            cause = str(error).splitlines()[0]
            if "unexpected keyword argument" in cause:
                wrong = cause.split("'")[-2]
                known = self._envpool.make_spec(self.id).config._asdict()
                near = difflib.get_close_matches(wrong, known, n=3, cutoff=0.4)
                raise EnvError(
                    f"env.id={self.id}: EnvPool has no option {wrong!r}"
                    + (f"; nearest: {', '.join(near)}" * bool(near))
                ) from error
            raise EnvError(f"env.id={self.id}: EnvPool refuses it with {self._arguments}: {cause}") from error

    def _wire(self, spec: Any, leaves: dict[str, spaces.Leaf], success_key: str | None) -> None:
        """Where in EnvPool's flat list of arrays everything is.

        ``pool.step`` wraps ``_send`` and ``_recv`` in dictionaries; after a simulator has emptied the caches that costs
        100 us a step, 4 % of 64 HalfCheetahs. ``envs/adapters/test_adapters.py`` compares both bit for bit.
        """
        at = {key: i for i, key in enumerate(spec.state_array_spec)}
        self._elapsed, self._reward, self._done, self._trunc = (
            at[key] for key in ("elapsed_step", "reward", "done", "trunc")
        )
        arrays = {key.replace(":", "/").replace(".", "/"): i for key, i in at.items() if key.startswith("obs")}
        if "" in leaves:
            (i,), leaf = arrays.values(), leaves[""]
            self._obs: Callable[[Any], Obs] = lambda state: leaf(state[i])
        else:
            places = [(name, arrays[f"obs/{name}"], leaf) for name, leaf in leaves.items()]
            self._obs = lambda state: {name: leaf(state[i]) for name, i, leaf in places}

        sent = spec.action_array_spec
        self._sent = [key not in ("env_id", "players.env_id") for key in sent]
        self._action_dtype = sent[next(key for key, mine in zip(sent, self._sent, strict=True) if mine)].dtype
        self._env_ids = np.arange(self.num_envs, dtype=np.int32)

        info = {key.removeprefix("info:"): i for key, i in at.items() if key.startswith("info:")}
        if success_key is not None and success_key not in info:
            known = ", ".join(sorted(info))
            raise EnvError(f"env.id={self.id}: success_key={success_key!r} is not in its info; it has {known}")
        name = success_key or next((key for key in ("success", "is_success") if key in info), None)
        self._success = None if name is None else info[name]

    def _clock(self, family: str, limit: int, asked: int | None) -> int | None:
        """Steps after which EnvPool truncates, or None; raises EnvError where it would ignore what was asked for."""
        if asked is None:
            return limit if limit < _NO_LIMIT else None
        own = self._envpool.make_spec(self.id).config.max_episode_steps
        if family in _OWN_CLOCK or own >= _NO_LIMIT:
            clock = f"its clock is fixed at {own} steps" if own < _NO_LIMIT else "it has no clock"
            raise EnvError(
                f"env.id={self.id}: max_episode_steps={asked} has no effect in EnvPool ({clock}); leave it out"
            )
        return limit

    def _make(self, num_envs: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # As above: EnvPool asks for the space once and keeps it.
            pool = self._envpool.make_gymnasium(
                self.id, num_envs=num_envs, seed=self._seeds[:num_envs], **self._arguments
            )
            _ = pool.observation_space
        return pool

    def _check_memory(self) -> None:
        """Raise EnvError if the simulators do not fit into free memory, warn if they take more than 2 GB.

        One environment's share is measured on three of them (0.1 to 1.5 s).
        """
        if not Path("/proc/self/statm").exists():
            return
        first = self._make(1)  # What all of them share is loaded with the first.
        first.reset()
        _return_freed_memory()  # where memory is what is resident, the next two would take it without growing that
        before = _allocated_gb()
        two = self._make(2)
        two.reset()
        each_gb = max((_allocated_gb() - before) / 2, 0.001)
        del first, two
        needed_gb, free_gb = each_gb * self.num_envs, free_memory_gb()
        if needed_gb > free_gb:
            raise EnvError(
                f"env.id={self.id}: {self.num_envs} environments need {needed_gb:.1f} GB ({each_gb * 1000:.0f} MB "
                f"each), {free_gb:.1f} GB are free; num_envs={int(free_gb / each_gb)} is the most that fits"
            )
        if needed_gb > 2:
            warnings.warn(
                f"env.id={self.id}: {self.num_envs} environments will take {needed_gb:.1f} GB of memory "
                f"({each_gb * 1000:.0f} MB each: EnvPool copies the robot's meshes); {free_gb:.1f} GB are free",
                stacklevel=4,
            )


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


class _Mallinfo2(ctypes.Structure):
    """What glibc knows about the memory it hands out, bytes but for the counts (man 3 mallinfo)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _allocated_gb() -> float:
    """Memory that this process has asked for and not freed; where the C library cannot say (glibc can since 2.33), what
    is resident: that also grows by what simulators free again while they are made.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return (info.uordblks + info.hblkhd) / 1e9


def _return_freed_memory() -> None:
    """To the machine, where the C library is one that can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_memory_gb() -> float:
    """What this process may still take: the machine's free memory, or what its container (cgroup v2) has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(int(text) - int(used.read_text()), 0))
    return free / 1e9
