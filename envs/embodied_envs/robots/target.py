"""TargetTask: bring the tip of an arm, or a drone, to a target and stay there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from embodied_envs.robots.observation_parts import COMMAND_UNITS, Part, describe
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.robots.robot_task import RobotTask
from embodied_envs.robots.terms import to_body_frame
from embodied_envs.tasks.task import State


class TargetTask(RobotTask):
    """Bring a site or body, ``tip``, to the target, whose position is the command x, y, z in m.

    Observation: that of ``RobotTask``, then the vector to the target, and of a floating robot its
    velocity, both in the frame of the base. Success: the distance in the last step is below
    ``tolerance_m``. A floating robot that falls, or is ``far_m`` from the target, ends the episode.
    """

    # Site or body.
    tip: ClassVar[str]
    commands: Mapping[str, tuple[float, float]] = dict.fromkeys("xyz", (0.0, 0.0))
    max_episode_steps = 250
    fields = (*RobotTask.fields, "xpos", "site_xpos")
    tolerance_m, far_m = 0.05, 3.0

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        self.is_site = self.tip in [model.site(i).name for i in range(model.nsite)]
        self.tip_id = (model.site(self.tip) if self.is_site else model.body(self.tip)).id
        self.reset_noise += 3

    def command_errors(self, s: State) -> Tensor:
        return s["site_xpos" if self.is_site else "xpos"][:, self.tip_id] - s["command"]

    def observe(self, s: State) -> Tensor:
        vector = -self.command_errors(s)
        if not self.floats:
            return torch.cat([super().observe(s), vector], 1)
        quaternion = s["qpos"][:, self.base_qpos + 3 : self.base_qpos + 7]
        vector = to_body_frame(quaternion, vector)
        return torch.cat([super().observe(s), vector, self.base_velocity(s)], 1)

    def observation_parts(self, model: mujoco.MjModel) -> list[Part]:
        """Return none: a robot measures its distance from the target in its own way."""
        return []

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        robot = RobotModel(model, self.preparation.key)
        names = [(f"to target {name}", COMMAND_UNITS.get(name)) for name in self.commands]
        if robot.base is not None:
            names += [(f"velocity {axis}", "m/s") for axis in "xyz"]
        return [*describe(robot.parts(), model), *names]

    # ---------------------------------------------------------------------------------------- terms
    def distance(self, before: State, s: State, action: Tensor) -> Tensor:
        """Distance from the target, m."""
        return self.command_errors(s).norm(dim=1)

    def target(self, before: State, s: State, action: Tensor, *, scale_m: float) -> Tensor:
        """1 - tanh(distance / scale_m)."""
        return 1 - torch.tanh(self.distance(before, s, action) / scale_m)

    def base_lin_vel(self, before: State, s: State, action: Tensor) -> Tensor:
        """Velocity of the floating base, squared."""
        return self.base_velocity(s).square().sum(1)

    def base_ang_vel(self, before: State, s: State, action: Tensor) -> Tensor:
        """Angular velocity of the floating base, squared."""
        return self.base_angular_velocity(s).square().sum(1)

    def joint_vel(self, before: State, s: State, action: Tensor) -> Tensor:
        """Velocities of the joints, squared."""
        return s["qvel"][:, self.qvel].square().sum(1)

    # ------------------------------------------------------------------------------------ variables
    def terminated(self, s: State) -> Tensor:
        far = self.command_errors(s).norm(dim=1) > self.far_m
        return self.fallen(s) | (far & self.floats)

    def success(self, s: State) -> Tensor:
        is_near = self.command_errors(s).norm(dim=1) < self.tolerance_m
        return is_near & (s["steps"] >= self.max_episode_steps - 1)

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return super().advance(s, action, u) | {"steps": s["steps"] + 1}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the start of ``RobotTask`` and a target."""
        command = self.least + u[:, -3:] * self.extent
        return super().reset(u[:, :-3]) | {"command": command, "steps": torch.zeros_like(u[:, 0])}
