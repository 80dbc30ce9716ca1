"""Find the update, the minibatch and the samples in which a condition on a metric first held."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.analysis import reexecution
from embodied_ppo.analysis.replay import Minibatch, Replay, replay
from embodied_ppo.core.errors import ConfigError, choose

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*(\S+?)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
NONFINITE = re.compile(r"\s*(\S+)\s+nonfinite\s*")
SAMPLES = 5
"""Number of samples of a minibatch, and of rewards of a rollout, that are named."""
STATISTICS = {
    "policy/loss": ("policy_loss", None),
    "policy/approx_kl": ("approx_kl", "count"),
    "policy/clip_fraction": ("clip_fraction", "count"),
    "policy/dual_clip_fraction": ("dual_clip_fraction", "count"),
    "policy/ratio_max": ("ratio_max", None),
    "policy/entropy": ("entropy", None),
    "policy/grad_norm": ("actor_norm", None),
    "value/loss": ("value_loss", None),
    "value/grad_norm": ("critic_norm", None),
    "value/clip_fraction": ("value_clipped", "rows"),
    "kl/to_reference": ("kl", "rows"),
    "distill/loss": ("policy_loss", None),
}
"""Metric -> statistic of a minibatch, and the statistic by which it is divided."""
RANKED_BY = {
    "policy/approx_kl": "log_ratio",
    "policy/clip_fraction": "log_ratio",
    "policy/dual_clip_fraction": "log_ratio",
    "policy/ratio_max": "log_ratio",
    "kl/to_reference": "log_ratio",
    "policy/loss": "advantage",
    "policy/grad_norm": "advantage",
    "policy/entropy": "log_ratio",
    "value/loss": "value_error",
    "value/grad_norm": "value_error",
    "value/clip_fraction": "value_error",
}
"""Metric -> quantity whose absolute value orders the samples of a minibatch."""
OUTLIER = 10.0
"""A reward is named as an outlier if no other one is a tenth as far from the median."""
UNITS = {"update", "env_steps", "tokens"}
"""Entries of a row that are not metrics."""


@dataclass(frozen=True)
class Condition:
    """A condition on a metric.

    Attributes:
        metric: Tag of metrics.jsonl.
        operator: Key of OPERATORS, or "nonfinite".
        number: Right-hand side; NaN with "nonfinite".
    """

    metric: str
    operator: str
    number: float

    def holds(self, value: float) -> bool:
        """Return whether the condition holds for a value; NaN fulfils "nonfinite" only."""
        if self.operator == "nonfinite":
            return not math.isfinite(value)
        return not math.isnan(value) and OPERATORS[self.operator](value, self.number)

    def __str__(self) -> str:
        if self.operator == "nonfinite":
            return f"{self.metric} nonfinite"
        return f"{self.metric} {self.operator} {self.number:g}"


def parse_condition(text: str) -> Condition:
    """Parse NAME OPERATOR NUMBER, or NAME nonfinite. Raises ConfigError."""
    if match := NONFINITE.fullmatch(text):
        return Condition(match[1], "nonfinite", math.nan)
    if match := CONDITION.fullmatch(text):
        try:
            number = float(match[3])
        except ValueError:
            number = math.nan
        if not math.isnan(number):
            return Condition(match[1], match[2], number)
    raise ConfigError(
        f"condition {text!r}: is not NAME OPERATOR NUMBER, with an operator of"
        f" {' '.join(OPERATORS)}, or NAME nonfinite; write for example"
        ' "policy/approx_kl > 0.1", in quotes'
    )


def bisect(source_run: Path, text: str, *, quiet: bool = False) -> dict[str, Any]:
    """Find where a condition first held in a run.

    metrics.jsonl names the update. It is then executed again, and the condition is evaluated on
    the statistics of each minibatch.

    Args:
        source_run: Directory of the run; it is only read.
        text: The condition, see ``parse_condition``.
        quiet: Whether no messages are shown.

    Returns:
        run, condition, held: the question, and whether the condition ever held.
        update, value: The first update in which it held, and its metric there. Where it never held,
            the update with the most extreme value.
        minibatch: number, epoch and position (from 1), count, value of the first minibatch in which
            the condition held; None where no minibatch determines the metric.
        ranked_by: Quantity that orders ``samples``.
        samples: The samples of that minibatch (else of the rollout) with the largest values of it:
            environment, step of the rollout, env_step (calls of this environment since the
            beginning of the run), reward, value, returns, advantage, value_error, ratio.
        rewards: The samples of the rollout whose rewards are furthest from the median; empty where
            all rewards are equal.
        notes: A reward that stands out, restrictions, and differences from the run.

    Raises:
        ConfigError: The condition is malformed, or the run has no such metric.
        CheckpointError, EnvError, TrainingError: The update cannot be executed again.
    """
    source_run = reexecution.run_directory(source_run)
    condition = parse_condition(text)
    rows = reexecution.metric_rows(source_run)
    names = sorted({name for row in rows.values() for name in row} - UNITS)
    if condition.metric not in names:
        raise ConfigError(
            f"{condition.metric}: is not a metric of {source_run};"
            f" {choose(condition.metric, names, 'metrics: ')}"
        )
    values = {
        update: math.nan if row[condition.metric] is None else float(row[condition.metric])
        for update, row in sorted(rows.items())
        if condition.metric in row
    }
    result: dict[str, Any] = {"run": str(source_run.resolve()), "condition": str(condition)}
    first = next((update for update, x in values.items() if condition.holds(x)), None)
    if first is None:
        update, word = _closest(condition, values)
        result |= {"held": False, "update": update, "value": values[update], "extreme": word}
        return result | {"notes": _failure(source_run)}
    result |= {"held": True, "update": first, "value": values[first], "minibatch": None}
    result |= {"ranked_by": None, "samples": [], "rewards": [], "notes": []}
    if first == 0 or condition.metric.startswith(reexecution.NOT_REEXECUTED):
        note = f"{condition.metric} is not computed per minibatch, so only the update is located"
        return result | {"notes": [note]}
    try:
        repeated = replay(source_run, first, quiet=quiet)
    except ConfigError as error:  # several processes, or rollouts that overlap with updates
        return result | {"notes": [f"the minibatch is not located: {error}"]}
    return result | _locate(condition, repeated)


def _failure(source_run: Path) -> list[str]:
    """Return a note if the run failed: the update in which it did has no row of metrics."""
    try:
        last = (source_run / "log.txt").read_text(errors="replace").splitlines()[-1]
    except (OSError, IndexError):
        return []
    _, failed, cause = last.partition(" failed: ")
    if not failed:
        return []
    return [f"the run failed in an update that has no metrics, which is not searched: {cause}"]


def _closest(condition: Condition, values: Mapping[int, float]) -> tuple[int, str]:
    """Return the update whose value is nearest to fulfilling the condition, and its description."""
    known = {update: x for update, x in values.items() if not math.isnan(x)} or dict(values)
    if condition.operator in ("<", "<="):
        return min(known, key=lambda u: known[u]), "smallest"
    if condition.operator == "==":
        return min(known, key=lambda u: abs(known[u] - condition.number)), "nearest"
    return max(known, key=lambda u: known[u]), "largest"


# ---------------------------------------------------------------------------- minibatch and samples
def _locate(condition: Condition, repeated: Replay) -> dict[str, Any]:
    """Return the first minibatch in which the condition held, its samples, and notes."""
    notes = list(repeated.notes) if repeated.differences else []
    if repeated.differences:
        notes.append(
            f"the repeated update differs from the run ({repeated.differences[0]}); minibatch and"
            " samples are those of the repetition"
        )
    deviation = _deviation(repeated.rollout["reward"])
    rewards = [
        sample
        for sample in _top(repeated, deviation, None)
        if deviation[sample["step"], sample["environment"]] > 0
    ]
    if len(rewards) > 1:
        furthest, second = (float(deviation[r["step"], r["environment"]]) for r in rewards[:2])
        if furthest > OUTLIER * second:
            notes.append(
                f"the reward {rewards[0]['reward']:g} of environment {rewards[0]['environment']} at"
                f" step {rewards[0]['step']} stands out: the next furthest from the median is"
                f" {rewards[1]['reward']:g}"
            )
    location: dict[str, Any] = {"rewards": rewards, "notes": notes}
    if condition.metric not in STATISTICS or not repeated.minibatches:
        # A property of the whole rollout.
        by = "advantage" if condition.metric.startswith("advantage/") else "reward"
        if condition.metric == "value/explained_variance":
            by = "value_error"
        quantities = _quantities(repeated, None)
        score = _deviation(quantities["reward"]) if by == "reward" else quantities[by].abs()
        return location | {"ranked_by": by, "samples": _top(repeated, score, None)}
    name, divisor = STATISTICS[condition.metric]
    values = [
        m.statistics[name] / (1.0 if divisor is None else max(1.0, m.statistics[divisor]))
        for m in repeated.minibatches
    ]
    number = next((i for i, x in enumerate(values) if condition.holds(x)), None)
    if number is None:
        notes.append(
            "the condition holds for the mean over all minibatches but for no single one; the"
            " nearest minibatch is shown"
        )
        number = min(range(len(values)), key=lambda i: abs(values[i] - condition.number))
    chosen = repeated.minibatches[number]
    before = sum(m.epoch < chosen.epoch for m in repeated.minibatches)
    minibatch = {
        "number": number + 1,
        "epoch": chosen.epoch + 1,
        "position": number - before + 1,
        "count": len(values),
        "samples": int((_members(repeated, chosen) & _mask(repeated)).sum()),
        "value": values[number],
    }
    quantities = _quantities(repeated, chosen)
    by = RANKED_BY.get(condition.metric, "advantage")
    by = by if by in quantities else "reward"
    score = _deviation(quantities["reward"]) if by == "reward" else quantities[by].abs()
    score = score.where(_members(repeated, chosen), torch.tensor(-math.inf, dtype=score.dtype))
    samples = _top(repeated, score, chosen)
    return location | {"minibatch": minibatch, "ranked_by": by, "samples": samples}


def _members(repeated: Replay, minibatch: Minibatch) -> Tensor:
    """Return bool [T, N], the samples of a minibatch."""
    member = torch.zeros(repeated.rollout["reward"].shape[:2], dtype=torch.bool)
    if repeated.minibatch_unit == "column":
        member[:, minibatch.index] = True
    else:
        member.view(-1)[minibatch.index] = True
    return member


def _mask(repeated: Replay) -> Tensor:
    """Return bool [T, N], the samples that are part of the loss."""
    mask = repeated.rollout["mask"]
    return mask.flatten(2).any(2) if mask.ndim > 2 else mask


def _quantities(repeated: Replay, minibatch: Minibatch | None) -> dict[str, Tensor]:
    """Return name -> double [T, N] of all samples.

    With a minibatch, log_ratio and value_error are those of its samples before its step, and NaN
    elsewhere; without, value_error is that of the values at the time of acting. Chunks of actions
    are reduced to the entry with the largest absolute value, rewards to their sum.
    """
    r = repeated.rollout
    quantities = {
        name: _reduced(r[name]) for name in ("value", "returns", "advantage") if name in r
    }
    reward = r["reward"].double()
    quantities["reward"] = reward.flatten(2).sum(2) if reward.ndim > 2 else reward
    shape = quantities["reward"].shape
    if minibatch is None:
        quantities["value_error"] = quantities["value"] - quantities["returns"]
        return quantities
    for name, x in (("log_ratio", minibatch.log_ratio), ("value_now", minibatch.value)):
        if x is None:
            continue
        full = torch.full(shape, math.nan, dtype=torch.float64)
        if repeated.minibatch_unit == "column":
            full[:, minibatch.index] = _reduced(x)
        else:
            full.view(-1)[minibatch.index] = _reduced(x, dims=1)
        quantities[name] = full
    quantities["value_error"] = (
        quantities.pop("value_now", quantities["value"]) - quantities["returns"]
    )
    return quantities


def _reduced(x: Tensor, dims: int = 2) -> Tensor:
    """Return a double tensor of the first dimensions: the entry with the largest absolute value."""
    x = x.double()
    if x.ndim <= dims:
        return x
    flat = x.flatten(dims)
    return flat.gather(dims, flat.abs().argmax(dims, keepdim=True)).squeeze(dims)


def _deviation(reward: Tensor) -> Tensor:
    """Return double [T, N], the distance of each reward from the median of the rollout."""
    reward = reward.double()
    reward = reward.flatten(2).sum(2) if reward.ndim > 2 else reward
    distance = (reward - reward.nanmedian()).abs()
    return torch.where(distance.isfinite(), distance, torch.inf)


def _top(repeated: Replay, score: Tensor, minibatch: Minibatch | None) -> list[dict[str, Any]]:
    """Return the samples [T, N] with the largest scores; masked samples are left out."""
    score = torch.where(score.isnan(), math.inf, score).masked_fill(~_mask(repeated), -math.inf)
    quantities = _quantities(repeated, minibatch)
    ratio = quantities.pop("log_ratio", None)
    if ratio is not None:
        quantities["ratio"] = ratio.exp()
    horizon, columns = score.shape
    best = score.flatten().topk(min(SAMPLES, score.numel()))
    samples = []
    for value, sample in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if value == -math.inf:
            break
        step, environment = divmod(sample, columns)
        position = {
            "environment": environment,
            "step": step,
            "env_step": (repeated.update - 1) * horizon + step,
        }
        samples.append(
            position | {name: float(x[step, environment]) for name, x in quantities.items()}
        )
    return samples
