"""Forward pass of decoder-only language models: layers, attention and packed rows.

``describe`` reads the form of a layer from transformers' module, and one function computes all.

B rows, L tokens of a row (padded on the right), R requested tokens, D size of a hidden state.
Weights and modules are those of transformers. ``place`` [B, R] holds the indices of the requested
tokens of each row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import checkpoint

from embodied_ppo.core.collectives import gathered
from embodied_ppo.policies.backbone import InferenceModule
from embodied_ppo.policies.fusion import gated_product, normalise, rotate
from embodied_ppo.policies.lora import project
from embodied_ppo.policies.prefix_tree import PrefixTree, prefix_tree

M = TypeVar("M")
# (layer, query [B, heads, Q, d], key and value [B, groups, L, d]) -> [B, heads, Q, d].
Attend: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], Tensor]"
# cos and sin of rotary positions, [1 or B, L, d].
Rotation: TypeAlias = "tuple[Tensor, Tensor]"
# Largest queries x keys of a row for which compiled attention is of elementary operations.
ELEMENTARY_LIMIT = 1024


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
        if self.softcap is None:
            if get_proxy_mode() is not None and q.shape[2] * k.shape[2] <= ELEMENTARY_LIMIT:
                return self._elementary(q, k, v, visible)
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


# Values of transformers' ``model_type`` whose rotary embedding rotates neighbours (2i, 2i + 1).
INTERLEAVED = ("glm", "glm4", "helium", "ernie4_5")
# Kinds of attention, entries of transformers' ``layer_types``; None: there is one kind.
KINDS = (None, "full_attention", "sliding_attention")


@dataclass(frozen=True)
class LayerForm:
    """Form of a layer.

    Attributes:
        norms: Names of the norms of attention's input and output and the MLP's; None: no norm.
        queries: Number of query heads.
        groups: Number of key heads.
        head_dim: Size of a head, d.
        norms_heads_together: Whether the norms of queries and keys are over all heads (OLMo 2).
        rotary: Whether there is rotary embedding, of the first numbers of a head if cos and sin
            have fewer than d.
        interleaved: Whether it rotates neighbours (GLM) instead of halves.
        residual: Factor of what attention and MLP add to the residual stream (Granite).
    """

    norms: tuple[str | None, ...]
    queries: int
    groups: int
    head_dim: int
    norms_heads_together: bool
    rotary: bool
    interleaved: bool
    residual: float


def describe(layer: Any) -> LayerForm:
    """Return the form of a layer of transformers' model."""
    a: Any = layer.self_attn
    if hasattr(layer, "post_self_attn_layernorm"):  # GLM 4
        names = ("input", "post_self_attn", "post_attention", "post_mlp")
    elif hasattr(layer, "post_feedforward_layernorm"):  # Gemma 2 and 3; without inputs: OLMo 2
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    else:
        names = ("input", "", "post_attention", "")
    names = (f"{name}_layernorm" for name in names)
    queries, head_dim = a.config.num_attention_heads, int(a.head_dim)
    norm = getattr(a, "q_norm", None)
    return LayerForm(
        norms=tuple(name if hasattr(layer, name) else None for name in names),
        queries=queries,
        groups=queries // a.num_key_value_groups,
        head_dim=head_dim,
        norms_heads_together=norm is not None and norm.weight.numel() != head_dim,
        rotary=bool(getattr(a, "use_rope", True)),  # SmolLM 3 has layers without
        interleaved=a.config.model_type in INTERLEAVED,
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
    )


