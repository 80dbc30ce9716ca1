"""`embodied-ppo doctor`: check this machine and print the cure of every problem.

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
    """Run all checks, print the results, and return the exit code."""
    arguments.reject_overrides(args)
    checks = run_checks()
    if args.json:
        print(output.as_json([check.as_dict() for check in checks]))
    else:
        print_checks(checks)
    return PROBLEM_FOUND if any(check.breaks_default_recipes for check in checks) else 0


def print_checks(checks: Sequence[Check]) -> None:
    """Print one line for each check, followed by the cure of a problem."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        state = check.state.upper() if check.state == "ok" else check.state
        print(f"{state:<7}  {check.name:<{width}}  {check.result}")
        if check.cure:
            print(f"{'':<7}  {'':<{width}}  cure: {check.cure}")
    if broken := [check.name for check in checks if check.breaks_default_recipes]:
        print(f"broken, and the default recipes need it: {', '.join(broken)}")
    else:
        print("all that the default recipes need works")


# ------------------------------------------------------------------------------------- the packages
@dataclass(frozen=True)
class Version:
    """Versions of a package that work.

    Attributes:
        tested: The version in scripts/constraints.txt.
        lowest: The lowest version that works.
        below: The lowest version that is too new; "" if none is known.
        module: Name of the Python module.
        extra: The extra that installs the package; "" for a package that is always installed.
    """

    tested: str
    lowest: str
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
    "mujoco-warp": Version("3.17.0", "3.17", "4", "mujoco_warp", "warp"),
    "warp-lang": Version("1.19.0", "1.19", "2", "warp", "warp"),
}
"""The versions of pyproject.toml and scripts/constraints.txt; a test compares them."""

REASONS = {"mujoco": " (4.0.0 has a diverging solver)"}
"""Package -> reason of its upper limit, if it is not obvious."""

