"""A small vision-language-action model: pictures, a sentence and the robot's own state to what actions are read from.

B rows, C actions of a chunk, A dimensions of each, D width, P tokens of what is seen, Q of what is decided.

Words point at places of the pictures: at this size a plain transformer clones the motion and ignores the words. What
is seen becomes the decoder's memory once; the tokens that actions are read from attend to it and to each other.
Families of action heads stand in ``vla_token``, ``vla_gaussian`` and ``vla_flow``.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.collectives import gathered
from embodied_ppo.core.types import ActionSpec, ArraySpec, Box, ConfigError, Obs, ObsSpec
from embodied_ppo.models.backbone import VECTOR, Encoder, channels_last

INSTRUCTION = "instruction"
"""The observation that counts the simulator's sentences."""
WORDS = "/words"
"""Name of the input that holds a sentence's words. (The slash: no image is called so.)"""
CELL = 4
"""Pixels along the side of the smallest square that is told from others."""
UNHEARD = -1
"""In place of a word's number: somebody says something, and it means nothing."""
FASTEST, SLOWEST = 12.0, 192.0
"""Words until the waves that number a sentence's words repeat themselves."""
NEVER = -1e4
"""Logit of what is not chosen, unless nothing else is there."""


def word_ids(sentence: str, buckets: int) -> list[int]:
    """Words as 1 .. buckets-1 by their hash: no vocabulary to keep, and words never seen have a place. 0 pads."""
    return [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in re.findall(r"\w+", sentence.lower())]


@functools.lru_cache(maxsize=4)
def sentence_table(sentences: tuple[str, ...], buckets: int) -> Tensor:
    """int64 [S, L], a row for each sentence."""
    rows = [word_ids(sentence, buckets) for sentence in sentences]
    width = max(1, *(len(row) for row in rows)) if rows else 1
    return torch.tensor([row + [0] * (width - len(row)) for row in rows] or [[0]], dtype=torch.int64)


class Found(NamedTuple):
    """What cloning's foresight is read from.

    focus  [B, D]  where in the pictures is what the sentence speaks of
    cells  [B, HW/16, D/2]  each square of CELL x CELL pixels in the light of the sentence, of all cameras one after
           another; None in models that were published with a trunk of their own
    """

    focus: Tensor
    cells: Tensor | None = None


class Memory(NamedTuple):
    """What is seen, once for all action tokens.

    tokens   [B, P, D]  pictures, state, words        hidden  bool [B, P]  tokens that pad
    context  [B, D]  what was found, sentence and state
    found    None where a frozen trunk looked before
    """

    tokens: Tensor
    hidden: Tensor
    context: Tensor
    found: Found | None = None


