"""Tests for NaN and infinity in nested tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree


def is_finite(values: Any) -> bool:
    """Return whether all numbers of nested tensors are finite."""
    numbers = [x for x in tree.leaves(values) if x.is_floating_point()]
    # A sum keeps NaN and infinity and is cheaper than isfinite() on every element. Finite elements
    # may overflow it, so a sum that is not finite needs the second test.
    sums = [x.sum() for x in numbers]
    if any(x.device.type != "cpu" for x in sums):  # wait for an accelerator once
        sums = [torch.stack(sums).sum()]
    if math.isfinite(sum(x.item() for x in sums)):
        return True
    return all(bool(x.isfinite().all()) for x in numbers)


def finite_rows(values: Any) -> Tensor:
    """Return whether all numbers of a row of nested tensors [N, ..] are finite, bool [N]."""
    leaves = [x.reshape(len(x), -1) for x in tree.leaves(values)]
    rows = [x.isfinite().all(1) for x in leaves if x.is_floating_point()]
    if not rows:
        return torch.ones(len(leaves[0]), dtype=torch.bool, device=leaves[0].device)
    return torch.stack(rows).all(0)


def wrong_number(values: Any, name: str, row: int) -> str:
    """Return name, index and value of the first number of row ``row`` that is not finite, or ""."""
    named = values if isinstance(values, dict) else {"": values}
    for key, x in named.items():
        if x is None or not x.is_floating_point():
            continue
        for index in (~x[row].isfinite()).nonzero()[:1].tolist():
            place = f" {key}" * bool(key) + f" {index}" * bool(index)
            return f"{name}{place} is {float(x[row][tuple(index)])}"
    return ""


def zero_rows(values: Any, where: Tensor) -> Any:
    """Return nested tensors [N, ..] with zeros in the rows where bool [N] holds."""
    return tree.map(lambda x: x.masked_fill(where.view(-1, *[1] * (x.ndim - 1)), 0), values)
