"""Rewards before advantages are computed: clipping, normalisation, whitening, KL penalty.

The order is: clip (before_norm), normalise, clip (after_norm), whiten, subtract the KL penalty,
clip (after_norm). Without options none of them changes a reward. T steps (or tokens), N columns;
rewards are float32 [T, N].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied_ppo.core.running_stats import RunningMoments, read_numbers
from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo import advantages, losses
from embodied_ppo.ppo.advantages import EPS


# -------------------------------------------------------------------- as configured, called by PPO
def shape_rewards(
    t: Trajectory, c: AlgorithmConfig, returns: ReturnScaler, scores_sequences: bool
) -> Tensor:
    """Return the rewards [T, N] before the KL penalty.

    Args:
        t: Experience; each action of a chunk that has a value is a row.
        c: Options.
        returns: Is updated where reward_norm=running reads its deviation.
        scores_sequences: Whether a column has one score. It is normalised as one number, whatever
            the sequence's length, and is the reward of the last token, where the episode ends.
    """
    reward, done, mask = t.reward, t.terminated | t.truncated, t.mask
    if scores_sequences:
        # One row of scores, so that a long response does not count more than a short one.
        mask = t.mask.any(0, keepdim=True)  # [1, N]
        reward = torch.where(t.mask, t.reward, 0.0).sum(0, keepdim=True)
    if c.reward_clip is not None and c.reward_clip_order == "before_norm":
        reward = clip_rewards(reward, mask, c.reward_clip)
    # Update first: the deviation then includes the returns of this rollout.
    if c.reward_norm == "running":
        steps = 1 if scores_sequences or t.steps is None else t.steps
        returns.update(reward, mask if scores_sequences else done, mask, c.gamma, steps)
        reward = torch.where(mask, reward.double() / returns.std, reward.double()).float()
    elif c.reward_norm is not None:
        reward = normalize_rewards(
            reward,
            mask,
            by=c.reward_norm_by,
            group_size=c.group_size if c.reward_norm == "group" else None,
        )
    if c.reward_clip is not None and c.reward_clip_order == "after_norm":
        reward = clip_rewards(reward, mask, c.reward_clip)
    if scores_sequences:
        reward = torch.where(done & t.mask, reward, 0.0)
    # Whiten at the end, over the rewards of all tokens.
    return whiten_rewards(reward, t.mask) if c.whiten_rewards else reward


@torch.no_grad()
def positive_columns(t: Trajectory) -> Tensor:
    """Return the unmasked entries of columns whose unshaped rewards, of all reward groups together,
    add up to more than 0, bool [T, N].
    """
    total = t.reward.sum(-1) if t.reward.ndim > t.mask.ndim else t.reward
    return t.mask & (torch.where(t.mask, total, 0.0).sum(0) > 0)


def subtract_kl_penalty(
    reward: Tensor, distance: Tensor, mask: Tensor, coef: float
) -> tuple[Tensor, Metrics]:
    """Return rewards minus the penalty, r_t − β·kl_t in unmasked rows, and the KL as a metric.

    Source: Ziegler et al. 2019, eq. 2. All tensors are [T, N]; ``coef`` is β.
    """
    # ``adapted_kl_coef`` reads the mean over sequences of the mean over tokens.
    _, columns = losses.minibatch_counts(mask, "column")
    assert columns is not None
    count, per_column = read_numbers(
        columns, losses.aggregate(distance, mask, aggregation="seq-mean-token-mean")
    )
    metrics: Metrics = {"kl/to_reference": Mean(per_column * count, count), "kl/coef": coef}
    return torch.where(mask, reward - coef * distance, reward), metrics


def clip_rewards(reward: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Clamp unmasked rewards [T, N] to ±limit."""
    return torch.where(mask, reward.clamp(-limit, limit), reward)


