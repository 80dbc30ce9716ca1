"""A ``MujocoEnv`` from a task and options: compile the model, choose the engine, turn MuJoCo's errors into ours."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import mujoco
import torch

from embodied_envs import tasks
from embodied_envs.cameras import Cameras
from embodied_envs.mujoco_batch import BatchPhysics
from embodied_envs.mujoco_env import MujocoEnv, Physics
from embodied_envs.randomization import Randomization
from embodied_envs.tasks import Task
from embodied_ppo.types import EnvError


def knows(id: str) -> bool:
    """Whether it is a task of ours, or a Task class of the user's."""
    return tasks.find(id) is not None


def compiled(task: Task, id: str) -> mujoco.MjModel:
    """The task's model; raises EnvError with MuJoCo's reason (file, line, element) where it does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*settotalmass")  # in files of Gymnasium's
            return task.spec().compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        raise EnvError(f"env.id={id}: MuJoCo refuses its model: {str(error).strip()}") from error


def bind(task: Task, model: mujoco.MjModel, id: str, device: torch.device, dtype: torch.dtype) -> None:
    """``task.bind``; raises EnvError for a name that the model lacks."""
    try:
        task.bind(model, device, dtype)
    except KeyError as error:
        raise EnvError(f"env.id={id}: {error.args[0] if error.args else error}") from error


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
    room: dict[str, Any] = {name: whole(id, name, kwargs.pop(name)) for name in ("nconmax", "njmax") if name in kwargs}
    task = tasks.make(id, kind, kwargs)
    model = compiled(task, id)
    own = (dict(task.ranges) | dict(ranges or {})) if randomize else {}
    size, film = image_size, render_size if render else None
    pictures = Cameras(model, cameras, size=size, picture_size=film)
    shared: dict[str, Any] = {"fields": task.fields, "stage": task.stage, "cameras": pictures}
    shared["randomization"] = Randomization(model, own)
    physics: Physics
    if engine == "warp":
        try:
            from embodied_envs.mujoco_warp import WarpPhysics  # warp takes two seconds to load
        except ImportError as error:
            cure = "pip install 'embodied-ppo[warp]', or use simulator=mujoco"
            raise EnvError(f"env.id={id}: simulation on a GPU needs mujoco_warp ({error}): {cure}") from error
        try:
            physics = WarpPhysics(model, num_envs, device=device, **shared, **room)
        except EnvError as error:
            raise EnvError(f"env.id={id}: {error}") from error
    else:
        physics = BatchPhysics(model, num_envs, num_threads or len(os.sched_getaffinity(0)), **shared)
    bind(task, model, id, physics.device, physics.dtype)
    return MujocoEnv(
        task,
        physics,
        id=id,
        seeds=seeds,
        device=device,
        max_episode_steps=max_episode_steps,
        action_mapping=action_mapping,
    )
