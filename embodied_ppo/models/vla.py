"""A small vision-language-action model: pictures, a sentence and the robot's own state to chunks of action tokens.

B rows, C actions of a chunk, A dimensions of each, K bins of a dimension, D width, P tokens of what is seen.

The stem is modulated by the sentence (FiLM, Perez et al. 2018): at this size a plain transformer clones the motion and
ignores the words. What is seen becomes the decoder's memory once; action tokens attend to it and to each other.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo import distributions as dist
from embodied_ppo.config import ModelConfig
from embodied_ppo.models.backbone import VECTOR, Encoder
from embodied_ppo.types import ActionSpec, ArraySpec, Box, ConfigError, Decision, Evaluation, Obs, ObsSpec

INSTRUCTION = "instruction"
"""The observation that counts the simulator's sentences."""
WORDS = "/words"
"""Name of the input that holds a sentence's words. (The slash: no image is called so.)"""


def word_ids(sentence: str, buckets: int) -> list[int]:
    """Words as 1 .. buckets-1 by their hash: no vocabulary to keep, and words never seen have a place. 0 pads."""
    return [1 + zlib.crc32(word.encode()) % (buckets - 1) for word in re.findall(r"\w+", sentence.lower())]


def sentence_table(sentences: Sequence[str], buckets: int) -> Tensor:
    """int64 [S, L], a row for each sentence."""
    rows = [word_ids(sentence, buckets) for sentence in sentences]
    width = max(1, *(len(row) for row in rows)) if rows else 1
    return torch.tensor([row + [0] * (width - len(row)) for row in rows] or [[0]], dtype=torch.int64)


class Memory(NamedTuple):
    """What is seen, once for all action tokens.

    tokens   [B, P, D]  pictures, state, words        hidden  bool [B, P]  tokens that pad
    focus    [B, D]  what the sentence finds in the pictures
    context  [B, D]  focus, sentence and state
    """

    tokens: Tensor
    hidden: Tensor
    focus: Tensor
    context: Tensor


class Stem(nn.Module):
    """uint8 [B, 3, H, W] to tokens [B, HW/64, D]; every layer's channels are scaled and shifted by the sentence.

    Patches of 4 x 4 pixels, of 2 x 2 of those, and convolutions between neighbours: half the work of strided
    convolutions.
    """

    def __init__(self, name: str, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, height, w = shape
        if height % 8 or w % 8:
            raise ConfigError(
                f"env observation {name!r}: {height} x {w} pixels; a VLA cuts it into patches of 8 x 8: use "
                "env.image_size=64, or another multiple of 8"
            )
        half = width // 2
        self.patch, self.merge = nn.Linear(16 * channels, half), nn.Linear(4 * half, width)
        self.near = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.film = nn.ModuleList(nn.Linear(width, 2 * size) for size in (half, width, width, width))
        self.position = nn.Parameter(torch.randn(height * w // 64, width))

    def forward(self, image: Tensor, sentence: Tensor) -> Tensor:
        films = [film(sentence)[:, None, None].chunk(2, dim=-1) for film in self.film]  # [B, 1, 1, ..]

        def modulated(x: Tensor, i: int) -> Tensor:
            scale, shift = films[i]
            return F.silu(torch.addcmul(shift, x, 1 + scale))

        x = _merged(image.permute(0, 2, 3, 1).contiguous(), 4).float() * (1 / 127.5) - 1
        x = modulated(self.patch(x), 0)
        x = modulated(self.merge(_merged(x, 2)), 1)
        for i, near in enumerate(self.near):
            x = x + modulated(near(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), 2 + i)
        return x.flatten(1, 2) + self.position


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
        shapes = {name: tuple(self.encoder(_zeros(named))[name].shape[1:]) for name in self.encoder.images}
        self.names = list(shapes)
        self.stems = nn.ModuleList(Stem(name, shape, width) for name, shape in shapes.items())  # type: ignore[arg-type]
        self.state = nn.Linear(self.encoder.vector_size, width) if self.encoder.vector_size else None
        self.words = nn.Embedding(config.word_buckets, width)
        self.sentence = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.heads = config.heads
        self.look = nn.Linear(width, width)
        self.seen = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width))
        self.table: Tensor
        """int64 [S, L], words of the simulator's sentences; not part of a checkpoint."""
        self.register_buffer("table", sentence_table(sentences, config.word_buckets), persistent=False)

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
        used = words > 0  # [B, L]
        embedded = self.words(words)
        mean = (embedded * used.unsqueeze(-1)).sum(1) / used.sum(1, keepdim=True).clamp_min(1)
        context = self.sentence(mean)
        tokens = [stem(inputs[name], context) for name, stem in zip(self.names, self.stems, strict=True)]
        query, (key, value) = self.look(context).unsqueeze(1), self.seen(torch.cat(tokens, dim=1)).chunk(2, dim=-1)
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key, value))
        focus = F.scaled_dot_product_attention(query, key, value).flatten(1)
        context = context + focus
        if self.state is not None:
            state = self.state(inputs[VECTOR])
            context = context + state
            tokens.append(state.unsqueeze(1))
        seen = sum(x.shape[1] for x in tokens)
        hidden = torch.cat((used.new_zeros(len(used), seen), ~used), dim=1)
        return Memory(torch.cat([*tokens, embedded], dim=1), hidden, focus, context)


