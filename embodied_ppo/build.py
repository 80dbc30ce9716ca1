"""The composition root: Config -> running system; the only place that chooses classes."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo import __version__, checkpoint, compiled, loop, report, strict
from embodied_ppo import evaluate as evaluation
from embodied_ppo.config import Config, EnvConfig, EvaluateConfig
from embodied_ppo.evaluate import EvaluationResult
from embodied_ppo.learner import JointLearner
from embodied_ppo.log import Log, Timer, numbers, peak_rss_mb, process_age_s
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.placement.local import LocalSystem
from embodied_ppo.rollout import Rollout, env_seeds, sampling_key
from embodied_ppo.types import (
    CheckpointError,
    ConfigError,
    Discrete,
    EnvError,
    Policy,
    TrainingError,
    VectorEnv,
)

PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "envpool", "hydra-core", "tensorboard")
# Options that may differ between a run and its continuation without a word; every other difference is told.
FREE_ON_RESUME = ("updates", "env_steps", "save_every", "keep_last", "eval_every", "evaluation", "run_dir", "resume")
FREE_ON_RESUME += ("device", "threads", "name", "description")
FIXED_ON_RESUME = ("algorithm.horizon", "env.num_envs", "seed")


# ------------------------------------------------------------------------------------------------------------- pieces
def device(name: str, threads: int) -> torch.device:
    """The device an option names; sets torch's threads. Raises ConfigError where it is not there."""
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(name)
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(f"device={name}: this machine shows torch {count} CUDA devices; use device=cpu or auto")
    return found


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


def make_policy(config: Config, env: VectorEnv) -> ActorCritic:
    """The policy of ``config.model`` for the spaces of ``env``, with weights from ``config.seed``."""
    a = config.algorithm
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        policy = ActorCritic(env.obs_spec, env.action_spec, config.model)
    if policy.kind != "categorical":
        for path, on in (("kl_loss_type", a.use_kl_loss), ("kl_penalty", a.use_kl_in_reward)):
            if on and getattr(a, path) == "full":
                raise ConfigError(f"algorithm.{path}=full: needs the logits of a categorical policy; use k3")
        if a.entropy_target is not None and a.entropy_target > 50:
            raise ConfigError(
                f"algorithm.entropy_target={a.entropy_target}: is above any reachable entropy; use < 50 nats"
            )
    return policy.to(env.device)


def steps_per_update(config: Config) -> int:
    """Environment steps of one rollout; with chunks of actions the most there can be."""
    return config.algorithm.horizon * config.env.num_envs * config.env.action_chunk


def total_updates(config: Config) -> int:
    """``updates``, or as many whole updates as ``env_steps`` holds (at least one)."""
    if config.updates is not None:
        return config.updates
    assert config.env_steps is not None
    return max(1, config.env_steps // steps_per_update(config))


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


def versions() -> dict[str, str]:
    found = {"embodied_ppo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def config_hash(config: Config) -> str:
    """12 hex digits over every option that can change a result."""
    plain = strict.dump(config)
    for path in ("name", "description", "run_dir", "resume", "keep_last"):
        plain.pop(path)
    return _digest(plain)[:12]


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


# ------------------------------------------------------------------------------------------------------ run directory
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


def _new_run_dir(config: Config) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]  # jobs of a sweep start in the same second
    path = Path("runs") / config.name / f"{stamp}-{config.seed}"
    for i in range(1, 1000):
        if not path.exists():
            return path
        path = path.with_name(f"{stamp}.{i}-{config.seed}")
    raise ConfigError(f"run_dir: {path} and 999 like it exist; name one with run_dir=DIR")


def _locate(config: Config, say: Callable[[str], None]) -> tuple[Path, str | None]:
    """The run directory, and what to continue from: a path, "newest" of the run, or None."""
    if config.resume is None:
        run_dir = Path(config.run_dir) if config.run_dir else _new_run_dir(config)
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"run_dir={run_dir}: is a file; name a directory")
        if any((run_dir / "checkpoints").glob("step_*")):
            raise ConfigError(f"run_dir={run_dir}: holds a run already; continue it with resume=auto or name another")
        return run_dir, None
    if config.resume == "auto":
        if config.run_dir:
            run_dir = Path(config.run_dir)
        else:
            runs = sorted((Path("runs") / config.name).glob(f"*-{config.seed}"))
            run_dir = next((r for r in reversed(runs) if any((r / "checkpoints").glob("step_*"))), None)
        if run_dir is None or not any((run_dir / "checkpoints").glob("step_*")):
            say(f"resume=auto: no checkpoint of {config.name!r} with seed {config.seed} yet; starting anew")
            return run_dir or _new_run_dir(config), None
        return run_dir, "newest"
    if (Path(config.resume) / "checkpoints").is_dir() and not config.run_dir:
        return Path(config.resume), "newest"
    found = checkpoint.find(config.resume)
    home = found.parent.parent if found.parent.name == "checkpoints" else found.parent
    if (
        config.run_dir
        and Path(config.run_dir).resolve() != home
        and any(Path(config.run_dir).glob("checkpoints/step_*"))
    ):
        raise ConfigError(f"run_dir={config.run_dir}: holds another run already; name a new one, or leave it out")
    newest = max((p.name for p in found.parent.glob("step_*")), default=found.name)
    if not config.run_dir and newest != found.name:
        raise ConfigError(
            f"resume={config.resume}: the run has gone on to {newest}, which continuing here would mix up; "
            f"branch off with run_dir=NEW, or continue the run with resume={home}"
        )
    return Path(config.run_dir) if config.run_dir else home, str(found)


