"""Advantages and returns from rewards and values, normalisation and reward shaping.

Shapes: T time steps (or response tokens) first, then N columns (environments or sequences). Tensors
are float32 [T, N] (flags: bool), arithmetic is float64, no result carries a gradient. A group is
``group_size`` neighbouring columns, g·group_size .. (g+1)·group_size − 1.

Masked rows have no effect: every unmasked row gets the result that it would get if the masked rows
of its column were deleted. Masked rows themselves get advantage 0 and their value as return; their
rewards, values and flags are never used and may be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied_ppo.core.running_stats import Moments, RunningMoments, expand_mask, masked_moments
from embodied_ppo.core.types import ConfigError

EPS = 1e-8
BOOTSTRAP_TYPES = ("standard", "always")
ADV_TYPES = (
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
REWARD_NORMS = (None, "batch", "group", "running")


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
    gae_lambda: float,
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
        gae_lambda: λ.
        steps: k, simulator steps that a row lasted, int or int64 [T, N].
        bootstrap_type: "standard" as above. "always" drops the factor 1 − terminated, so that
            terminations bootstrap, too; the recursion still stops there.

    Returns:
        Advantage and returns, float32 [T, N]. In masked rows 0 and the value.

    Raises:
        ConfigError: Unknown ``bootstrap_type``.
    """
    if bootstrap_type not in BOOTSTRAP_TYPES:
        raise ConfigError(
            f"algorithm.bootstrap_type = {bootstrap_type}: must be one of"
            f" {', '.join(BOOTSTRAP_TYPES)}"
        )
    mask = mask.bool()
    done = terminated.bool() | truncated.bool()
    discount = gamma**steps  # γ^k, float or [T, N]
    trace = (gamma * gae_lambda) ** steps  # (γλ)^k
    value64 = value.double()
    bootstrap = _skip_holes(value64, next_value.double(), done, mask)
    if bootstrap_type == "standard":
        bootstrap = bootstrap.masked_fill(terminated.bool(), 0.0)
    # δ_t = r_t + γ^k·V'_t − V_t, and 0 in masked rows
    delta = (reward.double() + discount * bootstrap - value64).masked_fill_(~mask, 0.0)
    # A_t = δ_t + carry_t·A_{t+1}; a masked row passes A_{t+1} on unchanged
    carry = torch.where(mask, (~done).double() * trace, 1.0)
    advantage = _scan(carry, delta).masked_fill_(~mask, 0.0)
    returns = torch.where(mask, advantage + value64, value64)
    return advantage.float(), returns.float()


def _scan(carry: Tensor, x: Tensor) -> Tensor:
    """Compute y_t = x_t + carry_t·y_{t+1} from the last row up, in place of x; both [T, N]."""
    if x.is_cuda:
        return x.copy_(_scan_by_doubling(carry, x))
    rows, factors = x.unbind(0), carry.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1])
    return x


def _scan_by_doubling(carry: Tensor, x: Tensor) -> Tensor:
    """Compute ``_scan`` in log2(T) passes over all rows (Hillis and Steele 1986).

    Faster on a GPU, where the launch of a kernel costs more than its arithmetic.
    """
    d = 1
    while d < len(x):  # x_t covers rows t .. t+d-1, carry_t is their product
        x = torch.cat([x[:-d] + carry[:-d] * x[d:], x[-d:]])
        carry = torch.cat([carry[:-d] * carry[d:], carry[-d:]])
        d *= 2
    return x


def _skip_holes(value: Tensor, next_value: Tensor, done: Tensor, mask: Tensor) -> Tensor:
    """Replace ``next_value`` before a hole in an episode by V of the next unmasked row; all [T,
    N].
    """
    before_hole = (mask & ~done)[:-1] & ~mask[1:]  # [T-1, N]
    # On a GPU the test would take longer than the replacement, because the host would wait.
    if before_hole.device.type == "cpu" and not bool(before_hole.any()):
        return next_value
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

    Raises:
        ConfigError: ``group_size`` is below 2 or does not divide N.
    """
    centred, var, _ = _centre(score, group_size, valid)
    return (centred / (var.sqrt() + eps) if normalize_std else centred).flatten().float()


@torch.no_grad()
def rloo(score: Tensor, group_size: int, *, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantage of each column.

    A_i = s_i − mean of the other columns of the group = (s_i − μ_g)·n/(n−1)

    Source: Ahmadian et al. 2024, eq. 8. Arguments, result and errors as ``grpo``.
    """
    centred, _, count = _centre(score, group_size, valid)
    return (centred * count / (count - 1).clamp(min=1)).flatten().float()


