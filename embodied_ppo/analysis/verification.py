"""Verification of a run: its files, options and metrics, and updates that are executed again.

A run is deterministic on one kind of machine: each checkpoint follows from the one before it, and
each evaluation from its checkpoint. ``verify`` executes intervals between two consecutive
checkpoints again and compares every tensor and every metric, evaluates the checkpoints of all
reports again, and compares all files with the digests that the run has recorded. The result is a
certificate.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from embodied_ppo import run
from embodied_ppo.analysis import recorded_files, reexecution
from embodied_ppo.analysis.recorded_files import Difference, Record
from embodied_ppo.analysis.reexecution import EVALUATION_METRICS, MACHINE_METRICS, NOT_REEXECUTED
from embodied_ppo.analysis.state_differences import (
    StateDifference,
    count,
    relative_difference,
    state_differences,
)
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core.devices import matmul_precision
from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    TrainingError,
    one_line,
    show,
)
from embodied_ppo.evaluation import report
from embodied_ppo.modes.base import (
    check_writable,
    evaluation_options,
    report_write_errors,
    select_device,
)
from embodied_ppo.training import checkpoint
from embodied_ppo.training.logging import finite
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import arithmetic, locked, replace_text, versions

FORMAT = 1
"""Version of certificate.json. Increase it when the meaning of a field changes."""
CERTIFICATE = "certificate.json"
ROUNDING = 1e-6
"""Differences up to ROUNDING * max(1, |a|, |b|) of two metrics a and b count as rounding. The 1
is there because metrics near 0 are often differences of larger numbers."""
MOST_LISTED = 100
"""Largest number of differences in a certificate, and of tensors of one checkpoint."""
NOT_VERIFIED = ("log.txt", "tensorboard/", "videos/", "report.html", "robustness.json")
"""Files of a run whose content is not compared with anything."""
Verdict = Literal["verified", "different"]


@dataclass(frozen=True)
class Interval:
    """Updates ``start`` + 1 to ``stop`` between two consecutive checkpoints."""

    start: int
    stop: int

    @property
    def updates(self) -> int:
        """Number of updates."""
        return self.stop - self.start

    def __str__(self) -> str:
        first = self.start + 1
        return f"update {first}" if self.updates == 1 else f"updates {first} to {self.stop}"


@dataclass
class Execution:
    """Result of the execution of an interval.

    Attributes:
        interval: The interval.
        tensors: Number of tensors that were compared.
        elements: Number of elements of these tensors.
        rows: Number of rows of metrics that were compared.
        differences: What differs.
        first_update: First update whose metrics differ; None: all metrics are equal.
        rounding: Whether the metrics of that update differ by rounding only.
        settings: Name -> (of the run, of this process) of versions and arithmetic settings that
            differ.
        error: Why the execution failed; "" if it did not.
    """

    interval: Interval
    tensors: int = 0
    elements: int = 0
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)
    first_update: int | None = None
    rounding: bool = False
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    error: str = ""


def verify(
    path: str | Path,
    *,
    updates: int | None = 5,
    seed: int = 0,
    out: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Verify a run, and write and return its certificate.

    Args:
        path: Directory of the run.
        updates: Number of updates to execute again, in intervals between two checkpoints that are
            chosen at random; None: all. The shortest interval is executed even if it is longer.
            0: none, files and evaluations only.
        seed: Seed of that choice.
        out: Directory of certificate.json; None: that of the run.
        quiet: Whether progress is hidden.

    Returns:
        Content of certificate.json, and its path ("certificate").

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: The run cannot be verified, or not
            executed here; nothing was written.
    """
    run_dir = reexecution.run_directory(path)
    if updates is not None and updates < 0:
        raise ConfigError(f"updates={updates}: must be at least 0, or all")
    if seed < 0:
        raise ConfigError(f"seed={seed}: must be at least 0")
    folder = run_dir if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out={folder}: is a file; name a directory")
    with ExitStack() as stack:
        if os.access(run_dir, os.W_OK):
            stack.enter_context(locked(run_dir, "RUN"))
        check_writable(folder)
        stack.enter_context(_torch_threads())
        content = _Verification(run_dir, updates, seed, Progress(quiet)).certificate()
        with report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / CERTIFICATE, json.dumps(content, indent=1) + "\n")
    return content | {"certificate": str(folder / CERTIFICATE)}


