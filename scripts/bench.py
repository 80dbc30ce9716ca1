"""Measure speed and learning.

    python scripts/bench.py PART [PART ...] [any.option=value ...] [--json FILE]

    train          CPU time per environment step of the bench_* experiments, by phase, and of the
                   simulator and the matrix products alone
    language       response tokens per CPU second of PPO, and of generation against transformers
    simulators     steps per CPU second of our engine, of a loop of mj_step and of EnvPool
    vla            images per CPU second of our small models against transformers
    placements     an update in one process, fused over Ray, and in time-shared processes
    placements_language
                   the same with a language model and its critic
    learning       the learning protocol, alone: see scripts/bench_learning.py
    mlp            policies with EnvPool's simulators: CPU and GPU, eager and compiled
    ant, go1, panda, tabletop
                   training and environment of the experiments ant_gpu, .. on a GPU
    qwen           a PPO step of Qwen2.5-0.5B's shape with its critic, random weights
    oft, pi0_frozen, pi0_trained
                   updates of VLA models of published size, random weights
    gpu_tests      the tests that need a GPU
    gpu            all parts from placements on, without learning

Each part is a process of its own with at most --limit seconds, and is ended with its children. A
part or figure that fails does not stop the others. Figures are printed and stored in the JSON file
as soon as they are measured, with date, device, versions and commit; an entry replaces that of the
same part, device, commit and size. Times of the first four parts are CPU times of one thread,
medians over rounds in which the candidates alternate, because the speed of a shared machine changes
within minutes. ``--tiny`` runs a part with small sizes. docs/gpu.md and docs/experiments describe
results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("embodied_envs") is None:  # the checkout is not installed
    _FOLDERS = [str(ROOT), str(ROOT / "envs")]
    sys.path += _FOLDERS
    _PATHS = [os.environ.get("PYTHONPATH"), *_FOLDERS]  # of the processes that a part starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))
T = TypeVar("T")
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "mujoco",
    "mujoco-warp",
    "warp-lang",
    "envpool",
    "ray",
)


# ------------------------------------------------------------------------------------------ figures
@dataclass(frozen=True)
class Part:
    """What a part is given.

    Attributes:
        write: Receives each figure or failure, one mapping each; the default prints it.
        options: Options of the training runs, ``any.option=value``.
        tiny: Whether to run with small sizes.
        rounds, experiments: See the command line.
    """

    write: Callable[[dict[str, Any]], None]
    options: Sequence[str] = ()
    tiny: bool = False
    rounds: int = 1
    experiments: Sequence[str] = ()

    def report(self, name: str, value: Any) -> None:
        """Report a figure; ``name`` ends with its unit."""
        self.write({"figure": name, "value": value})

    def attempt(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``; if it fails, report the cause and return None."""
        try:
            return call()
        # Any failure of one figure is recorded, and the next figure is measured.
        except (Exception, SystemExit) as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            self.write({"failure": name, "message": message[:500]})
            return None


