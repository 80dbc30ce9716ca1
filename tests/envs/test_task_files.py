"""The files of a user's task: which belong to it, what a run keeps, and which are executed after a
change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_envs

from embodied_envs import task_files
from embodied_ppo import run
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core.types import CheckpointError, ConfigError, EnvError

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
SMALL = {
    "name": "arm",
    "updates": 1,
    "device": "cpu",
    "compile": "never",
    "env": {"id": "arm:Arm", "num_envs": 2, "num_threads": 1},
    "model": {"hidden": [8]},
    "algorithm": {"horizon": 8, "global_batch_size": 16, "update_epoch": 1},
    "evaluation": {"episodes": 1, "num_envs": 1},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task, on the path of imports while the test runs."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(task_files, "_active", None)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # a file edited within a second has the time of its bytecode
    yield folder
    for name in ("arm", "arm_tools", "arm_tools.gain", "arm_tools.late"):
        sys.modules.pop(name, None)


def collected() -> task_files.TaskFiles:
    task = task_files.collect("arm:Arm", {})
    assert task is not None
    return task


def measured(run_dir: Path, **options: Any) -> float:
    """The return of one evaluated episode of 10 steps."""
    config = EvaluateConfig(checkpoint=str(run_dir), episodes=1, num_envs=1, video=False, **options)
    return run.evaluate(config, quiet=False)["eval/return"]


# --------------------------------------------------------------------------------------- collection
def test_a_task_is_its_modules_its_model_and_the_files_that_they_name(project: Path) -> None:
    task = collected()
    assert {file.name for file in task.files} == OWN and task.files[0].name == "arm.py"
    assert task.root == project and task.complete and task.cwd is None
    modules = {"arm", "arm_tools", "arm_tools.gain", "arm_tools.late"}
    assert {file.module for file in task.files if file.module} == modules
    (project / "models/meshes/cube.obj").write_text(CUBE.replace("1 0 0", "2 0 0"))
    assert collected().hash != task.hash
    assert (
        task_files.collect("Ant-v5", {}) is None and task_files.collect("Go1Joystick", {}) is None
    )


def test_files_of_env_kwargs_belong_to_a_task(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "models")
    task = task_files.collect("Ant-v5", {"xml_file": "balance.xml", "frame_skip": 5})
    assert task is not None
    assert {file.name for file in task.files} == {
        "balance.xml",
        "parts.xml",
        "meshes/cube.obj",
    } and task.cwd == "."


def test_what_is_too_large_has_a_hash_only(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(
        len(text) for name, text in FILES.items() if name in OWN and name[-3:] in (".py", "xml")
    )
    monkeypatch.setattr(task_files, "MAX_COPIED_BYTES", size)
    task = collected().save(tmp_path)
    assert {file.name for file in task.files if file.data is None} == {
        "models/meshes/cube.obj",
        "arm_tools/table.csv",
    }
    assert (
        task.store is not None
        and not task.complete
        and len(list(task.store.rglob("*.*"))) == len(OWN) - 1
    )
    lines: list[str] = []
    (project / "arm_tools/late.py").write_text("offset = 9.0\n")
    used = task_files.for_evaluation("arm:Arm", {}, task, allow=False, say=lines.append)
    assert used is not None and used.hash != task.hash
    assert (
        len(lines) == 1
        and "late.py changed since training; executing the changed files (the run keeps no"
        in lines[0]
    )
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    with pytest.raises(
        EnvError,
        match="cannot be imported here, and the run keeps no complete copy; set PYTHONPATH",
    ):
        task_files.for_evaluation("arm:Arm", {}, task, allow=False, say=lines.append)


# -------------------------------------------------------------------------------------------- a run
def test_a_changed_task_is_reported(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The reward is 1 a step in training, and 3 after the change; an episode has 10 steps."""
    run_dir = tmp_path / "run"
    config = replace(loader.load(Config, SMALL), run_dir=str(run_dir))
    run.train(config, quiet=True)
    (store,) = (run_dir / "task").iterdir()
    digest = json.loads((run_dir / "checkpoints/latest/manifest.json").read_text())["task_hash"]
    assert (
        store.name
        == digest
        == json.loads((run_dir / "reports/step_000001/report.json").read_text())["task_files"][
            "hash"
        ]
    )
    capfd.readouterr()

    assert measured(run_dir) == 10 and "task:" not in capfd.readouterr().err  # nothing has changed

    gain = project / "arm_tools" / "gain.py"
    gain.write_text(gain.read_text().replace("1.0", "3.0"))
    assert measured(run_dir) == 10
    said = capfd.readouterr().err
    assert (
        "gain.py changed since training; executing the run's copies in" in said
        and str(store) in said
    )
    assert measured(run_dir, allow_changed_task=True) == 30
    assert (
        "gain.py changed since training; executing the changed files (allow_changed_task=true)"
        in capfd.readouterr().err
    )
    reports = [
        json.loads(path.read_text())["task_files"]
        for path in run_dir.glob("reports/*-*/report.json")
    ]
    assert {r["hash"] == digest for r in reports} == {True, False}
    assert all(r["hash_in_training"] == digest and len(r["files"]) == len(OWN) for r in reports)

    longer = replace(config, updates=2, run_dir=None, resume=str(run_dir))
    with pytest.raises(
        ConfigError,
        match=r"resume: the task changed since the checkpoint: .*gain.py; restore it \(.*",
    ):
        run.train(longer, quiet=True)
    summary = run.train(replace(longer, allow_changed_task=True), quiet=True)
    assert summary["final_return"] == 30 and len(list((run_dir / "task").iterdir())) == 2
    assert not loader.load(
        Config, loader.plain_yaml((run_dir / "config.yaml").read_text())
    ).allow_changed_task

    monkeypatch.setattr(sys, "path", sys.path[:-1])  # from elsewhere
    monkeypatch.chdir("/")
    capfd.readouterr()
    assert measured(run_dir) == 30
    assert (
        "arm:Arm cannot be imported from here; executing the run's copies in"
        in capfd.readouterr().err
    )
    assert (
        measured(run_dir / "checkpoints" / "step_000001") == 10
    )  # each checkpoint has its own files
    assert not list((run_dir / "task").rglob("__pycache__"))


