"""Trackers beside TensorBoard, with recording trackers in place of the tools.

``tests/extras/test_trackers.py`` has the tools themselves (make test-trackers).
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_ppo import run
from embodied_ppo.commands import main
from embodied_ppo.core.types import ConfigError
from embodied_ppo.training import trackers
from embodied_ppo.training.trackers import Row, Status, TrackedRun, Trackers

TRAIN: dict[str, Any] = {
    "env.id": "toy_envs:Balance",
    "env.num_envs": 2,
    "env.max_episode_steps": 6,
    "algorithm.horizon": 4,
    "algorithm.global_batch_size": 8,
    "algorithm.update_epoch": 1,
    "evaluation.episodes": 2,
    "compile": "never",
    "device": "cpu",
    "updates": 3,
    "name": "balance",
}


class Recorder:
    """Keep what a tracker receives."""

    title = "wandb"

    def __init__(self, fails_at: str = "", next_step: int = 0) -> None:
        self.next_step = next_step
        self.identity: Mapping[str, str] = {"id": "42"}
        self.fails_at, self.calls, self.points = fails_at, list[Any](), list[tuple[int, str]]()
        self.run: TrackedRun | None = None

    def called(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self.fails_at:
            raise ConnectionResetError("the server is gone\n  Traceback ..")

    def start(self, run: TrackedRun) -> str:
        self.run = run
        self.called("start", run.name, run.project)
        return "in memory"

    def rows(self, rows: Sequence[Row]) -> None:
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

    def abandon(self) -> None:
        self.called("abandon")


def install(monkeypatch: pytest.MonkeyPatch, *recorders: Recorder) -> None:
    """Let the runs of a test use ``recorders``, one each."""
    waiting = list(recorders)
    monkeypatch.setattr(trackers, "TOOLS", {"wandb": lambda: waiting.pop(0)})
    monkeypatch.setattr(trackers, "check", lambda config: None)


def started(tmp_path: Path, say: Callable[[str], None], **options: Any) -> Trackers:
    config = run_helpers.tiny_config({**TRAIN, "trackers": ["wandb"], **options})
    return trackers.start(config, tmp_path, {}, say, resumed=False)


def train(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return run.train(
        run_helpers.tiny_config({**TRAIN, "run_dir": str(run_dir), **changes}), quiet=True
    )


def files(run_dir: Path) -> set[str]:
    return {
        str(file.relative_to(run_dir)).partition("events.out")[0]
        for file in run_dir.rglob("*")
        if file.is_file()
    }


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "speed/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


# --------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("fails_at", ["", "start", "rows", "summary"])
def test_training_does_not_depend_on_its_trackers(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(fails_at)
    install(monkeypatch, recorder)
    plain, tracked = tmp_path / "plain", tmp_path / "tracked"
    train(plain)
    summary = train(tracked, trackers=["wandb"], tracker_project="robots", tracker_run_name="one")
    assert untimed(tracked) == untimed(plain)
    added = {"trackers.json"} if fails_at != "start" else set()
    assert files(tracked) == files(plain) | added
    for name in ("policy.pt", "training.pt"):
        file = Path("checkpoints/step_000003") / name
        old, new = (torch.load(folder / file, weights_only=True) for folder in (plain, tracked))
        assert str(old) == str(new)  # tensors are few
    assert summary["config_hash"] == json.loads((plain / "summary.json").read_text())["config_hash"]

    assert recorder.calls[0] == ("start", "one", "robots")
    log = (tracked / "log.txt").read_text()
    off = "warning: wandb is off: ConnectionResetError: the server is gone; the files of the run"
    assert (off in log) == bool(fails_at) and ("wandb: in memory" in log) == (fails_at != "start")
    if fails_at:
        assert [call[0] for call in recorder.calls[-2:]] == [fails_at, "abandon"]
        return
    expected = [
        (row["env_steps"], tag)
        for row in map(json.loads, (tracked / "metrics.jsonl").read_text().splitlines())
        for tag, value in row.items()
        if "/" in tag and value is not None
    ]
    assert recorder.points == expected
    assert recorder.calls[-1] == ("finish", "finished")
    name, values, steps = next(call for call in recorder.calls if call[0] == "summary")
    assert (values["final_return"], steps) == (summary["final_return"], 24)
    assert recorder.run is not None and recorder.run.options["algorithm.horizon"] == 4


def test_resumed_run_passes_its_identity_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, branch = Recorder(), Recorder(next_step=25), Recorder()
    install(monkeypatch, first, second, branch)
    train(tmp_path / "run", trackers=["wandb"])
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == {"wandb": {"id": "42"}}
    more = {"trackers": ["wandb"], "updates": 4, "resume": str(tmp_path / "run")}
    run.train(run_helpers.tiny_config({**TRAIN, **more}), quiet=True)
    assert first.run is not None and first.run.stored == {}
    assert second.run is not None and second.run.stored == {"id": "42"}
    assert second.run.name == "balance/run" == first.run.name
    assert {steps for steps, _ in second.points} == {32}
    train(tmp_path / "branch", **{**more, "updates": 5})
    assert branch.run is not None and branch.run.stored == {}


def test_failed_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    install(monkeypatch, recorder)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("embodied_ppo.training.loop.train", fail)
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path / "run", trackers=["wandb"])
    assert recorder.calls[-1] == ("finish", "failed")


# ----------------------------------------------------------------------------------------- a worker
def test_repeated_rows_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a rebuild from an older checkpoint."""
    recorder, lines = Recorder(next_step=8), list[str]()
    install(monkeypatch, recorder)
    tools = started(tmp_path, lines.append)
    for steps in (0, 8, 16, 8, 16, 24):
        tools.metrics({"policy/loss": 1.0}, steps=steps)
    tools.table("samples", [{"a": 1}], steps=24)
    tools.close("interrupted")
    assert [steps for steps, _ in recorder.points] == [8, 16, 24]
    names = [call[0] for call in recorder.calls]
    assert names == ["start", "rows", "table", "finish"]  # the rows were sent together
    assert recorder.calls[-1] == ("finish", "interrupted") and lines == ["wandb: in memory"]


