"""Terms of the PPO loss per element, and their aggregation to one number.

Shapes: [..] is [B] (a minibatch of steps) or [T, B] (whole columns, time first). A log-probability
may have trailing dimensions, [.., C, A] with C actions of a chunk and A action dimensions. Masks,
advantages and weights [..] broadcast over them. Elementwise losses are 0 outside the mask;
``aggregate`` reduces them to the loss.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.core.running_stats import expand_mask, masked_sum
from embodied_ppo.core.types import ConfigError, TrainingError

Level: TypeAlias = Literal["token_level", "action_level", "chunk_level"]
Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

LEVELS: tuple[str, ...] = ("token_level", "action_level", "chunk_level")  # fine to coarse
AGGREGATIONS: tuple[str, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
RATIOS: tuple[str, ...] = ("token", "chunk", "sequence")  # values of ``ratio_level``
LOG_RATIO_LIMIT = 20.0


# ------------------------------------------------------------------------------------------- levels
def check_levels(*, logprob_type: str, entropy_type: str, reward_type: str) -> None:
    """Refuse combinations of granularities that cannot be multiplied.

    An advantage and its mask have the granularity of the reward, [..] (chunk_level) or [.., C]
    (action_level). They broadcast to log-probabilities and entropies of equal or finer granularity,
    never to coarser ones. Rewards of single tokens do not exist.

    Raises:
        ConfigError: The combination is not possible.
    """
    for name, level in (
        ("logprob_type", logprob_type),
        ("entropy_type", entropy_type),
        ("reward_type", reward_type),
    ):
        _check_level(level, f"algorithm.{name}")
    if reward_type == "token_level":
        raise ConfigError(
            "algorithm.reward_type = token_level: a reward belongs to an action or a chunk, not to"
            " an action dimension; use action_level or chunk_level"
        )
    for name, level in (("logprob_type", logprob_type), ("entropy_type", entropy_type)):
        if LEVELS.index(level) > LEVELS.index(reward_type):
            raise ConfigError(
                f"algorithm.{name} = {level}: must be as fine as or finer than"
                f" algorithm.reward_type = {reward_type}; use {name}={reward_type} or"
                f" reward_type={level}"
            )


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
    _check_level(level, "level")
    trailing = log_prob.ndim - batch_dims  # 0: [..], 1: [.., C], 2: [.., C, A]
    if trailing == 0 or (level, trailing) in (("token_level", 2), ("action_level", 1)):
        return log_prob
    if trailing not in (1, 2) or level == "token_level":
        raise ConfigError(
            f"{level}: cannot be computed from log-probabilities of shape {tuple(log_prob.shape)}"
            f" with {batch_dims} batch dimensions; use a coarser logprob_type or a policy that"
            " gives [.., C, A]"
        )
    return log_prob.sum(-1) if level == "action_level" else log_prob.flatten(batch_dims).sum(-1)


def _check_level(level: str, path: str) -> None:
    if level not in LEVELS:
        raise ConfigError(f"{path} = {level}: must be one of {', '.join(LEVELS)}")


# ------------------------------------------------------------------------------------------- policy
def log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return lp − lp_old clamped to ±20, so that exp does not overflow; any equal shapes."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mean_log_ratio(difference: Tensor, keep: Tensor, level: str, *, batch_dims: int) -> Tensor:
    """Return log s, whose value is the mean of lp − lp_old over a chunk or a sequence.

    s = exp( 1/|y| · Σ_{t in y} (lp_t − lp_old_t) ), the geometric mean of the ratios of y
    log s_t = sg[log s] + (lp_t − sg[lp_t])

    Source: Zheng et al. 2025, GSPO, eq. 7 and 14: the gradient of s_t is s·∇lp_t. Where all
    elements of y have one advantage, the mean of their losses has the gradient of the loss of s.

    Args:
        difference: [.., *trailing], lp − lp_old, 0 where masked, with gradient.
        keep: bool, same shape, the elements that count.
        level: "chunk": y is the decision of one row. "sequence": y is the column, [..] = [T, B].
        batch_dims: Number of leading dimensions [..]: 1 for [B], 2 for [T, B].

    Returns:
        [.., *trailing], the value clamped to ±20.

    Raises:
        ConfigError: Unknown ``level``, or a sequence without columns.
    """
    trailing = tuple(range(batch_dims, difference.ndim))
    if level == "sequence":
        if batch_dims != 2:
            raise ConfigError(
                "algorithm.ratio_level = sequence: needs whole columns [T, B]; set"
                " minibatch_unit=column"
            )
        dims = (0, *trailing)
    elif level == "chunk":
        dims = trailing
    else:
        raise ConfigError(f"algorithm.ratio_level = {level}: must be one of {', '.join(RATIOS)}")
    fixed = difference.detach()
    if not dims:  # a chunk of one element
        mean = fixed
    else:
        count = keep.sum(dims, keepdim=True).clamp(min=1)
        mean = (fixed.sum(dims, keepdim=True) / count).expand_as(fixed)
    return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + (difference - fixed)


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
    kind: str = "clip",
    ratio_level: str = "token",
    batch_dims: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each element: PPO's clipped surrogate, or that of CISPO.

    r = exp(lp − lp_old), or s of ``mean_log_ratio``
    kind "clip":   l = max(−A·r, −A·clip(r, 1 − low, 1 + high))
                   l = min(l, −A·c) where A < 0, if the dual clip c is set
    kind "cispo":  l = −A·sg[clip(r, 1 − low, 1 + high)]·lp, without dual clip

    Source: Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020, eq. 5; low < high: Yu et al.
    2025, DAPO, section 3.1 (clip-higher); CISPO: MiniMax 2025, MiniMax-M1, eq. 4 and 5.

    Args:
        log_prob: [.., *trailing], lp, with gradient.
        old_log_prob: [.., *trailing], lp_old, of the behaviour policy.
        advantage: [..] or finer, A; broadcast over trailing dimensions.
        mask: bool, shaped as ``advantage``.
        clip_ratio_low: low.
        clip_ratio_high: high.
        clip_ratio_c: c, None: no dual clip.
        weight: Off-policy correction, shaped as ``advantage`` or finer. Multiplies the loss,
            without gradient.
        kind: "clip" or "cispo".
        ratio_level: "token": each element has its own ratio. "chunk", "sequence": see
            ``mean_log_ratio``.
        batch_dims: Number of leading dimensions, see ``mean_log_ratio``.

    Returns:
        The loss [.., *trailing], 0 where masked, and statistics without gradient. All but
        ``ratio_max`` are sums over unmasked elements, which add up over micro-batches; divide them
        by ``count``.

        clip_fraction: elements whose clipped term is the larger one, which have no gradient. With
            "cispo": elements whose weight is clipped; they have a gradient.
        dual_clip_fraction: elements at the dual bound, which have no gradient.
        approx_kl: k3 estimate of KL(old || new), (r − 1) − log r, nats. r is that of the element
            for every ``ratio_level``.
        ratio_max: largest r, 0 without unmasked elements.
        count: unmasked elements.

    Raises:
        ConfigError: ``clip_ratio_c`` is not above 1; ``kind`` or ``ratio_level`` is unknown; a
            sequence without columns.
    """
    if kind not in ("clip", "cispo"):
        raise ConfigError(f"algorithm.policy_loss = {kind}: must be one of clip, cispo")
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ConfigError(
            f"algorithm.clip_ratio_c = {clip_ratio_c:g}: must be > 1 (3.0 is usual), or null for no"
            " dual clip"
        )
    keep = expand_mask(mask, log_prob)
    advantage = torch.where(keep, _expand(advantage, log_prob), 0.0)
    # Mask before exp: a NaN or inf of a masked element would otherwise reach the gradient.
    log_r = torch.where(keep, log_ratio(log_prob, old_log_prob), 0.0)
    if ratio_level == "token":
        ratio = log_r.exp()  # r = π(a|s) / π_old(a|s)
    else:
        difference = torch.where(keep, log_prob - old_log_prob, 0.0)
        ratio = mean_log_ratio(difference, keep, ratio_level, batch_dims=batch_dims).exp()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    dual = torch.zeros_like(keep)
    if kind == "cispo":
        loss = -advantage * bounded.detach() * torch.where(keep, log_prob, 0.0)
        limited = keep & (bounded != ratio)
    else:
        plain, clipped = -advantage * ratio, -advantage * bounded
        loss = torch.maximum(plain, clipped)
        limited = clipped > plain
    if kind == "clip" and clip_ratio_c is not None:
        bound = -advantage * clip_ratio_c
        dual = (advantage < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    if weight is not None:
        loss = loss * torch.where(keep, _expand(weight.detach(), log_prob), 0.0)
    with torch.no_grad():
        stats = {
            "clip_fraction": limited.sum().float(),
            "dual_clip_fraction": dual.sum().float(),
            "approx_kl": torch.where(keep, torch.expm1(log_r) - log_r, 0.0).sum(),
            "ratio_max": (
                torch.where(keep, ratio, 0.0).max() if ratio.numel() else ratio.new_zeros(())
            ),
            "count": keep.sum().float(),
        }
    return loss, stats


def _expand(x: Tensor, like: Tensor) -> Tensor:
    """Expand [..] to the shape of ``like``, [.., *trailing]."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)).expand_as(like)


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
        kind: token or sequence.
        cap: Largest weight.

    Returns:
        Weights [.., *trailing] without gradient, 1 where masked.

    Raises:
        ConfigError: Unknown ``kind``; a cap that is not positive; sequence weights without columns.
    """
    if cap <= 0:
        raise ConfigError(f"algorithm.off_policy_cap = {cap:g}: must be > 0 (2.0 is usual)")
    keep = expand_mask(mask, rollout_log_prob)
    difference = torch.where(keep, (trainer_old_log_prob - rollout_log_prob).detach(), 0.0)
    if kind == "sequence":
        _check_columns(mask, "algorithm.off_policy_correction = sequence")
        column = (
            difference.flatten(2).sum(-1).sum(0) if difference.ndim > 2 else difference.sum(0)
        )  # [B]
        difference = torch.where(keep, _expand(column.expand_as(mask), rollout_log_prob), 0.0)
    elif kind != "token":
        raise ConfigError(
            f"algorithm.off_policy_correction = {kind}: must be token, sequence or null"
        )
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
    near = old_value + change.clamp(-value_clip, value_clip)
    return (
        torch.maximum(loss, huber(returns - near, huber_delta)),
        change.detach().abs() > value_clip,
    )


# -------------------------------------------------------------------------------------- aggregation
def denominator(mask: Tensor, *, aggregation: str = "token-mean") -> Tensor:
    """Return the divisor of ``aggregate`` for a complete minibatch, float64 scalar.

    token-mean: unmasked rows. seq-mean-*: columns with an unmasked row. Add it up over ranks and
    pass it to every micro-batch. The sum of the micro-batches' losses is then the loss of the
    minibatch, independent of the split (seq-mean-* requires whole columns in a micro-batch).

    Args:
        mask: bool [..], [T, B] for seq-mean-*.
        aggregation: One of AGGREGATIONS.
    """
    _check_aggregation(aggregation)
    if aggregation == "token-mean":
        return mask.bool().sum().double()
    _check_columns(mask, f"algorithm.loss_agg_func = {aggregation}")
    return mask.bool().any(0).sum().double()


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token-mean",
    denominator: Tensor | float | None = None,
    length: float | None = None,
) -> Tensor:
    """Reduce elementwise losses to one number.

    With t over unmasked rows (and trailing elements) of column b, and B' columns that are not
    empty:
      token-mean               Σ_b Σ_t x / Σ_b Σ_t 1
      seq-mean-token-sum       Σ_b (Σ_t x) / B'
      seq-mean-token-mean      Σ_b (Σ_t x / Σ_t 1) / B'
      seq-mean-token-sum-norm  Σ_b (Σ_t x / length) / B'      (as in verl 0.9)

    Args:
        x: [.., *trailing].
        mask: bool [..].
        aggregation: One of AGGREGATIONS.
        denominator: Replaces Σ_b Σ_t 1 (counted in rows; trailing elements are multiplied in here)
            or B' by that of the complete minibatch, see the function ``denominator``. None: that of
            this tensor.
        length: Constant length of seq-mean-token-sum-norm, response_length.

    Returns:
        Scalar of x's dtype. Without unmasked elements 0, with zero gradient.

    Raises:
        ConfigError: Unknown ``aggregation``; seq-mean-* without columns; a norm without length.
    """
    _check_aggregation(aggregation)
    if aggregation != "token-mean":
        _check_columns(mask, f"algorithm.loss_agg_func = {aggregation}")
    if denominator is None:
        denominator = _count_denominator(mask, aggregation=aggregation)
    trailing = math.prod(x.shape[mask.ndim :])
    if aggregation == "token-mean":
        return masked_sum(x, mask) / (_at_least_one(denominator, x) * trailing)
    rows = torch.where(expand_mask(mask, x), x, 0.0).reshape(*mask.shape, trailing)
    column = rows.sum((0, 2))  # [B]
    if aggregation == "seq-mean-token-mean":
        column = column / (mask.bool().sum(0).clamp(min=1) * trailing)
    elif aggregation == "seq-mean-token-sum-norm":
        if length is None or length <= 0:
            raise ConfigError(
                "algorithm.loss_agg_func = seq-mean-token-sum-norm: needs a constant length > 0,"
                f" got {length}; set algorithm.response_length"
            )
        column = column / length
    return column.sum() / _at_least_one(denominator, x)


