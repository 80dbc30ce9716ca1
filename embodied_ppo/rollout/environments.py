"""Construct simulators from their options, and the files of a user's task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import embodied_envs
from embodied_envs import task_files
from embodied_envs.adapters.multi_task import MultiTaskEnv
from embodied_envs.adapters.spaces import ActionConverter, flatten
from embodied_envs.base import watchdog
from embodied_envs.base.observation_names import TASK, names_observation
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import Box, VectorEnv
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, EnvConfig, ModelConfig, RealismConfig
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.training import checkpoint


def make_env(
    seeds: list[int],
    *,
    config: EnvConfig,
    device: torch.device,
    render: bool = False,
    size: int = 640,
    task: TaskFiles | None = None,
    model: ModelConfig | None = None,
    rebuild: bool = True,
) -> VectorEnv:
    """Return one environment per seed.

    Args:
        render: Whether the environments can render a picture.
        size: Width of a rendered picture, pixels; its height is three quarters of it.
        task: Files of the user's task as they were when the run began; this process executes them.
        model: Options of the policy, whose history is a part of the observations. None: no history.
        rebuild: Whether ``restart`` may build the simulator again.

    Raises:
        EnvError: The task is unknown, refuses its options, or its files are missing.
    """
    # Activate the stored files first, because the constructor below may import the user's task.
    if task is not None:
        task.activate()
    # If a call of the simulator hangs, the message names the environment and the limit.
    watchdog.describe(env_id=config.title)
    watchdog.set_limit(config.step_timeout_s)
    # Where stored copies are executed, the task's relative paths refer to the copy of its folder.
    with task_files.working_folder(), watchdog.constructing:
        make = partial(
            embodied_envs.make,
            simulator=config.simulator,
            num_threads=config.num_threads or None,
            max_episode_steps=config.max_episode_steps,
            action_mapping=config.action_mapping,
            obs_keys=config.obs_keys,
            action_chunk=config.action_chunk,
            cameras=config.cameras,
            image_size=(config.image_size, config.image_size),
            image_layout=config.image_layout,
            randomize=config.randomize,
            ranges=config.ranges,
            commands=config.commands,
            rewards=config.rewards,
            realism=asdict(config.realism),
            kwargs=config.kwargs,
            device=device,
            render=render,
            render_size=(3 * size // 4, size),  # (height, width)
            rebuild=rebuild,
        )
        if isinstance(config.id, str) and config.tasks is None:
            env = make(config.id, num_envs=len(seeds), seeds=seeds)
        else:
            env = MultiTaskEnv(
                config.ids,
                lambda id, seeds: make(id, num_envs=len(seeds), seeds=seeds),
                seeds,
                weights=config.task_weights,
                tasks=config.tasks,
                # A vision-language-action model reads the sentence, not the index.
                sentences=model is not None and model.policy != "actor_critic",
            )
    # A history of one step is the observation itself.
    if model is None or model.history == 1:
        return env
    # Only what the actor reads is stacked. Observations of the critic alone pass unchanged.
    names, named = None, env.obs_spec if isinstance(env.obs_spec, dict) else {}
    if isinstance(env, MultiTaskEnv):
        names = [name for name in named if name != TASK]
    if model.actor_obs is not None:
        keys = model.actor_obs
        names = [n for n in names or named if any(names_observation(key, n) for key in keys)]
    return HistoryEnv(env, model.history, names)


def stored_task(source: checkpoint.Checkpoint, run_dir: Path) -> TaskFiles | None:
    """Return the files of the user's task that a checkpoint was trained with.

    None: its run stored none.

    Raises:
        CheckpointError: The stored files are damaged.
    """
    # The digest names a folder below, so only 12 hex digits are accepted.
    digest = str(source.manifest.get("task_hash"))
    if not re.fullmatch("[0-9a-f]{12}", digest):
        return None
    return task_files.read(run_dir / "task" / digest)


def training_env(config: Config) -> EnvConfig:
    """Return the options of the environment that returns what actor and critic read."""
    actor, critic = config.model.actor_obs, config.model.critic_obs
    # Both networks read what env.obs_keys selects.
    if actor is None or critic is None:
        return config.env
    # The union of both lists, without duplicates and in a fixed order.
    keys = tuple(dict.fromkeys((*actor, *critic)))
    return replace(config.env, obs_keys=keys, realism=_realism(config))


@dataclass(frozen=True)
class LimitedRealism(RealismConfig):
    """``env.realism`` that changes some observations only, because others read the rest."""

    # Names of the observations that are changed.
    obs_keys: tuple[str, ...] = ()


def limit_realism(realism: RealismConfig, names: tuple[str, ...] | None) -> RealismConfig:
    """Return ``realism`` that changes the observations ``names`` only; None: those it has."""
    if names is None or isinstance(realism, LimitedRealism):
        return realism
    return LimitedRealism(**vars(realism), obs_keys=names)


def changed_env(env: EnvConfig, changes: Mapping[str, Any], source: str) -> EnvConfig:
    """Return options of an environment of which some are replaced.

    Args:
        env: The options.
        changes: Name below env -> value.
        source: Label of the changes, for messages.

    Raises:
        ConfigError: A changed option is unknown or out of bounds.
    """
    options, names = loader.dump(env), None
    if isinstance(env.realism, LimitedRealism):
        names = env.realism.obs_keys
        del options["realism"]["obs_keys"]
    changed = loader.load(EnvConfig, {**options, **changes}, source=source)
    return replace(changed, realism=limit_realism(changed.realism, names))


def merged(env: EnvConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changed options; kwargs, commands and rewards contain those of ``env``, too."""
    options = dict(changes)
    for name in {"kwargs", "commands", "rewards"} & set(changes):
        options[name] = {**getattr(env, name), **dict(changes[name] or {})}
    for term, values in dict(changes.get("rewards") or {}).items():
        if isinstance(values, Mapping):
            options["rewards"][term] = {**env.rewards.get(term, {}), **values}
    return options


