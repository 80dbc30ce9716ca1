"""Construct a ``MujocoEnv``: compile the model, select the engine and report errors by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import mujoco
import torch

from embodied_envs import tasks
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base.errors import EnvError, check_choice, check_count, show
from embodied_envs.physics.cameras import Cameras
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.physics.engine import Physics
from embodied_envs.physics.mujoco_cpu import BatchPhysics
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.physics.task_validation import PRIVILEGED
from embodied_envs.tasks import Task
from embodied_envs.tasks.task import Stage
from embodied_envs.types import NO_LIMIT

# Control steps of random actions in which a GPU's worlds show how many contacts they need.
WARM_UP_STEPS = 200


def compile_model(task: Task, id: str) -> mujoco.MjModel:
    """Compile the task's model.

    Raises:
        EnvError: The model does not compile; the message has MuJoCo's reason (file, line, element).
    """
    try:
        with warnings.catch_warnings():
            # Gymnasium's model files have this deprecated attribute.
            warnings.filterwarnings("ignore", message=".*settotalmass")
            spec = task.spec()
            if isinstance(spec, mujoco.MjSpec):
                return spec.compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        reason = str(error).strip()
        is_missing_file = "opening file" in reason or "No such file" in reason
        folder = f" (files are looked for from {Path.cwd()})" if is_missing_file else ""
        raise EnvError(f"env.id={id}: MuJoCo refuses its model: {reason}{folder}") from error
    raise EnvError(
        f"env.id={id}: {type(task).__name__}.spec() is {type(spec).__name__}; it must be a"
        " mujoco.MjSpec"
    )


def _check_attributes(task: Task, id: str) -> None:
    """Raise EnvError if an attribute of the task is invalid."""
    prefix = f"env.id={id}: {type(task).__name__}"
    minimum = {"decimation": 1, "max_episode_steps": 1, "reset_noise": 0, "step_noise": 0}
    for name, low in minimum.items():
        check_count(f"{prefix}.{name}", getattr(task, name), low)
    check_choice(f"{prefix}.stage", task.stage, get_args(Stage))
    for name in ("fields", "privileged_fields", "before", "names", "instructions"):
        if isinstance(value := getattr(task, name), str):
            raise EnvError(f"{prefix}.{name}={value!r} must be a tuple: ({value!r},)")


def _pop_warp_capacities(kwargs: dict[str, Any], id: str, engine: str) -> dict[str, int]:
    """Remove ``nconmax`` and ``njmax`` from ``kwargs`` and return those that are set."""
    capacities = {k: x for k in ("nconmax", "njmax") if (x := kwargs.pop(k, None)) is not None}
    for name, value in capacities.items():
        check_count(f"env.id={id}: env.kwargs.{name}", value, 1)
        if engine != "warp":
            raise EnvError(f"remove env.kwargs.{name}: env.id={id} reads it with simulator=warp")
    return capacities


def _physics_class(id: str, engine: str, options: AdapterOptions) -> Callable[..., Physics]:
    """Return the class of the engine with its own arguments; EnvError without mujoco_warp."""
    if engine != "warp":
        num_threads = options.num_threads or len(os.sched_getaffinity(0))
        return partial(BatchPhysics, num_threads=num_threads)
    try:  # imported here, because warp takes two seconds to load
        from embodied_envs.physics.mujoco_warp import WarpPhysics
    except ImportError as error:
        raise EnvError(
            f"env.id={id}: simulation on a GPU needs mujoco_warp ({error}): pip install mujoco-warp"
            " warp-lang, or use simulator=mujoco"
        ) from error
    return partial(WarpPhysics, device=options.device)


def make(id: str, options: AdapterOptions, *, engine: str) -> MujocoEnv:
    """Create worlds of one of our tasks. ``embodied_envs.make`` documents the options.

    Args:
        id: ``env.id``.
        options: Options of all simulators.
        engine: "mujoco" (CPU threads) or "warp" (GPU worlds; also on device "cpu"). On a GPU, other
            worlds are simulated first to measure ``nconmax`` and ``njmax`` unless ``kwargs`` has
            them.

    Raises:
        EnvError: An option or the task is invalid, or the engine is not installed.
    """
    task_class = tasks.find(id)
    assert task_class is not None  # ``embodied_envs.make`` has found it
    kwargs = dict(options.kwargs or {})
    capacities = _pop_warp_capacities(kwargs, id, engine)
    task = tasks.make(id, task_class, kwargs, options.commands, options.rewards)
    _check_attributes(task, id)
    # The task reads it, for success in the last step. With NO_LIMIT a wrapper has the task's own.
    if (limit := options.max_episode_steps) is not None and limit != NO_LIMIT:
        task.max_episode_steps = limit
    model = compile_model(task, id)
    all_ranges: dict[str, Any] = dict(task.ranges) | dict(options.ranges or {})
    all_ranges = all_ranges if options.randomize else {}
    if options.randomize and not all_ranges:
        raise EnvError(
            f"env.id={id}: env.randomize=true, but the task has no ranges of its own; name some: "
            "env.ranges.mass=[0.8,1.2]"
        )
    if "joint_offset" in all_ranges and not task.reads_joints_from_state:
        raise EnvError(
            f"remove env.ranges.joint_offset={show(all_ranges['joint_offset'])}: env.id={id} lacks"
            " the attribute reads_joints_from_state of Go1Joystick and PandaPickCube"
        )
    render_size = options.render_size if options.render else None
    cameras = tuple(options.cameras)
    renderer = Cameras(model, cameras, size=options.image_size, render_size=render_size)
    make_physics = _physics_class(id, engine, options)

    def build(
        cameras: Cameras, obs_keys: Sequence[str] | None, capacities: Mapping[str, Any]
    ) -> MujocoEnv:
        """Create the worlds."""
        randomization = Randomization(model, all_ranges)
        privileged_fields = task.privileged_fields if PRIVILEGED in (obs_keys or ()) else ()
        try:
            physics = make_physics(
                model,
                options.num_envs,
                fields=(*task.fields, *privileged_fields),
                stage=task.stage,
                cameras=cameras,
                randomization=randomization,
                **capacities,
            )
        except EnvError as error:
            raise EnvError(f"env.id={id}: {error}") from error
        with wrap_errors(f"env.id={id}: {type(task).__name__}.bind: "):
            try:
                task.bind(model, physics.device, physics.dtype)
            except KeyError as error:  # MuJoCo's message lists the names that the model has
                raise EnvError(f"env.id={id}: {error.args[0] if error.args else error}") from error
        env = MujocoEnv(id, task, physics, replace(options, obs_keys=obs_keys))
        if "joint_offset" in all_ranges:
            env.use_joint_offsets(randomization)
        return env

    # Unused capacity costs time on a GPU, whose kernels have a thread for each row.
    if engine == "warp" and torch.device(options.device).type == "cuda" and len(capacities) < 2:
        capacities = _measure_capacities(build(Cameras(model), None, capacities)) | capacities
    obs_keys = None if options.obs_keys is None else (*options.obs_keys, *cameras)
    return build(renderer, obs_keys, capacities)


def _measure_capacities(env: MujocoEnv) -> dict[str, int]:
    """Take random actions in ``env``, close it and return the capacities that this play needs.

    Raises:
        EnvError: The default capacities are too small.
    """
    physics: Any = env.physics  # a ``WarpPhysics``
    generator = torch.Generator(env.device).manual_seed(0)
    env.reset()
    for _ in range(WARM_UP_STEPS):
        env.step(2 * torch.rand(env.action_shape, generator=generator, device=env.device) - 1)
    capacities = physics.measured_capacities()
    env.close()
    return capacities
