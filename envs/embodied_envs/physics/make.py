"""A ``MujocoEnv`` from a task and options: compile the model, choose the engine, turn MuJoCo's errors into ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import mujoco
import torch

from embodied_envs import tasks
from embodied_envs.adapters.user_code import blamed
from embodied_envs.physics.cameras import Cameras
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.physics.engine import Physics
from embodied_envs.physics.mujoco_cpu import BatchPhysics
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import Task
from embodied_envs.tasks.task import Stage
from embodied_ppo.core.types import EnvError


def compiled(task: Task, id: str) -> mujoco.MjModel:
    """The task's model; raises EnvError with MuJoCo's reason (file, line, element) where it does not compile."""
    where = f"env.id={id}: {type(task).__name__}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*settotalmass")  # in files of Gymnasium's
            spec = task.spec()
            if isinstance(spec, mujoco.MjSpec):
                return spec.compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        said = str(error).strip()
        place = f" (files are looked for from {Path.cwd()})" if "opening file" in said or "No such file" in said else ""
        raise EnvError(f"env.id={id}: MuJoCo refuses its model: {said}{place}") from error
    raise EnvError(f"{where}.spec() is {type(spec).__name__}; it must be a mujoco.MjSpec")


def bind(task: Task, model: mujoco.MjModel, id: str, device: torch.device, dtype: torch.dtype) -> None:
    """``task.bind``; raises EnvError for a name that the model lacks."""
    with blamed(f"env.id={id}: {type(task).__name__}.bind: "):
        try:
            task.bind(model, device, dtype)
        except KeyError as error:
            raise EnvError(f"env.id={id}: {error.args[0] if error.args else error}") from error


def _check(task: Task, id: str) -> None:
    """The attributes of a task. Raises EnvError."""
    where, least = f"env.id={id}: {type(task).__name__}", {"decimation": 1, "max_episode_steps": 1}
    for name, low in (least | {"reset_noise": 0, "step_noise": 0}).items():
        value = getattr(task, name)
        if not isinstance(value, int) or value < low:
            raise EnvError(f"{where}.{name}={value!r} must be a whole number, at least {low}")
    if task.stage not in get_args(Stage):
        raise EnvError(f"{where}.stage={task.stage!r} is unknown; there are {', '.join(get_args(Stage))}")
    for name in ("fields", "before"):
        if isinstance(getattr(task, name), str):
            raise EnvError(f"{where}.{name}={getattr(task, name)!r} must be a tuple of names: ({name!r},)")


def whole(id: str, name: str, value: Any) -> int:
    """A number of at least 1, else EnvError."""
    if not isinstance(value, int) or value < 1:
        raise EnvError(f"env.id={id}: env.kwargs.{name}={value!r} must be a whole number, at least 1")
    return value


def make(
    id: str,
    *,
    engine: str,
    num_envs: int,
    seeds: list[int],
    num_threads: int | None = None,
    max_episode_steps: int | None = None,
    action_mapping: str = "rescale",
    obs_keys: Sequence[str] | None = None,
    cameras: tuple[str, ...] = (),
    image_size: tuple[int, int] = (64, 64),
    randomize: bool = False,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    render: bool = False,
    render_size: tuple[int, int] = (240, 320),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> MujocoEnv:
    """``engine``: "mujoco" (CPU threads) or "warp" (GPU worlds; also on "cpu"). See ``embodied_envs.make``."""
    kind = tasks.find(id)
    if kind is None:
        raise EnvError(f"env.id={id}: no task of ours; choose one of {', '.join(tasks.OWN)}, or package.module:Class")
    kwargs = dict(kwargs or {})
    wanted = {name: kwargs.pop(name, None) for name in ("nconmax", "njmax")}
    room: dict[str, Any] = {name: whole(id, name, value) for name, value in wanted.items() if value is not None}
    if room and engine != "warp":
        name = next(iter(room))
        raise EnvError(f"env.id={id}: env.kwargs.{name} is read by simulator=warp only; leave it out, or write null")
    task = tasks.make(id, kind, kwargs)
    _check(task, id)
    model = compiled(task, id)
    own = (dict(task.ranges) | dict(ranges or {})) if randomize else {}
    if randomize and not own:
        raise EnvError(
            f"env.id={id}: env.randomize=true, but the task has no ranges of its own; name some: "
            "env.ranges.mass=[0.8,1.2]"
        )
    size, film = image_size, render_size if render else None
    pictures = Cameras(model, cameras, size=size, picture_size=film)
    shared: dict[str, Any] = {"fields": task.fields, "stage": task.stage, "cameras": pictures}
    shared["randomization"] = Randomization(model, own)
    make_physics: Callable[..., Physics]
    if engine == "warp":
        try:
            from embodied_envs.physics.mujoco_warp import WarpPhysics  # warp takes two seconds to load
        except ImportError as error:
            cure = "pip install 'embodied-ppo[warp]', or use simulator=mujoco"
            raise EnvError(f"env.id={id}: simulation on a GPU needs mujoco_warp ({error}): {cure}") from error
        make_physics = partial(WarpPhysics, device=device, **shared, **room)
    else:
        make_physics = partial(BatchPhysics, num_threads=num_threads or len(os.sched_getaffinity(0)), **shared)
    try:
        physics = make_physics(model, num_envs)
    except EnvError as error:
        raise EnvError(f"env.id={id}: {error}") from error
    bind(task, model, id, physics.device, physics.dtype)
    return MujocoEnv(
        task,
        physics,
        id=id,
        seeds=seeds,
        device=device,
        max_episode_steps=max_episode_steps,
        action_mapping=action_mapping,
        obs_keys=None if obs_keys is None else (*obs_keys, *cameras),
    )
