"""Train: decide what the run is, build its system, and repeat collect, update and publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError, ProcessLost
from embodied_ppo.cluster import run_plan
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.types import UpdateObserver
from embodied_ppo.options import batch_sizes, validation
from embodied_ppo.options.rules.base import refuse
from embodied_ppo.options.schema import Config
from embodied_ppo.programs.open_run import OpenRun, open_run, started
from embodied_ppo.programs.run_spec import RunSpec, budget_options
from embodied_ppo.training import checkpoint, generations, loop
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.logging import Timer, numbers, peak_rss_mb, process_age_s


def train(
    config: Config,
    *,
    explicit: Any = (),
    quiet: bool = False,
    observer: UpdateObserver | None = None,
    command: str | None = "train",
    **how: Any,
) -> dict[str, Any]:
    """Train from the first update, or from that of a checkpoint; return the content of
    ``summary.json``.

    Args:
        config: Resolved options.
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.
        observer: See ``reexecute``.
        command: Command that must read all options. None: they are those of another run.
        how: Further arguments of ``run_spec.decide``. ``stop_after``: update after which the run is
            saved and ends, so that ``resume`` can continue it; the result is then empty.

    Raises:
        ConfigError, EnvError, CheckpointError: Before anything is written.
        TrainingError: The run fails.
        SystemExit: 130, after an interrupt has saved a checkpoint.
    """
    if command is not None:
        validation.check_command(config, command)
    with started(config, explicit=explicit, quiet=quiet, **how) as (spec, messages, bar):
        # All updates are completed and reported.
        if spec.summary is not None:
            fact = f"{spec.run_dir}: nothing left to train and nothing changed"
            bar.say(f"{fact}; {budget_options(config)} requests more than {spec.updates} updates")
            return dict(spec.summary)
        with open_run(spec, messages, bar) as run:
            # Only the loss of a process leads to a repetition, from the newest checkpoint.
            while True:
                try:
                    if observer is not None:
                        assert isinstance(run.system, LocalSystem)
                        run.system.set_observer(observer)
                    # After a rebuild the clocks start again, and fewer updates may be completed.
                    session = _Session(run)
                    fix = f"continue with resume={spec.run_dir}"
                    with run.interruptible(session.timer, fix) as should_stop:
                        session.evaluate_before()
                        outcome = loop.train(
                            run.system,
                            run.log,
                            session.schedule,
                            completed_updates=run.completed_updates,
                            should_stop=should_stop,
                            timer=session.timer,
                            after_first=session.after_first_update,
                        )
                        # The execution that trains the last update evaluates and reports.
                        if spec.stop_after is not None and not outcome.interrupted:
                            return {}
                        evaluates = session.schedule.evaluates and not outcome.interrupted
                        if run.system.result is None and evaluates:
                            with session.timer("evaluate"):  # a finished run was resumed
                                run.system.evaluate(run.completed_updates)
                    return session.summary(outcome)
                except ProcessLost as error:
                    run.rebuild(error)


def distill(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Train a student by the labels of ``config.teacher``, see ``imitation.distillation``.

    Arguments, result and exceptions: as of ``train``.
    """
    validation.check_command(config, "distill")
    assert config.teacher is not None
    source = checkpoint.open_checkpoint(config.teacher, "teacher")
    # The checkpoint instead of the run: the teacher's training may continue.
    config = replace(config, teacher=str(source.path))
    return train(config, explicit=explicit, quiet=quiet, command="distill")


def reexecute(
    config: Config,
    *,
    stop_after: int,
    files_from: checkpoint.Checkpoint | None = None,
    observer: UpdateObserver | None = None,
    quiet: bool = False,
) -> None:
    """Execute updates of another run again, see ``tools.reexecution``.

    Args:
        config: Options of the run; ``resume`` names the checkpoint to start from, None for the
            first update, and ``run_dir`` a new directory.
        stop_after: Update after which the execution saves and ends without an evaluation.
        files_from: Checkpoint of the run, for the versions of the user's own files.
        observer: Called with the experience and the minibatches. None: nothing is observed.
        quiet: Whether progress is not shown.

    Raises:
        ConfigError, EnvError, CheckpointError: Before anything is written.
        TrainingError: An update failed, as it did in the run.
        SystemExit: 130, after an interrupt.
    """
    # An observer reads tensors, which must be in this process.
    if observer is not None:
        if run_plan.plan_run(config, select_device(config.device, config.threads)) is not None:
            raise ConfigError(
                f"placement = {config.placement}: the run has several processes, and only the"
                " minibatches of runs in one process can be read; its updates can be executed"
                " again (fork)"
            )
    train(
        config,
        quiet=quiet,
        observer=observer,
        command=None,
        stop_after=stop_after,
        reexecuted=True,
        files_from=files_from,
    )