def _stored_options(source: checkpoint.Checkpoint) -> dict[str, Any]:
    file = source.path / checkpoint.CONFIG
    try:
        options = yaml.safe_load(source.config_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: is no YAML ({' '.join(str(error).split())}); use another checkpoint") from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{file}: holds no options; use another checkpoint")
    return options


def _check_resume(config: Config, source: checkpoint.Checkpoint, updates: int, say: Callable[[str], None]) -> None:
    """Tell every option that differs from the checkpoint's; refuse those that cannot."""
    old = _flat(_stored_options(source))
    for path, now in _flat(strict.dump(config)).items():
        if path.split(".")[0] in FREE_ON_RESUME or old.get(path) == now:
            continue
        if path in FIXED_ON_RESUME:
            raise ConfigError(
                f"{path}={now}: the run to resume has {old.get(path)}, which its counters and random streams rest on; "
                "leave it, or start a new run"
            )
        say(f"resume: {path} was {old.get(path)}, is {now}")
    schedule = config.algorithm.lr_schedule
    length = [total_updates(strict.load(Config, _stored_options(source) | {"resume": None}, source="")), updates]
    if schedule in ("linear", "cosine") and length[0] != length[1]:
        say(f"resume: the run was to have {length[0]} updates, now {length[1]}: lr_schedule={schedule} spans them anew")
    if source.update > updates:
        raise ConfigError(f"updates={updates}: the checkpoint {source.path} has done {source.update}; ask for more")


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One process per run directory."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ".lock").touch()
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: cannot be written ({error.strerror}); name another") from error
    with open(run_dir / ".lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run_dir={run_dir}: another process is training in it; wait, or name another") from error
        yield


@contextmanager
def _stop_signals(timer: Timer) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the update under way; a second one, one while evaluating, or while
    waiting for the compiler, at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked or timer.phase == "evaluate" or compiled.Later.waiting:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: the caller keeps its signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -------------------------------------------------------------------------------------------------------------- train
def train(config: Config, *, explicit: Any = (), quiet: bool = False, json: bool = False) -> dict[str, Any]:
    """Train as configured; returns what ``summary.json`` holds.

    Raises ConfigError, EnvError, CheckpointError before anything is written; TrainingError if the run fails;
    SystemExit(130) after an interrupt has saved.
    """
    strict.check(config, explicit)
    early: list[str] = []
    run_dir, wanted = _locate(config, early.append)
    with ExitStack() as stack:
        fresh = not run_dir.exists()
        if not fresh:
            stack.enter_context(_locked(run_dir))
        source = None
        if wanted is not None:
            newest = wanted == "newest"
            source = checkpoint.newest_valid(run_dir, early.append) if newest else checkpoint.open_checkpoint(wanted)
            if newest and source is None:
                raise CheckpointError(
                    f"resume={config.resume}: holds no checkpoint (checkpoints/step_*); start a new run"
                )
            if newest and source is not None:
                checkpoint.set_aside(run_dir, after=source.update, notice=early.append)
        return _train(config, run_dir, source, early, stack if fresh else None, quiet=quiet)


