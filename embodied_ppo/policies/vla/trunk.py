"""Trunk of the small vision-language-action models.

It maps images, a sentence and the robot's state to a memory for the action decoder. B rows, C
actions of a chunk, A dimensions of each, D width, K cells of all cameras, P tokens of the memory, Q
tokens of the decoder, L words of a sentence.

The words attend to places in the images (``Trunk._attend_to_cells``). A plain transformer of this
size reproduces the motion but does not use the instruction. The memory is computed once per
observation; the action tokens attend to it and to each other. ``vla_policy`` builds policies of it.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.base.observation_names import INSTRUCTION, SINGLE
from embodied_envs.types import Obs, ObsSpec
from embodied_ppo.core.collectives import gathered
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.backbone import VECTOR, Encoder, channels_first_shape

# Name of the input that holds a sentence's word ids. No image has a name with a slash.
WORDS = "/words"
CELL = 4  # side of a cell, the smallest image patch, in pixels
MASKED_WORD = -1  # word id that replaces a masked word: it has a position but no embedding
# Shortest and longest period of the position encoding of words, in words.
SHORTEST_PERIOD, LONGEST_PERIOD = 12.0, 192.0
HEADS = 4  # number of attention heads; model.width is a multiple of 2 x HEADS
# Size of the vocabulary: each word of an instruction is mapped to one of this many buckets.
WORD_BUCKETS = 1024
# Logit of entries that must not be chosen; finite, for a softmax over such entries alone.
MASKED_LOGIT = -1e4


def word_ids(sentence: str, buckets: int) -> list[int]:
    """Return the ids 1 .. buckets-1 of a sentence's words, by hash; 0 is padding.

    No vocabulary has to be stored, and words unseen in training have an id, too.
    """
    words = re.findall(r"\w+", sentence.lower())
    return [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in words]


@functools.lru_cache(maxsize=4)
def sentence_table(sentences: tuple[str, ...], buckets: int) -> Tensor:
    """Return the word ids of each sentence, int64 [S, L]."""
    return pad_rows([word_ids(sentence, buckets) for sentence in sentences or ("",)], 0)


def pad_rows(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Return rows of ids as int64 [n, width], ``padding`` at their ends; width is at least 1."""
    width = max(1, *map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])


class Grounding(NamedTuple):
    """Image features that the sentence refers to; input of the auxiliary loss of behaviour cloning.

    Attributes:
        focus: [B, D], position of what the sentence refers to in the images.
        cells: [B, HW/16, D/2], features of each cell given the sentence, cameras one after another.
            None for published models, which have a trunk of their own.
    """

    focus: Tensor
    cells: Tensor | None = None


class DecoderMemory(NamedTuple):
    """Tokens that the action decoder attends to, computed once for all action tokens.

    Attributes:
        tokens: [B, P, D], images, state and words.
        padding: bool [B, P], padding tokens.
        summary: [B, D], sum of sentence, attended image features and state.
        grounding: None if a frozen trunk computed the memory in ``encode``.
    """

    tokens: Tensor
    padding: Tensor
    summary: Tensor
    grounding: Grounding | None = None


