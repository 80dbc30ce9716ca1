"""From rewards and values to advantages and returns: GAE, the critic-free estimators, normalisation and reward shaping.

T time steps (or response tokens) first, N columns (environments or sequences). Tensors are float32 [T, N] (bool for
flags), arithmetic is float64, nothing carries gradient. A group is ``group_size`` neighbouring columns,
g·group_size .. (g+1)·group_size − 1.

Masked rows are transparent: every unmasked row gets exactly what it would get were the masked rows of its column cut
out. Their advantage is 0 and their return is their value; their reward, values and flags (NaN included) are never used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied_ppo.core.running_stats import Moments, RunningMoments, expand_mask, masked_moments
from embodied_ppo.core.types import ConfigError

EPS = 1e-8
BOOTSTRAP_TYPES = ("standard", "always")
ADV_TYPES = ("gae", "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
REWARD_NORMS = (None, "batch", "group", "running")


# ---------------------------------------------------------------------------------------------------------------- gae
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
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16, with the episode's end made explicit).

    δ_t = r_t + γ^k·V'_t·(1 − terminated_t) − V_t
    A_t = δ_t + (γλ)^k·(1 − done_t)·A_{t+1}        done = terminated | truncated, A_T = 0
    R_t = A_t + V_t

    All tensors [T, N]. V' is ``next_value``, the value of row t's true successor (the paper's V(s_{t+1})). ``steps`` is
    k, the primitive steps a row lasted, an int or int64 [T, N]. bootstrap_type always: terminations bootstrap, too (the
    factor 1 − terminated is dropped); the carry A_{t+1} still stops there.

    Masked rows pass A_{t+1} on unchanged, and with it V:
    * After a done row (a simulator's dummy reset row, padding after a response) nothing has to pass: the done row stops
      the carry and has its own next_value.
    * Inside an episode (tool tokens in a response) ``next_value`` of the row before the hole is the value of a masked
      token. Values at masked rows never enter, so it is replaced by the value of the first unmasked row after the hole.
    * A hole that reaches row T−1 leaves the row before it last in its column: its own next_value stays.

    Returns advantage and returns, float32 [T, N]; at masked rows 0 and the value.
    Raises ConfigError for another bootstrap_type.
    """
    if bootstrap_type not in BOOTSTRAP_TYPES:
        raise ConfigError(f"algorithm.bootstrap_type = {bootstrap_type}: must be one of {', '.join(BOOTSTRAP_TYPES)}")
    mask = mask.bool()
    done = terminated.bool() | truncated.bool()
    discount = gamma**steps  # float, or [T, N]
    trace = (gamma * gae_lambda) ** steps
    value64 = value.double()
    bootstrap = _skip_holes(value64, next_value.double(), done, mask)
    if bootstrap_type == "standard":
        bootstrap = bootstrap.masked_fill(terminated.bool(), 0.0)
    delta = (reward.double() + discount * bootstrap - value64).masked_fill_(~mask, 0.0)
    carry = torch.where(mask, (~done).double() * trace, 1.0)
    advantage = _scan(carry, delta).masked_fill_(~mask, 0.0)
    returns = torch.where(mask, advantage + value64, value64)
    return advantage.float(), returns.float()


def _scan(carry: Tensor, x: Tensor) -> Tensor:
    """y_t = x_t + carry_t·y_{t+1} from the last row up, in place of x; both [T, N]. One operation per row on a CPU."""
    if x.is_cuda:
        return x.copy_(_scan_by_doubling(carry, x))
    rows, factors = x.unbind(0), carry.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1])
    return x


def _scan_by_doubling(carry: Tensor, x: Tensor) -> Tensor:
    """``_scan`` in log2(T) passes over all rows, where a launch costs more than arithmetic (Hillis & Steele 1986)."""
    d = 1
    while d < len(x):  # x_t covers rows t .. t+d-1, carry_t is their product
        x = torch.cat([x[:-d] + carry[:-d] * x[d:], x[-d:]])
        carry = torch.cat([carry[:-d] * carry[d:], carry[-d:]])
        d *= 2
    return x


