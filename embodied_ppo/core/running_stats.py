"""Means and variances: of masked tensors and of a stream of batches, mergeable across ranks.

All sums are float64, so that merging many small batches equals one pass over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import COARSE


class Moments(NamedTuple):
    """Mean and variance of ``count`` entries, all float64.

    ``mean`` and ``var`` have equal shapes, ``count`` is a scalar. Without entries all three are 0.
    One entry has variance 0, so test ``count`` and not ``var`` for a sufficient number of entries.
    """

    mean: Tensor
    var: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


# ----------------------------------------------------------------------------------- masked tensors
def expand(x: Tensor, like: Tensor) -> Tensor:
    """Expand x [..], such as a mask, to the shape of ``like``, [.., *trailing], as a view.

    Raises:
        ConfigError: The dimensions of x are not the leading ones of ``like``.
    """
    if x.shape != like.shape[: x.ndim]:
        fact = f"mask {tuple(x.shape)}: must be the leading dimensions of {tuple(like.shape)}"
        raise ConfigError(f"{fact}; check the *_type levels")
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim)).expand_as(like)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return Σ x over unmasked entries: x [.., *trailing], mask [..] -> scalar of x's dtype.

    A NaN outside the mask affects neither the sum nor its gradient.
    """
    return torch.where(expand(mask, x), x, 0.0).sum()


def masked_moments(x: Tensor, mask: Tensor, unbiased: bool = True) -> Moments:
    """Return the moments over all unmasked entries: x [.., *trailing], mask [..] -> scalars.

    The variance is Σ(x−μ)²/(n−1), or /n if not ``unbiased``; 0 where the divisor would be 0.
    """
    keep = expand(mask, x)
    count = keep.sum().double()
    x = torch.where(keep, x.double(), 0.0)
    mean = x.sum() / count.clamp(min=1)
    square = torch.where(keep, x - mean, 0.0).square().sum()
    return Moments(mean, square / (count - 1 if unbiased else count).clamp(min=1), count)


def read_numbers(*scalars: Tensor) -> list[float]:
    """Return the values of tensors with one element each; the host waits for the device once."""
    return torch.stack([x.double() for x in scalars]).tolist()


# Numbers of which moments are computed at a time; their float64 copies take 32 MB each.
BLOCK = 1 << 22


