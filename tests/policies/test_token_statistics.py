"""Chunked log-probabilities: casts, bytes and memory. test_causal_lm.py checks the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_ppo.policies.token_statistics import Head, TokenStatistics

TOKENS, SIZE, VOCABULARY, ROWS = 512, 32, 2048, 128


def test_gradients_of_one_argument() -> None:
    """Frozen heads and frozen hidden states get no gradient; the other one is the same."""
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    head = Head(rows=4, dtype=torch.float32, temperature=0.5, softcap=None, entropy=True)

    def gradients(**needed: bool) -> list[Tensor | None]:
        x, w = hidden.clone(), weight.clone()
        x.requires_grad_(needed["hidden"])
        w.requires_grad_(needed["weight"])
        statistics: Any = TokenStatistics.apply(x, w, torch.arange(6), None, None, head)
        (statistics[0].sum() + statistics[1].square().sum()).backward()
        return [x.grad, w.grad]

    both = gradients(hidden=True, weight=True)
    for i, names in enumerate(
        ({"hidden": True, "weight": False}, {"hidden": False, "weight": True})
    ):
        one = gradients(**names)
        assert one[1 - i] is None
        torch.testing.assert_close(one[i], both[i])
