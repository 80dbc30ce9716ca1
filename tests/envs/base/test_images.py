"""Which observations are images, and how networks read them."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch

from embodied_envs.adapters import spaces
from embodied_envs.base import images
from embodied_envs.base.errors import EnvError
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic

BYTES, FLOAT = torch.uint8, torch.float32


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 9, 12, 18])
@pytest.mark.parametrize("dtype", [BYTES, FLOAT])
def test_channels_are_found_in_both_layouts(channels: int, dtype: torch.dtype) -> None:
    for shape, order in (((channels, 84, 96), "CHW"), ((84, 96, channels), "HWC")):
        image = images.decide(shape, dtype)
        assert image is not None and image.order == order
        assert image.shape(shape) == (channels, 84, 96)


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "expected"),
    [
        ((84, 84), FLOAT, "HW", (1, 84, 84)),
        ((84, 84), BYTES, "HW", (1, 84, 84)),
        ((84, 84, 1), FLOAT, "HWC", (1, 84, 84)),
        ((4, 84, 84, 3), BYTES, "SHWC", (12, 84, 84)),
        ((4, 84, 84, 1), FLOAT, "SHWC", (4, 84, 84)),
        ((4, 3, 84, 84), BYTES, "SCHW", (12, 84, 84)),
        ((84, 84, 3, 4), BYTES, "HWCS", (12, 84, 84)),
        ((40, 84, 84), BYTES, "CHW", (40, 84, 84)),
        ((7, 7, 3), BYTES, "HWC", (3, 7, 7)),
    ],
)
def test_shapes_of_images(
    shape: tuple[int, ...], dtype: torch.dtype, order: str, expected: tuple[int, int, int]
) -> None:
    image = images.decide(shape, dtype)
    assert image is not None and image.order == order and image.shape(shape) == expected
    x = torch.arange(2 * math.prod(shape)).reshape(2, *shape)
    first = image.channels_first(x)
    assert first.shape == (2, *expected) and torch.equal(image.restore(first, shape), x)


@pytest.mark.parametrize("shape", [(), (48,), (1, 48), (12, 4), (512, 3), (3, 64, 3), (2, 3, 4, 5)])
def test_small_arrays_stay_vectors(shape: tuple[int, ...]) -> None:
    assert images.decide(shape, FLOAT) is None


def test_a_shape_that_is_not_clear_is_refused_until_the_option_decides() -> None:
    for dtype in (BYTES, FLOAT):
        with pytest.raises(EnvError, match=r"write env\.image_layout=hwc or chw"):
            images.decide((84, 84, 84), dtype)
        for layout in ("hwc", "chw"):
            image = images.decide((84, 84, 84), dtype, layout=layout)
            assert image is not None and image.order == layout.upper()
    assert images.decide((12, 4), FLOAT, layout="hwc") is None


@pytest.mark.parametrize(
    ("low", "high", "values", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0], [0.0, 0.5, 1.0]),
        (0.0, 255.0, [0.0, 51.0, 255.0], [0.0, 0.2, 1.0]),
        (-1.0, 1.0, [-1.0, 0.0, 1.0], [0.0, 0.5, 1.0]),
        (0.0, math.inf, [0.0, 2.5, 10.0], [0.0, 2.5, 10.0]),  # depth in metres
    ],
)
def test_values_as_networks_read_them(
    low: float, high: float, values: list[float], expected: list[float]
) -> None:
    image = images.decide((84, 84), FLOAT, low=low, high=high)
    assert image is not None
    torch.testing.assert_close(image.to_bytes(torch.tensor(values)) / 255, torch.tensor(expected))


@pytest.mark.parametrize(
    ("space", "channels"),
    [
        (gymnasium.spaces.Box(0, 1, (84, 84), np.float32), 1),
        (gymnasium.spaces.Box(0, 10, (84, 84, 1), np.float64), 1),
        (gymnasium.spaces.Box(0, 255, (4, 84, 84, 3), np.uint8), 12),
        (gymnasium.spaces.Box(0, 255, (84, 84, 18), np.uint8), 18),
    ],
)
def test_the_network_reads_the_image(space: gymnasium.spaces.Box, channels: int) -> None:
    """Spec, description for other processes, and a CNN with as many channels."""
    spec, leaves = spaces.observations(space, id="x", device=torch.device("cpu"))
    assert isinstance(spec, ArraySpec) and spec.layout is not None
    policy = ActorCritic(spec, Box((-1.0,), (1.0,)), ModelConfig(hidden=(8,)))
    assert next(policy.trunk.cnns.parameters()).shape[1] == channels
    inputs = policy.encode(leaves[""](np.stack([space.sample(), space.sample()])))
    assert inputs["obs"].shape == (2, channels, 84, 84)
    assert policy.act(inputs).action.shape == (2, 1)
