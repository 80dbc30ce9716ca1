"""The files of a user's task: collection, copies in the run, and execution after a change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import toy_envs

from embodied_envs import task_files
from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError
from embodied_ppo.evaluation import checkpoint_evaluation
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, EvaluateConfig
from embodied_ppo.programs import runs

TASK = """
from pathlib import Path
import mujoco, numpy, torch
from embodied_envs.tasks import Task
from arm_tools import gain

MODEL = Path(__file__).parent / "models" / "balance.xml"

class Arm(Task):
    max_episode_steps = 10
    def spec(self):
        return mujoco.MjSpec.from_file(str(MODEL))
    def observe(self, s):
        return torch.cat([s["qpos"], s["qvel"]], 1)
    def reward(self, before, s, action):
        from arm_tools.late import offset
        return gain.GAIN + offset + 0 * action[:, 0]
"""
CUBE = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\nf 1 3 4\nf 2 3 4\n"
FILES = {
    "arm.py": TASK,
    "arm_tools/__init__.py": "",
    "arm_tools/gain.py": "from . import late\nGAIN, TABLE = 1.0, 'table.csv'\n",
    "arm_tools/late.py": "offset = 0.0\n",
    "arm_tools/table.csv": "1,2\n",
    "arm_tools/unused.py": "",
    "models/parts.xml": '<mujoco><asset><mesh name="cube" file="cube.obj"/></asset></mujoco>',
    "models/meshes/cube.obj": CUBE,
    "models/balance.xml": toy_envs.BALANCE.replace(
        "<worldbody>", '<compiler meshdir="meshes"/><include file="parts.xml"/><worldbody>', 1
    ),
}
OWN = {name for name in FILES if "unused" not in name}
SMALL = run_helpers.nested(
    run_helpers.options("""name=arm updates=1 device=cpu compile=never env.id=arm:Arm
    env.num_envs=2 env.num_threads=1 model.hidden=[8] algorithm.horizon=8
    algorithm.global_batch_size=16 algorithm.update_epoch=1 evaluation.episodes=1
    evaluation.num_envs=1""")
)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with a task that can be imported during the test."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(task_files, "_active", None)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    # Bytecode would hide an edit within the same second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in ("arm", "arm_tools", "arm_tools.gain", "arm_tools.late"):
        sys.modules.pop(name, None)


def collect() -> task_files.TaskFiles:
    task = task_files.collect("arm:Arm", {})
    assert task is not None
    return task


def evaluated_return(run_dir: Path, **options: Any) -> float:
    """Return the return of one evaluated episode of 10 steps."""
    config = EvaluateConfig(checkpoint=str(run_dir), episodes=1, num_envs=1, video=False, **options)
    return checkpoint_evaluation.evaluate(config, quiet=False)["eval/return"]


# --------------------------------------------------------------------------------------- collection
def test_task_files_include_modules_models_and_named_files(project: Path) -> None:
    task = collect()
    assert {file.name for file in task.files} == OWN and task.files[0].name == "arm.py"
    assert task.root == project and task.complete and task.cwd is None
    modules = {"arm", "arm_tools", "arm_tools.gain", "arm_tools.late"}
    assert {file.module for file in task.files if file.module} == modules
    (project / "models/meshes/cube.obj").write_text(CUBE.replace("1 0 0", "2 0 0"))
    assert collect().hash != task.hash
    assert task_files.collect("Ant-v5", {}) is None
    assert task_files.collect("Go1Joystick", {}) is None


# -------------------------------------------------------------------------------------------- a run
@pytest.mark.slow
def test_changed_task_is_reported(project: Path, tmp_path, monkeypatch, capfd) -> None:
    """The reward per step is 1 in training and 3 after the change; an episode has 10 steps."""
    run_dir = tmp_path / "run"
    config = replace(loader.load(Config, SMALL), run_dir=str(run_dir))
    runs.train(config, quiet=True)
    (store,) = (run_dir / "task").iterdir()
    digest = json.loads((run_dir / "checkpoints/latest/manifest.json").read_text())["task_hash"]
    report = json.loads((run_dir / "reports/step_000001/report.json").read_text())
    assert store.name == digest == report["task_files"]["hash"]
    capfd.readouterr()

    assert evaluated_return(run_dir) == 10 and "task:" not in capfd.readouterr().err  # unchanged

    gain = project / "arm_tools" / "gain.py"
    gain.write_text(gain.read_text().replace("1.0", "3.0"))
    assert evaluated_return(run_dir) == 10
    log = capfd.readouterr().err
    assert "gain.py changed since training; executing the run's copies in" in log
    assert str(store) in log
    assert evaluated_return(run_dir, allow_changed_task=True) == 30
    log = capfd.readouterr().err
    assert "changed since training; executing the changed files (allow_changed_task=true)" in log
    paths = run_dir.glob("reports/*-*/report.json")
    reports = [json.loads(path.read_text())["task_files"] for path in paths]
    assert {r["hash"] == digest for r in reports} == {True, False}
    assert all(r["hash_in_training"] == digest and len(r["files"]) == len(OWN) for r in reports)

    longer = replace(config, updates=2, run_dir=None, resume=str(run_dir))
    with pytest.raises(
        ConfigError,
        match=r"resume: the task changed since the checkpoint: .*gain.py; restore it \(.*",
    ):
        runs.train(longer, quiet=True)
    summary = runs.train(replace(longer, allow_changed_task=True), quiet=True)
    assert summary["final_return"] == 30 and len(list((run_dir / "task").iterdir())) == 2
    assert not loader.load(
        Config, loader.plain_yaml((run_dir / "config.yaml").read_text())
    ).allow_changed_task

    monkeypatch.setattr(sys, "path", sys.path[:-1])  # the task cannot be imported any more
    monkeypatch.chdir("/")
    capfd.readouterr()
    assert evaluated_return(run_dir) == 30
    log = capfd.readouterr().err
    assert "arm:Arm cannot be imported from here; executing the run's copies in" in log
    # Each checkpoint has its own files.
    assert evaluated_return(run_dir / "checkpoints" / "step_000001") == 10
    assert not list((run_dir / "task").rglob("__pycache__"))


def test_other_processes_execute_the_files_of_the_run_start(project: Path, tmp_path) -> None:
    """Examples are a restarted worker, and the process that renders a video, after an edit."""
    task = collect()
    task.save(tmp_path)
    received = task.without_data(tmp_path)
    assert received.hash == task.hash
    task_files._active = None
    received.activate()  # unchanged
    assert task_files._active is not None and task_files._active.copies is None
    (project / "arm_tools/gain.py").write_text("GAIN = 7.0\n")
    task_files._active, lines = None, []
    for name in ("arm", "arm_tools", "arm_tools.gain"):
        sys.modules.pop(name, None)
    received.activate(lines.append)
    assert task_files.tasks.find("arm:Arm") is not None
    assert sys.modules["arm_tools.gain"].GAIN == 1.0
    assert len(lines) == 1 and "executing the run's copies" in lines[0]
    task_files._active = None
    with pytest.raises(
        EnvError,
        match=r"gain.py is not the file that the run began with \(task .* put the same file",
    ):
        replace(received, store=tmp_path / "nowhere").activate()


def test_damaged_copies_are_rejected(project: Path, tmp_path) -> None:
    task = collect().save(tmp_path)
    assert task.store is not None
    manifest = task.store / task_files.MANIFEST
    (task.store / "files/arm.py").write_text("import os")
    with pytest.raises(CheckpointError, match=r"arm.py is not what the run wrote \(sha256\)"):
        task_files.read(task.store)
    content = json.loads(manifest.read_text())
    content["files"][0]["name"] = "../arm.py"
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'../arm.py' lies outside of the folder"):
        task_files.read(task.store)
    manifest.write_text("[]")
    with pytest.raises(CheckpointError, match="is not a manifest"):
        task_files.read(task.store)
    assert task_files.read(tmp_path / "nothing") is None
