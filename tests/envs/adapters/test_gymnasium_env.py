"""Nothing is shared with environments that change what they have received and returned."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import embodied_envs
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError, TrainingError


class Reusing(gymnasium.Env):
    """Episodes of 3 steps; observations are (episode, step, goal), the reward is the action.

    All environments return the same buffer, actions are halved in place, and the infos of an
    episode are changed by the next reset.
    """

    observation_space = spaces.Dict({"a": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
    buffer = np.zeros(3, np.float32)

    def __init__(self, goals: list[int], discrete: bool = False) -> None:
        self.action_space = spaces.Discrete(99) if discrete else spaces.Box(-np.inf, np.inf, (1,))
        self.goal, self.episode, self.step_number = float(goals.pop()), -1, 0
        self.info: dict[str, Any] = {"success": np.zeros(1, bool)}

    def result(self) -> dict[str, np.ndarray]:
        self.buffer[:] = self.episode, self.step_number, self.goal
        return {"a": self.buffer}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.step_number = self.episode + 1, 0
        self.info["success"][:] = False
        return self.result(), self.info

    def step(self, action: Any) -> Any:
        self.step_number += 1
        reward = float(np.sum(action))
        if isinstance(action, np.ndarray):
            action *= 0.5
        self.info["success"][:] = self.step_number == 3
        return self.result(), reward, False, self.step_number == 3, self.info


class ReusingVector(gymnasium.vector.VectorEnv):
    """Environments of the class above whose results are the buffers of the vector."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self, num_envs: int, goals: list[int], discrete: bool = False, max_episode_steps: int = 0
    ) -> None:
        self.envs = [Reusing([*goals], discrete) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.single_observation_space = Reusing.observation_space
        self.single_action_space = self.envs[0].action_space
        self.obs, self.last = (np.zeros((num_envs, 3), np.float32) for _ in range(2))
        self.rewards = np.zeros(num_envs, np.float32)
        self.ended, self.never = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        goals.clear()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        for row, env in zip(self.obs, self.envs, strict=True):
            row[:] = env.reset()[0]["a"]
        return {"a": self.obs}, {}

    def step(self, actions: Any) -> Any:
        self.rewards[:] = actions.reshape(self.num_envs)
        actions //= 2
        for i, env in enumerate(self.envs):
            obs, _, _, self.ended[i], _ = env.step(0)
            self.obs[i] = obs["a"]
            if self.ended[i]:
                self.last[i] = obs["a"]
                self.obs[i] = env.reset()[0]["a"]
        infos = {"final_obs": {"a": self.last}, "final_info": {"success": self.ended}}
        return {"a": self.obs}, self.rewards, self.never, self.ended, infos


gymnasium.register("test/Reusing-v0", Reusing, vector_entry_point=ReusingVector)


@pytest.mark.filterwarnings("ignore:.*share an object")
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"vectorization_mode": "sync", "vector_kwargs": {"copy": False}},
        {"vectorization_mode": "async", "autoreset_mode": "same_step"},
        {"vectorization_mode": "vector_entry_point"},
    ],
    ids=lambda kwargs: "-".join(map(str, kwargs.values())),
)
def test_nothing_is_shared_with_the_environment(kwargs: dict[str, Any], discrete: bool) -> None:
    goals = [5, 7]
    env = embodied_envs.make(
        "test/Reusing-v0",
        num_envs=2,
        seeds=[0, 1],
        kwargs={"goals": goals, "discrete": discrete, **kwargs},
    )
    for _ in range(2):
        env.restart([2, 3])
        results: list[Any] = [env.reset()]
        actions = [torch.tensor([t + 1, t + 2]) for t in range(7)]
        actions = actions if discrete else [x.float().view(2, 1) for x in actions]
        given = [x.clone() for x in actions]
        copies = [tree.map(torch.clone, results[0])]
        for action in actions:
            results.append(env.step(action))
            copies.append(tree.map(torch.clone, results[-1]))
        assert all(map(torch.equal, actions, given))
        for result, copy in zip(results, copies, strict=True):
            pairs = zip(tree.leaves(result), tree.leaves(copy), strict=True)
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)
        rows: list[Any] = []  # the successors of environment 0
        for t, step in enumerate(results[1:]):
            if step.mask.all():
                ended = bool(step.truncated[0]) and step.final_obs is not None
                last = (step.final_obs if ended else step.obs)["a"]
                rows.append(last[0].tolist())
                assert torch.equal(last[0], last[1])
                assert step.reward.tolist() == [t + 1, t + 2]
                assert step.success is None or torch.equal(step.success, step.truncated)
        assert rows[:5] == [[0, 1, 7], [0, 2, 7], [0, 3, 7], [1, 1, 7], [1, 2, 7]]
    env.close()
    assert goals == [5, 7]


