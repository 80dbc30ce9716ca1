"""Statistics of comparisons: hand-computed examples, properties, coverage of the intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_ppo.evaluation import comparison, episodes


def test_difference_of_two_runs_is_students_paired_interval():
    a, b = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[2.0, 2.0, 5.0, 5.0]])
    # differences 1, 0, 2, 1: mean 1, variance 2/3, so √(2/3 / 4) = .408248; t(3) = 3.182446
    result = comparison.difference(a, b)
    assert result.mean == 1.0
    half = 3.182446 * 0.4082483
    assert (result.low, result.high) == pytest.approx((1 - half, 1 + half), abs=1e-5)
    # unpaired: variances 5/3 and 3, √((5/3 + 3) / 4) = 1.080123, t(6) = 2.446912
    half = 2.446912 * 1.0801234
    assert result.unpaired == pytest.approx((1 - half, 1 + half), abs=1e-5)
    # P(T(3) <= 1 / .408248) = .954 (table: 2.353 is the quantile .95)
    assert result.probability == pytest.approx(0.9541, abs=1e-3)
    assert not result.is_decided


def test_variance_counts_the_residual_once():
    # Two runs each, three episodes. Run means of A: 2, 4 (variance 2, of the mean 1); B: 3, 3.
    a = np.array([[1.0, 2.0, 3.0], [3.0, 5.0, 4.0]])
    b = np.array([[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]])
    # By state: A 2, 3.5, 3.5 and B 3, 3, 3; differences 1, -.5, -.5: variance .75, of the mean .25.
    # Residuals of A: (0, -.5, .5) and (0, .5, -.5): squares 1, (S-1)(E-1) = 2, so .5 / 6 = .083.
    result = comparison._variance((a, b), [b.mean(0) - a.mean(0)])
    assert result.seeds == (1.0, 0.0)
    assert result.episodes == pytest.approx(0.25 - 0.5 / 6)
    # ν = V² / (1² / 2 + 0 + .16667² / 3) - 1
    total = 1 + 1 / 6
    assert result.freedom == pytest.approx(total**2 / (0.5 + (1 / 6) ** 2 / 3) - 1)


def test_equal_runs_have_no_difference():
    scores = np.random.default_rng(0).normal(size=(1, 20))
    result = comparison.difference(scores, scores)
    assert (result.mean, result.low, result.high, result.probability) == (0, 0, 0, 0.5)
    assert result.unpaired[0] < 0 < result.unpaired[1]
    assert comparison.win_rate(scores, scores) == 0.5


def test_proportions_of_two_runs_have_the_interval_of_bonett_and_price():
    a = np.array([[1.0] * 6 + [0.0] * 4])
    b = np.array([[1.0] * 5 + [0.0] + [1.0] * 3 + [0.0]])
    # only B: 3, only A: 1 of 10; p = 4/12, q = 2/12, √((.5 - .027778) / 12) = .198373
    result = comparison.difference(a, b, binary=True)
    half = 1.959964 * math.sqrt((0.5 - (2 / 12) ** 2) / 12)
    assert (result.low, result.high) == pytest.approx((2 / 12 - half, 2 / 12 + half))
    always = np.ones((1, 50))
    equal = comparison.difference(always, always, binary=True)
    assert equal.mean == 0 and equal.low < 0 < equal.high, "50 of 50 does not prove equality"


def test_student_quantiles_of_real_degrees_of_freedom():
    assert comparison.student_quantile(0.975, 3) == episodes.t_quantile(0.975, 3)
    assert comparison.student_quantile(0.975, 4.5) == pytest.approx(2.6586, rel=0.01)  # exact
    assert comparison.student_quantile(0.975, math.inf) == pytest.approx(1.96, abs=1e-3)
    assert comparison.student_probability(2.776445, 4) == pytest.approx(0.975, abs=1e-6)
    assert comparison.student_probability(-2.776445, 4) == pytest.approx(0.025, abs=1e-6)
    assert comparison.student_probability(0.0, 2.5) == 0.5


def test_interquartile_mean():
    assert comparison.interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])) == 5.5
    # of 5 values a quarter is 1.25: the second and fourth count .75
    values = np.array([0.0, 1.0, 2.0, 3.0, 50.0])
    assert comparison.interquartile_mean(values) == pytest.approx((0.75 + 2 + 0.75 * 3) / 2.5)
    assert comparison.interquartile_mean(np.array([7.0])) == 7.0


def test_win_rate_and_profile():
    a, b = np.array([[1.0, 1.0], [3.0, 3.0]]), np.array([[2.0, 2.0], [3.0, 3.0]])
    # pairs: 2>1 yes, 3>1 yes, 2>3 no, 3=3 half
    assert comparison.win_rate(a, b) == 2.5 / 4
    assert comparison.profile(a, np.array([0.0, 1.0, 2.9, 3.0])).tolist() == [1, 0.5, 0.5, 0]


def test_seeds_needed():
    generator = np.random.default_rng(0)
    a = generator.normal(size=(3, 1)) + np.zeros((3, 50))
    b = a[::-1] + 1.0  # the variance of the runs' means is known, that of the states is 0
    needed = comparison.seeds_needed(a, b)
    assert needed is not None
    deviation = float(a.mean(1).std(ddof=1))

    def decides(n: int) -> bool:
        freedom = 2 * n - 1  # of two equal variances: (2v)² / (2 v² / n) - 1
        error = deviation * math.sqrt(2 / n)
        return (comparison.student_quantile(0.975, freedom) + 0.841621) * error < 1.0

    assert decides(needed) and not decides(needed - 1)
    assert comparison.seeds_needed(a[:1], b) is None, "one run has no variance"
    assert comparison.seeds_needed(a, a) is None, "no number decides without a difference"


def test_median_curve_interpolates_within_the_common_range():
    curve = comparison.median_curve([[(0, 0.0), (10, 10.0)], [(2, 4.0), (8, 4.0)]], points=4)
    # at 2, 4, 6, 8: medians of (2, 4), (4, 4), (6, 4), (8, 4)
    assert [(x, median) for x, median, _, _ in curve] == [(2, 3), (4, 4), (6, 5), (8, 6)]
    assert [(low, high) for _, _, low, high in curve] == [(2, 4), (4, 4), (4, 6), (4, 8)]
    assert comparison.median_curve([[(0, 1.0)], [(5, 1.0)]]) == []
    assert comparison.median_curve([[]]) == []


CASES = [  # runs of A, runs of B, deviation of seeds
    (1, 1, 0.0),
    (3, 3, 0.0),
    (3, 5, 0.1),
    (5, 5, 0.1),
    (5, 5, 1.0),
    (10, 10, 1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("runs_a, runs_b, seeds", CASES)
def test_coverage_is_95_percent(runs_a: int, runs_b: int, seeds: float) -> None:
    # docs/experiments.md has more cases, with 20,000 samples each. Here 3,000: standard error .004.
    generator = np.random.default_rng(7)
    samples, true, covered, narrower = 3000, 0.3, 0, 0

    def scores_of_method(runs: int, mean: float, of_state: np.ndarray) -> np.ndarray:
        states = 2 * (0.9 * of_state + math.sqrt(1 - 0.81) * generator.normal(size=100))
        of_seed = seeds * generator.normal(size=(runs, 1))
        return mean + of_seed + states + generator.normal(size=(runs, 100))

    for _ in range(samples):
        of_state = generator.normal(size=100)
        result = comparison.difference(
            scores_of_method(runs_a, 0.0, of_state), scores_of_method(runs_b, true, of_state)
        )
        covered += result.low <= true <= result.high
        narrower += result.high - result.low < result.unpaired[1] - result.unpaired[0]
    assert 0.935 < covered / samples < 0.965
    assert narrower / samples > (0.99 if seeds < 0.5 else 0.5)
