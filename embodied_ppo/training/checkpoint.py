"""Checkpoints: atomic directories with a manifest of checksums, which are verified before loading.

    checkpoints/step_000050/   manifest.json  config.yaml  policy.pt  training.pt
    checkpoints/latest         symbolic link to the newest
    checkpoints/best           symbolic link to the one with the highest evaluation score

A checkpoint is written under a temporary name, flushed to disk and renamed. A directory named
step_* is therefore complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import CheckpointError, one_line, show_path
from embodied_ppo.core import guarded_files
from embodied_ppo.core.finite import is_finite
from embodied_ppo.core.types import Metrics, PendingRow
from embodied_ppo.training.run_files import check_exists

FORMAT = 1
MANIFEST, CONFIG, POLICY, TRAINING = "manifest.json", "config.yaml", "policy.pt", "training.pt"
# Key of the manifest for ``PendingRow``, which is logged after the checkpoint is written.
ROW = "pending_row"
DIGEST = "metrics_digest"  # key of the manifest, and of summary.json, for ``MetricsDigest.record``
SUMMARY_DIGEST = "digest"  # key of summary.json for the SHA-256 of its other entries
# Key of the manifest for the options and arithmetic settings of all updates so far: a list of
# "start" (completed updates), "config_hash" and "arithmetic", one entry for each change.
SESSIONS = "sessions"
# Name of a checkpoint's directory: the update with at least six digits, and nothing else.
STEP = re.compile(r"step_(\d{6}|[1-9]\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files matched the checksums of its manifest when it was opened.

    Attributes:
        path: Its directory, absolute and without symbolic links.
        manifest: Content of its manifest.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def update(self) -> int:
        """Number of completed updates."""
        return int(self.manifest["update"])

    def pending_row(self) -> PendingRow | None:
        """Return the row to be logged after saving; None where the last update was logged."""
        if (row := self.manifest.get(ROW)) is None:
            return None
        # JSON has no NaN, which is stored as null.
        metrics: Metrics = {k: math.nan if x is None else x for k, x in row["metrics"].items()}
        return PendingRow(metrics, row["evaluation_due"])

    def policy(self) -> dict[str, Any]:
        """Return the state of the policy; raises CheckpointError."""
        return load_file(self.path / POLICY)

    def training(self) -> dict[str, Any]:
        """Return the state of learner and rollout; raises CheckpointError."""
        return load_file(self.path / TRAINING)


def steps(folder: Path) -> dict[int, Path]:
    """Return update -> directory of the checkpoints in ``folder``, in increasing order.

    They are found by their names, and damaged ones are not left out.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = filter(None, map(STEP.fullmatch, names))
    # Sort numbers: as text, step_1000000 comes before step_999999.
    paths = sorted((int(match[1]), folder / match[0]) for match in matches)
    return {update: path for update, path in paths if path.is_dir()}


# -------------------------------------------------------------------------------------------- write
def save(
    folder: Path,
    *,
    update: int,
    policy: Mapping[str, Any],
    training: Mapping[str, Any],
    config_text: str,
    info: Mapping[str, Any],
    keep_last: int,
) -> Path:
    """Write ``folder/step_<update>``, point ``latest`` at it and delete old checkpoints.

    Args:
        folder: Directory of the run's checkpoints.
        update: Number of completed updates.
        policy: State of the policy.
        training: State of learner and rollout.
        config_text: Content of config.yaml.
        info: Further entries of the manifest, such as env_steps and versions.
        keep_last: Number of checkpoints to keep besides the best.

    Raises:
        CheckpointError: Writing fails. Older checkpoints are unchanged.
    """
    final = folder / f"step_{update:06d}"
    temporary = folder / f".writing-{update:06d}-{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a run that was removed is not created again
        # A killed process may have left parts of a checkpoint.
        remove_temporary(folder)
        temporary.mkdir()
        files = {}
        contents = {CONFIG: config_text.encode(), POLICY: to_bytes(policy)}
        contents[TRAINING] = to_bytes(training)
        # Hash the data in memory, so that errors of the disk are detected on reading.
        for name, data in contents.items():
            _write(temporary / name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        # The manifest is last, because it lists everything else.
        manifest = {"format": FORMAT, "update": update, "score": None, **info, "files": files}
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
        # Flush the names before the rename, so that step_* is complete after a power failure.
        _sync_directory(temporary)
        if final.exists():
            _delete(final)
        temporary.rename(final)
        _sync_directory(folder)
        # The link moves only after the checkpoint is complete.
        _point(folder / "latest", final.name)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"free space or choose another run_dir: {show_path(final)} cannot be written"
            f" ({error.strerror})"
        ) from error
    # Delete old checkpoints only after the new one is on disk.
    _prune(folder, keep_last)
    return final


