"""Pure functions that map continuous actions from the policy's range to the simulator's units."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError, check_choice
from embodied_envs.types import Box

ACTION_MAPPINGS = ("rescale", "clip", "none")


def mapper(
    mapping: str, box: Box, device: torch.device | str = "cpu", *, id: str = ""
) -> Callable[[Tensor], Tensor]:
    """Return a function float32 [.., A] -> float32 [.., A] whose result is new memory.

    A simulator may change the result in place, because it shares no memory with the argument.

    rescale   clamp(a, -1, 1), then low + (a + 1) * (high - low) / 2, clamped to [low, high]. A
              dimension with an infinite bound is only clamped.
    clip      clamp(a, low, high)
    none      a

    Where float32 cannot represent a bound, the largest interval of float32 inside the bounds is
    used, or the number nearest to low if there is none.

    The tensors of bounds are created once. A call launches at most three small kernels, or one if
    all bounds are [-1, 1].

    Args:
        mapping: One of ``ACTION_MAPPINGS``.
        box: Bounds of the simulator's actions.
        device: Device of the actions.
        id: ``env.id``, for messages.

    Raises:
        EnvError: ``mapping`` is unknown, or no number is within the bounds.
    """
    prefix = f"env.id={id}: " if id else ""
    check_choice(f"{prefix}action_mapping", mapping, ACTION_MAPPINGS)
    for i, (least, most) in enumerate(zip(box.low, box.high, strict=True)):
        if not least <= most or least == math.inf or most == -math.inf:
            raise EnvError(
                f"{prefix}correct dimension {i} of its action space, whose bounds are"
                f" [{least:g}, {most:g}]: low <= high, and -inf and inf where there is no bound"
            )
    if mapping == "none":
        return torch.clone
    low, high = torch.tensor([box.low, box.high], dtype=torch.float32, device=device)
    if bool(((low == -1) & (high == 1)).all()):
        return lambda action: action.clamp(-1.0, 1.0)
    least, most = _float32_bounds(box, device)
    finite = torch.isfinite(low) & torch.isfinite(high)
    if mapping == "clip" or not bool(finite.any()):
        return lambda action: torch.clamp(action, least, most)
    ones = torch.ones_like(low)
    # A dimension with an infinite bound is clamped to [-inf, inf], multiplied by 1 and added to 0.
    upper = torch.where(finite, ones, torch.inf * ones)
    lower = -upper
    # The halves are subtracted, because high - low overflows for the largest floats.
    scale = torch.where(finite, high / 2 - low / 2, ones)
    offset = torch.where(finite, high / 2 + low / 2, torch.zeros_like(low))

    def rescale(action: Tensor) -> Tensor:
        # The result of addcmul can exceed a bound by one rounding step.
        return torch.addcmul(offset, torch.clamp(action, lower, upper), scale).clamp_(least, most)

    return rescale


def policy_bounds(box: Box, mapping: str) -> tuple[Tensor, Tensor]:
    """Return the policy's bounds of actions, float32 [A]; rescale maps [-1, 1] to finite ones."""
    low, high = torch.tensor([box.low, box.high], dtype=torch.float32)
    if mapping == "rescale":
        finite = torch.isfinite(low) & torch.isfinite(high)
        low, high = torch.where(finite, -1.0, low), torch.where(finite, 1.0, high)
    return low, high


def _float32_bounds(box: Box, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the largest interval of float32 inside the bounds, [A] each."""
    bounds = torch.tensor([box.low, box.high], dtype=torch.float64, device=device)
    nearest = bounds.float()
    infinity = torch.full_like(nearest[0], torch.inf)
    low = torch.where(nearest[0] < bounds[0], nearest[0].nextafter(infinity), nearest[0])
    high = torch.where(nearest[1] > bounds[1], nearest[1].nextafter(-infinity), nearest[1])
    empty = low > high
    return torch.where(empty, nearest[0], low), torch.where(empty, nearest[0], high)
