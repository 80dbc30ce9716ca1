"""Find the update and the minibatch in which a condition on a metric first held."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from embodied_envs.base.errors import ConfigError, choose
from embodied_ppo.api import Run, path_text, short_text
from embodied_ppo.core import guarded_files
from embodied_ppo.core.tables import tables
from embodied_ppo.tools import reexecution
from embodied_ppo.tools.update_replay import Replay, replay
from embodied_ppo.training.run_files import MESSAGE

# Operators; NaN fulfils "nonfinite" only.
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": lambda x, number: x < number or x > number,
    ">": operator.gt,
    "<": operator.lt,
    "nonfinite": lambda x, _: not math.isfinite(x),
}
CONDITION = re.compile(r"\s*(\S+?)\s*(>=|<=|==|!=|>|<|(?<=\s)nonfinite)\s*(\S*)\s*")
# Metric -> statistic of a minibatch, and the statistic by which it is divided.
STATISTICS: dict[str, Any] = tables(__file__)["statistics"]
UNITS = {"update", "env_steps", "tokens"}  # entries of a row that are not metrics


class Condition(NamedTuple):
    """A condition on a metric.

    Attributes:
        metric: Tag of metrics.jsonl.
        operator: Key of OPERATORS.
        number: Right-hand side; NaN with "nonfinite".
    """

    metric: str
    operator: str
    number: float

    def holds(self, value: float) -> bool:
        """Return whether the condition holds for a value."""
        return OPERATORS[self.operator](value, self.number)

    def __str__(self) -> str:
        number = "" if self.operator == "nonfinite" else f" {self.number:g}"
        return f"{self.metric} {self.operator}{number}"


def parse_condition(text: str) -> Condition:
    """Parse NAME OPERATOR NUMBER, or NAME nonfinite. Raises ConfigError."""
    if match := CONDITION.fullmatch(text):
        with suppress(ValueError):
            number = float(match[3] or "nan")
            if (match[2] == "nonfinite" and not match[3]) or not math.isnan(number):
                return Condition(match[1], match[2], number)
    raise ConfigError(
        f"condition {text!r}: is not NAME OPERATOR NUMBER, with an operator of"
        f" {' '.join([*OPERATORS][:-1])}, or NAME nonfinite; write for example"
        ' "policy/approx_kl > 0.1", in quotes'
    )


def bisect(run: str | Path | Run, condition: str, *, progress: bool = True) -> dict[str, Any]:
    """Find the update and the minibatch in which a condition on a metric first held.

    metrics.jsonl names the update. It is then executed again, and the condition is evaluated on
    the statistics of each minibatch. ``replay`` returns the samples of the minibatch.

    Args:
        run: Directory of a run, or a ``Run``; it is only read.
        condition: A metric, one of > >= < <= == !=, and a number: ``"policy/approx_kl > 0.1"``; or
            ``"policy/loss nonfinite"``.
        progress: Show messages on stderr.

    Returns:
        run, condition, held: the question, and whether the condition ever held.
        update, value: The first update in which it held, and its metric there. Where it never held,
            the update with the most extreme value.
        minibatch: number, epoch and position (from 1), count, value of the first minibatch in which
            the condition held; None where no minibatch determines the metric.
        notes: Restrictions, and differences from the run.

    Raises:
        ConfigError: The condition is malformed, or the run has no such metric.
        CheckpointError, EnvError, TrainingError: The update cannot be executed again.
    """
    wanted = parse_condition(short_text("condition", condition))
    source_run = reexecution.run_directory(path_text(run))
    rows = reexecution.metric_rows(source_run)
    names = sorted({name for row in rows.values() for name in row} - UNITS)
    if wanted.metric not in names:
        raise ConfigError(
            f"{wanted.metric}: is not a metric of {source_run};"
            f" {choose(wanted.metric, names, 'metrics: ')}"
        )
    values = {
        update: math.nan if row[wanted.metric] is None else float(row[wanted.metric])
        for update, row in sorted(rows.items())
        if wanted.metric in row
    }
    result: dict[str, Any] = {"run": str(source_run.resolve()), "condition": str(wanted)}
    first = next((update for update, x in values.items() if wanted.holds(x)), None)
    if first is None:
        update, word = _closest(wanted, values)
        result |= {"held": False, "update": update, "value": values[update], "extreme": word}
        return result | {"notes": _failure(source_run)}
    result |= {"held": True, "update": first, "value": values[first], "minibatch": None}
    if first == 0 or wanted.metric not in STATISTICS:
        note = f"{wanted.metric} is not computed per minibatch, so only the update is located"
        return result | {"notes": [note]}
    try:
        repeated = replay(source_run, update=first, progress=progress)
    except ConfigError as error:  # several processes, or rollouts that overlap with updates
        return result | {"notes": [f"the minibatch is not located: {error}"]}
    minibatch, notes = _locate(wanted, repeated)
    return result | {"minibatch": minibatch, "notes": notes}


def _failure(source_run: Path) -> list[str]:
    """Return a note if the run failed: the update in which it did has no row of metrics."""
    try:
        log = guarded_files.read_bytes(source_run / "log.txt").decode(errors="replace")
        last = MESSAGE.findall(log)[-1]
    except (OSError, ValueError, IndexError):
        return []
    _, failed, cause = last.partition("failed: ")
    note = f"the run failed in an update that has no metrics, which is not searched: {cause}"
    return [note] if failed else []


def _closest(condition: Condition, values: Mapping[int, float]) -> tuple[int, str]:
    """Return the update whose value is nearest to fulfilling the condition, and its description."""
    known = {update: x for update, x in values.items() if not math.isnan(x)} or dict(values)
    if condition.operator in ("<", "<="):
        return min(known, key=lambda u: known[u]), "smallest"
    if condition.operator == "==":
        return min(known, key=lambda u: abs(known[u] - condition.number)), "nearest"
    return max(known, key=lambda u: known[u]), "largest"


def _locate(condition: Condition, repeated: Replay) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the first minibatch in which the condition held (None without any), and notes."""
    notes = []
    if repeated.differences:
        notes = [
            *repeated.notes,
            f"the repeated update differs from the run ({repeated.differences[0]}); the minibatch"
            " is that of the repetition",
        ]
    name, divisor = STATISTICS[condition.metric]
    values = [
        m.statistics[name] / (1.0 if divisor is None else max(1.0, m.statistics[divisor]))
        for m in repeated.minibatches
    ]
    if not values:
        return None, notes
    number = next((i for i, x in enumerate(values) if condition.holds(x)), None)
    if number is None:
        notes.append(
            "the condition holds for the mean over all minibatches but for no single one; the"
            " nearest minibatch is shown"
        )
        number = min(range(len(values)), key=lambda i: abs(values[i] - condition.number))
    epoch = repeated.minibatches[number].epoch
    before = sum(m.epoch < epoch for m in repeated.minibatches)
    position = {"number": number + 1, "epoch": epoch + 1, "position": number - before + 1}
    return {**position, "count": len(values), "value": values[number]}, notes
