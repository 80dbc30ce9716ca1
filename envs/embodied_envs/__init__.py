"""Simulators behind one protocol, ``embodied_ppo.types.VectorEnv``: one file per simulator."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from embodied_envs import envpool_env, gymnasium_env, spaces
from embodied_envs.checks import check_env
from embodied_ppo.types import EnvError, VectorEnv

__all__ = ["SIMULATORS", "check_env", "make", "nearest"]

SIMULATORS = ("auto", "envpool", "gymnasium")


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
    render: bool = False,
    render_size: tuple[int, int] = (240, 320),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> VectorEnv:
    """``num_envs`` environments of task ``id``, stepped together.

    id                 EnvPool's or Gymnasium's name of the task; "package.module:Name-v0" imports the module first
    seeds              one per environment, each in [0, 2**31)
    simulator          "auto" takes EnvPool if it has the id, else Gymnasium
    num_threads        EnvPool's threads; None: the cores this process may use
    max_episode_steps  the clock, in primitive steps; None: the task's own
    action_mapping     "rescale" | "clip" | "none", see ``actions.mapper``; for continuous actions
    success_key        the info entry that says success; None: "success", else "is_success", where the task has one
    render             make ``render()`` work, at ``render_size`` = (height, width) pixels
    kwargs             handed to the simulator's own make
    device             where observations arrive and actions are expected

    Raises EnvError if the id is unknown, an argument is refused or the spaces are not supported.
    """
    if simulator not in SIMULATORS:
        raise EnvError(f"simulator={simulator!r} is unknown; choose one of {', '.join(SIMULATORS)}")
    for name, number in (
        ("num_envs", num_envs),
        ("num_threads", num_threads),
        ("max_episode_steps", max_episode_steps),
    ):
        if number is not None and number < 1:
            raise EnvError(f"env.id={id}: {name}={number} must be at least 1")
    if min(render_size) < 1:
        raise EnvError(f"env.id={id}: render_size={render_size} must be (height, width), at least 1 each")
    spaces.check_seeds(id, seeds, num_envs)
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "seeds": seeds,
        "num_threads": num_threads,
        "max_episode_steps": max_episode_steps,
        "action_mapping": action_mapping,
        "success_key": success_key,
        "render": render,
        "render_size": render_size,
        "kwargs": kwargs,
        "device": device,
    }
    if simulator in ("auto", "envpool") and ":" not in id and envpool_env.knows(id):
        return envpool_env.EnvPoolEnv(id, **options)
    if simulator in ("auto", "gymnasium") and gymnasium_env.knows(id):
        return gymnasium_env.GymnasiumEnv(id, **options)
    families = {name: near for name, near in nearest(id).items() if simulator in ("auto", name)}
    hints = "; ".join(f"nearest in {name}: {', '.join(near) or 'none'}" for name, near in families.items())
    raise EnvError(f"env.id={id} is unknown to {' and '.join(families)}; {hints}")


def nearest(id: str, n: int = 3) -> dict[str, list[str]]:
    """Simulator -> its ``n`` task ids most like ``id``, best first."""
    known = {"envpool": envpool_env.ids(), "gymnasium": gymnasium_env.ids()}
    return {name: difflib.get_close_matches(id, ids, n=n, cutoff=0.4) for name, ids in known.items()}
