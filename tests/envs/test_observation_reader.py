"""Observations outside of a training environment are converted as its adapter converts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces as gym

from embodied_envs import make
from embodied_envs.adapters import spaces
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.base.errors import EnvError
from embodied_envs.observation_reader import ObservationReader
from embodied_envs.types import Box

SPACE = gym.Dict(
    {
        "arm": gym.Dict({"joints": gym.Box(-1, 1, (2,), np.float64), "grip": gym.Discrete(3)}),
        "image": gym.Box(0, 255, (3, 4, 4), np.uint8),
        "clock": gym.Box(0, 1, (1,), np.float32),
    }
)


def reader(keys: tuple[str, ...] | None = ("arm", "image")) -> ObservationReader:
    spec, leaves = spaces.observations(SPACE, id="Test", device=torch.device("cpu"), keys=keys)
    env = GymnasiumEnv.__new__(GymnasiumEnv)  # its spaces only
    env.id, env.obs_spec, env.leaves = "Test", spec, leaves
    env.observation_space, env.action_spec = SPACE, Box((-1.0,), (1.0,))
    return ObservationReader(env)


def test_one_observation_and_a_batch() -> None:
    one = {
        "arm": {"joints": np.array([0.5, -0.25]), "grip": np.int64(2)},
        "image": np.full((3, 4, 4), 7, np.uint8),
    }
    obs, is_batched = reader()(one)
    assert isinstance(obs, dict) and not is_batched
    assert obs["arm/joints"].tolist() == [[0.5, -0.25]] and obs["arm/grip"].tolist() == [[0, 0, 1]]
    assert obs["image"].dtype == torch.uint8 and obs["image"].shape == (1, 3, 4, 4)
    two = {
        "arm": {"joints": np.zeros((2, 2)), "grip": np.array([2, 0])},
        "image": np.zeros((2, 3, 4, 4), np.uint8),
    }
    obs, is_batched = reader()(two)
    assert is_batched and isinstance(obs, dict)
    assert obs["arm/grip"].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert reader(("clock",))({"clock": torch.tensor([0.5])})[0] == {"clock": torch.tensor([[0.5]])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "obs is arm/joints, arm/grip; the policy reads .*image"),
        ({"image": np.zeros((3, 4, 4))}, "image.*float64.*uint8"),
        ({"image": np.zeros((2, 3, 4, 4), np.uint8)}, "different numbers of observations"),
    ],
)
def test_wrong_observations_are_refused(change: dict[str, Any], message: str) -> None:
    one = {
        "arm": {"joints": np.zeros(2), "grip": 0},
        "image": np.zeros((3, 4, 4), np.uint8),
        **change,
    }
    one = {name: value for name, value in one.items() if value is not None}
    with pytest.raises(EnvError, match=message):
        reader()(one)


def test_actions_of_a_chunk_are_mapped_one_by_one() -> None:
    env: Any = make("Pendulum-v1", num_envs=2, seeds=[0, 1], simulator="gymnasium", action_chunk=3)
    mapped = env.to_simulator(torch.tensor([[0.0, 0.5, 3.0], [-1.0, 0.0, 0.25]]))
    assert mapped.tolist() == [[[0.0], [1.0], [2.0]], [[-2.0], [0.0], [0.5]]]
    env.close()
