"""From logits to the next token: every rule is written here, none comes from a model's own settings.

The order is that of the literature's tools: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_ppo.core.types import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when a response is over.

    temperature         logits are divided by it; 0: the likeliest token
    top_k, top_p, min_p only the k likeliest tokens (0: all); the likeliest that together hold probability p, at least
                        one (1: all); those at least min_p times as likely as the likeliest (0: all)
    repetition_penalty  logits of tokens that occurred, in prompt or response, are divided by it where positive and
                        multiplied where negative (Keskar et al. 2019, section 4.1); 1: nothing
    max_tokens          longest response
    stop_ids            tokens that end a response; they belong to it
    stop                texts that end it; the token that completes one is its last
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
        for name, fine, limit in rules:
            if not fine:
                raise ConfigError(f"rollout.{name} = {getattr(self, name)}: must be {limit}")

    @property
    def plain(self) -> bool:
        """Whether tokens come from the temperature-scaled distribution itself, as PPO's ratio takes for granted."""
        filtered = self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1
        return self.temperature > 0 and not filtered


def choose(logits: Tensor, sampling: Sampling, u: Tensor, occurred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-probability, int64 and float32 [B].

    logits float32 [B, V]; u float64 [B] uniform in [0, 1): the token is the first whose cumulative probability exceeds
    u; ``occurred`` bool [B, V], for the repetition penalty. The log-probability is that of the distribution at this
    temperature (1 where it is 0), before penalty and filters: what the learner computes.
    """
    scaled = logits / (sampling.temperature or 1.0)
    log_p = scaled.log_softmax(-1)
    if sampling.repetition_penalty != 1.0:
        assert occurred is not None
        penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(occurred, penalised, logits)
        scaled = logits / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        token = scaled.argmax(-1)
    else:
        token = _draw(_filtered(scaled, sampling), u)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _filtered(scaled: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V], not normalised, 0 where a filter leaves a token out."""
    p = scaled.softmax(-1)
    if sampling.top_k and sampling.top_k < p.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        p = p.masked_fill(scaled < least, 0.0)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        share = ordered.double().cumsum(-1) / ordered.double().sum(-1, keepdim=True)
        ordered = ordered.masked_fill(share - ordered / ordered.sum(-1, keepdim=True) >= sampling.top_p, 0.0)
        p = torch.zeros_like(p).scatter(-1, order, ordered)
    if sampling.min_p:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


def _draw(p: Tensor, u: Tensor) -> Tensor:
    """int64 [B]: the first index whose cumulative share exceeds u. p [B, V] need not add up to 1."""
    total = p.double().cumsum(-1)
    token = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    # rounding may lead one past the last token that is possible
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
    return token.minimum(last)
