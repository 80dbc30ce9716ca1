"""Construct actor and critic of a language model from their options."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.options.schema import AlgorithmConfig, Config, CriticConfig
from embodied_ppo.policies import causal_lm, lora
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.policies.decoder import Decoder

# Adapters' scale is this / rank: the best rate hardly depends on rank (Schulman et al. 2025).
LORA_ALPHA = 32.0


def make_policy(
    config: Config, tokenizer: Any, device: torch.device, *, weights: bool = True
) -> LanguagePolicy:
    """Return the actor with weights of a directory or from ``config.seed``.

    Args:
        config: Options of the run.
        tokenizer: Its tokens must be those of the model.
        device: Device of the weights.
        weights: False: parameters are tensors without memory, see ``causal_lm.load``.

    Raises:
        ConfigError: The model cannot be loaded, or has fewer tokens than the tokenizer.
    """
    m = config.actor.model
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        model = causal_lm.load(
            m.path, m.architecture, section="actor.model", device=device, weights=weights
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocabulary:
        fact = f"actor.model: has {vocabulary} tokens, the tokenizer has {needed}"
        raise ConfigError(f"{fact}; use the tokenizer of this model")
    temperature, compute = config.rollout.temperature, getattr(torch, m.dtype)
    policy = LanguagePolicy(model, temperature=temperature, compute=compute)
    policy.decoder.module.recompute = m.gradient_checkpointing
    if m.lora_rank:
        _adapt(policy, policy.decoder.module, m.lora_rank, config, "adapters")
        if weights:
            policy.set_base_weights(str(m.path), "actor.model.path")
    return policy


def _adapt(
    model: LanguagePolicy | LanguageCritic, decoder: Decoder, rank: int, config: Config, stream: str
) -> None:
    """Add adapters to the layers of a model, from a stream of random numbers of the seed.

    Embedding, norms and head stay frozen in float32, the adapted matrices in the type of products.
    """
    decoder.base.requires_grad_(False)
    if isinstance(model, LanguagePolicy):
        model.requires_grad_(False)
    weight = decoder.base.embed_tokens.weight
    # Without weights, the adapters have none, either.
    mode = weight.fake_mode if isinstance(weight, FakeTensor) else nullcontext()
    with torch.random.fork_rng(), mode:
        torch.manual_seed(sampling_key(config.seed, stream))
        lora.adapt(decoder.layers, rank=rank, alpha=LORA_ALPHA)
    for layer in lora.adapted_layers(decoder).values():
        lora.cast_parameters(layer, model.compute)


def critic_rank(config: Config) -> int:
    """Return the rank of the critic's adapters, 0 without."""
    rank = config.critic.model.lora_rank
    return config.actor.model.lora_rank if rank is None else rank


def make_critic(
    config: Config, policy: LanguagePolicy, device: torch.device, *, weights: bool = True
) -> LanguageCritic | None:
    """Return the critic, a copy of the actor at the start unless critic.model.path is set.

    If both have adapters, they share the frozen parameters. None: no values are used.

    Args:
        config: Options of the run.
        policy: The actor, before its training.
        device: Device of the weights.
        weights: See ``make_policy``.

    Raises:
        ConfigError: critic.model cannot be loaded, or has fewer tokens than the actor.
    """
    path, m, rank = config.critic.model.path, config.actor.model, critic_rank(config)
    if config.algorithm.adv_type != "gae":
        return None
    if path is None and (weights or (m.lora_rank and rank)):
        # Buffers are constants. The copy has no adapters, so that they need not be copied.
        memo = {id(x): x for x in policy.buffers()} | (lora.shared(policy) if rank else {})
        if m.lora_rank:
            memo |= {id(p): p for p in policy.parameters() if p.requires_grad}
        model = copy.deepcopy(policy.model, memo)
        lora.remove(model)
        if m.lora_rank and not rank:  # all weights of the copy are trained
            model.float().requires_grad_(True)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(sampling_key(config.seed, "critic"))
            source, architecture = (path, {}) if path else (m.path, m.architecture)
            model = causal_lm.load(
                source, architecture, section="critic.model", device=device, weights=weights
            )
        pair = (model, policy.model)
        vocabulary, needed = (x.get_input_embeddings().num_embeddings for x in pair)
        if vocabulary < needed:
            fact = f"critic.model: has {vocabulary} tokens, the actor {needed}"
            raise ConfigError(f"{fact}; take one of the same family")
    critic = LanguageCritic(model, compute=getattr(torch, m.dtype))
    critic.decoder.recompute = m.gradient_checkpointing
    if rank:
        _adapt(critic, critic.decoder, rank, config, "critic adapters")
        if path is None and policy.base is not None:  # do not read the files again
            critic.base, critic.source = policy.base, policy.source
        elif weights:
            option = "actor.model.path" if path is None else "critic.model.path"
            critic.set_base_weights(str(path or m.path), option)
    return critic


def critic_config(a: AlgorithmConfig, c: CriticConfig) -> AlgorithmConfig:
    """Return the algorithm's options, replaced by those that ``critic`` sets.

    loss_agg_func is token-mean unless ``critic`` sets it. The learning rate is not adapted to the
    KL divergence of the actor: adaptive becomes constant.
    """
    names = {f.name for f in fields(AlgorithmConfig)}
    values = {name: x for name, x in vars(c).items() if name in names}
    overrides = {name: x for name, x in values.items() if x is not None}
    overrides.setdefault("loss_agg_func", "token-mean")
    critic = replace(a, **overrides)
    return replace(critic, lr_schedule="constant") if critic.lr_schedule == "adaptive" else critic
