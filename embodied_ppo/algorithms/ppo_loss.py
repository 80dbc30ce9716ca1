"""The PPO loss of one minibatch, and one optimiser step as a function of tensors only.

L = L_policy - c_H·H + c_kl·KL + c_V·L_value (Schulman et al. 2017, eq. 9). ``ActorCriticLoss`` is
the loss of one model with two heads; ``ActorLoss`` and ``CriticLoss`` divide the terms between two
language models. Each loss is a module, so that its parameters can be passed as tensors.

T steps or response tokens, B samples (or columns) of a minibatch, L tokens of a row.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import kl, losses
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.core.recurrent_state import memory_size
from embodied_ppo.core.running_stats import masked_sum
from embodied_ppo.core.types import Batch, Policy
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy, ModuleReference

SETTINGS: tuple[str, ...] = (
    "actor_step",
    "critic_step",
    "actor_inv",
    "critic_inv",
    "actor_decay",
    "critic_decay",
    "entropy_coef",
)
"""Scalars that change from one minibatch to the next, in the order of ``MinibatchStep``'s vector.
"""

STEP_OPTIONS: tuple[str, ...] = (
    *("adam_beta1", "adam_beta2", "adam_eps", "bptt_length", "clip_ratio_c", "clip_ratio_high"),
    *("clip_ratio_low", "entropy_type", "huber_delta", "kl_loss_coef", "kl_loss_type"),
    *("logprob_type", "loss_agg_func", "max_grad_norm", "minibatch_unit", "policy_loss"),
    *("ratio_level", "value_clip", "value_loss_coef"),
)
"""Options of the algorithm that ``MinibatchStep`` reads.

