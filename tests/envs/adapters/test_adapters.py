"""EnvPool and Gymnasium adapters: episode ends, seeds, actions, specs, images and errors."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

import embodied_envs
from embodied_envs.adapters import envpool_env
from embodied_envs.adapters.actions import mapper
from embodied_envs.checks import check_env
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, Discrete, EnvError, Step, VectorEnv


def make(id: str, n: int = 2, **options: Any) -> VectorEnv:
    return embodied_envs.make(id, num_envs=n, **{"seeds": list(range(n)), **options})


def random_actions(env: VectorEnv, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    spec = env.action_spec
    if isinstance(spec, Discrete):
        return [torch.randint(spec.n, (env.num_envs,), generator=generator) for _ in range(steps)]
    return [torch.rand(env.num_envs, spec.size, generator=generator) * 2 - 1 for _ in range(steps)]


def rollout(env: VectorEnv, steps: int) -> list[Any]:
    """Return the first observation, then the results of ``steps`` random actions."""
    return [env.reset(), *(env.step(action) for action in random_actions(env, steps))]


def are_equal(a: list[Any], b: list[Any]) -> bool:
    """Return whether all tensors of two rollouts are equal bit for bit."""
    return all(
        all(torch.equal(x, y) for x, y in zip(tree.leaves(u), tree.leaves(v), strict=True))
        for u, v in zip(a, b, strict=True)
    )


# ------------------------------------------------------------------------------------ episode ends
@pytest.mark.parametrize("simulator", ["envpool", "gymnasium"])
def test_each_episode_end_is_followed_by_one_masked_row(simulator: str) -> None:
    env = make("InvertedPendulum-v4", 3, simulator=simulator, max_episode_steps=5)
    env.reset()
    ended = torch.zeros(3, dtype=torch.bool)
    counts = {"terminated": 0, "truncated": 0, "masked": 0}
    for action in random_actions(env, 60):
        step = env.step(action)
        assert torch.equal(step.mask, ~ended)
        assert not (
            step.reward[ended].any() or step.terminated[ended].any() or step.truncated[ended].any()
        )
        assert step.final_obs is None
        ended = step.terminated | step.truncated
        counts["terminated"] += int(step.terminated.sum())
        counts["truncated"] += int(step.truncated.sum())
        counts["masked"] += int((~step.mask).sum())
    assert min(counts.values()) > 0
    assert counts["terminated"] + counts["truncated"] - int(ended.sum()) == counts["masked"]


@pytest.mark.parametrize(
    ("simulator", "kwargs"),
    [("envpool", {}), ("gymnasium", {}), ("gymnasium", {"autoreset_mode": "same_step"})],
)
def test_last_observation_is_the_true_successor(simulator: str, kwargs: dict[str, Any]) -> None:
    """The same seeds and actions lead to the same state with and without a limit of 4 steps."""
    limited = make("HalfCheetah-v5", simulator=simulator, kwargs=kwargs, max_episode_steps=4)
    unlimited = make("HalfCheetah-v5", simulator=simulator, kwargs=kwargs)
    a, b = rollout(limited, 4)[-1], rollout(unlimited, 4)[-1]
    assert a.truncated.all() and not b.truncated.any()
    assert torch.equal(a.final_obs if a.final_obs is not None else a.obs, b.obs)
    if a.final_obs is not None:  # then obs is the first observation of the next episode
        assert not torch.equal(a.obs, b.obs)


def test_envpool_adapter_equals_envpool_step() -> None:
    """The adapter reads EnvPool's arrays directly; they equal those of ``pool.step``."""
    options = {"num_envs": 3, "seed": [5, 6, 7], "max_episode_steps": 6, "num_threads": 1}
    for id in ("InvertedPendulum-v4", "FetchReach-v4"):
        env: Any = make(id, 3, seeds=[5, 6, 7], max_episode_steps=6, num_threads=2)
        pool = envpool_env.load().make_gymnasium(id, **options)
        low, high = (
            np.array(x, dtype=np.float32) for x in (env.action_spec.low, env.action_spec.high)
        )
        raw: Any = pool.reset()[0]
        obs: Any = env.reset()
        for action in random_actions(env, 20):
            actual, expected = (x if isinstance(x, dict) else {"": x} for x in (obs, raw))
            for name in expected:
                assert np.array_equal(expected[name].astype(np.float32), actual[name].numpy())
            raw, reward, terminated, truncated, info = pool.step(
                action.numpy() * (high - low) / 2 + (high + low) / 2
            )
            step = env.step(action)
            obs = step.obs
            assert np.array_equal(reward, step.reward.numpy())
            assert np.array_equal(terminated, step.terminated.numpy())
            assert np.array_equal(truncated, step.truncated.numpy())
            assert np.array_equal(info["elapsed_step"] != 0, step.mask.numpy())
            if step.success is not None:
                assert np.array_equal(
                    (info["is_success"] != 0) & (info["elapsed_step"] != 0), step.success.numpy()
                )


