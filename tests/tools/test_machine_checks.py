"""Tests of `embodied-ppo doctor` on this machine, and with simulated problems."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from packaging.requirements import Requirement

from embodied_ppo.commands import doctor, main
from embodied_ppo.tools import machine_checks
from embodied_ppo.tools.machine_checks import BACKENDS, Check, CheckFailed

ROOT = Path(__file__).parents[2]


def command(*argv: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run ``embodied-ppo doctor --json`` in a process; return the exit code and name -> check."""
    process = run_doctor("--json", *argv, **environment)
    assert process.stdout, process.stderr
    return process.returncode, {row["name"]: row for row in json.loads(process.stdout)}


def run_doctor(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "embodied_ppo.commands.main", "doctor", *argv]
    env = {**os.environ, **environment}
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)


def stub(folder: Path, name: str, text: str) -> str:
    """Write a module that hides the real one; return the $PYTHONPATH for it."""
    (folder / f"{name}.py").write_text(text)
    previous = filter(None, [os.environ.get("PYTHONPATH", "")])
    return os.pathsep.join([str(folder), *previous, str(ROOT), str(ROOT / "envs")])


# ------------------------------------------------------------------------------------- this machine
@pytest.mark.slow
def test_this_machine_has_no_problem() -> None:
    code, rows = command()
    broken = [row for row in rows.values() if row["state"] == "problem" and row["needed"]]
    assert code == 0 and not broken, broken
    names = ("python", "packages", "torch", "compiler", "mujoco", "rendering")
    for name in (*names, "envpool", "ray"):
        row = rows[name]
        assert row["state"] == "ok" and row["found"] and not row["fix"], row
    assert rows["rendering"]["found"].startswith("training uses egl")
    assert {"disk here", "disk cache", "disk temporary", "shared memory"} <= rows.keys()


# --------------------------------------------------------------------------- problems in a process
@pytest.mark.slow
def test_three_problems_in_one_process(tmp_path, monkeypatch, capsys) -> None:
    """There is no compiler, MUJOCO_GL is invalid, and EnvPool cannot be imported."""
    empty = tmp_path / "bin"
    empty.mkdir()
    paths = stub(tmp_path, "envpool", "raise ImportError('libGLEW.so: cannot open')")
    environment = {"PATH": str(empty), "MUJOCO_GL": "nonsense", "PYTHONPATH": paths}
    code, rows = command(**{**environment, "CXX": ""})
    assert code == 1 and rows["compiler"]["state"] == "absent"
    assert "no g++ on the path" in rows["compiler"]["found"]
    assert "conda install -c conda-forge gxx" in rows["compiler"]["fix"]
    assert "invalid value for environment variable MUJOCO_GL" in rows["mujoco"]["found"]
    assert rows["mujoco"]["fix"] == "unset MUJOCO_GL"
    assert rows["rendering"]["state"] == "ok"  # each backend is selected by its own name
    assert rows["envpool"]["found"] == "ImportError: libGLEW.so: cannot open"
    assert rows["envpool"]["state"] == "problem"
    assert rows["envpool"]["fix"] == "pip install --force-reinstall --no-deps envpool"
    # The same checks as a table; checking again would take as long.
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check(**row) for row in rows.values()])
    assert main.main(["doctor"]) == 1
    table = capsys.readouterr().out
    assert re.search(r"^problem  envpool +ImportError: libGLEW", table, re.MULTILINE)
    assert re.search(r"^ +fix: unset MUJOCO_GL$", table, re.MULTILINE)
    assert table.splitlines()[-1].startswith("broken, and the default recipes need it: ")