def set_score(path: Path, score: float) -> None:
    """Record the evaluation score of a checkpoint; point ``best`` at the highest of the run.

    A score that is not a number is recorded as null, like that of a checkpoint without evaluation.

    Raises:
        CheckpointError: Writing fails. The checkpoint is unchanged.
    """
    # Read this before the manifest changes: ``best`` may point at this checkpoint.
    best = _score(path.parent / "best")
    recorded = None if math.isnan(score) else score
    new = path / (MANIFEST + ".new")
    try:
        manifest = guarded_files.read_object(path / MANIFEST) | {"score": recorded}
        _write(new, json.dumps(manifest, indent=1, sort_keys=True).encode())
        new.replace(path / MANIFEST)
        # NaN exceeds no score, but the first checkpoint with an evaluation becomes the best.
        if score > best or not (path.parent / "best").exists():
            _point(path.parent / "best", path.name)
    except (OSError, ValueError) as error:
        with suppress(OSError):  # on a broken disk or in a folder that was removed
            new.unlink()
        reason = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(
            f"free space: the score of {show_path(path)} cannot be written ({reason})"
        ) from error


def repair(run_dir: Path, newest: Checkpoint, notice: Callable[[str], None]) -> None:
    """Make a run's directory consistent with its newest valid checkpoint.

    Renames later checkpoints, which are damaged, and points the links at existing ones.

    Raises:
        CheckpointError: Writing fails.
    """
    folder = newest.path.parent
    try:
        for update, step in steps(folder).items():
            if update > newest.update:
                renamed = step.with_name(f"damaged_{step.name}")
                shutil.rmtree(renamed, ignore_errors=True)
                step.rename(renamed)
                notice(f"resume: {step.name} does not verify; it is kept as {renamed.name}")
        # realpath accepts a loop of links, unlike resolve.
        if os.path.realpath(folder / "latest") != str(newest.path):
            _point(folder / "latest", newest.path.name)
        # The link is broken where the best checkpoint was renamed above or removed by hand.
        if (folder / "best").is_symlink() and not (folder / "best").exists():
            best = max(steps(folder).values(), key=_score)
            (folder / "best").unlink()
            if _score(best) > -math.inf:
                _point(folder / "best", best.name)
    except OSError as error:
        raise CheckpointError(
            f"free space: {show_path(folder)} cannot be written ({error.strerror})"
        ) from error


