"""Test of the example in docs/networks.md: its blocks run in their order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from run_helpers import page_commands

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "networks.md").read_text().partition("### Example: from the file")[2]
ADDED = {
    "embodied-ppo train": (
        "env.num_envs=4 env_steps=256 algorithm.horizon=32 algorithm.global_batch_size=64"
        " evaluation.episodes=2 evaluation.video_episodes=0 env.max_episode_steps=20 compile=never"
    ),
    "embodied-ppo evaluate": "episodes=2 num_envs=2 video=false",
}
"""Options that are added to each command, to make it short."""


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    """Run ``sh`` with the commands of this checkout, and save ``python FILE``."""
    env = page_commands(tmp_path, ROOT)
    output = ""
    blocks = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", TEXT, re.M | re.S)
    assert [language for language, *_ in blocks] == ["python", "sh", "python", "sh", "sh"]
    for language, name, text in blocks:
        if language == "python":
            (tmp_path / name).write_text(text)
            continue
        script = text
        for command, options in ADDED.items():
            script = script.replace(command, f"{command} {options}")
        process = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert process.returncode == 0, f"{script}\n{process.stdout}\n{process.stderr}"
        output += process.stdout
    assert re.search(r"^eval/return +-?\d", output, re.M), "evaluate reports the return"
    assert re.search(r"^action \[", output, re.M), "the script prints an action"
    assert re.search(r"replayed \d+ steps: no difference", output), "the export replays the trace"
