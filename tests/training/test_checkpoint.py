"""Checkpoints: damaged ones are refused in one line; valid ones survive interruptions."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import CheckpointError
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config
from embodied_ppo.programs import runs
from embodied_ppo.training import checkpoint

OPTIONS = run_helpers.nested(
    run_helpers.options("""updates=2 save_every=1 env.id=CartPole-v1 env.num_envs=4
    env.num_threads=1 model.hidden=[8] algorithm.horizon=8 algorithm.global_batch_size=16
    algorithm.update_epoch=1 evaluation.episodes=2 evaluation.num_envs=2""")
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    runs.train(loader.load(Config, {**OPTIONS, "run_dir": str(run_dir)}), quiet=True)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path) -> Path:
    """Return a copy of the run, which the test may damage."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def step(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_000002"


def truncate(run_dir: Path) -> Path:
    file = step(run_dir) / "policy.pt"
    file.write_bytes(file.read_bytes()[:-100])
    return run_dir


def flip_a_bit(run_dir: Path) -> Path:
    file = step(run_dir) / "policy.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return run_dir


def resign(run_dir: Path) -> None:
    """Write a manifest with the checksums of the changed files."""
    folder = step(run_dir)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Bomb:
    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, ("bomb-went-off",)


def pickled_code(run_dir: Path) -> Path:
    torch.save({"weights": Bomb()}, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def other_model(run_dir: Path) -> Path:
    weights = checkpoint.open_checkpoint(run_dir).policy()
    weights["trunk.layers.0.weight"] = torch.zeros(9, 4)
    torch.save(weights, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def damaged_config(text: str) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        (step(run_dir) / "config.yaml").write_text(text)
        resign(run_dir)
        return run_dir

    return damage


def without(name: str) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        (step(run_dir) / name).unlink()
        return run_dir

    return damage


def torn_manifest(run_dir: Path) -> Path:
    (step(run_dir) / "manifest.json").write_text('{"format": 1, "upd')
    return run_dir


def empty_run(run_dir: Path) -> Path:
    shutil.rmtree(run_dir / "checkpoints")
    return run_dir


def no_run(run_dir: Path) -> Path:
    (run_dir / "other").mkdir()
    return run_dir / "other"


# Damage -> function that makes it, and what the message must name.
DAMAGE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (truncate, "policy.pt"),
    "bit flipped": (flip_a_bit, "policy.pt"),
    "pickled code": (pickled_code, "policy.pt"),
    "other model": (other_model, r"policy.pt.*trunk.layers.0.weight.*\(9, 4\).*\(8, 4\)"),
    "config is no mapping": (damaged_config("[1, 2"), "config.yaml"),
    "config with an unknown option": (
        damaged_config("algorithm: {gama: 0.9}"),
        r"algorithm\.gama.*0\.9.*config\.yaml.*algorithm\.gamma",
    ),
    "config runs code": (
        damaged_config("!!python/object/apply:os.mkdir [bomb-went-off]"),
        "config.yaml",
    ),
    "manifest missing": (without("manifest.json"), "manifest.json.*step_000001"),
    "manifest torn": (torn_manifest, "manifest.json"),
    "training.pt missing": (without("training.pt"), "training.pt.*step_000001"),
    "no checkpoints": (empty_run, "save_every"),
    "no run": (no_run, "is no run"),
    "folder of runs": (lambda run_dir: run_dir.parent, "run"),
    "nowhere": (lambda run_dir: run_dir / "nowhere", "nowhere"),
}


def save(folder: Path, update: int, keep_last: int = 2) -> Path:
    """Write an empty checkpoint."""
    content: dict[str, Any] = {"policy": {}, "training": {}, "config_text": "", "info": {}}
    return checkpoint.save(folder, update=update, keep_last=keep_last, **content)


def files(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(
    run_dir: Path, tmp_path, damage: str, capfd, monkeypatch
) -> None:
    act, pattern = DAMAGE[damage]
    target = act(run_dir)
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", f"checkpoint={target}", "episodes=2", "video=false"]
    line = run_helpers.assert_refused(capfd, command)
    assert re.search(pattern, line), line
    assert files(tmp_path) == before, "nothing is written or lost"
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.parametrize("name", ["", "checkpoints/latest", "checkpoints/step_000002"])
def test_refusal_names_the_newest_intact_checkpoint(run_dir: Path, name: str) -> None:
    truncate(run_dir)
    older = step(run_dir).with_name("step_000001")
    with pytest.raises(checkpoint.CheckpointError, match="step_000001"):
        checkpoint.open_checkpoint(run_dir / name)
    (older / "config.yaml").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"policy\.pt"):
        checkpoint.open_checkpoint(run_dir / name)


def test_latest_best_and_pruning(trained: Path, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    scores = ((0, math.nan), (1, 5.0), (2, 9.0), (3, 7.0), (4, None), (5, -1.0))
    for update, score in scores:
        path = save(folder, update)
        if score is not None:
            checkpoint.set_score(path, score)
    names = sorted(p.name for p in folder.glob("step_*"))
    assert names == [f"step_{update:06d}" for update in (2, 4, 5)]
    assert (folder / "latest").resolve().name == "step_000005"
    assert (folder / "best").resolve().name == "step_000002"
    assert checkpoint.open_checkpoint(folder / "best").manifest["score"] == 9.0


def test_copies_are_ignored_and_updates_sort_numerically(run_dir: Path, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    for update in (999_998, 999_999, 1_000_000):
        save(folder, update)
    copies = ["step_1000000_backup", "step_1000000 (copy)", "step_0999999", "step_12"]
    for copy in copies:
        shutil.copytree(folder / "step_1000000", folder / copy)
    (folder / "step_000007").write_text("a file")
    save(folder, 1_000_001)
    assert list(checkpoint.steps(folder)) == [1_000_000, 1_000_001], "pruned by number"
    assert checkpoint.open_checkpoint(tmp_path).update == 1_000_001
    newest = checkpoint.newest_valid(tmp_path)
    assert newest is not None and newest.update == 1_000_001
    before = sorted(os.listdir(folder))
    checkpoint.repair(tmp_path, newest, print)
    assert sorted(os.listdir(folder)) == before and {*copies, "step_000007"} < {*before}
    # beside a real run: resume and evaluate take the newest checkpoint
    shutil.copytree(step(run_dir), step(run_dir).with_name("step_000002_backup"))
    other = loader.load(Config, {**OPTIONS, "run_dir": str(run_dir), "resume": "auto"})
    assert runs.train(other, quiet=True)["updates"] == 2
    assert checkpoint.find(run_dir).name == "step_000002"


def test_repair_points_links_to_valid_checkpoints(tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    for update, score in ((1, 5.0), (2, 7.0), (3, 9.0)):
        checkpoint.set_score(save(folder, update, keep_last=9), score)
    (folder / "step_000003" / "policy.pt").write_bytes(b"short")
    (folder / "latest").unlink()
    shutil.copytree(folder / "step_000003", folder / "latest")  # as scp -r copies the link
    newest = checkpoint.newest_valid(tmp_path)
    assert newest is not None
    checkpoint.repair(tmp_path, newest, print)
    assert {os.readlink(folder / link) for link in ("latest", "best")} == {"step_000002"}
    checkpoint.set_score(save(folder, 3, keep_last=9), 6.0)
    assert os.readlink(folder / "best") == "step_000002"


def test_partially_written_directory_is_no_checkpoint(trained: Path, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", folder, symlinks=True)
    shutil.copytree(folder / "step_000002", folder / ".writing-000003-1")
    assert checkpoint.open_checkpoint(tmp_path).update == 2
    save(folder, 3, keep_last=9)
    assert not list(folder.glob(".writing-*")), "leftovers of a killed process are removed"


def test_directory_is_renamed_before_deletion(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1, keep_last=1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed before a file is gone
    for _ in range(2):
        save(tmp_path, 2, keep_last=1)
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_000002"]
    assert checkpoint.open_checkpoint(tmp_path).update == 2


def test_load_weights_names_first_mismatch() -> None:
    module = torch.nn.Linear(2, 1)
    weights = {"weight": torch.ones(1, 2), "bias": torch.tensor([torch.inf])}
    with pytest.raises(CheckpointError, match=r"bias.*NaN"):
        checkpoint.load_weights(module, weights, "here")
    with pytest.raises(CheckpointError, match="'weight'"):
        checkpoint.load_weights(module, {"bias": torch.zeros(1)}, "here")