def test_rewards_of_envpool_reset_rows_are_dropped() -> None:
    """dm_control tasks return the last reward again on the row that only resets."""
    env = make("CheetahRun-v1", max_episode_steps=4)
    steps = rollout(env, 5)
    assert steps[4].truncated.all() and (steps[4].reward > 0).any()
    assert not steps[5].mask.any() and not steps[5].reward.any()


def test_reset_inside_an_episode_starts_a_new_one() -> None:
    env = make("InvertedPendulum-v4", max_episode_steps=5)
    rollout(env, 3)
    steps = rollout(env, 5)
    assert [bool(step.truncated.any()) for step in steps[1:5]] == [False] * 4
    assert steps[1].mask.all()


def test_autoreset_modes_give_equal_episodes() -> None:
    """With a policy of the observation alone, rows shift by the masked ones; episodes are equal."""
    episodes_of = {}
    for mode in ("next_step", "same_step"):
        env = make(
            "CartPole-v1",
            3,
            simulator="gymnasium",
            max_episode_steps=20,
            kwargs={"autoreset_mode": mode},
        )
        obs: Any = env.reset()
        episodes: list[list[Any]] = []
        current: list[list[Any]] = [[] for _ in range(3)]
        for _ in range(120):
            action = (obs[:, 0] + obs[:, 2] > 0).long()
            step = env.step(action)
            if mode == "same_step":
                assert step.mask.all()
            last = obs if step.final_obs is None else step.final_obs
            for i in step.mask.nonzero().flatten().tolist():
                current[i] += [*obs[i].tolist(), int(action[i]), float(step.reward[i])]
                if step.terminated[i] or step.truncated[i]:
                    final = (step.obs if step.final_obs is None else last)[i]
                    episodes.append([i, *current[i], *final.tolist(), bool(step.terminated[i])])
                    current[i] = []
            obs = step.obs
        for i in range(3):
            episodes_of[mode, i] = [episode for episode in episodes if episode[0] == i]
    for i in range(3):
        n = len(episodes_of["next_step", i])
        assert 4 <= n <= len(episodes_of["same_step", i])
        assert episodes_of["next_step", i] == episodes_of["same_step", i][:n]


# -------------------------------------------------------------------------------------------- seeds
@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("HalfCheetah-v4", {}),
        ("Pong-v5", {}),
        ("CartPole-v1", {}),
        ("CartPole-v1", {"simulator": "gymnasium"}),
    ],
)
def test_results_depend_on_seeds_only(id: str, options: dict[str, Any]) -> None:
    env = make(id, seeds=[3, 4], max_episode_steps=8, **options)
    first = rollout(env, 12)
    env.restart([3, 4])
    assert are_equal(first, rollout(env, 12))
    env.restart([8, 9])
    assert not are_equal(first, rollout(env, 12))
    env.restart([8, 9])
    env.restart([3, 4])
    assert are_equal(first, rollout(env, 12))


