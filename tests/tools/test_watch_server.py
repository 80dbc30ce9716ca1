"""Tests of `embodied-ppo watch`: reading of runs, the server, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import imageio.v3 as imageio
import numpy as np
import pytest
import yaml
from headless_browser import Browser
from hostile_files import WRITERS, put
from run_helpers import assert_refused

from embodied_ppo.tools import watch_server
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
    servers: list[watch_server.WatchServer] = []

    def start(*paths: Path) -> watch_server.WatchServer:
        server = watch_server.listen([str(path) for path in paths])
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(
    server: watch_server.WatchServer, path: str, query: Any = (), **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def get_json(server: watch_server.WatchServer, path: str, query: Any = ()) -> Any:
    status, _, body = get(server, path, query)
    assert status == 200, body
    return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# --------------------------------------------------------------------------------- reading of runs
def test_growing_file_is_read_once(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"update": 1}\n{"update": 2}\n{"upd')
    first = watch_server.read_rows(file, 0, "")
    assert [row["update"] for row in first["rows"]] == [1, 2], "an incomplete line is not read"
    assert first["next"] == 28 and not first["broken"] and not first["more"]
    with open(file, "a") as f:
        f.write('ate": 3}\n')
    second = watch_server.read_rows(file, first["next"], first["mark"])
    assert second["from"] == 28 and [row["update"] for row in second["rows"]] == [3]
    third = watch_server.read_rows(file, second["next"], second["mark"])
    assert third["rows"] == []
    assert (third["next"], third["mark"]) == (second["next"], second["mark"])


def test_invalid_lines_and_numbers(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"a": NaN, "b": -Infinity, "c": 1e999, "d": null, "e": "x", "f":'
        b' 2}\n{"torn\n[1]\n\xff\n{"f": 3}\n'
    )
    block = watch_server.read_rows(file, 0, "")
    assert block["rows"] == [{"a": None, "b": None, "c": None, "d": None, "f": 2}, {"f": 3}]
    assert block["broken"] == 3
    # Line 1 exceeds Python's recursion limit, the number of line 2 the range of floats.
    file.write_text("[" * 100_000 + '\n{"a": 1' + "0" * 400 + "}\n")
    block = watch_server.read_rows(file, 0, "")
    assert block["rows"] == [{"a": None}] and block["broken"] == 1


def test_large_files_and_links_are_not_read(tmp_path) -> None:
    make_run(tmp_path / "a").close()
    file = tmp_path / "a" / "summary.json"
    file.touch()
    os.truncate(file, 3 << 30)
    note = watch_server.status(tmp_path / "a")["note"]
    assert f"has 3221225472 bytes, the limit is {watch_server.MAX_FILE_SIZE}" in note
    file.unlink()
    (tmp_path / "elsewhere").write_text('{"updates": 40, "password": "secret"}')
    file.symlink_to(tmp_path / "elsewhere")
    status = watch_server.status(tmp_path / "a")
    assert "is a link, which is not followed" in status["note"] and "secret" not in str(status)


def test_runs_in_folders_are_found(tmp_path) -> None:
    for name in ("a/1", "a/2", "b", "x/x/x/4", "x/x/x/x/5", ".trash/6", "a/1/reports/step_1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    runs = watch_server.find_runs([tmp_path, tmp_path / "a"]).values()
    names = [str(path.relative_to(tmp_path)) for path in runs]
    assert names == ["a/1", "a/2", "b", "x/x/x/4"]
    one, two = str(tmp_path / "a/1"), str(tmp_path / "a/2")
    assert watch_server.labels([one, two]) == {one: "a/1", two: "a/2"}
    assert watch_server.labels([one]) == {one: "a/1"}


def test_states_of_a_run(tmp_path) -> None:
    run = tmp_path / "run"
    log = make_run(run)
    status = watch_server.status(run)
    assert (status["state"], status["update"], status["updates"]) == ("running", 40, 100)
    assert status["update_s"] == 1.0
    for name in os.listdir(run):
        os.utime(run / name, (time.time() - 90, time.time() - 90))
    status = watch_server.status(run)
    assert status["state"] == "silent" and 90 <= status["age_s"] < 100
    log.say("failed: TrainingError: loss is nan\nsecond line")
    log.say("warning: wandb is off: does not answer for 60 s at the end of the run")
    status = watch_server.status(run)
    assert (status["state"], status["note"]) == ("failed", "TrainingError: loss is nan")
    log.say("interrupted after update 40; saved x; continue with resume=x")
    status = watch_server.status(run)
    assert status["state"] == "interrupted"
    assert status["note"] == "after update 40; saved x; continue with resume=x"
    log.say("interrupted")
    assert watch_server.status(run)["note"] == ""
    log.say(f"test: CartPole-v1, updates 41 to 60, in {run}")
    write(log, 41, 60)
    assert watch_server.status(run)["state"] == "running"
    (run / "summary.json").write_text('{"updates": 60}')
    expected = ("finished", 60)
    assert (watch_server.status(run)["state"], watch_server.status(run)["updates"]) == expected
    log.say(f"test: CartPole-v1, updates 61 to 80, in {run}")
    assert watch_server.status(run)["state"] == "running", "the summary is older"
    (run / "summary.json").write_text("{")
    assert watch_server.status(run)["state"] == "unreadable"
    (folder := tmp_path / "imported").mkdir()
    for name in ("metrics.jsonl", "log.txt", "import.json"):
        (folder / name).touch()
    assert watch_server.status(folder)["state"] == "finished"
    log.close()


def test_differences_of_options(tmp_path) -> None:
    env = {"id": "X", "kwargs": {}}
    make_run(tmp_path / "a", env=env, algorithm={"lr": 0.1, "gamma": 0.9}).close()
    make_run(tmp_path / "b", env=env, algorithm={"lr": 0.2, "gamma": 0.9, "n": None}).close()
    assert watch_server.differences([tmp_path / "a", tmp_path / "b"]) == [
        {"option": "algorithm.lr", "values": ["0.1", "0.2"]},
        {"option": "algorithm.n", "values": [None, "null"]},
    ]
    make_run(tmp_path / "c", env={"id": "Y", "kwargs": {}}).close()
    # The other runs are compared although the third is damaged.
    for damage in (b"a: [", b"\xff"):
        (tmp_path / "c" / "config.yaml").write_bytes(damage)
        first, second = watch_server.differences([tmp_path / name for name in "abc"])
        assert first == {"option": "algorithm.lr", "values": ["0.1", "0.2", None]}
        assert second == {"option": "algorithm.n", "values": [None, "null", None]}


# ------------------------------------------------------------------------------------------- server
def branch(folder: Path, parent: Path, update: int, options: dict[str, Any] | None = None) -> Log:
    """Create a run that branches from another one."""
    log = make_run(folder, updates=5)
    changed = {name: tuple(values) for name, values in (options or {}).items()}
    relative = os.path.relpath(parent, folder)
    link = Parent(str(parent), relative, update, "0", changed)
    (folder / "parent.json").write_text(link.text())
    return log


def test_branches_are_linked_with_their_runs(tmp_path) -> None:
    make_run(tmp_path / "a").close()
    branch(tmp_path / "b", tmp_path / "a", 20, {"algorithm.lr": [1e-3, None]}).close()
    branch(tmp_path / "c", tmp_path / "gone", 3).close()
    make_run(tmp_path / "d").close()
    (tmp_path / "d" / "parent.json").write_text("[]")
    found = watch_server.branches(watch_server.find_runs([tmp_path]))
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    assert found == {
        a: None,
        b: {"run": a, "name": "a", "update": 20, "options": [["algorithm.lr", "0.001", "null"]]},
        c: {"run": None, "name": "gone", "update": 3, "options": []},
        d: None,
    }


def test_server_lists_new_runs(tmp_path, serve: Any) -> None:
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


def test_requests_for_other_hosts_are_refused(tmp_path, serve: Any) -> None:
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


def test_only_videos_and_reports_of_a_run_are_sent(tmp_path, serve: Any) -> None:
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
    for start in ("abc", "-1", "1" * 5000):
        status, _, body = get(server, "/data", {"run": run, "from": start})
        assert status == 400 and body.endswith(b": write a whole number of bytes")
    raw = b"GET /../../secret.html HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(server.server_address[:2], timeout=10) as plain:
        plain.sendall(raw)
        assert plain.recv(100).startswith(b"HTTP/1.1 404")
    query = {"run": run, "name": "reports/step_000001/report.html"}
    status, headers, body = get(server, "/file", query)
    assert (status, body) == (200, b"<p>report") and "sandbox" in headers["Content-Security-Policy"]


FILES = ("parent.json", "summary.json", "config.yaml", "metrics.jsonl", "log.txt")


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_of_one_run_do_not_hide_others(
    tmp_path, serve: Any, name: str, capfd
) -> None:
    make_run(tmp_path / "a", seed=1).close()
    make_run(tmp_path / "b", seed=2).close()
    server, runs = serve(tmp_path), [("run", str(tmp_path / name)) for name in "ab"]
    for kind in WRITERS:
        put(tmp_path / "b" / name, kind)
        rows = {Path(row["run"]).name: row for row in get_json(server, "/runs")["runs"]}
        assert rows["a"]["state"] == "running" and not rows["a"]["note"], kind
        note = rows["b"]["note"] if "b" in rows else ""
        assert "\n" not in note and len(note) <= watch_server.NOTE_LENGTH, kind
        if kind != "missing" and name == "summary.json":
            assert f"{name} " in note, kind
        status, _, body = get(server, "/data", runs[1:])
        assert status in (200, 404, 500) and len(body) < 10_000, kind
        if "b" in rows:
            assert get(server, "/diff", runs)[0] == 200, kind
        if (path := tmp_path / "b" / name).is_dir():
            path.rmdir()
    assert capfd.readouterr().err == "", "no traceback of the server"


# ------------------------------------------------------------------------------------------ command
def test_invalid_arguments_are_refused(tmp_path, serve: Any, capsys) -> None:
    make_run(tmp_path / "a").close()
    port = serve(tmp_path).server_address[1]
    (tmp_path / "none").mkdir()
    for arguments, named in (
        ([tmp_path / "x"], f"{tmp_path}/x"),
        ([tmp_path / "none"], "metrics.jsonl"),
        ([tmp_path, "--port", port], f"--port {port}"),
        ([tmp_path, "--port", 70000], "--port 70000"),
        ([tmp_path, "--port", "x"], "--port"),
        ([tmp_path, "--prot", 1], "did you mean --port?"),
    ):
        assert_refused(capsys, ["watch", *map(str, arguments)], named)


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
def test_ctrl_c_ends_the_command(tmp_path, flags: tuple[str, ...]) -> None:
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
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "" and "Traceback" not in err
    connection.close()


# ------------------------------------------------------------------------------------------ browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
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
def test_page_follows_runs(tmp_path, serve: Any, page: Browser) -> None:
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
def test_video_and_report(tmp_path, serve: Any, page: Browser) -> None:
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


def test_names_from_files_are_shown_as_text(tmp_path, serve: Any, page: Browser) -> None:
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
