"""A short deterministic run of scripts/fuzz.py by hypothesis, which shrinks failing inputs."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import fuzz

FEW = {"command": 3}
NUMBERED = {"command": 5}


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_only_declared_errors_are_raised(name: str) -> None:
    @given(st.randoms(use_true_random=False))
    @settings(
        max_examples=FEW.get(name, 25),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def attempts(r: Random) -> None:
        fuzz.attempt(fuzz.TARGETS[name], r)

    attempts()


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_targets_accept_some_inputs_and_refuse_others(name: str) -> None:
    """If all or none were refused, the inputs would not reach the code under test."""
    target, inputs = fuzz.TARGETS[name], NUMBERED.get(name, 200)
    refused = sum(fuzz.attempt(target, Random(f"{name} 0 {number}")) for number in range(inputs))
    assert refused < inputs and (refused > 0 or not target.errors)
