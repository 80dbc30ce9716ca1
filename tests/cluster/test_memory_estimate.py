"""Allocated bytes are counted exactly, with real tensors and with tensors without contents."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from embodied_ppo.cluster.memory_estimate import AllocationCounter, fake_tensors


@pytest.mark.parametrize("fake", [False, True])
def test_allocation_counter_by_hand(fake: bool) -> None:
    """Count the bytes of x [4, 8] @ W [8, 16], relu, @ V [16, 2], sum in float32.

    Allocated are 4·16·4 = 256 B and relu's 256 B, of which the first is released after relu; then
    4·2·4 = 32 B and a sum of 4 B.
    """
    layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 2, bias=False))
    with fake_tensors(layers) if fake else nullcontext(list(layers.parameters())) as known:
        x = torch.zeros(4, 8)
        with AllocationCounter([*known, x]) as living:
            h = layers[0](x)
            assert (living.now, living.peak) == (256, 256)
            h = layers[1](h)
            assert (living.now, living.peak) == (256, 512)
            y = layers[2](h)
            total = y.sum()
            assert (living.now, living.peak) == (256 + 32 + 4, 512)
            del y
            assert living.now == 256 + 4
            total.backward()
            del h, total
    assert living.now == 8 * 16 * 4 + 16 * 2 * 4  # gradients
