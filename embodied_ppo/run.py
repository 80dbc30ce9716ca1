"""A typed config -> a run directory: train, clone, plan, demos, evaluate, export."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config import batch_sizes, loader, placement, validation
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.compose import GIVEN
from embodied_ppo.config.rules.embodied import optimization_config
from embodied_ppo.config.schema import Config, DemosConfig, EvaluateConfig
from embodied_ppo.core import watchdog
from embodied_ppo.core.devices import matmul_precision
from embodied_ppo.core.errors import show
from embodied_ppo.core.types import (
    CheckpointError,
    ConfigError,
    EnvError,
    ProcessLost,
    TrainingError,
    UpdateObserver,
)
from embodied_ppo.evaluation import report
from embodied_ppo.imitation import expert_demos
from embodied_ppo.interop.policies import libraries
from embodied_ppo.interop.policies.imported import ImportedPolicy
from embodied_ppo.models import own_network
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.modes.base import (
    RunComponents,
    RunRequest,
    TrainedRun,
    config_hash,
    digest,
    report_write_errors,
    select_device,
)
from embodied_ppo.modes.embodied.components import describe_spaces, make_env, make_policy
from embodied_ppo.modes.embodied.distillation import check_teacher
from embodied_ppo.modes.registry import mode
from embodied_ppo.modes.workers import build_workers
from embodied_ppo.placement.remote_envs import EnvDescription
from embodied_ppo.training import checkpoint, loop, trackers
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.logging import Log, Timer, numbers, peak_rss_mb, process_age_s
from embodied_ppo.training.progress import Interrupts, Progress, stop_signals
from embodied_ppo.training.run_directory import (
    SAME_FUNCTION,
    absolute,
    arithmetic,
    changed_options,
    check_resume,
    claimed,
    parent_of,
    replace_text,
    stored_options,
    versions,
)
from embodied_ppo.training.run_files import PARENT, Parent
from embodied_ppo.training.system import RunSystem

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
"""Errors of a disk that is full, over quota, read-only or broken."""


# -------------------------------------------------------------------------------------------- train
def train(
    config: Config, *, explicit: Any = (), quiet: bool = False, stop_after: int | None = None
) -> dict[str, Any]:
    """Train as configured; return the content of ``summary.json``.

    Args:
        config: Resolved options.
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.
        stop_after: Update after which the run is saved and ends, so that ``resume`` can continue
            it; the result is then empty. None: the last one.

    Raises:
        ConfigError, EnvError, CheckpointError: Before anything is written.
        TrainingError: The run fails.
        SystemExit: 130, after an interrupt has saved a checkpoint.
    """
    validation.check_command(config, "train")
    return _train(config, explicit, quiet, stop_after=stop_after)


def train_branch(
    config: Config, parent: Parent, *, explicit: Any = (), quiet: bool = False
) -> dict[str, Any]:
    """Train a branch of another run from the checkpoint ``config.resume``.

    Args:
        config: Options of the branch.
        parent: Where it leaves the other run, written into its directory.
        explicit, quiet: As for ``train``.

    Result and exceptions: as of ``train``.
    """
    return _train(config, explicit, quiet, parent=parent)


@dataclass(frozen=True)
class Section:
    """A part of a run that is executed again.

    Attributes:
        stop_after: Update after which the execution saves and ends without an evaluation.
        files_from: Checkpoint of the run, for the versions of the user's own files.
        observer: Called with the experience and the minibatches. None: nothing is observed.
    """

    stop_after: int
    files_from: checkpoint.Checkpoint | None = None
    observer: UpdateObserver | None = None


def reexecute(config: Config, section: Section, *, quiet: bool = False) -> None:
    """Execute updates of another run again, see ``analysis.reexecution``.

    Args:
        config: Options of the run; ``resume`` names the checkpoint to start from, None for the
            first update, and ``run_dir`` a new directory.
        section: Which updates.
        quiet: Whether progress is not shown.

    Raises:
        ConfigError, EnvError, CheckpointError: Before anything is written.
        TrainingError: An update failed, as it did in the run.
        SystemExit: 130, after an interrupt.
    """
    if section.observer is not None:
        device = select_device(config.device, config.threads)
        if mode(config).plan(config, device) is not None:
            raise ConfigError(
                f"placement = {config.placement}: the run has several processes, and only the"
                " minibatches of runs in one process can be read; its updates can be executed"
                " again (fork)"
            )
    _train(config, (), quiet, section=section)


def distill(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Train a student by the labels of ``config.teacher``, see ``imitation.distillation``.

    Arguments, result and exceptions: as of ``train``.
    """
    validation.check_command(config, "distill")
    assert config.teacher is not None
    source = checkpoint.open_checkpoint(config.teacher, "teacher")
    # The checkpoint instead of the run: the teacher's training may continue.
    return _train(replace(config, teacher=str(source.path)), explicit, quiet)


