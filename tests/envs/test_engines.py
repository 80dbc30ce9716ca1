"""Simulators of one task: which one ``auto`` selects, which others run the task, and equality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import embodied_envs
from embodied_envs import engines
from embodied_envs.adapters import envpool_env
from embodied_envs.adapters.envpool_env import EnvPoolEnv
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.physics.mujoco_env import MujocoEnv

PLANAR = [
    (own, id)
    for own in ("HalfCheetah", "Hopper", "Walker2d")
    for id in engines.EQUAL[own]
    if id != "HalfCheetah-v3"  # an alias of v4 in EnvPool
]


@pytest.mark.parametrize(
    ("id", "name", "cls"),
    [
        ("HalfCheetah", "mujoco", MujocoEnv),
        ("toy_envs:Balance", "mujoco", MujocoEnv),
        ("CartPole-v1", "envpool", EnvPoolEnv),
        ("MountainCar-v0", "envpool", EnvPoolEnv),
        ("Taxi-v4", "gymnasium", GymnasiumEnv),
    ],
)
def test_simulator_is_the_one_that_make_selects(id: str, name: str, cls: type) -> None:
    assert engines.simulator_of(id, "auto", "cpu") == name
    env = embodied_envs.make(id, num_envs=1, seeds=[0])
    assert type(env) is cls
    env.close()
    assert engines.simulator_of(id, "gymnasium", "cpu") == "gymnasium"


def test_gpu_runs_tasks_of_this_package_in_warp() -> None:
    assert engines.simulator_of("HalfCheetah", "auto", torch.device("cuda", 0)) == "warp"


def test_other_simulators_of_a_task() -> None:
    gym = {"envpool": "HalfCheetah-v5", "gymnasium": "HalfCheetah-v5"}
    assert engines.same_task("HalfCheetah", "mujoco") == {"warp": "HalfCheetah", **gym}
    assert engines.same_task("HalfCheetah-v4", "envpool") == {
        "mujoco": "HalfCheetah",
        "warp": "HalfCheetah",
        "gymnasium": "HalfCheetah-v4",
    }
    assert engines.same_task("Walker2d-v4", "envpool") == {"gymnasium": "Walker2d-v4"}
    assert engines.same_task("Go1Joystick", "mujoco") == {"warp": "Go1Joystick"}
    assert engines.same_task("toy_envs:Balance", "warp") == {"mujoco": "toy_envs:Balance"}
    assert engines.same_task("libero/libero_spatial", "libero") == {}


def pool(id: str) -> tuple[Any, np.ndarray]:
    """Return four environments of EnvPool, and their first observations."""
    env = envpool_env.load().make_gymnasium(id, num_envs=4, seed=0)
    return env, env.reset()[0]


@pytest.mark.parametrize(("own", "id"), PLANAR)
def test_planar_tasks_equal_those_of_envpool(own: str, id: str) -> None:
    """From equal states, 20 random steps have equal observations, rewards and ends.

    The observation is qpos without x, and qvel; x has no effect.
    """
    theirs, obs = pool(id)
    ours: Any = embodied_envs.make(own, num_envs=4, seeds=[0, 1, 2, 3], action_mapping="none")
    ours.reset()
    nq = ours.s["qpos"].shape[1]
    ours.s["qpos"][:, 0] = 0
    ours.s["qpos"][:, 1:] = torch.from_numpy(obs[:, : nq - 1])
    ours.s["qvel"].copy_(torch.from_numpy(obs[:, nq - 1 :]))
    rng = np.random.default_rng(0)
    for t in range(20):
        action = rng.uniform(-0.3, 0.3, (4, ours.action_spec.size)).astype(np.float32)
        obs, reward, terminated, _, _ = theirs.step(action.astype(np.float64))
        step = ours.step(torch.from_numpy(action))
        final = step.obs if step.final_obs is None else step.final_obs
        np.testing.assert_allclose(final.numpy(), obs, atol=1e-5)
        if t > 0:  # the first reward is that of a step from the state before it was replaced
            np.testing.assert_allclose(step.reward.numpy(), reward, atol=1e-4)
        assert np.array_equal(step.terminated.numpy(), terminated) and not terminated.any()
    ours.close()


@pytest.mark.parametrize("id", [engines.EQUAL["Ant"][0], engines.EQUAL["Humanoid"][0]])
def test_spatial_tasks_of_envpool_equal_gymnasiums(id: str) -> None:
    """Ours equal Gymnasium's, see physics/test_mujoco_env.py."""
    import gymnasium

    theirs, obs = pool(id)
    reference: Any = gymnasium.make(id).unwrapped
    reference.reset(seed=0)
    nq, nv = reference.model.nq, reference.model.nv
    reference.set_state(np.concatenate([[0, 0], obs[0, : nq - 2]]), obs[0, nq - 2 :][:nv])
    rng = np.random.default_rng(0)
    for _ in range(10):
        action = rng.uniform(-0.2, 0.2, (4, reference.model.nu))
        obs, reward, *_ = theirs.step(action)
        expected, expected_reward, *_ = reference.step(action[0])
        np.testing.assert_allclose(obs[0], expected, rtol=1e-4, atol=1e-4)
        assert reward[0] == pytest.approx(expected_reward, abs=1e-4)


def test_neutral_ranges_change_nothing() -> None:
    ranges = engines.task_ranges("Go1Joystick", {})
    assert set(ranges) >= {"mass", "friction"}
    neutral = engines.neutral_ranges([*ranges, "colour"])
    assert neutral["mass"] == (1.0, 1.0) and neutral["colour"] == (0.0, 0.0)
    assert engines.task_ranges("CartPole-v1", {}) == {}


def test_changed_masses_start_in_the_same_states() -> None:
    """Every value of a robustness card is measured from the same initial states."""
    states = []
    for mass in (1.0, 2.0):
        env: Any = embodied_envs.make(
            "Hopper", num_envs=3, seeds=[5, 6, 7], randomize=True, ranges={"mass": [mass, mass]}
        )
        states.append(env.reset())
        env.close()
    assert torch.equal(*states)
