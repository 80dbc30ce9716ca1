"""Processes of a placement die, hang or fail: one error that names them, nothing left, and
recovery.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import run_helpers
import torch
from conftest import start_ray
from ray.exceptions import RayTaskError

from embodied_ppo import run as build
from embodied_ppo.core import tree
from embodied_ppo.core.types import ProcessLost, TrainingError
from embodied_ppo.placement import ray_system as cluster_module
from embodied_ppo.placement import ray_worker
from embodied_ppo.placement.ray_worker import RayWorker
from embodied_ppo.training import checkpoint
from tests.integration.test_placements import SMALL, rows

pytestmark = pytest.mark.usefixtures("eight_slots")

HYBRID: dict[str, Any] = {
    "placement": "hybrid",
    "cluster.devices_per_node": 2,
    "cluster.step_timeout_s": 60.0,
}


def system(tmp_path: Path, stack: ExitStack, **options: Any) -> Any:
    longer = {"env.id": "HalfCheetah-v4", "algorithm.horizon": 64}
    return run_helpers.build_cluster_system(
        run_helpers.tiny_config({**SMALL, **HYBRID, **longer, **options}), tmp_path, stack
    )


def soon(act: Callable[[], Any], seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def handles(made: Any) -> dict[str, Any]:
    return {h.name: h for group in made.processes.values() for h in group}


SIMULATORS, POLICY = "env rank 0", "rollout,actor rank 0"


@pytest.mark.parametrize(
    ("victim", "phase"),
    [(SIMULATORS, "collect"), (SIMULATORS, "evaluate"), (POLICY, "collect"), (POLICY, "update")],
)
def test_a_process_that_dies_is_named_at_once(victim: str, phase: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = system(tmp_path, stack)
        experience, _ = made.collect(64, update=0)
        known = handles(made)
        pids = [h.pid for h in known.values()]
        work: dict[str, Callable[[], Any]] = {
            "collect": lambda: made.collect(20_000, update=1),
            "update": lambda: made.update(experience, update=0),
            "evaluate": lambda: [made.evaluate(0) for _ in range(50)],
        }
        start = time.monotonic()
        killer = soon(
            lambda: os.kill(known[victim].pid, signal.SIGKILL), 0.0 if phase == "update" else 0.3
        )
        with pytest.raises(ProcessLost) as caught:
            work[phase]()
        killer.join()
        assert time.monotonic() - start < 10
        text = str(caught.value)
        assert text.startswith(f"process lost: {victim} (pid {known[victim].pid}, node "), text
        assert f", {phase}: " in text
    assert run_helpers.processes_ended(*pids)


def test_of_processes_that_learn_together_the_one_that_died_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        longer = {
            "placement": "fused",
            "cluster.devices_per_node": 4,
            "algorithm.update_epoch": 200,
        }
        made = system(tmp_path, stack, **longer)
        experience, _ = made.collect(64, update=0)
        known = handles(made)
        victim = known["env,rollout,actor rank 2"]
        killer = soon(lambda: os.kill(victim.pid, signal.SIGKILL), 1.0)
        with pytest.raises(
            ProcessLost,
            match=rf"process lost: env,rollout,actor rank 2 \(pid {victim.pid}, .* update: ",
        ):
            made.update(experience, update=0)
        killer.join()
    assert run_helpers.processes_ended(*(h.pid for h in known.values()))


def test_a_process_that_is_stopped_is_named_after_the_deadline_with_what_it_did(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        made = system(tmp_path, stack, **{"cluster.step_timeout_s": 12.0})
        known = handles(made)
        frozen, waiting = known["env rank 0"], known["rollout,actor rank 0"]
        freezer = soon(lambda: os.kill(frozen.pid, signal.SIGSTOP))
        start = time.monotonic()
        with pytest.raises(ProcessLost) as caught:
            made.collect(100_000, update=0)
        freezer.join()
        assert time.monotonic() - start < 40
        text = str(caught.value)
        assert (
            "env rank 0" in text and "cluster.step_timeout_s" in text and "raise the limit" in text
        ), text
    assert run_helpers.processes_ended(frozen.pid, waiting.pid)


def test_what_a_process_does_is_told_however_deep_in_a_library_it_waits() -> None:
    inside, end = threading.Event(), threading.Event()

    def deep(left: int) -> bool:
        return deep(left - 1) if left else inside.set() or end.wait(60)

    waiting = threading.Thread(target=tree.map, args=(deep, 20), name="learner")
    waiting.start()
    assert inside.wait(10)
    told = RayWorker("actor rank 0", 0).stacks()
    end.set()
    waiting.join()
    told = told[told.index("thread learner:") :]
    assert "in map" in told and "in wait" in told, told


def test_who_waits_for_others_in_vain_has_lost_them() -> None:
    """As gloo says it: seen where no process had ended, and the deadline had passed."""
    cause = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout [none]")
    told = ray_worker._translated(
        RayTaskError("update", str(cause), cause),
        ray_worker.WorkerHandle(None, "actor rank 1"),
        "update",
    )
    assert (
        isinstance(told, ProcessLost)
        and "(cluster.step_timeout_s)" in str(told)
        and "Connect timeout" in str(told)
    )


def test_a_simulator_that_exceeds_its_time_limit_is_named(tmp_path: Path) -> None:
    """The limit is below the duration of any step, and above that of none: the first that is seen
    is reported.
    """
    with ExitStack() as stack:
        made = system(tmp_path, stack, **{"env.step_timeout_s": 1e-9})
        message = (
            r"env rank 0 \(pid \d+, node \w+\), collect: env\.id=HalfCheetah-v4: (step|reset)\(\)"
            r" has not returned for "
        )
        with pytest.raises(
            ProcessLost, match=message + r"1e-09 s \(env\.step_timeout_s\) \(update 7\)"
        ):
            made.collect(20_000, update=7)


def test_an_error_in_one_process_is_the_error_of_the_run(tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = system(tmp_path, stack, **{"placement": "fused"})
        first = handles(made)["env,rollout,actor rank 0"]
        experience, _ = made.collect(64, update=0)

        def broken(worker: Any) -> None:
            worker.missing()

        with pytest.raises(
            TrainingError,
            match=r"env,rollout,actor rank 0 \(pid \d+, node \w+\), broken: AttributeErr",
        ):
            made._call([first], broken)
        assert made.update(experience, update=0)  # the others did not notice


def test_a_run_that_loses_a_process_ends_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in the middle of the third update's rollout, with one restart: the same weights and
    the same log.

    The undisturbed run is in one process, which is the same (tests/integration/test_placements.py).
    """
    options = {**SMALL, "updates": 4, "save_every": 1}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    build.train(run_helpers.tiny_config({**options, "run_dir": str(undisturbed)}), quiet=True)
    options |= {**HYBRID, "cluster.max_restarts": 1}
    collect = cluster_module.ClusterSystem.collect
    left = [1]

    def deadly(self: Any, horizon: int, *, update: int) -> Any:
        if update == 2 and left:
            left.pop()
            os.kill(handles(self)["env rank 0"].pid, signal.SIGKILL)
        return collect(self, horizon, update=update)

    monkeypatch.setattr(cluster_module.ClusterSystem, "collect", deadly)
    build.train(run_helpers.tiny_config({**options, "run_dir": str(killed)}), quiet=True)
    assert rows(killed) == rows(undisturbed)
    one, other = (
        checkpoint.open_checkpoint(d / "checkpoints" / "step_000004").policy()
        for d in (undisturbed, killed)
    )
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    log = (killed / "log.txt").read_text()
    assert "process lost: env rank 0" in log and "rebuilding, 1 of 1 (cluster.max_restarts)" in log
    assert "goes on after update 2" in log


