"""The learning protocol: every task, number of steps and seed, resumable, with tables.

    python scripts/bench.py learning [--tasks ..] [--steps ..] [--seeds N] [--jobs N]
                                     [--label NAME --set OPTION=VALUE ..] [--results FILE]

MuJoCo v4 at 1 and 3 million steps with five seeds, DeepMind tasks at 3 million with three, and
robots of MuJoCo Playground at 20 million with one, all in EnvPool. A candidate recipe is --set with
a label of its own. A run that has ended is stored in the file of results at once and is not run
again; one that was interrupted continues from its last checkpoint in runs/learning. Without further
runs the command prints the tables. Several processes may share the file.
"""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import bench
import numpy as np

RESULTS = bench.ROOT / "docs" / "results" / "protocol.json"
COMMON = {"evaluation.video_episodes": "0", "env.num_threads": "1", "threads": "1"}


@dataclass(frozen=True)
class Task:
    """A task of the protocol.

    Attributes:
        id: Task of EnvPool.
        experiment: Experiment with the recipe that is used without --set experiment=NAME.
        steps: Environment steps of its runs.
        seeds: Number of seeds.
        reference: Published return of PPO, the normalised score 1; a return of 0 has the score 0.
            None: there is none, and the task is not a part of normalised means.
        options: Options that name its observations.
    """

    id: str
    experiment: str
    steps: tuple[int, ...]
    seeds: int
    reference: float | None
    options: Mapping[str, str] = field(default_factory=dict)


# References: CleanRL, docs/rl-algorithms/rpo.md, PPO at 8 million steps, means of ten seeds.
_MUJOCO = {
    "HalfCheetah": ("halfcheetah", 2637.0),
    "Hopper": ("hopper", 2741.0),
    "Walker2d": ("walker2d", 2873.0),
    "Ant": ("ant", 1824.0),
    "Humanoid": ("humanoid", 583.0),
    "InvertedPendulum": ("inverted_pendulum", 889.0),
}
_DEEPMIND = {
    "WalkerStand": 439.0,
    "WalkerWalk": 306.0,
    "WalkerRun": 128.0,
    "CheetahRun": 472.0,
    "HopperStand": 3.3,
    "HopperHop": 6.5,
    "FingerSpin": 630.0,
    "ReacherEasy": 773.0,
    "PendulumSwingup": 472.0,
    "CartpoleSwingupSparse": 240.0,
    "QuadrupedWalk": 247.0,
    "FishUpright": 560.0,
}
# Brax PPO after 53 million steps of MuJoCo Playground (FastTD3, data/playground_result.json).
PRIVILEGED = {"model.actor_obs": "[state]", "model.critic_obs": "[state,privileged_state]"}
_PLAYGROUND = {"Go1Joystick": None, "T1Joystick": 18.1, "G1Joystick": 8.1}
GROUPS: dict[str, list[Task]] = {
    "mujoco": [
        Task(f"{name}-v4", experiment, (1_000_000, 3_000_000), 5, reference)
        for name, (experiment, reference) in _MUJOCO.items()
    ],
    "deepmind": [
        Task(f"{name}-v1", "cheetah_run", (3_000_000,), 3, reference)
        for name, reference in _DEEPMIND.items()
    ],
    "playground": [
        Task(f"{name}FlatTerrain-v1", "cheetah_run", (20_000_000,), 1, reference, PRIVILEGED)
        for name, reference in _PLAYGROUND.items()
    ],
}


@dataclass(frozen=True)
class Job:
    """One run of the protocol."""

    label: str
    task: Task
    steps: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.label, self.task.id, self.steps, self.seed


def selected(names: Sequence[str]) -> list[Task]:
    """Return the tasks of names and groups. Raises SystemExit for an unknown one."""
    tasks = [task for group in GROUPS.values() for task in group]
    known = {task.id: [task] for task in tasks} | GROUPS
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--tasks {' '.join(unknown)}: choose of {', '.join([*GROUPS, *known])}")
    return [task for name in names or GROUPS for task in known[name]]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["label"], row["task"], row["steps"], row["seed"]


def read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []


def store(file: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, which other processes may change at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [x for x in read(file) if key_of(x) != key_of(row)] + [row]
        rows.sort(key=key_of)
        temporary = file.with_name(f".{file.name}.new")
        temporary.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        temporary.replace(file)


def train(job: Job, changes: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Train, or continue, one run; return its row. Raises RuntimeError if it fails."""
    run_dir = folder / job.label / f"{job.task.id}_{job.steps}" / str(job.seed)
    options = {"experiment": job.task.experiment, "env.id": job.task.id, **COMMON}
    options |= {**job.task.options, "env_steps": str(job.steps), **changes, "seed": str(job.seed)}
    line = [f"{name}={value}" for name, value in options.items()]
    # resume=auto starts a run where there is no checkpoint.
    summary = bench.run_command("train", *line, f"run_dir={run_dir}", "resume=auto")
    rows = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [(x["env_steps"], x["rollout/return"]) for x in rows if x.get("rollout/return")]
    facts = bench.provenance()
    stored = ("final_return", "env_steps", "train_s", "cpu_s", "config_hash")
    return {
        **dict(zip(("label", "task", "steps", "seed"), job.key, strict=True)),
        **{name: summary[name] for name in stored if name in summary},
        "options": options,
        "command": "embodied-ppo train " + " ".join(line),
        "commit": facts["commit"],
        "versions": facts["versions"],
        "date": f"{date.today()}",
        "curve": [[x, round(y, 1)] for x, y in points[:: max(1, len(points) // 60)]],
    }


def run(args: Any, changes: Sequence[str]) -> int:
    """Train the runs that are missing and print the tables; return the exit code."""
    tasks, failed = selected(args.tasks), []
    file = args.results or (Path("protocol_tiny.json") if args.tiny else RESULTS)
    values = dict(x.split("=", 1) for x in changes)
    if args.tiny:
        values = dict(x.split("=", 1) for x in bench.TINY_RUN) | values
        values["evaluation.episodes"] = "2"
    jobs = [
        Job(args.label, task, steps, seed)
        for seed in range(max(args.seeds or task.seeds for task in tasks))
        for task in tasks
        if seed < (args.seeds or task.seeds)
        for steps in args.steps or task.steps
    ]
    done = {key_of(row): row for row in read(file)}
    # One label is one recipe: the same label with other options would mix two in one table.
    for row in done.values():
        base = {"experiment", "env.id", "env_steps", "seed", *COMMON, *PRIVILEGED} - {*values}
        used = {k: v for k, v in row["options"].items() if k not in base}
        if row["label"] == args.label and used != values:
            raise SystemExit(f"--label {args.label}: has runs with {used}; choose another label")
    missing = [job for job in jobs if job.key not in done]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are in {file}", flush=True)

    def run_one(job: Job) -> None:
        try:
            row = train(job, values, args.runs)
        except Exception as error:  # the other runs continue
            failed.append(job)
            print(f"{job.key}: {error}", flush=True)
            return
        store(file, row)
        print(f"{job.key}: {row.get('final_return', float('nan')):.1f}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run_one, missing))
    print_tables(read(file), {task.id: task for task in tasks})
    return int(bool(failed))


def print_tables(rows: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> None:
    """Print medians with ranges, and interquartile means with intervals, of each number of steps.

    A difference is that from the first label, over the tasks that both have.
    """
    from embodied_ppo.evaluation import comparison

    rows = [row for row in rows if row["task"] in tasks and row.get("final_return") is not None]
    for steps in sorted({row["steps"] for row in rows}):
        returns: dict[str, dict[str, list[float]]] = {}  # label -> task -> returns of its seeds
        for row in rows:
            if row["steps"] == steps:
                of_task = returns.setdefault(row["label"], {}).setdefault(row["task"], [])
                of_task.append(row["final_return"])
        labels = [*returns]
        print(f"\n{steps:,} steps: median (smallest to largest) of the final returns\n")
        print("| task | reference |" + "".join(f" {label} |" for label in labels))
        print("|---|---|" + "---|" * len(labels))
        for name, task in tasks.items():
            if any(name in of_label for of_label in returns.values()):
                texts = [_spread(of_label.get(name, [])) for of_label in returns.values()]
                print(f"| {name} | {task.reference or '-'} | {' | '.join(texts)} |")
        scores = {
            label: {
                name: np.array(values) / reference
                for name, values in of_label.items()
                if (reference := tasks[name].reference)
            }
            for label, of_label in returns.items()
        }
        print("\n| recipe | tasks | interquartile mean | 95 % | less the first | 95 % |")
        print("|---|---|---|---|---|---|")
        for label, of_label in scores.items():
            common = [name for name in of_label if name in scores[labels[0]]]
            if not of_label:
                continue
            result = comparison.interquartile_mean_of_tasks([*of_label.values()])
            cells = [label, str(len(of_label)), *_interval(result)]
            if label != labels[0] and common:
                pair = ([x[name] for name in common] for x in (scores[labels[0]], of_label))
                cells += _interval(comparison.difference_of_tasks(*pair))
            print(f"| {' | '.join(cells)} |" + " | |" * (len(cells) < 6))


def _spread(values: Sequence[float]) -> str:
    """Return "median (smallest to largest), n"."""
    if not values:
        return "-"
    return (
        f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g}), {len(values)}"
    )


def _interval(result: Any) -> list[str]:
    return [f"{result.mean:.3f}", f"{result.low:.3f} to {result.high:.3f}"]
