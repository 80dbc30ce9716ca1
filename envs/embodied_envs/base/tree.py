"""Map, stack and index nested dataclasses, dictionaries and lists of tensors as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def map(fn: Callable[..., Any], tree: T, *others: Any) -> T:
    """Apply ``fn`` to every tensor of ``tree`` and return a tree of the results.

    Dataclasses, dictionaries, lists and tuples keep their type; None stays None.

    Args:
        fn: Called with one leaf of ``tree`` and the corresponding leaf of each of ``others``.
        tree: Nested tensors.
        others: Trees with the structure of ``tree``.
    """
    if tree is None:
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {
            f.name: map(fn, getattr(tree, f.name), *(getattr(o, f.name) for o in others))
            for f in dataclasses.fields(tree)
        }
        return type(tree)(**values)
    if isinstance(tree, Mapping):
        mapped: Any = {k: map(fn, v, *(o[k] for o in others)) for k, v in tree.items()}
        return mapped
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(fn, v, *(o[i] for o in others)) for i, v in enumerate(tree))
    return fn(tree, *others)


def where(mask: torch.Tensor, yes: T, no: T) -> T:
    """Return the rows [N, ..] of ``yes`` where bool [N] is True, else those of ``no``.

    Tensors of ``no`` may have more leading dimensions, [T, N, ..].
    """
    return map(lambda a, b: torch.where(mask.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def named(value: Any, single: str = "") -> dict[str, Any]:
    """Return a dictionary as it is, and any other value by the name ``single``."""
    return value if isinstance(value, dict) else {single: value}


def leaves(tree: Any) -> Iterator[Any]:
    """Yield every tensor of ``tree`` in field order; None is skipped."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    if isinstance(tree, (Mapping, list, tuple)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(value)
    elif tree is not None:
        yield tree


def stack(trees: list[T], dim: int = 0) -> T:
    """Stack trees of equal structure along a new dimension: T trees of [N, ..] give [T, N, ..]."""
    return map(lambda *xs: torch.stack(xs, dim), trees[0], *trees[1:])


def concatenate(trees: Sequence[T], dim: int = 0) -> T:
    """Join trees of equal structure along a dimension that they have."""
    return map(lambda *xs: torch.cat(xs, dim), trees[0], *trees[1:])


def index(tree: T, i: Any) -> T:
    """Return ``leaf[i]`` of every leaf; ``i`` is any tensor index."""
    return map(lambda x: x[i], tree)


def flatten_time(tree: T) -> T:
    """Reshape every leaf [T, N, ..] to [T*N, ..], as a view where the memory layout allows it."""
    return map(lambda x: x.flatten(0, 1), tree)


def write(storage: T, t: int, value: T) -> None:
    """Assign ``storage[t] = value`` in every leaf, in place."""
    map(lambda s, v: s[t].copy_(v), storage, value)


def apply_in_parts(function: Callable[..., T], size: int | None, *inputs: Any) -> T:
    """Return ``function(*inputs)``, computed on at most ``size`` rows at a time.

    Bounds the memory of the intermediate results. ``size`` None computes all rows at once.
    """
    if size is None or size >= (rows := len(next(leaves(inputs)))):
        return function(*inputs)
    return concatenate([function(*index(inputs, slice(i, i + size))) for i in range(0, rows, size)])
