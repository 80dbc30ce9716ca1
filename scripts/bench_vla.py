"""Measure images per CPU second of vision-language-action models against transformers.

    python scripts/bench_vla.py [--rounds 9] [--json FILE]

First table: our small models (width 64, 2 blocks, a 64 x 64 image in 64 tokens, an instruction, 4
actions of 2 dimensions) against transformers' models of hidden size 64 with 2 layers, with the same
number of image tokens (patches of 8) and with a quarter of them (patches of 16): PI0 for flow
matching (sample_actions; loss), PaliGemma for tokens (generate; logits). Second table: forward and
backward pass of one PPO minibatch of π0 of that size with our code (trunk trained; frozen and
recomputed; frozen and cached by ``encode``), and transformers' loss.

All figures are medians of CPU time of this process on one thread, with new weights. The models take
turns.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import benchmark
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
"""Flow matching steps."""
SENTENCE = "push the small red block to the left"
"""A sentence of WORDS words."""
SPEC: ObsSpec = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, SIDE, SIDE), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
BOX = Box((-1.0,) * (CHUNK * SIZE), (1.0,) * (CHUNK * SIZE))
Calls = dict[str, Callable[[], Any]]


def observations() -> dict[str, Tensor]:
    return {
        "state": torch.randn(BATCH, 5),
        "front": torch.randint(0, 256, (BATCH, 3, SIDE, SIDE), dtype=torch.uint8),
        "instruction": torch.zeros(BATCH, dtype=torch.int64),
    }


def sizes(patch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of PaliGemma's configuration and of a Gemma configuration."""
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
    tokens = (SIDE // patch) ** 2
    ids = torch.cat(
        (torch.full((BATCH, tokens), 511), torch.randint(3, 500, (BATCH, WORDS))), dim=1
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# ------------------------------------------------------------------------------------------- calls
def learning_step(policy: Any, inputs: Mapping[str, Tensor], d: Any) -> Callable[[], None]:
    """Return the forward and backward pass of a minibatch."""

    def step() -> None:
        policy.zero_grad(set_to_none=True)
        out = policy.evaluate(inputs, d.action, d.replay)
        (out.log_prob.sum((1, 2)).exp().mean() + out.value.square().mean()).backward()

    return step


def add_own(name: str, policy: Any, calls: Calls) -> None:
    obs, noise = observations(), policy.noise(BATCH)
    inputs = policy.encode(obs)
    calls[f"{name}, act"] = lambda: policy.act(policy.encode(obs), noise=noise)
    calls[f"{name}, learn"] = learning_step(policy, inputs, policy.act(inputs, noise=noise))


def add_pi0(name: str, patch: int, calls: Calls) -> None:
    model = new_pi0(patch)
    inputs: dict[str, Any] = {
        "pixel_values": torch.randn(BATCH, 1, 3, SIDE, SIDE),
        "state": torch.randn(BATCH, 8),
    }
    inputs |= {"pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool)} | prompt(patch)
    actions = torch.randn(BATCH, CHUNK, 8)

    def learn() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs, actions=actions).loss.mean().backward()

    calls[f"{name}, act"] = lambda: model.sample_actions(**inputs, num_steps=STEPS)
    calls[f"{name}, learn"] = learn


def add_paligemma(name: str, patch: int, calls: Calls) -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    model: Any = PaliGemmaForConditionalGeneration(PaliGemmaConfig(**sizes(patch)[0])).eval()
    pixels, inputs, count = torch.randn(BATCH, 3, SIDE, SIDE), prompt(patch), CHUNK * SIZE
    more = torch.randint(3, 3 + BINS, (BATCH, count))
    sequence = {"input_ids": torch.cat((inputs["input_ids"], more), dim=1)}
    sequence |= {"attention_mask": torch.ones_like(sequence["input_ids"])}
    kinds = torch.zeros_like(sequence["input_ids"])
    kinds[:, -count:] = 1

    def act() -> None:
        options: dict[str, Any] = {
            "max_new_tokens": count,
            "min_new_tokens": count,
            "do_sample": True,
        }
        model.generate(**inputs, pixel_values=pixels, **options)

    def learn() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(
            **sequence, pixel_values=pixels, token_type_ids=kinds, logits_to_keep=count + 1
        ).logits[:, :-1]
        logits.log_softmax(-1).gather(-1, more.unsqueeze(-1)).mean().backward()

    calls[f"{name}, act"], calls[f"{name}, learn"] = act, learn


def tokenize(sentence: str) -> list[int]:
    return [3 + len(word) for word in sentence.split()]


def minibatches(patch: int) -> Calls:
    """Return the minibatches of π0."""
    calls: Calls = {}
    frozen: dict[str, Any] = {"freeze_trunk": True}
    variants: list[tuple[str, dict[str, Any], float | None]] = [
        ("trunk trained", {}, None),
        ("trunk frozen, recomputed", frozen, 0.0),
        ("trunk frozen, cached", frozen, None),
    ]
    for name, options, memory_gb in variants:
        config = ModelConfig(policy="flow", flow_steps=STEPS, **options)
        policy = PI0(
            SPEC,
            BOX,
            config,
            Published(new_pi0(patch), tokenize),
            chunk=CHUNK,
            sentences=(SENTENCE,),
            memory_gb=memory_gb,
        )
        inputs = policy.encode(observations())
        calls[name] = learning_step(policy, inputs, policy.act(inputs, noise=policy.noise(BATCH)))
    reference: Calls = {}
    add_pi0("transformers' loss, all trained", patch, reference)
    calls["transformers' loss, all trained"] = reference["transformers' loss, all trained, learn"]
    return calls


# ------------------------------------------------------------------------------------------ measure
def measure(calls: Calls, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each call."""
    times = benchmark.cpu_ms(calls, rounds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = benchmark.argument_parser(__doc__, rounds=9, json=None).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls: Calls = {}
    plain: dict[str, Any] = {"width": 64, "depth": 2, "bins": BINS}
    small: dict[str, Any] = {"chunk": CHUNK, "sentences": (SENTENCE,)}
    add_own(
        "FlowVLA",
        FlowVLA(SPEC, BOX, ModelConfig(policy="flow", flow_steps=STEPS, **plain), **small),
        calls,
    )
    for decode in ("parallel", "autoregressive"):
        config = ModelConfig(policy="token", decode=decode, **plain)
        add_own(f"TokenVLA, {decode}", TokenVLA(SPEC, BOX, config, **small), calls)
    for patch in (8, 16):
        add_pi0(f"PI0, patches of {patch}", patch, calls)
        add_paligemma(f"PaliGemma, patches of {patch}", patch, calls)
    times = measure(calls, args.rounds)
    rate = {name: 1e3 * BATCH / ms for name, ms in times.items()}
    print(f"Images per CPU second in batches of {BATCH}, torch {torch.__version__}\n")
    benchmark.print_header(["model", "act", "learn"])
    names = list(dict.fromkeys(name.rpartition(", ")[0] for name in times))
    for name in names:
        benchmark.print_row([name, *(f"{rate[f'{name}, {x}']:,.0f}" for x in ("act", "learn"))])
    ratios = {
        f"{own} / {other}, {phase}": rate[f"{own}, {phase}"] / rate[f"{other}, {phase}"]
        for own in names[:3]
        for other in names[3:]
        if (own == "FlowVLA") == other.startswith("PI0")
        for phase in ("act", "learn")
    }
    print()
    benchmark.print_header(["ratio", ""])
    for name, x in ratios.items():
        benchmark.print_row([name, f"{x:.1f}"])
    parts: dict[str, dict[str, float]] = {}
    for patch in (16, 8):
        parts[f"patches of {patch}"] = measure(minibatches(patch), args.rounds)
    print(f"\nPPO minibatch of {BATCH} of π0, hidden size 64, 2 layers: CPU milliseconds\n")
    benchmark.print_header(["", *parts])
    for name in next(iter(parts.values())):
        benchmark.print_row([name, *(f"{x[name]:.1f}" for x in parts.values())])
    if args.json:
        args.json.write_text(
            json.dumps({"pictures_per_s": rate, "ratios": ratios, "minibatch_ms": parts}, indent=1)
        )


if __name__ == "__main__":
    main()