def _train(
    config: Config,
    run_dir: Path,
    source: checkpoint.Checkpoint | None,
    early: list[str],
    fresh: ExitStack | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Build everything, then run. ``fresh`` holds the lock of a run directory that does not exist yet."""
    updates = total_updates(config)
    if source is not None:
        _check_resume(config, source, updates, early.append)
    config = replace(config, run_dir=str(run_dir), resume=None)
    where = device(config.device, config.threads)
    a = config.algorithm
    env = make_env(env_seeds(config.seed, 0, config.env.num_envs, a.group_size), config=config.env, device=where)
    try:
        policy = make_policy(config, env)
        _check_evaluation(config, where)
        early += _unread(config, env)
        text = yaml.safe_dump(strict.dump(config), sort_keys=False)
        notices: set[str] = set()
        say = [early.append]  # until there is a log

        def notice(line: str) -> None:
            if line not in notices:
                notices.add(line)
                say[0](line)

        since = compile_from(config, where, notice)
        simulators = config.env.num_threads or "as many as there are cores"
        early.append(
            f"threads: {torch.get_num_threads()} for tensors, {simulators} for simulators; compiled code: "
            + ("never" if since is None else f"from update {since + 1} on")
        )
        system = LocalSystem(
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
                later=compiled.Later(since, required=config.compile == "always", notice=notice),
            ),
            learner=JointLearner(
                policy,
                a,
                num_envs=env.num_envs,
                updates=updates,
                seed=config.seed,
                later=compiled.Later(since, required=config.compile == "always", notice=notice),
                dump_dir=run_dir,
                notice=notice,
            ),
            make_evaluation_env=functools.partial(make_env, config=evaluation_env(config), device=where),
            evaluation=config.evaluation,
            checkpoints=run_dir / "checkpoints",
            keep_last=config.keep_last,
            config_text=text,
            info={"versions": versions(), "config_hash": config_hash(config), "env_id": config.env.id},
        )
        if source is not None:
            system.load(source, notice)
        if fresh is not None:
            fresh.enter_context(_locked(run_dir))
        (run_dir / "config.yaml").write_text(text)
        first = source.update if source is not None else 0
        log = Log(run_dir, total_updates=updates, first_update=first, quiet=quiet)
        say[0] = log.say
        try:
            for line in early:
                log.say(line)
            return _run(config, system, log, first=first, updates=updates)
        except Exception as error:  # all of them: log.txt tells the cause, then it goes on up
            log.say(f"failed: {type(error).__name__}: {error}")
            if isinstance(error, (ConfigError, CheckpointError, EnvError)):  # no refusal: it had begun
                raise TrainingError(str(error)) from error
            raise
        finally:
            log.close()
            system.close()
    finally:
        env.close()


def _run(config: Config, system: LocalSystem, log: Log, *, first: int, updates: int) -> dict[str, Any]:
    run_dir, per_update = log.run_dir, steps_per_update(config)
    what = f"updates {first + 1} to {updates} of {per_update} steps"
    if first >= updates:
        what = "nothing left to train (updates= or env_steps= asks for more)"
    log.say(f"{config.name}: {config.env.id}, {config.env.num_envs} environments, {what}, in {run_dir}")
    started, timer, startup_s = time.perf_counter(), Timer(), process_age_s()
    before = None
    schedule = loop.Schedule(
        updates=updates,
        horizon=config.algorithm.horizon,
        steps_per_update=per_update,
        save_every=config.save_every,
        eval_every=config.eval_every,
    )
    with _stop_signals(timer) as should_stop, _matmul_precision(config.matmul_precision):
        try:
            if first == 0:
                with timer("evaluate"):
                    metrics = system.evaluate(0)
                log.metrics(metrics, update=0, env_steps=0)
                before = numbers(metrics)["eval/return"]
            warm: dict[str, float] = {}

            def after_first() -> None:
                warm.update(system.cpu_s() | {"total": timer.total(loop.TRAINING)[1]})

            outcome = loop.train(
                system,
                log,
                schedule,
                first_update=first,
                should_stop=should_stop,
                timer=timer,
                after_first=after_first,
            )
            if outcome.updates == first and not outcome.interrupted:  # a finished run resumed: nothing was trained
                with timer("evaluate"):
                    system.evaluate(first)
        except KeyboardInterrupt:
            log.say(
                f"interrupted; saved: {system.saved}; continue with resume={run_dir}" if system.saved else "interrupted"
            )
            raise SystemExit(130) from None
    train_s, cpu_s = timer.total(loop.TRAINING)
    steps, trained = outcome.updates * per_update, (outcome.updates - first) * per_update
    if trained <= per_update:  # nothing else was measured
        warm.clear()
    counted = trained - per_update if warm else max(1, trained)  # the first update warms up
    split = {phase: s - warm.get(phase, 0.0) for phase, s in (system.cpu_s() | {"total": cpu_s}).items()}
    total = split.pop("total")
    split["other"] = total - sum(split.values())
    if outcome.interrupted:
        log.say(f"interrupted after update {outcome.updates}; saved {system.saved}; continue with resume={run_dir}")
        raise SystemExit(130)
    assert system.saved is not None and system.result is not None
    final = numbers(system.result.metrics())
    written = write_report(
        replace(config, env=evaluation_env(config)),
        system.result,
        policy=system.policy,
        source=checkpoint.open_checkpoint(system.saved),
        run_dir=run_dir,
        out=run_dir / "reports" / f"step_{outcome.updates:06d}",
        film_episodes=config.evaluation.video_episodes,
        film_steps=config.evaluation.video_steps,
        film_size=config.evaluation.video_size,
    )
    if written["video"]:
        log.video("evaluation", written["video"], env_steps=steps)
    summary = {
        "updates": outcome.updates,
        "env_steps": steps,
        "startup_s": round(startup_s, 2),
        "wall_s": round(time.perf_counter() - started, 3),
        "train_s": round(train_s, 3),
        "cpu_s": round(cpu_s, 3),
        "cpu_us_per_step": round(total / counted * 1e6, 2),
        "cpu_us_per_step_by_phase": {phase: round(s / counted * 1e6, 2) for phase, s in split.items()},
        "steps_per_s": round(trained / max(train_s, 1e-9), 1),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "initial_return": before,
        "final_return": final["eval/return"],
        "final_success": final.get("eval/success"),
        "versions": versions(),
        "config_hash": config_hash(config),
        "run_dir": str(run_dir),
        "checkpoint": str(system.saved),
        "tensorboard": str(run_dir / "tensorboard"),
        **written,
    }
    results = {"hparam/final_return": final["eval/return"], "hparam/cpu_us_per_step": summary["cpu_us_per_step"]}
    log.hyper_parameters(_flat(strict.dump(config)), results)
    temporary = run_dir / "summary.json.new"
    temporary.write_text(_json(summary))
    temporary.replace(run_dir / "summary.json")
    return summary


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


# ----------------------------------------------------------------------------------------------------------- evaluate
def evaluate(config: EvaluateConfig, *, quiet: bool = False, json: bool = False) -> dict[str, Any]:
    """Measure a checkpoint in simulation and write the report; returns its headline numbers and paths.

    Raises CheckpointError, ConfigError, EnvError before anything is written.
    """
    source = checkpoint.open_checkpoint(config.checkpoint)
    run_dir = source.path.parent.parent if source.path.parent.name == "checkpoints" else source.path.parent
    stored = _stored_options(source)
    trained = strict.load(Config, {**stored, "resume": None}, source=str(source.path / checkpoint.CONFIG))
    base = strict.dump(evaluation_env(trained))
    kwargs = {**base["kwargs"], **dict(config.env.get("kwargs") or {})}
    env_config = strict.load(EnvConfig, {**base, **config.env, "kwargs": kwargs}, source="env")
    where = device(config.device, config.threads)
    factory = functools.partial(make_env, config=env_config, device=where)
    probe = factory(env_seeds(0, 0, 1))
    try:
        policy = make_policy(replace(trained, env=env_config), probe)
    finally:
        probe.close()
    checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
    changed = {"env": config.env, "deterministic": config.deterministic}
    suffix = "" if changed == {"env": {}, "deterministic": True} else f"-{_digest(changed)[:6]}"
    name = f"step_{source.update:06d}-{config.episodes}x{config.seed}{suffix}"
    out = Path(config.out) if config.out else run_dir / "reports" / name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written ({error.strerror}); name another directory") from error
    bar = None if quiet else _episode_bar(config.episodes)
    with bar or _nothing():
        result = evaluation.evaluate(
            policy,
            factory,
            episodes=config.episodes,
            num_envs=config.num_envs,
            seed=config.seed,
            deterministic=config.deterministic,
            on_episode=None if bar is None else lambda e: bar.advance(bar.task_ids[0]),
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
    found = numbers(result.metrics())
    return {"checkpoint": str(source.path), "episodes": config.episodes, **found, **written}


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
    rows = run_dir / "metrics.jsonl"
    curves = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")] if rows.exists() else []
    plain = strict.dump(config) | {"run_dir": None}
    written = report.write(
        out,
        result.by_kind(),
        checkpoint=source.path.name,
        update=source.update,
        env_steps=int(source.manifest["env_steps"]),
        config=plain,
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=curves,
        film=film,
    )
    video = None if film is None or film.path is None else os.path.relpath(film.path)
    return {"report": str(written.html), "report_json": str(written.json), "video": video}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _episode_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    bar.add_task("episodes", total=total)
    return bar
