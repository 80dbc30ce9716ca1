"""Simulators behind one protocol, ``embodied_ppo.core.types.VectorEnv``: one file per simulator."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import ModuleType
from typing import Any

import torch

from embodied_envs import engines, task_files, tasks
from embodied_envs.adapters import (
    envpool_env,
    gymnasium_env,
    libero_env,
    mjlab_env,
    realistic_env,
    spaces,
    torch_env,
)
from embodied_envs.adapters.actions import mapper
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.history_env import HistoryEnv
from embodied_envs.adapters.spaces import is_privileged
from embodied_envs.checks import check_env
from embodied_envs.observation_reader import ObservationReader
from embodied_envs.registration import own_name, register
from embodied_ppo.core.types import EnvError, VectorEnv

__all__ = ["SIMULATORS", "HistoryEnv", "ObservationReader", "check_env", "engines", "make"]
__all__ += ["benchmark_protocol", "is_privileged", "mapper", "nearest", "recorder"]
__all__ += ["spaces_without_simulator", "task_files"]

SIMULATORS = ("auto", "mujoco", "warp", "envpool", "gymnasium", "torch", "mjlab", "libero")
register()  # gym.make_vec("embodied/Tabletop-v0", num_envs=64), see gymnasium_api

FAMILIES = {"our tasks": ("mujoco", "warp"), "envpool": ("envpool",), "gymnasium": ("gymnasium",)}
"""Family of tasks -> simulators that run them."""


def recorder() -> ModuleType:
    """Return the module of Tabletop's expert and of the format of its demonstrations."""
    return importlib.import_module("embodied_envs.tasks.expert_recorder")


def benchmark_protocol() -> ModuleType:
    """Return the module of the protocol of tabletop-bench."""
    return importlib.import_module("embodied_envs.tabletop_bench")


