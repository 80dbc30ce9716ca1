"""Environment steps to 90 % success with and without ``algorithm.group_filter``, from success only.

    python scripts/bench_group_filter.py OUT [--task "10 steps"] [--settings "1e-3, 4 epochs"]

A policy for Tabletop's family reach is trained with the shaped reward and 32 steps an episode. GRPO
with ``env.kwargs.reward=success`` continues from it. Task "10 steps" then allows 10 steps an
episode; "32 steps" continues with 32 steps from a weaker policy. The steps include those of dropped
groups. Prints one line of each run and the median over seeds, and writes results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_ppo.commands import main

GOALS = 0.9, 0.95
TASK = [
    "experiment=tabletop_reach",
    "algorithm.lr_schedule=constant",
    "evaluation.video_episodes=0",
    "compile=never",
]
START = [
    "env.max_episode_steps=32",
    "eval_every=0",
    "seed=7",
    "evaluation.episodes=128",
    "evaluation.num_envs=64",
]
SPARSE = [
    "env.kwargs.reward=success",
    "env.restart_each_rollout=true",
    "env.num_envs=32",
    "algorithm.adv_type=grpo",
    "algorithm.group_size=4",
    "algorithm.reward_norm=null",
]


@dataclass(frozen=True)
class Setting:
    """Optimisation of one run: learning rate, epochs, and updates without and with the filter."""

    lr: float
    epochs: int
    updates: int
    filtered_updates: int


@dataclass(frozen=True)
class Task:
    """A task for success only.

    Attributes:
        start_steps: Environment steps of the policy that training starts from.
        options: Options of both arms.
        eval_every: Updates between evaluations, without and with the filter.
        settings: Name -> setting.
    """

    start_steps: int
    options: list[str]
    eval_every: tuple[int, int]
    settings: dict[str, Setting]


TASKS = {
    "32 steps": Task(
        12_000,
        [
            "env.max_episode_steps=32",
            "algorithm.horizon=32",
            "algorithm.global_batch_size=256",
            "evaluation.episodes=128",
            "evaluation.num_envs=64",
        ],
        (4, 4),
        {
            "3e-4, 10 epochs": Setting(3e-4, 10, 44, 28),
            "1e-3, 10 epochs": Setting(1e-3, 10, 66, 42),
            "3e-3, 4 epochs": Setting(3e-3, 4, 40, 28),
        },
    ),
    "10 steps": Task(
        30_000,
        [
            "env.max_episode_steps=10",
            "algorithm.horizon=10",
            "algorithm.global_batch_size=80",
            "evaluation.episodes=256",
            "evaluation.num_envs=128",
        ],
        (6, 4),
        {
            "1e-3, 4 epochs": Setting(1e-3, 4, 60, 36),
            "3e-4, 10 epochs": Setting(3e-4, 10, 60, 36),
        },
    ),
}


def train(run_dir: Path, *options: str) -> list[dict[str, Any]]:
    """Train unless ``run_dir`` has a finished run; return the rows of its metrics."""
    if not (run_dir / "summary.json").exists():
        with contextlib.redirect_stdout(sys.stderr):
            code = main.main(["train", "--quiet", *TASK, *options, f"run_dir={run_dir}"])
        if code:
            sys.exit(code)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_to(goal: float, rows: list[dict[str, Any]]) -> int | None:
    """Return the steps at the first of two evaluations in a row of at least ``goal``."""
    scores = [(row["env_steps"], row["eval/success"]) for row in rows if "eval/success" in row]
    pairs = itertools.pairwise(scores)
    return next((steps for (steps, x), (_, y) in pairs if min(x, y) >= goal), None)


def compare() -> None:
    """Train all runs and write their curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", choices=TASKS, default="10 steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--settings", nargs="+", help="default: all of the task")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    unknown = set(arguments.settings or ()) - set(task.settings)
    if unknown:
        parser.error(f"--settings {sorted(unknown)}: the task has {list(task.settings)}")
    out: Path = arguments.out.absolute() / arguments.task.replace(" ", "-")
    train(out / "start", *START, f"env_steps={task.start_steps}")
    results: list[dict[str, Any]] = []
    for name in arguments.settings or task.settings:
        setting = task.settings[name]
        reached: dict[str, list[dict[float, int | None]]] = {"null": [], "success": []}
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for value, updates, eval_every in (
                ("null", setting.updates, task.eval_every[0]),
                ("success", setting.filtered_updates, task.eval_every[1]),
            ):
                rows = train(
                    out / f"{name.replace(', ', '-').replace(' ', '-')}-{value}-{seed}",
                    *SPARSE,
                    *task.options,
                    f"algorithm.lr={setting.lr}",
                    f"algorithm.update_epoch={setting.epochs}",
                    f"initial_policy={out / 'start'}",
                    f"algorithm.group_filter={value}",
                    f"updates={updates}",
                    f"eval_every={eval_every}",
                    f"seed={seed}",
                )
                curve = {
                    row["env_steps"]: row["eval/success"] for row in rows if "eval/success" in row
                }
                steps = {goal: steps_to(goal, rows) for goal in GOALS}
                reached[value].append(steps)
                result = {
                    "setting": name,
                    "group_filter": value,
                    "seed": seed,
                    "steps": steps,
                    "curve": curve,
                }
                print(json.dumps(result), flush=True)
                results.append(result)
                (out / "results.json").write_text(json.dumps(results, indent=1))
        for value, goal in itertools.product(reached, GOALS):
            steps_of_seeds = [x[goal] or float("inf") for x in reached[value]]
            median = statistics.median(steps_of_seeds)
            print(f"{name}, {value}: {goal} after {median:,.0f} steps (median)")


if __name__ == "__main__":
    compare()
