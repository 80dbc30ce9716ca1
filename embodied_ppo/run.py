"""The composition root: Config -> running system; the only place that asks which mode it is."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo.config import batch_sizes, loader, placement, validation
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import Config, DemosConfig, EvaluateConfig
from embodied_ppo.core import watchdog
from embodied_ppo.core.types import CheckpointError, ConfigError, EnvError, ProcessLost, TrainingError
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.imitation import expert_demos
from embodied_ppo.modes.base import Assembly, Setup, config_hash, device, digest, hardware_of, matmul_precision
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.modes.embodied import workers as embodied_workers
from embodied_ppo.modes.reasoning import components as reasoning
from embodied_ppo.modes.reasoning import workers as reasoning_workers
from embodied_ppo.training import checkpoint, loop
from embodied_ppo.training.logging import Log, Timer, numbers, peak_rss_mb, process_age_s
from embodied_ppo.training.progress import Interrupts, Progress, stop_signals
from embodied_ppo.training.run_directory import (
    absolute,
    arithmetic,
    check_resume,
    claimed,
    replace_text,
    stored_options,
    versions,
)

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
"""Errors of a disk that is full, over quota, read-only or broken."""


# -------------------------------------------------------------------------------------------------------------- train
def train(config: Config, *, explicit: Any = (), quiet: bool = False, since_s: float = 0.0) -> dict[str, Any]:
    """Train as configured; returns what ``summary.json`` holds.

    Args:
        since_s: Age of this process at the beginning of the run, from which ``startup_s`` is counted. Later runs of a
            process, as in a sweep, do not count the time of earlier ones.

    Raises ConfigError, EnvError, CheckpointError before anything is written; TrainingError if the run fails;
    SystemExit(130) after an interrupt has saved.
    """
    return _start(config, explicit, quiet, imitate=False, since_s=since_s)


def clone(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """A run of no updates: the clone of ``config.cloning``, saved, measured and reported. As ``train``."""
    model, steps = config.model, config.cloning.steps
    rules_of_cloning = (
        (
            config.mode != "embodied",
            f"mode = {config.mode}: clone is for robot policies; a language model is warmed up by train, see "
            "warm_start.steps",
        ),
        (
            model.policy == "actor_critic",
            "model.policy = actor_critic: cannot be cloned; write model.policy=token, flow or gaussian, or "
            "experiment=tabletop_token",
        ),
        (steps == 0, "cloning.steps = 0: nothing would be learned; write cloning.steps=1500"),
        (
            config.resume is not None,
            f"resume = {config.resume}: clone begins anew; leave it out, or go on with PPO: embodied-ppo train "
            f"resume={config.resume} run_dir=NEW",
        ),
        (
            config.run_dir is not None and bool(checkpoint.steps(Path(config.run_dir) / "checkpoints")),
            f"run_dir={config.run_dir}: holds a run already; name another, or go on with PPO: embodied-ppo train "
            f"resume={config.run_dir} run_dir=NEW",
        ),
    )
    for broken, line in rules_of_cloning:
        if broken:
            raise ConfigError(line)
    return _start(config, explicit, quiet, imitate=True)


def _start(config: Config, explicit: Any, quiet: bool, *, imitate: bool, since_s: float = 0.0) -> dict[str, Any]:
    """``imitate``: cloning only."""
    watchdog.forget()  # in a sweep, what the previous run noted
    validation.check(config, explicit)
    early: list[str] = []
    with claimed(config, early.append) as (run_dir, wanted):
        source = None
        if wanted is not None:
            newest = wanted == "newest"
            source = checkpoint.newest_valid(run_dir, early.append) if newest else checkpoint.open_checkpoint(wanted)
            if newest and source is None:
                raise CheckpointError(
                    f"resume={config.resume}: holds no checkpoint (checkpoints/step_*); start a new run"
                )
            if newest and source is not None:
                checkpoint.repair(run_dir, source, early.append)
        return _train(config, run_dir, source, early, quiet=quiet, imitate=imitate, since_s=since_s)


def _train(
    config: Config,
    run_dir: Path,
    source: checkpoint.Checkpoint | None,
    early: list[str],
    *,
    quiet: bool,
    imitate: bool,
    since_s: float,
) -> dict[str, Any]:
    """Build everything, then run."""
    updates = total_updates(config)
    where = device(config.device, config.threads)
    if source is not None:
        check_resume(config, source, updates, where, early.append)
        if (done := _finished(run_dir, source, updates)) is not None:
            if not quiet:
                more = "updates=" if config.mode == "reasoning" else "updates= or env_steps="
                told = (
                    f"{run_dir}: nothing left to train and nothing changed; {more} asks for more than {updates} updates"
                )
                print(told, file=sys.stderr, flush=True)
            return done
    task = _task(config, source, early.append)
    config = replace(absolute(config), run_dir=str(run_dir), resume=None, allow_changed_task=False)
    notices: set[str] = set()
    say = [early.append]  # until there is a log

    def notice(line: str) -> None:
        if line not in notices:
            notices.add(line)
            say[0](line)

    shown: list[str] = []

    bar = Progress(quiet)

    def progress(line: str) -> None:
        shown.append(line)
        bar.say(line)

    text = yaml.safe_dump(loader.relevant(config), sort_keys=False)
    info = {
        "versions": versions(),
        "config_hash": config_hash(config),
        "arithmetic": arithmetic(config, where),
    }
    if task is not None:
        info["task_hash"] = task.hash
    setup = Setup(
        config,
        where,
        run_dir,
        updates,
        text,
        info,
        notice,
        progress,
        early,
        source is None,
        advance=bar.advance,
        task=None if task is None else task.without_data(run_dir),
    )
    with ExitStack() as stack:
        with Interrupts(), bar:
            made = _assembled(setup, stack)
        if source is not None:
            made.system.load(source, notice)
        first = source.update if source is not None else 0
        try:
            replace_text(run_dir / "config.yaml", text)
            if task is not None:
                task.saved(run_dir)
            log = Log(run_dir, total_updates=updates, first_update=first, unit=made.system.unit, quiet=quiet)
        except OSError as error:
            made.system.close()
            if error.errno not in DISK:
                raise
            raise ConfigError(
                f"run_dir={run_dir}: cannot be written ({error.strerror}); free space, or name another"
            ) from error
        say[0] = log.say
        try:
            for line in shown:
                log.say(line, show=False)
            for line in early:
                log.say(line)
            if imitate:
                return _imitated(config, made, log)
            lost = 0
            while True:
                try:
                    if lost:
                        source = checkpoint.newest_valid(run_dir, log.say)
                        made = _assembled(replace(setup, fresh_start=source is None), stack)
                        if source is not None:
                            made.system.load(source, notice)
                        first = source.update if source is not None else 0
                        log.rewind(first)
                        log.say(f"goes on after update {first}")
                    return _run(config, made, log, first=first, updates=updates, since_s=since_s)
                except ProcessLost as error:
                    lost += 1
                    if lost > config.cluster.max_restarts:
                        raise
                    log.say(f"{error}\nrebuilding, {lost} of {config.cluster.max_restarts} (cluster.max_restarts)")
                    made.system.close()
        except Exception as error:  # any: a run's log.txt tells why it ended; raised on
            log.say(f"failed: {type(error).__name__}: {error}")
            if isinstance(error, (ConfigError, CheckpointError, EnvError)):  # no refusal: it had begun
                raise TrainingError(str(error)) from error
            if isinstance(error, OSError) and error.errno in DISK:
                kept = f"resume={run_dir}" if checkpoint.steps(run_dir / "checkpoints") else "the same command"
                raise TrainingError(
                    f"{error.filename or run_dir}: cannot be written ({error.strerror}); free space, then continue "
                    f"with {kept}"
                ) from error
            raise
        finally:
            log.close()
            made.system.close()


def _task(config: Config, source: checkpoint.Checkpoint | None, say: Callable[[str], None]) -> Any:
    """Files of the user's task that the run executes; None: it is an installed package's. Raises ConfigError."""
    if config.mode != "embodied":
        return None
    kept = None if source is None else embodied.kept_task(source, source.path.parent.parent)
    return embodied.task_files().for_training(
        config.env.id, config.env.kwargs, kept, allow=config.allow_changed_task, say=say
    )


def _finished(run_dir: Path, source: checkpoint.Checkpoint, updates: int) -> dict[str, Any] | None:
    """The summary of a run that has all its updates; None where some are left, or it ended before its report."""
    if source.update < updates or source.path.parent != (run_dir / "checkpoints").resolve():
        return None
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return summary if summary.get("updates") == source.update else None


def _assembled(s: Setup, stack: ExitStack) -> Assembly:
    """The system that the options ask for. Raises ConfigError, EnvError, PlacementError."""
    how = mode(s.config)
    where = how.planned(s.config, s.device)
    if where is None and how.foreseeable(s.config, alone=True):
        how.check_memory(s.config, placed(s.config, s.device))
    match s.config.mode:
        case "embodied":
            return embodied.assemble(s, stack) if where is None else embodied_workers.assemble(s, where)
        case "reasoning":
            return reasoning.assemble(s, stack) if where is None else reasoning_workers.assemble(s, where)


def _run(config: Config, made: Assembly, log: Log, *, first: int, updates: int, since_s: float) -> dict[str, Any]:
    run_dir, system = log.run_dir, made.system
    what = f"updates {first + 1} to {updates}" if first < updates else "nothing left to train"
    log.say(f"{config.name}: {made.title}, {what}, in {run_dir}")
    for line in batch_sizes.lines(config) if first < updates else ():
        log.say(f"  {line}")

    def show(result: Any) -> None:
        if rows := made.samples(result):
            log.table("samples", rows, steps=system.steps)

    system.measured = show
    started, timer, startup_s = time.perf_counter(), Timer(), process_age_s() - since_s
    before = log.row(0)
    begun = system.steps
    schedule = loop.Schedule(
        updates=updates,
        horizon=made.horizon,
        save_every=config.save_every,
        eval_every=config.eval_every,
        max_lag=config.cluster.max_lag,
    )
    with stop_signals(timer) as should_stop, matmul_precision(config.matmul_precision):
        try:
            if first and system.saved is None:  # it goes on from another run's checkpoint
                system.save(first)
            if first == 0:
                with timer("evaluate"):
                    metrics = system.evaluate(0)
                log.metrics(metrics, update=0, steps=0)
                before = numbers(metrics)
            if system.pending_row is not None and not log.row(first):
                log.say(f"update {first} was saved, but not logged; that is completed now")
                loop.evaluate_and_log(system, log, timer, system.pending_row, update=first)
            warm: dict[str, float] = {}

            elsewhere = system.cpu_s()["process"]

            def after_first() -> None:
                seconds = timer.total(loop.TRAINING)[1]
                told = system.cpu_s()
                warm.update(told | {"total": seconds + told["process"] - elsewhere, "steps": float(system.steps)})

            outcome = loop.train(
                system,
                log,
                schedule,
                first_update=first,
                should_stop=should_stop,
                timer=timer,
                after_first=after_first,
            )
            if system.result is None and not outcome.interrupted:  # a finished run resumed: nothing was trained
                with timer("evaluate"):
                    system.evaluate(first)
        except KeyboardInterrupt:
            log.say(
                f"interrupted; saved: {system.saved}; continue with resume={run_dir}" if system.saved else "interrupted"
            )
            raise SystemExit(130) from None
    train_s, cpu_s = timer.total(loop.TRAINING)
    trained = system.steps - begun
    if outcome.updates <= first + 1:  # nothing else was measured
        warm.clear()
    counted = system.steps - warm.pop("steps", begun) or 1  # the first update warms up
    told = system.cpu_s()
    cpu_s += told["process"] - elsewhere
    split = {phase: s - warm.get(phase, 0.0) for phase, s in (told | {"total": cpu_s}).items()}
    total = split.pop("total")
    split.pop("process")
    split["other"] = total - sum(split.values())
    if outcome.interrupted:
        log.say(f"interrupted after update {outcome.updates}; saved {system.saved}; continue with resume={run_dir}")
        raise SystemExit(130)
    assert system.saved is not None and system.result is not None
    final = numbers(system.result.metrics())
    out = run_dir / "reports" / f"step_{outcome.updates:06d}"
    written = made.write(system.result, checkpoint.open_checkpoint(system.saved), out)
    if written.get("video"):
        log.video("evaluation", str(written["video"]), steps=system.steps)
    one, many = ("token", "tokens") if system.unit == "tokens" else ("step", "steps")
    summary = {
        "updates": outcome.updates,
        system.unit: system.steps,
        "startup_s": round(startup_s, 2),
        "wall_s": round(time.perf_counter() - started, 3),
        "train_s": round(train_s, 3),
        "cpu_s": round(cpu_s, 3),
        f"cpu_us_per_{one}": round(total / counted * 1e6, 2),
        f"cpu_us_per_{one}_by_phase": {phase: round(s / counted * 1e6, 2) for phase, s in split.items()},
        f"{many}_per_s": round(trained / max(train_s, 1e-9), 1),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "initial_return": before.get("eval/return"),
        "final_return": final["eval/return"],
        "initial_success": before.get(made.success),
        "final_success": final.get(made.success),
        **made.facts,
        "versions": versions(),
        "config_hash": config_hash(config),
        "run_dir": str(run_dir),
        "checkpoint": str(system.saved),
        "tensorboard": str(run_dir / "tensorboard"),
        **written,
    }
    _conclude(config, summary, log, ("final_return", f"cpu_us_per_{one}"))
    return summary


def _conclude(config: Config, summary: dict[str, Any], log: Log, results: Sequence[str]) -> None:
    """summary.json, and its ``results`` beside the options in TensorBoard."""
    log.hyper_parameters(loader.flat(loader.relevant(config)), {f"hparam/{name}": summary[name] for name in results})
    replace_text(log.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def _imitated(config: Config, made: Assembly, log: Log) -> dict[str, Any]:
    """Save the clone as update 0, measure it and write the report."""
    run_dir, system, timer = log.run_dir, made.system, Timer()
    log.say(f"{config.name}: {made.title}, cloned, in {run_dir}")
    started = time.perf_counter()
    with stop_signals(timer), matmul_precision(config.matmul_precision):
        try:
            saved = system.save(0)  # before the evaluation: should that fail, nothing is lost
            with timer("evaluate"):
                metrics = system.evaluate(0)
        except KeyboardInterrupt:
            log.say(f"interrupted; saved: {system.saved}; measure it with evaluate checkpoint={run_dir}")
            raise SystemExit(130) from None
    log.metrics(metrics, update=0, steps=0)
    final = numbers(metrics)
    written = made.write(system.result, checkpoint.open_checkpoint(saved), run_dir / "reports" / "step_000000")
    if written.get("video"):
        log.video("evaluation", str(written["video"]), steps=0)
    summary = {
        "updates": 0,
        "wall_s": round(time.perf_counter() - started, 3),
        **made.facts,
        "final_return": final["eval/return"],
        "final_success": final.get(made.success),
        "versions": versions(),
        "config_hash": config_hash(config),
        "run_dir": str(run_dir),
        "checkpoint": str(saved),
        "tensorboard": str(run_dir / "tensorboard"),
        **written,
    }
    _conclude(config, summary, log, ("final_return",))
    return summary


# --------------------------------------------------------------------------------------------------------------- plan
def mode(config: Config) -> Any:
    """The module that spreads the roles of this mode over processes."""
    return embodied_workers if config.mode == "embodied" else reasoning_workers


def placed(config: Config, where: torch.device) -> placement.Plan:
    """Where the roles of a run are; ``local``: all on one device. Raises ConfigError, PlacementError."""
    found = mode(config).planned(config, where)
    if found is not None:
        return found
    without = validation.unused_roles(config)
    roles = ",".join(role for role in placement.ROLES[config.mode] if role not in without)
    alone = replace(hardware_of(config, where), per_node=(1,))
    return placement.plan({roles: 0}, alone, mode=config.mode, without=without)


def planned(config: Config) -> dict[str, Any]:
    """Where the roles of a run would run, and what memory that takes; nothing is started.

    Raises ConfigError, EnvError, PlacementError (does not fit).
    """
    found, how = placed(config, device(config.device, config.threads)), mode(config)
    needs = how.check_memory(config, found)
    turns = [f"{g.name} with {' and '.join(o.name for o in found.sharing(g))}" for g in found.groups]
    return {
        "devices": found.rows(),
        "memory": placement.memory_rows(found, needs),
        "weights": {f"rollout rank {i}": found.weights_path(i) for i in range(found.processes("rollout"))},
        "facts": {
            "takes turns": [text for text in turns if not text.endswith("with ")],
            **how.facts(config, found),
        },
    }


# -------------------------------------------------------------------------------------------------------------- demos
def demos(config: DemosConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Record the scripted expert; returns what was done.

    Raises ConfigError, EnvError before anything is recorded; TrainingError if the recording fails; SystemExit(130)
    after an interrupt: what is finished is on the disk.
    """
    embodied.make_env([0], config=expert_demos.recording_env(config), device=torch.device("cpu")).close()
    started = time.perf_counter()
    with Progress(quiet) as bar:
        try:
            with Interrupts() as interrupts:
                told = expert_demos.record(
                    config,
                    bar.say,
                    lambda done, total: bar.advance("recording", done, total),
                    interrupts.whole,
                    done=bar.say,
                )
        except KeyboardInterrupt:
            bar.say(
                f"interrupted; {expert_demos.recorded(config.out)} of {config.episodes} demonstrations are safe in "
                f"{config.out}; the same command goes on"
            )
            raise SystemExit(130) from None
    return {
        "folder": str(Path(config.out)),
        "episodes": told.episodes,
        "frames": told.frames,
        "found": told.found,
        "recorded": told.episodes - told.found,
        "expert_success": told.succeeded / told.tried if told.tried else None,
        "wall_s": round(time.perf_counter() - started, 3),
        "families": told.families,
    }


