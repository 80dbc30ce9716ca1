"""One thread for every test: two cores are shared, and sums in a fixed order repeat bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch, the simulators and any process that a test starts read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MUJOCO_GL", "egl")

# With a space: the compiler of compile=always must bear it.
os.environ["EMBODIED_PPO_CACHE"] = tempfile.mkdtemp(prefix="embodied_ppo tests_")

import hypothesis
import pytest
import ray_fork_server
import torch

from embodied_ppo.data import synthetic_tasks

# The time of an example depends on the load of the machine.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")

# packages of their own: make test-mjlab, make test-libero, make test-trackers, .. (Makefile)
collect_ignore = ["extras"]

# Test files that take 20 s or more, the longest first.
LONGEST_FILES = (
    "core/test_compile.py",
    "integration/test_placements_language.py",
    "drills/test_placement_failures.py",
    "cluster/test_fsdp.py",
    "integration/test_placements.py",
    "drills/test_two_hosts.py",
    "commands/test_demos.py",
    "integration/test_memory.py",
    "tools/test_machine_checks.py",
    "drills/test_disk_and_clock.py",
    "gpu/test_fake_accelerator.py",
    "commands/test_sweep.py",
    "integration/test_tutorial.py",
    "policies/vla/test_trunk.py",
    "integration/test_experiments.py",
    "policies/vla/test_pi0.py",
    "integration/test_resume.py",
    "tools/test_task_generator.py",
    "commands/test_fit.py",
    "tools/test_watch_server.py",
    "evaluation/test_video.py",
    "drills/test_two_nodes.py",
    "commands/test_plan.py",
    "tools/test_verification.py",
)

FOLDER = Path(__file__).parent

torch.set_num_threads(1)


def start_ray(**options: Any) -> None:
    """Ray with eight slots for processes; ``options``: of ``ray.init``."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    ray_fork_server.install()
    ray.init(address="local", num_cpus=8, **quiet, **options)


@pytest.fixture(scope="module")
def few_problems() -> Iterator[None]:
    """Reduce the task arithmetic to 200 problems, here and in workers of a later ``start_ray``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ray_fork_server.PROBLEMS, "200")
        patch.setitem(synthetic_tasks.TASKS, "arithmetic", ray_fork_server.small_arithmetic(200))
        yield


@pytest.fixture
def empty_folder(tmp_path, monkeypatch) -> None:
    """Run the test in an empty folder, of which ``tmp_path`` is the parent."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(scope="module")
def eight_slots() -> Iterator[None]:
    """Ray with eight slots for processes, of this file's own; runs join it."""
    import ray

    start_ray()
    yield
    ray.shutdown()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["EMBODIED_PPO_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and skip tests marked ``gpu`` where there is none.

    Files are assigned to processes in this order, so that the last ones to end are short.
    """
    rank = {FOLDER / name: i for i, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
