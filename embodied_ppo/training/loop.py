"""train(): the one loop, the same for every mode and every placement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embodied_ppo.core.types import Metrics, PendingRow, System
from embodied_ppo.training.logging import Log, Timer, peak_rss_mb

TRAINING = ("collect", "update", "publish")
"""The timer's phases that are training; evaluating and saving are not."""


@dataclass(frozen=True)
class Schedule:
    """When things are due. Updates count from 0."""

    updates: int
    horizon: int
    save_every: int = 0
    eval_every: int = 0
    max_lag: int = 0


@dataclass(frozen=True)
class Outcome:
    """How the loop ended: updates done, and whether it was asked to stop before the last."""

    updates: int
    interrupted: bool
    metrics: Metrics


def train(
    system: System,
    log: Log,
    schedule: Schedule,
    *,
    first_update: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    timer: Timer | None = None,
    after_first: Callable[[], None] = lambda: None,
) -> Outcome:
    """collect -> update -> publish until ``schedule.updates``; evaluate, save and log when due, and after the last.

    ``max_lag`` rollouts wait between acting and learning (0: strictly on-policy). ``should_stop`` is asked between
    updates; what was learned until then is saved. ``after_first`` is called after the first update: it built the
    simulators and loaded compiled code, so measurements of speed begin there.
    """
    timer = timer or Timer()
    pending: deque[tuple[Any, Metrics]] = deque()
    metrics: Metrics = {}
    done, saved, collected = first_update, first_update, first_update
    while done < schedule.updates and not should_stop():
        while len(pending) <= schedule.max_lag and collected < schedule.updates:
            with timer("collect"):
                pending.append(system.collect(schedule.horizon, update=collected))
            collected += 1
        experience, rollout_metrics = pending.popleft()
        before = system.steps
        with timer("update"):
            metrics = rollout_metrics | system.update(experience, update=done)
        done += 1
        with timer("publish"):
            system.publish(done)
        seconds = timer.wall["collect"] + timer.wall["update"] + timer.wall["publish"]
        metrics |= {f"speed/{system.unit}_per_s": (system.steps - before) / seconds}
        last = done == schedule.updates
        row = PendingRow(metrics, last or bool(schedule.eval_every and done % schedule.eval_every == 0))
        if row.evaluation_due or (schedule.save_every and done % schedule.save_every == 0):
            with timer("save"):  # before the evaluation: should that fail, nothing is lost
                system.save(done, row)
            saved = done
        metrics = evaluate_and_log(system, log, timer, row, update=done)
        if done == first_update + 1:
            after_first()
    if saved != done or done == 0:
        system.save(done)
    return Outcome(done, done < schedule.updates, metrics)


def evaluate_and_log(system: System, log: Log, timer: Timer, row: PendingRow, *, update: int) -> Metrics:
    """Complete an update: evaluate where that is due, then log. Return the metrics of the whole row.

    A resumed run calls this first if its checkpoint was saved and the row was not logged.
    """
    metrics = row.metrics
    if row.evaluation_due:
        with timer("evaluate"):
            metrics = metrics | system.evaluate(update)
    metrics = metrics | timer.take() | {"memory/peak_gb": peak_rss_mb() / 1024}
    log.metrics(metrics, update=update, steps=system.steps)
    return metrics
