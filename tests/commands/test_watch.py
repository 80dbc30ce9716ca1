"""Tests of `embodied-ppo watch`: reading of runs, the server, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import imageio.v3 as imageio
import numpy as np
import pytest
import yaml
from headless_browser import Browser

from embodied_ppo.commands import main, watch
from embodied_ppo.training.logging import Log
from embodied_ppo.training.run_files import Parent


def metrics(update: int, kl: float = 0.01) -> dict[str, float]:
    return {
        "rollout/return": float(update),
        "policy/approx_kl": kl,
        "value/explained_variance": 0.5,
        "time/collect_s": 0.25,
        "time/update_s": 0.75,
        "time/swap_s": 0.5,
        "speed/env_steps_per_s": 100.0,
    }


def write(log: Log, first: int, last: int, kl: float = 0.01) -> None:
    for update in range(first, last + 1):
        log.metrics(metrics(update, kl), update=update, steps=100 * update)


def make_run(
    folder: Path, *, updates: int = 40, total: int = 100, kl: float = 0.01, **config: Any
) -> Log:
    """Create a run that has not ended, with the log of training."""
    log = Log(folder, total_updates=total, quiet=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"seed": 0, "run_dir": str(folder)} | config)
    )
    log.say(
        "test: CartPole-v1, 4 environments, 100 steps per update,"
        f" updates 1 to {total}, in {folder}"
    )
    write(log, 1, updates, kl)
    return log


def make_video(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    frames = np.zeros((60, 48, 64, 3), np.uint8)
    frames[np.arange(60), :, np.arange(60)] = 255
    imageio.imwrite(file, frames, fps=30, codec="libx264", plugin="FFMPEG")


@pytest.fixture
def serve() -> Iterator[Any]:
    """Return a function that starts a server until the end of the test."""
    servers: list[watch.Server] = []

    def start(*paths: Path) -> watch.Server:
        server = watch.listen([str(path) for path in paths])
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(
    server: watch.Server, path: str, query: Any = (), **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def get_json(server: watch.Server, path: str, query: Any = ()) -> Any:
    status, _, body = get(server, path, query)
    assert status == 200, body
    return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# --------------------------------------------------------------------------------- reading of runs
def test_growing_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"update": 1}\n{"update": 2}\n{"upd')
    first = watch.read_rows(file, 0, "")
    assert [row["update"] for row in first["rows"]] == [1, 2], "an incomplete line is not read"
    assert first["next"] == 28 and not first["broken"] and not first["more"]
    with open(file, "a") as f:
        f.write('ate": 3}\n')
    second = watch.read_rows(file, first["next"], first["mark"])
    assert second["from"] == 28 and [row["update"] for row in second["rows"]] == [3]
    third = watch.read_rows(file, second["next"], second["mark"])
    assert third["rows"] == []
    assert (third["next"], third["mark"]) == (second["next"], second["mark"])


@pytest.mark.parametrize(
    "content",
    ["", '{"update": 1}\n', '{"update": 9, "x": 1}\n' * 50],
    ids=["empty", "cut", "rewritten"],
)
def test_rewritten_file_is_read_from_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"update": {i}}}\n' for i in range(20)))
    before = watch.read_rows(file, 0, "")
    file.write_text(content)
    after = watch.read_rows(file, before["next"], before["mark"])
    assert after["from"] == 0 and after["next"] == len(content)
    assert len(after["rows"]) == content.count("\n")


def test_rewind_is_detected_in_a_longer_file(tmp_path: Path) -> None:
    """A run of 40 updates is resumed from update 10, and its file becomes longer than before."""
    log = make_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    before = watch.read_rows(file, 0, "")
    log.rewind(10)
    write(log, 11, 60, kl=0.02)
    log.close()
    after = watch.read_rows(file, before["next"], before["mark"])
    assert after["from"] == 0 and [row["update"] for row in after["rows"]] == list(range(1, 61))
    assert after["rows"][10]["policy/approx_kl"] == 0.02


def test_invalid_lines_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"a": NaN, "b": -Infinity, "c": 1e999, "d": null, "e": "x", "f":'
        b' 2}\n{"torn\n[1]\n\xff\n{"f": 3}\n'
    )
    block = watch.read_rows(file, 0, "")
    assert block["rows"] == [{"a": None, "b": None, "c": None, "d": None, "f": 2}, {"f": 3}]
    assert block["broken"] == 3
    # Line 1 exceeds Python's recursion limit, the number of line 2 the range of floats.
    file.write_text("[" * 100_000 + '\n{"a": 1' + "0" * 400 + "}\n")
    block = watch.read_rows(file, 0, "")
    assert block["rows"] == [{"a": None}] and block["broken"] == 1


def read_all(file: Path) -> tuple[list[int], int, int]:
    """Read a file block by block; return the updates, the broken lines and the final position."""
    updates, broken, block = [], 0, {"next": 0, "mark": "", "more": True}
    while block["more"]:
        block = watch.read_rows(file, block["next"], block["mark"])
        updates += [row["update"] for row in block["rows"]]
        broken += block["broken"]
    return updates, broken, block["next"]


def test_long_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BLOCK_SIZE", 100)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"update": {i}}}\n' for i in range(50)))
    assert read_all(file)[0] == list(range(50))


@pytest.fixture
def peak_mb() -> Iterator[Callable[[], float]]:
    """Return a function for the peak of Python's memory since its last call, in megabytes."""

    def measure() -> float:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        return peak / 1e6

    tracemalloc.start()
    yield measure
    tracemalloc.stop()


