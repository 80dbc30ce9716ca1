"""One optimiser step of REPPO as a function of tensors only.

REPPO (Voelcker et al. 2025, "Relative Entropy Pathwise Policy Optimization") learns the action
value Q of the policy, and improves the policy by the gradient of Q with respect to the action. Both
are regularised by the entropy, and the policy stays close to the one that began the update:

    L_Q      = cross-entropy of Q(s, a) to the target value (models.action_value)
    L_policy = α·log π(a'|s) - Q(s, a')   where KL(π_old || π) < limit in the state s
             = β·KL(π_old || π)           otherwise
    α        rises while the entropy is below its target, and β while the KL is above its limit;
             both fall otherwise, to MIN_COEFFICIENT

with a' = tanh(mean + std · noise), so that the gradient of L_policy passes through the action.

B samples of a minibatch, A action dimensions, D numbers of an observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from embodied_ppo.algorithms.ppo_loss import adamw_step
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.models import action_value
from embodied_ppo.models import distributions as dist
from embodied_ppo.models.action_value import ActionValue
from embodied_ppo.models.actor_critic import ActorCritic

STEP_OPTIONS = ("adam_beta1", "adam_beta2", "adam_eps", "max_grad_norm")
"""Options of the algorithm that ``ReppoStep`` reads."""
STATISTICS = (
    *("policy_loss", "value_loss", "entropy", "kl", "value", "actor_norm", "critic_norm"),
    *("entropy_coef", "kl_coef"),
)
"""Entries of the result of ``ReppoStep``; means over the minibatch, and value_loss is the sum over
the networks of Q."""
MIN_COEFFICIENT = 1e-4
"""Smallest α and β. Without it, α falls as long as the entropy is above its target (measured: to
1.5e-6), and takes about 60 updates to rise again when the entropy falls below."""
DUAL_LR = 1e-3
"""Learning rate of log α and log β. It does not follow ``algorithm.lr_schedule``: with a falling
rate, the entropy would no longer return to its target."""
ENTROPY, KL = 0, 1
"""Positions of log α and log β in the vector of both."""


@dataclass(frozen=True)
class Samples:
    """What a minibatch is drawn from. Leaves are [M, ..].

    Attributes:
        inputs: Encoded observations.
        action: Executed actions, float32 [M, A].
        target: Target of Q, float32 [M].
        mean: Mean of the policy that began the update, before the tanh, float32 [M, A].
        log_std: Logarithm of its standard deviation, float32 [M, A].
    """

    inputs: dict[str, Tensor]
    action: Tensor
    target: Tensor
    mean: Tensor
    log_std: Tensor


def sample_action(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions tanh(u) [B, A] and their log-probabilities [B], with gradients through both.

    Args:
        mean: Mean before the tanh, [B, A].
        log_std: Logarithm of the standard deviation, [B, A] or [A].
        noise: N(0, 1) numbers, [B, A].
    """
    u = dist.gaussian_sample(mean, log_std, noise)
    return u.tanh(), dist.squashed_log_prob(u, mean, log_std).sum(-1)


