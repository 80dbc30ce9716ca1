"""Distance to the reference policy: estimators, the penalty in the reward, and controllers of its weight.

Δ = lp − lp_ref of the taken action, in nats; [..] is any shape of log-probabilities.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

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
    """KL(policy || reference) per element (Schulman 2020, "Approximating KL divergence").

    k1 Δ · abs |Δ| · k2 ½Δ² · k3 e^{−Δ} − 1 + Δ (Δ clamped to ±20, result to ±10) · full Σ_a π·(log π − log π_ref)
    k1+, abs+, k2+, k3+: that value with the gradient of k2, which is the KL's own in expectation (Tang & Munos 2025)

    log_prob, ref_log_prob [..] -> [..], gradient through log_prob only. ``full`` reads logits, ref_logits [.., K]
    -> [..] and neither log-probability. E[k1] = E[k3] = KL under the policy (but for the clamps); k2 is biased.
    Raises ConfigError for another kind, or full without both logits.
    """
    if kind not in KINDS:
        raise ConfigError(f"kl estimator = {kind}: must be one of {', '.join(KINDS)}")
    if kind == "full":
        return _full(logits, ref_logits)
    if ref_log_prob is None:
        raise ConfigError(f"kl estimator = {kind}: needs the reference policy's log-probabilities; load a reference")
    delta = log_prob - ref_log_prob.detach()
    value = _sampled(delta, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    k2 = 0.5 * delta.square()
    return k2 - k2.detach() + value.detach()


def _sampled(delta: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return delta
    if kind == "abs":
        return delta.abs()
    if kind == "k2":
        return 0.5 * delta.square()
    delta = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.expm1(-delta) + delta).clamp(-RESULT_LIMIT, RESULT_LIMIT)


def _full(logits: Tensor | None, ref_logits: Tensor | None) -> Tensor:
    if logits is None or ref_logits is None:
        raise ConfigError(
            "kl estimator = full: needs logits of policy and reference, which only categorical policies have; use k3"
        )
    log_p = logits.log_softmax(-1)
    log_q = ref_logits.detach().log_softmax(-1)
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(-1)  # an impossible action adds 0


def check_loss_type(kind: str) -> None:
    """Refuse estimators that cannot train: the expected gradient of k1 is E[∇ log π] = 0. Raises ConfigError."""
    if kind not in KINDS:
        raise ConfigError(f"algorithm.kl_loss_type = {kind}: must be one of {', '.join(KINDS)}")
    if kind == "k1":
        raise ConfigError(
            "algorithm.kl_loss_type = k1: its expected gradient is zero, so it trains nothing; use k2, k3 or k1+"
        )


@torch.no_grad()
def penalize(reward: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """r_t − β·kl_t on unmasked rows (Ziegler et al. 2019, eq. 2).

    reward, mask [..]; kl [.., *trailing], summed over trailing dimensions (parts of one action) -> float32 [..].
    """
    kl = kl.flatten(reward.ndim).sum(-1) if kl.ndim > reward.ndim else kl
    return torch.where(mask.bool(), reward - coef * kl, reward)


# -------------------------------------------------------------------------------------------------------- controllers
class KLController(Protocol):
    """The weight β of the KL penalty. Read ``coef`` for an update, call ``update`` after it."""

    coef: float

    def update(self, kl: float, n: int) -> None:
        """kl: mean over sequences of the per-token mean (nats), n: sequences it was measured on."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKL:
    """β as configured, for ever."""

    def __init__(self, coef: float):
        self.coef = float(coef)

    def update(self, kl: float, n: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])


class AdaptiveKL:
    """β steered towards a target KL (Ziegler et al. 2019, section 2.2; KL as in verl: a mean per token, not a sum).

    e = clip(KL/target − 1, ±0.2) ; β ← β·(1 + e·n/horizon), n sequences
    """

    def __init__(self, coef: float, *, target: float, horizon: float):
        for name, number in (("target_kl", target), ("horizon", horizon)):
            if number <= 0:
                raise ConfigError(f"algorithm.kl_ctrl.{name} = {number:g}: must be > 0")
        self.coef = float(coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """``KLController.update``. ConfigError where one step could make β negative, TrainingError for a NaN."""
        if not math.isfinite(kl):
            raise TrainingError(
                f"KL to the reference = {kl}: the KL controller needs a finite one; lower lr or max_grad_norm"
            )
        if STEP_LIMIT * n >= self.horizon:
            raise ConfigError(
                f"algorithm.kl_ctrl.horizon = {self.horizon:g}: must be > {STEP_LIMIT:g} x {n} sequences an update, or "
                f"the coefficient could turn negative; set it to {10 * n} or more"
            )
        error = min(max(kl / self.target - 1.0, -STEP_LIMIT), STEP_LIMIT)
        self.coef *= 1.0 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])


def controller(type: str, *, kl_coef: float, horizon: float, target_kl: float) -> FixedKL | AdaptiveKL:
    """The controller that ``algorithm.kl_ctrl`` describes. Raises ConfigError for another type."""
    if type == "fixed":
        return FixedKL(kl_coef)
    if type == "adaptive":
        return AdaptiveKL(kl_coef, target=target_kl, horizon=horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type = {type}: must be fixed or adaptive")
