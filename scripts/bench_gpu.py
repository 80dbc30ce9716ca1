"""Everything about a GPU in one command: the tests that need one, then training speed on it and on the CPU, as a table.

    python scripts/bench_gpu.py

The simulators are EnvPool's, on the CPU, so this shows acting and learning: wall-clock ms of an update, by phase.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import torch

SETTINGS = {
    "bench_fast": [],
    "bench_classic": [],
    "bench_wide": [],
    "bench_wide, 1024 environments": ["env.num_envs=1024", "algorithm.global_batch_size=16384", "env.num_threads=0"],
}


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
    sys.exit(tests.returncode)


if __name__ == "__main__":
    main()
