"""docs/tutorial.md does what it says: its blocks are run in order, and its tables hold every
finding of check_env.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import pytest

import embodied_envs
from embodied_envs import checks
from embodied_ppo.core.errors import EnvError

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SMALL = (
    "env.num_envs=4 env_steps=512 algorithm.horizon=64 algorithm.global_batch_size=64"
    " evaluation.episodes=2"
)
SMALL += " evaluation.video_steps=4 compile=never"
"""Added to each training."""
COMMANDS = {"embodied-ppo": "-m embodied_ppo.commands.main", "python": ""}


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path) -> None:
    """``sh`` is run; ``LANGUAGE FILE`` is saved; ``python FILE:function`` replaces that
    function.
    """
    for name, words in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        file.chmod(0o755)
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": path}
    folder, said = tmp_path, ""
    blocks = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", TUTORIAL, re.M | re.S)
    assert len(blocks) == TUTORIAL.count("```") // 2 >= 8
    for language, target, text in blocks:
        if language == "sh":
            lines = [f"{x} {SMALL}" if "embodied-ppo train" in x else x for x in text.splitlines()]
            lines = [
                f"{x} num_envs=2 video=false" if "embodied-ppo evaluate" in x else x for x in lines
            ]
            script = "\n".join([*lines, f"pwd >'{tmp_path}/where'"])
            done = subprocess.run(
                ["bash", "-ec", script],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
            said += done.stdout
            folder = Path((tmp_path / "where").read_text().strip())
            continue
        assert language in ("xml", "python") and target
        name, _, function = target.partition(":")
        (folder / name).write_text(
            replaced((folder / name).read_text(), function, text) if function else text
        )
    assert folder == tmp_path / "my_robot"
    assert imageio.imread(folder / "look.png").std() > 10, "a picture of something"
    assert re.search(r"^eval/success +\d", said, re.M), "the second evaluation has a success rate"
    by_hand, _ = re.findall(r"^(?:eval/)?return +(\S+)", said, re.M)[-2:]
    newest = max(
        folder.glob("runs/second/reports/*/report.json"), key=lambda file: file.stat().st_mtime
    )
    (episode,) = json.loads(newest.read_text())["episodes"]
    assert float(by_hand) == episode["return"], "the script acts as evaluate does, bit for bit"


def replaced(source: str, function: str, text: str) -> str:
    """``source`` with the methods in ``text``, which shows them in their class, in the place of
    ``function``.
    """
    methods = text.partition("    ...\n\n")[2]
    assert methods.startswith(f"    def {function}(")
    (node,) = (
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.FunctionDef) and n.name == function
    )
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: node.lineno - 1], methods, *lines[node.end_lineno :]])


# ----------------------------------------------------------------------------- what check_env finds
def pattern(node: ast.expr) -> str:
    """A text as the tables write it: .. for what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    words = "".join(str(x.value) if isinstance(x, ast.Constant) else ".." for x in parts)
    return words.removeprefix("env.id=..: ").partition("; ")[0]


def findings() -> set[str]:
    """Return every violation and note in the source of check_env."""
    texts: list[tuple[ast.expr, str]] = []  # (expression, suffix)
    for node in ast.walk(ast.parse(Path(checks.__file__).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "violation":
            texts.append((node.value, ""))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            texts += [(element, "") for element in node.value.elts]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            argument = {"_require": 2, "EnvError": 0, "notes.append": 0, "wrap_errors": 0}
            suffix = ".." if name == "wrap_errors" else ""
            if name.endswith(".compare"):
                argument, suffix = {name: 1}, ", .. differs .."
            elif name == "_fail":
                argument = {name: 1}
            if name in argument:
                texts.append((node.args[argument[name]], suffix))
    texts = [x for x in texts if isinstance(x[0], ast.Constant | ast.JoinedStr)]
    found = {pattern(node) + suffix for node, suffix in texts}
    # The first two are put together from parts that are counted themselves.
    return found - {"..", ".., .. differs ..", ""}


def test_every_finding_of_check_env_is_explained() -> None:
    tables = TUTORIAL.partition("## What check_env finds")[2]
    rows = [line.split("|")[1:-1] for line in tables.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
    explained = [word for row in rows for word in re.findall(r"`([^`]+)`", row[0])]
    assert len(explained) == len(set(explained))
    assert set(explained) == findings()


TASK = """
import torch
from toy_envs import Balance
class Drawn(Balance):
    def reset(self, u):
        return super().reset(u) | {"qvel": torch.rand(len(u), 2, dtype=torch.float64)}
class Remembering(Balance):
    last = 0.0
    def observe(self, s):
        seen = super().observe(s) + self.last
        self.last = seen.mean()
        return seen
class Infinite(Balance):
    def reward(self, before, s, action):
        return s["qpos"][:, 0].sqrt()
"""


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("Drawn", r"with the same seeds and actions after restart\(seeds\), observation differs"),
        (
            "Remembering",
            r"with the same seeds and actions after restart\(seeds\), observation differs",
        ),
        ("Infinite", "is not finite"),
    ],
)
def test_a_task_is_found_out(
    name: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    with pytest.raises(EnvError, match=finding):
        embodied_envs.check_env(
            lambda seeds: embodied_envs.make(
                f"faulty:{name}", num_envs=4, seeds=seeds, max_episode_steps=9
            ),
            steps=20,
        )
