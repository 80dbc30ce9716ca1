"""What metrics are in healthy training, as docs/metrics.md tells, and what it means to be outside.
Pure.

Sources: the clipped objective and its epsilon of 0.2 by Schulman et al. 2017 (arXiv 1707.06347);
watching KL, clipped fraction and explained variance by Huang et al. 2022, "The 37 Implementation
Details of PPO", detail 12; early stopping at a KL of 0.01 to 0.05 by OpenAI's Spinning Up;
ratio_max, and that slow is not ill, by the runs of docs/experiments.md, many of which learn well
below 0.002 nats an update.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW = 5
"""Newest values of a tag whose median is judged: a single odd update is no news, and the first few
are always odd.
"""


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
        above=(
            "some action became far more likely in one update: lower lr; in the thousands, the"
            " policy that acts is not the one that learns"
        ),
    ),
    Range(
        "policy/dual_clip_fraction",
        None,
        0.01,
        above="bad actions become far more likely than they were: lower lr, or raise clip_ratio_c",
    ),
    Range(
        "value/explained_variance",
        -0.1,  # of a critic that knows nothing yet it is 0, more or less
        None,
        below=(
            "the critic is worse than a constant: check the scale of rewards (reward_norm=running),"
            " raise value_lr, or give it critic_warmup"
        ),
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
        above=(
            "most groups teach nothing, their scores are all alike: choose prompts of middling"
            " difficulty, or raise group_size"
        ),
    ),
    Range(
        "rollout/truncated",
        None,
        0.1,
        above="response_length cuts many responses: raise it, or set missing_eos_penalty",
    ),
    Range(
        "rollout/grader_failures",
        None,
        0.0,
        above="the grader raises, hangs or dies: log.txt has the first cause",
    ),
    Range(
        "rollout/unstable",
        None,
        0.0,
        above="worlds blew up and were reset: shorten the model's timestep, or soften its contacts",
    ),
    Range(
        "device/idle", None, 0.5, above="devices wait more than they work: try another placement"
    ),
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
    """What ``rows`` of metrics.jsonl, oldest first, say about each tag of RANGES that has WINDOW
    values.
    """
    rows = list(rows)
    verdicts = []
    for r in RANGES:
        values = [
            x for row in rows if isinstance(x := row.get(r.tag), (int, float)) and not math.isnan(x)
        ]
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


# ------------------------------------------------------------------------------------ while it runs
HISTORY = 50
"""Updates that a warning about change looks back on."""

PHASES = ("time/collect_s", "time/update_s", "time/publish_s")

SLOW_S = 10.0
"""Seconds that WINDOW updates must have taken before their speed is judged: that of shorter ones is
noise.
"""


class Watch:
    """Sees every update's metrics; says each kind of trouble once.

    Of all but the newest it keeps a few numbers.
    """

    def __init__(self) -> None:
        self._newest: deque[Mapping[str, float]] = deque(maxlen=HISTORY)
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        """The first 4 * WINDOW values of each tag."""
        self._ordered: defaultdict[str, list[float]] = defaultdict(list)
        """Every value of those tags that are compared with the whole run, smallest first."""
        self._said: set[str] = set()

    def see(self, row: Mapping[str, float]) -> list[str]:
        """What is new trouble after this update: one sentence each, with what to try."""
        self._newest.append(dict(row))
        for tag, x in row.items():
            if math.isfinite(x):
                if len(self._first[tag]) < 4 * WINDOW:
                    self._first[tag].append(x)
                if tag in (*PHASES, "rollout/return") or tag.startswith("speed/"):
                    insort(self._ordered[tag], x)
        early = len(self._newest) < 4 * WINDOW
        found = {} if early else {v.tag: v.text for v in judge(self._newest) if v.warning}
        checks = (self._slower, self._collapsed, self._exploded, self._dead)
        found |= {check.__name__: text for check in checks if (text := check())}
        new = {name: text for name, text in found.items() if name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def _ends(self, tag: str) -> tuple[float, float] | None:
        """Medians of the first and of the newest WINDOW values; None before there are four times as
        many.
        """
        first, newest = self._first[tag], self._values(tag)
        if len(first) < 4 * WINDOW or len(newest) < WINDOW:
            return None
        return median(first[:WINDOW]), median(newest[-WINDOW:])

    def _values(self, tag: str) -> list[float]:
        """Those among the newest rows."""
        return [x for row in self._newest if math.isfinite(x := row.get(tag, math.nan))]

    def _slower(self) -> str:
        """Throughput below half of its median over the run."""
        last = self._newest[-1]
        tag = next((tag for tag in last if tag.startswith("speed/")), "")
        values = self._ordered[tag]
        if len(values) < 4 * WINDOW:
            return ""
        newest = list(self._newest)[-WINDOW:]
        usual, now = values[len(values) // 2], median([row.get(tag, 0.0) for row in newest])
        seconds = sum(
            row.get(t, 0.0) for row in newest for t in ("time/collect_s", "time/update_s")
        )
        if now >= 0.5 * usual or seconds < SLOW_S:
            return ""
        phases = [t for t in PHASES if t in last and self._ordered[t]]
        before = {t: self._ordered[t][len(self._ordered[t]) // 2] for t in phases}
        after = {t: median([row.get(t, 0.0) for row in newest]) for t in phases}
        most = max(phases, key=lambda t: after[t] - before[t], default="")
        grown = f"; {most} has gone from {before[most]:.3g} to {after[most]:.3g}" if most else ""
        return (
            f"{tag} is {now:,.0f}, below half of its median of {usual:,.0f}{grown}: look who else"
            " uses the machine (top, nvidia-smi), whether memory is short, and whether episodes"
            " have become dearer to simulate"
        )

    def _collapsed(self) -> str:
        """Entropy nearly gone while returns are where they began."""
        entropy, returns = self._ends("policy/entropy"), self._ends("rollout/return")
        if entropy is None or returns is None or entropy[0] <= 0 or entropy[1] >= 0.1 * entropy[0]:
            return ""
        if returns[1] > returns[0] + 0.1 * abs(returns[0]):
            return ""
        return (
            f"policy/entropy has fallen from {entropy[0]:.3g} to {entropy[1]:.3g} and returns have"
            " not risen: the policy no longer tries anything; lower lr, set"
            " algorithm.entropy_bonus=0.01 or algorithm.entropy_target"
        )

    def _exploded(self) -> str:
        """A value loss far above its beginning that explains nothing."""
        loss, explained = self._ends("value/loss"), self._ends("value/explained_variance")
        if (
            loss is None
            or loss[1] <= 100 * max(loss[0], 1e-8)
            or (explained is not None and explained[1] > 0.2)
        ):
            return ""
        return (
            f"value/loss has grown from {loss[0]:.3g} to {loss[1]:.3g}: the critic does not follow;"
            " scale rewards (algorithm.reward_norm=running), lower value_lr, or set value_clip"
        )

    def _dead(self) -> str:
        """HISTORY updates without a success, all returns equal; a run that rose to them has learnt
        all there is.
        """
        returns, successes = self._values("rollout/return"), self._values("rollout/success")
        ever = self._ordered["rollout/return"]
        if (
            len(returns) < HISTORY
            or any(successes)
            or max(returns) - min(returns) > 1e-6 * max(1.0, abs(returns[0]))
        ):
            return ""
        if not successes and ever[0] < returns[0] >= ever[-1]:
            return ""
        said = "no episode has succeeded and " if successes else ""
        return (
            f"{said}rollout/return has been {returns[0]:.3g} in {HISTORY} updates: nothing tells"
            " good from bad; check the reward (grader, success_key), make the task easier to begin"
            " with, or clone demonstrations first"
        )