@pytest.mark.slow
def test_hanging_probe_and_its_child_are_ended(tmp_path, monkeypatch) -> None:
    child = tmp_path / "child"
    text = (
        "import subprocess, time\n"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    monkeypatch.setattr(machine_checks, "DEADLINE_S", 5.0)
    start = time.monotonic()
    check = machine_checks.run_apart("envpool")
    assert check.found == "did not answer in 5 s" and time.monotonic() - start < 30
    assert run_helpers.processes_ended(int(child.read_text()))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
        ("import os; print('no driver', flush=True); os._exit(7)", "ended with 7: no driver"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_crash_of_a_probe_is_reported(text: str, error: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    assert machine_checks.run_apart("envpool").found.startswith(error)


def test_egl_without_a_driver(monkeypatch) -> None:
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere.json")
    egl = machine_checks.run_apart("egl")
    assert egl.state == "problem"
    row = machine_checks.check_rendering({"egl": egl, "osmesa": Check("", "problem", "none")})
    assert row.state == "problem" and "conda install" in row.fix


# ---------------------------------------------------------------------------------- single problems
@pytest.mark.parametrize(
    ("mujoco_gl", "working", "result", "fix"),
    [
        ("", ("osmesa",), "training uses osmesa", ""),
        ("osmesa", ("egl", "osmesa"), "training uses osmesa", ""),
        ("osmesa", ("egl",), "MUJOCO_GL = osmesa does not render", "export MUJOCO_GL=egl"),
        ("", ("glfw",), "no backend works without a screen", "apt-get install libegl1"),
    ],
)
def test_rendering_backend_of_training(
    mujoco_gl: str, working: tuple[str, ...], result: str, fix: str, monkeypatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", mujoco_gl)
    states: dict[str, Any] = {x: "ok" if x in working else "problem" for x in BACKENDS}
    row = machine_checks.check_rendering({x: Check(x, s, "") for x, s in states.items()})
    assert row.state == ("problem" if fix else "ok") and row.found.startswith(result)
    assert row.fix.startswith(fix) and bool(row.fix) == bool(fix)


@pytest.mark.parametrize(
    ("extra", "name", "now", "state"),
    [
        ("", "mujoco", "4.0.0", "problem"),
        ("", "torch", "2.13.0+cu130", ""),
        ("", "ray", None, "problem"),
        ("warp", "mujoco-warp", None, "absent"),
    ],
)
def test_package_versions(extra: str, name: str, now: str | None, state: str, monkeypatch) -> None:
    lowest = {}
    for line in metadata.requires("embodied-ppo") or []:
        requirement = Requirement(line)
        lowest[requirement.name] = re.findall(r">=\s*([\d.]+)", str(requirement.specifier))[0]

    def version(package: str) -> str:
        if package != name:
            return lowest[package]
        if now is None:
            raise PackageNotFoundError(package)
        return now

    monkeypatch.setattr(machine_checks, "version", version)
    if not state:
        assert machine_checks.check_packages(extra) == "in the supported versions"
        return
    with pytest.raises(CheckFailed, match=f"{name}.*{now or ''}") as error:
        machine_checks.check_packages(extra)
    assert error.value.state == state


def nvidia_smi(folder: Path, text: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("cuda", "visible", "fix"),
    [
        (None, None, "torch --index-url https://pypi.org/simple"),
        ("13.0", None, "whl/cu126"),
        ("13.0", "-1", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_torch_without_the_gpus_of_the_driver(
    cuda: str | None, visible: str | None, fix: str, tmp_path, monkeypatch
) -> None:
    nvidia_smi(tmp_path, "echo 'NVIDIA L4, 535.1'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckFailed, match=r"the driver has NVIDIA L4, 535.1, torch finds") as error:
        machine_checks.check_torch()
    assert fix in error.value.fix
    nvidia_smi(tmp_path, "echo 'could not communicate with the driver'; exit 9")
    assert machine_checks.check_torch().endswith("no NVIDIA GPU: device=cpu")


def test_failing_compilers(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nprintf 'omp.h: No such file \\377\\n' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CheckFailed, match=r"cannot compile with OpenMP: omp.h: No such file"):
        machine_checks.check_compiler()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(CheckFailed, match="no /nowhere/g\\+\\+ on the path") as error:
        machine_checks.check_compiler()
    assert error.value.state == "absent"


def test_full_and_unwritable_disks(tmp_path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    with pytest.raises(CheckFailed, match=f"{tmp_path}: 0.0 GB free, less than 2"):
        machine_checks.check_disk(tmp_path, 2.0)
    monkeypatch.setenv("EMBODIED_PPO_CACHE", "/proc/nowhere")
    with pytest.raises(CheckFailed, match="cannot be written"):
        machine_checks.check_disk(machine_checks.cache_folder(), 0.0)
