"""`embodied-ppo watch`: what the server tells, to whom, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
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


def numbers(update: int, kl: float = 0.01) -> dict[str, float]:
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
        log.metrics(numbers(update, kl), update=update, steps=100 * update)


def make_run(
    folder: Path, *, updates: int = 40, total: int = 100, kl: float = 0.01, **config: Any
) -> Log:
    """A run under way, by the writer that training has."""
    log = Log(folder, total_updates=total, quiet=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"seed": 0, "run_dir": str(folder)} | config)
    )
    log.say(
        f"test: CartPole-v1, 4 environments, 100 steps an update, updates 1 to {total}, in {folder}"
    )
    write(log, 1, updates, kl)
    return log


def make_film(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    frames = np.zeros((60, 48, 64, 3), np.uint8)
    frames[np.arange(60), :, np.arange(60)] = 255
    imageio.imwrite(file, frames, fps=30, codec="libx264", plugin="FFMPEG")


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers; they end with the test."""
    started: list[watch.Server] = []

    def start(*paths: Path) -> watch.Server:
        server = watch.listen([str(path) for path in paths])
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def get(
    server: watch.Server, path: str, words: Any = (), **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", f"{path}?{urlencode(words)}", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def told(server: watch.Server, path: str, words: Any = ()) -> Any:
    status, _, body = get(server, path, words)
    assert status == 200, body
    return json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# -------------------------------------------------------------------------------------- the reading
def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"update": 1}\n{"update": 2}\n{"upd')
    first = watch.read_on(file, 0, "")
    assert [row["update"] for row in first["rows"]] == [1, 2], "half a line waits"
    assert first["next"] == 28 and not first["broken"] and not first["more"]
    with open(file, "a") as f:
        f.write('ate": 3}\n')
    second = watch.read_on(file, first["next"], first["mark"])
    assert second["from"] == 28 and [row["update"] for row in second["rows"]] == [3]
    third = watch.read_on(file, second["next"], second["mark"])
    assert third["rows"] == [] and (third["next"], third["mark"]) == (
        second["next"],
        second["mark"],
    )


@pytest.mark.parametrize(
    "now", ["", '{"update": 1}\n', '{"update": 9, "x": 1}\n' * 50], ids=["empty", "cut", "anew"]
)
def test_a_file_cut_or_written_anew_is_read_anew(tmp_path: Path, now: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"update": {i}}}\n' for i in range(20)))
    before = watch.read_on(file, 0, "")
    file.write_text(now)
    after = watch.read_on(file, before["next"], before["mark"])
    assert (
        after["from"] == 0 and len(after["rows"]) == now.count("\n") and after["next"] == len(now)
    )


def test_a_rewind_that_has_grown_past_the_place_is_noticed(tmp_path: Path) -> None:
    """A run of 40 updates goes on from its 10th: the head of the file stays, and soon it is longer
    than before.
    """
    log = make_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    before = watch.read_on(file, 0, "")
    log.rewind(10)
    write(log, 11, 60, kl=0.02)
    log.close()
    after = watch.read_on(file, before["next"], before["mark"])
    assert after["from"] == 0 and [row["update"] for row in after["rows"]] == list(range(1, 61))
    assert after["rows"][10]["policy/approx_kl"] == 0.02


def test_lines_that_are_no_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"a": NaN, "b": -Infinity, "c": 1e999, "d": null, "e": "x", "f":'
        b' 2}\n{"torn\n[1]\n\xff\n{"f": 3}\n'
    )
    found = watch.read_on(file, 0, "")
    assert (
        found["rows"] == [{"a": None, "b": None, "c": None, "d": None, "f": 2}, {"f": 3}]
        and found["broken"] == 3
    )
    file.write_text(
        "[" * 100_000 + '\n{"a": 1' + "0" * 400 + "}\n"
    )  # deeper than Python goes; no float
    found = watch.read_on(file, 0, "")
    assert found["rows"] == [{"a": None}] and found["broken"] == 1


