"""A short run of scripts/fuzz.py, by hypothesis, which shrinks what it finds; the same inputs every
time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import fuzz

FEW = {"command": 3, "option": 10}
NUMBERED = {"command": 5, "option": 60}


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_nothing_but_the_declared_errors_comes_out(name: str) -> None:
    @given(st.randoms(use_true_random=False))
    @settings(
        max_examples=FEW.get(name, 25),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def some(r: Random) -> None:
        fuzz.attempt(fuzz.TARGETS[name], r)

    some()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_numbered_inputs_are_refused_and_taken(name: str) -> None:
    """Neither all of them nor none: else a target would not reach what it is for."""
    target, inputs = fuzz.TARGETS[name], NUMBERED.get(name, 200)
    refused = sum(fuzz.attempt(target, Random(f"{name} 0 {number}")) for number in range(inputs))
    assert refused < inputs and (refused > 0 or not target.errors)
