"""Log files: rows, TensorBoard points, resumed logs, console output, documented tags."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from run_helpers import metric_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from embodied_ppo.core.types import Mean, Metrics
from embodied_ppo.training.logging import Log

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ESCAPE = "\x1b"

SPEED = "speed/env_steps_per_s"
LANGUAGE_ONLY = {"samples", "speed/tokens_per_s"}
LANGUAGE_ONLY |= {
    f"rollout/{x}" for x in ("truncated", "format", "prompt_length", "grader_failures", "epoch")
}
LANGUAGE_ONLY |= {
    f"eval/{x}" for x in ("accuracy", "accuracy_error", "accuracy/<source>", "pass@<k>", "maj@<n>")
}
LANGUAGE_ONLY |= {f"eval/{x}" for x in ("truncated", "format", "grader_failures", "reward/<name>")}
# Documented tags that mode=reasoning alone writes: test_reasoner compares them.
LANGUAGE_ONLY |= {"reward/<name>", "policy/positive_nll"}


def board(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "images": 0}).Reload()


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = board(run_dir / "tensorboard")
    return {t: [(e.step, e.value) for e in events.Scalars(t)] for t in events.Tags()["scalars"]}


def training(update: int, **more: Any) -> Metrics:
    """Return the metrics of an update as the loop reports them."""
    return {SPEED: 1000.0 * update, "policy/loss": Mean(float(update), 3.0), **more}


def write(
    run_dir: Path, updates: range, *, completed_updates: int = 0, total: int = 10, **options: Any
) -> None:
    log = Log(
        run_dir, total_updates=total, completed_updates=completed_updates, quiet=True, **options
    )
    for update in updates:
        log.metrics(training(update), update=update, steps=64 * update)
    log.close()


# ---------------------------------------------------------------------------------- rows and points
def test_rows_equal_tensorboard_points(tmp_path):
    log = Log(tmp_path, total_updates=3, quiet=True)
    log.metrics({"eval/return": Mean.of([1.0, 2.0])}, update=0, steps=0)
    for update in (1, 2, 3):
        result = Mean(0.1 * update, 3.0) if update > 1 else math.nan
        row = training(update, **{"rollout/return": result})
        log.metrics(row, update=update, steps=64 * update)
    log.close()
    log_rows = metric_rows(tmp_path)
    assert [(r["update"], r["env_steps"]) for r in log_rows] == [(i, 64 * i) for i in range(4)]
    assert log_rows[0] == {"update": 0, "env_steps": 0, "eval/return": 1.5}
    assert log_rows[1]["rollout/return"] is None
    assert log_rows[2]["rollout/return"] == pytest.approx(0.2 / 3)
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in log_rows:
        for tag, value in row.items():
            if "/" in tag and value is not None:
                expected.setdefault(tag, []).append((row["env_steps"], value))
    points = scalars(tmp_path)
    assert points.keys() == expected.keys()
    for tag, series in expected.items():
        assert [p[0] for p in points[tag]] == [p[0] for p in series]
        # float32
        assert [p[1] for p in points[tag]] == pytest.approx([p[1] for p in series], rel=1e-6)


def test_run_resumed_within_a_second_keeps_its_points(tmp_path, monkeypatch):
    """TensorBoard reads files in the order of their names, where file 10 precedes file 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    while time.time() % 1 > 0.5:
        time.sleep(0.02)
    write(tmp_path, range(1, 4))
    write(tmp_path, range(4, 6), completed_updates=3)
    assert [step for step, _ in scalars(tmp_path)["policy/loss"]] == [64, 128, 192, 256, 320]


