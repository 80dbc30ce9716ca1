"""Tests of docs/tutorial.md: its blocks run, and its tables explain all findings of check_env."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import imageio.v3 as imageio
import pytest
from run_helpers import page_commands, run_process

import embodied_envs
from embodied_envs.base.errors import EnvError

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SMALL = (
    "env.num_envs=4 env_steps=512 algorithm.horizon=64 algorithm.global_batch_size=64"
    " evaluation.episodes=2"
)
# Options that are added to each training.
SMALL += " compile=never"


@pytest.mark.slow
def test_all_blocks_run(tmp_path) -> None:
    """Run ``sh``, save ``LANGUAGE FILE``, and replace a function by ``python FILE:function``."""
    folder, output, env = tmp_path, "", page_commands(tmp_path, ROOT)
    blocks = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", TUTORIAL, re.M | re.S)
    assert len(blocks) == TUTORIAL.count("```") // 2 >= 8
    for language, target, text in blocks:
        if language == "sh":
            added = {"embodied-ppo train": SMALL, "embodied-ppo evaluate": "num_envs=2 video=false"}
            lines = text.splitlines()
            for command, options in added.items():
                lines = [f"{line} {options}" if command in line else line for line in lines]
            script = "\n".join([*lines, f"pwd >'{tmp_path}/cwd'"])
            output += run_process("bash", "-ec", script, cwd=folder, env=env)
            folder = Path((tmp_path / "cwd").read_text().strip())
            continue
        assert language in ("xml", "python") and target
        name, _, function = target.partition(":")
        if function:
            text = replace_function((folder / name).read_text(), function, text)
        (folder / name).write_text(text)
    assert folder == tmp_path / "my_robot"
    assert imageio.imread(folder / "look.png").std() > 10, "the picture is not blank"
    assert re.search(r"^eval/success +\d", output, re.M), "the second evaluation reports success"
    script_return, _ = re.findall(r"^(?:eval/)?return +(\S+)", output, re.M)[-2:]
    reports = folder.glob("runs/second/reports/*/report.json")
    newest = max(reports, key=lambda file: file.stat().st_mtime)
    (episode,) = json.loads(newest.read_text())["episodes"]
    assert float(script_return) == episode["return"], "the script equals evaluate bit for bit"


def replace_function(source: str, function: str, text: str) -> str:
    """Replace ``function`` in ``source`` by the methods in ``text``."""
    methods = text.partition("    ...\n\n")[2]
    assert methods.startswith(f"    def {function}(")
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    (node,) = (n for n in functions if n.name == function)
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: node.lineno - 1], methods, *lines[node.end_lineno :]])


# ---------------------------------------------------------------------------- findings of check_env


TASK = """
import torch
from toy_envs import Balance
class Stateful(Balance):
    last = 0.0
    def observe(self, s):
        observation = super().observe(s) + self.last
        self.last = observation.mean()
        return observation
class Infinite(Balance):
    def reward(self, before, s, action):
        return s["qpos"][:, 0].sqrt()
"""


@pytest.mark.parametrize(
    ("name", "finding"), [("Stateful", "observation differs"), ("Infinite", "finite")]
)
def test_check_env_reports_a_faulty_task(name: str, finding: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "faulty.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    options = {"num_envs": 4, "max_episode_steps": 9}
    with pytest.raises(EnvError, match=finding):
        embodied_envs.check_env(
            lambda seeds: embodied_envs.make(f"faulty:{name}", seeds=seeds, **options), steps=20
        )