class Stem(nn.Module):
    """A picture in two resolutions: cells of CELL x CELL pixels, and tokens of 2 x 2 cells."""

    def __init__(self, name: str, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, height, w = shape
        if height % (2 * CELL) or w % (2 * CELL):
            raise ConfigError(
                f"env observation {name!r}: {height} x {w} pixels; a VLA cuts it into patches of 8 x 8: use "
                "env.image_size=64, or another multiple of 8"
            )
        half, self.grid = width // 2, (height // CELL, w // CELL)
        self.patch, self.merge = nn.Linear(CELL * CELL * channels, half), nn.Linear(4 * half, width)
        self.near = nn.ModuleList(nn.Conv2d(half, half, 3, padding=1) for _ in range(2))
        cells = self.grid[0] * self.grid[1]
        self.places = nn.Parameter(torch.randn(cells, width))
        """Of the cells."""
        self.position = nn.Parameter(torch.randn(cells // 4, width))
        """Of the tokens."""

    def cells(self, image: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] -> [B, HW/16, D/2]."""
        x = _merged(image.permute(0, 2, 3, 1).contiguous(), CELL).float() * (1 / 127.5) - 1
        x = F.silu(self.patch(x)).permute(0, 3, 1, 2)
        for near in self.near:
            x = x + F.silu(near(x))
        return x.flatten(2).transpose(1, 2)

    def tokens(self, cells: Tensor) -> Tensor:
        """[B, HW/16, D/2] -> [B, HW/64, D]."""
        return F.silu(self.merge(_merged(cells.unflatten(1, self.grid).contiguous(), 2))).flatten(1, 2) + self.position


def _order(length: int, like: Tensor) -> Tensor:
    """[L, D] waves of 2 pi / SLOWEST to 2 pi / FASTEST a word: which comes first."""
    half = like.shape[-1] // 2
    period = FASTEST * (SLOWEST / FASTEST) ** (torch.arange(half, device=like.device) / max(1, half - 1))
    angle = torch.arange(length, device=like.device).unsqueeze(1) / period * (2 * math.pi)
    return F.pad(torch.cat((angle.sin(), angle.cos()), dim=1), (0, like.shape[-1] - 2 * half)).to(like)


def _merged(x: Tensor, n: int) -> Tensor:
    """[B, H, W, K] -> [B, H/n, W/n, n·n·K]."""
    b, h, w, k = x.shape
    return x.view(b, h // n, n, w // n, n, k).transpose(2, 3).reshape(b, h // n, w // n, n * n * k)


class Trunk(nn.Module):
    """Encoded observations to what the decoder attends to."""

    def __init__(self, spec: ObsSpec, sentences: Sequence[str], config: ModelConfig) -> None:
        super().__init__()
        named: dict[str, ArraySpec] = dict(spec) if isinstance(spec, dict) else {"obs": spec}
        self.told = named.pop(INSTRUCTION, None) is not None
        self.encoder = Encoder(named, config)
        if not self.encoder.images:
            raise ConfigError(
                f"model.policy={config.policy}: the observation holds no picture; name one with env.cameras=[front], "
                "or use model.policy=actor_critic"
            )
        width = config.width
        self.names = list(self.encoder.images)
        self.stems = nn.ModuleList(Stem(name, _chw(s), width) for name, s in self.encoder.images.items())
        self.state = nn.Linear(self.encoder.vector_size, width) if self.encoder.vector_size else None
        self.words = nn.Embedding.from_pretrained(torch.zeros(config.word_buckets, width), freeze=False)
        self.hear(sentences)
        self.beside = nn.Conv1d(width, width, 3, padding=1)
        """A word and the two beside it: without, "the red block to the blue zone" is the same bag of words as "the blue
        block to the red zone"."""
        self.sentence = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.heads = config.heads
        self.choose, self.ask = nn.Linear(width, config.heads), nn.Linear(width, width)
        self.show = nn.Linear(width // 2, 2 * width)
        self.place = nn.Linear(width, width)
        self.mark = nn.Linear(config.heads, width // 2)
        self.table: Tensor
        """int64 [S, L], words of the simulator's sentences; not part of a checkpoint."""
        self.register_buffer("table", sentence_table(tuple(sentences), config.word_buckets), persistent=False)

    @torch.no_grad()
    def hear(self, sentences: Sequence[str], generator: torch.Generator | None = None) -> None:
        """Words that have no meaning yet get one, at random. What no training has said remains 0, as UNHEARD."""
        weight = self.words.weight
        ids = sentence_table(tuple(sentences), len(weight)).unique().to(weight.device)
        new = ids[(ids > 0) & (weight[ids] == 0).all(1)]
        weight[new] = torch.randn(weight.shape, generator=generator)[new.cpu()].to(weight)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        named = obs if isinstance(obs, dict) else {"obs": obs}
        inputs = self.encoder({name: x for name, x in named.items() if name != INSTRUCTION})
        if self.told:
            inputs[WORDS] = self.table[named[INSTRUCTION].long()]
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> Memory:
        some = inputs[self.names[0]]
        words = inputs.get(WORDS)
        if words is None:
            words = some.new_zeros((len(some), 1), dtype=torch.int64)
        used = words != 0  # [B, L]
        embedded = self.words(words.clamp_min(0)) * (words > 0).unsqueeze(-1)
        embedded = (embedded + _order(words.shape[1], embedded)) * used.unsqueeze(-1)
        embedded = embedded + F.silu(self.beside(embedded.transpose(1, 2)).transpose(1, 2))
        mean = (embedded * used.unsqueeze(-1)).sum(1) / used.sum(1, keepdim=True).clamp_min(1)
        stems = cast("list[Stem]", list(self.stems))
        seen = [stem.cells(inputs[name]) for name, stem in zip(self.names, stems, strict=True)]
        focus, detail, marks = self._point(embedded, used, _joined(seen), torch.cat([s.places for s in stems]))
        cells = [x + m for x, m in zip(seen, self.mark(marks).split([x.shape[1] for x in seen], dim=1), strict=True)]
        tokens = [stem.tokens(x) for stem, x in zip(stems, cells, strict=True)]
        context = self.sentence(mean) + focus + detail
        if self.state is not None:
            state = self.state(inputs[VECTOR])
            context = context + state
            tokens.append(state.unsqueeze(1))
        count = sum(x.shape[1] for x in tokens)
        hidden = torch.cat((used.new_zeros(len(used), count), ~used), dim=1)
        return Memory(torch.cat([*tokens, embedded], dim=1), hidden, context, Found(focus, _joined(cells)))

    def _point(self, words: Tensor, used: Tensor, cells: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each head points at cells [B, P, D/2] that words of its choice [B, L, D] speak of: the mean of places and of
        contents [B, D], and how much it means each cell [B, P, heads].

        Because a picture is read without the words, and a head knows only those that it chose, "blue" means the same
        beside any other word. Only by pointing can be told where something is (as spatial softmax, Finn et al. 2016):
        contents, which would be learned sooner, are kept apart.
        """
        chosen = self.choose(words).masked_fill(~used.unsqueeze(-1), NEVER).softmax(1)  # [B, L, heads]
        query = torch.einsum("blh,blhd->bhd", chosen, self.ask(words).unflatten(-1, (self.heads, -1)))
        # What a cell shows is linear in it: heads pool cells, and only what they pooled is shown to them.
        size = query.shape[-1]
        key, content = self.show.weight.unflatten(0, (2, self.heads, size)).unbind()  # [heads, d, D/2]
        key_bias, content_bias = self.show.bias.view(2, self.heads, size).unbind()
        marks = cells @ torch.einsum("bhd,hdc->bch", query, key)
        marks = (marks + (query * key_bias).sum(-1).unsqueeze(1)) * size**-0.5
        weight = marks.softmax(1)
        where = torch.einsum("bph,phd->bhd", weight, self.place(places).unflatten(-1, (self.heads, -1)))
        what = torch.einsum("bhc,hdc->bhd", weight.transpose(1, 2) @ cells, content) + content_bias
        return where.flatten(1), what.flatten(1), marks


def _joined(parts: list[Tensor]) -> Tensor:
    """[B, n, D] one after another along n."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _chw(spec: ArraySpec) -> tuple[int, int, int]:
    a, b, c = spec.shape
    return (c, a, b) if channels_last(spec) else (a, b, c)


class Block(nn.Module):
    """Pre-LN: attention among the tokens, attention to the memory, a gated unit (Shazeer 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.out2 = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, L, d]

    def remember(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory [B, heads, P, d]."""
        key, value = self.kv(tokens).chunk(2, dim=-1)
        return self._split(key), self._split(value)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        seen: Tensor,
        *,
        causal: bool = False,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        """Tokens [B, Q, D]; ``seen`` bool [B, 1, 1, P]. ``past``: keys and values of earlier tokens, kept."""
        q, k, v = map(self._split, self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        if past is not None:
            if past:
                k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            past[:] = [k, v]
        x = x + self.out(_join(F.scaled_dot_product_attention(q, k, v, is_causal=causal and past is None)))
        q = self._split(self.q(self.norms[1](x)))
        x = x + self.out2(_join(F.scaled_dot_product_attention(q, *memory, attn_mask=seen)))
        gate, up = self.up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Tokens that attend to a memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def _all(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def remember(self, memory: Memory) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each block: all that is needed of a memory."""
        return [gathered(block, Block.remember, memory.tokens) for block in self._all()]

    def forward(
        self,
        x: Tensor,
        memory: Memory,
        kept: list[tuple[Tensor, Tensor]] | None = None,
        *,
        causal: bool = False,
        past: list[list[Tensor]] | None = None,
    ) -> Tensor:
        """[B, Q, D]; ``past``: a list for each block, for tokens that come one by one."""
        kept = self.remember(memory) if kept is None else kept
        seen = ~memory.hidden[:, None, None, :]
        for i, block in enumerate(self._all()):
            x = block(x, kept[i], seen, causal=causal, past=None if past is None else past[i])
        return self.norm(x)


class ValueHead(nn.Module):
    """V of a hidden state, float32 [B], or [B, C] of each action of a chunk; 0 everywhere at the start."""

    def __init__(self, width: int, detach: bool | None, hidden: int | None = None, *, values: int = 1) -> None:
        """``detach``: no gradient reaches the hidden state (None: as True); ``hidden``: units of the layer between,
        None: 4 x width; ``values``: outputs, 1 or C."""
        super().__init__()
        self.detach, hidden, self.values = detach is not False, hidden or 4 * width, values
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, values))
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        value = self.layers(hidden.detach() if self.detach else hidden).float()
        return value.squeeze(-1) if self.values == 1 else value


def action_size(spec: ActionSpec, chunk: int, config: ModelConfig) -> int:
    """Dimensions of one action (A) of a space that holds chunks. Raises ConfigError."""
    if not isinstance(spec, Box):
        raise ConfigError(
            f"model.policy={config.policy}: the task's actions are discrete; use model.policy=actor_critic"
        )
    return spec.size // chunk


def check_units(spec: ActionSpec, config: ModelConfig, mapping: str) -> None:
    """Of a checkpoint whose actions are in its dataset's units; ``mapping``: env.action_mapping. Raises ConfigError."""
    unit = isinstance(spec, Box) and set(spec.low) == {-1.0} and set(spec.high) == {1.0}
    if mapping == "rescale" and not unit:
        raise ConfigError(
            f"env.action_mapping=rescale: model.checkpoint={config.checkpoint} gives actions in its dataset's "
            "units, and the task's bounds are not -1 and 1; write env.action_mapping=clip"
        )


class VLA(nn.Module):
    """What all families have: a trunk that sees, a decoder that decides, a head that values.

    A frozen trunk is run once for every observation, in ``encode``; the epochs of an update begin from what it saw.
    """

    FROZEN_ROWS = 256
    """Observations that a frozen trunk reads together."""
    KEPT = ("tokens", "hidden", "context")
    """Of a frozen trunk's memory."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        queries: Callable[[int, int], int],
        values: int = 1,
    ) -> None:
        """``queries(C, A)`` is Q; ``values``: outputs of the value head, 1 or C. Raises ConfigError."""
        super().__init__()
        self.chunk, self.size = chunk, action_size(action_spec, chunk, config)
        self.trunk, self.decoder = Trunk(obs_spec, sentences, config), Decoder(config)
        self.query = nn.Parameter(torch.randn(queries(self.chunk, self.size), config.width))
        self.value_head = ValueHead(config.width, config.detach_value, values=values)
        self.temperature = config.temperature
        self.sentences = tuple(sentences)
        self.frozen = False

    def freeze(self, frozen: bool) -> None:
        """Whether the trunk stays as it is."""
        self.frozen = frozen
        self.trunk.requires_grad_(not frozen)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        inputs = self.trunk.encode(obs)
        if not self.frozen:
            return inputs
        with torch.no_grad():
            rows = len(next(iter(inputs.values())))
            cuts = (slice(i, i + self.FROZEN_ROWS) for i in range(0, rows, self.FROZEN_ROWS))
            parts = [self.trunk({name: x[cut] for name, x in inputs.items()}) for cut in cuts]
        return {f"/{name}": torch.cat([getattr(part, name) for part in parts]) for name in self.KEPT}

    def see(self, inputs: dict[str, Tensor]) -> Memory:
        """Of what ``encode`` gave."""
        if not self.frozen:
            return self.trunk(inputs)
        tokens, hidden, context = (inputs[f"/{name}"] for name in self.KEPT)
        return Memory(tokens, hidden, context)

    def tell(self, sentences: Sequence[str]) -> None:
        """The sentences that observations count, from now on."""
        self.sentences = tuple(sentences)
        self.trunk.table = sentence_table(self.sentences, self.trunk.words.num_embeddings).to(self.query.device)

    def observe(self, obs: Obs, mask: Tensor) -> None:
        named = obs if isinstance(obs, dict) else {"obs": obs}
        self.trunk.encoder.observe({name: x for name, x in named.items() if name != INSTRUCTION}, mask)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        critic = list(self.value_head.parameters())
        names = {id(p) for p in critic}
        actor = [p for p in self.parameters() if p.requires_grad and id(p) not in names]
        return {"actor": actor, "critic": critic}

    def units(self) -> list[nn.Module]:
        return [*self.decoder.blocks]


def mean_executed(loss: Tensor, executed: Tensor) -> Tensor:
    """Mean of [B, C, A] over the actions that were ``executed`` bool [B, C]."""
    return (loss.mean(-1) * executed).sum() / executed.sum().clamp_min(1)