def _centre(score: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return s − μ_g [G, n] (0 if invalid or alone), unbiased σ²_g [G, 1], valid columns [G, 1]."""
    s = _groups(score.double(), group_size)
    keep = (
        torch.ones_like(s, dtype=torch.bool) if valid is None else _groups(valid.bool(), group_size)
    )
    s = torch.where(keep, s, 0.0)
    count = keep.sum(1, keepdim=True).double()
    mean = s.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(keep & (count > 1), s - mean, 0.0)
    return centred, centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1), count


def _groups(x: Tensor, group_size: int) -> Tensor:
    """Reshape [N] to [G, group_size]."""
    if group_size < 2:
        raise ConfigError(
            f"algorithm.group_size = {group_size}: group-relative advantages and rewards need >= 2"
            " columns in a group; set algorithm.group_size, or use adv_type=gae and another"
            " reward_norm"
        )
    if x.shape[0] % group_size:
        raise ConfigError(
            f"algorithm.group_size = {group_size}: must divide the {x.shape[0]} columns of the"
            " rollout; set env.num_envs (or the number of responses) to a multiple of it"
        )
    return x.reshape(-1, group_size)


@torch.no_grad()
def return_to_go(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    steps: int | Tensor = 1,
) -> Tensor:
    """Return-to-go of each row, which uses no value.

    G_t = r_t + γ^k·(1 − done_t)·G_{t+1}, G_T = 0

    Returns:
        float32 [T, N], 0 in masked rows.
    """
    zero = torch.zeros_like(reward)
    return gae(
        reward, zero, zero, terminated, truncated, mask, gamma=gamma, gae_lambda=1.0, steps=steps
    )[0]


@torch.no_grad()
def estimate(
    adv_type: str,
    *,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float,
    group_size: int = 1,
    bootstrap_type: str = "standard",
    steps: int | Tensor = 1,
) -> tuple[Tensor, Tensor]:
    """Return advantage and returns of the estimator named ``adv_type``, float32 [T, N].

    gae                           as ``gae``
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
        adv_type: One of ADV_TYPES.
        reward: As in ``gae``, and so are the arguments that are not listed.
        group_size: Columns of a group, for the group-relative estimators.

    Raises:
        ConfigError: Unknown ``adv_type``, and as the estimators.
    """
    if adv_type not in ADV_TYPES:
        raise ConfigError(f"algorithm.adv_type = {adv_type}: must be one of {', '.join(ADV_TYPES)}")
    advantage, returns = gae(
        reward,
        value,
        next_value,
        terminated,
        truncated,
        mask,
        gamma=gamma,
        gae_lambda=gae_lambda if adv_type == "gae" else 1.0,
        steps=steps,
        bootstrap_type=bootstrap_type,
    )
    if adv_type == "gae":
        return advantage, returns
    if adv_type in ("reinforce", "reinforce_plus_plus"):
        return return_to_go(reward, terminated, truncated, mask, gamma=gamma, steps=steps), returns
    score, valid = torch.where(mask.bool(), reward.double(), 0.0).sum(0), mask.bool().any(0)  # [N]
    if adv_type == "rloo":
        column = rloo(score, group_size, valid=valid)
    else:
        column = grpo(score, group_size, normalize_std=adv_type == "grpo", valid=valid)
    return torch.where(mask.bool(), column, 0.0), returns


# ------------------------------------------------------------------------------------ normalisation
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
    scaled = torch.where(expand_mask(mask, advantage), scaled, 0.0)
    return torch.where(moments.count < 2, advantage, scaled).float(), moments


def clip(x: Tensor, c: float | None) -> Tensor:
    """Clamp to ±c; None returns x unchanged."""
    return x if c is None else x.clamp(-c, c)


# ------------------------------------------------------------------------------------------ rewards
@torch.no_grad()
def shape_rewards(
    reward: Tensor,
    mask: Tensor,
    *,
    norm: str | None = None,
    shift: bool = False,
    scale: bool = False,
    group_size: int = 1,
    running_std: Tensor | float | None = None,
) -> Tensor:
    """Normalise rewards, before a KL penalty is subtracted.

    r ← (r − μ)·rsqrt(σ² + 1e-8); with ``shift`` alone r − μ, with ``scale`` alone
    r·rsqrt(σ² + 1e-8)

    batch: μ and unbiased σ over all unmasked entries.
    group: μ and σ over the unmasked entries of each group of columns.
    running: r / running_std, the deviation of the discounted return (``ReturnScaler.std``). No mean
        is subtracted.

    Sets of fewer than 2 entries are not normalised, and a deviation below 1e-6 is not divided by.
    If the reward is one score per column, normalise the scores as [1, N] before assigning them to
    tokens.

    Args:
        reward: [T, N].
        mask: bool [T, N].
        norm: One of REWARD_NORMS.
        shift: Subtract the mean only.
        scale: Divide by the deviation only.
        group_size: Columns of a group, for norm = group.
        running_std: Deviation of the discounted return, for norm = running.

    Returns:
        float32 [T, N]; masked rows are unchanged.

    Raises:
        ConfigError: Unknown ``norm``; shift with norm = running; norm = running without
            ``running_std``; groups as ``grpo``.
    """
    if norm not in REWARD_NORMS:
        raise ConfigError(f"algorithm.reward_norm = {norm}: must be null, batch, group or running")
    keep, x = mask.bool(), reward.double()
    if norm == "running":
        if shift:
            raise ConfigError(
                "algorithm.reward_shift = true: must be false with algorithm.reward_norm = running,"
                " which only divides by the deviation of the discounted return; use"
                " reward_norm=batch to subtract a mean"
            )
        if running_std is None:
            raise ConfigError(
                "algorithm.reward_norm = running: needs the running deviation; pass"
                " running_std=ReturnScaler.std"
            )
        x = x / running_std
    elif norm is not None:
        T, N = x.shape
        groups = _groups(torch.arange(N, device=x.device), group_size) if norm == "group" else None
        size = N if groups is None else groups.shape[1]
        x = _standardise(
            x.reshape(T, -1, size), keep.reshape(T, -1, size), shift=shift, scale=scale
        ).reshape(T, N)
    return torch.where(keep, x, reward.double()).float()


def _standardise(x: Tensor, keep: Tensor, *, shift: bool, scale: bool) -> Tensor:
    """Apply the norm of ``shape_rewards`` in each of G sets of columns; x, keep [T, G, n]."""
    count = keep.sum((0, 2), keepdim=True).double()  # [1, G, 1]
    mean = torch.where(keep, x, 0.0).sum((0, 2), keepdim=True) / count.clamp(min=1)
    var = torch.where(keep, x - mean, 0.0).square().sum((0, 2), keepdim=True) / (count - 1).clamp(
        min=1
    )
    factor = torch.where(var > 1e-12, torch.rsqrt(var + EPS), 1.0)
    if shift and not scale:
        y = x - mean
    elif scale and not shift:
        y = x * factor
    else:
        y = (x - mean) * factor
    return torch.where(count < 2, x, y)


@torch.no_grad()
def whiten_rewards(reward: Tensor, mask: Tensor, *, keep_mean: bool = True) -> Tensor:
    """Whiten rewards: (r − μ)·rsqrt(σ² + 1e-8) + μ over unmasked entries, unbiased σ².

    Args:
        reward: float32 [T, N].
        mask: bool [T, N].
        keep_mean: Add μ again, as TRL does. ROLL does not.

    Returns:
        float32 [T, N]; masked rows, and fewer than 2 entries, are unchanged.
    """
    white, moments = normalize(reward, mask)
    white = white + moments.mean if keep_mean else white
    return torch.where(mask.bool() & (moments.count >= 2), white, reward.double()).float()


class ReturnScaler(nn.Module):
    """Running deviation of the discounted return, by which rewards are divided.

    G_t = γ^k·(1 − done_{t−1})·G_{t−1} + r_t

    Source: Engstrom et al. 2020, section 2. G of each environment continues across rollouts; the
    moments of all past G_t give the scale.

    State, in state_dict: ``moments`` (float64), and ``running`` float64 [N], G after the last row
    or 0 where that row ended an episode.
    """

    running: Tensor

    def __init__(self, num_envs: int):
        super().__init__()
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
            steps: As in ``gae``.
        """
        keep = mask.bool()
        reward = torch.where(keep, reward.double(), 0.0)
        discount = gamma**steps
        alive = (~done.bool()).double()
        # H_t, the value of G after row t: G_t·(1 − done_t), or H_{t−1} in a masked row. It obeys
        # the recursion of ``_scan`` with time reversed; row 0 is the H of the previous rollout.
        carry = torch.where(keep, alive * discount, 1.0)
        after = torch.cat([self.running.double().unsqueeze(0), reward * alive])  # [T+1, N]
        carry = torch.cat([torch.ones_like(carry[:1]), carry])  # [T+1, N]
        after = _scan(carry.flip(0), after.flip(0)).flip(0)
        returns = reward + discount * after[:-1]  # [T, N]
        self.running.copy_(after[-1])
        self.moments.update(returns.flatten(), keep.flatten())

    @property
    def std(self) -> Tensor:
        """sqrt(var + 1e-8), float64 scalar; 1 before the first update."""
        return torch.where(self.moments.count > 0, torch.sqrt(self.moments.var + EPS), 1.0)
