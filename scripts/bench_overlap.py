"""Compare the wall time per environment step on two cores with that on one core.

    python scripts/bench_overlap.py [--rounds 3] [--updates 60] [EXPERIMENT ...]

The default is the four bench_* experiments. For each of them, every arrangement below trains once
in each round, one after the other, so that all of them see the same load. Code is compiled before
the first update, and a run is measured from its fourth update on: the median of the wall time of an
update. The result is the median over the rounds, and the ratio to one core in the same round with
its range. Two cores must be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from embodied_ppo.training.health import PHASES

EXPERIMENTS = ("bench_fast", "bench_classic", "bench_wide", "bench_ant")
CORRECTION = "algorithm.off_policy_correction=token"
ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "one core": (),
    "env.num_threads=2": ("env.num_threads=2",),
    "cluster.stages=2": ("cluster.stages=2",),
    "learner_threads=2 env.num_threads=2": ("learner_threads=2", "env.num_threads=2"),
    "pipeline=true": ("pipeline=true", CORRECTION),
    "pipeline=true env.num_threads=2": ("pipeline=true", CORRECTION, "env.num_threads=2"),
    "pipeline=true learner_threads=2": ("pipeline=true", CORRECTION, "learner_threads=2"),
}
"""Name -> overrides. All but the first may use two cores."""
FIRST_UPDATE = 4


def measure(experiment: str, options: tuple[str, ...], cores: set[int], updates: int) -> float:
    """Return the median wall time of an update per environment step in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "embodied_ppo.commands.main", "train"),
            *(f"experiment={experiment}", *options, f"updates={updates}", "env_steps=null"),
            *(f"run_dir={run_dir}", "evaluation.episodes=1", "evaluation.video_episodes=0"),
        ]
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        if process.returncode:
            raise SystemExit(f"{experiment} {' '.join(options)}: {process.stderr[-2000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["update"] >= FIRST_UPDATE]
    steps = rows[1]["env_steps"] - rows[0]["env_steps"]
    return statistics.median(sum(row[tag] for tag in PHASES) for row in rows) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--rounds", type=int, default=3, help="at least 1 (default: 3)")
    least = FIRST_UPDATE + 1
    help = f"of each training, at least {least} (default: 60)"
    parser.add_argument("--updates", type=int, default=60, help=help)
    args = parser.parse_args()
    if args.rounds < 1 or args.updates < least:
        parser.error(f"--rounds must be at least 1, and --updates at least {least}")
    cores_of_process = sorted(os.sched_getaffinity(0))
    if len(cores_of_process) < 2:
        parser.error("this process may use one core only; two are needed")
    first, second = cores_of_process[:2]
    for experiment in args.experiments:
        times: dict[str, list[float]] = {name: [] for name in ARRANGEMENTS}
        for _ in range(args.rounds):
            for name, options in ARRANGEMENTS.items():
                cores = {first} if name == "one core" else {first, second}
                times[name].append(measure(experiment, options, cores, args.updates))
                print(f"{experiment}, {name}: {times[name][-1]:.1f} us", file=sys.stderr)
        print(
            f"\n{experiment}\n| options | us per step | times as fast as one core |\n|---|---|---|"
        )
        for name, values in times.items():
            ratios = [one / x for one, x in zip(times["one core"], values, strict=True)]
            print(
                f"| {name} | {statistics.median(values):.1f} | {statistics.median(ratios):.2f}"
                f" ({min(ratios):.2f} to {max(ratios):.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
