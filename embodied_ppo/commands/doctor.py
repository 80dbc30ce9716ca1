"""`embodied-ppo doctor`: check what works on this machine and print the cure for what does not.

This module needs the standard library only. A check that may hang or crash is a probe: it runs in a
separate process with a deadline (``python -m embodied_ppo.commands.doctor NAME``).
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import PROBLEM_FOUND
from embodied_ppo.core.errors import one_line

PYTHON = ((3, 11), (3, 14))
"""Supported versions of Python: from the first, below the second."""
DEADLINE_S = 120.0
"""Time limit of the probes, which run concurrently."""
GB = 1e9
BACKENDS = ("egl", "osmesa", "glfw")
INSTALL = "pip install -c scripts/constraints.txt -e ."


# -------------------------------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_override_arguments(parser, "doctor")


def run(args: argparse.Namespace) -> int:
    """Examine the machine, print the result, return the exit code."""
    arguments.reject_overrides(args)
    rows = examine()
    if args.json:
        print(output.as_json([vars(row) for row in rows]))
    else:
        print_rows(rows)
    return PROBLEM_FOUND if any(row.state == "problem" and row.needed for row in rows) else 0


def print_rows(rows: Sequence[Row]) -> None:
    """Print one line for each check, followed by the cure unless the check is OK."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        state = row.state.upper() if row.state == "ok" else row.state
        print(f"{state:<7}  {row.name:<{width}}  {row.found}")
        if row.cure:
            print(f"{'':<7}  {'':<{width}}  cure: {row.cure}")
    broken = [row.name for row in rows if row.state == "problem" and row.needed]
    if broken:
        print(f"broken, and the default recipes need it: {', '.join(broken)}")
    else:
        print("all that the default recipes need works")


# ------------------------------------------------------------------------------------- the packages
@dataclass(frozen=True)
class Version:
    """Versions of a package that work.

    Attributes:
        tested: The version in scripts/constraints.txt.
        least: The lowest version that works.
        below: The lowest version that is too new; "" if none is known.
        module: Name of the Python module.
        extra: The extra that installs the package; "" for a package that is always installed.
    """

    tested: str
    least: str
    below: str
    module: str
    extra: str = ""


VERSIONS: dict[str, Version] = {
    "torch": Version("2.13.0", "2.9", "3", "torch"),
    "gymnasium": Version("1.4.0", "1.2", "2", "gymnasium"),
    "mujoco": Version("3.17.0", "3.8.1", "4", "mujoco"),
    "envpool": Version("1.2.5", "1.2.5", "2", "envpool"),
    "ray": Version("2.60.0", "2.50", "3", "ray"),
    "tensorboard": Version("2.21.0", "2.20", "3", "tensorboard"),
    "hydra-core": Version("1.3.8", "1.3.2", "1.4", "hydra"),
    "omegaconf": Version("2.3.1", "2.3", "2.4", "omegaconf"),
    "pyyaml": Version("6.0.3", "6", "7", "yaml"),
    "numpy": Version("2.4.6", "2.0", "3", "numpy"),
    "imageio": Version("2.38.1", "2.34", "3", "imageio"),
    "imageio-ffmpeg": Version("0.8.1", "0.5", "1", "imageio_ffmpeg"),
    "pillow": Version("13.0.0", "10", "", "PIL"),
    "jinja2": Version("3.1.6", "3.1", "4", "jinja2"),
    "rich": Version("15.0.0", "13", "16", "rich"),
    "transformers": Version("5.23.0", "5.23", "6", "transformers", "language"),
    "tokenizers": Version("0.23.3", "0.23.1", "1", "tokenizers", "language"),
    "safetensors": Version("0.8.0", "0.8", "1", "safetensors", "language"),
    "pyarrow": Version("26.0.1", "16", "", "pyarrow", "language"),
    "math-verify": Version("0.9.0", "0.8", "1", "math_verify", "language"),
    "peft": Version("0.21.2", "0.21", "1", "peft", "vla"),
    "mujoco-warp": Version("3.17.0", "3.17", "4", "mujoco_warp", "warp"),
    "warp-lang": Version("1.19.0", "1.19", "2", "warp", "warp"),
}
"""The versions in pyproject.toml and scripts/constraints.txt (compared by a test)."""