class Decoder(InferenceModule):
    """Layers of a decoder-only language model in the forms that ``LayerForm`` describes.

    The last layer computes only the requested places. In PPO the last layer of a prompt needs keys
    and values only.
    """

    def __init__(self, base: nn.Module) -> None:
        """Wrap transformers' model without its head; ``causal_lm.load`` compares their logits.

        Raises:
            ValueError: A layer has another kind of attention.
        """
        super().__init__()
        self.base: Any = base
        config: Any = base.config
        self.hidden_size = int(config.hidden_size)
        types = getattr(config, "layer_types", None) or [None] * len(self.layers)
        self.types: tuple[str | None, ...] = tuple(types)
        if others := sorted({str(kind) for kind in self.types if kind not in KINDS}):
            raise ValueError(f"layers have {', '.join(others)}")
        pairs = zip(self.layers, self.types)
        self.attention = [self._attention(layer.self_attn, kind) for layer, kind in pairs]
        self.blocks = [describe(layer) for layer in self.layers]
        self.groups = [block.groups for block in self.blocks]  # number of key heads of each layer
        self.head_dim = self.blocks[0].head_dim
        self.embedding_scale = float(getattr(base, "embedding_multiplier", 1.0))  # Granite
        # Whether activations are recomputed backward: less memory, a third more time.
        self.recompute = False

    @property
    def layers(self) -> Any:
        return self.base.layers

    @property
    def has_experts(self) -> bool:
        """Whether layers choose among experts for each token."""
        return any(hasattr(layer.mlp, "experts") for layer in self.layers)

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
        x = self.base.embed_tokens(ids)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        return self.run(x, positions, attend, place)

    def run(self, x: Tensor, positions: Tensor, attend: Attend, place: Tensor | None) -> Tensor:
        """Run the layers on embeddings [B, L, D] at positions int64 [1 or B, L]; result as
        ``forward``.
        """
        rotations = {kind: self._rotation(x, positions, kind) for kind in dict.fromkeys(self.types)}
        last = len(self.layers) - 1
        for i, kind in enumerate(self.types):
            at = place if i == last else None
            args = (self.blocks[i], i, x, rotations[kind], attend, at)
            x = run_layer(self.recompute, self.layers[i], _compute_layer, *args)
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
        position, query = tree.position.unsqueeze(0), tree.query.unsqueeze(0)
        hidden = self(token, position, attend=attend, place=query)
        return hidden[0].index_select(0, tree.query_index).unflatten(0, place.shape)

    def _attend_tree(self, tree: PrefixTree, causal: Attend, places: Sequence[int]) -> Attend:
        """Return attention of the nodes of a tree; ``causal`` is that of the rows."""
        b, last = places[0], len(self.attention) - 1

        def rows(x: Tensor, index: Tensor) -> Tensor:
            """Copy [1, heads, n, d] to [B, heads, m, d]."""
            return x[0].transpose(0, 1).index_select(0, index).unflatten(0, (b, -1)).transpose(1, 2)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query, result = tree.token_node, tree.token_index
            if i == last:
                query, result = tree.query_index, tree.query_token
            out = causal(i, rows(q, query), rows(k, tree.token_node), rows(v, tree.token_node))
            out = out.transpose(1, 2).flatten(0, 1).index_select(0, result)  # [n, heads, d]
            return out.transpose(0, 1).unsqueeze(0)

        return attend

    def varlen(self, packing: Packing) -> Attend:
        """Return attention of packed rows by flash attention, for half precision on a GPU."""
        kernel = _varlen_kernel()
        rows = (packing.start, packing.start, packing.longest, packing.longest)
        assert kernel is not None

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # [n, heads, d]
            options = {"scale": self.attention[i].scale, "enable_gqa": q.shape[1] > k.shape[1]}
            window = (-1, 0)  # all earlier keys, no later ones
            return kernel(q, k, v, *rows, window_size=window, **options).transpose(0, 1)[None]

        return attend

    def _packs(self, ids: Tensor) -> bool:
        """Return whether ``varlen`` supports this call.

        It needs a GPU, half precision and full causal attention. It copies row lengths to the host,
        which is not allowed while a CUDA graph is captured.
        """
        if not ids.is_cuda or torch.cuda.is_current_stream_capturing() or _varlen_kernel() is None:
            return False
        dtype = next(self.layers[0].self_attn.o_proj.parameters()).dtype  # frozen, with adapters
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


def run_layer(recompute: bool, layer: Any, function: Callable[..., M], *args: Any) -> M:
    """Return ``function(layer, *args)``, called with gathered weights.

    With ``recompute`` its activations are computed again in the backward pass.
    """
    if recompute and torch.is_grad_enabled():
        result: Any = checkpoint(gathered, layer, function, *args, use_reentrant=False)
        return result
    return gathered(layer, function, *args)


def _compute_layer(
    layer: Any,
    block: LayerForm,
    i: int,
    x: Tensor,
    rotation: Rotation,
    attend: Attend,
    place: Tensor | None,
) -> Tensor:
    """Compute layer ``i`` on x [B, L, D]; the result is [B, R, D] at ``place``."""

    def norm(number: int, x: Tensor) -> Tensor:
        name = block.norms[number]
        return x if name is None else normalise(getattr(layer, name), x)

    a = layer.self_attn
    key, value, query = _project_heads(a, block, norm(0, x), place)
    key = _rotate(block, _heads(a, block, "k", key), rotation, value.dtype)
    if place is not None:
        x = _gather(x, place)
        rotation = _gather(rotation[0], place), _gather(rotation[1], place)
    query = _rotate(block, _heads(a, block, "q", query), rotation, value.dtype)
    value = _heads(a, block, "v", value)
    h = a.o_proj(attend(i, query, key, value).transpose(1, 2).flatten(2))
    x = torch.add(x, norm(1, h), alpha=block.residual)
    return torch.add(x, norm(3, gated_mlp(layer.mlp, norm(2, x))), alpha=block.residual)