@contextmanager
def _torch_threads() -> Iterator[None]:
    """Restore the number of torch's threads at the end of the block."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Verification:
    """The state of one verification."""

    def __init__(self, run_dir: Path, updates: int | None, seed: int, progress: Progress) -> None:
        steps = checkpoint.steps(run_dir / "checkpoints")
        if not steps:
            raise CheckpointError(
                f"{run_dir}: has no checkpoint (checkpoints/step_*), so no update can be"
                " executed again; train with save_every > 0"
            )
        self.run_dir, self.updates, self.seed, self.progress = run_dir, updates, seed, progress
        self.record = Record(run_dir.resolve(), {u: p.resolve() for u, p in steps.items()})
        self.checks: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.differences: list[Difference] = []
        self.executions: list[Execution] = []
        self.evaluations = 0
        self.cause = ""
        """Why the first difference exists, as far as it can be determined."""

    # ------------------------------------------------------------------------------------ the steps
    def certificate(self) -> dict[str, Any]:
        """Check everything; return the content of certificate.json."""
        record = self.record
        self._add_check(
            "checkpoints",
            list(recorded_files.check_checkpoints(record)),
            f"{plural(len(record.checkpoints), 'checkpoint')} equal the SHA-256 in their manifests",
        )
        self._add_check(
            "options",
            list(recorded_files.check_options(record)),
            f"config.yaml of the run and of {plural(len(record.checkpoints), 'checkpoint')}",
        )
        if not record.checkpoints.keys() - record.damaged:
            return self._content()
        differences, notes = recorded_files.check_metrics(record)
        self.notes += notes
        self._add_check(
            "metrics", differences, f"{plural(len(record.rows), 'row')} of metrics.jsonl"
        )
        differences, notes = recorded_files.check_summary(record)
        self.notes += notes
        self._add_check("summary", differences, notes[0] if notes else "summary.json")
        self._check_settings()
        self._reexecute()
        self._evaluate_reports()
        self._explain()
        return self._content()

    def _add_check(self, name: str, differences: Sequence[Difference], detail: str) -> None:
        """Record the result of a check."""
        self.differences += differences
        if differences:
            detail = str(differences[0])
            if len(differences) > 1:
                detail += f", and {len(differences) - 1} more"
        result = "different" if differences else "equal"
        self.checks.append({"check": name, "result": result, "detail": detail})

    def _check_settings(self) -> None:
        """Report versions and arithmetic settings that differ; they do not change the verdict."""
        settings = self._settings(self.record.newest)
        detail = "as in the run"
        if settings:
            detail = ", ".join(_setting(name, *values) for name, values in settings.items())
        self.checks.append(
            {
                "check": "settings",
                "result": "different" if settings else "equal",
                "detail": detail,
            }
        )

    def _settings(self, update: int) -> dict[str, tuple[Any, Any]]:
        """Return the settings of a checkpoint that differ from those of this process.

        The order is that in which they are likely reasons of other results.
        """
        manifest, config = self.record.manifests[update], self.record.configs[update]
        device = select_device(config.device, config.threads)
        now = {**versions(), **arithmetic(config, device)}
        stored = {**(manifest.get("versions") or {}), **(manifest.get("arithmetic") or {})}
        order = dict.fromkeys(["torch", "threads", "device", "compile", *stored])
        return {
            name: (stored[name], now.get(name))
            for name in order
            if name in stored and stored[name] != now.get(name)
        }

    # ------------------------------------------------------------------------------------ intervals
    def _intervals(self) -> list[Interval]:
        """Return the intervals between consecutive checkpoints that can be executed."""
        record = self.record
        starts = {u for u in reexecution.starts(self.run_dir) if u not in record.damaged}
        if 0 not in record.checkpoints and 0 not in record.rows:
            starts.discard(0)  # continues another run, whose updates are not known
        intervals = []
        for stop in record.checkpoints:
            start = max((u for u in starts if u < stop), default=None)
            if start is None or self._mixed_settings(start, stop):
                continue
            if stop in record.altered_options:
                self.notes.append(
                    f"{Interval(start, stop)} cannot be executed again: the options of checkpoint"
                    f" {stop} were changed"
                )
            else:
                intervals.append(Interval(start, stop))
        return intervals

    def _mixed_settings(self, start: int, stop: int) -> bool:
        """Return whether options or threads changed between two checkpoints; add a note if so."""
        sessions = recorded_files.recorded_sessions(self.record.manifests.get(stop, {}))
        changes = [x["start"] for x in sessions if start < x["start"] < stop]
        if changes:
            self.notes.append(
                f"updates {start + 1} to {stop} cannot be executed again: options or settings"
                f" changed after update {changes[-1]}, whose checkpoint has been deleted"
            )
        return bool(changes)

    def _chosen(self, possible: Sequence[Interval]) -> list[Interval]:
        """Return the intervals to execute: as many as have ``updates`` updates, at least one."""
        if self.updates is None:
            return list(possible)
        if not self.updates or not possible:
            return []
        order = list(possible)
        random.Random(self.seed).shuffle(order)
        chosen, remaining = [], self.updates
        for interval in order:
            if interval.updates <= remaining:
                chosen.append(interval)
                remaining -= interval.updates
        return sorted(chosen or [min(order, key=lambda x: x.updates)], key=lambda x: x.start)

    def _reexecute(self) -> None:
        """Execute the chosen intervals, and those that contain what the other checks report."""
        possible = self._intervals()
        if self.updates != 0 and not possible:
            self._refuse_without_states()
        lag = max(config.cluster.max_lag for config in self.record.configs.values())
        if self.updates != 0 and lag:
            raise ConfigError(
                f"cluster.max_lag = {lag}: the run collected while it learned, and the order of"
                " both is not stored, so its updates cannot be executed again; write --updates 0 to"
                " verify files and reports"
            )
        chosen = self._chosen(possible)
        if self.updates is not None and sum(x.updates for x in chosen) > self.updates:
            self.progress.say(
                f"{chosen[0]} are the shortest interval between two checkpoints; for shorter ones"
                " train with a smaller save_every and a larger keep_last"
            )
        if self.updates != 0:
            chosen += self._intervals_of_rows(self.record.altered_rows, possible, chosen)
            chosen += [x for x in possible if x.stop in self.record.damaged]
        pending = sorted({*chosen}, key=lambda x: (x.start, x.stop))
        with tempfile.TemporaryDirectory(prefix="embodied-ppo-verify-") as folder:
            inserted: set[Interval] = set()
            execute_earlier = True
            while pending:
                interval = pending.pop(0)
                execution = self._execute(interval, Path(folder))
                self.executions.append(execution)
                self.differences += execution.differences
                if not self._is_unexplained(execution):
                    continue
                # The state from which the interval starts may be altered. The interval before it
                # ends at this state, so execute that one as well. If it also differs from its first
                # update on, the state is not the cause, and no earlier interval is executed.
                execute_earlier = execute_earlier and interval not in inserted
                before = next((x for x in possible if x.stop == interval.start), None)
                known = [x.interval for x in self.executions] + pending
                if execute_earlier and before and before not in known:
                    pending.insert(0, before)
                    inserted.add(before)
            if any(x.interval.start == 0 for x in self.executions) or 0 in self.record.altered_rows:
                self._check_initial_evaluation(Path(folder))
        self.executions.sort(key=lambda x: x.interval.start)
        differences = [d for x in self.executions for d in x.differences]
        executed = ", ".join(map(str, _merged([x.interval for x in self.executions])))
        tensors, rows = (sum(getattr(x, n) for x in self.executions) for n in ("tensors", "rows"))
        if self.executions:
            detail = (
                f"{executed}: {plural(tensors, 'tensor')} and {plural(rows, 'row')} of metrics,"
                " bit for bit"
            )
            self.checks.append(
                {
                    "check": "execution",
                    "result": "different" if differences else "equal",
                    "detail": _listed(differences) or detail,
                }
            )
        else:
            self.notes.append("no update was executed again (--updates 0)")

    @staticmethod
    def _intervals_of_rows(
        updates: set[int], possible: Sequence[Interval], chosen: Sequence[Interval]
    ) -> list[Interval]:
        """Return intervals that end at the last of these rows, to find the values of the rows.

        Args:
            updates: Updates whose rows do not have their digests.
            possible: Intervals between checkpoints.
            chosen: Intervals that are executed anyway.
        """
        intervals = []
        for interval in possible:
            inside = [u for u in updates if interval.start < u <= interval.stop]
            if inside and interval not in chosen:
                intervals.append(replace(interval, stop=max(inside)))
        return intervals

    def _refuse_without_states(self) -> None:
        """Raise CheckpointError: no interval can be executed."""
        if self.differences:
            self.notes.append("no update was executed again: no intact checkpoint to start from")
            return
        stored = ", ".join(map(str, self.record.checkpoints))
        if max(self.record.checkpoints) == 0:
            raise CheckpointError(
                f"{self.run_dir}: has no updates (it was cloned); write --updates 0 to verify"
                " its files and its report"
            )
        raise CheckpointError(
            f"{self.run_dir}: no update can be executed again from the checkpoints (update"
            f" {stored}): the updates before the first one belong to another run, or options"
            " changed between two; train with a smaller save_every and a larger keep_last, or"
            " write --updates 0 to verify files and reports"
        )

    # ------------------------------------------------------------------------------------ execution
    def _execute(self, interval: Interval, folder: Path) -> Execution:
        """Execute an interval and compare the result with the run."""
        record, stored = self.record, self.record.checkpoints.get(interval.stop)
        decisive = min(u for u in record.checkpoints if u >= interval.stop)
        result = Execution(interval)
        if decisive not in record.damaged:
            result.settings = self._settings(decisive)
        self.progress.say(f"executing {interval} again")
        out = folder / f"{interval.start}-{interval.stop}"
        try:
            reexecution.reexecute(self.run_dir, out, start=interval.start, stop=interval.stop)
        except TrainingError as error:
            result.error = one_line(error)
            location = f"the execution of {interval} failed: {result.error}"
            result.differences.append(Difference("checkpoints", location, interval.start + 1))
            return result
        except (ConfigError, CheckpointError, EnvError) as error:
            if not self.differences:
                raise
            result.error = one_line(error)
            self.notes.append(f"{interval} cannot be executed: {result.error}")
            return result
        self._compare_rows(result, out)
        if stored is not None:
            self._compare_states(result, out, stored)
            self._compare_evaluation(result, stored)
        elif EVALUATION_METRICS in "".join(record.rows.get(interval.stop, {})):
            self._compare_evaluation(result, out / "checkpoints" / f"step_{interval.stop:06d}")
        return result

    def _compare_rows(self, result: Execution, out: Path) -> None:
        """Compare the metrics of an execution with those of the run."""
        interval, executed = result.interval, Record(out, {})
        recorded_files.read_rows(executed)
        for update in range(interval.start + 1, interval.stop + 1):
            stored, again = self.record.rows.get(update), executed.rows.get(update)
            if stored is None or again is None:
                continue
            result.rows += 1
            tags = [t for t in dict.fromkeys([*stored, *again]) if not t.startswith(NOT_REEXECUTED)]
            differences = [
                Difference(
                    "metrics.jsonl",
                    f"update {update}, {tag}",
                    update,
                    stored.get(tag),
                    again.get(tag),
                    "executed again",
                    relative_difference(stored.get(tag), again.get(tag)),
                )
                for tag in tags
                if stored.get(tag) != again.get(tag) or (tag in stored) != (tag in again)
            ]
            if differences and result.first_update is None:
                result.first_update = update
                result.rounding = all(_is_rounding(d.stored, d.expected) for d in differences)
            result.differences += differences

    def _compare_states(self, result: Execution, out: Path, stored: Path) -> None:
        """Compare the tensors of a checkpoint with those of an execution."""
        executed = out / "checkpoints" / stored.name
        for name in (checkpoint.POLICY, checkpoint.TRAINING):
            file, update = self.record.name(stored / name), result.interval.stop
            again = checkpoint.load_file(executed / name)
            try:
                state = checkpoint.load_file(stored / name)
            except CheckpointError as error:
                result.differences.append(Difference(file, one_line(error), update))
                continue
            tensors, elements = count(again)
            result.tensors += tensors
            result.elements += elements
            result.differences += [
                _tensor_difference(file, update, d) for d in state_differences(state, again)
            ]

    def _compare_evaluation(self, result: Execution, source: Path) -> None:
        """Evaluate a checkpoint of an execution; compare the metrics with those of its row."""
        update = result.interval.stop
        row = self.record.rows.get(update, {})
        if update in self.record.damaged or not any(
            tag.startswith(EVALUATION_METRICS) for tag in row
        ):
            return
        result.differences += self._evaluation_differences(update, source)

    def _check_initial_evaluation(self, folder: Path) -> None:
        """Evaluate the initial policy; compare the metrics with the first row."""
        if not any(tag.startswith(EVALUATION_METRICS) for tag in self.record.rows.get(0, {})):
            return
        if 0 not in reexecution.starts(self.run_dir) or 0 in self.record.damaged:
            return
        self.progress.say("evaluating the initial policy again")
        out = folder / "initial"
        reexecution.reexecute(self.run_dir, out, start=0, stop=0)
        source = out / "checkpoints" / "step_000000"
        execution = next((x for x in self.executions if x.interval.start == 0), None)
        differences = self._evaluation_differences(0, source)
        self.differences += differences
        if execution is not None:
            execution.differences = [*differences, *execution.differences]

    def _evaluation_differences(self, update: int, source: Path) -> list[Difference]:
        """Return the metrics of an evaluation that differ from those of its row."""
        row = self.record.rows[update]
        config = self._config_at(update)
        metrics, _ = _evaluate(source, _training_evaluation(config), config)
        self.evaluations += 1
        return [
            Difference(
                "metrics.jsonl",
                f"update {update}, {tag}",
                update,
                row.get(tag),
                metrics.get(tag),
                "evaluated again",
                relative_difference(row.get(tag), metrics.get(tag)),
            )
            for tag in row
            if tag.startswith(EVALUATION_METRICS) and row[tag] != metrics.get(tag)
        ]

    def _config_at(self, update: int) -> Config:
        """Return the options with which the run evaluated an update."""
        configs = self.record.configs
        return configs[min((u for u in configs if u >= update), default=max(configs))]

    # -------------------------------------------------------------------------------------- reports
    def _evaluate_reports(self) -> None:
        """Repeat the evaluation of every report whose checkpoint is stored."""
        differences: list[Difference] = []
        evaluated = 0
        for file in sorted((self.record.run_dir / "reports").glob("*/report.json")):
            name = self.record.name(file)
            try:
                content = json.loads(self.record.read(file))
                update = int(content["update"])
                options = self._report_options(content, file, update)
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ) as error:
                differences.append(Difference(name, f"is no report ({one_line(error, kind=True)})"))
                continue
            if isinstance(options, str):
                self.notes.append(f"{name} was not evaluated again: {options}")
                continue
            self.progress.say(f"repeating the evaluation of {name}")
            source = self.record.checkpoints[update]
            _, again = _evaluate(source, options, self.record.configs[update])
            evaluated += 1
            of_report = _report_differences(name, update, content, again)
            if self.record.configs[update].teacher is not None:
                # Reports of a distillation's training have the options of its regression there.
                of_report = [d for d in of_report if not d.location.startswith("config.algorithm.")]
            differences += of_report
        self._add_check(
            "reports", differences, f"{plural(evaluated, 'evaluation')} with equal episodes"
        )
        self.evaluations += evaluated

    def _report_options(
        self, content: Mapping[str, Any], file: Path, update: int
    ) -> EvaluateConfig | str:
        """Return the options of a report's evaluation, or why it cannot be repeated."""
        if update not in self.record.checkpoints:
            return f"the checkpoint of update {update} has been deleted"
        if update in self.record.damaged:
            return f"the checkpoint of update {update} is damaged"
        if content["format"] != report.FORMAT:
            return f"it has format {content['format']}, this version reads {report.FORMAT}"
        config = self.record.configs[update]
        base = _training_evaluation(config)
        if "evaluation" in content:
            options = {**loader.dump(base), **dict(content["evaluation"])}
            options |= {"video": False, "robustness": False}
            try:
                return loader.load(EvaluateConfig, _known(options), source=str(file))
            except ConfigError as error:
                raise ValueError(one_line(error)) from error
        if file.parent.name == f"step_{update:06d}":
            return base
        return "an earlier version wrote it without the options of the evaluation"

    # ------------------------------------------------------------------------------------ the cause
    def _explain(self) -> None:
        """Determine why the first difference exists."""
        option = next((d for d in self.differences if d.location.startswith("option ")), None)
        if option is not None:
            self.cause = f"{_place(option)}, in {option.file}"
            return
        differing = [x for x in self.executions if x.differences]
        # The first execution whose metrics differ, or that failed; and the first other one.
        diverged = next((x for x in differing if x.first_update is not None or x.error), None)
        states_only = next((x for x in differing if x is not diverged), None)
        if diverged is None and states_only is None:
            settings = self._settings(self.record.newest)
            of_files = [d for d in self.differences if not self._is_executed(d)]
            if of_files and of_files[0].source == "evaluated again" and settings:
                names = "; ".join(_setting(n, *v) for n, v in settings.items())
                self.cause = f"other results: {names}{_cure(settings)}"
            return
        if states_only is not None and (
            diverged is None or states_only.interval.start <= diverged.interval.start
        ):
            first = states_only.differences[0]
            self.cause = f"content of {first.file} differs: {_place(first)}"
            return
        assert diverged is not None
        if not self._is_unexplained(diverged):
            first = diverged.differences[0]
            self.cause = f"content of {first.file} differs: {_place(first)}"
            return
        if diverged.settings:
            kind = "rounding" if diverged.rounding else "other results"
            names = "; ".join(_setting(n, *v) for n, v in diverged.settings.items())
            self.cause = f"{kind}: {names}{_cure(diverged.settings)}"
            return
        start = diverged.interval.start
        self.cause = (
            f"no version or setting differs: the state of update {start}, the options of"
            f" {self._decisive(diverged.interval)} or the code are not those of the run, or its"
            " computation is not repeatable"
        )
        if start in {x.interval.stop for x in self.executions if not x.differences}:
            self.cause = (
                f"no version or setting differs and the state of update {start} is verified: the"
                f" options of {self._decisive(diverged.interval)} or the code are not those of the"
                " run, or its computation is not repeatable"
            )

    def _decisive(self, interval: Interval) -> str:
        """Return the file whose options an execution uses."""
        update = min(u for u in self.record.checkpoints if u >= interval.stop)
        return self.record.name(self.record.checkpoints[update] / checkpoint.CONFIG)

    def _is_executed(self, difference: Difference) -> bool:
        return any(difference in x.differences for x in self.executions)

    def _is_unexplained(self, execution: Execution) -> bool:
        """Return whether an execution differs, and not only in altered rows."""
        if not execution.differences or (execution.first_update is None and not execution.error):
            return False
        updates = {(d.file, d.update) for d in execution.differences}
        # If a single row differs, and the tensors after it are equal, the row was altered.
        is_one_row = updates == {("metrics.jsonl", execution.first_update)} and (
            execution.tensors > 0 or execution.first_update != execution.interval.stop
        )
        rows = {("metrics.jsonl", update) for update in self.record.altered_rows}
        return not is_one_row and not updates <= rows

    # ------------------------------------------------------------------------------------- contents
    def _content(self) -> dict[str, Any]:
        """Return the content of certificate.json."""
        record = self.record
        config = next(iter(record.configs.values()), None)
        ordered = sorted(
            self.differences,
            key=lambda d: (self._is_executed(d), d.update is not None, d.update or 0),
        )
        verdict: Verdict = "different" if self.differences else "verified"
        executed = [x.interval for x in self.executions if not x.error]
        return {
            "format": FORMAT,
            "verdict": verdict,
            "run": str(self.run_dir),
            "name": None if config is None else config.name,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "updates": self.updates,
            "seed": self.seed,
            "checks": self.checks,
            "first_difference": str(ordered[0]) if ordered else None,
            "cause": self.cause or (_default_cause(ordered[0]) if ordered else None),
            "differences": [_plain(d) for d in ordered[:MOST_LISTED]],
            "number_of_differences": len(ordered),
            "notes": list(dict.fromkeys(self.notes)),
            "completed_updates": max(record.rows, default=max(record.checkpoints)),
            "checkpoints": list(record.checkpoints),
            "executed_updates": sum(x.updates for x in executed),
            "executions": [
                {
                    "start": x.interval.start,
                    "stop": x.interval.stop,
                    "tensors": x.tensors,
                    "elements": x.elements,
                    "rows": x.rows,
                    "equal": not x.differences and not x.error,
                    "error": x.error or None,
                }
                for x in self.executions
            ],
            "evaluations": self.evaluations,
            "not_compared": {
                "metrics": [f"{prefix}*" for prefix in MACHINE_METRICS],
                "files": list(NOT_VERIFIED),
            },
            "config_hashes": {
                str(u): m.get("config_hash") for u, m in sorted(record.manifests.items())
            },
            "settings_of_run": {
                name: record.manifests.get(max(record.checkpoints), {}).get(name)
                for name in ("versions", "arithmetic")
            },
            "settings": {
                "versions": versions(),
                "arithmetic": None
                if config is None
                else arithmetic(config, select_device(config.device, config.threads)),
            },
            "machine": {
                "host": platform.node(),
                "system": platform.platform(),
                "processor": _processor(),
                "cores": os.cpu_count(),
            },
            "files": dict(sorted(record.digests.items())),
        }


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals with adjacent ones joined."""
    merged: list[Interval] = []
    for interval in intervals:
        if merged and interval.start <= merged[-1].stop:
            merged[-1] = Interval(merged[-1].start, max(interval.stop, merged[-1].stop))
        else:
            merged.append(interval)
    return merged


# --------------------------------------------------------------------------------------- evaluation
def _training_evaluation(config: Config) -> EvaluateConfig:
    """Return the options of the evaluations during training."""
    options = {**loader.dump(EvaluateConfig()), **evaluation_options(config.evaluation)}
    options |= {
        "num_envs": config.evaluation.num_envs,
        "device": config.device,
        "threads": config.threads,
        "video": False,
    }
    return loader.load(
        EvaluateConfig, {**_known(options), "checkpoint": "RUN"}, source="evaluation"
    )


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``evaluate`` has."""
    names = loader.dump(EvaluateConfig())
    return {name: value for name, value in options.items() if name in names}