def test_a_long_file_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CHUNK", 100)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"update": {i}}}\n' for i in range(50)))
    seen, told_ = [], {"next": 0, "mark": "", "more": True}
    while told_["more"]:
        told_ = watch.read_on(file, told_["next"], told_["mark"])
        seen += [row["update"] for row in told_["rows"]]
    assert seen == list(range(50))


@pytest.fixture
def peak_mb() -> Iterator[Callable[[], float]]:
    """The most memory that Python has allocated since the last call, in megabytes."""

    def measure() -> float:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        return peak / 1e6

    tracemalloc.start()
    yield measure
    tracemalloc.stop()


def test_an_endless_line_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak_mb: Callable[[], float]
) -> None:
    run = tmp_path / "run"
    make_run(run, updates=3).close()
    file = run / "metrics.jsonl"
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.truncate(3 << 30)  # a sparse line of 3 GB
    peak_mb()
    first = watch.read_on(file, 0, "")
    assert (
        [row["update"] for row in first["rows"]] == [1, 2, 3]
        and first["next"] == size
        and first["more"]
    )
    second = watch.read_on(file, size, first["mark"])
    assert (second["next"], second["rows"], second["broken"]) == (
        size + watch.CHUNK,
        [],
        1,
    ) and second["more"]
    third = watch.read_on(file, second["next"], second["mark"])
    assert third["from"] == second["next"] and third["broken"] == 0, "it is counted once"
    assert watch.status(run)["state"] == "running"
    with open(run / "log.txt", "r+b") as f:
        f.truncate(3 << 30)
    assert watch.status(run)["state"] == "running"
    assert peak_mb() < 5 * watch.CHUNK / 1e6

    monkeypatch.setattr(watch, "CHUNK", 100)
    file.write_text('{"update": 1}\n' + "x" * 345 + '\n{"update": 2}\n{"upd')
    seen, broken, answer = [], 0, {"next": 0, "mark": "", "more": True}
    while answer["more"]:
        answer = watch.read_on(file, answer["next"], answer["mark"])
        seen += [row["update"] for row in answer["rows"]]
        broken += answer["broken"]
    assert (seen, broken, answer["next"]) == ([1, 2], 1, 14 + 346 + 14)


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_large_files_and_links_of_a_run_are_not_read(
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
    assert f"{file}: has 3221225472 bytes, more than {watch.SMALL}" in reason()
    assert peak_mb() < 10
    file.unlink()
    (tmp_path / "elsewhere").write_text('{"updates": 40, "password": "secret"}')
    file.symlink_to(tmp_path / "elsewhere")
    assert "is a link, which is not followed" in reason() and "secret" not in reason()
    state = watch.status(tmp_path / "a")["state"]
    assert state == ("unreadable" if name == "summary.json" else "running"), (
        "the rows are still shown"
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_links_to_rows_and_messages_are_not_followed(tmp_path: Path, serve: Any, name: str) -> None:
    run = tmp_path / "runs" / "a"
    make_run(run).close()
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    server = serve(tmp_path / "runs")
    (row,) = told(server, "/runs")["runs"]
    assert row["state"] == "unreadable" and "is a link, which is not followed" in row["note"]
    if name == "metrics.jsonl":
        assert get(server, "/data", {"run": run})[0] == 500


def test_runs_are_found_in_folders(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b", "x/x/x/4", "x/x/x/x/5", ".trash/6", "a/1/reports/step_1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    found = watch.find([tmp_path, tmp_path / "a"])
    assert [str(path.relative_to(tmp_path)) for path in found.values()] == [
        "a/1",
        "a/2",
        "b",
        "x/x/x/4",
    ]
    assert set(watch.labels([str(tmp_path / "a/1"), str(tmp_path / "a/2")]).values()) == {
        "a/1",
        "a/2",
    }
    assert set(watch.labels([str(tmp_path / "a/1")]).values()) == {"a/1"}


def test_how_a_run_stands(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = make_run(run)
    now = watch.status(run)
    assert (now["state"], now["update"], now["updates"], now["update_s"]) == (
        "running",
        40,
        100,
        1.0,
    )
    for name in os.listdir(run):
        os.utime(run / name, (time.time() - 90, time.time() - 90))
    now = watch.status(run)
    assert now["state"] == "silent" and 90 <= now["age_s"] < 100
    log.say("failed: TrainingError: loss is nan\nsecond line")
    now = watch.status(run)
    assert (now["state"], now["note"]) == ("failed", "TrainingError: loss is nan")
    log.say("interrupted after update 40; saved x; continue with resume=x")
    assert watch.status(run)["state"] == "interrupted"
    log.say(f"test: CartPole-v1, updates 41 to 60, in {run}")
    write(log, 41, 60)
    assert watch.status(run)["state"] == "running"
    (run / "summary.json").write_text('{"updates": 60}')
    assert (watch.status(run)["state"], watch.status(run)["updates"]) == ("finished", 60)
    log.say(f"test: CartPole-v1, updates 61 to 80, in {run}")
    assert watch.status(run)["state"] == "running", "the summary is of before"
    (run / "summary.json").write_text("{")
    assert watch.status(run)["state"] == "unreadable"
    log.close()


@pytest.mark.slow
def test_real_runs_tell_how_they_ended(tmp_path: Path) -> None:
    tiny = [
        "experiment=cartpole",
        "updates=2",
        "env.num_envs=2",
        "algorithm.horizon=16",
        "algorithm.global_batch_size=16",
    ]
    tiny += ["evaluation.episodes=2", "evaluation.num_envs=2", "compile=never", "--quiet"]
    assert main.main(["train", *tiny, f"run_dir={tmp_path / 'good'}"]) == 0
    assert (
        main.main(
            ["train", *tiny, "updates=20", "algorithm.lr=1e38", f"run_dir={tmp_path / 'bad'}"]
        )
        == 3
    )
    good, bad = watch.status(tmp_path / "good"), watch.status(tmp_path / "bad")
    assert (good["state"], good["update"], good["updates"]) == ("finished", 2, 2)
    assert good["report"]["name"] == "reports/step_000002/report.html"
    assert bad["state"] == "failed" and bad["note"] and bad["updates"] == 20


def test_options_that_differ(tmp_path: Path) -> None:
    make_run(
        tmp_path / "a", env={"id": "X", "kwargs": {}}, algorithm={"lr": 0.1, "gamma": 0.9}
    ).close()
    make_run(
        tmp_path / "b",
        env={"id": "X", "kwargs": {}},
        algorithm={"lr": 0.2, "gamma": 0.9, "n": None},
    ).close()
    assert watch.differences([tmp_path / "a", tmp_path / "b"]) == [
        {"option": "algorithm.lr", "values": ["0.1", "0.2"]},
        {"option": "algorithm.n", "values": [None, "null"]},
    ]
    make_run(tmp_path / "c", env={"id": "Y", "kwargs": {}}).close()
    for damage, words in (
        (b"a: [", "is not YAML"),
        (b"\xff", "utf-8"),
    ):  # of the third: the others are still compared
        (tmp_path / "c" / "config.yaml").write_bytes(damage)
        first, second, third = watch.differences([tmp_path / name for name in "abc"])
        assert first == {"option": "algorithm.lr", "values": ["0.1", "0.2", None]}
        assert second == {"option": "algorithm.n", "values": [None, "null", None]}
        assert (
            third["option"] == "config.yaml"
            and third["values"][:2] == [None, None]
            and words in third["values"][2]
        )


# --------------------------------------------------------------------------------------- the server
def test_the_server_tells_of_runs_that_appear(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a", kl=2.0).close()
    server = serve(tmp_path)
    (run,) = told(server, "/runs")["runs"]
    assert run["run"] == str(tmp_path / "a") and [
        v["tag"] for v in run["health"] if v["warning"]
    ] == ["policy/approx_kl"]
    make_run(tmp_path / "b", seed=1).close()
    answer = told(server, "/runs")
    assert len(answer["runs"]) == 2 and answer["ranges"][0]["tag"] == "policy/approx_kl"
    rows = told(server, "/data", [("run", run["run"])])["rows"]
    assert len(rows) == 40 and rows[0]["rollout/return"] == 1.0
    assert told(server, "/diff", [("run", r["run"]) for r in answer["runs"]]) == [
        {"option": "seed", "values": ["0", "1"]}
    ]


def test_only_this_machine_is_answered(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server = serve(tmp_path)
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "evil@127.0.0.1",
        "[::1]",
    ):
        for path in ("/", "/runs", "/data", "/file"):
            assert get(server, path, Host=host)[0] == 403, host
    for host in (f"127.0.0.1:{port}", "localhost", "localhost:1"):  # 1: through a tunnel
        assert get(server, "/runs", Host=host)[0] == 200


def test_every_answer_forbids_other_origins(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server = serve(tmp_path)
    for path in ("/", "/runs", "/nothing"):
        _, headers, _ = get(server, path)
        policy = headers["Content-Security-Policy"]
        assert (
            policy.startswith("default-src 'none'")
            and "unsafe" not in policy
            and "http" not in policy
        )
        assert (
            headers["Cross-Origin-Resource-Policy"] == "same-origin"
            and "Access-Control-Allow-Origin" not in headers
        )


def test_files_outside_the_films_and_reports_of_a_run_are_refused(
    tmp_path: Path, serve: Any
) -> None:
    make_run(tmp_path / "runs" / "a").close()
    run = tmp_path / "runs" / "a"
    report = run / "reports" / "step_000001" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<p>report")
    for secret in (
        tmp_path / "secret.html",
        tmp_path / "reports" / "s" / "secret.html",
        run / "checkpoints" / "x.html",
    ):
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("secret")
    (run / "reports" / "step_000001" / "link.html").symlink_to(tmp_path / "secret.html")
    (run / "reports" / "out").symlink_to(tmp_path / "reports" / "s")
    server = serve(tmp_path / "runs")
    names = [
        "../../secret.html",
        "reports/../../../secret.html",
        "reports/../config.yaml",
        "config.yaml",
        "",
        ".",
        "/",
    ]
    names += [
        str(tmp_path / "secret.html"),
        "reports/step_000001/link.html",
        "reports/out/secret.html",
        "videos/no.mp4",
    ]
    names += [
        "checkpoints/x.html",
        "reports/..%2F..%2F..%2Fsecret.html",
        "reports/step_000001/report.html\n",
        "a\0b",
    ]
    names += [
        "reports/step_000001/../../../../secret.html",
        "reports//step_000001/../secret.html",
        "reports/../summary.json",
    ]
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
    status, headers, body = get(
        server, "/file", {"run": run, "name": "reports/step_000001/report.html"}
    )
    assert (status, body) == (200, b"<p>report") and "sandbox" in headers["Content-Security-Policy"]


def test_parts_of_a_film(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    (tmp_path / "a" / "videos").mkdir()
    (tmp_path / "a" / "videos" / "step_1.mp4").write_bytes(bytes(range(100)))
    server = serve(tmp_path / "a")
    words = {"run": tmp_path / "a", "name": "videos/step_1.mp4"}
    for asked, first, last in (
        ("0-", 0, 99),
        ("10-19", 10, 19),
        ("90-500", 90, 99),
        ("-5", 95, 99),
        ("-500", 0, 99),
    ):
        status, headers, body = get(server, "/file", words, Range=f"bytes={asked}")
        assert status == 206 and headers["Content-Range"] == f"bytes {first}-{last}/100"
        assert body == bytes(range(first, last + 1)) and headers["Content-Type"] == "video/mp4"
    for asked in ("bytes=100-", "bytes=9-3", "bytes=-0"):
        assert get(server, "/file", words, Range=asked)[0] == 416
    for asked in ("bytes=-", "bytes=0-1,5-6", "lines=1-2"):
        assert get(server, "/file", words, Range=asked)[2] == bytes(range(100))


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=0-"}])
def test_a_film_of_30_gb_is_streamed(
    tmp_path: Path, serve: Any, headers: dict[str, str], peak_mb: Callable[[], float]
) -> None:
    make_run(tmp_path / "a").close()
    (tmp_path / "a" / "videos").mkdir()
    film = tmp_path / "a" / "videos" / "step_1.mp4"
    film.write_bytes(b"begins")
    os.truncate(film, 30 << 30)  # sparse
    server = serve(tmp_path / "a")
    peak_mb()
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(
        "GET",
        f"/file?{urlencode({'run': tmp_path / 'a', 'name': 'videos/step_1.mp4'})}",
        None,
        headers,
    )
    answer = connection.getresponse()
    assert int(answer.headers["Content-Length"]) == 30 << 30 and answer.read(6) == b"begins"
    connection.close()
    assert get(server, "/runs")[0] == 200 and peak_mb() < 20
    os.truncate(film, 0)
    assert get(server, "/file", {"run": tmp_path / "a", "name": "videos/step_1.mp4"})[2] == b""


def test_bad_questions_get_a_line(tmp_path: Path, serve: Any) -> None:
    make_run(tmp_path / "a").close()
    server, run = serve(tmp_path), str(tmp_path / "a")
    for start in ("-1", "9" * 30, "9" * 5000):
        assert get(server, "/data", {"run": run, "from": start})[0] == 400
    assert get(server, "/data")[0] == 400 and get(server, "/data", [("run", run)] * 2)[0] == 400
    assert get(server, "/x")[2] == b"/x: no such page"
    odd = tmp_path / os.fsdecode(b"\xff")  # no text in any encoding
    make_run(tmp_path / "o").close()
    (tmp_path / "o").rename(odd)
    (run_odd,) = (row["run"] for row in told(server, "/runs")["runs"] if row["run"] != run)
    assert len(told(server, "/data", {"run": run_odd})["rows"]) == 40
    (odd / "config.yaml").write_text("a: [")
    assert get(server, "/diff", {"run": run_odd})[0] == 200
    shutil.rmtree(odd)
    make_run(tmp_path / "b").close()
    (tmp_path / "b" / "summary.json").write_text("[" * 100_000)
    for name, file in (("c", "log.txt"), ("d", "metrics.jsonl")):  # read, a pipe would never end
        make_run(tmp_path / name).close()
        (tmp_path / name / file).unlink()
        os.mkfifo(tmp_path / name / file)
    (tmp_path / "a" / "videos").mkdir()
    os.mkfifo(tmp_path / "a" / "videos" / "x.mp4")
    assert [row["state"] for row in told(server, "/runs")["runs"]] == [
        "running",
        *["unreadable"] * 3,
    ]
    status, _, body = get(server, "/data", {"run": str(tmp_path / "d")})
    assert status == 500 and b"metrics.jsonl" in body
    (tmp_path / "a" / "config.yaml").write_text("a: [")
    status, _, body = get(server, "/diff", {"run": run})
    assert status == 200 and b"config.yaml" in body and b"is not YAML" in body and b"\n" not in body


# -------------------------------------------------------------------------------------- the command
def test_bad_input_is_one_line_with_the_cure(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a").close()
    port = serve(tmp_path).server_address[1]
    (tmp_path / "none").mkdir()
    for words, line in (
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
        assert main.main(["watch", *map(str, words)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {line}")


def started(folder: Path, *form: str) -> tuple[subprocess.Popen[str], str]:
    """The command in ``folder``, and the address that it prints."""
    code = (
        "import sys; from embodied_ppo.commands import main; code = main.main(['watch',"
        " *sys.argv[1:]]); "
    )
    code += "sys.exit(9 if 'torch' in sys.modules else code)"
    command = [sys.executable, "-c", code, *form]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    line = process.stdout.readline().strip()
    return process, json.loads(line)["address"] if form else line


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_ends_it_cleanly(tmp_path: Path, form: tuple[str, ...]) -> None:
    make_run(tmp_path / "runs" / "a").close()
    process, line = started(tmp_path, *form)
    address = urlsplit(line)
    assert address.hostname == "127.0.0.1" and address.port
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request("GET", "/runs")
    assert len(json.loads(connection.getresponse().read())["runs"]) == 1, "runs/ by default"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "" and "Traceback" not in err
    connection.close()


# -------------------------------------------------------------------------------------- the browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser) -> Browser:
    """Without what earlier tests saw."""
    browser.open("about:blank")
    browser.requests.clear()
    browser.problems.clear()
    return browser


def shown(page: Browser, tag: str) -> dict[str, int]:
    """Run's directory -> points of its curve."""
    found = (
        f"[...document.querySelectorAll('[data-tag=\"{tag}\"] path.main')].map(p => [p.dataset.run,"
        " +p.dataset.points])"
    )
    return {Path(run).name: points for run, points in page.evaluate(found)}


def text(page: Browser, place: str) -> str:
    return page.evaluate(f"document.querySelector('{place}').innerText").replace("\u200b", "")


def until(page: Browser, tag: str, points: dict[str, int]) -> None:
    deadline = time.monotonic() + 30
    while shown(page, tag) != points:
        assert time.monotonic() < deadline, shown(page, tag)
        time.sleep(0.1)


def test_the_page_follows_runs(tmp_path: Path, serve: Any, page: Browser) -> None:
    good, bad = make_run(tmp_path / "good", seed=3), make_run(tmp_path / "bad", seed=4)
    server = serve(tmp_path)
    page.open(server.address)
    until(page, "rollout/return", {"good": 40, "bad": 40})
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
    assert bars == ["collect 250 ms, update 750 ms"] * 2, "swapping is part of the others"

    page.evaluate("window.before = true")
    write(bad, 41, 45, kl=4.2)  # runs away
    until(page, "rollout/return", {"good": 40, "bad": 45})
    page.wait("document.querySelector('.warnings')")
    warning = (
        f"{tmp_path.name}/bad: policy/approx_kl is 4.2, above 0.03: updates move the policy too"
        " far: lower lr"
    )
    assert warning in text(page, ".warnings")
    assert "1 warning" in text(page, "#runs")

    bad.rewind(20)  # as a resumed run does
    until(page, "rollout/return", {"good": 40, "bad": 20})
    assert page.evaluate("!document.querySelector('.warnings')")
    new = make_run(tmp_path / "new", updates=5)
    until(page, "rollout/return", {"good": 40, "bad": 20, "new": 5})
    assert page.evaluate("window.before"), "all that without loading the page again"

    (tmp_path / "new" / "metrics.jsonl").write_text(
        '{"update": 1, "env_steps": 1, "rollout/return": NaN}\n{"upd'
    )
    until(page, "rollout/return", {"good": 40, "bad": 20})
    assert page.problems == []
    assert page.requests and {
        urlsplit(url).netloc for url in page.requests if not url.startswith("data:")
    } == {urlsplit(server.address).netloc}
    for log in (good, bad, new):
        log.close()


def test_the_page_tells_when_the_command_has_ended(tmp_path: Path, page: Browser) -> None:
    make_run(tmp_path / "runs" / "a").close()
    process, address = started(tmp_path)
    page.open(address)
    page.wait("document.querySelector('#said').textContent.startsWith('1 run, read')")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    page.wait("document.querySelector('#said').textContent.startsWith('no answer')")


def test_settings_by_keyboard(tmp_path: Path, serve: Any, page: Browser) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name).close()
    page.open(serve(tmp_path).address)
    until(page, "rollout/return", {"a": 40, "b": 40})
    focus = "document.activeElement"
    for _ in range(30):
        page.key("Tab")
        if page.evaluate(f"{focus}.id.startsWith('run ') && {focus}.id.endsWith('/a')"):
            break
    page.key(" ")
    until(page, "rollout/return", {"b": 40})
    page.key(" ")
    until(page, "rollout/return", {"a": 40, "b": 40})
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
    assert (
        text(page, "#amount") == "0.02"
        and page.evaluate("document.querySelectorAll('path.faint').length") > 0
    )
    for _ in range(30):
        page.key("Tab")
        if page.evaluate(f"{focus}.dataset.tag === 'rollout/return'"):
            break
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert text(page, '[data-tag="rollout/return"] .tip').split("\n")[0] == "2 s of run time"
    assert page.problems == []


@pytest.mark.parametrize("width", [900, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits(tmp_path: Path, serve: Any, page: Browser, width: int, dark: bool) -> None:
    for i in range(6):
        kwargs = {"text": "long " * 40, "i": i}
        make_run(
            tmp_path / f"experiment_with_a_long_name_{i}" / "2026-11-22_14-15-18.931-0",
            kl=0.2,
            env=kwargs,
        ).close()
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
    cut = """[...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().width).flatMap(svg => {
      const box = svg.getBoundingClientRect();
      const out = t => t.left < box.left || t.right > box.right + 1 || t.bottom > box.bottom;
      return [...svg.querySelectorAll('text')].filter(t => out(t.getBoundingClientRect())).map(t => t.textContent);
    })"""
    assert page.evaluate(cut) == [], "labels are cut"
    hidden = """[...document.querySelectorAll('.run')].filter(row => {
      const box = row.getBoundingClientRect(), x = box.right - 4;
      return ![box.top + 4, box.bottom - 4].every(y => row.contains(document.elementFromPoint(x, y)));
    }).map(row => row.innerText)"""
    assert page.evaluate(hidden) == [], "runs of the list are clipped"
    place = "document.querySelector('#phases').getBoundingClientRect().top"
    before = page.evaluate(place)
    time.sleep(2.5)
    assert page.evaluate(place) == before, "the page jumps when it reads again"


def test_film_and_report(tmp_path: Path, serve: Any, page: Browser) -> None:
    run = tmp_path / "run"
    make_run(run).close()
    make_film(run / "videos" / "step_000020.mp4")
    (run / "reports" / "step_000040").mkdir(parents=True)
    (run / "reports" / "step_000040" / "report.html").write_text(
        "<title>report</title><script>document.title = 'x'</script>"
    )
    page.open(serve(run).address)
    page.wait("document.querySelector('video')?.readyState >= 1")
    assert page.evaluate(
        "[video = document.querySelector('video'), video.videoWidth, video.duration].slice(1)"
    ) == [
        64,
        2,
    ]
    jump = (
        "new Promise(done => { video.onseeked = () => done(video.currentTime); video.currentTime ="
        " 1.5 })"
    )
    assert page.evaluate(jump) == 1.5
    make_film(run / "videos" / "step_000040.mp4")
    page.wait("document.querySelector('video').src.includes('step_000040')")
    assert page.problems == []
    page.open(page.evaluate("document.querySelector('#films a').href"))
    page.wait("document.title == 'report'")
    assert any("Blocked script" in p or "Content Security Policy" in p for p in page.problems), (
        "scripts are not run"
    )


def test_names_from_files_are_text_and_nothing_leaves(
    tmp_path: Path, serve: Any, page: Browser
) -> None:
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
    assert (
        page.evaluate("document.title") == "embodied-ppo watch"
        and page.evaluate("document.images.length") == 0
    )
    assert page.problems == []
    elsewhere = serve(tmp_path).address  # another origin
    assert page.evaluate(f"fetch('{elsewhere}').then(() => 'came', () => 'refused')") == "refused"
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_many_runs_and_none_with_rows(tmp_path: Path, serve: Any, page: Browser) -> None:
    for i in range(10):
        (tmp_path / f"run{i}").mkdir()
        (tmp_path / f"run{i}" / "metrics.jsonl").touch()
    page.open(serve(tmp_path).address)
    page.wait("document.querySelector('#said').textContent.startsWith('10 runs')")
    assert page.evaluate("document.querySelectorAll('#runs input').length") == 10
    assert page.evaluate("document.querySelectorAll('#runs input:checked').length") == 8
    words = [text(page, place) for place in ("#health", "#curves", "#phases", "#films", "#diff")]
    assert all(len(w.strip().split("\n")) >= 2 for w in words), "each section says why it is empty"
    assert page.problems == []
