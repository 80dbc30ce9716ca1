"""Calibration errors of joint encoders: what a robot measures of its joints is shifted."""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.physics.engine import Physics
from embodied_envs.tasks.task import State, Task
from embodied_ppo.core.errors import EnvError, show

STREAM = 3
"""Stream of random numbers, see ``core.random``; ``pushes.STREAM`` is 2."""


class JointOffsets:
    """A constant error of the zero of each encoder, drawn per episode.

    The encoder of a joint at angle q measures q + x. The servo compares its target with the
    measured angle, so a target c moves the joint to c - x. ``measured`` is the state as the robot
    measures it, in which qpos and the targets in ctrl are shifted by x; ``true_ctrl`` shifts
    targets back. The offset is a function of the environment's seed and the episode.

    Joints are the hinges with an actuator; ctrl of motors has no shift.
    """

    def __init__(self, physics: Physics, bounds: tuple[float, float]) -> None:
        """Find joints and servos.

        Args:
            physics: The worlds.
            bounds: Lowest and highest offset, rad.

        Raises:
            EnvError: The model has no hinge joint with an actuator.
        """
        self.physics, self.bounds = physics, bounds
        joints, servos, gears = _hinges_and_servos(physics.model)
        if not joints:
            raise EnvError(
                f"env.ranges.joint_offset={list(bounds)}: the model has no hinge joint with an"
                " actuator; remove it"
            )
        n, model = physics.fields["qpos"].shape[0], physics.model

        def index(x: list[int]) -> Tensor:
            return torch.tensor(x, dtype=torch.int64, device=physics.device)

        def zeros(width: int) -> Tensor:
            return torch.zeros(n, width, dtype=physics.dtype, device=physics.device)

        self._qpos_index = index([int(model.jnt_qposadr[j]) for j in joints])
        self._ctrl_index = index(list(servos))
        self._servo_joint = index([joints.index(j) for j in servos.values()])
        self._gears = torch.tensor(gears, dtype=physics.dtype, device=physics.device)
        self.offset = zeros(len(joints))
        """[N, joints], rad."""
        self._qpos, self._ctrl = zeros(model.nq), zeros(model.nu)

    def begin(self, where: Tensor, seeds: Tensor, episode: Tensor) -> None:
        """Draw the offsets of new episodes.

        Args:
            where: bool [N], whether an episode starts.
            seeds: int64 [N].
            episode: int64 [N], its number.
        """
        u = self.physics.uniform(seeds, STREAM, episode, self.offset.shape[1])
        low, high = self.bounds
        self.load(torch.where(where[:, None], low + (high - low) * u, self.offset))

    def load(self, offset: Tensor) -> None:
        """Set the offsets [N, joints], rad."""
        self.offset.copy_(offset)
        self._qpos.index_copy_(1, self._qpos_index, self.offset)
        servos = self.offset.index_select(1, self._servo_joint) * self._gears
        self._ctrl.index_copy_(1, self._ctrl_index, servos)

    def measured(self, s: State) -> dict[str, Tensor]:
        """Return the state with qpos and ctrl as the robot measures them."""
        return {**s, "qpos": s["qpos"] + self._qpos, "ctrl": s["ctrl"] + self._ctrl}

    def true_ctrl(self, ctrl: Tensor) -> Tensor:
        """Return the ctrl [N, nu] to simulate for the commanded one."""
        return ctrl - self._ctrl


def check(task: Task, id: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse the range joint_offset for a task that does not declare how it reads joints.

    Raises EnvError.
    """
    if "joint_offset" in ranges and not task.reads_joints_from_state:
        raise EnvError(
            f"env.id={id}: env.ranges.joint_offset={show(ranges['joint_offset'])}: only tasks with"
            " the attribute reads_joints_from_state have it, such as Go1Joystick and PandaPickCube;"
            " remove it"
        )


def _hinges_and_servos(model: mujoco.MjModel) -> tuple[list[int], dict[int, int], list[float]]:
    """Return the hinges with an actuator, position servo -> its hinge, and the servos' gears."""
    kinds = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)
    acts_on_joint = np.isin(model.actuator_trntype, [int(kind) for kind in kinds])
    joints: list[int] = []
    servos: dict[int, int] = {}
    gears: list[float] = []
    for i in np.flatnonzero(acts_on_joint):
        joint = int(model.actuator_trnid[i, 0])
        if model.jnt_type[joint] != int(mujoco.mjtJoint.mjJNT_HINGE):
            continue
        if joint not in joints:
            joints.append(joint)
        gain, bias = model.actuator_gainprm[i, 0], model.actuator_biasprm[i, 1]
        if bias == -gain != 0:  # force = gain (ctrl - gear · angle) - ..
            servos[int(i)] = joint
            gears.append(float(model.actuator_gear[i, 0]))
    return joints, servos, gears
