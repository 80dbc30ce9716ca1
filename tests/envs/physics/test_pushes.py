"""Random pushes: size, direction and time, compared with a simulation without them."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs import tasks
from embodied_envs.physics.make import compile_model
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.physics.pushes import base_dof
from embodied_envs.tasks import Task
from embodied_ppo.core.types import EnvError

XY = slice(6, 8)
"""Horizontal velocity of the base in qvel, after the six of the block."""


def make(n: int = 2, seeds: list[int] | None = None, **options: Any) -> Any:
    options.setdefault("realism", {"push_velocity": [0.5, 1.0], "push_interval_s": [0.1, 0.2]})
    return embodied_envs.make(
        "toy_envs:Drifter",
        num_envs=n,
        seeds=seeds or list(range(n)),
        num_threads=1,
        action_mapping="none",
        **options,
    )


def velocities(env: Any, steps: int) -> Tensor:
    """Return qvel after each step without actions, float64 [steps + 1, N, nv]."""
    env.reset()
    rows = [env.s["qvel"].clone()]
    for _ in range(steps):
        env.step(torch.zeros(env.num_envs, 1))
        rows.append(env.s["qvel"].clone())
    return torch.stack(rows)


@pytest.mark.parametrize("stage", ["velocity", "forces"])  # two engines
def test_base_velocity_changes_by_the_size_at_the_interval(stage: str) -> None:
    n, steps = 300, 39
    env = make(n, kwargs={"stage": stage})
    assert isinstance(env, MujocoEnv), "the simulator pushes itself, without a wrapper"
    v = velocities(env, steps)
    change = (v[1:] - v[:-1])[:, :, XY]  # without forces, the velocity is constant in between
    size = change.norm(dim=2)
    pushed = size > 1e-9
    assert 0.5 <= float(size[pushed].min()) < 0.51 and 0.99 < float(size[pushed].max()) <= 1.0
    assert abs(float(size[pushed].mean()) - 0.75) < 0.01
    # [0.1, 0.2] s are 5 to 10 control steps of 20 ms: the first push precedes step 5 to 10.
    first = pushed.long().argmax(0)
    assert int(first.min()) == 5 and int(first.max()) == 10
    for row in pushed.T[:50]:
        gaps = row.nonzero().flatten().diff()
        assert bool(((gaps >= 5) & (gaps <= 10)).all())
    direction = change[pushed] / size[pushed].unsqueeze(1)
    assert float(direction.mean(0).norm()) < 0.05, "uniform"
    assert abs(float(direction[:, 0].square().mean()) - 0.5) < 0.03
    # Nothing else moves: neither the block nor any other velocity of the robot.
    assert not v[:, :, :6].any() and float(v[:, :, 8:].abs().max()) < 1e-12


def test_fixed_size_equals_a_hand_made_change_of_velocity() -> None:
    """Base velocity (0, 0) and a push of 0.5 m/s in direction u give 0.5 u in all bodies."""
    env = make(1, realism={"push_velocity": 0.5, "push_interval_s": 0.1})
    v = velocities(env, 11)[:, 0]
    assert not v[:6].any(), "5 steps without a push"
    assert float(v[6, XY].norm()) == pytest.approx(0.5, abs=1e-12)
    assert torch.allclose(v[6], v[10], atol=1e-12), "until the second one"
    assert float((v[11] - v[10])[XY].norm()) == pytest.approx(0.5, abs=1e-12)
    data = mujoco.MjData(env.physics.model)
    data.qvel[XY] = v[6, XY].numpy()
    mujoco.mj_forward(env.physics.model, data)
    velocity = np.zeros((6, 1))
    for body in (2, 3):
        mujoco.mj_objectVelocity(
            env.physics.model, data, mujoco.mjtObj.mjOBJ_BODY, body, velocity, 0
        )
        assert velocity[3:5, 0] == pytest.approx(v[6, XY].numpy(), abs=1e-12)


def test_pushes_are_functions_of_seed_episode_and_step() -> None:
    full = velocities(make(2, [7, 8]), 39)
    assert torch.equal(full[:, 1:], velocities(make(1, [8]), 39))
    assert not torch.equal(full[:, 0], full[:, 1])
    env = make(1, [7])
    again = [velocities(env, 20), velocities(env, 20)]
    assert torch.equal(again[0], full[:21, :1]) and not torch.equal(*again), "episodes differ"


def test_state_continues_and_fits_the_same_options_only() -> None:
    embodied_envs.check_env(lambda seeds: make(len(seeds), seeds, max_episode_steps=9), steps=40)
    env = make()
    env.reset()
    with pytest.raises(ValueError, match=r"other options of env\.realism"):
        make(realism={}).load_state(env.state())


def test_off_is_the_simulator_without_pushes() -> None:
    plain = velocities(make(realism=None), 12)
    for options in ({"push_velocity": None}, {"push_velocity": 0}, {"push_velocity": [0, 0]}):
        assert torch.equal(velocities(make(realism=options), 12), plain)


def test_tasks_with_a_base() -> None:
    """The message about other tasks names those of this package that have one."""
    bases = []
    for id in tasks.OWN:
        task = tasks.make(id, tasks.find(id) or Task, {})
        try:
            base_dof(compile_model(task, id), id)
            bases.append(id)
        except EnvError as error:
            assert "Go1Joystick, Go1Rough, Ant and Humanoid have one" in str(error)
    assert sorted(bases) == ["Ant", "Go1Joystick", "Go1Rough", "Humanoid"]


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("Hopper", {"push_velocity": 1}, "push_velocity needs one robot .* its robot is fixed"),
        (None, {"push_velocity": -1}, "push_velocity = -1: it must be a number >= 0"),
        (None, {"push_velocity": [2, 1]}, r"push_velocity = \[2, 1\]: .* low <= high"),
        (None, {"push_velocity": [1, 2, 3]}, r"it must be a number or \[low, high\]"),
        (None, {"push_velocity": 1, "push_interval_s": 0}, "push_interval_s = 0: .* > 0"),
        (None, {"push_velocity": 1, "push_interval_s": 0.8}, "ends after 0.8 s, before the first"),
    ],
)
def test_refusals_are_one_line(id: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message) as error:
        if id is None:
            make(1, realism=options)
        else:
            embodied_envs.make(id, num_envs=1, seeds=[0], realism=options)
    assert "\n" not in str(error.value) and "env.realism.push" in str(error.value)