WHY = {"mujoco": " (4.0.0 has a diverging solver)"}

RECIPES = {"": True, "language": True, "vla": False, "warp": False}
"""Extra -> whether the default recipes (quickstart, arithmetic) use it."""


@dataclass(frozen=True)
class Row:
    """The result of a check.

    Attributes:
        name: What was checked.
        state: ok; problem: broken, or needed and missing; absent: missing and optional.
        found: What the check found.
        cure: What to do unless the state is ok.
        needed: Whether the default recipes need it.
    """

    name: str
    state: Literal["ok", "problem", "absent"]
    found: str
    cure: str = ""
    needed: bool = True


@dataclass(frozen=True)
class Answer:
    """The result of a probe: what it found, or the error, "" if there was none."""

    found: Any = None
    error: str = ""


# ------------------------------------------------------------------------------------------- probes
def _imports() -> dict[str, str]:
    """Return installed package -> error of its import, for those that cannot be imported."""
    found = {}
    for name, about in VERSIONS.items():
        print(json.dumps({"at": name}), flush=True)  # if an import crashes, the last line names it
        try:
            version(name)
        except PackageNotFoundError:
            continue
        try:
            pkgutil.resolve_name(about.module)
        except Exception as error:  # any error means that the package is broken
            found[name] = one_line(error, kind=True)
    return found


def _torch() -> dict[str, Any]:
    """Return the versions and GPUs that torch finds, after one sum on each GPU."""
    import torch

    gpus, reason = [], ""
    try:
        if torch.version.cuda is not None:
            torch.cuda.init()
    except (
        RuntimeError,
        AssertionError,
        torch.cuda.DeferredCudaCallError,
    ) as error:  # no driver, no GPU, or a broken one
        reason = one_line(error)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        assert float(torch.ones(1000, device=f"cuda:{i}").sum()) == 1000
        free, total = torch.cuda.mem_get_info(i)
        gpus.append({"name": torch.cuda.get_device_name(i), "free": free, "total": total})
    assert float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum()) == 64**3
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "reason": reason,
    }


SCENE = """<mujoco><worldbody><light pos="0 0 3"/>
<geom type="plane" size="2 2 .1" rgba=".3 .6 .3 1"/>
<body pos="0 0 1"><freejoint/><geom type="sphere" size=".3" rgba="1 0 0 1"/></body>
</worldbody></mujoco>"""


def _mujoco() -> str:
    """Simulate a falling ball for 0.1 s; the distance must be g t^2 / 2."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    while data.time < 0.1:
        mujoco.mj_step(model, data)
    assert abs(1 - data.qpos[2] - 9.81 * data.time**2 / 2) < 0.005, (
        f"a ball fell {1 - data.qpos[2]:.3f} m in 0.1 s"
    )
    return f"{mujoco.__version__}, a falling ball is simulated correctly"


def _frame() -> str:
    """Render the scene with the backend of $MUJOCO_GL."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    began = time.perf_counter()
    renderer = mujoco.Renderer(model, height=48, width=64)
    renderer.update_scene(data)
    frame = renderer.render()  # [48, 64, 3]
    took = time.perf_counter() - began
    assert frame.std() > 5, "the frame is blank"
    return f"a frame of 64 x 48 in {took:.1f} s"


def _envpool() -> str:
    """Make one step of two half-cheetahs."""
    import envpool
    import numpy

    env = envpool.make_gymnasium("HalfCheetah-v4", num_envs=2)
    env.reset()
    obs = env.step(numpy.zeros((2, 6)))[0]
    assert obs.shape == (2, 17), f"HalfCheetah-v4 gave observations of shape {obs.shape}"
    return "HalfCheetah-v4 makes a step"


