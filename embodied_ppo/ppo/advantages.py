"""Advantages and returns from rewards and values, and their normalisation.

Shapes: T time steps (or response tokens) first, then N columns (environments or sequences). Tensors
are float32 [T, N] (flags: bool), arithmetic is float64, no result carries a gradient. A group is
``group_size`` neighbouring columns, g·group_size .. (g+1)·group_size − 1.

Masked rows have no effect: every unmasked row gets the result that it would get if the masked rows
of its column were deleted. Masked rows themselves get advantage 0 and their value as return; their
rewards, values and flags are never used and may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from embodied_ppo.core.running_stats import Moments, expand, masked_moments, masked_sum
from embodied_ppo.core.types import Trajectory

EPS = 1e-8


# ---------------------------------------------------------------------------------------------- gae
@torch.no_grad()
def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    steps: int | Tensor = 1,
    bootstrap_type: str = "standard",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with explicit episode ends.

    δ_t = r_t + γ^k·V'_t·(1 − terminated_t) − V_t
    A_t = δ_t + (γλ)^k·(1 − done_t)·A_{t+1}        done = terminated | truncated, A_T = 0
    R_t = A_t + V_t

    Source: Schulman et al. 2016, eq. 16.

    Masked rows pass A_{t+1} on unchanged, and with it V:
    * After a done row (reset row of a simulator, padding after a response) there is nothing to pass
      on: the done row stops the recursion and has its own ``next_value``.
    * Inside an episode (tool tokens in a response) ``next_value`` of the row before the hole is the
      value of a masked token. Values of masked rows must not be used, so it is replaced by the
      value of the first unmasked row after the hole.
    * A hole that reaches row T−1 makes the row before it the last one of its column, which keeps
      its own ``next_value``.

    Args:
        reward: [T, N], r.
        value: [T, N], V.
        next_value: [T, N], V', the value of row t's true successor state; V(s_{t+1}) in the paper.
        terminated: bool [T, N], the task ended the episode.
        truncated: bool [T, N], the time limit ended the episode.
        mask: bool [T, N].
        gamma: Discount factor γ of one simulator step.
        gae_lambda: λ, one number or float64 [N].
        steps: k, simulator steps that a row lasted, int or int64 [T, N].
        bootstrap_type: "standard" as above. "always" drops the factor 1 − terminated, so that
            terminations bootstrap, too; "never" makes it 1 − done, so that time limits do not. The
            recursion stops at done rows in any case.

    Returns:
        Advantage and returns, float32 [T, N]. In masked rows 0 and the value.
    """
    mask = mask.bool()
    done = terminated.bool() | truncated.bool()
    discount = gamma**steps  # γ^k, float or [T, N]
    trace = (gamma * gae_lambda) ** steps  # (γλ)^k, float, [N] or [T, N]
    # The recursion adds up many terms, so that an error of float32 would grow with T.
    value64 = value.double()
    bootstrap = next_value.double()
    before_hole = (mask & ~done)[:-1] & ~mask[1:]  # [T-1, N], last row before a hole
    # On a GPU the test would take longer than the replacement, because the host would wait.
    if before_hole.device.type != "cpu" or bool(before_hole.any()):
        bootstrap = _skip_holes(value64, bootstrap, before_hole, mask)
    if bootstrap_type != "always":
        ends = terminated.bool() if bootstrap_type == "standard" else done
        bootstrap = bootstrap.masked_fill(ends, 0.0)
    # δ_t = r_t + γ^k·V'_t − V_t, and 0 in masked rows
    delta = (reward.double() + discount * bootstrap - value64).masked_fill_(~mask, 0.0)
    # A_t = δ_t + carry_t·A_{t+1}; a masked row passes A_{t+1} on unchanged
    carry = torch.where(mask, (~done).double() * trace, 1.0)
    advantage = scan(carry, delta).masked_fill_(~mask, 0.0)
    returns = torch.where(mask, advantage + value64, value64)
    return advantage.float(), returns.float()


