"""Terms of the PPO loss per element, and their aggregation to one number.

Shapes: [..] is [B] (a minibatch of steps) or [T, B] (whole columns, time first). A log-probability
may have trailing dimensions, [.., C, A] with C actions of a chunk and A action dimensions. Masks,
advantages and weights [..] broadcast over them. Elementwise losses are 0 outside the mask;
``aggregate`` reduces them to the loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core.running_stats import expand, masked_sum

# exp(20) is about 5e8; larger ratios would dominate every sum and finally overflow.
LOG_RATIO_LIMIT = 20.0


# ------------------------------------------------------------------------------------------- levels
def reduce_log_prob(log_prob: Tensor, level: str, *, batch_dims: int) -> Tensor:
    """Sum log-probabilities or entropies [.., C, A] to a level.

    Actions and dimensions are independent, so that log-probabilities add up, and so do entropies.

    Args:
        log_prob: [.., C, A], [.., C] (already action_level), or [..], which is returned unchanged
            at every level.
        level: token_level [.., C, A], action_level [.., C] or chunk_level [..].
        batch_dims: Number of leading dimensions [..]: 1 for [B], 2 for [T, B].

    Raises:
        ConfigError: The level is finer than the tensor.
    """
    trailing = log_prob.ndim - batch_dims  # 0: [..], 1: [.., C], 2: [.., C, A]
    if trailing == 0 or (level, trailing) in (("token_level", 2), ("action_level", 1)):
        return log_prob
    if level == "token_level":
        raise ConfigError(
            f"{level}: cannot be computed from log-probabilities of shape {tuple(log_prob.shape)}"
            f" with {batch_dims} batch dimensions; use a coarser logprob_type or a policy that"
            " gives [.., C, A]"
        )
    return log_prob.sum(-1) if level == "action_level" else log_prob.flatten(batch_dims).sum(-1)


# ------------------------------------------------------------------------------------------- policy
def probability_ratio(
    log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, *, level: str = "token", batch_dims: int
) -> tuple[Tensor, Tensor]:
    """Return the ratio of the loss, and the logarithm of that of each element, 0 where masked.

    token            r = exp(lp − lp_old), clamped to exp(±20) so that it does not overflow
    chunk, sequence  s = exp( 1/|y| · Σ_{t in y} (lp_t − lp_old_t) ), the geometric mean over y
                     log s_t = sg[log s] + (lp_t − sg[lp_t])

    Source: Schulman et al. 2017, eq. 6; Zheng et al. 2025, GSPO, eq. 7 and 14: the gradient of s_t
    is s·∇lp_t. Where all elements of y have one advantage, the mean of their losses has the
    gradient of the loss of s.

    Args:
        log_prob: [.., *trailing], lp, with gradient.
        old_log_prob: [.., *trailing], lp_old, of the behaviour policy.
        mask: bool [..] or finer.
        level: "token": each element has its own ratio. "chunk": y is the decision of one row.
            "sequence": y is the column, [..] = [T, B].
        batch_dims: Number of leading dimensions [..]: 1 for [B], 2 for [T, B].

    Returns:
        Ratio and log-ratio, [.., *trailing].
    """
    keep = expand(mask, log_prob)
    # Mask before exp: a NaN or inf of a masked element would otherwise reach the gradient.
    difference = log_prob - old_log_prob
    log_ratio = torch.where(keep, difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    if level == "token":
        return log_ratio.exp(), log_ratio
    # The value is that of the mean over y, the gradient that of each element.
    difference = torch.where(keep, difference, 0.0)
    fixed = mean = difference.detach()
    # A chunk is averaged over trailing dimensions, a sequence over time as well.
    dims = tuple(range(batch_dims, difference.ndim))
    if level == "sequence":
        dims = (0, *dims)
    if dims:
        count = keep.sum(dims, keepdim=True).clamp(min=1)
        mean = (fixed.sum(dims, keepdim=True) / count).expand_as(fixed)
    # difference − fixed is 0 and adds the gradient of each element.
    mean = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (difference - fixed)
    return mean.exp(), log_ratio


def clipped_surrogate(
    ratio: Tensor,
    log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
    kind: str = "clip",
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each element: PPO's clipped surrogate, or that of CISPO.

    kind "clip":   l = max(−A·r, −A·clip(r, 1 − low, 1 + high))
                   l = min(l, −A·dual) where A < 0, if the dual clip is set
    kind "cispo":  l = −A·sg[clip(r, 1 − low, 1 + high)]·lp, without dual clip

    Source: Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5; low < high: Yu et al.
    2025, DAPO, section 3.1 (clip-higher); CISPO: MiniMax 2025, MiniMax-M1, eq. 4 and 5.

    Args:
        ratio: [.., *trailing], r of ``probability_ratio``, with gradient.
        log_prob: [.., *trailing], lp, with gradient; read by "cispo".
        advantage: [..] or finer, A; broadcast over trailing dimensions.
        mask: bool, shaped as ``advantage``.
        low: Distance of the lower clip range from 1.
        high: Distance of the upper clip range from 1.
        dual: Dual clip, above 1; None: none.
        kind: "clip" or "cispo".
        weight: Off-policy correction, shaped as ``advantage`` or finer. Multiplies the loss,
            without gradient.

    Returns:
        The loss [.., *trailing], 0 where masked, and two bool tensors of its shape: elements that
        were clipped (without gradient if kind is "clip"), and elements that the dual clip bounds
        (without gradient).
    """
    keep = expand(mask, ratio)
    advantage = torch.where(keep, expand(advantage, ratio), 0.0)
    bounded = ratio.clamp(1 - low, 1 + high)
    dual_clipped = torch.zeros_like(keep)
    # CISPO differentiates lp and not the ratio, so that clipped elements keep a gradient.
    if kind == "cispo":
        loss = -advantage * bounded.detach() * torch.where(keep, log_prob, 0.0)
        clipped = keep & (bounded != ratio)
    else:
        # The larger loss counts: clipping only removes the incentive to move the ratio further.
        plain, limited = -advantage * ratio, -advantage * bounded
        loss = torch.maximum(plain, limited)
        clipped = limited > plain
        # Where A < 0 the loss grows with the ratio without limit; the dual clip bounds it.
        if dual is not None:
            bound = -advantage * dual
            dual_clipped = (advantage < 0) & (loss > bound)
            loss = torch.where(dual_clipped, bound, loss)
    if weight is not None:
        loss = loss * torch.where(keep, expand(weight.detach(), ratio), 0.0)
    return loss, clipped, dual_clipped


