"""Which observations are images, and how their dimensions and values are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError

# Channels of an image above which they must be half of its sides at most.
MAX_CHANNELS = 32
# Smallest side of an image of numbers other than bytes, or without a dimension of channels: that of
# the network of Mnih et al. 2015. Smaller arrays are vectors.
MIN_SIDE = 36
# Bounds of an observation above which it counts as unbounded.
MAX_BOUND = 1e6


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How an array is read as an image.

    Attributes:
        order: Meaning of its dimensions: H and W are rows and columns, C channels, S a stack of
            frames. Frames and channels become the channels of the image, frame by frame.
        low: Value that becomes 0.
        high: Value that becomes 1. Bytes have 0 and 255. Numbers without bounds keep their unit.
    """

    order: str
    low: float = 0.0
    high: float = 255.0

    def shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return (channels, height, width) of an array's shape."""
        sizes = dict(zip(self.order, shape, strict=True))
        return sizes.get("S", 1) * sizes.get("C", 1), sizes["H"], sizes["W"]

    def channels_first(self, x: Tensor) -> Tensor:
        """Return arrays [B, *shape] as [B, C, H, W], in their own values."""
        if self.order == "CHW":
            return x
        y = x.permute(0, *(1 + self.order.index(d) for d in "SCHW" if d in self.order))
        return y.flatten(1, 2) if "S" in self.order else y if "C" in self.order else y.unsqueeze(1)

    def restore(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Invert ``channels_first`` for arrays of a shape."""
        if self.order == "CHW":
            return x
        sizes = dict(zip(self.order, shape, strict=True))
        present = [d for d in "SCHW" if d in self.order]
        y = x.reshape(-1, *(sizes[d] for d in present))
        return y.permute(0, *(1 + present.index(d) for d in self.order))

    def to_bytes(self, x: Tensor) -> Tensor:
        """Return values as networks read them, which divide by 255. uint8 stays as it is."""
        if not x.is_floating_point() or (self.low, self.high) == (0.0, 255.0):
            return x
        return (x - self.low) * (255.0 / (self.high - self.low))


def decide(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    layout: str | None = None,
    name: str = "observation",
) -> ImageLayout | None:
    """Return how an array is read as an image; None: it is a vector.

    Bytes with 3 or 4 dimensions are an image. Other numbers, and arrays of 2 dimensions, are one if
    both sides have at least MIN_SIDE pixels.

    Args:
        shape: Shape of one observation.
        dtype: torch.uint8 for bytes; bool, floats and other integers are converted to float32.
        low: Smallest value of the space.
        high: Largest value of the space.
        layout: The option env.image_layout; None: the channels are the first or last dimension,
            whichever is smaller than both sides.
        name: Name in messages.

    Raises:
        EnvError: The array is an image, and its channels are not clear or do not fit ``layout``.
    """
    is_bytes = dtype == torch.uint8
    if len(shape) not in (2, 3, 4):
        return None
    large = sorted(shape)[-2] >= MIN_SIDE
    if not large and (not is_bytes or len(shape) == 2):
        return None
    order = _order(shape, layout)
    if order is None and not (is_bytes or min(shape) >= MIN_SIDE):
        return None  # such as [3, 64, 3]: numbers for each of 64 points
    if order is None and layout is None and is_bytes and len(shape) == 3 and not large:
        order = "CHW"  # too small for a convolution, so that the order does not matter
    if order is None:
        values = "hwc or chw (channels last or first)" if layout is None else "null"
        raise EnvError(
            f"write env.image_layout={values}, or wrap the environment: {name} has shape"
            f" {list(shape)}, whose channels are not clear with env.image_layout={layout or 'null'}"
        )
    if not is_bytes and len(shape) > 2:
        _, height, width = ImageLayout(order).shape(shape)
        if layout is None and min(height, width) < MIN_SIDE:
            return None
    if is_bytes:
        return ImageLayout(order)
    bounded = math.isfinite(low) and math.isfinite(high) and low < high
    if bounded and max(abs(low), abs(high)) <= MAX_BOUND:
        return ImageLayout(order, low, high)
    return ImageLayout(order, 0.0, 1.0)


def _order(shape: Sequence[int], layout: str | None) -> str | None:
    """Return the order of the dimensions of an image; None: not clear."""
    if len(shape) == 2:
        return "HW"
    if layout is not None:
        if len(shape) == 3:
            return layout.upper()
        return f"S{layout.upper()}" if shape[0] <= MAX_CHANNELS else None
    if len(shape) == 4:  # frames are the first or the last dimension
        first = _order(shape[1:], None) if shape[0] <= MAX_CHANNELS else None
        last = _order(shape[:3], None) if shape[3] <= MAX_CHANNELS else None
        return f"S{first}" if first else last and f"{last}S"
    for channels, sides, order in ((shape[0], shape[1:], "CHW"), (shape[2], shape[:2], "HWC")):
        limit = max(MAX_CHANNELS, min(sides) // 2)
        if channels < min(sides) and channels <= limit:
            return order
    return None


def describe(
    shape: Sequence[int], dtype: torch.dtype, image: ImageLayout | None, name: str, network: str
) -> str:
    """Return a sentence about how an array of several dimensions is read.

    ``network``: name of what reads images.
    """
    kind = f"{name}, {str(dtype).removeprefix('torch.')} {list(shape)}"
    if image is None:
        return f"{kind}, is a vector of {math.prod(shape)} numbers"
    channels, height, width = image.shape(shape)
    values = f"values {image.low:g} to {image.high:g} become 0 to 1"
    if (image.low, image.high) == (0.0, 1.0):
        values = "values keep their unit"
    return (
        f"{kind}, is an image for the {network} ({image.order}): {channels} channel"
        f"{'s' * (channels > 1)} of {height} x {width}; {values}"
    )
