"""Forward pass of decoding over a copy of the weights in the type of the products.

Float32 weights that are multiplied in bfloat16 would be cast in every decode step, which moves four
times the bytes that the product reads. ``DecodeModel`` casts them once per ``refresh``, and stores
them in the form that needs the fewest kernels:

* One matrix yields queries, keys and values, another one the gate and the values of the MLP.
* The first matrix also yields rotate_half(q) and rotate_half(k) of rotary position embedding (Su et
  al. 2021), x·cos + rotate_half(x)·sin. rotate_half permutes and negates rows, so this is exact.
* The heads of a query are ordered (head of its group, group) instead of (group, head of its group).
  The queries of a group are those of one key head, and the result of attention needs no copy.

The residual stream is float32, as in the learner's forward pass under autocast. Two roundings
differ from it if the type is bfloat16: eager code rounds the inputs of the MLP's norm, and the
outputs of attention and MLP are added before they are added to the stream. docs/experiments/
compares the log-probabilities. In float32 all results are equal up to the order of sums.

N tokens, D size of a hidden state, H query heads, G key heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.policies.fusion import fused
from embodied_ppo.policies.lora import LoRALinear

# Values of transformers' ``model_type`` whose layers this forward pass computes.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
# (layer, queries [N, H, d] by group, keys and values [N, 2·G, d]) -> [N, H, d] by group.
HeadAttention: TypeAlias = "Callable[[int, Tensor, Tensor], Tensor]"


def is_supported(policy: LanguagePolicy) -> bool:
    """Return whether ``DecodeModel`` computes the forward pass of a model."""
    config, decoder = policy.model.config, policy.decoder.module
    if config.model_type not in FAMILIES or not all(block.rotary for block in decoder.blocks):
        return False
    pairs = [(layer.self_attn, layer.mlp) for layer in decoder.layers]
    inputs = [
        x for a, mlp in pairs for x in (a.q_proj, a.k_proj, a.v_proj, mlp.gate_proj, mlp.up_proj)
    ]
    outputs = [x for a, mlp in pairs for x in (a.o_proj, mlp.down_proj)]
    # The forward pass below assumes SiLU, no soft cap of logits, linear layers (adapters are added
    # to the copy), no bias on outputs, and equally many key heads in all layers.
    return (
        policy.model.lm_head.weight.dtype == torch.float32
        and config.hidden_act == "silu"
        and policy.softcap is None
        and all(type(x) in (nn.Linear, LoRALinear) for x in (*inputs, *outputs))
        and all(x.bias is None for x in outputs)
        and len(set(decoder.groups)) == 1
    )


def converts(policy: LanguagePolicy) -> bool:
    """Return whether the policy's products need a conversion of the weights."""
    # Weights are stored in float32, and products are computed in another type.
    return policy.model.lm_head.weight.dtype == torch.float32 != policy.compute


@dataclass(frozen=True, slots=True)
class _Layer:
    """Copied weights of a layer.

    Attributes:
        module: The layer of transformers' model.
        heads: [2·(H + G) + G, d, D], rows of rotate_half(q), rotate_half(k), q, k and v.
        bias: [2·(H + G) + G, d]; None: none.
        qk_norm: float32 [2·(H + G), d], weights of the norms of the heads (Qwen 3); None: none.
        out: [D, H·d].
        norm: [D], weight of the MLP's norm.
        gate_up: [2·I, D].
        down: [D, I].
    """

    module: Any
    heads: Tensor
    bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor


