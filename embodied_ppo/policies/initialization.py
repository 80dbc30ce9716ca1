"""Orthogonal initialisation of layers (Saxe et al. 2014, "Exact solutions to the nonlinear dynamics
of learning in deep linear neural networks"), and parameters without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_skipped = ContextVar("_skipped", default=False)


@contextmanager
def skip_orthogonal_matrices() -> Iterator[None]:
    """Leave weights as they are within the block.

    Matrices take minutes to compute for layers of ten thousand units.
    """
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


def orthogonal_(weight: Tensor, gain: float = 1.0) -> None:
    """Assign ``gain`` times an orthogonal matrix to a weight [outputs, inputs, ..]."""
    if not _skipped.get():
        nn.init.orthogonal_(weight, gain)


def replace_meta_tensors(module: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake tensors on the CPU, in place."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies: dict[int, Any] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in copies:
                    with mode:
                        empty = torch.empty(p.shape, dtype=p.dtype)
                    copies[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
                part._parameters[name] = copies[id(p)]
        for name, x in part._buffers.items():
            if x is not None and x.is_meta:
                with mode:
                    part._buffers[name] = torch.empty(x.shape, dtype=x.dtype)
