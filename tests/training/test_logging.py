"""Log files: rows, TensorBoard points, resumed logs, console output, documented tags."""

from __future__ import annotations

import contextlib
import errno
import html
import io
import json
import math
import os
import pty
import re
import struct
import threading
import time
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import run_helpers
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from embodied_ppo import run
from embodied_ppo.core.types import Mean, Metrics
from embodied_ppo.training.logging import Log, Timer, peak_rss_mb

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ESCAPE = "\x1b"

SPEED = "speed/env_steps_per_s"
LANGUAGE_ONLY = {"samples", "hparam/cpu_us_per_token", "speed/tokens_per_s"}
LANGUAGE_ONLY |= {
    f"rollout/{x}" for x in ("truncated", "format", "prompt_length", "grader_failures", "epoch")
}
LANGUAGE_ONLY |= {
    f"eval/{x}" for x in ("accuracy", "accuracy_error", "accuracy/<source>", "pass@<k>", "maj@<n>")
}
LANGUAGE_ONLY |= {f"eval/{x}" for x in ("truncated", "format", "grader_failures")}
"""Documented tags that mode=reasoning alone writes: test_reasoner compares them."""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def board(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "images": 0}).Reload()


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = board(run_dir / "tensorboard")
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


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
        result = (
            {"rollout/return": Mean(0.1 * update, 3.0)}
            if update > 1
            else {"rollout/return": math.nan}
        )
        log.metrics(training(update, **result), update=update, steps=64 * update)
    log.close()
    log_rows = rows(tmp_path)
    assert [(r["update"], r["env_steps"]) for r in log_rows] == [
        (0, 0),
        (1, 64),
        (2, 128),
        (3, 192),
    ]
    assert log_rows[0] == {"update": 0, "env_steps": 0, "eval/return": 1.5}
    assert log_rows[1]["rollout/return"] is None and log_rows[2]["rollout/return"] == pytest.approx(
        0.2 / 3
    )
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in log_rows:
        for tag, value in row.items():
            if "/" in tag and value is not None:
                expected.setdefault(tag, []).append((row["env_steps"], value))
    points = scalars(tmp_path)
    assert points.keys() == expected.keys()
    for tag, series in expected.items():
        assert [p[0] for p in points[tag]] == [p[0] for p in series]
        assert [p[1] for p in points[tag]] == pytest.approx(
            [p[1] for p in series], rel=1e-6
        )  # float32


def test_hyper_parameters(tmp_path):
    log = Log(tmp_path, total_updates=1, quiet=True)
    options = {
        "algorithm.lr": 3e-4,
        "env.id": "X-v0",
        "env.success_key": None,
        "model.hidden": [64, 64],
        "seed": 1,
    }
    log.hyper_parameters(options, {"hparam/final_return": 12.5})
    log.close()
    events = board(tmp_path / "tensorboard" / "hparams")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    reported = parse_session_start_info_plugin_data(content).hparams
    assert {name: value.WhichOneof("kind") for name, value in reported.items()} == {
        "algorithm.lr": "number_value",
        "env.id": "string_value",
        "env.success_key": "string_value",
        "model.hidden": "string_value",
        "seed": "number_value",
    }
    assert (
        reported["algorithm.lr"].number_value == 3e-4
        and reported["model.hidden"].string_value == "[64, 64]"
    )
    assert [e.value for e in events.Scalars("hparam/final_return")] == [12.5]


def test_video(tmp_path):
    frames = np.zeros((20, 48, 64, 3), np.uint8)
    for t in range(20):
        frames[t, :, : 3 * t] = 255  # a bar that grows
    imageio.imwrite(tmp_path / "video.mp4", frames, fps=20)
    log = Log(tmp_path, total_updates=1, quiet=True)
    log.video("evaluation", tmp_path / "video.mp4", steps=640)
    log.close()
    (image,) = board(tmp_path / "tensorboard").Images("evaluation")
    assert (image.step, image.height, image.width) == (640, 48, 64)
    assert image.encoded_image_string.startswith(b"GIF89a")
    played = imageio.imread(io.BytesIO(image.encoded_image_string), extension=".gif")
    assert played.shape == (10, 48, 64, 3)
    growth = [frame.mean() for frame in played]
    assert growth == sorted(growth) and growth[-1] > growth[0] + 50