def test_number_of_threads_does_not_change_results() -> None:
    runs = [
        rollout(make("HalfCheetah-v4", 5, num_threads=n, max_episode_steps=8), 20)
        for n in (1, 2, 5)
    ]
    assert are_equal(runs[0], runs[1]) and are_equal(runs[0], runs[2])


@pytest.mark.parametrize("simulator", ["envpool", "gymnasium"])
def test_results_depend_on_the_seed_and_not_on_the_index(simulator: str) -> None:
    """Environments 0 and 2 with the same seed and actions return the same observations."""
    a = make("InvertedPendulum-v4", 3, seeds=[9, 1, 2], simulator=simulator, max_episode_steps=4)
    b = make("InvertedPendulum-v4", 3, seeds=[1, 2, 9], simulator=simulator, max_episode_steps=4)
    assert torch.equal(a.reset()[0], b.reset()[2])
    for t in range(10):
        action = torch.full((3, 1), 0.1 * t)
        assert torch.equal(a.step(action).obs[0], b.step(action).obs[2])


# ------------------------------------------------------------------------------------------ actions
BOUNDS = Box(low=(-3.0, 0.0, -torch.inf), high=(3.0, 10.0, 2.0))


@pytest.mark.parametrize(
    ("mapping", "action", "expected"),
    [
        ("rescale", [1.0, 1.0, 5.0], [3.0, 10.0, 5.0]),  # an infinite bound: unchanged
        ("rescale", [-1.0, -1.0, -7.0], [-3.0, 0.0, -7.0]),
        ("rescale", [0.5, 0.5, 0.0], [1.5, 7.5, 0.0]),  # 0 + 1.5 * 10 / 2
        ("rescale", [4.0, -4.0, 0.0], [3.0, 0.0, 0.0]),
        ("clip", [4.0, -4.0, 4.0], [3.0, 0.0, 2.0]),
        ("clip", [1.0, 0.5, -9.0], [1.0, 0.5, -9.0]),
        ("none", [4.0, -4.0, 4.0], [4.0, -4.0, 4.0]),
    ],
)
def test_action_mappings(mapping: str, action: list[float], expected: list[float]) -> None:
    batch = torch.tensor([action, action])
    assert mapper(mapping, BOUNDS)(batch).tolist() == [expected, expected]
    assert batch.tolist() == [action, action]


def test_unit_bounds_are_clamped_by_each_mapping() -> None:
    unit = Box((-1.0, -1.0), (1.0, 1.0))
    for mapping in ("rescale", "clip"):
        mapped = mapper(mapping, unit)(torch.tensor([[-2.0, 0.3]]))
        assert mapped.tolist() == [[-1.0, pytest.approx(0.3)]]


@pytest.mark.parametrize("simulator", ["envpool", "gymnasium"])
def test_actions_are_mapped_to_simulator_units(simulator: str) -> None:
    """InvertedPendulum takes forces in [-3, 3] N: 0.5 is rescaled to 1.5, and 9 clipped to 3."""

    def after(mapping: str, value: float) -> Tensor:
        env = make("InvertedPendulum-v5", simulator=simulator, action_mapping=mapping)
        assert env.action_spec == Box((-3.0,), (3.0,))
        env.reset()
        return env.step(torch.full((2, 1), value)).obs

    assert torch.equal(after("rescale", 0.5), after("none", 1.5))
    assert torch.equal(after("clip", 9.0), after("none", 3.0))
    assert torch.equal(after("rescale", 9.0), after("none", 3.0))
    assert not torch.equal(after("rescale", 0.5), after("clip", 0.5))


