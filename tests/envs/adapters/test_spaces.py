"""Mapped actions are in the action space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from embodied_envs.adapters.actions import mapper
from embodied_envs.adapters.spaces import ActionConverter, flatten, observations
from embodied_envs.base.errors import EnvError
from embodied_envs.types import Box


@pytest.mark.parametrize("mapping", ["rescale", "clip"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "bounds",
    [
        (-3.0718, -0.0698),
        (0.0, np.inf),
        (-np.inf, -0.1),
        (-6e4, 6e4),
        (-1.1e-7, 1e-3),
        (-3e38, 3e38),
        (-1.0, 1.0),
    ],
)
def test_mapped_actions_are_in_the_space(
    bounds: tuple[float, float], dtype: Any, mapping: str
) -> None:
    """At and around the ends of [-1, 1] and of the bounds, for each dtype of the space."""
    limit = np.finfo(dtype).max
    finite = [np.clip(x, -limit, limit) if np.isfinite(x) else x for x in bounds]
    low, high = np.array([finite[0], -2], dtype), np.array([finite[1], 2], dtype)
    space = spaces.Box(low, high, dtype=dtype)
    apply = ActionConverter(space, id="x", mapping=mapping, device=torch.device("cpu")).function()
    edges = torch.tensor(np.array([-1, 1, *low, *high, -1e5, 1e5, 0], np.float32))
    near = [edges, edges.nextafter(torch.tensor(9e9)), edges.nextafter(torch.tensor(-9e9))]
    for action in torch.cat([*near, torch.linspace(-1.1, 1.1, 200)]):
        mapped = apply(action.expand(1, 2)).numpy()[0]
        assert space.contains(mapped), (mapped, space)


def test_wrong_bounds_are_refused() -> None:
    for low, high in ((2.0, 1.0), (float("nan"), 1.0), (float("inf"), float("inf"))):
        with pytest.raises(EnvError, match=r"env\.id=x: correct dimension 1 of its action space"):
            mapper("none", Box((0.0, low), (1.0, high)), id="x")


def test_two_entries_of_one_name_are_refused() -> None:
    inner = spaces.Box(-1, 1, (2,))
    with pytest.raises(EnvError, match="rename an entry of the space: a/b"):
        flatten(spaces.Dict({"a/b": inner, "a": spaces.Dict({"b": inner})}))


def test_a_choice_outside_of_its_space_is_named() -> None:
    space = spaces.Dict({"phase": spaces.Discrete(3, start=-1)})
    read = observations(space, id="x", device=torch.device("cpu"))[1]["phase"]
    assert read(np.array([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]
    for wrong in (-2, 2):
        with pytest.raises(EnvError, match=f"return -1 to 1: .*'phase' returned {wrong}"):
            read(np.array([0, wrong]))
