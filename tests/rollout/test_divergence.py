"""Environments whose observations or rewards are not finite: masked rows, resets, resuming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import embodied_envs
from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_envs.base.random import env_seeds
from embodied_envs.types import Step, VectorEnv
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout.divergence import DivergenceGuard, DivergenceLog
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.rollout.interleaved_rollouts import InterleavedRollouts
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training.logging import numbers

NAN = math.nan
SEEDS = env_seeds(0, 0, 4)


class Diverging(gymnasium.Env):
    """Counts its steps. Environment 1, of SEEDS[1], diverges in step ``at`` of its first episode.

    ``fault``: obs (the observation is NaN from then on), reward, end (NaN with ``terminated``), or
    reset (the first observation of the second episode).
    """

    observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, fault: str = "obs", at: int = 3, every: bool = False, length: int = 6):
        self.fault, self.at, self.every, self.length = fault, at, every, length
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.number = SEEDS.index(seed)
        self.episode += 1
        self.t = 0
        faulty = self.fault == "reset" and self.number == 1 and self.episode == 2
        return self._obs() * (NAN if faulty else 1.0), {}

    def _obs(self) -> np.ndarray:
        return np.array([self.episode, self.t], dtype=np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert np.isfinite(action).all()
        self.t += 1
        faulty = self.number == 1 and (self.every or self.episode == 1) and self.t >= self.at
        obs = self._obs() * (NAN if faulty and self.fault in ("obs", "end") else 1.0)
        reward = NAN if faulty and self.fault == "reward" else 1.0
        return obs, reward, faulty and self.fault == "end", self.t == self.length, {}


class DivergingVector(SyncVectorEnv):
    """A vector of its own, which cannot reset single environments."""

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        mode = AutoresetMode.NEXT_STEP
        super().__init__([lambda: Diverging(**options)] * num_envs, autoreset_mode=mode)


gymnasium.register("Diverging-v0", Diverging, vector_entry_point=DivergingVector)


def make(seeds: Sequence[int] = SEEDS, chunk: int = 1, **kwargs: Any) -> VectorEnv:
    return embodied_envs.make(
        "Diverging-v0",
        simulator="gymnasium",
        num_envs=len(seeds),
        seeds=list(seeds),
        action_chunk=chunk,
        kwargs=kwargs,
    )


def rollout(env: VectorEnv, **options: Any) -> Rollout:
    torch.manual_seed(0)
    model = options.pop("model", ModelConfig(hidden=(4,)))
    return Rollout(env, ActorCritic(env.obs_spec, env.action_spec, model), **{"seed": 0, **options})


@pytest.mark.parametrize(
    ("mode", "fault"), [("next_step", "obs"), ("same_step", "reward"), ("vector", "end")]
)
def test_a_diverging_environment_is_masked_and_reset(mode: str, fault: str) -> None:
    """Environment 1 diverges in row 2. Its row before is truncated, all others are unchanged."""
    own = {"vectorization_mode": "vector_entry_point"}
    kwargs = own if mode == "vector" else {"autoreset_mode": mode}
    lines: list[str] = []
    r = rollout(make(fault=fault, **kwargs), notice=lines.append)
    t, metrics = r.collect(10, update=3, version=0)
    healthy, _ = rollout(make(fault="none", **kwargs)).collect(10, update=3, version=0)
    assert all(bool(x.isfinite().all()) for x in tree.leaves(t) if x.is_floating_point())
    assert isinstance(t.obs, torch.Tensor) and isinstance(healthy.obs, torch.Tensor)
    others = [0, 2, 3]
    assert torch.equal(t.obs[:, others], healthy.obs[:, others])
    assert torch.equal(t.mask[:, others], healthy.mask[:, others])
    assert torch.equal(t.next_value[:, others], healthy.next_value[:, others])
    assert t.mask[:3, 1].tolist() == [True, True, False]
    assert t.truncated[:3, 1].tolist() == [False, True, False] and not t.terminated.any()
    assert t.next_value[1, 1] == t.value[2, 1], "the successor of row 1 is finite"
    first = 3  # row of the next episode, in simulators without a dummy row
    if mode == "vector" and fault != "end":  # masked until the episode ends, and a dummy row
        assert t.mask[:, 1].tolist() == [True] * 2 + [False] * 5 + [True] * 3
        first = 7
    elif fault == "end" and mode != "same_step":
        first = 4
    assert t.obs[first, 1].tolist() == [2, 0] and bool(t.mask[first, 1])
    # The others end one episode of 6 steps, with a return of 6; the damaged one has no return.
    assert metrics["rollout/episodes"] == 3 + (first + 6 <= 10)
    assert numbers(metrics)["rollout/return"] == 6
    assert metrics["rollout/diverged"] == 1
    name = {"obs": "observation [0]", "reward": "reward", "end": ""}[fault]
    assert len(lines) == 1 and f"{name} is nan in environment 1 (update 4, step 2)" in lines[0]


def test_many_divergences_end_the_run() -> None:
    """One may diverge in any case; above 1 % of the steps, the run ends."""
    r = rollout(make(every=True))
    assert r.collect(5, update=0, version=0)[1]["rollout/diverged"] == 1
    message = r"environment 1 \(update 2, step 0\); 2 of 24 steps diverged.*up to 1%"
    with pytest.raises(TrainingError, match=message):
        r.collect(6, update=1, version=0)


def test_a_group_may_diverge_at_once() -> None:
    """Environments of a group start alike, so that one fault appears in all of them."""
    log = DivergenceLog(DivergenceGuard(make()), 0, 1, group_size=2)
    diverged = torch.zeros(6, 4, dtype=torch.bool)
    diverged[2, :2] = True
    assert log.count(diverged, torch.zeros(6, 4, 1), 0) is not None
    diverged[3, 2] = True
    with pytest.raises(TrainingError, match="3 of 24 steps diverged"):
        log.count(diverged, torch.zeros(6, 4, 1), 1)


@pytest.mark.parametrize("variant", ["history", "recurrent", "chunk"])
def test_resume_repeats_the_resets(variant: str) -> None:
    """The simulator cannot save its state: its actions are replayed."""

    def build() -> Rollout:
        kwargs: dict[str, Any] = {"at": 3}
        env = make(chunk=2 if variant == "chunk" else 1, **kwargs)
        env = HistoryEnv(env, 3) if variant == "history" else env
        model = ModelConfig(hidden=(4,), recurrent="gru" if variant == "recurrent" else None)
        return rollout(env, model=model)

    r = build()
    first = [r.collect(5, update=u, version=0) for u in range(2)]
    assert any("rollout/diverged" in metrics for _, metrics in first)
    state = r.state()
    expected, metrics = r.collect(5, update=2, version=0)
    other, lines = build(), []
    other.load_state(state, notice=lines.append)
    resumed, resumed_metrics = other.collect(5, update=2, version=0)
    assert len(lines) == 1 and "replaying" in lines[0]
    assert all(map(torch.equal, tree.leaves(resumed), tree.leaves(expected)))
    assert resumed_metrics == metrics


def test_stages_and_masked_rows() -> None:
    stages = [
        rollout(make(seeds), stage=i, stages=2) for i, seeds in enumerate([SEEDS[:2], SEEDS[1:3]])
    ]
    _, metrics = InterleavedRollouts(stages).collect(6, update=0, version=0)
    assert metrics["rollout/diverged"] == 2
    env = make()
    guard = DivergenceGuard(env)
    step = env.step if guard.begin(env.reset()) is None else env.step(torch.zeros(4, 1))
    assert isinstance(step, Step)
    mask = torch.tensor([True, True, False, True])
    reward = torch.tensor([1.0, 1.0, NAN, 1.0])
    masked = Step(step.obs, reward, step.terminated, step.truncated, mask)
    checked, divergence = guard.check(masked)
    assert divergence is None and checked.reward.tolist() == [1, 1, 0, 1]


def test_block_check_of_an_accelerator() -> None:
    """There, steps are checked at the end of a rollout: an environment is masked until then."""
    r = rollout(make(fault="obs"))
    r.guard.on_host = False
    t, metrics = r.collect(5, update=0, version=0)
    assert all(bool(x.isfinite().all()) for x in tree.leaves(t) if x.is_floating_point())
    assert t.mask[:, 1].tolist() == [True, True, False, False, False]
    assert metrics["rollout/diverged"] == 1
    state = r.state()
    expected, _ = r.collect(5, update=1, version=0)
    assert expected.mask[:, 1].all()
    other = rollout(make(fault="obs"))
    other.guard.on_host = False
    other.load_state(state)
    resumed, _ = other.collect(5, update=1, version=0)
    assert all(map(torch.equal, tree.leaves(resumed), tree.leaves(expected)))
