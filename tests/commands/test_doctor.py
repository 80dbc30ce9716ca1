"""Tests of `embodied-ppo doctor` on this machine, and with simulated problems."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import run_helpers
from packaging.requirements import Requirement

from embodied_ppo.commands import doctor, main
from embodied_ppo.commands.doctor import Check, ProbeResult

ROOT = Path(__file__).parents[2]
INSTALL = "pip install -c scripts/constraints.txt"


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


def torch_probe(cuda: str | None, gpus: Any = (), reason: str = "") -> ProbeResult:
    return ProbeResult({"version": "2.13.0", "cuda": cuda, "gpus": list(gpus), "reason": reason})


# ------------------------------------------------------------------------------------- this machine
@pytest.mark.slow
def test_this_machine_has_no_problem() -> None:
    code, rows = command()
    broken = [row for row in rows.values() if row["state"] == "problem" and row["needed"]]
    assert code == 0 and not broken, broken
    names = ("python", "packages", "torch", "compiler", "mujoco", "picture egl", "pictures")
    for name in (*names, "envpool", "ray"):
        row = rows[name]
        assert row["state"] == "ok" and row["found"] and not row["cure"], row
    assert rows["pictures"]["found"] == "training uses egl (MUJOCO_GL)"
    assert re.fullmatch(r"a frame of 64 x 48 in [\d.]+ s", rows["picture egl"]["found"])
    optional = {"picture osmesa", "picture glfw", "warp", "disk here", "shared memory", "port 6379"}
    assert optional <= rows.keys()
    assert all(row["cure"] for row in rows.values() if row["state"] == "problem")


def test_versions_equal_those_of_pyproject_and_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = (ROOT / "scripts/constraints.txt").read_text()
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, re.MULTILINE))
    requirements = [("", line) for line in project["dependencies"]]
    for extra in filter(None, doctor.RECIPES):
        requirements += [(extra, line) for line in project["optional-dependencies"][extra]]
    compared = set[str]()
    for extra, line in requirements:
        requirement = Requirement(line)
        name = requirement.name
        if name in compared:  # an earlier extra has it, too
            continue
        compared.add(name)
        package = doctor.VERSIONS[name]
        limits = {(">=", package.lowest)} | ({("<", package.below)} if package.below else set())
        assert {(s.operator, s.version) for s in requirement.specifier} == limits, name
        assert (package.tested, package.extra) == (tested[name.lower()], extra), name
    assert compared == doctor.VERSIONS.keys()
    lowest, below = doctor.PYTHON
    assert project["requires-python"] == f">={lowest[0]}.{lowest[1]},<{below[0]}.{below[1]}"


# --------------------------------------------------------------------------- problems in a process
@pytest.mark.slow
def test_three_problems_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no compiler, MUJOCO_GL is invalid, and EnvPool cannot be imported."""
    empty = tmp_path / "bin"
    empty.mkdir()
    paths = stub(tmp_path, "envpool", "raise ImportError('libGLEW.so: cannot open')")
    environment = {"PATH": str(empty), "MUJOCO_GL": "nonsense", "PYTHONPATH": paths}
    code, rows = command(**{**environment, "CXX": ""})
    assert code == 1 and rows["compiler"]["state"] == "absent"
    assert "no g++ on the path" in rows["compiler"]["found"]
    assert "conda install -c conda-forge gxx" in rows["compiler"]["cure"]
    assert "invalid value for environment variable MUJOCO_GL" in rows["mujoco"]["found"]
    assert rows["mujoco"]["cure"] == rows["pictures"]["cure"] == "unset MUJOCO_GL"
    assert rows["picture egl"]["state"] == "ok"  # each backend is selected by its own name
    assert rows["envpool"]["found"] == "ImportError: libGLEW.so: cannot open"
    assert rows["envpool"]["state"] == "problem"
    assert rows["envpool"]["cure"] == "pip install --force-reinstall --no-deps envpool==1.2.5"
    assert "packages" not in rows and rows["extra language"]["state"] == "ok"
    # The same checks as a table; checking again would take as long.
    checks = [Check(**{"result": row.pop("found"), **row}) for row in rows.values()]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    assert main.main(["doctor"]) == 1
    table = capsys.readouterr().out
    assert re.search(r"^problem  envpool +ImportError: libGLEW", table, re.MULTILINE)
    assert re.search(r"^ +cure: unset MUJOCO_GL$", table, re.MULTILINE)
    assert table.splitlines()[-1].startswith("broken, and the default recipes need it: ")


