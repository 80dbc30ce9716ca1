"""Causal language models as policy and critic: the weights and modules are transformers', the forward pass is ours.

B rows, L tokens of a row (prompt and response without a gap, padded on the right), R response tokens, D size of a
hidden state, V size of the vocabulary. Row b's token ``place`` [B, R] is the one *before* a response token: log π and
V are read there (facts: off by one is the commonest bug of all).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
from embodied_ppo.models.checkpoint_files import refusing

M = TypeVar("M")
Attend: TypeAlias = "Callable[[int, Tensor, Tensor, Tensor], Tensor]"
"""(layer, query [B, heads, Q, d], key and value [B, groups, L, d]) -> [B, heads, Q, d]."""
CHUNK_BYTES = 64 << 20
"""Logits that may exist at once; more are computed in parts, and again in the backward pass."""
WRITTEN_OUT = 1024
"""Pairs of query and key in a row up to which attention is written out where it is compiled."""
OTHERWISE = (AttributeError, TypeError, RuntimeError, IndexError, ZeroDivisionError)
"""What a forward pass raises that was written for another architecture or other sizes."""
SAME = 1e-4
"""Largest difference between our logits and transformers', relative to the largest logit."""


@dataclass(frozen=True)
class Attention:
    """How a layer attends: logits q·k * scale, tanh-capped at softcap, to the last ``window`` keys; None: no limit."""

    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """[B, heads, Q, d]; ``seen`` bool [.., Q, L]: which keys each query sees. None: Q is L, all up to its own."""
        if self.softcap is None and get_proxy_mode() is not None and q.shape[2] * k.shape[2] <= WRITTEN_OUT:
            return self._written_out(q, k, v, seen)
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        groups, queries = k.shape[1], q.shape[2]
        logits = q.unflatten(1, (groups, -1)) @ k.unsqueeze(2).transpose(-1, -2) * self.scale
        logits = self.softcap * torch.tanh(logits / self.softcap)
        if seen is None:
            seen = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril()
        elif seen.ndim == 4:
            seen = seen.unsqueeze(2)
        p = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        return (p @ v.unsqueeze(2)).flatten(1, 2)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """The same in sums, which a compiler fuses: for few tokens faster than a kernel for many."""
        if seen is None:
            seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * self.scale
        p = logits.masked_fill(~seen, -1e30).softmax(-1)
        return (p.unsqueeze(-1) * v.unsqueeze(2)).sum(3)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Which places key [.., L] those at query [.., Q] see, bool [.., Q, L]."""
        distance = query.unsqueeze(-1) - key.unsqueeze(-2)
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


class Decoder(nn.Module):
    """The layers of a model of the Llama family (Llama, SmolLM, Mistral, Qwen 2, 2.5 and 3, Gemma 1 to 3).

    The last layer computes only the places that are asked for: in PPO, prompts need no more than their keys there.
    """

    def __init__(self, base: nn.Module) -> None:
        """``base``: transformers' model without a head; ``load`` refuses other families."""
        super().__init__()
        self.base: Any = base
        config: Any = base.config
        self.hidden_size = int(config.hidden_size)
        self.types: tuple[str | None, ...] = tuple(getattr(config, "layer_types", None) or [None] * len(self.layers))
        self.attention = [self._attention(layer.self_attn, kind) for layer, kind in zip(self.layers, self.types)]
        self.groups = [layer.self_attn.k_proj.out_features // layer.self_attn.head_dim for layer in self.layers]
        """Key heads of each layer."""
        self.head_dim = int(self.layers[0].self_attn.head_dim)
        self.recompute = False
        """Keep no layer's inside for the backward pass but compute it again: less memory, a third more time."""

    @property
    def layers(self) -> Any:
        return self.base.layers

    @staticmethod
    def _attention(attention: Any, kind: str | None) -> Attention:
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        if kind not in (None, "sliding_attention"):
            window = None
        return Attention(float(attention.scaling), window, getattr(attention, "attn_logit_softcapping", None))

    def causal(self, length: int, place: Tensor | None, device: torch.device) -> Attend:
        """Every token sees those before it in its row. ``place`` int64 [B, R]: what the last layer is asked for."""
        all_places = torch.arange(length, device=device)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            how = self.attention[i]
            if place is not None and i == len(self.attention) - 1:
                return how(q, k, v, how.sees(place, all_places).unsqueeze(1))
            seen = None if how.window is None or how.window >= length else how.sees(all_places, all_places)
            return how(q, k, v, seen)

        return attend

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, *, attend: Attend | None = None, place: Tensor | None = None
    ) -> Tensor:
        """int64 ids and positions [B, L] (None: 0, 1, ..) -> final hidden states [B, L, D], or [B, R, D] at ``place``.

        ``attend``: None for whole rows; a cache has its own. Whole rows go without their padding where ``varlen`` can.
        """
        if attend is None and positions is None and place is not None and self._packs(ids):
            return self.packed(ids, place, self.varlen)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        if attend is None:
            attend = self.causal(ids.shape[1], place, ids.device)
        return self.run(self.base.embed_tokens(ids), positions, attend, place)

    def run(self, x: Tensor, positions: Tensor, attend: Attend, place: Tensor | None) -> Tensor:
        """The layers on embeddings [B, L, D] at int64 positions [1 or B, L] -> as ``forward``."""
        kinds = {kind: self._rotation(x, positions, kind) for kind in dict.fromkeys(self.types)}
        last = len(self.layers) - 1
        for i, kind in enumerate(self.types):
            at = place if i == last else None
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(self._layer, i, x, *kinds[kind], attend, at, use_reentrant=False)
            else:
                x = self._layer(i, x, *kinds[kind], attend, at)
        return self.base.norm(x)

    def packed(self, ids: Tensor, place: Tensor, blocks: Callable[[Packing], Attend]) -> Tensor:
        """As ``forward`` with ``place``, all rows in one without their padding. ``blocks``: how each sees itself only.

        The last layer computes every place, not only those asked for.
        """
        packing = pack(place, ids.shape[1])
        one = ids.flatten()[packing.index].unsqueeze(0)
        return self(one, packing.position.unsqueeze(0), attend=blocks(packing))[0][packing.at]

    def separate(self, packing: Packing) -> Attend:
        """Of packed rows, one after the other: what ``varlen`` computes, slowly."""

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sizes = packing.start.diff().tolist()
            rows = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([self.causal(row[0].shape[2], None, q.device)(i, *row) for row in rows], dim=2)

        return attend

    def varlen(self, packing: Packing) -> Attend:
        """Of packed rows, by flash attention in half precision on a GPU."""
        kernel, start, longest = _varlen_kernel(), packing.start, packing.longest
        assert kernel is not None

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))  # [n, heads, d]
            window, gqa = (-1, 0), q.shape[1] != k.shape[1]  # all before, none after
            how = self.attention[i]
            out = kernel(q, k, v, start, start, longest, longest, scale=how.scale, window_size=window, enable_gqa=gqa)
            return out.transpose(0, 1).unsqueeze(0)

        return attend

    def _packs(self, ids: Tensor) -> bool:
        """Whether ``varlen`` can: on a GPU, in half precision, all earlier keys seen, no graph under way (lengths go to
        the host)."""
        if not ids.is_cuda or torch.cuda.is_current_stream_capturing() or _varlen_kernel() is None:
            return False
        dtype = self.layers[0].self_attn.v_proj.weight.dtype
        if dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        plain = all(a.softcap is None and (a.window is None or a.window >= ids.shape[1]) for a in self.attention)
        fits = dtype in (torch.bfloat16, torch.float16) and self.head_dim % 8 == 0 and self.head_dim <= 256
        return plain and fits and torch.cuda.get_device_capability(ids.device) >= (8, 0)

    def _rotation(self, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """cos and sin [1 or B, L, d]."""
        rotary = self.base.rotary_emb
        return rotary(x, positions, kind) if hasattr(rotary, "layer_types") else rotary(x, positions)

    def _layer(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, place: Tensor | None) -> Tensor:
        return gathered(self.layers[i], self._compute, i, x, cos, sin, attend, place)

    @staticmethod
    def _compute(
        layer: Any, i: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, place: Tensor | None
    ) -> Tensor:
        a = layer.self_attn
        h = layer.input_layernorm(x)
        key, value = _heads(a, "k", h), _heads(a, "v", h)
        key = _rotate(key, cos, sin)
        if place is not None:
            x, h, cos, sin = _at(x, place), _at(h, place), _at(cos, place), _at(sin, place)
        query = _rotate(_heads(a, "q", h), cos, sin)
        h = a.o_proj(attend(i, query, key, value).transpose(1, 2).flatten(2))
        if not hasattr(layer, "pre_feedforward_layernorm"):
            x = x + h
            return x + layer.mlp(layer.post_attention_layernorm(x))
        x = x + layer.post_attention_layernorm(h)  # Gemma 2 and 3 normalise what comes out, too
        return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))

    def train(self, mode: bool = True) -> Decoder:
        """Always as for evaluation: dropout would make log-probabilities noise."""
        return super().train(False)


