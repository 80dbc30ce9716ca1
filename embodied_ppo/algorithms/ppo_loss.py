"""The loss of a minibatch (robot policy or language model), and one optimiser step as a function of tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import kl, losses
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.core.running_stats import masked_sum
from embodied_ppo.core.types import Batch, Evaluation, Policy
from embodied_ppo.models.causal_lm import Aside, LanguageCritic, LanguagePolicy

SETTINGS: tuple[str, ...] = (
    "actor_step",
    "critic_step",
    "actor_inv",
    "critic_inv",
    "actor_decay",
    "critic_decay",
    "entropy_coef",
)
"""What changes from one minibatch to the next, in the order of ``MinibatchStep``'s vector (see ``adamw_settings``)."""


def kl_distance(
    log_prob: Tensor, ref_log_prob: Tensor, kind: str, logits: Any, ref_logits: Any, *, mask: Tensor, dims: int
) -> Tensor:
    """KL(policy || reference) with an entry for each of ``mask``: [..] of ``dims`` dimensions (a decision) or [.., C]
    (an action)."""
    level = "chunk_level" if mask.ndim == dims else "action_level"
    own, other = (losses.reduce_log_prob(x, level, batch_dims=dims) for x in (log_prob, ref_log_prob))
    return kl.estimate(own, other, kind, logits=logits, ref_logits=ref_logits)


