"""The interface of a batched MuJoCo engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mujoco
import torch
from torch import Tensor


class Physics(Protocol):
    """N worlds of one model."""

    model: mujoco.MjModel
    device: torch.device
    dtype: torch.dtype
    fields: dict[str, Tensor]
    """MjData and MjModel fields, [N, ..], live: the same tensors for ever."""
    waits: bool
    """Whether the host may look at results for nothing: False where that would stop a GPU."""

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance."""
        ...

    def reset(self, where: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """Where bool [N]: the model's defaults with ``values`` (names of START) [N, ..] over them, then all derived
        fields; the model itself is drawn anew from ``u`` [N, draws] where it is randomised."""
        ...

    draws: int
    """Random numbers that randomising the model takes for each world; 0: it is the same everywhere."""

    def images(self, where: Tensor) -> dict[str, Tensor]:
        """Camera -> uint8 [N, 3, H, W] of the present, arbitrary where bool [N] is False; {} without cameras."""
        ...

    def picture(self) -> Tensor:
        """uint8 [H, W, 3] of world 0, for films."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from there, derived fields included."""
        ...

    def captured(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """``step``, or a faster program of the same results. It changes tensors that live for ever in place, and
        nothing else; where ``waits`` is False it never looks at a value."""
        ...

    def close(self) -> None: ...
