"""Create simulators by the name of their task: ``make``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

import torch

from embodied_envs import tasks
from embodied_envs.adapters import envpool_env, gymnasium_env, language_env, realistic_env
from embodied_envs.adapters.action_chunking import ChunkedActions
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.interfaces import make as make_by_interface
from embodied_envs.adapters.libero_env import LiberoEnv
from embodied_envs.adapters.mjlab_env import MjlabEnv
from embodied_envs.adapters.spaces import check_seeds
from embodied_envs.adapters.user_code import copy_arrays, named_object
from embodied_envs.base.errors import EnvError, check_choice, check_count
from embodied_envs.engines import simulator_of
from embodied_envs.registration import own_name
from embodied_envs.types import VectorEnv

SIMULATORS = ("auto", "mujoco", "warp", "envpool", "gymnasium", "torch", "mjlab", "libero")
SIMULATORS += ("remote", *language_env.SIMULATORS)


def make(
    id: str,
    *,
    num_envs: int,
    seeds: list[int],
    simulator: str = "auto",
    num_threads: int | None = None,
    max_episode_steps: int | None = None,
    action_mapping: str = "rescale",
    obs_keys: Sequence[str] | None = None,
    action_chunk: int = 1,
    cameras: Sequence[str] = (),
    image_size: tuple[int, int] = (64, 64),
    image_layout: str | None = None,
    randomize: bool = False,
    ranges: Mapping[str, Sequence[float]] | None = None,
    commands: Mapping[str, Sequence[float]] | None = None,
    rewards: Mapping[str, Mapping[str, float]] | None = None,
    realism: Mapping[str, Any] | None = None,
    render: bool = False,
    render_size: tuple[int, int] = (240, 320),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    rebuild: bool = True,
) -> VectorEnv:
    """Create ``num_envs`` environments of task ``id`` that are stepped together.

    Args:
        id: Name of one of our tasks (tasks.OWN), of EnvPool's or of Gymnasium's;
            "package.module:Class" for your own Task, "package.module:Name-v0" for a task that this
            module registers with Gymnasium, "package.module:Name" for a class or function that is
            not registered, see ``adapters.interfaces``.
        num_envs: Number of environments, N.
        seeds: One seed per environment, each in [0, 2**31).
        simulator: "mujoco" (our engine on CPU threads), "warp" (our engine on a GPU), "envpool",
            "gymnasium", "torch" (a function that creates a batched environment of tensors),
            "mjlab", "libero", "remote" (an ``env_server`` elsewhere) or one of
            ``adapters.language_env``. "auto" selects the first one that has the id: our tasks
            (engine by ``device``), then EnvPool before Gymnasium.
        num_threads: Threads of EnvPool or of our engine; None: the cores that this process may use.
        max_episode_steps: Time limit in primitive steps; None: the task's default.
        action_mapping: "rescale", "clip" or "none" for continuous actions, see ``actions.mapper``.
        obs_keys: Entries of a dictionary of observations to use. Our own tasks offer "state" and,
            if they define it, "privileged" (``Task.privileged``). None: all except that one, which
            is an error if one of them is privileged by its name (``spaces.PRIVILEGED``).
        action_chunk: Primitive steps of one action (``ChunkedActions``).
        cameras: Cameras of the model; observations are then {"state": .., camera: uint8 [3, H, W]}.
        image_size: (H, W) of the cameras' images.
        image_layout: "hwc" or "chw", where the channels of images are the last or the first
            dimension; None: decided by the shape (``images.decide``).
        randomize: Randomise the domain (``domain_randomization.RANGES``) within the task's ranges.
        ranges: Ranges that override those of the task.
        commands: Command -> range that replaces that of the task (``Task.commands``).
        rewards: Term of the reward -> weight and parameters that replace those of the task
            (``Task.rewards``).
        realism: Delays, errors of sensors and limits of actions, by name
            (``options.schema.RealismConfig``); missing ones are off.
        render: Whether ``render()`` is available.
        render_size: (height, width) of its images in pixels.
        kwargs: Arguments of the task or of the simulator.
        device: Device of observations and actions.
        rebuild: Whether new seeds (``restart``) build Gymnasium's environments again, which may
            keep state between episodes. False: ``reset(seed=)`` has to be enough, because a process
            can have only one simulator.

    Returns:
        The environments, see ``VectorEnv``.

    Raises:
        EnvError: The id is unknown, an argument is invalid or a space is not supported.
    """
    given = dict(locals())
    check_choice("simulator", simulator, SIMULATORS)
    if isinstance(kwargs, Mapping):
        given["kwargs"] = copy_arrays(dict(kwargs))  # the simulator may change them
    options = AdapterOptions(**{field.name: given[field.name] for field in fields(AdapterOptions)})
    for names, is_valid, kind in (
        ("num_envs num_threads max_episode_steps", _is_count, "a whole number, at least 1"),
        ("render_size image_size", _is_size, "(height, width), at least 1 each"),
        ("cameras obs_keys", _is_list, "a list of names"),
        ("ranges kwargs commands rewards realism", _is_mapping, "a dictionary, or None"),
        ("randomize", lambda x: isinstance(x, bool), "True or False"),
    ):
        for name in names.split():
            value = given[name]
            if value is not None and not is_valid(value):
                raise EnvError(f"env.id={id}: {name}={value!r} must be {kind}")
    check_count(f"env.id={id}: action_chunk", action_chunk, 1)
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise EnvError(f"env.id={id}: device={device!r}: use cpu, cuda or cuda:N") from error
    check_seeds(id, seeds, num_envs)
    if ranges and not randomize:
        raise EnvError(f"env.id={id}: ranges={dict(ranges)} have no effect without randomize=true")
    env = _make_env(id, simulator, options)
    if realism:
        env = _with_realism(env, realism, seeds, action_mapping)
    return env if action_chunk == 1 else ChunkedActions(env, action_chunk)


def _is_count(n: Any) -> bool:
    """Return whether ``n`` is a whole number of at least 1."""
    return isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_mapping(x: Any) -> bool:
    return isinstance(x, Mapping)


def _is_size(size: Any) -> bool:
    """Return whether ``size`` is two whole numbers of at least 1."""
    return isinstance(size, Sequence) and len(size) == 2 and all(map(_is_count, size))


def _with_realism(
    env: VectorEnv, options: Mapping[str, Any], seeds: list[int], action_mapping: str
) -> VectorEnv:
    """Return the simulator with the options of section env.realism, unchanged if they are off."""
    try:
        checked = realistic_env.read(options, env)
        if checked.push_velocity is not None:  # then it has the method
            simulator: Any = env
            simulator.use_pushes(checked.push_velocity)
    except EnvError:
        env.close()
        raise
    if checked.is_off:
        return env
    return realistic_env.RealisticEnv(env, checked, seeds=seeds, action_mapping=action_mapping)


def is_users_simulator(id: str) -> bool:
    """Return whether ``id`` names a simulator of the user's: "module:Name", but no ``Task``.

    Raises:
        EnvError: The module cannot be imported.
    """
    return ":" in id and tasks.find(id) is None


def _make_env(id: str, simulator: str, options: AdapterOptions) -> VectorEnv:
    """Create the environments with the first simulator that has the task."""
    if simulator != "remote" and (name := own_name(id)) is not None:
        raise EnvError(f"env.id={id} is our task's name at Gymnasium; write env.id={name}")
    engine = simulator_of(id, simulator, options.device)
    if engine in ("mujoco", "warp") and tasks.find(id) is not None:
        from embodied_envs.physics.make import make as make_own  # MuJoCo takes half a second

        return make_own(id, options, engine=engine)
    for name, value in (
        ("cameras", () if engine in ("libero", *language_env.SIMULATORS) else options.cameras),
        ("randomize", options.randomize),
        ("commands", options.commands),
        ("rewards", options.rewards),
    ):
        if value:
            own = ", ".join(tasks.OWN)
            raise EnvError(f"env.id={id}: {name}={value} is for our own tasks: {own}")
    if (threads := options.num_threads) is not None and engine != "envpool":
        raise EnvError(f"remove num_threads={threads}: env.id={id} is not of EnvPool or our own")
    match engine:
        case "libero":
            return LiberoEnv(id, options)
        case "remote":
            try:
                from embodied_envs.adapters import remote_env  # needs packages of its own
            except ImportError as error:
                raise EnvError(
                    f"pip install 'embodied-ppo[serve]': simulator=remote needs {error.name}"
                ) from error
            return remote_env.ServerEnv(id, options)
        case "simpler" | "robocasa" | "robotwin" | "calvin" | "maniskill":
            return language_env.make(id, engine, options)
        case "mjlab":
            return MjlabEnv(id, options)
        case "envpool" if ":" not in id and envpool_env.has_task(id):
            return envpool_env.EnvPoolEnv(id, options)
        case "gymnasium" if gymnasium_env.has_task(id):
            return gymnasium_env.GymnasiumEnv(id, options)
        case "gymnasium" | "torch" if (target := named_object(id)) is not None:
            return make_by_interface(id, target, options, tensors=simulator == "torch")
    raise _unknown_task(id, simulator)


def _unknown_task(id: str, simulator: str) -> EnvError:
    """Return the error for an id that no simulator has, with the nearest ones."""
    if simulator == "torch":
        return EnvError(
            f'env.id={id} names no function; simulator=torch needs "package.module:function", which'
            " is called with num_envs, seed, device and env.kwargs and returns the environment"
        )
    similar = nearest(id)
    hints = [f"nearest in {family}: {', '.join(ids) or 'none'}" for family, ids in similar.items()]
    searched = " and ".join(similar) if simulator == "auto" else f"simulator {simulator}"
    missing = ""
    if simulator in ("auto", "envpool") and not envpool_env.is_installed():
        missing = "; EnvPool is not installed: pip install envpool"
    return EnvError(
        f"env.id={id} is unknown to {'; '.join([searched, *hints])}{tasks.hint(id)}{missing}"
    )


def nearest(id: str, n: int = 3) -> dict[str, list[str]]:
    """Return for each family of tasks the ``n`` ids most similar to ``id``, best first."""
    families: dict[str, Iterable[str]] = {"our tasks": tasks.OWN}
    families |= {"envpool": envpool_env.ids(), "gymnasium": gymnasium_env.ids()}
    return {name: difflib.get_close_matches(id, list(x), n, 0.6) for name, x in families.items()}