# -------------------------------------------------------------------------------- specs and success
@pytest.mark.parametrize(
    ("id", "options", "obs", "action", "limit"),
    [
        ("HalfCheetah-v4", {}, ArraySpec((17,)), Box((-1.0,) * 6, (1.0,) * 6), 1000),
        ("Pong-v5", {}, ArraySpec((4, 84, 84), torch.uint8), Discrete(6), 27000),
        ("FrozenLake-v1", {}, ArraySpec((16,)), Discrete(4), 100),
        ("FrozenLake-v1", {"simulator": "gymnasium"}, ArraySpec((16,)), Discrete(4), 100),
        (
            "CheetahRun-v1",
            {},
            {"position": ArraySpec((8,)), "velocity": ArraySpec((9,))},
            None,
            1000,
        ),
        (
            "Go1JoystickFlatTerrain-v1",
            {"obs_keys": ["state"]},
            {"state": ArraySpec((48,))},
            None,
            1000,
        ),
        ("CliffWalking-v0", {}, ArraySpec((48,)), Discrete(4), None),
        (
            "CartPole-v1",
            {"simulator": "gymnasium", "max_episode_steps": 9},
            ArraySpec((4,)),
            Discrete(2),
            9,
        ),
        ("LunarLanderContinuous-v3", {}, ArraySpec((8,)), Box((-1.0,) * 2, (1.0,) * 2), 1000),
    ],
)
def test_specs(id: str, options: dict[str, Any], obs: Any, action: Any, limit: int | None) -> None:
    env = make(id, **options)
    assert env.obs_spec == obs and env.max_episode_steps == limit
    assert action is None or env.action_spec == action


def test_nested_and_scalar_observations_get_flat_names() -> None:
    kitchen = make("FrankaKitchen-v1").obs_spec
    assert isinstance(kitchen, dict) and kitchen["desired_goal/kettle"] == ArraySpec((7,))
    finger = make("FingerSpin-v1", 2)
    assert isinstance(finger.obs_spec, dict)
    assert all(len(spec.shape) == 1 for spec in finger.obs_spec.values())
    obs = finger.reset()
    assert isinstance(obs, dict)
    shapes = {name: (2, *spec.shape) for name, spec in finger.obs_spec.items()}
    assert {name: tuple(x.shape) for name, x in obs.items()} == shapes


@pytest.mark.parametrize(
    ("id", "keys", "options"),
    [
        ("CheetahRun-v1", ["velocity"], {}),
        ("test/Teacher-v0", ["critic"], {}),  # selects critic/force and critic/mass
        ("torch_tasks:student", ["critic", "student"], {}),
        ("toy_envs:Privileged", ["state"], {"num_threads": 1, "cameras": ["eye"]}),
    ],
)
def test_obs_keys_select_observations(id: str, keys: list[str], options: dict[str, Any]) -> None:
    env = make(id, obs_keys=keys, **options)
    obs, step = rollout(env, 1)
    names = {
        "test/Teacher-v0": ["critic/force", "critic/mass"],
        "toy_envs:Privileged": ["state", "eye"],
    }.get(id, keys)
    assert isinstance(env.obs_spec, dict)
    assert list(env.obs_spec) == list(obs) == list(step.obs) == names
    assert all(tuple(x.shape) == (2, *env.obs_spec[name].shape) for name, x in step.obs.items())


def test_success_is_read_from_the_info() -> None:
    """A proportional controller reaches every Fetch goal; not all are reached in one step."""
    env = make("FetchReach-v4", 3, max_episode_steps=20)
    obs: Any = env.reset()
    success = []
    for _ in range(20):
        error = obs["desired_goal"] - obs["achieved_goal"]
        step = env.step(torch.cat([20 * error, torch.zeros(3, 1)], 1))
        obs = step.obs
        assert step.success is not None and step.success.dtype == torch.bool
        success.append(step.success.tolist())
    assert success[0] != [True] * 3 and success[-1] == [True] * 3
    assert rollout(make("HalfCheetah-v4"), 1)[-1].success is None
    assert rollout(make("MetaWorld/Reach-v3"), 1)[-1].success.tolist() == [False, False]


