"""Rewards of groups from the terms of a simulator or a grader."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.options import loader
from embodied_ppo.options.reward_groups import reward_groups
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.rollout.group_rewards import GroupRewards

MASK = torch.ones(2, 2, dtype=torch.bool)
REWARD = torch.tensor([[3.0, 6.0], [1.0, 1.0]])
ROWS = [
    {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 4.0]), "mean": torch.tensor([0.5])},
    {"a": torch.tensor([torch.nan, 1.0])},
]
"""In the second step environment 0 has no term a, and no environment has a term b."""


def split(groups: dict[str, Any], reward: torch.Tensor = REWARD) -> torch.Tensor:
    config = loader.load(AlgorithmConfig, {"reward_groups": groups})
    return GroupRewards(reward_groups(config), "env.id=Toy")(ROWS, reward, MASK)


def test_terms_of_groups_by_hand() -> None:
    parts = split({"x": {"terms": ["b"]}, "y": {"terms": "rest"}})
    assert parts.tolist() == [[[2.0, 1.0], [4.0, 2.0]], [[0.0, 1.0], [0.0, 1.0]]]
    assert split({"all": {}}) is REWARD
    both = torch.tensor([[3.0, 6.0], [0.0, 1.0]])
    assert torch.equal(split({"all": {"terms": ["a", "b"]}}, both), both)


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({"x": {"terms": ["c"]}, "y": {}}, "env.id=Toy has no reward term c; .. a, b"),
        ({"x": {"terms": ["mean"]}, "y": {}}, "has no reward term mean"),
        (
            {"x": {"terms": ["a"]}, "y": {"terms": ["b"]}},
            "write terms: rest .. a, b add up to 0 where the reward of env.id=Toy is 1",
        ),
    ],
)
def test_impossible_terms_are_refused(groups: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        split(groups)
    for part in line.split(" .. "):
        assert part in str(error.value)
