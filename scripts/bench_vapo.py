"""Remove each part of VAPO in turn, on sums with answers of 64 to 70 tokens.

    python scripts/bench_vapo.py [--seeds 0 1 2 3 4] [--updates 30] [--out vapo.json]

The digits of a sum are followed by 62 to 66 dots, so that the score is far from the digits that
earned it; an answer with another number of dots is wrong. At the start the policy forgets the carry
in 60 % of its answers. The critic has a random head, which value pretraining trains first with the
policy fixed. A run takes 10 CPU seconds, a seed 80. Rows are appended to the file of results: after
an interruption, the same command goes on with the first run that has no row.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
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
from embodied_ppo.programs import language

DOTS = (62, 66)
MODEL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
OPTIONS: dict[str, Any] = {
    **{f"actor.model.architecture.{name}": size for name, size in MODEL.items()},
    "algorithm.response_length": 80,
    "algorithm.rollout_batch_size": 64,
    "algorithm.global_batch_size": 32,
    "algorithm.lr": 1e-3,
    "critic.lr": 1e-3,
    "evaluation.episodes": 0,
    "eval_every": 0,
    "device": "cpu",
}
FIXED = {"algorithm.gae_lambda": 0.95}
VALUE = {"algorithm.gae_lambda_value": 1.0}
# VAPO's 0.05 is for thousands of tokens: λ = 1 - 1/(α·l) exceeds 0.95 where α·l > 20.
ADAPTIVE = {"algorithm.length_adaptive_alpha": 0.5}
NLL = {"algorithm.positive_nll_weight": 0.1}
HIGH = {"algorithm.clip_ratio_high": 0.28}
PRETRAINING = "value pretraining"
# name -> (whether the critic is pretrained, options)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "PPO": (False, FIXED),
    "without pretraining": (False, ADAPTIVE | VALUE | NLL | HIGH),
    "without decoupled lambda": (True, FIXED | NLL | HIGH),
    "without adaptive lambda": (True, FIXED | VALUE | NLL | HIGH),
    "without NLL": (True, ADAPTIVE | VALUE | HIGH),
    "VAPO": (True, ADAPTIVE | VALUE | NLL | HIGH),
}


def long_answers(seed: list[int]) -> None:
    """Replace the task scratchpad by one with long answers, and the critic's head by noise."""
    form = re.compile(rf"([0-9]+)\.{{{DOTS[0]},{DOTS[1]}}}#")
    pairs = [(a, b) for a in range(5, 10) for b in range(5, 10)]  # all need a carry
    random.Random(0).shuffle(pairs)

    def write(operands: tuple[int, ...], forget: Callable[[], bool]) -> str:
        total = sum(operands) % 10 if forget() else sum(operands)
        dots = random.Random(str(operands)).randint(*DOTS)  # equal in every run
        return f"{str(total)[::-1]}{'.' * dots}#"

    def read(response: str) -> str | None:
        answer = form.fullmatch(response)
        return None if answer is None else answer[1][::-1]

    synthetic_tasks.TASKS["scratchpad"] = replace(
        synthetic_tasks.TASKS["scratchpad"],
        **{"write": write, "read": read, "draw": lambda count: pairs, "form": form},
        **{"train": 20, "held_out": 5, "forget": 0.6},
    )
    language.WARM_START_BATCH, language.WARM_START_LR = 32, 3e-3
    create = LanguageCritic.__init__

    def with_random_head(critic: LanguageCritic, *arguments: Any, **options: Any) -> None:
        create(critic, *arguments, **options)
        weight, generator = critic.value_head.weight, torch.Generator().manual_seed(seed[0])
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)

    LanguageCritic.__init__ = with_random_head  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=range(5))
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--pretraining", type=int, default=20, help="updates of the critic alone")
    parser.add_argument("--warm-start", type=int, default=500, help="supervised steps")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", type=Path, default=Path("vapo.json"))
    a = parser.parse_args()
    current = [0]  # the seed of the runs
    long_answers(current)
    rows = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    finished = {(row["name"], row["seed"]) for row in rows}

    def execute(name: str, options: dict[str, Any]) -> None:
        """Train, and add a row to the results and their file."""
        row = {"name": name, "seed": current[0], **run({**options, "seed": current[0]})}
        rows.append(row)
        with a.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    a.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in a.seeds:
        current[0] = seed
        value, warm_start = a.out.parent / f"vapo_value_{seed}", {"warm_start.steps": a.warm_start}
        common = {**OPTIONS, **warm_start}
        if (PRETRAINING, seed) not in finished:
            warmup = {**VALUE, "algorithm.critic_warmup": a.pretraining, "updates": a.pretraining}
            execute(PRETRAINING, {**common, **warmup, "run_dir": value})
        for name, (pretrained, options) in VARIANTS.items():
            if name in a.only and (name, seed) not in finished:
                start = {"initial_policy": value, "warm_start.steps": 0} if pretrained else {}
                folder = a.out.parent / f"vapo_{name.replace(' ', '_')}_{seed}"
                execute(
                    name, {**common, **options, **start, "run_dir": folder, "updates": a.updates}
                )
    for name in (PRETRAINING, *VARIANTS):
        own = [row for row in rows if row["name"] == name]
        if own:
            keys = ("lowest", "last", "explained_last")
            lowest, last, explained = (statistics.fmean(row[key] for row in own) for key in keys)
            print(
                f"{name:26} return {last:.3f}, lowest {lowest:.3f},"
                f" explained variance {explained:.2f} ({len(own)})"
            )


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train and return what is compared: means over 5 updates, the first, lowest and last ones."""
    start, folder = time.process_time(), Path(options["run_dir"])
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    arguments = [f"{name}={value}" for name, value in options.items()]
    if cli.main(["train", "--quiet", "experiment=scratchpad", *arguments]):
        raise SystemExit(f"{folder}: failed")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rollout/return" in row]
    parts = [rows[i : i + 5] for i in range(len(rows) - 4)]
    returns = [statistics.fmean(r["rollout/return"] for r in part) for part in parts]
    row = {"first": returns[0], "lowest": min(returns), "last": returns[-1]}
    for name in ("value/explained_variance", "value/loss", "rollout/length"):
        values = [r[name] for r in rows[-5:] if r[name] is not None]
        row[f"{name.split('/')[1].split('_')[0]}_last"] = statistics.fmean(values)
    return row | {"cpu_s": round(time.process_time() - start, 1)}


if __name__ == "__main__":
    main()
