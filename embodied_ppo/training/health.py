"""Ranges of metrics in healthy training, and warnings about metrics outside of them.

docs/metrics.md has the same ranges. Sources: the clipped objective with an epsilon of 0.2 is from
Schulman et al. 2017 (arXiv 1707.06347). Huang et al. 2022, "The 37 Implementation Details of PPO",
detail 12, monitor KL, clipped fraction and explained variance. OpenAI's Spinning Up stops early at
a KL of 0.01 to 0.05. The limit of ratio_max is from the runs of docs/experiments/. Many of these
runs learn well with less than 0.002 nats per update, so that a small KL is no warning.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

# Number of newest values whose median is judged: single updates, and the first few, deviate.
WINDOW = 5


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy range of a metric, (low, high). None: no limit on that side."""

    tag: str
    limits: Sequence[float | None]
    # Meaning of a value below the range, and the hint.
    below: str = ""
    # Meaning of a value above the range, and the hint.
    above: str = ""
    # Whether a value below ``low`` means slow training, which is no warning.
    slow: bool = False


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RANGES = tuple(Range(tag, **entry) for tag, entry in _TABLE.items())


@dataclass(frozen=True, slots=True)
class Verdict:
    """A metric compared with its range."""

    tag: str
    # Median of the newest WINDOW values.
    value: float
    warning: bool
    # One sentence if the value is outside of its range, else "".
    text: str


def judge(rows: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Compare metrics with their ranges.

    Args:
        rows: Rows of metrics.jsonl, oldest first.

    Returns:
        A verdict for each tag of RANGES that has at least WINDOW values.
    """
    rows = list(rows)
    verdicts = []
    for r in RANGES:
        # Not every row has every tag, and a mean without samples is NaN or None.
        values = [
            x for row in rows if isinstance(x := row.get(r.tag), (int, float)) and not math.isnan(x)
        ]
        if len(values) < WINDOW:
            continue
        # The median of a window does not react to a single unusual update.
        x, text, (low, high) = median(values[-WINDOW:]), "", r.limits
        if low is not None and x < low:
            text = f"{r.tag} is {x:.3g}, below {low:g}: {r.below}"
        elif high is not None and x > high:
            text = f"{r.tag} is {x:.3g}, above {high:g}: {r.above}"
        is_slow = r.slow and low is not None and x < low
        verdicts.append(Verdict(r.tag, x, bool(text) and not is_slow, text))
    return verdicts


# ------------------------------------------------------------------------------ monitor of training
class HealthMonitor:
    """Judges the metrics of every update, and reports each metric once."""

    def __init__(self) -> None:
        self._newest: deque[Mapping[str, float]] = deque(maxlen=4 * WINDOW)
        self._reported: set[str] = set()

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add the metrics of an update; return a sentence with a hint for each new problem."""
        self._newest.append(dict(row))
        # The first updates of a healthy run are outside of some ranges.
        if len(self._newest) < 4 * WINDOW:
            return []
        problems = [v for v in judge(self._newest) if v.warning and v.tag not in self._reported]
        self._reported |= {v.tag for v in problems}
        return [v.text for v in problems]
