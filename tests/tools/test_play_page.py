"""The page of ``embodied-ppo play`` in a real browser, and its command."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import imageio.v3 as imageio
import numpy as np
import pytest
from headless_browser import Browser
from run_helpers import assert_refused

from embodied_ppo.commands import main
from embodied_ppo.evaluation.video import RenderProcess
from embodied_ppo.options.schema import EvaluateConfig
from embodied_ppo.tools.play_page import Page
from embodied_ppo.tools.play_sources import play_run, read_report

pytestmark = pytest.mark.slow
SOFTWARE_RENDERER = ("--use-angle=swiftshader", "--enable-unsafe-swiftshader")
TINY = ("experiment=go1_joystick", "env.num_envs=4", "model.hidden=[16]", "compile=never")
BATCH = ("algorithm.horizon=8", "algorithm.global_batch_size=16", "save_every=1", "--quiet")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Train one update of Go1Joystick and evaluate three episodes."""
    folder = tmp_path_factory.mktemp("runs") / "go1"
    options = ("updates=1", "evaluation.episodes=0", f"run_dir={folder}")
    assert main.main(["train", *TINY, *BATCH, *options]) == 0
    evaluate = (f"checkpoint={folder}", "episodes=3", "seed=5", "video=false", "--quiet")
    assert main.main(["evaluate", *evaluate]) == 0
    return folder