It cannot read any other option, so that runs which differ in other options, such as the learning
rate, share one compiled library.
"""

Statistics: TypeAlias = "dict[str, Tensor]"
"""Name -> scalar without gradient; values add up over micro-batches, except ``ratio_max``, a
maximum.
"""
Aggregate: TypeAlias = "Callable[[Tensor], Tensor]"
"""Elementwise loss [..] or finer -> scalar."""


# -------------------------------------------------------------------------------------------- terms
def kl_distance(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    kind: str,
    logits: Any,
    ref_logits: Any,
    *,
    mask: Tensor,
    dims: int,
) -> Tensor:
    """Return KL(policy || reference), of the shape of ``mask``.

    Args:
        kind: estimator, see ``kl.estimate``.
        mask: [..] (one entry for each decision) or [.., C] (one for each action of a chunk).
        dims: number of dimensions of [..].
    """
    level = "chunk_level" if mask.ndim == dims else "action_level"
    policy, reference = (
        losses.reduce_log_prob(x, level, batch_dims=dims) for x in (log_prob, ref_log_prob)
    )
    return kl.estimate(policy, reference, kind, logits=logits, ref_logits=ref_logits)


def statistic_names(batch: Batch) -> tuple[str, ...]:
    """Return the names of the statistics that a loss returns for such a batch."""
    names: tuple[str, ...] = (
        "clip_fraction",
        "dual_clip_fraction",
        "approx_kl",
        "ratio_max",
        "count",
    )
    names += ("kl",) if batch.ref_log_prob is not None else ()
    return (*names, "loss", "policy_loss", "value_loss", "entropy", "value_clipped", "rows")


def _aggregate(b: Batch, c: AlgorithmConfig, denominator: Tensor, length: float) -> Aggregate:
    """Return the configured aggregation over the minibatch of which ``b`` is a part."""
    return lambda x: losses.aggregate(
        x, b.mask, aggregation=c.loss_agg_func, denominator=denominator, length=length
    )


def _value_loss(
    value: Tensor, b: Batch, c: AlgorithmConfig, aggregate: Aggregate
) -> tuple[Tensor, Statistics]:
    """Return the clipped Huber value loss of a micro-batch and its statistics; value [..]."""
    errors, clipped = losses.value_loss(
        value, b.value, b.returns, value_clip=c.value_clip, huber_delta=c.huber_delta
    )
    loss = aggregate(errors)
    return loss, {"value_loss": loss.detach(), "value_clipped": (clipped & b.mask).sum()}


# ------------------------------------------------------------------------------------------- losses
class Terms(NamedTuple):
    """What the loss of a policy reads of its model, with gradients.

    Attributes:
        log_prob: Log-probability of the taken actions under the current policy, [..] or finer.
        entropy: Entropy of the policy, [..] or finer.
        kl: Elementwise KL to the reference, [..] or finer. None without a reference.
        value: Output of the value head, [..]. None if the critic is a separate model.
    """

    log_prob: Tensor
    entropy: Tensor
    kl: Tensor | None = None
    value: Tensor | None = None


class PolicyLoss(nn.Module, ABC):
    """L = c_V·L_value + L_policy - c_H·H + c_kl·KL (Schulman et al. 2017, eq. 9).

    L_value is a part of it only where the policy has a value head.
    """

    def __init__(self, policy: nn.Module, config: AlgorithmConfig, *, length: float) -> None:
        """Create the loss.

        Args:
            policy: The model.
            config: Coefficients and aggregation.
            length: Divisor of seq-mean-token-sum-norm unless config.loss_scale_factor is set.
        """
        super().__init__()
        self.model: Any = policy
        self.config, self.length = config, float(config.loss_scale_factor or length)

    @abstractmethod
    def terms(self, b: Batch) -> Terms:
        """Evaluate the model on a micro-batch."""

    def forward(
        self,
        b: Batch,
        denominator: Tensor,
        rows: Tensor,
        *,
        entropy_coef: Tensor | float,
        critic_only: bool = False,
    ) -> tuple[Tensor, Statistics]:
        """Return the loss of a micro-batch, a scalar, and its statistics.

        Args:
            b: The micro-batch.
            denominator: Denominator of the policy's terms for the complete minibatch, see
                ``losses.denominator``.
            rows: Denominator of the value loss: unmasked rows of the complete minibatch.
            entropy_coef: c_H, scalar.
            critic_only: Whether the loss is c_V·L_value alone. Requires a value head; the optimizer
                of an ``ActorLoss`` never sets it.
        """
        c = self.config
        terms, aggregate = self.terms(b), _aggregate(b, c, denominator, self.length)
        has_bonus = isinstance(entropy_coef, Tensor) or entropy_coef != 0.0
        # Without a bonus the entropy is a statistic. Its gradient costs passes over all logits.
        entropies = terms.entropy if has_bonus else terms.entropy.detach()
        elements, statistics = losses.policy_loss(
            terms.log_prob,
            b.log_prob,
            b.advantage,
            b.mask,
            clip_ratio_low=c.clip_ratio_low,
            clip_ratio_high=c.clip_ratio_high,
            clip_ratio_c=c.clip_ratio_c,
            weight=b.weight,
            kind=c.policy_loss,
            ratio_level=c.ratio_level,
            batch_dims=2 if c.minibatch_unit == "column" else 1,
        )
        surrogate, entropy = aggregate(elements), aggregate(entropies)
        statistics |= {"policy_loss": surrogate.detach(), "entropy": entropy.detach()}
        kl_to_reference = None
        if terms.kl is not None:
            statistics["kl"] = masked_sum(terms.kl.detach(), b.mask)
            kl_to_reference = aggregate(terms.kl)
        if terms.value is None:
            loss = surrogate - entropy_coef * entropy
            statistics |= dict.fromkeys(
                ("value_loss", "value_clipped"), torch.zeros_like(surrogate.detach())
            )
        else:
            value_loss, value_statistics = _value_loss(
                terms.value, b, c, lambda x: losses.aggregate(x, b.mask, denominator=rows)
            )
            statistics |= value_statistics
            loss = c.value_loss_coef * value_loss
            if not critic_only:
                loss = loss + surrogate - entropy_coef * entropy
        if kl_to_reference is not None and not critic_only:
            loss = loss + c.kl_loss_coef * kl_to_reference
        return loss, statistics | {"loss": loss.detach(), "rows": b.mask.sum()}


class ActorCriticLoss(PolicyLoss):
    """The loss of a policy with a value head."""

    def __init__(self, policy: Policy, config: AlgorithmConfig) -> None:
        assert isinstance(policy, nn.Module)
        super().__init__(policy, config, length=config.horizon)

    def terms(self, b: Batch) -> Terms:
        c = self.config
        dims = 2 if c.minibatch_unit == "column" else 1
        if dims == 1:
            out = self.model.evaluate(b.inputs, b.action, b.replay)
        elif memory_size(self.model):
            out = self.model.evaluate_columns(b.inputs, b.action, b.replay, length=c.bptt_length)
        else:  # the model reads samples; columns are flattened for it and folded back
            flat = tree.flatten_time
            out = self.model.evaluate(flat(b.inputs), flat(b.action), flat(b.replay))
            out = tree.map(lambda x: x.unflatten(0, b.mask.shape[:2]), out)
        log_prob = losses.reduce_log_prob(out.log_prob, c.logprob_type, batch_dims=dims)
        entropy = losses.reduce_log_prob(out.entropy, c.entropy_type, batch_dims=dims)
        distance = None
        if b.ref_log_prob is not None:
            distance = kl_distance(
                out.log_prob,
                b.ref_log_prob,
                c.kl_loss_type,
                out.logits,
                b.ref_logits,
                mask=b.mask,
                dims=dims,
            )
        return Terms(log_prob, entropy, distance, out.value)


class ActorLoss(PolicyLoss):
    """The loss of a language model, whose critic is a separate model.

    A batch's inputs are "row" int64 [L, B], prompt and response without a gap, and "place" int64
    [T, B], the position in its row of the token before each response token. Everything else is
    [T, B].
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        config: AlgorithmConfig,
        *,
        length: int,
        reference: LanguagePolicy | None = None,
    ) -> None:
        """Create the loss.

        Args:
            policy: The language model.
            config: Coefficients and aggregation.
            length: response_length.
            reference: The reference policy, which ``kl_loss_type=full`` reads. It is not a part of
                this module's state.
        """
        super().__init__(policy, config, length=length)
        self.reference = ModuleReference(reference)

    def terms(self, b: Batch) -> Terms:
        full = b.ref_log_prob is not None and self.config.kl_loss_type == "full"
        view = self.model.view_where(
            b.mask,
            self.model.hidden(b.inputs["row"].T, b.inputs["place"].T),
            b.action,
            reference=self.reference.module if full else None,
            ref=b.ref_logits,
        )
        distance = view.distance
        if b.ref_log_prob is not None and not full:
            distance = kl.estimate(view.log_prob, b.ref_log_prob, self.config.kl_loss_type)
        assert view.entropy is not None
        return Terms(view.log_prob, view.entropy, distance)