def test_without_restarts_the_run_fails_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(self: Any, version: int) -> None:
        if version == 1:
            os.kill(handles(self)["rollout,actor rank 0"].pid, signal.SIGKILL)
        return publish(self, version)

    publish = cluster_module.ClusterSystem.publish
    monkeypatch.setattr(cluster_module.ClusterSystem, "publish", deadly)
    with pytest.raises(ProcessLost, match=r"process lost: rollout,actor rank 0 \(pid \d+"):
        build.train(
            run_helpers.tiny_config({**SMALL, **HYBRID, "run_dir": str(tmp_path / "run")}),
            quiet=True,
        )
    assert (
        "failed: ProcessLost: process lost: rollout,actor rank 0"
        in (tmp_path / "run" / "log.txt").read_text()
    )


# ----------------------------------------------------------------------------------- full, and gone
PICTURES: dict[str, Any] = {
    "env.id": "Pong-v5",
    "env.num_envs": 32,
    "env.max_episode_steps": 50,
    "algorithm.horizon": 96,
    "algorithm.global_batch_size": 1536,
    "algorithm.update_epoch": 1,
    "updates": 1,
}
"""87 MB of pictures an update."""


@pytest.fixture
def small_store(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray with 80 MB for objects and, where asked for, a disk that counts as full."""
    ray.shutdown()
    start_ray(object_store_memory=80_000_000, _system_config=getattr(request, "param", {}))
    yield
    ray.shutdown()
    start_ray()


@pytest.mark.slow
@pytest.mark.usefixtures("small_store")
def test_experience_larger_than_rays_memory_goes_by_disk(tmp_path: Path) -> None:
    apart, local = tmp_path / "apart", tmp_path / "local"
    options = {"placement": "disaggregated", "cluster.devices_per_node": 2, "run_dir": str(apart)}
    build.train(run_helpers.tiny_config({**SMALL, **PICTURES, **options}), quiet=True)
    build.train(run_helpers.tiny_config({**SMALL, **PICTURES, "run_dir": str(local)}), quiet=True)
    assert rows(apart) == rows(local)


@pytest.mark.slow
@pytest.mark.parametrize(
    "small_store", [{"local_fs_capacity_threshold": 0.001}], indirect=True, ids=["full disk"]
)
def test_memory_and_disk_that_are_full_are_named_with_a_cure(
    small_store: None, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        c = run_helpers.tiny_config(
            {**SMALL, **PICTURES, "placement": "disaggregated", "cluster.devices_per_node": 2}
        )
        made = run_helpers.build_cluster_system(c, tmp_path, stack)
        known = handles(made)
        start = time.monotonic()
        with pytest.raises(TrainingError) as caught:
            made.collect(96, update=0)
        assert time.monotonic() - start < 60
        first = known["env,rollout rank 0"]
        assert (
            str(caught.value)
            == f"{first}, collect: Ray's shared memory on its machine is full, and so is the disk"
            " that it moves objects to (/tmp/ray); free that disk, start Ray with more memory"
            " (--object-store-memory=BYTES), lower algorithm.horizon or env.num_envs, or let"
            " one process act and learn ('rollout,actor': its experience stays where it is)"
        )
    assert run_helpers.processes_ended(*(h.pid for h in known.values()))


def below(pid: int) -> dict[int, str]:
    """Its descendants and their command lines."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            found |= {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")} | below(
                child
            )
    return found


@pytest.mark.slow
def test_rays_own_process_that_dies_is_named(tmp_path: Path) -> None:
    """As it does where /dev/shm is filled by others (SIGBUS).

    The command in a process of its own: Ray may end it.
    """
    options = {**HYBRID, "updates": 100_000, "env_steps": None, "run_dir": tmp_path / "run"}
    words = [f"{name}={'null' if x is None else x}" for name, x in {**SMALL, **options}.items()]
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", *words]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while (
        not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < until
    ):
        time.sleep(0.1)
    family = below(run.pid)
    (raylet,) = (pid for pid, words in family.items() if "/raylet/raylet " in words)
    os.kill(raylet, signal.SIGKILL)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 3
    assert "process lost: " in err.splitlines()[-1]
    assert "Ray's own process on its machine (raylet) is gone" in err.splitlines()[-1], err
    assert run_helpers.processes_ended(*family)
    assert [json.loads(line)["update"] for line in metrics.read_text().splitlines()][:3] == [
        0,
        1,
        2,
    ]