# ----------------------------------------------------------------------------------------------------------- evaluate
def _open(where: str) -> tuple[checkpoint.Checkpoint, Path, Config]:
    """A verified checkpoint, the directory of its run, and the options it was trained with."""
    source = checkpoint.open_checkpoint(where)
    run_dir = source.path.parent.parent if source.path.parent.name == "checkpoints" else source.path.parent
    options = {**stored_options(source), "resume": None}
    return source, run_dir, loader.load(Config, options, source=f"{loader.STORED}, {source.path / checkpoint.CONFIG}")


def evaluate(config: EvaluateConfig, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Measure a checkpoint and write the report; returns its headline numbers and paths.

    Raises CheckpointError, ConfigError, EnvError before anything is written.
    """
    source, run_dir, trained = _open(config.checkpoint)
    validation.check_evaluation(config, trained.mode, explicit)
    where = device(config.device, config.threads)

    progress = Progress(quiet)
    match trained.mode:
        case "embodied":
            measure = embodied.evaluate(config, trained, source, run_dir=run_dir, device=where, say=progress.say)
        case "reasoning":
            measure = reasoning.evaluate(config, trained, source, run_dir=run_dir, device=where, say=progress.say)
    default, free = (
        loader.dump(EvaluateConfig()),
        ("checkpoint", "episodes", "seed", "num_envs", "out", "device", "threads"),
    )
    changed = {k: v for k, v in loader.dump(config).items() if v != default[k] and k not in free and "video" not in k}
    name = f"step_{source.update:06d}-{config.episodes}x{config.seed}{f'-{digest(changed)[:6]}' if changed else ''}"
    out = Path(config.out) if config.out else run_dir / "reports" / name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written ({error.strerror}); name another directory") from error
    with progress:
        result, written = measure(out, progress.advance)
    found = numbers(result.metrics())
    intervals = {"ci95": result.intervals()} if isinstance(result, EvaluationResult) else {}
    return {"checkpoint": str(source.path), "episodes": config.episodes, **found, **intervals, **written}


def export(where: str, out: str) -> dict[str, Any]:
    """Write a checkpoint of a language model or of a model of action tokens as a directory of the published layout.

    Raises CheckpointError, ConfigError, EnvError.
    """
    source, run_dir, trained = _open(where)
    if trained.mode == "embodied" and trained.model.checkpoint is not None and trained.model.policy == "token":
        return embodied.export(trained, source, Path(out), run_dir=run_dir, say=Progress(quiet=False).say)
    if trained.mode == "embodied":
        raise ConfigError(
            f"checkpoint={where}: is a robot policy (model.policy={trained.model.policy}); export writes language "
            "models, and robot policies with model.policy=token and model.checkpoint. The weights are in "
            f"{source.path / checkpoint.POLICY}; docs/tutorial.md, section 6, loads them in a script of your own"
        )
    return reasoning.export(trained, source, Path(out))
