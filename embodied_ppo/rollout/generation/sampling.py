"""Sampling of the next token from logits. Generation settings stored with a model are not read.

Order: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_ppo.core.types import ConfigError


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
    scaled = logits / (sampling.temperature or 1.0)
    log_p = scaled.log_softmax(-1)
    if sampling.repetition_penalty != 1.0:
        assert occurred is not None
        penalised = torch.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
        logits = torch.where(occurred, penalised, logits)
        scaled = logits / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        token = scaled.argmax(-1)
    else:
        token = _draw(_filtered(scaled, sampling), u)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


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
    """Return int64 [B], the first index whose cumulative share of p [B, V] exceeds u."""
    total = p.double().cumsum(-1)
    token = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    # Rounding may select the index after the last token with positive probability.
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
    return token.minimum(last)
