"""Checks of this machine, with a fix for every problem.

Importing this module needs the standard library only. Each check is a function of the table
CHECKS, which returns a text or raises. It may hang or crash, so it runs in a separate process with
a deadline (``python -m embodied_ppo.tools.machine_checks NAME``).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from embodied_envs.base.errors import one_line

DEADLINE_S = 120.0  # time limit of the checks, which run concurrently
GB = 1e9
BACKENDS = ("egl", "osmesa", "glfw")
INSTALL = "pip install -c scripts/constraints.txt -e "
REINSTALL = "pip install --force-reinstall --no-deps "
OLDER_CUDA = (
    "a newer NVIDIA driver; without root an older CUDA: pip install --force-reinstall torch"
    " --index-url https://download.pytorch.org/whl/cu126"
)
State = Literal["ok", "problem", "absent"]


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: Subject of the check.
        state: ok; problem: broken, or needed and missing; absent: missing and optional.
        found: Description of the result.
        fix: Fix unless the state is ok.
        needed: Whether the default recipes (quickstart, arithmetic) need it.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    needed: bool = True

    @property
    def breaks_default_recipes(self) -> bool:
        """Return whether the default recipes cannot run."""
        return self.state == "problem" and self.needed


class CheckFailed(Exception):
    """A check found a problem, or that something optional is absent."""

    def __init__(self, result: str, fix: str = "", state: State = "problem") -> None:
        """Create the result of a check; without ``fix`` that of CHECKS holds."""
        super().__init__(result)
        self.fix, self.state = fix, state


# ----------------------------------------------------------------------------------------- packages
def check_packages(extra: str) -> str:
    """Check that the packages of an extra ("": those that are always needed) are installed."""
    from packaging.requirements import Requirement  # Hydra and Ray need it, too

    missing, other = [], []
    for r in map(Requirement, requires("embodied-ppo") or []):
        if (r.marker is None) != (extra == "") or (
            r.marker and not r.marker.evaluate({"extra": extra})
        ):
            continue
        try:
            installed = version(r.name)
            if not r.specifier.contains(installed, prereleases=True):
                other.append(f"{r.name} {installed} (works with {r.specifier})")
        except PackageNotFoundError:
            missing.append(r.name)
    if missing or other:
        result = [f"not installed: {', '.join(missing)}"] if missing else []
        state = "absent" if extra and not other else "problem"
        raise CheckFailed("; ".join(result + other), state=state)
    return "in the supported versions"


# ---------------------------------------------------------------------------- torch, GPUs, compiler
def check_torch() -> str:
    """Check torch by one sum on the CPU and on each GPU; name the free memory of the GPUs."""
    import torch

    assert float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum()) == 64**3
    cuda = torch.version.cuda
    result = f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPU only'}"
    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        assert float(torch.ones(1000, device=f"cuda:{i}").sum()) == 1000
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        gpus.append(f"{name} ({free / GB:.1f} of {total / GB:.1f} GB free)")
    if not gpus and (driver := driver_gpus()):
        fix = f"{REINSTALL}torch --index-url https://pypi.org/simple"
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            fix = "unset CUDA_VISIBLE_DEVICES"
        elif cuda:
            fix = OLDER_CUDA
        raise CheckFailed(f"{result}; the driver has {driver}, torch finds none", fix)
    return f"{result}; {', '.join(gpus) or 'no NVIDIA GPU: device=cpu'}"


def driver_gpus() -> str:
    """Return the GPUs that the NVIDIA driver reports, with its version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(process.stdout.splitlines())


def check_compiler() -> str:
    """Compile and run a program with OpenMP."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        result = f"no {name} on the path; compile=auto then trains uncompiled, slower"
        raise CheckFailed(result, state="absent")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "a.cpp"), Path(folder, "a.out")
        source.write_text("#include <vector>\n#include <omp.h>\nint main() { return 0; }\n")
        command = [name, "-fopenmp", str(source), "-o", str(program)]
        build = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if build.returncode != 0:
            reason = (build.stderr.strip().splitlines() or [f"exit code {build.returncode}"])[0]
            raise CheckFailed(f"{name} cannot compile with OpenMP: {reason}")
        subprocess.run([str(program)], check=True)
    return f"{shutil.which(name)} builds a program that runs"


# ------------------------------------------------------------------------------- simulators, Ray
SCENE = """<mujoco><worldbody><light pos="0 0 3"/>
<geom type="plane" size="2 2 .1" rgba=".3 .6 .3 1"/>
<body pos="0 0 1"><freejoint/><geom type="sphere" size=".3" rgba="1 0 0 1"/></body>
</worldbody></mujoco>"""


def check_mujoco() -> str:
    """Simulate a falling ball for 0.1 s; the distance must be g t^2 / 2."""
    try:
        import mujoco
    except RuntimeError as error:  # it refuses $MUJOCO_GL
        raise CheckFailed(one_line(error), "unset MUJOCO_GL") from error

    data = mujoco.MjData(model := mujoco.MjModel.from_xml_string(SCENE))
    while data.time < 0.1:
        mujoco.mj_step(model, data)
    fall = 1 - data.qpos[2]
    assert abs(fall - 9.81 * data.time**2 / 2) < 0.005, f"a ball fell {fall:.3f} m in 0.1 s"
    return f"{mujoco.__version__}, a falling ball is simulated correctly"


def render_frame() -> str:
    """Render the scene with the backend of $MUJOCO_GL."""
    import mujoco

    data = mujoco.MjData(model := mujoco.MjModel.from_xml_string(SCENE))
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, height=48, width=64)
    renderer.update_scene(data)
    assert renderer.render().std() > 5, "the frame is blank"  # [48, 64, 3]
    return "renders"


def check_envpool() -> str:
    """Make one step of two half-cheetahs."""
    import envpool
    import numpy

    env = envpool.make_gymnasium("HalfCheetah-v4", num_envs=2)
    env.reset()
    obs = env.step(numpy.zeros((2, 6)))[0]
    assert obs.shape == (2, 17), f"HalfCheetah-v4 has observations of shape {obs.shape}"
    return "HalfCheetah-v4 makes a step"


def check_ray() -> str:
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


# -------------------------------------------------------------------------------------------- disks
def check_disk(folder: Path, required_gb: float) -> str:
    """Check the free space of a folder (or its nearest parent), and that a file can be written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GB
    result = f"{folder}: {free:.1f} GB free"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckFailed(f"{result}, cannot be written: {error.strerror}") from error
    if free < required_gb:
        raise CheckFailed(f"{result}, less than {required_gb:g}")
    return result