class ReppoStep:
    """One step of the critic, then of the policy, then of both coefficients.

    Parameters and moments change in place. Where the settings are 0, nothing changes.
    """

    def __init__(
        self,
        policy: ActorCritic,
        critic: ActionValue,
        config: AlgorithmConfig,
        samples: Samples,
        entropy_target: float,
    ) -> None:
        """Create the function.

        Args:
            policy: The policy, a squashed Gaussian.
            critic: Q.
            config: Options of the algorithm.
            samples: Only their structure is kept.
            entropy_target: Target of the entropy of an action, nats.
        """
        self.policy, self.critic = policy, critic
        self.config = SimpleNamespace(**{name: getattr(config, name) for name in STEP_OPTIONS})
        self.entropy_target = entropy_target
        self.samples = tree.map(lambda x: x.new_empty(0), samples)
        self.actor_names = [name for name, _ in policy.named_parameters()]
        self.critic_names = [name for name, _ in critic.named_parameters()]

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Take one step and return ``STATISTICS``, float32 [K].

        Args:
            tensors: Parameters (of the policy, of the critic, and log α and log β [2]), their first
                moments, their second moments; settings [3, 2]: step and inv of ``adamw_step`` for
                policy, critic and coefficients; the limit of the KL, a scalar; indices int64 [B];
                noise [B, A]; leaves of ``Samples``.
        """
        n, actors = len(self.actor_names) + len(self.critic_names) + 1, len(self.actor_names)
        params, first_moments = tensors[:n], tensors[n : 2 * n]
        second_moments = tensors[2 * n : 3 * n]
        settings, max_kl, index, noise, *others = tensors[3 * n :]
        leaves = iter(others)
        b: Samples = tree.map(lambda _: next(leaves).index_select(0, index), self.samples)

        # 1. The critic.
        grad_params = [p.detach().requires_grad_() for p in params[actors : n - 1]]
        logits = self._logits(grad_params, b.inputs, b.action)
        value_loss = action_value.cross_entropy(logits, b.target).mean(-1).sum()
        critic_grads = torch.autograd.grad(value_loss, grad_params)
        critic_norm = self._apply(
            params[actors : n - 1],
            critic_grads,
            (first_moments[actors : n - 1], second_moments[actors : n - 1]),
            settings[1],
        )
        critic = [p.detach() for p in params[actors : n - 1]]

        # 2. The policy, with the new critic.
        log_coefficients = params[-1].detach()
        alpha, beta = log_coefficients.exp().unbind()
        grad_params = [p.detach().requires_grad_() for p in params[:actors]]
        mean, log_std = self._distribution(grad_params, b.inputs)
        action, log_prob = sample_action(mean, log_std, noise)
        value = action_value.min_value(self._logits(critic, b.inputs, action))
        kl = dist.gaussian_kl(b.mean, b.log_std, mean, log_std).sum(-1)
        pathwise_loss = alpha * log_prob - value
        policy_loss = torch.where(kl.detach() < max_kl, pathwise_loss, beta * kl).mean()
        actor_norm = self._apply(
            params[:actors],
            torch.autograd.grad(policy_loss, grad_params),
            (first_moments[:actors], second_moments[:actors]),
            settings[0],
        )

        # 3. The coefficients: gradients of α·(H - target) and β·(limit - KL) by log α and log β.
        entropy, mean_kl = -log_prob.detach().mean(), kl.detach().mean()
        excess = torch.stack([entropy - self.entropy_target, max_kl - mean_kl])
        gradient = log_coefficients.exp() * excess
        self._step(params[-1], gradient, (first_moments[-1], second_moments[-1]), settings[2])
        params[-1].clamp_(min=math.log(MIN_COEFFICIENT))
        return torch.stack(
            [
                *(policy_loss.detach(), value_loss.detach(), entropy, mean_kl),
                *(value.detach().mean(), actor_norm, critic_norm, alpha, beta),
            ]
        )

    def _logits(
        self, params: Sequence[Tensor], inputs: dict[str, Tensor], action: Tensor
    ) -> Tensor:
        named = {f"critic.{name}": p for name, p in zip(self.critic_names, params, strict=True)}
        return torch.func.functional_call(_Logits(self.critic), named, (inputs, action))

    def _distribution(
        self, params: Sequence[Tensor], inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        named = {f"policy.{name}": p for name, p in zip(self.actor_names, params, strict=True)}
        return torch.func.functional_call(_Distribution(self.policy), named, (inputs,))

    @torch.no_grad()
    def _apply(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: tuple[Sequence[Tensor], Sequence[Tensor]],
        settings: Tensor,
    ) -> Tensor:
        """Clip gradients, take a step of AdamW and return the norm of the gradients."""
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        if (limit := self.config.max_grad_norm) is not None:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            grads = [g * factor for g in grads]
        for p, g, first_moment, second_moment in zip(params, grads, *moments, strict=True):
            self._step(p, g, (first_moment, second_moment), settings)
        return norm

    @torch.no_grad()
    def _step(self, p: Tensor, g: Tensor, moments: tuple[Tensor, Tensor], settings: Tensor) -> None:
        """Take a step of AdamW with gradient ``g``."""
        step, inv = settings.unbind()
        results = adamw_step(
            *(p, *moments, g, self.config),  # pyright: ignore[reportArgumentType]
            step=step,
            inv=inv,
            decay=torch.zeros_like(step),
        )
        for old, new in zip((p, *moments), results, strict=True):
            old.copy_(torch.where(step > 0, new, old))


class _Logits(torch.nn.Module):
    """``ActionValue.logits`` as a forward method, which ``functional_call`` needs."""

    def __init__(self, critic: ActionValue) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, inputs: dict[str, Tensor], action: Tensor) -> Tensor:
        return self.critic.logits(inputs, action)


class _Distribution(torch.nn.Module):
    """``ActorCritic.distribution`` as a forward method, which ``functional_call`` needs."""

    def __init__(self, policy: ActorCritic) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.policy.distribution(inputs)