def batch_moments(x: Tensor, mask: Tensor | None = None) -> Moments:
    """Return population moments of each feature.

    Args:
        x: [M, *shape], any dtype.
        mask: bool [M], None: all rows.

    Returns:
        float64 mean and var [*shape], scalar count.
    """
    keep = None if mask is None else mask.bool()
    # Features in turn: the float64 copies would be large.
    if x.numel() > BLOCK and x.ndim > 1 and x[0].numel() > 1:
        columns = x.reshape(x.shape[0], -1).split(max(1, BLOCK // x.shape[0]), dim=1)
        moments = (batch_moments(part, keep) for part in columns)
        means, variances, counts = zip(*moments, strict=True)
        mean, var = (torch.cat(parts).view(x.shape[1:]) for parts in (means, variances))
        return Moments(mean, var, counts[0])
    x = x.double() if keep is None else x[keep].double()
    count = torch.tensor(float(x.shape[0]), dtype=torch.float64, device=x.device)
    if x.shape[0] == 0:
        zero = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
        return Moments(zero, zero, count)
    var, mean = torch.var_mean(x, dim=0, correction=0)
    return Moments(mean, var, count)


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 − Var(R−V)/Var(R) over unmasked entries, float64 scalar.

    1: V predicts R. 0: V is no better than a constant. Below 0: worse than a constant. NaN where
    the returns do not vary, apart from rounding.

    Args:
        value: [..], V.
        returns: [..], R.
        mask: bool [..].
    """
    return_var = masked_moments(returns, mask, unbiased=False).var
    error_var = masked_moments(returns.double() - value.double(), mask, unbiased=False).var
    return torch.where(return_var > 1e-12 * error_var, 1 - error_var / return_var, torch.nan)


# ---------------------------------------------------------------------------------- running moments
# A feature is constant if its standard deviation is below this and below this times its mean.
CONSTANT = 1e-4


class Float64Buffers(nn.Module):
    """Module whose float64 buffers keep their type when it is cast to another one."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the buffers with the module but keep their types."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in buffers.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class RunningMoments(Float64Buffers):
    """Mean and population variance, per feature, of all merged batches.

    State (float64 buffers, which ``.to(dtype)`` keeps float64): mean [*shape], var [*shape], count
    [].
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(
        self,
        shape: Sequence[int] = (),
        eps: float = 1e-8,
        std_eps: float = 0.0,
        scale_constants: bool = True,
    ):
        """Start without samples.

        Args:
            shape: Shape of one sample.
            eps: Added to the variance.
            std_eps: Added to the standard deviation.
            scale_constants: Whether a feature that was constant is divided by its standard
                deviation, as others are. This may amplify it 10,000-fold. False: it is divided by
                the magnitude of its mean, at least 1.
        """
        super().__init__()
        self.shape = tuple(shape)
        self.eps, self.std_eps, self.scale_constants = eps, std_eps, scale_constants
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge a batch.

        Args:
            x: [M, *shape], any dtype. Masked rows may hold any value.
            mask: bool [M], None: all rows.
        """
        self.merge(*batch_moments(x, mask))

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, count: Tensor | float) -> None:
        """Merge population moments [*shape] over ``count`` samples.

        With the new samples' share w = n_new/n and d = μ_new − μ:
        μ ← μ + w·d,  σ² ← (1−w)·σ² + w·σ²_new + w(1−w)·d²

        Source: Chan, Golub and LeVeque 1979, the pairwise formula.
        """
        n = float(count)
        if n == 0:
            return
        mean = torch.as_tensor(mean, dtype=torch.float64, device=self.mean.device)
        var = torch.as_tensor(var, dtype=torch.float64, device=self.mean.device)
        w = n / (float(self.count) + n)
        d = mean - self.mean
        self.mean.lerp_(mean, w)
        self.var.lerp_(var, w).addcmul_(d, d, value=w * (1.0 - w))
        self.count.add_(n)

    def is_constant(self) -> Tensor:
        """Return which features had the same value in all samples, bool [*shape]."""
        return self.var <= (self.mean * CONSTANT).square_().clamp_(max=CONSTANT**2)

    def std(self) -> Tensor:
        """Return the divisor of ``normalize``, float64 [*shape]."""
        std = (self.var + self.eps).sqrt() + self.std_eps
        if self.scale_constants:
            return std
        return torch.where(self.is_constant(), self.mean.abs().clamp_(min=1.0), std)

    def normalize(self, x: Tensor, clip: float | None = None, eps: float | None = None) -> Tensor:
        """Return (x − mean) / (sqrt(var + eps) + std_eps), clamped to ±clip, as float32.

        Before the first merge, mean is 0 and the scale is 1, so that x is only clamped.

        Args:
            x: [.., *shape], any dtype.
            clip: Bound of the result's magnitude, None: no bound.
            eps: Added to the variance, None: the constructor's.
        """
        var = self.var + (self.eps if eps is None else eps)
        inv = (1.0 / (var.sqrt() + self.std_eps) if self.std_eps else torch.rsqrt(var)).float()
        if not self.scale_constants:
            unit = self.mean.abs().clamp_(min=1.0).reciprocal_().float()
            inv = torch.where(self.is_constant(), unit, inv)
        inv = torch.where(self.count > 0, inv, 1.0)
        x = x if x.dtype is torch.float64 else x.to(torch.float32)
        y = (x - self.mean.float()).mul_(inv)  # in place: observations of a rollout may be large
        if clip is not None:
            y.clamp_(-clip, clip)
        return y.to(torch.float32)

    def normalize_large(self, x: Tensor, clip: float | None = None) -> Tensor:
        """Return ``normalize`` of float64 x; in float64 where the mean is above COARSE.

        A difference of large numbers has no digits in float32: 5.3e6 is a multiple of 0.5.
        """
        y = self.normalize(x.float(), clip)
        exact = (x - self.mean) / self.std()
        if clip is not None:
            exact.clamp_(-clip, clip)
        return torch.where((self.mean.abs() >= COARSE) & (self.count > 0), exact.float(), y)
