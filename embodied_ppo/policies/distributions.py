"""Action distributions as pure functions: Gaussian, squashed Gaussian, categorical, flow step.

Log-probabilities are [B, A], per dimension, for continuous actions and [B] for categorical ones.
Random numbers come only from the given generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
HALF_LOG_2PI_E = HALF_LOG_2PI + 0.5
IMPOSSIBLE = -1e9
"""Logit of a choice that is not possible: its probability is exactly 0, and p log p is not NaN."""


def gaussian_noise(
    shape: Sequence[int], generator: Generator | None, device: torch.device | None = None
) -> Tensor:
    """Return N(0, 1) numbers of ``shape``, float32, for ``gaussian_sample``."""
    return torch.randn(*shape, generator=generator, device=device)


def gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Return x = mean + exp(log_std) * noise, [B, A]."""
    return torch.addcmul(mean, log_std.exp(), noise)


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return log N(x; mean, exp(log_std)^2) per dimension, [B, A] -> [B, A].

    log p = -((x - mean) / std)^2 / 2 - log_std - log(2 pi) / 2
    """
    z = (x - mean) * (-log_std).exp()
    return -0.5 * z * z - log_std - HALF_LOG_2PI


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """Return KL(N(mean, std^2) || N(other_mean, other_std^2)) per dimension, [B, A].

    KL = log(other_std / std) + (std^2 + (mean - other_mean)^2) / (2 other_std^2) - 1/2
    """
    variance = (2.0 * log_std).exp() + (mean - other_mean).square()
    return other_log_std - log_std + 0.5 * variance * (-2.0 * other_log_std).exp() - 0.5


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return H = log_std + log(2 pi e) / 2 per dimension, [B, A] (``log_std`` may be [A])."""
    return (log_std + HALF_LOG_2PI_E).expand_as(mean)


def log_tanh_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), without cancellation for large
    |u|.
    """
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def squashed_log_prob(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-probability of a = tanh(u), u ~ N(mean, std), per dimension.

    log p(a) = log N(u; mean, std^2) - log(1 - tanh(u)^2)

    Source: Haarnoja et al. 2018, appendix C, eq. 21.
    """
    return gaussian_log_prob(u, mean, log_std) - log_tanh_slope(u)


def squashed_entropy(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return a one-sample estimate of H(tanh(u)) = H(u) + E[log(1 - tanh(u)^2)] per dimension.

    The sample is written as mean + std * noise with constant noise, which gives the pathwise
    gradient. The gradient of -log p of a constant sample has expectation zero, so that a bonus on
    it would have no effect.
    """
    noise = ((u - mean) * (-log_std).exp()).detach()
    return gaussian_entropy(mean, log_std) + log_tanh_slope(mean + log_std.exp() * noise)


def categorical_noise(
    shape: Sequence[int], generator: Generator | None, device: torch.device | None = None
) -> Tensor:
    """Return Exp(1) numbers of ``shape``, float32, for ``categorical_sample``."""
    noise = torch.empty(*shape, device=device).exponential_(generator=generator)
    return noise.clamp_(min=1e-30)  # argmax would select 0/0


def categorical_sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Return indices [B] drawn from softmax(logits [B, K]).

    argmax_k p_k / e_k with e ~ Exp(1) is distributed as p (exponential race).
    """
    return (logits.softmax(-1) / noise).argmax(-1)


def categorical_log_prob(action: Tensor, logits: Tensor) -> Tensor:
    """Return log softmax(logits)[action], int64 [B] and [B, K] -> [B]."""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Return H = -sum p log p, [B, K] -> [B]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(p || q) = sum p (log p - log q) of softmax distributions, [B, K] -> [B]."""
    log_p, log_q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def mask_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Set logits to ``IMPOSSIBLE`` where ``mask`` is False.

    Args:
        logits: [B, K], or more columns, which do not change.
        mask: bool [B, K], True for possible choices.
    """
    k = mask.shape[-1]
    masked = logits[..., :k].masked_fill(~mask, IMPOSSIBLE)
    return masked if k == logits.shape[-1] else torch.cat([masked, logits[..., k:]], dim=-1)


def flow_step(x: Tensor, v: Tensor, tau: Tensor, delta: float, eta: float) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a stochastic step of a flow from time ``tau`` to
    ``tau`` - ``delta``.

    With v = dx/dtau and sigma = eta sqrt(tau / (1 - tau)), the action is estimated as a = x - tau v
    and the noise as e = x + (1 - tau) v:

        mean = a (1 - (tau - delta)) + e (tau - delta - sigma^2 delta / (2 tau))
        std = sigma sqrt(delta)

    At tau = 1 the denominator 1 - tau of sigma is replaced by delta. For eta -> 0 the mean is the
    deterministic flow, x - delta v.

    Source: Flow-GRPO, Liu et al. 2025, arXiv 2505.05470.

    Args:
        x: [B, ..].
        v: [B, ..].
        tau: Broadcasts to x.
        delta: Length of the step.
        eta: Scale of the noise.

    Returns:
        Mean [B, ..] and standard deviation, of the shape of ``tau``.
    """
    var = eta * eta * delta * tau / (1 - tau.clamp(max=1 - delta))
    a, e = x - tau * v, x + (1 - tau) * v
    return a * (1 - (tau - delta)) + e * (tau - delta - var / (2 * tau)), var.sqrt()
