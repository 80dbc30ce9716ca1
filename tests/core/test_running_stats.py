"""Moments: hand-computed cases, the standard library's statistics, merging, state."""

from __future__ import annotations

from statistics import fmean, pvariance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core import running_stats
from embodied_ppo.core.running_stats import RunningMoments

# float32 numbers, so that a tensor holds exactly what the twin gets
number = st.floats(-1e3, 1e3, width=32)
batches = st.lists(st.lists(st.tuples(number, st.booleans()), max_size=9), min_size=1, max_size=5)


def test_masked_sum_and_moments_by_hand():
    x = torch.tensor([1.0, 5.0, 100.0, 6.0])
    mask = torch.tensor([True, True, False, True])
    # mean (1 + 5 + 6)/3 = 4 ; squares 9 + 1 + 4 = 14 ; unbiased 14/2 = 7 ; population 14/3
    assert running_stats.masked_sum(x, mask).item() == 12.0
    mean, var, count = running_stats.masked_moments(x, mask)
    assert (mean.item(), var.item(), count.item()) == (4.0, 7.0, 3.0)
    assert running_stats.masked_moments(x, mask, unbiased=False).var.item() == pytest.approx(14 / 3)
    assert mean.dtype == var.dtype == torch.float64


def test_masked_nan_changes_neither_sum_nor_gradient():
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    running_stats.masked_sum(x, mask).backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 0.0, 1.0]
    assert running_stats.masked_moments(x.detach(), mask).mean.item() == 2.0


def test_mask_broadcasts_over_trailing_dimensions():
    x = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([False, True])
    assert running_stats.masked_sum(x, mask).item() == 51.0  # 6 + .. + 11
    with pytest.raises(ConfigError, match=r"mask \(3,\).*\(2, 3, 2\)"):
        running_stats.masked_sum(x, torch.ones(3, dtype=torch.bool))


def test_moments_of_zero_and_one_entry():
    x, none = torch.tensor([2.0, 3.0]), torch.zeros(2, dtype=torch.bool)
    assert running_stats.masked_sum(x, none).item() == 0.0
    assert [v.item() for v in running_stats.masked_moments(x, none)] == [0.0, 0.0, 0.0]
    moments = running_stats.masked_moments(x, torch.tensor([True, False]))
    assert [v.item() for v in moments] == [2.0, 0.0, 1.0]


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    value = torch.tensor([1.0, 2.0, 4.0, -5.0])
    mask = torch.tensor([True, True, True, False])
    # Var(R) = 2/3 ; errors 0, 0, -1 have mean -1/3 and variance 1/3 - 1/9 = 2/9 ; 1 - (2/9)/(2/3) =
    # 2/3
    explained = lambda x: float(running_stats.explained_variance(x, returns, mask))
    assert explained(value) == pytest.approx(2 / 3)
    assert explained(returns + 7.0) == pytest.approx(1.0)  # a constant off
    assert explained(torch.zeros(4)) == pytest.approx(0.0)
    # errors 2R: 1 - 4
    assert explained(-returns) == pytest.approx(-3.0)
    for constant in (torch.ones(4), 1e-17 * returns):  # rounding in the sum of no rewards
        assert running_stats.explained_variance(value, constant, mask).isnan()


# ---------------------------------------------------------------------------------- running moments
def test_running_moments_by_hand():
    m = RunningMoments((1,), eps=0.0)
    m.update(torch.tensor([[1.0], [3.0]]))
    m.update(torch.tensor([[8.0], [50.0]]), torch.tensor([True, False]))
    # 1, 3, 8: mean 4, squares 9 + 1 + 16 = 26, population variance 26/3
    assert m.mean.item() == pytest.approx(4.0)
    assert m.var.item() == pytest.approx(26 / 3)
    assert m.count.item() == 3.0
    assert m.normalize(torch.tensor([[8.0]])).item() == pytest.approx(4 / (26 / 3) ** 0.5, rel=1e-6)


@settings(max_examples=60)
@given(batches)
def test_running_moments_equal_moments_of_all_batches(parts):
    m = RunningMoments()
    for part in parts:
        m.update(
            torch.tensor([x for x, _ in part]), torch.tensor([k for _, k in part], dtype=torch.bool)
        )
    unmasked = [x for part in parts for x, keep in part if keep]
    assert m.count.item() == len(unmasked)
    if unmasked:
        assert m.mean.item() == pytest.approx(fmean(unmasked), rel=1e-9, abs=1e-9)
        assert m.var.item() == pytest.approx(pvariance(unmasked), rel=1e-9, abs=1e-7)


