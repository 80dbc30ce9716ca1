"""Verification of a run: its files, options and metrics, and updates that are executed again.

A run is deterministic on one kind of machine: each checkpoint follows from the one before it, and
each evaluation from its checkpoint. ``verify`` compares all files with the digests that the run has
recorded, executes intervals between two consecutive checkpoints again and compares every tensor and
every metric, and evaluates the checkpoints of all reports again. The result is a certificate.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from embodied_envs.base import errors
from embodied_envs.base.compilation import highest_matmul_precision
from embodied_ppo.api import Run, path_text, whole_number
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.guarded_files import as_json, replace_file
from embodied_ppo.evaluation import checkpoint_evaluation, report
from embodied_ppo.options.schema import Config
from embodied_ppo.tools import recorded_files, reexecution
from embodied_ppo.tools.recorded_files import RunFiles
from embodied_ppo.tools.reexecution import Difference
from embodied_ppo.tools.state_differences import count_tensors, state_differences
from embodied_ppo.training import checkpoint, run_directory
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_files import METRICS

FORMAT = 2  # Version of certificate.json. Increase it when the meaning of a field changes.
CERTIFICATE = "certificate.json"
MOST_LISTED = 100  # largest number of differences in a certificate


# (start, stop) of the updates ``start`` + 1 to ``stop`` between two consecutive checkpoints.
Interval: TypeAlias = tuple[int, int]


def verify(
    run: str | Path | Run,
    *,
    updates: int | Literal["all"] = 5,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Verify a run, and write and return its certificate.

    Args:
        run: Directory of the run, or a ``Run``.
        updates: Number of updates to execute again, in intervals between two checkpoints that are
            chosen at random, or "all". The shortest interval is executed even if it is longer.
            0: none, files and evaluations only.
        seed: Seed of that choice.
        out: Directory of certificate.json; None: use the run's directory.
        progress: Show progress on stderr.

    Returns:
        Content of certificate.json, and its path ("certificate").

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: The run cannot be verified, or not
            executed here; nothing was written.
    """
    most = None if updates == "all" else whole_number("updates", updates)
    seed = whole_number("seed", seed)
    run_dir = reexecution.run_directory(path_text(run))
    if (most or 0) < 0 or seed < 0:
        raise errors.ConfigError(f"updates={updates}, seed={seed}: must be at least 0")
    folder = run_dir if out is None else Path(path_text(out, "out"))
    if folder.exists() and not folder.is_dir():
        raise errors.ConfigError(f"out={folder}: is a file; name a directory")
    with ExitStack() as stack:
        if os.access(run_dir, os.W_OK):
            stack.enter_context(run_directory.locked(run_dir, "RUN"))
        run_directory.check_writable(folder)
        content = _Verification(run_dir, most, seed, Progress(not progress)).certificate()
        with run_directory.report_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / CERTIFICATE, json.dumps(content, indent=1) + "\n")
    return content | {"certificate": str(folder / CERTIFICATE)}


