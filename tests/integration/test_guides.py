"""Commands and scripts of pages of the documentation run in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_helpers import page_commands, run_block

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "networks.md": {
        "embodied-ppo train": (
            "env.num_envs=4 env_steps=256 algorithm.horizon=32 algorithm.global_batch_size=64"
            " evaluation.episodes=2 evaluation.video_episodes=0 env.max_episode_steps=20"
            " compile=never"
        ),
        "embodied-ppo evaluate": "episodes=2 num_envs=2 video=false",
    },
    "trl.md": {
        "run_dir=runs/ppo": (
            "updates=1 algorithm.rollout_batch_size=4 algorithm.global_batch_size=4 device=cpu"
            " algorithm.micro_batch_size=4 algorithm.response_length=8 evaluation.episodes=4"
            " compile=never threads=1"
        ),
        "embodied-ppo evaluate": "episodes=4",
    },
    "rough_terrain.md": {
        "embodied-ppo train": (
            "env.num_envs=8 env.num_threads=1 updates=2 algorithm.horizon=8 compile=never"
            " algorithm.global_batch_size=32 env.max_episode_steps=20 evaluation.episodes=2"
            " evaluation.video_episodes=0"
        ),
        "embodied-ppo evaluate": "episodes=2 num_envs=2",
        "robustness=true": (
            "robustness_episodes=1 'robustness_factors=[action_delay]'"
            " 'robustness_values={action_delay:[0,1]}'"
        ),
    },
}
"""Page -> text of a command -> options that are added behind it, to make it short."""


@pytest.mark.slow
@pytest.mark.parametrize("page", SHORT)
def test_blocks_run(page: str, tmp_path) -> None:
    """Run ``sh`` with the commands of this checkout, and save ``python FILE``."""
    env = page_commands(tmp_path, ROOT)
    text = (ROOT / "docs" / page).read_text()
    text = text.partition("### Example: from the file")[2] or text
    blocks = re.findall(r"^```(sh|python)(?: (\S+))?\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) >= 4
    for language, name, block in blocks:
        if language == "sh":
            for command, options in SHORT[page].items():
                block = block.replace(command, f"{command} {options}")
            run_block(block, tmp_path, env)
        elif name:
            (tmp_path / name).write_text(block)
