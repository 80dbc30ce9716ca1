"""Tests of the supervisor: crashes, exits by libraries, calls that do not return."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import run_helpers

from embodied_envs.base import watchdog
from embodied_envs.base.errors import ProcessLost, TrainingError

PRELUDE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from embodied_envs.base import watchdog
from embodied_ppo.commands.supervisor import supervise

def main():
    watchdog.describe(env_id="Task-v0", during="update 4")
    watchdog.log_to(Path("log.txt"))
    {body}
    return 0

sys.exit(supervise(main))
"""
IN_STEP = "with watchdog.stepping: "


def command(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE.format(body=body)]


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("print('result')", 0, ""),
        ("return 2", 2, ""),
        (
            IN_STEP + "os._exit(0)",
            3,
            "env.id=Task-v0: step(): the process was ended with exit code 0 (os._exit",
        ),
        (
            IN_STEP + "ctypes.string_at(0)",
            3,
            "env.id=Task-v0: step(): the process was ended by SIGSEGV (update 4)",
        ),
        (
            "os.kill(os.getpid(), 9)",
            3,
            "the process was ended by SIGKILL (the kernel does so where memory runs out",
        ),
        (  # PyDLL keeps the interpreter's lock: no thread of the process could report it
            "watchdog.set_limit(0.2)\n    with watchdog.resetting: ctypes.PyDLL(None).sleep(60)",
            3,
            "env.id=Task-v0: reset() has not returned for 0.2 s (env.step_timeout_s) (update 4)",
        ),
        ("os.kill(os.getppid(), 15)\n    time.sleep(60)", 130, "interrupted"),
        ("import atexit; atexit.register(os.abort); return 2", 2, ""),  # a crash at the exit
    ],
)
def test_last_line_and_exit_code(body: str, code: int, last: str, tmp_path) -> None:
    start = time.monotonic()
    process = subprocess.run(command(body), capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == code, process.stderr
    if last:
        assert process.stderr.splitlines()[-1].startswith(f"error: {last}"), process.stderr
    else:
        assert not process.stderr
    assert process.stdout.count("result") == body.count("result")
    assert time.monotonic() - start < 30
    if code == 3:
        assert f" failed: {last}" in (tmp_path / "log.txt").read_text()


REQUESTS = """
    requests = []
    def handle(number, frame):
        if not watchdog.is_repetition():
            requests.append(number)
    signal.signal(signal.SIGINT, handle)
    print("ready", os.getpid(), flush=True)
    time.sleep(3.0)
    print(len(requests), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["command", "group", "child", "group twice"])
def test_signal_is_one_request(receiver: str) -> None:
    run = subprocess.Popen(
        command(REQUESTS), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    child = int(run.stdout.readline().split()[1])
    assert child != run.pid
    for _ in range(1 + receiver.endswith("twice")):
        if receiver.startswith("group"):
            os.killpg(run.pid, signal.SIGINT)
        else:
            os.kill(run.pid if receiver == "command" else child, signal.SIGINT)
        time.sleep(0.3)
    assert run.stdout.readline().split() == [str(1 + receiver.endswith("twice"))]
    assert run.wait(60) == 0


def test_child_ends_with_the_command() -> None:
    run = subprocess.Popen(
        command(REQUESTS.replace("3.0", "60")), stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    child = int(run.stdout.readline().split()[1])
    run.kill()
    run.wait()
    assert run_helpers.processes_ended(child)


@pytest.mark.slow
def test_pause_by_the_user_does_not_count(tmp_path) -> None:
    """Ctrl-Z stops the process group during a simulator's call."""
    call = "with watchdog.stepping: print('ready', flush=True); time.sleep(0.5)"
    body = f"watchdog.set_limit(6.0)\n    {call}"  # far above the delays of a loaded machine
    run = subprocess.Popen(
        command(body), stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    os.killpg(run.pid, signal.SIGSTOP)
    time.sleep(8.0)
    os.kill(run.pid, signal.SIGCONT)  # the parent first: the child has not ended its call
    time.sleep(0.3)
    os.killpg(run.pid, signal.SIGCONT)
    assert run.wait(30) == 0


def test_new_run_does_not_use_the_log_of_the_previous_one(reset_watchdog: Any, tmp_path) -> None:
    """The jobs of a sweep share a process, so a crash must not be logged in the previous run."""
    reset_watchdog.log_to(tmp_path / "log.txt")
    reset_watchdog.describe(env_id="Old-v0", during="update 9")
    reset_watchdog.clear()
    reset_watchdog.describe(env_id="New-v0")
    with reset_watchdog.constructing:
        message = "env.id=New-v0: its constructor: the process crashed; resume"
        assert reset_watchdog.exit_message("crashed").startswith(message)
    assert reset_watchdog.log_path() is None


@pytest.fixture
def reset_watchdog() -> Any:
    """Return the watchdog of this process and reset it afterwards."""
    yield watchdog
    watchdog.set_limit(None)
    watchdog.describe(env_id="", during="")


def test_exit_of_a_simulator_is_an_error(reset_watchdog: Any) -> None:
    reset_watchdog.describe(env_id="Task-v0", during="evaluation")
    message = r"env\.id=Task-v0: step\(\) called sys\.exit\(5\) \(evaluation\)"
    with pytest.raises(TrainingError, match=message), reset_watchdog.stepping:
        sys.exit(5)
    assert not reset_watchdog.timeout_message()


def test_calls_beyond_their_limit_are_overdue(reset_watchdog: Any) -> None:
    reset_watchdog.set_limit(0.05)
    assert not reset_watchdog.timeout_message()
    with reset_watchdog.stepping:
        assert not reset_watchdog.timeout_message()
        message = r"step\(\) has not returned for 0\.05 s \(env\.step_timeout_s\)"
        with pytest.raises(ProcessLost, match=message):
            reset_watchdog.wait_for_timeout()
        reset_watchdog.set_limit(None)
        assert not reset_watchdog.timeout_message()
    reset_watchdog.set_limit(0.0)
    assert not reset_watchdog.timeout_message()