def _surrogate(log_prob: Tensor, b: Batch, c: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """``losses.policy_loss`` with the options' clipping."""
    return losses.policy_loss(
        log_prob,
        b.log_prob,
        b.advantage,
        b.mask,
        clip_ratio_low=c.clip_ratio_low,
        clip_ratio_high=c.clip_ratio_high,
        clip_ratio_c=c.clip_ratio_c,
        weight=b.weight,
    )


class ActorCriticLoss(nn.Module):
    """L = L_policy - c_H·H + c_kl·KL + c_V·L_value; a module, so that its parameters can be handed in as tensors."""

    def __init__(self, policy: Policy, config: AlgorithmConfig) -> None:
        super().__init__()
        assert isinstance(policy, nn.Module)
        self.policy, self.config = policy, config

    def forward(
        self, b: Batch, whole: Tensor, rows: Tensor, *, entropy_coef: Tensor | float, warming: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and statistics that add up over micro-batches (``ratio_max``: a maximum).

        ``whole`` and ``rows``: denominators of the whole minibatch (``losses.denominator``). ``warming``: the value
        loss alone.
        """
        c = self.config
        out = self._evaluate(b)
        dims = 2 if c.minibatch_unit == "column" else 1
        log_prob = losses.reduce_log_prob(out.log_prob, c.logprob_type, batch_dims=dims)
        entropy = losses.reduce_log_prob(out.entropy, c.entropy_type, batch_dims=dims)
        elements, stats = _surrogate(log_prob, b, c)

        def agg(x: Tensor) -> Tensor:
            length = float(c.loss_scale_factor or c.horizon)
            return losses.aggregate(x, b.mask, how=c.loss_agg_func, denominator=whole, length=length)

        policy_loss, entropy_mean = agg(elements), agg(entropy)
        errors, far = losses.value_loss(
            out.value, b.value, b.returns, value_clip=c.value_clip, huber_delta=c.huber_delta
        )
        value_loss = losses.aggregate(errors, b.mask, denominator=rows)
        loss = c.value_loss_coef * value_loss
        if not warming:
            loss = loss + policy_loss - entropy_coef * entropy_mean
        if b.ref_log_prob is not None:
            distance = kl_distance(
                out.log_prob, b.ref_log_prob, c.kl_loss_type, out.logits, b.ref_logits, mask=b.mask, dims=dims
            )  # [..], or [.., C]
            if not warming:
                loss = loss + c.kl_loss_coef * agg(distance)
            stats["kl"] = masked_sum(distance.detach(), b.mask)
        return loss, stats | {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy_mean.detach(),
            "value_clipped": (far & b.mask).sum(),
            "rows": b.mask.sum(),
        }

    @staticmethod
    def statistics(batch: Batch) -> tuple[str, ...]:
        """Names of the statistics for such a batch."""
        names: tuple[str, ...] = ("clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_max", "count")
        names += ("kl",) if batch.ref_log_prob is not None else ()
        return (*names, "loss", "policy_loss", "value_loss", "entropy", "value_clipped", "rows")

    def _evaluate(self, b: Batch) -> Evaluation:
        """The policy's view of the micro-batch; columns are flattened for the model and folded back."""
        if self.config.minibatch_unit == "step":
            return self.policy.evaluate(b.inputs, b.action, b.replay)
        flat = tree.flatten_time
        out = self.policy.evaluate(flat(b.inputs), flat(b.action), flat(b.replay))
        return tree.map(lambda x: x.unflatten(0, b.mask.shape[:2]), out)


class TokenLoss(nn.Module):
    """Of a language model: L = L_policy - c_H·H + c_kl·KL of an actor, or L_value of a critic, another model.

    A batch's inputs are "row" int64 [L, B], prompt and response without a gap, and "place" int64 [T, B], where in its
    row the token before each response token is; everything else is [T, B].
    """

    def __init__(
        self,
        model: LanguagePolicy | LanguageCritic,
        config: AlgorithmConfig,
        *,
        length: int,
        reference: LanguagePolicy | None = None,
    ) -> None:
        """``length``: response_length, by which seq-mean-token-sum-norm divides unless config.loss_scale_factor is set.
        ``reference``: for kl type full."""
        super().__init__()
        self.policy, self.config = model, config
        self.length = float(config.loss_scale_factor or length)
        self.reference = Aside(reference)

    @staticmethod
    def statistics(batch: Batch) -> tuple[str, ...]:
        """As ``ActorCriticLoss.statistics``."""
        return ActorCriticLoss.statistics(batch)

    def forward(
        self, b: Batch, whole: Tensor, rows: Tensor, *, entropy_coef: Tensor | float, warming: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As ``ActorCriticLoss.forward``."""
        zero = b.advantage.new_zeros(())
        ids, place = b.inputs["row"].T, b.inputs["place"].T
        stats = dict.fromkeys(self.statistics(b), zero) | {"rows": b.mask.sum()}
        if isinstance(self.policy, LanguageCritic):
            value = self.policy.value(ids, place).T
            c = self.config
            errors, far = losses.value_loss(
                value, b.value, b.returns, value_clip=c.value_clip, huber_delta=c.huber_delta
            )
            loss = losses.aggregate(errors, b.mask, how=c.loss_agg_func, denominator=whole, length=self.length)
            return loss, stats | {
                "loss": loss.detach(),
                "value_loss": loss.detach(),
                "value_clipped": (far & b.mask).sum(),
            }
        return self._actor(self.policy, b, ids, place, whole, entropy_coef, stats)

    def _actor(
        self,
        policy: LanguagePolicy,
        b: Batch,
        ids: Tensor,
        place: Tensor,
        whole: Tensor,
        entropy_coef: Tensor | float,
        stats: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        full = b.ref_log_prob is not None and c.kl_loss_type == "full"
        view = policy.view_where(
            b.mask,
            policy.hidden(ids, place),
            b.action,
            reference=self.reference.module if full else None,
            ref=b.ref_logits,
        )
        elements, told = _surrogate(view.log_prob, b, c)

        def agg(x: Tensor) -> Tensor:
            return losses.aggregate(x, b.mask, how=c.loss_agg_func, denominator=whole, length=self.length)

        policy_loss, entropy = agg(elements), agg(view.entropy)
        loss = policy_loss - entropy_coef * entropy
        if b.ref_log_prob is not None:
            distance = view.distance if full else kl.estimate(view.log_prob, b.ref_log_prob, c.kl_loss_type)
            assert distance is not None
            loss = loss + c.kl_loss_coef * agg(distance)
            told["kl"] = masked_sum(distance.detach(), b.mask)
        told |= {"loss": loss.detach(), "policy_loss": policy_loss.detach(), "entropy": entropy.detach()}
        return loss, stats | told


def take(batch: Batch, index: Tensor, unit: str) -> Batch:
    """Rows (``unit`` step) or columns of a batch."""
    return tree.map(lambda x: x.index_select(1 if unit == "column" else 0, index), batch)


def adamw_settings(
    config: AlgorithmConfig, n: int, *, lr: Sequence[float], steps: Sequence[int], entropy_coef: float
) -> Tensor:
    """Rows of ``SETTINGS``, float32 [n, 7], for the next n steps after ``steps`` of (actor, critic) at rates ``lr``.

    AdamW (Loshchilov & Hutter 2019, alg. 2): step = lr/(1 − β1^t), inv = 1/sqrt(1 − β2^t), decay = lr·weight_decay.
    """
    t = torch.arange(1, n + 1, dtype=torch.float64).unsqueeze(1) + torch.tensor(steps, dtype=torch.float64)  # [n, 2]
    rate = torch.tensor(lr, dtype=torch.float64).expand(n, 2)
    columns = (rate / (1 - config.adam_beta1**t), (1 - config.adam_beta2**t).rsqrt(), rate * config.weight_decay)
    return torch.cat([*columns, torch.full((n, 1), entropy_coef, dtype=torch.float64)], dim=1).float()


class MinibatchStep:
    """Gather, forward, loss, backward, clipping and AdamW of one minibatch: tensors in, statistics out.

    Parameters, first and second moments change in place; with a non-finite loss or gradient norm, or where all is
    masked, none of them does.
    The same numbers as ``JointLearner``'s eager step to float32 rounding, and no host decides anything in between, so
    that it can be compiled or captured as one graph.
    """

    def __init__(
        self,
        objective: ActorCriticLoss | TokenLoss,
        actor: Sequence[str],
        critic: Sequence[str],
        batch: Batch,
        buffers: Sequence[str] = (),
    ) -> None:
        """``actor``, ``critic``: parameter names of the policy; ``buffers``: what else of it the loss reads. ``batch``:
        a rollout's, for its structure."""
        self.objective, self.names, self.actors = objective, [f"policy.{n}" for n in (*actor, *critic)], len(actor)
        self.buffers = [f"policy.{n}" for n in buffers]
        self.batch = tree.map(lambda x: x.new_empty(0), batch)

    def statistics(self) -> tuple[str, ...]:
        """Names of the result's entries, in order; the last is not finite where nothing was changed."""
        return (*self.objective.statistics(self.batch), "actor_norm", "critic_norm", "finite")

    def __call__(self, *tensors: Tensor) -> Tensor:
        """(parameters, first moments, second moments, settings [7], index [B], buffers, the rollout's leaves) ->
        float32 [K]."""
        c, n = self.objective.config, len(self.names)
        params, first, second = tensors[:n], tensors[n : 2 * n], tensors[2 * n : 3 * n]
        settings, index, *others = tensors[3 * n :]
        frozen, leaves = others[: len(self.buffers)], others[len(self.buffers) :]
        s = dict(zip(SETTINGS, settings.unbind(), strict=True))
        rest = iter(leaves)
        batch: Batch = tree.map(lambda _: next(rest), self.batch)
        part = take(batch, index, c.minibatch_unit)
        live = [p.detach().requires_grad_() for p in params]
        whole, rows = losses.denominator(part.mask, how=c.loss_agg_func), losses.denominator(part.mask)
        loss, stats = torch.func.functional_call(
            self.objective,
            dict(zip([*self.names, *self.buffers], [*live, *frozen], strict=True)),
            (part, whole, rows),
            {"entropy_coef": s["entropy_coef"]},
        )
        grads = torch.autograd.grad(loss, live)
        with torch.no_grad():
            squares = [g.square().sum() for g in grads]
            groups = (squares[: self.actors], squares[self.actors :])
            actor, critic = (torch.stack(x).sum().sqrt() if x else torch.zeros_like(loss) for x in groups)
            norm = torch.hypot(actor, critic)
            finite = norm + loss
            fine = torch.isfinite(finite) & (rows > 0)  # momentum alone would move weights
            scale = 1.0 if c.max_grad_norm is None else (c.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for i, (p, m, v, grad) in enumerate(zip(params, first, second, grads, strict=True)):
                who = "actor" if i < self.actors else "critic"
                g = grad * scale
                m_new = torch.lerp(m, g, 1 - c.adam_beta1)
                v_new = v * c.adam_beta2 + g * g * (1 - c.adam_beta2)
                step = s[f"{who}_step"] * m_new / (v_new.sqrt() * s[f"{who}_inv"] + c.adam_eps)
                p_new = p * (1 - s[f"{who}_decay"]) - step
                for old, new in ((m, m_new), (v, v_new), (p, p_new)):
                    old.copy_(torch.where(fine, new, old))
        stats |= {"actor_norm": actor, "critic_norm": critic, "finite": finite}
        return torch.stack([stats[name].float() for name in self.statistics()])
