"""Train language experiments and variants of them over several seeds.

    python scripts/bench_language_learning.py --seeds 3 --jobs 2          (all variants)
    python scripts/bench_language_learning.py arithmetic scratchpad       (some)

The results are stored in docs/results/language.json. Each run is `embodied-ppo train`; its accuracy
is that of greedy responses to 1,000 held-out prompts. A new result replaces the one of the same
variant and seed. CPU seconds are those of PPO alone, on one thread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmark

GROUPS = "algorithm.rollout_batch_size=64 algorithm.global_batch_size=32 algorithm.group_size=4"
"""The same number of responses as without groups: 256 per update, 128 per optimiser step."""
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
RESULTS = benchmark.Results(
    "language.json",
    ("variant", "seed"),
    lambda e: (list(VARIANTS).index(e["variant"]), e["seed"]),
)
STORED = ("updates", "tokens", "cpu_s", "cpu_us_per_token", "config_hash")


def run(variant: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train one seed of a variant and return its entry."""
    options = VARIANTS[variant].split()
    if not any(option.startswith("experiment=") for option in options):
        options.insert(0, "experiment=arithmetic")
    options += [f"seed={seed}", *overrides]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        summary = benchmark.run_command("train", *options, f"run_dir={run_dir}")
        rows = benchmark.read_metrics(run_dir)
    return {
        "variant": variant,
        "seed": seed,
        **benchmark.provenance(options),
        **{name: summary[name] for name in STORED},
        "accuracy": {r["update"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r},
    }


def table() -> None:
    """Print a row for each variant."""
    benchmark.print_header(["variant", "before", "after, each seed", "median", "CPU s"])
    for name in VARIANTS:
        entries = [e for e in RESULTS.load() if e["variant"] == name]
        if not entries:
            continue
        curves = [list(e["accuracy"].values()) for e in entries]
        cells = [name, *(", ".join(f"{curve[i]:.3f}" for curve in curves) for i in (0, -1))]
        cells += [f"{statistics.median(curve[-1] for curve in curves):.3f}"]
        benchmark.print_row([*cells, f"{statistics.median(e['cpu_s'] for e in entries):.0f}"])


def main() -> None:
    parser = benchmark.argument_parser(__doc__, seeds=3)
    parser.add_argument("variants", nargs="*", help=f"of: {', '.join(VARIANTS)}")
    args = parser.parse_args()
    jobs = [(name, seed) for name in args.variants or VARIANTS for seed in range(args.seeds)]
    for entry in benchmark.run_jobs(
        lambda name, seed: run(name, seed, args.override), jobs, args.jobs
    ):
        RESULTS.save(entry)
        accuracy = list(entry["accuracy"].values())[-1]
        text = f"{entry['variant']}, seed {entry['seed']}: {accuracy:.3f}"
        print(text, file=sys.stderr, flush=True)
    table()


if __name__ == "__main__":
    main()