def _realism(config: Config) -> RealismConfig:
    """Return ``env.realism``, limited to the observations of ``model.actor_obs`` if it is set."""
    # Sensor errors and delays apply to the actor. What the critic alone reads stays exact.
    return limit_realism(config.env.realism, config.model.actor_obs)


def evaluation_env(config: Config) -> EnvConfig:
    """Return the options of the environment as the evaluation uses it.

    With ``model.actor_obs``, the environment returns only what the actor reads.
    """
    keys, cameras = config.env.obs_keys, config.env.cameras
    # No critic runs in an evaluation, so cameras that only the critic reads are not rendered.
    if config.model.actor_obs is not None:
        keys = config.model.actor_obs
        cameras = tuple(c for c in cameras if any(names_observation(k, c) for k in keys))
    # Options of the evaluation replace those of the training; randomize can only be switched off.
    randomize = config.env.randomize and config.evaluation.randomize
    return replace(
        config.env,
        obs_keys=keys,
        cameras=cameras,
        kwargs={**config.env.kwargs, **config.evaluation.env_kwargs},
        randomize=randomize,
        ranges=config.env.ranges if randomize else {},
        realism=_realism(config),
        task_weights=None,  # as many episodes of each task
    )


def evaluated_envs(config: EnvConfig, num_envs: int) -> int:
    """Return ``num_envs``, rounded up to a multiple of the number of tasks.

    The task of an episode then depends on its number alone.
    """
    return -(-num_envs // len(config.ids)) * len(config.ids)


def action_converter(config: EnvConfig, env: VectorEnv) -> ActionConverter:
    """Return the converter of the policy's actions to those of the simulator, on the CPU."""
    space, spec = env.simulator.action_space, env.action_spec
    # Our own tasks have no Gymnasium space. The bounds of a chunk repeat those of one step.
    if space is None:
        assert isinstance(spec, Box)
        size = spec.size // config.action_chunk
        space = Box(spec.low[:size], spec.high[:size])
    cpu = torch.device("cpu")
    return ActionConverter(space, id=env.id, mapping=config.action_mapping, device=cpu)


def observation_spaces(env: VectorEnv) -> dict[str, Any]:
    """Return Gymnasium's space of each observation by name; {} for our own tasks."""
    space = env.simulator.observation_space
    return {} if space is None else flatten(space)


def builds_once(config: Config) -> bool:
    """Return whether the run builds its simulator only once, because a process can have one."""
    e = config.evaluation
    return e.episodes == 0 or e.env == "training"
