"""Means over the steps of an episode of the numbers that a simulator returns in its info."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_envs.types import Step


class StepNumbers:
    """Sums of the numbers of N environments.

    ``error_NAME`` and ``command_NAME`` are the error and the value of a command in each step, see
    ``embodied_envs.robots.terms``.
    """

    def __init__(self, n: int) -> None:
        """Start without numbers."""
        self.n = n
        self._sums: dict[str, Tensor] = {}  # name -> sum and count of its values, [2, N]
        # Command -> value, error, and whether it counts, [3, N] in each step.
        self._commands: dict[str, list[Tensor]] = {}

    def add(self, step: Step, counted: Tensor) -> None:
        """Add the numbers [N, ..] of a step where bool [N]; those of all environments are none."""
        info = {k: x for k, x in (step.info or {}).items() if x.ndim and len(x) == self.n}
        for name, x in info.items():
            command = name.removeprefix("command_")
            values = x.double().cpu().reshape(self.n, -1)
            if name != command and (error := info.get(f"error_{command}")) is not None:
                # Over the executed actions of a chunk; the others are NaN.
                errors = error.double().cpu().reshape(self.n, -1).nanmean(1)
                row = [values[:, 0], errors, (counted & errors.isfinite()).double()]
                self._commands.setdefault(command, []).append(torch.stack(row))
                continue
            valid = values.isfinite() & counted[:, None]
            added = torch.stack([values.where(valid, 0.0).sum(1), valid.sum(1).double()])
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def means(self, i: int) -> dict[str, float]:
        """Return name -> mean of environment ``i``; names without a value are left out."""
        return {k: float(x[0, i] / x[1, i]) for k, x in self._sums.items() if x[1, i]}

    def tracking(self, i: int) -> dict[str, list[tuple[float, float, int]]]:
        """Return command -> its values in environment ``i``, each with mean error and steps."""
        tracking = {}
        for name, rows in self._commands.items():
            value, error, counted = torch.stack(rows)[:, :, i].unbind(1)
            value, error = value[counted > 0], error[counted > 0]
            values, index, counts = value.unique(return_inverse=True, return_counts=True)
            means = torch.zeros_like(values).index_add_(0, index, error) / counts
            columns = values.tolist(), means.tolist(), counts.tolist()
            tracking[name] = list(zip(*columns, strict=True))
        return tracking
