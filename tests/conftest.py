"""One thread for every test: two cores are shared, and sums in a fixed order repeat bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

# Before torch, the simulators and any process that a test starts read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MUJOCO_GL", "egl")

# With a space: the compiler of compile=always must bear it.
os.environ["EMBODIED_PPO_CACHE"] = tempfile.mkdtemp(prefix="embodied_ppo tests_")

import pytest
import ray_fork_server
import torch

collect_ignore = [
    "extras"
]  # packages of their own: make test-mjlab, make test-libero, make test-trackers, .. (Makefile)

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
def eight_slots() -> Iterator[None]:
    """Ray with eight slots for processes, of this file's own; runs join it."""
    import ray

    start_ray()
    yield
    ray.shutdown()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["EMBODIED_PPO_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
