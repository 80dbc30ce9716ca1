"""Record a task's scripted expert and clone policies from demonstrations, cached on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError, EnvError, TrainingError, one_line, show
from embodied_envs.types import Say
from embodied_ppo.core import compile, guarded_files
from embodied_ppo.core.types import ProgressCallback
from embodied_ppo.data import dataset_folder, episode_images
from embodied_ppo.data.lerobot_reader import open_folder, read_info
from embodied_ppo.data.lerobot_writer import SAFE, Writer
from embodied_ppo.imitation import behavior_cloning, supervised_finetuning
from embodied_ppo.options import loader
from embodied_ppo.options.rules.base import refuse_any
from embodied_ppo.options.schema import Config, DemosConfig, EnvConfig
from embodied_ppo.policies.backbone import channels_first_shape
from embodied_ppo.rollout.environments import make_env
from embodied_ppo.training.progress import Interrupts, Progress

RECORDERS = 64  # number of environments that record in parallel
# File of a recording: the options it was requested with, besides those in LeRobot's own files.
REQUEST = "meta/embodied_ppo.json"


def demonstrations(
    config: Config, notice: Say, advance: ProgressCallback = lambda task, completed, total: None
) -> Path:
    """Return the folder of the demonstrations for ``config.cloning``; record missing ones.

    Args:
        config: Options of the run.
        notice: Receives lines for the log.
        advance: Progress callback.

    Raises:
        ConfigError: The task has no expert, or its options cannot be recorded.
    """
    c, env = config.cloning, config.env
    if c.dataset is not None:
        return Path(c.dataset)
    recording_env(DemosConfig(out="cache", env=env))  # raises for what cannot be recorded
    request = {"kwargs": env.kwargs, "cameras": env.cameras, "size": env.image_size}
    # A continued recording has other episodes than one recorded without interruption.
    request |= {"randomize": env.randomize, "episodes": c.episodes}
    name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:20]
    folder = compile.cache_folder() / "demonstrations" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        # The second of two equal runs waits here and then uses the recording of the first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        demos = DemosConfig(out=str(folder), episodes=c.episodes, env=env)
        record(demos, lambda line: notice(f"cloning: {line}"), advance)
    return folder


def recording_env(config: DemosConfig) -> EnvConfig:
    """Return the environment that ``record`` uses, after checking all options.

    Nothing is written before the check.

    Raises:
        ConfigError: The options cannot be recorded.
    """
    env, obs = config.env, config.env.kwargs.get("obs", "language")
    refusals = {
        "out = '' must name a folder to record into; write out=demos/reach": not config.out,
        f"env.id = {env.id}: has no expert to record; write experiment=tabletop_token"
        " (env.id=Tabletop), or bring demonstrations of your own as cloning.dataset=FOLDER"
        " (LeRobot's layout)": env.id != "Tabletop",
        "env.cameras = []: demonstrations are of what cameras see; write env.cameras=[front], or"
        " experiment=tabletop_token": not env.cameras,
        f"env.kwargs.obs = {show(obs)}: demonstrations are of obs=language; write"
        " env.kwargs.obs=language": obs != "language",
        f"env.ranges = {show(env.ranges)}: demonstrations are randomised by the task's own ranges;"
        " take them away (~env.ranges), or write env.randomize=false": env.randomize and env.ranges,
    }
    refuse_any(refusals)
    return replace(env, simulator="mujoco", kwargs={**env.kwargs, "obs": "language"})


def record(
    config: DemosConfig,
    notice: Say,
    advance: ProgressCallback = lambda task, completed, total: None,
    atomic: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Any]:
    """Record the task's expert into ``config.out`` until it holds ``config.episodes``.

    Args:
        config: What to record.
        notice: Receives lines for the log.
        advance: Progress callback ``(task, completed, total)``.
        atomic: Context in which an episode is written; it may delay an interrupt.

    Returns:
        "folder"; its demonstrations before ("found") and after the recording ("episodes",
        "frames"); of the new ones "recorded", "expert_success" (share of the expert's finished
        episodes) and "families" (kind of episode -> number).

    Raises:
        ConfigError: The options do not fit the folder, or it cannot be written.
        EnvError: The simulator cannot be used.
        TrainingError: Recording failed after the first episode.
    """
    env, folder = config.env, Path(config.out)
    from embodied_envs.tasks import expert_recorder as recorder  # loads MuJoCo

    outcomes, families = Counter[bool](), Counter[str]()
    try:
        with Writer(
            folder,
            fps=recorder.FPS,
            state=recorder.STATE,
            action=recorder.ACTION,
            cameras=dict.fromkeys(env.cameras, (env.image_size, env.image_size)),
        ) as writer:
            existing = writer.episodes
            _check_request(config, exists=existing > 0)
            if (missing := config.episodes - existing) > 0:
                holds = f", which holds {existing}" if existing else ""
                notice(f"recording {missing} demonstrations into {folder}{holds}")
                advance("recording", existing, config.episodes)
                for demo in recorder.record(
                    env.kwargs,
                    episodes=missing,
                    seed=config.seed,
                    num_envs=RECORDERS,
                    image_size=(env.image_size, env.image_size),
                    cameras=env.cameras,
                    on_episode=lambda family, success: outcomes.update([success]),
                    noise=config.noise,
                    start=existing,
                    randomize=env.randomize,
                    num_threads=env.num_threads or None,
                ):
                    with atomic():
                        writer.add(demo.images, demo.state, demo.action, demo.instruction)
                    families[demo.family] += 1
                    advance("recording", writer.episodes, config.episodes)
    except (OSError, ConfigError, EnvError) as error:
        message, hint, is_refusal = str(error), ".", not isinstance(error, OSError)
        if isinstance(error, OSError):
            message = f"{folder}: cannot be written ({error.strerror or one_line(error)})"
            hint = "; is the disk full?"
        if families:  # recording had begun, so this is not a refusal of the options
            raise TrainingError(f"{message}{hint} {SAFE}") from error
        if is_refusal:
            raise
        raise ConfigError(f"{message}; choose another folder") from error
    counts = {"episodes": writer.episodes, "frames": writer.frames, "found": existing}
    success = outcomes[True] / outcomes.total() if outcomes else None
    new = {"recorded": writer.episodes - existing, "expert_success": success}
    return {"folder": str(folder), **counts, **new, "families": dict(sorted(families.items()))}


def record_demos(config: DemosConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Record demonstrations of the scripted expert; return their number and success rate.

    Raises:
        ConfigError, EnvError: Before anything is recorded.
        TrainingError: The recording fails.
        SystemExit: 130, after an interrupt; finished demonstrations are on the disk.
    """
    make_env([0], config=recording_env(config), device=torch.device("cpu")).close()
    started = time.perf_counter()
    with Progress(quiet) as bar:
        try:
            with Interrupts() as interrupts:
                summary = record(config, bar.say, bar.advance, interrupts.uninterrupted)
        except KeyboardInterrupt:
            safe = f"finished demonstrations are safe in {config.out}"
            bar.say(f"interrupted; {safe}; the same command continues")
            raise SystemExit(130) from None
        if not summary["recorded"]:
            held = f"{config.out} holds {summary['episodes']} demonstrations"
            bar.say(f"{held}; nothing is left to record")
    return {**summary, "wall_s": round(time.perf_counter() - started, 3)}


