"""Checks of a run's files that need no execution: digests, options, metrics, summary.

Every check returns the differences that it finds, in the order of updates.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from embodied_ppo.analysis.state_differences import state_differences
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import CheckpointError, ConfigError, one_line, show
from embodied_ppo.modes.base import digest, options_hash
from embodied_ppo.modes.registry import mode
from embodied_ppo.training import checkpoint, metrics_digest

LOCATION = ("run_dir", "resume")
"""Options that say where a run is, which may differ between its copies of the options."""


@dataclass(frozen=True)
class Difference:
    """One place in which a run differs from its records or from its re-execution.

    Attributes:
        file: File relative to the run's directory.
        location: What differs in it: "tensor NAME, index ..", "option algorithm.lr", "line 3, ..".
        update: Update of the location; None: none in particular.
        stored: Value in the file.
        expected: Value by ``source``.
        source: Where ``expected`` comes from.
        largest: Largest relative difference of numbers; infinity if there is none.
    """

    file: str
    location: str
    update: int | None = None
    stored: Any = None
    expected: Any = None
    source: str = ""
    largest: float = float("inf")

    def __str__(self) -> str:
        text = f"{self.file}: {self.location}"
        if self.source:
            text += f": stored {show(self.stored)}, {self.source} {show(self.expected)}"
        return text


@dataclass
class Record:
    """The files of a run.

    Attributes:
        run_dir: Directory of the run.
        checkpoints: Update -> directory of every stored checkpoint.
        manifests: Update -> manifest of every checkpoint whose manifest can be read.
        damaged: Updates of checkpoints with a file that is not as its manifest says.
        altered_options: Updates of checkpoints whose options do not have their digest.
        rows: Update -> row of metrics.jsonl.
        altered_rows: Updates whose rows do not have their digest.
        digests: File -> SHA-256 of every file that was read.
        configs: Update -> options of every checkpoint whose options can be read.
    """

    run_dir: Path
    checkpoints: dict[int, Path]
    manifests: dict[int, dict[str, Any]] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    altered_options: set[int] = field(default_factory=set)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    altered_rows: set[int] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    configs: dict[int, Config] = field(default_factory=dict)

    def read(self, path: Path) -> bytes:
        """Return the content of a file and record its digest. Raises OSError."""
        content = path.read_bytes()
        self.digests[self.name(path)] = hashlib.sha256(content).hexdigest()
        return content

    def name(self, path: Path) -> str:
        """Return a path relative to the run's directory."""
        return str(path.relative_to(self.run_dir))

    @property
    def newest(self) -> int:
        """Update of the newest checkpoint that is not damaged."""
        return max(self.checkpoints.keys() - self.damaged)


# -------------------------------------------------------------------------------------- checkpoints
def check_checkpoints(record: Record) -> Iterator[Difference]:
    """Compare the files of all checkpoints with the sizes and checksums of their manifests."""
    for update, folder in record.checkpoints.items():
        differences = list(_check_checkpoint(record, update, folder))
        if differences:
            record.damaged.add(update)
        yield from differences


