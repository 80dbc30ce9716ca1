"""A typed config -> a run directory: train, clone, plan, demos, evaluate, export."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Sequence
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
from embodied_ppo.core.types import (
    CheckpointError,
    ConfigError,
    EnvError,
    ProcessLost,
    TrainingError,
)
from embodied_ppo.imitation import expert_demos
from embodied_ppo.modes.base import (
    RunComponents,
    RunRequest,
    TrainedRun,
    config_hash,
    digest,
    matmul_precision,
    select_device,
)
from embodied_ppo.modes.embodied.components import make_env
from embodied_ppo.modes.registry import mode
from embodied_ppo.modes.workers import build_workers
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


# -------------------------------------------------------------------------------------------- train
def train(
    config: Config, *, explicit: Any = (), quiet: bool = False, since_s: float = 0.0
) -> dict[str, Any]:
    """Train as configured; return the content of ``summary.json``.

    Args:
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.
        since_s: Age of this process, in seconds, at the beginning of the run, from which
            ``startup_s`` is counted. Later runs of a process, as in a sweep, do not count the time
            of earlier ones.

    Raises:
        ConfigError, EnvError, CheckpointError: Before anything is written.
        TrainingError: The run fails.
        SystemExit: 130, after an interrupt has saved a checkpoint.
    """
    return _start(config, explicit, quiet, imitate=False, since_s=since_s)


def clone(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Clone the demonstrations of ``config.cloning`` without PPO: save, evaluate and report the
    clone.

    Arguments, result and exceptions: as of ``train``.
    """
    if (error := mode(config).cloning_error) is not None:
        raise ConfigError(error)
    model, steps = config.model, config.cloning.steps
    rules_of_cloning = (
        (
            model.policy == "actor_critic",
            (
                "model.policy = actor_critic: cannot be cloned; write model.policy=token, flow or"
                " gaussian, or experiment=tabletop_token"
            ),
        ),
        (steps == 0, "cloning.steps = 0: nothing would be learned; write cloning.steps=1500"),
        (
            config.resume is not None,
            (
                f"resume = {config.resume}: clone begins anew; leave it out, or go on with PPO:"
                f" embodied-ppo train resume={config.resume} run_dir=NEW"
            ),
        ),
        (
            config.run_dir is not None
            and bool(checkpoint.steps(Path(config.run_dir) / "checkpoints")),
            (
                f"run_dir={config.run_dir}: holds a run already; name another, or go on with PPO:"
                f" embodied-ppo train resume={config.run_dir} run_dir=NEW"
            ),
        ),
    )
    for violated, message in rules_of_cloning:
        if violated:
            raise ConfigError(message)
    return _start(config, explicit, quiet, imitate=True)