RECIPES = {"": True, "language": True, "warp": False}
"""Extra -> whether the default recipes (quickstart, arithmetic) use it."""


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: Subject of the check.
        state: ok; problem: broken, or needed and missing; absent: missing and optional.
        result: Description of the result.
        cure: Cure unless the state is ok.
        needed: Whether the default recipes need it.
    """

    name: str
    state: Literal["ok", "problem", "absent"]
    result: str
    cure: str = ""
    needed: bool = True

    @property
    def breaks_default_recipes(self) -> bool:
        """Return whether the default recipes cannot run."""
        return self.state == "problem" and self.needed

    def as_dict(self) -> dict[str, Any]:
        """Return the check for --json."""
        fields = {"name": self.name, "state": self.state, "found": self.result}
        return fields | {"cure": self.cure, "needed": self.needed}


@dataclass(frozen=True)
class ProbeResult:
    """The value that a probe returned, or its error; "" if there was none."""

    value: Any = None
    error: str = ""


# ------------------------------------------------------------------------------------------- probes
def _imports() -> dict[str, str]:
    """Return installed package -> error of its import, for those that cannot be imported."""
    errors = {}
    for name, package in VERSIONS.items():
        print(json.dumps({"at": name}), flush=True)  # if an import crashes, the last line names it
        try:
            version(name)
        except PackageNotFoundError:
            continue
        try:
            pkgutil.resolve_name(package.module)
        except Exception as error:  # any error means that the package is broken
            errors[name] = one_line(error, kind=True)
    return errors


def _torch() -> dict[str, Any]:
    """Return the versions and GPUs of torch, after one sum on each GPU."""
    import torch

    gpus, reason = [], ""
    try:
        if torch.version.cuda is not None:
            torch.cuda.init()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        reason = one_line(error)  # no driver, no GPU, or a broken GPU
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        assert float(torch.ones(1000, device=f"cuda:{i}").sum()) == 1000
        free, total = torch.cuda.mem_get_info(i)
        gpus.append({"name": torch.cuda.get_device_name(i), "free": free, "total": total})
    assert float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum()) == 64**3
    versions = {"version": torch.__version__, "cuda": torch.version.cuda}
    return {**versions, "gpus": gpus, "reason": reason}


PROGRAM = """#include <vector>
#include <omp.h>
int main() { return std::vector<int>(7).size(); }
"""
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
    start = time.perf_counter()
    renderer = mujoco.Renderer(model, height=48, width=64)
    renderer.update_scene(data)
    frame = renderer.render()  # [48, 64, 3]
    duration_s = time.perf_counter() - start
    assert frame.std() > 5, "the frame is blank"
    return f"a frame of 64 x 48 in {duration_s:.1f} s"


def _envpool() -> str:
    """Make one step of two half-cheetahs."""
    import envpool
    import numpy

    env = envpool.make_gymnasium("HalfCheetah-v4", num_envs=2)
    env.reset()
    obs = env.step(numpy.zeros((2, 6)))[0]
    assert obs.shape == (2, 17), f"HalfCheetah-v4 has observations of shape {obs.shape}"
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
    def worker_pid() -> int:
        return os.getpid()

    start = time.perf_counter()
    options = dict[str, Any](include_dashboard=False, log_to_driver=False)
    ray.init(address="local", num_cpus=1, **options)
    try:
        assert ray.get(worker_pid.remote()) != os.getpid()
    finally:
        ray.shutdown()
    return f"starts and answers in {time.perf_counter() - start:.1f} s"


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
        result = {"value": PROBES[name]()}
    except Exception as error:  # the top of the process: every error is a result
        result = {"error": one_line(error, kind=True)}
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)


def run_probes(names: Sequence[str]) -> dict[str, ProbeResult]:
    """Run probes concurrently and return their results after at most DEADLINE_S.

    Processes that the probes started are ended, too.
    """
    deadline = time.monotonic() + DEADLINE_S
    running: dict[str, tuple[subprocess.Popen[bytes], Any]] = {}
    with ExitStack() as stack:
        for name in names:
            # Only the probe of MuJoCo reports a $MUJOCO_GL that MuJoCo refuses.
            gl = {} if name == "mujoco" else {"MUJOCO_GL": name if name in BACKENDS else ""}
            # A file, because a process that a probe started would keep a pipe open.
            out = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-m", "embodied_ppo.commands.doctor", name],
                env={**os.environ, **gl},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, process)
            running[name] = process, out
        return {name: _result(process, out, deadline) for name, (process, out) in running.items()}


def _result(process: subprocess.Popen[bytes], out: Any, deadline: float) -> ProbeResult:
    """Wait for a probe and parse the last line of its output."""
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        code = None
    out.seek(0)
    lines = [line for line in out.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    result = json.loads(last) if re.match(r'\{"(value|error|at)"', last) else {}
    at = f", at {result['at']}" if "at" in result else ""
    if code is None:
        return ProbeResult(error=f"did not answer in {DEADLINE_S:g} s{at}")
    if code < 0:
        return ProbeResult(error=f"crashed ({signal.Signals(-code).name}){at}")
    if not {"value", "error"} & result.keys():
        return ProbeResult(error=f"ended with {code}{at}: {last}")
    return ProbeResult(**result)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ------------------------------------------------------------------------------------------- checks
def run_checks() -> list[Check]:
    """Run all checks and return them in the order of printing."""
    probes = run_probes([name for name in PROBES if name != "warp" or _installed("warp-lang")])
    return [
        check_python(),
        *check_packages(probes["imports"]),
        *check_torch(probes["torch"]),
        check_compiler(),
        check_probe("mujoco", probes["mujoco"], _gl_cure() or _pip("mujoco")),
        *check_rendering({name: probes[name] for name in BACKENDS}),
        check_probe("envpool", probes["envpool"], _pip("envpool")),
        check_warp(probes.get("warp")),
        check_probe("ray", probes["ray"], _pip("ray"), needed=False),
        *check_disks(),
        *check_ports(),
    ]


def check_probe(name: str, probe: ProbeResult, cure: str, *, needed: bool = True) -> Check:
    """Return the check of a probe whose value is a text."""
    if probe.error:
        return Check(name, "problem", probe.error, cure, needed)
    return Check(name, "ok", probe.value, needed=needed)


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
    return f"pip install --force-reinstall --no-deps {name}=={VERSIONS[name].tested}"


def check_python() -> Check:
    """Check the version of Python."""
    description = f"{platform.python_version()} at {sys.executable}"
    lowest, below = PYTHON
    if lowest <= sys.version_info[:2] < below:
        return Check("python", "ok", description)
    cure = "make PYTHON=/path/to/python3.11 train; without root: conda create -n ppo python=3.11"
    return Check("python", "problem", f"{description}; works with 3.11, 3.12 and 3.13", cure)


def check_packages(imports: ProbeResult) -> Iterator[Check]:
    """Check the packages.

    Yields a check for each missing, too old, too new or broken package, and one for each extra
    without a problem.
    """
    import_errors = imports.value or {}
    if imports.error:
        yield Check("imports", "problem", imports.error, INSTALL)
    for extra, needed in RECIPES.items():
        names = [name for name, package in VERSIONS.items() if package.extra == extra]
        installed = {name: now for name in names if (now := _installed(name))}
        missing = [name for name in names if name not in installed]
        title = f"extra {extra}" if extra else "packages"
        if missing:
            cure = INSTALL.replace("-e .", f"-e '.[{extra}]'") if extra else INSTALL
            state = "absent" if extra else "problem"
            yield Check(title, state, f"not installed: {', '.join(missing)}", cure, needed)
        problems, untested = list[Check](), list[str]()
        for name, now in installed.items():
            package = VERSIONS[name]
            limit = f">={package.lowest}" + (f",<{package.below}" if package.below else "")
            too_new = package.below and _numbers(now) >= _numbers(package.below)
            if _numbers(now) < _numbers(package.lowest) or too_new:
                result = f"{now}: works with {limit}{REASONS.get(name, '')}"
                cure = f"pip install '{name}{limit}'"
                problems.append(Check(name, "problem", result, cure, needed))
            elif name in import_errors:
                result = f"{now} cannot be imported: {import_errors[name]}"
                problems.append(Check(name, "problem", result, _pip(name), needed))
            elif now.partition("+")[0] != package.tested:
                untested.append(f"{name} {now} (tested: {package.tested})")
        yield from problems
        if not missing and not problems:
            tested = f"{len(names) - len(untested)} of {len(names)} as tested"
            yield Check(title, "ok", "; ".join([tested, *untested]), needed=needed)


def check_torch(probe: ProbeResult) -> Iterator[Check]:
    """Check torch, whether it can use the GPUs of the driver, and their free memory."""
    if probe.error:
        yield Check("torch", "problem", probe.error, _pip("torch"))
        return
    torch, driver = probe.value, _driver()
    cuda = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
    build = f"{torch['version']}, built for {cuda}"
    if driver and not torch["gpus"]:
        result = f"{build}; the driver has {', '.join(driver)}, torch finds none"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and visible.strip() in ("", "-1"):
            result += f": CUDA_VISIBLE_DEVICES = '{visible}'"
            cure = "unset CUDA_VISIBLE_DEVICES"
        elif torch["cuda"]:
            result += f": {torch['reason'] or 'no reason given'}"
            cure = (
                "a newer NVIDIA driver; without root an older CUDA: pip install --force-reinstall "
                "torch --index-url https://download.pytorch.org/whl/cu126"
            )
        else:
            cure = _pip("torch") + " --index-url https://pypi.org/simple"
        yield Check("torch", "problem", result, cure)
        return
    yield Check("torch", "ok", build)
    if not torch["gpus"]:
        yield Check("gpu", "absent", "no NVIDIA GPU: device=cpu", needed=False)
    for i, gpu in enumerate(torch["gpus"]):
        result = f"{gpu['name']}, {gpu['free'] / GB:.1f} of {gpu['total'] / GB:.1f} GB free"
        if gpu["free"] < 0.5 * gpu["total"]:
            cure = (
                "nvidia-smi lists the processes that use it; to use another GPU: "
                f"device=cuda:{i + 1}, or CUDA_VISIBLE_DEVICES"
            )
            yield Check(f"gpu {i}", "problem", result, cure, needed=False)
        else:
            yield Check(f"gpu {i}", "ok", result)


def _driver() -> list[str]:
    """Return the names of the GPUs that the NVIDIA driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ["a GPU (/dev/nvidia0)"] if Path("/dev/nvidia0").exists() else []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = process.stdout.splitlines() if process.returncode == 0 else []
    return [" (driver".join(line.rsplit(",", 1)) + ")" for line in lines if line.strip()]


