"""Sampling of the next token from logits. Generation settings stored with a model are not read.

Order: temperature, top-k, top-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_ppo.policies.fusion import fused

EPSILON = 2.0**-52  # x·(1 − EPSILON) < x for each positive float64 x that is not subnormal


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and stop conditions.

    Attributes:
        max_tokens: Maximum length of a response.
        temperature: Divisor of the logits; 0: greedy.
        top_k: Sample from the k most likely tokens; 0: all.
        top_p: Sample from the most likely tokens with total probability top_p; 1: all.
        stop_ids: Tokens that end a response and belong to it.
        stop: Texts that end a response; the token that completes one is the last.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether tokens come from the temperature-scaled distribution without filters.

        PPO's ratio assumes that.
        """
        return self.temperature > 0 and not self.top_k and self.top_p == 1


def choose(logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample the next token of each row.

    Args:
        logits: [B, V], float32, bfloat16 or float16.
        sampling: Sampling parameters.
        u: float64 [B], uniform in [0, 1); the token is the first whose cumulative probability
            exceeds it.

    Returns:
        Tokens int64 [B], and their log-probabilities float32 [B] at the temperature (1 for greedy),
        before filters, as the learner computes them.
    """
    # The usual case of training: no filters, nothing of the size of the logits is kept.
    if sampling.plain and _block_width(logits.shape[-1]) < logits.shape[-1]:
        return _choose_plain(logits, sampling.temperature, u)
    scaled = _scale(logits.float(), sampling.temperature or 1.0)
    # The log-probability is that of the learner, before filters.
    log_p = scaled.log_softmax(-1)
    if sampling.temperature == 0:
        token = scaled.argmax(-1)
    else:
        total = _sums_up_to(_filtered(scaled, sampling))
        target = u.clamp(max=1 - EPSILON).unsqueeze(-1) * total[:, -1:]
        token = _first_above(total, target).squeeze(-1)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _choose_plain(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample without filters; see ``choose``. Nothing of the size of the logits is kept."""
    vocabulary = logits.shape[-1]
    width = _block_width(vocabulary)
    # Two levels: choose a block by its total weight, then a token of the block.
    largest, sums = _block_sums(logits, temperature, width)
    sum_up_to = _sums_up_to(sums)
    total = sum_up_to[:, -1:]
    # u < 1, so that the sum up to a block with positive weight exceeds the target.
    target = u.clamp(max=1 - EPSILON).unsqueeze(-1) * total
    block = _first_above(sum_up_to, target)
    target = target - (sum_up_to - sums).gather(1, block)
    index = torch.arange(width, device=logits.device) + block * width  # [B, width]
    weights = _weights(logits.gather(1, index.clamp(max=vocabulary - 1)), temperature, largest)
    inner = _sums_up_to(weights * (index < vocabulary))
    # The order of the sums differs, so that rounding may leave the block at either end.
    target = target.clamp(min=0).minimum(inner[:, -1:] * (1 - EPSILON))
    token = torch.add(_first_above(inner, target), block, alpha=width)
    token = token.clamp_(max=vocabulary - 1)  # NaN, with a padded block
    # log p = scaled logit - log(sum of exp), both relative to the largest logit.
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
        # top-k: drop what is below the k-th largest logit.
        threshold = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        p = p.masked_fill(scaled < threshold, 0.0)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        # A token is excluded if the more likely tokens have probability top_p already. The sum is
        # float64, because in float32 it would lose the last bits over a large vocabulary.
        share = _sums_up_to(ordered) / ordered.double().sum(-1, keepdim=True)
        before = F.pad(share[:, :-1], (1, 0))  # 0 for the first token, which is always kept
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        p = torch.zeros_like(p).scatter(-1, order, ordered)
    return p


def _sums_up_to(x: Tensor) -> Tensor:
    """Return the sums of x [B, K] up to each column, float64, with additions in a fixed order."""
    # CUDA adds a single row in blocks of any order (torch issue 75240), but each of several in one.
    rows = x if len(x) > 1 else x.repeat(2, 1)
    # torch's deterministic mode refuses both, although the second gives equal bits in each run.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        return rows.cumsum(-1, dtype=torch.float64)[: len(x)]
    finally:
        torch.set_deterministic_debug_mode(mode)


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
