"""Differences of two nested states, such as the contents of checkpoints, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateDifference:
    """A leaf in which two states differ.

    Attributes:
        name: Path of the leaf, "learner.optimizer.state.0.exp_avg".
        index: Position of the first element that differs; None if the leaf is no tensor, or its
            shape or type differ.
        stored: Value of that element, or of the leaf.
        recomputed: The same in the other state.
        elements: Number of elements that differ.
        size: Number of elements of the leaf.
        largest: Largest difference relative to the larger of both values; infinity where there is
            no such number.
    """

    name: str
    index: tuple[int, ...] | None
    stored: Any
    recomputed: Any
    elements: int = 1
    size: int = 1
    largest: float = math.inf

    def __str__(self) -> str:
        place = "" if not self.index else f", index {list(self.index)}"
        text = f"{self.name}{place}: stored {self.stored!r}, recomputed {self.recomputed!r}"
        if self.elements > 1:
            text += f" ({self.elements} of {self.size} elements differ)"
        return text


ABSENT = "(absent)"
"""Value of a leaf that one of the states does not have."""


def state_differences(stored: Any, recomputed: Any, name: str = "") -> Iterator[StateDifference]:
    """Yield the leaves in which two states differ, in the order of ``stored``.

    Floating-point numbers are equal if their bits are, or if both are NaN. So 0.0 differs from
    -0.0.
    """
    if isinstance(stored, Tensor) and isinstance(recomputed, Tensor):
        yield from _tensor_difference(stored, recomputed, name)
    elif isinstance(stored, Mapping) and isinstance(recomputed, Mapping):
        for key in dict.fromkeys([*stored, *recomputed]):
            path = f"{name}.{key}" if name else str(key)
            if key in stored and key in recomputed:
                yield from state_differences(stored[key], recomputed[key], path)
            else:
                values = (_describe(side.get(key, ABSENT)) for side in (stored, recomputed))
                yield StateDifference(path, None, *values)
    elif _is_list(stored) and _is_list(recomputed) and len(stored) == len(recomputed):
        for i, pair in enumerate(zip(stored, recomputed, strict=True)):
            yield from state_differences(*pair, f"{name}[{i}]")
    elif not _equal(stored, recomputed):
        largest = relative_difference(stored, recomputed)
        yield StateDifference(name, None, _describe(stored), _describe(recomputed), largest=largest)


def count(state: Any) -> tuple[int, int]:
    """Return the numbers of tensors and of their elements in a state."""
    if isinstance(state, Tensor):
        return 1, state.numel()
    values = state.values() if isinstance(state, Mapping) else state if _is_list(state) else ()
    counts = [count(value) for value in values]
    return sum(n for n, _ in counts), sum(n for _, n in counts)


def relative_difference(a: Any, b: Any) -> float:
    """Return |a - b| / max(|a|, |b|) of two numbers; infinity where this is no number."""
    try:
        a, b = float(a), float(b)
    except (TypeError, ValueError, OverflowError):
        return math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _describe(value: Any) -> Any:
    """Return a plain value for messages and JSON."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _tensor_difference(a: Tensor, b: Tensor, name: str) -> Iterator[StateDifference]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield StateDifference(name, None, _describe(a), _describe(b))
        return
    if not a.numel():
        return
    x, y = (t.detach().cpu().contiguous().reshape(-1) for t in (a, b))
    bits = (t.view(torch.uint8).reshape(t.numel(), -1) for t in (x, y))
    differs = torch.ne(*bits).any(1)
    if x.is_floating_point() or x.is_complex():
        differs &= ~(x.isnan() & y.isnan())
    if not differs.any():
        return
    first = int(differs.nonzero()[0])
    index, position = [], first
    for length in reversed(a.shape):
        index.append(position % length)
        position //= length
    largest = math.inf
    if x.is_floating_point():
        u, v = x[differs].double(), y[differs].double()
        relative = (u - v).abs() / torch.maximum(u.abs(), v.abs())
        largest = float(torch.where(relative.isnan(), math.inf, relative).max())
        if largest != largest or bool((u == v).all()):  # zeros of both signs
            largest = 0.0
    yield StateDifference(
        name,
        tuple(reversed(index)),
        x[first].item(),
        y[first].item(),
        int(differs.sum()),
        a.numel(),
        largest,
    )