@pytest.mark.parametrize("starts", [False, True])
def test_tool_that_does_not_answer(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Slow(Recorder):
        def start(self, run: TrackedRun) -> str:
            return "" if starts else str(released.wait())

        def rows(self, rows: Sequence[Row]) -> None:
            released.wait()

    lines = list[str]()
    install(monkeypatch, Slow())
    for name, value in (("START_S", 0.1), ("CLOSE_S", 0.2), ("BATCH_S", 0.0), ("MAX_PENDING", 5)):
        monkeypatch.setattr(trackers, name, value)
    before = time.monotonic()
    tools = started(tmp_path, lines.append)
    tools.metrics({"policy/loss": 1.0}, steps=1)
    tools.close("finished")
    assert time.monotonic() - before < 5
    limit = 0.2 if starts else 0.1
    assert f"wandb is off: does not answer for {limit} s at the end of the run" in lines[-1]

    install(monkeypatch, Slow())
    tools = started(tmp_path, lines.append)
    for steps in range(20):
        tools.metrics({"policy/loss": 1.0}, steps=steps)
    assert lines[-1].startswith("warning: wandb is off: does not answer, 5 updates wait for it")
    released.set()


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    tools = trackers.start(run_helpers.tiny_config(), tmp_path, {}, print, resumed=False)
    tools.metrics({"policy/loss": 1.0}, steps=1)
    tools.close("finished")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------- before the run
def available(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules be installed, and no others."""

    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=f"{name}.py") if name in modules else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("tool", "installed", "variables", "message"),
    [
        ("wandb", "", {}, "[wandb]: wandb not installed; pip install wandb, or leave wandb out"),
        ("wandb", "wandb", {"WANDB_MODE": "offline"}, ""),
        ("wandb", "wandb", {"WANDB_API_KEY": "0" * 40}, ""),
        ("mlflow", "mlflow", {}, "sqlalchemy and alembic not installed; pip install sqlalchemy al"),
        ("mlflow", "mlflow", {"MLFLOW_TRACKING_URI": "http://localhost:5000"}, ""),
        ("mlflow", "mlflow sqlalchemy alembic", {}, ""),
        (
            "mlflow",
            "mlflow sqlalchemy alembic",
            {"MLFLOW_TRACKING_URI": "./mlruns"},
            "./mlruns: MLflow writes no runs into folders any more; write MLFLOW_TRACKING_URI=sq",
        ),
        (
            "mlflow",
            "mlflow sqlalchemy alembic",
            {"MLFLOW_TRACKING_URI": "mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
            "",
        ),
    ],
)
def test_check(
    tool: str,
    installed: str,
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available(monkeypatch, *installed.split())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = run_helpers.tiny_config({"trackers": [tool]})
    if not message:
        return trackers.check(config)
    with pytest.raises(ConfigError) as error:
        trackers.check(config)
    assert message in str(error.value)


def test_key_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, "wandb")
    file = tmp_path / "netrc"
    file.write_text("machine my.server.example\n  login user\n  password 0123\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.setenv("WANDB_BASE_URL", "https://my.server.example:8080")
    trackers.check(run_helpers.tiny_config({"trackers": ["wandb"]}))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_package_is_refused_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
