"""Estimate the memory of a language model's run on the CPU, before the run is built."""

from __future__ import annotations

import math
from typing import Any

import torch

from embodied_ppo.cluster import memory_estimate
from embodied_ppo.cluster.memory_estimate import MemoryEstimator, MemoryNeeds
from embodied_ppo.options import placement
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import causal_lm, language_models
from embodied_ppo.rollout import group_filter, language_inputs
from embodied_ppo.rollout.generation import decode_model

# Purposes of the memory of a process.
PURPOSES = ("weights", "gradients", "optimiser", "experience", "cache", "activations")


class LanguageMemoryEstimator(MemoryEstimator):
    """See ``MemoryEstimator``. Graders and reward models are not counted."""

    def __init__(self, config: Config) -> None:
        """Build actor and critic without weights, and read the prompts for the longest sequence.

        Raises ConfigError.
        """
        self.config = config
        a, cpu = config.algorithm, torch.device("cpu")
        # Caches and activations depend on the longest sequence, so all prompts are read.
        tokenizer = language_inputs.make_tokenizer(config)
        train, held_out = language_inputs.read_prompts(config, tokenizer, lambda line: None)
        self.policy = language_models.make_policy(config, tokenizer, cpu, weights=False)
        prompts = [*train, *held_out]
        # Responses of an evaluation, for which the engine enlarges its cache.
        self.evaluated = min(config.evaluation.episodes, len(held_out)) * config.evaluation.n
        self.longest = language_inputs.check_length(self.policy, prompts, a.response_length)
        self.critic = language_models.make_critic(config, self.policy, cpu, weights=False)

    def estimate_memory(
        self, placed: placement.Plan, micro_batch_size: int | None = None
    ) -> MemoryNeeds:
        """See ``MemoryEstimator.estimate_memory``."""
        config, a, policy = self.config, self.config.algorithm, self.policy
        # Responses of one update in all processes together.
        sequences = a.rollout_batch_size * a.group_size
        acts, learners = placed.processes("rollout"), placed.processes("actor")
        hardware, limit = placed.hardware, micro_batch_size or self.micro_batch_size or sequences
        # The policy computes logits in chunks, whose size depends on the memory of the device.
        policy.logit_bytes = causal_lm.logit_bytes(hardware.kind, hardware.memory)
        # int64 tokens of the whole sequence, and the numbers per token of its response.
        row = 8 * self.longest + memory_estimate.EXPERIENCE_BYTES_PER_TOKEN * a.response_length
        # A group filter holds the kept groups and the newest round at the same time.
        copies = 1.0 + config.rollout.oversampling
        if a.group_filter is not None:
            copies, _ = group_filter.peak_copies(a.rollout_batch_size, a.group_filter_rounds)
        needs: MemoryNeeds = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(PURPOSES, 0)
            roles = group.roles
            rolls_out, models = "rollout" in roles, list[dict[str, int]]()
            counted = set[int]()  # models with adapters share frozen parameters
            if rolls_out:
                # One row of the cache for each response that is decoded at the same time.
                groups = a.rollout_batch_size // acts
                begun = groups + math.ceil(config.rollout.oversampling * groups)
                decoded = max(begun * a.group_size, self.evaluated)
                slots = min(language_inputs.slots(config), decoded)
                need["cache"] = memory_estimate.kv_cache_bytes(policy, slots, self.longest)
                # On a GPU the engine decodes with a copy of the weights in the type of the
                # products.
                if hardware.kind == "cuda" and config.rollout.engine == "builtin":
                    models.append({"weights": decode_model.copy_bytes(policy)})
            # Acting and learning share one copy of the weights.
            if "actor" in roles:
                models.append(self._trained_bytes(policy, learners, counted, acts=rolls_out))
            elif rolls_out:
                models.append({"weights": memory_estimate.model_bytes(policy, counted)["weights"]})
            if "critic" in roles:
                models.append(self._trained_bytes(self.critic, learners, counted))
            # The reference is a copy of the actor that is never trained.
            if "reference" in roles:
                counted = counted if config.actor.model.lora_rank else set()
                size = self._trained_bytes(policy, learners, counted)["weights"]
                models.append({"weights": size})
            for model in models:
                for purpose, size in model.items():
                    need[purpose] += size
            # Actor and critic train one after the other, so the larger activations count.
            trained = [role for role in ("actor", "critic") if role in roles]
            steps = [self._step(role, learners, limit) for role in trained]
            if "actor" in roles and config.cloning.steps:
                steps.append(self._cloning_step(limit, learners))
            need["activations"] = max(steps, default=0)
            if "actor" in roles or rolls_out:
                # The experience is divided over the rollouts or the learners; count the larger
                # part.
                need["experience"] = round(sequences // min(acts, learners) * row * copies)
            needs[group.name] = need
        return needs

    def _trained_bytes(
        self, model: Any, learners: int, counted: set[int], *, acts: bool = False
    ) -> dict[str, int]:
        """Return the bytes of a trained model and its optimiser."""
        # Each sharded model has shards of its own.
        if self.config.cluster.shard:
            return memory_estimate.sharded_bytes(model, learners, acts=acts)
        return memory_estimate.model_bytes(model, counted)

    def _cloning_step(self, limit: int, learners: int) -> int:
        """Return the bytes of a pass of supervised fine-tuning, whose batch has a size of its own.

        ``limit`` is none if it allows a complete minibatch of PPO.
        """
        a, size = self.config.algorithm, self.config.cloning.batch_size
        rows = min(size, self.micro_batch_size or size)
        if limit < a.global_batch_size * a.group_size // learners:
            rows = min(rows, limit)
        width, length = self.longest, a.response_length
        return memory_estimate.language_step(self.policy, rows, width, length, entropy=False)

    def _step(self, role: str, learners: int, limit: int) -> int:
        """Return the bytes of one forward and backward pass of at most ``limit`` responses."""
        a, model = self.config.algorithm, self.policy
        size = a.global_batch_size
        if role == "critic":
            assert self.critic is not None
            model = self.critic
            size = language_models.critic_config(a, self.config.critic).global_batch_size
        # A process computes its share of a minibatch, at most one micro-batch at a time.
        rows = min(size * a.group_size // learners, limit)
        return memory_estimate.language_step(model, rows, self.longest, a.response_length)
