"""HistoryEnv against stacks built from the simulator's own steps."""

from __future__ import annotations

import itertools

import pytest
import torch
import toy_envs
from torch import Tensor

from embodied_envs.types import Obs, starts
from embodied_ppo.core.history import PREVIOUS_ACTIONS
from embodied_ppo.rollout.history_env import HistoryEnv

LENGTHS, CLOCK = [2, 3, 5], [False, True, False]
K = 3


def scripted(same_step: bool, saves: bool = False) -> toy_envs.ScriptedEnv:
    return toy_envs.ScriptedEnv(LENGTHS, CLOCK, same_step=same_step, saves=saves)


def values(obs: Obs) -> tuple[Tensor, Tensor]:
    assert isinstance(obs, dict)
    return obs["obs"], obs[PREVIOUS_ACTIONS]


@pytest.mark.parametrize("same_step", [True, False])
def test_observations_are_the_last_ones_of_the_episode(same_step: bool) -> None:
    """The expected stacks are built from lists of the observations and actions of an episode."""
    env, plain = HistoryEnv(scripted(same_step), K), scripted(same_step)
    episodes: list[list[Tensor]] = [[] for _ in LENGTHS]
    taken: list[list[Tensor]] = [[] for _ in LENGTHS]
    obs, raw = env.reset(), plain.reset()
    assert isinstance(raw, Tensor)
    for i in range(3):
        episodes[i] = [raw[i]]

    def check(obs: Obs, raw: Obs) -> None:
        observed, previous = values(obs)
        assert isinstance(raw, Tensor)
        for i in range(3):
            past = [*episodes[i][:-1], raw[i]][-K:]
            zeros = [torch.zeros(3)] * (K - len(past))
            changes = [after - before for before, after in itertools.pairwise(past)]
            assert torch.equal(observed[i], torch.stack([*zeros, *changes, past[-1]]))
            past = taken[i][-(K - 1) :] if K > 1 else []
            zeros = [torch.zeros(1)] * (K - 1 - len(past))
            assert torch.equal(previous[i], torch.stack([*zeros, *past]))

    check(obs, raw)
    for t in range(9):
        action = torch.arange(3.0).unsqueeze(1) + 10 * t
        step, plain_step = env.step(action), plain.step(action)
        for i in range(3):
            taken[i].append(action[i])
        first = starts(plain_step)
        assert isinstance(plain_step.obs, Tensor)
        if plain_step.final_obs is not None:
            assert step.final_obs is not None and isinstance(plain_step.final_obs, Tensor)
            for i in range(3):
                episodes[i].append(plain_step.final_obs[i])
            ended = plain_step.terminated | plain_step.truncated
            whole = {name: x[ended] for name, x in step.final_obs.items()}
            for row, i in enumerate(ended.nonzero().flatten().tolist()):
                assert torch.equal(whole["obs"][row, -1], plain_step.final_obs[i])
                change = plain_step.final_obs[i] - episodes[i][-2]
                assert torch.equal(whole["obs"][row, -2], change)
            for i in range(3):
                episodes[i].pop()
        for i in range(3):
            if first[i]:
                episodes[i], taken[i] = [], []
            episodes[i].append(plain_step.obs[i])
        check(step.obs, plain_step.obs)


def test_state_continues_bit_for_bit() -> None:
    env = HistoryEnv(scripted(True, saves=True), K)
    env.reset()
    for t in range(4):
        env.step(torch.full((3, 1), float(t)))
    state = env.state()
    assert state is not None
    expected = env.step(torch.ones(3, 1))
    other = HistoryEnv(scripted(True, saves=True), K)
    other.reset()
    other.load_state(state)
    actual = other.step(torch.ones(3, 1))
    for name, x in expected.obs.items():
        assert torch.equal(x, actual.obs[name]), name
