"""Values normalised for each task: statistics, and outputs that keep their values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from embodied_envs.types import ArraySpec, Box
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.popart import SMALLEST_STD, PopArt
from embodied_ppo.ppo import advantages


def test_two_updates_by_hand() -> None:
    head = nn.Linear(1, 1, dtype=torch.float64)
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    popart, task = PopArt(1, rate=0.25), torch.zeros(2, 1, dtype=torch.int64)
    mask = torch.ones(2, 1, dtype=torch.bool)
    # The first rollout sets mean(R) = 2 and mean(R²) = 5: σ = 1, w = 1, b = (0 + 0 − 2)/1.
    popart.update(head, torch.tensor([[1.0], [3.0]]), task, mask)
    assert (float(popart.mean), float(popart.std())) == (2.0, 1.0)
    assert (head.weight.item(), head.bias.item()) == (1.0, -2.0)
    # β = 1/2: μ = (2 + 6)/2 = 4, q = (5 + 36)/2 = 20.5, σ² = 4.5, w = 1/σ, b = (−2 + 2 − 4)/σ.
    popart.update(head, torch.full((2, 1), 6.0), task, mask)
    std = math.sqrt(4.5)
    assert float(popart.mean) == 4.0 and float(popart.std()) == pytest.approx(std)
    assert head.weight.item() == pytest.approx(1 / std)
    assert head.bias.item() == pytest.approx(-4 / std)
    # From the fifth rollout on β is the rate.
    for _ in range(2):
        popart.update(head, torch.full((2, 1), 4.0), task, mask)
    popart.update(head, torch.full((2, 1), 8.0), task, mask)
    assert float(popart.mean) == pytest.approx(0.75 * 4.0 + 0.25 * 8.0)


def test_random_updates_equal_a_loop_in_float64() -> None:
    torch.manual_seed(0)
    head, popart, features = nn.Linear(3, 4), PopArt(4, 0.3), torch.randn(50, 3)
    one_hot = torch.eye(4)[torch.arange(50) % 4]
    mean, square, seen = [0.0] * 4, [1.0] * 4, [0] * 4
    for update in range(6):
        task = torch.randint(3, (7, 5))  # the last task has no samples
        returns = torch.randn(7, 5) * 10.0 ** task.float() + update
        mask = torch.rand(7, 5) > 0.3
        before = popart(head(features), one_hot, normalized=False)
        popart.update(head, torch.where(mask, returns, torch.nan), task, mask)
        after = popart(head(features), one_hot, normalized=False)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-4)
        normalized = popart(head(features), one_hot, normalized=True)
        torch.testing.assert_close(popart.denormalize(normalized, torch.arange(50) % 4), after)
        for k in range(3):
            values = [
                float(r)
                for r, t, m in zip(returns.flatten(), task.flatten(), mask.flatten(), strict=True)
                if m and t == k
            ]
            seen[k] += 1
            beta = max(0.3, 1 / seen[k])
            mean[k] += beta * (math.fsum(values) / len(values) - mean[k])
            square[k] += beta * (math.fsum(v * v for v in values) / len(values) - square[k])
    assert popart.mean.tolist() == pytest.approx(mean)
    assert popart.std().tolist() == pytest.approx(
        [max(SMALLEST_STD, math.sqrt(q - m * m)) for m, q in zip(mean, square, strict=True)]
    )


def test_equal_returns_do_not_divide_by_zero() -> None:
    popart = PopArt(1, 0.5)
    zeros = torch.zeros(2, 2)
    popart.update(nn.Linear(2, 1), zeros, zeros.long(), zeros == 0)
    assert float(popart.std()) == SMALLEST_STD
    popart.update(nn.Linear(2, 1), zeros + 1e4, zeros.long(), zeros == 0)
    popart.square.copy_(popart.mean.square())
    assert float(popart.std()) == pytest.approx(5.0)  # 0.001 of the mean


def test_policy_acts_with_values_and_learns_normalised_ones() -> None:
    torch.manual_seed(0)
    spec = {"x": ArraySpec((4,)), "task": ArraySpec((2,))}
    policy = ActorCritic(
        spec, Box((-1.0,), (1.0,)), ModelConfig(hidden=(8,)), popart=PopArt(2, 0.1)
    )
    task = torch.arange(6) % 2
    inputs = policy.encode({"x": torch.randn(6, 4), "task": torch.eye(2)[task]})
    decision = policy.act(inputs, noise=torch.randn(6, 1))
    assert policy.popart is not None and policy.value_head is not None
    returns = torch.randn(5, 6) * torch.tensor([1.0, 30.0])[task]
    mask = torch.ones(5, 6, dtype=torch.bool)
    policy.popart.update(policy.value_head, returns, task.expand(5, 6), mask)
    torch.testing.assert_close(policy.value(inputs), decision.value)
    learned = policy.evaluate(inputs, decision.action, decision.replay).value
    torch.testing.assert_close(learned, policy.popart.normalize(decision.value, task))
    popart = policy.bfloat16().popart
    assert popart is not None and popart.mean.dtype == torch.float64


def test_advantages_are_standardised_within_each_task() -> None:
    advantage = torch.tensor([[1.0, 100.0, 300.0], [3.0, 200.0, 7.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    result = advantages.normalize_tasks(advantage, mask, torch.tensor([[0, 1, 1], [0, 1, 1]]))
    # 1 and 3 have the unbiased deviation √2; 100, 200 and 300 have 100.
    expected = [[-(0.5**0.5), -1.0, 1.0], [0.5**0.5, 0.0, 0.0]]
    torch.testing.assert_close(torch.where(mask, result, 0.0), torch.tensor(expected))
