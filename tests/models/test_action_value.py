"""The action value's distribution over the grid, against integrals in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ArraySpec
from embodied_ppo.models import action_value
from embodied_ppo.models.action_value import (
    BIN_WIDTH,
    MAX_VALUE,
    NUM_BINS,
    SIGMA_IN_BINS,
    ActionValue,
)
from embodied_ppo.models.backbone import Encoder


def reference(value: float) -> list[float]:
    """Return the normalised masses of the target distribution in the cells of the grid."""
    centre, scale = min(max(value, -MAX_VALUE), MAX_VALUE), SIGMA_IN_BINS * BIN_WIDTH * math.sqrt(2)
    edges = [-MAX_VALUE + (i - 0.5) * BIN_WIDTH for i in range(NUM_BINS + 1)]
    below = [math.erf((edge - centre) / scale) for edge in edges]
    total = below[-1] - below[0]
    return [(b - a) / total for a, b in itertools.pairwise(below)]


@given(st.floats(-12, 12))
def test_target_distribution(value: float) -> None:
    actual = action_value.target_distribution(torch.tensor([value]))[0].double()
    expected = torch.tensor(reference(value), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert float(actual.sum()) == pytest.approx(1.0, abs=1e-5)


@given(st.floats(-9, 9))
def test_mean_of_the_target_is_the_value(value: float) -> None:
    logits = action_value.target_distribution(torch.tensor([value])).log().clamp(min=-80)
    assert float(action_value.mean(logits)) == pytest.approx(value, abs=2e-3)


def test_cross_entropy_is_smallest_at_the_target() -> None:
    values = torch.tensor([-3.0, 0.1, 8.0])
    best = action_value.target_distribution(values).clamp(min=1e-30).log()
    other = torch.randn(3, NUM_BINS, generator=torch.Generator().manual_seed(0))
    entropy = -(best.exp() * best).sum(-1)
    torch.testing.assert_close(action_value.cross_entropy(best, values), entropy)
    assert bool((action_value.cross_entropy(other, values) > entropy).all())
    expected = -(best.exp().double() * other.double().log_softmax(-1)).sum(-1)
    actual = action_value.cross_entropy(other, values)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_network_reads_observation_and_action() -> None:
    config = ModelConfig(hidden=(8,), critic_hidden=(16, 12), shared_backbone=False)
    encoder = Encoder({"a": ArraySpec((3,)), "b": ArraySpec(())}, config)
    critic = ActionValue(encoder, 2, config, networks=2)
    sizes = [tuple(p.shape) for p in critic.parameters() if p.ndim == 2]
    assert sizes == [*([(16, 6), (12, 16)] * 2), *([(NUM_BINS, 12)] * 2)]
    inputs = encoder({"a": torch.randn(5, 3), "b": torch.randn(5)})
    action = torch.randn(5, 2, requires_grad=True)
    value = critic(inputs, action)
    assert value.shape == (5,) and bool((value.abs() <= MAX_VALUE).all())
    both = action_value.mean(critic.logits(inputs, action))
    assert both.shape == (2, 5) and not torch.equal(both[0], both[1])
    assert torch.equal(value, torch.minimum(both[0], both[1]))
    (gradient,) = torch.autograd.grad(value.sum(), action)
    assert bool((gradient.abs() > 0).all())
