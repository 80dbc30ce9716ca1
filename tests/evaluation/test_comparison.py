"""Statistics of comparisons: hand-computed examples, properties, coverage of the intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodied_ppo.evaluation import comparison


def test_difference_of_two_runs_is_students_paired_interval():
    a, b = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[2.0, 2.0, 5.0, 5.0]])
    # differences 1, 0, 2, 1: mean 1, variance 2/3, so √(2/3 / 4) = .408248; t(3) = 3.182446
    result = comparison.difference(a, b)
    assert result.mean == 1.0
    half = 3.182446 * 0.4082483
    assert (result.low, result.high) == pytest.approx((1 - half, 1 + half), abs=1e-5)
    assert not result.is_decided


def test_variance_counts_the_residual_once():
    # Two runs each, three episodes. Run means of A: 2, 4 (variance 2, of the mean 1); B: 3, 3.
    a = np.array([[1.0, 2.0, 3.0], [3.0, 5.0, 4.0]])
    b = np.array([[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]])
    # By state: A 2, 3.5, 3.5 and B 3, 3, 3; differences 1, -.5, -.5: variance .75, of the mean .25.
    # Residuals of A: (0, -.5, .5) and (0, .5, -.5): squares 1, (S-1)(E-1) = 2, so .5 / 6 = .083.
    *seeds, episodes = variances = comparison._variances((a, b), b.mean(0) - a.mean(0))
    assert seeds == [(1.0, 1), (0.0, 1)]
    assert episodes == (pytest.approx(0.25 - 0.5 / 6), 2)
    # ν = V² / (1² / 2 + 0 + .16667² / 3) - 1
    total = 1 + 1 / 6
    assert comparison._freedom(variances) == pytest.approx(total**2 / (0.5 + (1 / 6) ** 2 / 3) - 1)


def test_equal_runs_have_no_difference():
    scores = np.random.default_rng(0).normal(size=(1, 20))
    result = comparison.difference(scores, scores)
    assert (result.mean, result.low, result.high) == (0, 0, 0)
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


def test_interquartile_mean():
    assert comparison.interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])) == 5.5
    # of 5 values a quarter is 1.25: the second and fourth count .75
    values = np.array([0.0, 1.0, 2.0, 3.0, 50.0])
    assert comparison.interquartile_mean(values) == pytest.approx((0.75 + 2 + 0.75 * 3) / 2.5)
    assert comparison.interquartile_mean(np.array([7.0])) == 7.0


def test_statistics_of_several_tasks():
    a = [np.array([0.0, 0.4]), np.array([0.2, 0.6, 1.0])]
    b = [np.array([0.5, 0.9]), np.array([0.2, 0.8, 1.2])]
    # of 5 values a quarter is 1.25: (.75·.2 + .4 + .75·.6) / 2.5 and (.75·.5 + .8 + .75·.9) / 2.5
    first, second = (comparison.interquartile_mean_of_tasks(x) for x in (a, b))
    assert (first.mean, second.mean) == pytest.approx((0.4, 0.74))
    result = comparison.difference_of_tasks(a, b)
    assert result.mean == pytest.approx(0.34) and result.low < 0.34 < result.high
    # pairs won: 4 of 4 in the first task; .5, 2 and 3 of 3 by .2, .8 and 1.2 in the second
    assert comparison.improvement_probability(a, b) == pytest.approx((1 + 5.5 / 9) / 2)
    # The shares above .4 are 0 of 2 and 2 of 3, each task with weight 1/2; above 1.0 none.
    points = comparison.performance_profile(a, [-0.1, 0.4, 1.0])
    assert [share for _, share, _, _ in points] == pytest.approx([1.0, 1 / 3, 0.0])
    assert points[0][2:] == (1.0, 1.0) and points[1][2] < 1 / 3 < points[1][3]


def test_stratified_bootstrap_resamples_runs_within_tasks():
    generator = np.random.default_rng(5)
    runs = [generator.normal(size=4), 100 + generator.normal(size=6)]
    # A slow bootstrap with other random numbers, and the mean of the middle half value by value.
    values = []
    for _ in range(2000):
        drawn = sorted(float(generator.choice(x)) for x in runs for _ in range(len(x)))
        weights = [0, 0, 0.5, 1, 1, 1, 1, 0.5, 0, 0]  # 2.5 of 10 are removed at each end
        values.append(sum(w * x for w, x in zip(weights, drawn, strict=True)) / 5)
    result = comparison.interquartile_mean_of_tasks(runs)
    assert result.mean == comparison.interquartile_mean(np.concatenate(runs))
    assert (result.low, result.high) == pytest.approx(np.quantile(values, (0.025, 0.975)), abs=0.2)
    # Without strata, the number of large values would vary, and the interval be 50 wide.
    assert result.high - result.low < 2


def test_win_rate():
    a, b = np.array([[1.0, 1.0], [3.0, 3.0]]), np.array([[2.0, 2.0], [3.0, 3.0]])
    # pairs: 2>1 yes, 3>1 yes, 2>3 no, 3=3 half
    assert comparison.win_rate(a, b) == 2.5 / 4


def test_median_curve_interpolates_within_the_common_range():
    curve = comparison.median_curve([[(0, 0.0), (10, 10.0)], [(2, 4.0), (8, 4.0)]], points=4)
    # at 2, 4, 6, 8: medians of (2, 4), (4, 4), (6, 4), (8, 4)
    assert [(x, median) for x, median, _, _ in curve] == [(2, 3), (4, 4), (6, 5), (8, 6)]
    assert [(low, high) for _, _, low, high in curve] == [(2, 4), (4, 4), (4, 6), (4, 8)]
    assert comparison.median_curve([[(0, 1.0)], [(5, 1.0)]]) == []
    assert comparison.median_curve([[]]) == []