class CriticLoss(nn.Module):
    """L = L_value of a separate critic; a batch is that of ``ActorLoss``."""

    def __init__(self, critic: LanguageCritic, config: AlgorithmConfig, *, length: int) -> None:
        """Create the loss.

        Args:
            critic: The critic.
            config: Coefficients and aggregation.
            length: response_length.
        """
        super().__init__()
        self.model, self.config = critic, config
        self.length = float(config.loss_scale_factor or length)

    def forward(
        self,
        b: Batch,
        denominator: Tensor,
        rows: Tensor,
        *,
        entropy_coef: Tensor | float,
        critic_only: bool = False,
    ) -> tuple[Tensor, Statistics]:
        """Return the loss of a micro-batch, a scalar, and its statistics.

        ``rows``, ``entropy_coef`` and ``critic_only`` are not used.

        Args:
            b: The micro-batch.
            denominator: Denominator of the loss for the complete minibatch, see
                ``losses.denominator``.
        """
        zeros = dict.fromkeys(statistic_names(b), b.advantage.new_zeros(()))
        value = self.model.value(b.inputs["row"].T, b.inputs["place"].T).T
        loss, statistics = _value_loss(
            value, b, self.config, _aggregate(b, self.config, denominator, self.length)
        )
        return loss, zeros | statistics | {"rows": b.mask.sum(), "loss": loss.detach()}


Loss: TypeAlias = "ActorCriticLoss | ActorLoss | CriticLoss"


# ------------------------------------------------------------------------------- one optimiser step
def take(batch: Batch, index: Tensor, unit: str) -> Batch:
    """Return the rows (``unit`` step) or columns (``unit`` column) ``index`` of a batch."""
    return tree.map(lambda x: x.index_select(1 if unit == "column" else 0, index), batch)