def run_command(command: str, *options: str) -> dict[str, Any]:
    """Run ``embodied-ppo COMMAND --json`` and return its result.

    Raises:
        RuntimeError: The command failed; the message holds the end of its stderr.
    """
    line = [sys.executable, "-m", "embodied_ppo.commands.main", command, "--quiet", "--json"]
    process = subprocess.run([*line, *options], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{command} {' '.join(options)}: {process.stderr[-1000:]}")
    return json.loads(process.stdout)


def train(*options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train without videos, and return the summary and the rows of the metrics."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run_dir={folder}/run", "evaluation.video_episodes=0"]
        summary = run_command("train", *fixed, *options)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric over the second half of the updates."""
    rows = [row for row in rows if "time/update_s" in row]
    values: dict[str, list[float]] = {}
    for row in rows[len(rows) // 2 :]:
        for tag, value in row.items():
            if isinstance(value, int | float):
                values.setdefault(tag, []).append(value)
    return {tag: statistics.fmean(numbers) for tag, numbers in values.items()}


def wait(device: Any) -> None:
    """Wait for the work of a torch device."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: Any) -> float:
    """Return the wall time of one call, including the work of the device."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def cpu_s(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each call; the calls alternate, after a warm-up of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


# Part of a GPU's name -> dense bfloat16 products, operations per second (data sheets).
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def peak_flops(device: Any) -> float | None:
    """Return the entry of ``PEAKS`` for a torch device, None if it has none."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((x for key, x in PEAKS.items() if key in name), None)


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------- CPU parts
TINY_RUN = ["env.num_envs=4", "algorithm.horizon=8", "algorithm.global_batch_size=16"]
TINY_RUN += ["updates=4", "env_steps=null", "evaluation.episodes=0", "compile=never"]


def measure_train(part: Part) -> None:
    """Report CPU microseconds per environment step by phase, and two lower bounds."""
    names = ("bench_fast", "bench_classic", "bench_wide", "bench_ant")
    for name in part.experiments or names[: 1 if part.tiny else 4]:
        options = [f"experiment={name}", *(TINY_RUN if part.tiny else ()), *part.options]
        config = {path: x["value"] for path, x in run_command("config", *options).items()}
        bounds = [simulator_us(config)]
        summary, _ = train(*options)
        bounds += [simulator_us(config)]  # before and after, because the machine is shared
        simulator, observations, actions = min(bounds)
        part.report(f"{name}/total_us", summary["cpu_us_per_step"])
        for phase, us in summary["cpu_us_per_step_by_phase"].items():
            part.report(f"{name}/{phase}_us", us)
        part.report(f"{name}/simulator_alone_us", simulator)
        part.report(f"{name}/products_alone_us", products_us(config, observations, actions))
        for tag in ("steps_per_s", "peak_rss_mb", "startup_s"):
            part.report(f"{name}/{tag}", summary[tag])


def simulator_us(config: Mapping[str, Any], steps: int = 300) -> tuple[float, int, int]:
    """Return CPU microseconds per environment step with random actions, and the sizes of an
    observation and of an action.
    """
    import embodied_envs

    n = config["env.num_envs"]
    env: Any = embodied_envs.make(
        config["env.id"],
        num_envs=n,
        seeds=list(range(n)),
        simulator=config["env.simulator"],
        num_threads=1,
        kwargs=config.get("env.kwargs") or {},
    )
    with contextlib.closing(env):
        call, size = random_steps(env)
        used = cpu_s({"steps": lambda: [call() for _ in range(steps)]}, 1)["steps"]
        return used / (steps * n) * 1e6, env.obs_spec.shape[0], size


def random_steps(env: Any) -> tuple[Callable[[], Any], int]:
    """Reset an environment; return a function that steps random actions, and their size."""
    import torch

    env.reset()
    spec, n = env.action_spec, env.num_envs
    if hasattr(spec, "low"):
        actions, size = torch.rand(50, n, spec.size, device=env.device) * 2 - 1, spec.size
    else:
        actions, size = torch.randint(spec.n, (50, n), device=env.device), spec.n
    turn = iter(range(10**9))
    return lambda: env.step(actions[next(turn) % 50]), size


def products_us(config: Mapping[str, Any], observations: int, actions: int) -> float:
    """Return CPU microseconds per environment step of the matrix products alone: acting, and
    forward and backward pass in every epoch.
    """
    import torch

    hidden, shared = list(config["model.hidden"]), config["model.shared_backbone"]
    trunk = list(zip([observations, *hidden], hidden, strict=False))
    layers = trunk * (1 if shared else 2) + [(hidden[-1], actions), (hidden[-1], 1)]
    first = {0} if shared else {0, len(trunk)}  # needs no gradient of its input
    n, size = config["env.num_envs"], config["algorithm.global_batch_size"]
    samples = config["algorithm.horizon"] * n

    def products(rows: int, backward: bool) -> None:
        for i, (width_in, width_out) in enumerate(layers):
            x, w = torch.ones(rows, width_in), torch.ones(width_out, width_in)
            y = x @ w.T
            if backward:
                torch.mm(y.T, x)
            if backward and i not in first:
                torch.mm(y, w)

    times = cpu_s({"act": lambda: products(n, False), "learn": lambda: products(size, True)}, 20)
    minibatches = config["algorithm.update_epoch"] * samples / size
    return (times["act"] / n + times["learn"] * minibatches / samples) * 1e6


def measure_language(part: Part) -> None:
    """Report response tokens per CPU second of training, eager and compiled, and of generation."""
    import bench_models

    small = "algorithm.rollout_batch_size=4 algorithm.global_batch_size=4 warm_start.steps=0"
    options = ["experiment=arithmetic", "eval_every=0", *part.options]
    options += [*small.split(), "updates=4"] if part.tiny else []
    half = ["actor.model.dtype=bfloat16"]
    for name, variant in {
        "eager": ["compile=never"],
        "compiled": ["compile=always"],
        "eager_bfloat16": ["compile=never", *half],
        "compiled_bfloat16": ["compile=always", *half],
    }.items():
        if part.tiny and name != "eager":
            continue
        summary, _ = train(*options, *variant)
        part.report(f"{name}/tokens_per_cpu_s", 1e6 / summary["cpu_us_per_token"])
        for phase, us in summary["cpu_us_per_token_by_phase"].items():
            part.report(f"{name}/{phase}_us_per_token", us)
        part.report(f"{name}/final_success", summary["final_success"])
    bench_models.measure_generation(part, rounds=part.rounds)


# Our task -> EnvPool's task with the same robot.
ENVPOOL = {
    **{name: f"{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")},
    "PandaPickCube": "PandaPickCube-v1",
    "Go1Joystick": "Go1JoystickFlatTerrain-v1",
}