def make(
    id: str,
    *,
    num_envs: int,
    seeds: list[int],
    simulator: str = "auto",
    num_threads: int | None = None,
    max_episode_steps: int | None = None,
    action_mapping: str = "rescale",
    success_key: str | None = None,
    obs_keys: Sequence[str] | None = None,
    action_chunk: int = 1,
    cameras: Sequence[str] = (),
    image_size: tuple[int, int] = (64, 64),
    randomize: bool = False,
    ranges: Mapping[str, Sequence[float]] | None = None,
    realism: Mapping[str, Any] | None = None,
    render: bool = False,
    render_size: tuple[int, int] = (240, 320),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> VectorEnv:
    """Create ``num_envs`` environments of task ``id`` that are stepped together.

    Args:
        id: Name of one of our tasks (tasks.OWN), of EnvPool's or of Gymnasium's;
            "package.module:Class" for your own Task, "package.module:Name-v0" for a task that this
            module registers with Gymnasium, "package.module:function" for simulator torch.
        num_envs: Number of environments, N.
        seeds: One seed per environment, each in [0, 2**31).
        simulator: "mujoco" (our engine on CPU threads), "warp" (our engine on a GPU), "envpool",
            "gymnasium", "torch" (a function that creates a batched environment of tensors), "mjlab"
            or "libero". "auto" selects the first one that has the id: our tasks (engine by
            ``device``), then EnvPool before Gymnasium.
        num_threads: Threads of EnvPool or of our engine; None: the cores that this process may use.
        max_episode_steps: Time limit in primitive steps; None: the task's default.
        action_mapping: "rescale", "clip" or "none" for continuous actions, see ``actions.mapper``.
        success_key: Entry of the info that means success; None: "success" or "is_success", if the
            task has one.
        obs_keys: Entries of a dictionary of observations to use. Our own tasks offer "state" and,
            if they define it, "privileged" (``Task.privileged``). None: all except that one, which
            is an error if one of them is privileged by its name (``spaces.PRIVILEGED``).
        action_chunk: Primitive steps of one action (``ChunkedActions``).
        cameras: Cameras of the model; observations are then {"state": .., camera: uint8 [3, H, W]}.
        image_size: (H, W) of the cameras' images.
        randomize: Randomise the domain (``domain_randomization.RANGES``) within the task's ranges.
        ranges: Ranges that override those of the task.
        realism: Delays, errors of sensors and limits of actions, by name
            (``config.schema.RealismConfig``); missing ones are off.
        render: Whether ``render()`` is available.
        render_size: (height, width) of its images in pixels.
        kwargs: Arguments of the task or of the simulator.
        device: Device of observations and actions.

    Returns:
        The environments, see ``VectorEnv``.

    Raises:
        EnvError: The id is unknown, an argument is invalid or a space is not supported.
    """
    if simulator not in SIMULATORS:
        raise EnvError(f"simulator={simulator!r} is unknown; choose one of {', '.join(SIMULATORS)}")
    for name, number in (
        ("num_envs", num_envs),
        ("num_threads", num_threads),
        ("max_episode_steps", max_episode_steps),
        ("action_chunk", action_chunk),
    ):
        if number is None:
            continue
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise EnvError(f"env.id={id}: {name}={number!r} must be a whole number")
        if number < 1:
            raise EnvError(f"env.id={id}: {name}={number} must be at least 1")
    for name, size in (("render_size", render_size), ("image_size", image_size)):
        if not _is_size(size):
            raise EnvError(f"env.id={id}: {name}={size!r} must be (height, width), at least 1 each")
    for name, names in (("cameras", cameras), ("obs_keys", obs_keys)):
        if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
            listed = [names] if isinstance(names, str) else ["state"]
            raise EnvError(f"env.id={id}: {name}={names!r} must be a list; write {name}={listed}")
    for name, mapping in (("realism", realism), ("ranges", ranges), ("kwargs", kwargs)):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise EnvError(f"env.id={id}: {name}={mapping!r} must be a dictionary, or None")
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise EnvError(
            f"env.id={id}: device={device!r} is unknown; use cpu, cuda or cuda:N"
        ) from error
    spaces.check_seeds(id, seeds, num_envs)
    if not isinstance(randomize, bool):
        raise EnvError(f"env.id={id}: randomize={randomize!r} must be True or False")
    if ranges and not randomize:
        raise EnvError(f"env.id={id}: ranges={dict(ranges)} have no effect without randomize=true")
    options = AdapterOptions(
        num_envs=num_envs,
        seeds=seeds,
        num_threads=num_threads,
        max_episode_steps=max_episode_steps,
        action_mapping=action_mapping,
        success_key=success_key,
        obs_keys=obs_keys,
        render=render,
        render_size=render_size,
        kwargs=kwargs,
        device=device,
    )
    env = _make_env(id, simulator, options, cameras, image_size, randomize, ranges)
    if realism:
        env = _with_realism(env, realism, seeds, action_mapping)
    if action_chunk == 1:
        return env
    # Lazy, because the module imports MuJoCo, which takes half a second.
    action_chunking = importlib.import_module("embodied_envs.adapters.action_chunking")
    return action_chunking.ChunkedActions(env, action_chunk)


def _is_size(size: Any) -> bool:
    """Return whether ``size`` is two whole numbers of at least 1."""
    if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != 2:
        return False
    return all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1 for n in size)


def _with_realism(
    env: VectorEnv, options: Mapping[str, Any], seeds: list[int], action_mapping: str
) -> VectorEnv:
    """Return the simulator with the options of section env.realism, unchanged if they are off."""
    try:
        checked = realistic_env.read(options, env)
        if checked.push_velocity is not None:  # then it has the method
            simulator: Any = env
            simulator.use_pushes(checked.push_velocity, checked.push_interval_s)
    except EnvError:
        env.close()
        raise
    if checked.is_off:
        return env
    return realistic_env.RealisticEnv(env, checked, seeds=seeds, action_mapping=action_mapping)


