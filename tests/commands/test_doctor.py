"""`embodied-ppo doctor` on this machine, and with each thing broken on purpose: its line, and the
cure.
"""

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
from embodied_ppo.commands.doctor import Answer, Row

ROOT = Path(__file__).parents[2]


def command(*argv: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and rows of ``embodied-ppo doctor --json`` in a process of its own."""
    line = [sys.executable, "-m", "embodied_ppo.commands.main", "doctor", "--json", *argv]
    done = subprocess.run(
        line, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout, done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)}


def stub(folder: Path, name: str, text: str) -> str:
    """A module ``name`` before the real one; $PYTHONPATH with it."""
    (folder / f"{name}.py").write_text(text)
    return os.pathsep.join(
        [
            str(folder),
            *filter(None, [os.environ.get("PYTHONPATH", "")]),
            str(ROOT),
            str(ROOT / "envs"),
        ]
    )


def only(rows: Any) -> Row:
    (row,) = rows
    return row


# ------------------------------------------------------------------------------------- this machine
def test_a_healthy_machine() -> None:
    code, rows = command()
    broken = [row for row in rows.values() if row["state"] == "problem" and row["needed"]]
    assert code == 0 and not broken, broken
    for name in (
        "python",
        "packages",
        "torch",
        "compiler",
        "mujoco",
        "picture egl",
        "pictures",
        "envpool",
        "ray",
    ):
        assert rows[name]["state"] == "ok" and rows[name]["found"] and not rows[name]["cure"], rows[
            name
        ]
    assert rows["pictures"]["found"] == "training uses egl (MUJOCO_GL)"
    assert re.fullmatch(r"a frame of 64 x 48 in [\d.]+ s", rows["picture egl"]["found"])
    assert {
        "picture osmesa",
        "picture glfw",
        "warp",
        "disk here",
        "shared memory",
        "port 6379",
    } <= rows.keys()
    assert all(row["cure"] for row in rows.values() if row["state"] == "problem")


def test_the_tested_versions_are_those_of_the_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / "scripts/constraints.txt").read_text(), re.MULTILINE
        )
    )
    wanted = [("", line) for line in project["dependencies"]]
    seen = set[str]()
    for extra in filter(None, doctor.RECIPES):
        wanted += [(extra, line) for line in project["optional-dependencies"][extra]]
    for extra, line in wanted:
        one = Requirement(line)
        if one.name in seen:  # of the extra named before
            continue
        seen.add(one.name)
        about = doctor.VERSIONS[one.name]
        limits = {(s.operator, s.version) for s in one.specifier}
        assert limits == {(">=", about.least)} | ({("<", about.below)} if about.below else set()), (
            one.name
        )
        assert (about.tested, about.extra) == (tested[one.name.lower()], extra), one.name
    assert seen == doctor.VERSIONS.keys()
    least, below = doctor.PYTHON
    assert project["requires-python"] == f">={least[0]}.{least[1]},<{below[0]}.{below[1]}"


# ---------------------------------------------------------------------- broken on purpose, for real
def test_three_things_broken_in_a_real_process(tmp_path: Path) -> None:
    """No compiler on the path, a MUJOCO_GL that is none, and an EnvPool that does not load."""
    empty = tmp_path / "bin"
    empty.mkdir()
    paths = stub(tmp_path, "envpool", "raise ImportError('libGLEW.so: cannot open')")
    environment = {"PATH": str(empty), "MUJOCO_GL": "nonsense", "PYTHONPATH": paths}
    code, rows = command(**{**environment, "CXX": ""})
    assert code == 1
    assert (
        rows["compiler"]["state"] == "absent" and "no g++ on the path" in rows["compiler"]["found"]
    )
    assert "conda install -c conda-forge gxx" in rows["compiler"]["cure"]
    assert "invalid value for environment variable MUJOCO_GL" in rows["mujoco"]["found"]
    assert rows["mujoco"]["cure"] == rows["pictures"]["cure"] == "unset MUJOCO_GL"
    assert rows["picture egl"]["state"] == "ok"  # each backend is asked by its own name
    assert (
        rows["envpool"]["found"] == "ImportError: libGLEW.so: cannot open"
        and rows["envpool"]["state"] == "problem"
    )
    assert rows["envpool"]["cure"] == "pip install --force-reinstall --no-deps envpool==1.2.5"
    assert "packages" not in rows and rows["extra language"]["state"] == "ok"
    human = subprocess.run(
        [sys.executable, "-m", "embodied_ppo.commands.main", "doctor"],
        env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert human.returncode == 1 and re.search(
        r"^problem  envpool +ImportError: libGLEW", human.stdout, re.MULTILINE
    )
    assert re.search(r"^ +cure: unset MUJOCO_GL$", human.stdout, re.MULTILINE)
    assert human.stdout.splitlines()[-1].startswith("broken, and the default recipes need it: ")


def test_what_hangs_is_ended_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe and the process that it started."""
    child = tmp_path / "child"
    text = (
        "import subprocess, time\n"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    monkeypatch.setattr(doctor, "DEADLINE_S", 5.0)
    began = time.monotonic()
    answer = doctor._ask(["envpool"])["envpool"]
    assert answer == Answer(error="did not answer in 5 s") and time.monotonic() - began < 30
    assert run_helpers.processes_ended(int(child.read_text()))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
        ("import os; print('no driver', flush=True); os._exit(7)", "ended with 7: no driver"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_what_crashes_takes_nothing_down(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "envpool", text))
    assert doctor._ask(["envpool"])["envpool"].error == error


def test_a_package_that_crashes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, "jinja2", "import os; os.abort()"))
    found = list(doctor._packages(doctor._ask(["imports"])["imports"]))
    assert (
        found[0].name == "imports"
        and found[0].state == "problem"
        and "crashed (SIGABRT), at " in found[0].found
    )


