"""Action distributions as pure functions: (squashed) Gaussian, beta, categorical, flow step.

Log-probabilities are [B, A], per dimension, for continuous actions and [B] for categorical ones.
Random numbers come only from the given generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
HALF_LOG_2PI_E = HALF_LOG_2PI + 0.5
# Distance that the number of a beta distribution keeps from 0 and 1, where log p is infinite.
BETA_MARGIN = 1e-6
# Proposals of a gamma number in ``beta_sample``. Each is rejected with p <= 0.049 (shape 1).
CANDIDATES = 4
# Logit of a choice that is not possible: its probability is exactly 0, and p log p is not NaN.
IMPOSSIBLE = -1e9


def gaussian_noise(
    shape: Sequence[int], generator: Generator | None, device: torch.device | None = None
) -> Tensor:
    """Return N(0, 1) numbers of ``shape``, float32, for ``gaussian_sample``."""
    return torch.randn(*shape, generator=generator, device=device)


def gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Return x = mean + exp(log_std) * noise, [B, A]."""
    return torch.addcmul(mean, log_std.exp(), noise)


def gaussian_mode(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the mean."""
    return mean


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


def beta_noise(
    shape: Sequence[int], generator: Generator | None, device: torch.device | None = None
) -> Tensor:
    """Return the random numbers of ``beta_sample`` for actions of ``shape`` [B, A], [B, 16 A]."""
    rows, size = shape
    numbers = (rows, 2 * CANDIDATES * size)
    uniform = torch.rand(*numbers, generator=generator, device=device)
    return torch.cat([gaussian_noise(numbers, generator, device), uniform], dim=1)


def beta_sample(alpha: Tensor, beta: Tensor, noise: Tensor) -> Tensor:
    """Return a = 2x - 1 with x = g / (g + h), g ~ Gamma(alpha), h ~ Gamma(beta), [B, A].

    A gamma number of shape k >= 1 is d v, d = k - 1/3, v = (1 + n / sqrt(9 d))^3 with n ~ N(0, 1),
    accepted if log u < n^2 / 2 + d (1 - v + log v), u ~ U(0, 1). The first accepted one of
    ``CANDIDATES`` is taken. Where all are rejected (p < 6e-6), v = 1.

    Source: Marsaglia and Tsang 2000, "A Simple Method for Generating Gamma Variables".
    """
    # [B, candidates, 2, A] each
    normal, uniform = noise.unflatten(-1, (2, CANDIDATES, 2, -1)).unbind(-4)
    d = torch.stack([alpha, beta], dim=-2).unsqueeze(-3) - 1 / 3
    v = (1 + normal * (9 * d).rsqrt()) ** 3
    bound = 0.5 * normal.square() + d * (1 - v + v.clamp(min=1e-30).log())
    accepted = (v > 0) & (uniform.log() < bound)
    chosen = torch.ones_like(v[..., 0, :, :])
    for k in reversed(range(CANDIDATES)):
        chosen = torch.where(accepted[..., k, :, :], v[..., k, :, :], chosen)
    g, h = (d.squeeze(-3) * chosen).unbind(-2)
    return 2 * (g / (g + h)).clamp(BETA_MARGIN, 1 - BETA_MARGIN) - 1


def beta_mean(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the mean of a = 2x - 1, [B, A]."""
    return 2 * alpha / (alpha + beta) - 1


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return log B = log G(alpha) + log G(beta) - log G(alpha + beta), G: the gamma function.

    Arguments are float64: the terms of a narrow distribution cancel.
    """
    return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()


def beta_log_prob(action: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the log-probability of a = 2x - 1, x ~ Beta(alpha, beta), per dimension, [B, A].

    log p(a) = (alpha - 1) log x + (beta - 1) log(1 - x) - log B(alpha, beta) - log 2

    x is computed from the action and keeps ``BETA_MARGIN`` from 0 and 1.
    """
    a, b = alpha.double(), beta.double()
    x = (0.5 * (action.double() + 1)).clamp(BETA_MARGIN, 1 - BETA_MARGIN)
    log_p = (a - 1) * x.log() + (b - 1) * (1 - x).log() - _log_beta(a, b) - math.log(2)
    return log_p.to(alpha.dtype)


def beta_entropy(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return the entropy of a = 2x - 1, x ~ Beta(alpha, beta), per dimension, [B, A].

    H = log B(alpha, beta) - (alpha - 1) psi(alpha) - (beta - 1) psi(beta)
        + (alpha + beta - 2) psi(alpha + beta) + log 2,  psi: the digamma function
    """
    a, b = alpha.double(), beta.double()
    expected = (a - 1) * a.digamma() + (b - 1) * b.digamma() - (a + b - 2) * (a + b).digamma()
    return (_log_beta(a, b) - expected + math.log(2)).to(alpha.dtype)


def beta_kl(alpha: Tensor, beta: Tensor, other_alpha: Tensor, other_beta: Tensor) -> Tensor:
    """Return KL(Beta(alpha, beta) || Beta(other_alpha, other_beta)) per dimension, [B, A].

    KL = log B(other) - log B + (alpha - other_alpha) psi(alpha) + (beta - other_beta) psi(beta)
         - (alpha + beta - other_alpha - other_beta) psi(alpha + beta)
    """
    a, b, c, d = (x.double() for x in (alpha, beta, other_alpha, other_beta))
    moments = (a - c) * a.digamma() + (b - d) * b.digamma() - (a + b - c - d) * (a + b).digamma()
    return (_log_beta(c, d) - _log_beta(a, b) + moments).to(alpha.dtype)


class Numbers(NamedTuple):
    """Functions of a distribution of numbers, see those of the Gaussian and the beta distribution.

    Its parameters [B, A] are mean and log_std, or alpha and beta.
    """

    noise: Callable[..., Tensor]
    sample: Callable[[Tensor, Tensor, Tensor], Tensor]
    # The action without noise.
    mode: Callable[[Tensor, Tensor], Tensor]
    log_prob: Callable[[Tensor, Tensor, Tensor], Tensor]
    entropy: Callable[[Tensor, Tensor], Tensor]
    kl: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __repr__(self) -> str:
        # Without addresses, which would be other compiled code in each process.
        return " ".join(function.__name__ for function in self)


_GAUSSIAN = Numbers(
    *(gaussian_noise, gaussian_sample, gaussian_mode, gaussian_log_prob),
    *(gaussian_entropy, gaussian_kl),
)
_BETA = Numbers(beta_noise, beta_sample, beta_mean, beta_log_prob, beta_entropy, beta_kl)
# Value of ``model.distribution`` -> distribution of numbers, before the tanh if it has one.
NUMBERS = dict.fromkeys(("auto", "gaussian", "squashed_gaussian"), _GAUSSIAN) | {"beta": _BETA}


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