class Rewarding(gymnasium.Env):
    """Returns a reward and an end of any type."""

    observation_space = action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, reward: Any, end: Any = False) -> None:
        self.reward, self.end = reward, end

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), self.reward, self.end, False, {}


gymnasium.register("test/Rewarding-v0", Rewarding, disable_env_checker=True)


class Observing(gymnasium.Env):
    """The second observation is ``second``."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        {"cam/x": spaces.Box(-1, 1, (2,)), "s": spaces.Dict({"q/v": spaces.Box(-1, 1, (1,))})}
    )

    def __init__(self, second: Any) -> None:
        self.second = second

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs = {"cam/x": np.ones(2, np.float32), "s": {"q/v": np.zeros(1, np.float32)}}
        return obs if self.second == "older" else (obs, {})

    def step(self, action: Any) -> Any:
        result = self.second, 0.0, False, False, {}
        return result[1:] if self.second == "old" else result


gymnasium.register("test/Observing-v0", Observing, disable_env_checker=True)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, r"cam/x of Observing is NoneType, its space \[2\]"),
        ({"cam/x": np.ones((1, 2)), "s": {"q/v": np.ones(1)}}, r"is \[1, 2\], its space \[2\]"),
        ({"cam/x": np.ones(2), "s": {}}, "s/q/v of Observing is NoneType"),
        ("old", r"return .* from step\(\): .* \(expected 5, got 4\)"),
        ("older", r"return \(observation, info\) from reset\(\): info is 's'"),
    ],
)
def test_an_observation_of_another_shape_is_named(second: Any, message: str) -> None:
    """Names of observations may contain a slash."""
    env = embodied_envs.make("test/Observing-v0", num_envs=1, seeds=[0], kwargs={"second": second})
    with pytest.raises(EnvError, match=message):
        obs: Any = env.reset()
        assert {name: x[0].tolist() for name, x in obs.items()} == {"cam/x": [1, 1], "s/q/v": [0]}
        env.step(torch.zeros(1, dtype=torch.int64))


def reward_of(reward: Any, end: Any = False) -> list[float]:
    kwargs = {"reward": reward, "end": end}
    env = embodied_envs.make("test/Rewarding-v0", num_envs=1, seeds=[0], kwargs=kwargs)
    env.reset()
    return env.step(torch.zeros(1, 1)).reward.tolist()


def test_a_reward_is_one_number_and_an_end_a_flag() -> None:
    for reward in ([0.5], torch.tensor(0.5)):
        assert reward_of(reward) == [0.5]
    for reward in (None, np.zeros(2)):
        with pytest.raises(EnvError, match="reward"):
            reward_of(reward)
    assert reward_of(0.5, np.array([1])) == [0.5]
    for end in (None, "False", -0.3):
        with pytest.raises(EnvError, match="return True or False as terminated"):
            reward_of(0.5, end)


class Ending(Rewarding):
    """Ends its process."""

    def step(self, action: Any) -> Any:
        os._exit(3)


gymnasium.register("test/Ending-v0", Ending, disable_env_checker=True)


@pytest.mark.parametrize(("is_killed", "call"), [(False, "step"), (True, "step"), (True, "reset")])
def test_the_end_of_a_process_is_named(is_killed: bool, call: str) -> None:
    kwargs = {"reward": 0.0, "vectorization_mode": "async"}
    env: Any = embodied_envs.make("test/Ending-v0", num_envs=2, seeds=[0, 1], kwargs=kwargs)
    env.reset()
    for process in env._env.unwrapped.processes if is_killed else ():
        process.kill()
        process.join()
    with pytest.raises(TrainingError, match=rf"Ending-v0: {call}\(\): a process .* has ended"):
        env.step(torch.zeros(2, 1)) if call == "step" else env.reset()
    env.close()  # without an error that would replace the first one


def test_mask_in_info_is_named_as_not_read() -> None:
    """Taxi returns info["action_mask"]."""
    with pytest.warns(UserWarning, match="action_mask"):
        env = embodied_envs.make("Taxi-v4", num_envs=2, seeds=[0, 1], simulator="gymnasium")
        env.reset()
    env.close()
