"""Memory of small robot policies before a run: weights that exceed it, and upper bounds."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

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


@pytest.mark.parametrize("unit", ["step", "column"])
def test_only_a_run_that_exceeds_the_estimate_is_refused(unit: str) -> None:
    """An upper bound that fits spares the estimate."""
    c = run_helpers.tiny_config({"algorithm.minibatch_unit": unit})
    plan = run_plan.plan_on_one_device(c, torch.device("cpu"))
    estimator, state = RobotMemoryEstimator(c), torch.get_rng_state()
    (need,) = estimator.estimate_memory(plan).values()
    estimator.bound = True
    (bound,) = estimator.estimate_memory(plan).values()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(bound[purpose] >= size for purpose, size in need.items()) and bound != need
    fitting = round(sum(need.values()) / USABLE_MEMORY)
    for memory in (2 * sum(bound.values()), fitting + 8, fitting - 8):
        placed = replace(plan, hardware=replace(plan.hardware, memory=memory))
        with pytest.raises(PlacementError) if memory < fitting else nullcontext():
            run_plan.check_memory(c, placed)


def test_the_start_of_a_small_network_imports_no_compiler() -> None:
    """With fake tensors torch imports its compiler, a third of the start's duration."""
    code = (
        "import sys, torch, embodied_ppo; from embodied_ppo.cluster import run_plan;"
        "c = embodied_ppo.config('cartpole');"
        "run_plan.check_memory(c, run_plan.plan_on_one_device(c, torch.device('cpu')));"
        "assert not {'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
