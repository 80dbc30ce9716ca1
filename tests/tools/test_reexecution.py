"""Updates that are executed again: equal bit for bit, from any state; observers; refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

import embodied_ppo as ep
from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_ppo.core.types import Metrics, Trajectory
from embodied_ppo.ppo.minibatches import take
from embodied_ppo.tools import reexecution
from tests.integration.test_resume import assert_same, contents, rows

TINY: dict[str, Any] = run_helpers.options("""env__num_envs=8 env__num_threads=1 updates=5
    save_every=2 eval_every=2 algorithm__horizon=16 algorithm__global_batch_size=64
    algorithm__update_epoch=2 algorithm__lr_schedule=linear algorithm__reward_norm=running
    evaluation__episodes=2 evaluation__video_episodes=0 compile=never progress=false""")


def files(run_dir: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.rglob("*") if p.is_file()}


class Notes:
    """Observer that keeps all calls, and checks the statistics of each minibatch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.experience: Trajectory | None = None
        self.indices: list[Tensor] = []
        self.statistics: list[Mapping[str, float]] = []

    def on_experience(self, experience: Trajectory, *, update: int) -> None:
        self.calls.append(f"experience {update}")
        self.experience = experience

    def on_batch(self, batch: Any, *, loss: Any) -> None:
        self.calls.append("batch")
        self.batch, self.loss = batch, loss

    def before_minibatch(self, index: Tensor, *, epoch: int) -> None:
        self.calls.append(f"before {epoch}")
        self.indices.append(index)
        minibatch = take(self.batch, index, "step")
        with torch.no_grad():
            ratio = (self.loss.evaluate(minibatch).log_prob - minibatch.log_prob).exp()
        self.ratio_max = float(ratio[minibatch.mask].max())

    def after_minibatch(self, statistics: Mapping[str, float]) -> None:
        self.calls.append("after")
        self.statistics.append(statistics)
        assert statistics["ratio_max"] == pytest.approx(self.ratio_max, rel=1e-6)

    def on_update(self, metrics: Metrics) -> None:
        self.calls.append("update")


@pytest.mark.parametrize("start, stop, equal", [(2, 4, 4), (4, 5, 5), (0, 2, 2), (2, 3, None)])
def test_updates_equal_those_of_the_run(run_dir, tmp_path, start, stop, equal):
    before = files(run_dir)
    out = tmp_path / "out"
    assert reexecution.repeat(run_dir, out, start=start, stop=stop, say=print) == ([], [])
    assert files(run_dir) == before, "the run is only read"
    if equal is not None:
        assert_same(contents(out, stop), contents(run_dir, stop))
    expected = [
        {tag: x for tag, x in row.items() if not tag.startswith("eval/")} for row in rows(run_dir)
    ]
    assert rows(out) == expected[start + 1 : stop + 1]
    assert reexecution.stored_updates(out) == sorted({start, stop} - {0})
    assert not (out / "summary.json").exists() and not list((out / "reports").glob("*"))


def test_observer_changes_nothing_and_receives_every_minibatch(run_dir, tmp_path):
    notes = Notes()
    out = tmp_path / "out"
    reexecution.reexecute(run_dir, out, start=4, stop=5, observe=notes)
    assert_same(contents(out, 5), contents(run_dir, 5))
    minibatch = ["before 0", "after"] * 2 + ["before 1", "after"] * 2
    assert notes.calls == ["experience 4", "batch", *minibatch, "update"]
    assert notes.experience is not None and notes.experience.reward.shape == (16, 8)
    assert torch.equal(torch.cat(notes.indices[:2]).sort().values, torch.arange(128))
    (row,) = rows(out)
    losses = [s["value_loss"] for s in notes.statistics]
    assert row["value/loss"] == pytest.approx(sum(losses) / 4)


def test_nearest_state_and_its_message(run_dir):
    said: list[str] = []
    step_2 = run_dir / "checkpoints/step_000002"
    assert reexecution.nearest_start(run_dir, 3, said.append) == (2, step_2)
    assert said == [
        "checkpoint for update 3 is not stored; stored: 2, 4, 5; the nearest earlier one is used"
        " (2)"
    ]
    assert reexecution.nearest_start(run_dir, 1, said.append) == (0, None)
    assert said[1].endswith("is used (0, the beginning of the run)")
    assert reexecution.nearest_start(run_dir, 4, said.append)[0] == 4 and len(said) == 2
    with pytest.raises(ConfigError, match=r"update=6: .* has completed 5 updates; name one from 0"):
        reexecution.nearest_start(run_dir, 6)


def test_options_are_those_of_the_process_that_made_the_update(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, symlinks=True)
    ep.train(resume=copy, updates=7, algorithm__lr=1e-4, progress=False)
    assert [reexecution.options(copy, u).updates for u in (1, 5, 6, 7)] == [5, 5, 7, 7]
    reexecution.reexecute(copy, tmp_path / "out", start=5, stop=7)
    assert_same(contents(tmp_path / "out", 7), contents(copy, 7))


def test_branch_begins_at_its_parent(run_dir, tmp_path):
    ep.train(
        resume=run_dir / "checkpoints/step_000002", run_dir=tmp_path / "branch", progress=False
    )
    branch = tmp_path / "branch"
    assert json.loads((branch / "parent.json").read_text())["update"] == 2
    shutil.rmtree(branch / "checkpoints/step_000002")
    assert list(reexecution.starts(branch)) == [2, 4, 5]
    reexecution.reexecute(branch, tmp_path / "out", start=2, stop=4)
    assert_same(contents(tmp_path / "out", 4), contents(run_dir, 4))
    with pytest.raises(CheckpointError, match="no earlier one exists, name a later update"):
        reexecution.nearest_start(branch, 1)
    # A parent that was trained anew has other weights.
    parent = json.loads((branch / "parent.json").read_text())
    (branch / "parent.json").write_text(json.dumps(parent | {"policy_sha256": "0"}))
    assert list(reexecution.starts(branch)) == [4, 5]
    (branch / "parent.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"parent.json is damaged"):
        reexecution.starts(branch)


def test_rollouts_that_overlap_with_updates_are_refused(run_dir, tmp_path):
    (tmp_path / "run").mkdir()
    text = (run_dir / "config.yaml").read_text()
    text = text.replace("placement: local", "placement: disaggregated")
    (tmp_path / "run/config.yaml").write_text(text + "cluster:\n  max_lag: 1\n")
    with pytest.raises(
        ConfigError, match=r"cluster.max_lag = 1: .* only runs with cluster.max_lag"
    ):
        reexecution.reexecute(tmp_path / "run", tmp_path / "out", start=0, stop=1)