def check_compiler() -> Check:
    """Compile and run a program with OpenMP."""
    name = os.environ.get("CXX") or "g++"
    cure = (
        "apt-get install g++; without root: conda install -c conda-forge gxx; export"
        " CXX=$CONDA_PREFIX/bin/g++"
    )
    path = shutil.which(name)
    if path is None and os.environ.get("CXX"):
        result = f"CXX = {name} is not on the path"
        return Check("compiler", "problem", result, "unset CXX; " + cure, needed=False)
    if path is None:
        result = f"no {name} on the path; compile=auto then trains uncompiled, slower"
        return Check("compiler", "absent", result, cure, needed=False)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "a.cpp"), Path(folder, "a.out")
        source.write_text(PROGRAM)
        try:
            command = [name, "-fopenmp", str(source), "-o", str(program)]
            build = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S
            )
            errors = build.stderr.strip().splitlines()[:1] or ["its program does not run"]
            if build.returncode == 0:
                code = subprocess.run([str(program)], timeout=DEADLINE_S).returncode
                errors = [] if code == 7 else errors
        except (OSError, subprocess.TimeoutExpired) as error:
            errors = [one_line(error)]
    if errors:
        result = f"{name} cannot compile with OpenMP: {errors[0]}"
        return Check("compiler", "problem", result, cure, needed=False)
    return Check("compiler", "ok", f"{path} builds a program that runs", needed=False)


def _gl_cure() -> str:
    """Return the cure for a $MUJOCO_GL that MuJoCo refuses, "" for a valid one."""
    switches = ("off", "0", "false", "disable", "disabled", "on", "1", "true", "enable", "enabled")
    return "" if _mujoco_gl() in ("", *BACKENDS, *switches) else "unset MUJOCO_GL"


