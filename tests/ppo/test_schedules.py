"""Learning rates and adapted coefficients, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from embodied_envs.base.errors import TrainingError
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo.schedules import (
    adapted_entropy_coef,
    adapted_factor,
    adapted_kl_coef,
    average,
    entropy_factor,
    learning_rate_factor,
)


def test_entropy_factor_by_hand():
    assert entropy_factor("constant", 7, 10, 0.5) == 1
    linear = [entropy_factor("linear", update, 10, 0.5) for update in (0, 5, 10, 99)]
    assert linear == pytest.approx([1, 0.5, 0, 0])
    # std 2, 1: m = 0.1 x 2 = 0.2, then 0.9 x 0.2 + 0.1 x 1 = 0.28
    first, second = average(0.0, 2.0), average(average(0.0, 2.0), 1.0)
    # 0.2 / (1 - 0.9) = 2 ; 0.9 x 0.28 / (1 - 0.81) = 1.326316
    assert entropy_factor("relative", 0, 10, first) == pytest.approx(2)
    assert entropy_factor("relative", 1, 10, second) == pytest.approx(1.326316)


def test_learning_rate_schedules_by_hand():
    def factors(updates: int, ask: list[int], **options: Any) -> list[float]:
        config = loader.load(AlgorithmConfig, options)
        return [learning_rate_factor(config, u, updates) for u in ask]

    assert factors(10, [0, 9, 50], lr_schedule="constant") == [1, 1, 1]
    assert factors(10, [0, 5, 10, 99], lr_schedule="linear") == pytest.approx([1, 0.5, 0, 0])
    assert factors(10, [0, 5, 9, 10], lr_schedule="linear", lr_end=0.2) == pytest.approx(
        [1, 0.6, 0.28, 0.2]
    )
    # half a cosine: (1 + cos(pi/4))/2 = 0.853553 ; 0.1 + 0.9 x that = 0.868198
    assert factors(8, [0, 2, 4, 8], lr_schedule="cosine", lr_end=0.1) == pytest.approx(
        [1, 0.8681981, 0.55, 0.1]
    )
    assert factors(10, [0, 1, 2, 3, 4], lr_warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    # The full rate is reached at the end of the warm-up; the other 9 updates decay: 1 - 4/9.
    assert factors(10, [0, 1, 5, 10], lr_warmup=1, lr_schedule="linear") == pytest.approx(
        [0.5, 1, 5 / 9, 0]
    )
    # HF's get_cosine_schedule_with_warmup, step 7 of 12 with 4 warm-up steps: (1 + cos(3 pi/8))/2.
    assert factors(12, [4, 7, 12], lr_warmup=4, lr_schedule="cosine") == pytest.approx(
        [1, 0.6913417, 0]
    )
    assert factors(3, [0, 1, 2, 3], lr_warmup=9, lr_schedule="linear") == pytest.approx(
        [0.1, 0.2, 0.3, 0.4]
    )


def test_adapted_learning_rate() -> None:
    """Within half and twice the target the factor stays; it has limits."""
    kls = (0.021, 0.02, 0.005, 0.004)
    assert [adapted_factor(1.0, kl, 0.01) for kl in kls] == [1 / 1.5, 1.0, 1.0, 1.5]
    assert adapted_factor(1e-3, 1.0, 0.01) == 1e-3 and adapted_factor(29.0, 0.0, 0.01) == 30.0


def test_adapted_entropy_coef() -> None:
    """Half a nat too little: e^(0.1·0.5); the error is clipped to ±1."""
    assert adapted_entropy_coef(0.01, 0.5, 1.0) == pytest.approx(0.01 * math.exp(0.05))
    assert adapted_entropy_coef(0.01, 99.0, 1.0) == pytest.approx(0.01 * math.exp(-0.1))
    assert adapted_entropy_coef(1e-5, 5.0, 1.0) == 1e-5 and adapted_entropy_coef(1.0, -5, 1.0) == 1
    with pytest.raises(TrainingError, match="entropy = nan"):
        adapted_entropy_coef(0.01, math.nan, 1.0)


def test_adapted_kl_coef() -> None:
    """e = 0.1: 0.5·(1 + 0.1·50/1000); e = 49 is clipped to 0.2, and −1 to −0.2."""
    limits = {"target": 0.1, "horizon": 1000}
    adapted = [adapted_kl_coef(0.5, kl, 50, **limits) for kl in (0.11, 5.0, 0.0, 0.1)]
    assert adapted == pytest.approx([0.5 * 1.005, 0.5 * 1.01, 0.5 * 0.99, 0.5])
    with pytest.raises(TrainingError, match="nan"):
        adapted_kl_coef(0.1, math.nan, 1, target=0.1, horizon=10)


def test_adapted_kl_coef_reaches_its_target() -> None:
    """A policy whose KL is proportional to 1/β converges to KL = target."""
    coef = 0.01
    for _ in range(500):
        coef = adapted_kl_coef(coef, 0.02 / coef, 64, target=0.1, horizon=100)
    assert 0.02 / coef == pytest.approx(0.1, rel=1e-3)