def cache_folder() -> Path:
    """Return the folder of compiled code."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EMBODIED_PPO_CACHE") or Path(cache, "embodied_ppo"))


# ------------------------------------------------------------------------------------------- table
CONDA = "without root: conda install -c conda-forge"
COMPILER_FIX = f"apt-get install g++; {CONDA} gxx; export CXX=$CONDA_PREFIX/bin/g++"
RENDERING_FIX = f"apt-get install libegl1 libgl1-mesa-dri; {CONDA} libegl mesalib"
CACHE_FIX = "export EMBODIED_PPO_CACHE=/another/disk"
TEMPORARY_FIX = "export TMPDIR=/another/disk; files of earlier runs in /tmp/ray may be deleted"
SHARED_MEMORY_FIX = "in Docker: docker run --shm-size 8g IMAGE"
# Name -> (check, its fix, whether the default recipes need it), in the order of printing.
CHECKS: dict[str, tuple[Callable[[], str], str, bool]] = {
    "python": (lambda: f"{platform.python_version()} at {sys.executable}", "", True),
    "packages": (lambda: check_packages(""), f"{INSTALL}.", True),
    "extra language": (lambda: check_packages("language"), f"{INSTALL}'.[language]'", True),
    "extra warp": (lambda: check_packages("warp"), f"{INSTALL}'.[warp]'", False),
    "torch": (check_torch, f"{REINSTALL}torch", True),
    "compiler": (check_compiler, COMPILER_FIX, False),
    "mujoco": (check_mujoco, f"{REINSTALL}mujoco", True),
    **dict.fromkeys(BACKENDS, (render_frame, RENDERING_FIX, False)),
    "envpool": (check_envpool, f"{REINSTALL}envpool", True),
    "ray": (check_ray, f"{REINSTALL}ray", False),
    "disk here": (lambda: check_disk(Path.cwd(), 2.0), "run_dir=/another/disk/run", True),
    "disk cache": (lambda: check_disk(cache_folder(), 0.5), CACHE_FIX, True),
    "disk temporary": (lambda: check_disk(Path(tempfile.gettempdir()), 1.0), TEMPORARY_FIX, True),
    "shared memory": (lambda: check_disk(Path("/dev/shm"), 1.0), SHARED_MEMORY_FIX, False),
}


# ------------------------------------------------------------------------------------------ execute
def print_check(name: str) -> None:
    """Run a check in this process and print its result as the last line."""
    function, fix, _ = CHECKS[name]
    try:
        result: dict[str, Any] = {"state": "ok", "found": function()}
    except CheckFailed as failure:
        result = {"state": failure.state, "found": str(failure), "fix": failure.fix or fix}
    except Exception as error:  # every error is a result
        result = {"state": "problem", "found": one_line(error, kind=True), "fix": fix}
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # without waiting for threads of a library


def run_apart(name: str) -> Check:
    """Run a check in a process of its own, and end it and all processes that it started."""
    _, fix, needed = CHECKS[name]
    # Only the check of MuJoCo reports a $MUJOCO_GL that MuJoCo refuses.
    gl = {} if name == "mujoco" else {"MUJOCO_GL": name if name in BACKENDS else ""}
    # A file, because a process that a check started would keep a pipe open.
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "embodied_ppo.tools.machine_checks", name],
            env={**os.environ, **gl},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return Check(name, "problem", f"did not answer in {DEADLINE_S:g} s", fix, needed)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        last = out.read().decode(errors="replace").strip().rpartition("\n")[2]
    if code == 0:
        return Check(name, needed=needed, **json.loads(last))
    ended = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    return Check(name, "problem", f"{ended}: {last}", fix, needed)


def run_checks() -> list[Check]:
    """Run all checks at the same time and return them in the order of printing."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        results = dict(zip(CHECKS, pool.map(run_apart, CHECKS), strict=True))
    backends = {name: results.pop(name) for name in BACKENDS}
    return [*results.values(), check_rendering(backends)]


def check_rendering(backends: Mapping[str, Check]) -> Check:
    """Check the rendering backend of training: $MUJOCO_GL, else the first of EGL and OSMesa."""
    working = [name for name, check in backends.items() if check.state == "ok"]
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    if chosen in BACKENDS and chosen not in working:
        result = f"MUJOCO_GL = {chosen} does not render: {backends[chosen].found}"
        fix = f"export MUJOCO_GL={working[0]}" if working else RENDERING_FIX
        return Check("rendering", "problem", result, fix)
    if chosen not in BACKENDS and not {"egl", "osmesa"} & {*working}:
        result = f"no backend works without a screen: {backends['egl'].found}"
        return Check("rendering", "problem", result, RENDERING_FIX)
    used = chosen if chosen in BACKENDS else working[0]
    return Check("rendering", "ok", f"training uses {used}; working: {', '.join(working)}")


if __name__ == "__main__":
    print_check(sys.argv[1])
