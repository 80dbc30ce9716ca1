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
from embodied_ppo.models.fusion import fused

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
        logits: [B, V], float32, bfloat16 or float16.
        sampling: Sampling parameters.
        u: float64 [B], uniform in [0, 1); the token is the first whose cumulative probability
            exceeds it.
        occurred: bool [B, V], tokens that occurred, for the repetition penalty.

    Returns:
        Tokens int64 [B], and their log-probabilities float32 [B] at the temperature (1 for greedy),
        before penalty and filters, as the learner computes them.
    """
    if sampling.plain and _block_width(logits.shape[-1]) < logits.shape[-1]:
        return _choose_plain(logits, sampling.temperature, u)
    logits, temperature = logits.float(), sampling.temperature or 1.0
    scaled = _scale(logits, temperature)
    log_p = scaled.log_softmax(-1)
    if sampling.repetition_penalty != 1.0:
        assert occurred is not None
        penalised = torch.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
        logits = torch.where(occurred, penalised, logits)
        scaled = _scale(logits, temperature)
    if sampling.temperature == 0:
        token = scaled.argmax(-1)
    else:
        token = _draw(_filtered(scaled, sampling), u)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _choose_plain(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample without filters; see ``choose``. Nothing of the size of the logits is kept."""
    vocabulary = logits.shape[-1]
    width = _block_width(vocabulary)
    largest, sums = _block_sums(logits, temperature, width)
    block, target, total = _choose_block(sums, u)
    index = torch.arange(width, device=logits.device) + block * width  # [B, width]
    weights = _weights(logits.gather(1, index.clamp(max=vocabulary - 1)), temperature, largest)
    token = _choose_in_block(weights * (index < vocabulary), block, target, vocabulary)
    chosen = _scale(logits.gather(1, token), temperature) - largest
    return token.squeeze(1), (chosen - total.log().float()).squeeze(1)


@fused
def _block_sums(logits: Tensor, temperature: float, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest scaled logit, float32 [B, 1], and sums of weights, float64 [B, blocks]."""
    largest = _scale(logits.amax(-1, keepdim=True), temperature)
    weights = F.pad(_weights(logits, temperature, largest), (0, -logits.shape[-1] % width))
    return largest, weights.unflatten(-1, (-1, width)).sum(-1, dtype=torch.float64)


def _weights(logits: Tensor, temperature: float, largest: Tensor) -> Tensor:
    """Return probabilities relative to that of the largest scaled logit, float32."""
    return (_scale(logits, temperature) - largest).exp()


def _scale(logits: Tensor, temperature: float) -> Tensor:
    """Return float32 logits divided by the temperature."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


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
    width = _block_width(vocabulary)
    if width == vocabulary:
        total = p.cumsum(-1, dtype=torch.float64)
        # u < 1, so that the sum up to an index with positive probability exceeds the target.
        target = u.clamp(max=1 - EPSILON).unsqueeze(-1) * total[:, -1:]
        return _first_above(total, target).squeeze(-1)
    blocks = F.pad(p, (0, -vocabulary % width)) if vocabulary % width else p
    blocks = blocks.unflatten(-1, (-1, width))  # [B, blocks, width]
    block, target, _ = _choose_block(blocks.sum(-1, dtype=torch.float64), u)
    weights = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, width)).squeeze(1)
    return _choose_in_block(weights, block, target, vocabulary).squeeze(-1)


def _choose_block(sums: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block of the token, the target within it and the total, each [B, 1].

    Args:
        sums: float64 [B, blocks], of the weights of each block.
        u: float64 [B].
    """
    sum_up_to = sums.cumsum(-1)
    total = sum_up_to[:, -1:]
    target = u.clamp(max=1 - EPSILON).unsqueeze(-1) * total
    block = _first_above(sum_up_to, target)
    return block, target - (sum_up_to - sums).gather(1, block), total


def _choose_in_block(weights: Tensor, block: Tensor, target: Tensor, vocabulary: int) -> Tensor:
    """Return int64 [B, 1], the first token of a block whose cumulative weight exceeds the target.

    Args:
        weights: [B, width], of the block's tokens.
        block: int64 [B, 1].
        target: float64 [B, 1].
        vocabulary: V.
    """
    inner = weights.cumsum(-1, dtype=torch.float64)
    # The order of the sums differs, so that rounding may leave the block at either end.
    target = target.clamp(min=0).minimum(inner[:, -1:] * (1 - EPSILON))
    token = torch.add(_first_above(inner, target), block, alpha=weights.shape[-1])
    return token.clamp_(max=vocabulary - 1)  # NaN, with a padded block


def _first_above(total: Tensor, target: Tensor) -> Tensor:
    """Return the first index of total [B, K] above target [B, 1]; the last one for NaN."""
    return torch.searchsorted(total, target, right=True).clamp_(max=total.shape[-1] - 1)


def _block_width(vocabulary: int) -> int:
    """Return the number of tokens of a block.

    Divisors of the vocabulary are preferred, because for others eager code pads a copy of the
    probabilities.
    """
    width = math.gcd(vocabulary, 1024)
    return width if width >= 64 else min(vocabulary, 256)