def _evaluate(
    source: Path, options: EvaluateConfig, config: Config
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evaluate a checkpoint; return the metrics as in metrics.jsonl, and report.json."""
    with tempfile.TemporaryDirectory(prefix="embodied-ppo-verify-") as folder:
        options = replace(options, checkpoint=str(source), out=folder)
        with matmul_precision(config.matmul_precision):
            results = run.evaluate(options, quiet=True)
        content = json.loads(Path(results["report_json"]).read_text())
    metrics = {
        tag: value
        for tag, value in results.items()
        if tag.startswith(EVALUATION_METRICS) and isinstance(value, float)
    }
    return finite(metrics), content


def _report_differences(
    name: str, update: int, stored: Mapping[str, Any], again: Mapping[str, Any]
) -> list[Difference]:
    """Return what differs between two reports; numbers of episodes come first."""
    ignored = ("versions", "evaluation", "checkpoint")
    paths = ("config.model.network",)  # the run's copy or the original, whichever was executed
    a, b = (
        {key: x[key] for key in sorted(x, key=lambda k: k != "episodes") if key not in ignored}
        for x in (stored, again)
    )
    return [
        Difference(name, d.name, update, d.stored, d.recomputed, "evaluated again", d.largest)
        for d in state_differences(a, b)
        if d.name not in paths
    ]


# ----------------------------------------------------------------------------------------- messages
def _tensor_difference(file: str, update: int, difference: StateDifference) -> Difference:
    index = "" if not difference.index else f", index {list(difference.index)}"
    kind = "tensor" if difference.index is not None else "value"
    extra = ""
    if difference.elements > 1:
        extra = f" ({difference.elements} of {difference.size} elements)"
    return Difference(
        file,
        f"{kind} {difference.name}{index}{extra}",
        update,
        difference.stored,
        difference.recomputed,
        "executed again",
        difference.largest,
    )


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(differences: Sequence[Difference]) -> str:
    """Return the first difference and the number of the others; "" if there is none."""
    if not differences:
        return ""
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"{differences[0]}{more}"


def _place(difference: Difference) -> str:
    """Return a difference without its file."""
    return str(difference).removeprefix(f"{difference.file}: ")


def _is_rounding(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in (a, b))
    return numbers and abs(a - b) <= ROUNDING * max(1.0, abs(a), abs(b))


def _setting(name: str, stored: Any, now: Any) -> str:
    """Return a line about a setting that differs."""
    label = {"threads": "number of threads", "torch": "version of torch"}.get(name, name)
    return f"{label} was {show(stored)}, is {show(now)}"


def _cure(settings: Mapping[str, tuple[Any, Any]]) -> str:
    """Return how to repeat the verification with the run's number of threads, if that differs."""
    if "threads" not in settings:
        return ""
    return f"; repeat the verification with OMP_NUM_THREADS={settings['threads'][0]}"


def _default_cause(difference: Difference) -> str:
    return f"content of {difference.file} differs from what the run recorded"


def _plain(difference: Difference) -> dict[str, Any]:
    """Return a difference for JSON."""
    plain = asdict(difference)
    if not plain["largest"] < float("inf"):
        plain["largest"] = None
    return {**finite_values(plain), "text": str(difference)}


def finite_values(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with numbers that are not finite as text."""
    return {
        key: str(x) if isinstance(x, float) and (x != x or abs(x) == float("inf")) else x
        for key, x in plain.items()
    }


def _processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