@torch.no_grad()
def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return λ = 1 − 1/max(α·l, 1) of columns with l unmasked rows, float64 [N].

    The sum of the weights λ^k of a long column, 1/(1 − λ), is then α·l, and λ = 0 up to l = 1/α.

    Source: Yue et al. 2025, VAPO; the bound is that of NeMo RL.

    Args:
        mask: bool [T, N].
        alpha: α.
    """
    return 1.0 - 1.0 / (alpha * mask.sum(0).double()).clamp(min=1.0)


def scan(carry: Tensor, x: Tensor) -> Tensor:
    """Compute y_t = x_t + carry_t·y_{t+1} from the last row up, in place of x; both [T, N]."""
    if x.is_cuda:
        return x.copy_(_scan_by_doubling(carry, x))
    # unbind returns views, so that each step writes into x. The last row stays: y_{T−1} = x_{T−1}.
    rows, factors = x.unbind(0), carry.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1])
    return x


def _scan_by_doubling(carry: Tensor, x: Tensor) -> Tensor:
    """Compute ``scan`` in log2(T) passes over all rows (Hillis and Steele 1986).

    Faster on a GPU, where the launch of a kernel costs more than its arithmetic.
    """
    d = 1
    while d < len(x):  # x_t covers rows t .. t+d-1, carry_t is their product
        x = torch.cat([x[:-d] + carry[:-d] * x[d:], x[-d:]])
        carry = torch.cat([carry[:-d] * carry[d:], carry[-d:]])
        d *= 2
    return x


def _skip_holes(value: Tensor, next_value: Tensor, before_hole: Tensor, mask: Tensor) -> Tensor:
    """Return ``next_value`` with V of the next unmasked row before holes in an episode, [T, N]."""
    T = mask.shape[0]
    row = torch.arange(T, device=mask.device).unsqueeze(1)
    unmasked_row = torch.where(mask, row, T)  # [T, N]: own index, or T where masked
    # [T-1, N]: index of the first unmasked row after t; T if there is none
    following = unmasked_row.flip(0).cummin(0).values.flip(0)[1:]
    following_value = value.gather(0, following.clamp(max=T - 1))
    patched = next_value.clone()
    patched[:-1] = torch.where(before_hole & (following < T), following_value, next_value[:-1])
    return patched


# -------------------------------------------------------------------------------------- critic-free
@torch.no_grad()
def grpo(
    score: Tensor,
    group_size: int,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Group-relative advantage of each column.

    A_i = (s_i − μ_g)/(σ_g + eps), σ unbiased

    Source: Shao et al. 2024, section 4.1.2. Without the division: Liu et al. 2025, Dr. GRPO.

    Args:
        score: float [N], s.
        group_size: Columns of a group.
        normalize_std: Divide by σ_g + eps.
        eps: Added to σ_g.
        valid: bool [N], columns that count; None: all. Other columns get 0, and so does the single
            valid column of a group.

    Returns:
        float32 [N].
    """
    centred, var, _ = _centre(score, group_size, valid)
    return (centred / (var.sqrt() + eps) if normalize_std else centred).flatten().float()


@torch.no_grad()
def rloo(score: Tensor, group_size: int, *, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantage of each column.

    A_i = s_i − mean of the other columns of the group = (s_i − μ_g)·n/(n−1)

    Source: Ahmadian et al. 2024, eq. 8. Arguments and result as ``grpo``.
    """
    centred, _, count = _centre(score, group_size, valid)
    return (centred * count / (count - 1).clamp(min=1)).flatten().float()


def _centre(score: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return s − μ_g [G, n] (0 if invalid or alone), unbiased σ²_g [G, 1], valid columns [G, 1]."""
    s = score.double().reshape(-1, group_size)
    keep = torch.ones_like(s).bool() if valid is None else valid.bool().view_as(s)
    s = torch.where(keep, s, 0.0)
    count = keep.sum(1, keepdim=True).double()
    mean = s.sum(1, keepdim=True) / count.clamp(min=1)
    # The only valid column of a group has nothing to compare with and gets 0.
    centred = torch.where(keep & (count > 1), s - mean, 0.0)
    return centred, centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1), count


