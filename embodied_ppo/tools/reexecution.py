"""Re-execute updates of a run.

A checkpoint holds everything that the next update depends on. A run therefore contains each of its
updates: those between two checkpoints follow from the earlier one.

Updates are counted by completion: update 37 is the one of the row ``"update": 37`` in
metrics.jsonl, and it leads from the state after 36 updates to checkpoint step_000037.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from embodied_envs.base.errors import CheckpointError, ConfigError, show, show_path
from embodied_ppo.core.guarded_files import update_of
from embodied_ppo.core.types import UpdateObserver
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config
from embodied_ppo.programs import runs
from embodied_ppo.training import checkpoint, run_files
from embodied_ppo.training.run_directory import options_hash, read_options
from embodied_ppo.training.run_files import METRICS, read_parent


# ------------------------------------------------------------------------------ states of a run
def run_directory(path: str | Path) -> Path:
    """Return the directory of a run; raises CheckpointError if ``path`` is none."""
    if not os.path.exists(path):
        raise CheckpointError(f"name the directory of a run: {show_path(path)} does not exist")
    path = Path(path)
    if (path / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"name its run, {show_path(path.resolve().parent.parent)}: {show_path(path)} is a"
            " checkpoint"
        )
    if not (path / "config.yaml").is_file():
        raise CheckpointError(
            f"name the directory of a run: {show_path(path)} is no run (it has no config.yaml)"
        )
    return path


def stored_updates(run_dir: Path) -> list[int]:
    """Return the updates whose checkpoints are stored, in increasing order."""
    return list(checkpoint.steps(run_dir / "checkpoints"))


def completed_updates(run_dir: Path) -> int:
    """Return the number of updates that a run has completed, by its log and its checkpoints."""
    logged = list(metric_rows(run_dir)) if (run_dir / METRICS).exists() else {}
    return max([max(logged, default=0), *stored_updates(run_dir)])


def check_completed(run_dir: Path, update: int, *, least: int) -> None:
    """Raise ConfigError if a run has not completed ``update``, or it is below ``least``."""
    completed = completed_updates(run_dir)
    if not least <= update <= completed:
        raise ConfigError(
            f"update={update}: {run_dir} has completed {completed} updates; name one from {least}"
            f" to {completed}"
        )


def starts(run_dir: Path) -> dict[int, Path | None]:
    """Return update -> checkpoint from which a run can be executed again, in increasing order.

    None is the beginning of the run, which is computed from its options and seed. A branch begins
    at the checkpoint of its parent, if that is still stored and has the same weights.

    Raises:
        CheckpointError: parent.json is damaged.
    """
    states: dict[int, Path | None] = {**checkpoint.steps(run_dir / "checkpoints")}
    parent = read_parent(run_dir)
    if parent is None:
        states.setdefault(0, None)
    elif parent.update not in states and (home := parent.path(run_dir)) is not None:
        path = checkpoint.steps(home / "checkpoints").get(parent.update)
        with suppress(CheckpointError, KeyError):  # a damaged checkpoint is no beginning
            files = checkpoint.read_manifest(path)["files"] if path is not None else {}
            if files[checkpoint.POLICY]["sha256"] == parent.policy_sha256:
                states[parent.update] = path
    return dict(sorted(states.items()))


def nearest_start(
    run_dir: Path, update: int, say: Callable[[str], None] = lambda line: None
) -> tuple[int, Path | None]:
    """Return the last state of a run at or before an update: its update, and as in ``starts``.

    Args:
        run_dir: Directory of the run.
        update: Completed updates of the wanted state.
        say: Called with a line if that state itself is not stored.

    Raises:
        CheckpointError: The run has no state at or before ``update``.
        ConfigError: The run has not completed so many updates.
    """
    check_completed(run_dir, update, least=0)
    possible = starts(run_dir)
    earlier = [u for u in possible if u <= update]
    stored = ", ".join(map(str, stored_updates(run_dir))) or "none"
    line = f"checkpoint for update {update} is not stored; stored: {stored}"
    if not earlier:
        raise CheckpointError(f"{run_dir}: {line}; no earlier one exists, name a later update")
    start = earlier[-1]
    if start != update:
        say(f"{line}; the nearest earlier one is used ({start or '0, the beginning of the run'})")
    return start, possible[start]


def options_folder(run_dir: Path, update: int) -> Path:
    """Return the folder whose config.yaml has the options with which a run executed an update.

    A run may have been resumed with other options. The checkpoints hold those of the process that
    wrote them, so the first checkpoint at or after the update decides.

    Args:
        run_dir: Directory of the run.
        update: The update, at least 1.
    """
    stored = checkpoint.steps(run_dir / "checkpoints")
    return next((path for u, path in stored.items() if u >= update), run_dir)


def options(run_dir: Path, update: int) -> Config:
    """Return the options with which a run executed an update, see ``options_folder``.

    Raises:
        CheckpointError: The options are damaged, or differ from the digest in the manifest.
        ConfigError: They are not of this version.
    """
    folder = options_folder(run_dir, update)
    file = folder / checkpoint.CONFIG
    stored = read_options(file)
    if (folder / checkpoint.MANIFEST).exists():
        manifest = checkpoint.read_manifest(folder)
        sessions = checkpoint.recorded_sessions(manifest)
        expected = (sessions[-1] if sessions else manifest).get("config_hash")
        if options_hash(stored) != expected:
            raise CheckpointError(
                f"restore {show_path(file)}: its options were changed after the run wrote them"
                f" (config_hash {expected} in {checkpoint.MANIFEST})"
            )
    return loader.load(Config, {**stored, "resume": None}, source=f"{loader.STORED}, {file}")


# ------------------------------------------------------------------------------------------ execute
def reexecute(
    source_run: Path, out: Path, *, start: int, stop: int, observe: UpdateObserver | None = None
) -> None:
    """Execute the updates ``start`` + 1 to ``stop`` of a run again in a new directory.

    The options are those of the run, also the number of updates, which schedules read; trackers
    are off. The result equals the run bit for bit on the same kind of machine: weights, state of
    the optimiser, rollout, and metrics besides those of time, speed and memory. Lines in
    ``out``/log.txt name differences of versions, threads or devices, which change the rounding.
    ``source_run`` is only read.

    Args:
        source_run: Directory of the run.
        out: New directory; it gets config.yaml, metrics.jsonl with the rows of these updates, and
            the checkpoints ``start`` (unless it is 0) and ``stop``. There is no evaluation.
        start: Completed updates at the beginning: a key of ``starts``. 0 begins the run anew with
            its options and seed, including cloning and initial_policy.
        stop: Completed updates at the end.
        observe: Receives experience and minibatches of each update; for runs in one process only.

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: Nothing was written.
        TrainingError: An update failed.
        SystemExit: 130, after an interrupt.
    """
    config = options(source_run, max(stop, 1))
    if config.cluster.max_lag:
        raise ConfigError(
            f"cluster.max_lag = {config.cluster.max_lag}: {source_run} collected while it learned,"
            " and the order of both is not stored; only runs with cluster.max_lag=0 can be"
            " executed again"
        )
    first = starts(source_run)[start]
    resume = None if first is None else str(first)
    config = replace(config, run_dir=str(out), resume=resume, trackers=())
    # Without a checkpoint to start from, another one names the versions of the user's own files.
    files_from = checkpoint.newest_valid(source_run) if first is None else None
    runs.reexecute(config, stop_after=stop, files_from=files_from, observer=observe, quiet=True)


# ---------------------------------------------------------------------------- compare with the run
# Prefixes of metrics that measure the machine, and of those that re-execution does not compute.
NOT_REEXECUTED = ("time/", "speed/", "memory/", "device/", "eval/")


def metric_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return update -> row of metrics.jsonl; rows that were cut short are left out.

    Raises:
        CheckpointError: The file cannot be read.
    """
    rows = (row for _, row in run_files.metric_rows(run_dir) if row is not None)
    return {update_of(row): row for row in rows}


