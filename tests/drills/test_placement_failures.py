"""Processes of a placement die, hang or fail: one error names them, and a run can recover."""

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

from embodied_envs.base.errors import ProcessLost, TrainingError
from embodied_ppo.cluster import ray_system as cluster_module
from embodied_ppo.programs import runs
from embodied_ppo.training import checkpoint
from tests.integration.test_placements import SMALL, rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eight_slots")]

ROOT = Path(__file__).resolve().parents[2]
HYBRID = run_helpers.options("""placement=hybrid cluster.devices_per_node=2
    cluster.step_timeout_s=60.0""")


@pytest.fixture(scope="module")
def last_shutdown() -> Iterator[None]:
    """End Ray after the tests of this file."""
    yield
    ray.shutdown()


@pytest.fixture
def eight_slots(request, last_shutdown: None) -> None:
    """Start Ray with eight slots, unless it runs or the test starts it with other options."""
    if "small_store" not in request.fixturenames and not ray.is_initialized():
        start_ray()


def build_system(tmp_path: Path, stack: ExitStack, **options: Any) -> Any:
    longer = {"env.id": "HalfCheetah-v4", "algorithm.horizon": 64}
    return run_helpers.build_cluster_system(
        run_helpers.tiny_config({**SMALL, **HYBRID, **longer, **options}), tmp_path, stack
    )


