"""Current CUDA device, and the GPU that MuJoCo renders on, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.core import devices
from embodied_ppo.core.devices import DERIVED_VARIABLE, EGL_VARIABLE, egl_device_id, select_device
from embodied_ppo.evaluation.checkpoint_evaluation import evaluate
from embodied_ppo.evaluation.trained_policy import load_policy
from embodied_ppo.options.schema import EvaluateConfig
from embodied_ppo.programs import system
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.programs.system import WorkerBuilder

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def activated(monkeypatch) -> Iterator[list[torch.device]]:
    """Return the devices that were made current, of a machine with 8 GPUs that EGL renders on."""
    calls: list[torch.device] = []
    for name in (EGL_VARIABLE, DERIVED_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores the value of before
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(devices, "egl_device_count", lambda: 8)
    yield calls


@pytest.mark.parametrize(
    ("name", "index"), [("cuda:1", 1), ("cuda", 0), ("auto", 0), ("cuda:7", 7)]
)
def test_the_device_of_a_run_becomes_the_current_one(
    activated: list[torch.device], name: str, index: int
) -> None:
    device = select_device(name, 0)
    assert device == torch.device("cuda", index) and activated == [device]
    assert os.environ[EGL_VARIABLE] == str(index)


def test_a_missing_device_is_refused_and_a_cpu_changes_nothing(
    activated: list[torch.device],
) -> None:
    with pytest.raises(ConfigError, match="device=cuda:8: torch finds 8 CUDA devices"):
        select_device("cuda:8", 0)
    assert select_device("cpu", 0) == torch.device("cpu")
    assert not activated and EGL_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("visible", "index", "value"),
    [
        (None, 0, "0"),  # all GPUs are visible, in the machine's order
        (None, 3, "3"),
        ("5", 0, "5"),  # a process of Ray
        ("2, 6", 1, "6"),
        ("GPU-8f3a", 0, None),
        ("0,MIG-1c", 1, None),
        ("4", 1, None),  # no such device
        ("", 0, None),
    ],
)
def test_egl_device_is_the_index_on_the_machine(
    visible: str | None, index: int, value: str | None
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert egl_device_id(environment, torch.device("cuda", index)) == value


def test_egl_device_of_the_user_is_kept(activated: list[torch.device], monkeypatch) -> None:
    monkeypatch.setenv(EGL_VARIABLE, "2")
    select_device("cuda:1", 0)
    assert os.environ[EGL_VARIABLE] == "2" and DERIVED_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("visible", "count", "reason"),
    [
        ("GPU-8f3a", 8, "CUDA_VISIBLE_DEVICES does not name this process's GPU by its index"),
        ("3", 1, "EGL has 1 devices, and this process uses GPU 3"),
    ],
)
def test_unknown_egl_device_is_left_unset_with_one_line(
    activated: list[torch.device], monkeypatch, visible: str, count: int, reason: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(devices, "egl_device_count", lambda: count)
    lines: list[str] = []
    select_device("cuda", 0, notice=lines.append)
    assert EGL_VARIABLE not in os.environ and len(lines) == 1
    assert lines[0].startswith(f"{EGL_VARIABLE} is not set: {reason}; ")


def report_environment(
    spec: RunSpec, process: WorkerSpec, *_: Any
) -> tuple[Worker, dict[str, Any]]:
    """Build a worker without roles; return the environment variable and the device."""
    return Worker(process), {"egl": os.environ.get(EGL_VARIABLE), "device": spec.device}


@pytest.mark.parametrize("visible", ["0", "6"])
def test_workers_render_on_their_own_gpu(
    activated: list[torch.device], monkeypatch, tmp_path, visible: str
) -> None:
    """The driver, on cuda:1, has set its own variables, which processes of Ray inherit."""
    config, device = run_helpers.tiny_config(), select_device("cuda:1", 0)
    monkeypatch.setattr(system, "build", report_environment)
    spec = RunSpec(config, device, tmp_path, 1)
    assert os.environ[EGL_VARIABLE] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)  # as Ray sets it
    factory, lines = WorkerBuilder.of(spec), list[str]()
    _, facts = factory(WorkerSpec(("env",), {}), None, lines.append)
    own_device = torch.device("cuda", 0)
    assert facts == {"egl": visible, "device": own_device} and not lines
    assert activated == [device, own_device]


@pytest.fixture
def cublas(activated: list[torch.device], monkeypatch) -> Iterator[list[torch.device]]:
    """Restore torch's mode and the variable that it needs."""
    monkeypatch.setenv(CUBLAS, "")
    monkeypatch.delenv(CUBLAS)
    yield activated
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_deterministic_algorithms(cublas: list[torch.device], monkeypatch, given: str) -> None:
    """They are selected before CUDA starts, in workers too; a variable of the user is kept."""
    select_device("cpu", 0, deterministic=True)
    select_device("cuda:0", 0)
    assert not torch.are_deterministic_algorithms_enabled() and CUBLAS not in os.environ
    if given:
        monkeypatch.setenv(CUBLAS, given)
    modes = list[str | None]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: modes.append(os.environ.get(CUBLAS)))
    select_device("cuda:0", 0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and modes == [given or ":4096:8"]
    assert torch._inductor.config.deterministic
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(system, "build", report_environment)
    config = run_helpers.tiny_config({"deterministic": True})
    factory = WorkerBuilder.of(RunSpec(config, torch.device("cuda", 0), Path(), 1))
    factory(WorkerSpec(("actor",), {}), None, print)
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("value", [False, True])
def test_training_and_evaluation_read_deterministic(
    monkeypatch, tmp_path: Path, value: bool
) -> None:
    calls = list[torch.device]()
    monkeypatch.setattr(devices, "use_deterministic_algorithms", calls.append)
    options = run_helpers.options("device=cpu updates=1 compile=never evaluation.episodes=1")
    run_helpers.train(tmp_path / "run", {**options, "deterministic": value})
    evaluation = {"checkpoint": str(tmp_path / "run"), "episodes": 1, "video": False}
    evaluate(EvaluateConfig(**evaluation, device="cpu"), quiet=True)
    load_policy(str(tmp_path / "run"))
    assert calls == [torch.device("cpu")] * (3 * value)