def _warp() -> str:
    """Run one Warp array operation on the CPU."""
    import mujoco_warp
    import warp

    warp.init()
    assert warp.full(3, 2.0, dtype=float, device="cpu").numpy().sum() == 6
    devices = ", ".join(map(str, warp.get_devices()))
    return f"{warp.__version__}, mujoco_warp {mujoco_warp.__version__}, on {devices}"


def _ray() -> str:
    """Start a local Ray and make one call in it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    @ray.remote
    def other() -> int:
        return os.getpid()

    began = time.perf_counter()
    options = dict[str, Any](include_dashboard=False, log_to_driver=False)
    ray.init(address="local", num_cpus=1, **options)
    try:
        assert ray.get(other.remote()) != os.getpid()
    finally:
        ray.shutdown()
    return f"starts and answers in {time.perf_counter() - began:.1f} s"


PROBES: dict[str, Callable[[], Any]] = {
    "imports": _imports,
    "torch": _torch,
    "mujoco": _mujoco,
    **dict.fromkeys(BACKENDS, _frame),
    "envpool": _envpool,
    "warp": _warp,
    "ray": _ray,
}


def _probe(name: str) -> None:
    """Run a probe in this process, print its result as the last line, and exit at once."""
    try:
        answer = {"found": PROBES[name]()}
    except Exception as error:  # the top of the process: every error is a result
        answer = {"error": one_line(error, kind=True)}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)


def _ask(names: Sequence[str]) -> dict[str, Answer]:
    """Run probes concurrently and return their results after at most DEADLINE_S.

    Processes that the probes started are ended, too.
    """
    deadline, running = (
        time.monotonic() + DEADLINE_S,
        dict[str, tuple[subprocess.Popen[bytes], Any]](),
    )
    with ExitStack() as stack:
        for name in names:
            # only the probe of MuJoCo reports a $MUJOCO_GL that MuJoCo refuses
            gl = {} if name == "mujoco" else {"MUJOCO_GL": name if name in BACKENDS else ""}
            out = stack.enter_context(
                tempfile.TemporaryFile()
            )  # a process that a probe started would keep a pipe open
            command = [sys.executable, "-m", "embodied_ppo.commands.doctor", name]
            process = subprocess.Popen(
                command,
                env={**os.environ, **gl},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
            running[name] = process, out
        return {name: _answer(process, out, deadline) for name, (process, out) in running.items()}


def _answer(process: subprocess.Popen[bytes], out: Any, deadline: float) -> Answer:
    """Wait for a probe and parse the last line of its output."""
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        code = None
    out.seek(0)
    lines = [line for line in out.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    result = json.loads(last) if re.match(r'\{"(found|error|at)"', last) else {}
    at = f", at {result['at']}" if "at" in result else ""
    if code is None:
        return Answer(error=f"did not answer in {DEADLINE_S:g} s{at}")
    if code < 0:
        return Answer(error=f"crashed ({signal.Signals(-code).name}){at}")
    if not {"found", "error"} & result.keys():
        return Answer(error=f"ended with {code}{at}: {last}")
    return Answer(result.get("found"), result.get("error", ""))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ------------------------------------------------------------------------------------------- checks
def examine() -> list[Row]:
    """Run all checks and return their results in the order of printing."""
    answers = _ask([name for name in PROBES if name != "warp" or _installed("warp-lang")])
    return [
        _python(),
        *_packages(answers["imports"]),
        *_gpu(answers["torch"]),
        _compiler(),
        _of("mujoco", answers["mujoco"], _gl_cure() or _pip("mujoco")),
        *_pictures({name: answers[name] for name in BACKENDS}),
        _of("envpool", answers["envpool"], _pip("envpool")),
        _of_warp(answers.get("warp")),
        _of("ray", answers["ray"], _pip("ray"), needed=False),
        *_disks(),
        *_ports(),
    ]


def _of(name: str, answer: Answer, cure: str, *, needed: bool = True) -> Row:
    """Return the row of a probe whose result is a text."""
    if answer.error:
        return Row(name, "problem", answer.error, cure, needed)
    return Row(name, "ok", answer.found, needed=needed)


def _numbers(text: str) -> tuple[int, ...]:
    """Convert 2.13.0+cpu to (2, 13, 0)."""
    return tuple(int(x) for x in re.findall(r"\d+", text.partition("+")[0])[:3])


def _installed(name: str) -> str:
    """Return the version of a package, "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _pip(name: str) -> str:
    """Return the command that reinstalls a package."""
    about = VERSIONS[name]
    return f"pip install --force-reinstall --no-deps {name}=={about.tested}"