def test_running_variance_is_exact_for_large_mean():
    x = torch.tensor([[10000.0], [10001.0], [10002.0]], dtype=torch.float32)
    m = RunningMoments((1,))
    for _ in range(1000):
        m.update(x)
    assert m.var.item() == pytest.approx(2 / 3, rel=1e-9)


@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_normalize_is_identity_before_first_merge(eps):
    m = RunningMoments((2,), eps=eps)
    x = torch.tensor([[3.0, -400.0]])
    assert m.normalize(x).equal(x)
    assert m.normalize(x, clip=5.0).tolist() == [[3.0, -5.0]]
    m.load_state_dict(RunningMoments((2,)).state_dict())  # a checkpoint from before the first merge
    assert m.normalize(x).equal(x)
    # nothing: masked rows hold anything
    m.update(torch.full((3, 2), float("nan")), torch.zeros(3, dtype=torch.bool))
    assert m.normalize(x).equal(x) and m.count.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_normalize_returns_float32_for_any_dtype(dtype):
    m = RunningMoments((3,))
    x = torch.tensor([1.0, 2.0, 6.0]).reshape(3, 1).expand(3, 3)
    m.update(x)
    y = m.normalize(x.to(dtype))
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, m.normalize(x))
    torch.testing.assert_close(y, ((x - 3) / (14 / 3 + 1e-8) ** 0.5))


def test_normalize_clip_and_eps():
    m = RunningMoments(())
    m.update(torch.tensor([0.0, 2.0]))  # mean 1, variance 1
    x = torch.tensor([-9.0, 1.5])
    assert m.normalize(x, clip=3.0).tolist() == pytest.approx([-3.0, 0.5])
    assert m.normalize(x, eps=3.0).tolist() == pytest.approx([-5.0, 0.25])  # divided by sqrt(1 + 3)


def _trained(seed: int = 0) -> RunningMoments:
    m = RunningMoments((4,))
    m.update(torch.randn(50, 4, generator=torch.Generator().manual_seed(seed)) * 3 + 2)
    return m


def test_cast_of_module_keeps_float64_statistics():
    m, x = _trained(), torch.randn(5, 4)
    before, state = m.normalize(x), m.mean.clone()
    nn.Sequential(nn.Linear(4, 4), m).to(torch.bfloat16)
    assert m.mean.dtype is torch.float64 and m.mean.equal(state)
    assert m.normalize(x).equal(before)


@pytest.mark.parametrize("block", [1, 40, 10**6])
def test_moments_of_blocks_equal_those_of_all_features(block, monkeypatch):
    """Large batches are computed in blocks of features; 1 is less than a feature's rows."""
    x, mask = torch.randn(20, 3, 4), torch.arange(20) % 3 > 0
    var, mean = torch.var_mean(x[mask].double(), dim=0, correction=0)
    monkeypatch.setattr(running_stats, "BLOCK", block)
    moments = running_stats.batch_moments(x, mask)
    assert moments.mean.shape == (3, 4) and float(moments.count) == int(mask.sum())
    torch.testing.assert_close(moments.mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.var, var, rtol=1e-12, atol=1e-12)
    assert not running_stats.batch_moments(x, mask & False).mean.any()


def test_a_constant_feature_is_not_amplified() -> None:
    """Values 0.5 and -4000 without and with rounding, 1e-6 around 0, and 1 to 3 around 5e6."""
    x = torch.tensor([[0.5, -4000.0, 1e-6, 5e6 + 1], [0.5, -4000.0, -1e-6, 5e6 + 3]]).double()
    x[:, 0] += torch.tensor([1e-6, -1e-6])
    bounded, plain = RunningMoments((4,), scale_constants=False), RunningMoments((4,))
    for m in (bounded, plain):
        m.update(x)
    assert bounded.is_constant().tolist() == [True, True, False, False]
    later = torch.tensor([[0.51, -4004.0, 1e-6, 5e6 + 3]])
    y, z = bounded.normalize(later, clip=10.0), plain.normalize(later, clip=10.0)
    assert z[0].tolist()[:2] == [10.0, -10.0], "ten standard deviations"
    # (0.51 - 0.5) / 1 and (-4004 + 4000) / 4000; the others are those of the plain normaliser
    torch.testing.assert_close(y[0, :2], torch.tensor([0.01, -0.001]), atol=1e-6, rtol=0)
    assert torch.equal(y[0, 2:], z[0, 2:])
    torch.testing.assert_close(((later - bounded.mean) / bounded.std()).float()[0, :2], y[0, :2])
