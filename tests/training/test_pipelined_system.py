"""Tests of runs that collect in a second thread while the learner trains."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from run_helpers import metric_rows, tiny_config, tiny_rollout, tiny_training

from embodied_envs.base.errors import TrainingError
from embodied_ppo.options.schema import Config
from embodied_ppo.programs import runs
from embodied_ppo.rollout.acting import Acting
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.tools.state_differences import state_differences
from tests.integration.test_resume import contents

TINY = run_helpers.options(
    "env.id=InvertedPendulum-v4 updates=6 pipeline=true algorithm.off_policy_correction=token"
    " algorithm.reward_norm=running evaluation.episodes=4 evaluation.num_envs=4"
)


def config(run_dir: Path, **changes: Any) -> Config:
    return replace(tiny_config(TINY), run_dir=str(run_dir), **changes)


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in metric_rows(run_dir) if row["update"]]


def assert_equal_runs(one: Path, other: Path, update: int) -> None:
    """Check that the checkpoints of two runs after ``update`` are equal in every bit."""
    assert not list(state_differences(contents(one, update), contents(other, update)))


def test_equals_the_same_order_in_one_thread(tmp_path) -> None:
    c = config(tmp_path / "run")
    runs.train(c, quiet=True)
    expected = tiny_training(replace(c, pipeline=False), max_lag=1)
    logged = rows(tmp_path / "run")
    assert [row["rollout/version_lag"] for row in logged] == [0, 1, 1, 1, 1, 1]
    assert [row["update"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert all(row["time/wait_for_rollout_s"] >= 0 for row in logged)
    for row, reference in zip(logged, expected, strict=True):
        for tag in ("policy/loss", "policy/approx_kl", "value/loss", "rollout/episodes"):
            assert row[tag] == reference[tag], tag
    policy, training = contents(tmp_path / "run", 6)
    weights = sum(float(x.double().abs().sum()) for k, x in policy.items() if "normal" not in k)
    assert weights > 0 and not training["pending"]


@pytest.mark.slow
def test_resume_is_exact(tmp_path) -> None:
    runs.train(config(tmp_path / "whole", save_every=3, keep_last=9), quiet=True)
    runs.train(config(tmp_path / "parts"), quiet=True, stop_after=3)
    assert list(contents(tmp_path / "parts", 3)[1]["pending"]) == [3]
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts", 3)
    runs.train(config(tmp_path / "parts", resume=str(tmp_path / "parts")), quiet=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts", 6)


def test_run_without_pipeline_continues_one_with(tmp_path) -> None:
    runs.train(config(tmp_path / "run"), quiet=True, stop_after=3)
    runs.train(config(tmp_path / "run", resume=str(tmp_path / "run"), pipeline=False), quiet=True)
    assert [row["rollout/version_lag"] for row in rows(tmp_path / "run")] == [0, 1, 1, 0, 0, 0]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rollout 4 is not trained on, because pipeline=false" in log


def test_stages_of_one_process_equal_a_single_one(tmp_path) -> None:
    """The noise of an environment does not depend on the stages, and EnvPool steps both at once."""
    for stages in (1, 2):
        c = config(tmp_path / f"{stages}", updates=2, pipeline=False)
        runs.train(replace(c, cluster=replace(c.cluster, stages=stages)), quiet=True)
    one, two = (rows(tmp_path / f"{stages}") for stages in (1, 2))
    assert two[0]["rollout/episodes"] == one[0]["rollout/episodes"]
    assert two[0]["policy/loss"] == pytest.approx(one[0]["policy/loss"], rel=1e-4, abs=1e-6)
    assert "no overlap" not in (tmp_path / "2" / "log.txt").read_text()


def test_failed_rollout_ends_the_run(tmp_path, monkeypatch) -> None:
    collect = Rollout.collect

    def failing(self: Rollout, horizon: int, *, update: int, version: int) -> Any:
        if update == 2:
            raise TrainingError("the simulator failed")
        return collect(self, horizon, update=update, version=version)

    monkeypatch.setattr(Rollout, "collect", failing)
    with pytest.raises(TrainingError, match="the simulator failed"):
        runs.train(config(tmp_path / "run"), quiet=True)


def test_rollout_in_progress_is_stopped(monkeypatch) -> None:
    """After a second signal, a command ends without the remainder of a long rollout."""
    rollout, started = tiny_rollout(tiny_config(TINY)), threading.Event()
    act = Acting.__call__

    def slowly(self: Acting, *args: Any) -> Any:
        started.set()
        time.sleep(0.1)
        return act(self, *args)

    monkeypatch.setattr(Acting, "__call__", slowly)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rollout.collect, 2000, update=0, version=0)  # takes 200 s
        assert started.wait(60)
        rollout.stop()
        error = future.exception(60)
    rollout.close()
    assert isinstance(error, TrainingError) and "stopped" in str(error)
