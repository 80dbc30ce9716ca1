"""Checkpoints: atomic directories with a manifest, checked byte for byte before anything is loaded.

    checkpoints/step_000050/   manifest.json  config.yaml  policy.pt  training.pt
    checkpoints/latest         symbolic link to the newest, checkpoints/best to the best by
    evaluation

A checkpoint is written under a temporary name, flushed to disk and renamed: a directory called
step_* is complete.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import CheckpointError, Metrics, PendingRow

FORMAT = 1
MANIFEST, CONFIG, POLICY, TRAINING = "manifest.json", "config.yaml", "policy.pt", "training.pt"
ROW = "pending_row"
"""Key of the manifest: the metrics of the update, which are logged after the checkpoint is written.
"""
STEP = re.compile(r"step_(\d{6}|[1-9]\d{6,})", re.ASCII)
"""Name of a checkpoint's directory: the update with at least six digits.

Copies (step_000004_backup) do not match.
"""
NO_ZIP = (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError)
"""What opening raises for what is no archive, or a damaged one: all that three million damaged ones
raised.
"""
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
"""What torch.load raises for damaged files, besides ``pickle.UnpicklingError``: found by
scripts/fuzz.py.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its bytes matched the manifest when it was opened."""

    path: Path
    manifest: dict[str, Any]

    @property
    def update(self) -> int:
        """Updates done when it was saved."""
        return int(self.manifest["update"])

    def pending_row(self) -> PendingRow | None:
        """Return the row that was to be logged after saving; None where an older version saved.

        Raises CheckpointError.
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
        """Return what the rounding of the run depended on; older versions recorded torch's version
        alone.
        """
        versions, settings = (self.manifest.get(key) for key in ("versions", "arithmetic"))
        torch_version = versions.get("torch") if isinstance(versions, dict) else None
        return {"torch": torch_version} | (settings if isinstance(settings, dict) else {})

    def config_text(self) -> str:
        return (self.path / CONFIG).read_text()

    def policy(self) -> dict[str, Any]:
        return _load(self.path / POLICY)

    def training(self) -> dict[str, Any]:
        return _load(self.path / TRAINING)


def steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoint directories of ``folder`` by update, in increasing order; empty if
    there is no folder.
    """
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
    """Write ``folder/step_<update>`` and point ``latest`` at it; delete all but ``keep_last`` and
    the best.

    ``info`` joins the manifest (env_steps, versions, seeds ..).
    Raises CheckpointError if the disk refuses; nothing older is touched then.
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
    """Record an evaluation's score of a checkpoint; ``best`` points at the highest of the run.

    Raises CheckpointError if the disk refuses; the checkpoint stays as it was then.
    """
    best = _score(path.parent / "best")
    manifest = json.loads((path / MANIFEST).read_text()) | {"score": score}
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
    """Make a run's directory agree with its newest sound checkpoint, after a kill or a damaged
    file.

    Later checkpoints, which do not verify, are renamed; the links point to what exists.
    Raises CheckpointError if the disk refuses.
    """
    folder = newest.path.parent
    try:
        for update, step in steps(folder).items():
            if update > newest.update:
                aside = step.with_name(f"damaged_{step.name}")
                shutil.rmtree(aside, ignore_errors=True)
                step.rename(aside)
                notice(f"resume: {step.name} does not verify; it is kept as {aside.name}")
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
    buffer = io.BytesIO()
    torch.save(dict(value), buffer)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _score(step: Path) -> float:
    """Score of a checkpoint; minus infinity where it has none."""
    try:
        score = json.loads((step / MANIFEST).read_text())["score"]
    except (OSError, ValueError, KeyError):
        return -math.inf
    return -math.inf if score is None else float(score)


def _prune(folder: Path, keep_last: int) -> None:
    best = (folder / "best").resolve()
    for old in list(steps(folder).values())[:-keep_last]:
        if old.resolve() != best:
            _delete(old)


def _delete(path: Path) -> None:
    """Out of sight first: a directory called step_* stays complete whenever the process is
    killed.
    """
    aside = path.with_name(f".deleting-{path.name}-{os.getpid()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


# --------------------------------------------------------------------------------------------- read
def find(path: str | Path) -> Path:
    """The checkpoint directory that ``path`` means: itself, a run's newest, or a link.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"checkpoint={path}: does not exist; give a run directory or runs/../checkpoints/step_*"
        )
    if path.is_file():
        raise CheckpointError(
            f"checkpoint={path}: is a file; give the directory that holds {MANIFEST}"
        )
    if (path / MANIFEST).exists():
        return path.resolve()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoints = list(steps(folder).values())
    if not checkpoints:
        runs = sorted(
            {manifest.parents[2] for manifest in path.glob(f"*/checkpoints/step_*/{MANIFEST}")}
        )
        if runs:
            raise CheckpointError(
                f"checkpoint={path}: is no run, but holds {len(runs)}; name one, the last is"
                f" {runs[-1]}"
            )
        raise CheckpointError(
            f"checkpoint={path}: holds no checkpoint (checkpoints/step_*); if it is a run, train"
            " with save_every > 0"
        )
    return checkpoints[-1].resolve()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Find and verify.

    Raises CheckpointError naming the file that is missing, truncated or altered.
    """
    folder = find(path)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], dict(manifest["files"])
        update = int(manifest["update"])
        expected = {name: (int(of["bytes"]), str(of["sha256"])) for name, of in files.items()}
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
        size, digest = expected[name]  # of whatever else is listed nothing is read
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"{file}: is missing (update {update}); use another checkpoint of the run"
            )
        data = file.read_bytes()
        if len(data) != size:
            raise CheckpointError(
                f"{file}: has {len(data)} bytes, its manifest says {size}; it was cut short, use"
                " another checkpoint"
            )
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(
                f"{file}: its contents do not match the manifest's sha256; use another checkpoint"
            )
    return Checkpoint(folder, manifest)


def newest_valid(run_dir: Path, notice: Any = lambda text: None) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies; ``notice`` hears of those that do not. None if
    none is there.

    Raises CheckpointError if there are checkpoints and none verifies.
    """
    error: CheckpointError | None = None
    for step in reversed(steps(run_dir / "checkpoints").values()):
        try:
            return open_checkpoint(step)
        except CheckpointError as problem:
            notice(f"skipped: {problem}")
            error = error or problem
    if error is not None:
        raise error
    return None


def _load(path: Path) -> dict[str, Any]:
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
    """``module.load_state_dict`` that names the first tensor that does not fit, in one line:
    CheckpointError.
    """
    own = module.state_dict()
    for name, tensor in own.items():
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
    extra = sorted(map(str, weights.keys() - own.keys()))
    if extra:
        raise CheckpointError(
            f"{source}: has tensor {extra[0]!r}, which this model lacks; use the model it was"
            " trained with"
        )
    module.load_state_dict(dict(weights))