def _python() -> Row:
    """Check the version of Python."""
    now, name = sys.version_info[:2], f"{platform.python_version()} at {sys.executable}"
    least, below = PYTHON
    cure = "make PYTHON=/path/to/python3.11 train; without root: conda create -n ppo python=3.11"
    if not least <= now < below:
        return Row("python", "problem", f"{name}; works with 3.11, 3.12 and 3.13", cure)
    return Row("python", "ok", name)


def _packages(imports: Answer) -> Iterator[Row]:
    """Check the packages.

    Yields a row for each missing, too old, too new or broken package, and one for each extra
    without a problem.
    """
    broken = imports.found or {}
    if imports.error:
        yield Row("imports", "problem", imports.error, INSTALL)
    for extra in RECIPES:
        names = [name for name, about in VERSIONS.items() if about.extra == extra]
        missing = [name for name in names if not _installed(name)]
        title, needed = f"extra {extra}" if extra else "packages", RECIPES[extra]
        install = INSTALL if not extra else INSTALL.replace("-e .", f"-e '.[{extra}]'")
        if missing:
            state = "problem" if not extra else "absent"
            yield Row(title, state, f"not installed: {', '.join(missing)}", install, needed)
        bad = list[str]()
        for name in (name for name in names if name not in missing):
            about, now = VERSIONS[name], _installed(name)
            limit = f">={about.least}" + (f",<{about.below}" if about.below else "")
            if _numbers(now) < _numbers(about.least) or (
                about.below and _numbers(now) >= _numbers(about.below)
            ):
                bad.append(name)
                why = f"{now}: works with {limit}{WHY.get(name, '')}"
                yield Row(name, "problem", why, f"pip install '{name}{limit}'", needed)
            elif name in broken:
                bad.append(name)
                yield Row(
                    name, "problem", f"{now} cannot be imported: {broken[name]}", _pip(name), needed
                )
        if not missing and not bad:
            other = [
                f"{n} {_installed(n)} (tested: {VERSIONS[n].tested})"
                for n in names
                if not _as_tested(n)
            ]
            tested = f"{len(names) - len(other)} of {len(names)} as tested"
            yield Row(title, "ok", "; ".join([tested, *other]), needed=needed)


def _as_tested(name: str) -> bool:
    """Return whether the installed version of a package is the tested one."""
    return _installed(name).partition("+")[0] == VERSIONS[name].tested


