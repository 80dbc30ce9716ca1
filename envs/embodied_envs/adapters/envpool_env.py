"""EnvPool's C++ simulators (Atari, MuJoCo, MetaWorld and others) as a ``VectorEnv``."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters import envpool_scenes, spaces
from embodied_envs.adapters.base import SUCCESS_KEYS, Adapter, AdapterOptions, check_kwargs
from embodied_envs.base import tree, watchdog
from embodied_envs.base.errors import choose
from embodied_envs.base.host_memory import free_memory
from embodied_envs.types import NO_LIMIT, Composite, Obs, Step

# Arguments of envpool.make that have their own option, or that the adapter depends on.
_RESERVED = (
    *("num_envs", "batch_size", "seed", "env_seed", "num_threads", "max_episode_steps"),
    "render_mode",
)

# Families whose environments each copy the robot's meshes: 8 to 170 MB (others: 1 MB).
_LARGE_MODELS = ("playground", "myosuite", "dmc", "robotics", "metaworld")

# Families that ignore max_episode_steps, as tasks without a limit do (CliffWalking, 2048).
_FIXED_TIME_LIMIT = ("envpool.highway", "envpool.jumanji")

# Number of environments up to which free memory is not checked: they take at most 3 GB.
_SMALL_POOL = 16

# Why this process cannot render MuJoCo images; "" if it can, None before EnvPool is loaded.
_egl_error: str | None = None


def load() -> Any:
    """Return the ``envpool`` module, which the first call imports (1 to 3 s).

    EnvPool's MuJoCo renderer needs the symbols of libEGL to be global *before* EnvPool is loaded.
    Without them it ends the process at the first image. Therefore libEGL is loaded here, also where
    no image is rendered.

    Raises:
        ImportError: EnvPool is not installed.
    """
    global _egl_error
    if _egl_error is None:
        if "envpool" in sys.modules:
            _egl_error = (
                "envpool was imported before embodied_envs loaded it; call embodied_envs.make"
                " before importing envpool"
            )
        else:
            try:
                ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
                _egl_error = ""
            except OSError:
                _egl_error = "libEGL.so.1 is missing; apt-get install libegl1 libegl-mesa0"
    with _without_jumanji():
        import envpool

    return envpool


@contextmanager
def _without_jumanji() -> Iterator[None]:
    """Import EnvPool without its package of Jumanji tasks, which imports matplotlib.

    That takes as long as all the rest. The tasks are registered nevertheless, and EnvPool imports
    the package when one of them is made.
    """
    name = "envpool.jumanji"
    spec = find_spec("envpool")
    if "envpool" in sys.modules or spec is None or spec.submodule_search_locations is None:
        yield
        return
    package = ModuleType(name)
    package.__path__ = [str(Path(folder) / "jumanji") for folder in spec.submodule_search_locations]
    sys.modules[name] = package
    try:
        yield
    finally:
        del sys.modules[name]


def ids() -> list[str]:
    """Return all task ids of EnvPool, aliases included; empty if EnvPool is not installed."""
    try:
        return load().list_all_envs()
    except ImportError:
        return []


def is_installed() -> bool:
    """Return whether EnvPool is installed, without importing it."""
    return find_spec("envpool") is not None


def has_task(id: str) -> bool:
    """Return whether EnvPool is installed and has this task."""
    return id in ids()


class EnvPoolEnv(Adapter):
    """``num_envs`` copies of an EnvPool task, stepped by EnvPool's threads.

    Implements ``VectorEnv``. EnvPool resets an ended episode on the step *after* it. The row that
    ends carries the true final observation (so ``final_obs`` is None), and the next row is a dummy
    (mask False, reward 0, action ignored). The first ``reset`` builds the simulators, so
    ``restart`` itself is free. If the task and the time limit end an episode in the same step,
    EnvPool reports it as truncated.
    """

    returns_new_arrays = True

    def __init__(self, id: str, options: AdapterOptions) -> None:
        super().__init__(id, options)
        self._envpool = load()
        self._pool: Any = None
        self._arguments = self._make_arguments(options)
        spec = self._spec()
        config = spec.config._asdict()
        if (players := config["max_num_players"]) != 1:
            raise self.error(f"choose a task with a single player; it has {players}")
        family: str = self._envpool.registration.registry.specs[id][0]
        self.step_s = envpool_scenes.step_s(id, family, config)
        self._scenes: Any = None
        # The first camera of dm_control's robots follows them.
        self._camera = 0 if family == "envpool.mujoco.dmc" else None
        has_pixels = bool(self._arguments.get("from_pixels"))  # the policy sees EnvPool's models
        if options.render and family in envpool_scenes.FAMILIES and not has_pixels:
            self._scenes = envpool_scenes.write(config["base_path"], family)
            self._arguments["base_path"] = self._scenes.name
        # Others are drawn in their own aspect ratio, then resized.
        if options.render and not family.startswith("envpool.mujoco"):
            del self._arguments["render_height"], self._arguments["render_width"]
        limit, requested = config["max_episode_steps"], options.max_episode_steps
        self.max_episode_steps = self._time_limit(family, limit, requested)
        with warnings.catch_warnings(action="ignore"):
            # Gymnasium warns that EnvPool's bounds are rounded to float32.
            action_space = spec.gymnasium_action_space
            self._set_spaces(spec.gymnasium_observation_space, action_space, options)
        if isinstance(self.action_spec, Composite) or spaces.is_nested(action_space):
            raise self.error("several actions at once are not supported with EnvPool")
        self._index_arrays(spec)

        if _egl_error and family.startswith("envpool.mujoco") and (options.render or has_pixels):
            raise self.error(f"no images can be rendered; {_egl_error}")
        if family.removeprefix("envpool.mujoco.") in _LARGE_MODELS and self.num_envs > _SMALL_POOL:
            self._check_memory()

    def reset(self) -> Obs:
        """Start new episodes in all environments. The first call builds the simulators."""
        self._check_open()
        if self._pool is None:
            self._pool = self._make(self.num_envs)
            self._seeds_are_new = False
        self._pool.async_reset()
        return self._read_obs(self._pool._recv())

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A] or int64 [N]."""
        self.send(action)
        return self._receive()

    is_asynchronous = True

    def send(self, action: Tensor) -> None:
        """Start a step in the threads of the simulator; ``receive`` must follow."""
        self._check_step(action)
        actions = self.to_simulator(action).detach().cpu().numpy().astype(self._action_dtype)
        self._pool._send([actions if is_action else self._env_ids for is_action in self._is_action])

    def receive(self) -> Step:
        """Wait for the step that ``send`` has started."""
        with watchdog.stepping:
            return self._receive()

    def _receive(self) -> Step:
        state = self._pool._recv()
        acted = state[self._elapsed] != 0  # [N], False in the dummy rows
        reward, truncated = state[self._reward], state[self._trunc]
        # Some families (dm_control) repeat the last reward on the dummy row.
        reward[~acted] = 0  # a product would keep NaN
        success = None
        if self._success_index is not None:
            success = torch.from_numpy((state[self._success_index] != 0) & acted)
        step = Step(
            obs=self._read_obs(state),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(state[self._done] & ~truncated),
            truncated=torch.from_numpy(truncated),
            mask=torch.from_numpy(acted),
            success=success,
            info={name: torch.from_numpy(state[i]) for name, i in self._numbers} or None,
        )
        if self.device.type == "cpu":
            return step
        return tree.map(lambda x: x.to(self.device, non_blocking=True), step)

    def reset_where(self, where: Tensor) -> Obs:
        """Start new episodes where bool [N] is True; the other rows of the result are zeros."""
        env_ids = where.nonzero().flatten()
        if not len(env_ids):
            return self._zeros()
        self._pool._reset(env_ids.cpu().numpy().astype(np.int32))
        rows = self._read_obs(self._pool._recv())  # only these environments, in this order
        return tree.map(
            lambda x: x.new_zeros((self.num_envs, *x.shape[1:])).index_copy_(0, env_ids, x), rows
        )

    def restart(self, seeds: list[int]) -> None:
        """Free the simulators; the ``reset`` that must follow builds them with these seeds."""
        super().restart(seeds)
        self._pool = None

    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3]."""
        self._check_render()
        if self._pool is None:
            raise self.error("render() before reset(); call reset() first")
        try:
            return self._to_image(self._pool.render(camera_id=self._camera))
        except RuntimeError as error:
            raise self.error(f"EnvPool cannot render it ({error}); use render=False") from error

    def close(self) -> None:
        """Free the simulators and their threads. A second call has no effect."""
        self._pool = None
        self._closed = True

    def _make_arguments(self, options: AdapterOptions) -> dict[str, Any]:
        """Return the arguments of envpool.make besides the number of environments and seeds."""
        arguments = dict(options.kwargs or {})
        check_kwargs(self.id, arguments, _RESERVED)
        cores = len(os.sched_getaffinity(0))  # EnvPool's default is all cores of the machine
        arguments["num_threads"] = options.num_threads or min(self.num_envs, cores)
        if options.max_episode_steps is not None:
            arguments["max_episode_steps"] = options.max_episode_steps
        if self._render_size is not None:
            arguments["render_height"], arguments["render_width"] = self._render_size
            arguments["render_mode"] = "rgb_array"
        return arguments

    def _spec(self) -> Any:
        """Return EnvPool's description of the task, which validates the arguments."""
        try:
            return self._envpool.make_spec(
                self.id, num_envs=self.num_envs, seed=self._seeds, **self._arguments
            )
        except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as error:
            cause = str(error).splitlines()[0]
            message = f"EnvPool rejects {self._arguments}: {cause}"
            if "unexpected keyword argument" in cause:
                option = cause.split("'")[-2]
                names = list(self._envpool.make_spec(self.id).config._asdict())
                message = f"EnvPool has no option {option!r}; {choose(option, names, 'it has ')}"
            raise self.error(message) from error

    def _index_arrays(self, spec: Any) -> None:
        """Store the positions of observations, rewards and flags in EnvPool's flat list of arrays.

        ``pool.step`` wraps ``_send`` and ``_recv`` in dictionaries. With cold CPU caches after a
        simulator step this takes 100 us, 4 % of a step of 64 HalfCheetahs.
        ``tests/envs/adapters/test_adapters.py`` compares both paths bit for bit.
        """
        position = {key: i for i, key in enumerate(spec.state_array_spec)}
        self._elapsed, self._reward, self._done, self._trunc = (
            position[key] for key in ("elapsed_step", "reward", "done", "trunc")
        )
        names = {key.replace(":", "/").replace(".", "/"): i for key, i in position.items()}
        obs_position = {name: i for name, i in names.items() if name.startswith("obs")}
        if "" in self.leaves:
            (i,), leaf = obs_position.values(), self.leaves[""]
            self._read_obs: Callable[[Any], Obs] = lambda state: leaf(state[i])
        else:
            entries = [(name, obs_position[f"obs/{name}"], x) for name, x in self.leaves.items()]
            self._read_obs = lambda state: {name: leaf(state[i]) for name, i, leaf in entries}

        inputs = spec.action_array_spec
        self._is_action = [key not in ("env_id", "players.env_id") for key in inputs]
        self._action_dtype = inputs[next(itertools.compress(inputs, self._is_action))].dtype
        self._env_ids = np.arange(self.num_envs, dtype=np.int32)

        info = {x.removeprefix("info:"): i for x, i in position.items() if x.startswith("info:")}
        self._success_index = next((info[key] for key in SUCCESS_KEYS if key in info), None)
        is_number = {x: list(spec.state_array_spec[f"info:{x}"].shape) == [-1] for x in info}
        is_number["players.env_id"] = False
        self._numbers = [(name, i) for name, i in info.items() if is_number[name]]

    def _time_limit(self, family: str, limit: int, requested: int | None) -> int | None:
        """Return the time limit; raise EnvError if EnvPool would ignore the requested one."""
        if requested is None:
            return limit if limit < NO_LIMIT else None
        default = self._envpool.make_spec(self.id).config.max_episode_steps
        if family in _FIXED_TIME_LIMIT or default >= NO_LIMIT:
            fixed = f"fixed at {default} steps" if default < NO_LIMIT else "missing"
            raise self.error(f"remove max_episode_steps={requested}: its time limit is {fixed}")
        return limit

    def _make(self, num_envs: int) -> Any:
        """Build the simulators of ``num_envs`` environments."""
        # As in the constructor; the pool caches its space.
        with warnings.catch_warnings(action="ignore"):
            pool = self._envpool.make_gymnasium(
                self.id, num_envs=num_envs, seed=self._seeds[:num_envs], **self._arguments
            )
            _ = pool.observation_space
        return pool

    def _check_memory(self) -> None:
        """Raise EnvError if the simulators exceed the free memory.

        The memory of one environment is measured on three of them (0.1 to 1.5 s).
        """
        first = self._make(1)  # loads the data that all environments share
        first.reset()
        before_gb = _allocated_gb()
        pair = self._make(2)
        pair.reset()
        each_gb = max((_allocated_gb() - before_gb) / 2, 0.001)
        del first, pair
        needed_gb, free_gb = each_gb * self.num_envs, (free_memory() or math.inf) / 1e9
        if needed_gb > free_gb:
            raise self.error(
                f"num_envs={int(free_gb / each_gb)} is the most that fits: {self.num_envs} need"
                f" {needed_gb:.1f} GB ({each_gb * 1000:.0f} MB each), {free_gb:.1f} GB are free"
            )


class _Mallinfo2(ctypes.Structure):
    """Statistics of glibc's allocator in bytes, except for the counts (man 3 mallinfo)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _allocated_gb() -> float:
    """Return the memory this process has allocated and not freed; 0 without glibc 2.33."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0.0
    library.mallinfo2.restype = _Mallinfo2
    info = library.mallinfo2()
    return (info.uordblks + info.hblkhd) / 1e9
