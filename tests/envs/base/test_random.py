"""Counter-based random numbers."""

from __future__ import annotations

import pytest
import torch

from embodied_envs.base.random import normal, uniform

SEEDS = torch.arange(256) + 1_000_000


def reference(seed: int, stream: int, count: int, place: int) -> float:
    """Compute a number with Python's integers, modulo 2^64."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    key = mix((seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xD1B54A32D192ED03) % 2**64)
    key = mix((key + count * 0x8CB92BA72F3D8DD7) % 2**64)
    return (mix((key + place * 0xAEF17502108EF2D9) % 2**64) >> 11) * 2.0**-53


def test_uniform_equals_integer_reference() -> None:
    numbers = uniform(torch.tensor([0, 5, 2**31 - 1]), 3, torch.tensor([0, -1, 9]), 4)
    for row, (seed, count) in zip(numbers.tolist(), [(0, 0), (5, -1), (2**31 - 1, 9)], strict=True):
        assert row == [reference(seed, 3, count, k) for k in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_distribution(dtype: torch.dtype) -> None:
    u = uniform(SEEDS, 0, torch.zeros_like(SEEDS), 1000, dtype)
    assert u.dtype == dtype and float(u.min()) >= 0 and float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=0.002) and float(u.var()) == pytest.approx(
        1 / 12, abs=0.001
    )
    assert u.flatten().histc(20, 0, 1).sub(12800).abs().max() < 600
    # rows and columns are independent: correlations as small as 256 x 1000 numbers allow
    for x in (u, u.T[:200]):
        c = torch.corrcoef(x).fill_diagonal_(0)
        assert float(c.abs().max()) < 6 / x.shape[1] ** 0.5


def test_streams_and_counts_are_independent() -> None:
    zeros = torch.zeros_like(SEEDS)
    parts = [
        uniform(SEEDS, 0, zeros, 400),
        uniform(SEEDS, 1, zeros, 400),
        uniform(SEEDS, 0, zeros + 1, 400),
    ]
    parts.append(uniform(SEEDS + 1, 0, zeros, 400))
    c = torch.corrcoef(torch.stack([x.flatten() for x in parts])).fill_diagonal_(0)
    assert float(c.abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_distribution(dtype: torch.dtype) -> None:
    n = normal(uniform(SEEDS, 0, torch.zeros_like(SEEDS), 1000, dtype))
    assert float(n.mean()) == pytest.approx(0, abs=0.01) and float(n.std()) == pytest.approx(
        1, abs=0.01
    )
    assert bool(normal(torch.tensor([0.0, 1 - 2.0**-24], dtype=dtype)).isfinite().all())
