"""Our tasks in Gymnasium's interface equal those of ``embodied_envs.make``."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

import embodied_envs
from embodied_envs import tasks
from embodied_envs.adapters import envpool_env, gymnasium_env
from embodied_envs.registration import MAX_EPISODE_STEPS, gymnasium_id
from embodied_ppo.core.types import Box, EnvError

N = 3
TABLETOP = "embodied/Tabletop-v0"
LANGUAGE: dict[str, Any] = {
    "families": ["reach", "push"],
    "obs": "language",
    "cameras": ["front"],
    "image_size": 16,
}


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
    assert set(MAX_EPISODE_STEPS) == set(tasks.OWN)
    for name in tasks.OWN:
        task_class = tasks.find(name)
        assert task_class is not None
        limit = gym.spec(gymnasium_id(name)).max_episode_steps
        assert limit == task_class.max_episode_steps, name


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


@pytest.mark.parametrize("chunk", [1, 2])
def test_single_environment_equals_the_vector(chunk: int) -> None:
    env = gym.make(TABLETOP, max_episode_steps=6, action_chunk=chunk, **LANGUAGE)
    many = vector(max_episode_steps=6 * chunk, action_chunk=chunk, **LANGUAGE)
    obs, info = env.reset(seed=3)
    batch, batch_info = many.reset(seed=3)
    for action in actions(14, 4 * chunk):
        assert_equal(obs, row(batch, 0))
        assert info["instruction"] == batch_info["instruction"][0]
        obs, reward, terminated, truncated, info = env.step(action[0])
        batch, rewards, ends, limits, batch_info = many.step(action)
        assert (reward, terminated, truncated) == (rewards[0], ends[0], limits[0])
        assert info["success"] is bool(batch_info["success"][0])
        if terminated or truncated:
            assert_equal(obs, batch_info["final_obs"][0])
            obs, info = env.reset()
    env.close()
    many.close()


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
    mask = np.array([False, True, False])
    partly, _ = env.reset(options={"reset_mask": mask})
    assert ((partly != by_int).any(1) == mask).all()
    random, _ = env.reset(seed=[None, 4, None])
    assert_equal(random[1], first[0])
    assert (random[0] != random[2]).any()
    other = vector()
    assert (other.reset()[0] != second).any()  # seeds from the operating system
    env.close()
    env.close()
    other.close()


def test_returned_arrays_are_not_changed_by_later_steps() -> None:
    env = vector(max_episode_steps=4, **LANGUAGE)
    obs, _ = env.reset(seed=0)
    arrays: list[np.ndarray] = list(obs.values())
    copies = [x.copy() for x in arrays]
    for action in actions(9):
        obs, *results, info = env.step(action)
        for before, array in zip(copies, arrays, strict=True):
            assert_equal(before, array)
        arrays = [*obs.values(), *results, info["success"]]
        arrays += [x for o in info.get("final_obs", []) if o is not None for x in o.values()]
        copies = [np.copy(x) for x in arrays]
    env.close()


def test_gymnasiums_vector_wrappers() -> None:
    """Returns and lengths are those of the episodes in both modes; wrappers of observations work
    with next_step.
    """
    results = []
    for mode in (AutoresetMode.SAME_STEP, "next_step"):
        env: Any = RecordEpisodeStatistics(vector(max_episode_steps=5, autoreset_mode=mode))
        if mode == "next_step":
            env = NormalizeObservation(env)
        env.reset(seed=2)
        total = np.zeros(N)
        for action in np.repeat(actions(1), 5, axis=0):
            _, reward, terminated, truncated, info = env.step(action)
            total += reward
        assert truncated.all() and not terminated.any()
        np.testing.assert_allclose(info["episode"]["r"], total)
        assert info["episode"]["l"].tolist() == [5] * N
        results.append(total)
        env.close()
    assert_equal(*results)


def test_images_of_every_environment() -> None:
    """With next_step the image after the end shows the end, with same_step the next start."""
    frames = {}
    for mode in ("same_step", "next_step"):
        env = vector(
            max_episode_steps=2,
            render_mode="rgb_array",
            render_size=(24, 32),
            autoreset_mode=mode,
        )
        env.reset(seed=0)
        frames[mode] = [env.render()]
        for action in actions(3):
            env.step(action)
            frames[mode].append(env.render())
        assert env.metadata["render_fps"] == 20
        env.close()
    same, following = frames["same_step"], frames["next_step"]
    assert len(same[0]) == N and same[0][1].shape == (24, 32, 3)
    assert (same[0][0] != same[0][1]).any()
    assert_equal(same[1], following[1])
    assert (same[2][0] != following[2][0]).any()
    assert_equal(same[2], following[3])  # the first images of the second episodes


def test_a_single_environment_shows_the_end_of_its_episode() -> None:
    env = gym.make(TABLETOP, render_mode="rgb_array", render_size=(24, 32), families=["reach"])
    env.reset(seed=0)
    task_env: Any = env.unwrapped
    simulator: Any = task_env.simulator
    action, terminated = np.zeros(4), False
    for _ in range(60):  # the tool moves to block A: displacement 3 of the observation
        obs, _, terminated, _, info = env.step(action)
        action = np.clip([*obs[12 + 9 : 12 + 12] / 0.03, 0.0], -1, 1)
        if terminated:
            break
    assert terminated and info["success"]
    last = env.render()
    assert bool(simulator.task.success(simulator.s)[0])  # the state is still the last one
    env.reset()
    assert (env.render() != last).any()
    env.close()


def test_a_task_of_the_user_has_the_interface() -> None:
    from embodied_envs.gymnasium_api import TaskVectorEnv

    env = TaskVectorEnv("embodied_envs.tasks.locomotion:Hopper", 2, num_threads=1)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (2, 11) and "success" not in env.step(env.action_space.sample())[4]
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera": ["front"]}, "option camera is unknown; did you mean cameras"),
        ({"task": "Tabletopp"}, "task='Tabletopp' is none of ours; choose one of HalfCheetah"),
        ({"render_mode": "human"}, "render_mode='human' is unknown; choose one of None, rgb_array"),
        ({"simulator": "envpool"}, "simulator='envpool' is unknown; choose one of auto"),
        ({"autoreset_mode": "never"}, "autoreset_mode='never' is unknown; choose one of same_step"),
        ({"autoreset_mode": "next_step", "action_chunk": 2}, "not available with action_chunk"),
        ({"task": "Go1Rough", "autoreset_mode": "next_step"}, "for tasks with carry_over"),
        ({"split": "tests"}, "split='tests' is unknown; there are train"),
        ({"cameras": "front"}, r"cameras='front' must be a list; write cameras=\['front'\]"),
        ({"cameras": ["front"], "image_size": 0}, r"image_size=\(0, 0\) must be \(height, width"),
        ({"cameras": ["front"], "image_size": (64,)}, r"image_size=\(64,\) must be"),
        ({"cameras": ["front"], "image_size": "64"}, "image_size='64' must be"),
        ({"render_mode": "rgb_array", "render_size": 5}, "render_size=5 must be"),
        ({"obs_keys": "state"}, r"obs_keys='state' must be a list; write obs_keys=\['state'\]"),
        ({"action_chunk": "2"}, "action_chunk='2' must be a whole number"),
        ({"max_episode_steps": 1.5}, "max_episode_steps=1.5 must be a whole number"),
        ({"randomize": "yes"}, "randomize='yes' must be True or False"),
        ({"realism": 3}, "realism=3 must be a dictionary"),
        ({"device": "nope"}, "device='nope' is unknown; use cpu, cuda"),
        ({"autoreset_mode": ["same_step"]}, "is unknown; choose one of same_step"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        vector(**options)


def test_wrong_calls_are_refused() -> None:
    env = vector()
    mask = np.ones(N, dtype=bool)
    with pytest.raises(EnvError, match=r"Tabletop: step\(\) before reset\(\)|before reset"):
        env.step(actions(1)[0])
    with pytest.raises(EnvError, match="call reset\\(\\) first"):
        env.reset(options={"reset_mask": mask})
    env.reset()
    with pytest.raises(EnvError, match="reset_mask is float64"):
        env.reset(options={"reset_mask": np.ones(N)})
    with pytest.raises(EnvError, match="unknown; there is reset_mask"):
        env.reset(options={"level": 1})
    seeds: Any
    for seeds in ([1, 2], [], -1, [-1] * N, "a", 1.5, [1.5] * N, 2**70, True):
        with pytest.raises(EnvError, match="seed"):
            env.reset(seed=seeds)
    broken = actions(1)[0]
    broken[1, 2] = np.nan
    with pytest.raises(EnvError, match=r"action \[1, 2\] is nan; actions must be finite"):
        env.step(broken)
    options: Any = 3
    with pytest.raises(EnvError, match="must be a dictionary"):
        env.reset(options=options)
    with pytest.raises(EnvError, match="render_mode"):
        env.render()
    env.close()
    with pytest.raises(EnvError, match=r"num_envs='a' must be a whole number"):
        gym.make_vec(TABLETOP, num_envs="a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvError, match=r"num_envs=3.*use gym.make_vec"):
        gym.make(TABLETOP, num_envs=3)
    single = gym.make(TABLETOP)
    with pytest.raises(EnvError, match="there are none"):
        single.reset(options={"level": 1})
    single.close()


def test_the_trainer_names_our_tasks_by_their_own_ids() -> None:
    with pytest.raises(EnvError, match=r"write env\.id=Tabletop$"):
        embodied_envs.make(TABLETOP, num_envs=1, seeds=[0])
    assert not any("embodied/" in name for name in gymnasium_env.ids())


def test_absent_envpool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envpool_env, "find_spec", lambda name: None)
    monkeypatch.setattr(envpool_env, "ids", list)
    with pytest.raises(EnvError, match="EnvPool is not installed: pip install envpool"):
        embodied_envs.make("Pong-v5", num_envs=1, seeds=[0])
