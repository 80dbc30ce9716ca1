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
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import CheckpointError, Metrics, PendingRow
from embodied_ppo.training.run_files import check_exists

FORMAT = 1
MANIFEST, CONFIG, POLICY, TRAINING = "manifest.json", "config.yaml", "policy.pt", "training.pt"
ROW = "pending_row"
"""Key of the manifest for ``PendingRow``, which is logged after the checkpoint is written."""
DIGEST = "metrics_digest"
"""Key of the manifest, and of summary.json, for ``MetricsDigest.record``."""
SUMMARY_DIGEST = "digest"
"""Key of summary.json for the SHA-256 of its other entries."""
SESSIONS = "sessions"
"""Key of the manifest for the options and arithmetic settings of all updates so far: a list of
"start" (completed updates), "config_hash" and "arithmetic", one entry for each change."""
STEP = re.compile(r"step_(\d{6}|[1-9]\d{6,})", re.ASCII)
"""Name of a checkpoint's directory: the update with at least six digits.

Copies (step_000004_backup) do not match.
"""
NO_ZIP = (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError)
"""Exceptions of ``zipfile.ZipFile`` for damaged archives (three million were tried)."""
DAMAGED = (
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
)
"""Exceptions of ``torch.load`` for damaged files (scripts/fuzz.py), besides UnpicklingError."""


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
        """Return the row to be logged after saving; None in checkpoints of older versions.

        Raises:
            CheckpointError: The row is malformed.
        """
        if (row := self.manifest.get(ROW)) is None:
            return None
        try:
            metrics: Metrics = {
                str(k): math.nan if x is None else float(x) for k, x in row["metrics"].items()
            }
            return PendingRow(metrics, bool(row["evaluation_due"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path / MANIFEST}: {ROW} is no row of metrics; use another checkpoint"
            ) from error

    def arithmetic(self) -> dict[str, Any]:
        """Return the settings that the run's rounding depended on.

        Older versions recorded the version of torch only.
        """
        versions, settings = (self.manifest.get(key) for key in ("versions", "arithmetic"))
        torch_version = versions.get("torch") if isinstance(versions, dict) else None
        return {"torch": torch_version} | (settings if isinstance(settings, dict) else {})

    def config_text(self) -> str:
        """Return the content of config.yaml."""
        return (self.path / CONFIG).read_text()

    def policy(self) -> dict[str, Any]:
        """Return the state of the policy; raises CheckpointError."""
        return load_file(self.path / POLICY)

    def training(self) -> dict[str, Any]:
        """Return the state of learner and rollout; raises CheckpointError."""
        return load_file(self.path / TRAINING)


def steps(folder: Path) -> dict[int, Path]:
    """Return update -> directory of the checkpoints in ``folder``, in increasing order."""
    names = os.listdir(folder) if folder.is_dir() else []
    matches = sorted(
        (int(match[1]), folder / name) for name in names if (match := STEP.fullmatch(name))
    )
    return {update: path for update, path in matches if path.is_dir()}


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
        info: Further entries of the manifest (env_steps, versions, seeds ..).
        keep_last: Number of checkpoints to keep besides the best.

    Raises:
        CheckpointError: Writing fails. Older checkpoints are unchanged.
    """
    final = folder / f"step_{update:06d}"
    temporary = folder / f".writing-{update:06d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob(".writing-*"), *folder.glob(".deleting-*")):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()
        files = {}
        contents = {
            CONFIG: config_text.encode(),
            POLICY: _bytes(policy),
            TRAINING: _bytes(training),
        }
        for name, data in contents.items():
            _write(temporary / name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {"format": FORMAT, "update": update, "score": None, **info, "files": files}
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
        _sync_directory(temporary)
        if final.exists():
            _delete(final)
        temporary.rename(final)
        _sync_directory(folder)
        _point(folder / "latest", final.name)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: cannot be written ({error.strerror}); free space or choose another run_dir"
        ) from error
    _prune(folder, keep_last)
    return final


def set_score(path: Path, score: float) -> None:
    """Record the evaluation score of a checkpoint; point ``best`` at the highest of the run.

    A score that is not a number is recorded as null, like that of a checkpoint without evaluation.

    Raises:
        CheckpointError: Writing fails. The checkpoint is unchanged.
    """
    best = _score(path.parent / "best")
    recorded = None if math.isnan(score) else score
    manifest = json.loads((path / MANIFEST).read_text()) | {"score": recorded}
    new = path / (MANIFEST + ".new")
    try:
        _write(new, json.dumps(manifest, indent=1, sort_keys=True).encode())
        new.replace(path / MANIFEST)
        if score > best or not (path.parent / "best").exists():
            _point(path.parent / "best", path.name)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: its score cannot be written ({error.strerror}); free space"
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
        if (folder / "latest").resolve() != newest.path:
            _point(folder / "latest", newest.path.name)
        if (folder / "best").is_symlink() and not (folder / "best").exists():
            best = max(steps(folder).values(), key=_score)
            (folder / "best").unlink()
            if _score(best) > -math.inf:
                _point(folder / "best", best.name)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror}); free space"
        ) from error


def _bytes(value: Mapping[str, Any]) -> bytes:
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
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _point(link: Path, target: str) -> None:
    """Replace a symbolic link atomically."""
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _score(step: Path) -> float:
    """Return the score of a checkpoint, minus infinity without one."""
    try:
        score = json.loads((step / MANIFEST).read_text())["score"]
    except (OSError, ValueError, KeyError):
        return -math.inf
    return -math.inf if score is None else float(score)


def _prune(folder: Path, keep_last: int) -> None:
    """Delete all checkpoints but the newest ``keep_last`` and the best."""
    best = (folder / "best").resolve()
    for old in list(steps(folder).values())[:-keep_last]:
        if old.resolve() != best:
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
    if path.is_file():
        raise CheckpointError(
            f"{option}={path}: is a file; give the directory that holds {MANIFEST}"
        )
    if (path / MANIFEST).exists():
        return path.resolve()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoints = list(steps(folder).values())
    if not checkpoints:
        runs = sorted({file.parents[2] for file in path.glob(f"*/checkpoints/step_*/{MANIFEST}")})
        if runs:
            raise CheckpointError(
                f"{option}={path}: is no run, but holds {len(runs)}; name one, the last is"
                f" {runs[-1]}"
            )
        raise CheckpointError(
            f"{option}={path}: holds no checkpoint (checkpoints/step_*); name a run that has saved"
            " one (before the first one it was ended, or its save_every is too large)"
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
        for other in reversed(steps(folder.parent).values()):
            if _is_intact(other):
                raise CheckpointError(f"{error}; {other.name} is intact") from error
        raise


def _is_intact(folder: Path) -> bool:
    try:
        _verified(folder)
    except CheckpointError:
        return False
    return True


def _verified(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``; raises CheckpointError where it is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], dict(manifest["files"])
        update = int(manifest["update"])
        expected = {name: (int(x["bytes"]), str(x["sha256"])) for name, x in files.items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: is missing; the directory is no complete checkpoint, use another"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: is not a manifest ({error!r}); use another checkpoint"
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{folder / MANIFEST}: format {version}, this version reads {FORMAT}; use the version"
            " that wrote it"
        )
    for name in (CONFIG, POLICY, TRAINING):
        if name not in expected:
            raise CheckpointError(f"{folder / MANIFEST}: lists no {name}; use another checkpoint")
        size, digest = expected[name]  # other files of the manifest are not read
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"{file}: is missing (update {update}); use another checkpoint of the run"
            )
        data = file.read_bytes()
        if len(data) != size:
            raise CheckpointError(
                f"{file}: has {len(data)} bytes, its manifest has {size}; it was cut short, use"
                " another checkpoint"
            )
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(
                f"{file}: its contents do not match the manifest's sha256; use another checkpoint"
            )
    return Checkpoint(folder, manifest)


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
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointError(
                    f"{path}: is compressed, which torch.save never does; use another checkpoint"
                )
    except (OSError, *NO_ZIP) as error:
        raise CheckpointError(
            f"{path}: is no file of torch.save ({error}); use another checkpoint"
        ) from error
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects other than tensors and plain values, which are never executed; "
            "use a checkpoint written by embodied-ppo"
        ) from error
    except DAMAGED as error:
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
    for name, tensor in state.items():
        if name not in weights:
            raise CheckpointError(
                f"{source}: has no tensor {name!r}; it is another model's, use the model it was"
                " trained with"
            )
        if not isinstance(weights[name], torch.Tensor):
            raise CheckpointError(
                f"{source}: {name!r} is no tensor; use a checkpoint written by embodied-ppo"
            )
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: tensor {name!r} is {tuple(weights[name].shape)}, this model needs"
                f" {tuple(tensor.shape)}; use the model and env it was trained with"
            )
    extra = sorted(map(str, weights.keys() - state.keys()))
    if extra:
        raise CheckpointError(
            f"{source}: has tensor {extra[0]!r}, which this model lacks; use the model it was"
            " trained with"
        )
    module.load_state_dict(dict(weights))
