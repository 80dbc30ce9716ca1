"""Re-execute updates of a run.

A checkpoint holds everything that the next update depends on. A run therefore contains each of its
updates: those between two checkpoints follow from the earlier one.

Updates are counted by completion: update 37 is the one of the row ``"update": 37`` in
metrics.jsonl, and it leads from the state after 36 updates to checkpoint step_000037.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from embodied_ppo import run as runs
from embodied_ppo.config import loader
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import CheckpointError, ConfigError
from embodied_ppo.core.types import UpdateObserver
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_files import read_parent


@dataclass(frozen=True)
class Start:
    """A state of a run from which its updates can be executed again.

    Attributes:
        update: Completed updates.
        checkpoint: Directory of the checkpoint; None: the beginning of the run, which is computed
            from its options and seed.
    """

    update: int
    checkpoint: Path | None


# ------------------------------------------------------------------------------ states of a run
def run_directory(path: str | Path) -> Path:
    """Return the directory of a run; raises CheckpointError if ``path`` is none."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; name the directory of a run")
    if (path / checkpoint.MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: is a checkpoint; name its run, {path.resolve().parent.parent}"
        )
    if not (path / "config.yaml").is_file():
        raise CheckpointError(
            f"{path}: is no run (it has no config.yaml); name the directory of a run"
        )
    return path


def stored_updates(run_dir: Path) -> list[int]:
    """Return the updates whose checkpoints are stored, in increasing order."""
    return list(checkpoint.steps(run_dir / "checkpoints"))


def completed_updates(run_dir: Path) -> int:
    """Return the number of updates that a run has completed, by its log and its checkpoints."""
    logged = 0
    path = run_dir / "metrics.jsonl"
    if path.is_file():
        for line in reversed(path.read_text().splitlines()):
            try:
                logged = int(json.loads(line)["update"])
                break
            except (ValueError, KeyError, TypeError):  # a row that was cut short
                continue
    return max([logged, *stored_updates(run_dir)])


def starts(run_dir: Path) -> dict[int, Start]:
    """Return update -> state from which a run can be executed again, in increasing order.

    These are the stored checkpoints and the beginning: update 0 from options and seed, or for a
    branch the checkpoint of its parent, if that is still stored and has the same weights.

    Raises:
        CheckpointError: parent.json is damaged.
    """
    states = {u: Start(u, path) for u, path in checkpoint.steps(run_dir / "checkpoints").items()}
    parent = read_parent(run_dir)
    if parent is None:
        states.setdefault(0, Start(0, None))
    elif parent.update not in states and (home := parent.path(run_dir)) is not None:
        path = checkpoint.steps(home / "checkpoints").get(parent.update)
        if path is not None and _policy_sha256(path) == parent.policy_sha256:
            states[parent.update] = Start(parent.update, path)
    return dict(sorted(states.items()))


