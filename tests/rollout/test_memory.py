"""Rollouts of policies with memory: states, marks of first steps, values of final observations."""

from __future__ import annotations

import pytest
import torch
import toy_envs
from torch import Tensor

from embodied_ppo.core.recurrent_state import MEMORY, START, EpisodeMemory, with_memory
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout.simulation import Rollout

LENGTHS, CLOCK = [2, 3, 5, 4], [False, True, False, True]
T = 7


def recurrent_policy() -> ActorCritic:
    torch.manual_seed(0)
    options = {"hidden": [8], "recurrent": "lstm", "recurrent_size": 4, "shared_backbone": False}
    env = toy_envs.ScriptedEnv(LENGTHS, CLOCK)
    config = loader.load(ModelConfig, options | {"normalize_obs": False})
    return ActorCritic(env.obs_spec, env.action_spec, config)


def rollout(policy: ActorCritic, *, same_step: bool, saves: bool = False) -> Rollout:
    env = toy_envs.ScriptedEnv(LENGTHS, CLOCK, same_step=same_step, saves=saves)
    return Rollout(env, policy, seed=0)


def memory_of(t: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(t.obs, dict)
    return t.obs["obs"], t.obs[MEMORY], t.obs[START]


@pytest.mark.parametrize("same_step", [True, False])
def test_states_values_and_next_values_are_those_of_each_episode(same_step: bool) -> None:
    """Every episode is evaluated again, observation by observation, from a state of zeros."""
    policy = recurrent_policy()
    r = rollout(policy, same_step=same_step)
    first, _ = r.collect(T, update=0, version=0)
    second, _ = r.collect(T, update=1, version=0)
    zero = torch.zeros(1, policy.memory_size)
    for i in range(len(LENGTHS)):
        state = zero
        for t in (first, second):
            observed, memory, start = memory_of(t)
            for row in range(T):
                _, _, step = (int(x) for x in observed[row, i])
                is_first = step == 0
                assert bool(start[row, i]) == is_first
                if is_first:
                    state = zero
                else:
                    torch.testing.assert_close(memory[row, i], state[0], rtol=0, atol=1e-6)
                obs = with_memory(observed[row, i : i + 1], state, torch.tensor([False]))
                decision = policy.act(policy.encode(obs))
                assert decision.memory is not None
                state = decision.memory
                torch.testing.assert_close(t.value[row, i], decision.value[0], rtol=0, atol=1e-6)
                final = observed[row, i].clone()
                final[2] += 1  # the observation after the action, in the same episode
                obs = with_memory(final.unsqueeze(0), state, torch.tensor([False]))
                if t.mask[row, i]:
                    expected = policy.value(policy.encode(obs))[0]
                    torch.testing.assert_close(t.next_value[row, i], expected, rtol=0, atol=1e-6)


def test_evaluating_the_columns_of_a_rollout_gives_its_log_probabilities() -> None:
    policy = recurrent_policy()
    t, _ = rollout(policy, same_step=True).collect(T, update=0, version=0)
    flat = {name: x.flatten(0, 1) for name, x in t.obs.items()}  # pyright: ignore
    inputs = {name: x.unflatten(0, (T, -1)) for name, x in policy.encode(flat).items()}
    evaluated = policy.evaluate_columns(inputs, t.action, t.replay)
    torch.testing.assert_close(evaluated.log_prob, t.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(evaluated.value, t.value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("saves", [True, False])
def test_saved_rollout_continues_bit_for_bit(saves: bool) -> None:
    policy = recurrent_policy()
    r = rollout(policy, same_step=True, saves=saves)
    r.collect(T, update=0, version=0)
    state = r.state()
    expected, _ = r.collect(T, update=1, version=0)
    other = rollout(policy, same_step=True, saves=saves)
    other.load_state(state)
    actual, _ = other.collect(T, update=1, version=0)
    for x, y in zip(memory_of(expected), memory_of(actual), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(expected.log_prob, actual.log_prob)


def test_policy_without_memory_reads_plain_observations() -> None:
    obs = torch.ones(3, 2)
    assert EpisodeMemory(toy_envs.CountingPolicy(), 3, torch.device("cpu")).attach(obs) is obs
