"""Mappings of continuous actions from the policy's range to the simulator's units, as pure
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from embodied_ppo.core.types import Box, EnvError

ActionMapping: TypeAlias = Literal["rescale", "clip", "none"]
ACTION_MAPPINGS: tuple[str, ...] = get_args(ActionMapping)


def mapper(
    mapping: str, box: Box, device: torch.device | str = "cpu"
) -> Callable[[Tensor], Tensor]:
    """Return a function float32 [.., A] -> float32 [.., A] that never changes its argument.

    rescale   clamp(a, -1, 1), then low + (a + 1) * (high - low) / 2; a dimension with an infinite
    bound is not changed
    clip      clamp(a, low, high)
    none      a

    The tensors of bounds are created once. A call launches two or three small kernels, and one
    where every bound is [-1, 1].

    Args:
        mapping: One of ``ACTION_MAPPINGS``.
        box: Bounds of the simulator's actions.
        device: Device of the actions.

    Raises:
        EnvError: ``mapping`` is unknown.
    """
    if mapping not in ACTION_MAPPINGS:
        raise EnvError(
            f"action_mapping={mapping!r} is unknown; choose one of {', '.join(ACTION_MAPPINGS)}"
        )
    if mapping == "none":
        return _identity
    low = torch.tensor(box.low, dtype=torch.float32, device=device)
    high = torch.tensor(box.high, dtype=torch.float32, device=device)
    unit = bool(((low == -1) & (high == 1)).all())
    if unit:
        return _clamp_unit
    if mapping == "clip":
        return lambda action: torch.clamp(action, low, high)

    finite = torch.isfinite(low) & torch.isfinite(high)
    if not bool(finite.any()):
        return _identity
    ones = torch.ones_like(low)
    # In a dimension with an infinite bound: clamp to [-inf, inf], multiply by 1, add 0.
    lower = torch.where(finite, -ones, -torch.inf * ones)
    upper = torch.where(finite, ones, torch.inf * ones)
    # Halves are subtracted, because high - low of the largest floats overflows.
    scale = torch.where(finite, high / 2 - low / 2, ones)
    offset = torch.where(finite, high / 2 + low / 2, torch.zeros_like(low))
    return lambda action: torch.addcmul(offset, torch.clamp(action, lower, upper), scale)


def _identity(action: Tensor) -> Tensor:
    return action


def _clamp_unit(action: Tensor) -> Tensor:
    return action.clamp(-1.0, 1.0)