class Stem(nn.Module):
    """Image features in two resolutions: cells of CELL x CELL pixels, and tokens of 2 x 2 cells."""

    def __init__(self, name: str, shape: tuple[int, int, int], width: int) -> None:
        """Build the layers for one camera.

        Args:
            name: Name of the observation, for messages.
            shape: (channels, height, width) of an image in pixels.
            width: D.

        Raises:
            ConfigError: Height or width is not a multiple of 8.
        """
        super().__init__()
        channels, height, w = shape
        if height % (2 * CELL) or w % (2 * CELL):
            raise ConfigError(
                f"env observation {name!r}: {height} x {w} pixels; a VLA cuts it into patches of 8"
                " x 8: use env.image_size=64, or another multiple of 8"
            )
        half, self.grid = width // 2, (height // CELL, w // CELL)
        self.patch, self.merge = nn.Linear(CELL * CELL * channels, half), nn.Linear(4 * half, width)
        # Convolution over neighbouring cells. The attributes' names are keys of checkpoints.
        self.near = nn.ModuleList(nn.Conv2d(half, half, 3, padding=1) for _ in range(2))
        cells = self.grid[0] * self.grid[1]
        self.places = nn.Parameter(torch.randn(cells, width))  # position embedding of the cells
        # Position embedding of the tokens.
        self.position = nn.Parameter(torch.randn(cells // 4, width))

    def cells(self, image: Tensor) -> Tensor:
        """Return cell features [B, HW/16, D/2] of images uint8 [B, channels, H, W]."""
        x = _merge_patches(image.permute(0, 2, 3, 1).contiguous(), CELL).float() * (1 / 127.5) - 1
        x = F.silu(self.patch(x)).permute(0, 3, 1, 2)
        for near in self.near:
            x = x + F.silu(near(x))
        return x.flatten(2).transpose(1, 2)

    def tokens(self, cells: Tensor) -> Tensor:
        """Merge cells [B, HW/16, D/2] to tokens [B, HW/64, D]."""
        x = self.merge(_merge_patches(cells.unflatten(1, self.grid).contiguous(), 2))
        return F.silu(x).flatten(1, 2) + self.position


def _position_encoding(length: int, like: Tensor) -> Tensor:
    """Return sinusoidal position encodings [L, D] of words."""
    half = like.shape[-1] // 2
    ranks = torch.arange(half, device=like.device) / max(1, half - 1)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** ranks
    angle = torch.arange(length, device=like.device).unsqueeze(1) / period * (2 * math.pi)
    encoding = torch.cat((angle.sin(), angle.cos()), dim=1)
    return F.pad(encoding, (0, like.shape[-1] - 2 * half)).to(like)


def _merge_patches(x: Tensor, n: int) -> Tensor:
    """Join patches of n x n: [B, H, W, F] -> [B, H/n, W/n, n·n·F]."""
    b, h, w, f = x.shape
    return x.view(b, h // n, n, w // n, n, f).transpose(2, 3).reshape(b, h // n, w // n, n * n * f)


class ObservationEncoder(nn.Module):
    """Base class of trunks: encodes images and vectors, and reads the index of the instruction."""

    # Tokens of the simulator's sentences, by instruction; not part of a checkpoint.
    table: Any

    def __init__(self, spec: ObsSpec, config: ModelConfig) -> None:
        """Build the encoder of all observations except the instruction.

        Raises:
            ConfigError: No observation is an image.
        """
        super().__init__()
        self.has_instruction = isinstance(spec, dict) and INSTRUCTION in spec
        self.encoder = Encoder(_without_instruction(spec), config)
        if not self.encoder.images:
            option = "policy" if config.checkpoint is None else "checkpoint"
            raise ConfigError(
                f"model.{option}={getattr(config, option)}: the observation holds no image;"
                " name a camera with env.cameras=[front], or use model.policy=actor_critic"
            )
        self.names = list(self.encoder.images)

    def encode_observations(self, obs: Obs) -> dict[str, Tensor]:
        """Return normalised vectors and images, see ``Encoder``."""
        return self.encoder(_without_instruction(obs))

    def raw_vector(self, obs: Obs) -> Tensor:
        """Return the vectors in their own units, concatenated, [B, n]."""
        return self.encoder.join(_without_instruction(obs)).float()

    def instruction_index(self, obs: Obs, rows: int, device: torch.device) -> Tensor:
        """Return the index of each row's sentence, int64 [rows]; 0 where there is only one."""
        if self.has_instruction and isinstance(obs, dict):
            return obs[INSTRUCTION].long()
        return torch.zeros(rows, dtype=torch.int64, device=device)

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """See ``Policy.observe``."""
        self.encoder.observe(_without_instruction(obs), mask)


def _without_instruction(obs: Any) -> dict[str, Any]:
    """Return observations, or their specs, by name, except the instruction."""
    return {name: x for name, x in tree.named(obs, SINGLE).items() if name != INSTRUCTION}


class Trunk(ObservationEncoder):
    """Maps encoded observations to the memory that the decoder attends to."""

    def __init__(self, spec: ObsSpec, sentences: Sequence[str], config: ModelConfig) -> None:
        """Build the trunk.

        Args:
            spec: Observations of one environment.
            sentences: The simulator's instructions.
            config: Options of the section ``model``.

        Raises:
            ConfigError: No observation is an image, or an image's size is not supported.
        """
        super().__init__(spec, config)
        width, state_size = config.width, self.encoder.vector_size
        images = self.encoder.images.items()
        self.stems = nn.ModuleList(Stem(n, channels_first_shape(s), width) for n, s in images)
        self.state = nn.Linear(state_size, width) if state_size else None
        self.words = nn.Embedding.from_pretrained(torch.zeros(WORD_BUCKETS, width), freeze=False)
        self.initialize_words(sentences)
        # Convolution over a word and its two neighbours. Without it, "the red block to the blue
        # zone" and "the blue block to the red zone" are the same bag of words.
        self.beside = nn.Conv1d(width, width, 3, padding=1)
        self.sentence = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        # Layers of ``_attend_to_cells``; the attributes' names are keys of checkpoints.
        # choose: logits of the attention of each head to the words.
        # ask: query of each head, from the words.
        self.choose, self.ask = nn.Linear(width, HEADS), nn.Linear(width, width)
        # Keys and contents (values) of the cells.
        self.show = nn.Linear(width // 2, 2 * width)
        # Projection of the cells' position embeddings, whose attended mean is ``Grounding.focus``.
        self.place = nn.Linear(width, width)
        # Maps the heads' attention logits of a cell to a term that is added to its features.
        self.mark = nn.Linear(HEADS, width // 2)
        table = sentence_table(tuple(sentences), WORD_BUCKETS)
        self.register_buffer("table", table, persistent=False)

    @torch.no_grad()
    def initialize_words(
        self, sentences: Sequence[str], generator: Generator | None = None
    ) -> None:
        """Draw random embeddings for words that have none yet.

        Embeddings of words unseen in training stay 0, as MASKED_WORD.
        """
        weight = self.words.weight
        ids = sentence_table(tuple(sentences), len(weight)).unique().to(weight.device)
        new = ids[(ids > 0) & (weight[ids] == 0).all(1)]
        weight[new] = torch.randn(weight.shape, generator=generator)[new.cpu()].to(weight)

    def set_sentences(self, sentences: tuple[str, ...]) -> None:
        """Set the sentences that the instruction observation indexes."""
        self.table = sentence_table(sentences, WORD_BUCKETS).to(self.table.device)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """Return normalised vectors, images and the word ids of instructions, if there are any."""
        inputs = self.encode_observations(obs)
        if self.has_instruction and isinstance(obs, dict):
            inputs[WORDS] = self.table[obs[INSTRUCTION].long()]
        return inputs

    def forward(self, inputs: dict[str, Tensor]) -> DecoderMemory:
        """Return the memory of encoded observations."""
        image = inputs[self.names[0]]
        words = inputs.get(WORDS)
        if words is None:
            words = image.new_zeros((len(image), 1), dtype=torch.int64)
        valid = words != 0  # [B, L], not padding
        # MASKED_WORD keeps its place in the sentence but has a zero embedding.
        embedded = self.words(words.clamp_min(0)) * (words > 0).unsqueeze(-1)
        embedded = (embedded + _position_encoding(words.shape[1], embedded)) * valid.unsqueeze(-1)
        embedded = embedded + F.silu(self.beside(embedded.transpose(1, 2)).transpose(1, 2))
        mean = (embedded * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True).clamp_min(1)
        stems = cast("list[Stem]", list(self.stems))
        raw = [stem.cells(inputs[name]) for name, stem in zip(self.names, stems, strict=True)]
        places = torch.cat([stem.places for stem in stems])
        focus, detail, marks = self._attend_to_cells(embedded, valid, _concatenate(raw), places)
        added = self.mark(marks).split([x.shape[1] for x in raw], dim=1)
        cells = [x + m for x, m in zip(raw, added, strict=True)]
        tokens = [stem.tokens(x) for stem, x in zip(stems, cells, strict=True)]
        summary = self.sentence(mean) + focus + detail
        if self.state is not None:
            state = self.state(inputs[VECTOR])
            summary = summary + state
            tokens.append(state.unsqueeze(1))
        count = sum(x.shape[1] for x in tokens)
        padding = torch.cat((valid.new_zeros(len(valid), count), ~valid), dim=1)
        grounding = Grounding(focus, _concatenate(cells))
        return DecoderMemory(torch.cat([*tokens, embedded], dim=1), padding, summary, grounding)

    def _attend_to_cells(
        self, words: Tensor, valid: Tensor, cells: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from the words to image cells, one spatial softmax per head.

        Images are encoded without the words, and a head reads only the words that it selects.
        "Blue" therefore means the same next to any other word. The position of an object can only
        be computed through this attention (as spatial softmax, Finn et al. 2016). Contents, which
        are learned sooner, are kept in a separate output.

        Args:
            words: [B, L, D].
            valid: bool [B, L], words that are not padding.
            cells: [B, K, D/2].
            positions: [K, D], position embeddings of the cells.

        Returns:
            Mean position [B, D], mean content [B, D] and attention logits [B, K, heads].
        """
        logits = self.choose(words).masked_fill(~valid.unsqueeze(-1), MASKED_LOGIT)
        queries = self.ask(words).unflatten(-1, (HEADS, -1))  # [B, L, heads, d]
        query = torch.einsum("blh,blhd->bhd", logits.softmax(1), queries)
        # Keys and contents are linear in a cell, so the projections are moved behind the pooling
        # over cells: both products are over [heads, D/2] instead of [K, 2 D].
        size = query.shape[-1]
        # key and content are [heads, d, D/2].
        key, content = self.show.weight.unflatten(0, (2, HEADS, size)).unbind()
        key_bias, content_bias = self.show.bias.view(2, HEADS, size).unbind()
        marks = cells @ torch.einsum("bhd,hdc->bch", query, key)
        marks = (marks + (query * key_bias).sum(-1).unsqueeze(1)) * size**-0.5
        weight = marks.softmax(1)
        position = self.place(positions).unflatten(-1, (HEADS, -1))
        position = torch.einsum("bkh,khd->bhd", weight, position)
        pooled = torch.einsum("bhc,hdc->bhd", weight.transpose(1, 2) @ cells, content)
        return position.flatten(1), (pooled + content_bias).flatten(1), marks


def _concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate [B, n, D] along n; a single tensor keeps its strides, on which bits depend."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Block(nn.Module):
    """Pre-LN transformer block with self-attention and cross-attention to the memory.

    Its MLP is a gated linear unit (Shazeer 2020).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q, self.out2 = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [B, heads, L, d]

    def project_memory(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the memory, [B, heads, P, d]."""
        key, value = self.kv(tokens).chunk(2, dim=-1)
        return self._split(key), self._split(value)

    def forward(
        self,
        x: Tensor,
        memory: tuple[Tensor, Tensor],
        visible: Tensor,
        *,
        causal: bool = False,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: Tokens [B, Q, D].
            memory: Result of ``project_memory``.
            visible: bool [B, 1, 1, P], memory tokens that are not padding.
            causal: Restrict self-attention to earlier tokens.
            past: Keys and values of earlier tokens, updated in place; for decoding token by token.
        """
        q, k, v = map(self._split, self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        if past is not None:
            if past:
                k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            past[:] = [k, v]
        is_causal = causal and past is None
        x = x + self.out(_join(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)))
        q = self._split(self.q(self.norms[1](x)))
        x = x + self.out2(_join(F.scaled_dot_product_attention(q, *memory, attn_mask=visible)))
        gate, up = self.up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _join(x: Tensor) -> Tensor:
    """Concatenate heads: [B, heads, L, d] -> [B, L, D]."""
    return x.transpose(1, 2).flatten(2)


class ActionDecoder(nn.Module):
    """Stack of blocks whose tokens attend to a memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def project_memory(self, memory: DecoderMemory) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of the memory for each block, which replace it in decoding."""
        return [gathered(block, Block.project_memory, memory.tokens) for block in self._blocks()]

    def forward(
        self,
        x: Tensor,
        memory: DecoderMemory,
        memory_kv: list[tuple[Tensor, Tensor]] | None = None,
        *,
        causal: bool = False,
        past: list[list[Tensor]] | None = None,
    ) -> Tensor:
        """Run all blocks on tokens [B, Q, D].

        Args:
            x: Tokens.
            memory: What the tokens attend to.
            memory_kv: Result of ``project_memory``, None: computed here.
            causal: As in ``Block``.
            past: ``past`` of each block, for decoding token by token.
        """
        if memory_kv is None:
            memory_kv = self.project_memory(memory)
        visible = ~memory.padding[:, None, None, :]
        for i, block in enumerate(self._blocks()):
            block_past = None if past is None else past[i]
            x = block(x, memory_kv[i], visible, causal=causal, past=block_past)
        return self.norm(x)
