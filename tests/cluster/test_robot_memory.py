"""Memory of small robot policies before a run: weights that exceed it, and upper bounds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.robot_memory import RobotMemoryEstimator
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement_memory import USABLE_MEMORY


def test_weights_that_exceed_the_memory_are_not_allocated() -> None:
    """The message names the option; it was a failed allocation in the constructor of a layer."""
    c = run_helpers.tiny_config({"model.hidden": [100_000] * 26})
    message = r"model: the weights alone need 1000\.\d GB .*model\.hidden"
    with pytest.raises(ConfigError, match=message):
        RobotMemoryEstimator(c)


@pytest.mark.parametrize(
    "options", [{}, {"model.recurrent": "gru", "algorithm.minibatch_unit": "column"}]
)
def test_only_an_upper_bound_that_does_not_fit_needs_the_estimate(options: Any) -> None:
    """A run is refused from the estimate on, not from its upper bound on, which is larger."""
    c = run_helpers.tiny_config(options)
    plan = run_plan.plan_on_one_device(c, torch.device("cpu"))
    estimator = RobotMemoryEstimator(c)
    (need,) = estimator.estimate_memory(plan).values()
    estimator.bound, state = True, torch.get_rng_state()
    (bound,) = estimator.estimate_memory(plan).values()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(bound[purpose] >= size for purpose, size in need.items())
    assert sum(bound.values()) > sum(need.values())
    fitting = round(sum(need.values()) / USABLE_MEMORY)
    for memory in (2 * sum(bound.values()), fitting + 8):
        run_plan.refuse_excess(c, replace(plan, hardware=replace(plan.hardware, memory=memory)))
    with pytest.raises(PlacementError):
        small = replace(plan.hardware, memory=fitting - 8)
        run_plan.refuse_excess(c, replace(plan, hardware=small))


def test_the_start_of_a_small_network_imports_no_compiler() -> None:
    """torch imports its compiler with fake tensors, a third of the start's duration."""
    code = (
        "import sys, torch, embodied_ppo; from embodied_ppo.cluster import run_plan;"
        "c = embodied_ppo.config('cartpole');"
        "run_plan.refuse_excess(c, run_plan.plan_on_one_device(c, torch.device('cpu')));"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
