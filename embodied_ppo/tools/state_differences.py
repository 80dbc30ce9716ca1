"""Differences of two nested states, such as the contents of checkpoints, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StateDifference(NamedTuple):
    """A leaf in which two states differ.

    Attributes:
        place: Path of the leaf, "learner.optimizer.state.0.exp_avg"; for a tensor also the index of
            the first element that differs, and the number of such elements.
        stored: Value of the leaf, or of that element.
        recomputed: The same in the other state.
    """

    place: str
    stored: Any
    recomputed: Any


def state_differences(stored: Any, recomputed: Any, name: str = "") -> Iterator[StateDifference]:
    """Yield the leaves in which two states differ, in the order of ``stored``.

    Floating-point numbers are equal if their bits are, or if both are NaN. So 0.0 differs from
    -0.0. Entries that only ``recomputed`` has, and its further elements of a tuple, are not
    compared: a later version added them.
    """
    if isinstance(stored, Tensor) and isinstance(recomputed, Tensor):
        yield from _tensor_difference(stored, recomputed, name)
    elif isinstance(stored, Mapping) and isinstance(recomputed, Mapping):
        for key, value in stored.items():
            path = f"{name}.{key}" if name else str(key)
            yield from state_differences(value, recomputed.get(key, "(absent)"), path)
    elif _is_list(stored) and _is_list(recomputed) and _have_equal_fields(stored, recomputed):
        for i, pair in enumerate(zip(stored, recomputed, strict=False)):
            yield from state_differences(*pair, f"{name}[{i}]")
    elif not _equal(stored, recomputed):
        yield StateDifference(name, _describe(stored), _describe(recomputed))


def count_tensors(state: Any) -> int:
    """Return the number of tensors in a state."""
    if isinstance(state, Tensor):
        return 1
    values = state.values() if isinstance(state, Mapping) else state if _is_list(state) else ()
    return sum(map(count_tensors, values))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _have_equal_fields(stored: Any, recomputed: Any) -> bool:
    """Return whether two lists are equally long, or a record has got further fields."""
    are_tuples = isinstance(stored, tuple) and isinstance(recomputed, tuple)
    grew = are_tuples and 0 < len(stored) < len(recomputed)
    return grew or len(stored) == len(recomputed)


def _describe(value: Any) -> Any:
    """Return a plain value for messages and JSON."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        same_bits = a == b and math.copysign(1, a) == math.copysign(1, b)
        return same_bits or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _tensor_difference(a: Tensor, b: Tensor, name: str) -> Iterator[StateDifference]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield StateDifference(name, _describe(a), _describe(b))
        return
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    bits = (x.reshape(-1, 1).view(torch.uint8) for x in (a, b))
    differs = torch.ne(*bits).any(1).reshape(a.shape) & ~(a.isnan() & b.isnan())
    if differs.any():
        first = differs.nonzero()[0].tolist()
        index, count = f", index {first}" if first else "", int(differs.sum())
        elements = f" ({count} of {a.numel()} elements)" if count > 1 else ""
        values = a[tuple(first)].item(), b[tuple(first)].item()
        yield StateDifference(f"{name}{index}{elements}", *values)