def test_table(tmp_path):
    """TensorBoard shows the text of the model without changes."""
    wild = "12*6=<<12*6=72>>72 | a_b_c \\\\(x\\\\) `y` <think>\r\n# so\n\n| 3 |"
    log = Log(tmp_path, total_updates=1, quiet=True)
    log.table(
        "samples",
        [{"the_response": wild, "score": 0.5}, {"the_response": "x" * 500, "score": 1}],
        steps=640,
    )
    log.close()
    (event,) = board(tmp_path / "tensorboard").Tensors("samples/text_summary")
    assert event.step == 640
    page = markdown_to_safe_html(event.tensor_proto.string_val[0].decode())
    cells = [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", page)]
    assert page.count("<tr>") == 3 and cells[:2] == ["the_response", "score"]
    assert cells[2].split("<br>") == wild.splitlines() and cells[3] == "0.5"
    assert cells[4:] == ["x" * 399 + "…", "1"]


# ------------------------------------------------------------------------------------------ resumed
@pytest.mark.slow
def test_resumed_log_drops_rows_after_checkpoint(tmp_path):
    write(tmp_path, range(1, 8))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"update": 8, "env_st')  # killed while writing
    time.sleep(1.1)  # event files are named by the second
    log = Log(tmp_path, total_updates=10, completed_updates=4, quiet=True)
    assert [r["update"] for r in rows(tmp_path)] == [1, 2, 3, 4]
    for update in (5, 6):
        log.metrics({SPEED: -1.0}, update=update, steps=64 * update)
    log.close()
    assert [r["update"] for r in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    # in TensorBoard, too: points up to the checkpoint stay, later ones are replaced
    assert scalars(tmp_path)[SPEED] == [(64.0 * u, 1000.0 * u) for u in (1, 2, 3, 4)] + [
        (320, -1.0),
        (384, -1.0),
    ]
    assert [step for step, _ in scalars(tmp_path)["policy/loss"]] == [64, 128, 192, 256]


def test_damaged_rows_are_reported(tmp_path):
    """Rows 2 and 4 are damaged; the last line is incomplete, as after a kill."""
    write(tmp_path, range(1, 8))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    lines[1], lines[3], lines[5] = b'{"update": 2, "env', lines[3] + b"\xff}", b"[6]"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:-1], lines[-1][:20]]))
    write(tmp_path, range(6, 7), completed_updates=5)
    assert [r["update"] for r in rows(tmp_path)] == [1, 3, 5, 6]
    line = (
        "metrics.jsonl: damaged rows are left out: line 2 (after update 1), line 4 (after update 3)"
    )
    assert (tmp_path / "log.txt").read_text().count(line + "\n") == 1
    assert "line 6" not in (tmp_path / "log.txt").read_text()  # after the checkpoint


@pytest.mark.slow
def test_new_run_drops_rows_of_run_without_checkpoint(tmp_path):
    write(tmp_path, range(0, 4))
    time.sleep(1.1)
    write(tmp_path, range(1, 2))
    assert [r["update"] for r in rows(tmp_path)] == [1]
    assert scalars(tmp_path)[SPEED] == [(64, 1000.0)]


@pytest.mark.slow
def test_resumed_log_without_rows_keeps_tensorboard_points(tmp_path):
    write(tmp_path, range(1, 5))
    (tmp_path / "metrics.jsonl").unlink()
    time.sleep(1.1)
    write(tmp_path, range(5, 7), completed_updates=4)
    assert [step for step, _ in scalars(tmp_path)[SPEED]] == [64 * u for u in range(1, 7)]


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
    assert re.fullmatch(  # when it ends is told there alone: the console has the time left
        rf"{stamp}:\d\d hello \[bold\]you\[/bold\]\n"
        rf"{stamp}:\d\d update 1 is done; all 3 will be at about {stamp}\n",
        (tmp_path / "log.txt").read_text(),
    )


def test_progress_lines_are_rate_limited(tmp_path, capsys):
    log = Log(tmp_path, total_updates=50)
    for update in range(1, 51):
        log.metrics(training(update), update=update, steps=update)
    log.close()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/50", "50/50"]