def _start(
    config: Config, explicit: Any, quiet: bool, *, imitate: bool, since_s: float = 0.0
) -> dict[str, Any]:
    """Open the run directory and the checkpoint to resume, then run; ``imitate``: clone only."""
    watchdog.clear()  # in a sweep, the calls of the previous run
    validation.check(config, explicit)
    early: list[str] = []
    with claimed(config, early.append) as (run_dir, resumed):
        source = None
        if resumed is not None:
            newest = resumed == "newest"
            if newest:
                source = checkpoint.newest_valid(run_dir, early.append)
            else:
                source = checkpoint.open_checkpoint(resumed)
            if newest and source is None:
                raise CheckpointError(
                    f"resume={config.resume}: holds no checkpoint (checkpoints/step_*); start a"
                    " new run"
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
    """Build the system, then run; rebuild it from the newest checkpoint where a process is lost."""
    updates = total_updates(config)
    device = select_device(config.device, config.threads)
    if source is not None:
        check_resume(config, source, updates, device, early.append)
        if (summary := _finished(run_dir, source, updates)) is not None:
            if not quiet:
                message = (
                    f"{run_dir}: nothing left to train and nothing changed;"
                    f" {mode(config).budget_options} asks for more than {updates} updates"
                )
                print(message, file=sys.stderr, flush=True)
            return summary
    task = mode(config).task_for_training(config, source, early.append)
    config = replace(absolute(config), run_dir=str(run_dir), resume=None, allow_changed_task=False)
    notices: set[str] = set()
    say = [early.append]  # replaced by the log once it is open

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
        "arithmetic": arithmetic(config, device),
    }
    if task is not None:
        info["task_hash"] = task.hash
    request = RunRequest(
        config,
        device,
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
            components = _build(request, stack)
        if source is not None:
            components.system.load(source, notice)
        first = source.update if source is not None else 0
        try:
            replace_text(run_dir / "config.yaml", text)
            if task is not None:
                task.save(run_dir)
            log = Log(
                run_dir,
                total_updates=updates,
                first_update=first,
                unit=components.system.unit,
                quiet=quiet,
            )
        except OSError as error:
            components.system.close()
            if error.errno not in DISK:
                raise
            raise ConfigError(
                f"run_dir={run_dir}: cannot be written ({error.strerror}); free space, or name"
                " another"
            ) from error
        say[0] = log.say
        try:
            for line in shown:
                log.say(line, show=False)
            for line in early:
                log.say(line)
            if imitate:
                return _save_clone(config, components, log)
            lost = 0
            while True:
                try:
                    if lost:
                        source = checkpoint.newest_valid(run_dir, log.say)
                        components = _build(replace(request, fresh_start=source is None), stack)
                        if source is not None:
                            components.system.load(source, notice)
                        first = source.update if source is not None else 0
                        log.rewind(first)
                        log.say(f"goes on after update {first}")
                    return _run(
                        config, components, log, first=first, updates=updates, since_s=since_s
                    )
                except ProcessLost as error:
                    lost += 1
                    if lost > config.cluster.max_restarts:
                        raise
                    log.say(
                        f"{error}\nrebuilding, {lost} of {config.cluster.max_restarts}"
                        " (cluster.max_restarts)"
                    )
                    components.system.close()
        except Exception as error:  # of any kind: the log records why the run ended; raised again
            log.say(f"failed: {type(error).__name__}: {error}")
            # The run had begun, so these are failures of a run, not refusals (another exit code).
            if isinstance(error, (ConfigError, CheckpointError, EnvError)):
                raise TrainingError(str(error)) from error
            if isinstance(error, OSError) and error.errno in DISK:
                saved = checkpoint.steps(run_dir / "checkpoints")
                next_command = f"resume={run_dir}" if saved else "the same command"
                raise TrainingError(
                    f"{error.filename or run_dir}: cannot be written ({error.strerror}); free"
                    f" space, then continue with {next_command}"
                ) from error
            raise
        finally:
            log.close()
            components.system.close()


def _finished(run_dir: Path, source: checkpoint.Checkpoint, updates: int) -> dict[str, Any] | None:
    """Return the summary of a run that has all its updates; None where some are left, or it has no
    report.
    """
    if source.update < updates or source.path.parent != (run_dir / "checkpoints").resolve():
        return None
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return summary if summary.get("updates") == source.update else None


def _build(request: RunRequest, stack: ExitStack) -> RunComponents:
    """Build the system in this process or in workers.

    Raises ConfigError, EnvError, PlacementError.
    """
    config, device = request.config, request.device
    implementation = mode(config)
    plan = implementation.plan(config, device)
    if plan is not None:
        return build_workers(implementation, request, plan)
    if implementation.can_estimate(config, in_process=True):
        implementation.check_memory(config, implementation.plan_on_one_device(config, device))
    return implementation.build_local(request, stack)


def _run(
    config: Config,
    components: RunComponents,
    log: Log,
    *,
    first: int,
    updates: int,
    since_s: float,
) -> dict[str, Any]:
    """Train from update ``first`` on, evaluate, and write report and summary."""
    run_dir, system, implementation = log.run_dir, components.system, mode(config)
    span = f"updates {first + 1} to {updates}" if first < updates else "nothing left to train"
    log.say(f"{config.name}: {components.title}, {span}, in {run_dir}")
    for line in batch_sizes.lines(config) if first < updates else ():
        log.say(f"  {line}")

    def show(result: Any) -> None:
        if rows := implementation.samples(result):
            log.table("samples", rows, steps=system.steps)

    system.measured = show
    started, timer, startup_s = time.perf_counter(), Timer(), process_age_s() - since_s
    before = log.row(0)
    begun = system.steps
    schedule = loop.Schedule(
        updates=updates,
        horizon=implementation.horizon(config),
        save_every=config.save_every,
        eval_every=config.eval_every,
        max_lag=config.cluster.max_lag,
    )
    with stop_signals(timer) as should_stop, matmul_precision(config.matmul_precision):
        try:
            if first and system.saved is None:  # resumed from the checkpoint of another run
                system.save(first)
            if first == 0:
                with timer("evaluate"):
                    metrics = system.evaluate(0)
                log.metrics(metrics, update=0, steps=0)
                before = numbers(metrics)
            if system.pending_row is not None and not log.row(first):
                log.say(f"update {first} was saved, but not logged; that is completed now")
                loop.evaluate_and_log(system, log, timer, system.pending_row, update=first)
            warm_up: dict[str, float] = {}  # CPU seconds of the first update, by phase
            worker_cpu_s = system.cpu_s()["process"]

            def after_first() -> None:
                phases = system.cpu_s()
                total = timer.total(loop.TRAINING)[1] + phases["process"] - worker_cpu_s
                warm_up.update(phases | {"total": total, "steps": float(system.steps)})

            outcome = loop.train(
                system,
                log,
                schedule,
                first_update=first,
                should_stop=should_stop,
                timer=timer,
                after_first=after_first,
            )
            if (
                system.result is None and not outcome.interrupted
            ):  # a finished run resumed: nothing was trained
                with timer("evaluate"):
                    system.evaluate(first)
        except KeyboardInterrupt:
            log.say(
                f"interrupted; saved: {system.saved}; continue with resume={run_dir}"
                if system.saved
                else "interrupted"
            )
            raise SystemExit(130) from None
    train_s, cpu_s = timer.total(loop.TRAINING)
    trained = system.steps - begun
    if outcome.updates <= first + 1:  # there is no other update to count
        warm_up.clear()
    counted = system.steps - warm_up.pop("steps", begun) or 1  # the first update is not counted
    phases = system.cpu_s()
    cpu_s += phases["process"] - worker_cpu_s
    split = {phase: s - warm_up.get(phase, 0.0) for phase, s in (phases | {"total": cpu_s}).items()}
    total = split.pop("total")
    split.pop("process")
    split["other"] = total - sum(split.values())
    if outcome.interrupted:
        log.say(
            f"interrupted after update {outcome.updates}; saved {system.saved}; continue with"
            f" resume={run_dir}"
        )
        raise SystemExit(130)
    assert system.saved is not None and system.result is not None
    final = numbers(system.result.metrics())
    out = run_dir / "reports" / f"step_{outcome.updates:06d}"
    written = components.write(system.result, checkpoint.open_checkpoint(system.saved), out)
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
        f"cpu_us_per_{one}_by_phase": {
            phase: round(s / counted * 1e6, 2) for phase, s in split.items()
        },
        f"{many}_per_s": round(trained / max(train_s, 1e-9), 1),
        "peak_rss_mb": round(peak_rss_mb(), 1),
        "initial_return": before.get("eval/return"),
        "final_return": final["eval/return"],
        "initial_success": before.get(implementation.success_metric),
        "final_success": final.get(implementation.success_metric),
        **components.facts,
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
    """Write summary.json, and its ``results`` beside the options in TensorBoard."""
    log.hyper_parameters(
        loader.flat(loader.relevant(config)), {f"hparam/{name}": summary[name] for name in results}
    )
    replace_text(log.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")


def _save_clone(config: Config, components: RunComponents, log: Log) -> dict[str, Any]:
    """Save the clone as update 0, evaluate it and write the report."""
    run_dir, system, timer = log.run_dir, components.system, Timer()
    log.say(f"{config.name}: {components.title}, cloned, in {run_dir}")
    started = time.perf_counter()
    with stop_signals(timer), matmul_precision(config.matmul_precision):
        try:
            saved = system.save(0)  # before the evaluation, which may fail
            with timer("evaluate"):
                metrics = system.evaluate(0)
        except KeyboardInterrupt:
            log.say(
                f"interrupted; saved: {system.saved}; measure it with evaluate checkpoint={run_dir}"
            )
            raise SystemExit(130) from None
    log.metrics(metrics, update=0, steps=0)
    final = numbers(metrics)
    out = run_dir / "reports" / "step_000000"
    written = components.write(system.result, checkpoint.open_checkpoint(saved), out)
    if written.get("video"):
        log.video("evaluation", str(written["video"]), steps=0)
    summary = {
        "updates": 0,
        "wall_s": round(time.perf_counter() - started, 3),
        **components.facts,
        "final_return": final["eval/return"],
        "final_success": final.get(mode(config).success_metric),
        "versions": versions(),
        "config_hash": config_hash(config),
        "run_dir": str(run_dir),
        "checkpoint": str(saved),
        "tensorboard": str(run_dir / "tensorboard"),
        **written,
    }
    _conclude(config, summary, log, ("final_return",))
    return summary


# --------------------------------------------------------------------------------------------- plan
def planned(config: Config) -> dict[str, Any]:
    """Return where the roles of a run would run, and their memory; nothing is started.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: The placement is not valid, or does not fit in memory.
    """
    plan = mode(config).resolve_plan(config, select_device(config.device, config.threads))
    needs = mode(config).check_memory(config, plan)
    turns = [f"{g.name} with {' and '.join(o.name for o in plan.sharing(g))}" for g in plan.groups]
    return {
        "devices": plan.rows(),
        "memory": placement.memory_rows(plan, needs),
        "weights": {
            f"rollout rank {i}": plan.weights_path(i) for i in range(plan.processes("rollout"))
        },
        "facts": {
            "takes turns": [text for text in turns if not text.endswith("with ")],
            **mode(config).facts(config, plan),
        },
    }


# -------------------------------------------------------------------------------------------- demos
def demos(config: DemosConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Record demonstrations of the scripted expert; return their number and success rate.

    Raises:
        ConfigError, EnvError: Before anything is recorded.
        TrainingError: The recording fails.
        SystemExit: 130, after an interrupt; finished demonstrations are on the disk.
    """
    make_env([0], config=expert_demos.recording_env(config), device=torch.device("cpu")).close()
    started = time.perf_counter()
    with Progress(quiet) as bar:
        try:
            with Interrupts() as interrupts:
                recording = expert_demos.record(
                    config,
                    bar.say,
                    lambda done, total: bar.advance("recording", done, total),
                    interrupts.uninterrupted,
                    done=bar.say,
                )
        except KeyboardInterrupt:
            bar.say(
                f"interrupted; {expert_demos.recorded(config.out)} of {config.episodes}"
                f" demonstrations are safe in {config.out}; the same command goes on"
            )
            raise SystemExit(130) from None
    return {
        "folder": str(Path(config.out)),
        "episodes": recording.episodes,
        "frames": recording.frames,
        "found": recording.found,
        "recorded": recording.episodes - recording.found,
        "expert_success": recording.succeeded / recording.tried if recording.tried else None,
        "wall_s": round(time.perf_counter() - started, 3),
        "families": recording.families,
    }


# ----------------------------------------------------------------------------------------- evaluate
def open_run(path: str) -> tuple[checkpoint.Checkpoint, Path, Config]:
    """Return a verified checkpoint, the directory of its run, and the options it was trained with.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: Its options are not of this version.
    """
    source = checkpoint.open_checkpoint(path)
    run_dir = (
        source.path.parent.parent
        if source.path.parent.name == "checkpoints"
        else source.path.parent
    )
    options = {**stored_options(source), "resume": None}
    return (
        source,
        run_dir,
        loader.load(Config, options, source=f"{loader.STORED}, {source.path / checkpoint.CONFIG}"),
    )


def evaluate(config: EvaluateConfig, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Evaluate a checkpoint and write the report; return metrics and paths.

    Raises:
        CheckpointError, ConfigError, EnvError: Before anything is written.
    """
    source, run_dir, trained = open_run(config.checkpoint)
    validation.check_evaluation(config, trained.mode, explicit)
    device, progress = select_device(config.device, config.threads), Progress(quiet)
    run = TrainedRun(trained, source, run_dir, progress.say)
    evaluator = mode(trained).evaluator(run, config, device)
    # The folder's name has a digest of the options that change the result, so that reports do not
    # overwrite each other.
    default, free = (
        loader.dump(EvaluateConfig()),
        ("checkpoint", "episodes", "seed", "num_envs", "out", "device", "threads"),
    )
    changed = {
        option: value
        for option, value in loader.dump(config).items()
        if value != default[option] and option not in free and "video" not in option
    }
    name = f"step_{source.update:06d}-{config.episodes}x{config.seed}{f'-{digest(changed)[:6]}' if changed else ''}"
    out = Path(config.out) if config.out else run_dir / "reports" / name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out={out}: cannot be written ({error.strerror}); name another directory"
        ) from error
    with progress:
        results = evaluator(out, progress.advance)
    return {"checkpoint": str(source.path), "episodes": config.episodes, **results}


def export(path: str, out: str) -> dict[str, Any]:
    """Write a checkpoint of a language model, or of a model of action tokens, in its published
    layout.

    Raises:
        CheckpointError, ConfigError, EnvError: The model has no such layout, or cannot be written.
    """
    source, run_dir, trained = open_run(path)
    say = Progress(quiet=False).say
    return mode(trained).export(TrainedRun(trained, source, run_dir, say), Path(out))