_count_denominator = denominator  # ``aggregate`` has an argument of that name


def _at_least_one(count: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(count, dtype=like.dtype, device=like.device).clamp(min=1)


def _check_aggregation(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ConfigError(
            f"algorithm.loss_agg_func = {aggregation}: must be one of {', '.join(AGGREGATIONS)}"
        )


def _check_columns(mask: Tensor, option: str) -> None:
    if mask.ndim != 2:
        raise ConfigError(
            f"{option}: needs whole columns [T, B], got a mask {tuple(mask.shape)}; set"
            " minibatch_unit=column"
        )


# ------------------------------------------------------------------------------------------ entropy
class EntropyController:
    """Coefficient c of the entropy bonus, constant or adapted to a target entropy.

    c ← clip(c · exp(rate · clip(target − H, ±1)), 1e-5, 1) after each update

    H is the entropy in nats as aggregated for the loss; an entropy below the target raises c. This
    is a bounded, multiplicative form of the dual ascent of Haarnoja et al. 2018, eq. 18, which also
    works for negative differential entropies.

    Args:
        coef: Initial c. With a target, an initial value outside [1e-5, 1] is clipped.
        target: Target entropy, nats. None: c is constant.
        rate: Step size of the adaptation.
    """

    SMALLEST, LARGEST = 1e-5, 1.0

    def __init__(self, coef: float, target: float | None = None, rate: float = 0.1):
        self.coef = (
            float(coef) if target is None else min(max(float(coef), self.SMALLEST), self.LARGEST)
        )
        self.initial = self.coef
        self.target = target
        self.rate = rate

    def update(self, entropy: float) -> None:
        """Adapt c to the mean entropy of an update, nats.

        Raises:
            TrainingError: The entropy is not finite.
        """
        if self.target is None:
            return
        if not math.isfinite(entropy):
            raise TrainingError(
                f"entropy = {entropy}: the entropy controller needs a finite one; lower lr or"
                " max_grad_norm"
            )
        error = min(max(self.target - entropy, -1.0), 1.0)
        self.coef = min(max(self.coef * math.exp(self.rate * error), self.SMALLEST), self.LARGEST)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "initial": self.initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the stored c, unless the run was resumed with another initial c."""
        if state.get("initial", self.initial) == self.initial:
            self.coef = float(state["coef"])
