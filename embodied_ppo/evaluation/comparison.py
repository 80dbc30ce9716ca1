"""Statistics of comparisons: paired differences, their intervals, and the number of runs needed.

A method is one or more runs that differ only in their seed. Its scores are an array
[S, E]: S runs (seeds), E episodes; episode e has the same initial state in all runs of all methods.

The score of episode e of run s is modelled as x_se = μ + a_s + b_e + ε_se with the effects of the
seed and of the initial state, and a residual. The difference d of the means of two methods then has
the variance

    V = Σ over methods σ²_a / S  +  Var(b^B - b^A) / E  +  Σ over methods σ²_ε / (S E)

The variance of the run means, divided by S, contains σ²_ε / (S E). The variance of the differences
of episodes, divided by E, contains the same term. A bootstrap that resamples seeds and episodes
counts the term twice (Owen 2007, "The pigeonhole bootstrap"), so its intervals are too wide if the
variance of the seeds is small. With few seeds its percentile intervals are too narrow. V is
therefore the sum of the two variances, minus the residual of the two-way table, which is counted
once. The interval is d ± t(ν) √V with degrees of freedom ν between those of Satterthwaite and
those of Welch. Intervals of statistics without such a formula (interquartile mean, profiles,
medians of curves) come from a bootstrap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodied_ppo.core.intervals import Z95, wilson_interval
from embodied_ppo.evaluation import episodes

Scores = NDArray[np.float64]
"""Scores of a method, [S, E]."""

REPLICATES = 2000
"""Replicates of a bootstrap."""

POWER = 0.8
"""Probability that a comparison with the number of runs of ``seeds_needed`` is decided."""

Z_POWER = 0.841621
"""Quantile POWER of the normal distribution."""

MOST_SEEDS = 200
"""Largest number of seeds that ``seeds_needed`` returns."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of the mean scores of two methods, B minus A.

    Attributes:
        mean: The difference.
        low, high: 95 % interval.
        unpaired: 95 % interval of the same difference if the methods had different initial states.
        probability: Probability that the mean of B is larger, from Student's t distribution centred
            at ``mean``.
        freedom: Degrees of freedom of the interval.
    """

    mean: float
    low: float
    high: float
    unpaired: tuple[float, float]
    probability: float
    freedom: float

    @property
    def is_decided(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class _Variance:
    """Parts of the variance of a difference, each with its degrees of freedom."""

    seeds: tuple[float, ...]
    """Variance of the mean of each method's run means; 0 for a method with one run."""
    seed_freedom: tuple[int, ...]
    episodes: float
    """Variance due to the initial states, without the residual, which ``seeds`` contains."""
    episode_freedom: int

    @property
    def total(self) -> float:
        return sum(self.seeds) + self.episodes

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the total: ν = V² / Σ (V_i² / (ν_i + 1)) - 1.

        The value lies between that of Satterthwaite's formula (1946, V² / Σ (V_i² / ν_i)), with
        which the intervals of few runs are too wide, and that of Welch's (1947, with ν_i + 2 and
        -2), with which they are too narrow. docs/experiments.md has the measured coverage.
        """
        parts = [*zip(self.seeds, self.seed_freedom), (self.episodes, self.episode_freedom)]
        squares = sum(part**2 / (freedom + 1) for part, freedom in parts if freedom > 0)
        return max(1.0, self.total**2 / squares - 1) if squares > 0 else math.inf


def difference(a: Scores, b: Scores, *, binary: bool = False) -> Difference:
    """Return the difference of the means of two methods, with intervals.

    Args:
        a: Scores of method A, [S_A, E].
        b: Scores of method B, [S_B, E], with the same initial states.
        binary: Whether the scores are 0 and 1. If each method has one run, the interval is then
            that of Bonett and Price (2012) for paired proportions, whose width is not 0 if all
            episodes have equal scores.

    Raises:
        ValueError: The number of episodes differs, or is less than 2.
    """
    if a.shape[1] != b.shape[1] or a.shape[1] < 2:
        raise ValueError(f"{a.shape[1]} and {b.shape[1]} episodes; at least 2, the same number")
    state_means_a, state_means_b = a.mean(0), b.mean(0)  # [E]
    paired = _variance((a, b), [state_means_b - state_means_a])
    unpaired = _variance((a, b), [state_means_a, state_means_b])
    mean = float(b.mean() - a.mean())
    low, high = _interval(mean, paired)
    if binary and len(a) == len(b) == 1:
        low, high = _paired_proportions(a[0], b[0])
    if paired.total > 0:
        probability = student_probability(mean / math.sqrt(paired.total), paired.freedom)
    else:
        probability = 0.5 if mean == 0 else float(mean > 0)
    return Difference(
        mean, low, high, _interval(mean, unpaired), probability, min(paired.freedom, 1e6)
    )


def seeds_needed(a: Scores, b: Scores) -> int | None:
    """Return the number of runs of each method that would decide the comparison.

    If the difference and the variances stay as observed, the 95 % interval with this number of runs
    excludes 0 with probability POWER.

    Returns:
        The number, at least that of the method with more runs. None if a method has one run (the
        variance of its seeds is unknown), or if MOST_SEEDS runs are not enough.
    """
    if min(len(a), len(b)) < 2:
        return None
    observed = _variance((a, b), [b.mean(0) - a.mean(0)])
    mean = abs(float(b.mean() - a.mean()))
    for n in range(max(len(a), len(b)), MOST_SEEDS + 1):
        seeds = tuple(part * len(x) / n for part, x in zip(observed.seeds, (a, b)))
        freedom = (n - 1, n - 1)
        predicted = _Variance(seeds, freedom, observed.episodes, observed.episode_freedom)
        quantile = student_quantile(0.975, predicted.freedom)
        if mean > (quantile + Z_POWER) * math.sqrt(predicted.total):
            return n
    return None


def mean_interval(scores: Scores, *, binary: bool = False) -> tuple[float, float]:
    """Return the 95 % interval of the mean of a method.

    For one run with binary scores it is Wilson's interval, otherwise Student's.

    Args:
        scores: [S, E], E at least 2.
        binary: Whether the scores are 0 and 1.
    """
    if binary and len(scores) == 1:
        return wilson_interval(int(scores.sum()), scores.size)
    return _interval(float(scores.mean()), _variance((scores,), [scores.mean(0)]))


def _variance(methods: Sequence[Scores], state_terms: Sequence[NDArray[np.float64]]) -> _Variance:
    """Return the variance of a sum or difference of the means of methods, see the module.

    Args:
        methods: Scores of each method.
        state_terms: Independent terms of the sum for each initial state, [E] each.
    """
    count = methods[0].shape[1]
    states = sum(float(term.var(ddof=1)) for term in state_terms) / count
    residual = sum(_residual(x) / x.size for x in methods if len(x) > 1)
    return _Variance(
        tuple(float(x.mean(1).var(ddof=1)) / len(x) if len(x) > 1 else 0.0 for x in methods),
        tuple(len(x) - 1 for x in methods),
        max(0.0, states - residual),
        len(state_terms) * (count - 1),
    )


def _residual(x: Scores) -> float:
    """Return the mean square of the residuals of a two-way table [S, E]."""
    residual = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    return float((residual**2).sum()) / ((x.shape[0] - 1) * (x.shape[1] - 1))


def _interval(mean: float, variance: _Variance) -> tuple[float, float]:
    """Return the 95 % interval, mean ± t √V."""
    if variance.total == 0:
        return mean, mean
    half = student_quantile(0.975, variance.freedom) * math.sqrt(variance.total)
    return mean - half, mean + half


def _paired_proportions(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of Bonett and Price (2012) for the difference of two proportions.

    Of n pairs of episodes, only B succeeds in n_b and only A in n_a. With p = (n_b + 1) / (n + 2)
    and q = (n_a + 1) / (n + 2), the interval is p - q ± z √((p + q - (p - q)²) / (n + 2)).
    """
    n = len(a)
    p, q = (float((b > a).sum()) + 1) / (n + 2), (float((a > b).sum()) + 1) / (n + 2)
    half = Z95 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