class _Verification:
    """The state of one verification."""

    def __init__(self, run_dir: Path, updates: int | None, seed: int, progress: Progress) -> None:
        steps = checkpoint.steps(run_dir / "checkpoints")
        if not steps:
            raise errors.CheckpointError(
                f"{run_dir}: has no checkpoint (checkpoints/step_*), so no update can be"
                " executed again; train with save_every > 0"
            )
        self.run_dir, self.updates, self.seed, self.progress = run_dir, updates, seed, progress
        self.record = RunFiles(run_dir.resolve(), {u: p.resolve() for u, p in steps.items()})
        self.checks: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.differences: list[Difference] = []
        self.executions: list[dict[str, Any]] = []
        self.evaluations = 0

    # ------------------------------------------------------------------------------------ the steps
    def certificate(self) -> dict[str, Any]:
        """Check everything; return the content of certificate.json."""
        record = self.record
        count = plural(len(record.checkpoints), "checkpoint")
        detail = f"{count} equal the SHA-256 in their manifests"
        self._check("checkpoints", recorded_files.check_checkpoints(record), detail)
        if not record.manifests:
            return self._content({}, {})
        detail = "config.yaml of the run and of its newest checkpoint"
        self._check("options", recorded_files.check_options(record), detail)
        found = list(recorded_files.check_metrics(record))
        self._check("metrics", found, f"{plural(len(record.updates), 'row')} of {METRICS}")
        self._check("summary", recorded_files.check_summary(record), "summary.json")
        # Other settings are not a difference of the run, so they do not change the verdict.
        newest = max(record.manifests)
        config, manifest = record.configs[newest], record.manifests[newest]
        stored = {key: manifest.get(key) or {} for key in ("versions", "arithmetic")}
        device = select_device(config.device, config.threads)
        arithmetic = run_directory.arithmetic(config, device)
        now = {"versions": run_directory.versions(), "arithmetic": arithmetic}
        changed = [
            f"{name} was {errors.show(value)}, is {errors.show(now[key].get(name))}"
            for key, settings in stored.items()
            for name, value in settings.items()
            if now[key].get(name) != value
        ]
        result, detail = "different" if changed else "equal", ", ".join(changed) or "as in the run"
        self.checks.append({"check": "settings", "result": result, "detail": detail})
        if self.updates == 0:
            self.notes.append("no update was executed again (--updates 0)")
        else:
            self._reexecute()
        found = list(self._evaluate_reports())
        detail = f"{plural(self.evaluations, 'evaluation')} with equal episodes"
        self._check("reports", found, detail)
        return self._content(stored, now)

    def _check(self, name: str, differences: Iterable[Difference], detail: str) -> None:
        """Record the result of a check, with ``detail`` if there is no difference."""
        found, result = list(differences), "equal"
        self.differences += found
        if found:
            more = f", and {len(found) - 1} more" if found[1:] else ""
            result, detail = "different", f"{found[0]}{more}"
        self.checks.append({"check": name, "result": result, "detail": detail})

    # ------------------------------------------------------------------------------------ execution
    def _intervals(self) -> Iterator[Interval]:
        """Yield the intervals between consecutive checkpoints that can be executed."""
        record = self.record
        damaged = record.checkpoints.keys() - record.manifests.keys()
        starts = [u for u in reexecution.starts(self.run_dir) if u not in damaged]
        for stop, manifest in record.manifests.items():
            start = max((u for u in starts if u < stop), default=None)
            if start is None:
                continue
            # An interval in which the run was resumed with other options has no single ones.
            sessions = checkpoint.recorded_sessions(manifest)
            if changes := [x["start"] for x in sessions if start < x["start"] < stop]:
                self.notes.append(
                    f"updates {start + 1} to {stop} cannot be executed again: options or settings"
                    f" changed after update {changes[-1]}, whose checkpoint has been deleted"
                )
                continue
            yield start, stop

    def _chosen(self, possible: list[Interval]) -> list[Interval]:
        """Return the intervals to execute: as many as have ``updates`` updates, at least one."""
        if self.updates is None:
            return possible
        order = list(possible)
        random.Random(self.seed).shuffle(order)
        chosen, remaining = [], self.updates
        for start, stop in order:
            if stop - start <= remaining:
                chosen.append((start, stop))
                remaining -= stop - start
        if not chosen:
            chosen = [min(order, key=lambda x: x[1] - x[0])]
            self.progress.say(
                f"{describe(*chosen[0])} are the shortest interval between two checkpoints; for"
                " shorter ones train with a smaller save_every and a larger keep_last"
            )
        return sorted(chosen)

    def _reexecute(self) -> None:
        """Execute the chosen intervals and compare the results with the run."""
        possible = list(self._intervals())
        if not possible and self.differences:
            self.notes.append("no update was executed again: no intact checkpoint to start from")
            return
        if not possible:
            stored = ", ".join(map(str, self.record.checkpoints))
            raise errors.CheckpointError(
                f"{self.run_dir}: no update can be executed again from the checkpoints (update"
                f" {stored}): the updates before the first one belong to another run, or options"
                " changed between two; train with a smaller save_every and a larger keep_last, or"
                " write --updates 0 to verify files and reports"
            )
        differences: list[Difference] = []
        chosen = self._chosen(possible)
        with tempfile.TemporaryDirectory(prefix="embodied-ppo-verify-") as folder:
            for start, stop in chosen:
                self.progress.say(f"executing {describe(start, stop)} again")
                out = Path(folder) / str(stop)
                result = {"start": start, "stop": stop, "tensors": 0}
                self.executions.append(result)
                try:
                    reexecution.reexecute(self.run_dir, out, start=start, stop=stop)
                    different = reexecution.differing_metrics(self.run_dir, out)
                    different += self._state_differences(stop, out, result)
                except errors.TrainingError as error:
                    failed = f"the execution of {describe(start, stop)} failed"
                    location = f"{failed}: {errors.one_line(error)}"
                    different = [Difference("checkpoints", location, start + 1)]
                result["equal"] = not different
                differences += different
        tensors = plural(sum(x["tensors"] for x in self.executions), "tensor")
        rows = plural(sum(stop - start for start, stop in chosen), "row")
        intervals = errors.join_names([describe(*x) for x in chosen])
        detail = f"{intervals}: {tensors} and {rows} of metrics, bit for bit"
        self._check("execution", differences, detail)

    def _state_differences(
        self, update: int, out: Path, result: dict[str, Any]
    ) -> Iterator[Difference]:
        """Compare the state of a checkpoint with that of an execution; count the tensors."""
        folder = self.record.checkpoints[update]
        for name in (checkpoint.POLICY, checkpoint.TRAINING):
            stored = checkpoint.load_file(folder / name)
            again = checkpoint.load_file(out / "checkpoints" / folder.name / name)
            result["tensors"] += count_tensors(again)
            for d in state_differences(stored, again):
                file = self.record.name(folder / name)
                yield Difference(file, d.place, update, d.stored, d.recomputed, "executed again")

    # -------------------------------------------------------------------------------------- reports
    def _evaluate_reports(self) -> Iterator[Difference]:
        """Repeat the evaluation of every report whose checkpoint is stored."""
        for file in sorted((self.record.run_dir / "reports").glob("*/report.json")):
            name = self.record.name(file)
            try:
                self.record.read(file)
                stored = report.read(file)
                update = stored["update"]
                stored["evaluation"]  # every version of reports has it
            except (OSError, ValueError, KeyError, TypeError) as error:
                yield Difference(name, f"is no report ({errors.one_line(error, kind=True)})")
                continue
            diverged, missing = stored["overall"].get("diverged"), update not in self.record.configs
            if missing or diverged:  # ``evaluate`` refuses an environment that diverges
                reason = f"the checkpoint of update {update} has been deleted or is damaged"
                reason = reason if missing else f"{plural(diverged, 'episode')} of it diverged"
                self.notes.append(f"{name} was not evaluated again: {reason}")
                continue
            self.progress.say(f"repeating the evaluation of {name}")
            source, config = self.record.checkpoints[update], self.record.configs[update]
            again = _evaluate(source, stored, config)
            self.evaluations += 1
            # Options and versions are not results.
            for key in ("config", "versions", "evaluation", "checkpoint"):
                stored.pop(key, None)
            for d in state_differences(stored, again):
                yield Difference(name, d.place, update, d.stored, d.recomputed, "evaluated again")

    # ------------------------------------------------------------------------------------- contents
    def _content(self, settings_of_run: Any, settings: Any) -> dict[str, Any]:
        """Return the content of certificate.json."""
        record, differences = self.record, self.differences
        content = {
            "format": FORMAT,
            "verdict": "different" if differences else "verified",
            "run": str(self.run_dir),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "updates": self.updates,
            "seed": self.seed,
            "checks": self.checks,
            "first_difference": str(differences[0]) if differences else None,
            "differences": [d._asdict() | {"text": str(d)} for d in differences[:MOST_LISTED]],
            "number_of_differences": len(differences),
            "notes": self.notes,
            "completed_updates": max([*record.updates, *record.checkpoints]),
            "executed_updates": sum(x["stop"] - x["start"] for x in self.executions),
            "executions": self.executions,
            "evaluations": self.evaluations,
            "settings_of_run": settings_of_run,
            "settings": settings,
            "files": dict(sorted(record.digests.items())),
        }
        return json.loads(as_json(content))  # numbers that are not finite become null


def _evaluate(source: Path, stored: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Evaluate a checkpoint with the options of a report; return its report.json."""
    run = {"device": config.device, "threads": config.threads}
    with tempfile.TemporaryDirectory(prefix="embodied-ppo-verify-") as folder:
        options = checkpoint_evaluation.options_of_report(
            stored, source, num_envs=config.evaluation.num_envs, out=folder, **run
        )
        with highest_matmul_precision():
            results = checkpoint_evaluation.evaluate(options, quiet=True)
        return report.read(Path(results["report_json"]))


def describe(start: int, stop: int) -> str:
    """Return an interval as text."""
    return f"update {stop}" if stop - start == 1 else f"updates {start + 1} to {stop}"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