# ------------------------------------------------------------ the user's own Gymnasium environments
class Corridor(gymnasium.Env):
    """A walk that succeeds and terminates at 4; the time limit of 4 ends the same step."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Dict(
        {
            "position": spaces.Discrete(6, start=-1),
            "body": spaces.Dict(
                {"x": spaces.Box(-9, 9, (2,), np.float64), "flags": spaces.MultiBinary(3)}
            ),
        }
    )
    action_space = spaces.Discrete(2, start=1)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.x = 0

    def _obs(self) -> dict[str, Any]:
        body = {
            "x": np.array([self.x, -self.x], dtype=np.float64),
            "flags": np.array([1, 0, 1], dtype=np.int8),
        }
        return {"position": np.int64(self.x), "body": body}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (1, 2)
        self.x = max(self.x + (1 if action == 2 else -1), -1)
        return (
            self._obs(),
            float(self.x),
            self.x == 4,
            False,
            {"is_success": self.x == 4, "at": self.x},
        )

    def render(self) -> Any:
        image = np.zeros((8, 8, 3), dtype=np.uint8)
        image[:, :4] = 200
        return image


class Teacher(Corridor):
    """Observations of a policy, and more of them for a critic."""

    observation_space = spaces.Dict(
        {
            "policy": spaces.Box(-9, 9, (2,), np.float32),
            "critic": spaces.Dict(
                {"force": spaces.Box(-9, 9, (1,)), "mass": spaces.Box(0, 9, (1,))}
            ),
        }
    )

    def _obs(self) -> dict[str, Any]:
        one = np.ones(1, np.float32)
        return {
            "policy": np.array([self.x, 0], np.float32),
            "critic": {"force": 2 * one, "mass": 3 * one},
        }


class OwnVector(gymnasium.vector.VectorEnv):
    """A user's vector environment: same-step resets, a single seed, one reused buffer."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(
        self, num_envs: int, max_episode_steps: int = 5, mode: Any = AutoresetMode.SAME_STEP
    ) -> None:
        self.num_envs, self.limit = num_envs, max_episode_steps
        self.metadata = {"autoreset_mode": mode} if mode else {}
        self.buffer = np.zeros((num_envs, 2), dtype=np.float32)
        self.clock = np.zeros(num_envs, dtype=np.int64)

    def _begin(self, rows: np.ndarray) -> None:
        self.buffer[rows] = self.np_random.normal(size=(int(rows.sum()), 2))
        self.clock[rows] = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin(np.ones(self.num_envs, dtype=bool))
        return self.buffer, {}

    def step(self, actions: Any) -> Any:
        self.buffer += actions
        self.clock += 1
        over, out = np.abs(self.buffer[:, 0]) > 2, self.clock >= self.limit
        info = {}
        reward = self.buffer[:, 0].copy()
        if (over | out).any():
            info["final_obs"] = self.buffer.copy()
            self._begin(over | out)
        return self.buffer, reward, over, out, info


