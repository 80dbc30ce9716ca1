"""Random pushes: size, direction and time, compared with a simulation without them."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor
from toy_envs import make_world

import embodied_envs
from embodied_envs.physics import mujoco_env
from embodied_envs.physics.mujoco_env import MujocoEnv

# Horizontal velocity of the base in qvel, after the six of the block.
XY = slice(6, 8)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch) -> None:
    """Push after 5 to 10 control steps of 20 ms."""
    monkeypatch.setattr(mujoco_env, "PUSH_INTERVAL_S", (0.1, 0.2))


def make(n: int = 2, **options: Any) -> Any:
    options.setdefault("realism", {"push_velocity": [0.5, 1.0]})
    return make_world("toy_envs:Drifter", n, action_mapping="none", **options)


def velocities(env: Any, steps: int) -> Tensor:
    """Return qvel after each step without actions, float64 [steps + 1, N, nv]."""
    env.reset()
    rows = [env.s["qvel"].clone()]
    for _ in range(steps):
        env.step(torch.zeros(env.num_envs, 1))
        rows.append(env.s["qvel"].clone())
    return torch.stack(rows)


# two engines
@pytest.mark.parametrize("stage", ["velocity", pytest.param("forces", marks=pytest.mark.slow)])
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


def test_fixed_size_equals_a_hand_made_change_of_velocity(monkeypatch) -> None:
    """Base velocity (0, 0) and a push of 0.5 m/s in direction u give 0.5 u in all bodies."""
    monkeypatch.setattr(mujoco_env, "PUSH_INTERVAL_S", (0.1, 0.1))
    env = make(1, realism={"push_velocity": 0.5})
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


def test_state_continues_and_fits_the_same_options_only() -> None:
    embodied_envs.check_env(
        lambda seeds: make(len(seeds), seeds=seeds, max_episode_steps=9), steps=40
    )
    env = make()
    env.reset()
    with pytest.raises(ValueError, match=r"other options of env\.realism"):
        make(realism={}).load_state(env.state())
