"""Batch sizes of an update and length of a run: samples, minibatches, optimiser steps, environment
steps.
"""

from __future__ import annotations

from embodied_ppo.config.rules.base import Batches
from embodied_ppo.config.rules.select import rules_of
from embodied_ppo.config.schema import Config


def batches(config: Config) -> Batches:
    """Return the batch sizes of checked options."""
    return rules_of(config.mode).batches(config)


def lines(config: Config) -> list[str]:
    """Return rollout, minibatches and run as one line of text each."""
    return rules_of(config.mode).batch_lines(config, total_updates(config))


def steps_per_update(config: Config) -> int:
    """Return the environment steps of one rollout; with action chunks this is an upper bound."""
    env_steps = config.algorithm.horizon * config.env.num_envs * config.env.action_chunk
    return env_steps


def total_updates(config: Config) -> int:
    """Return ``updates``, or as many complete updates as ``env_steps`` allows (at least one)."""
    if config.updates is not None:
        return config.updates
    assert config.env_steps is not None
    return max(1, config.env_steps // steps_per_update(config))