def clone(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Train on the demonstrations of ``config.cloning`` or, with a language model, on the responses
    of ``config.data.train``, without PPO: save, evaluate and report.

    Arguments, result and exceptions: as of ``train``.
    """
    _check_cloning(config)
    if config.mode == "reasoning":  # a run of a language model needs a length
        config = replace(config, updates=config.updates or 1)
    with (
        started(config, explicit=explicit, quiet=quiet) as (spec, messages, bar),
        open_run(_without_critic(spec), messages, bar) as run,
    ):
        system, log, timer, start_s = run.system, run.log, Timer(), time.perf_counter()
        log.say(f"{config.name}: {run.built.title}, cloned, in {spec.run_dir}")
        system.on_evaluation = partial(_log_samples, run)
        with run.interruptible(timer, f"measure it with evaluate checkpoint={spec.run_dir}"):
            system.save(0)  # before the evaluation, which may fail
            if config.evaluation.episodes:
                with timer("evaluate"):
                    log.metrics(system.evaluate(0), update=0, steps=0)
        written = run.write_report(0)
        wall_s = round(time.perf_counter() - start_s, 3)
        return run.write_summary({"updates": 0, "wall_s": wall_s, **run.results("final")}, written)


def _without_critic(spec: RunSpec) -> RunSpec:
    """Return the run of a language model without critic and reference: cloning reads neither."""
    if spec.config.mode != "reasoning":
        return spec
    a = replace(spec.config.algorithm, adv_type="reinforce")
    config = replace(spec.config, algorithm=replace(a, use_kl_loss=False, use_kl_in_reward=False))
    plan = None if spec.plan is None else spec.plan.without("critic", "reference")
    return replace(spec, config=config, plan=plan)


def _check_cloning(config: Config) -> None:
    """Raise ConfigError for options with which nothing can be cloned."""
    # Refuse before the directory of the run is created and locked.
    validation.check_command(config, "clone")
    reasoning, task = config.mode == "reasoning", config.data.task
    small = not reasoning and config.model.policy == "actor_critic"
    refuse(
        reasoning and task is not None,
        f"write train with warm_start.steps, or data.task=null: data.task = {task} has no files of"
        " responses, which clone trains on",
    )
    refuse(small, "write model.policy=token, flow or gaussian: clone trains no actor_critic")
    refuse(config.cloning.steps == 0, "write cloning.steps=1500: cloning.steps=0 trains nothing")
    option = "initial_policy" if reasoning else "resume"
    continuation = f"continue with PPO: embodied-ppo train {option}={{}} run_dir=NEW"
    refuse(
        config.resume is not None,
        f"remove resume, or {continuation.format(config.resume)}: clone starts a new run",
    )
    refuse(
        config.run_dir is not None and checkpoint.steps(Path(config.run_dir) / "checkpoints"),
        f"run_dir={config.run_dir}: already contains a run; name another, or"
        f" {continuation.format(config.run_dir)}",
    )


def write_initial_policy(
    config: Config,
    initialize: Callable[[LocalSystem, Path, Callable[[str], None]], None],
    *,
    explicit: Any = (),
    quiet: bool = False,
) -> tuple[Path, Path]:
    """Write a new run of one process whose only checkpoint is its policy before training.

    Args:
        config: Options of the run.
        initialize: Called with the system, the run directory and the log's ``say`` before the
            checkpoint is written; it sets the weights.
        explicit, quiet: As for ``train``.

    Returns:
        The run directory and the checkpoint.

    Raises:
        ConfigError, EnvError: An option is refused; nothing was written.
    """
    with (
        started(config, explicit=explicit, quiet=quiet) as (spec, messages, bar),
        open_run(spec, messages, bar) as run,
    ):
        assert isinstance(run.system, LocalSystem)
        initialize(run.system, spec.run_dir, run.log.say)
        return spec.run_dir, run.system.save(0)


def _log_samples(run: OpenRun, result: Any) -> None:
    """Log a table of responses and write them; the evaluation of a robot has none."""
    spec, system = run.spec, run.system
    # Only evaluations of prompts have responses to show.
    if spec.config.mode != "reasoning":
        return
    if rows := result.samples():
        run.log.table("samples", rows, steps=system.steps)
    if (dump := spec.config.rollout.dump) is not None:
        file = generations.file_of(spec.run_dir, "eval", system.version)
        generations.write(file, result.lines(dump))


class _Session:
    """Training from an update to the end of the run or the loss of a process.

    Measures time per phase. The first update is left out of the measured speed, because it builds
    the simulators and loads compiled code.
    """

    def __init__(self, run: OpenRun) -> None:
        """Write the first lines of the log and start the clocks."""
        spec, config, completed = run.spec, run.spec.config, run.completed_updates
        last = spec.last_update
        self.run = run
        span = f"updates {completed + 1} to {last}" if completed < last else "nothing left to train"
        run.log.say(f"{config.name}: {run.built.title}, {span}, in {spec.run_dir}")
        for line in batch_sizes.lines(config) if completed < last else ():
            run.log.say(f"  {line}")
        run.system.on_evaluation = partial(_log_samples, run)
        self.started, self.timer = time.perf_counter(), Timer()
        self.startup_s = process_age_s()
        # Repeated updates are not evaluated, and saved at the end only.
        self.schedule = loop.Schedule(
            updates=spec.updates,
            horizon=batch_sizes.horizon(config),
            save_every=0 if spec.reexecuted else config.save_every,
            eval_every=0 if spec.reexecuted else config.eval_every,
            evaluates=config.evaluation.episodes > 0,
            # A pipeline collects the next rollout while it learns from the current one.
            max_lag=1 if config.pipeline else config.cluster.max_lag,
            stop_after=spec.stop_after,
        )
        # Metrics of the evaluation before the first update.
        self.initial: Mapping[str, Any] = run.log.row(0)
        # Steps before this session do not count for its speed.
        self.steps_before, self.worker_cpu_s = run.system.steps, 0.0
        self.warm_up: dict[str, float] = {}  # CPU seconds of the first update by phase, and "steps"

    def evaluate_before(self) -> None:
        """Evaluate the initial policy, or complete the update that a resumed run has not logged."""
        system, log, first = self.run.system, self.run.log, self.run.completed_updates
        if first and system.saved is None:  # resumed from the checkpoint of another run
            system.save(first)
        # A run that stops early is one of several trials. Its first evaluation would take more time
        # than a short training.
        if first == 0 and self.schedule.stop_after is None and self.schedule.evaluates:
            with self.timer("evaluate"):
                metrics = system.evaluate(0)
            log.metrics(metrics, update=0, steps=0)
            self.initial = numbers(metrics)
        # The run ended between the checkpoint of this update and its row in the log.
        if (row := system.pending_row) is not None and not log.row(first):
            log.say(f"update {first} was saved, but not logged; that is completed now")
            row = replace(row, evaluation_due=row.evaluation_due and self.schedule.evaluates)
            loop.evaluate_and_log(system, log, self.timer, row, update=first)
            if self.run.spec.config.evaluation.env == "training":  # which has left its episodes
                source = checkpoint.open_checkpoint(self.run.spec.run_dir)
                system.load(source, self.run.messages.notice)
        # Count the CPU time of other processes from here on, without this evaluation.
        self.worker_cpu_s = system.cpu_s()["process"]

    def _cpu_s(self) -> dict[str, float]:
        """Return CPU seconds of training by phase, and their "total" over all processes."""
        phases = dict(self.run.system.cpu_s())
        # The timer measures this process only.
        workers = phases.pop("process") - self.worker_cpu_s
        return phases | {"total": self.timer.total(loop.TRAINING_PHASES)[1] + workers}

    def after_first_update(self) -> None:
        """Record what the first update has cost."""
        self.warm_up = self._cpu_s() | {"steps": float(self.run.system.steps)}

    def summary(self, outcome: loop.Outcome) -> dict[str, Any]:
        """Write the report and the summary; return the summary.

        Raises SystemExit(130) if the run was interrupted.
        """
        run, system = self.run, self.run.system
        # The execution that continues from here writes the report.
        if outcome.interrupted:
            line = (
                f"interrupted after update {outcome.updates}; saved {system.saved}; continue with"
            )
            run.log.say(f"{line} resume={run.spec.run_dir}" if system.saved else "interrupted")
            raise SystemExit(130)
        train_s, cpu = self.timer.total(loop.TRAINING_PHASES)[0], self._cpu_s()
        # The first update is not counted, unless there is no other.
        warm_up = self.warm_up if outcome.updates > run.completed_updates + 1 else {}
        # The divisor is 1 where nothing was trained.
        counted = system.steps - warm_up.get("steps", self.steps_before) or 1
        split = {phase: s - warm_up.get(phase, 0.0) for phase, s in cpu.items()}
        total = split.pop("total")
        # CPU time of training outside the measured phases.
        split["other"] = total - sum(split.values())
        written = run.write_report(outcome.updates)
        one, many = ("token", "tokens") if system.unit == "tokens" else ("step", "steps")
        measurements = {
            "updates": outcome.updates,
            system.unit: system.steps,
            "startup_s": round(self.startup_s, 2),
            "wall_s": round(time.perf_counter() - self.started, 3),
            "train_s": round(train_s, 3),
            "cpu_s": round(cpu["total"], 3),
            f"cpu_us_per_{one}": round(total / counted * 1e6, 2),
            f"cpu_us_per_{one}_by_phase": {
                phase: round(s / counted * 1e6, 2) for phase, s in split.items()
            },
            f"{many}_per_s": round((system.steps - self.steps_before) / max(train_s, 1e-9), 1),
            "peak_rss_mb": round(peak_rss_mb(), 1),
            **run.results("initial", self.initial),
            **run.results("final"),
        }
        return run.write_summary(measurements, written)
