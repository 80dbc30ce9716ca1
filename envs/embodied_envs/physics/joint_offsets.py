"""Calibration errors of joint encoders: what a robot measures of its joints is shifted."""

from __future__ import annotations

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.physics.engine import Physics
from embodied_envs.tasks.task import State


class JointOffsets:
    """A constant error of the zero of each encoder, drawn per episode.

    The encoder of a joint at angle q measures q + x. The servo compares its target with the
    measured angle, so a target c moves the joint to c - x: ``Randomization`` shifts the bias of the
    servo, so that MuJoCo limits the command c by its ctrlrange. ``measured`` is the state as the
    robot measures it, in which qpos is shifted by x; ctrl is the command.

    Joints are the hinges with an actuator; motors have no target.
    """

    def __init__(self, physics: Physics, randomization: Randomization) -> None:
        """Find joints and servos.

        Args:
            physics: The worlds.
            randomization: Their random model, with the range joint_offset.

        Raises:
            EnvError: The model has no hinge joint with an actuator.
        """
        self._randomization, self._encoders = randomization, randomization.encoders
        if not self._encoders.joints:
            value = list(randomization.ranges["joint_offset"])
            raise EnvError(f"remove env.ranges.joint_offset={value}: no actuator moves a hinge")
        addresses = [int(physics.model.jnt_qposadr[j]) for j in self._encoders.joints]
        self._qpos_index = torch.tensor(addresses, dtype=torch.int64, device=physics.device)
        self._qpos, self._ctrl = (torch.zeros_like(physics.fields[k]) for k in ("qpos", "ctrl"))
        # [N, joints], rad.
        self.offset = torch.zeros_like(self._qpos[:, self._qpos_index])

    def begin(self, where: Tensor, u: Tensor) -> None:
        """Set the offsets of new episodes.

        Args:
            where: bool [N], whether an episode starts.
            u: The random numbers of the worlds' models, see ``Physics.reset``.
        """
        drawn = self._randomization.draw("joint_offset", u.to(self.offset))
        self.load(torch.where(where[:, None], drawn, self.offset))

    def load(self, offset: Tensor) -> None:
        """Set the offsets [N, joints], rad."""
        self.offset.copy_(offset)
        self._qpos.index_copy_(1, self._qpos_index, self.offset)
        self._ctrl.index_copy_(1, self._encoders.servo_index, self._encoders.to_servo_units(offset))

    def measured(self, s: State) -> dict[str, Tensor]:
        """Return the state with qpos as the robot measures it."""
        return {**s, "qpos": s["qpos"] + self._qpos}

    def command(self, target: Tensor | None) -> Tensor:
        """Return the ctrl [N, nu] that moves the joints to the true ``target``; None: zeros.

        An episode starts with it, so that servos which hold the initial state continue to do so.
        """
        return self._ctrl.clone() if target is None else target + self._ctrl
