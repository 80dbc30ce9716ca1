"""Environment steps to 90 % success with and without ``algorithm.group_filter``, from success only.

    python scripts/bench_group_filter.py OUT [--seeds 3] [--settings "3e-4, 10 epochs"]

A weak policy for Tabletop's family reach is trained with the shaped reward. GRPO with
``env.kwargs.reward=success`` continues from it. The steps include those of dropped groups. Prints
one line of each run, and writes OUT/results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from embodied_ppo.commands import main

GOAL = 0.9
TASK = [
    "experiment=tabletop_reach",
    "env.max_episode_steps=32",
    "algorithm.lr_schedule=constant",
    "evaluation.episodes=128",
    "evaluation.num_envs=64",
    "evaluation.video_episodes=0",
    "compile=never",
]
START = ["env_steps=12000", "eval_every=0", "seed=7"]
SPARSE = [
    "env.kwargs.reward=success",
    "env.restart_each_rollout=true",
    "env.num_envs=32",
    "algorithm.horizon=32",
    "algorithm.global_batch_size=256",
    "algorithm.adv_type=grpo",
    "algorithm.group_size=4",
    "algorithm.reward_norm=null",
    "eval_every=4",
]
SETTINGS = {
    "3e-4, 10 epochs": (["algorithm.lr=3e-4", "algorithm.update_epoch=10"], 44, 28),
    "1e-3, 10 epochs": (["algorithm.lr=1e-3", "algorithm.update_epoch=10"], 66, 42),
    "3e-3, 4 epochs": (["algorithm.lr=3e-3", "algorithm.update_epoch=4"], 40, 28),
}
"""Name -> (options, updates without the filter, updates with it)."""


def train(run_dir: Path, *options: str) -> list[dict[str, Any]]:
    """Train unless ``run_dir`` has a finished run; return the rows of its metrics."""
    if not (run_dir / "summary.json").exists():
        with contextlib.redirect_stdout(sys.stderr):
            code = main.main(["train", "--quiet", *TASK, *options, f"run_dir={run_dir}"])
        if code:
            sys.exit(code)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_to_goal(rows: list[dict[str, Any]]) -> int | None:
    """Return the steps at the first of two evaluations in a row that reach the goal."""
    scores = [(row["env_steps"], row["eval/success"]) for row in rows if "eval/success" in row]
    pairs = itertools.pairwise(scores)
    return next((steps for (steps, x), (_, y) in pairs if min(x, y) >= GOAL), None)


def compare() -> None:
    """Train all runs and write their curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    train(out / "start", *START)
    results: list[dict[str, Any]] = []
    for setting in arguments.settings:
        options, without, filtered = SETTINGS[setting]
        for seed in range(arguments.seeds):
            for value, updates in (("null", without), ("success", filtered)):
                chosen = [
                    *SPARSE,
                    *options,
                    f"initial_policy={out / 'start'}",
                    f"algorithm.group_filter={value}",
                    f"updates={updates}",
                    f"seed={seed}",
                ]
                run_name = f"{setting.replace(', ', '-').replace(' ', '-')}-{value}-{seed}"
                rows = train(out / run_name, *chosen)
                curve = {
                    row["env_steps"]: row["eval/success"] for row in rows if "eval/success" in row
                }
                result = {
                    "setting": setting,
                    "group_filter": value,
                    "seed": seed,
                    "steps": steps_to_goal(rows),
                    "curve": curve,
                }
                print(json.dumps(result), flush=True)
                results.append(result)
                (out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    compare()