def test_other_processes_execute_what_the_run_began_with(project: Path, tmp_path: Path) -> None:
    """As a worker that is started again, or the process that draws a video, after the task was
    edited.
    """
    task = collected()
    task.save(tmp_path)
    sent = task.without_data(tmp_path)
    assert sent.hash == task.hash
    task_files._active = None
    sent.activate()  # unchanged
    assert task_files._active is not None and task_files._active.copies is None
    (project / "arm_tools/gain.py").write_text("GAIN = 7.0\n")
    task_files._active, lines = None, []
    for name in ("arm", "arm_tools", "arm_tools.gain"):
        sys.modules.pop(name, None)
    sent.activate(lines.append)
    assert (
        task_files.tasks.find("arm:Arm") is not None and sys.modules["arm_tools.gain"].GAIN == 1.0
    )
    assert len(lines) == 1 and "executing the run's copies" in lines[0]
    task_files._active = None
    with pytest.raises(
        EnvError,
        match=r"gain.py is not the file that the run began with \(task .* put the same file",
    ):
        replace(sent, store=tmp_path / "nowhere").activate()


def test_damaged_copies_are_refused(project: Path, tmp_path: Path) -> None:
    task = collected().save(tmp_path)
    assert task.store is not None
    manifest = task.store / task_files.MANIFEST
    (task.store / "files/arm.py").write_text("import os")
    with pytest.raises(
        CheckpointError, match=r"arm.py: is not the file that the run wrote \(sha256\)"
    ):
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