@torch.no_grad()
def estimate(
    adv_type: str,
    t: Trajectory,
    *,
    gamma: float,
    gae_lambda: float,
    gae_lambda_value: float | None = None,
    length_adaptive_alpha: float | None = None,
    group_size: int = 1,
    bootstrap_type: str = "standard",
) -> tuple[Tensor, Tensor]:
    """Return advantage and returns of the estimator named ``adv_type``, float32 [T, N].

    gae                           as ``gae``, the returns with a λ of their own if it is set
                                  (decoupled GAE, Yuan et al. 2025, VC-PPO)
    reinforce                     return-to-go of each row (Williams 1992)
    reinforce_plus_plus           return-to-go of each row; the caller whitens it with ``normalize``
    reinforce_plus_plus_baseline  s_i − μ_g in every row; the caller whitens it (Hu et al. 2025)
    dr_grpo                       s_i − μ_g in every row; the caller does not whiten it, nor divide
                                  a loss by the length of its column (Liu et al. 2025)
    grpo, rloo                    the advantage of the column in every row

    s is the score of a column (one episode or response): the undiscounted sum of its unmasked
    rewards. Only gae uses values. The returns of the others are the λ = 1 targets of ``gae``, which
    train a critic if there is one: the discounted rewards to the end of the episode, or to the
    value where the time limit or the rollout cut it.

    Args:
        adv_type: One of the names above.
        t: Shaped rewards, values, flags, mask and steps [T, N]; other fields are not read.
        gamma: As in ``gae``, and so are the arguments that are not listed.
        gae_lambda_value: λ of the returns; None: ``gae_lambda``.
        length_adaptive_alpha: α of ``length_adaptive_lambda``, which is then the λ of the
            advantage; None: ``gae_lambda``.
        group_size: Columns of a group, for the group-relative estimators.
    """
    flags, steps = (t.terminated, t.truncated, t.mask), 1 if t.steps is None else t.steps
    traces = partial(
        gae,
        *(t.reward, t.value, t.next_value, *flags),
        gamma=gamma,
        steps=steps,
        bootstrap_type=bootstrap_type,
    )
    if adv_type == "gae":
        policy_lambda: float | Tensor = gae_lambda
        if length_adaptive_alpha is not None:
            policy_lambda = length_adaptive_lambda(t.mask, length_adaptive_alpha)
        value_lambda = gae_lambda if gae_lambda_value is None else gae_lambda_value
        advantage, returns = traces(gae_lambda=policy_lambda)
        # Equal λ need one pass only.
        if isinstance(policy_lambda, Tensor) or policy_lambda != value_lambda:
            returns = traces(gae_lambda=value_lambda)[1]
        return advantage, returns
    returns = traces(gae_lambda=1.0)[1]
    if adv_type in ("reinforce", "reinforce_plus_plus"):
        # G_t = r_t + γ^k·(1 − done_t)·G_{t+1}: the recursion of ``gae`` with V = 0 and λ = 1.
        zero = torch.zeros_like(t.reward)
        discounts = {"gamma": gamma, "gae_lambda": 1.0, "steps": steps}
        return gae(t.reward, zero, zero, *flags, **discounts)[0], returns
    # The other estimators give one advantage, computed from the score, to all rows of a column.
    mask = t.mask.bool()
    score, valid = torch.where(mask, t.reward.double(), 0.0).sum(0), mask.any(0)  # [N]
    if adv_type == "rloo":
        column = rloo(score, group_size, valid=valid)
    elif adv_type in ("grpo", "dr_grpo", "reinforce_plus_plus_baseline"):
        column = grpo(score, group_size, normalize_std=adv_type == "grpo", valid=valid)
    else:
        raise NotImplementedError(adv_type)
    return torch.where(mask, column, 0.0), returns


# ------------------------------------------------------------------------------------ reward groups
@torch.no_grad()
def weighted_sum(
    parts: Sequence[Tensor], mask: Tensor, *, weights: Sequence[float], normalized: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """Add the advantages of reward groups: A = Σ_k w_k·Â_k, Â_k = ``normalize``(A_k) if configured.

    Source: several critics as in Zargarbashi et al. 2024, "RobotKeyframing", section III-C. With
    ``grpo`` of each reward, and A whitened, it is GDPO (Liu et al. 2026, eq. 4 to 6).

    Args:
        parts: Advantages A_k, float32 [T, N] each, 0 where masked.
        mask: bool [T, N].
        weights: w_k.
        normalized: Whether A_k is standardised.

    Returns:
        A, and the share of each group, Σ|w_k·Â_k| / Σ_j Σ|w_j·Â_j| over unmasked entries, NaN
        where all are 0.
    """
    scaled = [
        w * (normalize(x, mask)[0] if standardise else x)
        for x, w, standardise in zip(parts, weights, normalized, strict=True)
    ]
    total = torch.stack(scaled).double().sum(0).float() if len(scaled) > 1 else scaled[0]
    sizes = [masked_sum(x.double().abs(), mask) for x in scaled]
    everything = torch.stack(sizes).sum()
    return total, [size / everything for size in sizes]


# ------------------------------------------------------------------------------------ normalisation
@torch.no_grad()
def normalize_tasks(advantage: Tensor, mask: Tensor, task: Tensor) -> Tensor:
    """Return advantages [T, N] that are standardised within each task, int64 [T, N]."""
    for k in range(int(task.max()) + 1):
        own = mask & (task == k)
        advantage = torch.where(own, normalize(advantage, own)[0], advantage)
    return advantage


@torch.no_grad()
def normalize(advantage: Tensor, mask: Tensor) -> tuple[Tensor, Moments]:
    """Standardise advantages: (A − μ)·rsqrt(σ² + 1e-8), unbiased σ² over unmasked entries.

    Args:
        advantage: float32 [..].
        mask: bool [..].

    Returns:
        The standardised advantage, 0 where masked, and its moments before. With fewer than 2
        entries the advantage is returned unchanged; the caller reports it.
    """
    moments = masked_moments(advantage, mask)
    scaled = (advantage.double() - moments.mean) * torch.rsqrt(moments.var + EPS)
    scaled = torch.where(expand(mask, advantage), scaled, 0.0)
    # Select on the device: reading the count would make the host wait.
    return torch.where(moments.count < 2, advantage, scaled).float(), moments