def measure_simulators(part: Part) -> None:
    """Report environment steps per CPU second with random actions on one thread.

    The loop is a lower bound: it calls mj_step on one MjData after the other and reads no results.
    EnvPool holds the meshes of a robot once per environment, so that it has at most 64 of those.
    """
    for task in ("Hopper",) if part.tiny else (*ENVPOOL, "Tabletop"):
        many = 4 if part.tiny else 256
        number = {"ours": many, "mj_step": many, "camera": many, "envpool": min(many, 64)}
        calls: dict[str, Callable[[], Any]] = {"ours": simulator_call(task, "mujoco", many)}
        calls["mj_step"] = loop_call(task, many)
        if task in ENVPOOL:
            calls["envpool"] = simulator_call(ENVPOOL[task], "envpool", number["envpool"])
        else:
            calls["camera"] = simulator_call(task, "mujoco", many, cameras=("front",))
        used = cpu_s(calls, part.rounds)
        for name, duration in used.items():
            part.report(f"{task}/{name}_steps_per_cpu_s", 20 * number[name] / duration)


def simulator_call(task: str, simulator: str, n: int, **options: Any) -> Callable[[], Any]:
    """Return a function that takes 20 steps."""
    import embodied_envs

    seeds = list(range(n))
    env = embodied_envs.make(
        task, num_envs=n, seeds=seeds, simulator=simulator, num_threads=1, **options
    )
    step, _ = random_steps(env)
    return lambda: [step() for _ in range(20)]


def loop_call(task: str, n: int) -> Callable[[], Any]:
    """Return a function that takes 20 control steps with MuJoCo's own bindings."""
    import mujoco

    from embodied_envs import tasks
    from embodied_envs.physics import make

    task_class = tasks.find(task)
    assert task_class is not None
    instance = task_class()
    model: Any = make.compile_model(instance, task)
    datas = [mujoco.MjData(model) for _ in range(n)]

    def steps() -> None:
        for _ in range(20):
            for data in datas:
                mujoco.mj_step(model, data, nstep=instance.decimation)

    return steps


def measure_vla(part: Part) -> None:
    import bench_models

    bench_models.measure_small_vla(part, rounds=part.rounds)


