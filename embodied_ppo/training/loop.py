"""The training loop of all modes and placements: collect, update, publish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embodied_ppo.core.types import Metrics, PendingRow, System
from embodied_ppo.training.logging import Log, Timer, peak_rss_mb

# Phases of the timer that count as training; evaluating and saving do not.
TRAINING_PHASES = ("collect", "update", "publish")


@dataclass(frozen=True)
class Schedule:
    """Lengths and intervals of a run.

    Attributes:
        updates: Updates of the complete run.
        horizon: Steps (or tokens) of one rollout.
        save_every: Updates between checkpoints; 0: only before evaluations and at the end.
        eval_every: Updates between evaluations; 0: only at the end.
        evaluates: Whether the run has evaluations.
        max_lag: Rollouts that may wait between acting and learning; 0: strictly on-policy.
        stop_after: Update after which the loop saves and ends without an evaluation; None: the
            last one, which is evaluated.
    """

    updates: int
    horizon: int
    save_every: int = 0
    eval_every: int = 0
    evaluates: bool = True
    max_lag: int = 0
    stop_after: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of the loop.

    Attributes:
        updates: Completed updates.
        interrupted: Whether a signal ended the loop before its last update.
    """

    updates: int
    interrupted: bool


def train(
    system: System,
    log: Log,
    schedule: Schedule,
    *,
    completed_updates: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    timer: Timer | None = None,
    after_first: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train until ``schedule.updates``; evaluate, save and log when due, and after the last update.

    ``schedule.stop_after`` ends the loop earlier.

    Args:
        system: Collects, learns and saves.
        log: Receives the metrics.
        schedule: Lengths and intervals.
        completed_updates: Updates that a resumed run has completed.
        should_stop: Called between updates; if it returns True, the loop saves and ends.
        timer: Timer of the phases.
        after_first: Called after the first update, which builds the simulators and loads compiled
            code. Measurements of speed start there.

    Returns:
        Completed updates, and whether the loop was interrupted.

    Raises:
        TrainingError: An update or the simulator failed.
    """
    timer = timer or Timer()
    pending: deque[tuple[Any, Metrics]] = deque()
    # Rollouts may be ahead of updates by ``max_lag``, so both are counted.
    done, saved, collected = completed_updates, completed_updates, completed_updates
    end = schedule.updates if schedule.stop_after is None else schedule.stop_after
    # With a lag, rollouts after the last update of this call belong to its checkpoint.
    last_rollout = min(schedule.updates, end + schedule.max_lag)
    while done < end and not should_stop():
        # With max_lag = 0 this collects exactly one rollout, with the newest weights.
        while len(pending) <= schedule.max_lag and collected < last_rollout:
            with timer("collect"):
                pending.append(system.collect(schedule.horizon, update=collected))
            collected += 1
        # Experience is trained on in the order in which it was collected.
        experience, rollout_metrics = pending.popleft()
        before = system.steps
        with timer("update"):
            metrics: Metrics = rollout_metrics | system.update(experience, update=done)
        done += 1
        # From here on, rollouts act with version ``done`` of the weights.
        with timer("publish"):
            system.publish(done)
        # The speed does not contain evaluations and checkpoints.
        seconds = sum(timer.wall[phase] for phase in TRAINING_PHASES)
        metrics |= {f"speed/{system.unit}_per_s": (system.steps - before) / seconds}
        # A run that stops early continues later, so only its true end is always evaluated.
        last = done == schedule.updates and schedule.stop_after is None
        due = last or bool(schedule.eval_every and done % schedule.eval_every == 0)
        row = PendingRow(metrics, due and schedule.evaluates)
        saving_due = bool(schedule.save_every) and done % schedule.save_every == 0
        # Other runs can start from the critic at the end of its warm-up.
        if row.evaluation_due or saving_due or metrics.get("value/warmup") == 0:
            # Save before the evaluation, so that its failure does not lose the update.
            with timer("save"):
                system.save(done, row)
            saved = done
        # The row is logged last, so that an update with a row is complete.
        evaluate_and_log(system, log, timer, row, update=done)
        if done == completed_updates + 1:
            after_first()
    if saved != done or done == end == 0:  # an interrupt before the first update saves nothing
        system.save(done)
    return Outcome(done, done < end)


def evaluate_and_log(
    system: System, log: Log, timer: Timer, row: PendingRow, *, update: int
) -> None:
    """Complete an update: evaluate if due, then log.

    A resumed run calls this first if its checkpoint was saved and the row was not logged before the
    interruption.
    """
    metrics = row.metrics
    if row.evaluation_due:
        with timer("evaluate"):
            metrics = metrics | system.evaluate(update)
    # The row contains the duration of its own evaluation and checkpoint.
    metrics = metrics | timer.take() | {"memory/peak_gb": peak_rss_mb() / 1024}
    log.metrics(metrics, update=update, steps=system.steps)