class Difference(NamedTuple):
    """One place in which a run differs from its records or from its re-execution.

    Attributes:
        file: File or folder relative to the run's directory.
        location: What differs in it: for example "option algorithm.lr".
        update: Update of the location; None: none in particular.
        stored: Value in the file.
        expected: Value by ``source``.
        source: Where ``expected`` comes from; "" if there are no two values.
    """

    file: str
    location: str
    update: int | None = None
    stored: Any = None
    expected: Any = None
    source: str = ""

    def __str__(self) -> str:
        text = f"{self.file}: {self.location}"
        if self.source:
            text += f": stored {show(self.stored)}, {self.source} {show(self.expected)}"
        return text


def differing_metrics(run_dir: Path, repeated: Path) -> list[Difference]:
    """Return the metrics in which re-executed updates differ from the run.

    Metrics that only the version of the run or this version has are not compared.

    Args:
        run_dir: Directory of the run.
        repeated: Result of ``reexecute``.
    """
    return [
        Difference(METRICS, f"update {update}: {name}", update, value, row[name], "executed again")
        for update, row in metric_rows(repeated).items()
        for name, value in metric_rows(run_dir).get(update, {}).items()
        if not name.startswith(NOT_REEXECUTED) and row.get(name, value) != value
    ]


def repeat(
    source_run: Path,
    out: Path,
    *,
    start: int,
    stop: int,
    say: Callable[[str], None],
    observe: UpdateObserver | None = None,
) -> tuple[list[str], list[str]]:
    """Execute updates again (see ``reexecute``) and compare their metrics with the run.

    Args:
        source_run, out, start, stop, observe: As for ``reexecute``.
        say: Called with lines about the execution and about what differs.

    Returns:
        The metrics that differ, as "update N: NAME", and lines on versions, threads and devices
        that change the rounding.
    """
    if start < stop:
        say(f"executing updates {start + 1} to {stop} of {source_run} again")
    reexecute(source_run, out, start=start, stop=stop, observe=observe)
    differing = [difference.location for difference in differing_metrics(source_run, out)]
    notes = rounding_notes(out)
    for line in notes if differing else ():
        say(line)
    if differing:
        say(f"{len(differing)} metrics differ from those of the run ({differing[0]})")
    return differing, notes


def rounding_notes(repeated: Path) -> list[str]:
    """Return the lines of ``repeated``/log.txt on why its numbers may differ from the run's."""
    lines = (repeated / "log.txt").read_text().splitlines()
    messages = (line.partition(" ")[2].partition(" ")[2] for line in lines)  # after date and time
    return [x for x in messages if x.startswith("resume: ") and "replaying" not in x]
