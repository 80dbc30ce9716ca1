"""KL divergence from the reference policy: estimators, reward penalty, controllers.

Δ = lp − lp_ref of the taken action, in nats; [..] is any shape of log-probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core.types import ConfigError, TrainingError

KINDS: tuple[str, ...] = ("k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+")
EXPONENT_LIMIT, RESULT_LIMIT, STEP_LIMIT = 20.0, 10.0, 0.2


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
        kind: One of KINDS.
        logits: [.., K] of the policy, only for full, with gradient.
        ref_logits: [.., K] of the reference, only for full.

    Returns:
        [..].

    Raises:
        ConfigError: Unknown ``kind``; full without both logits.
    """
    if kind not in KINDS:
        raise ConfigError(f"kl estimator = {kind}: must be one of {', '.join(KINDS)}")
    if kind == "full":
        return _full(logits, ref_logits)
    if ref_log_prob is None:
        raise ConfigError(
            f"kl estimator = {kind}: needs the reference policy's log-probabilities; load a"
            " reference"
        )
    delta = log_prob - ref_log_prob.detach()
    value = _sampled(delta, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    k2 = 0.5 * delta.square()
    return k2 - k2.detach() + value.detach()


def _sampled(delta: Tensor, kind: str) -> Tensor:
    """Return the estimate from the log-probability of the taken action."""
    if kind == "k1":
        return delta
    if kind == "abs":
        return delta.abs()
    if kind == "k2":
        return 0.5 * delta.square()
    assert kind == "k3", f"{kind} is in KINDS, but has no formula"
    delta = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.expm1(-delta) + delta).clamp(-RESULT_LIMIT, RESULT_LIMIT)


def _full(logits: Tensor | None, ref_logits: Tensor | None) -> Tensor:
    """Return the exact KL of two categorical distributions."""
    if logits is None or ref_logits is None:
        raise ConfigError(
            "kl estimator = full: needs logits of policy and reference, which only categorical"
            " policies have; use k3"
        )
    log_p = logits.log_softmax(-1)
    log_q = ref_logits.detach().log_softmax(-1)
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)  # 0 · log 0 = 0


def check_loss_type(kind: str) -> None:
    """Refuse estimators that cannot be trained on.

    The expected gradient of k1 is E[∇ log π] = 0.

    Raises:
        ConfigError: The kind is unknown or k1.
    """
    if kind not in KINDS:
        raise ConfigError(f"algorithm.kl_loss_type = {kind}: must be one of {', '.join(KINDS)}")
    if kind == "k1":
        raise ConfigError(
            "algorithm.kl_loss_type = k1: its expected gradient is zero, so it trains nothing; use"
            " k2, k3 or k1+"
        )


@torch.no_grad()
def penalize(reward: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Subtract the KL penalty from the rewards: r_t − β·kl_t in unmasked rows.

    Source: Ziegler et al. 2019, eq. 2.

    Args:
        reward: [..].
        kl: [.., *trailing], summed over trailing dimensions (parts of one action).
        mask: bool [..].
        coef: β.

    Returns:
        float32 [..].
    """
    kl = kl.flatten(reward.ndim).sum(-1) if kl.ndim > reward.ndim else kl
    return torch.where(mask.bool(), reward - coef * kl, reward)


# -------------------------------------------------------------------------------------- controllers
class KLController:
    """Coefficient β of the KL penalty: constant, or adapted to a target KL.

    e = clip(KL/target − 1, ±0.2);  β ← β·(1 + e·n/horizon) for n sequences

    Read ``coef`` for an update and call ``update`` after it.

    Source: Ziegler et al. 2019, section 2.2. The KL is a mean per token as in verl, not a sum.

    Args:
        coef: Initial β.
        target: Target KL, nats per token. None: β is constant.
        horizon: Number of sequences over which β adapts.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: float = 1.0):
        for name, number in (("target_kl", target), ("horizon", horizon)):
            if number is not None and number <= 0:
                raise ConfigError(f"algorithm.kl_ctrl.{name} = {number:g}: must be > 0")
        self.coef, self.target, self.horizon = float(coef), target, horizon

    def update(self, kl: float, n: int) -> None:
        """Adapt β.

        Args:
            kl: Mean over sequences of the mean KL per token, nats.
            n: Number of sequences.

        Raises:
            ConfigError: One step could make β negative.
            TrainingError: ``kl`` is not finite.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise TrainingError(
                f"KL to the reference = {kl}: the KL controller needs a finite one; lower lr or"
                " max_grad_norm"
            )
        if STEP_LIMIT * n >= self.horizon:
            raise ConfigError(
                f"algorithm.kl_ctrl.horizon = {self.horizon:g}: must be > {STEP_LIMIT:g} x {n}"
                f" sequences per update, or the coefficient could become 0 or negative; set it to"
                f" {10 * n} or more"
            )
        error = min(max(kl / self.target - 1.0, -STEP_LIMIT), STEP_LIMIT)
        self.coef *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state of a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self.coef = float(state["coef"])


def controller(type: str, *, kl_coef: float, horizon: float, target_kl: float) -> KLController:
    """Return the controller that ``algorithm.kl_ctrl`` describes.

    Raises:
        ConfigError: Unknown type.
    """
    if type == "fixed":
        return KLController(kl_coef)
    if type == "adaptive":
        return KLController(kl_coef, target=target_kl, horizon=horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type = {type}: must be fixed or adaptive")
