"""SmolVLA: layers of SmolVLM2 encode images, words and state, a smaller Llama predicts the flow.

Sizes are named as in ``pi0``. Attention::

    images | words                       attend to each other
                    state                attends to these and itself
                          H noisy actions, in every second layer of the expert: attend to the
                                         prefix, to themselves and to earlier actions;
                                         in the other layers: to the prefix only

Source: Shukor et al. 2025, arXiv 2506.01844; lerobot for the details.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_ppo.core.collectives import gathered
from embodied_ppo.policies import lora
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.policies.decoder import gated_mlp
from embodied_ppo.policies.fusion import normalise, rotate
from embodied_ppo.policies.vla import smolvla_files
from embodied_ppo.policies.vla.pi0 import PI0, PI0Trunk
from embodied_ppo.policies.vla.prefix import PrefixCache, append_room, block, grouped

WAVELENGTH = 10_000.0
"""Largest wavelength of the rotary positions, in place of SmolVLM2's 100,000."""


def rotation(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin float32 [B, Q, d] of positions int64 [B, Q] for heads of d = ``size``."""
    exponent = torch.arange(size // 2, device=place.device, dtype=torch.float32) * (2.0 / size)
    angle = place.unsqueeze(-1).float() / WAVELENGTH**exponent
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


class SmolTrunk(PI0Trunk):
    """Trunk on SmolVLM2. The prefix ends with the state."""

    def offsets(self, width: int, height: int) -> tuple[int, int]:
        """See ``PI0Trunk.offsets``: padding is left of the image and above it."""
        return self.side - width, self.side - height

    def image_tokens(self) -> int:
        """See ``PI0Trunk.image_tokens``."""
        return super().image_tokens() // self.vlm.config.scale_factor**2

    def forward(self, inputs: dict[str, Tensor]) -> PrefixCache:
        """See ``PI0Trunk.forward``."""
        vlm = self.vlm
        images, words, given = self.embed(inputs)
        scale = math.sqrt(words.shape[-1])
        state = vlm.state_proj(inputs[VECTOR].to(vlm.state_proj.weight.dtype)).unsqueeze(1)
        x = torch.cat((images.to(words.dtype) * scale, words * scale, state.to(words.dtype)), dim=1)
        ones = given.new_ones(len(given), 1)
        valid = torch.cat((ones.expand(-1, images.shape[1]), given, ones), dim=1)
        attention = vlm.language_model.layers[0].self_attn
        rotary = rotation(valid.cumsum(1) - 1, attention.head_dim)
        # The state is the last token: it attends to all, and only itself attends to it.
        last = torch.zeros_like(valid)
        last[:, -1] = True
        visible = valid.unsqueeze(1) & (last.unsqueeze(2) | ~last.unsqueeze(1))
        return self.run_layers(x, rotary, _repeat_mask(visible, attention), valid, inputs)


class SmolVLA(PI0):
    """Flow policy on SmolVLA; see ``PI0``."""

    trunk: SmolTrunk
    trunk_class = SmolTrunk
    state_tokens = 0
    state_in_prefix = True
    read = staticmethod(smolvla_files.read)
    rename = staticmethod(smolvla_files.rename)

    def prompt_tokens(self) -> int:
        """See ``PI0.prompt_tokens``; the state is one of them."""
        return super().prompt_tokens() + 1

    def embed_actions(
        self, context: PrefixCache, x: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See ``PI0.embed_actions``."""
        return self.embed(x, tau), None

    def expert_calls(self, context: PrefixCache) -> list[tuple[Any, ...]]:
        """See ``PI0.expert_calls``."""
        layers: list[Any] = list(self.expert.layers)
        valid, size = context.valid, self.horizon
        rows, attention = len(valid), layers[0].self_attn
        order = torch.arange(size, device=valid.device)
        self_rotation = rotation(valid.sum(1, keepdim=True) + order, attention.head_dim)
        cross_rotation = rotation(order.expand(rows, -1), attention.head_dim)
        prefix = valid[:, None].expand(rows, size, -1)
        causal = (order[:, None] >= order).expand(rows, -1, -1)
        mask = _repeat_mask(torch.cat((prefix, causal), dim=2), attention)
        cross_mask = _repeat_mask(prefix, attention)
        calls: list[tuple[Any, ...]] = []
        with lora.autocast(self.device, self.dtype):
            for i, kv in enumerate(zip(context.keys, context.values, strict=True)):
                if smolvla_files.is_cross_layer(i):
                    kv = gathered(layers[i], _cross_keys, *kv)
                    calls.append((_cross_attention, cross_rotation, cross_mask, kv))
                else:
                    calls.append((block, self_rotation, mask, append_room(*kv, size)))
        return calls


def _repeat_mask(visible: Tensor, attention: Any) -> Tensor:
    """Repeat a mask bool [B, Q, P] for the queries that share keys, [B, 1, n Q, P]."""
    return visible.repeat(1, attention.num_key_value_groups, 1).unsqueeze(1)


def _cross_keys(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Map keys and values of the prefix, [B, G, P, d] each, to those of a layer of the expert."""
    out = []
    for linear, x in ((layer.self_attn.k_proj, keys), (layer.self_attn.v_proj, values)):
        y = linear(x.transpose(1, 2).flatten(2).to(linear.weight.dtype))
        out.append(y.unflatten(-1, (x.shape[1], -1)).transpose(1, 2))
    return out[0], out[1]


def _cross_attention(
    layer: Any,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    visible: Tensor,
    kv: tuple[Tensor, Tensor],
    condition: None,
) -> tuple[Tensor]:
    """Run a layer of the expert whose queries attend to the prefix only.

    Args:
        layer: Layer of transformers' Llama.
        x: [B, H, D].
        rotary: cos and sin of the rotary positions of the actions, counted from 0.
        visible: bool [B, 1, n H, P], see ``pi0.block``.
        kv: Results of ``_cross_keys``, [B, G, P, d] each.
        condition: Unused.

    Returns:
        Outputs [B, H, D].
    """
    a = layer.self_attn
    q = a.q_proj(normalise(layer.input_layernorm, x))
    q = q.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
    keys, values = kv
    q = rotate(q, *rotary, values.dtype)
    h = F.scaled_dot_product_attention(
        grouped(q, keys.shape[1]), keys, values, attn_mask=visible, scale=a.scaling
    ).reshape(q.shape)
    x = x + a.o_proj(h.transpose(1, 2).flatten(2))
    return (x + gated_mlp(layer.mlp, normalise(layer.post_attention_layernorm, x)),)
