"""Special cases between a rollout and the batch of ``PPO.prepare``.

Recomputed log-probabilities and importance weights, the columns of all ranks, and action chunks
whose single actions have values. T steps, N columns, C actions of a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.running_stats import expand, masked_sum, read_numbers
from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies.popart import TASK_INPUT
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.roles import Actor

COLUMNS = ("reward", "value", "next_value", "terminated", "truncated", "mask", "steps")
"""Fields of a trajectory that rewards and advantages are computed from."""


def recompute_behaviour(
    actor: Actor, inputs: Any, t: Trajectory, c: AlgorithmConfig
) -> tuple[Tensor, Tensor | None, Metrics]:
    """Return log π_old of the actions [T, N, ..], the off-policy weights, and metrics.

    With ``off_policy_correction`` the weights correct for the difference from acting.
    """
    # Evaluate the actions with the weights and kernels of this learner, before the first step.
    log_prob = actor.log_prob(inputs, t)
    if c.off_policy_correction is None:
        return log_prob, None, {}
    # Weights multiply elements of the loss, so both are reduced to its level first.
    old, acted = (
        losses.reduce_log_prob(x, c.logprob_type, batch_dims=2) for x in (log_prob, t.log_prob)
    )
    weight = losses.off_policy_weight(
        old, acted, t.mask, kind=c.off_policy_correction, cap=c.off_policy_cap
    )
    total, count = read_numbers(masked_sum(weight, t.mask), expand(t.mask, weight).sum())
    return log_prob, weight, {"policy/off_policy_weight": Mean(total, count)}


def gather_columns(t: Trajectory, ranks: Ranks) -> Trajectory:
    """Return a trajectory whose COLUMNS are those of all ranks, with one row for each value."""
    gathered = ranks.all_gather_columns({name: getattr(t, name) for name in COLUMNS})
    # Where each action of a chunk has a value, it becomes a row with its own advantage.
    return replace(t, **(tree.map(flatten_chunks, gathered) if t.mask.ndim == 3 else gathered))


def local_columns(x: Tensor, ranks: Ranks, *, like: Tensor) -> Tensor:
    """Return this rank's columns of a result of ``gather_columns``, shaped as ``like``."""
    if like.ndim == 3:  # [T·C, N] to [T, N, C]
        x = x.unflatten(0, (-1, like.shape[2])).transpose(1, 2)
    return ranks.local_columns(x)


def task_of_samples(inputs: Any, mask: Tensor) -> Tensor:
    """Return the index of the task of each sample, int64 [T, N]; 0 where there is one task."""
    one_hot = inputs.get(TASK_INPUT)
    return torch.zeros_like(mask, dtype=torch.int64) if one_hot is None else one_hot.argmax(-1)


def flatten_chunks(x: Tensor) -> Tensor:
    """Reshape [T, N, C] to [T·C, N], actions in execution order; return [T, N] unchanged."""
    return x if x.ndim == 2 else x.transpose(1, 2).flatten(0, 1)