def _skip_holes(value: Tensor, next_value: Tensor, done: Tensor, mask: Tensor) -> Tensor:
    """``next_value``, but V of the next unmasked row where a masked one follows inside an episode; all [T, N]."""
    before_hole = (mask & ~done)[:-1] & ~mask[1:]  # [T-1, N]
    if not bool(before_hole.any()):
        return next_value
    T = mask.shape[0]
    row = torch.arange(T, device=mask.device).unsqueeze(1)
    here = torch.where(mask, row, T)  # own index, or T where masked
    following = here.flip(0).cummin(0).values.flip(0)[1:]  # [T-1, N]: first unmasked row after t; T if there is none
    found = value.gather(0, following.clamp(max=T - 1))
    patched = next_value.clone()
    patched[:-1] = torch.where(before_hole & (following < T), found, next_value[:-1])
    return patched


# -------------------------------------------------------------------------------------------------------- critic-free
@torch.no_grad()
def grpo(
    score: Tensor, group_size: int, *, normalize_std: bool = True, eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """Group-relative advantage of each column (Shao et al. 2024, section 4.1.2): A_i = (s_i − μ_g)/(σ_g + eps).

    score float [N] -> float32 [N]. σ is unbiased; normalize_std=False does not divide (Liu et al. 2025, Dr. GRPO).
    ``valid`` bool [N] (None: all): other columns count nowhere and get 0, and so does a group with one valid column.
    Raises ConfigError for a group_size below 2 or not dividing N.
    """
    centred, var, _ = _centre(score, group_size, valid)
    return (centred / (var.sqrt() + eps) if normalize_std else centred).flatten().float()


@torch.no_grad()
def rloo(score: Tensor, group_size: int, *, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantage of each column (Ahmadian et al. 2024, eq. 8): A_i = s_i − mean of the group's others.

    The same as (s_i − μ_g)·n/(n−1). Arguments, result and errors as ``grpo``.
    """
    centred, _, count = _centre(score, group_size, valid)
    return (centred * count / (count - 1).clamp(min=1)).flatten().float()


def _centre(score: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """s − μ_g [G, n] (0 where not valid or alone), unbiased σ²_g [G, 1] and valid columns [G, 1]; float64."""
    s = _groups(score.double(), group_size)
    keep = torch.ones_like(s, dtype=torch.bool) if valid is None else _groups(valid.bool(), group_size)
    s = torch.where(keep, s, 0.0)
    count = keep.sum(1, keepdim=True).double()
    mean = s.sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(keep & (count > 1), s - mean, 0.0)
    return centred, centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1), count


def _groups(x: Tensor, group_size: int) -> Tensor:
    """[N] -> [G, group_size]."""
    if group_size < 2:
        raise ConfigError(
            f"algorithm.group_size = {group_size}: group-relative advantages and rewards need >= 2 columns in "
            f"a group; set algorithm.group_size, or use adv_type=gae and another reward_norm"
        )
    if x.shape[0] % group_size:
        raise ConfigError(
            f"algorithm.group_size = {group_size}: must divide the {x.shape[0]} columns of the rollout; "
            f"set env.num_envs (or the number of responses) to a multiple of it"
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
    """G_t = r_t + γ^k·(1 − done_t)·G_{t+1}, G_T = 0: reads no value; [T, N] -> float32 [T, N], 0 where masked."""
    zero = torch.zeros_like(reward)
    return gae(reward, zero, zero, terminated, truncated, mask, gamma=gamma, gae_lambda=1.0, steps=steps)[0]


@torch.no_grad()
def reinforce_plus_plus(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    steps: int | Tensor = 1,
    whiten: bool = True,
) -> Tensor:
    """REINFORCE++ (Hu et al. 2025): return-to-go of the (KL-penalised) rewards, whitened over all unmasked rows.

    All [T, N] -> float32 [T, N], 0 at masked rows. whiten=False leaves the whitening to the caller, who has the
    moments of all ranks (``normalize``).
    """
    advantage = return_to_go(reward, terminated, truncated, mask, gamma=gamma, steps=steps)
    return normalize(advantage, mask)[0] if whiten else advantage


@torch.no_grad()
def reinforce_plus_plus_baseline(score: Tensor, mask: Tensor, group_size: int, *, whiten: bool = True) -> Tensor:
    """REINFORCE++ with a group baseline (Hu et al. 2025): s_i − μ_g on every unmasked row, whitened over all.

    score [N], mask [T, N] -> float32 [T, N], 0 at masked rows. ``whiten`` as above, errors as ``grpo``.
    """
    centred = grpo(score, group_size, normalize_std=False, valid=mask.bool().any(0))
    advantage = torch.where(mask.bool(), centred, 0.0)
    return normalize(advantage, mask)[0] if whiten else advantage


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
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advantage and returns, float32 [T, N], by the name of the estimator; arguments as ``gae``.

    The critic-free estimators take a column's score, the sum of its unmasked rewards (undiscounted; a column is one
    episode or response), and give every unmasked row of the column the same advantage; reinforce and
    reinforce_plus_plus give each row its return-to-go. None of them reads a value. Their returns, which only train a
    critic that happens to be there, are the λ=1 targets of ``gae``: the discounted rewards to the episode's end, or to
    the value where the clock or the rollout cut it. ``whiten`` as in ``reinforce_plus_plus``.
    Raises ConfigError for another adv_type and as the estimators do.
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
    if adv_type == "reinforce":
        return return_to_go(reward, terminated, truncated, mask, gamma=gamma, steps=steps), returns
    if adv_type == "reinforce_plus_plus":
        advantage = reinforce_plus_plus(reward, terminated, truncated, mask, gamma=gamma, steps=steps, whiten=whiten)
        return advantage, returns
    score = torch.where(mask.bool(), reward.double(), 0.0).sum(0)  # [N]
    if adv_type == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline(score, mask, group_size, whiten=whiten), returns
    relative = grpo if adv_type == "grpo" else rloo
    column = relative(score, group_size, valid=mask.bool().any(0))
    return torch.where(mask.bool(), column, 0.0), returns


# ------------------------------------------------------------------------------------------------------ normalisation
@torch.no_grad()
def normalize(advantage: Tensor, mask: Tensor, *, moments: Moments | None = None) -> tuple[Tensor, Moments]:
    """(A − μ)·rsqrt(σ² + 1e-8) with unbiased σ² over unmasked entries; float32 [..] -> same, 0 where masked.

    ``moments``: those of all ranks (``moments.merge_moments``); None: this tensor's own. Returns the moments used. With
    ``moments.count`` below 2 nothing can be standardised and the advantage comes back unchanged: the caller says so.
    """
    moments = masked_moments(advantage, mask) if moments is None else moments
    if float(moments.count) < 2:
        return advantage, moments
    scaled = (advantage.double() - moments.mean) * torch.rsqrt(moments.var + EPS)
    return torch.where(expand_mask(mask, advantage), scaled, 0.0).float(), moments


def clip(x: Tensor, c: float | None) -> Tensor:
    """Clamp to ±c, any shape; None: as it is."""
    return x if c is None else x.clamp(-c, c)


# ------------------------------------------------------------------------------------------------------------ rewards
@torch.no_grad()
def shape_rewards(
    reward: Tensor,
    mask: Tensor,
    *,
    norm: str | None = None,
    shift: bool = False,
    scale: bool = False,
    clip: float | None = None,
    group_size: int = 1,
    running_std: Tensor | float | None = None,
) -> Tensor:
    """Clamp, then normalise rewards, before any KL is subtracted; [T, N] -> float32 [T, N].

    1. clip: r ← clamp(r, ±clip)
    2. norm: r ← (r − μ)·rsqrt(σ² + 1e-8); with shift alone r − μ, with scale alone r·rsqrt(σ² + 1e-8)
       batch    μ, σ (unbiased) over all unmasked entries
       group    over the unmasked entries of each group of columns
       running  r / running_std, the deviation of the discounted return (``ReturnScaler.std``); no mean is subtracted
    Where fewer than 2 entries share a μ and σ they stay as they are; a deviation below 1e-6 divides nothing.

    Masked rows come back untouched. A reward that is one score per column is normalised as such by passing [1, N]
    scores before they are put on a token.
    Raises ConfigError for another norm, shift with running, running without its deviation, and groups as ``grpo``.
    """
    if norm not in REWARD_NORMS:
        raise ConfigError(f"algorithm.reward_norm = {norm}: must be null, batch, group or running")
    keep = mask.bool()
    x = reward.double() if clip is None else reward.double().clamp(-clip, clip)
    if norm == "running":
        if shift:
            raise ConfigError(
                "algorithm.reward_shift = true: must be false with algorithm.reward_norm = running, which only divides "
                "by the deviation of the discounted return; use reward_norm=batch to subtract a mean"
            )
        if running_std is None:
            raise ConfigError(
                "algorithm.reward_norm = running: needs the running deviation; pass running_std=ReturnScaler.std"
            )
        x = x / running_std
    elif norm is not None:
        T, N = x.shape
        groups = _groups(torch.arange(N, device=x.device), group_size) if norm == "group" else None
        size = N if groups is None else groups.shape[1]
        x = _standardise(x.reshape(T, -1, size), keep.reshape(T, -1, size), shift=shift, scale=scale).reshape(T, N)
    return torch.where(keep, x, reward.double()).float()


def _standardise(x: Tensor, keep: Tensor, *, shift: bool, scale: bool) -> Tensor:
    """The norm of ``shape_rewards`` within each of G sets of columns; x, keep [T, G, n], float64."""
    kept = torch.where(keep, x, 0.0)
    count = keep.sum((0, 2), keepdim=True).double()  # [1, G, 1]
    mean = kept.sum((0, 2), keepdim=True) / count.clamp(min=1)
    var = torch.where(keep, x - mean, 0.0).square().sum((0, 2), keepdim=True) / (count - 1).clamp(min=1)
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
    """(r − μ)·rsqrt(σ² + 1e-8) + μ over unmasked entries, unbiased σ². TRL keeps the mean, ROLL does not (no + μ).

    float32 [T, N] -> float32 [T, N]; masked rows untouched; fewer than 2 entries stay as they are.
    """
    moments = masked_moments(reward, mask)
    if float(moments.count) < 2:
        return reward
    white, _ = normalize(reward, mask, moments=moments)
    white = white + moments.mean if keep_mean else white
    return torch.where(mask.bool(), white, reward.double()).float()


class ReturnScaler(nn.Module):
    """Deviation of the discounted return, by which rewards are divided (Engstrom et al. 2020, section 2).

    Each environment runs G_t = γ^k·(1 − done_{t−1})·G_{t−1} + r_t across rollouts; the moments of all G_t ever seen
    give the scale. State, in state_dict: ``moments`` (float64) and ``running`` float64 [N], G after the last row, 0
    where that ended an episode.
    """

    running: Tensor

    def __init__(self, num_envs: int):
        super().__init__()
        self.moments = RunningMoments(())
        self.register_buffer("running", torch.zeros(num_envs, dtype=torch.float64))

    @torch.no_grad()
    def update(self, reward: Tensor, done: Tensor, mask: Tensor, gamma: float, steps: int | Tensor = 1) -> None:
        """Run G over a rollout and merge it; reward, done, mask [T, N]. Masked rows neither move nor enter G."""
        keep = mask.bool()
        reward = torch.where(keep, reward.double(), 0.0)
        discount = gamma**steps
        alive = (~done.bool()).double()
        carry = torch.where(keep, alive * discount, 1.0)  # after row t: where(mask, G_t·(1 − done_t), as before)
        after = torch.cat([self.running.double().unsqueeze(0), reward * alive])  # [T+1, N], row 0 is the last rollout's
        carry = torch.cat([torch.ones_like(carry[:1]), carry])  # [T+1, N], from the row before
        after = _scan(carry.flip(0), after.flip(0)).flip(0)
        returns = reward + discount * after[:-1]  # [T, N]
        self.running.copy_(after[-1])
        self.moments.update(returns.flatten(), keep.flatten())

    @property
    def std(self) -> Tensor:
        """sqrt(var + 1e-8), float64 scalar; 1 before the first update."""
        return torch.where(self.moments.count > 0, torch.sqrt(self.moments.var + EPS), 1.0)

    @property
    def scale(self) -> Tensor:
        """1 / std, float64 scalar."""
        return 1.0 / self.std
