"""Measure the seconds of training until a greedy evaluation reaches a return, for several trainers.

    python scripts/bench_time_to_return.py [--seeds 1] [--tasks HalfCheetah-v4 ..] [--json FILE]
        [--sb3 .venv-sb3/bin/python] [--cleanrl PYTHON FILE] [--rl-games PYTHON FOLDER]
        [--trainers embodied_ppo ..]

Each trainer uses its published settings: ours are those of the experiments, those of
Stable-Baselines3 rl-baselines3-zoo's (see ``time_to_return_sb3.py``; `make .venv-sb3/ready` creates
its environment, which also needs `pip install 'gymnasium[mujoco]'`), those of CleanRL the defaults
of its file (see ``time_to_return_cleanrl.py``), and those of rl_games its configs for EnvPool (see
``time_to_return_rl_games.py``). The first three train one million steps, rl_games the number of its
config. The return of the mean action in ten episodes is measured every 20,480 steps, after the
update in which they end. Neither evaluations nor the start of the process count. The other trainers
are stopped when they reach the largest return of the task, or after --limit seconds. The trainers
use the cores that this process may use (`taskset -c 0,1`), which must be idle. The JSON file has
all evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from embodied_ppo.training.health import PHASES

RETURNS = {
    "HalfCheetah-v4": (3000, 5000),
    "Hopper-v4": (2500,),
    "Walker2d-v4": (3500,),
    "Ant-v4": (3000,),
}
"""Task -> returns to reach."""
EXPERIMENTS = {
    "HalfCheetah-v4": "halfcheetah",
    "Hopper-v4": "hopper",
    "Walker2d-v4": "walker2d",
    "Ant-v4": "ant",
}
EVALUATION_UPDATES = 10
"""Updates of 2,048 steps between two evaluations."""
SB3 = Path(__file__).parent / "time_to_return_sb3.py"
CLEANRL = Path(__file__).parent / "time_to_return_cleanrl.py"
RL_GAMES = Path(__file__).parent / "time_to_return_rl_games.py"


class Evaluation(NamedTuple):
    """A greedy evaluation during training.

    Attributes:
        env_steps: Environment steps so far.
        seconds: Wall time of training so far.
        score: Mean return.
    """

    env_steps: int
    seconds: float
    score: float


def run(command: Sequence[str]) -> str:
    """Run a command and return its stdout."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {process.stderr[-2000:]}")
    return process.stdout


def train_ours(task: str, seed: int) -> list[Evaluation]:
    """Train this project's experiment of a task."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run(
            [
                *(sys.executable, "-m", "embodied_ppo.commands.main", "train"),
                *(f"experiment={EXPERIMENTS[task]}", f"seed={seed}", f"run_dir={run_dir}"),
                *(f"eval_every={EVALUATION_UPDATES}", "save_every=0", "evaluation.episodes=10"),
                "evaluation.video_episodes=0",
            ]
        )
        rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        seconds, evaluations = 0.0, []
        for row in rows:
            seconds += sum(row.get(tag, 0.0) for tag in PHASES)
            if "eval/return" in row:
                evaluations.append(Evaluation(row["env_steps"], seconds, row["eval/return"]))
    return evaluations


def train_other(command: Sequence[str], limit_s: float, task: str, seed: int) -> list[Evaluation]:
    """Train with a script that prints evaluations, lines that begin with a bracket.

    It is stopped at the largest return of the task, or after ``limit_s`` seconds of training.
    """
    evaluations = []
    with tempfile.TemporaryFile("w+") as errors:
        environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
        arguments = [*command, task, str(seed)]
        with subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("["):
                    evaluations.append(Evaluation(*json.loads(line)))
                    _, seconds, score = evaluations[-1]
                    if score >= max(RETURNS[task]) or seconds > limit_s:
                        process.kill()
                        return evaluations
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(arguments)}: {errors.read()[-2000:]}")
    return evaluations


def seconds_to(evaluations: Sequence[Evaluation], score: float) -> float | None:
    """Return the seconds of the first evaluation that reaches ``score``; None: none does."""
    return next((e.seconds for e in evaluations if e.score >= score), None)


def cell(times: Sequence[float | None]) -> str:
    """Return the median of the seeds; "-" if half of them or fewer reach the return."""
    reached = [x for x in times if x is not None]
    if 2 * len(reached) <= len(times):
        return f"- ({len(reached)} of {len(times)})"
    median = statistics.median([x if x is not None else float("inf") for x in times])
    return f"{median:.0f} ({len(reached)} of {len(times)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=list(RETURNS), choices=list(RETURNS))
    parser.add_argument("--sb3", help="Python with Stable-Baselines3 and gymnasium[mujoco]")
    parser.add_argument("--cleanrl", nargs=2, metavar=("PYTHON", "FILE"))
    parser.add_argument("--rl-games", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of other trainers")
    parser.add_argument("--trainers", nargs="+", help="only these columns of the table")
    parser.add_argument("--json", type=Path, help="file for all evaluations")
    args = parser.parse_args()
    trainers: dict[str, Callable[[str, int], list[Evaluation]]] = {"embodied_ppo": train_ours}
    if args.sb3:
        trainers["Stable-Baselines3"] = partial(train_other, [args.sb3, str(SB3)], args.limit)
    if args.cleanrl:
        python, file = args.cleanrl
        trainers["CleanRL"] = partial(train_other, [python, str(CLEANRL), file], args.limit)
    if args.rl_games:
        python, folder = args.rl_games
        trainers["rl_games"] = partial(train_other, [python, str(RL_GAMES), folder], args.limit)
    if args.trainers:
        if unknown := set(args.trainers) - {*trainers}:
            parser.error(
                f"--trainers {' '.join(unknown)}: unknown, or without its option (--sb3, --cleanrl,"
                f" --rl-games); available: {', '.join(trainers)}"
            )
        trainers = {name: trainers[name] for name in args.trainers}
    evaluations: dict[str, dict[str, list[list[Evaluation]]]] = {}
    names = " | ".join(trainers)
    print(f"| task, return | {names} |\n|---|{'---|' * len(trainers)}")
    for task in args.tasks:
        runs = {
            name: [train(task, seed) for seed in range(args.seeds)]
            for name, train in trainers.items()
        }
        evaluations[task] = runs
        if args.json:
            args.json.write_text(json.dumps(evaluations))
        for score in RETURNS[task]:
            times = [cell([seconds_to(x, score) for x in evals]) for evals in runs.values()]
            print(f"| {task}, {score} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
