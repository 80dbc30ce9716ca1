"""Everything about a GPU in one command: the tests that need one, then training speed on it and on the CPU, as a table.

    python scripts/bench_gpu.py

The first table's simulators are EnvPool's, on the CPU, so it shows acting and learning: wall-clock ms of an update, by
phase. The second is simulation on the GPU: control steps of all worlds per second, of bare physics and of the task.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import embodied_envs

SETTINGS = {
    "bench_fast": [],
    "bench_classic": [],
    "bench_wide": [],
    "bench_wide, 1024 environments": ["env.num_envs=1024", "algorithm.global_batch_size=16384", "env.num_threads=0"],
}

WORLDS: list[tuple[str, int, dict[str, Any]]] = [
    ("Ant", 4096, {}),
    ("Ant", 4096, {"randomize": True, "ranges": {"mass": (0.8, 1.2)}}),
    ("HalfCheetah", 4096, {}),
    ("PandaPickCube", 4096, {}),
    ("PandaPickCube", 1024, {"cameras": ("front",)}),
]
"""Task, worlds, options of ``embodied_envs.make``; a step is a control step."""


def train(name: str, words: list[str], device: str, compile_: str) -> dict[str, float]:
    """Mean wall seconds of a phase over the second half of 40 updates."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"experiment={name.split(',')[0]}", *words, f"device={device}", f"compile={compile_}", "updates=40"]
        options += [f"run_dir={folder}/run", "evaluation.episodes=1", "evaluation.video_episodes=0"]
        command = [sys.executable, "-m", "embodied_ppo.cli", "train", "--quiet", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(options)}\n{done.stderr[-2000:]}")
        with open(f"{folder}/run/metrics.jsonl") as f:
            rows = [json.loads(line) for line in f][-20:]
    return {phase: sum(row[f"time/{phase}_s"] for row in rows) / len(rows) for phase in ("collect", "update")}


def rate(call: Callable[[], Any], calls: int = 100) -> float:
    """Calls per second, after as many to warm up."""
    for measured in (False, True):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        if measured:
            return calls / (time.perf_counter() - begin)
    raise AssertionError


def simulate(id: str, num_envs: int, **options: Any) -> tuple[float, float]:
    """World steps per second of physics alone, and of the whole environment with random actions."""
    env: Any = embodied_envs.make(id, num_envs=num_envs, seeds=list(range(num_envs)), device="cuda", **options)
    env.reset()
    action = torch.rand(num_envs, env.action_spec.size, device="cuda") * 2 - 1
    whole = rate(lambda: env.step(action))
    env.physics.records = True  # its kernels in a graph of their own
    ctrl = env.physics.fields["ctrl"].clone()
    bare = rate(lambda: env.physics.step(ctrl, env.task.decimation))
    env.close()
    return bare * num_envs, whole * num_envs


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure (docs/gpu.md says what has not been run)")
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs"])
    print(f"tests that need a GPU: {'passed' if tests.returncode == 0 else 'FAILED'}; {torch.cuda.get_device_name()}")
    print("| experiment | device | compiled | collect ms | update ms |\n|---|---|---|---|---|")
    for name, words in SETTINGS.items():
        for device, compile_ in (("cpu", "always"), ("cuda", "never"), ("cuda", "always")):
            t = train(name, words, device, compile_)
            cells = [name, device, compile_, f"{t['collect'] * 1e3:.1f}", f"{t['update'] * 1e3:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)
    print("\n| task | worlds | physics, steps/s | environment, steps/s |\n|---|---|---|---|")
    for id, num_envs, options in WORLDS:
        bare, whole = simulate(id, num_envs, **options)
        print(f"| {id} {options or ''} | {num_envs} | {bare:,.0f} | {whole:,.0f} |", flush=True)
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
