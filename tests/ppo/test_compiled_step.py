"""The step of a minibatch as a function of tensors equals the eager step, for all options."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_helpers import tables
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core.types import MEAN_SHIFT, Batch
from embodied_ppo.ppo.compiled_step import (
    ADAMW_SETTINGS,
    Gradients,
    MinibatchStep,
    adam_state,
    adamw_settings,
)
from embodied_ppo.ppo.minibatches import SampleCutter, TokenBudgetCutter, take
from embodied_ppo.ppo.optimizer import MinibatchOptimizer
from embodied_ppo.ppo.ppo import PPO
from tests.ppo.test_robot_actor import N, T, experience, make

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = tables(__file__)["cases"]


def prepared(learner: PPO, *, shifted: bool = False, **options: Any) -> Batch:
    """Return a batch; ``shifted`` adds the means' shift that ``rpo_alpha`` draws."""
    batch = learner.prepare(experience(learner, noise=0.3, **options))[0]
    if not shifted:
        return batch
    shift = torch.rand(batch.action.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return replace(batch, replay=batch.replay | {MEAN_SHIFT: shift})


def parameter_names(optimizer: MinibatchOptimizer) -> list[list[str]]:
    """Return the names of the actor's and of the critic's parameters."""
    name = {id(p): n for n, p in optimizer.model.named_parameters()}
    return [[name[id(p)] for p in group] for group in (optimizer.actor, optimizer.critic)]


def program_steps(learner: PPO, batch: Batch, indices: list[torch.Tensor]) -> list[torch.Tensor]:
    program = MinibatchStep(learner.optimizer.loss, *parameter_names(learner.optimizer), batch)
    state = adam_state(learner.optimizer.adamw)
    adamw, groups = learner.optimizer.adamw, (learner.optimizer.actor, learner.optimizer.critic)
    steps = [int(adamw.state[group[0]]["step"]) for group in groups]
    options = {"lr": [group["lr"] for group in adamw.param_groups], "steps": steps}
    options |= {"coefficients": [learner.entropy_coef]}
    settings = adamw_settings(learner.config, len(indices), **options)
    assert settings.shape == (len(indices), len(ADAMW_SETTINGS) + 1)
    tensors = [*state.parameters, *state.first, *state.second]
    return [
        program(*tensors, s, i, *tree.leaves(batch)) for s, i in zip(settings, indices, strict=True)
    ]


def eager_step(optimizer: MinibatchOptimizer, batch: Batch, index: Tensor, coef: float) -> Tensor:
    """Take one eager step on the samples (or columns) ``index`` and return its statistics."""
    minibatch = take(batch, index, optimizer.config.minibatch_unit)
    optimizer.config = replace(optimizer.config, update_epoch=1)
    if isinstance(optimizer.cutter, TokenBudgetCutter):
        optimizer.cutter = replace(optimizer.cutter, columns=len(index))
    elif isinstance(optimizer.cutter, SampleCutter):
        size = len(index) * (len(batch.mask) if optimizer.config.minibatch_unit == "column" else 1)
        config = replace(optimizer.cutter.config, global_batch_size=size)
        optimizer.cutter = replace(optimizer.cutter, config=config)
    optimizer.loss.coefficients["entropy"] = coef
    stats = optimizer.optimize(minibatch, 0)
    assert stats.sums["steps"] == 1
    return torch.tensor([stats.sums[name] for name in optimizer.statistics])


@pytest.mark.parametrize("case", CASES)
def test_program_equals_eager_step(case: str) -> None:
    options, arguments = CASES[case]
    eager, fast = (make(options, **copy.deepcopy(arguments)) for _ in range(2))
    batch = prepared(eager, shifted=case == "shifted")
    start = [p.detach().clone() for p in eager.policy.parameters()]
    size = N // 4 if "minibatch_unit" in options else 16
    indices = [torch.arange(i * size, (i + 1) * size).flip(0) for i in range(4)]
    rows = program_steps(fast, prepared(fast, shifted=case == "shifted"), indices)
    for row, index in zip(rows, indices, strict=True):
        expected = eager_step(eager.optimizer, batch, index, eager.entropy_coef)
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)
    for a, b, before in zip(
        eager.policy.parameters(), fast.policy.parameters(), start, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert not torch.equal(a, before)
    one, other = adam_state(eager.optimizer.adamw), adam_state(fast.optimizer.adamw)
    for a, b in zip([*one.first, *one.second], [*other.first, *other.second], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


class Recorded(MinibatchStep):
    """Returns the gradients and statistics instead of a step."""

    def _apply(self, *arguments: Any) -> Any:
        return arguments[2:]


@pytest.mark.parametrize("case", ["clipped", "entropy", "columns"])
def test_programs_of_separate_networks_equal_that_of_both(case: str) -> None:
    """The gradients of one network do not depend on the other's weights."""
    learner = make(CASES[case][0], model={"shared_backbone": False})
    batch, optimizer = prepared(learner), learner.optimizer
    assert optimizer.loss.separate
    arguments = optimizer.loss, *parameter_names(optimizer), batch
    size, state = N // 4 if case == "columns" else 16, adam_state(optimizer.adamw)
    rest = [torch.arange(size), *tree.leaves(batch)]
    settings = torch.cat([torch.zeros(len(ADAMW_SETTINGS)), torch.tensor([0.1])])
    gradients, stats = Recorded(*arguments)(*state.tensors, settings, *rest)
    parts = [
        Gradients(*arguments, part=part)(*state.parameters, settings[-1:], *rest)
        for part in ("actor", "critic")
    ]
    separate = [*parts[0][1:], *parts[1][1:]]
    assert all(torch.equal(x, y) for x, y in zip(separate, gradients, strict=True))
    row = dict(zip(optimizer.statistics, parts[0][0] + parts[1][0], strict=True))
    assert all(torch.equal(row[name], x.float()) for name, x in stats.items())


def test_adamw_settings_equal_torch_bias_corrections() -> None:
    """After 3 steps of the actor and 5 of the critic: bias corrections of steps 4 and 6."""
    learner = make({"adam_betas": (0.9, 0.99), "weight_decay": 0.1})
    options = {"lr": [0.1, 0.2], "steps": [3, 5], "coefficients": [0.3]}
    first = adamw_settings(learner.config, 2, **options)[0].tolist()
    row = dict(zip((*ADAMW_SETTINGS, "entropy"), first, strict=True))
    expected = {"actor_step": 0.1 / (1 - 0.9**4), "critic_step": 0.2 / (1 - 0.9**6)}
    expected |= {"actor_inv": (1 - 0.99**4) ** -0.5, "critic_inv": (1 - 0.99**6) ** -0.5}
    expected |= {"actor_decay": 0.01, "critic_decay": 0.02}
    assert row == pytest.approx(expected | {"entropy": 0.3}, rel=1e-6)


@pytest.mark.parametrize("leaf", ["returns", "advantage", "inputs"])
def test_program_changes_nothing_if_loss_is_not_finite(leaf: str) -> None:
    learner = make()
    batch = prepared(learner)
    for x in tree.leaves(getattr(batch, leaf)):
        x[batch.mask.nonzero()[0]] = torch.nan
    before = copy.deepcopy(learner.optimizer.model.state_dict())
    (stats,) = program_steps(learner, batch, [torch.arange(T * N)])
    assert not stats[-1].isfinite() and learner.optimizer.statistics[-1] == "finite"
    assert all(torch.equal(x, before[k]) for k, x in learner.optimizer.model.state_dict().items())
    state = adam_state(learner.optimizer.adamw)
    assert all(not x.any() for x in (*state.first, *state.second))