def start_timer(action: Callable[[], Any], seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def handles(system: Any) -> dict[str, Any]:
    """Return name -> process."""
    return {h.name: h for h in system.processes.handles}


SIMULATORS, POLICY = "env rank 0", "rollout,actor rank 0"


@pytest.mark.parametrize(("victim", "phase"), [(SIMULATORS, "collect"), (POLICY, "update")])
def test_killed_process_is_named_at_once(victim: str, phase: str, tmp_path) -> None:
    with ExitStack() as stack:
        system = build_system(tmp_path, stack)
        experience, _ = system.collect(64, update=0)
        processes_by_name = handles(system)
        pids = [h.pid for h in processes_by_name.values()]
        work: dict[str, Callable[[], Any]] = {
            "collect": lambda: system.collect(20_000, update=1),
            "update": lambda: system.update(experience, update=0),
        }
        start = time.monotonic()
        killer = start_timer(
            lambda: os.kill(processes_by_name[victim].pid, signal.SIGKILL),
            0.0 if phase == "update" else 0.3,
        )
        with pytest.raises(ProcessLost) as caught:
            work[phase]()
        killer.join()
        assert time.monotonic() - start < 40
        text = str(caught.value)
        assert text.startswith(
            f"process lost: {victim} (pid {processes_by_name[victim].pid}, node "
        ), text
        assert f", {phase}: " in text
    assert run_helpers.processes_ended(*pids)


def test_killed_learner_is_named_among_its_group(tmp_path) -> None:
    with ExitStack() as stack:
        longer = run_helpers.options("""placement=fused cluster.devices_per_node=4
            algorithm.update_epoch=200""")
        system = build_system(tmp_path, stack, **longer)
        experience, _ = system.collect(64, update=0)
        processes_by_name = handles(system)
        victim = processes_by_name["env,rollout,actor rank 2"]
        killer = start_timer(lambda: os.kill(victim.pid, signal.SIGKILL), 1.0)
        with pytest.raises(
            ProcessLost,
            match=rf"process lost: env,rollout,actor rank 2 \(pid {victim.pid}, .* update: ",
        ):
            system.update(experience, update=0)
        killer.join()
    assert run_helpers.processes_ended(*(h.pid for h in processes_by_name.values()))


def test_stopped_process_is_named_after_the_time_limit(tmp_path) -> None:
    with ExitStack() as stack:
        system = build_system(tmp_path, stack, **{"cluster.step_timeout_s": 12.0})
        processes_by_name = handles(system)
        frozen, waiting = processes_by_name["env rank 0"], processes_by_name["rollout,actor rank 0"]
        freezer = start_timer(lambda: os.kill(frozen.pid, signal.SIGSTOP))
        start = time.monotonic()
        with pytest.raises(ProcessLost) as caught:
            system.collect(100_000, update=0)
        freezer.join()
        assert time.monotonic() - start < 40
        text = str(caught.value)
        assert (
            "env rank 0" in text and "cluster.step_timeout_s" in text and "raise the limit" in text
        ), text
    assert run_helpers.processes_ended(frozen.pid, waiting.pid)


def test_simulator_that_exceeds_its_time_limit_is_named(tmp_path) -> None:
    """The limit is below the duration of any step, so the first step that is checked exceeds it."""
    with ExitStack() as stack:
        system = build_system(tmp_path, stack, **{"env.step_timeout_s": 1e-9})
        message = (
            r"env rank 0 \(pid \d+, node \w+\), collect: env\.id=HalfCheetah-v4: (step|reset)\(\)"
            r" has not returned for "
        )
        with pytest.raises(
            ProcessLost, match=message + r"1e-09 s \(env\.step_timeout_s\) \(update 7\)"
        ):
            system.collect(20_000, update=7)


def test_error_of_one_process_is_raised_by_the_driver(tmp_path) -> None:
    with ExitStack() as stack:
        system = build_system(tmp_path, stack, **{"placement": "fused"})
        first = handles(system)["env,rollout,actor rank 0"]
        experience, _ = system.collect(64, update=0)

        def broken(worker: Any) -> None:
            worker.missing()

        with pytest.raises(
            TrainingError,
            match=r"env,rollout,actor rank 0 \(pid \d+, node \w+\), broken: AttributeErr",
        ):
            system._call([first], broken)
        assert system.update(experience, update=0)  # other processes continue


def test_restarted_run_equals_an_undisturbed_one(tmp_path, monkeypatch) -> None:
    """SIGKILL in the third rollout, with one restart, gives the same weights and metrics.

    The undisturbed run is in one process (tests/integration/test_placements.py: equal results).
    """
    options = {**SMALL, "updates": 4, "save_every": 1}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    runs.train(run_helpers.tiny_config({**options, "run_dir": str(undisturbed)}), quiet=True)
    options |= {**HYBRID, "cluster.max_restarts": 1}
    collect = cluster_module.ClusterSystem.collect
    kills_left = [1]

    def killing(self: Any, horizon: int, *, update: int) -> Any:
        if update == 2 and kills_left:
            kills_left.pop()
            os.kill(handles(self)["env rank 0"].pid, signal.SIGKILL)
        return collect(self, horizon, update=update)

    monkeypatch.setattr(cluster_module.ClusterSystem, "collect", killing)
    runs.train(run_helpers.tiny_config({**options, "run_dir": str(killed)}), quiet=True)
    assert rows(killed) == rows(undisturbed)
    one, other = (
        checkpoint.open_checkpoint(d / "checkpoints" / "step_000004").policy()
        for d in (undisturbed, killed)
    )
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    log = (killed / "log.txt").read_text()
    assert "process lost: env rank 0" in log and "rebuilding, 1 of 1 (cluster.max_restarts)" in log
    assert "continuing after update 2" in log


# ------------------------------------------------------------------------------- lost Ray process
def descendants(pid: int) -> dict[int, str]:
    """Return process id -> command line of the descendants of a process."""
    commands = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            commands[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            commands |= descendants(child)
    return commands


def test_killed_raylet_is_named(tmp_path) -> None:
    """The raylet also dies where other programs fill /dev/shm (SIGBUS).

    The command runs in its own process, which Ray may end.
    """
    options = {**HYBRID, "updates": 100_000, "env_steps": None, "run_dir": tmp_path / "run"}
    arguments = [f"{name}={'null' if x is None else x}" for name, x in {**SMALL, **options}.items()]
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", *arguments]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while (
        not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < until
    ):
        time.sleep(0.1)
    processes = descendants(run.pid)
    (raylet,) = (pid for pid, line in processes.items() if "/raylet/raylet " in line)
    os.kill(raylet, signal.SIGKILL)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 3
    assert "process lost: " in err.splitlines()[-1]
    assert "Ray's own process on its machine (raylet) is gone" in err.splitlines()[-1], err
    assert run_helpers.processes_ended(*processes)
    updates = [json.loads(line)["update"] for line in metrics.read_text().splitlines()]
    assert updates[:3] == [0, 1, 2]


# ------------------------------------------------------------------------------------ full memory
IMAGES: dict[str, Any] = run_helpers.options("""env.id=Pong-v5 env.num_envs=4
    env.max_episode_steps=50 algorithm.horizon=192 algorithm.global_batch_size=384
    algorithm.update_epoch=1 evaluation.episodes=1 updates=1""")
IMAGES |= {"env.kwargs": {"img_height": 168, "img_width": 168}}
# Convolutions would take longer than everything else.
IMAGES |= {"model.network": f"{ROOT / 'scripts/examples/own_network.py'}:Residual"}
# Options with 87 MB of images per update.
IMAGES |= {"model.network_options": {"width": 8}}


@pytest.fixture
def small_store(request) -> Iterator[None]:
    """Start Ray with an 80 MB object store and, by parameter, a disk that counts as full."""
    ray.shutdown()
    start_ray(object_store_memory=80_000_000, _system_config=getattr(request, "param", {}))
    yield
    ray.shutdown()


@pytest.mark.usefixtures("small_store")
def test_experience_larger_than_the_object_store_is_spilled_to_disk(tmp_path) -> None:
    disaggregated, local = tmp_path / "apart", tmp_path / "local"
    options = {"placement": "disaggregated", "cluster.devices_per_node": 2}
    options["run_dir"] = str(disaggregated)
    runs.train(run_helpers.tiny_config({**SMALL, **IMAGES, **options}), quiet=True)
    runs.train(run_helpers.tiny_config({**SMALL, **IMAGES, "run_dir": str(local)}), quiet=True)
    assert rows(disaggregated) == rows(local)


@pytest.mark.parametrize(
    "small_store", [{"local_fs_capacity_threshold": 0.001}], indirect=True, ids=["full disk"]
)
def test_full_memory_and_disk_are_reported_with_a_hint(small_store: None, tmp_path) -> None:
    with ExitStack() as stack:
        c = run_helpers.tiny_config(
            {**SMALL, **IMAGES, "placement": "disaggregated", "cluster.devices_per_node": 2}
        )
        system = run_helpers.build_cluster_system(c, tmp_path, stack)
        processes_by_name = handles(system)
        start = time.monotonic()
        with pytest.raises(TrainingError) as caught:
            system.collect(IMAGES["algorithm.horizon"], update=0)
        assert time.monotonic() - start < 300  # an error, not a time limit
        first = processes_by_name["env,rollout rank 0"]
        assert (
            str(caught.value)
            == f"{first}, collect: Ray's shared memory on its machine is full, and so is the disk"
            " that it moves objects to (/tmp/ray); free that disk, start Ray with more memory"
            " (--object-store-memory=BYTES), lower algorithm.horizon or env.num_envs, or let"
            " one process act and learn ('rollout,actor': its experience stays where it is)"
        )
    assert run_helpers.processes_ended(*(h.pid for h in processes_by_name.values()))
