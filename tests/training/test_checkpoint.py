"""Checkpoints: damaged ones are refused in one line; valid ones survive interruptions."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embodied_ppo import run
from embodied_ppo.commands import main
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import CheckpointError
from embodied_ppo.training import checkpoint

OPTIONS = {
    "updates": 2,
    "save_every": 1,
    "env": {"id": "CartPole-v1", "num_envs": 4, "num_threads": 1},
    "model": {"hidden": [8]},
    "algorithm": {"horizon": 8, "global_batch_size": 16, "update_epoch": 1},
    "evaluation": {"episodes": 2, "num_envs": 2},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run.train(loader.load(Config, {**OPTIONS, "run_dir": str(run_dir)}), quiet=True)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
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


def garbage(run_dir: Path) -> Path:
    (step(run_dir) / "policy.pt").write_bytes(b"not a torch file at all")
    resign(run_dir)
    return run_dir


def other_model(run_dir: Path) -> Path:
    weights = checkpoint.open_checkpoint(run_dir).policy()
    weights["trunk.layers.0.weight"] = torch.zeros(9, 4)
    torch.save(weights, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def missing_tensor(run_dir: Path) -> Path:
    weights = checkpoint.open_checkpoint(run_dir).policy()
    del weights["value_head.bias"]
    torch.save(weights, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def extra_tensor(run_dir: Path) -> Path:
    weights = checkpoint.open_checkpoint(run_dir).policy()
    torch.save({**weights, "second_head.weight": torch.zeros(1)}, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def not_a_dictionary(run_dir: Path) -> Path:
    torch.save([1, 2], step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def no_tensor(run_dir: Path) -> Path:
    weights = checkpoint.open_checkpoint(run_dir).policy()
    torch.save({**weights, "value_head.bias": 1.0}, step(run_dir) / "policy.pt")
    resign(run_dir)
    return run_dir


def compressed(run_dir: Path) -> Path:
    """Write an archive of a megabyte that expands to a gigabyte."""
    file = step(run_dir) / "policy.pt"
    with zipfile.ZipFile(file) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    resign(run_dir)
    return run_dir


LAUGHS = "env:\n kwargs:\n  a: &a [x, x]\n" + "".join(
    f"  {chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)
"""Nine to the twelfth values."""


def damaged_config(text: str) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        (step(run_dir) / "config.yaml").write_text(text)
        resign(run_dir)
        return run_dir

    return damage


def edit_manifest(**changes: object) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        file = step(run_dir) / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
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


DAMAGE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (truncate, "policy.pt: has .* bytes, its manifest has .* use another"),
    "bit flipped": (
        flip_a_bit,
        "policy.pt: its contents do not match the manifest's sha256; use another",
    ),
    "pickled code": (
        pickled_code,
        "policy.pt: holds objects other than tensors .* never executed; use",
    ),
    "garbage": (garbage, "policy.pt: .* use another"),
    "other model": (
        other_model,
        r"policy.pt: tensor 'trunk.layers.0.weight' is \(9, 4\), this model needs \(8, 4\); use",
    ),
    "missing tensor": (
        missing_tensor,
        "policy.pt: has no tensor 'value_head.bias'.* use the model",
    ),
    "extra tensor": (
        extra_tensor,
        "policy.pt: has tensor 'second_head.weight', which this model lacks; use",
    ),
    "no dictionary": (not_a_dictionary, "policy.pt: holds a list, not named tensors; use"),
    "config is no mapping": (damaged_config("[1, 2"), "config.yaml: .* use another"),
    "config is a list": (damaged_config("- 1"), "config.yaml: holds no options; use another"),
    "config with an unknown option": (
        damaged_config("algorithm: {gama: 0.9}"),
        "algorithm.gama = 0.9 .*config.yaml.*did you mean algorithm.gamma",
    ),
    "manifest missing": (without("manifest.json"), "manifest.json: is missing; .* use another"),
    "manifest torn": (torn_manifest, "manifest.json: is not a manifest .* use another"),
    "manifest of the future": (
        edit_manifest(format=99),
        "format 99, this version reads 1; use the version",
    ),
    "manifest without end": (
        edit_manifest(update=float("inf")),
        "manifest.json: is not a manifest .* use another",
    ),
    "manifest of lists": (
        edit_manifest(files={"policy.pt": []}),
        "manifest.json: is not a manifest .* use another",
    ),
    "compressed": (
        compressed,
        "policy.pt: is compressed, which torch.save never does; use another",
    ),
    "no tensor": (no_tensor, "policy.pt: 'value_head.bias' is no tensor; use"),
    "config is a bomb": (
        damaged_config(LAUGHS),
        r"config.yaml: is no YAML \(an alias, which is not read.* use another",
    ),
    "config of itself": (
        damaged_config("env: &a {kwargs: *a}"),
        r"config.yaml: is no YAML \(an alias, .* use another",
    ),
    "config runs code": (
        damaged_config("!!python/object/apply:os.mkdir [bomb-went-off]"),
        "config.yaml: is no YAML",
    ),
    "config too deep": (
        damaged_config("a: " + "[" * 5000),
        r"config.yaml: is no YAML \(RecursionError.* use another",
    ),
    "config of no day": (
        damaged_config("a: 2000-99-99"),
        r"config.yaml: is no YAML \(ValueError.* use another",
    ),
    "manifest lists nothing": (edit_manifest(files={}), "lists no config.yaml; use another"),
    "training.pt missing": (without("training.pt"), "training.pt: is missing .* use another"),
    "no checkpoints": (empty_run, "holds no checkpoint"),
    "folder of runs": (
        lambda run_dir: run_dir.parent,
        "is no run, but holds 1; name one, the last is .*run",
    ),
    "file": (lambda run_dir: run_dir / "config.yaml", "is a file; give the directory"),
    "nowhere": (lambda run_dir: run_dir / "nowhere", "does not exist; give a run"),
}


def files(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_refused_in_one_line(
    run_dir: Path,
    tmp_path: Path,
    damage: str,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    act, pattern = DAMAGE[damage]
    target = act(run_dir)
    before = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = main.main(["evaluate", f"checkpoint={target}", "episodes=2", "video=false"])
    err = capfd.readouterr().err.strip().splitlines()
    assert code == 2, err
    assert len(err) == 1, err
    assert re.search(pattern, err[0]), err[0]
    assert files(tmp_path) == before, "nothing is written or lost"
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.parametrize("name", ["", "checkpoints/latest", "checkpoints/step_000002"])
def test_refusal_names_the_newest_intact_checkpoint(run_dir: Path, name: str) -> None:
    truncate(run_dir)
    older = step(run_dir).with_name("step_000001")
    with pytest.raises(checkpoint.CheckpointError, match=r"; step_000001 is intact$"):
        checkpoint.open_checkpoint(run_dir / name)
    (older / "config.yaml").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"use another checkpoint$"):
        checkpoint.open_checkpoint(run_dir / name)


def test_manifest_paths_outside_checkpoint_are_not_read(run_dir: Path) -> None:
    """Paths with ``..`` in a manifest are not read: it reveals nothing about other files."""
    file = step(run_dir) / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["../../../secret"] = {"bytes": 1, "sha256": "0"}
    file.write_text(json.dumps(manifest))
    fifo = run_dir.parent / "secret"
    os.mkfifo(fifo)  # whoever opens it waits for ever
    assert checkpoint.open_checkpoint(run_dir).update == 2


def test_latest_best_and_pruning(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    scores = ((0, math.nan), (1, 5.0), (2, 9.0), (3, 7.0), (4, None), (5, -1.0))
    for update, score in scores:
        path = checkpoint.save(
            folder, update=update, policy={}, training={}, config_text="", info={}, keep_last=2
        )
        if score is not None:
            checkpoint.set_score(path, score)
    assert sorted(p.name for p in folder.glob("step_*")) == [
        "step_000002",
        "step_000004",
        "step_000005",
    ]
    assert (folder / "latest").resolve().name == "step_000005"
    assert (folder / "best").resolve().name == "step_000002"
    assert checkpoint.open_checkpoint(folder / "best").manifest["score"] == 9.0


def test_copies_are_ignored_and_updates_sort_numerically(run_dir: Path, tmp_path: Path) -> None:
    def save(update: int) -> Path:
        return checkpoint.save(
            folder, update=update, policy={}, training={}, config_text="", info={}, keep_last=2
        )

    folder = tmp_path / "checkpoints"
    for update in (999_998, 999_999, 1_000_000):
        save(update)
    copies = ["step_1000000_backup", "step_1000000 (copy)", "step_0999999", "step_12"]
    for copy in copies:
        shutil.copytree(folder / "step_1000000", folder / copy)
    (folder / "step_000007").write_text("a file")
    save(1_000_001)
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
    assert run.train(other, quiet=True)["updates"] == 2
    assert checkpoint.find(run_dir).name == "step_000002"


def test_repair_points_links_to_valid_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for update, score in ((1, 5.0), (2, 7.0), (3, 9.0)):
        path = checkpoint.save(
            folder, update=update, policy={}, training={}, config_text="", info={}, keep_last=9
        )
        checkpoint.set_score(path, score)
    (folder / "step_000003" / "policy.pt").write_bytes(b"short")
    newest = checkpoint.newest_valid(tmp_path)
    assert newest is not None
    checkpoint.repair(tmp_path, newest, print)
    assert {os.readlink(folder / link) for link in ("latest", "best")} == {"step_000002"}
    checkpoint.set_score(
        checkpoint.save(
            folder, update=3, policy={}, training={}, config_text="", info={}, keep_last=9
        ),
        6.0,
    )
    assert os.readlink(folder / "best") == "step_000002"


def test_partially_written_directory_is_no_checkpoint(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    shutil.copytree(
        tmp_path / "checkpoints/step_000002", tmp_path / "checkpoints/.writing-000003-1"
    )
    assert checkpoint.open_checkpoint(tmp_path).update == 2
    checkpoint.save(
        tmp_path / "checkpoints",
        update=3,
        policy={},
        training={},
        config_text="",
        info={},
        keep_last=9,
    )
    assert not list((tmp_path / "checkpoints").glob(".writing-*")), (
        "leftovers of a killed process are removed"
    )


def test_directory_is_renamed_before_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(update: int) -> None:
        checkpoint.save(
            tmp_path, update=update, policy={}, training={}, config_text="", info={}, keep_last=1
        )

    save(1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed before a file is gone
    save(2)
    save(2)
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_000002"]
    assert checkpoint.open_checkpoint(tmp_path).update == 2


def test_manifest_records_versions(trained: Path) -> None:
    manifest = checkpoint.open_checkpoint(trained).manifest
    assert manifest["env_steps"] == 64
    assert manifest["env_id"] == "CartPole-v1"
    assert torch.__version__.startswith(manifest["versions"]["torch"].split("+")[0])
    assert len(manifest["config_hash"]) == 12


def test_evaluation_is_reproducible(trained: Path, tmp_path: Path) -> None:
    arguments = [
        "evaluate",
        f"checkpoint={trained}",
        "episodes=5",
        "video=false",
        "--quiet",
        "--json",
    ]
    for name, more in (("a", ["num_envs=2"]), ("b", ["num_envs=5"])):
        assert main.main([*arguments, *more, f"out={tmp_path / name}"]) == 0
    a, b = ((tmp_path / name / "report.json").read_bytes() for name in "ab")
    assert a == b
    assert len(json.loads(a)["tasks"]) == 1


def test_report_files_that_are_directories_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "report.json").mkdir(parents=True)
    assert main.main(["evaluate", f"checkpoint={trained}", f"out={tmp_path / 'out'}"]) == 2
    assert "report.json: is a directory; remove it" in capsys.readouterr().err


def test_load_weights_names_first_mismatch() -> None:
    module = torch.nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match="has no tensor 'weight'"):
        checkpoint.load_weights(module, {"bias": torch.zeros(1)}, "here")
