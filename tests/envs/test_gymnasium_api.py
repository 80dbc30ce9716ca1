"""Our tasks in Gymnasium's interface equal those of ``embodied_envs.make``."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import run_helpers
import torch
from gymnasium.utils.env_checker import check_env

import embodied_envs
from embodied_envs import tasks
from embodied_envs.adapters import envpool_env, gymnasium_env
from embodied_envs.base.errors import EnvError
from embodied_envs.registration import OWN, gymnasium_id
from embodied_envs.types import Box

N = 3
TABLETOP = "embodied/Tabletop-v0"
LANGUAGE: dict[str, Any] = run_helpers.options("""families=[reach,push] obs=language
    cameras=[front] image_size=16""")


def vector(**options: Any) -> Any:
    return gym.make_vec(TABLETOP, **{"num_envs": N, "num_threads": 1, **options})


def actions(steps: int, size: int = 4) -> np.ndarray:
    """Return actions [steps, N, size], partly outside the bounds."""
    return np.random.default_rng(0).normal(0, 0.7, (steps, N, size)).astype(np.float32)


def assert_equal(a: Any, b: Any) -> None:
    """Compare arrays, tensors and dictionaries of them bit for bit."""
    if isinstance(a, dict):
        assert set(a) == set(b)
        for name in a:
            assert_equal(a[name], b[name])
    else:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert np.asarray(a).dtype == np.asarray(b).dtype


def row(obs: Any, i: int) -> Any:
    return {name: x[i] for name, x in obs.items()} if isinstance(obs, dict) else obs[i]


def test_every_task_is_registered_with_its_time_limit() -> None:
    for name in OWN:
        task_class = tasks.find(name)
        assert task_class is not None
        assert gym.spec(gymnasium_id(name)).max_episode_steps == task_class.max_episode_steps, name


@pytest.mark.parametrize("name", ["HalfCheetah", "Humanoid", "PandaPickCube", "Go1Rough"])
def test_observations_and_actions_are_in_their_spaces(name: str) -> None:
    env = gym.make_vec(gymnasium_id(name), num_envs=2, num_threads=1, action_mapping="clip")
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert env.observation_space.contains(obs) and reward.dtype == np.float32
    assert terminated.dtype == truncated.dtype == np.bool_
    assert ("success" in info) == (name in ("PandaPickCube", "Go1Rough"))
    if name == "Humanoid":
        assert float(env.single_action_space.high[0]) == pytest.approx(0.4)
    env.close()


@pytest.mark.parametrize("options", [{}, LANGUAGE], ids=["state", "language"])
def test_single_environment_passes_gymnasiums_checks(options: dict[str, Any]) -> None:
    env = gym.make(TABLETOP, render_mode="rgb_array", render_size=(24, 32), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*infinity")  # bounds of observations
        check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        LANGUAGE,
        {"action_chunk": 3},
        {"realism": {"action_delay": (1, 2), "obs_noise": 0.1}},
        {"randomize": True, "ranges": {"mass": [0.8, 1.2]}},
    ],
    ids=["state", "language", "chunk", "realism", "randomize"],
)
def test_vector_equals_the_simulator(options: dict[str, Any]) -> None:
    """Three episodes of 7 steps and a success, with the same actions."""
    env = vector(max_episode_steps=7, **options)
    obs, info = env.reset(seed=5)
    other = {k: v for k, v in options.items() if k not in ("families", "obs", "image_size")}
    kwargs = {k: v for k, v in options.items() if k in ("families", "obs")}
    ours = embodied_envs.make(
        "Tabletop",
        num_envs=N,
        seeds=[5, 6, 7],
        num_threads=1,
        max_episode_steps=7,
        image_size=(16, 16),
        kwargs=kwargs,
        **other,
    )
    assert_equal(obs, ours.reset())
    ended = 0
    assert isinstance(ours.action_spec, Box)
    for action in actions(22, ours.action_spec.size):
        sentences = info.get("instruction")
        obs, reward, terminated, truncated, info = env.step(action)
        step = ours.step(torch.from_numpy(action))
        assert_equal(obs, step.obs)
        expected = step.reward.sum(1) if "action_chunk" in options else step.reward
        assert_equal(reward, expected)
        assert_equal(terminated, step.terminated)
        assert_equal(truncated, step.truncated)
        assert_equal(info["success"], step.success)
        done = terminated | truncated
        assert ("final_obs" in info) == bool(done.any())
        for i in np.flatnonzero(done):
            ended += 1
            assert step.final_obs is not None and info["_final_obs"][i]
            final = info["final_obs"][i]
            assert_equal(final, row(step.final_obs, i))
            assert env.single_observation_space.contains(final)
            assert info["final_info"]["success"][i] == terminated[i]
            if sentences is not None:
                assert info["final_info"]["instruction"][i] == sentences[i]
        if isinstance(obs, dict):
            expected = [env.instructions[i] for i in obs["instruction"]]
            assert info["instruction"].tolist() == expected
            assert info["task"][0] in ("reach", "push")
        if "action_chunk" in options:
            assert step.executed is not None
            assert_equal(info["executed"], step.executed.sum(1))
    assert ended >= 2 * N
    env.close()
    ours.close()


def test_next_step_mode_has_the_same_episodes() -> None:
    """Rows that only reset are left out; then both modes have the same rows."""
    rows: dict[str, list[list[Any]]] = {}
    for mode in ("same_step", "next_step"):
        env = vector(max_episode_steps=5, autoreset_mode=mode, **LANGUAGE)
        assert env.metadata["autoreset_mode"].name == mode.upper()
        rows[mode] = [[] for _ in range(N)]
        streams = actions(30).transpose(1, 0, 2).tolist()  # one queue of actions for each i
        obs, _ = env.reset(seed=1)
        done = np.zeros(N, dtype=bool)
        for _ in range(18):
            resets = done if mode == "next_step" else np.zeros(N, dtype=bool)
            action = [[9.0] * 4 if resets[i] else streams[i].pop(0) for i in range(N)]
            before = obs
            obs, reward, terminated, truncated, info = env.step(np.array(action))
            done = terminated | truncated
            if mode == "next_step":
                assert "final_obs" not in info
                assert (info["_success"] == ~resets).all()
                assert not (resets & (done | (reward != 0))).any()
            for i in np.flatnonzero(~resets):
                has_final = mode == "same_step" and done[i]
                after = info["final_obs"][i] if has_final else row(obs, i)
                rows[mode][i].append((row(before, i), reward[i], bool(done[i]), after))
        env.close()
    for ours, others in zip(rows["same_step"], rows["next_step"], strict=True):
        assert len(others) > 13 and sum(done for _, _, done, _ in others) >= 2
        for (obs_a, reward_a, done_a, next_a), (obs_b, reward_b, done_b, next_b) in zip(
            ours, others, strict=False
        ):
            assert_equal(obs_a, obs_b)
            assert_equal(next_a, next_b)
            assert reward_a == reward_b and done_a == done_b


def test_seeds_and_resets() -> None:
    env = vector()
    first, _ = env.reset(seed=[4, 9, 4])
    assert (first[0] == first[2]).all() and (first[0] != first[1]).any()
    second, _ = env.reset()
    assert (second != first).any(1).all()
    again, _ = env.reset(seed=[4, 9, 4])
    assert_equal(again, first)
    by_int, _ = env.reset(seed=4)
    assert_equal(by_int[0], first[0])
    random, _ = env.reset(seed=[None, 4, None])
    assert_equal(random[1], first[0])
    assert (random[0] != random[2]).any()
    other = vector()
    assert (other.reset()[0] != second).any()  # seeds from the operating system
    env.close()
    env.close()
    other.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera": ["front"]}, "camera.*cameras"),
        ({"task": "Tabletopp"}, "Tabletopp.*HalfCheetah"),
        ({"render_mode": "human"}, "render_mode.*human.*rgb_array"),
        ({"task": "Go1Rough", "autoreset_mode": "next_step"}, "carry_over"),
        ({"autoreset_mode": "next_step", "action_chunk": 2}, "action_chunk"),
        ({"cameras": ["front"], "image_size": 0}, r"image_size.*\(0, 0\)"),
        ({"realism": 3}, "realism.*3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    if message == "carry_over":  # a task that carries nothing over
        vector(task="Go1Joystick", autoreset_mode="next_step").close()
    with pytest.raises(EnvError, match=message):
        vector(**options)


def test_wrong_calls_are_refused() -> None:
    env = vector()
    with pytest.raises(EnvError, match="reset"):
        env.step(actions(1)[0])
    env.reset()
    with pytest.raises(EnvError, match="level"):
        env.reset(options={"level": 1})
    seeds: Any
    for seeds in ([1, 2], -1, 1.5):
        with pytest.raises(EnvError, match="seed"):
            env.reset(seed=seeds)
    broken = actions(1)[0]
    broken[1, 2] = np.nan
    with pytest.raises(EnvError, match=r"\[1, 2\].*nan"):
        env.step(broken)
    env.close()


def test_the_trainer_names_our_tasks_by_their_own_ids() -> None:
    with pytest.raises(EnvError, match=r"write env\.id=Tabletop$"):
        embodied_envs.make(TABLETOP, num_envs=1, seeds=[0])
    assert not any("embodied/" in name for name in gymnasium_env.ids())


def test_absent_envpool_is_named(monkeypatch) -> None:
    monkeypatch.setattr(envpool_env, "find_spec", lambda name: None)
    monkeypatch.setattr(envpool_env, "ids", list)
    with pytest.raises(EnvError, match="EnvPool is not installed: pip install envpool"):
        embodied_envs.make("Pong-v5", num_envs=1, seeds=[0])
