"""Causal language models as policy and critic.

B rows, L tokens of a row (prompt and response without a gap, padded on the right), R response
tokens, D size of a hidden state, V size of the vocabulary. Weights and modules are those of
transformers; the forward pass is implemented here.

``place`` [B, R] holds the index of the token *before* each response token. log π and V are read
there: the hidden state of a token predicts the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import checkpoint

from embodied_ppo.core.collectives import gathered
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.backbone import InferenceModule
from embodied_ppo.models.checkpoint_files import (
    LOCAL_WEIGHTS,
    check_finite,
    config_errors,
    forward_mismatch,
    import_transformers,
    relative_difference,
)
from embodied_ppo.models.fusion import gated_product, normalise, rotate
from embodied_ppo.models.lora import project
from embodied_ppo.models.prefix_tree import PrefixTree, prefix_tree
from embodied_ppo.models.token_statistics import Head, TokenStatistics

M = TypeVar("M")
Attend: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], Tensor]"
"""Attention of a layer: (layer, query [B, heads, Q, d], key and value [B, groups, L, d]) -> [B,
heads, Q, d].
"""
Rotation: TypeAlias = "tuple[Tensor, Tensor]"
"""cos and sin of rotary positions, [1 or B, L, d]."""
LOGIT_BYTES = 64 << 20
"""Size of float32 logits up to which all are computed at once. Larger ones are computed in chunks,
and again in the backward pass, see ``token_statistics``.
"""
CUDA_LOGIT_BYTES = 1 << 30
"""Largest size of the float32 logits of a chunk on a GPU."""
ELEMENTARY_LIMIT = 1024
"""Largest product of queries and keys of a row for which compiled attention uses elementary
operations.
"""


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        scale: Factor of the logits q·k.
        window: Number of last keys that a query attends to, None: all.
        softcap: Bound of the logits, softcap · tanh(logit / softcap), None: no bound.
    """

    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Compute attention, [B, heads, Q, d].

        Args:
            q: [B, heads, Q, d].
            k: [B, groups, L, d].
            v: [B, groups, L, d].
            visible: [.., Q, L], keys that each query attends to, bool, or 0 and -inf in the type of
                ``v`` without softcap. None: causal, with Q = L.
        """
        if (
            self.softcap is None
            and get_proxy_mode() is not None
            and q.shape[2] * k.shape[2] <= ELEMENTARY_LIMIT
        ):
            return self._elementary(q, k, v, visible)
        if self.softcap is None:
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, visible, is_causal=visible is None, scale=self.scale, enable_gqa=gqa
            )
        groups, queries = k.shape[1], q.shape[2]
        logits = q.unflatten(1, (groups, -1)) @ k.unsqueeze(2).transpose(-1, -2) * self.scale
        logits = self.softcap * torch.tanh(logits / self.softcap)
        if visible is None:
            visible = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril()
        elif visible.ndim == 4:
            visible = visible.unsqueeze(2)
        p = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        return (p @ v.unsqueeze(2)).flatten(1, 2)

    def _elementary(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Compute attention from elementary operations, which the compiler fuses.

        For few tokens this is faster than an attention kernel.
        """
        if visible is None:
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * self.scale
        p = logits.masked_fill(~visible, -1e30).softmax(-1)
        return (p.unsqueeze(-1) * v.unsqueeze(2)).sum(3)

    def visible_keys(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which keys at places [.., L] the queries at [.., Q] attend to, bool [.., Q, L]."""
        query, key = query.unsqueeze(-1), key.unsqueeze(-2)
        visible = query >= key
        return visible if self.window is None else visible & (query - key < self.window)


class Decoder(InferenceModule):
    """Layers of a model of the Llama family (Llama, SmolLM, Mistral, Qwen 2, 2.5 and 3, Gemma 1 to
    3).

    The last layer computes only the requested places. In PPO the last layer of a prompt needs keys
    and values only.
    """

    def __init__(self, base: nn.Module) -> None:
        """Wrap transformers' model without its head; ``load`` refuses other families."""
        super().__init__()
        self.base: Any = base
        config: Any = base.config
        self.hidden_size = int(config.hidden_size)
        self.types: tuple[str | None, ...] = tuple(
            getattr(config, "layer_types", None) or [None] * len(self.layers)
        )
        self.attention = [
            self._attention(layer.self_attn, kind) for layer, kind in zip(self.layers, self.types)
        ]
        self.groups = [
            layer.self_attn.k_proj.out_features // layer.self_attn.head_dim for layer in self.layers
        ]
        """Number of key heads of each layer."""
        self.head_dim = int(self.layers[0].self_attn.head_dim)
        self.recompute = False
        """Whether activations are recomputed in the backward pass: less memory, a third more time.
        """

    @property
    def layers(self) -> Any:
        return self.base.layers

    @staticmethod
    def _attention(attention: Any, kind: str | None) -> Attention:
        window = getattr(attention.config, "sliding_window", None)
        window = getattr(attention, "sliding_window", window)
        if kind not in (None, "sliding_attention"):
            window = None
        softcap = getattr(attention, "attn_logit_softcapping", None)
        return Attention(float(attention.scaling), window, softcap)

    def causal(self, length: int, place: Tensor | None, device: torch.device) -> Attend:
        """Return causal attention within each row.

        Args:
            length: Tokens of a row.
            place: int64 [B, R], queries of the last layer; None: all.
            device: Device of the result.
        """
        all_places = torch.arange(length, device=device)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attention = self.attention[i]
            if place is not None and i == len(self.attention) - 1:
                return attention(q, k, v, attention.visible_keys(place, all_places).unsqueeze(1))
            if attention.window is None or attention.window >= length:
                return attention(q, k, v, None)
            return attention(q, k, v, attention.visible_keys(all_places, all_places))

        return attend

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        attend: Attend | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [B, L, D], or [B, R, D] at ``place``.

        Args:
            ids: int64 [B, L].
            positions: int64 [B, L], None: 0, 1, ..
            attend: Attention of the layers, None: causal. A key-value cache passes its own.
            place: int64 [B, R], places of the result; None: all. Complete rows are then packed
                without padding where ``varlen`` supports it.
        """
        if attend is None and positions is None and place is not None:
            if self._packs(ids):
                return self.packed(ids, place, self.varlen)
            if _reads_host(ids):
                return self.shared(ids, place, self.causal(ids.shape[1], place, ids.device))
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        if attend is None:
            attend = self.causal(ids.shape[1], place, ids.device)
        return self.run(self.base.embed_tokens(ids), positions, attend, place)

    def run(self, x: Tensor, positions: Tensor, attend: Attend, place: Tensor | None) -> Tensor:
        """Run the layers on embeddings [B, L, D] at positions int64 [1 or B, L]; result as
        ``forward``.
        """
        rotations = {kind: self._rotation(x, positions, kind) for kind in dict.fromkeys(self.types)}
        last = len(self.layers) - 1
        for i, kind in enumerate(self.types):
            at = place if i == last else None
            args = (self.layers[i], _run_layer, i, x, rotations[kind], attend, at)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(gathered, *args, use_reentrant=False)
            else:
                x = gathered(*args)
        return normalise(self.base.norm, x)

    def packed(self, ids: Tensor, place: Tensor, blocks: Callable[[Packing], Attend]) -> Tensor:
        """Compute ``forward`` with ``place`` on all rows concatenated without padding.

        The last layer computes every place, not only the requested ones.

        Args:
            ids: int64 [B, L].
            place: int64 [B, R].
            blocks: Returns attention within each packed row.
        """
        packing = pack(place, ids.shape[1])
        one = ids.flatten()[packing.index].unsqueeze(0)
        return self(one, packing.position.unsqueeze(0), attend=blocks(packing))[0][packing.at]

    def shared(self, ids: Tensor, place: Tensor, attend: Attend) -> Tensor:
        """Compute ``forward`` with ``place``, each token that rows have in common once.

        Tokens that are not on the host are computed row by row.

        Args:
            ids: int64 [B, L].
            place: int64 [B, R].
            attend: Causal attention of the rows.
        """
        if not _reads_host(ids):
            return self(ids, attend=attend, place=place)
        tree = prefix_tree(ids, place)
        token = ids.flatten().index_select(0, tree.token_index).unsqueeze(0)
        attend = self._attend_tree(tree, attend, place.shape)
        hidden = self(
            token, tree.position.unsqueeze(0), attend=attend, place=tree.query.unsqueeze(0)
        )
        return hidden[0].index_select(0, tree.query_index).unflatten(0, place.shape)

    def _attend_tree(self, tree: PrefixTree, causal: Attend, places: Sequence[int]) -> Attend:
        """Return attention of the nodes of a tree; ``causal`` is that of the rows."""
        b, last = places[0], len(self.attention) - 1

        def rows(x: Tensor, index: Tensor) -> Tensor:
            """Copy [1, heads, n, d] to [B, heads, m, d]."""
            return x[0].transpose(0, 1).index_select(0, index).unflatten(0, (b, -1)).transpose(1, 2)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query, result = (
                (tree.query_index, tree.query_token)
                if i == last
                else (tree.token_node, tree.token_index)
            )
            out = causal(i, rows(q, query), rows(k, tree.token_node), rows(v, tree.token_node))
            out = out.transpose(1, 2).flatten(0, 1).index_select(0, result)  # [n, heads, d]
            return out.transpose(0, 1).unsqueeze(0)

        return attend

    def varlen(self, packing: Packing) -> Attend:
        """Return attention of packed rows by flash attention, for half precision on a GPU."""
        kernel = _varlen_kernel()
        rows = (packing.start, packing.start, packing.longest, packing.longest)
        assert kernel is not None
        has_groups = "enable_gqa" in inspect.signature(kernel).parameters  # not in torch 2.11

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # [n, heads, d]
            repeats = q.shape[1] // k.shape[1]
            options: dict[str, Any] = {"enable_gqa": repeats > 1} if has_groups else {}
            if not has_groups:
                k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            window = (-1, 0)  # all earlier keys, no later ones
            scale = self.attention[i].scale
            out = kernel(q, k, v, *rows, scale=scale, window_size=window, **options)
            return out.transpose(0, 1).unsqueeze(0)

        return attend

    def _packs(self, ids: Tensor) -> bool:
        """Return whether ``varlen`` supports this call.

        It needs a GPU, half precision and full causal attention. It copies row lengths to the host,
        which is not allowed while a CUDA graph is captured.
        """
        if not ids.is_cuda or torch.cuda.is_current_stream_capturing() or _varlen_kernel() is None:
            return False
        dtype = self.layers[0].self_attn.v_proj.weight.dtype
        if dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        length = ids.shape[1]
        windows = all(a.window is None or a.window >= length for a in self.attention)
        plain = windows and all(a.softcap is None for a in self.attention)
        fits = self.head_dim % 8 == 0 and self.head_dim <= 256
        fits = fits and dtype in (torch.bfloat16, torch.float16)
        return plain and fits and torch.cuda.get_device_capability(ids.device) >= (8, 0)

    def _rotation(self, x: Tensor, positions: Tensor, kind: str | None) -> Rotation:
        """Return the rotation of one kind of layers."""
        rotary = self.base.rotary_emb
        return rotary(x, positions, *([kind] if hasattr(rotary, "layer_types") else []))


def _run_layer(
    layer: Any, i: int, x: Tensor, rotation: Rotation, attend: Attend, place: Tensor | None
) -> Tensor:
    """Compute layer ``i`` on x [B, L, D]; the result is [B, R, D] at ``place``."""
    a = layer.self_attn
    h = normalise(layer.input_layernorm, x)
    if place is None:
        key, value, query = project((a.k_proj, a.v_proj, a.q_proj), h)
        key = rotate(_heads(a, "k", key), *rotation, value.dtype)
    else:
        key, value = project((a.k_proj, a.v_proj), h)
        key = rotate(_heads(a, "k", key), *rotation, value.dtype)
        x, h = _gather(x, place), _gather(h, place)
        rotation = _gather(rotation[0], place), _gather(rotation[1], place)
        query = a.q_proj(h)
    query = rotate(_heads(a, "q", query), *rotation, value.dtype)
    value = _heads(a, "v", value)
    h = a.o_proj(attend(i, query, key, value).transpose(1, 2).flatten(2))
    if not hasattr(layer, "pre_feedforward_layernorm"):
        x = x + h
        return x + gated_mlp(layer.mlp, normalise(layer.post_attention_layernorm, x))
    # Gemma 2 and 3 also normalise the outputs.
    x = x + normalise(layer.post_attention_layernorm, h)
    h = gated_mlp(layer.mlp, normalise(layer.pre_feedforward_layernorm, x))
    return x + normalise(layer.post_feedforward_layernorm, h)


def gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """Return down_proj(act(gate_proj x) * up_proj x), [B, L, D]."""
    gate, up = project((mlp.gate_proj, mlp.up_proj), x)
    return mlp.down_proj(gated_product(mlp.act_fn, gate, up))


def _heads(attention: Any, which: str, x: Tensor) -> Tensor:
    """Split projections [B, L, heads d] to [B, heads, L, d], normalised in models that do so (Qwen
    3, Gemma 3).
    """
    x = x.unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)
    return (x if norm is None else normalise(norm, x)).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Packing:
    """B rows of [B, L] concatenated without padding, n tokens.

    Attributes:
        index: int64 [n], place of each token in the flattened [B·L].
        position: int64 [n], place in its own row.
        start: int32 [B+1], first token of each row; the last entry is n.
        at: int64 [B, R], requested places in the packed sequence.
        longest: At least the tokens of the longest row. The exact number would have to be read from
            the device.
    """

    index: Tensor
    position: Tensor
    start: Tensor
    at: Tensor
    longest: int


def pack(place: Tensor, width: int) -> Packing:
    """Pack rows of ``width`` tokens up to their last ``place`` int64 [B, R]; later tokens have no
    effect.
    """
    length = place.amax(1) + 1
    inside = torch.arange(width, device=place.device) < length.unsqueeze(1)
    index = inside.flatten().nonzero().flatten()
    start = F.pad(length.cumsum(0), (1, 0))
    at = place + start[:-1].unsqueeze(1)
    return Packing(index, index % width, start.int(), at, width)


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's attention of packed rows, None in versions without it or without windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def _reads_host(ids: Tensor) -> bool:
    """Return whether token ids are on the host and can be read, unlike those of a compiler."""
    return type(ids) is Tensor and ids.device.type == "cpu" and get_proxy_mode() is None


def _gather(x: Tensor, place: Tensor) -> Tensor:
    """Gather rows [1 or B, L, K] at places [B, R]."""
    if place.shape[0] == 1:
        return x.index_select(1, place[0])
    x = x.expand(place.shape[0], *x.shape[1:])
    return x.gather(1, place.unsqueeze(-1).expand(*place.shape, x.shape[-1]))


# ------------------------------------------------------------------------------------------- policy
def precision(
    weight: Tensor, compute: torch.dtype, *, cache_weights: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which float32 weights like ``weight`` are multiplied in ``compute``.

    Inside such a context, or where no conversion is needed, it does nothing.

    Args:
        weight: A weight of the model.
        compute: Type of the arithmetic.
        cache_weights: Keep converted weights until the context ends. A CUDA graph must convert
            them each time.
    """
    kind = weight.device.type
    if (
        weight.dtype != torch.float32
        or compute == torch.float32
        or (cache_weights and torch.is_autocast_enabled(kind))
    ):
        return nullcontext()
    return torch.autocast(kind, compute, cache_enabled=cache_weights)


@dataclass(frozen=True, slots=True)
class TokenView:
    """Evaluation of response tokens, float32.

    Attributes:
        log_prob: [..], of the token.
        entropy: [..], of the distribution, nats; None if not requested.
        distance: [..], exact KL from the reference, Σ_v π·(log π − log π_ref).
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    distance: Tensor | None = None


def logit_bytes(kind: str, memory: int | None) -> int:
    """Return the size of the float32 logits of a chunk.

    On a GPU it is a 64th of the memory of the device, at most ``CUDA_LOGIT_BYTES``: a chunk needs
    about three times this size, and each chunk reads the weight of the head and adds to its
    gradient. It does not depend on the free memory, so that runs can be repeated.

    Args:
        kind: Type of the device.
        memory: Bytes of the device; None: unknown.
    """
    if kind != "cuda" or memory is None:
        return LOGIT_BYTES
    return max(LOGIT_BYTES, min(CUDA_LOGIT_BYTES, memory // 64))


class LanguagePolicy(InferenceModule):
    """π(token | all tokens before it), at the temperature of the rollouts."""

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, compute: torch.dtype = torch.float32
    ) -> None:
        """Wrap a causal language model of transformers.

        Args:
            model: The model with its head.
            temperature: Sampling temperature of the rollouts.
            compute: Type of matrix multiplications.
        """
        super().__init__()
        self.model: Any = model
        self.temperature, self.compute = temperature, compute
        self.decoder = ModuleReference(Decoder(self.model.model))
        self.softcap: float | None = getattr(self.model.config, "final_logit_softcapping", None)
        self.logit_bytes: int | None = None
        """Size of the float32 logits of a chunk; None: that of ``logit_bytes`` for the device."""

    def units(self) -> list[nn.Module]:
        """Return the layers, see ``Policy.units``."""
        return [*self.decoder.module.layers]

    def hidden(self, ids: Tensor, place: Tensor) -> Tensor:
        """Return the hidden states [B, R, D] of tokens [B, L] at places [B, R]."""
        with precision(self.model.lm_head.weight, self.compute):
            return self.decoder.module(ids, place=place)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits at temperature 1: [.., D] -> float32 [.., V]."""
        with precision(self.model.lm_head.weight, self.compute):
            logits = self.model.lm_head(hidden).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def view(
        self,
        hidden: Tensor,
        action: Tensor,
        *,
        reference: LanguagePolicy | None = None,
        ref_hidden: Tensor | None = None,
        entropy: bool = True,
    ) -> TokenView:
        """Evaluate tokens given the hidden states that predict them, with gradient.

        Logits larger than LOGIT_BYTES are computed in chunks.

        Args:
            hidden: [.., D].
            action: int64 [..], the tokens.
            reference: Reference policy; the result then has the exact KL divergence from it (kl
                type full).
            ref_hidden: [.., D], hidden states of the reference.
            entropy: Whether to compute the entropy.
        """
        shape, rows = action.shape, action.numel()
        hidden, action = hidden.reshape(rows, -1), action.reshape(rows)
        ref_weight = None
        if reference is not None:
            assert ref_hidden is not None
            ref_hidden, ref_weight = ref_hidden.reshape(rows, -1), reference.model.lm_head.weight
        weight = self.model.lm_head.weight
        if 4 * rows * weight.shape[0] <= LOGIT_BYTES:
            columns = self._part(reference, hidden, action, ref_hidden, entropy=entropy)
        else:
            head = Head(
                rows=max(1, self._logit_bytes() // (4 * weight.shape[0])),
                dtype=self.compute if weight.dtype == torch.float32 else weight.dtype,
                temperature=self.temperature,
                softcap=self.softcap,
                entropy=entropy,
            )
            statistics: Any = TokenStatistics.apply(
                hidden, weight, action, ref_hidden, ref_weight, head
            )
            columns = statistics
        log_prob, *others = columns
        return TokenView(
            log_prob.view(shape), *(None if x is None else x.view(shape) for x in others)
        )

    def _logit_bytes(self) -> int:
        """Return the size of the float32 logits of a chunk."""
        if self.logit_bytes is not None:
            return self.logit_bytes
        device, memory = self.model.lm_head.weight.device, None
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        return logit_bytes(device.type, memory)

    def view_where(
        self,
        mask: Tensor,
        hidden: Tensor,
        action: Tensor,
        *,
        reference: LanguagePolicy | None = None,
        ref: Tensor | None = None,
        entropy: bool = True,
    ) -> TokenView:
        """Evaluate the tokens where ``mask`` is True; results are [R, B], arbitrary elsewhere.

        With a large vocabulary nothing is computed where ``mask`` is False.

        Args:
            mask: bool [R, B].
            hidden: [B, R, D].
            action: int64 [R, B].
            reference: As in ``view``.
            ref: [R, B, D], hidden states of the reference.
            entropy: As in ``view``.
        """
        hidden, options = hidden.transpose(0, 1), {"reference": reference, "entropy": entropy}
        if 4 * mask.numel() * self.model.lm_head.weight.shape[0] <= LOGIT_BYTES:
            return self.view(hidden, action, ref_hidden=ref, **options)
        ref_hidden = None if ref is None else ref[mask]
        selected = self.view(hidden[mask], action[mask], ref_hidden=ref_hidden, **options)

        def scatter(x: Tensor) -> Tensor:
            return torch.zeros(mask.shape, device=x.device).index_put((mask,), x)

        others = (selected.entropy, selected.distance)
        return TokenView(
            scatter(selected.log_prob), *(None if x is None else scatter(x) for x in others)
        )

    def _part(
        self,
        reference: LanguagePolicy | None,
        hidden: Tensor,
        action: Tensor,
        ref_hidden: Tensor | None,
        *,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the columns of ``TokenView`` from the logits of all tokens."""
        log_p = (self.logits(hidden) / self.temperature).log_softmax(-1)  # [M, V]
        p = log_p.exp()
        entropies = -torch.where(p > 0, p * log_p, 0.0).sum(-1) if entropy else None
        distance = None
        if reference is not None:
            with torch.no_grad():
                assert ref_hidden is not None
                log_q = (reference.logits(ref_hidden) / self.temperature).log_softmax(-1)
            distance = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropies, distance


class LanguageCritic(InferenceModule):
    """V(all tokens so far): a complete model with one output per token.

    The head is zero at the start, so that V is 0 everywhere. With a random head the value loss
    started at 14 and the first 20 updates were lost.
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype = torch.float32) -> None:
        """Wrap a causal language model of transformers and drop its head.

        Args:
            model: The model.
            compute: Type of matrix multiplications.
        """
        super().__init__()
        self.compute = compute
        causal_lm: Any = model
        self.decoder = Decoder(causal_lm.model)
        device = self.decoder.base.embed_tokens.weight.device
        self.value_head = nn.Linear(self.decoder.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def copy_body(self, policy: Mapping[str, Tensor]) -> None:
        """Copy all weights except the head from the state_dict of a ``LanguagePolicy``."""
        prefix = "model.model."
        body = {
            name.removeprefix(prefix): x for name, x in policy.items() if name.startswith(prefix)
        }
        self.decoder.base.load_state_dict(body)

    def units(self) -> list[nn.Module]:
        """Return the layers, see ``Policy.units``."""
        return [*self.decoder.layers]

    def value(self, ids: Tensor, place: Tensor) -> Tensor:
        """Return V, float32 [B, R], of tokens [B, L] at places [B, R]."""
        with precision(self.decoder.base.embed_tokens.weight, self.compute):
            hidden = self.decoder(ids, place=place)
        return self.value_head(hidden.float()).squeeze(-1)


class ModuleReference(Generic[M]):
    """Reference to a module that is excluded from state_dict and parameters of its owner."""

    def __init__(self, module: M) -> None:
        self.module = module

    def __repr__(self) -> str:
        # No memory address: the cache of compiled libraries uses the representation as part of its
        # key.
        return f"ModuleReference({type(self.module).__name__})"


# ------------------------------------------------------------------------------------------ loading
def load(
    path: str | None,
    architecture: Mapping[str, Any],
    *,
    section: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """Load transformers' causal language model from a directory, or build a new one.

    Our forward pass is compared with that of transformers before the model is used.

    Args:
        path: Directory, None: a new model.
        architecture: Fields of the new model's configuration.
        section: Section of the options, for messages.
        dtype: Type of the weights.
        device: Device of the weights.

    Raises:
        ConfigError: The directory cannot be read, or the architecture is not supported.
    """
    transformers = import_transformers("mode=reasoning", extra="language")
    model: Any
    option = f"path={path}" if path else "architecture"
    with config_errors(f"{section}.{option}: transformers refuses: "):
        if path is not None:
            if not Path(path, "config.json").is_file():
                raise ConfigError(
                    f"{section}.path={path}: holds no config.json; name a directory that"
                    " transformers wrote (hf download NAME --local-dir DIR), or leave path null for"
                    " a new, small model"
                )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, **LOCAL_WEIGHTS
            )
            check_finite(model.named_parameters(), f"{section}.path={path}")
        else:
            fields = dict(architecture)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    model = model.to(device).eval()
    mismatch = forward_mismatch(lambda: _difference(model), model.dtype)
    if mismatch is None:
        return model
    raise ConfigError(
        f"{section}: {type(model).__name__} computes something else than models of the Llama family"
        f" do ({mismatch}); Llama, SmolLM, Mistral, Qwen 2 to 3 and Gemma 1 to 3 are supported"
    )


@torch.no_grad()
def _difference(model: Any) -> float:
    """Return the ``relative_difference`` between our logits and those of transformers."""
    policy = LanguagePolicy(model)
    vocabulary = model.lm_head.weight.shape[0]
    ids = (torch.arange(2 * 12, device=model.lm_head.weight.device).view(2, 12) * 7919) % vocabulary
    expected = model(input_ids=ids, use_cache=False).logits.float()
    return relative_difference(policy.logits(policy.decoder.module(ids)), expected)
