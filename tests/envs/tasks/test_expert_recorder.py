"""Demonstrations of Tabletop's scripted expert, recorded in MuJoCo, read and replayed."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import embodied_envs
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import expert_recorder
from embodied_envs.tasks.tabletop import COLOUR_VALUES
from embodied_envs.tasks.tabletop_captions import captions
from embodied_envs.tasks.tabletop_language import FAMILIES
from embodied_ppo.core.types import EnvError
from embodied_ppo.data.lerobot_reader import read
from embodied_ppo.data.lerobot_writer import Writer

N = 8


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[expert_recorder.Episode]]:
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
    captions = expert_recorder.captions(families)
    options = {"noise": 0, "num_threads": 1, "captions": True}
    with Writer(folder, **names, captions=captions) as writer:
        for e in expert_recorder.record(
            families, episodes=12, seed=3, num_envs=N, image_size=size, **options
        ):
            writer.add(e.images, e.state, e.action, e.instruction, e.points)
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


def test_places_of_captions_are_on_the_objects(
    recorded: tuple[Path, list[expert_recorder.Episode]],
) -> None:
    """The pixel at the place of a visible object has the colour of the object."""
    data = read(recorded[0])
    assert list(data.captions)[:4] == [f"{colour} block" for colour in COLOUR_VALUES]
    assert data.captions["red zone"][0] == "the red zone"
    points, images = data.points["front"], data.images["front"].float()
    visible = (points >= 0).all(-1)  # [F, 8]
    assert 0.5 < float(visible.float().mean()) < 1  # the gripper or a block covers some
    colours = torch.tensor([[float(x) for x in v.split()] for v in COLOUR_VALUES.values()])
    frames, objects = visible.nonzero().unbind(1)
    x, y = (points[frames, objects] * 32).long().clamp_max(31).unbind(1)
    # The colour with the largest cosine similarity to the pixel.
    similarity = F.normalize(images[frames, y, x], dim=1) @ F.normalize(colours, dim=1).T
    assert float((similarity.argmax(1) == objects % 4).float().mean()) > 0.97


def test_captions_have_no_word_of_held_out_wordings_alone() -> None:
    words = {x for text in chain(*captions().values()) for x in text.split()}
    train = {x for f in FAMILIES.values() for x in " ".join(f.train).split()}
    held_out = {x for f in FAMILIES.values() for x in " ".join(f.held_out).split()}
    assert "red" in words and not words & (held_out - train)


def test_another_start_gives_other_episodes(
    recorded: tuple[Path, list[expert_recorder.Episode]],
) -> None:
    families, size = {"families": ["reach", "push", "put"]}, (8, 8)
    options: dict[str, Any] = {
        "episodes": 2,
        "seed": 3,
        "num_envs": N,
        "image_size": size,
        "num_threads": 1,
    }
    again, other = (
        list(expert_recorder.record(families, **options, noise=0, start=start)) for start in (0, 12)
    )
    assert [np.array_equal(x.state, y.state) for x, y in zip(again, recorded[1])] == [True, True]
    assert not any(
        x.state.shape == y.state.shape and (x.state == y.state).all()
        for x, y in zip(other, recorded[1])
    )


@pytest.mark.slow
def test_with_noise_the_experts_action_is_recorded() -> None:
    """Half of the steps execute another action, so the target does not move as recorded.

    Failed episodes are counted, not recorded.
    """
    outcomes: Counter[bool] = Counter()
    options: dict[str, Any] = {"seed": 0, "num_envs": N, "image_size": (8, 8), "num_threads": 1}
    recorded_episodes = list(
        expert_recorder.record(
            {"families": ["reach", "put"]},
            episodes=16,
            noise=0.5,
            on_episode=lambda family, success: outcomes.update([success]),
            **options,
        )
    )
    assert len(recorded_episodes) == 16 <= outcomes[True] and outcomes[False] > 0
    state, action = (
        np.concatenate([getattr(e, name)[:-1] for e in recorded_episodes])
        for name in ("state", "action")
    )
    after = np.concatenate([e.state[1:] for e in recorded_episodes])
    finger = np.clip(
        state[:, 8] + 0.014 * action[:, 3], 0, 0.037
    )  # targets of the fingers by the recorded actions
    executed = np.abs(after[:, 8] - finger) < 1e-6
    # Half are as recorded, and some of the others, where the fingers stay at their limits.
    assert 0.5 < executed.mean() < 0.9


def test_invalid_options_are_refused() -> None:
    options: dict[str, Any] = {"episodes": 1, "seed": 0, "num_envs": 1, "image_size": (8, 8)}
    with pytest.raises(EnvError, match=r"obs='state': demonstrations are of obs=language"):
        next(expert_recorder.record({"obs": "state"}, **options))
    with pytest.raises(EnvError, match=r"noise=1.5 must be a probability"):
        next(expert_recorder.record({}, **options, noise=1.5))
