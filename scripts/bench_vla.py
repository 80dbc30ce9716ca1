"""Pictures per CPU second of vision-language-action models, acting and learning, next to
transformers' of equal size.

    python scripts/bench_vla.py [--rounds 9] [--json FILE]

First table: our small models (width 64, 2 blocks, a picture of 64 x 64 in 64 tokens, a sentence, 4
actions of 2 dimensions) against transformers' own code of hidden size 64 and 2 layers with as many
tokens for the picture (patches of 8) and with a quarter of them (16): PI0 for actions that flow
(sample_actions; loss), PaliGemma for tokens (generate; logits of all). Second table: one minibatch
of PPO, forward and backward, of π0 of that size through our code with the trunk trained, frozen and
computed anew, frozen and kept from ``encode``; and transformers' loss of it.

Milliseconds of CPU time of this process on one thread; medians, all candidates take turns. New
weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ArraySpec, Box, ObsSpec
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.flow_matching import FlowVLA
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pi0_files import Published

BATCH, SIDE, CHUNK, SIZE, BINS, WORDS = 64, 64, 4, 2, 32, 8
STEPS = 4
"""From noise to an action."""
SENTENCE = "push the small red block to the left"
"""WORDS words."""
SPEC: ObsSpec = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, SIDE, SIDE), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
BOX = Box((-1.0,) * (CHUNK * SIZE), (1.0,) * (CHUNK * SIZE))
Jobs = dict[str, Callable[[], Any]]


def observations() -> dict[str, Tensor]:
    return {
        "state": torch.randn(BATCH, 5),
        "front": torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8),
        "instruction": torch.zeros(BATCH, dtype=torch.int64),
    }


def sizes(patch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """PaliGemma's fields and those of a Gemma."""
    gemma = {
        "model_type": "gemma",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    gemma |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 256,
        "patch_size": patch,
    }
    vision |= {
        "image_size": SIDE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vision_use_head": False,
    }
    return {
        "text_config": gemma,
        "vision_config": vision,
        "projection_dim": 64,
        "image_token_id": 511,
    }, gemma


def new_pi0(patch: int) -> Any:
    from transformers import PI0Config, PI0ForConditionalGeneration

    vlm, gemma = sizes(patch)
    config = PI0Config(
        vlm_config={"model_type": "paligemma"} | vlm,
        dit_config=gemma,
        chunk_size=CHUNK,
        max_state_dim=8,
        max_action_dim=8,
    )
    return PI0ForConditionalGeneration(config)


