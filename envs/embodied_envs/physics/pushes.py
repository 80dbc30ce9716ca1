"""Random pushes: sudden changes of the horizontal velocity of a robot's base."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.physics.engine import Physics
from embodied_envs.robots.robot_model import FREE, RobotModel

# Stream of random numbers, see ``base.random``; ``MujocoEnv`` uses 0 and 1.
STREAM = 2


class Pushes:
    """Push the base of each robot at random times of its episodes.

    A push adds a horizontal velocity to the root free joint, and so to all bodies of the robot. Its
    size, its direction (all are equally likely) and the time until the next push are uniform random
    numbers, functions of the environment's seed, the episode and the control step.
    """

    def __init__(
        self, physics: Physics, *, id: str, velocity: tuple[float, float], interval: tuple[int, int]
    ) -> None:
        """Find the base of the robot.

        Args:
            physics: The worlds.
            id: ``env.id``, for messages.
            velocity: Bounds of the size, m/s.
            interval: Bounds of the control steps from the start of an episode to the first push,
                and from a push to the next one, at least 1.

        Raises:
            EnvError: The model has no robot with a root free joint, or several.
        """
        self.physics, self.velocity, self.interval = physics, velocity, interval
        robot, model = RobotModel(physics.model), physics.model
        # A free body without an actuator, such as a block, is no robot.
        count = sum(int(body) in robot.roots for body in model.jnt_bodyid[model.jnt_type == FREE])
        if count != 1:
            raise EnvError(
                f"remove env.realism.push_velocity: env.id={id} has {count} robots whose root is a"
                " free joint, and pushes need one"
            )
        dof = robot.base_dof
        self._xy = physics.fields["qvel"][:, dof : dof + 2]
        # int64 [N]: control steps of the episode before the next push.
        self.next = torch.zeros(len(self._xy), dtype=torch.int64, device=physics.device)

    def begin(self, where: Tensor, seeds: Tensor, episode: Tensor) -> None:
        """Draw the first push of new episodes.

        Args:
            where: bool [N], whether an episode starts.
            seeds: int64 [N].
            episode: int64 [N], its number.
        """
        u = self.physics.uniform(seeds, STREAM, episode << 32, 3)
        torch.where(where, self._interval(u), self.next, out=self.next)

    def apply(self, seeds: Tensor, episode: Tensor, elapsed: Tensor) -> None:
        """Push the robots that are due, before the physics of a control step.

        Args:
            seeds: int64 [N].
            episode: int64 [N], its number.
            elapsed: int64 [N], control steps of the episode so far.
        """
        due = elapsed == self.next
        if self.physics.host_readable and not bool(due.any()):
            return
        u = self.physics.uniform(seeds, STREAM, (episode << 32) + elapsed, 3)
        low, high = self.velocity
        size, angle = low + (high - low) * u[:, 0], 2 * math.pi * u[:, 1]
        change = torch.stack([size * angle.cos(), size * angle.sin()], 1)
        self._xy.copy_(torch.where(due[:, None], self._xy + change, self._xy))
        torch.where(due, elapsed + self._interval(u), self.next, out=self.next)

    def _interval(self, u: Tensor) -> Tensor:
        """Map the last of three uniform numbers [N, 3] to control steps, int64 [N]."""
        low, high = self.interval
        return low + (u[:, 2] * (high - low + 1)).long().clamp(max=high - low)
