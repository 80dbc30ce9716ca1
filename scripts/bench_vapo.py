"""Remove each part of VAPO in turn, on scratchpad problems with answers of 64 to 128 tokens.

    python scripts/bench_vapo.py [--seeds 0 1 2 3 4] [--updates 40] [--out vapo.json]

Problems have two numbers, and their sum is followed by 56 to 60 dots, so that the score is far from
the digits that earned it. The critic has a random head, which value pretraining trains first with
the policy fixed. Rows are appended to the file of results; existing ones are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.commands import main as cli
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.policies.causal_lm import LanguageCritic

DOTS = (56, 60)
OPTIONS: dict[str, Any] = {
    "actor.model.architecture.max_position_embeddings": 256,
    "algorithm.response_length": 96,
    "algorithm.rollout_batch_size": 64,
    "algorithm.global_batch_size": 32,
    "algorithm.micro_batch_tokens": 8192,
    "evaluation.episodes": 100,
    "eval_every": 0,
    "device": "cpu",
}
FIXED = {"algorithm.gae_lambda": 0.95}
VALUE = {"algorithm.gae_lambda_value": 1.0}
ADAPTIVE = {"algorithm.length_adaptive_alpha": 0.05}
NLL = {"algorithm.positive_nll_weight": 0.1}
HIGH = {"algorithm.clip_ratio_high": 0.28}
# name -> (whether the critic is pretrained, options)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "PPO": (False, FIXED),
    "without pretraining": (False, ADAPTIVE | VALUE | NLL | HIGH),
    "without decoupled lambda": (True, FIXED | NLL | HIGH),
    "without adaptive lambda": (True, FIXED | VALUE | NLL | HIGH),
    "without NLL": (True, ADAPTIVE | VALUE | HIGH),
    "VAPO": (True, ADAPTIVE | VALUE | NLL | HIGH),
}


def long_answers(problems: int, seed: list[int]) -> None:
    """Replace the task scratchpad by one with long answers, and the critic's head by noise."""
    task, pairs = (synthetic_tasks.TASKS[name] for name in ("scratchpad", "arithmetic"))

    def write(operands: tuple[int, ...], forget: Callable[[], bool]) -> str:
        digits, mark, total = task.write(operands, forget).partition("#")
        dots = random.Random(str(operands)).randint(*DOTS)  # equal in every run
        return f"{digits}{'.' * dots}{mark}{total}"

    synthetic_tasks.TASKS["scratchpad"] = replace(
        task, write=write, draw=pairs.draw, train=problems, held_out=100
    )
    create = LanguageCritic.__init__

    def with_random_head(critic: LanguageCritic, *arguments: Any, **options: Any) -> None:
        create(critic, *arguments, **options)
        weight, generator = critic.value_head.weight, torch.Generator().manual_seed(seed[0])
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)

    LanguageCritic.__init__ = with_random_head  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--problems", type=int, default=9_000, help="training problems")
    parser.add_argument("--pretraining", type=int, default=20, help="updates of the critic alone")
    parser.add_argument("--warm-start", type=int, default=500, help="supervised steps")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=Path("vapo.json"))
    a = parser.parse_args()
    current = [0]  # the seed of the runs
    long_answers(a.problems, current)
    rows = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    for seed in a.seeds:
        current[0] = seed
        value = a.out.parent / f"vapo_value_{seed}"
        common = {**OPTIONS, "seed": seed, "warm_start.steps": a.warm_start}
        for name, (pretrained, options) in VARIANTS.items():
            if name not in a.only or any((r["name"], r["seed"]) == (name, seed) for r in rows):
                continue
            start = {}
            if pretrained:
                if not value.exists():
                    warmup = {**VALUE, "algorithm.critic_warmup": a.pretraining}
                    row = run({**common, **warmup, "updates": a.pretraining, "run_dir": str(value)})
                    append(a.out, rows, {"name": "value pretraining", "seed": seed, **row})
                start = {"initial_policy": str(value), "warm_start.steps": 0}
            folder = {"run_dir": str(a.out.parent / f"vapo_{name.replace(' ', '_')}_{seed}")}
            row = run({**common, **options, **start, **folder, "updates": a.updates})
            append(a.out, rows, {"name": name, "seed": seed, **row})
    for name in ("value pretraining", *VARIANTS):
        own = [row for row in rows if row["name"] == name]
        if own:
            means = [
                statistics.fmean(row[key] for row in own) for key in ("last", "explained_last")
            ]
            print(
                f"{name:26} return {means[0]:.3f}, explained variance {means[1]:.2f} ({len(own)})"
            )


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train and return what is compared: means over the first and the last 5 updates."""
    start, folder = time.process_time(), Path(options["run_dir"])
    arguments = [f"{name}={value}" for name, value in options.items()]
    if cli.main(["train", "--quiet", "experiment=scratchpad", *arguments]):
        raise SystemExit(f"{folder}: failed")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rollout/return" in row]
    summary = json.loads((folder / "summary.json").read_text())
    row = {name: summary[f"{name}_success"] for name in ("initial", "final")}
    for when, part in (("first", rows[:5]), ("last", rows[-5:])):
        row[when] = statistics.fmean(r["rollout/return"] for r in part)
        explained = [r["value/explained_variance"] for r in part]
        row[f"explained_{when}"] = statistics.fmean(x for x in explained if x is not None)
        row[f"value_loss_{when}"] = statistics.fmean(r["value/loss"] for r in part)
        row[f"length_{when}"] = statistics.fmean(r["rollout/length"] for r in part)
    return row | {"cpu_s": round(time.process_time() - start, 1)}


def append(out: Path, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row to the results and their file."""
    rows.append(row)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


if __name__ == "__main__":
    main()
