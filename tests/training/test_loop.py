"""Training loop: order of calls, lag, intervals, stop and resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import run_helpers
import torch

from embodied_envs.base.random import env_seeds
from embodied_ppo.core.types import Mean, Metrics, PendingRow
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.policies import robot_policy
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import loop
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.logging import Log
from embodied_ppo.training.run_system import Records


class Notes:
    """System that records its calls; an update has 64 steps."""

    unit: Literal["env_steps", "tokens"] = "env_steps"

    def __init__(self, completed_updates: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version, self.steps = completed_updates, 64 * completed_updates

    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]:
        assert horizon == 16
        self.calls.append(("collect", update))
        return (update, self.version), {"rollout/episodes": float(update)}

    def update(self, experience: Any, *, update: int) -> Metrics:
        collected, version = experience
        self.calls.append(("update", update, collected))
        self.steps += 64
        return {
            "policy/loss": Mean(float(update), 1.0),
            "rollout/version_lag": float(self.version - version),
        }

    def publish(self, version: int) -> None:
        self.calls.append(("publish", version))
        self.version = version

    def evaluate(self, update: int) -> Metrics:
        self.calls.append(("evaluate", update))
        return {"eval/return": Mean(10.0 * update, 2.0)}

    def save(self, update: int, row: PendingRow | None = None) -> Path:
        self.calls.append(("save", update, self.steps))
        return Path()

    def close(self) -> None: ...


def train(
    tmp_path: Path,
    updates: int,
    *,
    completed_updates: int = 0,
    should_stop=lambda: False,
    **due: Any,
):
    """Run the loop; return calls, rows and outcome."""
    system = Notes(completed_updates)
    log = Log(tmp_path, total_updates=updates, completed_updates=completed_updates, quiet=True)
    schedule = loop.Schedule(updates=updates, horizon=16, **due)
    outcome = loop.train(
        system, log, schedule, completed_updates=completed_updates, should_stop=should_stop
    )
    log.close()
    return system.calls, run_helpers.metric_rows(tmp_path), outcome


def only(calls: list[tuple[Any, ...]], name: str) -> list[tuple[Any, ...]]:
    return [call[1:] for call in calls if call[0] == name]


def test_collect_update_publish(tmp_path):
    calls, rows, outcome = train(tmp_path, 3)
    assert calls == [
        *(("collect", 0), ("update", 0, 0), ("publish", 1)),
        *(("collect", 1), ("update", 1, 1), ("publish", 2)),
        *(("collect", 2), ("update", 2, 2), ("publish", 3)),
        *(("save", 3, 192), ("evaluate", 3)),
    ]
    assert (outcome.updates, outcome.interrupted) == (3, False)
    assert [(r["update"], r["env_steps"]) for r in rows] == [(1, 64), (2, 128), (3, 192)]
    for update, row in enumerate(rows):
        assert row["policy/loss"] == row["rollout/episodes"] == update  # of one and the same update
        assert row["rollout/version_lag"] == 0
        seconds = sum(row[f"time/{phase}_s"] for phase in ("collect", "update", "publish"))
        assert row["speed/env_steps_per_s"] == pytest.approx(64 / seconds)
        assert row["memory/peak_gb"] > 0.05
        last = update == 2
        assert ("time/save_s" in row) == ("eval/return" in row) == last


@pytest.mark.parametrize("max_lag", [0, 2, 9])
def test_max_lag(tmp_path, max_lag):
    calls, rows, _ = train(tmp_path, 5, max_lag=max_lag)
    # each once, none beyond the last update
    assert only(calls, "collect") == [(u,) for u in range(5)]
    assert only(calls, "update") == [(u, u) for u in range(5)]  # the oldest first
    ahead = [
        len(only(calls[:i], "collect")) - len(only(calls[:i], "update"))
        for i, call in enumerate(calls)
        if call[0] == "update"
    ]
    assert max(ahead) == min(max_lag + 1, 5)
    assert [r["rollout/version_lag"] for r in rows] == [min(u, max_lag) for u in range(5)]


def test_evaluation_and_save_intervals(tmp_path):
    calls, rows, _ = train(tmp_path, 7, save_every=3, eval_every=2)
    assert only(calls, "evaluate") == [(2,), (4,), (6,), (7,)]
    # what is evaluated is saved before; 3 is due; 6 is due twice and saved once; 7 is the end
    assert only(calls, "save") == [(2, 128), (3, 192), (4, 256), (6, 384), (7, 448)]
    assert [r["update"] for r in rows if "eval/return" in r] == [2, 4, 6, 7]
    assert [r["update"] for r in rows if "time/evaluate_s" in r] == [2, 4, 6, 7]
    assert [r["update"] for r in rows if "time/save_s" in r] == [2, 3, 4, 6, 7]
    i = calls.index(("evaluate", 2))
    assert calls[i - 2 : i + 1] == [("publish", 2), ("save", 2, 128), ("evaluate", 2)]


@pytest.mark.parametrize("after", [0, 2])
def test_loop_stops_and_saves(tmp_path, after):
    answers = iter([False] * after + [True])
    calls, rows, outcome = train(
        tmp_path, 9, should_stop=lambda: next(answers), save_every=2 if after else 0
    )
    assert (outcome.updates, outcome.interrupted) == (after, True)
    assert len(only(calls, "update")) == len(rows) == after
    # Once; nothing before the first update, which would leave a directory without any training.
    assert only(calls, "save") == ([(after, 64 * after)] if after else [])


def test_loop_resumes(tmp_path):
    calls, rows, outcome = train(tmp_path, 6, completed_updates=4, save_every=5)
    assert only(calls, "collect") == [(4,), (5,)] and only(calls, "update") == [(4, 4), (5, 5)]
    assert only(calls, "publish") == [(5,), (6,)]
    assert only(calls, "save") == [(5, 320), (6, 384)]
    assert [(r["update"], r["env_steps"]) for r in rows] == [(5, 320), (6, 384)]
    assert not outcome.interrupted
    calls, _, outcome = train(tmp_path / "done", 4, completed_updates=4)
    assert calls == [] and (outcome.updates, outcome.interrupted) == (4, False)


def test_exception_ends_loop(tmp_path):
    class Broken(Notes):
        def update(self, experience: Any, *, update: int) -> Metrics:
            raise RuntimeError("the simulator died")

    system, log = Broken(), Log(tmp_path, total_updates=1, quiet=True)
    with pytest.raises(RuntimeError, match="the simulator died"):
        loop.train(system, log, loop.Schedule(updates=1, horizon=16))
    log.close()
    assert not only(system.calls, "save")


def test_version_lag_of_local_system(tmp_path):
    """A rollout of an older policy has a lag and larger probability ratios."""
    c = run_helpers.tiny_config({"env.id": "CartPole-v1"})
    env = environments.make_env(env_seeds(0, 0, 4), config=c.env, device=torch.device("cpu"))
    policy = robot_policy.make_policy(c, env)
    system = LocalSystem(
        Records("env_steps", "eval/return", tmp_path / "checkpoints", 1, "", {}),
        policy=policy,
        rollout=Rollout(env, policy, seed=0),
        learner=robot_ppo(policy, c.algorithm, num_envs=4, updates=4, seed=0),
        count=lambda experience: 32,
        measure=functools.partial(
            evaluation.evaluate,
            policy,
            functools.partial(environments.make_env, config=c.env, device=torch.device("cpu")),
            episodes=10,
            num_envs=10,
            seed=0,
        ),
    )
    log = Log(tmp_path, total_updates=4, quiet=True)
    loop.train(system, log, loop.Schedule(updates=4, horizon=8, max_lag=2))
    log.close()
    system.close()
    rows = run_helpers.metric_rows(tmp_path)
    assert [r["rollout/version_lag"] for r in rows] == [0, 1, 2, 2]
    assert rows[2]["policy/approx_kl"] > rows[0]["policy/approx_kl"]