def _zeros(spec: dict[str, ArraySpec]) -> dict[str, Tensor]:
    return {name: torch.zeros(1, *s.shape, dtype=s.dtype) for name, s in spec.items()}


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

    def remember(self, memory: Memory) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each block: all that is needed of a memory."""
        return [block.remember(memory.tokens) for block in self._all()]

    def _all(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

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
    """V of a hidden state, float32 [B]; 0 everywhere at the start."""

    def __init__(self, width: int, detach: bool) -> None:
        super().__init__()
        self.detach = detach
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 1))
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden.detach() if self.detach else hidden).float().squeeze(-1)


def chunk_size(spec: ActionSpec, chunk: int, policy: str) -> tuple[int, int]:
    """(C, A) of an action space that holds whole chunks, C·A numbers."""
    if not isinstance(spec, Box):
        raise ConfigError(f"model.policy={policy}: the task's actions are discrete; use model.policy=actor_critic")
    return chunk, spec.size // chunk


class TokenVLA(nn.Module):
    """Every dimension of every action of a chunk is one of K bins (RT-2, OpenVLA; in parallel as OpenVLA-OFT).

    The value is read at the first action token. Log-probabilities are [B, C, A].
    """

    def __init__(
        self, obs_spec: ObsSpec, action_spec: ActionSpec, config: ModelConfig, *, chunk: int, sentences: Sequence[str]
    ) -> None:
        super().__init__()
        self.chunk, self.size = chunk_size(action_spec, chunk, config.policy)
        self.bins, self.temperature = config.bins, config.temperature
        self.autoregressive = config.decode == "autoregressive"
        self.trunk, self.decoder = Trunk(obs_spec, sentences, config), Decoder(config)
        self.query = nn.Parameter(torch.randn(self.chunk * self.size, config.width))
        self.before = nn.Embedding(config.bins + 1, config.width) if self.autoregressive else None
        """Of the token before: bin, or K at the beginning."""
        self.head = nn.Linear(config.width, config.bins)
        self.value_head = ValueHead(config.width, config.detach_value)

    # --------------------------------------------------------------------------------------------------------- tokens
    def _hidden(self, memory: Memory, bins: Tensor | None) -> Tensor:
        """[B, C·A, D] at the action tokens; ``bins`` int64 [B, C·A] is read where each depends on those before."""
        x = self.query + memory.context.unsqueeze(1)
        if self.before is None:
            return self.decoder(x, memory)
        assert bins is not None
        return self.decoder(x + self.before(F.pad(bins[:, :-1], (1, 0), value=self.bins)), memory, causal=True)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 [.., K] at the temperature."""
        return self.head(hidden).float() / self.temperature

    def centre(self, bins: Tensor) -> Tensor:
        """Actions in [-1, 1]: the middles of their bins."""
        return (2 * bins.float() + 1) / self.bins - 1

    def bin_of(self, action: Tensor) -> Tensor:
        """int64, the bin that holds each action."""
        return ((action + 1) * (0.5 * self.bins)).long().clamp(0, self.bins - 1)

    # ------------------------------------------------------------------------------------------------------- protocol
    def encode(self, obs: Obs) -> dict[str, Tensor]:
        return self.trunk.encode(obs)

    def tell(self, sentences: Sequence[str]) -> None:
        """The sentences that observations count, from now on."""
        self.trunk.table = sentence_table(sentences, self.trunk.words.num_embeddings).to(self.query.device)

    def observe(self, obs: Obs, mask: Tensor) -> None:
        named = obs if isinstance(obs, dict) else {"obs": obs}
        self.trunk.encoder.observe({name: x for name, x in named.items() if name != INSTRUCTION}, mask)

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        return dist.categorical_noise((rows, self.chunk * self.size, self.bins), generator, self.query.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        def choose(logits: Tensor, noise: Tensor | None) -> Tensor:
            return logits.argmax(-1) if noise is None else dist.categorical_sample(logits, noise)

        if self.before is None:
            hidden = self._hidden(self.trunk(inputs), None)
            logits = self._logits(hidden)
            bins, first = choose(logits, noise), hidden[:, 0]
        else:
            memory = self.trunk(inputs)
            kept, past = self.decoder.remember(memory), [[] for _ in self.decoder.blocks]
            token = torch.full((len(memory.context),), self.bins, device=self.query.device)
            hidden, rows = [], []
            chosen: list[Tensor] = []
            for i, query in enumerate(self.query):
                x = (query + memory.context + self.before(token)).unsqueeze(1)
                hidden.append(self.decoder(x, memory, kept, past=past)[:, 0])
                rows.append(self._logits(hidden[-1]))
                token = choose(rows[-1], None if noise is None else noise[:, i])
                chosen.append(token)
            bins, logits, first = torch.stack(chosen, 1), torch.stack(rows, 1), hidden[0]
        log_prob = dist.categorical_log_prob(bins, logits)
        shape = (len(bins), self.chunk, self.size)
        return Decision(
            self.centre(bins).flatten(1),
            log_prob.view(shape),
            self.value_head(first),
            {"bins": bins.view(shape).short()},
        )

    def evaluate(self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        bins = replay["bins"].flatten(1).long()
        hidden = self._hidden(self.trunk(inputs), bins)
        logits = self._logits(hidden)
        shape = (len(bins), self.chunk, self.size)
        return Evaluation(
            dist.categorical_log_prob(bins, logits).view(shape),
            dist.categorical_entropy(logits).view(shape),
            self.value_head(hidden[:, 0]),
        )

    @torch.no_grad()
    def value(self, inputs: dict[str, Tensor]) -> Tensor:
        memory = self.trunk(inputs)
        if self.before is None:
            return self.value_head(self.decoder(self.query + memory.context.unsqueeze(1), memory)[:, 0])
        first = self.query[:1] + self.before.weight[self.bins] + memory.context.unsqueeze(1)
        return self.value_head(self.decoder(first, memory)[:, 0])

    def bc_loss(self, inputs: dict[str, Tensor], action: Tensor, executed: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of demonstrated actions [B, C, A], the mean of those ``executed`` bool [B, C], and what the
        sentence finds in the pictures [B, D]."""
        bins = self.bin_of(action).flatten(1)
        memory = self.trunk(inputs)
        logits = self.head(self._hidden(memory, bins)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), bins.flatten(), reduction="none").view(action.shape)
        return (loss.mean(-1) * executed).sum() / executed.sum().clamp_min(1), memory.focus

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        critic = list(self.value_head.parameters())
        names = {id(p) for p in critic}
        return {"actor": [p for p in self.parameters() if id(p) not in names], "critic": critic}
