"""The terms of the PPO loss, element by element, and how elements become one number.

Shapes: [..] is [B] (a minibatch of steps) or [T, B] (whole columns, time first); a log-probability may be finer,
[.., C, A] with C actions of a chunk and A action dimensions. Masks, advantages and weights [..] broadcast over such
trailing dimensions. Elementwise losses are 0 outside the mask; ``aggregate`` turns them into the loss.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.core.running_stats import expand_mask, masked_sum
from embodied_ppo.core.types import ConfigError, TrainingError

Level: TypeAlias = Literal["token_level", "action_level", "chunk_level"]
Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LEVELS: tuple[str, ...] = ("token_level", "action_level", "chunk_level")  # fine to coarse
AGGREGATIONS: tuple[str, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOG_RATIO_LIMIT = 20.0


# ------------------------------------------------------------------------------------------------------------- levels
def check_levels(*, logprob_type: str, entropy_type: str, reward_type: str) -> None:
    """Refuse granularities that cannot be multiplied.

    An advantage and its mask are as fine as the reward, [..] (chunk_level) or [.., C] (action_level). They broadcast
    onto equal or finer log-probabilities and entropies, never onto coarser ones; token rewards do not exist.
    Raises ConfigError.
    """
    for name, level in (("logprob_type", logprob_type), ("entropy_type", entropy_type), ("reward_type", reward_type)):
        _check_level(level, f"algorithm.{name}")
    if reward_type == "token_level":
        raise ConfigError(
            "algorithm.reward_type = token_level: a reward belongs to an action or a chunk, not to an action "
            "dimension; use action_level or chunk_level"
        )
    for name, level in (("logprob_type", logprob_type), ("entropy_type", entropy_type)):
        if LEVELS.index(level) > LEVELS.index(reward_type):
            raise ConfigError(
                f"algorithm.{name} = {level}: must be as fine as or finer than algorithm.reward_type = {reward_type}; "
                f"use {name}={reward_type} or reward_type={level}"
            )


def reduce_log_prob(log_prob: Tensor, level: str, *, batch_dims: int) -> Tensor:
    """Sum log-probabilities (or entropies) [.., C, A] to a level: token [.., C, A], action [.., C], chunk [..].

    ``batch_dims`` is the number of leading dimensions [..]: 1 for [B], 2 for [T, B]. A tensor that is [..] already
    passes through at every level; [.., C] is taken as action_level. Independent parts: log-probabilities add up, and so
    do entropies.
    Raises ConfigError for a level finer than the tensor.
    """
    _check_level(level, "level")
    fine = log_prob.ndim - batch_dims  # 0: [..], 1: [.., C], 2: [.., C, A]
    if fine == 0 or (level, fine) in (("token_level", 2), ("action_level", 1)):
        return log_prob
    if fine not in (1, 2) or level == "token_level":
        raise ConfigError(
            f"{level}: cannot be had from log-probabilities of shape {tuple(log_prob.shape)} with {batch_dims} batch "
            f"dimensions; use a coarser logprob_type or a policy that gives [.., C, A]"
        )
    return log_prob.sum(-1) if level == "action_level" else log_prob.flatten(batch_dims).sum(-1)


def _check_level(level: str, path: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"{path} = {level}: must be one of {', '.join(LEVELS)}")


# ------------------------------------------------------------------------------------------------------------- policy
def log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """lp − lp_old clamped to ±20, so that exp never overflows; any equal shapes."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, per element (Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5).

    r = exp(lp − lp_old) ; l = max(−A·r, −A·clip(r, 1−low, 1+high)) ; where A < 0 and c is set l = min(l, −A·c)

    log_prob, old_log_prob [.., *trailing]; advantage, mask, weight [..] or finer, they broadcast over trailing
    dimensions. ``weight`` (off-policy correction) multiplies the loss and gets no gradient.
    Returns the loss [.., *trailing], 0 where masked, and statistics without gradient, sums over unmasked elements that
    add up over micro-batches (divide by ``count``):
      clip_fraction       elements whose clipped term is the larger one: no gradient
      dual_clip_fraction  elements at the dual bound: no gradient
      approx_kl           k3 of old against new, (r − 1) − log r, nats
      ratio_max           the largest r (a maximum, not a sum; 0 with nothing unmasked)
      count               unmasked elements
    Raises ConfigError for a clip_ratio_c that is not above 1.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ConfigError(
            f"algorithm.clip_ratio_c = {clip_ratio_c:g}: must be > 1 (3.0 is usual), or null for no dual clip"
        )
    keep = expand_mask(mask, log_prob)
    advantage = torch.where(keep, _expand(advantage, log_prob), 0.0)
    log_r = torch.where(keep, log_ratio(log_prob, old_log_prob), 0.0)  # before exp: nothing masked reaches a gradient
    ratio = log_r.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    loss = torch.maximum(plain, clipped)
    dual = torch.zeros_like(keep)
    if clip_ratio_c is not None:
        bound = -advantage * clip_ratio_c
        dual = (advantage < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    if weight is not None:
        loss = loss * torch.where(keep, _expand(weight.detach(), log_prob), 0.0)
    with torch.no_grad():
        stats = {
            "clip_fraction": (clipped > plain).sum().float(),
            "dual_clip_fraction": dual.sum().float(),
            "approx_kl": torch.where(keep, torch.expm1(log_r) - log_r, 0.0).sum(),
            "ratio_max": torch.where(keep, ratio, 0.0).max() if ratio.numel() else ratio.new_zeros(()),
            "count": keep.sum().float(),
        }
    return loss, stats


def _expand(x: Tensor, like: Tensor) -> Tensor:
    """[..] seen as like's shape [.., *trailing]."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)).expand_as(like)


def off_policy_weight(
    trainer_old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, *, kind: str, cap: float = 2.0
) -> Tensor:
    """Truncated importance weights for a rollout engine that is not quite the trainer's policy (Ionides 2008).

    token:    w = min(exp(lp_trainer − lp_rollout), cap) per element
    sequence: w = min(exp(Σ_column (lp_trainer − lp_rollout)), cap), the same for the whole column

    Log-probabilities [.., *trailing] ([T, B, *trailing] for sequence), mask [..]; returns the weights in that shape,
    without gradient, 1 where masked. Differences and sums are clamped to ±20.
    Raises ConfigError for another kind, a cap that is not positive, or sequence weights without columns.
    """
    if cap <= 0:
        raise ConfigError(f"algorithm.off_policy_cap = {cap:g}: must be > 0 (2.0 is usual)")
    keep = expand_mask(mask, rollout_log_prob)
    difference = torch.where(keep, (trainer_old_log_prob - rollout_log_prob).detach(), 0.0)
    if kind == "sequence":
        _check_columns(mask, "algorithm.off_policy_correction = sequence")
        column = difference.flatten(2).sum(-1).sum(0) if difference.ndim > 2 else difference.sum(0)  # [B]
        difference = torch.where(keep, _expand(column.expand_as(mask), rollout_log_prob), 0.0)
    elif kind != "token":
        raise ConfigError(f"algorithm.off_policy_correction = {kind}: must be token, sequence or null")
    weight = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return torch.where(keep, weight, 1.0)


# -------------------------------------------------------------------------------------------------------------- value
def huber(error: Tensor, delta: float | None) -> Tensor:
    """½e² where |e| ≤ δ, else δ(|e| − ½δ) (Huber 1964); δ None: ½e² everywhere. Any shape."""
    if delta is None:
        return 0.5 * error.square()
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    returns: Tensor,
    *,
    value_clip: float | None,
    huber_delta: float | None,
) -> tuple[Tensor, Tensor]:
    """Clipped Huber value loss, per element; all [..].

    V_c = V_old + clamp(V − V_old, ±c) ; L = max(h(R − V), h(R − V_c)) ; value_clip None: L = h(R − V)

    (The clipping of Schulman et al.'s code, see Engstrom et al. 2020, section 2; h is ``huber``.)
    Returns the loss [..] and bool flags [..], |V − V_old| > c (all False without clipping).
    """
    loss = huber(returns - value, huber_delta)
    if value_clip is None:
        return loss, torch.zeros_like(value, dtype=torch.bool)
    change = value - old_value
    near = old_value + change.clamp(-value_clip, value_clip)
    return torch.maximum(loss, huber(returns - near, huber_delta)), change.detach().abs() > value_clip


# -------------------------------------------------------------------------------------------------------- aggregation
def denominator(mask: Tensor, *, how: str = "token-mean") -> Tensor:
    """What ``aggregate`` divides by, of a WHOLE minibatch: rows (token-mean) or non-empty columns (seq-mean-*).

    mask [..] ([T, B] for seq-mean-*); float64 scalar. Add it up over ranks, then hand it to every micro-batch: the
    sum of their losses is then the minibatch's loss, whatever the cut (seq-mean-* micro-batches are whole columns).
    """
    _check_how(how)
    if how == "token-mean":
        return mask.bool().sum().double()
    _check_columns(mask, f"algorithm.loss_agg_func = {how}")
    return mask.bool().any(0).sum().double()


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    how: str = "token-mean",
    denominator: Tensor | float | None = None,
    length: float | None = None,
) -> Tensor:
    """Elementwise losses [.., *trailing] with mask [..] to one number (scalar, x's dtype).

    With t over unmasked rows (and trailing elements) of column b, B' non-empty columns:
      token-mean               Σ_b Σ_t x / Σ_b Σ_t 1
      seq-mean-token-sum       Σ_b (Σ_t x) / B'
      seq-mean-token-mean      Σ_b (Σ_t x / Σ_t 1) / B'
      seq-mean-token-sum-norm  Σ_b (Σ_t x / length) / B'      (verl 0.9's meaning; ``length`` = response_length)

    ``denominator`` replaces Σ_b Σ_t 1 (in rows: trailing elements are multiplied in here) or B' by those of the whole
    minibatch, see the function of that name; None: this tensor's own. Nothing unmasked gives 0 with zero gradient.
    Raises ConfigError for another ``how``, seq-mean-* without columns, or a norm without length.
    """
    _check_how(how)
    if how != "token-mean":
        _check_columns(mask, f"algorithm.loss_agg_func = {how}")
    if denominator is None:
        denominator = _own_denominator(mask, how=how)
    trailing = math.prod(x.shape[mask.ndim :])
    if how == "token-mean":
        return masked_sum(x, mask) / (_at_least_one(denominator, x) * trailing)
    rows = torch.where(expand_mask(mask, x), x, 0.0).reshape(*mask.shape, trailing)
    column = rows.sum((0, 2))  # [B]
    if how == "seq-mean-token-mean":
        column = column / (mask.bool().sum(0).clamp(min=1) * trailing)
    elif how == "seq-mean-token-sum-norm":
        if length is None or length <= 0:
            raise ConfigError(
                f"algorithm.loss_agg_func = seq-mean-token-sum-norm: needs a constant length > 0, got {length}; "
                "set algorithm.response_length"
            )
        column = column / length
    return column.sum() / _at_least_one(denominator, x)


_own_denominator = denominator  # ``aggregate`` has an argument of that name


def _at_least_one(count: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(count, dtype=like.dtype, device=like.device).clamp(min=1)


def _check_how(how: str) -> None:
    if how not in AGGREGATIONS:
        raise ConfigError(f"algorithm.loss_agg_func = {how}: must be one of {', '.join(AGGREGATIONS)}")


def _check_columns(mask: Tensor, what: str) -> None:
    if mask.ndim != 2:
        raise ConfigError(
            f"{what}: needs whole columns [T, B], got a mask {tuple(mask.shape)}; set minibatch_unit=column"
        )


# ------------------------------------------------------------------------------------------------------------ entropy
class EntropyController:
    """The weight c of the entropy bonus, constant or adapted to hold a target entropy.

    c ← clip(c · exp(rate · clip(target − H, ±1)), 1e-5, 1) after each update, H in nats as aggregated for the loss:
    too little entropy raises c. (A bounded, multiplicative form of the dual ascent of Haarnoja et al. 2018, eq. 18; it
    works for negative differential entropies, too.) A start below 1e-5 is raised to it. ``target`` None: c stays.
    """

    SMALLEST, LARGEST = 1e-5, 1.0

    def __init__(self, coef: float, target: float | None = None, rate: float = 0.1):
        self.coef = float(coef) if target is None else min(max(float(coef), self.SMALLEST), self.LARGEST)
        self.target = target
        self.rate = rate

    def update(self, entropy: float) -> None:
        """Adapt to the update's mean entropy (nats). Raises TrainingError if it is not finite."""
        if self.target is None:
            return
        if not math.isfinite(entropy):
            raise TrainingError(
                f"entropy = {entropy}: the entropy controller needs a finite one; lower lr or max_grad_norm"
            )
        error = min(max(self.target - entropy, -1.0), 1.0)
        self.coef = min(max(self.coef * math.exp(self.rate * error), self.SMALLEST), self.LARGEST)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])
