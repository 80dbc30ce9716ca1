"""Joints, actuators and the relation of action and ctrl of our own tasks."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor
from toy_envs import Balance

from embodied_envs.physics.mechanism import actuators
from embodied_envs.tasks import State
from embodied_envs.tasks.go1 import Go1Joystick
from embodied_ppo.options.schema import EnvConfig
from embodied_ppo.rollout import environments


def mechanism(id: str, **options: Any) -> dict[str, Any]:
    config = EnvConfig(id=id, num_threads=1, **options)
    env = environments.make_env([0, 1], config=config, device=torch.device("cpu"))
    try:
        return env.simulator.mechanism()
    finally:
        env.close()


def test_go1_actions_are_position_targets_around_the_home_pose() -> None:
    """Hip ±0.1, thigh 0.9, calf -1.8 rad, plus 0.5 rad times the action."""
    robot = mechanism("Go1Joystick")
    home = [0.1, 0.9, -1.8, -0.1, 0.9, -1.8] * 2
    assert robot["ctrl_of_action"]["offset"] == pytest.approx(home)
    assert robot["ctrl_of_action"]["scale"] == pytest.approx([0.5] * 12)
    assert [a["name"] for a in robot["actuators"]][:2] == ["FR_hip", "FR_thigh"]
    assert {(a["kind"], a["unit"]) for a in robot["actuators"]} == {("position", "rad")}
    free, hip = robot["joints"][:2]
    assert (free["type"], free["qpos"], free["qvel"]) == ("free", [0, 7], [0, 6])
    assert (hip["qpos"], hip["qvel"], hip["unit"]) == ([7, 8], [6, 7], "rad")
    assert hip["range"] is not None and robot["actuators"][0]["joint"] == hip["name"]


@pytest.mark.parametrize(("gear", "kind", "kp"), [("1", "position", 20), ("2", "other", None)])
def test_a_servo_with_a_gear_has_no_angle_as_target(gear: str, kind: str, kp: float | None) -> None:
    """Its ctrl is gear times the angle, and its gains hold before the gear."""
    servo = f'<position joint="hinge" kp="20" gear="{gear}"/>'
    body = '<body><joint name="hinge"/><geom size=".1"/></body>'
    model = f"<mujoco><worldbody>{body}</worldbody><actuator>{servo}</actuator></mujoco>"
    (row,) = actuators(mujoco.MjModel.from_xml_string(model))
    assert (row["kind"], row["kp"], row["unit"]) == (kind, kp, "rad" if kp else None)


def test_actions_that_change_the_targets_of_the_last_step_have_no_fixed_relation() -> None:
    robot = mechanism("PandaPickCube")
    assert robot["ctrl_of_action"] is None
    assert [a["unit"] for a in robot["actuators"]] == ["rad"] * 7 + ["m"]
    assert mechanism("CartPole-v1") == {}, "other simulators describe no joints"


class Observant(Go1Joystick):
    """Adds to the observation, but not to its parts."""

    def observe(self, s: State) -> Tensor:
        return torch.cat([super().observe(s), s["qpos"][:, :1]], 1)


def test_parts_of_a_part_of_the_observation_are_left_out() -> None:
    parts = [mechanism(id)["observation_parts"] for id in ("Go1Joystick", f"{__name__}:Observant")]
    assert len(parts[0]) > 3 and parts[1] == []


class Opens(Balance):
    """The control is 0 at the low end of its range, as that of a closed gripper."""

    def control(self, s: State, action: Tensor) -> Tensor:
        return (0.01 * action).clamp(min=0)


class Closes(Balance):
    """The control is 0 at the high end of its range, as that of an open gripper."""

    def control(self, s: State, action: Tensor) -> Tensor:
        return (0.01 * action).clamp(max=0)


@pytest.mark.parametrize("task", ["toy_envs:Balance", f"{__name__}:Opens", f"{__name__}:Closes"])
def test_motor_on_a_slide_has_a_gear_and_chunks_are_unwrapped(task: str) -> None:
    robot = mechanism(task, action_chunk=2)
    (motor,) = robot["actuators"]
    assert (motor["kind"], motor["unit"], motor["gear"]) == ("motor", "N/gear", 1000)
    assert robot["ctrl_of_action"] == {"offset": [0], "scale": [pytest.approx(0.01)]}