def _check_request(config: DemosConfig, *, exists: bool) -> None:
    """Compare the options with those of an existing recording, or store them in REQUEST.

    Raises:
        ConfigError: The options differ.
    """
    path, env = Path(config.out) / REQUEST, config.env
    request = {"env.id": env.id, "env.kwargs": env.kwargs, "env.randomize": env.randomize}
    request |= {"noise": config.noise, "seed": config.seed}
    if not exists:
        path.write_text(json.dumps(request, indent=1) + "\n")
        return
    stored: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # another program recorded it; the Writer has compared it
        stored = guarded_files.read_object(path)
    for name, value in request.items():
        if name in stored and stored[name] != json.loads(json.dumps(value)):
            raise ConfigError(
                f"{config.out}: holds demonstrations with {name}={show(stored[name])}, not"
                f" {show(value)}; choose another folder, or the options it was begun with"
            )


def clone(
    policy: behavior_cloning.Family,
    config: Config,
    notice: Say,
    advance: ProgressCallback = lambda task, completed, total: None,
    *,
    rate: float | None = None,
) -> dict[str, float]:
    """Clone the policy by ``config.cloning``, or load the weights of an equal earlier run.

    Args:
        policy: The policy, trained in place.
        config: Options of the run.
        notice: Receives lines for the log.
        advance: Progress callback.
        rate: Actions per second of the simulator; None: unknown.

    Returns:
        Losses by name.

    Raises:
        ConfigError: The demonstrations do not fit the policy.
        EnvError: The simulator cannot be used.
        TrainingError: The norm of the gradient is not finite.
    """
    c = config.cloning
    folder = demonstrations(config, notice, advance)
    dataset_folder.check(folder)
    rate = _resampling_rate(config, folder, rate)
    weights, name = policy.state_dict(), _clone_name(policy, config, folder, rate)
    path = compile.cache_folder() / "cloned" / f"{name}.safetensors"

    def train() -> dict[str, float]:
        shapes = {n: channels_first_shape(x) for n, x in policy.trunk.encoder.images.items()}
        cameras = {name: (shape[1], shape[2]) for name, shape in shapes.items()}
        options = {"limit": c.episodes, "exclude": c.exclude_episodes}
        demos = open_folder(folder, cameras=cameras, rate=rate, **options)
        frames, count = len(demos.state), len(demos.episode.unique())
        notice(f"cloning: {frames:,} frames of {count:,} demonstrations in {folder}")
        assert demos.disk is not None
        for name, camera in demos.disk.cameras.items():
            if camera.stored != camera.size:
                sizes = [" x ".join(map(str, size)) for size in (camera.stored, camera.size)]
                notice(f"cloning: images of {name} are resized from {sizes[0]} to {sizes[1]}")
        return behavior_cloning.clone(
            policy, demos, c, seed=config.seed, notice=notice, advance=advance
        )

    return supervised_finetuning.compute_or_load(
        weights, path, train, label="cloning", work=f"{c.steps} supervised steps", notice=notice
    )[1]


