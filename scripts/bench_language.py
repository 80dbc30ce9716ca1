"""Response tokens per CPU second: of whole PPO updates by phase, and of generation next to
transformers' generate.

    python scripts/bench_language.py [any.option=value ...]          (options go to the training)

Training is the user's own command, `embodied-ppo train experiment=arithmetic` (256 prompts,
minibatches of 128, two epochs, a model of 0.5 M parameters and its critic), eager and with compiled
minibatches, in float32 and bfloat16; its summary.json holds the same figures. Generation: 4 layers
of 256, 256 prompts of 16 tokens, responses of about 16 tokens (geometric) and at most 64; the two
take turns. One thread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling

ROUNDS = 9
LONGEST = 64
ENDS = (2, 3, 4, 5)
"""4 of 64 tokens end a response: one in 16 does, since a new model likes all tokens about equally.
"""
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


def train(words: list[str]) -> dict[str, Any]:
    """The summary of a run."""
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
        done = subprocess.run(
            [*command, "experiment=arithmetic", "eval_every=0", *words], capture_output=True
        )
        if done.returncode:
            raise SystemExit(done.stderr.decode())
    return json.loads(done.stdout)


def theirs(model: Any, prompts: torch.Tensor) -> int:
    """Useful tokens of transformers' generate."""
    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=LONGEST,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(ENDS),
        pad_token_id=0,
    )[:, prompts.shape[1] :]
    ended = torch.isin(out, torch.tensor(ENDS))
    return int(torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1]).sum())


def generation() -> list[tuple[float, float]]:
    """(ours, theirs) in useful tokens per CPU second, round by round."""
    torch.manual_seed(0)
    policy = LanguagePolicy(causal_lm.load(None, MODEL, section="actor.model"))
    engine = Engine(policy, slots=256, pad_id=0)
    sampling = Sampling(max_tokens=LONGEST, stop_ids=ENDS)
    found = []
    for turn in range(ROUNDS + 1):
        prompts = torch.randint(6, 64, (256, 16))
        start = time.process_time()
        ours = int(engine.generate(prompts.tolist(), sampling, seed=turn).length.sum())
        between = time.process_time()
        other = theirs(policy.model, prompts)
        end = time.process_time()
        found.append((ours / (between - start), other / (end - between)))
    return found[1:]  # the first warms up


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    print(
        f"PPO, response tokens per CPU second; {' '.join(words) or 'as shipped'}; torch"
        f" {torch.__version__}"
    )
    print(
        "| minibatches | tokens per CPU second | CPU us per token by phase | accuracy before |"
        " after | MB |"
    )
    print("|---" * 6 + "|")
    half = ["actor.model.dtype=bfloat16", "critic.model.dtype=bfloat16"]
    for name, options in (
        ("eager", ["compile=never"]),
        ("compiled", ["compile=always"]),
        ("eager, bfloat16", ["compile=never", *half]),
        ("compiled, bfloat16", ["compile=always", *half]),
    ):
        s = train([*options, *words])
        phases = ", ".join(
            f"{phase} {us:.0f}" for phase, us in s["cpu_us_per_token_by_phase"].items()
        )
        speed = f"{1e6 / s['cpu_us_per_token']:,.0f}"
        cells = [name, speed, phases]
        cells += [
            f"{s['initial_success']:.3f}",
            f"{s['final_success']:.3f}",
            f"{s['peak_rss_mb']:.0f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    print("\nGeneration, useful tokens per CPU second, round by round")
    print("| ours | transformers' generate | ratio |\n|---|---|---|")
    rounds = generation()
    for ours, other in rounds:
        print(f"| {ours:,.0f} | {other:,.0f} | {ours / other:.2f} |")
    print(f"median ratio {statistics.median(ours / other for ours, other in rounds):.2f}")


if __name__ == "__main__":
    main()