# ----------------------------------------------------------------------------------------- formulas
@torch.no_grad()
def normalize_rewards(
    reward: Tensor, mask: Tensor, *, by: str = "mean_std", group_size: int | None = None
) -> Tensor:
    """Standardise rewards over all unmasked entries, or over those of each group of columns.

    r ← (r − μ)·rsqrt(σ² + 1e-8); by "mean" r − μ, by "std" r·rsqrt(σ² + 1e-8)

    σ is unbiased. Sets of fewer than 2 entries are not normalised, and a deviation below 1e-6 is
    not divided by.

    Args:
        reward: [T, N].
        mask: bool [T, N].
        by: Statistics that are used, see ``algorithm.reward_norm_by``.
        group_size: Columns of a group; None: all columns are one set.

    Returns:
        float32 [T, N]; masked rows are unchanged.
    """
    T, N = reward.shape
    sets = (T, -1, N if group_size is None else group_size)
    x, keep = reward.double().reshape(sets), mask.bool().reshape(sets)  # [T, G, n]
    count = keep.sum((0, 2), keepdim=True).double()  # [1, G, 1]
    mean = torch.where(keep, x, 0.0).sum((0, 2), keepdim=True) / count.clamp(min=1)
    square = torch.where(keep, x - mean, 0.0).square().sum((0, 2), keepdim=True)
    var = square / (count - 1).clamp(min=1)
    # Equal rewards differ by rounding only, which a division would amplify.
    factor = torch.where(var > 1e-12, torch.rsqrt(var + EPS), 1.0)
    if by == "mean":
        y = x - mean
    elif by == "std":
        y = x * factor
    else:
        y = (x - mean) * factor
    return torch.where(keep & (count >= 2), y, x).reshape(T, N).float()


@torch.no_grad()
def whiten_rewards(reward: Tensor, mask: Tensor) -> Tensor:
    """Whiten rewards: (r − μ)·rsqrt(σ² + 1e-8) + μ over unmasked entries, unbiased σ².

    Args:
        reward: float32 [T, N].
        mask: bool [T, N].

    Returns:
        float32 [T, N]; masked rows, and fewer than 2 entries, are unchanged.
    """
    white, moments = advantages.normalize(reward, mask)
    # Whitening changes the deviation and keeps the mean.
    white = white + moments.mean
    return torch.where(mask.bool() & (moments.count >= 2), white, reward.double()).float()


class ReturnScaler(nn.Module):
    """Running deviation of the discounted return, by which rewards are divided.

    G_t = γ^k·(1 − done_{t−1})·G_{t−1} + r_t

    Source: Engstrom et al. 2020, section 2. G of each environment continues across rollouts; the
    moments of all past G_t give the scale. No mean is subtracted.

    State, in state_dict: ``moments`` (float64), and ``running`` float64 [N], G after the last row
    or 0 where that row ended an episode.
    """

    running: Tensor

    def __init__(self, num_envs: int, rollouts: int | None = None):
        """Start without returns.

        Args:
            num_envs: N.
            rollouts: R, so that each rollout has the weight 1/R and earlier ones fade, for rewards
                whose scale changes by orders of magnitude; None: all returns count equally.
        """
        super().__init__()
        self.rollouts = rollouts
        self.moments = RunningMoments(())
        self.register_buffer("running", torch.zeros(num_envs, dtype=torch.float64))

    @torch.no_grad()
    def update(
        self, reward: Tensor, done: Tensor, mask: Tensor, gamma: float, steps: int | Tensor = 1
    ) -> None:
        """Advance G over a rollout and merge its values into the moments.

        Args:
            reward: [T, N].
            done: bool [T, N].
            mask: bool [T, N]; G ignores masked rows.
            gamma: Discount factor.
            steps: As in ``advantages.gae``.
        """
        keep = mask.bool()
        reward = torch.where(keep, reward.double(), 0.0)
        discount = gamma**steps
        alive = (~done.bool()).double()
        # H_t, the value of G after row t: G_t·(1 − done_t), or H_{t−1} in a masked row. It obeys
        # the recursion of ``scan`` with time reversed; row 0 is the H of the previous rollout.
        carry = torch.where(keep, alive * discount, 1.0)
        after = torch.cat([self.running.double().unsqueeze(0), reward * alive])  # [T+1, N]
        carry = torch.cat([torch.ones_like(carry[:1]), carry])  # [T+1, N]
        after = advantages.scan(carry.flip(0), after.flip(0)).flip(0)
        returns = reward + discount * after[:-1]  # [T, N]
        self.running.copy_(after[-1])
        if self.rollouts is not None:
            self.moments.count.clamp_(max=(self.rollouts - 1) * keep.sum())
        self.moments.update(returns.flatten(), keep.flatten())

    @property
    def std(self) -> Tensor:
        """sqrt(var + 1e-8), float64 scalar; 1 before the first update."""
        return torch.where(self.moments.count > 0, torch.sqrt(self.moments.var + EPS), 1.0)
