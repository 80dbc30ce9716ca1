"""RobotTask: the base class of tasks in which action 0 holds the home posture of any robot."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import ClassVar

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.observation_parts import MEASURED_SENSORS, Part
from embodied_envs.robots.preparation import CONTACT, CONTACTS, FORCE, GYRO, Preparation
from embodied_envs.robots.robot_model import IMU, RobotModel
from embodied_envs.robots.terms import TermTask
from embodied_envs.tasks.task import State


class RobotTask(TermTask):
    """A task of the robot in ``mjcf``; everything about the robot follows from this file.

    Action [N, nu]: 0 is the home posture. ctrl = home control + scale · action within the control
    range, with the scale of each actuator of ``RobotModel``. An episode starts at home with noise.

    Observation [N, D], what a robot measures:
    of a floating robot: direction of gravity in the IMU's frame; angular velocity, rad/s
    positions minus home (rad, m) and velocities (rad/s, m/s) of hinges and slides
    sensors of touch, force, distance and tendons, where the model has them
    last action

    Privileged observation, for the critic: velocity of a floating base in its own frame (m/s), its
    height (m), and the force on each foot (share of the weight); forces of the actuators as shares
    of their limits; states of actuators; positions and velocities of objects and ball joints.

    Joints are in the order of MuJoCo. ``robot`` holds bodies, feet, pairs and actuators.
    """

    # The robot's MJCF.
    mjcf: ClassVar[Path]
    # Gains, floor and keyframe, where they are not those of the file.
    preparation: ClassVar[Preparation] = Preparation()
    # Pattern of names of actuators -> scale of their action, where it is not the derived one.
    action_scale: ClassVar[Mapping[str, float]] = {}
    # Largest distance of the start from home: rad, m; of velocities rad/s, m/s.
    noise = 0.05
    fields = ("sensordata", "site_xmat", "actuator_force")
    reads_joints_from_state = True

    # ------------------------------------------------------------------------------------ the model
    def spec(self) -> mujoco.MjSpec:
        """Return the completed model. Paths in the file are relative to it."""
        return self.preparation.prepare(self.mjcf)

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store the robot's indices and constants as tensors."""
        super().bind(model, device, dtype)
        self.robot = robot = RobotModel(model, self.preparation.key)
        tensor = partial(torch.tensor, device=device, dtype=dtype)
        index = partial(torch.tensor, device=device, dtype=torch.int64)
        # Control: the action 0, the scale of each actuator, and the range.
        actuators, scales = robot.actuators, [a.scale for a in robot.actuators]
        for pattern, scale in self.action_scale.items():
            matches = [i for i, a in enumerate(actuators) if fnmatchcase(a.name, pattern)]
            if not matches:
                known = ", ".join(a.name for a in actuators)
                raise EnvError(f"name actuators ({known}): action_scale: {pattern!r} matches none")
            for i in matches:
                scales[i] = scale
        self.home_control = tensor([a.home for a in actuators])
        self.scale = tensor(scales)
        self.low, self.high = tensor([(a.low, a.high) for a in actuators]).unbind(1)
        self.force_limit = tensor([a.largest_force for a in actuators])
        self.home_act = tensor(robot.home_act)
        # Positions and velocities of the base, of hinges and slides, and all others.
        joints = list(robot.joints)
        qpos, qvel = model.jnt_qposadr[joints], model.jnt_dofadr[joints]
        self.home, self.qpos, self.qvel = tensor(robot.home), index(qpos), index(qvel)
        self.floats = robot.base is not None
        if self.floats:
            self.base_qpos, self.base_dof = robot.base_qpos, robot.base_dof
            self.home_height = float(robot.home[self.base_qpos + 2])
            self.imu, self.gyro = model.site(IMU).id, int(model.sensor(GYRO).adr[0])
            qpos = [*qpos, *range(self.base_qpos, self.base_qpos + 7)]
            qvel = [*qvel, *range(self.base_dof, self.base_dof + 6)]
        self.other_qpos = index(sorted(set(range(model.nq)) - set(qpos)))
        self.other_qvel = index(sorted(set(range(model.nv)) - set(qvel)))
        # Limits of the start, and those that end an episode: a tenth of the range beyond.
        start, spread = np.full((model.nq, 2), (-np.inf, np.inf)), np.zeros(model.nq)
        limits = start.copy()
        for j in joints:
            i, (low, high) = int(model.jnt_qposadr[j]), model.jnt_range[j]
            spread[i], slack = self.noise, 0.1 * (high - low)
            if model.jnt_limited[j]:
                start[i], limits[i] = (low, high), (low - slack, high + slack)
                spread[i] = min(self.noise, slack)
            elif robot.falls(j):
                limits[i] = robot.home[i] - 1, robot.home[i] + 1
        self.start, self.limits, self.spread = tensor(start), tensor(limits), tensor(spread)
        measured = np.repeat(np.isin(model.sensor_type, list(MEASURED_SENSORS)), model.sensor_dim)
        self.measured_sensors, self.weight = index(np.flatnonzero(measured)), robot.weight
        force, contact = (
            np.array([model.sensor(f"{name}{n}").adr[0] for n in range(len(robot.feet))], int)
            for name in (FORCE, CONTACT)
        )
        self.foot_force, self.foot_contact = index(force[:, None] + range(3)), index(contact)
        names = [*self.preparation.contacts, *([CONTACTS] if self.floats else [])]
        self.contacts = {name: int(model.sensor(name).adr[0]) for name in names}
        self.nq, self.na, self.reset_noise = model.nq, model.na, model.nq + model.nv

    def control(self, s: State, action: Tensor) -> Tensor:
        return (self.home_control + self.scale * action).clamp(self.low, self.high)

    # --------------------------------------------------------------------------------- observations
    def gravity(self, s: State) -> Tensor:
        """Return the direction of gravity in the frame of the IMU, [N, 3]."""
        return -s["site_xmat"][:, self.imu].flatten(1)[:, 6:9]

    def angular_velocity(self, s: State) -> Tensor:
        """Return the angular velocity in the frame of the IMU, rad/s, [N, 3]."""
        return s["sensordata"][:, self.gyro : self.gyro + 3]

    def joint_positions(self, s: State) -> Tensor:
        """Return the positions of hinges and slides minus home, rad and m, [N, joints]."""
        return s["qpos"][:, self.qpos] - self.home[self.qpos]

    def observe(self, s: State) -> Tensor:
        imu = [self.gravity(s), self.angular_velocity(s)] if self.floats else []
        joints = [self.joint_positions(s), s["qvel"][:, self.qvel]]
        sensors = s["sensordata"][:, self.measured_sensors]
        return torch.cat([*imu, *joints, sensors, s["last_action"]], 1)

    def observation_parts(self, model: mujoco.MjModel) -> list[Part]:
        return RobotModel(model, self.preparation.key).parts()

    def foot_forces(self, s: State) -> Tensor:
        """Return the force of the ground on each foot in the last physics step, [N, feet].

        It is a share of the weight.
        """
        return s["sensordata"][:, self.foot_force].norm(dim=2) / self.weight

    def down(self, s: State) -> Tensor:
        """Return bool [N, feet], whether each foot touches the ground."""
        return s["sensordata"][:, self.foot_contact] > 0

    def touches(self, s: State, name: str) -> Tensor:
        """Return the number of contacts of a pair of ``Preparation.contacts``, [N]."""
        return s["sensordata"][:, self.contacts[name]]

    def privileged(self, s: State) -> Tensor:
        parts = [s["actuator_force"] / self.force_limit]
        if self.floats:
            parts += [self.base_velocity(s), self.height(s)[:, None], self.foot_forces(s)]
        if self.na:
            parts.append(s["act"])
        return torch.cat([*parts, s["qpos"][:, self.other_qpos], s["qvel"][:, self.other_qvel]], 1)

    # ----------------------------------------------------------------------------- terms of rewards
    def distance_from_home(self, s: State) -> Tensor:
        """Return the squared distance from the home posture, [N].

        It adds the squares of the joints' distances, rad and m, and for a floating base that of its
        height, m, and 1 - cos²(half the angle of its turn).
        """
        squares = self.joint_positions(s).square().sum(1)
        if not self.floats:
            return squares
        # The product of two quaternions is the cosine of half the angle between them.
        quaternion = slice(self.base_qpos + 3, self.base_qpos + 7)
        cosine = (s["qpos"][:, quaternion] * self.home[quaternion]).sum(1)
        return squares + (self.height(s) - self.home_height).square() + 1 - cosine.square()

    def effort(self, s: State) -> Tensor:
        """Return the mean square of the actuators' forces as shares of their limits, [N]."""
        return (s["actuator_force"] / self.force_limit).square().mean(1)

    def out_of_range(self, s: State) -> Tensor:
        """Return bool [N], whether a joint is a tenth of its range beyond it.

        A falling joint without range and actuator, such as a pole, is beyond it 1 rad from home.
        """
        return ((s["qpos"] < self.limits[:, 0]) | (s["qpos"] > self.limits[:, 1])).any(1)

    def fallen(self, s: State) -> Tensor:
        """Return bool [N], whether the base is below half of its height at home."""
        if not self.floats or self.home_height <= 0:
            return torch.zeros_like(s["qpos"][:, 0], dtype=torch.bool)
        return self.height(s) < 0.5 * self.home_height

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {"last_action": action}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the home posture and control with noise on joints and velocities."""
        noise = 2 * u - 1
        qpos = self.home + self.spread * noise[:, : self.nq]
        return {
            "qpos": qpos.clamp(self.start[:, 0], self.start[:, 1]),
            "qvel": self.noise * noise[:, self.nq :],
            "ctrl": self.home_control.repeat(len(u), 1),
            "act": self.home_act.repeat(len(u), 1),
            "last_action": torch.zeros_like(self.home_control).repeat(len(u), 1),
        }