def _mujoco_gl() -> str:
    """Return $MUJOCO_GL as MuJoCo reads it."""
    return os.environ.get("MUJOCO_GL", "").lower().strip()


GL_CURES = {
    "egl": (
        "apt-get install libegl1 libgl1-mesa-dri; without root: conda install -c conda-forge libegl"
        " mesalib"
    ),
    "osmesa": "apt-get install libosmesa6; without root: conda install -c conda-forge mesalib=24",
    "glfw": "needs a screen: xvfb-run -a embodied-ppo ..; not needed if EGL works",
}


def check_rendering(probes: Mapping[str, ProbeResult]) -> Iterator[Check]:
    """Check each rendering backend, and the one that training uses.

    Training uses $MUJOCO_GL, else the first of EGL and OSMesa that works.
    """
    working = [name for name, probe in probes.items() if not probe.error]
    for name, probe in probes.items():
        state, cure = ("absent", GL_CURES[name]) if probe.error else ("ok", "")
        yield Check(f"picture {name}", state, probe.error or probe.value, cure, needed=False)
    backend = _mujoco_gl()
    if backend in BACKENDS and backend not in working:
        cure = f"export MUJOCO_GL={working[0]}" if working else GL_CURES[backend]
        yield Check("pictures", "problem", f"MUJOCO_GL = {backend} does not render", cure)
    elif cure := _gl_cure():
        result = (
            f"MUJOCO_GL = {backend} is not one of {', '.join(BACKENDS)}; MuJoCo refuses to load"
        )
        yield Check("pictures", "problem", result, cure)
    elif backend in BACKENDS:
        yield Check("pictures", "ok", f"training uses {backend} (MUJOCO_GL)")
    elif {"egl", "osmesa"} & set(working):
        yield Check("pictures", "ok", f"training uses {working[0]}")
    else:
        yield Check("pictures", "problem", "no backend works without a screen", GL_CURES["egl"])


def check_warp(probe: ProbeResult | None) -> Check:
    """Check MuJoCo Warp; None if it is not installed."""
    cure = INSTALL.replace("-e .", "-e '.[warp]'")
    if probe is None:
        result = "not installed; env.simulator=warp needs it"
        return Check("warp", "absent", result, cure, needed=False)
    return check_probe("warp", probe, cure, needed=False)


def check_disks() -> Iterator[Check]:
    """Check the free space of the folders for runs, compiled code and Ray."""
    cache = os.environ.get("EMBODIED_PPO_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "embodied_ppo"
    )
    move_tmp = "export TMPDIR=/another/disk; files of earlier runs in /tmp/ray may be deleted"
    disks = (  # name, folder, GB that must be free, cure, whether the default recipes need it
        ("disk here", Path.cwd(), 2.0, "run_dir=/another/disk/run", True),
        ("disk cache", Path(cache), 0.5, "export EMBODIED_PPO_CACHE=/another/disk", True),
        ("disk temporary", Path(tempfile.gettempdir()), 1.0, move_tmp, True),
        ("shared memory", Path("/dev/shm"), 1.0, "in Docker: docker run --shm-size 8g ..", False),
    )
    for name, folder, required, cure, needed in disks:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free / GB
        result = f"{folder}: {free:.1f} GB free"
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            result = f"{folder}: cannot be written ({error.strerror})"
            yield Check(name, "problem", result, cure, needed)
            continue
        if free < required:
            yield Check(name, "problem", f"{result}, less than {required:g}", cure, needed)
        else:
            yield Check(name, "ok", result, needed=needed)


PORTS = {
    6379: (
        "ray start --head",
        "ray status shows whether it is a Ray cluster; else ray start --head --port=6380",
    ),
    6006: ("tensorboard", "tensorboard --logdir runs --port 6007"),
}
"""Port -> (program that uses it, cure if it is occupied)."""


def check_ports() -> Iterator[Check]:
    """Check whether processes can listen, and whether well-known ports are free."""
    error = _bind_error(("127.0.0.1", 0))
    if error:
        yield Check("ports", "problem", f"127.0.0.1: {error}", "ip link set lo up", needed=False)
    else:
        yield Check("ports", "ok", "processes can listen on 127.0.0.1", needed=False)
    for port, (program, cure) in PORTS.items():
        if error := _bind_error(("", port)):
            yield Check(f"port {port}", "problem", f"{program}: {error}", cure, needed=False)
        else:
            yield Check(f"port {port}", "ok", f"free, for {program}", needed=False)


def _bind_error(address: tuple[str, int]) -> str:
    """Return the reason why a socket cannot be bound to an address, "" if it can."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(address)
        except OSError as error:
            return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    _probe(sys.argv[1])
