"""Action chunks compared with single steps of the same simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.adapters.action_chunking import ChunkedActions
from embodied_ppo.ppo import advantages
from embodied_ppo.rollout.simulation import Rollout


def chunked(
    lengths: list[int], clock: list[bool], chunk: int, *, same_step: bool
) -> ChunkedActions:
    """Return scripted episodes of these lengths; ``clock``: the time limit ends them."""
    return ChunkedActions(toy_envs.ScriptedEnv(lengths, clock, same_step=same_step), chunk)


@pytest.mark.parametrize("same_step", [True, False], ids=["same_step", "next_step"])
def test_episode_end_inside_a_chunk_skips_remaining_actions(same_step: bool) -> None:
    """Chunks of 3; episode lengths 2, 4 (truncated), 7, and 3, which ends with the chunk."""
    env = chunked([2, 4, 7, 3], [False, True, False, False], 3, same_step=same_step)
    assert env.action_spec.size == 3 and env.reset().shape == (4, 3)  # pyright: ignore[reportAttributeAccessIssue]
    step = env.step(torch.zeros(4, 3, 1))
    # rewards are 100 i + 10 episode + step
    assert step.reward.tolist() == [[1, 2, 0], [101, 102, 103], [201, 202, 203], [301, 302, 303]]
    assert step.executed is not None and step.executed.sum(1).tolist() == [2, 3, 3, 3]
    assert step.terminated.tolist() == [True, False, False, True]
    assert not step.truncated.any() and step.mask.all()
    assert step.final_obs is not None
    assert step.final_obs[0].tolist() == [0, 0, 2] and step.final_obs[3].tolist() == [3, 0, 3]
    episode_and_step = step.obs[:, 1:].tolist()
    assert episode_and_step[1:3] == [[0, 3], [0, 3]], "these episodes continue"
    assert [episode_and_step[i][1] for i in (0, 3)] == [0, 0], "these environments start the next"
    step = env.step(torch.zeros(4, 3))
    assert step.reward[1].tolist() == [104, 0, 0]
    assert step.truncated.tolist() == [False, True, False, False]
    assert step.executed is not None and step.executed[1].tolist() == [True, False, False]
    assert step.final_obs is not None and step.final_obs[1].tolist() == [1, 0, 4]


def test_rollout_discounts_within_and_between_chunks() -> None:
    """A decision of k steps has the reward Σ γ^i r_i, and its next value is discounted by γ^k."""
    env = chunked([2, 5], [False, True], 3, same_step=True)

    class Policy(toy_envs.CountingPolicy):
        def noise(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
            return torch.randn(rows, 3, generator=generator)

    policy: Any = Policy()
    rollout = Rollout(env, policy, seed=0, gamma=0.5)
    t, metrics = rollout.collect(2, update=0, version=0)
    assert t.steps is not None and t.steps.tolist() == [[2, 3], [2, 2]]
    assert t.reward[:, 1].tolist() == [101 + 0.5 * 102 + 0.25 * 103, 104 + 0.5 * 105]
    assert t.truncated[:, 1].tolist() == [False, True]
    assert t.terminated[:, 0].tolist() == [True, True]
    assert t.next_value[1, 1].item() == 1005.5, "V of the final observation, episode 0 step 5"
    adv, _ = advantages.gae(
        t.reward,
        t.value,
        t.next_value,
        t.terminated,
        t.truncated,
        t.mask,
        gamma=0.5,
        gae_lambda=1.0,
        steps=t.steps,
    )
    # environment 1: r0 + γ r1 + γ² r2 + γ³ r3 + γ⁴ r4 + γ⁵ V - V(s0), by hand
    expected = sum(0.5**i * (101 + i) for i in range(5)) + 0.5**5 * 1005.5 - 1000.5
    assert adv[0, 1].item() == pytest.approx(expected, rel=1e-6)
    returns = [e[0] for e in rollout.episodes.finished]
    assert returns[0] == 1 + 2 and returns[-1] == 101 + 102 + 103 + 104 + 105, "undiscounted"
    assert [e[1] for e in rollout.episodes.finished][-1] == 5 and metrics["rollout/episodes"] == 3


@pytest.mark.parametrize("id", ["HalfCheetah-v4", "toy_envs:Balance"])
def test_single_environments_restart_inside_a_chunk(id: str) -> None:
    """The executed steps of each episode add up to the time limit."""
    options: dict[str, Any] = {"num_envs": 3, "seeds": [1, 2, 3], "max_episode_steps": 7}
    env = embodied_envs.make(id, **options, action_chunk=3)
    env.reset()
    lengths = torch.zeros(3, dtype=torch.int64)
    for _ in range(12):
        step = env.step(torch.zeros(3, env.action_spec.size))  # pyright: ignore[reportAttributeAccessIssue]
        assert step.executed is not None
        lengths += step.executed.sum(1)
        ended = step.terminated | step.truncated
        assert (lengths[ended] == 7).all() and (lengths <= 7).all()
        lengths[ended] = 0
