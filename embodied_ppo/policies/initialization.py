"""Orthogonal initialisation of layers (Saxe et al. 2014, "Exact solutions to the nonlinear dynamics
of learning in deep linear neural networks").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

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
