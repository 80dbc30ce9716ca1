"""Warp kernels of ``WarpPhysics``, besides those of mujoco_warp."""
# The body of a kernel is compiled by warp, whose type stubs describe Python's operators instead.
# pyright: reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

import warp as wp

from embodied_envs.base import random

_SEED, _COUNT, _INDEX, _MIX1, _MIX2 = (
    wp.constant(wp.uint64(x))
    for x in (random.SEED, random.COUNT, random.INDEX, random.MIX1, random.MIX2)
)
_RESOLUTION = wp.constant(2.0**-24)


@wp.kernel(enable_backward=False)
def clear(columns: wp.array[int], out: wp.array2d[float]):
    """Set out[:, columns] to 0."""
    world, i = wp.tid()
    out[world, columns[i]] = 0.0


@wp.kernel(enable_backward=False)
def update_peaks(
    contact_bits: int,
    row_bits: int,
    overflow: wp.array[int],
    candidates: wp.array[int],
    contacts: wp.array[int],
    rows: wp.array[int],
    peaks: wp.array[int],
):
    """Raise ``WarpPhysics._peak_counts`` to the current counts.

    Args:
        contact_bits: Bits of ``overflow`` that mean lost contacts.
        row_bits: Bits that mean lost rows of constraints.
        overflow: [N], flags of each world.
        candidates: [1], pairs of geoms that may touch, in all worlds.
        contacts: [1], contacts of all worlds.
        rows: [N], rows of constraints of each world.
        peaks: [5], whether contacts and rows were lost, and the largest other counts.
    """
    world = wp.tid()
    if overflow[world] & contact_bits != 0:
        wp.atomic_max(peaks, 0, 1)
    if overflow[world] & row_bits != 0:
        wp.atomic_max(peaks, 1, 1)
    if world == 0:
        wp.atomic_max(peaks, 2, candidates[0])
        wp.atomic_max(peaks, 3, contacts[0])
    wp.atomic_max(peaks, 4, rows[world])


@wp.func
def _mix(z: wp.uint64) -> wp.uint64:
    """See ``base.random``."""
    z = (z ^ (z >> wp.uint64(30))) * _MIX1
    z = (z ^ (z >> wp.uint64(27))) * _MIX2
    return z ^ (z >> wp.uint64(31))


@wp.kernel(enable_backward=False)
def uniform(
    stream: wp.uint64, seed: wp.array[wp.int64], count: wp.array[wp.int64], out: wp.array2d[float]
):
    """Set out[n, i] to number i of (seed[n], stream, count[n]) in [0, 1), of 24 random bits.

    The numbers are those of ``base.random.uniform`` in float32.
    """
    n, i = wp.tid()
    key = _mix(wp.uint64(seed[n]) * _SEED + stream) + wp.uint64(count[n]) * _COUNT
    bits = _mix(_mix(key) + wp.uint64(i) * _INDEX)
    out[n, i] = float(bits >> wp.uint64(40)) * _RESOLUTION
