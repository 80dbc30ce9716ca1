"""Clone and train vision-language-action models over several seeds: docs/results/vla.json.

    python scripts/bench_vla_learning.py tabletop_token --seeds 3 --jobs 2
    python scripts/bench_vla_learning.py tabletop_push --seeds 1 --override env_steps=3000000

Each run is the user's own command, `embodied-ppo train experiment=NAME seed=S`; the checkpoint of
its end is measured by `embodied-ppo evaluate` on every split of the task's language, greedily,
episodes that no training has seen. A new result replaces the one of the same experiment, options
and seed. CPU seconds of PPO do not hold its evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from bench_learning import RESULTS, commit

FILE = RESULTS / "vla.json"
SPLITS = ("train", "unseen_combination", "unseen_wording")


def command(*words: str, cwd: Path) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    line = [
        sys.executable,
        "-m",
        "embodied_ppo.commands.main",
        words[0],
        "--quiet",
        "--json",
        *words[1:],
    ]
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def run(
    experiment: str, seed: int, overrides: list[str], runs: Path, episodes: int
) -> dict[str, Any]:
    words = [f"experiment={experiment}", f"seed={seed}", *overrides]
    summary = command("train", *words, cwd=runs)
    folder = runs / summary["run_dir"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [[r["env_steps"], r["eval/success"]] for r in rows if r.get("eval/success") is not None]
    log = (folder / "log.txt").read_text()
    cloning = re.search(r"cloning: .*? (\d+) CPU seconds", log)
    entry = {
        "experiment": experiment,
        "seed": seed,
        "command": "embodied-ppo train " + " ".join(words),
    }
    entry |= {
        "commit": commit(),
        "date": date.today().isoformat(),
        "env_steps": summary["env_steps"],
    }
    entry |= {"ppo_cpu_s": summary["cpu_s"], "ppo_s": summary["train_s"], "curve": curve}
    entry |= {"cloning_cpu_s": int(cloning[1]) if cloning else None}
    for split in SPLITS:
        out = folder / f"evaluated-{split}"
        words = [
            f"checkpoint={folder}",
            f"episodes={episodes}",
            "num_envs=64",
            "seed=10000",
            "video=false",
        ]
        command("evaluate", *words, f"env.kwargs.split={split}", f"out={out}", cwd=runs)
        told = json.loads(next(out.rglob("report.json")).read_text())["overall"]["success"]
        entry[split] = told
    return entry


def save(entry: dict[str, Any]) -> None:
    kept = json.loads(FILE.read_text()) if FILE.exists() else []
    kept = sorted(
        [*(e for e in kept if e["command"] != entry["command"]), entry], key=lambda e: e["command"]
    )
    FILE.write_text("[\n" + ",\n".join(json.dumps(e) for e in kept) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--episodes", type=int, default=1024, help="of each final evaluation")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/bench"), help="where the run directories go"
    )
    parser.add_argument("--override", action="append", default=[], help="an option for every run")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    runs = args.runs.resolve()
    jobs = [
        (name, seed)
        for name in args.experiments
        for seed in range(args.first, args.first + args.seeds)
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for e in pool.map(
            lambda job: run(job[0], job[1], args.override, runs, args.episodes), jobs
        ):
            save(e)
            ends = ", ".join(f"{split} {e[split]['rate']:.3f}" for split in SPLITS)
            print(f"{e['experiment']} seed {e['seed']}: clone {e['curve'][0][1]:.3f} -> {ends}")


if __name__ == "__main__":
    main()
