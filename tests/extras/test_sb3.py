"""Stable-Baselines3 trains in our tasks, in an environment without the trainer: make test-sb3."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_helpers import run_process

PYTHON = os.environ.get("SB3_PYTHON", "")
EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="SB3_PYTHON names no Python with Stable-Baselines3: make test-sb3"
)


def run(script: str) -> list:
    """Run a program in the folder of the examples and return the JSON of its last line."""
    output = run_process(Path(PYTHON).absolute(), "-c", script, cwd=EXAMPLES, timeout=None)
    return json.loads(output.splitlines()[-1])


def test_state_policy_learns() -> None:
    """Random actions reach the block in 5 % of the episodes."""
    script = """
import json, sys
import train_with_sb3
print(json.dumps([train_with_sb3.main(30000), "ray" in sys.modules]))
"""
    success, has_ray = run(script)
    assert success > 0.6 and not has_ray


def test_policy_with_images_and_instructions_trains() -> None:
    script = """
import gymnasium as gym, json
from stable_baselines3 import PPO
from train_with_sb3 import SB3VecEnv
env = gym.make_vec("embodied/Tabletop-v0", num_envs=4, families=["reach", "push"], obs="language",
                   cameras=["front"], image_size=36, max_episode_steps=6)
model = PPO("MultiInputPolicy", SB3VecEnv(env), n_steps=16, batch_size=32, n_epochs=1, device="cpu")
model.learn(128)
print(json.dumps([model.num_timesteps, len(model.ep_success_buffer)]))
"""
    steps, episodes = run(script)
    assert steps == 128 and episodes == 20  # 32 steps of 4 environments, 6 steps each


def test_truncated_episodes_report_their_last_observation() -> None:
    script = """
import gymnasium as gym, json, numpy as np
from train_with_sb3 import SB3VecEnv
env = SB3VecEnv(gym.make_vec("embodied/Tabletop-v0", num_envs=3, max_episode_steps=2))
env.seed(5)
first = env.reset()
env.step(np.zeros((3, 4)))
obs, reward, done, infos = env.step(np.zeros((3, 4)))
final = np.stack([info["terminal_observation"] for info in infos])
other = gym.make_vec("embodied/Tabletop-v0", num_envs=3, autoreset_mode="next_step")
same = bool((other.reset(seed=[5, 6, 7])[0] == first).all())
other.step(np.zeros((3, 4)))
same &= bool((other.step(np.zeros((3, 4)))[0] == final).all())
print(json.dumps([same, done.tolist(), [info["TimeLimit.truncated"] for info in infos]]))
"""
    assert run(script) == [True, [True] * 3, [True] * 3]
