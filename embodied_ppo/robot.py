"""What mode=embodied is made of: simulators, a policy for their spaces, episodes that are measured and filmed."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from embodied_ppo import checkpoint, cloning, compiled, report, strict, warm_start
from embodied_ppo import evaluate as evaluation
from embodied_ppo.assembly import Assembly, Setup, steps_per_update, total_updates, versions
from embodied_ppo.config import Config, EnvConfig, EvaluateConfig
from embodied_ppo.demonstrations import Writer
from embodied_ppo.demonstrations import read as read_demonstrations
from embodied_ppo.evaluate import EvaluationResult
from embodied_ppo.learner import JointLearner
from embodied_ppo.models import vla
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.vla import TokenVLA
from embodied_ppo.placement.local import LocalSystem
from embodied_ppo.rollout import Rollout, env_seeds, sampling_key
from embodied_ppo.types import ConfigError, Discrete, Policy, VectorEnv


# ------------------------------------------------------------------------------------------------------------- pieces
def make_env(
    seeds: list[int], *, config: EnvConfig, device: torch.device, render: bool = False, size: int = 256
) -> VectorEnv:
    """One environment per seed. Raises EnvError."""
    return importlib.import_module("embodied_envs").make(
        config.id,
        num_envs=len(seeds),
        seeds=seeds,
        simulator=config.simulator,
        num_threads=config.num_threads or None,
        max_episode_steps=config.max_episode_steps,
        action_mapping=config.action_mapping,
        success_key=config.success_key,
        action_chunk=config.action_chunk,
        cameras=config.cameras,
        image_size=(config.image_size, config.image_size),
        randomize=config.randomize,
        ranges=config.ranges,
        kwargs=config.kwargs,
        device=device,
        render=render,
        render_size=(size, size),
    )


def evaluation_env(config: Config) -> EnvConfig:
    """The environment as it is evaluated."""
    kwargs = {**config.env.kwargs, **config.evaluation.env_kwargs}
    randomize = config.env.randomize and config.evaluation.randomize
    return replace(config.env, kwargs=kwargs, randomize=randomize, ranges=config.env.ranges if randomize else {})


def make_policy(config: Config, env: VectorEnv) -> ActorCritic | TokenVLA:
    """The policy of ``config.model`` for the spaces of ``env``, with weights from ``config.seed``."""
    a = config.algorithm
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        if config.model.policy == "token":
            policy = TokenVLA(
                env.obs_spec,
                env.action_spec,
                config.model,
                chunk=config.env.action_chunk,
                sentences=getattr(env, "instructions", ()),
            )
        else:
            policy = ActorCritic(env.obs_spec, env.action_spec, config.model)
    if not isinstance(policy, ActorCritic) or policy.kind != "categorical":
        for path, on in (("kl_loss_type", a.use_kl_loss), ("kl_penalty", a.use_kl_in_reward)):
            if on and getattr(a, path) == "full":
                raise ConfigError(f"algorithm.{path}=full: needs the logits of a categorical policy; use k3")
        if a.entropy_target is not None and a.entropy_target > 50:
            raise ConfigError(
                f"algorithm.entropy_target={a.entropy_target}: is above any reachable entropy; use < 50 nats"
            )
    return policy.to(env.device)


COMPILE_AFTER = 8192
"""Optimiser steps after which compile=auto has compiled code take over: about as long as the compiler needs."""


def compile_from(config: Config, device: torch.device, notice: Callable[[str], None]) -> int | None:
    """The first update of compiled code, None for never: a matter of options alone, so that a run repeats itself."""
    a = config.algorithm
    if config.compile == "never":
        return None
    steps = a.update_epoch * (a.horizon * config.env.num_envs // a.global_batch_size)  # of the optimiser, per update
    at_once = config.compile == "always" or device.type == "cuda"  # a CUDA graph is captured in a moment
    since = 0 if at_once else -(-COMPILE_AFTER // steps)
    if since >= total_updates(config):
        return None
    why = compiled.obstacle() if device.type == "cpu" else ""
    if a.micro_batch_size is not None and a.micro_batch_size < a.global_batch_size:
        why = "algorithm.micro_batch_size cuts minibatches; leave it null"
    if not why:
        return since
    if config.compile == "always":
        raise ConfigError(f"compile=always: {why}; or use compile=auto")
    notice(f"compile: not used, {why}")
    return None


def _check_evaluation(config: Config, device: torch.device) -> None:
    """What the first evaluation would refuse, before anything is written."""
    e = config.evaluation
    evaluation.evaluation_seeds(e.seed, e.episodes)
    if e.env_kwargs:
        probe = make_env(evaluation.evaluation_seeds(e.seed, 1), config=evaluation_env(config), device=device)
        try:
            probe.reset()
        finally:
            probe.close()


def _unread(config: Config, env: VectorEnv) -> Iterator[str]:
    """Options that this task gives no meaning, and settings that see little of it."""
    if isinstance(env.action_spec, Discrete):
        default = Config()
        for path in ("env.action_mapping", "model.state_dependent_std", "model.init_log_std"):
            section, name = path.split(".")
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(default, section), name):
                yield f"{path}={value}: not read, the actions of {env.id} are discrete"
    horizon, clock = config.algorithm.horizon, env.max_episode_steps
    if config.env.restart_each_rollout and clock is not None and horizon < clock:
        yield (
            f"algorithm.horizon={horizon}: with env.restart_each_rollout=true only the first {horizon} of up to "
            f"{clock} steps of an episode are ever seen; set algorithm.horizon={clock} to see all"
        )


# ------------------------------------------------------------------------------------------------------------ cloning
RECORDERS = 64
"""Environments that demonstrations are recorded in."""


def demonstrations(config: Config, notice: Callable[[str], None]) -> Path:
    """Folder of what ``config.cloning`` learns from; recorded by the task's expert unless it is there. ConfigError."""
    c, env = config.cloning, config.env
    if c.dataset is not None:
        return Path(c.dataset)
    if env.id != "Tabletop":
        raise ConfigError(f"cloning.dataset = null: env.id={env.id} has no expert of its own; name a folder")
    asked = {"kwargs": env.kwargs, "cameras": env.cameras, "size": env.image_size, "randomize": env.randomize}
    asked["episodes"] = c.episodes  # a recording that is continued has other episodes than one made at once
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:20]
    folder = compiled.cache_folder() / "demonstrations" / name
    recorder: Any = importlib.import_module("embodied_envs").recorder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(folder.with_suffix(".lock"), "w") as lock,  # two runs that want the same: the second finds it done
        _locked(lock),
        Writer(
            folder,
            fps=recorder.FPS,
            state=recorder.STATE,
            action=recorder.ACTION,
            cameras=dict.fromkeys(env.cameras, (env.image_size, env.image_size)),
        ) as writer,
    ):
        missing = c.episodes - writer.episodes
        if missing <= 0:
            return folder
        notice(f"cloning: recording {missing} demonstrations, once; they stay in {folder}")
        for episode in recorder.record(
            env.kwargs,
            episodes=missing,
            seed=0,
            num_envs=RECORDERS,
            image_size=(env.image_size, env.image_size),
            cameras=env.cameras,
            start=writer.episodes,
            randomize=env.randomize,
            num_threads=env.num_threads or None,
        ):
            writer.add(episode.images, episode.state, episode.action, episode.instruction)
    return folder


@contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def clone(policy: Policy, config: Config, notice: Callable[[str], None]) -> None:
    """Behaviour cloning by ``config.cloning``, or the weights that an earlier run got by it. Raises ConfigError."""
    c = config.cloning
    assert isinstance(policy, TokenVLA)
    folder = demonstrations(config, notice)
    info = folder / "meta" / "info.json"
    if not info.is_file():
        raise ConfigError(f"cloning.dataset={folder}: holds no meta/info.json; name a dataset in LeRobot's layout")
    weights = policy.state_dict()
    around = json.dumps([strict.dump(c), str(folder), torch.__version__, config.seed, str(policy.query.device)])
    name = hashlib.sha256(around.encode() + info.read_bytes() + warm_start.digest_of(weights).encode())
    for module in (cloning, vla):
        name.update(Path(str(module.__file__)).read_bytes())
    path = compiled.cache_folder() / "cloned" / f"{name.hexdigest()[:20]}.safetensors"
    if path.exists():
        damage = warm_start.take(weights, path)
        if damage is None:
            return notice(f"cloning: taken from {path}")
        notice(f"cloning: {path} is damaged ({damage}); it is made anew")
    demos = read_demonstrations(folder, limit=c.episodes)
    notice(f"cloning: {len(demos.state):,} frames of {int(demos.episode[-1]) + 1:,} demonstrations in {folder}")
    told = cloning.clone(
        policy,
        demos,
        steps=c.steps,
        batch_size=c.batch_size,
        lr=c.lr,
        foresight_steps=c.foresight_steps,
        seed=config.seed,
        notice=notice,
    )
    notice(
        f"cloning: loss {told.loss:.3f}, of held-out episodes {told.held_out_loss:.3f}, {told.cpu_s:.0f} CPU seconds"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        warm_start.keep(policy.state_dict(), path)
    except OSError as error:
        notice(f"cloning: not kept ({' '.join(str(error).split())})")


# ----------------------------------------------------------------------------------------------------------- assembly
def assemble(s: Setup, stack: ExitStack) -> Assembly:
    """A system of mode=embodied; ``stack`` closes what it opens. Raises ConfigError, EnvError."""
    config, a = s.config, s.config.algorithm
    env = make_env(env_seeds(config.seed, 0, config.env.num_envs, a.group_size), config=config.env, device=s.device)
    stack.callback(env.close)
    policy = make_policy(config, env)
    _check_evaluation(config, s.device)
    if config.cloning.steps and s.fresh_start:
        clone(policy, config, s.progress)
    s.early.extend(_unread(config, env))
    since = compile_from(config, s.device, s.notice)
    simulators = config.env.num_threads or "as many as there are cores"
    s.early.append(
        f"threads: {torch.get_num_threads()} for tensors, {simulators} for simulators; compiled code: "
        + ("never" if since is None else f"from update {since + 1} on")
    )

    def later() -> compiled.Later:
        return compiled.Later(since, required=config.compile == "always", notice=s.notice)

    e = config.evaluation
    system = LocalSystem(
        unit="env_steps",
        policy=policy,
        rollout=Rollout(
            env,
            policy,
            seed=config.seed,
            group_size=a.group_size,
            one_episode=config.env.restart_each_rollout,
            restart_every=config.env.restart_every,
            stagger=config.env.stagger,
            gamma=a.gamma,
            later=later(),
        ),
        learner=JointLearner(
            policy,
            a,
            num_envs=env.num_envs,
            updates=s.updates,
            seed=config.seed,
            later=later(),
            dump_dir=s.run_dir,
            notice=s.notice,
        ),
        count=lambda experience: steps_per_update(config),
        measure=functools.partial(
            evaluation.evaluate,
            policy,
            functools.partial(make_env, config=evaluation_env(config), device=s.device),
            episodes=e.episodes,
            num_envs=e.num_envs,
            seed=e.seed,
            deterministic=e.deterministic,
        ),
        score="eval/return",
        checkpoints=s.run_dir / "checkpoints",
        keep_last=config.keep_last,
        config_text=s.text,
        info={**s.info, "env_id": config.env.id},
    )

    def write(result: EvaluationResult, source: checkpoint.Checkpoint, out: Path) -> dict[str, str | None]:
        return write_report(
            replace(config, env=evaluation_env(config)),
            result,
            policy=policy,
            source=source,
            run_dir=s.run_dir,
            out=out,
            film_episodes=e.video_episodes,
            film_steps=e.video_steps,
            film_size=e.video_size,
        )

    title = f"{config.env.id}, {config.env.num_envs} environments, {steps_per_update(config)} steps an update"
    return Assembly(system, title, a.horizon, write)


# ----------------------------------------------------------------------------------------------------------- evaluate
def evaluate(
    config: EvaluateConfig,
    trained: Config,
    source: checkpoint.Checkpoint,
    *,
    run_dir: Path,
    device: torch.device,
) -> Callable[[Path, Callable[[Any], None]], tuple[EvaluationResult, dict[str, str | None]]]:
    """What measures a checkpoint and writes the report into a folder, telling of every episode.

    Raises CheckpointError, ConfigError, EnvError.
    """
    base = strict.dump(evaluation_env(trained))
    kwargs = {**base["kwargs"], **dict(config.env.get("kwargs") or {})}
    env_config = strict.load(EnvConfig, {**base, **config.env, "kwargs": kwargs}, source="env")
    factory = functools.partial(make_env, config=env_config, device=device)
    probe = factory(env_seeds(0, 0, 1))
    try:
        policy = make_policy(replace(trained, env=env_config), probe)
    finally:
        probe.close()
    checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)

    def measure(out: Path, on_episode: Callable[[Any], None]) -> tuple[EvaluationResult, dict[str, str | None]]:
        result = evaluation.evaluate(
            policy,
            factory,
            episodes=config.episodes,
            num_envs=config.num_envs,
            seed=config.seed,
            deterministic=config.deterministic,
            on_episode=on_episode,
        )
        written = write_report(
            replace(trained, env=env_config),
            result,
            policy=policy,
            source=source,
            run_dir=run_dir,
            out=out,
            film_episodes=config.video_episodes if config.video else 0,
            film_steps=config.video_steps,
            film_size=config.video_size,
        )
        return result, written

    return measure


def write_report(
    config: Config,
    result: EvaluationResult,
    *,
    policy: Policy,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    out: Path,
    film_episodes: int,
    film_steps: int,
    film_size: int,
) -> dict[str, str | None]:
    """report.json, report.html and an mp4 of an evaluation; returns their paths."""
    film = None
    if film_episodes:
        film = report.film(
            policy,
            functools.partial(make_env, config=config.env, device=torch.device("cpu"), render=True, size=film_size),
            path=run_dir / "videos" / f"{out.name}.mp4",
            seed=result.seed,
            deterministic=result.deterministic,
            episodes=film_episodes,
            steps=film_steps,
        )
    plain = strict.relevant(config) | {"run_dir": None}
    written = report.write(
        out,
        result.by_kind(),
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest["env_steps"]),
        config=plain,
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=report.rows(run_dir),
        film=film,
    )
    video = None if film is None or film.path is None else os.path.relpath(film.path)
    return {"report": str(written.html), "report_json": str(written.json), "video": video}
