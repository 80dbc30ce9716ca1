"""Ranges of metrics in healthy training, and warnings about metrics outside of them.

docs/metrics.md has the same ranges. Sources: the clipped objective with an epsilon of 0.2 is from
Schulman et al. 2017 (arXiv 1707.06347). Huang et al. 2022, "The 37 Implementation Details of PPO",
detail 12, monitor KL, clipped fraction and explained variance. OpenAI's Spinning Up stops early at
a KL of 0.01 to 0.05. The limit of ratio_max is from the runs of docs/experiments.md. Many of these
runs learn well with less than 0.002 nats per update, so that a small KL is no warning.
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
"""Number of newest values whose median is judged: single updates, and the first few, deviate."""


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy range of a metric. None: no limit on that side."""

    tag: str
    low: float | None
    high: float | None
    below: str = ""
    """Meaning of a value below ``low``, and the cure."""
    above: str = ""
    """Meaning of a value above ``high``, and the cure."""
    slow: bool = False
    """Whether a value below ``low`` means slow training, which is no warning."""


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
        -0.1,  # about 0 for an untrained critic
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
            "most groups have equal scores and give no gradient: write group_filter=success, choose"
            " prompts of medium difficulty, or raise group_size"
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
        above=(
            "simulations diverged and were reset: shorten the model's timestep, or soften its"
            " contacts"
        ),
    ),
    Range(
        "device/idle", None, 0.5, above="devices wait more than they work: try another placement"
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
        values = [
            x for row in rows if isinstance(x := row.get(r.tag), (int, float)) and not math.isnan(x)
        ]
        if len(values) < WINDOW:
            continue
        x = median(values[-WINDOW:])
        if r.low is not None and x < r.low:
            text = f"{r.tag} is {x:.3g}, below {r.low:g}: {r.below}"
            verdicts.append(Verdict(r.tag, x, not r.slow, text))
        elif r.high is not None and x > r.high:
            text = f"{r.tag} is {x:.3g}, above {r.high:g}: {r.above}"
            verdicts.append(Verdict(r.tag, x, True, text))
        else:
            verdicts.append(Verdict(r.tag, x, False, ""))
    return verdicts


# ------------------------------------------------------------------------------ monitor of training
HISTORY = 50
"""Number of newest updates that a warning about changes considers."""

PHASES = ("time/collect_s", "time/update_s", "time/publish_s")

SLOW_S = 10.0
"""Least duration of WINDOW updates in seconds for a warning about speed; shorter ones are noise."""


class HealthMonitor:
    """Checks the metrics of every update and reports each kind of problem once."""

    def __init__(self) -> None:
        self._newest: deque[Mapping[str, float]] = deque(maxlen=HISTORY)
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        """The first 4 * WINDOW values of each tag."""
        self._ordered: defaultdict[str, list[float]] = defaultdict(list)
        """All values of the tags that are compared with the complete run, in increasing order."""
        self._reported: set[str] = set()

    def add(self, row: Mapping[str, float]) -> list[str]:
        """Add the metrics of an update; return a sentence with a cure for each new problem."""
        self._newest.append(dict(row))
        for tag, x in row.items():
            if math.isfinite(x):
                if len(self._first[tag]) < 4 * WINDOW:
                    self._first[tag].append(x)
                if tag in (*PHASES, "rollout/return") or tag.startswith("speed/"):
                    insort(self._ordered[tag], x)
        early = len(self._newest) < 4 * WINDOW
        problems = {} if early else {v.tag: v.text for v in judge(self._newest) if v.warning}
        checks = (
            self._check_speed,
            self._check_entropy,
            self._check_value_loss,
            self._check_returns,
        )
        problems |= {check.__name__: text for check in checks if (text := check())}
        new = {name: text for name, text in problems.items() if name not in self._reported}
        self._reported |= new.keys()
        return list(new.values())

    def _ends(self, tag: str) -> tuple[float, float] | None:
        """Return the medians of the first and of the newest WINDOW values.

        None before there are 4 * WINDOW values.
        """
        first, newest = self._first[tag], self._values(tag)
        if len(first) < 4 * WINDOW or len(newest) < WINDOW:
            return None
        return median(first[:WINDOW]), median(newest[-WINDOW:])

    def _values(self, tag: str) -> list[float]:
        """Return the values of a tag in the newest rows."""
        return [x for row in self._newest if math.isfinite(x := row.get(tag, math.nan))]

    def _check_speed(self) -> str:
        """Report a throughput below half of its median over the run."""
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
            f"{tag} is {now:,.0f}, below half of its median of {usual:,.0f}{grown}: look for"
            " other processes on the machine (top, nvidia-smi), for a lack of memory, and for"
            " episodes that take longer to simulate"
        )

    def _check_entropy(self) -> str:
        """Report an entropy near 0 while returns have not risen."""
        entropy, returns = self._ends("policy/entropy"), self._ends("rollout/return")
        if entropy is None or returns is None or entropy[0] <= 0 or entropy[1] >= 0.1 * entropy[0]:
            return ""
        if returns[1] > returns[0] + 0.1 * abs(returns[0]):
            return ""
        return (
            f"policy/entropy has fallen from {entropy[0]:.3g} to {entropy[1]:.3g} and returns have"
            " not risen: the policy no longer explores; lower lr, set"
            " algorithm.entropy_bonus=0.01 or algorithm.entropy_target"
        )

    def _check_value_loss(self) -> str:
        """Report a value loss far above its first values, with a low explained variance."""
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

    def _check_returns(self) -> str:
        """Report HISTORY updates with equal returns and without success.

        A run whose returns have risen to a constant has reached the optimum.
        """
        returns, successes = self._values("rollout/return"), self._values("rollout/success")
        history = self._ordered["rollout/return"]
        if (
            len(returns) < HISTORY
            or any(successes)
            or max(returns) - min(returns) > 1e-6 * max(1.0, abs(returns[0]))
        ):
            return ""
        if not successes and history[0] < returns[0] >= history[-1]:
            return ""
        prefix = "no episode has succeeded and " if successes else ""
        return (
            f"{prefix}rollout/return has been {returns[0]:.3g} in {HISTORY} updates: the reward"
            " does not distinguish actions; check the reward (grader, success_key), choose an"
            " easier task to begin with, or clone demonstrations first"
        )