def _policy_sha256(path: Path) -> str | None:
    """Return the checksum of a checkpoint's policy by its manifest; None if it is damaged."""
    try:
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        return str(manifest["files"][checkpoint.POLICY]["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def nearest_start(
    run_dir: Path, update: int, say: Callable[[str], None] = lambda line: None
) -> Start:
    """Return the last state of a run at or before an update.

    Args:
        run_dir: Directory of the run.
        update: Completed updates of the wanted state.
        say: Called with a line if that state itself is not stored.

    Raises:
        CheckpointError: The run has no state at or before ``update``.
        ConfigError: The run has not completed so many updates.
    """
    completed = completed_updates(run_dir)
    if not 0 <= update <= completed:
        raise ConfigError(
            f"update={update}: {run_dir} has completed {completed} updates; name one from 0 to"
            f" {completed}"
        )
    possible = starts(run_dir)
    if update in possible:
        return possible[update]
    stored = ", ".join(map(str, stored_updates(run_dir))) or "none"
    line = f"checkpoint for update {update} is not stored; stored: {stored}"
    earlier = [start for u, start in possible.items() if u < update]
    if not earlier:
        raise CheckpointError(f"{run_dir}: {line}; no earlier one exists, name a later update")
    name = earlier[-1].update or "0, the beginning of the run"
    say(f"{line}; the nearest earlier one is used ({name})")
    return earlier[-1]


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
        CheckpointError: The options are damaged.
        ConfigError: They are not of this version.
    """
    file = options_folder(run_dir, update) / checkpoint.CONFIG
    try:
        content = loader.plain_yaml(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({' '.join(str(error).split())}); use another run"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds no options; use another run")
    stored: dict[str, Any] = {**content, "resume": None}
    return loader.load(Config, stored, source=f"{loader.STORED}, {file}")


# ------------------------------------------------------------------------------------------ execute
def reexecute(
    source_run: Path,
    out: Path,
    *,
    start: int,
    stop: int,
    observe: UpdateObserver | None = None,
    quiet: bool = True,
) -> Path:
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
        quiet: Whether no progress is shown.

    Returns:
        ``out``.

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: Nothing was written.
        TrainingError: An update failed.
        SystemExit: 130, after an interrupt.
    """
    source_run, out = run_directory(source_run), Path(out)
    if not 0 <= start <= stop:
        raise ConfigError(f"start={start}, stop={stop}: start must be from 0 to stop")
    first = starts(source_run).get(start)
    if first is None:
        stored = ", ".join(map(str, stored_updates(source_run))) or "none"
        raise CheckpointError(
            f"{source_run}: checkpoint for update {start} is not stored; stored: {stored}"
        )
    config = options(source_run, max(stop, 1))
    if stop > (updates := total_updates(config)):
        raise ConfigError(f"stop={stop}: {source_run} has {updates} updates")
    if config.cluster.max_lag:
        raise ConfigError(
            f"cluster.max_lag = {config.cluster.max_lag}: {source_run} collected while it learned,"
            " and the order of both is not stored; only runs with cluster.max_lag=0 can be"
            " executed again"
        )
    resume = None if first.checkpoint is None else str(first.checkpoint)
    config = replace(config, run_dir=str(out), resume=resume, trackers=())
    # Without a checkpoint to start from, another one names the versions of the user's own files.
    files_from = checkpoint.newest_valid(source_run) if resume is None else None
    runs.reexecute(config, runs.Section(stop, files_from, observe), quiet=quiet)
    return out


# ---------------------------------------------------------------------------- compare with the run
MACHINE_METRICS = ("time/", "speed/", "memory/", "device/")
"""Prefixes of metrics that measure the machine. They differ between two executions of an update."""
EVALUATION_METRICS = "eval/"
"""Prefix of the metrics of evaluations, which re-execution leaves out."""
NOT_REEXECUTED = (*MACHINE_METRICS, EVALUATION_METRICS)
"""Prefixes of metrics that re-execution does not reproduce, and that no minibatch determines."""


def metric_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return update -> row of metrics.jsonl; rows that were cut short are left out.

    Raises:
        CheckpointError: The file cannot be read.
    """
    path, rows = run_dir / "metrics.jsonl", {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); name another run") from error
    for line in lines:
        try:
            row = json.loads(line)
            rows[int(row["update"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return rows


def differing_metrics(run_dir: Path, repeated: Path) -> list[str]:
    """Return the metrics in which re-executed updates differ from the run, as "update N: NAME".

    Args:
        run_dir: Directory of the run.
        repeated: Result of ``reexecute``.
    """
    rows = metric_rows(run_dir)
    differing = []
    for update, row in metric_rows(repeated).items():
        for name in row:
            expected = rows.get(update, {}).get(name, row[name])
            if not name.startswith(NOT_REEXECUTED) and expected != row[name]:
                differing.append(f"update {update}: {name}")
    return differing


def rounding_notes(repeated: Path) -> list[str]:
    """Return the lines of ``repeated``/log.txt on why its numbers may differ from the run's."""
    lines = (repeated / "log.txt").read_text().splitlines()
    messages = (line.partition(" ")[2].partition(" ")[2] for line in lines)  # after date and time
    return [x for x in messages if x.startswith("resume: ") and "replaying" not in x]