def remove_temporary(folder: Path) -> None:
    """Remove what killed processes left in ``folder``.

    Call it where the run is locked: no other process writes checkpoints then.
    """
    for pattern in (".writing-*", ".deleting-*", ".latest-*", ".best-*", f"step_*/{MANIFEST}.new"):
        for stale in folder.glob(pattern):
            # Remove links themselves, not what they point to.
            if stale.is_dir() and not stale.is_symlink():
                shutil.rmtree(stale, ignore_errors=True)
            else:
                stale.unlink(missing_ok=True)


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """Serialise by ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(dict(value), buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk."""
    # A rename survives a power failure only after fsync of the directory.
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _point(link: Path, target: str) -> None:
    """Replace a symbolic link atomically."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    # symlink_to overwrites nothing; the rename below does, atomically.
    temporary.unlink(missing_ok=True)
    if link.is_dir() and not link.is_symlink():  # in a copy that followed links (scp -r)
        shutil.rmtree(link)
    temporary.symlink_to(target)
    temporary.replace(link)


def _score(step: Path) -> float:
    """Return the score of a checkpoint, minus infinity without one."""
    try:
        return float(guarded_files.read_object(step / MANIFEST, {"score": float})["score"])
    except (OSError, ValueError):
        return -math.inf


def _prune(folder: Path, keep_last: int) -> None:
    """Delete all checkpoints but the newest ``keep_last`` and the best."""
    # realpath accepts a missing or broken link; then nothing is exempt.
    best = os.path.realpath(folder / "best")
    for old in list(steps(folder).values())[:-keep_last]:
        if os.path.realpath(old) != best:
            _delete(old)


def _delete(path: Path) -> None:
    """Rename, then delete: a directory named step_* is complete even if the process is killed."""
    renamed = path.with_name(f".deleting-{path.name}-{os.getpid()}")
    path.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


# --------------------------------------------------------------------------------------------- read
def find(path: str | Path, option: str = "checkpoint") -> Path:
    """Return a checkpoint's directory.

    Args:
        path: The directory, a link to it, or the directory of a run, which selects its newest one.
        option: The option that names ``path``, for messages.

    Raises:
        CheckpointError: There is none.
    """
    check_exists(path, option)
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"give the directory that holds {MANIFEST}: {option}={show_path(path)} is a file"
        )
    # A checkpoint, or a link to one.
    if (path / MANIFEST).exists():
        return path.resolve()
    # The directory of a run, or its folder of checkpoints.
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoints = list(steps(folder).values())
    if not checkpoints:
        # A folder of several runs: name the last one in the message.
        runs = sorted({file.parents[2] for file in path.glob(f"*/checkpoints/step_*/{MANIFEST}")})
        if runs:
            fact = f"{option}={show_path(path)}: is no run, but holds {len(runs)}"
            raise CheckpointError(f"{fact}; name one, the last is {show_path(runs[-1])}")
        if not any((path / name).exists() for name in ("config.yaml", "checkpoints")):
            raise CheckpointError(
                f"name the directory of a run, such as runs/NAME/DATE-SEED, or of a checkpoint:"
                f" {option}={show_path(path)} is no run (it has no config.yaml and no checkpoints)"
            )
        raise CheckpointError(
            f"{option}={show_path(path)}: holds no checkpoint (checkpoints/step_*); name a run that"
            " has saved one (before the first one it was ended, or its save_every is too large)"
        )
    return checkpoints[-1].resolve()


def open_checkpoint(path: str | Path, option: str = "checkpoint") -> Checkpoint:
    """Find a checkpoint (see ``find``) and verify its checksums.

    Raises:
        CheckpointError: A file is missing, truncated or altered; the message names the newest
            intact checkpoint of the run, if there is one.
    """
    folder = find(path, option)
    try:
        return _verified(folder)
    except CheckpointError as error:
        # Name the newest intact one, but do not use it: the user asked for another.
        for other in reversed(steps(folder.parent).values()):
            try:
                _verified(other)
            except CheckpointError:
                continue
            raise CheckpointError(f"{error}; {other.name} is intact") from error
        raise


def _verified(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``; raises CheckpointError where it is damaged."""
    manifest = read_manifest(folder)
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"use the version that wrote it: {show_path(folder / MANIFEST)} has format"
            f" {str(manifest['format'])[:20]}, this version reads {FORMAT}"
        )
    # Folders may have any other name, but not the number of another update.
    number = STEP.fullmatch(folder.name)
    if number and int(number[1]) != manifest["update"]:
        hint = "rename it, or move it out of the run"
        raise CheckpointError(f"{hint}: {show_path(folder)} contains update {manifest['update']}")
    for name in (CONFIG, POLICY, TRAINING):  # other files of the manifest are not read
        with guarded_files.refusing_damage(folder / name, "use another checkpoint"):
            if name not in manifest["files"]:
                raise ValueError("its manifest does not list it")
            size, digest = (manifest["files"][name][key] for key in ("bytes", "sha256"))
            # The size is compared first: it costs nothing and detects truncation.
            if (stored := os.stat(folder / name).st_size) != size:
                raise ValueError(f"has {stored} bytes, its manifest has {size}")
            if guarded_files.sha256(folder / name) != digest:
                raise ValueError("its contents do not match the manifest's sha256")
    return Checkpoint(folder, manifest)


