"""KL divergence from the reference policy: estimators.

Δ = lp − lp_ref of the taken action, in nats; [..] is any shape of log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Limits of |Δ| and of the result in k3.
EXPONENT_LIMIT, RESULT_LIMIT = 20.0, 10.0


def estimate(
    log_prob: Tensor,
    ref_log_prob: Tensor | None,
    kind: str,
    *,
    logits: Tensor | None = None,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per element.

    k1: Δ
    abs: |Δ|
    k2: ½Δ²
    k3: e^{−Δ} − 1 + Δ, with Δ clamped to ±20 and the result to ±10
    full: Σ_a π·(log π − log π_ref)
    k1+, abs+, k2+, k3+: the same value with the gradient of k2, whose expectation is the gradient
    of the KL

    E[k1] = E[k3] = KL under the policy, apart from the clamps; k2 is biased.

    Source: Schulman 2020, "Approximating KL divergence"; "+": Tang and Munos 2025.

    Args:
        log_prob: [..], lp, with gradient. Not used by full.
        ref_log_prob: [..], lp_ref. Not used by full.
        kind: One of the names above.
        logits: [.., K] of the policy, only for full, with gradient; [.., D, K] of D choices, whose
            distances are added.
        ref_logits: Of the reference, as ``logits``, only for full.

    Returns:
        [..].
    """
    if kind == "full":
        assert logits is not None and ref_logits is not None
        log_p, log_q = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
        p = log_p.exp()
        distance = (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)  # 0 · log 0 = 0
        # Distances of several choices are added.
        return distance if distance.ndim <= log_prob.ndim else distance.sum(-1)
    assert ref_log_prob is not None
    delta = log_prob - ref_log_prob.detach()
    match kind.removesuffix("+"):
        case "k1":
            value = delta
        case "abs":
            value = delta.abs()
        case "k2":
            value = 0.5 * delta.square()
        case "k3":
            # Without the limits exp could overflow, and a single token could dominate a mean.
            limited = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
            value = (torch.expm1(-limited) + limited).clamp(-RESULT_LIMIT, RESULT_LIMIT)
        case _:
            raise NotImplementedError(kind)
    if not kind.endswith("+"):
        return value
    # The value is that of the estimator, the gradient that of k2.
    k2 = 0.5 * delta.square()
    return k2 - k2.detach() + value.detach()
