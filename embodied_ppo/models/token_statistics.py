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
            log_p, _ = head.log_softmax(hidden[rows], weight)
            log_prob[rows] = log_p.gather(1, action[rows].unsqueeze(1)).squeeze(1)
            if entropy is None and distance is None:
                continue
            p = log_p.exp()
            if distance is not None:
                assert ref_hidden is not None and ref_weight is not None
                log_q, _ = head.log_softmax(ref_hidden[rows], ref_weight)
                torch.sum(p * (log_p - log_q), -1, out=distance[rows])
                del log_q
            if entropy is not None:
                torch.sum(p.mul_(log_p), -1, out=entropy[rows]).neg_()
            del log_p, p
        ctx.save_for_backward(hidden, weight, action, ref_hidden, ref_weight, entropy, distance)
        return log_prob, entropy, distance

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, action, ref_hidden, ref_weight, entropy, distance = ctx.saved_tensors
        head, (hidden_type, weight_type) = ctx.head, ctx.types
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # The gradients of (log π(a), H, KL), [M, 1].
        by_log_prob, by_entropy, by_distance = (g if g is None else g.unsqueeze(1) for g in grads)
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, len(action), head.rows):
            rows = slice(start, start + head.rows)
            log_p, bounded = head.log_softmax(hidden[rows], weight)
            d = log_p.exp()
            # d = π·(slope·log π − offset − ∂KL·log π_ref), the sum of the terms with π above.
            slope, offset = 0.0, 0.0
            if by_log_prob is not None:
                offset = offset + by_log_prob[rows]
            if by_entropy is not None:
                slope = slope - by_entropy[rows]
                offset = offset + by_entropy[rows] * entropy[rows].unsqueeze(1)
            if by_distance is not None:
                slope = slope + by_distance[rows]
                offset = offset + by_distance[rows] * distance[rows].unsqueeze(1)
            if isinstance(slope, Tensor):
                log_p.mul_(slope).sub_(offset)
                if by_distance is not None:
                    log_q, _ = head.log_softmax(ref_hidden[rows], ref_weight)
                    log_p.addcmul_(log_q, by_distance[rows], value=-1)
                    del log_q
                d.mul_(log_p)
            else:
                d.mul_(-offset)
            del log_p
            if by_log_prob is not None:
                d.scatter_add_(1, action[rows].unsqueeze(1), by_log_prob[rows])
            if head.temperature != 1.0:
                d.div_(head.temperature)
            if bounded is not None:
                d.mul_(1 - bounded.square())
            d = d.to(head.dtype)
            if hidden_grad is not None:
                torch.mm(d, weight, out=hidden_grad[rows])
            if weight_grad is not None:
                weight_grad.add_(d.T @ hidden[rows])
            del d
        return (
            None if hidden_grad is None else hidden_grad.to(hidden_type),
            None if weight_grad is None else weight_grad.to(weight_type),
            None,
            None,
            None,
            None,
        )
