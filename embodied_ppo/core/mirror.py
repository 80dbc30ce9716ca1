"""The mirror image of what a policy reads and does, in the plane y = 0 of a robot's base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SignedPermutation:
    """Number i of the image is sign[i] times number index[i] of the original."""

    index: tuple[int, ...]
    sign: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the image of tensors [.., D]."""
        columns = x.unbind(-1)
        pairs = zip(self.index, self.sign, strict=True)
        return torch.stack([columns[i] if sign > 0 else -columns[i] for i, sign in pairs], -1)

    def array(self, x: Any) -> Any:
        """Return the image of arrays [.., D]."""
        return x[..., list(self.index)] * self.sign

    def moved(self) -> int | None:
        """Return the first number that two mirrorings do not restore; None: there is none."""
        for i, (j, sign) in enumerate(zip(self.index, self.sign, strict=True)):
            if self.index[j] != i or self.sign[j] != sign:
                return i
        return None


@dataclass(frozen=True)
class Mirror:
    """The mirror image of what a policy of a task reads and does.

    Attributes:
        action: Of one action [A].
        observations: Name -> that of the last dimension of this observation; a single array has the
            name ``SINGLE``.
        line: What was derived and measured.
        warnings: Lines about differences of left and right above WARN.
    """

    action: SignedPermutation
    observations: Mapping[str, SignedPermutation]
    line: str = ""
    warnings: tuple[str, ...] = ()


def permutation(pairs: Sequence[tuple[int, int]]) -> SignedPermutation:
    """Return the permutation of (index, sign)."""
    return SignedPermutation(tuple(i for i, _ in pairs), tuple(s for _, s in pairs))
