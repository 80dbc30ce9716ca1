"""EnvPool and Gymnasium adapters: episode ends, seeds, actions, specs, images and errors."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import embodied_envs
from embodied_envs.adapters import envpool_env
from embodied_envs.adapters.actions import mapper
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ArraySpec, Box, Discrete, Step, VectorEnv


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


# ------------------------------------------------------------------------------------ episode ends
@pytest.mark.parametrize("simulator", ["envpool", "gymnasium"])
def test_contract_with_resets_in_the_next_step(simulator: str) -> None:
    options: dict[str, Any] = {"simulator": simulator, "max_episode_steps": 5}
    report = check_env(
        lambda seeds: make("InvertedPendulum-v4", 4, seeds=seeds, **options), steps=60
    )
    assert report.longest == 5 and report.rows < 240 and report.seeded


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
    steps = rollout(make("CheetahRun-v1", max_episode_steps=4), 5)
    assert steps[4].truncated.all() and (steps[4].reward > 0).any()
    assert not steps[5].mask.any() and not steps[5].reward.any()


# ------------------------------------------------------------------------------------------ actions
BOUNDS = Box(low=(-3.0, 0.0, -torch.inf), high=(3.0, 10.0, 2.0))


@pytest.mark.parametrize(
    ("mapping", "action", "expected"),
    [
        ("rescale", [1.0, 1.0, 5.0], [3.0, 10.0, 2.0]),  # an infinite bound: clipped
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


# -------------------------------------------------------------------------------- specs and success
RUN_OBS = {"position": ArraySpec((8,)), "velocity": ArraySpec((9,))}


@pytest.mark.parametrize(
    ("id", "obs", "action", "limit"),
    [
        ("HalfCheetah-v4", ArraySpec((17,)), Box((-1.0,) * 6, (1.0,) * 6), 1000),
        ("Pong-v5", ArraySpec((4, 84, 84), torch.uint8), Discrete(6), 27000),
        ("CheetahRun-v1", RUN_OBS, Box((-1.0,) * 6, (1.0,) * 6), 1000),
    ],
)
def test_specs(id: str, obs: Any, action: Any, limit: int | None) -> None:
    env = make(id)
    assert env.obs_spec == obs and env.max_episode_steps == limit and env.action_spec == action


@pytest.mark.parametrize(
    ("id", "key", "names", "options"),
    [
        ("CheetahRun-v1", "velocity", ["velocity"], {}),
        ("test/Teacher-v0", "critic", ["critic/force", "critic/mass"], {}),
        ("toy_envs:Privileged", "state", ["state", "eye"], {"cameras": ["eye"]}),
    ],
)
def test_obs_keys_select_observations(
    id: str, key: str, names: list[str], options: dict[str, Any]
) -> None:
    env = make(id, obs_keys=[key], **options)
    obs, step = rollout(env, 1)
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


gymnasium.register("test/Corridor-v0", lambda **kwargs: Corridor(**kwargs), max_episode_steps=4)
gymnasium.register("test/Teacher-v0", lambda **kwargs: Teacher(**kwargs), max_episode_steps=4)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_registered_user_environment(mode: str) -> None:
    env = make("test/Corridor-v0", 2, kwargs={"autoreset_mode": mode})
    assert env.obs_spec == {
        "position": ArraySpec((6,)),
        "body/x": ArraySpec((2,)),
        "body/flags": ArraySpec((3,)),
    }
    assert env.action_spec == Discrete(2) and env.max_episode_steps == 4
    for limit in (7, -1):  # -1 is Gymnasium's value for no limit
        other = make("test/Corridor-v0", 2, kwargs={"max_episode_steps": limit})
        assert other.max_episode_steps == {7: 7, -1: None}[limit]
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


def test_module_before_the_colon_is_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_tasks_for_test.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import"
        " CartPoleEnv\ngymnasium.register('MyPole-v0', CartPoleEnv, max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = make("my_tasks_for_test:MyPole-v0")
    assert env.id == "my_tasks_for_test:MyPole-v0"
    assert rollout(env, 3)[-1].truncated.all()


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
    with pytest.raises(EnvError, match="1 seeds for 2"):
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


def test_render_resizes_by_area_average() -> None:
    """8 x 8 with a left half of 200 becomes 2 x 2, with a black column on each side."""
    env = make("test/Corridor-v0", render=True, render_size=(2, 4))
    env.reset()
    assert env.render()[..., 0].tolist() == [[0, 200, 0, 0]] * 2
    simulator: Any = env
    for image in (np.ones((8, 8, 4), np.uint8), np.ones((8, 8, 3)), np.ones((8, 8), np.uint8)):
        simulator.first_environment().unwrapped.render = lambda image=image: image
        with pytest.raises(EnvError, match=r"return uint8 \[H, W, 3\] from its render\(\)"):
            env.render()
