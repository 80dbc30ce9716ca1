"""Estimate the memory of a language model's run on the CPU, before the run is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from embodied_ppo.config import placement, validation
from embodied_ppo.config.schema import AlgorithmConfig, Config
from embodied_ppo.models import causal_lm
from embodied_ppo.modes.base import MemoryNeeds
from embodied_ppo.modes.reasoning import components
from embodied_ppo.placement import memory_estimate
from embodied_ppo.rollout import group_filter
from embodied_ppo.rollout.generation import decode_model

PURPOSES: tuple[str, ...] = (
    "weights",
    "gradients",
    "optimiser",
    "experience",
    "cache",
    "activations",
)
"""Purposes of the memory of a process."""


class ReasoningMemoryEstimator:
    """See ``MemoryEstimator``. Graders and reward models are not counted."""

    def __init__(self, config: Config) -> None:
        """Build actor and critic on the CPU, and read the prompts for the longest sequence.

        Raises ConfigError.
        """
        self.config = config
        a, cpu = config.algorithm, torch.device("cpu")
        tokenizer = components.make_tokenizer(config)
        train, held_out = components.read_prompts(config, tokenizer, lambda line: None)
        self.policy = components.make_policy(config, tokenizer, cpu)
        prompts = [*train, *held_out]
        self.longest = components.check_length(self.policy, prompts, a.response_length)
        uses_critic = "critic" not in validation.unused_roles(config)
        self.critic = components.make_critic(config, self.policy, cpu) if uses_critic else None
        self._step_bytes: dict[tuple[str, int], int] = {}

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> MemoryNeeds:
        """See ``MemoryEstimator.needs``."""
        config, a, policy, longest = self.config, self.config.algorithm, self.policy, self.longest
        sequences = a.rollout_batch_size * a.group_size
        acts, learners = placed.processes("rollout"), placed.processes("actor")
        shard = config.cluster.shard if shard is None else shard
        hardware = placed.hardware
        policy.logit_bytes = causal_lm.logit_bytes(hardware.kind, hardware.memory)
        full_weights = memory_estimate.nbytes([*policy.parameters(), *policy.buffers()])
        needs: MemoryNeeds = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(PURPOSES, 0)
            rolls_out, learns = "rollout" in group.roles, "actor" in group.roles
            if (rolls_out or learns) and not (shard and learns):
                need["weights"] += full_weights
            if rolls_out:
                slots = min(components.slots(config), sequences // acts)
                need["cache"] = memory_estimate.kv_cache_bytes(policy, slots, longest)
                if hardware.kind == "cuda" and config.rollout.engine == "builtin":
                    need["weights"] += decode_model.copy_bytes(policy)
            models: dict[str, Any] = {"actor": policy, "critic": self.critic}
            for role, model in models.items():
                if role not in group.roles:
                    continue
                for purpose, size in self._trained_bytes(
                    role, model, learners, shard, rolls_out
                ).items():
                    need[purpose] += size
                step = self._step(
                    role, model, learners, micro or self.micro_batch_size or sequences
                )
                need["activations"] = max(need["activations"], step)
            if "reference" in group.roles:
                sharded = (
                    memory_estimate.sharded_bytes(policy, learners)["weights"] if shard else None
                )
                need["weights"] += full_weights if sharded is None else sharded
            if learns or rolls_out:
                row = 8 * longest + memory_estimate.EXPERIENCE_BYTES_PER_TOKEN * a.response_length
                copies = 1.0
                if a.group_filter is not None:
                    rounds = a.group_filter_rounds
                    copies = group_filter.peak_copies(a.rollout_batch_size, rounds)[0]
                need["experience"] = round(sequences // min(acts, learners) * row * copies)
            needs[group.name] = need
        return needs

    def _trained_bytes(
        self, role: str, model: Any, learners: int, shard: bool, rolls_out: bool
    ) -> dict[str, int]:
        """Return the bytes of a trained model and its optimiser.

        The weights of an actor that is not sharded are not included.
        """
        if shard:
            return memory_estimate.sharded_bytes(
                model, learners, acts=role == "actor" and rolls_out
            )
        size = memory_estimate.nbytes([p for p in model.parameters() if p.requires_grad])
        sizes = {"gradients": size, "optimiser": 2 * size}
        if role == "critic":
            sizes["weights"] = memory_estimate.nbytes([*model.parameters(), *model.buffers()])
        return sizes

    def _step(self, role: str, model: Any, learners: int, limit: int) -> int:
        """Return the bytes of one forward and backward pass of at most ``limit`` responses."""
        config, a = self.config, self.config.algorithm
        options = a if role == "actor" else components.critic_config(a, config.critic)
        rows = min(options.global_batch_size * a.group_size // learners, limit)
        if (role, rows) not in self._step_bytes:
            size = memory_estimate.language_step(model, rows, self.longest, a.response_length)
            self._step_bytes[role, rows] = size
        return self._step_bytes[role, rows]

    @property
    def micro_batch_size(self) -> int | None:
        """See ``MemoryEstimator.micro_batch_size``; in responses of the longest kind."""
        a = self.config.algorithm
        by_tokens = None
        if a.micro_batch_tokens is not None:
            by_tokens = max(1, a.micro_batch_tokens // self.longest)
        limits = [rows for rows in (a.micro_batch_size, by_tokens) if rows is not None]
        return min(limits, default=None)

    def with_micro_batch_size(self, algorithm: AlgorithmConfig, size: int) -> AlgorithmConfig:
        """See ``MemoryEstimator.with_micro_batch_size``."""
        if algorithm.micro_batch_tokens is not None:
            return replace(algorithm, micro_batch_tokens=size * self.longest)
        return replace(algorithm, micro_batch_size=size)