@torch.no_grad()
def ratio_statistics(ratio: Tensor, log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return statistics of the ratio; sums over unmasked elements, except the maximum.

    approx_kl: k3 estimate of KL(old || new), (r − 1) − log r, nats. r is that of the element for
        every ``ratio_level``.
    ratio_max: largest ratio, 0 without unmasked elements.
    count: unmasked elements.
    """
    keep = expand(mask, ratio)
    ratios = torch.where(keep, ratio, 0.0)
    return {
        # expm1 keeps the digits of ratios close to 1.
        "approx_kl": torch.where(keep, torch.expm1(log_ratio) - log_ratio, 0.0).sum(),
        "ratio_max": ratios.max() if ratio.numel() else ratio.new_zeros(()),
        "count": keep.sum().float(),
    }


def off_policy_weight(
    trainer_old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    *,
    kind: str,
    cap: float = 2.0,
) -> Tensor:
    """Truncated importance weights for rollouts whose policy differs from the trainer's.

    token:    w = min(exp(lp_trainer − lp_rollout), cap) per element
    sequence: w = min(exp(Σ_column (lp_trainer − lp_rollout)), cap), equal in a whole column

    Source: Ionides 2008. Differences and sums are clamped to ±20.

    Args:
        trainer_old_log_prob: [.., *trailing], computed by the trainer before the update.
        rollout_log_prob: [.., *trailing], reported by the rollout engine. For sequence weights the
            leading dimensions are [T, B].
        mask: bool [..].
        kind: "token" or "sequence".
        cap: Largest weight.

    Returns:
        Weights [.., *trailing] without gradient, 1 where masked.
    """
    keep = expand(mask, rollout_log_prob)
    difference = torch.where(keep, (trainer_old_log_prob - rollout_log_prob).detach(), 0.0)
    # The probability of a column is the product over its tokens, so log-ratios add up.
    if kind == "sequence":
        column = (
            difference.flatten(2).sum(-1).sum(0) if difference.ndim > 2 else difference.sum(0)
        )  # [B]
        difference = torch.where(keep, expand(column.expand_as(mask), rollout_log_prob), 0.0)
    # Truncation bounds the variance of the weights, at the cost of a bias.
    weight = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return torch.where(keep, weight, 1.0)


# -------------------------------------------------------------------------------------------- value
def huber(error: Tensor, delta: float | None) -> Tensor:
    """Return the Huber loss: ½e² where |e| ≤ δ, else δ(|e| − ½δ) (Huber 1964).

    ``delta`` None gives ½e² everywhere. Any shape.
    """
    if delta is None:
        return 0.5 * error.square()
    return torch.nn.functional.huber_loss(
        error, torch.zeros_like(error), reduction="none", delta=delta
    )


def value_loss(
    value: Tensor,
    old_value: Tensor,
    returns: Tensor,
    *,
    value_clip: float | None,
    huber_delta: float | None,
) -> tuple[Tensor, Tensor]:
    """Clipped Huber value loss per element.

    V_c = V_old + clamp(V − V_old, ±c)
    L = max(h(R − V), h(R − V_c)), or h(R − V) without clipping

    Source: the code of Schulman et al. 2017, described by Engstrom et al. 2020, section 2. h is
    ``huber``.

    Args:
        value: [..], V, with gradient.
        old_value: [..], V_old, at the time of acting.
        returns: [..], R.
        value_clip: c, None: no clipping.
        huber_delta: δ of ``huber``.

    Returns:
        The loss [..] and bool flags [..], |V − V_old| > c (all False without clipping).
    """
    loss = huber(returns - value, huber_delta)
    if value_clip is None:
        return loss, torch.zeros_like(value, dtype=torch.bool)
    change = value - old_value
    # Where V has approached R by more than c, the clipped error is larger and has no gradient.
    near = old_value + change.clamp(-value_clip, value_clip)
    return (
        torch.maximum(loss, huber(returns - near, huber_delta)),
        change.detach().abs() > value_clip,
    )


@torch.no_grad()
def value_difference(value: Tensor, old_value: Tensor, mask: Tensor) -> Tensor:
    """Return Σ (V − V_old)² / (1 + V_old²) over unmasked entries; all arguments are [..]."""
    return masked_sum((value - old_value).square() / (1 + old_value.square()), mask)


# -------------------------------------------------------------------------------------- aggregation
def column_shares(mask: Tensor) -> Tensor:
    """Return T/n for each entry of a rollout, with n unmasked entries in its column.

    With these factors each column has the same weight, whatever its length.

    Args:
        mask: bool [T, N], or [T, N, C] with an entry for each action, of which a column has T·C.

    Returns:
        float32, shaped as ``mask``.
    """
    columns = mask.transpose(0, 1).flatten(1)  # [N, T·C]
    share = columns.shape[1] / columns.sum(1).clamp(min=1).float()
    return share.view(-1, *[1] * (mask.ndim - 2)).expand_as(mask)


def minibatch_counts(
    mask: Tensor, unit: str, aggregation: str = "token-mean"
) -> tuple[Tensor, Tensor | None]:
    """Return the divisors of the losses of a complete minibatch, float64 scalars.

    The sum of the micro-batches' losses is then the loss of the minibatch, independent of the split
    into micro-batches and ranks; over ranks the counts add up.

    Args:
        mask: bool [..], the complete minibatch.
        unit: "step", or "column" where the mask is [T, B].
        aggregation: As in ``aggregate``.

    Returns:
        Unmasked rows (trajectory-mean: all rows); columns with an unmasked row, None for steps.
    """
    keep = mask.bool() if aggregation != "trajectory-mean" else torch.ones_like(mask).bool()
    rows = keep.sum().double()
    return rows, keep.any(0).sum().double() if unit == "column" else None


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token-mean",
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    length: float = 1.0,
    share: Tensor | None = None,
) -> Tensor:
    """Reduce elementwise losses to one number.

    With t over unmasked rows (and trailing elements) of column b, and B' columns that are not
    empty:
      token-mean               Σ_b Σ_t x / Σ_b Σ_t 1
      trajectory-mean          Σ_b Σ_t share·x / number of all rows, masked or not
      seq-mean-token-sum       Σ_b (Σ_t x) / B'
      seq-mean-token-mean      Σ_b (Σ_t x / Σ_t 1) / B'
      seq-mean-token-sum-norm  Σ_b (Σ_t x / length) / B'      (as in verl 0.9)

    Args:
        x: [.., *trailing].
        mask: bool [..], [T, B] for seq-mean-*.
        aggregation: One of the names above.
        rows: Replaces Σ_b Σ_t 1 (counted in rows; trailing elements are multiplied in here) by that
            of the complete minibatch, see ``minibatch_counts``. None: count in this tensor.
        columns: As ``rows``, replaces B'.
        length: Constant length of seq-mean-token-sum-norm, response_length.
        share: [..], ``column_shares`` of the rollout for trajectory-mean. In the complete rollout
            the result is the mean over columns of each one's mean, in which empty columns are 0.

    Returns:
        Scalar of x's dtype. Without unmasked elements 0, with zero gradient.
    """
    # Every trailing element counts, so the numbers of rows are multiplied by this one.
    trailing = math.prod(x.shape[mask.ndim :])
    if aggregation in ("token-mean", "trajectory-mean"):
        if share is not None:
            x = x * expand(share, x)
        rows = minibatch_counts(mask, "step", aggregation)[0] if rows is None else rows
        return masked_sum(x, mask) / (rows.to(x.dtype).clamp(min=1) * trailing)
    # The other aggregations reduce each column first, then average over columns.
    columns = mask.bool().any(0).sum() if columns is None else columns
    kept = torch.where(expand(mask, x), x, 0.0).reshape(*mask.shape, trailing)
    column = kept.sum((0, 2))  # [B]
    if aggregation == "seq-mean-token-mean":
        column = column / (mask.bool().sum(0).clamp(min=1) * trailing)
    elif aggregation == "seq-mean-token-sum-norm":
        column = column / length
    return column.sum() / columns.to(x.dtype).clamp(min=1)
