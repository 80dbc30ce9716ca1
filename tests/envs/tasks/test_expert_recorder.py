"""Demonstrations of Tabletop's scripted expert, recorded in MuJoCo, read and replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import embodied_envs
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import expert_recorder
from embodied_ppo.data.lerobot_reader import read
from embodied_ppo.data.lerobot_writer import Writer

N = 8


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[expert_recorder.Episode]]:
    folder = tmp_path_factory.mktemp("recorded")
    size = (32, 32)
    names = {
        "fps": expert_recorder.FPS,
        "state": expert_recorder.STATE,
        "action": expert_recorder.ACTION,
        "cameras": {"front": size},
    }
    episodes = []
    families = {"families": ["reach", "push", "put"]}
    options = {"noise": 0, "num_threads": 1}
    with Writer(folder, **names) as writer:
        for e in expert_recorder.record(
            families, episodes=12, seed=3, num_envs=N, image_size=size, **options
        ):
            writer.add(e.images, e.state, e.action, e.instruction)
            episodes.append(e)
    return folder, episodes


def tabletop(size: int = 32) -> MujocoEnv:
    kwargs = {"families": ["reach", "push", "put"], "obs": "language"}
    options = {"cameras": ["front"], "image_size": (size, size), "num_threads": 1, "kwargs": kwargs}
    env = embodied_envs.make("Tabletop", num_envs=N, seeds=expert_recorder.seeds(3, N), **options)
    assert isinstance(env, MujocoEnv)
    return env


@pytest.mark.slow
def test_replayed_actions_repeat_the_recording(
    recorded: tuple[Path, list[expert_recorder.Episode]],
) -> None:
    """With the same seeds every first episode is equal bit for bit, and succeeds."""
    data, episodes = read(recorded[0]), recorded[1]
    first = {e.attempt: i for i, e in enumerate(episodes) if e.attempt < N}
    assert len(first) > N / 2 and [e.attempt for e in episodes] == sorted(
        e.attempt for e in episodes
    )
    env = tabletop()
    sentences = env.s["instruction"].tolist()
    obs, done = env.reset(), Counter()
    for t in range(max(len(episodes[i].state) for i in first.values())):
        action = torch.zeros(N, 4)
        assert isinstance(obs, dict)
        running = {n: i for n, i in first.items() if t < len(episodes[i].state)}
        for n, i in running.items():
            frame = int((data.episode == i).nonzero()[t])
            action[n] = data.action[frame]
            assert torch.equal(data.state[frame], obs["state"][n])
            assert torch.equal(data.images["front"][frame].permute(2, 0, 1), obs["front"][n])
            assert data.instructions[int(data.instruction[frame])] == env.instructions[sentences[n]]
        step = env.step(action)
        obs, success = step.obs, step.success
        assert success is not None
        for n, i in running.items():
            ends = t == len(episodes[i].state) - 1
            assert bool(success[n]) == ends
            done[n] += ends
    assert done == dict.fromkeys(first, 1)
    env.close()