def spaces_without_simulator(
    id: str,
    *,
    simulator: str = "auto",
    obs_keys: Sequence[str] | None = None,
    cameras: Sequence[str] = (),
    image_size: tuple[int, int] = (64, 64),
    action_chunk: int = 1,
    max_episode_steps: int | None = None,
) -> dict[str, Any] | None:
    """Return spaces and sentences of a task that are known without its packages.

    The arguments are those of ``make``.

    Returns:
        A dictionary as ``embodied_ppo.placement.remote_envs.describe_env`` returns it; None: the
        simulator has to be built.
    """
    if simulator not in ("auto", "libero") or not libero_env.has_task(id):
        return None
    return libero_env.describe(
        id,
        obs_keys=obs_keys,
        cameras=cameras,
        image_size=image_size,
        action_chunk=action_chunk,
        max_episode_steps=max_episode_steps,
    )


def _make_env(
    id: str,
    simulator: str,
    options: AdapterOptions,
    cameras: Sequence[str],
    image_size: tuple[int, int],
    randomize: bool,
    ranges: Mapping[str, Sequence[float]] | None,
) -> VectorEnv:
    """Create the environments with the first simulator that has the task."""
    if (name := own_name(id)) is not None:
        raise EnvError(
            f"env.id={id} is the name of a task of ours at Gymnasium; write env.id={name}"
        )
    if simulator in ("auto", "mujoco", "warp") and tasks.find(id) is not None:
        if options.success_key is not None:
            raise EnvError(
                f"env.id={id}: success_key={options.success_key!r} is for EnvPool and Gymnasium;"
                " leave it out, because the task defines success"
            )
        engine = simulator
        if simulator == "auto":
            engine = "warp" if torch.device(options.device).type == "cuda" else "mujoco"
        # Lazy, because the module imports MuJoCo, which takes half a second.
        return importlib.import_module("embodied_envs.physics.make").make(
            id,
            options,
            engine=engine,
            cameras=tuple(cameras),
            image_size=image_size,
            randomize=randomize,
            ranges=ranges,
        )
    is_libero = simulator == "libero" or (simulator == "auto" and libero_env.has_task(id))
    for name, value in (("cameras", () if is_libero else cameras), ("randomize", randomize)):
        if value:
            raise EnvError(
                f"env.id={id}: {name}={value} is for our own tasks: {', '.join(tasks.OWN)}"
            )
    if is_libero:
        return libero_env.LiberoEnv(id, options, cameras=tuple(cameras), image_size=image_size)
    if simulator == "mjlab" or (simulator == "auto" and mjlab_env.has_task(id)):
        return mjlab_env.MjlabEnv(id, options)
    if simulator in ("auto", "envpool") and ":" not in id and envpool_env.has_task(id):
        return envpool_env.EnvPoolEnv(id, options)
    if simulator in ("auto", "gymnasium") and gymnasium_env.has_task(id):
        return gymnasium_env.GymnasiumEnv(id, options)
    if simulator == "torch" or (simulator == "auto" and torch_env.factory(id) is not None):
        return torch_env.TorchVectorEnv(id, options)
    similar = {
        family: ids
        for family, ids in nearest(id).items()
        if simulator == "auto" or simulator in FAMILIES[family]
    }
    hints = [f"nearest in {family}: {', '.join(ids) or 'none'}" for family, ids in similar.items()]
    searched = " and ".join(similar) or f"simulator {simulator}"
    missing = ""
    if simulator in ("auto", "envpool") and not envpool_env.is_installed():
        missing = "; EnvPool is not installed: pip install envpool"
    raise EnvError(
        f"env.id={id} is unknown to {'; '.join([searched, *hints])}{tasks.hint(id)}{missing}"
    )


def nearest(id: str, n: int = 3) -> dict[str, list[str]]:
    """Return for each family of tasks the ``n`` ids most similar to ``id``, best first."""
    families = zip(FAMILIES, (tasks.OWN, envpool_env.ids(), gymnasium_env.ids()), strict=True)
    return {name: difflib.get_close_matches(id, ids, n=n, cutoff=0.6) for name, ids in families}
