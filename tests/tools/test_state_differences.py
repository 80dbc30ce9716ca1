"""Bitwise differences of nested states, with their names, positions and values."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from embodied_ppo.tools.state_differences import count_tensors, state_differences

NAN = float("nan")


def state() -> dict:
    return {
        "x": torch.arange(6.0).reshape(2, 3),
        "list": [1, 2.5, NAN, None, "a"],
        "inner": {"mask": torch.tensor([True, False]), "zero": torch.tensor(0.0)},
        "nan": torch.tensor([NAN, 1.0], dtype=torch.float64),
        "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
    }


def test_equal_states_have_no_difference():
    """NaN equals NaN, also with other bits."""
    other = copy.deepcopy(state())
    other["nan"].view(torch.int64)[0] += 1
    assert math.isnan(other["nan"][0])
    assert list(state_differences(state(), other)) == []
    assert count_tensors(state()) == 6


def test_each_difference_is_named():
    other = copy.deepcopy(state())
    other["x"][1, 0] += 3e-7
    other["x"][1, 2] = 6.0
    other["list"][1] = 2.0
    other["inner"]["mask"][1] = True
    other["inner"]["zero"] *= -1  # equal numbers with other bits
    other["half"].view(torch.int16)[1] ^= 1
    other["nan"] = other["nan"].float()
    del other["empty"]
    other["new"] = torch.zeros(2)
    named = {d.place.partition(",")[0]: d for d in state_differences(state(), other)}
    # Entries that only the other state has are not compared.
    assert list(named) == ["x", "list[1]", "inner.mask", "inner.zero", "nan", "half", "empty"]
    x = named["x"]
    assert (x.place, x.stored) == ("x, index [1, 0] (2 of 6 elements)", 3.0)
    assert (named["list[1]"].stored, named["list[1]"].recomputed) == (2.5, 2.0)
    assert named["inner.mask"].place == "inner.mask, index [1]"
    assert named["inner.zero"].place == "inner.zero"
    assert named["nan"].stored == "float64 [2]" and named["nan"].recomputed == "float32 [2]"
    assert named["half"].place == "half, index [1]"
    assert named["empty"].recomputed == "(absent)"


@pytest.mark.parametrize(
    ("stored", "recomputed", "expected"),
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ("a", "list of 2", "list of 3")),  # as a whole
        ([(1.0, 2)], [(1.0, 3, True)], ("[0][1]", 2, 3)),  # fields that a later version added
    ],
)
def test_lists_and_tuples_of_other_lengths(stored: Any, recomputed: Any, expected: Any):
    (difference,) = state_differences(stored, recomputed)
    assert (difference.place, difference.stored, difference.recomputed) == expected
