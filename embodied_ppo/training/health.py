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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW = 5
"""Number of newest values whose median is judged: single updates, and the first few, deviate."""


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy range of a metric, (low, high). None: no limit on that side."""

    tag: str
    limits: tuple[float | None, float | None]
    below: str = ""
    """Meaning of a value below the range, and the hint."""
    above: str = ""
    """Meaning of a value above the range, and the hint."""
    slow: bool = False
    """Whether a value below ``low`` means slow training, which is no warning."""


RANGES: tuple[Range, ...] = (
    Range(
        # Mean of the k3 estimate of KL(old || new), nats.
        "policy/approx_kl",
        (0.002, 0.03),
        below="updates hardly move the policy, as when lr_schedule ends; else raise lr",
        above="updates move the policy too far: lower lr or update_epoch, or set target_kl_stop",
        slow=True,
    ),
    Range(
        # Share of samples whose clipped term is the larger one, so that they give no gradient.
        "policy/clip_fraction",
        (0.05, 0.3),
        below="steps are small, as when lr_schedule ends; else raise lr or update_epoch",
        above="much of the batch gives no gradient, steps are too large: lower lr or update_epoch",
        slow=True,
    ),
    Range(
        # Largest ratio of an action's new probability to that when it was taken.
        "policy/ratio_max",
        (None, 20.0),
        above=(
            "some action became far more likely in one update: lower lr; in the thousands, the"
            " policy that acts is not the one that learns"
        ),
    ),
    Range(
        # Share of samples with a negative advantage whose loss the dual clip bounds.
        "policy/dual_clip_fraction",
        (None, 0.01),
        above="bad actions become far more likely than they were: lower lr, or raise clip_ratio_c",
    ),
    Range(
        # 1 - Var(returns - values) / Var(returns); a constant has 0.
        "value/explained_variance",
        # about 0 for an untrained critic
        (-0.1, None),
        below=(
            "the critic is worse than a constant: check the scale of rewards (reward_norm=running),"
            " raise value_lr, or give it critic_warmup"
        ),
    ),
    Range(
        # Share of samples with |V - V_old| > value_clip.
        "value/clip_fraction",
        (None, 0.3),
        above="returns are large for value_clip: scale rewards (reward_norm=running), or raise it",
    ),
    Range(
        # Advantages within a group are 0 where all of its scores are equal.
        "advantage/zero_fraction",
        (None, 0.5),
        above=(
            "most groups have equal scores and give no gradient: write group_filter=success, choose"
            " prompts of medium difficulty, or raise group_size"
        ),
    ),
    Range(
        # Share of responses that end at response_length instead of a stop token.
        "rollout/truncated",
        (None, 0.1),
        above="response_length cuts many responses: raise it, or set missing_eos_penalty",
    ),
    Range(
        # A single failure already shows a defect of the grader.
        "rollout/grader_failures",
        (None, 0.0),
        above="the grader raises, hangs or dies: log.txt has the first cause",
    ),
    Range(
        # A simulation that diverges returns meaningless observations and rewards.
        "rollout/unstable",
        (None, 0.0),
        above=(
            "simulations diverged and were reset: shorten the model's timestep, or soften its"
            " contacts"
        ),
    ),
    Range(
        # Share of the training time in which no process works on a device, mean of all devices.
        "device/idle",
        (None, 0.5),
        above="devices wait more than they work: try another placement",
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A metric compared with its range."""

    tag: str
    value: float
    """Median of the newest WINDOW values."""
    warning: bool
    text: str
    """One sentence if the value is outside of its range, else ""."""


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