@functools.lru_cache(maxsize=10_000)
def _quantile(p: float, freedom: int) -> float:
    """Return a cached quantile of Student's t for an integer ν."""
    return episodes.t_quantile(p, freedom)


def student_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t for 0.5 <= p < 1 and a real ν >= 1.

    Between two integers, the quantile is interpolated linearly in 1/ν. The error is below 1 % for
    ν >= 2.
    """
    low, high, weight = _neighbour_integers(freedom)
    return (1 - weight) * _quantile(p, low) + weight * _quantile(p, high)


def student_probability(t: float, freedom: float) -> float:
    """Return P(T <= t) of Student's t, interpolated as ``student_quantile``."""
    low, high, weight = _neighbour_integers(freedom)
    inside = [episodes.t_within(abs(t), nu) for nu in (low, high)]
    return 0.5 + math.copysign(0.5, t) * ((1 - weight) * inside[0] + weight * inside[1])


def _neighbour_integers(freedom: float) -> tuple[int, int, float]:
    """Return the integers below and above ν, and the interpolation weight of the upper one."""
    freedom = min(max(freedom, 1.0), 10_000.0)
    low, high = math.floor(freedom), math.ceil(freedom)
    weight = 0.0 if low == high else (1 / low - 1 / freedom) / (1 / low - 1 / high)
    return low, high, weight


