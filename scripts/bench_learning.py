"""Train shipped experiments over several seeds and keep what they reached:
docs/results/learning.json and learning.png.

    python scripts/bench_learning.py hopper ant --seeds 5 --jobs 2
    python scripts/bench_learning.py --plot              (only draw the picture again)

Each run is the user's own command, `embodied-ppo train experiment=NAME seed=S`; its final
evaluation counts. A new result replaces the one of the same experiment and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FILE = RESULTS / "learning.json"
TARGETS = {
    "halfcheetah": 5000,
    "hopper": 2600,
    "walker2d": 3500,
    "ant": 3000,
    "inverted_pendulum": 1000,
    "humanoid": 790,
}
KEPT = (
    "updates",
    "env_steps",
    "train_s",
    "cpu_s",
    "cpu_us_per_step",
    "peak_rss_mb",
    "initial_return",
    "final_return",
)
KEPT += ("final_success", "config_hash", "versions")


def commit() -> str:
    out = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return out.stdout.strip()


def run(experiment: str, seed: int, overrides: list[str], runs: Path) -> dict:
    words = [f"experiment={experiment}", f"seed={seed}", "evaluation.video_episodes=0", *overrides]
    command = [
        sys.executable,
        "-m",
        "embodied_ppo.commands.main",
        "train",
        "--quiet",
        "--json",
        *words,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=runs, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    rows = [
        json.loads(line)
        for line in (runs / summary["run_dir"] / "metrics.jsonl").read_text().splitlines()
    ]
    points = [
        (r["env_steps"], r["rollout/return"]) for r in rows if r.get("rollout/return") is not None
    ]
    thin = points[:: max(1, len(points) // 60)]
    entry = {
        "experiment": experiment,
        "seed": seed,
        "command": "embodied-ppo train " + " ".join(words),
    }
    entry |= {"commit": commit(), "date": date.today().isoformat()} | {k: summary[k] for k in KEPT}
    return entry | {"curve": [[s, round(r, 1)] for s, r in thin]}


def load() -> list[dict]:
    return json.loads(FILE.read_text()) if FILE.exists() else []


def save(entry: dict) -> None:
    """Replace the entry of the same experiment and seed."""
    rest = [
        e for e in load() if (e["experiment"], e["seed"]) != (entry["experiment"], entry["seed"])
    ]
    rest = sorted([*rest, entry], key=lambda e: (e["experiment"], e["seed"]))
    RESULTS.mkdir(parents=True, exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(json.dumps(e) for e in rest) + "\n]\n")


def table() -> None:
    by_name: dict[str, list[dict]] = {}
    for e in load():
        by_name.setdefault(e["experiment"], []).append(e)
    print(
        "| experiment | seeds | median | each seed | target | CPU us/step"
        " |\n|---|---|---|---|---|---|"
    )
    for name, entries in by_name.items():
        returns = [e["final_return"] for e in entries]
        cpu = statistics.median(e["cpu_us_per_step"] for e in entries)
        each = ", ".join(f"{r:.0f}" for r in returns)
        target = TARGETS.get(name, "")
        print(
            f"| {name} | {len(entries)} | {statistics.median(returns):.0f} | {each} | {target} |"
            f" {cpu:.0f} |"
        )


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(e["experiment"] for e in load()))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, 2.6 * lines), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for e in (e for e in load() if e["experiment"] == name):
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
    figure.savefig(RESULTS / "learning.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bench"), help="where the run directories go"
    )
    parser.add_argument("--override", action="append", default=[], help="an option for every run")
    parser.add_argument("--plot", action="store_true", help="only draw")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    jobs = [(name, seed) for seed in range(args.seeds) for name in args.experiments]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, name, seed, args.override, args.runs) for name, seed in jobs]
        for future in futures:
            entry = future.result()
            save(entry)
            print(
                f"{entry['experiment']} seed {entry['seed']}: {entry['final_return']:.0f}",
                file=sys.stderr,
                flush=True,
            )
    if load():
        table()
        plot()


if __name__ == "__main__":
    main()
