"""Which simulator runs a task, and which others run the same task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from embodied_envs import tasks
from embodied_envs.adapters import envpool_env, gymnasium_env, libero_env, mjlab_env
from embodied_ppo.core.types import EnvError

OWN = ("mujoco", "warp")
"""Simulators of the tasks of this package."""

EQUAL: dict[str, tuple[str, ...]] = {
    "HalfCheetah": ("HalfCheetah-v5", "HalfCheetah-v4", "HalfCheetah-v3"),
    "Hopper": ("Hopper-v5", "Hopper-v4"),
    "Walker2d": ("Walker2d-v5",),
    "Ant": ("Ant-v5",),
    "Humanoid": ("Humanoid-v5",),
}
"""Task of this package -> ids of EnvPool and Gymnasium with the same model, observation, reward and
end. In Hopper-v4 a fall has a reward that is 1 higher."""


def simulator_of(id: str, simulator: str, device: torch.device | str) -> str:
    """Return the simulator that ``embodied_envs.make`` selects for ``simulator="auto"``.

    Raises:
        EnvError: A module that ``id`` names cannot be imported.
    """
    if simulator != "auto":
        return simulator
    if tasks.find(id) is not None:
        return "warp" if torch.device(device).type == "cuda" else "mujoco"
    candidates = (
        ("libero", libero_env.has_task),
        ("mjlab", mjlab_env.has_task),
        ("envpool", lambda id: ":" not in id and envpool_env.has_task(id)),
        ("gymnasium", gymnasium_env.has_task),
    )
    return next((name for name, has_task in candidates if has_task(id)), "torch")


def same_task(id: str, simulator: str) -> dict[str, str]:
    """Return the other simulators that run the task: name -> id there.

    Args:
        id: The task's id in ``simulator``.
        simulator: A simulator, not "auto".
    """
    own = id if simulator in OWN else next((k for k, ids in EQUAL.items() if id in ids), None)
    others = dict.fromkeys(OWN, own) if own is not None else {}
    gym_id = id if simulator not in OWN else EQUAL.get(id, (None,))[0]
    if gym_id is not None and simulator in (*OWN, "envpool", "gymnasium"):
        is_pool = ":" not in gym_id and envpool_env.has_task(gym_id)
        others |= {"envpool": gym_id} if is_pool else {}
        others |= {"gymnasium": gym_id} if gymnasium_env.has_task(gym_id) else {}
    return {name: x for name, x in others.items() if name != simulator and x is not None}


def task_ranges(id: str, kwargs: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return the ranges of a task's own domain randomisation; {} for other simulators.

    Raises:
        EnvError: The task does not take ``kwargs``.
    """
    task_class = tasks.find(id)
    if task_class is None:
        return {}
    options = {k: v for k, v in kwargs.items() if k not in ("nconmax", "njmax")}
    return dict(tasks.make(id, task_class, options).ranges)


def neutral_ranges(names: Sequence[str]) -> dict[str, Sequence[float]]:
    """Return ranges of domain randomisation that change nothing.

    Raises:
        EnvError: A name is unknown.
    """
    # Lazy, because the module imports MuJoCo, which takes half a second.
    from embodied_envs.physics.domain_randomization import RANGES

    for name in names:
        if name not in RANGES:
            raise EnvError(f"env.ranges: {name!r} is unknown")
    return {name: (1.0, 1.0) if RANGES[name].operation == "scale" else (0.0, 0.0) for name in names}