# ------------------------------------------------------------------------------- statistics of runs
def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the middle half of the values (Agarwal et al. 2021).

    A quarter of the total weight is removed at each end. A value at the border has a fractional
    weight.
    """
    ordered, n = np.sort(values), len(values)
    upper = np.minimum(np.arange(1, n + 1), 0.75 * n)
    weights = np.maximum(0.0, upper - np.maximum(np.arange(n), 0.25 * n))
    return float((ordered * weights).sum() / weights.sum())


def win_rate(a: Scores, b: Scores) -> float:
    """Return the share of pairs of runs in which B's mean is larger; equal means count half."""
    means_a, means_b = a.mean(1)[:, None], b.mean(1)[None]  # [S_A, 1], [1, S_B]
    return float(((means_b > means_a) + 0.5 * (means_b == means_a)).mean())


def profile(scores: Scores, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of episodes with a score above each threshold (a performance profile)."""
    return (scores.reshape(-1, 1) > thresholds).mean(0)


def bootstrap(
    scores: Scores,
    statistic: Callable[[Scores], float | NDArray[np.float64]],
    *,
    seed: int = 0,
    replicates: int = REPLICATES,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the 95 % percentile interval of a statistic of a method.

    Runs and episodes are resampled with replacement; the resampled episodes are the same for all
    runs.

    Args:
        scores: [S, E].
        statistic: Maps scores to a number, or to an array.
        seed: Seed of the resampling.
        replicates: Number of resamplings.

    Returns:
        Lower and upper ends, in the shape of the statistic.
    """
    generator = np.random.default_rng(seed)
    runs, count = scores.shape
    values = []
    for _ in range(replicates):
        rows = generator.integers(runs, size=runs)
        columns = generator.integers(count, size=count)
        values.append(statistic(scores[np.ix_(rows, columns)]))
    low, high = np.quantile(np.array(values), (0.025, 0.975), axis=0)
    return low, high


def median_curve(
    curves: Sequence[Sequence[tuple[float, float]]], points: int = 60, *, seed: int = 0
) -> list[tuple[float, float, float, float]]:
    """Return points of the median curve: x, median over runs, lower and upper end of its interval.

    Each curve is interpolated linearly at ``points`` values of x in the range that all curves have
    in common. The 95 % interval is that of a bootstrap over the runs; with few runs it equals their
    range.

    Args:
        curves: Points (x, y) of each run, x ascending.
        points: Number of values of x.
        seed: Seed of the bootstrap.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    start, end = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
    if end < start:
        return []
    x = np.linspace(start, end, points) if end > start else np.array([start])
    y = np.stack([np.interp(x, *np.array(curve).T) for curve in curves])  # [S, points]
    rows = np.random.default_rng(seed).integers(len(y), size=(REPLICATES // 4, len(y)))
    low, high = np.quantile(np.median(y[rows], axis=1), (0.025, 0.975), axis=0)
    columns = (x.tolist(), np.median(y, axis=0).tolist(), low.tolist(), high.tolist())
    return list(zip(*columns, strict=True))