def test_long_line_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak_mb: Callable[[], float]
) -> None:
    run = tmp_path / "run"
    make_run(run, updates=3).close()
    file = run / "metrics.jsonl"
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.truncate(3 << 30)  # a sparse line of 3 GB
    peak_mb()
    first = watch.read_rows(file, 0, "")
    assert [row["update"] for row in first["rows"]] == [1, 2, 3]
    assert first["next"] == size and first["more"]
    second = watch.read_rows(file, size, first["mark"])
    assert second["next"] == size + watch.BLOCK_SIZE and second["more"]
    assert (second["rows"], second["broken"]) == ([], 1)
    third = watch.read_rows(file, second["next"], second["mark"])
    assert third["from"] == second["next"] and third["broken"] == 0, "the line is counted once"
    assert watch.status(run)["state"] == "running"
    with open(run / "log.txt", "r+b") as f:
        f.truncate(3 << 30)
    assert watch.status(run)["state"] == "running"
    assert peak_mb() < 5 * watch.BLOCK_SIZE / 1e6

    monkeypatch.setattr(watch, "BLOCK_SIZE", 100)
    file.write_text('{"update": 1}\n' + "x" * 345 + '\n{"update": 2}\n{"upd')
    assert read_all(file) == ([1, 2], 1, 14 + 346 + 14)


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_large_files_and_links_are_not_read(
    tmp_path: Path, name: str, peak_mb: Callable[[], float]
) -> None:
    for run in ("a", "b"):
        make_run(tmp_path / run, seed=run).close()
    file = tmp_path / "a" / name
    file.touch()
    os.truncate(file, 3 << 30)

    def reason() -> str:
        if name == "summary.json":
            return watch.status(tmp_path / "a")["note"]
        (row,) = watch.differences([tmp_path / "a", tmp_path / "b"])
        assert row["option"] == "config.yaml" and row["values"][1] is None
        return row["values"][0]

    peak_mb()
    assert f"{file}: has 3221225472 bytes, more than {watch.MAX_FILE_SIZE}" in reason()
    assert peak_mb() < 10
    file.unlink()
    (tmp_path / "elsewhere").write_text('{"updates": 40, "password": "secret"}')
    file.symlink_to(tmp_path / "elsewhere")
    assert "is a link, which is not followed" in reason() and "secret" not in reason()
    state = watch.status(tmp_path / "a")["state"]
    assert state == ("unreadable" if name == "summary.json" else "running")


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_links_to_metrics_and_log_are_not_followed(tmp_path: Path, serve: Any, name: str) -> None:
    run = tmp_path / "runs" / "a"
    make_run(run).close()
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    server = serve(tmp_path / "runs")
    (row,) = get_json(server, "/runs")["runs"]
    assert row["state"] == "unreadable" and "is a link, which is not followed" in row["note"]
    if name == "metrics.jsonl":
        assert get(server, "/data", {"run": run})[0] == 500