gymnasium.register("test/Corridor-v0", lambda **kwargs: Corridor(**kwargs), max_episode_steps=4)
gymnasium.register("test/Teacher-v0", lambda **kwargs: Teacher(**kwargs), max_episode_steps=4)
gymnasium.register(
    "test/Own-v0", vector_entry_point=lambda **kwargs: OwnVector(**kwargs), max_episode_steps=6
)
gymnasium.register(
    "test/Silent-v0", vector_entry_point=lambda num_envs, **_: OwnVector(num_envs, mode=None)
)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_registered_user_environment(mode: str) -> None:
    env = make("test/Corridor-v0", 2, kwargs={"autoreset_mode": mode})
    assert env.obs_spec == {
        "position": ArraySpec((6,)),
        "body/x": ArraySpec((2,)),
        "body/flags": ArraySpec((3,)),
    }
    assert env.action_spec == Discrete(2) and env.max_episode_steps == 4
    obs: Any = env.reset()
    assert obs["position"].tolist() == [[0, 1, 0, 0, 0, 0]] * 2  # -1 has index 0 of 6
    steps: list[Step] = [env.step(torch.tensor([1, 0])) for _ in range(4)]
    last = steps[-1]
    # Environment 0 reaches 4 at its time limit: terminated counts. Environment 1 stays at -1:
    # truncated.
    assert last.terminated.tolist() == [True, False] and last.truncated.tolist() == [False, True]
    assert last.success is not None and last.success.tolist() == [True, False]
    assert last.reward.tolist() == [4.0, -1.0]
    final: Any = last.obs if mode == "next_step" else last.final_obs
    assert final["body/x"].tolist() == [[4, -4], [-1, 1]] and final["position"][0].argmax() == 5
    if mode == "same_step":
        assert last.obs["body/x"].tolist() == [[0, 0], [0, 0]]
    check_env(
        lambda seeds: make("test/Corridor-v0", 4, seeds=seeds, kwargs={"autoreset_mode": mode}),
        steps=30,
    )


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_unknown_success_key_is_rejected(mode: str) -> None:
    env = make("test/Corridor-v0", 2, success_key="won", kwargs={"autoreset_mode": mode})
    env.reset()
    with pytest.raises(
        EnvError,
        match=r"success_key='won' is not in the info of a step that ends.*; it has at, is_succ",
    ):
        for _ in range(4):
            env.step(torch.tensor([1, 0]))


def test_module_before_the_colon_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks_for_test.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import"
        " CartPoleEnv\ngymnasium.register('MyPole-v0', CartPoleEnv, max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = make("my_tasks_for_test:MyPole-v0")
    assert env.id == "my_tasks_for_test:MyPole-v0"
    assert rollout(env, 3)[-1].truncated.all()


def test_user_vector_environment_satisfies_the_contract() -> None:
    report = check_env(lambda seeds: make("test/Own-v0", 4, seeds=seeds), steps=40)
    assert report.longest == 6 and report.rows == 160 and report.seeded


# ----------------------------------------------------------------------------------- errors, memory
@pytest.mark.parametrize("simulator", ["envpool", "gymnasium"])
def test_invalid_calls_are_rejected(simulator: str) -> None:
    env = make("CartPole-v1", simulator=simulator)
    with pytest.raises(EnvError, match=r"step\(\) before reset\(\)"):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.reset()
    with pytest.raises(EnvError, match=r"actions of shape \[3\]; it takes \[2\]"):
        env.step(torch.zeros(3, dtype=torch.int64))
    assert env.state() is None
    with pytest.raises(EnvError, match=r"use restart\(seeds\)"):
        env.load_state({})
    with pytest.raises(EnvError, match="rendering is disabled"):
        env.render()
    with pytest.raises(EnvError, match="1 seeds for 2 environments"):
        env.restart([0])
    env.close()
    env.close()
    for call in (
        env.reset,
        lambda: env.step(torch.zeros(2, dtype=torch.int64)),
        lambda: env.restart([0, 1]),
    ):
        with pytest.raises(EnvError, match="it was closed"):
            call()


