"""Actions as tokens: every dimension of every action of a chunk is one of K bins (RT-2; OpenVLA; OpenVLA-OFT).

B rows, C actions of a chunk, A dimensions of each, K bins of a dimension, D width.

``Tokens`` is the family's mathematics, in terms of a body: the small one is ``TokenVLA``, those of published models
are in ``vla_checkpoint``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ActionSpec, Decision, Evaluation, ObsSpec
from embodied_ppo.models import distributions as dist
from embodied_ppo.models.vla.trunk import VLA, Found, Memory, ValueHead, mean_executed

Seen = TypeVar("Seen")


class Tokens(nn.Module, Generic[Seen]):
    """All tokens at once, or each after those before it. The value is read where the first is predicted.

    Log-probabilities are float32 [B, C, A]. What a body says: the methods under "body"; ``Seen`` is what it makes of
    its inputs once, whatever that is.
    """

    chunk: int
    """C"""
    size: int
    """A"""
    bins: int
    """K"""
    autoregressive: bool
    temperature: float
    value_head: ValueHead

    # ---------------------------------------------------------------------------------------------------------- body
    @abstractmethod
    def see(self, inputs: dict[str, Tensor]) -> Seen:
        """Of what ``encode`` gave."""

    @abstractmethod
    def hidden(self, seen: Seen, bins: Tensor | None) -> Tensor:
        """[B, C·A, D] that predict the action tokens; ``bins`` int64 [B, C·A]: each depends on those before it."""

    @abstractmethod
    def start(self, seen: Seen) -> tuple[Tensor, Any]:
        """[B, D] that predict the first of tokens one by one, and what ``next`` wants. Without gradient."""

    @abstractmethod
    def next(self, bins: Tensor, state: Any) -> Tensor:
        """[B, D] that predict the next token after int64 [B]; ``state`` changes in place. Without gradient."""

    @abstractmethod
    def first(self, seen: Seen) -> Tensor:
        """[B, D] that predict the first token, of all at once or one by one. Without gradient."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [.., K] at temperature 1."""

    @abstractmethod
    def found(self, seen: Seen, first: Tensor) -> Found | None:
        """What cloning's foresight is read from; ``first`` [B, D] predicts the first token, with gradient."""

    @property
    def device(self) -> torch.device:
        return next(self.value_head.parameters()).device

    @property
    def parts(self) -> int:
        """An odd number of bins that are used, so that the middle of one is 0: who means to stand still would drift."""
        return self.bins - (self.bins + 1) % 2

    def centre(self, bins: Tensor) -> Tensor:
        """Actions [B, C, A] in [-1, 1], the middles of their bins, of int64 [B, C, A]; the last of an even number of
        bins is the one before it (OpenVLA's 256 words are 255 parts)."""
        return (2 * bins.float().clamp_max(self.parts - 1) + 1) / self.parts - 1

    def bin_of(self, action: Tensor) -> Tensor:
        """int64, the bin that holds each action."""
        return ((action + 1) * (0.5 * self.parts)).long().clamp(0, self.parts - 1)

    # ------------------------------------------------------------------------------------------------------- protocol
    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        return dist.categorical_noise((rows, self.chunk * self.size, self.bins), generator, self.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        def choose(logits: Tensor, noise: Tensor | None) -> Tensor:
            return logits.argmax(-1) if noise is None else dist.categorical_sample(logits, noise)

        seen = self.see(inputs)
        if not self.autoregressive:
            hidden = self.hidden(seen, None)
            logits = self._tempered(hidden)
            bins, first = choose(logits, noise), hidden[:, 0]
        else:
            first, state = self.start(seen)
            rows, chosen = [self._tempered(first)], []
            for i in range(self.chunk * self.size):
                if i:
                    rows.append(self._tempered(self.next(chosen[-1], state)))
                chosen.append(choose(rows[-1], None if noise is None else noise[:, i]))
            bins, logits = torch.stack(chosen, 1), torch.stack(rows, 1)
        shape = (len(bins), self.chunk, self.size)
        return Decision(
            self.centre(bins.view(shape)).flatten(1),
            dist.categorical_log_prob(bins, logits).view(shape),
            self.value_head(first),
            {"bins": bins.view(shape).short()},
        )

    def evaluate(self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        bins = replay["bins"].flatten(1).long()
        hidden = self.hidden(self.see(inputs), bins if self.autoregressive else None)
        logits = self._tempered(hidden)
        shape = (len(bins), self.chunk, self.size)
        return Evaluation(
            dist.categorical_log_prob(bins, logits).view(shape),
            dist.categorical_entropy(logits).view(shape),
            self.value_head(hidden[:, 0]),
        )

    @torch.no_grad()
    def value(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.value_head(self.first(self.see(inputs)))

    def bc_loss(
        self, inputs: dict[str, Tensor], action: Tensor, executed: Tensor, generator: Generator | None = None
    ) -> tuple[Tensor, Found | None]:
        """Cross-entropy of demonstrated actions [B, C, A], the mean of those ``executed`` bool [B, C], and what was
        found."""
        bins, seen = self.bin_of(action).flatten(1), self.see(inputs)
        hidden = self.hidden(seen, bins if self.autoregressive else None)
        loss = F.cross_entropy(self.logits(hidden).flatten(0, 1), bins.flatten(), reduction="none")
        return mean_executed(loss.view(action.shape), executed), self.found(seen, hidden[:, 0])

    def _tempered(self, hidden: Tensor) -> Tensor:
        """What is sampled from: float32 [.., K]."""
        return self.logits(hidden) / self.temperature


@dataclass
class _Streamed:
    """Tokens that come one by one.

    memory      what they attend to
    kept, past  its keys and values, and those of earlier tokens, by block
    count       tokens so far
    """

    memory: Memory
    kept: list[tuple[Tensor, Tensor]]
    past: list[list[Tensor]]
    count: int = 0


class TokenVLA(Tokens[Memory], VLA):
    """A small body: a query for each token, a decoder that attends to what is seen."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        values: int = 1,
    ) -> None:
        """As ``VLA``."""
        super().__init__(
            obs_spec,
            action_spec,
            config,
            chunk=chunk,
            sentences=sentences,
            queries=lambda C, A: C * A,
            values=values,
        )
        self.bins = config.bins
        self.autoregressive = config.decode == "autoregressive"
        self.before = nn.Embedding(config.bins + 1, config.width) if self.autoregressive else None
        """Of the token before: bin, or K at the beginning."""
        self.head = nn.Linear(config.width, config.bins)

    def see(self, inputs: dict[str, Tensor]) -> Memory:
        return VLA.see(self, inputs)

    def hidden(self, seen: Memory, bins: Tensor | None) -> Tensor:
        x = self.query + seen.context.unsqueeze(1)
        if bins is None:
            return self.decoder(x, seen)
        assert self.before is not None
        return self.decoder(x + self.before(F.pad(bins[:, :-1], (1, 0), value=self.bins)), seen, causal=True)

    def start(self, seen: Memory) -> tuple[Tensor, _Streamed]:
        state = _Streamed(seen, self.decoder.remember(seen), [[] for _ in self.decoder.blocks])
        return self.next(torch.full((len(seen.context),), self.bins, device=self.device), state), state

    def next(self, bins: Tensor, state: _Streamed) -> Tensor:
        assert self.before is not None
        x = (self.query[state.count] + state.memory.context + self.before(bins)).unsqueeze(1)
        state.count += 1
        return self.decoder(x, state.memory, state.kept, past=state.past)[:, 0]

    def first(self, seen: Memory) -> Tensor:
        return self.start(seen)[0] if self.autoregressive else self.hidden(seen, None)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()

    def found(self, seen: Memory, first: Tensor) -> Found | None:
        return seen.found