def test_runs_in_folders_are_found(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b", "x/x/x/4", "x/x/x/x/5", ".trash/6", "a/1/reports/step_1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    runs = watch.find_runs([tmp_path, tmp_path / "a"]).values()
    names = [str(path.relative_to(tmp_path)) for path in runs]
    assert names == ["a/1", "a/2", "b", "x/x/x/4"]
    one, two = str(tmp_path / "a/1"), str(tmp_path / "a/2")
    assert watch.labels([one, two]) == {one: "a/1", two: "a/2"}
    assert watch.labels([one]) == {one: "a/1"}


def test_states_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = make_run(run)
    status = watch.status(run)
    assert (status["state"], status["update"], status["updates"]) == ("running", 40, 100)
    assert status["update_s"] == 1.0
    for name in os.listdir(run):
        os.utime(run / name, (time.time() - 90, time.time() - 90))
    status = watch.status(run)
    assert status["state"] == "silent" and 90 <= status["age_s"] < 100
    log.say("failed: TrainingError: loss is nan\nsecond line")
    status = watch.status(run)
    assert (status["state"], status["note"]) == ("failed", "TrainingError: loss is nan")
    log.say("interrupted after update 40; saved x; continue with resume=x")
    assert watch.status(run)["state"] == "interrupted"
    log.say(f"test: CartPole-v1, updates 41 to 60, in {run}")
    write(log, 41, 60)
    assert watch.status(run)["state"] == "running"
    (run / "summary.json").write_text('{"updates": 60}')
    assert (watch.status(run)["state"], watch.status(run)["updates"]) == ("finished", 60)
    log.say(f"test: CartPole-v1, updates 61 to 80, in {run}")
    assert watch.status(run)["state"] == "running", "the summary is older"
    (run / "summary.json").write_text("{")
    assert watch.status(run)["state"] == "unreadable"
    log.close()


@pytest.mark.slow
def test_states_of_real_runs(tmp_path: Path) -> None:
    tiny = ["train", "experiment=cartpole", "updates=2", "env.num_envs=2", "compile=never"]
    tiny += ["algorithm.horizon=16", "algorithm.global_batch_size=16", "--quiet"]
    tiny += ["evaluation.episodes=2", "evaluation.num_envs=2"]
    assert main.main([*tiny, f"run_dir={tmp_path / 'good'}"]) == 0
    diverging = ["updates=20", "algorithm.lr=1e38", f"run_dir={tmp_path / 'bad'}"]
    assert main.main([*tiny, *diverging]) == 3
    good, bad = watch.status(tmp_path / "good"), watch.status(tmp_path / "bad")
    assert (good["state"], good["update"], good["updates"]) == ("finished", 2, 2)
    assert good["report"]["name"] == "reports/step_000002/report.html"
    assert bad["state"] == "failed" and bad["note"] and bad["updates"] == 20


def test_differences_of_options(tmp_path: Path) -> None:
    env = {"id": "X", "kwargs": {}}
    make_run(tmp_path / "a", env=env, algorithm={"lr": 0.1, "gamma": 0.9}).close()
    make_run(tmp_path / "b", env=env, algorithm={"lr": 0.2, "gamma": 0.9, "n": None}).close()
    assert watch.differences([tmp_path / "a", tmp_path / "b"]) == [
        {"option": "algorithm.lr", "values": ["0.1", "0.2"]},
        {"option": "algorithm.n", "values": [None, "null"]},
    ]
    make_run(tmp_path / "c", env={"id": "Y", "kwargs": {}}).close()
    # The other runs are compared although the third is damaged.
    for damage, message in ((b"a: [", "is not YAML"), (b"\xff", "utf-8")):
        (tmp_path / "c" / "config.yaml").write_bytes(damage)
        first, second, third = watch.differences([tmp_path / name for name in "abc"])
        assert first == {"option": "algorithm.lr", "values": ["0.1", "0.2", None]}
        assert second == {"option": "algorithm.n", "values": [None, "null", None]}
        assert third["option"] == "config.yaml" and third["values"][:2] == [None, None]
        assert message in third["values"][2]


# ------------------------------------------------------------------------------------------- server
def branch(folder: Path, parent: Path, update: int, options: dict[str, Any] | None = None) -> Log:
    """Create a run that branches from another one."""
    log = make_run(folder, updates=5)
    changed = {name: tuple(values) for name, values in (options or {}).items()}
    relative = os.path.relpath(parent, folder)
    link = Parent(str(parent), relative, update, "0", changed)
    (folder / "parent.json").write_text(link.text())
    return log


def test_branches_are_linked_with_their_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "a").close()
    branch(tmp_path / "b", tmp_path / "a", 20, {"algorithm.lr": [1e-3, None]}).close()
    branch(tmp_path / "c", tmp_path / "gone", 3).close()
    make_run(tmp_path / "d").close()
    (tmp_path / "d" / "parent.json").write_text("[]")
    found = watch.branches(watch.find_runs([tmp_path]))
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    assert found == {
        a: None,
        b: {
            "run": a,
            "name": "a",
            "update": 20,
            "options": [["algorithm.lr", "0.001", "null"]],
        },
        c: {"run": None, "name": "gone", "update": 3, "options": []},
        d: None,
    }


