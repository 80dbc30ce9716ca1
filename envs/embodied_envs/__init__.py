"""Simulators behind one protocol, ``embodied_ppo.types.VectorEnv``: one file per simulator."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from embodied_ppo.types import EnvError, VectorEnv

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
    if num_envs < 1:
        raise EnvError(f"num_envs={num_envs}: at least 1 environment is needed")
    check_seeds(id, seeds, num_envs)
    if max_episode_steps is not None and max_episode_steps < 1:
        raise EnvError(f"env.id={id}: max_episode_steps={max_episode_steps} must be at least 1")
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
    from embodied_envs import envpool_env

    if simulator in ("auto", "envpool") and ":" not in id and envpool_env.knows(id):
        return envpool_env.EnvPoolEnv(id, **options)
    raise EnvError(f"env.id={id} is unknown")


def check_seeds(id: str, seeds: list[int], num_envs: int) -> None:
    """Raise EnvError unless there is one seed in [0, 2**31) for each of ``num_envs`` environments."""
    if len(seeds) != num_envs:
        raise EnvError(f"env.id={id}: {len(seeds)} seeds for {num_envs} environments; give one each")
    if wrong := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise EnvError(f"env.id={id}: seed {wrong[0]} is outside [0, 2**31); EnvPool keeps seeds in 32 bits")
