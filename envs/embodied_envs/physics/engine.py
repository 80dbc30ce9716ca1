"""The interface of a batched MuJoCo engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import mujoco
import torch
from torch import Tensor

T = TypeVar("T")

# Simulator fields that ``Task.reset`` may return; its other entries are variables of the task.
INITIAL_FIELDS = ("qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat")
# MjData fields that the next physics step depends on; the solver starts from qacc_warmstart.
STATE_FIELDS = ("time", *INITIAL_FIELDS, "qacc_warmstart")


class Physics(Protocol):
    """N worlds of one model."""

    model: mujoco.MjModel
    device: torch.device
    dtype: torch.dtype
    # MjData and MjModel fields, [N, ..], updated in place and never replaced by the engine.
    fields: dict[str, Tensor]
    # Whether the host can read values at no cost; False on a GPU, which would synchronise.
    host_readable: bool

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance by ``substeps`` physics steps."""

    def reset(self, mask: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """Reset the worlds where ``mask`` is True and compute all derived fields.

        Args:
            mask: bool [N].
            values: Fields of INITIAL_FIELDS, [N, ..]; the others take the model's defaults.
            u: [N, random_size], random numbers in [0, 1) from which a randomised model is drawn.
        """

    # Random numbers per world that draw a randomised model; 0: all worlds have the same model.
    random_size: int

    def uniform(self, seed: Tensor, stream: int, count: Tensor, size: int) -> Tensor:
        """Return ``base.random.uniform`` in ``dtype``, [N, size]."""
        ...

    def images(self, mask: Tensor) -> dict[str, Tensor]:
        """Return camera -> uint8 [N, 3, H, W], arbitrary where bool [N] is False.

        The dictionary is empty without cameras.
        """
        ...

    def render(self, world: int = 0) -> Tensor:
        """Return an image of one world, uint8 [H, W, 3], for videos."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state()``, derived fields included."""

    def capture(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return ``step``, or a faster program with the same results (a CUDA graph).

        ``step`` may only change persistent tensors in place; if ``host_readable`` is False it must
        not read values on the host.
        """
        ...

    def fuse(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function``, or a faster function whose results differ by rounding.

        ``function`` takes and returns tensors, and may change persistent ones in place. As in
        ``capture``, it must not read values on the host if ``host_readable`` is False.
        """
        ...

    def close(self) -> None:
        """Free the simulation."""
