"""Rewards of groups from the terms of a simulator or a grader."""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import TrainingError
from embodied_ppo.core.errors import RunRefused
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.reward_groups import reward_groups
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.rollout.group_rewards import GroupRewards

MASK = torch.ones(2, 2, dtype=torch.bool)
REWARD = torch.tensor([[3.0, 6.0], [1.0, 1.0]])
# In the second step environment 0 has no term a, and no environment has a term b.
ROWS = [
    {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 4.0]), "mean": torch.tensor([0.5])},
    {"a": torch.tensor([torch.nan, 1.0])},
]


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
        ({"x": {"terms": ["c"]}, "y": {}}, "correct c .. first step of env.id=Toy .. a, b"),
        ({"x": {"terms": ["mean"]}, "y": {}}, "correct mean"),
        (
            {"x": {"terms": ["a"]}, "y": {"terms": ["b"]}},
            "write terms: rest .. a, b add up to 0 where the reward of env.id=Toy is 1",
        ),
    ],
)
def test_impossible_terms_are_refused(groups: dict[str, Any], line: str) -> None:
    with pytest.raises(RunRefused) as error:
        split(groups)
    for part in line.split(" .. "):
        assert part in str(error.value)


def test_every_rollout_is_checked() -> None:
    """A term that a later rollout lacks would be missing in the reward."""
    config = loader.load(AlgorithmConfig, {"reward_groups": {"x": {"terms": ["a", "b"]}}})
    rewards = GroupRewards(reward_groups(config), "env.id=Toy")
    # Where no response could be graded, there are no terms to check.
    assert rewards([{}], REWARD[:1], ~MASK[:1]).tolist() == [[0.0, 0.0]]
    assert rewards(ROWS[:1], REWARD[:1], MASK[:1]).tolist() == [[3.0, 6.0]]
    with pytest.raises(RunRefused, match=r"a, b add up to 0 where the reward of env.id=Toy is 1"):
        rewards(ROWS[1:], REWARD[1:], MASK[1:])
    assert rewards(ROWS[1:], REWARD[1:], torch.tensor([[False, True]]))[0, 1] == 1.0


def test_infinite_term_is_named() -> None:
    config = loader.load(AlgorithmConfig, {"reward_groups": {"x": {"terms": ["a"]}, "y": {}}})
    rewards = GroupRewards(reward_groups(config), "env.id=Toy")
    rows = [{"a": torch.tensor([torch.inf, 1.0])}]
    with pytest.raises(TrainingError, match=r"the reward term a of env.id=Toy is infinite"):
        rewards(rows, REWARD[:1], MASK[:1])
    masked = rewards(rows, REWARD[:1], torch.tensor([[False, True]]))
    assert masked[0, 1].tolist() == [1.0, 5.0] and bool(masked.isfinite().all())


@pytest.mark.slow
def test_misspelt_term_leaves_nothing_behind(tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    options = ["env.id=HalfCheetah-v4", "env.num_envs=4", "updates=2", "compile=never"]
    options += ["algorithm.horizon=16", "algorithm.global_batch_size=32", f"run_dir={run_dir}"]
    groups = "algorithm.reward_groups={run: {terms: [reward_rum]}, other: {}}"
    message = "correct reward_rum .. did you mean reward_run?"
    run_helpers.assert_refused(capsys, ["train", "--quiet", *options, groups], message)
    assert not run_dir.exists()


def test_discount_of_a_group_applies_within_chunks() -> None:
    """A decision of two actions has the reward r_0 + γ·r_1 in each group."""

    def collect(gamma: float | None) -> Trajectory:
        groups = {"run": {"terms": ["reward_run"], "gamma": gamma}, "cost": {}}
        options = {"env.action_chunk": 2, "algorithm.reward_groups": groups if gamma else {}}
        rollout = run_helpers.tiny_rollout(run_helpers.tiny_config(options))
        try:
            return rollout.collect(8, update=0, version=0)[0]
        finally:
            rollout.close()

    plain, near, far = collect(None), collect(0.5), collect(0.99)
    assert torch.equal(plain.action, near.action) and near.value.shape == near.reward.shape
    torch.testing.assert_close(far.reward.sum(-1), plain.reward)
    assert torch.equal(near.reward[..., 1], far.reward[..., 1])
    second = (far.reward - near.reward)[..., 0] / 0.49
    first = near.reward[..., 0] - 0.5 * second
    # The reward of the forward velocity of one step is at most a few units.
    assert 0 < float(first.abs().mean()) < 3 and 0 < float(second.abs().mean()) < 3
