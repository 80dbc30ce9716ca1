"""The part ``language`` of bench_gpu.py: a PPO step of a language model with its critic.

The model has Qwen2.5-0.5B's shape and random weights. Weights are float32 and products bfloat16,
as in training with actor.model.dtype=bfloat16. Every response has its full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import benchmark
import torch
from torch import Tensor

from embodied_ppo.algorithms.separate_critic_learner import LocalCritic, separate_critic_learner
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import Decoder, LanguageCritic, LanguagePolicy
from embodied_ppo.rewards.graders import Grade, Sample
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language import ReasoningRollout


@dataclass(frozen=True)
class Shape:
    """Shape of a model (Qwen2 with tied embeddings) and of its batches.

    There are ``prompts`` prompts of ``prompt`` tokens, and responses of ``new`` tokens.
    """

    hidden: int = 896
    layers: int = 24
    heads: int = 14
    groups: int = 2
    mlp: int = 4864
    vocabulary: int = 151936
    prompts: int = 256
    prompt: int = 100
    new: int = 512
    micro_tokens: int = 32768

    def model(self, device: torch.device) -> Any:
        """Return a model with random float32 weights, made on the device."""
        fields: dict[str, Any] = {
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        with device:
            return causal_lm.load(None, fields, section="bench", device=device)

    def flops(self, decoder: Decoder, lengths: Tensor, responses: Tensor) -> float:
        """Return the operations of a forward and backward pass, without recomputation.

        They are 6 · weights · tokens, and for the attention of each layer 6 · length² · hidden.

        Args:
            decoder: The decoder.
            lengths: [N], tokens of each row.
            responses: [N], tokens at the end of each row whose logits are computed.
        """
        weights = sum(p.numel() for p in decoder.layers.parameters())
        head = self.vocabulary * self.hidden
        attention = self.layers * float((lengths.double() ** 2).sum()) * self.hidden
        return 6.0 * (weights * float(lengths.sum()) + head * float(responses.sum()) + attention)


TINY = Shape(64, 2, 4, 2, 128, 512, prompts=6, prompt=5, new=12, micro_tokens=64)
COMPUTE = torch.bfloat16
"""Type of matrix products."""


class EvenLength:
    """Graders that score 1 if a response has an even number of tokens."""

    failures, last_failure = 0, ""

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        return [Grade(float(len(text) % 2 == 0)) for _, text, _, _ in samples]

    def close(self) -> None: ...


def ppo_step(policy: LanguagePolicy, shape: Shape, prompts: list[list[int]]) -> dict[str, float]:
    """Return the seconds of each phase of the second PPO step, with 4 minibatches and an epoch."""
    device = policy.model.lm_head.weight.device
    critic = LanguageCritic(shape.model(device), compute=COMPUTE)
    config = AlgorithmConfig(adv_type="gae", gamma=1.0, gae_lambda=1.0, update_epoch=1, lr=1e-6)
    shared: dict[str, Any] = {
        "length": shape.new,
        "columns": -(-shape.prompts // 4),
        "tokens": shape.micro_tokens,
        "updates": 2,
        "seed": 0,
    }
    values = LocalCritic(critic, config, **shared)
    learner = separate_critic_learner(
        policy, values, config, recompute=True, num_sequences=shape.prompts, **shared
    )
    engine = Engine(policy, slots=shape.prompts, pad_id=0)
    tasks = [Prompt(tuple(p), "", "", "bench", {}, i) for i, p in enumerate(prompts)]
    rollout = ReasoningRollout(
        tasks,
        engine,
        EvenLength(),
        lambda ids: "x" * len(ids),
        batch=shape.prompts,
        sampling=Sampling(shape.new),
        pad_id=0,
        seed=0,
    )
    phases: dict[str, float] = {}
    for update in range(2):
        results: list[Any] = []
        phases["generate_s"] = benchmark.seconds(
            lambda u=update, r=results: r.append(
                rollout.collect(shape.new, update=u, version=u)[0]
            ),
            device,
        )
        assert int(results[0].mask.sum()) == shape.prompts * shape.new
        phases["values_log_probs_advantages_s"] = benchmark.seconds(
            lambda r=results: r.append(learner._prepare(r[0])[0]), device
        )
        for name, optimizer in (("critic_s", values.optimizer), ("actor_s", learner.optimizer)):
            phases[name] = benchmark.seconds(
                lambda o=optimizer, r=results, u=update: o.optimize(
                    r[1], u, critic_only=False, entropy_coef=0.0
                ),
                device,
            )
    return phases | {"ppo_step_s": sum(phases.values())}


def decode_ms(
    policy: LanguagePolicy, shape: Shape, prompts: list[list[int]], static: bool
) -> float:
    """Return the time of one decode step of all prompts, without prefill and graph capture."""
    device = policy.model.lm_head.weight.device
    engine = Engine(policy, slots=shape.prompts, pad_id=0, static=static)
    few = max(2, shape.new // 16)
    long, short = (  # the longest first, so that both use one cache
        min(
            benchmark.seconds(lambda n=new: engine.generate(prompts, Sampling(n), seed=0), device)
            for _ in range(2)
        )
        for new in (shape.new, few)
    )
    return (long - short) / (shape.new - few) * 1e3


def forward_backward(report: benchmark.Report, policy: LanguagePolicy, shape: Shape) -> None:
    """Report the second forward and backward pass of log-probabilities of a micro-batch."""
    device = policy.model.lm_head.weight.device
    rows = min(shape.prompts, max(1, shape.micro_tokens // (shape.prompt + shape.new)))
    lengths = torch.full((rows,), shape.prompt + shape.new)
    ids = torch.randint(0, shape.vocabulary, (rows, shape.prompt + shape.new), device=device)
    # [rows, new], positions before the scored tokens
    place = (torch.arange(shape.new, device=device) + shape.prompt - 1).expand(rows, -1)

    def step() -> None:
        view = policy.view(policy.hidden(ids, place), ids.gather(1, place + 1))
        view.log_prob.sum().backward()
        policy.zero_grad()

    step_s = [benchmark.seconds(step, device) for _ in range(2)][1]
    report("forward_backward_tokens", int(lengths.sum()))
    report("forward_backward_ms", step_s * 1e3)
    if (peak := benchmark.peak_flops(device)) is not None:
        responses = torch.full((rows,), shape.new)
        flops = shape.flops(policy.decoder.module, lengths, responses)
        report("forward_backward_mfu", flops / step_s / peak)


def measure(report: benchmark.Report, shape: Shape, device: torch.device) -> None:
    """Report the figures of the part."""
    torch.manual_seed(0)
    policy = LanguagePolicy(shape.model(device), compute=COMPUTE)
    report("parameters", sum(p.numel() for p in policy.parameters()))
    prompts = torch.randint(0, shape.vocabulary, (shape.prompts, shape.prompt)).tolist()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    phases = report.attempt("ppo_step", lambda: ppo_step(policy, shape, prompts))
    for name, duration_s in (phases or {}).items():
        report(name, duration_s)
    if device.type == "cuda":
        report("ppo_step_peak_gib", torch.cuda.max_memory_allocated(device) / 2**30)
    for name, static in (("decode_step_graph_ms", True), ("decode_step_eager_ms", False)):
        step_ms = report.attempt(name, lambda s=static: decode_ms(policy, shape, prompts, s))
        if step_ms is not None:
            report(name, step_ms)
    report.attempt("forward_backward", lambda: forward_backward(report, policy, shape))
