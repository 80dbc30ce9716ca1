"""Means over the steps of an episode of the numbers that a simulator returns in its info."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_envs.types import Step


class StepNumbers:
    """Sums of the numbers of N environments."""

    def __init__(self, n: int) -> None:
        """Start without numbers."""
        self.n = n
        self._sums: dict[str, Tensor] = {}
        """Name -> sum and count of its values, [2, N]."""

    def add(self, step: Step, counted: Tensor) -> None:
        """Add the numbers [N, ..] of a step where bool [N]; those of all environments are none."""
        for name, x in (step.info or {}).items():
            if x.ndim and len(x) == self.n:
                values = x.double().cpu().reshape(self.n, -1)
                valid = values.isfinite() & counted[:, None]
                added = torch.stack([values.where(valid, 0.0).sum(1), valid.sum(1).double()])
                self._sums[name] = self._sums[name] + added if name in self._sums else added

    def means(self, i: int) -> dict[str, float]:
        """Return name -> mean of environment ``i``; names without a value are left out."""
        return {k: float(x[0, i] / x[1, i]) for k, x in self._sums.items() if x[1, i]}
