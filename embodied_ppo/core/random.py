"""Random numbers by counting: a pure function of (seed, stream, count), the same on every device and after a resume."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _signed(x: int) -> int:
    """A 64-bit pattern as torch's int64."""
    return x - (1 << 64) if x >= 1 << 63 else x


_STREAM = 0xD1B54A32D192ED03
_SEED, _COUNT = (_signed(x) for x in (0x9E3779B97F4A7C15, 0x8CB92BA72F3D8DD7))
_PLACE, _MIX1, _MIX2 = (_signed(x) for x in (0xAEF17502108EF2D9, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: Tensor) -> Tensor:
    """A bijection of 64 bits in which every bit of the input changes half of the output (Steele et al. 2014, the
    finaliser of SplitMix64). int64 multiplies modulo 2^64; its right shift copies the sign, hence the masks."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def uniform(seed: Tensor, stream: int, count: Tensor, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[N, size] in [0, 1): row n from ``seed`` [N] and ``count`` [N] (int64); streams are independent."""
    key = _mix(seed * _SEED + _signed((stream + 1) * _STREAM % 2**64)) + count * _COUNT
    place = torch.arange(size, device=seed.device) * _PLACE
    bits = _mix(_mix(key)[:, None] + place)
    digits = 24 if dtype == torch.float32 else 53
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def normal(u: Tensor) -> Tensor:
    """Uniform [0, 1) -> standard normal, element by element."""
    step = 2.0**-24 if u.dtype == torch.float32 else 2.0**-53
    return torch.special.ndtri(u.clamp(step / 2, 1 - step))  # neither end of (0, 1) is met


def sampling_key(*parts: int | str) -> int:
    """A 63-bit seed from (seed, update, stage, t, ..): equal parts give equal randomness in any process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


TRAINING_SEEDS = 1 << 30
"""Training seeds lie below this, evaluation seeds at or above it."""


def env_seeds(seed: int, round_: int, num_envs: int, group_size: int = 1) -> list[int]:
    """One simulator seed per environment; the members of a group share one."""
    return [sampling_key(seed, "env", round_, i // group_size) % TRAINING_SEEDS for i in range(num_envs)]