def adamw_settings(
    config: AlgorithmConfig,
    n: int,
    *,
    lr: Sequence[float],
    steps: Sequence[int],
    entropy_coef: float,
) -> Tensor:
    """Return rows of ``SETTINGS``, float32 [n, 7], for the next n steps of AdamW.

    AdamW (Loshchilov & Hutter 2019, alg. 2): step = lr/(1 − β1^t), inv = 1/sqrt(1 − β2^t), decay =
    lr·weight_decay.

    Args:
        lr: learning rates of actor and critic.
        steps: optimiser steps that actor and critic have taken, t of the first row is one more.
    """
    t = torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(1) + torch.tensor(
        steps, dtype=torch.float64
    )  # [n, 2]
    rate = torch.tensor(lr, dtype=torch.float64).expand(n, 2)
    columns = (
        rate / (1 - config.adam_beta1**t),
        (1 - config.adam_beta2**t).rsqrt(),
        rate * config.weight_decay,
    )
    return torch.cat(
        [*columns, torch.full((n, 1), entropy_coef, dtype=torch.float64)], dim=1
    ).float()


def adamw_step(
    p: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    c: AlgorithmConfig,
    *,
    step: Tensor,
    inv: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a parameter and its moments after one step of AdamW.

    m ← β1·m + (1 − β1)·g ; v ← β2·v + (1 − β2)·g² ; p ← p·(1 − decay) − step·m / (sqrt(v)·inv + ε)

    Source: Loshchilov & Hutter 2019, alg. 2. ``step``, ``inv`` and ``decay`` are those of
    ``adamw_settings``.

    The eager step uses ``torch.optim.AdamW(fused=True)`` instead. That kernel divides in another
    order, so that parameters differ in the last bit after the first step, and on a CPU it takes
    about a third of the time of these operations one by one. torch cannot compile the kernel into
    the library of the minibatch, where these operations are fused.
    """
    first = torch.lerp(first, grad, 1 - c.adam_beta1)
    second = second * c.adam_beta2 + grad * grad * (1 - c.adam_beta2)
    p = p * (1 - decay) - step * first / (second.sqrt() * inv + c.adam_eps)
    return p, first, second


class MinibatchStep:
    """Gather, forward, loss, backward, clipping and AdamW of one minibatch: tensors in, statistics
    out.

    Parameters and moments change in place. Nothing changes where a loss or gradient norm is not
    finite, or where the whole minibatch is masked. Results equal those of ``MinibatchOptimizer``'s
    eager step to float32 rounding. No value is read on the host, so that the step can be compiled
    or captured as one CUDA graph.
    """

    def __init__(
        self,
        loss: Loss,
        actor: Sequence[str],
        critic: Sequence[str],
        batch: Batch,
        buffers: Sequence[str] = (),
    ) -> None:
        """Create the function.

        Args:
            actor: names of the actor's parameters in ``loss.model``.
            critic: names of the critic's parameters.
            batch: a whole rollout; only its structure is kept.
            buffers: names of the buffers of ``loss.model`` that the loss reads.
        """
        self.loss: Any = copy.copy(loss)
        self.loss.config = SimpleNamespace(**{x: getattr(loss.config, x) for x in STEP_OPTIONS})
        self.names, self.actors = [f"model.{n}" for n in (*actor, *critic)], len(actor)
        self.buffers = [f"model.{n}" for n in buffers]
        self.batch = tree.map(lambda x: x.new_empty(0), batch)

    def statistics(self) -> tuple[str, ...]:
        """Return the names of the result's entries, in order.

        The last (``finite``) is not finite if the loss or a gradient is not finite; the step was
        then skipped. The step of a minibatch that is masked completely is skipped, too; its
        ``finite`` is 0.
        """
        return (*statistic_names(self.batch), "actor_norm", "critic_norm", "finite")

    def __call__(self, *tensors: Tensor) -> Any:
        """Take one step and return its statistics, float32 [K].

        Args:
            tensors: parameters, first moments, second moments, settings [7], index [B], buffers,
                leaves of the rollout.
        """
        n = len(self.names)
        settings, index, *others = tensors[3 * n :]
        grads, stats = self._gradients(tensors[:n], settings, index, index, others)
        return self._apply(tensors[: 3 * n], settings, grads, stats)

    def _gradients(
        self,
        params: Sequence[Tensor],
        settings: Tensor,
        index: Tensor,
        rows: Tensor,
        others: Sequence[Tensor],
    ) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """Return the gradients and statistics of some rows of a minibatch.

        Args:
            params: the parameters.
            settings: row of ``SETTINGS``.
            index: rows (columns) of the whole minibatch, whose counts divide the loss.
            rows: those of them whose gradient is returned.
            others: buffers and leaves of the rollout.
        """
        c = self.loss.config
        buffers, leaves = others[: len(self.buffers)], iter(others[len(self.buffers) :])
        s = dict(zip(SETTINGS, settings.unbind(), strict=True))
        batch: Batch = tree.map(lambda _: next(leaves), self.batch)
        mask = batch.mask.index_select(1 if c.minibatch_unit == "column" else 0, index)
        live = [p.detach().requires_grad_() for p in params]
        loss, stats = torch.func.functional_call(
            self.loss,
            dict(zip([*self.names, *self.buffers], [*live, *buffers], strict=True)),
            (
                take(batch, rows, c.minibatch_unit),
                losses.denominator(mask, aggregation=c.loss_agg_func),
                losses.denominator(mask),
            ),
            {"entropy_coef": s["entropy_coef"]},
        )
        return torch.autograd.grad(loss, live), stats

    @torch.no_grad()
    def _apply(
        self,
        state: Sequence[Tensor],
        settings: Tensor,
        grads: Sequence[Tensor],
        stats: Mapping[str, Tensor],
    ) -> Tensor:
        """Clip the gradients, take a step of AdamW and return statistics [K].

        Args:
            state: parameters, first moments and second moments, which change.
            settings: row of ``SETTINGS``.
            grads: gradients of the parameters.
            stats: statistics of the loss.
        """
        c, n = self.loss.config, len(self.names)
        params, first, second = state[:n], state[n : 2 * n], state[2 * n :]
        s = dict(zip(SETTINGS, settings.unbind(), strict=True))
        squares = [g.square().sum() for g in grads]
        groups = (squares[: self.actors], squares[self.actors :])
        actor, critic = (
            torch.stack(x).sum().sqrt() if x else torch.zeros_like(stats["loss"]) for x in groups
        )
        norm = torch.hypot(actor, critic)
        finite = norm + stats["loss"]
        # A step with a gradient of 0 would still move the weights, by AdamW's momentum.
        valid = torch.isfinite(finite) & (stats["rows"] > 0)
        scale = 1.0 if c.max_grad_norm is None else (c.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for i, (p, m, v, grad) in enumerate(zip(params, first, second, grads, strict=True)):
            role = "actor" if i < self.actors else "critic"
            step, inv, decay = (s[f"{role}_{name}"] for name in ("step", "inv", "decay"))
            new = adamw_step(p, m, v, grad * scale, c, step=step, inv=inv, decay=decay)
            for old, x in zip((p, m, v), new, strict=True):
                old.copy_(torch.where(valid, x, old))
        stats = {**stats, "actor_norm": actor, "critic_norm": critic, "finite": finite}
        return torch.stack([stats[name].float() for name in self.statistics()])


class GradientPart(MinibatchStep):
    """Gradients of a part of a minibatch, so that several threads can compute one minibatch."""

    def __call__(self, *tensors: Tensor) -> Any:
        """Return the gradients, and statistics of the loss, float32 [K - 3].

        Args:
            tensors: parameters, settings [7], index of the minibatch [B], index of the part [B/P],
                buffers, leaves of the rollout.
        """
        n = len(self.names)
        settings, index, rows, *others = tensors[n:]
        grads, stats = self._gradients(tensors[:n], settings, index, rows, others)
        row = torch.stack([stats[name].detach().float() for name in statistic_names(self.batch)])
        return [*grads, row]


class GradientSum(MinibatchStep):
    """The step of AdamW of a minibatch whose gradients were computed in parts."""

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Take one step and return its statistics, float32 [K].

        Args:
            tensors: parameters, first moments, second moments, settings [7], and the results of
                ``GradientPart`` of each part.
        """
        n = len(self.names)
        settings, *results = tensors[3 * n :]
        parts = [results[i : i + n + 1] for i in range(0, len(results), n + 1)]
        # In the order of the parts.
        sums = [functools.reduce(torch.add, x) for x in zip(*parts, strict=True)]
        names = statistic_names(self.batch)
        stats = dict(zip(names, sums[n].unbind(), strict=True))
        largest = torch.stack([part[n][names.index("ratio_max")] for part in parts]).amax()
        return self._apply(tensors[: 3 * n], settings, sums[:n], stats | {"ratio_max": largest})
