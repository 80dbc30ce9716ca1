"""Counter-based random numbers: a pure function of (seed, stream, count).

The numbers are equal on every device and after a resumed run, because no generator has a state.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

SEED, STREAM, COUNT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
# Odd 64-bit factors of seed, stream, count and index, and those of the finaliser.
INDEX, MIX1, MIX2 = 0xAEF17502108EF2D9, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    """Return the int64 value that torch stores for a 64-bit pattern."""
    return x - (1 << 64) if x >= 1 << 63 else x


_SEED, _COUNT, _INDEX, _MIX1, _MIX2 = map(_signed, (SEED, COUNT, INDEX, MIX1, MIX2))


def _mix(z: Tensor) -> Tensor:
    """Mix 64 bits bijectively: each bit of the input changes half of the output bits on average.

    The finaliser of SplitMix64 (Steele et al. 2014). int64 multiplication is modulo 2^64; the right
    shift of int64 copies the sign bit, hence the masks.
    """
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def stream_key(stream: int) -> int:
    """Return the 64-bit key of a stream of random numbers."""
    return (stream + 1) * STREAM % 2**64


def uniform(
    seed: Tensor, stream: int, count: Tensor, size: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return uniform numbers in [0, 1), [N, size].

    Args:
        seed: int64 [N], row n depends on ``seed[n]`` and ``count[n]``.
        stream: Index of the purpose; different streams are independent.
        count: int64 [N].
        size: Numbers per row.
        dtype: float64 (53 random bits) or float32 (24).
    """
    key = _mix(seed * _SEED + _signed(stream_key(stream))) + count * _COUNT
    offset = torch.arange(size, device=seed.device) * _INDEX
    bits = _mix(_mix(key)[:, None] + offset)
    digits = 24 if dtype == torch.float32 else 53
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def normal(u: Tensor) -> Tensor:
    """Return standard normal numbers from uniform ones in [0, 1), element by element."""
    step = 2.0**-24 if u.dtype == torch.float32 else 2.0**-53
    return torch.special.ndtri(u.clamp(step / 2, 1 - step))  # ndtri(0) and ndtri(1) are infinite


def sampling_key(*parts: int | str) -> int:
    """Return a 63-bit seed from (seed, update, stage, t, ..); equal parts give equal seeds in any
    process.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# Training seeds are below this bound, evaluation seeds at or above it.
TRAINING_SEEDS = 1 << 30


def env_seeds(seed: int, round_: int, num_envs: int, group_size: int = 1) -> list[int]:
    """Return one simulator seed per environment; the members of a group share a seed."""
    return [
        sampling_key(seed, "env", round_, i // group_size) % TRAINING_SEEDS for i in range(num_envs)
    ]
