"""Tests of what happens to a rollout before its batch: values of lagged experience."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core.types import Trajectory
from embodied_ppo.ppo.preparation import replace_values
from tests.ppo.test_robot_actor import N, T, experience, full, make

CORRECTED: dict[str, Any] = {"off_policy_correction": "token", "gae_lambda": 0.9}


def successors(t: Trajectory, value: Tensor) -> list[list[float]]:
    """Return V' of [T, N] rows in float64, row by row."""
    new, old, following = (x.double().tolist() for x in (value, t.value, t.next_value))
    ended = (t.terminated | t.truncated).tolist()
    for row in range(len(new)):
        for i in range(len(new[0])):
            known = row + 1 < len(new) and not ended[row][i]
            source = row + 1 if known else row  # the observation after an end is not stored
            following[row][i] += new[source][i] - old[source][i]
    return following


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-5
    )


def test_replaced_values_against_a_reference() -> None:
    t = full(experience(make()))
    value = t.value + torch.randn(T, N, generator=torch.Generator().manual_seed(1))
    assert (t.terminated | t.truncated).any()
    expected = successors(t, value)
    close(replace_values(t, value).next_value, expected)

    # Reward groups [T, N, G] share the ends.
    groups = replace(
        t, value=torch.stack([t.value] * 2, -1), next_value=torch.stack([t.next_value] * 2, -1)
    )
    result = replace_values(groups, torch.stack([value, t.value], -1))
    close(result.next_value[..., 0], expected)
    assert torch.equal(result.next_value[..., 1], t.next_value)

    # The actions of chunks [T, N, 2] follow each other as [2T, N] rows do.
    def chunks(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 2)).transpose(1, 2)

    names = ("value", "next_value", "terminated", "truncated", "mask")
    chunked = replace(t, **{name: chunks(getattr(t, name)) for name in names})
    result = replace_values(chunked, chunks(value))
    close(result.next_value.transpose(1, 2).flatten(0, 1), expected)


@pytest.mark.parametrize("correction", ["token", None])
def test_lagged_rollout_has_values_of_the_newest_critic(correction: str | None) -> None:
    learner = make({**CORRECTED, "off_policy_correction": correction})
    t = full(experience(learner))
    learner.update(full(experience(learner, seed=1)), update=0)
    lagged: list[Any] = []
    learner.record = lambda t, batch, update: lagged.append(batch)
    newest = learner.policy.value(learner.policy.encode(tree.flatten_time(t).obs))
    assert (newest - t.value.flatten()).abs().max() > 1e-3
    learner.update(t, update=1)  # version 0 acted
    (batch,) = lagged
    if correction is None:
        assert torch.equal(batch.value, t.value.flatten())
    else:
        torch.testing.assert_close(batch.value, newest)
        reference = make({**CORRECTED, "off_policy_correction": None})
        replaced = replace_values(t, newest.view(T, N))
        close(batch.returns, reference.prepare(replaced)[0].returns.double().tolist())


def test_correction_without_lag_changes_no_value() -> None:
    batches = []
    for options in (CORRECTED, {**CORRECTED, "off_policy_correction": None}):
        learner = make(options)
        learner.record = lambda t, batch, update: batches.append(batch)
        learner.update(experience(learner, noise=0.3), update=0)
    for name in ("value", "advantage", "returns"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
