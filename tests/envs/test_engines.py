"""Simulators of one task: which one ``auto`` selects, and equality with EnvPool's tasks."""

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

# Task of this package -> ids of EnvPool with the same model, observation, reward and end. In
# Hopper-v4 a fall has a reward that is 1 higher.
EQUAL: dict[str, tuple[str, ...]] = {
    "HalfCheetah": ("HalfCheetah-v5", "HalfCheetah-v4", "HalfCheetah-v3"),
    "Hopper": ("Hopper-v5", "Hopper-v4"),
    "Walker2d": ("Walker2d-v5",),
}
PLANAR = [
    (own, id)
    for own in ("HalfCheetah", "Hopper", "Walker2d")
    for id in EQUAL[own]
    if id != "HalfCheetah-v3"  # an alias of v4 in EnvPool
]


@pytest.mark.parametrize(
    ("id", "name", "cls"),
    [
        ("HalfCheetah", "mujoco", MujocoEnv),
        ("toy_envs:Balance", "mujoco", MujocoEnv),
        ("CartPole-v1", "envpool", EnvPoolEnv),
        ("Taxi-v4", "gymnasium", GymnasiumEnv),
    ],
)
def test_simulator_is_the_one_that_make_selects(id: str, name: str, cls: type) -> None:
    assert engines.simulator_of(id, "auto", "cpu") == name
    env = embodied_envs.make(id, num_envs=1, seeds=[0])
    assert type(env) is cls
    env.close()
    assert engines.simulator_of(id, "gymnasium", "cpu") == "gymnasium"


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
