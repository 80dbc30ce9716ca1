"""Graders in worker processes that crash, hang and are killed."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_helpers

from embodied_envs.base.errors import ConfigError
from embodied_ppo.rollout.rewards.graders import Limits, Sample
from embodied_ppo.rollout.rewards.worker_pool import GraderPool

GRADER_FILE = '''
import asyncio, ctypes, os, signal, subprocess, sys, time

loops = set()
print("loaded")

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the number in the response, or do what its keyword names."""
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "killed":  # by the kernel, say, until it was graded ``attempts`` times
        with open(extra_info["file"], "a") as file:
            file.write("x")
            if file.tell() <= extra_info["attempts"]:
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return 7
    if solution_str == "child":  # the child must end with the worker
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(extra_info["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if solution_str == "busy":
        while True:
            pass
    if solution_str == "raise":
        raise RuntimeError("broken grader")
    if solution_str == "quit":
        sys.exit(1)
    if solution_str == "nan":
        return float("nan")
    if solution_str == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        return 1
    if solution_str == "count":
        extra_info["calls"] = extra_info.get("calls", 0) + 1
        return extra_info["calls"]
    if solution_str == "pid":
        return {"score": 1, "pid": os.getpid()}
    same = solution_str == ground_truth
    return {"score": float(solution_str), "echo": extra_info.get("echo", 0), "same": same}

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0.001)
    if solution_str == "cancel":
        raise asyncio.CancelledError
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "raise":
        raise RuntimeError("broken grader")
    if solution_str == "late":
        await asyncio.sleep(1000)
    if solution_str == "blocks":
        time.sleep(1000)
    if solution_str == "wait":
        await asyncio.sleep(0.2)
        return 1.0
    return {"score": float(solution_str), "loops": len(loops)}
'''


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "rewards.py").write_text(GRADER_FILE)
    return f"{tmp_path}/rewards.py"


def sample(response: str, truth: str = "1", **extra: Any) -> Sample:
    return "mine", response, truth, extra


@pytest.fixture
def pool(file: str) -> Iterator[GraderPool]:
    pool = GraderPool(file, workers=2, limits=Limits(1.0))
    yield pool
    before = pids(pool)
    pool.close()
    pool.close()
    assert not any(map(alive, before))


def alive(pid: int | None) -> bool:
    """Return whether the process exists, also as a zombie."""
    assert pid is not None
    return Path(f"/proc/{pid}").exists()


def pids(pool: GraderPool) -> set[int | None]:
    return {worker.process.pid for worker in pool._workers if worker.process is not None}


def test_order_is_kept(pool: GraderPool) -> None:
    grades = pool.grade([sample(str(i), "5", echo=i) for i in range(100)])
    assert [g.score for g in grades] == list(range(100))
    assert grades[5].extra == {"echo": 5.0, "same": 1.0}
    assert grades[6].extra == {"echo": 6.0, "same": 0.0}
    assert pool.failures == 0 and pool.last_failure is None
    assert pool.grade([]) == []
    big = pool.grade([("mine", "7", "x" * 2_000_000, {})])  # more than a pipe holds
    assert big[0].score == 7


@pytest.mark.slow
def test_crashes_and_hangs_cost_one_sample_each(pool: GraderPool) -> None:
    before = pids(pool)
    bad = ["raise", "exit", "segfault", "hang", "nan", "busy", "quit"]
    responses = [x for i, word in enumerate(bad) for x in (word, str(i), str(i + 10))]
    grades = pool.grade([sample(r) for r in responses])
    for response, grade in zip(responses, grades, strict=True):
        if response in bad:
            assert grade.failed and math.isnan(grade.score), response
        else:
            assert grade.score == float(response) and not grade.failed
    assert pool.failures == len(bad)
    failure = str(pool.last_failure)  # the first one of the batch
    assert failure.startswith(
        "sample 0 of 21 (data_source = mine, ground_truth = '1', response = 'raise'): RuntimeError"
    )
    assert re.search(r"RuntimeError: broken grader, rewards.py line \d+$", failure)
    assert not any(map(alive, before - pids(pool)))
    assert [g.score for g in pool.grade([sample("1"), sample("2"), sample("3")])] == [1, 2, 3]
    assert pool.failures == len(bad)


@pytest.mark.slow
def test_children_of_a_grader_end_with_it(pool: GraderPool, tmp_path) -> None:
    assert pool.grade([sample("child", file=str(tmp_path / "pid"))])[0].failed
    assert run_helpers.processes_ended(int((tmp_path / "pid").read_text()))


def test_workers_ignore_interrupts_and_survive_kills(pool: GraderPool, tmp_path) -> None:
    assert pool.grade([sample("interrupt")])[0].score == 1 and pool.failures == 0
    for worker in pool._workers:
        worker.process.kill()
        worker.process.join()
    assert [g.score for g in pool.grade([sample("1"), sample("2"), sample("3")])] == [1, 2, 3]
    assert pool.failures == 0
    # A worker that is killed with a sample: another one grades it, once.
    killed = [sample("killed", file=str(tmp_path / str(n)), attempts=n) for n in (1, 9)]
    first, second, third = pool.grade([*killed, sample("3")])
    assert (first.score, third.score) == (7, 3) and not first.failed
    assert second.failed and pool.failures == 1
    assert (tmp_path / "9").read_text() == "xx"


def test_results_of_an_interrupted_batch_do_not_reach_the_next(pool: GraderPool) -> None:
    before = pids(pool)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.grade([sample("hang"), sample("1"), sample("2")])
    assert not any(map(alive, before))
    assert [g.score for g in pool.grade([sample("3"), sample("4"), sample("5")])] == [3, 4, 5]


def test_workers_end_with_their_parent(file: str) -> None:
    """Also during a sample, and if the parent is killed. Nothing they print is on stdout."""
    code = (
        "from embodied_ppo.rollout.rewards.graders import Limits\n"
        "from embodied_ppo.rollout.rewards.worker_pool import GraderPool\n"
        f"pool = GraderPool({file!r}, workers=1, limits=Limits(100))\n"
        "print(pool._workers[0].process.pid, flush=True)\n"
        "pool.grade([('', 'busy', '', {})])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        time.sleep(0.2)
        parent.kill()
    assert run_helpers.processes_ended(worker)


def test_async_graders_run_on_one_loop(file: str) -> None:
    pool = GraderPool(f"{file}:asynchronous", workers=0, limits=Limits(1))
    grades = pool.grade([sample("1"), sample("cancel"), sample("2")])
    assert [g.failed for g in grades] == [False, True, False]
    assert grades[2].score == 2 and grades[2].extra == {"loops": 1.0}
    assert pool.failures == 1 and "the grader was cancelled" in str(pool.last_failure)


@pytest.mark.parametrize("workers", [0, 2])
def test_async_graders_grade_at_the_same_time(file: str, workers: int) -> None:
    pool = GraderPool(f"{file}:asynchronous", workers=workers, limits=Limits(0.5))
    start = time.monotonic()
    grades = pool.grade([sample("wait")] * 16 + [sample("late"), sample("raise"), sample("3")])
    assert time.monotonic() - start < 1.5  # one after another: 3.7 s
    assert [g.failed for g in grades] == [False] * 16 + [True, True, False]
    assert pool.failures == 2 and "took longer than timeout_s = 0.5" in str(pool.last_failure)
    pool.close()


def test_a_crash_of_an_async_grader_costs_its_batch(file: str) -> None:
    pool = GraderPool(f"{file}:asynchronous", workers=1, limits=Limits(5))
    assert all(g.failed for g in pool.grade([sample("wait"), sample("exit")]))
    assert [g.score for g in pool.grade([sample("2")])] == [2]
    pool.close()
    assert pool.failures == 2 and "the worker exited with code 3" in str(pool.last_failure)


def test_no_workers_grade_in_this_process(file: str) -> None:
    pool = GraderPool(file, workers=0, limits=Limits(1))
    assert pool.grade([sample("pid")])[0].extra["pid"] == os.getpid()
    grades = pool.grade([sample("3"), sample("raise"), sample("quit"), sample("nan")])
    assert [g.failed for g in grades] == [False, True, True, True]
    assert grades[0].score == 3 and pool.failures == 3
    # A grader that changes extra_info does not change the data.
    assert [pool.grade([counted])[0].score for counted in [sample("count")] * 2] == [1, 1]
    pool.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in range(4):  # the pipe, or the process, has no file left
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count, limits[1])
        )
        try:
            with pytest.raises(ConfigError, match=r"^reward\.grader = .*Too many open files"):
                GraderPool(file, workers=2, limits=Limits(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
