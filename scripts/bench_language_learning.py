"""Train the language experiments over several seeds, as shipped and with one thing changed:
docs/results/language.json.

    python scripts/bench_language_learning.py --seeds 3 --jobs 2          (all variants)
    python scripts/bench_language_learning.py arithmetic scratchpad       (some)

Each run is the user's own command; its accuracy is that of greedy responses to 1,000 held-out
prompts. A new result replaces the one of the same variant and seed. CPU seconds are of PPO alone,
one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "results" / "language.json"
GROUPS = "algorithm.rollout_batch_size=64 algorithm.global_batch_size=32 algorithm.group_size=4"
"""As many responses as without groups: 256 an update, 128 a step."""
VARIANTS = {
    "arithmetic": "",
    "scratchpad": "experiment=scratchpad",
    "rlhf_tiny": "experiment=rlhf_tiny",
    "KL in the reward": "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.02",
    "KL in the reward, adaptive": "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive",
    "KL loss k3": "algorithm.use_kl_loss=true algorithm.kl_loss_coef=0.02",
    "KL loss k1+": (
        "algorithm.use_kl_loss=true algorithm.kl_loss_coef=0.02 algorithm.kl_loss_type=k1+"
    ),
    "KL loss full": (
        "algorithm.use_kl_loss=true algorithm.kl_loss_coef=0.02 algorithm.kl_loss_type=full"
    ),
    "no dual clip": "algorithm.clip_ratio_c=null",
    "seq-mean-token-sum": "algorithm.loss_agg_func=seq-mean-token-sum",
    "seq-mean-token-mean": "algorithm.loss_agg_func=seq-mean-token-mean",
    "seq-mean-token-sum-norm": "algorithm.loss_agg_func=seq-mean-token-sum-norm",
    "lambda 0.95": "algorithm.gae_lambda=0.95",
    "grpo, 4 a prompt": f"algorithm.adv_type=grpo {GROUPS}",
    "rloo, 4 a prompt": f"algorithm.adv_type=rloo {GROUPS}",
    "reinforce++": "algorithm.adv_type=reinforce_plus_plus",
    "reinforce++ baseline, 4 a prompt": f"algorithm.adv_type=reinforce_plus_plus_baseline {GROUPS}",
}


def run(variant: str, seed: int, more: list[str]) -> dict[str, Any]:
    words = VARIANTS[variant].split()
    if not any(word.startswith("experiment=") for word in words):
        words.insert(0, "experiment=arithmetic")
    words += [f"seed={seed}", *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "embodied_ppo.commands.main",
            "train",
            "--quiet",
            "--json",
            f"run_dir={folder}/run",
        ]
        done = subprocess.run([*command, *words], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
        rows = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    s = json.loads(done.stdout)
    accuracy = {row["update"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    known = {k: s[k] for k in ("updates", "tokens", "cpu_s", "cpu_us_per_token", "config_hash")}
    who = {"variant": variant, "seed": seed, "command": "embodied-ppo train " + " ".join(words)}
    return (
        who
        | {"commit": commit.stdout.strip(), "date": date.today().isoformat()}
        | known
        | {"accuracy": accuracy}
    )


def load() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.exists() else []


def save(entry: dict[str, Any]) -> None:
    """Replace the entry of the same variant and seed."""
    rest = [e for e in load() if (e["variant"], e["seed"]) != (entry["variant"], entry["seed"])]
    order = list(VARIANTS)
    rest = sorted([*rest, entry], key=lambda e: (order.index(e["variant"]), e["seed"]))
    FILE.write_text("[\n" + ",\n".join(json.dumps(e) for e in rest) + "\n]\n")


def table() -> None:
    print("| variant | before | after, each seed | median | CPU s |\n|---|---|---|---|---|")
    for name in VARIANTS:
        entries = [e for e in load() if e["variant"] == name]
        if not entries:
            continue
        curves = [list(e["accuracy"].values()) for e in entries]
        before, after = (", ".join(f"{c[i]:.3f}" for c in curves) for i in (0, -1))
        cpu = statistics.median(e["cpu_s"] for e in entries)
        print(
            f"| {name} | {before} | {after} | {statistics.median(c[-1] for c in curves):.3f} |"
            f" {cpu:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--override", action="append", default=[], help="an option for every run")
    args = parser.parse_args()
    jobs = [(name, seed) for name in args.variants or VARIANTS for seed in range(args.seeds)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(run, name, seed, args.override) for name, seed in jobs]:
            entry = future.result()
            save(entry)
            after = list(entry["accuracy"].values())[-1]
            print(
                f"{entry['variant']}, seed {entry['seed']}: {after:.3f}",
                file=sys.stderr,
                flush=True,
            )
    table()


if __name__ == "__main__":
    main()