def _train(
    config: Config,
    explicit: Any,
    quiet: bool,
    *,
    parent: Parent | None = None,
    section: Section | None = None,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """Run the training loop from the first update, or from that of a checkpoint, to the end.

    With ``section`` it runs those updates only, with ``stop_after`` it ends after that update; the
    result is then empty.
    """
    last = stop_after if section is None else section.stop_after
    with _opened(config, explicit, quiet, parent=parent, section=section, last=last) as run:
        if isinstance(run, dict):
            return run
        while True:
            try:
                if section is not None and section.observer is not None:
                    assert isinstance(run.system, LocalSystem)
                    run.system.set_observer(section.observer)
                session = _Session(run, section, stop_after)
                with _interruptible(run, session.timer, f"continue with resume={run.dir}") as stop:
                    session.evaluate_before()
                    outcome = loop.train(
                        run.system,
                        run.log,
                        session.schedule,
                        completed_updates=run.first,
                        should_stop=stop,
                        timer=session.timer,
                        after_first=session.after_first_update,
                    )
                    if session.schedule.stop_after is not None and not outcome.interrupted:
                        return {}
                    if run.system.result is None and not outcome.interrupted:
                        with session.timer("evaluate"):  # a finished run was resumed
                            run.system.evaluate(run.first)
                return session.summary(outcome)
            except ProcessLost as error:
                run.rebuild(error)


def clone(config: Config, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Clone the demonstrations of ``config.cloning`` without PPO: save, evaluate and report.

    Arguments, result and exceptions: as of ``train``.
    """
    _check_cloning(config)
    with _opened(config, explicit, quiet) as run:
        assert isinstance(run, _Run)
        system, log, timer, started = run.system, run.log, Timer(), time.perf_counter()
        log.say(f"{run.config.name}: {run.components.title}, cloned, in {run.dir}")
        with _interruptible(run, timer, f"measure it with evaluate checkpoint={run.dir}"):
            system.save(0)  # before the evaluation, which may fail
            with timer("evaluate"):
                metrics = system.evaluate(0)
        log.metrics(metrics, update=0, steps=0)
        written = run.write_report(0)
        final = numbers(metrics)
        measurements = {
            "updates": 0,
            "wall_s": round(time.perf_counter() - started, 3),
            "final_return": final["eval/return"],
            "final_success": final.get(mode(run.config).success_metric),
        }
        return run.write_summary(measurements, written, ("final_return",))


def _check_cloning(config: Config) -> None:
    """Raise ConfigError for options with which nothing can be cloned."""
    validation.check_command(config, "clone")
    if (error := mode(config).cloning_error) is not None:
        raise ConfigError(error)
    if config.model.policy == "actor_critic":
        raise ConfigError(
            "model.policy = actor_critic: cannot be cloned; write model.policy=token, flow or"
            " gaussian, or experiment=tabletop_token"
        )
    if config.cloning.steps == 0:
        raise ConfigError("cloning.steps = 0: nothing would be learned; write cloning.steps=1500")
    continuation = "continue with PPO: embodied-ppo train resume={} run_dir=NEW"
    if config.resume is not None:
        raise ConfigError(
            f"resume = {config.resume}: clone starts a new run; leave it out, or"
            f" {continuation.format(config.resume)}"
        )
    if config.run_dir is not None and checkpoint.steps(Path(config.run_dir) / "checkpoints"):
        raise ConfigError(
            f"run_dir={config.run_dir}: holds a run already; name another, or"
            f" {continuation.format(config.run_dir)}"
        )


# ------------------------------------------------------------------------------------ import policy
IMPORT = "import.json"
"""File of a run directory that names the origin of an imported policy."""


def import_policy(
    loaded: loader.Loaded[Config],
    library: str,
    path: Path,
    *,
    normalizer: Path | None = None,
    critic: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write a run whose first checkpoint is a trained policy of another library.

    Args:
        loaded: Options of the run. Those that follow from the file are set here.
        library: A key of ``interop.policies.libraries.LIBRARIES``.
        path: File of that library.
        normalizer: File of a normaliser of observations that the library keeps beside the policy.
        critic: Whether the value function is imported; False: a new one.
        quiet: Whether progress is not shown.

    Returns:
        Directory, checkpoint, options that follow from the file, and notes.

    Raises:
        ConfigError, EnvError: The file, or an option, is refused; nothing was written.
    """
    if loaded.config.mode != "embodied":
        raise ConfigError(
            f"mode = {loaded.config.mode}: import-policy reads policies of robots; leave it out"
        )
    policy = libraries.read(library, path, normalizer, critic=critic)
    config, derived = _with_imported_options(loaded, policy)
    explicit = loaded.deliberate(GIVEN)
    validation.check(config, explicit)
    for option in ("resume", "initial_policy", "teacher"):
        if getattr(config, option) is not None:
            raise ConfigError(
                f"{option} = {getattr(config, option)}: is not read by import-policy, which writes"
                " a new run; leave it out"
            )
    if config.placement != "local" or config.cluster.component_placement:
        raise ConfigError(
            f"placement = {config.placement}: import-policy runs in one process; write"
            " placement=local, and the placement when training goes on: train resume=RUN"
            f" placement={config.placement}"
        )
    spaces = EnvDescription(describe_spaces(config), torch.device("cpu"))
    probe = make_policy(config, spaces)
    assert isinstance(probe, ActorCritic)
    policy.check_sizes(probe, config.env.id)
    scaled = config.algorithm.reward_norm == "running"
    notes = [*policy.notes, *_import_notes(policy, config, explicit)]
    with _opened(config, explicit, quiet) as run:
        assert isinstance(run, _Run) and isinstance(run.system, LocalSystem)
        system, module = run.system, run.system.module
        assert isinstance(module, ActorCritic)
        run.log.say(f"{run.config.name}: {path} of {libraries.LIBRARIES[library].title}")
        policy.load_into(module, normalized_rewards=scaled)
        learner = system.learner
        if scaled and policy.value_scale is not None and isinstance(learner, Learner):
            scale, moments = policy.value_scale, learner.returns.moments
            moments.var.fill_(scale.std**2)
            moments.count.fill_(max(scale.count, 1.0))
        origin = {
            "library": library,
            "file": str(path.absolute()),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "normalizer": None if normalizer is None else str(normalizer.absolute()),
            "options": derived,
            "notes": notes,
        }
        replace_text(run.dir / IMPORT, json.dumps(origin, indent=1) + "\n")
        saved = system.save(0)
        for note in notes:
            run.log.say(f"note: {note}")
        return {"run_dir": str(run.dir), "checkpoint": str(saved), **origin}


def _with_imported_options(
    loaded: loader.Loaded[Config], policy: ImportedPolicy
) -> tuple[Config, dict[str, Any]]:
    """Return the options of a run with those of an imported policy, and the latter by path.

    Raises:
        ConfigError: The user has given an option another value than the file needs.
    """
    given = loaded.deliberate(GIVEN)
    given = {path: loader.flat(loader.dump(loaded.config))[path] for path in given}
    fixed = policy.fixed_options()
    fixed["model.activation"] = policy.checked_activation(given.get("model.activation"))
    for option, value in fixed.items():
        if option in given and given[option] != value:
            raise ConfigError(
                f"{option} = {show(given[option])}: {policy.label} has {show(value)}; leave it out"
            )
    free = {path: x for path, x in policy.suggested_options().items() if path not in given}
    derived = fixed | free
    options = loader.dump(loaded.config)
    for option, value in derived.items():
        section, name = option.split(".")
        options[section][name] = value
    return loader.read(Config, [("", options)]).config, derived


def _import_notes(policy: ImportedPolicy, config: Config, explicit: Any) -> list[str]:
    """Return what the user should know about an imported policy."""
    notes = ["the state of the optimiser is not imported; training starts with a new one"]
    if policy.activation is None and "model.activation" not in explicit:
        notes.append(
            f"model.activation={config.model.activation} is the library's default; the file does"
            " not contain it"
        )
    if policy.normalizer is None:
        notes.append("the file has no normaliser: the policy reads observations as they are")
    if policy.critic is None:
        notes.append(
            "the value function is new; let it learn first with algorithm.critic_warmup=10"
        )
    elif policy.gamma is not None and policy.gamma != config.algorithm.gamma:
        notes.append(
            f"the value function was trained with gamma={policy.gamma:g}, and algorithm.gamma ="
            f" {config.algorithm.gamma:g}"
        )
    return notes


# ------------------------------------------------------------------------------- open run directory
class _Messages:
    """Lines for the user, kept until the log is open."""

    def __init__(self, quiet: bool) -> None:
        self.bar = Progress(quiet)
        self.early_log_lines: list[str] = []
        """Lines that are not shown yet."""
        self._shown: list[str] = []
        self._notices: set[str] = set()
        self._log: Log | None = None

    def notice(self, line: str) -> None:
        """Report a line, each line once."""
        if line not in self._notices:
            self._notices.add(line)
            (self.early_log_lines.append if self._log is None else self._log.say)(line)

    def progress(self, line: str) -> None:
        """Show a line at once."""
        self._shown.append(line)
        self.bar.say(line)

    def open(self, log: Log) -> None:
        """Write all lines to the log."""
        self._log = log
        for line in self._shown:
            log.say(line, show=False)
        for line in self.early_log_lines:
            log.say(line)


@dataclass
class _Run:
    """A run whose directory is locked, whose system is built and whose log is open."""

    request: RunRequest
    components: RunComponents
    log: Log
    first: int
    """Updates that were completed before this process started, or before the last rebuild."""
    stack: ExitStack
    failures: int = 0

    sessions: list[dict[str, Any]] = field(default_factory=list)
    """``checkpoint.SESSIONS`` of the run."""

    def __post_init__(self) -> None:
        self.record_session()

    def record_session(self) -> None:
        """Let the system's checkpoints record the settings of all updates and the logged rows."""
        self.system.session = lambda: {
            checkpoint.SESSIONS: self.sessions,
            checkpoint.DIGEST: self.log.digest.record(),
        }

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def dir(self) -> Path:
        return self.request.run_dir

    @property
    def system(self) -> RunSystem:
        return self.components.system

    def rebuild(self, error: ProcessLost) -> None:
        """Rebuild the system from the newest checkpoint after the loss of a process.

        Raises the error after more than cluster.max_restarts losses.
        """
        limit = self.config.cluster.max_restarts
        while True:
            self.failures += 1
            if self.failures > limit:
                raise error
            self.log.say(f"{error}\nrebuilding, {self.failures} of {limit} (cluster.max_restarts)")
            self.system.close()
            try:
                source = checkpoint.newest_valid(self.dir, self.log.say)
                request = replace(self.request, fresh_start=source is None)
                self.components = _build(request, self.stack)
                if source is not None:
                    self.system.load(source, self.request.notice)
                self.first = source.update if source is not None else 0
                self.record_session()
                self.log.rewind(self.first)
                self.log.say(f"continuing after update {self.first}")
                return
            except ProcessLost as another:
                error = another

    def write_report(self, update: int) -> dict[str, str | None]:
        """Write the report of the last evaluation; return the paths of its files."""
        assert self.system.saved is not None
        written = self.components.write_report(
            self.system.result,
            checkpoint.open_checkpoint(self.system.saved),
            self.dir / "reports" / f"step_{update:06d}",
        )
        if written.get("video"):
            self.log.video("evaluation", str(written["video"]), steps=self.system.steps)
        return written

    def write_summary(
        self, measurements: Mapping[str, Any], written: Mapping[str, Any], results: Sequence[str]
    ) -> dict[str, Any]:
        """Write summary.json, and its ``results`` beside the options in TensorBoard."""
        summary = {
            **measurements,
            **self.components.facts,
            "versions": versions(),
            "config_hash": self.request.info["config_hash"],
            checkpoint.DIGEST: self.log.digest.record(),
            "run_dir": str(self.dir),
            "checkpoint": str(self.system.saved),
            "tensorboard": str(self.dir / "tensorboard") if self.log.board else None,
            **written,
        }
        self.log.hyper_parameters(
            loader.flat(loader.relevant(self.config)),
            {f"hparam/{name}": summary[name] for name in results},
        )
        self.log.trackers.summary(summary, steps=self.system.steps)
        plain = json.loads(json.dumps(summary))
        summary |= {checkpoint.SUMMARY_DIGEST: {"sha256": digest(plain)}}
        replace_text(self.dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary


@contextmanager
def _opened(
    config: Config,
    explicit: Any,
    quiet: bool,
    *,
    parent: Parent | None = None,
    section: Section | None = None,
    last: int | None = None,
) -> Iterator[_Run | dict[str, Any]]:
    """Open the run directory, load the checkpoint to resume, build the system, open the log.

    Args:
        config, explicit, quiet: As for ``train``.
        parent: Run that this one branches from; None: that of the checkpoint to resume, if any.
        section: Part of another run that is executed again.
        last: Number of updates after which this execution ends; None: those of the run.

    Yields:
        The run, or the summary of a run that has no update left.
    """
    watchdog.clear()  # in a sweep, the calls of the previous run
    validation.check(config, explicit)
    trackers.check(config)
    messages = _Messages(quiet)
    with (
        claimed(config, messages.early_log_lines.append) as (run_dir, resumed),
        ExitStack() as stack,
    ):
        source = _checkpoint_to_resume(config, run_dir, resumed, messages.early_log_lines.append)
        updates = total_updates(config)
        device = select_device(
            config.device, config.threads, notice=messages.early_log_lines.append
        )
        if source is not None:
            check_resume(config, source, updates, device, messages.early_log_lines.append)
            if (summary := _finished(run_dir, source, updates)) is not None:
                if changed := changed_options(config, source):
                    path, value = next(iter(changed.items()))
                    raise ConfigError(
                        f"{path}={show(value)}: {run_dir} has completed its {updates} updates, and"
                        f" nothing would use the new value; train further with"
                        f" {mode(config).budget_options}, or leave it out"
                    )
                messages.bar.say(
                    f"{run_dir}: nothing left to train and nothing changed;"
                    f" {mode(config).budget_options} requests more than {updates} updates"
                )
                yield summary
                return
        teacher = _teacher(config, messages.early_log_lines.append)
        if config.initial_policy is not None and source is None:
            _check_initial_policy(config)
        files_from = source if section is None else source or section.files_from
        task = mode(config).task_for_training(config, files_from, messages.early_log_lines.append)
        network = _network(config, files_from, messages.early_log_lines.append)
        if parent is None and section is None and source is not None:
            parent = parent_of(config, source, run_dir)
        config = replace(
            absolute(config), run_dir=str(run_dir), resume=None, allow_changed_task=False
        )
        text = yaml.safe_dump(loader.relevant(config), sort_keys=False)
        options = loader.flat(loader.relevant(config))
        info = {
            "versions": versions(),
            "config_hash": config_hash(config),
            "arithmetic": arithmetic(config, device),
        }
        if network is not None:  # all processes execute the copy
            info["network_hash"] = network.hash
            model = replace(config.model, network=network.spec_in(run_dir))
            config = replace(config, model=model)
        request = RunRequest(
            optimization_config(config),
            device,
            run_dir,
            updates,
            text,
            info if task is None else {**info, "task_hash": task.hash},
            messages.notice,
            messages.progress,
            messages.early_log_lines,
            source is None,
            advance=messages.bar.advance,
            task=None if task is None else task.without_data(run_dir),
            teacher=teacher,
            last_update=last,
        )
        saved = nullcontext() if network is None else network.saved(run_dir)
        with Interrupts(), messages.bar, saved:
            components = _build(request, stack)
        if source is not None:
            components.system.load(source, messages.notice)
        first = source.update if source is not None else 0
        try:
            replace_text(run_dir / "config.yaml", text)
            if parent is not None:
                replace_text(run_dir / PARENT, parent.text())
            if task is not None:
                task.save(run_dir)
            log = Log(
                run_dir,
                total_updates=updates,
                completed_updates=first,
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
        sessions = _sessions(source, run_dir, info)
        run = _Run(request, components, log, first, stack, sessions=sessions)
        status: trackers.Status = "interrupted"
        try:
            messages.open(log)
            resumed_here = source is not None and source.path.parent.parent == run_dir.resolve()
            log.trackers = trackers.start(config, run_dir, options, log.say, resumed=resumed_here)
            yield run
            status = "finished"
        except Exception as error:  # of any kind: the log records why the run ended; raised again
            status = "failed"
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
            log.close(status)
            run.system.close()


def _teacher(config: Config, say: Callable[[str], None]) -> TrainedRun | None:
    """Return the teacher of a distillation, checked; None: the run trains by PPO."""
    if config.teacher is None:
        return None
    source, run_dir, trained = open_run(config.teacher, "teacher")
    say(f"teacher: {source.path}, {source.update} updates")
    teacher = TrainedRun(trained, source, run_dir, say)
    check_teacher(teacher, config)
    return teacher


def _check_initial_policy(config: Config) -> None:
    """Refuse an initial policy whose weights would be another function. Raises ConfigError."""
    assert config.initial_policy is not None
    _, run_dir, trained = open_run(config.initial_policy, "initial_policy")
    then, now = loader.flat(loader.relevant(trained)), loader.flat(loader.relevant(config))
    for path in SAME_FUNCTION:
        if then.get(path) != now.get(path):
            raise ConfigError(
                f"{path} = {show(now.get(path))}: initial_policy={run_dir} has"
                f" {show(then.get(path))}, and with another value its weights are another function;"
                f" write {path}={show(then.get(path))}"
            )


def _network(
    config: Config, source: checkpoint.Checkpoint | None, say: Callable[[str], None]
) -> own_network.NetworkFile | None:
    """Return the file of ``model.network`` that a run executes; None without the option."""
    if config.model.network is None:
        return None
    stored, stored_dir = None, None
    if source is not None:
        stored, stored_dir = source.manifest.get("network_hash"), source.path.parent.parent
    return own_network.for_training(
        config.model.network, stored, stored_dir, allow=config.allow_changed_task, say=say
    )


def _checkpoint_to_resume(
    config: Config, run_dir: Path, resumed: str | None, say: Callable[[str], None]
) -> checkpoint.Checkpoint | None:
    """Return the checkpoint that ``claimed`` has located; None for a new run."""
    if resumed is None:
        return None
    if resumed != "newest":
        return checkpoint.open_checkpoint(resumed)
    source = checkpoint.newest_valid(run_dir, say)
    if source is None:
        raise CheckpointError(
            f"resume={config.resume}: holds no checkpoint (checkpoints/step_*); start a new run"
        )
    checkpoint.repair(run_dir, source, say)
    return source


def _sessions(
    source: checkpoint.Checkpoint | None, run_dir: Path, info: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the settings of the run's updates so far, and those of this process."""
    first = 0 if source is None else source.update
    session = {"start": first, **{key: info[key] for key in ("config_hash", "arithmetic")}}
    stored = []
    if source is not None and source.path.parent == (run_dir / "checkpoints").resolve():
        stored = source.manifest.get(checkpoint.SESSIONS) or []
    sessions = [entry for entry in stored if entry["start"] < first]
    if sessions and {**sessions[-1], "start": first} == session:
        return sessions
    return [*sessions, session]


def _finished(run_dir: Path, source: checkpoint.Checkpoint, updates: int) -> dict[str, Any] | None:
    """Return the summary of a run without updates left; None if there are some, or no report."""
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


@contextmanager
def _interruptible(run: _Run, timer: Timer, cure: str) -> Iterator[Callable[[], bool]]:
    """Handle signals while a run trains; yield a function that returns whether one has arrived.

    Raises SystemExit(130) after a second signal.
    """
    with stop_signals(timer) as should_stop, matmul_precision(run.config.matmul_precision):
        try:
            yield should_stop
        except KeyboardInterrupt:
            saved = run.system.saved
            run.log.say(f"interrupted; saved: {saved}; {cure}" if saved else "interrupted")
            raise SystemExit(130) from None


class _Session:
    """Training from update ``run.first`` to the end of the run or the loss of a process.

    Measures time per phase. The first update is left out of the measured speed, because it builds
    the simulators and loads compiled code.
    """

    def __init__(
        self, run: _Run, section: Section | None = None, stop_after: int | None = None
    ) -> None:
        """Write the first lines of the log and start the clocks."""
        config, updates, first = run.config, run.request.updates, run.first
        self.run, self.mode, self.section = run, mode(config), section
        last = section.stop_after if section is not None else stop_after or updates
        span = f"updates {first + 1} to {last}" if first < last else "nothing left to train"
        run.log.say(f"{config.name}: {run.components.title}, {span}, in {run.dir}")
        for line in batch_sizes.lines(config) if first < last else ():
            run.log.say(f"  {line}")
        run.system.on_evaluation = self._log_samples
        self.started, self.timer = time.perf_counter(), Timer()
        self.startup_s = process_age_s()
        self.schedule = loop.Schedule(
            updates=updates,
            horizon=self.mode.horizon(config),
            save_every=config.save_every,
            eval_every=config.eval_every,
            max_lag=1 if config.pipeline else config.cluster.max_lag,
        )
        if section is not None:
            self.schedule = replace(self.schedule, save_every=0, eval_every=0)
        if last < updates or section is not None:
            self.schedule = replace(self.schedule, stop_after=last)
        self.initial: Mapping[str, Any] = run.log.row(0)
        """Metrics of the evaluation before the first update."""
        self.steps_before, self.worker_cpu_s = run.system.steps, 0.0
        self.warm_up: dict[str, float] = {}
        """CPU seconds of the first update by phase, and "steps"."""

    def _log_samples(self, result: Any) -> None:
        if rows := self.mode.samples(result):
            self.run.log.table("samples", rows, steps=self.run.system.steps)

    def evaluate_before(self) -> None:
        """Evaluate the initial policy, or complete the update that a resumed run has not logged."""
        system, log, first = self.run.system, self.run.log, self.run.first
        if first and system.saved is None:  # resumed from the checkpoint of another run
            system.save(first)
        # A run that stops early is one of several trials. Its first evaluation would take more time
        # than a short training.
        if first == 0 and self.section is None and self.schedule.stop_after is None:
            with self.timer("evaluate"):
                metrics = system.evaluate(0)
            log.metrics(metrics, update=0, steps=0)
            self.initial = numbers(metrics)
        if system.pending_row is not None and not log.row(first):
            log.say(f"update {first} was saved, but not logged; that is completed now")
            loop.evaluate_and_log(system, log, self.timer, system.pending_row, update=first)
        self.worker_cpu_s = system.cpu_s()["process"]

    def _cpu_s(self) -> dict[str, float]:
        """Return CPU seconds of training by phase, and their "total" over all processes."""
        phases = dict(self.run.system.cpu_s())
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
        train_s, cpu = self.timer.total(loop.TRAINING_PHASES)[0], self._cpu_s()
        # The first update is not counted, unless there is no other.
        warm_up = self.warm_up if outcome.updates > run.first + 1 else {}
        counted = system.steps - warm_up.get("steps", self.steps_before) or 1
        split = {phase: s - warm_up.get(phase, 0.0) for phase, s in cpu.items()}
        total = split.pop("total")
        split["other"] = total - sum(split.values())
        if outcome.interrupted:
            run.log.say(
                f"interrupted after update {outcome.updates}; saved {system.saved}; continue with"
                f" resume={run.dir}"
            )
            raise SystemExit(130)
        written = run.write_report(outcome.updates)
        final = numbers(system.result.metrics())
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
            "initial_return": self.initial.get("eval/return"),
            "final_return": final["eval/return"],
            "initial_success": self.initial.get(self.mode.success_metric),
            "final_success": final.get(self.mode.success_metric),
        }
        return run.write_summary(measurements, written, ("final_return", f"cpu_us_per_{one}"))


# --------------------------------------------------------------------------------------------- plan
def planned(config: Config) -> dict[str, Any]:
    """Return where the roles of a run would run, and their memory; nothing is started.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: The placement is not valid, or does not fit in memory.
    """
    plan = mode(config).resolve_plan(config, select_device(config.device, config.threads))
    needs = mode(config).check_memory(config, plan)
    time_sharing = [
        f"{group.name} with {' and '.join(other.name for other in others)}"
        for group in plan.groups
        if (others := plan.sharing(group))
    ]
    return {
        "devices": plan.rows(),
        "memory": placement.memory_rows(plan, needs),
        "weights": {
            f"rollout rank {i}": plan.weights_path(i) for i in range(plan.processes("rollout"))
        },
        "facts": {
            "time sharing": time_sharing,
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
                    on_complete=bar.say,
                )
        except KeyboardInterrupt:
            bar.say(
                f"interrupted; {expert_demos.count_recorded(config.out)} of {config.episodes}"
                f" demonstrations are safe in {config.out}; the same command continues"
            )
            raise SystemExit(130) from None
    return {
        "folder": str(Path(config.out)),
        "episodes": recording.episodes,
        "frames": recording.frames,
        "found": recording.existing,
        "recorded": recording.episodes - recording.existing,
        "expert_success": recording.successes / recording.attempts if recording.attempts else None,
        "wall_s": round(time.perf_counter() - started, 3),
        "families": recording.families,
    }


# ----------------------------------------------------------------------------------------- evaluate
def open_run(path: str, option: str = "checkpoint") -> tuple[checkpoint.Checkpoint, Path, Config]:
    """Return a verified checkpoint, the directory of its run, and the options it was trained with.

    Args:
        path: Directory of a run, or of a checkpoint.
        option: The option that names ``path``, for messages.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: Its options are not of this version.
    """
    source = checkpoint.open_checkpoint(path, option)
    folder = source.path.parent
    run_dir = folder.parent if folder.name == "checkpoints" else folder
    options = {**stored_options(source), "resume": None}
    origin = f"{loader.STORED}, {source.path / checkpoint.CONFIG}"
    return source, run_dir, loader.load(Config, options, source=origin)


def load_policy(
    path: str, *, device: str = "cpu", seed: int = 0, allow_changed_task: bool = False
) -> Any:
    """Return the policy of a checkpoint of a robot, see ``Mode.load_policy``.

    Raises:
        CheckpointError, ConfigError, EnvError: The checkpoint or its task cannot be used.
    """
    source, run_dir, trained = open_run(path)
    say = Progress(quiet=False).say
    chosen = select_device(device, 0, notice=say)
    run = TrainedRun(trained, source, run_dir, say)
    return mode(trained).load_policy(run, chosen, seed=seed, allow_changed_task=allow_changed_task)


def evaluate(config: EvaluateConfig, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Evaluate a checkpoint and write the report; return metrics and paths.

    Raises:
        CheckpointError, ConfigError, EnvError: Before anything is written.
    """
    source, run_dir, trained = open_run(config.checkpoint)
    validation.check_evaluation(config, trained.mode, explicit)
    progress = Progress(quiet)
    device = select_device(config.device, config.threads, notice=progress.say)
    run = TrainedRun(trained, source, run_dir, progress.say)
    evaluator = mode(trained).evaluator(run, config, device)
    out = report_dir(config, source, run_dir)
    with report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    for name in report.FILES:
        if (out / name).is_dir():
            raise ConfigError(f"{out / name}: is a directory; remove it, or name another out=")
    with progress:
        results = evaluator(out, progress.advance)
    return {"checkpoint": str(source.path), "episodes": config.episodes, **results}


def report_dir(config: EvaluateConfig, source: checkpoint.Checkpoint, run_dir: Path) -> Path:
    """Return the directory of an evaluation's report.

    Its name has a digest of the options that change the result, so that reports do not overwrite
    each other.
    """
    if config.out:
        return Path(config.out)
    default = loader.dump(EvaluateConfig())
    free = ("checkpoint", "episodes", "seed", "num_envs", "out", "device", "threads")
    changed = {
        option: value
        for option, value in loader.dump(config).items()
        if value != default[option] and option not in free and "video" not in option
    }
    suffix = f"-{digest(changed)[:6]}" if changed else ""
    name = f"step_{source.update:06d}-{config.episodes}x{config.seed}{suffix}"
    return run_dir / "reports" / name


def export(path: str, out: str, *, adapter: bool = False) -> dict[str, Any]:
    """Write a checkpoint for other programs.

    An actor-critic policy becomes a deployment bundle (``modes.embodied.bundle``); a language
    model, or a published vision-language-action model, is written in its published layout.

    Args:
        path: A checkpoint or a run directory.
        out: Directory to write.
        adapter: Write the adapters of a policy with model.lora_rank only.

    Raises:
        CheckpointError, ConfigError, EnvError: The model cannot be exported, or not be written.
    """
    source, run_dir, trained = open_run(path)
    say = Progress(quiet=False).say
    run = TrainedRun(trained, source, run_dir, say)
    return mode(trained).export(run, Path(out), adapter=adapter)