def _check_checkpoint(record: Record, update: int, folder: Path) -> Iterator[Difference]:
    file = folder / checkpoint.MANIFEST
    try:
        manifest = json.loads(record.read(file))
        entries = {str(k): (v["bytes"], v["sha256"]) for k, v in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Difference(
            record.name(file), f"is no manifest ({one_line(error, kind=True)})", update
        )
        return
    record.manifests[update] = manifest
    for key, expected in (("format", checkpoint.FORMAT), ("update", update)):
        if manifest.get(key) != expected:
            source = "this version reads" if key == "format" else "its directory is of"
            stored = manifest.get(key)
            yield Difference(record.name(file), key, update, stored, expected, source)
    for name in dict.fromkeys(
        [checkpoint.CONFIG, checkpoint.POLICY, checkpoint.TRAINING, *entries]
    ):
        path = folder / name
        if name not in entries:
            yield Difference(record.name(file), f"lists no {name}", update)
        elif Path(name).name != name or not path.is_file():
            yield Difference(f"{record.name(folder)}/{name}", "is missing", update)
        else:
            content = record.read(path)
            size, stored = entries[name]
            actual = record.digests[record.name(path)]
            if len(content) != size:
                yield Difference(
                    record.name(path), "bytes", update, len(content), size, "its manifest has"
                )
            elif actual != stored:
                location = "content differs from the SHA-256 in its manifest"
                yield Difference(record.name(path), location + _damaged_tensors(path), update)


def _damaged_tensors(path: Path) -> str:
    """Return the names of tensors whose bytes do not have the checksum in the archive; or ""."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (record := archive.testzip()) is None or "/data/" not in record:
                return ""
            contents = {name: _member(archive, name) for name in archive.namelist()}
        with tempfile.TemporaryDirectory() as folder:
            states = []
            for flip in (0, 255):  # tensors that depend on the record differ between both
                copy = Path(folder) / f"{flip}.pt"
                with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as archive:
                    for name, content in contents.items():
                        changed = bytes(b ^ flip for b in content) if name == record else content
                        archive.writestr(name, changed)
                states.append(checkpoint.load_file(copy))
            names = [difference.name for difference in state_differences(*states)]
    except (OSError, CheckpointError, *checkpoint.NO_ZIP):
        return ""
    return f": tensor {' and '.join(names)}" if names else ""


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the bytes of a stored member without the comparison of its checksum."""
    with archive.open(name) as member:
        setattr(member, "_expected_crc", None)  # noqa: B010
        return member.read()


def recorded_sessions(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``checkpoint.SESSIONS`` of a manifest; empty for older versions."""
    sessions = manifest.get(checkpoint.SESSIONS)
    names = {"start", "config_hash", "arithmetic"}
    if not isinstance(sessions, list) or not all(
        isinstance(entry, dict) and names <= entry.keys() for entry in sessions
    ):
        return []
    return sessions


# ------------------------------------------------------------------------------------------ options
def check_options(record: Record) -> Iterator[Difference]:
    """Compare the options of the run and of all checkpoints with their digests."""
    copies: dict[str, dict[str, Any]] = {}
    """File -> options of every copy whose digest is right, or that has none."""
    wrong: list[tuple[int, str, dict[str, Any], str]] = []
    for update, folder in record.checkpoints.items():
        manifest, path = record.manifests.get(update, {}), folder / checkpoint.CONFIG
        try:
            options, config = read_options(path)
        except (CheckpointError, ConfigError) as error:
            yield Difference(record.name(path), f"holds no options ({one_line(error)})", update)
            record.altered_options.add(update)
            record.damaged.add(update)
            continue
        record.configs[update] = config
        expected, sessions = str(manifest.get("config_hash")), recorded_sessions(manifest)
        if sessions and (hash_of_session := str(sessions[-1]["config_hash"])) != expected:
            name = f"{record.name(folder)}/{checkpoint.MANIFEST}"
            values = (expected, hash_of_session)
            yield Difference(name, "config_hash", update, *values, "its last session has")
            expected = hash_of_session
        if update not in record.manifests or options_hash(options) == expected:
            copies[record.name(path)] = options
        else:
            wrong.append((update, record.name(path), options, expected))
    path = record.run_dir / checkpoint.CONFIG
    try:
        record.read(path)
        run_options, _ = read_options(path)
    except (OSError, CheckpointError, ConfigError) as error:
        yield Difference(checkpoint.CONFIG, f"holds no options ({one_line(error)})")
    else:
        copies[checkpoint.CONFIG] = run_options
        newest = record.checkpoints[max(record.checkpoints)] / checkpoint.CONFIG
        if record.name(newest) in copies:
            changes = option_changes(run_options, copies[record.name(newest)])
            for name, (value, other) in changes.items():
                source = f"{record.name(newest)} has"
                yield Difference(checkpoint.CONFIG, f"option {name}", None, value, other, source)
    for update, name, options, expected in wrong:
        yield from _altered_options(update, name, options, expected, copies)
    for update in {update for update, *_ in wrong}:
        record.altered_options.add(update)
        record.damaged.add(update)


def read_options(path: Path) -> tuple[dict[str, Any], Config]:
    """Return the options of a config.yaml; raises CheckpointError, ConfigError."""
    try:
        options = loader.plain_yaml(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(one_line(error)) from error
    if not isinstance(options, dict):
        raise CheckpointError("no mapping")
    source = f"{loader.STORED}, {path}"
    return options, loader.load(Config, {**options, "resume": None}, source=source)


def option_changes(
    stored: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return path -> (value in ``stored``, value in ``other``) of the options that differ."""
    a, b = loader.flat(stored), loader.flat(other)
    return {
        path: (a.get(path), b.get(path))
        for path in dict.fromkeys([*a, *b])
        if path not in LOCATION and a.get(path) != b.get(path)
    }


def _altered_options(
    update: int,
    file: str,
    options: dict[str, Any],
    expected: str,
    copies: Mapping[str, Mapping[str, Any]],
) -> Iterator[Difference]:
    """Name the option whose change explains that options do not have their digest."""
    sources = {f"{name} has": copy for name, copy in copies.items()}
    sources["its default is"] = loader.relevant(Config(mode=options.get("mode", "embodied")))
    for source, copy in sources.items():
        changes = option_changes(options, copy)
        for path, (stored, other) in changes.items():
            if options_hash(_with(options, path, other)) == expected:
                location = f"option {path} (with it config_hash is {expected})"
                yield Difference(file, location, update, stored, other, source)
                return
    yield Difference(
        file, f"options do not have the config_hash {expected} of the manifest", update
    )


def _with(options: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return options with another value at a dotted path."""
    name, _, remainder = path.partition(".")
    inner = options.get(name)
    if remainder:
        inner = _with(inner if isinstance(inner, Mapping) else {}, remainder, value)
        return {**options, name: inner}
    return {**options, name: value}


# ------------------------------------------------------------------------------------------ metrics
def check_metrics(record: Record) -> tuple[list[Difference], list[str]]:
    """Compare the rows of metrics.jsonl with their digests and with the checkpoints.

    Returns:
        The differences, and notes about rows without a digest.
    """
    differences, lines = read_rows(record)
    entries = metrics_digest.read(record.run_dir / metrics_digest.FILE)
    if entries:
        record.read(record.run_dir / metrics_digest.FILE)
    named: set[int] = set()
    previous = ""
    for update, value in entries:
        if update not in lines:
            differences.append(Difference("metrics.jsonl", f"update {update}: has no row", update))
        elif metrics_digest.chain(previous, lines[update][1]) != value:
            location = f"line {lines[update][0]} (update {update}) does not have its digest"
            differences.append(Difference("metrics.jsonl", location, update))
            named.add(update)
        previous = value
    covered = {update for update, _ in entries}
    for low, high, update in _altered_spans(record, lines):
        if not named & {*range(low, high + 1)}:
            location = (
                f"a row of updates {low} to {high} does not have the digest that checkpoint"
                f" {update} recorded"
                if low < high
                else f"line {lines[low][0]} (update {low}) does not have the digest that checkpoint"
                f" {update} recorded"
            )
            differences.append(Difference("metrics.jsonl", location, low))
            named |= {*range(low, high + 1)} & lines.keys()
        covered |= {*range(low, high + 1)}
    for head in _heads(record):
        covered |= {*range(head["first"], head["last"] + 1)}
    record.altered_rows = named
    differences += _compare_with_checkpoints(record)
    free = sorted(lines.keys() - covered)
    notes = []
    if free:
        notes.append(
            f"{len(free)} of {len(lines)} rows of metrics.jsonl have no digest, because an earlier"
            " version wrote them; only re-executed ones are verified"
        )
    return differences, notes


def read_rows(record: Record) -> tuple[list[Difference], dict[int, tuple[int, bytes]]]:
    """Return differences, and update -> (number, bytes) of each line of metrics.jsonl."""
    differences: list[Difference] = []
    lines: dict[int, tuple[int, bytes]] = {}
    try:
        content = record.read(record.run_dir / "metrics.jsonl")
    except OSError as error:
        return [Difference("metrics.jsonl", f"cannot be read ({error.strerror})")], {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            update = int(row["update"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            differences.append(Difference("metrics.jsonl", f"line {number} is no row of metrics"))
            continue
        if update in lines:
            location = f"line {number} is a second row of update {update}"
            differences.append(Difference("metrics.jsonl", location, update))
            continue
        record.rows[update], lines[update] = row, (number, line)
    return differences, lines


def _heads(record: Record) -> list[dict[str, Any]]:
    """Return the digests that checkpoints and the summary recorded, by their last rows."""
    heads = []
    sources = {str(update): manifest for update, manifest in record.manifests.items()}
    sources["summary.json"] = _read_summary(record)
    for name, source in sources.items():
        head = source.get(checkpoint.DIGEST)
        if isinstance(head, Mapping) and {"first", "last", "sha256"} <= head.keys():
            heads.append({**head, "source": name})
    return sorted(heads, key=lambda head: head["last"])


def _altered_spans(
    record: Record, lines: Mapping[int, tuple[int, bytes]]
) -> Iterator[tuple[int, int, str]]:
    """Yield (first update, last update, source) of rows without the digest that was recorded.

    Each span starts from the digest before it, so that one change does not affect later spans.
    """
    before: dict[int, tuple[int, str]] = {}
    """First update of a chain -> last update and digest so far."""
    for head in _heads(record):
        first, last = head["first"], head["last"]
        start, value = before.get(first, (first - 1, ""))
        if last <= start:
            continue
        for update in sorted(u for u in lines if start < u <= last):
            value = metrics_digest.chain(value, lines[update][1])
        if value != head["sha256"]:
            yield start + 1, last, head["source"]
        before[first] = last, head["sha256"]


def _compare_with_checkpoints(record: Record) -> Iterator[Difference]:
    """Compare the rows with what the checkpoints of the same updates recorded."""
    for update, manifest in record.manifests.items():
        row = record.rows.get(update)
        if row is None or update in record.damaged:
            continue
        source = f"{record.name(record.checkpoints[update])}/{checkpoint.MANIFEST} has"
        expected = dict((manifest.get(checkpoint.ROW) or {}).get("metrics") or {})
        implementation = mode(record.configs[update])
        expected[implementation.unit] = manifest.get(implementation.unit)
        if manifest.get("score") is not None:
            expected[implementation.score_metric] = manifest["score"]
        for tag, value in expected.items():
            if row.get(tag) != value:
                location = f"update {update}, {tag}"
                yield Difference("metrics.jsonl", location, update, row.get(tag), value, source)


# ------------------------------------------------------------------------------------------ summary
def _read_summary(record: Record) -> dict[str, Any]:
    """Return summary.json, empty if it cannot be read."""
    try:
        summary = json.loads((record.run_dir / "summary.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def check_summary(record: Record) -> tuple[list[Difference], list[str]]:
    """Compare summary.json with its digest, the last row and the newest checkpoint.

    Returns:
        The differences, and notes.
    """
    path = record.run_dir / "summary.json"
    if not path.exists():
        return [], ["there is no summary.json, because the run was interrupted or failed"]
    record.read(path)
    summary = _read_summary(record)
    if not summary:
        return [Difference("summary.json", "is no JSON object")], []
    differences = [
        Difference("summary.json", name, update, summary[name], value, source)
        for name, (value, source, update) in _expected_summary(record).items()
        if name in summary and summary[name] != value
    ]
    if checkpoint.SUMMARY_DIGEST not in summary:
        return differences, ["summary.json has no digest, because an earlier version wrote it"]
    plain = {name: value for name, value in summary.items() if name != checkpoint.SUMMARY_DIGEST}
    expected = {"sha256": digest(plain)}
    if expected != summary[checkpoint.SUMMARY_DIGEST] and not differences:
        unknown = ", ".join(name for name in plain if name not in _expected_summary(record))
        location = f"does not have its digest; one of these was changed: {unknown}"
        differences.append(Difference("summary.json", location))
    return differences, []


def _expected_summary(record: Record) -> dict[str, tuple[Any, str, int | None]]:
    """Return name -> (value, source, update) of what else the files of the run say."""
    expected: dict[str, tuple[Any, str, int | None]] = {}
    last = max(record.rows, default=None)
    if last is not None:
        row, first = record.rows[last], record.rows.get(0, {})
        config = record.configs.get(last) or next(iter(record.configs.values()), None)
        source = "the last row of metrics.jsonl has"
        expected["updates"] = (last, source, last)
        if config is not None:
            unit, success = mode(config).unit, mode(config).success_metric
            expected[unit] = (row.get(unit), source, last)
            expected["final_success"] = (row.get(success), source, last)
            if first:
                before = "the first row of metrics.jsonl has"
                expected["initial_success"] = (first.get(success), before, 0)
                expected["initial_return"] = (first.get("eval/return"), before, 0)
        expected["final_return"] = (row.get("eval/return"), source, last)
    newest = record.manifests.get(max(record.checkpoints), {})
    if newest:
        for name in ("config_hash", "versions"):
            expected[name] = (newest.get(name), "the newest manifest has", None)
    return expected
