"""Graders in worker processes that crash, hang and are killed."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_helpers

from embodied_ppo.core.types import ConfigError
from embodied_ppo.data.synthetic_tasks import TaskGrader
from embodied_ppo.rewards.graders import GRADERS, Grade, Sample
from embodied_ppo.rewards.worker_pool import GraderPool

GRADER_FILE = '''
import asyncio, ctypes, os, signal, subprocess, sys, time

loops = set()

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the number in the response, or do what its keyword names."""
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "hang":
        time.sleep(1000)
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
    if solution_str.startswith("fork"):
        os.fork()
        return float(solution_str[4:])
    if solution_str == "silent":
        raise type("Silent", (Exception,), {"__str__": lambda self: 1 / 0})()
    if solution_str == "pid":
        return {"score": 1, "pid": os.getpid()}
    same = solution_str == ground_truth
    return {"score": float(solution_str), "echo": extra_info.get("echo", 0), "same": same}

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0.001)
    if solution_str == "cancel":
        raise asyncio.CancelledError
    return {"score": float(solution_str), "loops": len(loops)}
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(GRADER_FILE)
    return f"{tmp_path}/rewards.py"


def sample(response: str, truth: str = "1", **extra: Any) -> Sample:
    return "mine", response, truth, extra


@pytest.fixture
def pool(file: str) -> Iterator[GraderPool]:
    pool = GraderPool(file, workers=2, timeout_s=1.0)
    yield pool
    pids = [worker.process.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert not any(map(alive, pids))


def alive(pid: int | None) -> bool:
    """Return whether the process exists, also as a zombie."""
    assert pid is not None
    return Path(f"/proc/{pid}").exists()


def pids(pool: GraderPool) -> set[int | None]:
    return {worker.process.pid for worker in pool._workers}


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
            assert grade == Grade(0.0, failed=True), response
        else:
            assert grade.score == float(response) and not grade.failed
    assert pool.failures == len(bad)
    failure = str(pool.last_failure)  # the first one of the batch
    assert failure.startswith(
        "sample 0 of 21 (data_source = mine, ground_truth = '1', response = 'raise'): RuntimeError"
    )
    assert re.search(r"RuntimeError: broken grader, rewards.py line \d+$", failure)
    assert len(pids(pool)) == 2 and not any(map(alive, before - pids(pool)))
    assert [g.score for g in pool.grade([sample("1"), sample("2"), sample("3")])] == [1, 2, 3]
    assert pool.failures == len(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("exit", "the worker exited with code 3"),
        ("segfault", "the worker died of SIGSEGV"),
        ("hang", "took longer than timeout_s = 1"),
        ("nan", "ValueError: result = 'nan' of the grader is no finite number"),
        ("quit", "SystemExit: 1, rewards.py line"),
    ],
)
def test_causes_of_failures(pool: GraderPool, word: str, cause: str) -> None:
    before = pids(pool)
    grades = pool.grade([sample("4"), sample(word), sample("5")])
    assert [(g.score, g.failed) for g in grades] == [(4, False), (0, True), (5, False)]
    assert f"response = '{word}'): {cause}" in str(pool.last_failure)
    assert len(before & pids(pool)) == (
        2 if word in ("nan", "quit") else 1
    )  # one worker is replaced


@pytest.mark.slow
def test_children_of_a_grader_end_with_it(pool: GraderPool, tmp_path: Path) -> None:
    assert pool.grade([sample("child", file=str(tmp_path / "pid"))])[0].failed
    child = int((tmp_path / "pid").read_text())
    assert run_helpers.processes_ended(child)


def test_workers_ignore_interrupts_and_survive_idle_deaths(pool: GraderPool) -> None:
    assert pool.grade([sample("interrupt")])[0].score == 1 and pool.failures == 0
    for worker in pool._workers:
        worker.process.kill()
        worker.process.join()
    assert [g.score for g in pool.grade([sample("1"), sample("2"), sample("3")])] == [1, 2, 3]
    assert pool.failures == 0


