"""Checks of a run's files that need no execution: digests, options, metrics, summary."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import CheckpointError, ConfigError, one_line
from embodied_ppo.core import guarded_files
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config
from embodied_ppo.tools import reexecution
from embodied_ppo.tools.reexecution import Difference
from embodied_ppo.training import checkpoint, metrics_digest
from embodied_ppo.training.run_directory import digest, read_options
from embodied_ppo.training.run_files import METRICS

# Options that say where a run is, which may differ between its copies of the options.
LOCATION = ("run_dir", "resume")


@dataclass
class RunFiles:
    """The files of a run.

    Attributes:
        run_dir: Directory of the run.
        checkpoints: Update -> directory of every stored checkpoint.
        manifests: Update -> manifest of every intact checkpoint.
        configs: Update -> options of every intact checkpoint.
        updates: Updates that have a row in metrics.jsonl.
        digests: File -> SHA-256 of every file that was read.
    """

    run_dir: Path
    checkpoints: dict[int, Path]
    manifests: dict[int, dict[str, Any]] = field(default_factory=dict)
    configs: dict[int, Config] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path) -> bytes:
        """Return the content of a file and record its digest. Raises OSError, ValueError."""
        content = guarded_files.read_bytes(path, guarded_files.MAX_ROWS_SIZE)
        self.digests[self.name(path)] = hashlib.sha256(content).hexdigest()
        return content

    def name(self, path: Path) -> str:
        """Return a path relative to the run's directory."""
        return os.path.relpath(path, self.run_dir)


def check_checkpoints(record: RunFiles) -> Iterator[Difference]:
    """Compare the files of all checkpoints with their manifests, and read what is intact."""
    for update, folder in record.checkpoints.items():
        try:
            manifest = checkpoint.open_checkpoint(folder).manifest
            record.configs[update] = reexecution.options(record.run_dir, update)
        except (CheckpointError, ConfigError) as error:
            yield Difference(record.name(folder), one_line(error), update)
            continue
        record.manifests[update] = manifest
        record.read(folder / checkpoint.MANIFEST)
        for name, entry in manifest["files"].items():
            record.digests[f"{record.name(folder)}/{name}"] = entry["sha256"]


def check_options(record: RunFiles) -> Iterator[Difference]:
    """Compare config.yaml of the run with that of its newest checkpoint."""
    path = record.checkpoints[max(record.manifests)] / checkpoint.CONFIG
    try:
        record.read(record.run_dir / checkpoint.CONFIG)
        stored = loader.flat(read_options(record.run_dir / checkpoint.CONFIG))
        expected = loader.flat(read_options(path))
    except (OSError, ValueError) as error:
        yield Difference(checkpoint.CONFIG, f"contains no options ({one_line(error)})")
        return
    for name in dict.fromkeys([*expected, *stored]):
        values = stored.get(name), expected.get(name)
        if name not in LOCATION and values[0] != values[1]:
            source = f"{record.name(path)} has"
            yield Difference(checkpoint.CONFIG, f"option {name}", None, *values, source)


def check_metrics(record: RunFiles) -> Iterator[Difference]:
    """Compare the rows of metrics.jsonl with their digests."""
    try:
        content = record.read(record.run_dir / METRICS)
        digests = metrics_digest.read(record.run_dir / metrics_digest.FILE)
    except (OSError, ValueError) as error:
        yield Difference(METRICS, f"cannot be read ({one_line(error)})")
        return
    lines: dict[int, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            update = guarded_files.update_of(guarded_files.parse_row(line))
        except ValueError:
            update = None
        if update is None or update in lines:
            yield Difference(METRICS, f"line {number} is no row of a further update", update)
        else:
            lines[update] = line
    record.updates = sorted(lines)
    previous = ""
    for update, value in digests:
        if metrics_digest.chain(previous, lines.get(update, b"")) != value:
            location = f"the row of update {update} does not have its digest"
            yield Difference(METRICS, location, update)
        previous = value
    for update in lines.keys() - dict(digests).keys():
        yield Difference(METRICS, f"the row of update {update} has no digest", update)
    # Every checkpoint recorded the digest of the last row before it.
    for update, manifest in record.manifests.items():
        head = manifest.get(checkpoint.DIGEST)
        if head and dict(digests).get(head["last"]) != head["sha256"]:
            source = record.name(record.checkpoints[update] / checkpoint.MANIFEST)
            location = f"the digest of update {head['last']} differs from {source}"
            yield Difference(metrics_digest.FILE, location, head["last"])


def check_summary(record: RunFiles) -> Iterator[Difference]:
    """Compare summary.json, which an interrupted run does not have, with its digest."""
    path = record.run_dir / "summary.json"
    if not os.path.lexists(path):
        return
    try:
        record.read(path)
        summary = guarded_files.read_object(path, {checkpoint.SUMMARY_DIGEST: dict})
    except (OSError, ValueError) as error:
        yield Difference(path.name, f"is no summary of a run ({one_line(error)})")
        return
    if summary.pop(checkpoint.SUMMARY_DIGEST) != {"sha256": digest(summary)}:
        yield Difference(path.name, "does not have its digest")
