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
those of Welch. Intervals of statistics without such a formula (interquartile mean,
medians of curves) come from a bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from embodied_envs.base.intervals import Z95, wilson_interval
from embodied_ppo.evaluation import episodes

# Scores of a method, [S, E].
Scores = NDArray[np.float64]

REPLICATES = 2000  # replicates of a bootstrap


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """Difference of the mean scores of two methods, B minus A.

    Attributes:
        mean: The difference.
        low, high: 95 % interval.
    """

    mean: float
    low: float
    high: float

    @property
    def is_decided(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


# Parts of the variance of a mean or a difference, each with its degrees of freedom.
_Variances: TypeAlias = Sequence[tuple[float, int]]


def difference(a: Scores, b: Scores, *, binary: bool = False) -> ScoreDifference:
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
    mean = float(b.mean() - a.mean())
    if binary and len(a) == len(b) == 1:
        return ScoreDifference(mean, *_paired_proportions(a[0], b[0]))
    return ScoreDifference(mean, *_interval(mean, _variances((a, b), b.mean(0) - a.mean(0))))


def mean_interval(scores: Scores, *, binary: bool = False) -> tuple[float, float]:
    """Return the 95 % interval of the mean of a method.

    For one run with binary scores it is Wilson's interval, otherwise Student's.

    Args:
        scores: [S, E], E at least 2.
        binary: Whether the scores are 0 and 1.
    """
    if binary and len(scores) == 1:
        return wilson_interval(int(scores.sum()), scores.size)
    return _interval(float(scores.mean()), _variances((scores,), scores.mean(0)))


def _variances(methods: Sequence[Scores], states: NDArray[np.float64]) -> _Variances:
    """Return the parts of the variance of a mean, or of a difference of means, see the module.

    They are the variance of the mean of the run means of each method with several runs, and the
    variance due to the initial states, without the residual, which the others contain.

    Args:
        methods: Scores of each method.
        states: The mean or difference for each initial state, [E].
    """
    several, count = [x for x in methods if len(x) > 1], len(states)
    residual = sum(_residual(x) / x.size for x in several)
    seeds = [(float(x.mean(1).var(ddof=1)) / len(x), len(x) - 1) for x in several]
    return [*seeds, (max(0.0, float(states.var(ddof=1)) / count - residual), count - 1)]


def _residual(x: Scores) -> float:
    """Return the mean square of the residuals of a two-way table [S, E]."""
    residual = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    return float((residual**2).sum()) / ((x.shape[0] - 1) * (x.shape[1] - 1))


def _interval(mean: float, variances: _Variances) -> tuple[float, float]:
    """Return the 95 % interval, mean ± t √V."""
    total = sum(part for part, _ in variances)
    if total == 0:
        return mean, mean
    half = quantile(_freedom(variances)) * math.sqrt(total)
    return mean - half, mean + half


def _freedom(variances: _Variances) -> float:
    """Return the degrees of freedom of the sum of parts: ν = V² / Σ (V_i² / (ν_i + 1)) - 1.

    The value lies between that of Satterthwaite's formula (1946, V² / Σ (V_i² / ν_i)), with which
    the intervals of few runs are too wide, and that of Welch's (1947, with ν_i + 2 and -2), with
    which they are too narrow. docs/experiments/ has the measured coverage.
    """
    total = sum(part for part, _ in variances)
    squares = sum(part**2 / (freedom + 1) for part, freedom in variances)
    return max(1.0, total**2 / squares - 1) if squares > 0 else math.inf


def _paired_proportions(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of Bonett and Price (2012) for the difference of two proportions.

    Of n pairs of episodes, only B succeeds in n_b and only A in n_a. With p = (n_b + 1) / (n + 2)
    and q = (n_a + 1) / (n + 2), the interval is p - q ± z √((p + q - (p - q)²) / (n + 2)).
    """
    n = len(a)
    p, q = (float((b > a).sum()) + 1) / (n + 2), (float((a > b).sum()) + 1) / (n + 2)
    half = Z95 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


def quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t for ν >= 1, rounded down to an integer."""
    return episodes.t_quantile(0.975, int(min(freedom, 10_000.0)))


# ------------------------------------------------------------------------------- statistics of runs
def interquartile_mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the middle half of the values (Agarwal et al. 2021).

    A quarter of the total weight is removed at each end. A value at the border has a fractional
    weight.
    """
    return float(_interquartile_means(values))


def _interquartile_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the interquartile mean of each row: [.., n] -> [..]."""
    n = values.shape[-1]
    upper = np.minimum(np.arange(1, n + 1), 0.75 * n)
    weights = np.maximum(0.0, upper - np.maximum(np.arange(n), 0.25 * n))
    return np.sort(values, axis=-1) @ (weights / weights.sum())


def win_rate(a: Scores, b: Scores) -> float:
    """Return the share of pairs of runs in which B's mean is larger; equal means count half."""
    means_a, means_b = a.mean(1)[:, None], b.mean(1)[None]  # [S_A, 1], [1, S_B]
    return float(((means_b > means_a) + 0.5 * (means_b == means_a)).mean())


def interquartile_mean_interval(scores: Scores) -> tuple[float, float]:
    """Return the 95 % percentile interval of the interquartile mean of a method's run means.

    It comes from a bootstrap: runs and episodes are resampled with replacement; the resampled
    episodes are the same for all runs.

    Args:
        scores: [S, E].
    """
    generator = np.random.default_rng(0)
    runs, count = scores.shape
    values = []
    for _ in range(REPLICATES):
        rows = generator.integers(runs, size=runs)
        columns = generator.integers(count, size=count)
        values.append(interquartile_mean(scores[np.ix_(rows, columns)].mean(1)))
    return _interval_of(np.array(values))


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


# ---------------------------------------------------------------------- statistics of several tasks
# Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", with
# the normalised scores of the runs of each task. The bootstrap is stratified: it resamples the runs
# within each task, because tasks are fixed and runs are random. Methods are independent.
# Normalised scores of a method's runs in each task, M arrays [S_m].
Runs: TypeAlias = Sequence[NDArray[np.float64]]


def _resampled(runs: Runs, seed: int) -> list[NDArray[np.float64]]:
    """Return replicates of the runs of each task, [REPLICATES, S_m]."""
    generator = np.random.default_rng(seed)
    return [x[generator.integers(len(x), size=(REPLICATES, len(x)))] for x in runs]


def _resampled_means(runs: Runs, seed: int) -> NDArray[np.float64]:
    """Return the interquartile means of replicates of the runs of all tasks, [REPLICATES]."""
    return _interquartile_means(np.concatenate(_resampled(runs, seed), axis=1))


def _interval_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % percentile interval of replicates."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def interquartile_mean_of_tasks(runs: Runs) -> ScoreDifference:
    """Return the interquartile mean of the runs of all tasks together, with its interval."""
    ends = _interval_of(_resampled_means(runs, 0))
    return ScoreDifference(interquartile_mean(np.concatenate(runs)), *ends)


def difference_of_tasks(a: Runs, b: Runs) -> ScoreDifference:
    """Return the difference of the interquartile means of two methods, B minus A."""
    mean = interquartile_mean(np.concatenate(b)) - interquartile_mean(np.concatenate(a))
    # Two seeds, so that methods with as many runs are not resampled in the same way.
    return ScoreDifference(mean, *_interval_of(_resampled_means(b, 1) - _resampled_means(a, 0)))


def improvement_probability(a: Runs, b: Runs) -> float:
    """Return the mean over tasks of ``win_rate``."""
    return float(np.mean([win_rate(x[:, None], y[:, None]) for x, y in zip(a, b, strict=True)]))


def performance_profile(
    runs: Runs, thresholds: Sequence[float]
) -> list[tuple[float, float, float, float]]:
    """Return points of the performance profile: τ, F(τ), lower and upper end of its interval.

    F(τ) = 1/M Σ_m 1/S_m Σ_s [score_ms > τ], the share of runs above τ, with equal weights of tasks.
    """
    points, replicates = [], _resampled(runs, 0)
    for tau in thresholds:
        share = float(np.mean([(x > tau).mean() for x in runs]))
        low, high = _interval_of(np.mean([(x > tau).mean(1) for x in replicates], axis=0))
        points.append((float(tau), share, low, high))
    return points
