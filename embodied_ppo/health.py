"""What metrics are in healthy training, as docs/metrics.md tells, and what it means to be outside. Pure.

Sources: the clipped objective and its epsilon of 0.2 by Schulman et al. 2017 (arXiv 1707.06347); watching KL, clipped
fraction and explained variance by Huang et al. 2022, "The 37 Implementation Details of PPO", detail 12; early stopping
at a KL of 0.01 to 0.05 by OpenAI's Spinning Up; ratio_max, and that slow is not ill, by the runs of
docs/experiments.md, many of which learn well below 0.002 nats an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW = 5
"""Newest values of a tag whose median is judged: a single odd update is no news, and the first few are always odd."""


@dataclass(frozen=True, slots=True)
class Range:
    """Where a metric belongs. None: no limit on that side."""

    tag: str
    low: float | None
    high: float | None
    below: str = ""
    """What a value below ``low`` means, and what to try."""
    above: str = ""
    """The same above ``high``."""
    slow: bool = False
    """Below ``low`` training is slow, not ill: no warning."""


RANGES: tuple[Range, ...] = (
    Range(
        "policy/approx_kl",
        0.002,
        0.03,
        below="updates hardly move the policy, as when lr_schedule ends; else raise lr",
        above="updates move the policy too far: lower lr or update_epoch, or set target_kl_stop",
        slow=True,
    ),
    Range(
        "policy/clip_fraction",
        0.05,
        0.3,
        below="steps are small, as when lr_schedule ends; else raise lr or update_epoch",
        above="much of the batch gives no gradient, steps are too large: lower lr or update_epoch",
        slow=True,
    ),
    Range(
        "policy/ratio_max",
        None,
        20.0,
        above="some action became far more likely in one update: lower lr; in the thousands, the policy that acts is "
        "not the one that learns",
    ),
    Range(
        "policy/dual_clip_fraction",
        None,
        0.01,
        above="bad actions become far more likely than they were: lower lr, or raise clip_ratio_c",
    ),
    Range(
        "value/explained_variance",
        0.0,
        None,
        below="the critic is worse than a constant: check the scale of rewards (reward_norm=running), raise value_lr, "
        "or give it critic_warmup",
    ),
    Range(
        "value/clip_fraction",
        None,
        0.3,
        above="returns are large for value_clip: scale rewards (reward_norm=running), or raise it",
    ),
    Range(
        "advantage/zero_fraction",
        None,
        0.5,
        above="most groups teach nothing, their scores are all alike: choose prompts of middling difficulty, or raise "
        "group_size",
    ),
    Range(
        "rollout/truncated",
        None,
        0.1,
        above="response_length cuts many responses: raise it, or set missing_eos_penalty",
    ),
    Range("rollout/grader_failures", None, 0.0, above="the grader raises, hangs or dies: log.txt has the first cause"),
    Range(
        "rollout/unstable",
        None,
        0.0,
        above="worlds blew up and were reset: shorten the model's timestep, or soften its contacts",
    ),
    Range("device/idle", None, 0.5, above="devices wait more than they work: try another placement"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A metric against its range."""

    tag: str
    value: float
    """Median of the newest WINDOW values."""
    warning: bool
    text: str
    """One sentence where the value is outside, else ""."""


def judge(rows: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """What ``rows`` of metrics.jsonl, oldest first, say about each tag of RANGES that has WINDOW values."""
    rows = list(rows)
    verdicts = []
    for r in RANGES:
        values = [x for row in rows if isinstance(x := row.get(r.tag), (int, float)) and not math.isnan(x)]
        if len(values) < WINDOW:
            continue
        x = median(values[-WINDOW:])
        text = ""
        if r.low is not None and x < r.low:
            text = f"{r.tag} is {x:.3g}, below {r.low:g}: {r.below}"
        elif r.high is not None and x > r.high:
            text = f"{r.tag} is {x:.3g}, above {r.high:g}: {r.above}"
        below = r.low is not None and x < r.low
        verdicts.append(Verdict(r.tag, x, bool(text) and not (below and r.slow), text))
    return verdicts