def wait(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true; return its value."""
    deadline = time.monotonic() + 300
    while not (value := condition()):
        assert time.monotonic() < deadline, "never true"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"), SOFTWARE_RENDERER)
    yield opened
    opened.close()


@pytest.fixture
def page(run: Path, browser: Browser, tmp_path) -> Iterator[Page]:
    """Serve the page of the report of the run, which the browser shows."""
    options, report = read_report(next((run / "reports").iterdir()))
    with play_run(options) as (player, weights):
        served = Page(
            player, title="Go1", video_dir=tmp_path, weights=weights, episodes=report["episodes"]
        )

        def interrupt() -> None:
            raise KeyboardInterrupt

        def serve() -> None:
            with pytest.raises(KeyboardInterrupt):
                served.serve()

        thread = threading.Thread(target=serve)
        thread.start()
        browser.problems.clear()
        browser.requests.clear()
        browser.open(served.address)
        browser.wait("document.body.innerText.includes('track')")
        yield served
        served._events.put(interrupt)
        thread.join(timeout=60)
        assert not thread.is_alive()
        browser.open("about:blank")


def click(browser: Browser, text: str) -> None:
    """Click the button with this text."""
    buttons = "[...document.querySelectorAll('button, label')]"
    find = f"{buttons}.find(x => x.innerText.trim() === {text!r})"
    browser.wait(find)
    browser.evaluate(f"{find}.click()")


def mouse(browser: Browser, kind: str, x: float, y: float) -> None:
    browser.call(
        "Input.dispatchMouseEvent",
        type=kind,
        x=x,
        y=y,
        button="left",
        buttons=0 if kind == "mouseReleased" else 1,
        clickCount=1,
    )
    time.sleep(0.1)


def test_robot_is_driven_pushed_and_dragged(page: Page, browser: Browser) -> None:
    player = page.player
    wait(lambda: player.steps > 3)
    browser.wait("document.querySelector('canvas')")
    assert [r for r in browser.requests if not r.startswith((page.address, "data:", "blob:"))] == []
    assert not [p for p in browser.problems if "exception" in p.lower()]

    click(browser, "Zero")
    wait(lambda: player.held == [0.0, 0.0, 0.0])
    wait(lambda: not np.any(player.frames[-1].command))

    click(browser, "Pause")
    wait(lambda: player.paused)
    browser.wait("document.body.innerText.includes('Resume')")
    before = player._frame(0.0, {}).velocity
    click(browser, "left")
    wait(lambda: (player._frame(0.0, {}).velocity != before).any())
    change = player._frame(0.0, {}).velocity - before
    assert change[:3] @ change[:3] == pytest.approx(1.0)  # 1 m/s

    # Drag what is in the middle of the picture: the robot.
    mouse(browser, "mouseMoved", 800, 500)
    mouse(browser, "mousePressed", 800, 500)
    for x in range(810, 1000, 20):
        mouse(browser, "mouseMoved", x, 420)
    pull = wait(lambda: player.pull)
    assert pull.body > 0
    click(browser, "Resume")
    wait(lambda: not player.paused)
    mouse(browser, "mouseReleased", 990, 420)
    wait(lambda: player.pull is None)


def test_gamepad_sets_the_commands(page: Page, browser: Browser) -> None:
    """A stick half up and to the left: half the largest velocities; removed: zero."""
    player, pads = page.player, "navigator.getGamepads = () => [{}]"
    assert player.held is None
    pad = "null, {connected: true, axes: [-0.5, -0.5, 0.05, 0]}"
    browser.evaluate(pads.format(pad))
    wait(lambda: player.held is not None)
    wait(lambda: player.held == pytest.approx([0.5, 0.25, 0.0], abs=0.01))
    wait(lambda: player.frames[-1].command == pytest.approx([0.5, 0.25, 0.0], abs=0.01))
    browser.evaluate(pads.format("{connected: true, axes: [0, 1, 1, 0]}"))
    wait(lambda: player.held == pytest.approx([-0.8, 0.0, -1.0], abs=0.01))
    browser.evaluate(pads.format("null"))
    wait(lambda: player.held == [0.0, 0.0, 0.0])
    assert not [p for p in browser.problems if "exception" in p.lower()]


def test_replay_equals_the_report_and_is_exported(page: Page, browser: Browser, tmp_path) -> None:
    click(browser, "Replay")
    browser.wait("document.body.innerText.includes('equal to the report')")
    player = page.player
    wait(lambda: player.cursor is not None and player.cursor > 3)
    click(browser, "Pause")
    wait(lambda: player.paused)
    page._seconds.value = 1.0
    frames = min(player.shown + 1, 50)
    click(browser, "Save as mp4 (720p)")
    file = wait(lambda: next(tmp_path.glob("*.mp4"), None))
    video = imageio.imread(file, plugin="FFMPEG")
    assert video.shape[1:] == (720, 1280, 3)
    assert len(video) == pytest.approx(frames / 2, abs=2)  # 50 steps and 25 pictures per second
    assert video[0].std() > 5  # neither black nor empty
    browser.wait("document.body.innerText.includes('saved')")
    assert [x for x in tmp_path.iterdir() if x != file] == []
    click(browser, "Next episode")
    wait(lambda: player.cursor is None)


def test_new_checkpoints_are_loaded(run: Path, tmp_path) -> None:
    copy = tmp_path / "go1"
    subprocess.run(["cp", "-a", run, copy], check=True)
    with play_run(EvaluateConfig(checkpoint=str(copy))) as (player, weights):
        assert weights.update() == ""
        old = [x.clone() for x in player.policy.parameters()]  # pyright: ignore
        assert main.main(["train", f"resume={copy}", "updates=3", "--quiet"]) == 0
        assert "step_000003" in weights.update()
        assert weights.source.update == 3
        new = list(player.policy.parameters())  # pyright: ignore
        assert any((a != b).any() for a, b in zip(old, new, strict=True))
        # A damaged checkpoint is not loaded; the next valid one is.
        (copy / "checkpoints" / "step_000003").rename(copy / "checkpoints" / "step_000004")
        (copy / "checkpoints" / "latest").unlink()
        (copy / "checkpoints" / "latest").symlink_to("step_000004")
        (copy / "checkpoints" / "step_000004" / "policy.pt").write_bytes(b"x")
        assert "not loaded" in weights.update()
        assert weights.source.update == 3
        player.advance()


def test_one_process_at_a_time_renders_and_is_stopped(run: Path, tmp_path, monkeypatch) -> None:
    with play_run(EvaluateConfig(checkpoint=str(run))) as (player, weights):
        page = Page(player, title="Go1", video_dir=tmp_path, weights=weights)
        page._save_video()
        export = page._export
        page._save_video()
        assert page._export is export and len([*tmp_path.iterdir()]) == 1
        # A run that is deleted meanwhile does not end the page.
        look = Mock(side_effect=[OSError("deleted"), KeyboardInterrupt()])
        monkeypatch.setattr(page, "_look_for_changes", look)
        with pytest.raises(KeyboardInterrupt):
            page.serve()
        assert page._message == "paused: deleted"
    process = RenderProcess(functools.partial(_sleep, 600.0), tmp_path)
    assert process.wait(0.1) is None
    process.stop()
    assert process.wait(10)
    (tmp_path / "stderr").unlink()  # with its run
    assert "without a message" in str(process.wait(10))


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command as a user does."""
    line = "import sys; from embodied_ppo.commands import main; sys.exit(main.main())"
    return subprocess.Popen(
        [sys.executable, "-c", line, "play", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_command_prints_the_address_and_ends_with_ctrl_c(run: Path) -> None:
    process = start("env.id=PandaPickCube", "agent=random", "--json")
    assert process.stdout
    address = json.loads(process.stdout.readline())["address"]
    assert "</html>" in urllib.request.urlopen(address).read().decode()
    port = address.rstrip("/").rpartition(":")[2]
    second = start(run, "--port", port)
    _, error = second.communicate(timeout=120)
    assert second.returncode == 2
    assert f"--port {port}" in error.splitlines()[-1]
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert "Traceback" not in error and "ssh -L" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "RUN"),
        (("missing",), "missing"),
        (("{run}", "agent=best"), "agent=best"),
        (("{run}", "episodes=3"), "episodes"),
        (("{run}", "env.nonsense=3"), "nonsense"),
        (("{run}", "episode=x"), "episode"),
        (("{run}", "{run}"), "2 runs"),
        (("env.id=Go1Joystick", "agent=trained"), "agent=trained"),
        (("env.id=CartPole-v1",), "CartPole-v1"),
        (("{empty}",), "is no run"),
        (("{run}/reports/{report}", "seed=3"), "seed"),
        (("{moved}",), "name the run, or move the report there"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...], word: str, run: Path, tmp_path, capsys
) -> None:
    report, empty = next((run / "reports").iterdir()), tmp_path / "empty"
    empty.mkdir()
    moved = shutil.copytree(report, tmp_path / "moved")
    names = {"run": run, "empty": empty, "report": report.name, "moved": moved}
    filled = [x.format(**names) for x in arguments]
    assert_refused(capsys, ["play", *filled], word)