# ------------------------------------------------------------------------------------------ resumed
@pytest.mark.slow
def test_resumed_log_drops_rows_after_checkpoint(tmp_path):
    write(tmp_path, range(1, 8))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"update": 8, "env_st')  # killed while writing
    time.sleep(1.1)  # event files are named by the second
    log = Log(tmp_path, total_updates=10, completed_updates=4, quiet=True)
    assert [r["update"] for r in metric_rows(tmp_path)] == [1, 2, 3, 4]
    for update in (5, 6):
        log.metrics({SPEED: -1.0}, update=update, steps=64 * update)
    log.close()
    assert [r["update"] for r in metric_rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    # in TensorBoard, too: points up to the checkpoint stay, later ones are replaced
    speeds = [(64.0 * u, 1000.0 * u) for u in (1, 2, 3, 4)]
    assert scalars(tmp_path)[SPEED] == [*speeds, (320, -1.0), (384, -1.0)]
    assert [step for step, _ in scalars(tmp_path)["policy/loss"]] == [64, 128, 192, 256]


def test_damaged_rows_are_left_out(tmp_path):
    """Rows 2 and 4 are damaged; the last line is incomplete, as after a kill."""
    write(tmp_path, range(1, 8))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    lines[1], lines[3], lines[5] = b'{"update": 2, "env', lines[3] + b"\xff}", b"[6]"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:-1], lines[-1][:20]]))
    write(tmp_path, range(6, 7), completed_updates=5)
    assert [r["update"] for r in metric_rows(tmp_path)] == [1, 3, 5, 6]


@pytest.mark.slow
def test_new_run_drops_rows_of_run_without_checkpoint(tmp_path):
    write(tmp_path, range(0, 4))
    time.sleep(1.1)
    write(tmp_path, range(1, 2))
    assert [r["update"] for r in metric_rows(tmp_path)] == [1]
    assert scalars(tmp_path)[SPEED] == [(64, 1000.0)]


# ------------------------------------------------------------------------------------------ console
def test_progress_lines_without_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("embodied_ppo.training.logging.LINE_EVERY_S", 0.0)
    log = Log(tmp_path, total_updates=3)
    log.say("hello [bold]you[/bold]")
    log.metrics({"eval/return": 1.25}, update=0, steps=0)
    log.metrics(training(1), update=1, steps=64)
    log.metrics(training(2, **{"rollout/return": Mean(7.0, 2.0)}), update=2, steps=128)
    log.metrics(training(3, **{"rollout/return": Mean(9.0, 2.0)}), update=3, steps=192)
    log.metrics({"eval/return": 99.0}, update=3, steps=192)  # the last evaluation is no progress
    log.close()
    out, err = capsys.readouterr()
    assert out == "" and ESCAPE not in err and "nan" not in err
    hello, *lines = err.splitlines()
    assert hello == "hello [bold]you[/bold]"
    clock = r"\d+:\d\d:\d\d left"
    expected = [
        rf"update 1/3  return -  evaluation 1\.2 \(at 0\)  1,000 steps/s  {clock}",
        rf"update 2/3  return 3\.5  evaluation 1\.2 \(at 0\)  2,000 steps/s  {clock}",
        r"update 3/3  return 4\.5  evaluation 1\.2 \(at 0\)  3,000 steps/s  0:00:00 left",
    ]
    assert len(lines) == 3 and all(
        re.fullmatch(e, line) for e, line in zip(expected, lines, strict=True)
    ), err
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    log_text = (tmp_path / "log.txt").read_text()
    assert re.fullmatch(rf"{stamp}:\d\d hello \[bold\]you\[/bold\]\n", log_text)


# ---------------------------------------------------------------------------------------- every tag
ALL_ON: dict[str, Any] = {
    **run_helpers.options(
        "env.id=toy_envs:toy_envs/Point-v0 env.num_threads=0 eval_every=1 save_every=1 updates=3"
        " name=all"
    ),
    **run_helpers.options(
        "algorithm.clip_ratio_c=1.2 algorithm.entropy_bonus=0.01 algorithm.entropy_target=1.0"
        " algorithm.use_kl_in_reward=true algorithm.use_kl_loss=true algorithm.horizon=16"
        " algorithm.off_policy_correction=token evaluation.episodes=32 evaluation.num_envs=32"
    ),
}


def documented() -> dict[str, list[str]]:
    """Return tag -> unit, meaning and healthy range from docs/metrics.md."""
    table = re.findall(r"^\| `([^`]+)` \| (.+) \|$", DOCS.read_text(), flags=re.M)
    return {tag: [cell.strip() for cell in re.split(r"(?<!\\)\|", cells)] for tag, cells in table}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "all"
    run_helpers.train(path, ALL_ON)
    return path