INVALID = [
    (
        "HalfCheeta-v4",
        {},
        (
            "unknown to our tasks and envpool and gymnasium; .*our tasks: HalfCheetah; .*envpool:"
            " HalfCh.*gymnasium: "
        ),
    ),
    (
        "HalfCheeta-v4",
        {"simulator": "gymnasium"},
        "unknown to gymnasium; nearest in gymnasium: HalfCheetah",
    ),
    ("FetchReach-v4", {"simulator": "gymnasium"}, "unknown to gymnasium"),
    (
        "Track-v0",
        {},
        "; if a module of yours registers it with Gymnasium, write env.id=module:Track-v0$",
    ),
    (
        "CartPole-v1",
        {"simulator": "isaac"},
        "choose one of auto, mujoco, warp, envpool, gymnasium, torch",
    ),
    ("CartPole-v1", {"seeds": [1]}, "1 seeds for 2 environments"),
    ("CartPole-v1", {"seeds": [1, 2**31]}, r"seed 2147483648 is outside \[0, 2\*\*31\)"),
    ("CartPole-v1", {"num_threads": 0}, "num_threads=0 must be at least 1"),
    ("CartPole-v1", {"max_episode_steps": 0}, "max_episode_steps=0 must be at least 1"),
    ("CartPole-v1", {"render_size": (0, 4)}, "render_size"),
    (
        "CartPole-v1",
        {"simulator": "gymnasium", "num_threads": 2},
        "num_threads=2 is an option of EnvPool",
    ),
    ("HalfCheetah-v4", {"action_mapping": "tanh"}, "choose one of rescale, clip, none"),
    (
        "HalfCheetah-v4",
        {"success_key": "won"},
        "success_key='won' is not in its info; it has env_id, .*reward_run",
    ),
    ("HalfCheetah-v4", {"kwargs": {"seed": 3}}, "kwargs seed are set by the adapter"),
    (
        "HalfCheetah-v4",
        {"kwargs": {"frame_skips": 3}},
        "no option 'frame_skips'; nearest: frame_skip",
    ),
    (
        "HalfCheetah-v5",
        {"simulator": "gymnasium", "kwargs": {"frame_skips": 3}},
        "cannot make it.*frame_skips",
    ),
    (
        "CartPole-v1",
        {"simulator": "gymnasium", "kwargs": {"autoreset_mode": "x"}},
        "choose one of next_step, same_step",
    ),
    (
        "CartPole-v1",
        {"simulator": "gymnasium", "kwargs": {"vectorization_mode": "x"}},
        "choose one of sync, async",
    ),
    ("CliffWalking-v0", {"max_episode_steps": 9}, "has no effect in EnvPool.*no time limit"),
    ("Highway-v0", {"max_episode_steps": 9}, "has no effect in EnvPool.*fixed at 40"),
    ("Go9x9-v1", {}, "a game of 2 players"),
    ("BinPack-v2", {}, "Box of int32"),
    (
        "PandaPickCube-v1",
        {"n": 20_000},
        r"20000 environments need .* GB .* num_envs=\d+ is the most that fits",
    ),
    (
        "Go1JoystickFlatTerrain-v1",
        {},
        (
            r"has privileged_state, which exists in simulation only, .* write"
            r" model.actor_obs=\[state\] model.critic_obs=\[state,privileged_state\] .* or"
            r" env.obs_keys=\[state\] to leave it out"
        ),
    ),
    (
        "Go1JoystickFlatTerrain-v1",
        {"obs_keys": ["stat"]},
        "'stat' is not in its observation; did you mean state",
    ),
    (
        "Go1JoystickFlatTerrain-v1",
        {"obs_keys": []},
        r"selects nothing; write null for all, or some of \[state,",
    ),
    ("CartPole-v1", {"obs_keys": ["state"]}, "its observation is one array; leave the option out"),
    ("test/Teacher-v0", {}, r"has critic/force, .*; write .*env.obs_keys=\[policy\]"),
    ("torch_tasks:student", {}, r"has critic, .*; write .*model.critic_obs=\[student,critic\]"),
    (
        "toy_envs:Privileged",
        {"num_threads": 1},
        r"has privileged_mass, .*; write .* env.obs_keys=\[state\]",
    ),
    ("no_such_module_at_all:X-v0", {}, "cannot import 'no_such_module_at_all'"),
    ("test/Silent-v0", {}, "autoreset_mode=None.*metadata"),
    ("FrozenLake-v1", {"simulator": "gymnasium", "kwargs": {"map_name": "9x9"}}, "cannot make it"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is missing AutoresetMode metadata")
@pytest.mark.parametrize(
    ("id", "options", "message"), INVALID, ids=[f"{r[0]}-{i}" for i, r in enumerate(INVALID)]
)
def test_errors_name_the_id_the_limit_and_the_cure(
    id: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvError, match=message):
        make(id, **options)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.MultiDiscrete([2, 3]), "action space MultiDiscrete.*wrap the environment"),
        (spaces.Tuple([spaces.Discrete(2)]), "action space Tuple"),
        (spaces.Text(5), "action space Text"),
    ],
)
def test_unsupported_action_spaces_are_rejected(
    space: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Corridor, "action_space", space)
    with pytest.raises(EnvError, match=message):
        make("test/Corridor-v0")


