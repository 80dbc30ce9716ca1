"""A run whose directory is locked, whose system is built and whose log is open."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from embodied_envs.base import errors, watchdog
from embodied_envs.base.compilation import highest_matmul_precision
from embodied_ppo.core.errors import SELF_EXPLANATORY, RunRefused
from embodied_ppo.core.guarded_files import replace_file
from embodied_ppo.evaluation import report
from embodied_ppo.evaluation.run_report import success_metric
from embodied_ppo.options import loader, validation
from embodied_ppo.options.schema import Config
from embodied_ppo.programs.run_spec import RunSpec, decide
from embodied_ppo.programs.system import BuiltSystem, build_system
from embodied_ppo.training import checkpoint, trackers
from embodied_ppo.training.logging import Log, Timer, numbers
from embodied_ppo.training.progress import Interrupts, Messages, Progress, stop_signals
from embodied_ppo.training.run_directory import claimed, digest, versions
from embodied_ppo.training.run_files import PARENT
from embodied_ppo.training.run_system import RunSystem

# Errors of a disk that is full, over quota, read-only or broken.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}


@dataclass
class OpenRun:
    """A run that trains.

    Attributes:
        spec: What the run is.
        built: Its system.
        log: Its log.
        sessions: Settings of the run's updates so far, ``checkpoint.SESSIONS`` of its checkpoints.
        completed_updates: Updates that were completed when this execution began, or at the
            checkpoint of the last rebuild.
        messages: Lines for the log.
        stack: Closes what the system has opened.
        failures: Losses of processes so far, see ``rebuild``.
    """

    spec: RunSpec
    built: BuiltSystem
    log: Log
    sessions: list[dict[str, Any]]
    completed_updates: int
    messages: Messages
    stack: ExitStack
    failures: int = 0

    def __post_init__(self) -> None:
        self._record_session()

    @property
    def system(self) -> RunSystem:
        """The system, which ``rebuild`` replaces."""
        return self.built.system

    def _record_session(self) -> None:
        """Set what checkpoints record: the settings of all updates, and a digest of the log."""
        # A function, because the digest changes with every row.
        self.system.session = lambda: {
            checkpoint.SESSIONS: self.sessions,
            checkpoint.DIGEST: self.log.digest.record(),
        }

    def rebuild(self, error: errors.ProcessLost) -> None:
        """Rebuild the system from the newest checkpoint after the loss of a process.

        Raises the error after more than cluster.max_restarts losses.
        """
        limit = self.spec.config.cluster.max_restarts
        while True:
            self.failures += 1
            if self.failures > limit:
                raise error
            self.log.say(f"{error}\nrebuilding, {self.failures} of {limit} (cluster.max_restarts)")
            # Close first: the new system needs the devices and the memory of the old one.
            self.system.close()
            try:
                # Without a checkpoint here, training starts again with the first update, and a
                # branch with the checkpoint of its parent.
                newest = checkpoint.newest_valid(self.spec.run_dir, self.log.say)
                source = newest or self.spec.checkpoint
                spec = replace(self.spec, checkpoint=source)
                self.built = build_system(spec, self.messages, self.stack)
                if source is not None:
                    self.system.load(source, self.messages.notice)
                self.completed_updates = spec.completed_updates
                # The hooks belong to the system, which is a new one.
                self._record_session()
                # Updates after the checkpoint are repeated, and so are their rows.
                self.log.rewind(self.completed_updates)
                self.log.say(f"continuing after update {self.completed_updates}")
                return
            except errors.ProcessLost as another:
                # Another process was lost while the system was built: try again within the limit.
                error = another

    @contextmanager
    def interruptible(self, timer: Timer, fix: str) -> Iterator[Callable[[], bool]]:
        """Handle signals while the run trains; yield a function that returns whether one arrived.

        Raises SystemExit(130) after a second signal.
        """
        with stop_signals(timer) as should_stop, highest_matmul_precision():
            try:
                yield should_stop
            # The first signal sets ``should_stop``; a second one, or one in an evaluation, raises.
            except KeyboardInterrupt:
                saved = self.system.saved
                self.log.say(f"interrupted; saved: {saved}; {fix}" if saved else "interrupted")
                raise SystemExit(130) from None

    # ------------------------------------------------------------------------------------- results
    def results(self, name: str, metrics: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return NAME_return and NAME_success; {} without evaluations.

        Args:
            name: Prefix of the entries.
            metrics: Metrics of an evaluation; None: those of the last one.
        """
        result = self.system.result
        if result is None:
            return {}
        metrics = numbers(result.metrics()) if metrics is None else metrics
        return {
            f"{name}_return": metrics.get("eval/return"),
            f"{name}_success": metrics.get(success_metric(self.spec.config)),
        }

    def write_report(self, update: int) -> Mapping[str, str | None]:
        """Write the report of the last evaluation, if any; return the paths of its files."""
        if self.system.result is None:
            return {}
        # An evaluation with a report follows the checkpoint of its update.
        assert self.system.saved is not None
        source = checkpoint.open_checkpoint(self.system.saved)
        folder = self.spec.run_dir / "reports" / f"step_{update:06d}"
        written = self.built.write_report(self.system.result, source, folder)
        if written.get("video"):
            self.log.trackers.video("evaluation", str(written["video"]), steps=self.system.steps)
        return written

    def write_summary(
        self, measurements: Mapping[str, Any], written: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write summary.json; return its content.

        Args:
            measurements: First entries of the summary.
            written: Files of the report.
        """
        spec, system = self.spec, self.system
        summary = {
            **measurements,
            **self.built.facts,
            "versions": versions(),
            "config_hash": spec.info["config_hash"],
            checkpoint.DIGEST: self.log.digest.record(),
            "run_dir": str(spec.run_dir),
            "checkpoint": str(system.saved),
            "tensorboard": str(spec.run_dir / "tensorboard") if self.log.board else None,
            **written,
        }
        self.log.trackers.summary(summary, steps=system.steps)
        # Hash what a reader of the file gets: JSON has no tuples and no numbers as keys.
        plain = json.loads(json.dumps(summary))
        summary |= {checkpoint.SUMMARY_DIGEST: {"sha256": digest(plain)}}
        replace_file(spec.run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary


# ----------------------------------------------------------------------------------------- opening
@contextmanager
def started(
    config: Config, *, explicit: Any = (), quiet: bool = False, **how: Any
) -> Iterator[tuple[RunSpec, Messages, Progress]]:
    """Check the options, lock the run directory and decide what the run is.

    Args:
        config: Resolved options.
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.
        how: Further arguments of ``run_spec.decide``.
    """
    watchdog.clear()  # in a sweep, the calls of the previous run
    validation.check(config, explicit)
    trackers.check(config)
    bar = Progress(quiet)
    messages = Messages(bar.say, bar.advance)
    # The directory is locked until the run ends, so that no other process trains in it.
    with (
        Interrupts(),
        claimed(config, messages.add) as (run_dir, resumed),
        _removed_if_untrained(run_dir),
    ):
        yield decide(config, run_dir, resumed, messages.add, **how), messages, bar


@contextmanager
def open_run(spec: RunSpec, messages: Messages, bar: Progress) -> Iterator[OpenRun]:
    """Build the system, load the checkpoint to resume, and open the log.

    Args:
        spec: The run.
        messages: Lines so far, which the log gets.
        bar: Shows progress while the system is built.

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: The run is refused; the directory
            has no new file.
        TrainingError, RunRefused: The run fails after that.
    """
    with ExitStack() as stack:
        # Later edits have no effect: changed files are replaced by their copies in the directory.
        task = None if spec.task is None else spec.task.without_data(spec.run_dir)
        saved = nullcontext() if spec.network is None else spec.network.saved(spec.run_dir)
        with bar, saved:
            built = build_system(replace(spec, task=task), messages, stack)
        # Load before the log is opened: a checkpoint that does not fit refuses the run.
        if spec.checkpoint is not None:
            built.system.load(spec.checkpoint, messages.notice)
        try:
            log = _write_start(spec, quiet=bar.quiet)
        except OSError as error:  # also of a file of another user, or too many open files
            built.system.close()
            fact = f"run_dir={spec.run_dir}: cannot be written ({error.strerror})"
            raise errors.ConfigError(f"{fact}; free space, or name another") from error
        built_spec, sessions = replace(spec, task=task), _sessions(spec)
        run = OpenRun(built_spec, built, log, sessions, spec.completed_updates, messages, stack)
        # KeyboardInterrupt and SystemExit are no ``Exception`` and leave this status.
        status: trackers.Status = "interrupted"
        try:
            # Lines were kept until now, because refused runs have no log.
            messages.open(log.say, lambda line: log.say(line, show=False))
            options = loader.flat(yaml.safe_load(spec.config_text))
            log.trackers = trackers.start(
                spec.config, spec.run_dir, options, log.say, resumed=spec.kind == "resumed"
            )
            yield run
            status = "finished"
        except Exception as error:  # of any kind: the log records why the run ended
            status = "failed"
            log.say(f"failed: {type(error).__name__}: {error}")
            _raise_failure(error, spec.run_dir)
        finally:
            log.close(status)
            run.system.close()


def _write_start(spec: RunSpec, *, quiet: bool) -> Log:
    """Write the files that say what the run is, and open its log."""
    replace_file(spec.run_dir / "config.yaml", spec.config_text)
    if spec.parent is not None:
        replace_file(spec.run_dir / PARENT, spec.parent.text())
    if spec.task is not None:
        spec.task.save(spec.run_dir)
    return Log(
        spec.run_dir,
        total_updates=spec.updates,
        completed_updates=spec.completed_updates,
        unit=spec.records.unit,
        quiet=quiet,
    )


def _raise_failure(error: Exception, run_dir: Path) -> None:
    """Raise the error of a run that had begun: it is a failure, not a refusal (exit code 3).

    ``RunRefused`` remains a refusal: the same command cannot succeed.
    """
    if isinstance(error, RunRefused):
        raise error
    # PlacementError: the devices of a lost process are missing when the system is built again.
    if isinstance(error, SELF_EXPLANATORY):
        raise errors.TrainingError(str(error)) from error
    if isinstance(error, OSError) and not run_dir.exists():
        hint = "leave the directory of a run in place while it trains"
        raise errors.TrainingError(f"{hint}: {errors.show_path(run_dir)} was removed") from error
    # A broken or full disk, and every error of a file of the run.
    file = Path(str(getattr(error, "filename", "")))
    if isinstance(error, OSError) and (
        error.errno in DISK or file.absolute().is_relative_to(run_dir.absolute())
    ):
        saved = checkpoint.steps(run_dir / "checkpoints")
        next_command = f"resume={errors.show_path(run_dir)}" if saved else "the same command"
        raise errors.TrainingError(
            f"free space, then continue with {next_command}:"
            f" {errors.show_path(error.filename or run_dir)} cannot be written ({error.strerror})"
        ) from error
    raise error


@contextmanager
def _removed_if_untrained(run_dir: Path) -> Iterator[None]:
    """Remove what a block writes if it ends before an update or a checkpoint.

    Interrupts and refusals end it so; of a run that fails, the log remains.
    """
    # Entries that exist before the run are never removed.
    existing = set(os.listdir(run_dir))
    try:
        yield
    except (KeyboardInterrupt, SystemExit, RunRefused):
        # Without a checkpoint and a trained update there is nothing to continue.
        if not checkpoint.steps(run_dir / "checkpoints") and not any(
            row.get("update") for row in report.rows(run_dir)
        ):
            for path in (run_dir / name for name in set(os.listdir(run_dir)) - existing):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        raise


def _sessions(spec: RunSpec) -> list[dict[str, Any]]:
    """Return the settings of the run's updates so far, and those of this process."""
    first = spec.completed_updates
    session = {"start": first, **{key: spec.info[key] for key in ("config_hash", "arithmetic")}}
    # A run that continues itself continues the list of its checkpoint; others start one.
    stored = []
    if spec.checkpoint is not None and spec.kind == "resumed":
        stored = checkpoint.recorded_sessions(spec.checkpoint.manifest)
    # Later entries are of updates that are repeated.
    sessions = [entry for entry in stored if entry["start"] < first]
    # With unchanged settings the last entry holds for these updates, too.
    if sessions and {**sessions[-1], "start": first} == session:
        return sessions
    return [*sessions, session]