@fused
def _normalise(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Return the RMS norm of x [N, D] (Zhang & Sennrich 2019) in type ``dtype``."""
    return F.rms_norm(x, x.shape[-1:], weight, epsilon).to(dtype)


@fused
def _add_and_normalise(
    x: Tensor, y: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return x + y, float32, and its RMS norm in the type of y; all are [N, D]."""
    x = x + y
    return x, F.rms_norm(x, x.shape[-1:], weight, epsilon).to(y.dtype)


@fused
def _normalise_sum(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x + y in the type of y, [N, D]; eager code rounds x + y to it, too."""
    total = torch.add(x, y).to(y.dtype)
    return F.rms_norm(total, total.shape[-1:], weight, epsilon)


@fused
def _rotate(
    heads: Tensor, rotations: Tensor, queries: int, norm: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary position embedding, and the values behind the keys.

    Args:
        heads: [N, 2·(H + G) + G, d], see ``_Layer.heads``.
        rotations: float32 [N, 2, d], cosines and sines.
        queries: H.
        norm: [2·(H + G), d], weights of the norms of the heads; None: none.
        epsilon: Of these norms.

    Returns:
        Queries [N, H, d], keys and values [N, 2·G, d].
    """
    # Rows: n of rotate_half(q, k), n of (q, k), then the values.
    n = queries + (heads.shape[1] - 2 * queries) // 3  # query and key heads
    query_and_key = heads[:, : 2 * n]
    if norm is not None:
        query_and_key = F.rms_norm(query_and_key, query_and_key.shape[-1:], eps=epsilon) * norm
    cos, sin = rotations[:, :1], rotations[:, 1:]
    # x·cos + rotate_half(x)·sin
    rotated = torch.addcmul(query_and_key[:, n:] * cos, query_and_key[:, :n], sin).to(heads.dtype)
    return rotated[:, :queries], torch.cat((rotated[:, queries:], heads[:, 2 * n :]), dim=1)


@fused
def _gate(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) · up of [N, 2·I]: [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class DecodeModel:
    """A copy of a policy's float32 weights and its forward pass.

    Embedding and norms other than the MLP's are shared with the policy.
    """

    def __init__(self, policy: LanguagePolicy, device: torch.device | None = None) -> None:
        """Allocate the copy; ``refresh`` fills it.

        Args:
            policy: A model for which ``is_supported`` is True.
            device: Device of the copy; None: use that of the weights.
        """
        self.device = device or policy.model.lm_head.weight.device
        self.policy, self.dtype = policy, policy.compute
        decoder = policy.decoder.module
        self.head_dim, self.groups = decoder.head_dim, decoder.groups[0]
        self.queries = policy.model.config.num_attention_heads
        self.layers = [self._allocate(layer) for layer in decoder.layers]
        self.head = self._empty(policy.model.lm_head.weight)

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised tensor in the type of the copy."""
        return torch.empty(shape or like.shape, dtype=self.dtype, device=self.device)

    def _allocate(self, layer: Any) -> _Layer:
        """Return the uninitialised copy of a layer."""
        a, mlp, d = layer.self_attn, layer.mlp, self.head_dim
        rotated = self.queries + self.groups
        # Query and key heads twice, rotated and straight, then the value heads.
        rows, weight = 2 * rotated + self.groups, a.q_proj.weight
        has_norm = getattr(a, "q_norm", None) is not None
        return _Layer(
            module=layer,
            heads=self._empty(weight, rows, d, weight.shape[1]),
            bias=None if a.q_proj.bias is None else self._empty(weight, rows, d),
            qk_norm=torch.empty(2 * rotated, d, device=self.device) if has_norm else None,
            out=self._empty(a.o_proj.weight),
            norm=self._empty(layer.post_attention_layernorm.weight),
            gate_up=self._empty(weight, 2 * mlp.gate_proj.out_features, weight.shape[1]),
            down=self._empty(mlp.down_proj.weight),
        )

    def tensors(self) -> list[Tensor]:
        """Return the copied tensors."""
        names = ("heads", "bias", "qk_norm", "out", "norm", "gate_up", "down")
        parts = [getattr(layer, name) for layer in self.layers for name in names]
        return [x for x in (*parts, self.head) if x is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights. The copies keep their addresses, which CUDA graphs read."""
        self.head.copy_(self.policy.model.lm_head.weight)
        for layer in self.layers:
            a, mlp = layer.module.self_attn, layer.module.mlp
            self._copy_heads(layer.heads, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
            if layer.bias is not None:
                self._copy_heads(layer.bias, a.q_proj.bias, a.k_proj.bias, a.v_proj.bias)
            if layer.qk_norm is not None:
                # The norm has d weights that all heads share; repeat them for each head.
                q = a.q_norm.weight.repeat(self.queries)
                k = a.k_norm.weight.repeat(self.groups)
                # rotate_half permutes the weights of a norm; the sign is already in the normalised
                # values.
                self._copy_heads(layer.qk_norm, q, k, None, sign=1)
            width = a.o_proj.weight.shape[0]
            # Columns of the output projection follow the order of the query heads.
            layer.out.view(width, -1, self.groups, self.head_dim).copy_(
                a.o_proj.weight.view(width, self.groups, -1, self.head_dim).transpose(1, 2)
            )
            layer.norm.copy_(layer.module.post_attention_layernorm.weight)
            gate, up = layer.gate_up.chunk(2)
            gate.copy_(mlp.gate_proj.weight)
            up.copy_(mlp.up_proj.weight)
            layer.down.copy_(mlp.down_proj.weight)

    def _copy_heads(
        self, target: Tensor, q: Tensor, k: Tensor, v: Tensor | None, *, sign: int = -1
    ) -> None:
        """Copy rows of heads [heads·d, ..] into ``target``, ordered as ``_Layer.heads``.

        ``sign`` is the factor of the second halves of rotated heads.
        """
        # Queries from (group, head of its group) to (head of its group, group).
        g, d, half = self.groups, self.head_dim, self.head_dim // 2
        q, k = q.unflatten(0, (g, -1, d)).transpose(0, 1).flatten(0, 1), k.unflatten(0, (-1, d))
        n = self.queries + g
        for rotated, straight, source in (
            (target[: self.queries], target[n : n + self.queries], q),
            (target[self.queries : n], target[n + self.queries : 2 * n], k),
        ):
            # rotate_half: the second half negated, then the first half.
            straight.copy_(source)
            rotated[:, :half].copy_(sign * source[:, half:])
            rotated[:, half:].copy_(source[:, :half])
        if v is not None:
            target[2 * n :].copy_(v.unflatten(0, (-1, d)))

    def rotations(self, length: int) -> Tensor:
        """Return cos and sin of positions 0 .. length-1, float32 [length, 2, d]."""
        base = self.policy.decoder.module.base
        weight = base.embed_tokens.weight
        positions = torch.arange(length, device=weight.device).unsqueeze(0)
        cos, sin = base.rotary_emb(torch.empty(0, device=weight.device), positions)
        return torch.stack((cos[0], sin[0]), dim=1)

    def hidden(self, ids: Tensor, rotations: Tensor, attend: HeadAttention) -> Tensor:
        """Return the final hidden states [N, D].

        Args:
            ids: int64 [N].
            rotations: [N, 2, d], rows of ``rotations``.
            attend: Attention of the layers; it also writes keys and values to the cache.
        """
        base = self.policy.decoder.module.base
        # The norm of a layer's input is fused with the sum of the layer before.
        norms = [layer.module.input_layernorm for layer in self.layers] + [base.norm]
        x = base.embed_tokens(ids)  # float32 [N, D]
        h = _normalise(x, norms[0].weight, norms[0].variance_epsilon, self.dtype)
        for i, (layer, norm) in enumerate(zip(self.layers, norms[1:], strict=True)):
            y = self._run_layer(layer, i, x, h, rotations, attend)
            x, h = _add_and_normalise(x, y, norm.weight, norm.variance_epsilon)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits at temperature 1: [.., D] -> [.., V] in the type of the products."""
        return F.linear(hidden, self.head)

    def _run_layer(
        self, layer: _Layer, i: int, x: Tensor, h: Tensor, rotations: Tensor, attend: HeadAttention
    ) -> Tensor:
        """Return what layer ``i`` adds to the residual stream x [N, D], whose norm is h."""
        # One product: [N, D] -> [N, 2·(H + G) + G, d].
        bias = None if layer.bias is None else layer.bias.flatten()
        heads = F.linear(h, layer.heads.flatten(0, 1), bias).unflatten(-1, (-1, self.head_dim))
        norm = layer.module.self_attn.q_norm if layer.qk_norm is not None else None
        epsilon = 0.0 if norm is None else norm.variance_epsilon
        queries, keys_values = _rotate(heads, rotations, self.queries, layer.qk_norm, epsilon)
        # Attention, output projection, then the MLP on the normalised sum.
        attended = attend(i, queries, keys_values)
        o = F.linear(attended.flatten(1), layer.out)
        epsilon = layer.module.post_attention_layernorm.variance_epsilon
        y = _normalise_sum(x, o, layer.norm, epsilon)
        # o + down(SiLU(gate) · up): the residual stream adds both at once.
        return torch.addmm(o, _gate(F.linear(y, layer.gate_up)), layer.down.T)


def copy_bytes(policy: LanguagePolicy) -> int:
    """Return the bytes of a copy, 0 where ``Engine`` decodes without one."""
    if not converts(policy) or not is_supported(policy):
        return 0
    # Tensors on the device meta have sizes but no memory.
    return sum(x.nbytes for x in DecodeModel(policy, torch.device("meta")).tensors())
