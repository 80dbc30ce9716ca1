"""Runs with Weights & Biases offline and MLflow in SQLite, read back from their stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import run_helpers
import wandb
from mlflow import MlflowClient
from wandb.proto import wandb_internal_pb2

from embodied_ppo.training import trackers
from embodied_ppo.training.logging import Log

TRAIN = run_helpers.options("""env.id=toy_envs:Balance env.num_envs=2 env.max_episode_steps=6
    algorithm.horizon=4 algorithm.global_batch_size=8 algorithm.update_epoch=1
    evaluation.episodes=2 compile=never device=cpu updates=3 name=balance""")
BOTH = {"trackers": ["wandb", "mlflow"]}
Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts into mlruns/ of the current folder
    yield
    wandb.teardown()  # it reads its variables once


def train(run_dir: Path, **changes: Any) -> Path:
    run_helpers.train(run_dir, {**TRAIN, **BOTH, **changes})
    return run_dir


# -------------------------------------------------------------------------------------- read stores
def points(run_dir: Path) -> Points:
    """Return tag -> [(step, value)] of metrics.jsonl, without empty values."""
    result: Points = {}
    for row in run_helpers.metric_rows(run_dir):
        for tag, value in row.items():
            if tag not in ("update", "env_steps") and value is not None:
                result.setdefault(tag, []).append((row["env_steps"], value))
    return result


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a LevelDB log behind a header of 7 bytes."""
    (file,) = folder.glob("*.wandb")
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        if left < 7 or kind == 0:  # the end of a block is empty
            position += left
            continue
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or its last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def items(update: Any) -> dict[str, Any]:
    """Return the entries of a wandb message; nested ones have a path."""
    return {e.key or "/".join(e.nested_key): json.loads(e.value_json) for e in update}


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def wandb_points(folder: Path) -> Points:
    result: Points = {}
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            entries = items(record.history.item)
            for tag, value in entries.items():
                if not tag.startswith("_"):
                    result.setdefault(tag, []).append((entries["_step"], value))
    return result


def mlflow_points(client: MlflowClient, id: str) -> Points:
    return {
        tag: sorted((point.step, point.value) for point in client.get_metric_history(id, tag))
        for tag in client.get_run(id).data.metrics
    }


# --------------------------------------------------------------------------------------------- runs
def test_both_tools_store_tags_options_and_summary(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "robots")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "robots")
    monkeypatch.setenv("WANDB_NAME", "first")
    run_dir = train(tmp_path / "run")
    expected, summary = points(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert {"eval/return", "policy/loss", "speed/env_steps_per_s"} <= expected.keys()
    ids = json.loads((run_dir / trackers.FILE).read_text())

    (folder,) = offline_runs(tmp_path)
    assert wandb_points(folder) == expected
    by_kind = {record.WhichOneof("record_type"): record for record in records(folder)}
    started = by_kind["run"].run
    wanted = ("robots", "first", "balance")
    assert (started.project, started.display_name, started.run_group) == wanted
    assert started.run_id == ids["wandb"]["id"] and by_kind["exit"].exit.exit_code == 0
    options = items(started.config.update)
    assert options["algorithm.horizon"] == 4 and options["env.id"] == "toy_envs:Balance"
    results = {k: v for r in records(folder) for k, v in items(r.summary.update).items()}
    assert results["final_return"] == summary["final_return"]

    client, id = MlflowClient(), ids["mlflow"]["id"]
    stored, data = client.get_run(id).info, client.get_run(id).data
    assert stored.status == "FINISHED"
    assert client.get_experiment(stored.experiment_id).name == "robots"
    measured = mlflow_points(client, id)
    assert {tag: series for tag, series in measured.items() if "/" in tag} == expected
    assert measured["final_return"] == [(summary["env_steps"], summary["final_return"])]
    assert data.tags["run_dir"] == str(run_dir) and data.params["algorithm.horizon"] == "4"


def test_resumed_run_continues_the_tracked_runs(tmp_path) -> None:
    run_dir = train(tmp_path / "run", save_every=2)
    (run_dir / "summary.json").unlink()  # as after a loss of power
    (run_dir / "checkpoints" / "step_000003").rename(tmp_path / "lost")
    for link in ("latest", "best"):
        (run_dir / "checkpoints" / link).unlink(missing_ok=True)
    ids = json.loads((run_dir / trackers.FILE).read_text())
    train(run_dir, resume=str(run_dir), updates=4)
    assert json.loads((run_dir / trackers.FILE).read_text()) == ids
    expected = points(run_dir)

    first, second = offline_runs(tmp_path)
    started = next(r.run for r in records(second) if r.WhichOneof("record_type") == "run")
    assert started.run_id == ids["wandb"]["id"]
    assert [step for step, _ in wandb_points(second)["policy/loss"]] == [24, 32]
    assert [step for step, _ in wandb_points(first)["policy/loss"]] == [8, 16, 24]

    client, id = MlflowClient(), ids["mlflow"]["id"]
    measured = mlflow_points(client, id)
    # Update 3 was stored twice, with one value.
    assert sorted({*measured["policy/loss"]}) == expected["policy/loss"]
    assert client.get_run(id).data.params["updates"] == "3"
    assert client.get_run(id).info.status == "FINISHED"


def test_names_tables_and_videos(tmp_path) -> None:
    config = run_helpers.tiny_config({**TRAIN, **BOTH})
    lines: list[str] = []
    started = trackers.start(config, tmp_path, {"a,b": {}}, lines.append, resumed=False)
    log = Log(tmp_path, total_updates=1, quiet=True)
    log.trackers = started
    log.metrics({"eval/pass@4": 0.5, "memory/env+actor_peak_gb": 1.0}, update=0, steps=0)
    table = [
        {"prompt": "1+1", "score": 1.0, "extra": None},
        {"prompt": "x", "score": 0, "extra": 2},
    ]
    log.table("samples", table, steps=0)
    imageio.imwrite(tmp_path / "video.mp4", np.zeros((4, 48, 64, 3), np.uint8), fps=20)
    log.trackers.video("evaluation", tmp_path / "video.mp4", steps=0)
    log.close("interrupted")
    assert [line.partition(":")[0] for line in sorted(lines)] == ["mlflow", "wandb"]
    client = MlflowClient()
    id = json.loads((tmp_path / trackers.FILE).read_text())["mlflow"]["id"]
    data = client.get_run(id).data
    assert data.metrics == {"eval/pass_4": 0.5, "memory/env_actor_peak_gb": 1.0}
    assert data.params == {"a_b": "{}"} and client.get_run(id).info.status == "KILLED"
    assert client.list_artifacts(id, "samples")[0].path == "samples/step_000000000000.json"
    (video,) = client.list_artifacts(id, "evaluation/step_000000000000")
    assert video.path.endswith("/video.mp4")
    (folder,) = offline_runs(tmp_path)
    entries = {k: v for r in records(folder) for k, v in items(r.history.item).items()}
    assert entries["eval/pass@4"] == 0.5 and entries["samples/_type"] == "table-file"
    assert entries["evaluation/_type"] == "video-file"
