"""Trackers beside TensorBoard, with recording trackers in place of the tools.

``tests/extras/test_trackers.py`` has the tools themselves (make test-trackers).
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_ppo.commands import main
from embodied_ppo.training import trackers
from embodied_ppo.training.trackers import MetricsRow, Status, TrackedRun, Trackers

TRAIN = run_helpers.options("""env.id=toy_envs:Balance env.num_envs=2 env.max_episode_steps=6
    algorithm.horizon=4 algorithm.global_batch_size=8 algorithm.update_epoch=1 evaluation.episodes=2
    compile=never device=cpu updates=3 name=balance""")


class Recorder:
    """Keep what a tracker receives."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.calls, self.points = fails_at, list[Any](), list[tuple[int, str]]()
        self.run: TrackedRun | None = None

    def called(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self.fails_at:
            raise ConnectionResetError("the server is gone\n  Traceback ..")

    def start(self, run: TrackedRun) -> tuple[str, str]:
        self.run = run
        self.called("start", run.name)
        return "in memory", "42"

    def rows(self, rows: Sequence[MetricsRow]) -> None:
        self.points += [(row.steps, tag) for row in rows for tag in row.values]
        self.called("rows")

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        self.called("table", tag, steps)

    def video(self, tag: str, path: Path, steps: int) -> None:
        self.called("video", tag, steps)

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        self.called("summary", values, steps)

    def finish(self, status: Status) -> None:
        self.called("finish", status)


def install(monkeypatch: pytest.MonkeyPatch, *recorders: Recorder) -> None:
    """Let the runs of a test use ``recorders``, one each."""
    waiting = list(recorders)
    monkeypatch.setattr(trackers, "TOOLS", {"wandb": lambda: waiting.pop(0)})
    monkeypatch.setattr(trackers, "check", lambda config: None)


def started(tmp_path: Path, say: Callable[[str], None], **options: Any) -> Trackers:
    config = run_helpers.tiny_config({**TRAIN, "trackers": ["wandb"], **options})
    return trackers.start(config, tmp_path, {}, say, resumed=False)


def train(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return run_helpers.train(run_dir, {**TRAIN, **changes})


def files(run_dir: Path) -> set[str]:
    files = [file.relative_to(run_dir) for file in run_dir.rglob("*") if file.is_file()]
    return {str(file).partition("events.out")[0] for file in files}


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    rows = run_helpers.metric_rows(run_dir)
    timed = ("time/", "speed/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


# --------------------------------------------------------------------------------------------- runs
@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["", "rows"])
def test_training_does_not_depend_on_its_trackers(fails_at: str, tmp_path, monkeypatch) -> None:
    recorder = Recorder(fails_at)
    install(monkeypatch, recorder)
    plain, tracked = tmp_path / "plain", tmp_path / "tracked"
    train(plain)
    summary = train(tracked, trackers=["wandb"])
    assert untimed(tracked) == untimed(plain)
    added = {"trackers.json"} if fails_at != "start" else set()
    assert files(tracked) == files(plain) | added
    for name in ("policy.pt", "training.pt"):
        file = Path("checkpoints/step_000003") / name
        old, new = (torch.load(folder / file, weights_only=True) for folder in (plain, tracked))
        assert str(old) == str(new)  # tensors are few
    assert summary["config_hash"] == json.loads((plain / "summary.json").read_text())["config_hash"]

    assert recorder.calls[0] == ("start", f"balance/{tracked.name}")
    log = (tracked / "log.txt").read_text()
    off = "warning: wandb is off: ConnectionResetError: the server is gone; the files of the run"
    assert (off in log) == bool(fails_at) and ("wandb: in memory" in log) == (fails_at != "start")
    if fails_at:
        assert recorder.calls[-2:] == [(fails_at,), ("finish", "failed")]
        return
    expected = [
        (row["env_steps"], tag)
        for row in run_helpers.metric_rows(tracked)
        for tag, value in row.items()
        if "/" in tag and value is not None
    ]
    assert recorder.points == expected
    assert recorder.calls[-1] == ("finish", "finished")
    name, values, steps = next(call for call in recorder.calls if call[0] == "summary")
    assert (values["final_return"], steps) == (summary["final_return"], 24)
    assert recorder.run is not None and recorder.run.options["algorithm.horizon"] == 4


def test_resumed_run_passes_its_identity_on(tmp_path, monkeypatch) -> None:
    first, second, branch = Recorder(), Recorder(), Recorder()
    install(monkeypatch, first, second, branch)
    train(tmp_path / "run", trackers=["wandb"])
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == {"wandb": {"id": "42"}}
    more = {"trackers": ["wandb"], "updates": 4, "resume": str(tmp_path / "run")}
    train(tmp_path / "run", **more)
    assert first.run is not None and first.run.id is None
    assert second.run is not None and second.run.id == "42"
    assert second.run.name == "balance/run" == first.run.name
    assert {steps for steps, _ in second.points} == {32}
    train(tmp_path / "branch", **{**more, "updates": 5})
    assert branch.run is not None and branch.run.id is None


def test_failed_run_is_reported(tmp_path, monkeypatch) -> None:
    recorder = Recorder()
    install(monkeypatch, recorder)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("embodied_ppo.training.loop.train", fail)
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path / "run", trackers=["wandb"])
    assert recorder.calls[-1] == ("finish", "failed")


# ----------------------------------------------------------------------------------------- a worker
def test_calls_arrive_in_order(tmp_path, monkeypatch) -> None:
    recorder, lines = Recorder(), list[str]()
    install(monkeypatch, recorder)
    tools = started(tmp_path, lines.append)
    for steps in (0, 8, 16):
        tools.metrics({"policy/loss": 1.0}, steps=steps)
    tools.table("samples", [{"a": 1}], steps=16)
    tools.metrics({"policy/loss": 1.0}, steps=24)
    tools.close("interrupted")
    assert [steps for steps, _ in recorder.points] == [0, 8, 16, 24]
    names = list(dict.fromkeys(call[0] for call in recorder.calls))
    assert names == ["start", "rows", "table", "finish"] and recorder.calls[-2] == ("rows",)
    assert recorder.calls[-1] == ("finish", "interrupted") and lines == ["wandb: in memory"]


@pytest.mark.parametrize("starts", [False, True])
def test_tool_that_does_not_answer(starts: bool, tmp_path, monkeypatch) -> None:
    released = threading.Event()

    class Slow(Recorder):
        def start(self, run: TrackedRun) -> tuple[str, str]:
            return ("", "") if starts else (str(released.wait()), "")

        def rows(self, rows: Sequence[MetricsRow]) -> None:
            released.wait()

    lines = list[str]()
    install(monkeypatch, Slow())
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    monkeypatch.setattr(trackers, "MAX_PENDING", 5)
    before = time.monotonic()
    tools = started(tmp_path, lines.append)
    tools.metrics({"policy/loss": 1.0}, steps=1)
    tools.close("finished")
    assert time.monotonic() - before < 5
    assert "wandb is off: does not answer for 0.2 s at the end of the run" in lines[-1]

    install(monkeypatch, Slow())
    tools = started(tmp_path, lines.append)
    for steps in range(20):
        tools.metrics({"policy/loss": 1.0}, steps=steps)
    assert lines[-1].startswith("warning: wandb is off: does not answer, 5 updates wait for it")
    released.set()


def test_without_trackers_nothing_is_written(tmp_path) -> None:
    tools = trackers.start(run_helpers.tiny_config(), tmp_path, {}, print, resumed=False)
    tools.metrics({"policy/loss": 1.0}, steps=1)
    tools.close("finished")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------- before the run
@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_package_is_refused_before_torch_is_loaded(tmp_path, monkeypatch, capsys) -> None:
    """The folder wandb/ of offline runs is not the package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("train", "clone"):
        assert main.main([command, "trackers=[wandb]", f"run_dir={tmp_path / 'run'}"]) == 2
        assert capsys.readouterr().err == (
            "error: trackers = [wandb]: wandb not installed; pip install wandb, or leave wandb"
            " out\n"
        )
    assert not (tmp_path / "run").exists()
