"""Rewards before advantages: hand-computed cases and float64 references."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import pytest
import reference_numerics
import torch

from embodied_ppo.core import running_stats
from embodied_ppo.ppo import rewards
from tests.ppo.test_advantages import NAN, close, random_rows

# ------------------------------------------------------------------------------------------ rewards
REWARD = torch.tensor([[1.0, 3.0, 10.0, 10.0], [2.0, 99.0, 30.0, 10.0]])
KEPT = torch.tensor([[True, True, True, True], [True, False, True, True]])


def test_whiten_rewards_keeps_the_mean():
    out = rewards.whiten_rewards(REWARD, KEPT)
    before = running_stats.masked_moments(REWARD, KEPT)
    after = running_stats.masked_moments(out, KEPT)
    assert after.mean.item() == pytest.approx(before.mean.item(), rel=1e-6)
    assert after.var.item() == pytest.approx(1.0, rel=1e-5) and before.var.item() > 50
    assert out[1, 1].item() == 99.0
    # 0, 4: mean 2, unbiased deviation √8
    two = rewards.whiten_rewards(torch.tensor([[0.0, 4.0]]), torch.ones(1, 2).bool())
    assert two.tolist() == [pytest.approx([2 - 2 / 8**0.5, 2 + 2 / 8**0.5])]
    one = torch.tensor([[7.0]])
    assert rewards.whiten_rewards(one, torch.ones(1, 1).bool()).equal(one)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [  # 0, 4: mean 2, unbiased deviation √8
        ({}, [-2 / 8**0.5, 2 / 8**0.5]),
        ({"by": "mean"}, [-2.0, 2.0]),
        ({"by": "std"}, [0.0, 4 / 8**0.5]),
    ],
)
@pytest.mark.parametrize("group_size", [None, 2])
def test_rewards_by_mean_and_deviation(flags, expected, group_size):
    out = rewards.normalize_rewards(
        torch.tensor([[0.0, 4.0]]), torch.ones(1, 2).bool(), group_size=group_size, **flags
    )
    assert out.flatten().tolist() == pytest.approx(expected)


def test_reward_norm_over_the_batch_and_over_groups():
    batch = rewards.normalize_rewards(REWARD, KEPT)
    close(
        batch[KEPT],
        torch.tensor(reference_numerics.standardise(REWARD.tolist(), KEPT.tolist()))[KEPT],
    )
    assert batch[1, 1].item() == 99.0  # masked: untouched
    groups = rewards.normalize_rewards(REWARD, KEPT, group_size=2)
    for cut in (slice(0, 2), slice(2, 4)):
        expected = torch.tensor(
            reference_numerics.standardise(REWARD[:, cut].tolist(), KEPT[:, cut].tolist())
        )
        close(groups[:, cut][KEPT[:, cut]], expected[KEPT[:, cut]])


def test_constant_rewards_are_not_divided():
    same = torch.full((3, 4), 0.1)
    mask = torch.ones(3, 4).bool()
    assert rewards.normalize_rewards(same, mask, by="std").equal(same)
    assert rewards.normalize_rewards(same, mask).abs().max() < 1e-6
    single_entry_mask = torch.tensor([[True, False], [False, True]])
    reward = torch.tensor([[5.0, 1.0], [2.0, 7.0]])
    # A single entry keeps its value.
    shaped = rewards.normalize_rewards(reward[:, :1], single_entry_mask[:, :1])
    assert shaped.flatten().tolist() == [5.0, 2.0]


# ----------------------------------------------------------------------------------- return scaling
def test_return_scaler_by_hand():
    s = rewards.ReturnScaler(1)
    assert s.std.item() == 1.0
    flags = {
        "done": torch.tensor([[0], [1], [0], [0]]).bool(),
        "mask": torch.tensor([[1], [1], [0], [1]]).bool(),
    }
    s.update(torch.tensor([[2.0], [3.0], [NAN], [6.0]]), **flags, gamma=0.5)
    # G: 2 ; 3 + ½·2 = 4, done ; masked ; 6 -> mean 4, population variance (4 + 0 + 4)/3
    assert s.moments.mean.item() == pytest.approx(4.0) and s.moments.count.item() == 3
    assert s.std.item() == pytest.approx((8 / 3) ** 0.5)
    assert s.running.item() == 6.0
    # 1 + ½·6 = 4, done
    s.update(torch.tensor([[1.0]]), torch.tensor([[True]]), torch.tensor([[True]]), 0.5)
    assert s.moments.var.item() == pytest.approx(8 / 4) and s.running.item() == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_return_scaler_equals_reference_over_rollouts(seed):
    s, state, returns = rewards.ReturnScaler(3), [0.0] * 3, []
    for i in range(4):
        rows = random_rows(7, 3, 10 * seed + i)
        done = rows["terminated"] | rows["truncated"]
        s.update(rows["reward"], done, rows["mask"], 0.97)
        new_returns, state = reference_numerics.discounted_returns(
            rows["reward"].tolist(), done.tolist(), rows["mask"].tolist(), gamma=0.97, start=state
        )
        returns += new_returns
    assert s.moments.count.item() == len(returns)
    assert s.moments.mean.item() == pytest.approx(fmean(returns), abs=1e-9)
    assert s.std.item() == pytest.approx(math.sqrt(pvariance(returns) + 1e-8), rel=1e-9)
    assert s.running.tolist() == pytest.approx(state, abs=1e-9)


def test_return_scaler_is_independent_of_rollout_length():
    rows = random_rows(12, 3, 11)
    done = rows["terminated"] | rows["truncated"]
    uncut, cut = rewards.ReturnScaler(3), rewards.ReturnScaler(3)
    uncut.update(rows["reward"], done, rows["mask"], 0.9)
    for i in range(0, 12, 4):
        part = slice(i, i + 4)
        resumed = rewards.ReturnScaler(3)
        resumed.load_state_dict(cut.state_dict())
        cut = resumed
        cut.update(rows["reward"][part], done[part], rows["mask"][part], 0.9)
    torch.testing.assert_close(cut.running, uncut.running, rtol=1e-12, atol=1e-12)
    assert cut.std.item() == pytest.approx(uncut.std.item(), rel=1e-12)
    assert set(cut.state_dict()) == {"running", "moments.mean", "moments.var", "moments.count"}