@pytest.mark.slow
def test_hanging_probe_and_its_child_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    text = (
        "import subprocess, time\n"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    monkeypatch.setattr(doctor, "DEADLINE_S", 5.0)
    start = time.monotonic()
    probe = doctor.run_probes(["envpool"])["envpool"]
    assert probe == ProbeResult(error="did not answer in 5 s") and time.monotonic() - start < 30
    assert run_helpers.processes_ended(int(child.read_text()))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
        ("import os; print('no driver', flush=True); os._exit(7)", "ended with 7: no driver"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_crash_of_a_probe_is_reported(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    assert doctor.run_probes(["envpool"])["envpool"].error == error


@pytest.mark.slow
def test_package_that_crashes_at_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "jinja2", "import os; os.abort()"))
    check, *_ = doctor.check_packages(doctor.run_probes(["imports"])["imports"])
    assert (check.name, check.state) == ("imports", "problem")
    assert "crashed (SIGABRT), at " in check.result


def test_egl_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere.json")
    probe = doctor.run_probes(["egl"])["egl"]
    assert probe.error
    probes = {"egl": probe, "osmesa": ProbeResult(error="none")}
    rows = {row.name: row for row in doctor.check_rendering(probes)}
    assert rows["picture egl"].state == "absent"
    assert "apt-get install libegl1" in rows["picture egl"].cure
    assert rows["pictures"].state == "problem" and "conda install" in rows["pictures"].cure


# ---------------------------------------------------------------------------------- single problems
@pytest.mark.parametrize(
    ("mujoco_gl", "working", "state", "result", "cure"),
    [
        ("", ("egl", "osmesa"), "ok", "training uses egl", ""),
        ("", ("osmesa",), "ok", "training uses osmesa", ""),
        ("osmesa", ("egl", "osmesa"), "ok", "training uses osmesa (MUJOCO_GL)", ""),
        ("disabled", ("egl",), "ok", "training uses egl", ""),
        (
            "osmesa",
            ("egl",),
            "problem",
            "MUJOCO_GL = osmesa does not render",
            "export MUJOCO_GL=egl",
        ),
        (
            "egel",
            ("egl",),
            "problem",
            "MUJOCO_GL = egel is not one of egl, osmesa, glfw",
            "unset MUJOCO_GL",
        ),
        ("", ("glfw",), "problem", "no backend works without a screen", "apt-get install libegl1"),
    ],
)
def test_rendering_backend_of_training(
    mujoco_gl: str,
    working: tuple[str, ...],
    state: str,
    result: str,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUJOCO_GL", mujoco_gl)
    probes = {
        name: ProbeResult("a frame") if name in working else ProbeResult(error="no library")
        for name in doctor.BACKENDS
    }
    rows = {row.name: row for row in doctor.check_rendering(probes)}
    row = rows.pop("pictures")
    assert row.state == state and row.result.startswith(result)
    assert row.cure.startswith(cure) and bool(row.cure) == bool(cure)
    states = ["ok" if name in working else "absent" for name in doctor.BACKENDS]
    assert [row.state for row in rows.values()] == states


@pytest.mark.parametrize("now", [(3, 10, 12), (3, 14, 0)])
def test_unsupported_python_version(now: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", now)
    row = doctor.check_python()
    assert row.state == "problem" and row.needed and "works with 3.11, 3.12 and 3.13" in row.result
    assert "conda create -n ppo python=3.11" in row.cure


@pytest.mark.parametrize(
    ("name", "now", "state", "result", "cure"),
    [
        (
            "mujoco",
            "4.0.0",
            "problem",
            "4.0.0: works with >=3.8.1,<4 (4.0.0 has a diverging solver)",
            "pip install 'mujoco>=3.8.1,<4'",
        ),
        ("torch", "2.8.1", "problem", "2.8.1: works with >=2.9,<3", "pip install 'torch>=2.9,<3'"),
        ("torch", "2.13.0+cu130", "ok", "15 of 15 as tested", ""),
        ("pillow", "99.1", "ok", "14 of 15 as tested; pillow 99.1 (tested: 13.0.0)", ""),
        ("ray", None, "problem", "not installed: ray", f"{INSTALL} -e ."),
        (
            "mujoco-warp",
            None,
            "absent",
            "not installed: mujoco-warp",
            f"{INSTALL} -e '.[warp]'",
        ),
    ],
)
def test_package_versions(
    name: str, now: str | None, state: str, result: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == name:
            if now is None:
                raise PackageNotFoundError(package)
            return now
        return doctor.VERSIONS[package].tested

    monkeypatch.setattr(doctor, "version", version)
    extra = doctor.VERSIONS[name].extra
    title = name if state == "problem" and now else f"extra {extra}" if extra else "packages"
    row = {row.name: row for row in doctor.check_packages(ProbeResult({}))}[title]
    assert (row.state, row.result) == (state, result)
    assert cure in row.cure and bool(cure) == bool(row.cure)


def nvidia_smi(folder: Path, text: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("cuda", "reason", "visible", "parts"),
    [
        (
            None,
            "",
            None,
            ("built for CPU only; the driver has NVIDIA L4 (driver 535.1)", "torch==2.13.0"),
        ),
        (
            "13.0",
            "driver too old",
            None,
            ("built for CUDA 13.0", "torch finds none: driver too old", "whl/cu126"),
        ),
        ("13.0", "", "-1", ("CUDA_VISIBLE_DEVICES = '-1'", "unset CUDA_VISIBLE_DEVICES")),
    ],
)
def test_torch_without_the_gpus_of_the_driver(
    cuda: str | None,
    reason: str,
    visible: str | None,
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvidia_smi(tmp_path, "echo 'NVIDIA L4, 535.1'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (row,) = doctor.check_torch(torch_probe(cuda, reason=reason))
    assert row.state == "problem" and row.needed
    for part in parts:
        assert part in f"{row.result} {row.cure}"


def test_occupied_gpus_and_a_failing_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, "echo 'could not communicate with the driver'; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpus = [{"name": "L4", "free": 20e9, "total": 24e9}, {"name": "L4", "free": 2e9, "total": 24e9}]
    torch, free, full = doctor.check_torch(torch_probe("13.0", gpus))
    assert (torch.state, free.state, full.state) == ("ok", "ok", "problem")
    assert "2.0 of 24.0 GB free" in full.result
    assert "nvidia-smi" in full.cure and not full.needed
    assert [row.state for row in doctor.check_torch(torch_probe(None))] == ["ok", "absent"]
    (row,) = doctor.check_torch(ProbeResult(error="OSError: libcudart.so"))
    assert row.cure.endswith("torch==2.13.0")


def test_failing_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nprintf 'omp.h: No such file \\377\\n' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    row = doctor.check_compiler()
    assert row.state == "problem" and row.cure
    assert "cannot compile with OpenMP: omp.h: No such file" in row.result
    monkeypatch.setenv("CXX", "/nowhere/g++")
    row = doctor.check_compiler()
    assert row.state == "problem" and "CXX = /nowhere/g++" in row.result
    assert row.cure.startswith("unset CXX")


def test_full_and_unwritable_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBODIED_PPO_CACHE", "/proc/nowhere")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    rows = {row.name: row for row in doctor.check_disks()}
    assert rows["disk here"].result == f"{tmp_path}: 0.0 GB free, less than 2"
    assert rows["disk here"].needed
    assert rows["disk here"].cure == "run_dir=/another/disk/run"
    assert "cannot be written" in rows["disk cache"].result
    assert "EMBODIED_PPO_CACHE" in rows["disk cache"].cure
    assert rows["shared memory"].state == "problem" and "--shm-size" in rows["shared memory"].cure


def test_occupied_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: ("tensorboard", "tensorboard --port 6007")})
        loopback, row = doctor.check_ports()
    assert loopback.state == "ok"
    assert (row.name, row.state, row.needed) == (f"port {port}", "problem", False)
    assert row.result == "tensorboard: Address already in use"
    assert row.cure == "tensorboard --port 6007"


def test_optional_packages_are_not_needed() -> None:
    warp = doctor.check_warp(None)
    assert warp.state == "absent" and "'.[warp]'" in warp.cure
    ray = doctor.check_probe("ray", ProbeResult(error="no"), "cure", needed=False)
    assert ray == Check("ray", "problem", "no", "cure", False)


def test_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "experiment=quickstart"]) == 2
    assert "is not read by doctor" in capsys.readouterr().err