def _heads(attention: Any, which: str, h: Tensor) -> Tensor:
    """[B, L, D] -> [B, heads, L, d], normalised where the model does (Qwen 3, Gemma 3)."""
    x = getattr(attention, f"{which}_proj")(h).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)
    return (x if norm is None else norm(x)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of [B, heads, L, d] by angles [1 or B, L, d]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Packing:
    """B rows of [B, L] in one without padding, n tokens.

    index     int64 [n]     where each was in the flattened [B·L]
    position  int64 [n]     in its own row
    start     int32 [B+1]   where rows begin; the last one is n
    at        int64 [B, R]  where the places are that were asked for
    longest   row, tokens
    """

    index: Tensor
    position: Tensor
    start: Tensor
    at: Tensor
    longest: int


def pack(place: Tensor, width: int) -> Packing:
    """Rows of ``width`` tokens up to their last ``place`` int64 [B, R]: nothing that is asked for depends on more."""
    length = place.amax(1) + 1
    inside = torch.arange(width, device=place.device) < length.unsqueeze(1)
    index = inside.flatten().nonzero().flatten()
    start = F.pad(length.cumsum(0), (1, 0))
    return Packing(index, index % width, start.int(), place + start[:-1].unsqueeze(1), int(length.max()))


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's attention of packed rows; None in versions without it or without grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def _at(x: Tensor, place: Tensor) -> Tensor:
    """Rows [1 or B, L, K] at places [B, R]."""
    x = x.expand(place.shape[0], *x.shape[1:])
    return x.gather(1, place.unsqueeze(-1).expand(*place.shape, x.shape[-1]))


# ------------------------------------------------------------------------------------------------------------- policy
def precision(weight: Tensor, compute: torch.dtype, *, again: bool = True) -> AbstractContextManager[Any]:
    """The context in which float32 weights like ``weight`` are multiplied in ``compute``; within another: nothing.

    ``again``: weights rounded in it are kept until it ends; a CUDA graph must round them each time.
    """
    kind = weight.device.type
    if weight.dtype != torch.float32 or compute == torch.float32 or (again and torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, compute, cache_enabled=again)


@dataclass(frozen=True, slots=True)
class TokenView:
    """What a policy thinks of response tokens, float32.

    log_prob  [..]  of the token      entropy  [..]  of the distribution      distance [..]  Σ_v π·(log π − log π_ref)
    """

    log_prob: Tensor
    entropy: Tensor
    distance: Tensor | None = None


class LanguagePolicy(nn.Module):
    """π(token | everything before it), at the temperature that rollouts are sampled with."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, compute: torch.dtype = torch.float32) -> None:
        """``model``: a causal language model of transformers. ``compute``: what matrices are multiplied in."""
        super().__init__()
        self.model: Any = model
        self.temperature, self.compute = temperature, compute
        self.decoder = Aside(Decoder(self.model.model))
        self.softcap: float | None = getattr(self.model.config, "final_logit_softcapping", None)

    def units(self) -> list[nn.Module]:
        """As of ``types.Policy``."""
        return [*self.decoder.module.layers]

    def hidden(self, ids: Tensor, place: Tensor) -> Tensor:
        """[B, R, D] of tokens [B, L] at places [B, R]."""
        with precision(self.model.lm_head.weight, self.compute):
            return self.decoder.module(ids, place=place)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., D] -> float32 [.., V], at temperature 1."""
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
    ) -> TokenView:
        """Of hidden states [.., D] and the tokens int64 [..] that followed; with gradient.

        With a ``reference`` and its hidden states also the exact KL divergence from it (kl type full). Logits are
        computed in parts that fit CHUNK_BYTES.
        """
        shape, rows = action.shape, action.numel()
        flat = [hidden.reshape(rows, -1), action.reshape(rows)]
        if reference is not None:
            assert ref_hidden is not None
            flat.append(ref_hidden.reshape(rows, -1))
        size = max(1, CHUNK_BYTES // (4 * self.model.lm_head.weight.shape[0]))
        if rows <= size:
            parts = [self._part(reference, *flat)]
        else:
            cuts = zip(*(x.split(size) for x in flat), strict=True)
            parts = [checkpoint(self._part, reference, *cut, use_reentrant=False) for cut in cuts]
        columns: Any = [torch.cat(x).view(shape) if x[0] is not None else None for x in zip(*parts, strict=True)]
        return TokenView(*columns)

    def view_where(
        self,
        mask: Tensor,
        hidden: Tensor,
        action: Tensor,
        *,
        reference: LanguagePolicy | None = None,
        ref: Tensor | None = None,
    ) -> TokenView:
        """``view`` of hidden [B, R, D] and, time first, action [R, B] and ``ref`` [R, B, D]; all [R, B], arbitrary
        where ``mask`` is False: with a large vocabulary nothing is computed there."""
        hidden = hidden.transpose(0, 1)
        if 4 * mask.numel() * self.model.lm_head.weight.shape[0] <= CHUNK_BYTES:
            return self.view(hidden, action, reference=reference, ref_hidden=ref)
        few = self.view(hidden[mask], action[mask], reference=reference, ref_hidden=None if ref is None else ref[mask])

        def spread(x: Tensor) -> Tensor:
            return torch.zeros(mask.shape, device=x.device).index_put((mask,), x)

        distance = None if few.distance is None else spread(few.distance)
        return TokenView(spread(few.log_prob), spread(few.entropy), distance)

    def _part(
        self, reference: LanguagePolicy | None, hidden: Tensor, action: Tensor, ref_hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        log_p = (self.logits(hidden) / self.temperature).log_softmax(-1)  # [M, V]
        p = log_p.exp()
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
        distance = None
        if reference is not None:
            with torch.no_grad():
                assert ref_hidden is not None
                log_q = (reference.logits(ref_hidden) / self.temperature).log_softmax(-1)
            distance = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, distance

    def train(self, mode: bool = True) -> LanguagePolicy:
        """See ``Decoder.train``."""
        return super().train(False)


class LanguageCritic(nn.Module):
    """V(everything so far): a complete model of its own with one number per token, 0 everywhere at the start.

    (A random head was seen to begin with a value loss of 14 and to waste the first 20 updates.)
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype = torch.float32) -> None:
        """``model``: a causal language model of transformers; its head is dropped. ``compute`` as of the policy."""
        super().__init__()
        self.compute = compute
        whole: Any = model
        self.decoder = Decoder(whole.model)
        like = self.decoder.base.embed_tokens.weight
        self.value_head = nn.Linear(self.decoder.hidden_size, 1, device=like.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def begin_as(self, policy: Mapping[str, Tensor]) -> None:
        """Take everything but the head from a ``LanguagePolicy``'s state_dict."""
        within = "model.model."
        body = {name.removeprefix(within): x for name, x in policy.items() if name.startswith(within)}
        self.decoder.base.load_state_dict(body)

    def units(self) -> list[nn.Module]:
        """As of ``types.Policy``."""
        return [*self.decoder.layers]

    def value(self, ids: Tensor, place: Tensor) -> Tensor:
        """float32 [B, R] of tokens [B, L] at places [B, R]."""
        with precision(self.decoder.base.embed_tokens.weight, self.compute):
            hidden = self.decoder(ids, place=place)
        return self.value_head(hidden.float()).squeeze(-1)

    def train(self, mode: bool = True) -> LanguageCritic:
        """See ``Decoder.train``."""
        return super().train(False)


class Aside(Generic[M]):
    """Keeps a module out of the state_dict and the parameters of the one that holds it."""

    def __init__(self, module: M) -> None:
        self.module = module

    def __repr__(self) -> str:
        return f"Aside({type(self.module).__name__})"  # no address: compiled libraries are known by what is in them


# ------------------------------------------------------------------------------------------------------------- loading
def load(
    path: str | None,
    architecture: Mapping[str, Any],
    *,
    what: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """transformers' causal language model: from a directory, or new from ``architecture`` (its configuration's fields).

    ``what``: the options' section, for messages. Our forward pass is compared with the model's own before it is
    trusted. Raises ConfigError.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"mode=reasoning needs transformers ({error}): pip install 'embodied-ppo[language]'"
        ) from error
    logging.disable_progress_bar()
    model: Any
    option = f"path={path}" if path else "architecture"
    with refusing(f"{what}.{option}: transformers refuses: "):
        if path is not None:
            if not Path(path, "config.json").is_file():
                raise ConfigError(
                    f"{what}.path={path}: holds no config.json; name a directory that transformers wrote "
                    "(hf download NAME --local-dir DIR), or leave path null for a new, small model"
                )
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        else:
            fields = dict(architecture)
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model = model.to(device).eval()
    try:
        error = _difference(model)
    except torch.OutOfMemoryError:
        raise
    except OTHERWISE as missing:
        error = f"it is built otherwise, or its sizes do not fit: {type(missing).__name__}: {missing}"
    else:
        if error <= (SAME if model.dtype == torch.float32 else 0.05):
            return model
        error = f"logits differ by {error:.2g} of the largest"
    raise ConfigError(
        f"{what}: {type(model).__name__} computes something else than models of the Llama family do ({error}); Llama, "
        "SmolLM, Mistral, Qwen 2 to 3 and Gemma 1 to 3 are supported"
    )


@torch.no_grad()
def _difference(model: Any) -> float:
    """Between transformers' logits and ours, relative to the largest."""
    policy = LanguagePolicy(model)
    vocabulary = model.lm_head.weight.shape[0]
    ids = (torch.arange(2 * 12, device=model.lm_head.weight.device).view(2, 12) * 7919) % vocabulary
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    ours = policy.logits(policy.decoder.module(ids))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
