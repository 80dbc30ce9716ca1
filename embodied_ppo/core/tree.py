"""Map, stack and index over dataclasses, dictionaries and tensors, so that a trajectory is handled as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply ``fn`` to every tensor of ``tree``, leaf by leaf with the same leaves of ``rest``.

    Dataclasses, dictionaries, lists and tuples keep their type; None stays None.
    """
    if tree is None:
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {
            f.name: map(fn, getattr(tree, f.name), *(getattr(r, f.name) for r in rest))
            for f in dataclasses.fields(tree)
        }
        return type(tree)(**values)
    if isinstance(tree, Mapping):
        mapped: Any = {k: map(fn, v, *(r[k] for r in rest)) for k, v in tree.items()}
        return mapped
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(tree))
    return fn(tree, *rest)


def leaves(tree: Any) -> Iterator[Any]:
    """Every tensor of ``tree``, in field order, None left out."""
    if tree is None:
        return
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for f in dataclasses.fields(tree):
            yield from leaves(getattr(tree, f.name))
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def stack(trees: list[T], dim: int = 0) -> T:
    """Stack equal trees along a new dimension: T trees of [N, ..] give one of [T, N, ..]."""
    return map(lambda *xs: torch.stack(xs, dim), trees[0], *trees[1:])


def index(tree: T, i: Any) -> T:
    """``leaf[i]`` for every leaf; ``i`` is anything a tensor takes."""
    return map(lambda x: x[i], tree)


def flatten_time(tree: T) -> T:
    """[T, N, ..] -> [T*N, ..] for every leaf (a view where memory allows)."""
    return map(lambda x: x.flatten(0, 1), tree)


def allocate(tree: T, length: int) -> T:
    """Uninitialised [length, ..] storage for ``length`` trees shaped like ``tree`` [..]."""
    return map(lambda x: x.new_empty((length, *x.shape)), tree)


def write(storage: T, t: int, value: T) -> None:
    """``storage[t] = value`` for every leaf, in place."""
    map(lambda s, v: s[t].copy_(v), storage, value)


def in_parts(function: Callable[..., T], size: int | None, *inputs: Any) -> T:
    """Return ``function(*inputs)``, computed on at most ``size`` rows of the inputs at a time (None: on all)."""
    rows = len(next(leaves(inputs)))
    if size is None or size >= rows:
        return function(*inputs)
    cuts = [slice(i, i + size) for i in range(0, rows, size)]
    outputs = [function(*index(inputs, cut)) for cut in cuts]
    return map(lambda *xs: torch.cat(xs), outputs[0], *outputs[1:])
