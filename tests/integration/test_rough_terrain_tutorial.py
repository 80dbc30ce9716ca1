"""Test of docs/rough_terrain.md: its commands and scripts run in their order."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from run_helpers import page_commands

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "rough_terrain.md").read_text()
ADDED = {
    "embodied-ppo train": (
        "env.num_envs=8 env.num_threads=1 updates=2 algorithm.horizon=8 compile=never"
        " algorithm.global_batch_size=32 env.max_episode_steps=20 evaluation.episodes=2"
        " evaluation.video_episodes=0"
    ),
    "robustness=true": (
        "robustness=true robustness_episodes=1 'robustness_factors=[action_delay]'"
        " 'robustness_values={action_delay:[0,1]}'"
    ),
    "embodied-ppo evaluate": "episodes=2 num_envs=2",
}
"""Options that are added to each command, to make it short."""


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    """Run ``sh`` with the commands of this checkout, and save ``python FILE``."""
    env = page_commands(tmp_path, ROOT)
    output = ""
    blocks = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", TEXT, re.M | re.S)
    kinds = [language for language, *_ in blocks]
    assert kinds == ["sh", "python", "sh", "sh", "sh", "sh", "python", "sh", "python", "sh"]
    for language, name, text in blocks:
        if language == "python":
            (tmp_path / name).write_text(text)
            continue
        script = text
        for command, options in ADDED.items():
            words = options if "=true" in command else f"{command} {options}"
            script = script.replace(command, words)
        process = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, f"{script}\n{process.stdout}\n{process.stderr}"
        output += process.stdout
    config = (tmp_path / "runs/blind/config.yaml").read_text()
    assert "height_scan" in config, "the critic reads the heights of the ground"
    assert re.search(r"^env_steps rollout/return .*\n64 ", output, re.M), "progress.py"
    assert output.count("eval/success ") == 2, "both evaluations report success"
    assert "1 episodes at each value" in output, "the table of robustness"
    described = json.loads((tmp_path / "blind_policy/policy.json").read_text())
    assert [x["name"] for x in described["inputs"]] == ["state"], "the policy reads state only"
    for line in page_lines("control rate 50.0 Hz") + page_lines("replayed 400 steps"):
        assert line in output, line
    assert "FR_hip position minus home differs" in output and "do not run this policy" in output


def page_lines(first: str) -> list[str]:
    """Return the lines of the output that the page shows, from ``first`` on, without ``..``."""
    (block, *_) = (b for b in TEXT.split("```") if b.startswith(f"\n{first}"))
    return [line for line in block.strip().splitlines() if line != ".."]
