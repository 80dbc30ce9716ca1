"""Confidence intervals that need no other package."""

from __future__ import annotations

import math

# 97.5% quantile of the normal distribution.
Z95 = 1.959964


def wilson_interval(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion p = successes / n (Wilson 1927).

        (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    Unlike p ± z √(p(1-p)/n), it has a positive width at 0 and n successes and stays within [0, 1].
    It is [0, 1] for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)