def _project_heads(a: Any, block: LayerForm, h: Tensor, place: Tensor | None) -> Sequence[Tensor]:
    """Return keys and values [B, L, G d] and queries [B, L, H d], or [B, R, H d] at ``place``."""
    if hasattr(a, "qkv_proj"):  # Phi 3
        sizes = [n * block.head_dim for n in (block.queries, block.groups, block.groups)]
        query, key, value = a.qkv_proj(h).split(sizes, dim=-1)
        return key, value, query if place is None else _gather(query, place)
    if place is None:
        return project((a.k_proj, a.v_proj, a.q_proj), h)
    return *project((a.k_proj, a.v_proj), h), a.q_proj(_gather(h, place))


def gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """Return down_proj(act(gate_proj x) * up_proj x), or that of the chosen experts, [B, L, D]."""
    if hasattr(mlp, "experts"):  # a router chooses some of them for each token (Qwen 3 MoE)
        return _expert_shapes(mlp, x) if isinstance(x, FakeTensor) else mlp(x)
    if hasattr(mlp, "gate_up_proj"):  # Phi 3, GLM 4
        gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
        return mlp.down_proj(gated_product(mlp.activation_fn, gate, up))
    gate, up = project((mlp.gate_proj, mlp.up_proj), x)
    return mlp.down_proj(gated_product(mlp.act_fn, gate, up))


def _expert_shapes(mlp: Any, x: Tensor) -> Tensor:
    """Return a tensor like ``mlp(x)`` for a prediction of memory, from one expert for all tokens.

    torch's grouped products refuse float32 tensors without contents.
    """
    rows = x.repeat_interleave(mlp.gate.top_k, dim=-2)
    gate, up = F.linear(rows, mlp.experts.gate_up_proj[0]).chunk(2, dim=-1)
    y = F.linear(gated_product(mlp.experts.act_fn, gate, up), mlp.experts.down_proj[0])
    return y.unflatten(-2, (-1, mlp.gate.top_k)).sum(-2)


def _heads(attention: Any, block: LayerForm, which: str, x: Tensor) -> Tensor:
    """Split projections [B, L, heads d] to [B, heads, L, d], normalised in models that do so (Qwen
    3, Gemma 3, OLMo 2).
    """
    norm = getattr(attention, f"{which}_norm", None)
    if norm is not None and block.norms_heads_together:
        x, norm = normalise(norm, x), None
    x = x.unflatten(-1, (-1, block.head_dim))
    return (x if norm is None else normalise(norm, x)).transpose(1, 2)


def _rotate(block: LayerForm, x: Tensor, rotation: Rotation, dtype: torch.dtype) -> Tensor:
    """Return x [B, heads, L, d] with rotary position embedding, in type ``dtype``.

    The order of the numbers of a head may change, in queries and keys alike.
    """
    if not block.rotary:
        return x.to(dtype)
    size = rotation[0].shape[-1]
    y = x if size == x.shape[-1] else x[..., :size]
    if block.interleaved:  # put the partners i of all pairs first, as ``rotate`` expects
        y = y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    y = rotate(y, *rotation, dtype)
    return y if size == x.shape[-1] else torch.cat((y, x[..., size:].to(dtype)), dim=-1)


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
    """Return torch's attention of packed rows, None in versions (before 2.12) that lack it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def _reads_host(ids: Tensor) -> bool:
    """Return whether token ids are on the host and can be read, unlike those of a compiler."""
    return type(ids) is Tensor and ids.device.type == "cpu" and get_proxy_mode() is None


def _gather(x: Tensor, place: Tensor) -> Tensor:
    """Gather rows [1 or B, L, K] at places [B, R]."""
    if place.shape[0] == 1:
        return x.index_select(1, place[0])
    x = x.expand(place.shape[0], *x.shape[1:])
    return x.gather(1, place.unsqueeze(-1).expand(*place.shape, x.shape[-1]))


class ModuleReference(Generic[M]):
    """Reference to a module that is excluded from state_dict and parameters of its owner."""

    def __init__(self, module: M) -> None:
        self.module = module

    def __repr__(self) -> str:
        # No memory address: the cache of compiled libraries uses the representation as part of its
        # key.
        return f"ModuleReference({type(self.module).__name__})"
