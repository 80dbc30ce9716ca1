"""Measure response tokens per CPU second of PPO updates, and of generation against transformers.

    python scripts/bench_language.py [any.option=value ...]          (options of the training)

Training is `embodied-ppo train experiment=arithmetic` (256 prompts, minibatches of 128, two epochs,
a model of 0.5 M parameters and its critic), eager and compiled, in float32 and bfloat16; its
summary.json has the same figures. Generation uses 4 layers of width 256 and 256 prompts of 16
tokens; responses have about 16 tokens (geometric distribution) and at most 64. Our engine and
transformers' `generate` run alternately. One thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import benchmark
import torch

from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling

ROUNDS = 9
MAX_TOKENS = 64
STOP_IDS = (2, 3, 4, 5)
"""4 of 64 tokens end a response. A new model samples all tokens with about equal probability, so a
response has about 16 tokens."""
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def train(options: list[str]) -> dict[str, Any]:
    """Return the summary of a run."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["experiment=arithmetic", "eval_every=0", f"run_dir={folder}/run"]
        return benchmark.run_command("train", *fixed, *options)


def generate_with_transformers(model: Any, prompts: torch.Tensor) -> int:
    """Return the number of tokens up to the end of each response."""
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=MAX_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(STOP_IDS),
        pad_token_id=0,
    )[:, prompts.shape[1] :]
    ended = torch.isin(out, torch.tensor(STOP_IDS))
    return int(torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1]).sum())


def generation() -> list[tuple[float, float]]:
    """Return response tokens per CPU second of our engine and of transformers, by round."""
    torch.manual_seed(0)
    policy = LanguagePolicy(causal_lm.load(None, MODEL, section="actor.model"))
    engine = Engine(policy, slots=256, pad_id=0)
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_ids=STOP_IDS)
    rates = []
    for number in range(ROUNDS + 1):
        prompts = torch.randint(6, 64, (256, 16))
        start = time.process_time()
        tokens = int(engine.generate(prompts.tolist(), sampling, seed=number).length.sum())
        middle = time.process_time()
        reference_tokens = generate_with_transformers(policy.model, prompts)
        end = time.process_time()
        rates.append((tokens / (middle - start), reference_tokens / (end - middle)))
    return rates[1:]  # the first round warms up


def main() -> None:
    torch.set_num_threads(1)
    parser = benchmark.argument_parser(__doc__)
    parser.add_argument("options", nargs="*", help="any.option=value of the training")
    options = parser.parse_args().options
    changes = " ".join(options) or "as shipped"
    print(f"PPO, response tokens per CPU second; {changes}; torch {torch.__version__}")
    columns = ["minibatches", "tokens per CPU second", "CPU us per token by phase"]
    benchmark.print_header([*columns, "accuracy before", "after", "MB"])
    half = ["actor.model.dtype=bfloat16", "critic.model.dtype=bfloat16"]
    for name, variant in (
        ("eager", ["compile=never"]),
        ("compiled", ["compile=always"]),
        ("eager, bfloat16", ["compile=never", *half]),
        ("compiled, bfloat16", ["compile=always", *half]),
    ):
        summary = train([*variant, *options])
        phases = summary["cpu_us_per_token_by_phase"].items()
        cells = [name, f"{1e6 / summary['cpu_us_per_token']:,.0f}"]
        cells += [", ".join(f"{phase} {us:.0f}" for phase, us in phases)]
        cells += [f"{summary[key]:.3f}" for key in ("initial_success", "final_success")]
        benchmark.print_row([*cells, f"{summary['peak_rss_mb']:.0f}"])
    print("\nGeneration, response tokens per CPU second, by round")
    benchmark.print_header(["embodied_ppo", "transformers' generate", "ratio"])
    rates = generation()
    for own, reference in rates:
        benchmark.print_row([f"{own:,.0f}", f"{reference:,.0f}", f"{own / reference:.2f}"])
    print(f"median ratio {statistics.median(own / reference for own, reference in rates):.2f}")


if __name__ == "__main__":
    main()
