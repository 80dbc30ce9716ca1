"""Means and variances: of masked tensors, running ones, and both mergeable across ranks.

Everything is accumulated in float64, so that a merge of many small batches equals one pass over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.core.types import ConfigError


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of ``count`` entries; float64, equal shapes for mean and var, scalar count. Unpacks in order.

    Nothing counted is mean 0, var 0, count 0; one entry has var 0: ask ``count``, not ``var``, whether it was enough.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.mean, self.var, self.count)


# ----------------------------------------------------------------------------------------------------- masked tensors
def expand_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Bool mask [..] seen as x's shape [.., *trailing] (a view: no copy).

    Raises ConfigError if the mask's dimensions are not the leading ones of x.
    """
    if mask.shape != x.shape[: mask.ndim]:
        raise ConfigError(
            f"mask {tuple(mask.shape)}: must be the leading dimensions of {tuple(x.shape)}; check the *_type levels"
        )
    return mask.bool().reshape(mask.shape + (1,) * (x.ndim - mask.ndim)).expand_as(x)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Σ x over unmasked entries; x [.., *trailing], mask [..]; scalar, x's dtype. NaN outside the mask is not seen."""
    return torch.where(expand_mask(mask, x), x, torch.zeros((), dtype=x.dtype, device=x.device)).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Σ x·m / Σ m; x [.., *trailing], mask [..]; scalar, x's dtype, NaN with nothing unmasked (as ``Mean.value``)."""
    return masked_sum(x, mask) / expand_mask(mask, x).sum()


def masked_moments(x: Tensor, mask: Tensor, unbiased: bool = True) -> Moments:
    """Moments over all unmasked entries; x [.., *trailing], mask [..]; float64 scalars.

    unbiased: Σ(x−μ)²/(n−1), else /n. The variance is 0 where that divides by zero.
    """
    keep = expand_mask(mask, x)
    count = keep.sum().double()
    x = torch.where(keep, x.double(), 0.0)
    mean = x.sum() / count.clamp(min=1)
    square = torch.where(keep, x - mean, 0.0).square().sum()
    return Moments(mean, square / (count - 1 if unbiased else count).clamp(min=1), count)


def batch_moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Population moments per feature; x [M, *shape], mask [M] (None: all) -> mean, var float64 [*shape], count []."""
    x = x.double() if mask is None else x[mask.bool()].double()
    count = torch.tensor(float(x.shape[0]), dtype=torch.float64, device=x.device)
    if x.shape[0] == 0:
        zero = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
        return Moments(zero, zero, count)
    var, mean = torch.var_mean(x, dim=0, correction=0)
    return Moments(mean, var, count)


def merge_moments(parts: Sequence[Moments], *, unbiased: bool = True) -> Moments:
    """Moments of the union, e.g. over ranks (Chan, Golub & LeVeque 1979, the pairwise formula).

    n = n_a + n_b ; d = μ_b − μ_a ; μ = μ_a + d·n_b/n ; S = S_a + S_b + d²·n_a·n_b/n with S = Σ(x−μ)².
    ``unbiased`` says how every part's variance was taken and how the result's is.
    """
    mean, _, count = parts[0]
    total = parts[0].var * _degrees(count, unbiased)
    for b in parts[1:]:
        n = (count + b.count).clamp(min=1)
        d = b.mean - mean
        total = total + b.var * _degrees(b.count, unbiased) + d.square() * count * b.count / n
        mean = mean + d * b.count / n
        count = count + b.count
    return Moments(mean, total / _degrees(count, unbiased).clamp(min=1), count)


def _degrees(count: Tensor, unbiased: bool) -> Tensor:
    return (count - 1).clamp(min=0) if unbiased else count


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R−V)/Var(R) over unmasked entries, all [..]; float64 scalar, NaN where the returns do not vary.

    1: V predicts R; 0: no better than a constant; below 0: worse.
    """
    spread = masked_moments(returns, mask, unbiased=False).var
    error = masked_moments(returns.double() - value.double(), mask, unbiased=False).var
    return torch.where(spread > 0, 1 - error / spread, torch.nan)


# ---------------------------------------------------------------------------------------------------- running moments
class RunningMoments(nn.Module):
    """Mean and population variance, per feature, of everything ever merged.

    State (float64 buffers, kept float64 by ``.to(dtype)``): mean [*shape], var [*shape], count [].
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int] = (), eps: float = 1e-8):
        super().__init__()
        self.shape = tuple(shape)
        self.eps = eps
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge a batch: x [M, *shape] of any dtype, mask bool [M] (None: all); masked rows may hold anything."""
        self.merge(*batch_moments(x, mask))

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, count: Tensor | float) -> None:
        """Merge another's population moments [*shape] over ``count`` samples (the formula of ``merge_moments``)."""
        n = float(count)
        if n == 0:
            return
        mean = torch.as_tensor(mean, dtype=torch.float64, device=self.mean.device)
        var = torch.as_tensor(var, dtype=torch.float64, device=self.mean.device)
        w = n / (float(self.count) + n)  # the newcomers' share: mean, var ← mixtures, var gains w(1−w)d²
        d = mean - self.mean
        self.mean.lerp_(mean, w)
        self.var.lerp_(var, w).addcmul_(d, d, value=w * (1.0 - w))
        self.count.add_(n)

    def normalize(self, x: Tensor, clip: float | None = None, eps: float | None = None) -> Tensor:
        """(x − mean)·rsqrt(var + eps), clamped to ±clip; x [.., *shape] of any dtype -> float32 of the same shape.

        While nothing has been merged, x itself (clamped): mean is 0 and var 1. ``eps`` None: the constructor's.
        """
        inv = torch.rsqrt(self.var + (self.eps if eps is None else eps)).float()
        inv = torch.where(self.count > 0, inv, 1.0)
        x = x if x.dtype is torch.float64 else x.to(torch.float32)
        y = (x - self.mean.float()) * inv
        if clip is not None:
            y.clamp_(-clip, clip)
        return y.to(torch.float32)

    def _apply(self, fn: Any, recurse: bool = True) -> RunningMoments:
        """Move with the module, but stay float64 when it is cast to bfloat16."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"shape={self.shape}, count={float(self.count):g}"
