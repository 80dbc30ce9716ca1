"""Pure functions that map continuous actions from the policy's range to the simulator's units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied_ppo.core.types import Box, EnvError

ACTION_MAPPINGS = ("rescale", "clip", "none")


def mapper(
    mapping: str, box: Box, device: torch.device | str = "cpu"
) -> Callable[[Tensor], Tensor]:
    """Return a function float32 [.., A] -> float32 [.., A] that never changes its argument.

    rescale   clamp(a, -1, 1), then low + (a + 1) * (high - low) / 2. A dimension with an infinite
              bound is not changed.
    clip      clamp(a, low, high)
    none      a

    The tensors of bounds are created once. A call launches two or three small kernels, or one if
    all bounds are [-1, 1].

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
        return lambda action: action
    low = torch.tensor(box.low, dtype=torch.float32, device=device)
    high = torch.tensor(box.high, dtype=torch.float32, device=device)
    if bool(((low == -1) & (high == 1)).all()):
        return lambda action: action.clamp(-1.0, 1.0)
    if mapping == "clip":
        return lambda action: torch.clamp(action, low, high)

    finite = torch.isfinite(low) & torch.isfinite(high)
    if not bool(finite.any()):
        return lambda action: action
    ones = torch.ones_like(low)
    # A dimension with an infinite bound is clamped to [-inf, inf], multiplied by 1 and added to 0.
    upper = torch.where(finite, ones, torch.inf * ones)
    lower = -upper
    # The halves are subtracted, because high - low overflows for the largest floats.
    scale = torch.where(finite, high / 2 - low / 2, ones)
    offset = torch.where(finite, high / 2 + low / 2, torch.zeros_like(low))
    return lambda action: torch.addcmul(offset, torch.clamp(action, lower, upper), scale)
