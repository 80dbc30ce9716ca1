"""Which simulator runs a task, and the ranges of its domain randomisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from embodied_envs import tasks
from embodied_envs.adapters import envpool_env, gymnasium_env, libero_env, mjlab_env
from embodied_envs.base.errors import check_names


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

    check_names("env.ranges", names, RANGES)
    return {name: (1.0, 1.0) if RANGES[name].operation == "scale" else (0.0, 0.0) for name in names}
