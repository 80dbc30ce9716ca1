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
from embodied_ppo.core.running_stats import expand, read_numbers
from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies.popart import TASK_INPUT
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.roles import Actor

# Fields of a trajectory that rewards and advantages are computed from.
COLUMNS = ("reward", "value", "next_value", "terminated", "truncated", "mask", "steps")


def recompute_behaviour(
    actor: Actor, inputs: Any, t: Trajectory, c: AlgorithmConfig, ranks: Ranks, *, lags: bool
) -> tuple[Tensor, Tensor | None, Trajectory, Metrics]:
    """Return log π_old of the actions [T, N, ..], the off-policy weights, and metrics.

    With ``off_policy_correction`` the weights correct for the difference from acting. If other
    weights acted (``lags``), the returned trajectory has the values of the critic that is trained.
    """
    # Evaluate the actions with the weights and kernels of this learner, before the first step.
    log_prob, value = actor.log_prob(inputs, t)
    if c.off_policy_correction is None:
        return log_prob, None, t, {}
    # Advantages of a lagged rollout rest on the newest critic, which explains the returns better.
    t = replace_values(t, value) if lags and value is not None else t
    # Weights multiply elements of the loss, so both are reduced to its level first.
    old, acted = (
        losses.reduce_log_prob(x, c.logprob_type, batch_dims=2) for x in (log_prob, t.log_prob)
    )
    weight = losses.off_policy_weight(
        old, acted, t.mask, kind=c.off_policy_correction, cap=c.off_policy_cap
    )
    return log_prob, weight, t, weight_metrics(weight, t.mask, ranks, cap=c.off_policy_cap)


def weight_metrics(weight: Tensor, mask: Tensor, ranks: Ranks, *, cap: float) -> Metrics:
    """Return metrics of the off-policy weights [T, N, ..] of all ranks, at most ``cap`` each."""
    weight, mask = ranks.all_gather_columns((weight, mask))
    ordered = weight[expand(mask, weight)].double().sort().values
    n, tag = len(ordered), "policy/off_policy_weight"
    quantiles = {f"{tag}_{q}": ordered[n * q // 100] for q in (5, 95) if n}
    capped = (ordered >= cap).sum()
    total, capped, *numbers = read_numbers(ordered.sum(), capped, *quantiles.values())
    metrics: Metrics = {tag: Mean(total, n), "policy/off_policy_capped": Mean(capped, n)}
    return metrics | dict(zip(quantiles, numbers, strict=True))


def replace_values(t: Trajectory, value: Tensor) -> Trajectory:
    """Return a trajectory with other values V of its observations, shaped as ``t.value``.

    D_t = V(s_t) − V_acting(s_t);  V'_t ← V'_t + D_{t+1} within an episode. The observation after
    the last row of an episode or rollout is not stored: there D_t stands for its difference.
    """
    difference, ended = value - t.value, t.terminated | t.truncated
    if t.mask.ndim == 3:
        difference, ended = flatten_chunks(difference), flatten_chunks(ended)
    following = torch.cat([difference[1:], difference[-1:]])
    difference = torch.where(expand(ended, difference), difference, following)
    if t.mask.ndim == 3:
        difference = difference.unflatten(0, (-1, t.mask.shape[2])).transpose(1, 2)
    return replace(t, value=value, next_value=t.next_value + difference)


def gather_columns(t: Trajectory, ranks: Ranks) -> Trajectory:
    """Return a trajectory whose COLUMNS are those of all ranks, with one row for each value."""
    gathered = ranks.all_gather_columns({name: getattr(t, name) for name in COLUMNS})
    # Where each action of a chunk has a value, it becomes a row with its own advantage.
    return replace(t, **(tree.map(flatten_chunks, gathered) if t.mask.ndim == 3 else gathered))


def local_columns(like: Trajectory, ranks: Ranks, *results: Tensor) -> list[Tensor]:
    """Return this rank's columns of results of ``gather_columns``, shaped as its trajectory."""
    if like.mask.ndim == 3:  # [T·C, N] to [T, N, C]
        results = tuple(x.unflatten(0, (-1, like.mask.shape[2])).transpose(1, 2) for x in results)
    return [ranks.local_columns(x) for x in results]


def task_of_samples(inputs: Any, mask: Tensor) -> Tensor:
    """Return the index of the task of each sample, int64 [T, N]; 0 where there is one task."""
    one_hot = inputs.get(TASK_INPUT)
    return torch.zeros_like(mask, dtype=torch.int64) if one_hot is None else one_hot.argmax(-1)


def flatten_chunks(x: Tensor) -> Tensor:
    """Reshape [T, N, C] to [T·C, N], actions in execution order; return [T, N] unchanged."""
    return x if x.ndim == 2 else x.transpose(1, 2).flatten(0, 1)
