"""Tests of evaluation: real simulators, hand-computed intervals, reproducible results."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import embodied_envs
from embodied_envs.adapters import envpool_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.base.errors import EnvError
from embodied_envs.types import Step
from embodied_ppo.core.types import Decision
from embodied_ppo.evaluation import episodes as ev
from embodied_ppo.evaluation.step_numbers import StepNumbers
from embodied_ppo.policies import distributions as dist

# Weights that push the cart to the side to which the pole leans; it falls after about 40 steps.
LEAN = torch.tensor([[0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])


class Linear(nn.Module):
    """Policy with logits or means W s: categorical, or Gaussian with standard deviation 0.1."""

    def __init__(self, weight: torch.Tensor, discrete: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.layer.weight.data.copy_(weight)
        self.frozen = nn.Dropout(0.5).eval()
        self.dropout = nn.Dropout(0.5)
        self.discrete = discrete
        self.observed = 0

    def encode(self, obs: Any) -> Any:
        return obs

    def noise(self, rows: int, generator: torch.Generator | None = None) -> torch.Tensor:
        if self.discrete:
            return dist.categorical_noise((rows, 2), generator)
        return dist.gaussian_noise((rows, 1), generator)

    def act(self, inputs: Any, *, noise: torch.Tensor | None = None) -> Decision:
        assert not torch.is_grad_enabled()
        out = self.dropout(self.layer(inputs))
        if self.discrete:
            action = out.argmax(-1) if noise is None else dist.categorical_sample(out, noise)
        else:
            action = out if noise is None else out + 0.1 * noise
        return Decision(action, torch.zeros(len(out)), torch.zeros(len(out)))

    def evaluate(self, inputs: Any, action: Any, replay: Any) -> Any: ...
    def value(self, inputs: Any) -> Any: ...
    def parameter_groups(self) -> Any: ...
    def units(self) -> Any: ...
    def observe(self, obs: Any, mask: Any) -> None:
        self.observed += 1


def cartpole() -> Linear:
    return Linear(LEAN, discrete=True)


def make_cartpole(seeds: list[int], id: str = "CartPole-v1", **options: Any) -> Any:
    return embodied_envs.make(id, num_envs=len(seeds), seeds=seeds, num_threads=1, **options)


def make_pendulum(seeds: list[int], **options: Any) -> Any:
    return make_cartpole(seeds, "InvertedPendulum-v4", **options)


def make_cheetah(seeds: list[int]) -> Any:
    return make_cartpole(seeds, "HalfCheetah-v4", max_episode_steps=60)


def measure(policy: Linear, make: Any = make_cartpole, **options: Any) -> ev.EvaluationResult:
    return ev.evaluate(policy, make, **({"episodes": 10, "num_envs": 4, "seed": 0} | options))


# -------------------------------------------------------------------------------------- measurement
def test_numbers_are_means_of_the_steps_of_each_episode() -> None:
    """Of Go1Joystick: errors of commands and weighted terms, also as metrics; errors by command."""

    def make(seeds: list[int]) -> Any:
        options = {"max_episode_steps": 7, "kwargs": {"resample_s": 0.04}}
        return embodied_envs.make("Go1Joystick", num_envs=len(seeds), seeds=seeds, **options)

    result = measure(Linear(torch.zeros(12, 48), discrete=False), make, episodes=3, num_envs=2)
    env = make(ev.evaluation_seeds(0, 3))
    env.reset()
    infos = [env.step(torch.zeros(3, 12)).info for _ in range(7)]
    env.close()
    for name in ("error_lin_vel_x", "error_ang_vel_yaw", "tracking_lin_vel"):
        means = torch.stack([info[name] for info in infos]).double().mean(0)
        assert result.numbers()[name] == pytest.approx(means.tolist())
    error = ev.Mean.of(result.numbers()["error_lin_vel_y"])
    assert result.metrics()["eval/error_lin_vel_y"] == error
    assert not {"eval/tracking_lin_vel", "eval/command_lin_vel_x"} & result.metrics().keys()
    commands, errors = (
        torch.stack([info[f"{kind}_lin_vel_y"] for info in infos]) for kind in ("command", "error")
    )
    for i, episode in enumerate(result.episodes):
        rows = episode.tracking["lin_vel_y"]
        assert len(rows) > 1 and sum(count for _, _, count in rows) == 7
        for value, error, count in rows:
            same = commands[:, i].double() == value
            assert int(same.sum()) == count
            assert error == pytest.approx(float(errors[same, i].double().mean()))
    # A step of a diverged world has no error and does not count.
    numbers, one = StepNumbers(2), torch.ones(2)
    for errors in ([0.25, 0.5], [math.nan, 0.25]):
        info = {"command_x": one, "error_x": torch.tensor(errors)}
        numbers.add(Step(one, one, one, one, one, info=info), one.bool())
    assert numbers.tracking(0) == {"x": [(1.0, 0.25, 1)]}
    assert numbers.tracking(1) == {"x": [(1.0, 0.375, 2)]}


def test_episodes_equal_those_of_a_plain_loop() -> None:
    result = measure(cartpole(), episodes=5, num_envs=2, seed=7)
    envpool = envpool_env.load()
    first = (1 << 30) + 7 * ev.EPISODES_PER_SEED
    for i, episode in enumerate(result.episodes):
        env = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[first + i])
        obs, _ = env.reset()
        state = hashlib.sha256(obs[0].astype(np.float32).tobytes()).hexdigest()
        total, length, done = 0.0, 0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(np.array([int(obs[0, 2] > 0)]))
            total += float(reward[0])
            length += 1
            done = bool(terminated[0] or truncated[0])
        assert (episode.index, episode.seed) == (i, first + i)
        assert (episode.return_, episode.length, episode.initial_state) == (total, length, state)
        assert episode.ended == "terminated" and episode.success is None
    assert len(set(result.returns)) > 1, "the returns differ"


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("task", ["discrete", "continuous"])
def test_episodes_depend_neither_on_num_envs_nor_on_their_number(
    task: str, deterministic: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, make = cartpole(), make_cartpole
    if task == "continuous":  # wide products and real-valued returns reveal a changed last bit
        policy = Linear(torch.randn(6, 64, generator=generator) / 8, discrete=False)
        make = make_cheetah
        inner = nn.Linear(17, 64, bias=False)
        inner.weight.data.copy_(torch.randn(64, 17, generator=generator))
        policy.layer = nn.Sequential(inner, nn.Tanh(), policy.layer)
    options = {"deterministic": deterministic, "seed": 3}
    expected = measure(policy, make, episodes=37, num_envs=37, **options).episodes
    assert len({e.return_ for e in expected}) > 2
    for num_envs in (1, 5, 16):
        assert measure(policy, make, episodes=37, num_envs=num_envs, **options).episodes == expected
    assert measure(policy, make, episodes=20, num_envs=8, **options).episodes == expected[:20]


def test_sampling_is_reproducible_and_differs_from_the_mode() -> None:
    sampled = measure(cartpole(), deterministic=False)
    assert sampled == measure(cartpole(), deterministic=False)
    assert sampled.returns != measure(cartpole()).returns
    greedy = measure(cartpole()).episodes
    assert [e.initial_state for e in sampled.episodes] == [e.initial_state for e in greedy]


def test_time_limit_and_termination_are_distinguished() -> None:
    still = Linear(torch.zeros(1, 4), discrete=False)
    result = measure(still, lambda seeds: make_pendulum(seeds, max_episode_steps=5), episodes=4)
    assert {(e.length, e.ended) for e in result.episodes} == {(5, "truncated")}
    assert {e.ended for e in measure(still, make_pendulum, episodes=4).episodes} == {"terminated"}


class SuccessOnly(gymnasium.Env):
    """Episodes with odd seeds succeed; only their info has the flag."""

    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed or 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, True, False, {"success": True} if self.seed % 2 else {}


@pytest.mark.slow
def test_success_and_dictionary_observations() -> None:
    gymnasium.register("SuccessOnly-v0", entry_point=SuccessOnly)  # pyright: ignore[reportArgumentType]
    create = lambda seeds: embodied_envs.make("SuccessOnly-v0", num_envs=len(seeds), seeds=seeds)
    for n in (1, 3):
        result = measure(Linear(torch.zeros(1, 1), False), create, episodes=4, num_envs=n)
        assert result.successes == [False, True, False, True]

    def make(seeds: list[int]) -> Any:
        return embodied_envs.make("FetchReach-v4", num_envs=len(seeds), seeds=seeds, num_threads=1)

    class Reach(Linear):
        def act(self, inputs: Any, *, noise: Any = None) -> Decision:
            away = inputs["desired_goal"] - inputs["achieved_goal"]
            action = torch.cat([away * self.layer.weight[0, 0], away[:, :1] * 0], 1).float()
            return Decision(action, torch.zeros(len(away)), torch.zeros(len(away)))

    gains = (10.0, 0.0)
    good, idle = (measure(Reach(torch.full((1, 1), x), False), make, episodes=4) for x in gains)
    assert good.successes == [True] * 4 and good.metrics()["eval/success"].value == 1.0
    assert idle.successes is not None and sum(idle.successes) < 4
    assert good.distinct_initial_states == 4
    assert [e.initial_state for e in good.episodes] == [e.initial_state for e in idle.episodes]


def test_endless_episode_is_an_error() -> None:
    def make(seeds: list[int]) -> Any:
        env = make_cartpole(seeds)
        env.max_episode_steps = 3
        return env

    message = r"CartPole-v1: the episode with seed 1073741824 has not ended after 4 steps"
    with pytest.raises(EnvError, match=message):
        measure(cartpole(), make)


def test_diverging_episodes_are_counted_and_have_no_return() -> None:
    """Of 6 episodes in blocks of 4, one has a reward that is not finite in its first step."""

    class Broken(envpool_env.EnvPoolEnv):
        def step(self, action: torch.Tensor) -> Step:
            step = super().step(action)
            if self.num_envs == 4:
                step.reward[1] = math.nan
                assert isinstance(step.obs, torch.Tensor)
                step.obs[1] = math.inf
            return step

    def make(seeds: list[int]) -> Any:
        return Broken("CartPole-v1", AdapterOptions(num_envs=len(seeds), seeds=seeds))

    result = measure(cartpole(), make, episodes=6, skip_diverged=True)
    expected = [e for e in measure(cartpole(), episodes=6).episodes if e.index != 1]
    assert list(result.episodes) == expected and result.diverged == 1
    assert result.metrics()["eval/diverged"] == 1


# --------------------------------------------------------------------------------------- statistics
def test_wilson_interval_against_hand_computed_numbers() -> None:
    # 8 of 10, z² = 3.841459: centre = (0.8 + 3.841459/20) / 1.3841459 = 0.992073/1.3841459 =
    # 0.716740, half = 1.959964 √(0.8·0.2/10 + 3.841459/400) / 1.3841459 = 1.959964 √0.02560365 /
    # 1.3841459 = 0.226577
    assert ev.wilson_interval(8, 10) == pytest.approx((0.490162, 0.943317), abs=2e-6)
    # 0 of 10: from 0 to z²/(n + z²) = 3.841459/13.841459 = 0.277533; 10 of 10 is symmetric
    assert ev.wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert ev.wilson_interval(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    assert ev.wilson_interval(0, 10)[0] == 0.0 and ev.wilson_interval(10, 10)[1] == 1.0
    assert ev.wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="11 successes of 10"):
        ev.wilson_interval(11, 10)


def test_mean_interval_against_hand_computed_numbers() -> None:
    # 1 2 3 4: mean 2.5, s = √(5/3) = 1.290994, t(0.975, 3) = 3.182446, half = 3.182446·1.290994/2 =
    # 2.054261
    assert ev.mean_interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((0.445739, 4.554261), abs=1e-6)
    assert ev.mean_interval([1.0]) is None
    assert ev.mean_interval([5.0, 5.0, 5.0]) == (5.0, 5.0)
    assert ev.deviation([7.0]) == 0.0


@pytest.mark.parametrize(
    ("freedom", "expected"),  # 97.5 % quantiles
    [(1, 12.70620), (2, 4.302653), (3, 3.182446), (9, 2.262157), (99, 1.984217)]
    + [(30, 2.042272), (10_000, 1.960201)],
)
def test_t_quantile_against_printed_tables(freedom: int, expected: float) -> None:
    assert ev.t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-6)
