"""Rewards and advantages of several reward groups (``algorithm.reward_groups``).

T steps, N columns, G groups. With one group, tensors have no dimension for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodied_ppo.core.types import Trajectory
from embodied_ppo.options.reward_groups import RewardGroup
from embodied_ppo.ppo import advantages, rewards


def split(t: Trajectory, groups: int) -> list[Trajectory]:
    """Return a trajectory [T, N] for each of several groups."""
    fields = ("reward", "value", "next_value")

    def part(name: str, k: int) -> Tensor:
        x = getattr(t, name)
        return x[..., k] if x.ndim > t.mask.ndim else x  # without a critic, values are [T, N]

    return [replace(t, **{name: part(name, k) for name in fields}) for k in range(groups)]


def shape_rewards(
    t: Trajectory,
    groups: Sequence[RewardGroup],
    returns: Sequence[rewards.ReturnScaler],
    scores_sequences: bool,
) -> Tensor:
    """Return ``rewards.shape_rewards`` of each group, [T, N] or [T, N, G]."""
    columns = [t] if len(groups) == 1 else split(t, len(groups))
    parts = [
        rewards.shape_rewards(part, group.options, scaler, scores_sequences)
        for part, group, scaler in zip(columns, groups, returns, strict=True)
    ]
    return torch.stack(parts, -1) if len(parts) > 1 else parts[0]


def estimate(
    t: Trajectory, groups: Sequence[RewardGroup]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return advantage [T, N], returns [T, N] or [T, N, G], and shares of the advantage by name.

    A = Σ_k w_k·Â_k, where Â_k is the estimate of group k, standardised if it is configured.
    """
    columns = [t] if len(groups) == 1 else split(t, len(groups))
    estimates = [
        advantages.estimate(
            group.options.adv_type,
            part,
            gamma=group.options.gamma,
            gae_lambda=group.options.gae_lambda,
            gae_lambda_value=group.options.gae_lambda_value,
            length_adaptive_alpha=group.options.length_adaptive_alpha,
            group_size=group.options.group_size,
            bootstrap_type=group.options.bootstrap_type,
        )
        for part, group in zip(columns, groups, strict=True)
    ]
    parts, returns = zip(*estimates, strict=True)
    total, shares = advantages.weighted_sum(
        parts,
        t.mask,
        weights=[group.weight for group in groups],
        normalized=[group.normalize for group in groups],
    )
    if len(groups) == 1:
        return total, returns[0], {}
    names = (group.name for group in groups)
    return total, torch.stack(returns, -1), dict(zip(names, shares, strict=True))
