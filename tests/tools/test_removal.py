"""The trainer works without the folder ``tools``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import run_process

ROOT = Path(__file__).parents[2]
# An editable installation would find the folder in the checkout.
WITHOUT_INSTALLATION = """\
import sys
names = "_EditableFinder", "_EditableNamespaceFinder"
sys.meta_path[:] = [x for x in sys.meta_path if getattr(x, "__name__", "") not in names]
"""


@pytest.mark.slow
def test_trainer_works_without_tools(tmp_path) -> None:
    for name in ("embodied_ppo", "configs", "envs"):
        ignored = shutil.ignore_patterns("tools", "__pycache__", "*.stl", "*.obj")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    assert not (tmp_path / "embodied_ppo/tools").exists()
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_INSTALLATION)
    options = ["env.num_envs=4", "algorithm.horizon=8", "algorithm.global_batch_size=32"]
    options += ["updates=2", "evaluation.episodes=1", "run_dir=run", "compile=never", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (
        ["train", "experiment=cartpole", *options],
        ["evaluate", "checkpoint=run", "episodes=1", "video=false"],
        ["plan", "experiment=cartpole"],
        ["--help"],
    ):
        program = (sys.executable, "-m", "embodied_ppo.commands.main")
        run_process(*program, *command, cwd=tmp_path, env=environment)
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()
    check = "import embodied_ppo as ep; assert ep.train and ep.load; ep.verify"
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "embodied_ppo.tools" in result.stderr