def test_unsupported_observation_spaces_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Corridor, "observation_space", spaces.Dict({"say": spaces.Text(5)}))
    with pytest.raises(
        EnvError, match=r"observation 'say': observation space Text.*wrap the environment"
    ):
        make("test/Corridor-v0")


def test_large_memory_use_is_announced() -> None:
    before = make("PandaPickCube-v1", 3)
    before.reset()
    before.close()  # memory that is freed must not hide the growth of the others
    # 55 MB each; 48 if the first of all is among them, 100 without statistics of the C library.
    with pytest.warns(
        UserWarning, match=r"60 environments will take \d\.\d GB of memory \(([4-9]|10)\d MB each"
    ):
        make("PandaPickCube-v1", 60)  # reset() would create the simulators


def test_mujoco_warnings_are_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        make("HalfCheetah-v5", 3, simulator="gymnasium").reset()
        make("HalfCheetah-v5", 3, simulator="envpool").reset()
    assert "settotalmass" not in capfd.readouterr().err and not caught
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_import_loads_no_simulator() -> None:
    """The import of EnvPool takes 1 to 3 s, which would slow down commands such as --help."""
    code = (
        "import embodied_envs, sys; print([m for m in ('envpool', 'mujoco', 'ray') if m in"
        " sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------- images
def _can_render() -> bool:
    envpool_env.load()
    return envpool_env._egl_error == ""


@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("Pong-v5", {}),
        ("test/Corridor-v0", {"render_size": (4, 4)}),
        pytest.param(
            "HalfCheetah-v4", {}, marks=pytest.mark.skipif("not _can_render()", reason="no libEGL")
        ),
        pytest.param(
            "InvertedPendulum-v5",
            {"simulator": "gymnasium"},
            marks=pytest.mark.skipif("not _can_render()", reason="no libEGL"),
        ),
    ],
)
def test_render_returns_an_image(id: str, options: dict[str, Any]) -> None:
    size = options.setdefault("render_size", (48, 64))
    env = make(id, render=True, **options)
    env.reset()
    image = env.render()
    assert image.shape == (*size, 3) and image.dtype == torch.uint8
    assert image.float().std() > 1
    env.close()


def test_missing_render_package_is_named() -> None:
    env = make("CartPole-v1", simulator="gymnasium", render=True)
    env.reset()
    if importlib.util.find_spec("pygame") is None:
        with pytest.raises(EnvError, match="pygame is not installed"):
            env.render()
    else:
        assert env.render().shape == (240, 320, 3)


def test_render_resizes_by_area_average() -> None:
    """8 x 8 with a left half of 200 and a right half of 0 gives 2 x 4: columns 200 200 0 0."""
    env = make("test/Corridor-v0", render=True, render_size=(2, 4))
    env.reset()
    assert env.render()[..., 0].tolist() == [[200, 200, 0, 0]] * 2


@pytest.mark.slow
def test_envpool_is_imported_without_matplotlib_and_has_all_tasks() -> None:
    """The package of Jumanji tasks, which imports matplotlib, is imported by its tasks only."""
    script = """
import sys
from embodied_envs.adapters import envpool_env
envpool = envpool_env.load()
assert "matplotlib" not in sys.modules and len(envpool_env.ids()) > 1000
envpool.make_gymnasium("Game2048-v1", num_envs=2).reset()
assert envpool.jumanji.Game2048GymnasiumEnvPool and "matplotlib" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
