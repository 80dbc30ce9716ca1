"""Calibration errors of joint encoders, compared with the same episode without them."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.tasks.task import State
from embodied_ppo.core.types import EnvError

EXACT = {"mass": [1, 1], "friction": [1, 1], "gains": [1, 1]}
"""The tasks' own ranges, switched off."""
JOINTS = {"Go1Joystick": slice(12, 24), "PandaPickCube": slice(0, 7)}
"""Positions of hinge joints in the observation."""


def make(id: str, *, n: int = 2, seeds: list[int] | None = None, **ranges: list[float]) -> Any:
    return embodied_envs.make(
        id,
        num_envs=n,
        seeds=seeds or list(range(n)),
        num_threads=1,
        randomize=True,
        ranges=EXACT | ranges,
    )


def obs_of(env: Any, actions: Tensor) -> Tensor:
    return torch.stack([env.reset(), *(env.step(a).obs for a in actions)])


@pytest.mark.parametrize("id", list(JOINTS))
def test_zero_offset_changes_nothing(id: str) -> None:
    actions = 0.3 * torch.randn(3, 2, 12 if id == "Go1Joystick" else 8)
    assert torch.equal(obs_of(make(id), actions), obs_of(make(id, joint_offset=[0, 0]), actions))


@pytest.mark.parametrize("id", list(JOINTS))
def test_measured_positions_and_targets_are_shifted(id: str) -> None:
    plain, env = make(id), make(id, joint_offset=[0.02, 0.02])
    first = env.reset() - plain.reset()
    shift = torch.zeros_like(first)
    shift[:, JOINTS[id]] = 0.02
    torch.testing.assert_close(first, shift, atol=1e-6, rtol=0)  # the same state
    action = torch.zeros(2, plain.action_shape[1])
    for _ in range(3):
        plain.step(action)
        env.step(action)
    arm = slice(0, 12) if id == "Go1Joystick" else slice(0, 7)
    # Go1Joystick commands home. PandaPickCube holds the first command, the measured position.
    command = 0.0 if id == "Go1Joystick" else 0.02
    ctrl = (env.s["ctrl"] - plain.s["ctrl"])[:, arm]
    torch.testing.assert_close(ctrl, torch.full_like(ctrl, command), atol=1e-12, rtol=0)
    assert torch.equal(env.s["ctrl"][:, 7:8], plain.s["ctrl"][:, 7:8]) or id == "Go1Joystick"


def test_robot_with_offsets_moves_to_the_shifted_target() -> None:
    """The measured angle reaches the target: the true one misses it by the offset."""
    env, plain = (make("PandaPickCube", n=1, joint_offset=[x, x]) for x in (0.05, 0.0))
    obs = env.reset()
    other = plain.reset()
    action = torch.zeros(1, 8)
    action[:, 1] = 0.5
    for _ in range(4):
        obs, other = env.step(action).obs, plain.step(action).obs
    for _ in range(30):
        obs, other = env.step(0 * action).obs, plain.step(0 * action).obs
    # Target minus position is what both read; position differs by the offset.
    torch.testing.assert_close(obs[:, 31:38], other[:, 31:38], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        obs[:, :7] - other[:, :7], torch.full((1, 7), 0.05), atol=1e-6, rtol=0
    )


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
    one = make("Go1Joystick", n=1, seeds=[7], joint_offset=[-0.1, 0.05])
    assert torch.equal(one._joint_offsets.offset, drawn[7:8])
    kept = env.step(torch.zeros(100, 12)).terminated
    assert not kept.any() and torch.equal(env._joint_offsets.offset, drawn)
    env.reset_where(torch.arange(100) == 3)
    changed = (env._joint_offsets.offset != drawn).any(1)
    assert changed.nonzero().flatten().tolist() == [3]


def test_state_continues_and_fits_the_same_options_only() -> None:
    def create(seeds: list[int]) -> Any:
        return embodied_envs.make(
            "Go1Joystick",
            num_envs=len(seeds),
            seeds=seeds,
            num_threads=1,
            max_episode_steps=5,
            randomize=True,
            ranges={"joint_offset": [-0.1, 0.1]},
        )

    embodied_envs.check_env(create, steps=12)
    env = create([1])
    env.reset()
    with pytest.raises(ValueError, match=r"other options of env\.ranges"):
        make("Go1Joystick", n=1).load_state(env.state())


@pytest.mark.parametrize(
    ("id", "bounds", "message"),
    [
        ("HalfCheetah", [0, 0.1], "only tasks with the attribute reads_joints_from_state"),
        ("Go1Joystick", [0.1, 0], "two finite numbers"),
        ("Go1Joystick", 0.1, "two finite numbers"),
        ("HalfCheetah", 0.1, "only tasks with"),
    ],
)
def test_refusals_are_one_line(id: str, bounds: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message) as error:
        embodied_envs.make(
            id, num_envs=1, seeds=[0], randomize=True, ranges={"joint_offset": bounds}
        )
    assert "\n" not in str(error.value) and "env.ranges.joint_offset=" in str(error.value)


def test_model_without_servos_stays_as_it_is() -> None:
    motor = '<worldbody><body><joint name="a"/><geom size="1"/></body></worldbody>'
    model = mujoco.MjModel.from_xml_string(
        f'<mujoco>{motor}<actuator><motor joint="a"/></actuator></mujoco>'
    )
    randomization = Randomization(model, {"joint_offset": (-0.1, 0.1)})
    assert randomization.fields == () and randomization.size == 1