def test_time_left_counts_this_session(tmp_path, capsys, monkeypatch):
    """A resumed run with 5 of 105 updates completed and one update per second has 99 s left."""
    write(tmp_path, range(1, 6))
    log = Log(tmp_path, total_updates=105, completed_updates=5)
    now = time.perf_counter()
    monkeypatch.setattr(log, "_started", now - 1.0)
    log.metrics(training(6), update=6, steps=6)
    log.close()
    left = re.search(r"(\d+):(\d\d):(\d\d) left", capsys.readouterr().err)
    assert left is not None
    hours, minutes, seconds = map(int, left.groups())
    assert 98 <= hours * 3600 + minutes * 60 + seconds <= 130
    (reported,) = re.findall(
        r"update 6 is done; all 105 will be at about (.*)\n", (tmp_path / "log.txt").read_text()
    )
    ends = time.mktime(time.strptime(reported, "%Y-%m-%d %H:%M"))
    assert 98 - 60 <= ends - time.time() <= 130


def test_quiet_log_prints_nothing(tmp_path, capsys):
    log = Log(tmp_path, total_updates=1, quiet=True)
    log.say("only in the file")
    log.metrics(training(1), update=1, steps=64)
    log.close()
    assert capsys.readouterr() == ("", "")
    assert "only in the file" in (tmp_path / "log.txt").read_text()


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch):
    master, slave = pty.openpty()
    parts: list[bytes] = []

    def drain() -> None:  # a terminal that nobody reads blocks its writer
        with contextlib.suppress(OSError):  # closed on the other side
            while part := os.read(master, 4096):
                parts.append(part)

    reader = threading.Thread(target=drain)
    reader.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        log = Log(tmp_path, total_updates=4, completed_updates=0)
        log.metrics(training(1), update=1, steps=64)
        log.say("a word in between")
        log.metrics(training(2, **{"rollout/return": 3.25}), update=2, steps=128)
        log.close()
        monkeypatch.undo()
    reader.join(10)
    os.close(master)
    output = b"".join(parts).decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert ESCAPE in output and "nan" not in text
    assert "return -" in text and "return 3.2" in text and "2/4" in text
    assert "a word in between" in text and "2,000 steps/s" in text


# ------------------------------------------------------------------------------------- measurements
def test_writer_that_fails_after_the_log_is_closed_prints_nothing(tmp_path, capfd):
    # A full disk: the next metric raises the writer's error and closes the log, while the
    # thread has not yet returned from its own exception.
    log = Log(tmp_path / "run", total_updates=2, quiet=True)
    assert log.board is not None and log.board.file_writer is not None
    writer: Any = log.board.file_writer.event_writer._async_writer
    closed = threading.Event()

    def fail(data: bytes) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            closed.wait(10)

    writer._writer.write = fail
    log.metrics({"rollout/return": 1.0}, update=0, steps=8)
    writer._worker.exception = OSError(errno.ENOSPC, "No space left on device")
    log.close()
    closed.set()
    writer._worker.join(10)
    assert not writer._worker.is_alive()
    out, err = capfd.readouterr()
    assert out == "" and "not written to the end (No space left on device)" in err
    assert "Traceback" not in err


def test_timer():
    timer = Timer()
    for _ in range(2):
        with timer("collect"):
            time.sleep(0.02)
    with pytest.raises(ValueError), timer("update"):
        sum(i * i for i in range(100_000))
        raise ValueError  # a phase that fails is measured, too
    cpu = timer.cpu["update"]
    taken: dict[str, Any] = timer.take()
    assert taken.keys() == {"time/collect_s", "time/update_s"}
    assert 0.04 <= taken["time/collect_s"] < 1.0 and cpu > 0
    assert timer.cpu["collect"] < 0.04  # asleep
    assert timer.take() == {}


def test_peak_memory():
    reported = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert reported is not None and peak_rss_mb() == pytest.approx(
        int(reported[1]) / 1024, rel=0.05
    )


