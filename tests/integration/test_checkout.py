"""Tests of a checkout without an installation and without the packages that training can lack."""

from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path

import pytest
from run_helpers import run_process

ROOT = Path(__file__).resolve().parents[2]
# Packages that only some runs need.
ABSENT = ("envpool", "imageio_ffmpeg", "ray", "tensorboard")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Return an interpreter without embodied_ppo and the packages of ``ABSENT``.

    Its site-packages has links to all other packages of this environment. Absent names are left
    out, instead of refused by a finder, because libraries look for them with ``find_spec``.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    absent = (*ABSENT, "__editable__", "embodied_ppo")
    folders = {Path(path) for path in sys.path if Path(path).name == "site-packages"}
    files = {file.name: file for folder in folders for file in folder.iterdir()}
    for name, file in files.items():
        if not name.startswith(absent) and file.suffix != ".pth" and name != "__pycache__":
            (site / name).symlink_to(file)
    return home / "bin" / "python"


COMMON = ["compile=never", "device=cpu", "threads=1", "updates=1", "algorithm.update_epoch=1"]
# Run directory -> options of a run: a task of our own, and a language model with its critic.
RUNS = {
    "robot": [
        *("env.id=Hopper", "env.simulator=mujoco", "env.num_envs=2", "env.max_episode_steps=4"),
        *("algorithm.horizon=4", "algorithm.global_batch_size=8", "model.hidden=[8]"),
        *("evaluation.episodes=1", "evaluation.video_episodes=0"),
    ],
    "language": [
        *("mode=reasoning", "experiment=arithmetic", "warm_start.steps=1", "eval_every=0"),
        *("algorithm.rollout_batch_size=4", "algorithm.global_batch_size=4"),
        "evaluation.episodes=4",
    ],
}


@pytest.mark.slow
def test_both_modes_train(python: Path, tmp_path) -> None:
    """One process trains both, because its imports take most of the time."""
    commands = [["train", "--quiet", f"run_dir={name}", *COMMON, *RUNS[name]] for name in RUNS]
    code = f"import embodied_ppo.commands.main as m; print([m.main(c) for c in {commands}])"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert "[0, 0]" in run_process(python, "-c", code, cwd=tmp_path, env=env)
    for name in RUNS:
        folder = tmp_path / name
        row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert {"policy/loss", "value/loss"} <= row.keys()
        assert "pip install tensorboard" in (folder / "log.txt").read_text()
        assert not (folder / "tensorboard").exists()
        assert json.loads((folder / "summary.json").read_text())["tensorboard"] is None
