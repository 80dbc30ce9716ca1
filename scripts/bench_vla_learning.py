"""Clone and train vision-language-action policies over several seeds.

    python scripts/bench_vla_learning.py tabletop_token --seeds 3 --jobs 2
    python scripts/bench_vla_learning.py tabletop_push --seeds 1 --override env_steps=3000000

The results are stored in docs/results/vla.json. Each run is `embodied-ppo train experiment=NAME
seed=S`; `embodied-ppo evaluate` then measures its last checkpoint on every split of the task's
instructions, deterministically, on new episodes. A new result replaces the one of the same command.
CPU seconds of PPO do not include evaluations.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import benchmark

RESULTS = benchmark.Results("vla.json", ("command",), lambda e: e["command"])
SPLITS = ("train", "unseen_combination", "unseen_wording")


def run(
    experiment: str, seed: int, overrides: list[str], runs: Path, episodes: int
) -> dict[str, Any]:
    """Train and evaluate one seed and return its entry."""
    options = [f"experiment={experiment}", f"seed={seed}", *overrides]
    summary = benchmark.run_command("train", *options, cwd=runs)
    folder = runs / summary["run_dir"]
    curve = [
        [row["env_steps"], row["eval/success"]]
        for row in benchmark.read_metrics(folder)
        if row.get("eval/success") is not None
    ]
    cloning = re.search(r"cloning: .*? (\d+) CPU seconds", (folder / "log.txt").read_text())
    entry = {
        "experiment": experiment,
        "seed": seed,
        **benchmark.provenance(options),
        "env_steps": summary["env_steps"],
        "ppo_cpu_s": summary["cpu_s"],
        "ppo_s": summary["train_s"],
        "curve": curve,
        "cloning_cpu_s": int(cloning[1]) if cloning else None,
    }
    fixed = [f"checkpoint={folder}", f"episodes={episodes}", "num_envs=64", "seed=10000"]
    for split in SPLITS:
        out = folder / f"evaluated-{split}"
        changed = ["video=false", f"env.kwargs.split={split}", f"out={out}"]
        benchmark.run_command("evaluate", *fixed, *changed, cwd=runs)
        report = json.loads(next(out.rglob("report.json")).read_text())
        entry[split] = report["overall"]["success"]
    return entry


def main() -> None:
    parser = benchmark.argument_parser(__doc__, seeds=3, runs=Path("runs/bench"))
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--episodes", type=int, default=1024, help="of each final evaluation")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    runs = args.runs.resolve()
    seeds = range(args.first, args.first + args.seeds)
    jobs = [(name, seed) for name in args.experiments for seed in seeds]
    for entry in benchmark.run_jobs(
        lambda name, seed: run(name, seed, args.override, runs, args.episodes), jobs, args.jobs
    ):
        RESULTS.save(entry)
        rates = ", ".join(f"{split} {entry[split]['rate']:.3f}" for split in SPLITS)
        cloned = entry["curve"][0][1]
        print(f"{entry['experiment']} seed {entry['seed']}: cloned {cloned:.3f} -> {rates}")


if __name__ == "__main__":
    main()