# ---------------------------------------------------------------------------------------- every tag
ALL_ON: dict[str, Any] = {
    **{
        "env.id": "toy_envs:toy_envs/Point-v0",
        "env.num_threads": 0,
        "eval_every": 1,
        "save_every": 1,
        "updates": 3,
        "name": "all",
    },
    **{
        "algorithm.clip_ratio_c": 1.2,
        "algorithm.entropy_bonus": 0.01,
        "algorithm.entropy_target": 1.0,
    },
    **{
        "algorithm.use_kl_in_reward": True,
        "algorithm.use_kl_loss": True,
        "algorithm.off_policy_correction": "token",
    },
    **{
        "evaluation.episodes": 32,
        "evaluation.num_envs": 32,
        "algorithm.horizon": 16,
        "model.policy_gain": 0.5,
    },
}


def documented() -> dict[str, list[str]]:
    """Return tag -> unit, meaning and healthy range from docs/metrics.md."""
    table = re.findall(r"^\| `([^`]+)` \| (.+) \|$", DOCS.read_text(), flags=re.M)
    return {tag: [cell.strip() for cell in re.split(r"(?<!\\)\|", cells)] for tag, cells in table}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "all"
    run.train(run_helpers.tiny_config({**ALL_ON, "run_dir": str(path)}), quiet=True)
    return path


def test_tags_equal_documentation(run_dir):
    written = {tag for row in rows(run_dir) for tag in row} - {"update", "env_steps"}
    events = board(run_dir / "tensorboard")
    written |= set(board(run_dir / "tensorboard" / "hparams").Tags()["scalars"]) | set(
        events.Tags()["scalars"]
    )
    elsewhere = {
        "evaluation",
        "rollout/unstable",
        "rollout/terrain_level",
        "eval/success/<kind>",
    }  # tested in test_video; our own engines write it
    elsewhere |= {"policy/cloning_loss"}  # test_beside
    elsewhere |= {f"rollout/{x}" for x in ("filter_rounds", "groups_dropped", "groups_missing")}
    # test_group_filter
    elsewhere |= {f"distill/{x}" for x in ("loss", "action_error", "teacher_share")}
    # test_distillation
    elsewhere |= {
        "time/swap_s",
        "memory/<roles>_peak_gb",
        "memory/<roles>_gpu_peak_gb",
        "weights/moved_mb",
        "device/idle",
        "device/idle_max",
    }  # test_placements
    elsewhere |= {"time/wait_for_rollout_s"}  # test_pipelined_system
    assert sorted(set(documented()) - LANGUAGE_ONLY) == sorted(written | elsewhere)
    assert all(len(cells) == 3 and all(cells) for cells in documented().values())


def test_metrics_change_during_training(run_dir):
    """All metrics that can change in this run have changed, and none is at a bound."""
    log_rows = [row for row in rows(run_dir) if SPEED in row]
    assert len(log_rows) == 3
    constant = {
        "rollout/version_lag": 0,
        "policy/epochs": 3,
        "advantage/zero_fraction": 0,
    }  # as they must be here
    constant |= {
        "policy/lr": 3e-3,
        "value/lr": 3e-3,
        "kl/coef": 0.001,
        "memory/peak_gb": log_rows[0]["memory/peak_gb"],
    }
    constant |= {"policy/off_policy_weight": 1}  # who acts is who learns
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
    last = rows(run_dir)[-1]
    assert (
        summary["final_return"] == last["eval/return"]
        and summary["env_steps"] == last["env_steps"] == 192
    )
    assert summary["initial_return"] == rows(run_dir)[0]["eval/return"]


def test_floats_round_trip_through_rows(tmp_path):
    log = Log(tmp_path, total_updates=1, quiet=True)
    value = struct.unpack("d", struct.pack("q", 0x3FB999999999999B))[0]
    tensor = torch.tensor(1 / 3, dtype=torch.float64)
    log.metrics(
        {"a/x": value, "a/y": Mean(tensor, torch.tensor(1.0)), "a/z": math.inf}, update=1, steps=1
    )
    log.close()
    assert rows(tmp_path)[0] == {
        "update": 1,
        "env_steps": 1,
        "a/x": value,
        "a/y": tensor.item(),
        "a/z": None,
    }
