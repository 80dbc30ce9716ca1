"""Layers of flow policies that attend to a prefix, which is computed once for a chain.

B rows, P tokens of the prefix, Q queries, D' width, G key heads, d size of a head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.policies import lora
from embodied_ppo.policies.decoder import gated_mlp
from embodied_ppo.policies.fusion import normalise, rotate
from embodied_ppo.policies.vla.trunk import Grounding


class PrefixCache(NamedTuple):
    """Result of the trunk, computed once for all steps of a chain.

    Attributes:
        keys: Of each layer [B, G, P, d].
        values: Of each layer [B, G, P, d].
        valid: bool [B, P], tokens that are not padding.
        pooled: float32 [B, D], mean of the last layer's outputs over valid tokens.
        state: float32 [B, N], normalised and padded.
        origin: float32 [B, A], added to the actions of a model that predicts them relative to the
            state; 0 in the dimensions that are absolute. None: all are.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor
    pooled: Tensor
    state: Tensor
    origin: Tensor | None = None

    @property
    def grounding(self) -> Grounding:
        """Input of cloning's auxiliary loss, see ``VLAPolicy.encode_context``."""
        return Grounding(self.pooled)


def block(
    layer: Any,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    visible: Tensor,
    past: tuple[Tensor, Tensor] | None = None,
    condition: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one Gemma layer.

    Args:
        layer: Layer of transformers' Gemma. With ``condition`` its norms are
            ``pi05.AdaptiveNorm``.
        x: [B, Q, D'].
        rotation: cos and sin of the rotary positions.
        visible: bool [B, 1, 1 or n Q, P + Q], keys that each query attends to, see ``grouped``.
        past: Keys and values of earlier tokens, see ``_append``.
        condition: [B, D'], input of π0.5's adaptive norms; None: the norms have no condition.

    Returns:
        Outputs [B, Q, D'], and the layer's own keys and values [B, G, Q, d].
    """
    a = layer.self_attn
    h, gate = apply_norm(layer.input_layernorm, x, condition)
    q, k, v = (
        x.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
        for x in lora.project((a.q_proj, a.k_proj, a.v_proj), h)
    )
    q, k = (rotate(t, *rotation, v.dtype) for t in (q, k))
    keys, values = k, v
    if past is not None:
        length = visible.shape[-1]
        keys, values = _append(past[0], k, length), _append(past[1], v, length)
    query = grouped(q, k.shape[1])
    h = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=a.scaling)
    h = h.reshape(q.shape)
    h = a.o_proj(h.transpose(1, 2).flatten(2))
    x = x + (h if gate is None else gate * h)
    h, gate = apply_norm(layer.post_attention_layernorm, x, condition)
    h = gated_mlp(layer.mlp, h)
    return x + (h if gate is None else gate * h), k, v


def apply_norm(
    norm: nn.Module, x: Tensor, condition: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the normalised x [B, Q, D'], and the gate of its residual branch (None: 1).

    Args:
        norm: Layer norm, with ``condition`` a ``pi05.AdaptiveNorm``.
        x: [B, Q, D'].
        condition: [B, D'], see ``block``.

    Returns:
        [B, Q, D'], and the gate [B, 1, D'] or None.
    """
    return (normalise(norm, x), None) if condition is None else norm(x, condition)


def _append(past: Tensor, new: Tensor, length: int) -> Tensor:
    """Return earlier and new keys (or values) together, [B, G, P + Q, d].

    Args:
        past: [B, G, P, d]; or [B, G, P + Q, d] where the places of the new ones are free. These are
            written in place, which is not differentiable.
        new: [B, G, Q, d].
        length: P + Q.
    """
    if past.shape[2] < length:
        return torch.cat((past.to(new.dtype), new), dim=2)
    past[:, :, length - new.shape[2] :] = new
    return past


def append_room(keys: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Extend keys and values [B, G, P, d] to [B, G, P + size, d], unless a gradient is needed.

    All steps of a chain then write their keys and values into the same tensors. With gradient they
    are returned unchanged, because the backward pass needs those of each step.
    """
    if torch.is_grad_enabled():
        return keys, values
    room = (0, 0, 0, size)
    return F.pad(keys, room), F.pad(values, room)


def grouped(q: Tensor, groups: int) -> Tensor:
    """Fold the n = heads / G queries that share keys into the query dimension.

    [B, heads, Q, d] -> [B, G, n Q, d], so that no key is copied.
    """
    return q if q.shape[1] == groups else q.reshape(q.shape[0], groups, -1, q.shape[-1])


def positions(model: Any, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin float32 [B, Q, d] of positions int64 [B, Q]."""
    return model.rotary_emb(place.new_zeros((), dtype=torch.float32), place)


class TimeEncoding(nn.Module):
    """Sines and cosines of the time of the flow, as openpi and lerobot compute them.

    The angle 2 π τ / period reaches 1570. In float32, which transformers uses, its error is 1e-4;
    it is therefore computed in float64.
    """

    def __init__(self, width: int, periods: tuple[float, float]) -> None:
        """Store the width of the result, and the shortest and the longest period."""
        super().__init__()
        self.width, self.periods = width, periods

    def forward(self, tau: Tensor) -> Tensor:
        """Encode float32 [B] -> float32 [B, width]."""
        low, high = self.periods
        ranks = torch.linspace(0, 1, self.width // 2, dtype=torch.float64, device=tau.device)
        angle = tau.double().unsqueeze(1) * (2 * math.pi / (low * (high / low) ** ranks))
        return torch.cat((angle.sin(), angle.cos()), dim=1).float()
