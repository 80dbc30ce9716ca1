"""Evaluate a robot policy: episodes, report, video."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from embodied_envs import task_files
from embodied_envs.base.errors import show
from embodied_envs.base.random import env_seeds
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import VectorEnv
from embodied_ppo.core.types import Policy
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import run_report, video
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.evaluation.run_report import ReportFiles, ReportTarget
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, EnvConfig, EvaluateConfig, EvaluationConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.robot_policy import AnyPolicy, constant_inputs, sampling_temperature
from embodied_ppo.rollout.environments import builds_once, make_env, stored_task
from embodied_ppo.training import checkpoint
from embodied_ppo.training.trained_run import TrainedRun

VIDEO_SIZE = 640  # width of a video, pixels; its height is three quarters of it


def measure(
    e: EvaluationConfig | EvaluateConfig,
    policy: AnyPolicy,
    factory: Callable[[list[int]], VectorEnv],
    on_episode: Callable[[Any], None] = lambda episode: None,
    skip_diverged: bool = False,
) -> EvaluationResult:
    """Evaluate a policy with the options ``e``; call ``on_episode`` with each finished episode.

    ``skip_diverged``: see ``episodes.evaluate``.
    """
    return evaluation.evaluate(
        policy,
        factory,
        episodes=e.episodes,
        num_envs=e.num_envs,
        seed=e.seed if isinstance(e, EvaluateConfig) else 0,
        deterministic=e.deterministic,
        temperature=None if e.deterministic else sampling_temperature(policy, e.temperature),
        on_episode=on_episode,
        skip_diverged=skip_diverged,
    )


def evaluated_task(run: TrainedRun, env: EnvConfig, *, allow: bool) -> TaskFiles | None:
    """Return the files of the user's task that an evaluation executes.

    Args:
        env: Options of the evaluated environment.
        allow: Whether the files may differ from those of the training.

    Returns:
        The files; None: the task belongs to an installed package.
    """
    stored = stored_task(run.source, run.run_dir)
    if stored is not None and stored.id != env.title:
        return task_files.collect(env.title, env.kwargs)
    task = task_files.select(env.title, env.kwargs, stored, allow=allow, resumes=False, say=run.say)
    return None if task is None else task.without_data(run.run_dir)


def env_factory(
    run: TrainedRun, config: Config, device: torch.device, *, allow: bool, **options: Any
) -> functools.partial[VectorEnv]:
    """Return the function that creates environments for an evaluation of a run from seeds.

    Args:
        config: Options of the run, with the evaluated environment.
        allow: See ``evaluated_task``.
        options: Further arguments of ``make_env``.
    """
    task = evaluated_task(run, config.env, allow=allow)
    common = {"config": config.env, "device": device, "task": task, "model": config.model}
    return functools.partial(make_env, **common, **options)


def _command(options: EvaluationConfig | EvaluateConfig, source: checkpoint.Checkpoint) -> str:
    """Return the command that repeats an evaluation."""
    default, given = loader.flat(loader.dump(EvaluateConfig())), loader.flat(loader.dump(options))
    free = ("checkpoint", "out", "num_envs", "device", "threads", "video", "env", "episodes")
    arguments = {"checkpoint": str(source.path), "episodes": options.episodes} | {
        path: value
        for path, value in given.items()
        if path in default and value != default[path] and not path.startswith(free)
    }
    if isinstance(options, EvaluateConfig):
        arguments |= {f"env.{path}": x for path, x in options.env.items()}
    words = (shlex.quote(f"{path}={show(value)}") for path, value in arguments.items())
    return f"embodied-ppo evaluate {' '.join(words)}"


def write_report(
    target: ReportTarget,
    result: EvaluationResult,
    *,
    policy: Policy,
    video_episodes: int,
    task: TaskFiles | None = None,
    notice: Callable[[str], None] | None = None,
    robustness: Mapping[str, Any] | None = None,
    paired: Mapping[str, Any] | None = None,
) -> ReportFiles:
    """Write report.json, report.html and an mp4 of an evaluation; return their paths.

    Args:
        target: Checkpoint and folder.
        result: Episodes.
        policy: Acts in the video.
        video_episodes: Episodes of the video; 0: no video.
        task: Files of the user's task that were executed.
        notice: Called with the reason where there is no mp4.
        robustness: Content of robustness.json.
        paired: Content of paired.json.
    """
    config, recorded, video_file = target.config, None, target.out / "video.mp4"
    # With a folder of its own, an evaluation writes into no run, which may be read-only.
    if target.out.parent == target.run_dir / "reports":
        video_file = target.run_dir / "videos" / f"{target.out.name}.mp4"
    if video_episodes:
        first_seed, device = evaluation.evaluation_seeds(result.seed, 1)[0], torch.device("cpu")
        common = {"config": config.env, "device": device, "task": task, "model": config.model}
        how = {**common, "first_seed": first_seed, "render": True, "size": VIDEO_SIZE}
        recorded = video.record_video(
            policy,
            functools.partial(_filmed_env, **how),
            path=video_file,
            seed=result.seed,
            deterministic=result.deterministic,
            temperature=result.temperature,
            episodes=video_episodes,
            notice=notice,
        )
    elif notice is not None:
        option = "evaluation.env=training" if builds_once(config) else "evaluation.video_episodes=0"
        notice(f"no video: {option}")
    constant = constant_inputs(policy)
    if constant and notice is not None:
        notice(
            f"constant inputs: {', '.join(constant)} had the same value in all of the training; the"
            " policy does not scale them (docs/networks.md)"
        )
    files = run_report.write_report(
        target,
        result.by_kind(),
        "env_steps",
        task={
            "hash": None if task is None else task.hash,
            "hash_in_training": target.source.manifest.get("task_hash"),
            "files": {} if task is None else {file.name: file.digest for file in task.files},
        },
        video=recorded,
        robustness=robustness,
        paired=paired,
        constant_inputs=constant,
        command=_command(target.options, target.source),
    )
    has_video = recorded is not None and recorded.path is not None
    return {**files, "video": str(video_file) if has_video else None}


def _filmed_env(seeds: list[int], *, first_seed: int, config: EnvConfig, **how: Any) -> VectorEnv:
    """Return the environment of an episode of the video, with the task that it was evaluated in."""
    ids = config.ids
    if len(ids) > 1:
        task = (ids[(seeds[0] - first_seed) % len(ids)],)
        config = replace(config, id=task, tasks=config.tasks or ids)
    return make_env(seeds, config=config, **how)


def restore(
    run: TrainedRun,
    config: Config,
    factory: Callable[[list[int]], VectorEnv],
    *,
    allow: bool,
    trained: bool = True,
) -> tuple[robot_policy.AnyPolicy, VectorEnv]:
    """Return the policy with the weights of a checkpoint, and a closed environment of its task.

    Args:
        allow: Whether the file of ``model.network`` may differ from that of the training.
        trained: Whether to load the weights; False: the policy is as before the training.
    """
    config = replace(config, model=run.model(allow=allow))
    with closing(factory(env_seeds(0, 0, 1))) as env:
        policy = robot_policy.make_policy(config, env)
    if trained:
        run.load_weights(policy)
    return policy, env