# Entries of a manifest that every checkpoint has.
MANIFEST_FIELDS = {"format": object, "update": int, "files": dict}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, its entries of the right types.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path = folder / MANIFEST
    with guarded_files.refusing_damage(path, "use another checkpoint"):
        manifest = guarded_files.read_object(path, MANIFEST_FIELDS)
        for entry in manifest["files"].values():
            guarded_files.check_fields(entry, {"bytes": int, "sha256": str})
        return manifest


def recorded_sessions(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return ``SESSIONS`` of a manifest; empty where it is damaged."""
    fields = {"start": int, "config_hash": str, "arithmetic": dict}
    try:
        return [guarded_files.check_fields(entry, fields) for entry in manifest[SESSIONS]]
    except (KeyError, ValueError, TypeError):
        return []


def newest_valid(run_dir: Path, notice: Any = lambda text: None) -> Checkpoint | None:
    """Return the newest valid checkpoint of a run; None if the run has no checkpoint.

    Args:
        run_dir: Directory of the run.
        notice: Called with a line for each damaged checkpoint.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    error: CheckpointError | None = None
    for step in reversed(steps(run_dir / "checkpoints").values()):
        try:
            return replace(_verified(step), path=step.resolve())
        except CheckpointError as problem:
            notice(f"skipped: {problem}")
            # If none is valid, raise the error of the newest.
            error = error or problem
    if error is not None:
        raise error
    return None


def load_file(path: Path) -> dict[str, Any]:
    """Load a file of ``torch.save``, which holds tensors and plain values only.

    Raises:
        CheckpointError: It is damaged or holds other objects.
    """
    try:
        # A pickle can execute code; weights_only refuses everything but tensors and plain values.
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects other than tensors and plain values, which are never executed; "
            "use a checkpoint written by embodied-ppo"
        ) from error
    except Exception as error:  # torch raises many types for damaged files (scripts/fuzz.py)
        raise CheckpointError(
            f"{path}: cannot be read ({one_line(error, kind=True)}); use another checkpoint"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, not named tensors; use another checkpoint"
        )
    return value


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any], source: str | Path) -> None:
    """Load a state_dict into a module.

    Weights whose names start with an entry of the module's ``unused_weights`` are left out.

    Raises:
        CheckpointError: Names the first tensor that does not fit.
    """
    state = module.state_dict()
    unused: tuple[str, ...] = getattr(module, "unused_weights", ())
    weights = {name: x for name, x in weights.items() if not str(name).startswith(unused)}
    for name in [*state, *sorted(map(str, weights.keys() - state.keys()))]:
        x, own, hint = weights.get(name), state.get(name), "use the model it was trained with"
        if own is None:
            problem = f"has tensor {name!r}, which this model lacks; {hint}"
        elif not isinstance(x, torch.Tensor):
            problem = f"has no tensor {name!r}; it is another model's, {hint}"
        elif x.shape != own.shape:
            problem = (
                f"tensor {name!r} is {tuple(x.shape)}, this model needs {tuple(own.shape)}; use the"
                " model, lora_rank and env it was trained with"
            )
        # Values that are not finite are valid only where the new model has them, too.
        elif not is_finite(x) and is_finite(own):
            problem = f"tensor {name!r} contains NaN or infinity; use an earlier checkpoint"
        else:
            continue
        raise CheckpointError(f"{source}: {problem}")
    module.load_state_dict(dict(weights))
