"""Calibration errors of joint encoders, compared with the same episode without them."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.tasks.task import State

# The tasks' own ranges, switched off.
EXACT = {"mass": [1, 1], "friction": [1, 1], "gains": [1, 1]}


def make(id: str, *, n: int = 2, seed: int = 0, **ranges: list[float]) -> Any:
    options = {"seeds": list(range(seed, seed + n)), "randomize": True, "ranges": EXACT | ranges}
    return toy_envs.make_world(id, n, **options)


def test_measured_positions_are_shifted_and_targets_are_not() -> None:
    """Go1Joystick commands home, whatever it measures."""
    plain, env = make("Go1Joystick"), make("Go1Joystick", joint_offset=[0.02, 0.02])
    first = env.reset() - plain.reset()
    shift = torch.zeros_like(first)
    shift[:, 12:24] = 0.02
    torch.testing.assert_close(first, shift, atol=1e-6, rtol=0)  # the same state
    for _ in range(3):
        plain.step(torch.zeros(2, 12))
        env.step(torch.zeros(2, 12))
    torch.testing.assert_close(env.s["ctrl"], plain.s["ctrl"], atol=1e-12, rtol=0)


class Servo(toy_envs.Balance):
    """A hinge with a position servo, whose action is the target, limited to [-0.5, 0.5] rad."""

    reads_joints_from_state = True
    reset_noise, fields = 0, ()

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def control(self, s: State, action: Tensor) -> Tensor:
        return action

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros(len(u), dtype=torch.float64)
        return {"qpos": zeros[:, None], "pushes": zeros.long(), "gust": zeros}

    def spec(self) -> mujoco.MjSpec:
        text = """
        <mujoco><option timestep="0.02" gravity="0 0 0"/><worldbody><body>
          <joint name="hinge" type="hinge" axis="0 1 0" damping="4"/>
          <geom type="sphere" size=".1" pos="0 0 .5" mass="1"/>
        </body></worldbody><actuator>
          <position joint="hinge" kp="20" gear="2" ctrlrange="-.5 .5"/>
        </actuator></mujoco>"""
        return mujoco.MjSpec.from_string(text)

    def terminated(self, s: State) -> Tensor:
        return torch.zeros(len(s["qpos"]), dtype=torch.bool)


@pytest.mark.parametrize("x", [-0.1, 0.1])
def test_servo_at_the_limit_of_its_command_is_shifted(x: float) -> None:
    """ctrlrange limits the command: 0.5 moves the joint to 0.5 / gear - x, beyond 0.5 / gear."""
    env = embodied_envs.make(
        f"{__name__}:Servo",
        num_envs=2,
        seeds=[0, 1],
        num_threads=1,
        action_mapping="none",
        randomize=True,
        ranges={"joint_offset": [x, x], "motor_strength": [0.5, 1.5], "gains": [0.9, 1.1]},
    )
    env.reset()
    for command in (0.5, -0.5):
        for _ in range(150):
            env.step(torch.full((2, 1), command))
        angle = env.s["qpos"][:, 0]
        torch.testing.assert_close(
            angle, torch.full_like(angle, command / 2 - x), atol=1e-4, rtol=0
        )


def test_offsets_are_uniform_and_functions_of_seed_and_episode() -> None:
    env = make("Go1Joystick", n=100, joint_offset=[-0.1, 0.05])
    env.reset()
    drawn = env._joint_offsets.offset.clone()
    assert drawn.shape == (100, 12) and len(drawn.unique()) == 1200
    assert -0.1 <= float(drawn.min()) < -0.099 and 0.049 < float(drawn.max()) < 0.05
    assert abs(float(drawn.mean()) + 0.025) < 0.01
    one = make("Go1Joystick", n=1, seed=7, joint_offset=[-0.1, 0.05])
    assert torch.equal(one._joint_offsets.offset, drawn[7:8])
    kept = env.step(torch.zeros(100, 12)).terminated
    assert not kept.any() and torch.equal(env._joint_offsets.offset, drawn)
    env.reset_where(torch.arange(100) == 3)
    assert (env._joint_offsets.offset != drawn).any(1).nonzero().flatten().tolist() == [3]