def prompt(patch: int) -> dict[str, Tensor]:
    seen = (SIDE // patch) ** 2
    ids = torch.cat((torch.full((BATCH, seen), 511), torch.randint(3, 500, (BATCH, WORDS))), dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# ----------------------------------------------------------------------------------------- the jobs
def learned(policy: Any, inputs: Mapping[str, Tensor], d: Any) -> Callable[[], None]:
    """Forward and backward of a minibatch."""

    def job() -> None:
        policy.zero_grad(set_to_none=True)
        out = policy.evaluate(inputs, d.action, d.replay)
        (out.log_prob.sum((1, 2)).exp().mean() + out.value.square().mean()).backward()

    return job


def ours(name: str, policy: Any, jobs: Jobs) -> None:
    obs, noise = observations(), policy.noise(BATCH)
    inputs = policy.encode(obs)
    jobs[f"{name}, act"] = lambda: policy.act(policy.encode(obs), noise=noise)
    jobs[f"{name}, learn"] = learned(policy, inputs, policy.act(inputs, noise=noise))


def theirs_flow(name: str, patch: int, jobs: Jobs) -> None:
    model = new_pi0(patch)
    asked: dict[str, Any] = {
        "pixel_values": torch.randn(BATCH, 1, 3, SIDE, SIDE),
        "state": torch.randn(BATCH, 8),
    }
    asked |= {"pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool)} | prompt(patch)
    actions = torch.randn(BATCH, CHUNK, 8)

    def learn() -> None:
        model.zero_grad(set_to_none=True)
        model(**asked, actions=actions).loss.mean().backward()

    jobs[f"{name}, act"] = lambda: model.sample_actions(**asked, num_steps=STEPS)
    jobs[f"{name}, learn"] = learn


def theirs_tokens(name: str, patch: int, jobs: Jobs) -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    model: Any = PaliGemmaForConditionalGeneration(PaliGemmaConfig(**sizes(patch)[0])).eval()
    pixels, asked, count = torch.randn(BATCH, 3, SIDE, SIDE), prompt(patch), CHUNK * SIZE
    more = torch.randint(3, 3 + BINS, (BATCH, count))
    whole = {"input_ids": torch.cat((asked["input_ids"], more), dim=1)}
    whole |= {"attention_mask": torch.ones_like(whole["input_ids"])}
    kinds = torch.zeros_like(whole["input_ids"])
    kinds[:, -count:] = 1

    def act() -> None:
        options: dict[str, Any] = {
            "max_new_tokens": count,
            "min_new_tokens": count,
            "do_sample": True,
        }
        model.generate(**asked, pixel_values=pixels, **options)

    def learn() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(
            **whole, pixel_values=pixels, token_type_ids=kinds, logits_to_keep=count + 1
        ).logits[:, :-1]
        logits.log_softmax(-1).gather(-1, more.unsqueeze(-1)).mean().backward()

    jobs[f"{name}, act"], jobs[f"{name}, learn"] = act, learn


def tokenize(sentence: str) -> list[int]:
    return [3 + len(word) for word in sentence.split()]


def minibatches(patch: int) -> Jobs:
    """Of π0."""
    jobs: Jobs = {}
    frozen: dict[str, Any] = {"freeze_trunk": True}
    kinds: list[tuple[str, dict[str, Any], float | None]] = [
        ("trunk trained", {}, None),
        ("trunk frozen, computed anew", frozen, 0.0),
        ("trunk frozen, kept", frozen, None),
    ]
    for name, options, room in kinds:
        config = ModelConfig(policy="flow", flow_steps=STEPS, **options)
        policy = PI0(
            SPEC,
            BOX,
            config,
            Published(new_pi0(patch), tokenize),
            chunk=CHUNK,
            sentences=(SENTENCE,),
            memory_gb=room,
        )
        inputs = policy.encode(observations())
        jobs[name] = learned(policy, inputs, policy.act(inputs, noise=policy.noise(BATCH)))
    theirs: Jobs = {}
    theirs_flow("transformers' loss, all trained", patch, theirs)
    jobs["transformers' loss, all trained"] = theirs["transformers' loss, all trained, learn"]
    return jobs


# ------------------------------------------------------------------------------------------ measure
def measure(jobs: Jobs, rounds: int) -> dict[str, float]:
    """Medians of CPU milliseconds."""
    told: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(rounds + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if i:
                told[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(x) for name, x in told.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    jobs: Jobs = {}
    plain: dict[str, Any] = {"width": 64, "depth": 2, "bins": BINS}
    small: dict[str, Any] = {"chunk": CHUNK, "sentences": (SENTENCE,)}
    ours(
        "FlowVLA",
        FlowVLA(SPEC, BOX, ModelConfig(policy="flow", flow_steps=STEPS, **plain), **small),
        jobs,
    )
    for decode in ("parallel", "autoregressive"):
        config = ModelConfig(policy="token", decode=decode, **plain)
        ours(f"TokenVLA, {decode}", TokenVLA(SPEC, BOX, config, **small), jobs)
    for patch in (8, 16):
        theirs_flow(f"PI0, patches of {patch}", patch, jobs)
        theirs_tokens(f"PaliGemma, patches of {patch}", patch, jobs)
    times = measure(jobs, asked.rounds)
    rate = {name: 1e3 * BATCH / ms for name, ms in times.items()}
    print(f"Pictures per CPU second, {BATCH} at once, torch {torch.__version__}\n")
    print("| model | act | learn |\n|---|---|---|")
    names = list(dict.fromkeys(name.rpartition(", ")[0] for name in times))
    for name in names:
        print(f"| {name} | {rate[f'{name}, act']:,.0f} | {rate[f'{name}, learn']:,.0f} |")
    ratios = {
        f"{mine} / {other}, {what}": rate[f"{mine}, {what}"] / rate[f"{other}, {what}"]
        for mine in names[:3]
        for other in names[3:]
        if (mine == "FlowVLA") == other.startswith("PI0")
        for what in ("act", "learn")
    }
    print("\n| ratio | |\n|---|---|")
    for name, x in ratios.items():
        print(f"| {name} | {x:.1f} |")
    parts: dict[str, dict[str, float]] = {}
    for patch in (16, 8):
        parts[f"patches of {patch}"] = measure(minibatches(patch), asked.rounds)
    print(f"\nA minibatch of {BATCH} of PPO of π0, hidden size 64, 2 layers: CPU milliseconds\n")
    print(f"| | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}")
    for name in next(iter(parts.values())):
        print(f"| {name} | {' | '.join(f'{x[name]:.1f}' for x in parts.values())} |")
    if asked.json:
        asked.json.write_text(
            json.dumps({"pictures_per_s": rate, "ratios": ratios, "minibatch_ms": parts}, indent=1)
        )


if __name__ == "__main__":
    main()
