"""Simulators behind one protocol, ``embodied_ppo.core.types.VectorEnv``: one file per simulator."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from embodied_envs import task_files, tasks
from embodied_envs.adapters import envpool_env, gymnasium_env, libero_env, mjlab_env, spaces, torch_env
from embodied_envs.checks import check_env
from embodied_ppo.core.types import EnvError, VectorEnv

__all__ = ["SIMULATORS", "check_env", "make", "nearest", "recorder", "task_files"]

SIMULATORS = ("auto", "mujoco", "warp", "envpool", "gymnasium", "torch", "mjlab", "libero")
FAMILIES = {"our tasks": ("mujoco", "warp"), "envpool": ("envpool",), "gymnasium": ("gymnasium",)}
"""Who has task ids -> the simulators that step them."""


def recorder() -> ModuleType:
    """``embodied_envs.tasks.expert_recorder``: Tabletop's expert, and what its demonstrations hold."""
    return importlib.import_module("embodied_envs.tasks.expert_recorder")


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
    render: bool = False,
    render_size: tuple[int, int] = (240, 320),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> VectorEnv:
    """``num_envs`` environments of task ``id``, stepped together.

    id                 a task of ours (tasks.OWN), EnvPool's or Gymnasium's name of one; "package.module:Class" for a
                       Task of your own, "package.module:Name-v0" for what that module registers with Gymnasium,
                       "package.module:function" for simulator torch
    seeds              one per environment, each in [0, 2**31)
    simulator          "mujoco": our engine on CPU threads; "warp": ours for a GPU; "envpool"; "gymnasium"; "torch": a
                       function that makes a batched environment of tensors; "mjlab"; "libero"; "auto": who knows the
                       id, ours first (by ``device``), EnvPool before Gymnasium
    num_threads        threads of EnvPool or of our engine; None: the cores this process may use
    max_episode_steps  the clock, in primitive steps; None: the task's own
    action_mapping     "rescale" | "clip" | "none", see ``actions.mapper``; for continuous actions
    success_key        the info entry that says success; None: "success", else "is_success", where the task has one
    obs_keys           names of the observations to use, where they are a dictionary; None: all, which is refused where
                       a name says that it is privileged (``spaces.PRIVILEGED``)
    action_chunk       primitive steps of one action (``ChunkedActions``)
    cameras            of the model, for the policy to see: observations are {"state": .., camera: uint8 [3, H, W]}
    image_size         (H, W) of what they show
    randomize          domain randomisation (``randomization.RANGES``) by the task's ranges, and ``ranges`` over them
    render             make ``render()`` work, at ``render_size`` = (height, width) pixels
    kwargs             handed to the task's, or the simulator's own, make
    device             where observations arrive and actions are expected

    Raises EnvError if the id is unknown, an argument is refused or the spaces are not supported.
    """
    if simulator not in SIMULATORS:
        raise EnvError(f"simulator={simulator!r} is unknown; choose one of {', '.join(SIMULATORS)}")
    for name, number in (
        ("num_envs", num_envs),
        ("num_threads", num_threads),
        ("max_episode_steps", max_episode_steps),
        ("action_chunk", action_chunk),
    ):
        if number is not None and number < 1:
            raise EnvError(f"env.id={id}: {name}={number} must be at least 1")
    if min(render_size) < 1:
        raise EnvError(f"env.id={id}: render_size={render_size} must be (height, width), at least 1 each")
    spaces.check_seeds(id, seeds, num_envs)
    if ranges and not randomize:
        raise EnvError(f"env.id={id}: ranges={dict(ranges)} have no effect without randomize=true")
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "seeds": seeds,
        "num_threads": num_threads,
        "max_episode_steps": max_episode_steps,
        "action_mapping": action_mapping,
        "obs_keys": obs_keys,
        "render": render,
        "render_size": render_size,
        "kwargs": kwargs,
        "device": device,
    }
    env = _made(id, simulator, options, success_key, cameras, image_size, randomize, ranges)
    if action_chunk == 1:
        return env
    return importlib.import_module("embodied_envs.adapters.action_chunking").ChunkedActions(env, action_chunk)


def _made(
    id: str,
    simulator: str,
    options: dict[str, Any],
    success_key: str | None,
    cameras: Sequence[str],
    image_size: tuple[int, int],
    randomize: bool,
    ranges: Mapping[str, Sequence[float]] | None,
) -> VectorEnv:
    """By the first family that knows the id."""
    if simulator in ("auto", "mujoco", "warp") and tasks.find(id) is not None:
        if success_key is not None:
            raise EnvError(
                f"env.id={id}: success_key={success_key!r} is for EnvPool and Gymnasium; the task itself says"
            )
        of_device = "warp" if torch.device(options["device"]).type == "cuda" else "mujoco"
        options |= {"cameras": tuple(cameras), "image_size": image_size, "randomize": randomize, "ranges": ranges}
        mujoco_make = importlib.import_module("embodied_envs.physics.make")  # MuJoCo takes half a second to load
        return mujoco_make.make(id, engine=of_device if simulator == "auto" else simulator, **options)
    of_libero = simulator == "libero" or (simulator == "auto" and libero_env.knows(id))
    for name, value in (("cameras", () if of_libero else cameras), ("randomize", randomize)):
        if value:
            raise EnvError(f"env.id={id}: {name}={value} is for tasks of ours: {', '.join(tasks.OWN)}")
    options["success_key"] = success_key
    if of_libero:
        return libero_env.LiberoEnv(id, cameras=tuple(cameras), image_size=image_size, **options)
    if simulator == "mjlab" or (simulator == "auto" and mjlab_env.knows(id)):
        return mjlab_env.MjlabEnv(id, **options)
    if simulator in ("auto", "envpool") and ":" not in id and envpool_env.knows(id):
        return envpool_env.EnvPoolEnv(id, **options)
    if simulator in ("auto", "gymnasium") and gymnasium_env.knows(id):
        return gymnasium_env.GymnasiumEnv(id, **options)
    if simulator == "torch" or (simulator == "auto" and torch_env.factory(id) is not None):
        return torch_env.TorchVectorEnv(id, **options)
    families = {name: near for name, near in nearest(id).items() if simulator == "auto" or simulator in FAMILIES[name]}
    hints = "; ".join(f"nearest in {name}: {', '.join(near) or 'none'}" for name, near in families.items())
    raise EnvError(f"env.id={id} is unknown to {' and '.join(families)}; {hints}{tasks.hint(id)}")


def nearest(id: str, n: int = 3) -> dict[str, list[str]]:
    """Family of tasks -> its ``n`` ids most like ``id``, best first."""
    known = {"our tasks": list(tasks.OWN), "envpool": envpool_env.ids(), "gymnasium": gymnasium_env.ids()}
    return {name: difflib.get_close_matches(id, ids, n=n, cutoff=0.6) for name, ids in known.items()}
