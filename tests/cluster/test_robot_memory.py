"""Weights of robot policies that exceed the memory of this machine."""

from __future__ import annotations

import pytest
import run_helpers

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster.robot_memory import RobotMemoryEstimator


def test_weights_that_exceed_the_memory_are_not_allocated() -> None:
    """The message names the option; it was a failed allocation in the constructor of a layer."""
    c = run_helpers.tiny_config({"model.hidden": [100_000] * 26})
    message = r"model: the weights alone need 1000\.\d GB .*model\.hidden"
    with pytest.raises(ConfigError, match=message):
        RobotMemoryEstimator(c)