def test_server_lists_new_runs(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a", kl=2.0).close()
    server = serve(tmp_path)
    (run,) = get_json(server, "/runs")["runs"]
    assert run["run"] == str(tmp_path / "a")
    assert [v["tag"] for v in run["health"] if v["warning"]] == ["policy/approx_kl"]
    make_run(tmp_path / "b", seed=1).close()
    response = get_json(server, "/runs")
    assert len(response["runs"]) == 2 and response["ranges"][0]["tag"] == "policy/approx_kl"
    rows = get_json(server, "/data", [("run", run["run"])])["rows"]
    assert len(rows) == 40 and rows[0]["rollout/return"] == 1.0
    differences = get_json(server, "/diff", [("run", r["run"]) for r in response["runs"]])
    assert differences == [{"option": "seed", "values": ["0", "1"]}]


def test_requests_for_other_hosts_are_refused(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server = serve(tmp_path)
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    names = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "evil@127.0.0.1")
    for host in (*names, "", "[::1]"):
        for path in ("/", "/runs", "/data", "/file"):
            assert get(server, path, Host=host)[0] == 403, host
    for host in (f"127.0.0.1:{port}", "localhost", "localhost:1"):  # 1: through a tunnel
        assert get(server, "/runs", Host=host)[0] == 200


def test_every_response_forbids_other_origins(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server = serve(tmp_path)
    for path in ("/", "/runs", "/nothing"):
        _, headers, _ = get(server, path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy and "http" not in policy
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


def test_only_videos_and_reports_of_a_run_are_sent(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "runs" / "a").close()
    run = tmp_path / "runs" / "a"
    report = run / "reports" / "step_000001" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<p>report")
    secrets = [tmp_path / "secret.html", tmp_path / "reports" / "s" / "secret.html"]
    for secret in (*secrets, run / "checkpoints" / "x.html"):
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("secret")
    (run / "reports" / "step_000001" / "link.html").symlink_to(tmp_path / "secret.html")
    (run / "reports" / "out").symlink_to(tmp_path / "reports" / "s")
    server = serve(tmp_path / "runs")
    names = ["../../secret.html", "reports/../../../secret.html", "reports/../config.yaml"]
    names += ["config.yaml", "", ".", "/", "a\0b", str(tmp_path / "secret.html")]
    names += ["reports/step_000001/link.html", "reports/out/secret.html", "videos/no.mp4"]
    names += ["checkpoints/x.html", "reports/..%2F..%2F..%2Fsecret.html"]
    names += ["reports/step_000001/report.html\n", "reports/step_000001/../../../../secret.html"]
    names += ["reports//step_000001/../secret.html", "reports/../summary.json"]
    (run / "summary.json").write_text("{}")
    for name in names:
        status, _, body = get(server, "/file", {"run": run, "name": name})
        assert status == 404 and body.endswith(b"is not a video or report of the run"), name
    for other in (tmp_path, "/", tmp_path / "runs", f"{run}/../a", "a"):
        for path in ("/file", "/data", "/diff"):
            assert get(server, path, {"run": other, "name": "secret.html"})[0] == 404
    raw = b"GET /../../secret.html HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(server.server_address[:2], timeout=10) as plain:
        plain.sendall(raw)
        assert plain.recv(100).startswith(b"HTTP/1.1 404")
    query = {"run": run, "name": "reports/step_000001/report.html"}
    status, headers, body = get(server, "/file", query)
    assert (status, body) == (200, b"<p>report") and "sandbox" in headers["Content-Security-Policy"]


def test_ranges_of_a_video(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    (tmp_path / "a" / "videos").mkdir()
    (tmp_path / "a" / "videos" / "step_1.mp4").write_bytes(bytes(range(100)))
    server = serve(tmp_path / "a")
    query = {"run": tmp_path / "a", "name": "videos/step_1.mp4"}
    ranges = [("0-", 0, 99), ("10-19", 10, 19), ("90-500", 90, 99), ("-5", 95, 99), ("-500", 0, 99)]
    for text, first, last in ranges:
        status, headers, body = get(server, "/file", query, Range=f"bytes={text}")
        assert status == 206 and headers["Content-Range"] == f"bytes {first}-{last}/100"
        assert body == bytes(range(first, last + 1)) and headers["Content-Type"] == "video/mp4"
    for header in ("bytes=100-", "bytes=9-3", "bytes=-0"):
        assert get(server, "/file", query, Range=header)[0] == 416
    for header in ("bytes=-", "bytes=0-1,5-6", "lines=1-2"):
        assert get(server, "/file", query, Range=header)[2] == bytes(range(100))


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=0-"}])
def test_large_video_is_streamed(
    tmp_path: Path, serve: Any, headers: dict[str, str], peak_mb: Callable[[], float]
) -> None:
    make_run(tmp_path / "a").close()
    (tmp_path / "a" / "videos").mkdir()
    video = tmp_path / "a" / "videos" / "step_1.mp4"
    video.write_bytes(b"begins")
    os.truncate(video, 30 << 30)  # sparse
    server = serve(tmp_path / "a")
    peak_mb()
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    query = {"run": tmp_path / "a", "name": "videos/step_1.mp4"}
    connection.request("GET", f"/file?{urlencode(query)}", None, headers)
    response = connection.getresponse()
    assert int(response.headers["Content-Length"]) == 30 << 30 and response.read(6) == b"begins"
    connection.close()
    assert get(server, "/runs")[0] == 200 and peak_mb() < 20
    os.truncate(video, 0)
    assert get(server, "/file", query)[2] == b""


def test_invalid_requests_and_unreadable_files(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server, run = serve(tmp_path), str(tmp_path / "a")
    for start in ("-1", "9" * 30, "9" * 5000):
        assert get(server, "/data", {"run": run, "from": start})[0] == 400
    assert get(server, "/data")[0] == 400 and get(server, "/data", [("run", run)] * 2)[0] == 400
    assert get(server, "/x")[2] == b"/x: no such page"
    not_utf8 = tmp_path / os.fsdecode(b"\xff")
    make_run(tmp_path / "o").close()
    (tmp_path / "o").rename(not_utf8)
    (other,) = (row["run"] for row in get_json(server, "/runs")["runs"] if row["run"] != run)
    assert len(get_json(server, "/data", {"run": other})["rows"]) == 40
    (not_utf8 / "config.yaml").write_text("a: [")
    assert get(server, "/diff", {"run": other})[0] == 200
    shutil.rmtree(not_utf8)
    make_run(tmp_path / "b").close()
    (tmp_path / "b" / "summary.json").write_text("[" * 100_000)
    for name, file in (("c", "log.txt"), ("d", "metrics.jsonl")):  # reading of a pipe would not end
        make_run(tmp_path / name).close()
        (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file)
    (tmp_path / "a" / "videos").mkdir()
    os.mkfifo(tmp_path / "a" / "videos" / "x.mp4")
    states = [row["state"] for row in get_json(server, "/runs")["runs"]]
    assert states == ["running", *["unreadable"] * 3]
    status, _, body = get(server, "/data", {"run": str(tmp_path / "d")})
    assert status == 500 and b"metrics.jsonl" in body
    (tmp_path / "a" / "config.yaml").write_text("a: [")
    status, _, body = get(server, "/diff", {"run": run})
    assert status == 200 and b"config.yaml" in body and b"is not YAML" in body and b"\n" not in body


# ------------------------------------------------------------------------------------------ command
def test_invalid_arguments_are_refused(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a").close()
    port = serve(tmp_path).server_address[1]
    (tmp_path / "none").mkdir()
    for arguments, message in (
        ([tmp_path / "x"], f"{tmp_path}/x: no such directory; name a run, or a folder of runs"),
        (
            [tmp_path / "none"],
            (
                f"{tmp_path}/none: is not a run and contains none (metrics.jsonl is missing); name"
                " a run"
            ),
        ),
        (
            [tmp_path, "--port", port],
            f"--port {port}: is in use; name another port, or leave it out",
        ),
        (
            [tmp_path, "--port", 70000],
            "--port 70000: is not from 0 to 65535; leave it out for a free port",
        ),
        (
            [tmp_path, "--port", "x"],
            "argument --port: invalid int value: 'x'; see embodied-ppo watch --help",
        ),
        ([tmp_path, "--prot", 1], "unrecognized arguments: --prot 1; did you mean --port?"),
    ):
        assert main.main(["watch", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


WATCH = """
import sys
from embodied_ppo.commands import main
code = main.main(['watch', *sys.argv[1:]])
sys.exit(9 if 'torch' in sys.modules else code)
"""


def start_command(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """Start the command in ``folder``; return the process and the address that it prints."""
    command = [sys.executable, "-c", WATCH, *flags]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    line = process.stdout.readline().strip()
    return process, json.loads(line)["address"] if flags else line


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_ctrl_c_ends_the_command(tmp_path: Path, flags: tuple[str, ...]) -> None:
    make_run(tmp_path / "runs" / "a").close()
    process, line = start_command(tmp_path, *flags)
    address = urlsplit(line)
    assert address.hostname == "127.0.0.1" and address.port
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", "/runs")
    assert len(json.loads(connection.getresponse().read())["runs"]) == 1, (
        "the default folder is runs"
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "" and "Traceback" not in err
    connection.close()


# ------------------------------------------------------------------------------------------ browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser) -> Browser:
    """Return the browser without the requests and problems of earlier tests."""
    browser.open("about:blank")
    browser.requests.clear()
    browser.problems.clear()
    return browser


def shown(page: Browser, tag: str) -> dict[str, int]:
    """Return the run's directory -> number of points of its curve."""
    script = (
        f"[...document.querySelectorAll('[data-tag=\"{tag}\"] path.main')].map(p => [p.dataset.run,"
        " +p.dataset.points])"
    )
    return {Path(run).name: points for run, points in page.evaluate(script)}


def text(page: Browser, selector: str) -> str:
    return page.evaluate(f"document.querySelector('{selector}').innerText").replace("\u200b", "")


def wait_for_points(page: Browser, tag: str, points: dict[str, int]) -> None:
    deadline = time.monotonic() + 30
    while shown(page, tag) != points:
        assert time.monotonic() < deadline, shown(page, tag)
        time.sleep(0.1)


@pytest.mark.slow
def test_page_follows_runs(tmp_path: Path, serve: Any, page: Browser) -> None:
    good, bad = make_run(tmp_path / "good", seed=3), make_run(tmp_path / "bad", seed=4)
    server = serve(tmp_path)
    page.open(server.address)
    wait_for_points(page, "rollout/return", {"good": 40, "bad": 40})
    page.wait("document.querySelector('#diff td')")
    assert "No warnings" in text(page, "#health")
    assert "running, update 40 of 100" in text(page, "#runs")
    diff = page.evaluate(
        "[...document.querySelectorAll('#diff tbody tr')].map(r => [...r.children].map(c =>"
        " c.innerText))"
    )
    assert diff == [["seed", "4", "3"]]
    bars = page.evaluate(
        "[...document.querySelectorAll('.bar')].map(b => b.getAttribute('aria-label'))"
    )
    assert bars == ["collect 250 ms, update 750 ms"] * 2, "swapping is part of the other phases"

    page.evaluate("window.before = true")
    write(bad, 41, 45, kl=4.2)  # the KL divergence is too large
    wait_for_points(page, "rollout/return", {"good": 40, "bad": 45})
    page.wait("document.querySelector('.warnings')")
    warning = (
        f"{tmp_path.name}/bad: policy/approx_kl is 4.2, above 0.03: updates move the policy too"
        " far: lower lr"
    )
    assert warning in text(page, ".warnings")
    assert "1 warning" in text(page, "#runs")

    bad.rewind(20)  # as a resumed run does
    wait_for_points(page, "rollout/return", {"good": 40, "bad": 20})
    assert page.evaluate("!document.querySelector('.warnings')")
    new = make_run(tmp_path / "new", updates=5)
    wait_for_points(page, "rollout/return", {"good": 40, "bad": 20, "new": 5})
    assert page.evaluate("window.before"), "the page has not been loaded again"

    (tmp_path / "new" / "metrics.jsonl").write_text(
        '{"update": 1, "env_steps": 1, "rollout/return": NaN}\n{"upd'
    )
    wait_for_points(page, "rollout/return", {"good": 40, "bad": 20})
    assert page.problems == []
    hosts = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
    assert hosts == {urlsplit(server.address).netloc}
    for log in (good, bad, new):
        log.close()


@pytest.mark.slow
def test_branches_are_drawn(tmp_path: Path, serve: Any, page: Browser) -> None:
    make_run(tmp_path / "base").close()
    page.open(serve(tmp_path).address)
    wait_for_points(page, "rollout/return", {"base": 40})
    assert page.evaluate("document.querySelector('#tree').hidden")
    branch(tmp_path / "late", tmp_path / "base", 30, {"seed": [0, 1]}).close()
    branch(tmp_path / "early", tmp_path / "base", 10).close()
    branch(tmp_path / "of_late", tmp_path / "late", 35).close()
    branch(tmp_path / "own_parent", tmp_path / "own_parent", 2).close()
    page.wait("document.querySelectorAll('#tree .track').length == 5")
    lines = text(page, "#tree").split("\n")
    names = [line.rpartition("/")[2] for line in lines if line.startswith(tmp_path.name)]
    assert names == ["base", "late", "of_late", "early", "own_parent"]
    assert any(line.startswith("from update 30: seed 0 \u2192 1 \u00b7 ") for line in lines)
    assert any(line.startswith("from update 10: no option changed") for line in lines)
    links = page.evaluate(
        "[...document.querySelectorAll('#tree .link')].map(p => p.getAttribute('d'))"
    )
    rows = [re.findall(r"[MV,]([\d.]+)", link) for link in links]
    # x of the update, y of the parent's row, y of the branch's row
    assert [(int(a), int(b)) for _, a, b in rows[:3]] == [(26, 72), (72, 118), (26, 164)]
    assert float(rows[2][0]) < float(rows[0][0]) < float(rows[1][0])
    assert page.problems == []


@pytest.mark.slow
def test_page_shows_that_the_command_has_ended(tmp_path: Path, page: Browser) -> None:
    make_run(tmp_path / "runs" / "a").close()
    process, address = start_command(tmp_path)
    page.open(address)
    page.wait("document.querySelector('#status').textContent.startsWith('1 run, read')")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    page.wait("document.querySelector('#status').textContent.startsWith('no answer')")


def test_settings_with_the_keyboard(tmp_path: Path, serve: Any, page: Browser) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name).close()
    page.open(serve(tmp_path).address)
    wait_for_points(page, "rollout/return", {"a": 40, "b": 40})
    focus = "document.activeElement"
    for _ in range(30):
        page.key("Tab")
        if page.evaluate(f"{focus}.id.startsWith('run ') && {focus}.id.endsWith('/a')"):
            break
    page.key(" ")
    wait_for_points(page, "rollout/return", {"b": 40})
    page.key(" ")
    wait_for_points(page, "rollout/return", {"a": 40, "b": 40})
    label = (
        'document.querySelector(\'[data-tag="rollout/return"] svg >'
        " text:last-of-type').textContent"
    )
    assert page.evaluate(label) == "environment steps"
    for _ in range(30):
        page.key("Tab")
        if page.evaluate(f"{focus}.name === 'axis'"):
            break
    page.key("ArrowRight")
    assert page.evaluate(label) == "updates"
    page.key("ArrowRight")
    assert page.evaluate(label) == "s of run time"
    page.key("Tab")
    page.key("ArrowRight")
    assert text(page, "#amount") == "0.02"
    assert page.evaluate("document.querySelectorAll('path.faint').length") > 0
    for _ in range(30):
        page.key("Tab")
        if page.evaluate(f"{focus}.dataset.tag === 'rollout/return'"):
            break
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert text(page, '[data-tag="rollout/return"] .tip').split("\n")[0] == "2 s of run time"
    assert page.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [900, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_the_window(
    tmp_path: Path, serve: Any, page: Browser, width: int, dark: bool
) -> None:
    for i in range(6):
        folder = tmp_path / f"experiment_with_a_long_name_{i}" / "2026-11-22_14-15-18.931-0"
        make_run(folder, kl=0.2, env={"text": "long " * 40, "i": i}).close()
    page.open(serve(tmp_path).address, width=width, dark=dark)
    page.wait(
        "document.querySelectorAll('path.main').length >= 18 && document.querySelectorAll('#diff"
        " td').length == 6"
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 28)" if dark else "rgb(250, 250, 248)")
    colours = page.evaluate(
        "[...document.querySelectorAll('[data-tag=\"rollout/return\"] .main')].map(p =>"
        " p.style.stroke)"
    )
    assert len(set(colours)) == 6
    cut = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
      const box = svg.getBoundingClientRect();
      const out = t => t.left < box.left || t.right > box.right + 1 || t.bottom > box.bottom;
      const labels = [...svg.querySelectorAll('text')].filter(t => out(t.getBoundingClientRect()));
      return box.width ? labels.map(t => t.textContent) : [];
    })"""
    assert page.evaluate(cut) == [], "labels are cut"
    hidden = """[...document.querySelectorAll('.run')].filter(row => {
      const box = row.getBoundingClientRect(), x = box.right - 4;
      const visible = y => row.contains(document.elementFromPoint(x, y));
      return !visible(box.top + 4) || !visible(box.bottom - 4);
    }).map(row => row.innerText)"""
    assert page.evaluate(hidden) == [], "runs of the list are clipped"
    position = "document.querySelector('#phases').getBoundingClientRect().top"
    before = page.evaluate(position)
    time.sleep(2.5)
    assert page.evaluate(position) == before, "the page jumps when it reads new rows"


@pytest.mark.slow
def test_video_and_report(tmp_path: Path, serve: Any, page: Browser) -> None:
    run = tmp_path / "run"
    make_run(run).close()
    make_video(run / "videos" / "step_000020.mp4")
    (run / "reports" / "step_000040").mkdir(parents=True)
    (run / "reports" / "step_000040" / "report.html").write_text(
        "<title>report</title><script>document.title = 'x'</script>"
    )
    page.open(serve(run).address)
    page.wait("document.querySelector('video')?.readyState >= 1")
    size = "[video = document.querySelector('video'), video.videoWidth, video.duration].slice(1)"
    assert page.evaluate(size) == [64, 2]
    seek = (
        "new Promise(done => { video.onseeked = () => done(video.currentTime); video.currentTime ="
        " 1.5 })"
    )
    assert page.evaluate(seek) == 1.5
    make_video(run / "videos" / "step_000040.mp4")
    page.wait("document.querySelector('video').src.includes('step_000040')")
    assert page.problems == []
    page.open(page.evaluate("document.querySelector('#videos a').href"))
    page.wait("document.title == 'report'")
    messages = ("Blocked script", "Content Security Policy")
    assert any(text in problem for problem in page.problems for text in messages)


def test_names_from_files_are_shown_as_text(tmp_path: Path, serve: Any, page: Browser) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    for name in ("a", f"b {evil.replace('/', '')}"):
        run = tmp_path / name
        make_run(run, **{"description": evil + name}).close()
        with open(run / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"update": 41, "env_steps": 4100, f"evil/{evil}": 1.0}) + "\n")
    page.open(serve(tmp_path).address)
    page.wait(
        "document.querySelectorAll('#diff td').length == 2 &&"
        " document.querySelectorAll('figure').length > 7"
    )
    assert page.evaluate("document.title") == "embodied-ppo watch"
    assert page.evaluate("document.images.length") == 0
    assert page.problems == []
    other_origin = serve(tmp_path).address
    assert (
        page.evaluate(f"fetch('{other_origin}').then(() => 'sent', () => 'refused')") == "refused"
    )
    assert any("Content Security Policy" in problem for problem in page.problems)


@pytest.mark.slow
def test_page_without_rows(tmp_path: Path, serve: Any, page: Browser) -> None:
    for i in range(10):
        (tmp_path / f"run{i}").mkdir()
        (tmp_path / f"run{i}" / "metrics.jsonl").touch()
    page.open(serve(tmp_path).address)
    page.wait("document.querySelector('#status').textContent.startsWith('10 runs')")
    assert page.evaluate("document.querySelectorAll('#runs input').length") == 10
    assert page.evaluate("document.querySelectorAll('#runs input:checked').length") == 8
    for section in ("#health", "#curves", "#phases", "#videos", "#diff"):
        lines = text(page, section).strip().split("\n")
        assert len(lines) >= 2, f"{section} does not say why it is empty"
    assert page.problems == []
