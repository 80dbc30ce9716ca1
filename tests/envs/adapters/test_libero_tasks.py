"""How LiberoEnv gives tasks to environments, with the recorded interface of LIBERO's package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import fake_libero
import pytest
import torch

from embodied_envs.adapters import libero_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.libero_env import LiberoEnv
from embodied_envs.base.errors import EnvError, fit_message
from embodied_envs.base.random import env_seeds

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libero") is not None, reason="LIBERO itself is installed"
)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_libero.install(tmp_path, monkeypatch)
    yield
    monkeypatch.undo()


def make(seeds: list[int], **kwargs: Any) -> LiberoEnv:
    options = {"processes": False, "settle_steps": 1, **kwargs}
    return LiberoEnv(
        "libero/libero_spatial",
        AdapterOptions(num_envs=len(seeds), seeds=seeds, image_size=(8, 8), kwargs=options),
    )


def scenes(env: LiberoEnv) -> list[tuple[int, int]]:
    """Start episodes; return task and initial state of each environment."""
    obs = env.reset()
    assert isinstance(obs, dict)
    starts = [int(x) for x in obs["state"][:, 0]]
    assert obs["instruction"].tolist() == env.task.tolist()
    return [divmod(x, 100) for x in starts]


def test_a_group_has_one_task() -> None:
    """Environments with one seed are a group; tasks divide groups and not environments."""
    env = make(env_seeds(0, 0, 12, 4), tasks=[0, 3])
    # 3 groups over 2 tasks: 0, 0, 1. By environments the second group would have tasks 0 and 3.
    assert [task for task, _ in scenes(env)] == [0] * 8 + [3] * 4
    assert env.task.tolist() == [0] * 8 + [1] * 4
    env.close()
    env = make(env_seeds(0, 0, 5), tasks=[0, 3])  # without groups as ever: i * 2 // 5
    assert [task for task, _ in scenes(env)] == [0, 0, 0, 3, 3]
    env.close()


def test_processes_share_a_server_without_torch() -> None:
    """They hold no torch, and less of numpy and Gymnasium than a process of their own."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    server._stop()  # another test may have started it with torch
    env = make(env_seeds(0, 0, 2), tasks=[0, 3], processes=True)
    assert [task for task, _ in scenes(env)] == [0, 3]
    for process in env._env.processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps and "multiarray" in maps
        assert os.getpgid(process.pid) != os.getpgid(0)
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        (own,) = re.findall(r"Private_Dirty: +(\d+) kB", rollup)
        assert int(own) < 60_000  # of 1.5 GB that a process with torch and LIBERO takes
    env.close()


def test_message_about_missing_meshes_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 200)
    (folder / "scenes").mkdir(parents=True)
    for path, problem in ((folder, "lacks articulated_objects"), (folder / "b", "is missing")):
        with pytest.raises(EnvError) as caught:
            make([0], assets=str(path))
        line = fit_message(str(caught.value))
        assert libero_env._DOWNLOAD in line and "env.kwargs.assets" in line and problem in line


def test_drawn_tasks_follow_from_seeds() -> None:
    seeds = env_seeds(0, 0, 8, 2)
    env = make(seeds, draw_tasks=True)
    assert scenes(env) == [(seed // 50 % 10, seed % 50) for seed in seeds]
    built: list[int] = importlib.import_module("libero.libero.envs").BUILT
    before = len(built)
    env.restart(seeds)
    scenes(env)
    assert len(built) == before, "the same tasks keep their scenes"
    other = env_seeds(0, 1, 8, 2)
    env.restart(other)
    assert scenes(env) == [(seed // 50 % 10, seed % 50) for seed in other]
    step = env.step(torch.zeros(8, 7))
    assert step.task is not None and step.task.tolist() == [seed // 50 % 10 for seed in other]
    # 500 consecutive seeds, those of an evaluation, are every task and state once.
    assert len({(seed // 50 % 10, seed % 50) for seed in range(1000, 1500)}) == 500
    env.close()