def test_tags_equal_documentation(run_dir):
    written = {tag for row in metric_rows(run_dir) for tag in row} - {"update", "env_steps"}
    events = board(run_dir / "tensorboard")
    written |= set(events.Tags()["scalars"])
    assert {"env/near", "env/near/episode_sum"} <= written
    written = {re.sub(r"^env/.*?(/episode_sum)?$", r"env/<name>\1", tag) for tag in written}
    elsewhere = {
        "rollout/unstable",
        "rollout/diverged",
        "eval/diverged",
        "rollout/terrain_level",
        "eval/success/<kind>",
        *("rollout/return/<task>", "rollout/success/<task>", "eval/return/<task>"),
    }  # our own engines write it
    elsewhere |= {"rollout/diverged", "eval/diverged"}  # test_divergence
    elsewhere |= {f"rollout/{x}" for x in ("filter_rounds", "groups_dropped", "groups_missing")}
    # test_group_filter
    elsewhere |= {"advantage/share/<group>", "value/explained_variance/<group>"}
    # test_group_advantages
    elsewhere |= {"value/warmup"}  # test_language_actor
    elsewhere |= {"curiosity/reward", "curiosity/loss"}  # test_curiosity
    elsewhere |= {"eval/error_<command>"}  # test_episodes
    elsewhere |= {"policy/symmetry_error"}  # test_symmetry
    elsewhere |= {f"distill/{x}" for x in ("loss", "action_error", "teacher_share")}
    # test_distillation
    elsewhere |= {"memory/<roles>_peak_gb", "memory/<roles>_gpu_peak_gb"}  # test_placements
    elsewhere |= {"time/swap_s", "weights/moved_mb", "device/idle", "device/idle_max"}
    elsewhere |= {"time/wait_for_rollout_s"}  # test_pipelined_system
    assert sorted(set(documented()) - LANGUAGE_ONLY) == sorted(written | elsewhere)
    assert all(len(cells) == 3 and all(cells) for cells in documented().values())


def test_metrics_change_during_training(run_dir):
    """All metrics that can change in this run have changed, and none is at a bound."""
    log_rows = [row for row in metric_rows(run_dir) if SPEED in row]
    assert len(log_rows) == 3
    # As they must be here.
    constant = {"rollout/version_lag": 0, "policy/epochs": 3, "advantage/zero_fraction": 0}
    constant |= {"policy/lr": 3e-3, "value/lr": 3e-3, "kl/coef": 0.001}
    constant |= {"memory/peak_gb": log_rows[0]["memory/peak_gb"]}
    # The policy that acts is the one that learns.
    constant |= {f"policy/off_policy_weight{x}": 1 for x in ("", "_5", "_95")}
    constant |= {"policy/off_policy_capped": 0}
    for tag in {tag for row in log_rows for tag in row} - {"update", "env_steps"}:
        values = [row[tag] for row in log_rows if row.get(tag) is not None]
        if tag in constant:
            assert values == pytest.approx([constant[tag]] * 3, rel=0.1), tag
        else:
            assert any(v not in (0, 1) for v in values), tag
            assert len(set(values)) > 1, tag
    for tag in ("policy/clip_fraction", "policy/dual_clip_fraction", "value/clip_fraction"):
        assert 0 < sum(row[tag] for row in log_rows) < 3, tag
    assert log_rows[-1]["policy/ratio_max"] > 1 and log_rows[-1]["value/explained_variance"] < 1
    assert log_rows[-1][SPEED] == pytest.approx(
        64 / sum(log_rows[-1][f"time/{p}_s"] for p in ("collect", "update", "publish"))
    )
    assert 0.1 < log_rows[-1]["memory/peak_gb"] < 100


def test_summary_equals_rows(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    last = metric_rows(run_dir)[-1]
    assert summary["final_return"] == last["eval/return"]
    assert summary["env_steps"] == last["env_steps"] == 192
    assert summary["initial_return"] == metric_rows(run_dir)[0]["eval/return"]
