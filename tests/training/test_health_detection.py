"""Warnings about problems in training: synthetic rows and real runs."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import run_helpers

from embodied_ppo import run
from embodied_ppo.training import health
from embodied_ppo.training.health import HISTORY, WINDOW, HealthMonitor


def row(**more: float) -> dict[str, float]:
    """Return the metrics of a healthy update."""
    metrics = {
        "speed/env_steps_per_s": 1000.0,
        "time/collect_s": 1.0,
        "time/update_s": 1.0,
        "policy/approx_kl": 0.01,
        "policy/entropy": 1.0,
        "value/loss": 1.0,
        "value/explained_variance": 0.5,
        "rollout/return": 1.0,
    }
    return metrics | {name.replace("__", "/"): x for name, x in more.items()}


def warnings_of(rows: list[dict[str, float]]) -> list[str]:
    monitor = HealthMonitor()
    return [text for r in rows for text in monitor.add(r)]


def test_healthy_training_has_no_warning() -> None:
    assert warnings_of([row(rollout__return=float(i)) for i in range(200)]) == []
    learnt = [row(rollout__return=float(i), policy__entropy=math.exp(-i / 20)) for i in range(200)]
    assert warnings_of(learnt) == []  # certain, and better


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            row(speed__env_steps_per_s=300.0, time__collect_s=9.0),
            "time/collect_s has gone from 1 to 9",
        ),
        (
            row(policy__entropy=0.01),
            "policy/entropy has fallen from 1 to 0.01 and returns have not risen",
        ),
        (
            row(value__loss=1e4, value__explained_variance=-3.0),
            "value/loss has grown from 1 to 1e+04",
        ),
        (row(policy__approx_kl=0.4), "policy/approx_kl is 0.4, above 0.03"),
        (row(device__idle=0.9), "device/idle is 0.9, above 0.5"),
    ],
)
def test_each_problem_is_reported_once(problem: dict[str, float], text: str) -> None:
    rows = [row(rollout__return=1.0 + i % 2) for i in range(60)] + [
        problem | {"rollout/return": i} for i in (1.0, 2.0)
    ]
    warnings = warnings_of(
        [*rows, *(problem | {"rollout/return": 1.0 + i % 2} for i in range(2 * WINDOW))]
    )
    hits = [warning for warning in warnings if text in warning]
    assert len(hits) == 1, warnings
    assert any(word in hits[0] for word in ("lower", "set ", "scale", "try", "look"))


def test_missing_success_is_reported() -> None:
    dead = row(rollout__return=0.0, rollout__success=0.0)
    warnings = warnings_of([dead] * (HISTORY + 5))
    assert (
        len(warnings) == 1
        and "no episode has succeeded and rollout/return has been 0 in 50 updates" in warnings[0]
    )
    assert (
        warnings_of([row(rollout__return=float(i % 3), rollout__success=0.0) for i in range(100)])
        == []
    )
    assert warnings_of([dead | {"rollout/success": 0.1}] * 100) == []
    rising, full = (
        [row(rollout__return=float(i)) for i in range(0, 500, 10)],
        [row(rollout__return=500.0)] * HISTORY,
    )
    assert warnings_of(rising + full) == []  # the best there is
    assert len(warnings_of(rising + [row(rollout__return=9.0)] * HISTORY)) == 1


@pytest.mark.slow
def test_memory_of_monitor_is_bounded() -> None:
    """Bytes per update over 2,000 updates; a row of 60 tags takes about 4,000."""
    monitor = HealthMonitor()
    rows = [
        row(rollout__return=float(i % 7), **{f"more__{n}": i + n / 60 for n in range(60)})
        for i in range(50)
    ]
    tracemalloc.start()
    try:
        for i in range(3000):
            monitor.add({tag: x + i * 1e-9 for tag, x in rows[i % 50].items()})
            if i == 999:
                before = tracemalloc.get_traced_memory()[0]
        left = (tracemalloc.get_traced_memory()[0] - before) / 2000
    finally:
        tracemalloc.stop()
    assert left < 300, left


SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "env.num_envs": 8,
    "algorithm.horizon": 16,
    "algorithm.global_batch_size": 32,
    "evaluation.episodes": 2,
    "evaluation.video_episodes": 0,
    "compile": "never",
    "updates": 30,
}


@pytest.mark.slow
def test_warning_is_in_log_and_tensorboard(tmp_path: Path) -> None:
    """A learning rate 100 times too large: the KL diverges and the entropy collapses."""
    run.train(
        run_helpers.tiny_config({**SMALL, "run_dir": str(tmp_path / "run"), "algorithm.lr": 0.1})
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    warnings = [line for line in log.splitlines() if "warning, update" in line]
    assert any("policy/approx_kl is" in line and "lower lr" in line for line in warnings), log
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert "warnings/text_summary" in board.Tags()["tensors"]


class Turns(gymnasium.Env[np.ndarray[Any, Any], int]):
    """Episodes of four steps; after 200 steps the robot is ``slow`` (10 ms more a step), or rewards
    are ``large``. ``dull``: nothing is ever earned."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, turn: str) -> None:
        self.turn, self.steps = turn, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        late = self.steps > 200
        time.sleep(0.01 if late and self.turn == "slow" else 0)
        reward = (
            0.0
            if self.turn == "dull"
            else float(self.np_random.normal()) * (1e3 if late and self.turn == "large" else 1)
        )
        return (
            self.observation_space.sample(),
            reward,
            self.steps % 4 == 0,
            False,
            {"is_success": False},
        )


gymnasium.register("test/Turns-v0", lambda **kwargs: Turns(**kwargs))


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("slow", "speed/env_steps_per_s is "),
        ("large", "value/loss has grown from "),
        (
            "dull",
            (
                "no episode has succeeded and rollout/return has been 0 in 50 updates: the"
                " reward does not distinguish actions"
            ),
        ),
    ],
)
def test_degrading_robot_policy_is_reported(
    turn: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SLOW_S", 0.2)
    options = {
        "env.id": "test/Turns-v0",
        "env.kwargs": {"turn": turn},
        "env.num_envs": 2,
        "updates": 55,
        "env.num_threads": 0,
    }
    smaller = {
        "algorithm.horizon": 8,
        "algorithm.global_batch_size": 16,
        "algorithm.update_epoch": 1,
    }
    run.train(
        run_helpers.tiny_config({**SMALL, **options, **smaller, "run_dir": str(tmp_path / "run")}),
        quiet=True,
    )
    log_lines = [
        line
        for line in (tmp_path / "run" / "log.txt").read_text().splitlines()
        if "warning, update" in line
    ]
    assert len([line for line in log_lines if text in line]) == 1, log_lines
    if turn == "slow":
        (line,) = (line for line in log_lines if text in line)
        assert "time/collect_s has gone from " in line


@pytest.mark.slow
def test_healthy_run_has_no_warning(tmp_path: Path) -> None:
    run.train(
        run_helpers.tiny_config({**SMALL, "run_dir": str(tmp_path / "run"), "algorithm.lr": 1e-3}),
        quiet=True,
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 31
    log_lines = (tmp_path / "run" / "log.txt").read_text()
    assert "warning, update" not in log_lines, log_lines
