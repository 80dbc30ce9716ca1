"""Train experiments over several seeds and store their results and curves.

    python scripts/bench_learning.py hopper ant --seeds 5 --jobs 2
    python scripts/bench_learning.py --plot              (only draw the figure again)
    python scripts/bench_learning.py hopper --file learning_3m.json --override env_steps=3000000

The results are docs/results/learning.json, or --file in that folder, and a figure of the same name.
Each run is `embodied-ppo train experiment=NAME seed=S` with the overrides; its final evaluation is
stored. A new result replaces the one of the same experiment and seed.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import benchmark

TARGETS = {
    "halfcheetah": 5000,
    "hopper": 2600,
    "walker2d": 3500,
    "ant": 3000,
    "inverted_pendulum": 1000,
    "humanoid": 790,
}
"""Experiment -> return that its evaluation after 1 million steps should reach."""
STORED = [
    "updates",
    "env_steps",
    "train_s",
    "cpu_s",
    "cpu_us_per_step",
    "peak_rss_mb",
    "initial_return",
]
STORED += ["final_return", "final_success", "config_hash", "versions"]


def run(experiment: str, seed: int, overrides: list[str], runs: Path) -> dict[str, Any]:
    """Train one seed and return its entry."""
    options = [f"experiment={experiment}", f"seed={seed}", "evaluation.video_episodes=0"]
    options += overrides
    summary = benchmark.run_command("train", *options, cwd=runs)
    points = [
        (row["env_steps"], row["rollout/return"])
        for row in benchmark.read_metrics(runs / summary["run_dir"])
        if row.get("rollout/return") is not None
    ]
    curve = points[:: max(1, len(points) // 60)]
    return {
        "experiment": experiment,
        "seed": seed,
        **benchmark.provenance(options),
        **{name: summary[name] for name in STORED},
        "curve": [[steps, round(value, 1)] for steps, value in curve],
    }


def table(results: benchmark.Results) -> None:
    """Print a row for each experiment."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for entry in results.load():
        by_name.setdefault(entry["experiment"], []).append(entry)
    columns = ["experiment", "seeds", "median", "each seed", "target", "CPU us/step"]
    benchmark.print_header(columns)
    for name, entries in by_name.items():
        returns = [e["final_return"] for e in entries]
        cpu_us = statistics.median(e["cpu_us_per_step"] for e in entries)
        cells = [name, str(len(entries)), f"{statistics.median(returns):.0f}"]
        cells += [", ".join(f"{value:.0f}" for value in returns), str(TARGETS.get(name, ""))]
        benchmark.print_row([*cells, f"{cpu_us:.0f}"])


def plot(results: benchmark.Results) -> None:
    """Draw the curve of each seed into a figure beside the results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(e["experiment"] for e in results.load()))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, 2.6 * lines), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for e in (e for e in results.load() if e["experiment"] == name):
            steps, returns = zip(*e["curve"], strict=True)
            axis.plot([s / 1e6 for s in steps], returns, lw=1.2, label=f"seed {e['seed']}")
        if name in TARGETS:
            axis.axhline(TARGETS[name], color="grey", ls=":", lw=1)
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    for axis in axes[-1]:
        axis.set_xlabel("environment steps (millions)", fontsize=8)
    figure.suptitle(
        "Return of training episodes (sampled actions), each seed; dotted: target of the"
        " evaluation",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(results.file.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = benchmark.argument_parser(__doc__, seeds=5, runs=Path("runs/bench"))
    parser.add_argument("experiments", nargs="*")
    parser.add_argument("--file", default="learning.json", help="of the results")
    parser.add_argument("--plot", action="store_true", help="only draw the figure")
    args = parser.parse_args()
    results = benchmark.Results(
        args.file, ("experiment", "seed"), lambda e: (e["experiment"], e["seed"])
    )
    args.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(name, seed) for seed in range(args.seeds) for name in args.experiments]
    for entry in benchmark.run_jobs(
        lambda name, seed: run(name, seed, args.override, args.runs), jobs, args.jobs
    ):
        results.save(entry)
        text = f"{entry['experiment']} seed {entry['seed']}: {entry['final_return']:.0f}"
        print(text, file=sys.stderr, flush=True)
    if results.load():
        table(results)
        plot(results)


if __name__ == "__main__":
    main()
