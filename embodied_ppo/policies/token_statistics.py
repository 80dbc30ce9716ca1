"""Log-probability, entropy and KL of tokens from hidden states and the head, in chunks of rows.

The logits of all tokens of a micro-batch do not fit the memory (80 GB for 131,072 tokens and a
vocabulary of 151,936). They exist for one chunk at a time, and are computed again in the backward
pass. The weight of the head is converted once for both passes, and its gradient is accumulated in
float32.

M tokens, D size of a hidden state, V size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from embodied_ppo.policies.fusion import fused


@dataclass(frozen=True, slots=True)
class Head:
    """How logits z of hidden states h become a distribution: softmax(cap(W·h) / temperature).

    Attributes:
        rows: Tokens of a chunk.
        dtype: Type of the matrix products.
        temperature: Divisor of the logits.
        softcap: cap(z) = softcap · tanh(z / softcap); None: cap(z) = z.
        entropy: Whether the entropy is computed.
    """

    rows: int
    dtype: torch.dtype
    temperature: float
    softcap: float | None
    entropy: bool

    def log_softmax(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities float32 [m, V], and tanh(z / softcap) if there is a softcap."""
        z, bounded = F.linear(hidden, weight).float(), None
        if self.softcap is not None:
            bounded = torch.tanh(z / self.softcap)
            z = self.softcap * bounded
        if self.temperature != 1.0:
            z = z / self.temperature
        return z.log_softmax(-1), bounded


@fused
def _statistics(
    hidden: Tensor,
    weight: Tensor,
    action: Tensor,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    head: Head,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the results of ``TokenStatistics`` for the m tokens of a chunk."""
    log_p, _ = head.log_softmax(hidden, weight)
    log_prob = log_p.gather(1, action.unsqueeze(1)).squeeze(1)
    if not head.entropy and ref_hidden is None:
        return log_prob, None, None
    entropy = distance = None
    p = log_p.exp()
    if ref_hidden is not None:
        assert ref_weight is not None
        log_q, _ = head.log_softmax(ref_hidden, ref_weight)
        distance = torch.sum(p * (log_p - log_q), -1)
        del log_q
    if head.entropy:
        entropy = torch.sum(p.mul_(log_p), -1).neg_()
    return log_prob, entropy, distance


@fused
def _logit_gradient(
    hidden: Tensor,
    weight: Tensor,
    action: Tensor,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    head: Head,
    constant: Tensor,
    by_log_prob: Tensor | None,
    log_prob_factor: Tensor | None,
    by_distance: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to the logits z of a chunk, [m, V], in ``head.dtype``.

    With z' as in ``TokenStatistics`` it is

        (π·(f·log π − c − by_distance·log π_ref) + [v = a]·by_log_prob) · ∂z' / ∂z

    with f = ``log_prob_factor`` and c = ``constant``. The last four arguments are [m, 1]; None
    stands for 0. ``ref_hidden`` is read if there is ``by_distance``.
    """
    log_p, bounded = head.log_softmax(hidden, weight)
    d = log_p.exp()
    if log_prob_factor is None:
        d.mul_(-constant)
    else:
        log_p.mul_(log_prob_factor).sub_(constant)
        if by_distance is not None:
            assert ref_hidden is not None and ref_weight is not None
            log_q, _ = head.log_softmax(ref_hidden, ref_weight)
            log_p.addcmul_(log_q, by_distance, value=-1)
            del log_q
        d.mul_(log_p)
    del log_p
    if by_log_prob is not None:
        d.scatter_add_(1, action.unsqueeze(1), by_log_prob)
    if head.temperature != 1.0:
        d.div_(head.temperature)
    if bounded is not None:
        d.mul_(1 - bounded.square())
    return d.to(head.dtype)


class TokenStatistics(torch.autograd.Function):
    """(log π(a), H, KL(π ‖ π_ref)) of each token, float32 [M]; the latter two may be None.

    ``apply`` takes hidden states [M, D], the weight of the head [V, D], tokens a int64 [M], the
    hidden states of the reference [M, D'] and the weight of its head [V, D'] (or None), and a
    ``Head``. There are gradients with respect to the first two.

    With z' = cap(z) / temperature and π = softmax(z'):

        ∂ log π(a) / ∂z'_v = [v = a] − π_v
        ∂ H / ∂z'_v        = −π_v · (log π_v + H)
        ∂ KL / ∂z'_v       = π_v · (log π_v − log π_ref,v − KL)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        action: Tensor,
        ref_hidden: Tensor | None,
        ref_weight: Tensor | None,
        head: Head,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.head, ctx.types = head, (hidden.dtype, weight.dtype)
        ctx.set_materialize_grads(False)
        hidden, weight = hidden.to(head.dtype), weight.to(head.dtype)
        if ref_hidden is not None and ref_weight is not None:
            ref_hidden, ref_weight = ref_hidden.to(head.dtype), ref_weight.to(head.dtype)
        log_prob = torch.empty(len(action), device=action.device)
        entropy = torch.empty_like(log_prob) if head.entropy else None
        distance = torch.empty_like(log_prob) if ref_hidden is not None else None
        for start in range(0, len(action), head.rows):
            rows = slice(start, start + head.rows)
            chunk = None if ref_hidden is None else ref_hidden[rows]
            results = _statistics(hidden[rows], weight, action[rows], chunk, ref_weight, head)
            for result, part in zip((log_prob, entropy, distance), results, strict=True):
                if result is not None and part is not None:
                    result[rows] = part
        ctx.save_for_backward(hidden, weight, action, ref_hidden, ref_weight, entropy, distance)
        return log_prob, entropy, distance

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, action, ref_hidden, ref_weight, entropy, distance = ctx.saved_tensors
        head, (hidden_type, weight_type) = ctx.head, ctx.types
        # The gradients of (log π(a), H, KL), [M, 1].
        by_log_prob, by_entropy, by_distance = (g if g is None else g.unsqueeze(1) for g in grads)
        # Factors of the terms with π above: of log π, and of 1, [M, 1].
        log_prob_factor: Tensor | None = None
        constant = torch.zeros(len(action), 1, device=action.device)
        if by_log_prob is not None:
            constant = constant + by_log_prob
        if by_entropy is not None:
            log_prob_factor = -by_entropy
            constant = constant + by_entropy * entropy.unsqueeze(1)
        if by_distance is not None:
            others = log_prob_factor
            log_prob_factor = by_distance if others is None else others + by_distance
            constant = constant + by_distance * distance.unsqueeze(1)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = None
        if ctx.needs_input_grad[1]:  # not with adapters
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(action), head.rows):
            rows = slice(start, start + head.rows)
            factors = (by_log_prob, log_prob_factor, by_distance)
            chunk = None if ref_hidden is None else ref_hidden[rows]
            chunks = (hidden[rows], weight, action[rows], chunk, ref_weight, head, constant[rows])
            d = _logit_gradient(*chunks, *(x if x is None else x[rows] for x in factors))
            torch.mm(d, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                weight_grad.add_(d.T @ hidden[rows])
            del d
        weight_grad = None if weight_grad is None else weight_grad.to(weight_type)
        return hidden_grad.to(hidden_type), weight_grad, *[None] * 4