def _gpu(answer: Answer) -> Iterator[Row]:
    """Check torch, whether it finds the GPUs of the driver, and their free memory."""
    if answer.error:
        yield Row("torch", "problem", answer.error, _pip("torch"))
        return
    torch, driver = answer.found, _driver()
    built = (
        f"{torch['version']}, built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'CPU only'}"
    )
    if driver and not torch["gpus"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"{built}; the driver has {', '.join(driver)}, torch finds none"
        if hidden is not None and hidden.strip() in ("", "-1"):
            yield Row(
                "torch",
                "problem",
                f"{found}: CUDA_VISIBLE_DEVICES = '{hidden}'",
                "unset CUDA_VISIBLE_DEVICES",
            )
        elif torch["cuda"]:
            yield Row(
                "torch",
                "problem",
                f"{found}: {torch['reason'] or 'no reason given'}",
                "a newer NVIDIA driver; without root an older CUDA: pip install --force-reinstall "
                "torch "
                "--index-url https://download.pytorch.org/whl/cu126",
            )
        else:
            yield Row(
                "torch", "problem", found, _pip("torch") + " --index-url https://pypi.org/simple"
            )
        return
    yield Row("torch", "ok", built)
    if not torch["gpus"]:
        yield Row("gpu", "absent", "no NVIDIA GPU: device=cpu", needed=False)
    for i, gpu in enumerate(torch["gpus"]):
        free, total = gpu["free"] / GB, gpu["total"] / GB
        found = f"{gpu['name']}, {free:.1f} of {total:.1f} GB free"
        if gpu["free"] < 0.5 * gpu["total"]:
            cure = (
                "nvidia-smi lists the processes that use it; to use another GPU: "
                f"device=cuda:{i + 1}, or CUDA_VISIBLE_DEVICES"
            )
            yield Row(f"gpu {i}", "problem", found, cure, needed=False)
        else:
            yield Row(f"gpu {i}", "ok", found)


def _driver() -> list[str]:
    """Return the names of the GPUs that the NVIDIA driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ["a GPU (/dev/nvidia0)"] if Path("/dev/nvidia0").exists() else []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [" (driver".join(line.rsplit(",", 1)) + ")" for line in lines if line.strip()]


def _compiler() -> Row:
    """Compile and run a program with OpenMP."""
    name = os.environ.get("CXX") or "g++"
    cure = (
        "apt-get install g++; without root: conda install -c conda-forge gxx; export"
        " CXX=$CONDA_PREFIX/bin/g++"
    )
    if shutil.which(name) is None:
        if os.environ.get("CXX"):
            return Row(
                "compiler",
                "problem",
                f"CXX = {name} is not on the path",
                "unset CXX; " + cure,
                needed=False,
            )
        return Row(
            "compiler",
            "absent",
            f"no {name} on the path; compile=auto then trains uncompiled, slower",
            cure,
            False,
        )
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "a.cpp"), Path(folder, "a.out")
        source.write_text(
            "#include <vector>\n#include <omp.h>\nint main() { return"
            " std::vector<int>(7).size(); }\n"
        )
        try:
            command = [name, "-fopenmp", str(source), "-o", str(program)]
            build = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S
            )
            works = (
                build.returncode == 0
                and subprocess.run([str(program)], timeout=DEADLINE_S).returncode == 7
            )
            errors = build.stderr.strip().splitlines()[:1] or ["its program does not run"]
        except (OSError, subprocess.TimeoutExpired) as error:
            works, errors = False, [one_line(error)]
    if not works:
        return Row(
            "compiler",
            "problem",
            f"{name} cannot compile with OpenMP: {errors[0]}",
            cure,
            needed=False,
        )
    return Row("compiler", "ok", f"{shutil.which(name)} builds a program that runs", needed=False)


def _gl_cure() -> str:
    """Return the cure for a $MUJOCO_GL that MuJoCo refuses, "" for a valid one."""
    named = os.environ.get("MUJOCO_GL", "").lower().strip()
    known = (
        "",
        *BACKENDS,
        "off",
        "0",
        "false",
        "disable",
        "disabled",
        "on",
        "1",
        "true",
        "enable",
        "enabled",
    )
    return "" if named in known else "unset MUJOCO_GL"


GL_CURES = {
    "egl": (
        "apt-get install libegl1 libgl1-mesa-dri; without root: conda install -c conda-forge libegl"
        " mesalib"
    ),
    "osmesa": "apt-get install libosmesa6; without root: conda install -c conda-forge mesalib=24",
    "glfw": "needs a screen: xvfb-run -a embodied-ppo ..; not needed if EGL works",
}


def _pictures(answers: Mapping[str, Answer]) -> Iterator[Row]:
    """Check each rendering backend, and the one that training uses.

    Training uses $MUJOCO_GL, else the first of EGL and OSMesa that works.
    """
    works = [name for name, answer in answers.items() if not answer.error]
    for name, answer in answers.items():
        state, cure = ("absent", GL_CURES[name]) if answer.error else ("ok", "")
        yield Row(f"picture {name}", state, answer.error or answer.found, cure, needed=False)
    named = os.environ.get("MUJOCO_GL", "").lower().strip()
    if named in BACKENDS and named not in works:
        cure = f"export MUJOCO_GL={works[0]}" if works else GL_CURES[named]
        yield Row("pictures", "problem", f"MUJOCO_GL = {named} does not render", cure)
    elif _gl_cure():
        refused = f"MUJOCO_GL = {named} is not one of {', '.join(BACKENDS)}; MuJoCo refuses to load"
        yield Row("pictures", "problem", refused, _gl_cure())
    elif not {"egl", "osmesa"} & set(works):
        yield Row("pictures", "problem", "no backend works without a screen", GL_CURES["egl"])
    else:
        used = named if named in BACKENDS else works[0]
        yield Row(
            "pictures",
            "ok",
            f"training uses {used}" + (" (MUJOCO_GL)" if named in BACKENDS else ""),
        )


def _of_warp(answer: Answer | None) -> Row:
    """Check MuJoCo Warp."""
    install = INSTALL.replace("-e .", "-e '.[warp]'")
    if answer is None:
        return Row(
            "warp", "absent", "not installed; env.simulator=warp needs it", install, needed=False
        )
    return _of("warp", answer, install, needed=False)


def _disks() -> Iterator[Row]:
    """Check free space where runs, compiled code and Ray write."""
    cache = os.environ.get("EMBODIED_PPO_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "embodied_ppo"
    )
    places = (
        ("disk here", Path.cwd(), 2.0, "run_dir=/another/disk/run", True),
        ("disk cache", Path(cache), 0.5, "export EMBODIED_PPO_CACHE=/another/disk", True),
        (
            "disk temporary",
            Path(tempfile.gettempdir()),
            1.0,
            "export TMPDIR=/another/disk; files of earlier runs in /tmp/ray may be deleted",
            True,
        ),
        ("shared memory", Path("/dev/shm"), 1.0, "in Docker: docker run --shm-size 8g ..", False),
    )
    for name, folder, least, cure, needed in places:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        found = f"{folder}: {shutil.disk_usage(there).free / GB:.1f} GB free"
        try:
            with tempfile.TemporaryFile(dir=there):
                full = shutil.disk_usage(there).free < least * GB
        except OSError as error:
            yield Row(
                name, "problem", f"{folder}: cannot be written ({error.strerror})", cure, needed
            )
            continue
        if full:
            yield Row(name, "problem", f"{found}, less than {least:g}", cure, needed)
        else:
            yield Row(name, "ok", found, needed=needed)


PORTS = {
    6379: (
        "ray start --head",
        "ray status shows whether it is a Ray cluster; else ray start --head --port=6380",
    ),
    6006: ("tensorboard", "tensorboard --logdir runs --port 6007"),
}


def _ports() -> Iterator[Row]:
    """Check whether processes can listen, and whether well-known ports are free."""
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
        yield Row("ports", "ok", "processes can listen on 127.0.0.1", needed=False)
    except OSError as error:
        yield Row(
            "ports", "problem", f"127.0.0.1: {error.strerror}", "ip link set lo up", needed=False
        )
    for port, (user, cure) in PORTS.items():
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", port))
                yield Row(f"port {port}", "ok", f"free, for {user}", needed=False)
            except OSError as error:
                yield Row(
                    f"port {port}", "problem", f"{user}: {error.strerror}", cure, needed=False
                )


if __name__ == "__main__":
    _probe(sys.argv[1])