def _resampling_rate(config: Config, folder: Path, rate: float | None) -> float | None:
    """Return the rate to which demonstrations are resampled, None: they are not.

    Raises:
        ConfigError: Their rate is not ``rate``, the simulator's, and the options do not say what to
            do.
    """
    mismatch, fps = config.cloning.fps_mismatch, float(read_info(folder)["fps"])
    if rate is None or mismatch == "ignore" or abs(fps - rate) <= 0.01 * rate:
        return None
    if mismatch == "refuse":
        raise ConfigError(
            "write cloning.fps_mismatch=resample, or =ignore if the frames are control steps of"
            f" this task whatever meta/info.json says: {folder} has {fps:g} actions per second,"
            f" env.id={config.env.title} executes {rate:g}"
        )
    return round(rate, 2)  # the step of a simulator is rarely exact, such as 0.0500001 s


def _clone_name(
    policy: behavior_cloning.Family, config: Config, folder: Path, rate: float | None
) -> str:
    """Return a digest of everything that the cloned weights depend on, 20 hex digits."""
    settings = [
        loader.dump(config.cloning),
        str(folder.resolve()),
        torch.__version__,
        config.seed,
        str(policy.device),
        loader.dump(replace(config.model, detach_value=True)),  # cloning learns no value
        config.env.cameras,
        config.env.image_size,
        rate,
    ]
    digest = hashlib.sha256(json.dumps(settings).encode())
    digest.update(supervised_finetuning.digest_of(policy.state_dict()).encode())
    for file in sorted(path for path in (folder / "meta").rglob("*") if path.is_file()):
        digest.update(file.read_bytes())
    # The data are too large to be read here, and their statistics in meta may be old.
    for file in sorted([*folder.rglob("*.parquet"), *folder.rglob("*.mp4")]):
        stat = file.stat() if file.is_file() else None  # a link may lead nowhere
        digest.update(f"{file.name} {stat and (stat.st_size, stat.st_mtime_ns)}".encode())
    modules = {type(m).__module__ for m in policy.modules()}
    modules |= {behavior_cloning.__name__, episode_images.__name__}
    for module in sorted(name for name in modules if name.startswith("embodied_ppo.")):
        digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    return digest.hexdigest()[:20]
