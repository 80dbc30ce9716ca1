"""Sampling of the next token from logits. Generation settings stored with a model are not read.

Order: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_ppo.core.types import ConfigError

EPSILON = 2.0**-52
"""x·(1 − EPSILON) < x for each positive float64 x that is not subnormal."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and stop conditions.

    Attributes:
        max_tokens: Maximum length of a response.
        temperature: Divisor of the logits; 0: greedy.
        top_k: Sample from the k most likely tokens; 0: all.
        top_p: Sample from the most likely tokens with total probability top_p; 1: all.
        min_p: Sample from tokens at least min_p times as likely as the most likely one; 0: all.
        repetition_penalty: Logits of tokens that occurred in prompt or response are divided by it
            if positive and multiplied if negative (Keskar et al. 2019, section 4.1); 1: no penalty.
        stop_ids: Tokens that end a response and belong to it.
        stop: Texts that end a response; the token that completes one is the last.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0: all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "> 0 and <= 1"),
            ("min_p", 0 <= self.min_p <= 1, ">= 0 and <= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0 (1: none)"),
            ("stop", all(self.stop), "texts that are not empty"),
        )
        for name, is_valid, limit in rules:
            if not is_valid:
                raise ConfigError(f"rollout.{name} = {getattr(self, name)}: must be {limit}")

    @property
    def plain(self) -> bool:
        """Whether tokens come from the temperature-scaled distribution without filters.

        PPO's ratio assumes that.
        """
        filtered = self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1
        return self.temperature > 0 and not filtered


def choose(
    logits: Tensor, sampling: Sampling, u: Tensor, occurred: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample the next token of each row.

    Args:
        logits: float32 [B, V].
        sampling: Sampling parameters.
        u: float64 [B], uniform in [0, 1); the token is the first whose cumulative probability
            exceeds it.
        occurred: bool [B, V], tokens that occurred, for the repetition penalty.

    Returns:
        Tokens int64 [B], and their log-probabilities float32 [B] at the temperature (1 for greedy),
        before penalty and filters, as the learner computes them.
    """
    scaled = _scaled(logits, sampling)
    log_p = scaled.log_softmax(-1)
    if sampling.repetition_penalty != 1.0:
        assert occurred is not None
        penalised = torch.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
        logits = torch.where(occurred, penalised, logits)
        scaled = _scaled(logits, sampling)
    if sampling.temperature == 0:
        token = scaled.argmax(-1)
    else:
        token = _draw(_filtered(scaled, sampling), u)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits divided by the temperature, as they are for greedy choice."""
    return logits if sampling.temperature in (0.0, 1.0) else logits / sampling.temperature


def _filtered(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Return unnormalised probabilities [B, V], 0 for tokens that a filter excludes."""
    p = scaled.softmax(-1)
    if sampling.top_k and sampling.top_k < p.shape[-1]:
        threshold = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        p = p.masked_fill(scaled < threshold, 0.0)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        # A token is excluded if the more likely tokens have probability top_p already. This keeps
        # the first token, unless top_p is below the rounding error (about 1e-7). The cumulative sum
        # is float64, because in float32 it would lose the last bits over a large vocabulary.
        share = ordered.double().cumsum(-1) / ordered.double().sum(-1, keepdim=True)
        before = share - ordered / ordered.sum(-1, keepdim=True)
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        p = torch.zeros_like(p).scatter(-1, order, ordered)
    if sampling.min_p:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


def _draw(p: Tensor, u: Tensor) -> Tensor:
    """Return int64 [B], the first index whose cumulative share of p [B, V] exceeds u.

    The cumulative sum over the vocabulary has two levels, blocks and the tokens of one block. Only
    the sums are float64, so that nothing of the size of the vocabulary is written.
    """
    vocabulary = p.shape[-1]
    width, u = _block_width(vocabulary), u.clamp(max=1 - EPSILON).unsqueeze(-1)
    # u < 1, so that the sum up to an index with positive probability exceeds the target.
    if width == vocabulary:
        total = p.cumsum(-1, dtype=torch.float64)
        return _first_above(total, u * total[:, -1:]).squeeze(-1)
    blocks = F.pad(p, (0, -vocabulary % width)) if vocabulary % width else p
    blocks = blocks.unflatten(-1, (-1, width))  # [B, blocks, width]
    sums = blocks.sum(-1, dtype=torch.float64)
    total = sums.cumsum(-1)
    target = u * total[:, -1:]
    block = _first_above(total, target)  # [B, 1]
    inner = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, width)).squeeze(1)
    inner = inner.cumsum(-1, dtype=torch.float64)
    before = (total - sums).gather(1, block)
    # The order of the sums differs, so that rounding may leave the block at either end.
    target = (target - before).clamp(min=0).minimum(inner[:, -1:] * (1 - EPSILON))
    token = torch.add(_first_above(inner, target), block, alpha=width).squeeze(-1)
    return token.clamp_(max=vocabulary - 1)  # NaN, with a padded block


def _first_above(total: Tensor, target: Tensor) -> Tensor:
    """Return the first index of total [B, K] above target [B, 1]; the last one for NaN."""
    return torch.searchsorted(total, target, right=True).clamp_(max=total.shape[-1] - 1)


def _block_width(vocabulary: int) -> int:
    """Return the number of tokens of a block.

    Divisors of the vocabulary are preferred, because others need a padded copy of the
    probabilities.
    """
    width = math.gcd(vocabulary, 1024)
    return width if width >= 64 else min(vocabulary, 256)
