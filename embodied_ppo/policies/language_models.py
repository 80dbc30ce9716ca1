"""Construct actor and critic of a language model from their options."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.options.schema import AlgorithmConfig, Config, CriticConfig
from embodied_ppo.policies import causal_lm
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy


def make_policy(config: Config, tokenizer: Any, device: torch.device) -> LanguagePolicy:
    """Return the actor with weights of a directory or from ``config.seed``. Raises ConfigError."""
    m = config.actor.model
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        model = causal_lm.load(m.path, m.architecture, section="actor.model", device=device)
    vocabulary = model.get_input_embeddings().num_embeddings
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocabulary:
        fact = f"actor.model: has {vocabulary} tokens, the tokenizer has {needed}"
        raise ConfigError(f"{fact}; use the tokenizer of this model")
    policy = LanguagePolicy(
        model, temperature=config.rollout.temperature, compute=getattr(torch, m.dtype)
    )
    policy.decoder.module.recompute = m.gradient_checkpointing
    return policy


def make_critic(
    config: Config, policy: LanguagePolicy, device: torch.device
) -> LanguageCritic | None:
    """Return the critic, a copy of the actor unless critic.model.path is set.

    None: no values are used.

    Raises:
        ConfigError: critic.model cannot be loaded, or has fewer tokens than the actor.
    """
    path, m = config.critic.model.path, config.actor.model
    if config.algorithm.adv_type != "gae":
        return None
    if path is None:
        model = copy.deepcopy(policy.model)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(sampling_key(config.seed, "critic"))
            model = causal_lm.load(path, {}, section="critic.model", device=device)
        pair = (model, policy.model)
        vocabulary, needed = (x.get_input_embeddings().num_embeddings for x in pair)
        if vocabulary < needed:
            fact = f"critic.model: has {vocabulary} tokens, the actor {needed}"
            raise ConfigError(f"{fact}; take one of the same family")
    critic = LanguageCritic(model, compute=getattr(torch, m.dtype))
    critic.decoder.recompute = m.gradient_checkpointing
    return critic


def critic_config(a: AlgorithmConfig, c: CriticConfig) -> AlgorithmConfig:
    """Return the algorithm's options, replaced by those that ``critic`` sets.

    loss_agg_func is token-mean unless ``critic`` sets it. The learning rate is not adapted to the
    KL divergence of the actor: adaptive becomes constant, adaptive_linear linear.
    """
    names = {f.name for f in fields(AlgorithmConfig)}
    values = {name: x for name, x in vars(c).items() if name in names}
    overrides = {name: x for name, x in values.items() if x is not None}
    overrides.setdefault("loss_agg_func", "token-mean")
    critic = replace(a, **overrides)
    schedule = {"adaptive": "constant", "adaptive_linear": "linear"}.get(critic.lr_schedule)
    return critic if schedule is None else replace(critic, lr_schedule=schedule)