def test_a_backend_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """EGL for which no driver is registered."""
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere.json")
    answer = doctor._ask(["egl"])["egl"]
    assert answer.error
    rows = {
        row.name: row for row in doctor._pictures({"egl": answer, "osmesa": Answer(error="none")})
    }
    assert (
        rows["picture egl"].state == "absent"
        and "apt-get install libegl1" in rows["picture egl"].cure
    )
    assert rows["pictures"].state == "problem" and "conda install" in rows["pictures"].cure


# -------------------------------------------------------------------- broken on purpose, one by one
@pytest.mark.parametrize(
    ("named", "works", "state", "found", "cure"),
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
def test_what_training_will_draw_with(
    named: str,
    works: tuple[str, ...],
    state: str,
    found: str,
    cure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUJOCO_GL", named)
    answers = {
        name: Answer("a frame") if name in works else Answer(error="no library")
        for name in doctor.BACKENDS
    }
    rows = {row.name: row for row in doctor._pictures(answers)}
    row = rows.pop("pictures")
    assert (
        row.state == state
        and row.found.startswith(found)
        and row.cure.startswith(cure)
        and bool(row.cure) == bool(cure)
    )
    assert [row.state for row in rows.values()] == [
        "ok" if name in works else "absent" for name in doctor.BACKENDS
    ]


@pytest.mark.parametrize("now", [(3, 10, 12), (3, 14, 0)])
def test_another_python(now: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", now)
    row = doctor._python()
    assert row.state == "problem" and row.needed and "works with 3.11, 3.12 and 3.13" in row.found
    assert "conda create -n ppo python=3.11" in row.cure


@pytest.mark.parametrize(
    ("name", "now", "state", "found", "cure"),
    [
        ("mujoco", "4.0.0", "problem", "4.0.0: works with >=3.8.1,<4 (4.0.0 has a diverging solver)",
         "pip install 'mujoco>=3.8.1,<4'"),
        ("torch", "2.8.1", "problem", "2.8.1: works with >=2.9,<3", "pip install 'torch>=2.9,<3'"),
        ("torch", "2.13.0+cu130", "ok", "15 of 15 as tested", ""),
        ("pillow", "99.1", "ok", "14 of 15 as tested; pillow 99.1 (tested: 13.0.0)", ""),
        ("ray", None, "problem", "not installed: ray", "pip install -c scripts/constraints.txt -e ."),
        ("peft", None, "absent", "not installed: peft", "pip install -c scripts/constraints.txt -e '.[vla]'"),
    ],
)  # fmt: skip
def test_versions(
    name: str, now: str | None, state: str, found: str, cure: str, monkeypatch: pytest.MonkeyPatch
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
    row = {row.name: row for row in doctor._packages(Answer({}))}[title]
    assert (
        (row.state, row.found) == (state, found)
        and cure in row.cure
        and bool(cure) == bool(row.cure)
    )


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
def test_torch_that_does_not_see_the_gpu(
    cuda: str | None, reason: str, visible: str | None, parts: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    nvidia_smi(tmp_path, "echo 'NVIDIA L4, 535.1'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    row = only(
        doctor._gpu(Answer({"version": "2.13.0", "cuda": cuda, "gpus": [], "reason": reason}))
    )
    assert row.state == "problem" and row.needed
    for part in parts:
        assert part in f"{row.found} {row.cure}"


def test_gpus_that_others_use_and_a_driver_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, "echo 'could not communicate with the driver'; exit 9")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpus = [{"name": "L4", "free": 20e9, "total": 24e9}, {"name": "L4", "free": 2e9, "total": 24e9}]
    torch, free, full = doctor._gpu(
        Answer({"version": "2.13.0", "cuda": "13.0", "gpus": gpus, "reason": ""})
    )
    assert (torch.state, free.state, full.state) == (
        "ok",
        "ok",
        "problem",
    ) and "2.0 of 24.0 GB free" in full.found
    assert "nvidia-smi" in full.cure and not full.needed
    assert [
        row.state
        for row in doctor._gpu(Answer({"version": "2", "cuda": None, "gpus": [], "reason": ""}))
    ] == [
        "ok",
        "absent",
    ]
    assert only(doctor._gpu(Answer(error="OSError: libcudart.so"))).cure.endswith("torch==2.13.0")


def test_compilers_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nprintf 'omp.h: No such file \\377\\n' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    row = doctor._compiler()
    assert (
        row.state == "problem"
        and "cannot compile with OpenMP: omp.h: No such file" in row.found
        and row.cure
    )
    monkeypatch.setenv("CXX", "/nowhere/g++")
    row = doctor._compiler()
    assert (
        row.state == "problem"
        and "CXX = /nowhere/g++" in row.found
        and row.cure.startswith("unset CXX")
    )


def test_disks_that_are_full_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBODIED_PPO_CACHE", "/proc/nowhere")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    rows = {row.name: row for row in doctor._disks()}
    assert (
        rows["disk here"].found == f"{tmp_path}: 0.0 GB free, less than 2"
        and rows["disk here"].needed
    )
    assert rows["disk here"].cure == "run_dir=/another/disk/run"
    assert (
        "cannot be written" in rows["disk cache"].found
        and "EMBODIED_PPO_CACHE" in rows["disk cache"].cure
    )
    assert rows["shared memory"].state == "problem" and "--shm-size" in rows["shared memory"].cure


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: ("tensorboard", "tensorboard --port 6007")})
        loopback, row = doctor._ports()
    assert loopback.state == "ok" and row == Row(
        f"port {port}",
        "problem",
        "tensorboard: Address already in use",
        "tensorboard --port 6007",
        needed=False,
    )


def test_without_optional_packages_it_is_well() -> None:
    assert doctor._of_warp(None).state == "absent" and "'.[warp]'" in doctor._of_warp(None).cure
    assert doctor._of("ray", Answer(error="no"), "cure", needed=False) == Row(
        "ray", "problem", "no", "cure", False
    )


def test_it_reads_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "experiment=quickstart"]) == 2
    assert "is not read by doctor" in capsys.readouterr().err