# ------------------------------------------------------------------------------------ training runs
NO_LEARNING = ["save_every=0", "evaluation.episodes=1", "env_steps=null"]
QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
QWEN |= {"num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 128}
PLACEMENTS = {
    "one_process": [],
    "fused": ["placement=fused", "cluster.devices_per_node=1"],
    "time_shared": ["placement=colocated", "cluster.devices_per_node=1"],
}
ROBOT = ["experiment=tabletop_token", "compile=never", "cloning.steps=0", *NO_LEARNING]
LANGUAGE = ["experiment=arithmetic", "mode=reasoning", "warm_start.steps=0", "eval_every=0"]
LANGUAGE += ["compile=never", "save_every=0", "evaluation.episodes=1"]
LARGE_LANGUAGE = [*LANGUAGE, "algorithm.response_length=64", "actor.model.dtype=bfloat16"]
LARGE_LANGUAGE += [f"actor.model.architecture.{name}={value}" for name, value in QWEN.items()]
SMALL_LANGUAGE = [*LANGUAGE, "algorithm.rollout_batch_size=4", "algorithm.global_batch_size=4"]
SMALL_ROBOT = ["env.id=Hopper", "env.simulator=mujoco", *TINY_RUN, "model.hidden=[8]"]


def measure_placements(part: Part) -> None:
    """Report times, idle share and memory of each placement, and the memory that plan predicts."""
    compare_placements(part, SMALL_ROBOT if part.tiny else ROBOT)


def measure_placements_language(part: Part) -> None:
    """As ``measure_placements`` with a language model."""
    compare_placements(part, SMALL_LANGUAGE if part.tiny else LARGE_LANGUAGE)


def compare_placements(part: Part, experiment: Sequence[str]) -> None:
    device = device_type()
    updates = 4 if part.tiny else 10
    for name, placement in PLACEMENTS.items():
        options = [*experiment, *placement, f"device={device}", *part.options]
        plan = part.attempt(f"{name}/predicted", lambda o=options: run_command("plan", *o))
        if plan is not None:
            header, *rows = plan["memory"]
            part.report(f"{name}/predicted", dict(zip(header[1:], rows[-1][1:], strict=True)))
        run = part.attempt(name, lambda o=options: train(*o, f"updates={updates}"))
        if run is None:
            continue
        mean = means(run[1])
        phases = ("collect", "update", "publish")
        part.report(f"{name}/update_s", sum(mean[f"time/{phase}_s"] for phase in phases))
        part.report(f"{name}/swap_s", mean.get("time/swap_s", 0.0))
        for tag, value in mean.items():
            if tag == "device/idle" or (tag.startswith("memory/") and tag.endswith("_peak_gb")):
                part.report(f"{name}/{tag}", value)


def measure_mlp(part: Part) -> None:
    """Report the times of acting and learning on CPU and GPU."""
    wide = "experiment=bench_wide env.num_envs=1024 env.num_threads=0"
    settings = {
        "bench_fast": ["experiment=bench_fast"],
        "bench_wide": ["experiment=bench_wide"],
        "bench_wide_1024": [*wide.split(), "algorithm.global_batch_size=16384"],
    }
    kinds = [("cpu", "always"), ("cuda", "never"), ("cuda", "always")]
    if part.tiny:
        settings = {"tiny": SMALL_ROBOT}
    for name, options in settings.items():
        for device, compile_ in [("cpu", "never")] if device_type() == "cpu" else kinds:
            label = f"{name}/{device}/compile_{compile_}"
            run_options = [*options, *NO_LEARNING, f"device={device}", f"compile={compile_}"]
            run_options += [f"updates={4 if part.tiny else 40}", *part.options]
            run = part.attempt(label, lambda o=run_options: train(*o))
            if run is not None:
                for phase in ("collect", "update"):
                    part.report(f"{label}/{phase}_ms", means(run[1])[f"time/{phase}_s"] * 1e3)


def measure_simulation(part: Part, name: str) -> None:
    """Report control steps per second of training and of the environment alone."""
    import torch

    import embodied_envs

    device = device_type()
    experiment = f"experiment={name}_gpu"
    tiny = "env.simulator=mujoco env.num_envs=4 algorithm.horizon=8 compile=never"
    tiny += " algorithm.global_batch_size=16"
    options = [experiment, *NO_LEARNING, f"device={device}", *part.options]
    options += [*tiny.split(), "updates=4"] if part.tiny else ["updates=10"]
    for label, repeats in {"": "false", "deterministic/": "true"}.items():
        more = [*options, f"deterministic={repeats}"]
        run = part.attempt(f"{label}training", lambda o=more: train(*o))
        if run is not None:
            for tag in ("time/collect_s", "time/update_s", "speed/env_steps_per_s"):
                part.report(label + tag, means(run[1])[tag])
    config = {path: x["value"] for path, x in run_command("config", *options).items()}
    n = config["env.num_envs"]

    def environment() -> None:
        env: Any = embodied_envs.make(
            config["env.id"],
            num_envs=n,
            seeds=list(range(n)),
            simulator=config["env.simulator"],
            kwargs=config.get("env.kwargs") or {},
            device=torch.device(device),
        )
        with contextlib.closing(env):
            step, _ = random_steps(env)
            times = [seconds(lambda: [step() for _ in range(20)], device) for _ in range(4)]
        part.report("environment_steps_per_s", 20 * n / min(times))

    part.attempt("environment", environment)


def measure_gpu_tests(part: Part) -> None:
    """Run the tests that need a GPU; without one they are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", "gpu", "-p", "no:cacheprovider"]
    tests = ["tests/core"] if part.tiny else ["tests"]
    process = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    part.report("summary", lines[-1] if lines else process.stderr[-400:])
    for outcome in ("FAILED", "ERROR", "SKIPPED"):
        if matching := [line for line in lines if line.startswith(outcome)]:
            part.report(outcome.lower(), matching)
    if process.returncode:
        raise SystemExit(f"pytest: exit status {process.returncode}")


def measure_model(part: Part, name: str) -> None:
    import bench_models
    import torch

    device = torch.device("cuda", 0) if device_type() == "cuda" else torch.device("cpu")
    measure = bench_models.measure_qwen if name == "qwen" else bench_models.measure_large_vla
    measure(part, name, device)


# -------------------------------------------------------------------------------------------- parts
def of_name(measure: Callable[[Part, str], None], name: str) -> Callable[[Part], None]:
    return lambda part: measure(part, name)


SIMULATIONS = ("ant", "go1", "panda", "tabletop")
MODELS = ("qwen", "oft", "pi0_frozen", "pi0_trained")
PARTS: dict[str, Callable[[Part], None]] = {
    "train": measure_train,
    "language": measure_language,
    "simulators": measure_simulators,
    "vla": measure_vla,
    "placements": measure_placements,
    "placements_language": measure_placements_language,
    "mlp": measure_mlp,
    **{name: of_name(measure_simulation, name) for name in SIMULATIONS},
    **{name: of_name(measure_model, name) for name in MODELS},
    "gpu_tests": measure_gpu_tests,
}
GPU = list(PARTS)[list(PARTS).index("placements") :]


def run_part(command: Sequence[str], limit_s: float, on_line: Callable[[str], None]) -> str:
    """Run a command in a process of its own, which ends after ``limit_s`` with its children.

    Args:
        command: Command and arguments.
        limit_s: Time limit, seconds.
        on_line: Called with each line of standard output as it comes.

    Returns:
        "", or the reason of the failure: the time limit, or the end of standard error.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_tree(process.pid)

        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line)
            process.wait()
        finally:
            timer.cancel()
            kill_tree(process.pid)
            process.wait()
        if expired.is_set():
            return f"not finished after {limit_s:g} s"
        if process.returncode == 0:
            return ""
        errors.seek(0)
        return " ".join(errors.read()[-2000:].split()) or f"exit status {process.returncode}"