def test_results_of_an_interrupted_batch_do_not_reach_the_next(
    pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pool._events

    def interrupted() -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(pool, "_events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.grade([sample("1"), sample("2")])
    monkeypatch.setattr(pool, "_events", events)
    assert [g.score for g in pool.grade([sample("3"), sample("4"), sample("5")])] == [3, 4, 5]


def test_workers_end_with_their_parent(file: str) -> None:
    """Also during a sample, and if the parent is killed."""
    code = (
        "from embodied_ppo.rewards.worker_pool import GraderPool\n"
        f"pool = GraderPool({file!r}, workers=1, timeout_s=100)\n"
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


def test_graders_that_cannot_be_loaded(file: str, tmp_path: Path) -> None:
    message = r"^reward.grader = .*rewards.py:compute: compute does not exist; did you mean"
    with pytest.raises(ConfigError, match=message):
        GraderPool(f"{file}:compute", workers=1, timeout_s=1)
    (tmp_path / "dies.py").write_text("import os; os._exit(5)")
    with pytest.raises(ConfigError, match=r"grader = .*dies.py: the worker exited with code 5"):
        GraderPool(f"{tmp_path}/dies.py", workers=2, timeout_s=1)


@pytest.mark.slow
def test_a_grader_that_cannot_be_loaded_again(file: str) -> None:
    """The worker crashes after its file was deleted. The batch ends; the next batch tries again."""
    pool = GraderPool(file, workers=1, timeout_s=1)
    text = Path(file).read_text()
    Path(file).unlink()
    grades = pool.grade([sample("1"), sample("exit"), sample("2")])
    assert [g.failed for g in grades] == [False, True, True]
    assert [g.score for g in grades] == [1, 0, 0] and pool.failures == 2
    Path(file).write_text(text)
    assert pool.grade([sample("2")])[0].score == 2
    pool.close()


def test_async_graders_run_on_one_loop(file: str) -> None:
    pool = GraderPool(f"{file}:asynchronous", workers=0, timeout_s=1)
    grades = pool.grade([sample("1"), sample("cancel"), sample("2")])
    assert [g.score for g in grades] == [1, 0, 2] and grades[2].extra == {"loops": 1.0}
    assert pool.failures == 1 and "the grader was cancelled" in str(pool.last_failure)


def test_async_in_workers(file: str) -> None:
    pool = GraderPool(f"{file}:asynchronous", workers=1, timeout_s=5)
    assert [g.score for g in pool.grade([sample("1"), sample("2")])] == [1, 2]
    pool.close()


def test_functions_in_workers() -> None:
    pool = GraderPool(GRADERS["exact"], workers=1, timeout_s=5)
    grades = pool.grade([sample("aa", "aa"), sample("ab", "aa")])
    assert [g.correct for g in grades] == [True, False]
    pool.close()
    pool = GraderPool(TaskGrader("scratchpad"), workers=1, timeout_s=5)
    grades = pool.grade([sample("64#46", "46"), sample("64#64", "46")])
    assert [g.correct for g in grades] == [True, False]
    pool.close()


def test_functions_that_cannot_be_pickled() -> None:
    def local(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return 1.0

    message = r"grader = .*local.*: cannot be sent to worker processes .*; define it at"
    with pytest.raises(ConfigError, match=message):
        GraderPool(local, workers=1, timeout_s=5)


def test_a_worker_starts_without_torch() -> None:
    code = (
        "import sys, embodied_ppo.rewards.worker_pool, embodied_ppo.data.synthetic_tasks\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_workers_grade_in_this_process(file: str) -> None:
    pool = GraderPool(file, workers=0, timeout_s=1)
    assert pool.grade([sample("pid")])[0].extra["pid"] == os.getpid()
    grades = pool.grade([sample("3"), sample("raise"), sample("quit"), sample("nan")])
    assert [g.failed for g in grades] == [False, True, True, True]
    assert [g.score for g in grades] == [3, 0, 0, 0] and pool.failures == 3
    pool.close()


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers = -1 must be >= 0"):
        GraderPool("exact", workers=-1, timeout_s=1)
    for limit in (0, math.nan):
        with pytest.raises(ConfigError, match=r"timeout_s = (0|nan) must be > 0"):
            GraderPool("exact", workers=0, timeout_s=limit)


def test_a_grader_that_forks_returns_one_result(file: str) -> None:
    pool = GraderPool(file, workers=1, timeout_s=5)
    try:
        for _ in range(3):
            grades = pool.grade([sample(f"fork{i}") for i in range(6)])
            assert [g.score for g in grades] == [*range(6)]
        assert pool.failures == 0
    finally:
        pool.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_without_readable_text(file: str, workers: int) -> None:
    pool = GraderPool(file, workers=workers, timeout_s=5)
    try:
        assert pool.grade([sample("silent"), sample("2")])[1].score == 2
        assert pool.failures == 1
        assert "Silent: (its text cannot be read)" in str(pool.last_failure)
    finally:
        pool.close()