def kill_tree(pid: int) -> None:
    """Kill a process group, and the descendants of its leader that left the group."""
    pids, group = [pid], [pid]
    while group:
        parent = group.pop()
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                group += map(int, file.read_text().split())
        pids += group
    for child in set(pids) - {pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------ results
def save(file: Path | None, entry: dict[str, Any]) -> None:
    """Store an entry in the place of the one of the same part, device, commit and size.

    The file is replaced as a whole, so that it is complete at any time.
    """
    if file is None:
        return
    entries = json.loads(file.read_text()) if file.exists() else []
    key = ("part", "device", "commit", "tiny")
    entries = [e for e in entries if any(e[name] != entry[name] for name in key)] + [entry]
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
    temporary.replace(file)


def provenance() -> dict[str, Any]:
    """Return device, commit and the versions of installed packages.

    A separate process reads the device, so that this process allocates no memory on it.
    """
    code = (
        "import torch; c = torch.cuda; print(c.get_device_name(0) if c.is_available() else 'cpu')"
    )
    device = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    line = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return {"device": device.strip() or "unknown", "commit": commit, "versions": installed}


def run_and_store(part: str, command: Sequence[str], facts: dict[str, Any], args: Any) -> bool:
    """Run a part, print and store its figures; return whether none failed."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    entry: dict[str, Any] = {"part": part, **facts, "date": now, "figures": {}, "failures": {}}

    def store(line: str) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # a library printed it
        if isinstance(message, dict) and "figure" in message:
            value = entry["figures"][message["figure"]] = message["value"]
            text = f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)
            print(f"| {part} | {message['figure']} | {text[:120]} |", flush=True)
        elif isinstance(message, dict) and "failure" in message:
            entry["failures"][message["failure"]] = message["message"]
            print(f"| {part} | {message['failure']} | not measured: {message['message']} |")
        save(args.json, entry)

    if reason := run_part(command, args.limit, store):
        store(json.dumps({"failure": part, "message": reason}))
    return not entry["failures"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="PART", help="parts, and options of training")
    parser.add_argument("--json", type=Path, help="file of the results, for example gpu.json")
    parser.add_argument("--experiments", nargs="+", default=[], help="of train")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--tasks", nargs="+", default=[], help="tasks, or groups of them")
    learning.add_argument("--steps", nargs="+", type=int, help="instead of those of the protocol")
    learning.add_argument("--seeds", type=int, help="number, instead of that of the protocol")
    learning.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="a recipe")
    learning.add_argument("--label", default="default", help="name of the recipe")
    learning.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    learning.add_argument("--results", type=Path, help="default: docs/results/protocol.json")
    learning.add_argument("--runs", type=Path, default=Path("runs/learning"), help="their folder")
    parser.add_argument("--rounds", type=int, default=5, help="of language, simulators and vla")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a part")
    parser.add_argument("--tiny", action="store_true", help="small sizes; needs no GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    options = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word]
    if names == ["learning"]:
        import bench_learning

        return bench_learning.run(args, [*options, *args.set])
    names = [part for name in names for part in (GPU if name == "gpu" else [name])]
    if unknown := set(names) - set(PARTS):
        parser.error(
            f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}, gpu, learning"
        )
    if args.child:
        import torch

        torch.set_num_threads(1)
        write = lambda line: print(json.dumps(line), flush=True)
        part = Part(write, options, args.tiny, args.rounds, args.experiments)
        PARTS[names[0]](part)
        return 0
    facts = provenance() | {"tiny": args.tiny}
    print(f"{facts['device']}, commit {facts['commit']}, {facts['versions']}")
    print("| part | figure | value |\n|---|---|---|", flush=True)
    common = [*options, "--rounds", str(args.rounds), *(["--tiny"] if args.tiny else [])]
    common += ["--experiments", *args.experiments] if args.experiments else []
    child = [sys.executable, __file__, "--child"]
    complete = [run_and_store(name, [*child, name, *common], facts, args) for name in names]
    print(f"{sum(complete)} of {len(complete)} parts complete")
    return int(not all(complete))


if __name__ == "__main__":
    sys.exit(main())
