"""Tasks of following commands of velocity, for any robot with a floating base and feet."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.observation_parts import Part
from embodied_envs.robots.preparation import CONTACTS, SOLE
from embodied_envs.robots.robot_task import RobotTask
from embodied_envs.robots.terms import TermTask
from embodied_envs.tasks.task import State, Term

# Those of Go1Joystick.
QUADRUPED: dict[str, dict[str, float]] = {
    "tracking_lin_vel": {"weight": 1.0, "sigma": 0.25},
    "tracking_ang_vel": {"weight": 0.5, "sigma": 0.25},
    "lin_vel_z": {"weight": -0.5},
    "ang_vel_xy": {"weight": -0.01},
    "orientation": {"weight": -1.0},
    "pose": {"weight": -0.1},
    "torques": {"weight": -2e-4},
    "action_rate": {"weight": -0.01},
    "feet_air_time": {"weight": 1.0, "threshold_s": 0.2},
    "all_feet_down": {"weight": -0.3},
    "feet_slip": {"weight": -0.05},
}
LEAST_S = 1.0  # least duration of an episode without a fall that changes the share of the ranges


class VelocityCommands(TermTask):
    """Commands of velocity, their terms, and success, for a task that can read its base and feet.

    The command is forward and sideways velocity (m/s) and yaw rate (rad/s), uniform in the ranges
    of ``commands``. Success is decided in the last of ``max_episode_steps``: the mean errors of
    velocity and yaw rate are below ``tolerance``.

    Variables: "command" [N, 3], "last_action" [N, nu], "air" [N, feet], seconds since each foot
    left the ground, "steps" [N], and "error" [N, 2], the sums of the errors.
    """

    commands: Mapping[str, tuple[float, float]] = {
        "lin_vel_x": (-0.8, 1.0),
        "lin_vel_y": (-0.5, 0.5),
        "ang_vel_yaw": (-1.0, 1.0),
    }
    ranges: Mapping[str, tuple[float, float]] = {
        "mass": (0.8, 1.2),
        "friction": (0.5, 1.5),
        "gains": (0.9, 1.1),
    }
    # Largest mean errors of a success, m/s and rad/s.
    tolerance = (0.2, 0.3)
    least_reward = 0.0
    # Change of the share of the ranges after an episode, and the smallest share (curriculum).
    share_step, least_share = 0.1, 0.2
    # Control step.
    dt_s: float
    # Site of each foot.
    feet: Tensor

    def __init__(
        self, resample_s: float = 5.0, standing: float = 0.1, command_curriculum: bool = False
    ) -> None:
        """Select the commands.

        Args:
            resample_s: Mean time between two commands.
            standing: Share of commands that are zero, in the components whose range contains 0.
            command_curriculum: Whether the share of the ranges that an environment uses grows after
                an episode that meets ``tolerance``, and shrinks after a fall or twice the errors.
                Its first episode, hence an evaluation, uses the whole ranges.

        Raises:
            EnvError: A value is out of range.
        """
        if not (isinstance(resample_s, (int, float)) and 0 < resample_s < math.inf):
            raise EnvError(f"write seconds above 0: resample_s={resample_s!r}")
        if not (isinstance(standing, (int, float)) and 0 <= standing <= 1):
            raise EnvError(f"write a share from 0 to 1: standing={standing!r}")
        self.resample_s, self.standing = resample_s, standing
        self.command_curriculum = command_curriculum

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store the control step and the ranges of the commands."""
        super().bind(model, device, dtype)
        self.dt_s = float(model.opt.timestep) * self.decimation
        self.never_zero = (self.least > 0) | (self.least + self.extent < 0)

    # ------------------------------------------------------------------- what the subclass can read
    @abstractmethod
    def joint_positions(self, s: State) -> Tensor:
        """Return joint positions minus home, rad, [N, joints]."""

    def foot_positions(self, s: State) -> Tensor:
        """Return the position of each foot, m, [N, feet, 3]; of ``before``, too."""
        return s["site_xpos"][:, self.feet]

    def foot_heights(self, s: State) -> Tensor:
        """Return the height of each foot above the ground, m, [N, feet]."""
        return self.foot_positions(s)[..., 2]

    @abstractmethod
    def down(self, s: State) -> Tensor:
        """Return bool [N, feet], whether each foot is on the ground."""

    # ---------------------------------------------------------------------------------------- terms
    def errors(self, s: State) -> tuple[Tensor, Tensor]:
        """Return the errors of horizontal velocity, m/s, and yaw rate, rad/s, [N] each."""
        error = self.command_errors(s)
        return error[:, :2].norm(dim=1), error[:, 2].abs()

    def command_errors(self, s: State) -> Tensor:
        return s["command_error"] if "command_error" in s else self.shared(s)["command_error"]

    def shared(self, s: State) -> Mapping[str, Tensor]:
        """Return "velocity" of the base, "command_error", and whether the feet are "down"."""
        velocity, turn = self.base_velocity(s), self.base_angular_velocity(s)[:, 2:]
        error = torch.cat([velocity[:, :2], turn], 1) - s["command"]
        return {"velocity": velocity, "command_error": error, "down": self.down(s)}

    def moving(self, s: State) -> Tensor:
        """Return bool [N], whether the command is not to stand still."""
        return s["command"].square().sum(1) > 0

    def tracking_lin_vel(
        self, before: State, s: State, action: Tensor, *, sigma: float = 0.25
    ) -> Tensor:
        """exp(-error² / sigma) of the horizontal velocity."""
        return torch.exp(-self.errors(s)[0].square() / sigma)

    def tracking_ang_vel(
        self, before: State, s: State, action: Tensor, *, sigma: float = 0.25
    ) -> Tensor:
        """exp(-error² / sigma) of the yaw rate."""
        return torch.exp(-self.errors(s)[1].square() / sigma)

    def lin_vel_z(self, before: State, s: State, action: Tensor) -> Tensor:
        """Vertical velocity squared."""
        return s["velocity"][:, 2].square()

    def ang_vel_xy(self, before: State, s: State, action: Tensor) -> Tensor:
        """Roll and pitch rate squared."""
        return self.base_angular_velocity(s)[:, :2].square().sum(1)

    def orientation(self, before: State, s: State, action: Tensor) -> Tensor:
        """Gravity's component in the plane of the base, squared."""
        return self.base_gravity(s)[:, :2].square().sum(1)

    def pose(self, before: State, s: State, action: Tensor) -> Tensor:
        """Joint positions minus home, squared."""
        return self.joint_positions(s).square().sum(1)

    def torques(self, before: State, s: State, action: Tensor) -> Tensor:
        """Forces of the actuators squared, N² m²."""
        return s["actuator_force"].square().sum(1)

    def feet_air_time(
        self, before: State, s: State, action: Tensor, *, threshold_s: float = 0.2
    ) -> Tensor:
        """For each foot that lands: seconds in the air minus the threshold; 0 while standing."""
        landed = s["down"] & (s["air"] > 0)
        return (landed * (s["air"] - threshold_s)).sum(1) * self.moving(s)

    def all_feet_down(self, before: State, s: State, action: Tensor) -> Tensor:
        """1 while all feet are on the ground and the command is not to stand still."""
        return s["down"].all(1) & self.moving(s)

    def feet_slip(self, before: State, s: State, action: Tensor) -> Tensor:
        """Horizontal speed of feet on the ground, squared."""
        old_xy, xy = (self.foot_positions(x)[..., :2] for x in (before, s))
        return (s["down"] * ((xy - old_xy) / self.dt_s).square().sum(2)).sum(1)

    def stand_still(self, before: State, s: State, action: Tensor) -> Tensor:
        """Absolute joint positions minus home while the command is to stand still."""
        return self.joint_positions(s).abs().sum(1) * ~self.moving(s)

    # ----------------------------------------------------------------- commands and other variables
    def new_command(self, u: Tensor) -> Tensor:
        """Return a command [N, 3] from uniform numbers [N, 4]."""
        is_kept = (u[:, 3:4] >= self.standing) | self.never_zero
        return (self.least + u[:, :3] * self.extent) * is_kept

    def begin(self, u: Tensor, feet: int) -> dict[str, Tensor]:
        """Return the initial variables from uniform numbers [N, 4], without "last_action"."""
        zero = torch.zeros_like(u[:, 0])
        share = {"command_share": torch.ones_like(zero)} if self.command_curriculum else {}
        return {
            "command": self.new_command(u),
            "air": torch.zeros_like(u[:, :1]).repeat(1, feet),
            "steps": zero,
            "error": torch.stack([zero, zero], 1),
            **share,
        }

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        """Return the variables after a control step; ``u`` is [N, 5 or more]."""
        command = self.new_command(u[:, :4])
        if self.command_curriculum:
            command = command * s["command_share"][:, None]
        is_new = u[:, 4:5] < self.dt_s / self.resample_s
        s = {**s, **self.shared(s)}
        return {
            "command": torch.where(is_new, command, s["command"]),
            "last_action": action,
            "air": (s["air"] + self.dt_s).masked_fill(s["down"], 0.0),
            "steps": s["steps"] + 1,
            "error": s["error"] + torch.stack(self.errors(s), 1),
        }

    def carry_over(self, s: State, start: State, u: Tensor) -> dict[str, Tensor]:
        """Return the share of the commands' ranges in the next episode, with the curriculum."""
        if not self.command_curriculum:
            return {}
        # Action chunks, and the truncation of first episodes, cut some that are too short to judge.
        is_long = s["steps"] * self.dt_s >= LEAST_S
        up = ~self.terminated(s) & self._within(s, 1.0) & is_long
        down = self.terminated(s) | (~self._within(s, 2.0) & is_long)
        share = s["command_share"] + self.share_step * (up.to(u) - down.to(u))
        share = share.clamp(self.least_share, 1.0)
        return {"command_share": share, "command": start["command"] * share[:, None]}

    def _within(self, s: State, factor: float) -> Tensor:
        """Return bool [N], whether the mean errors are below ``factor`` times the tolerance."""
        steps, error = s["steps"], s["error"]
        move, turn = (error[:, i] < factor * x * steps for i, x in enumerate(self.tolerance))
        return move & turn

    def success(self, s: State) -> Tensor:
        return (s["steps"] >= self.max_episode_steps - 1) & self._within(s, 1.0)


class VelocityTask(RobotTask, VelocityCommands):
    """Follow commands of velocity with any robot that has a floating base, z up, and feet.

    Observation: that of ``RobotTask``, then the command and, with ``gait_hz``, cosine and sine of
    the gait's phase. Privileged observation: that of ``RobotTask``, then "air".

    An episode ends if the base is below half its height at home or tilts by 60 degrees.
    """

    max_episode_steps, step_noise = 500, 5
    fields, before = (*RobotTask.fields, "site_xpos"), ("site_xpos",)
    # Steps per second of each foot, for the term feet_phase; None: there is no phase.
    gait_hz: float | None = None
    # Share of a joint's range within which dof_pos_limits is 0.
    soft_limit = 0.95

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        robot, count = self.robot, len(self.robot.feet)
        if count < 2:
            raise EnvError(f"{type(self).__name__}: the robot needs a floating base and two feet")

        def tensor(x: object) -> Tensor:
            return torch.tensor(x, device=device, dtype=dtype)

        soles = [model.site(f"{SOLE}{n}").id for n in range(count)]
        self.feet = torch.tensor(soles, device=device)
        self.foot_phase = tensor([n / count for n in range(count)])
        joints = list(robot.joints)
        low, high = model.jnt_range[joints].T
        half = np.where(model.jnt_limited[joints], self.soft_limit * (high - low) / 2, np.inf)
        middle = (low + high) / 2 - robot.home[model.jnt_qposadr[joints]]
        self.soft_low, self.soft_high = tensor(middle - half), tensor(middle + half)
        self.reset_noise += 5  # command, phase

    def available_terms(self) -> Mapping[str, Term]:
        terms = dict(super().available_terms())
        if self.gait_hz is None:
            del terms["feet_phase"]
        return terms

    def observe(self, s: State) -> Tensor:
        parts = [super().observe(s), s["command"]]
        if self.gait_hz is not None:
            angle = 2 * math.pi * s["phase"][:, None]
            parts += [angle.cos(), angle.sin()]
        return torch.cat(parts, 1)

    def observation_parts(self, model: mujoco.MjModel) -> list[Part]:
        phase = [] if self.gait_hz is None else [Part("phase", (str(self.gait_hz),))]
        return [*super().observation_parts(model), Part("command", tuple(self.commands)), *phase]

    def privileged(self, s: State) -> Tensor:
        return torch.cat([super().privileged(s), s["air"]], 1)

    # ---------------------------------------------------------------------------------------- terms
    def dof_pos_limits(self, before: State, s: State, action: Tensor) -> Tensor:
        """Distances of the joints beyond ``soft_limit`` of their range, rad."""
        x = self.joint_positions(s)
        return ((self.soft_low - x).clamp(min=0) + (x - self.soft_high).clamp(min=0)).sum(1)

    def undesired_contacts(self, before: State, s: State, action: Tensor) -> Tensor:
        """Number of contacts of the ground with other parts of the robot than its feet."""
        return self.touches(s, CONTACTS) - s["sensordata"][:, self.foot_contact].sum(1)

    def feet_phase(
        self, before: State, s: State, action: Tensor, *, height_m: float = 0.12
    ) -> Tensor:
        """exp(-squared distances of the feet from their heights in the gait's phase / .01 m²).

        The height rises to ``height_m`` and falls again once in a cycle, along t² (3 - 2t), and the
        feet have equal distances in phase (Zakka et al. 2025, gait.get_rz).
        """
        t = 1 - (2 * ((s["phase"][:, None] + self.foot_phase) % 1) - 1).abs()
        error = self.foot_heights(s) - height_m * t.square() * (3 - 2 * t)
        return torch.exp(-error.square().sum(1) / 0.01)

    def terminated(self, s: State) -> Tensor:
        return self.fallen(s) | (self.base_gravity(s)[:, 2] > -0.5)

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        values = VelocityCommands.advance(self, s, action, u)
        if self.gait_hz is not None:
            values["phase"] = (s["phase"] + self.gait_hz * self.dt_s) % 1
        return values

    def mirrored(self, name: str, x: Tensor) -> Tensor | None:
        """Return the image of a variable; that of two feet's phase is half a period later."""
        return (x + 0.5) % 1 if name == "phase" else super().mirrored(name, x)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the start of ``RobotTask``, a command and a phase."""
        phase = {} if self.gait_hz is None else {"phase": u[:, -1]}
        return super().reset(u[:, :-5]) | self.begin(u[:, -5:-1], len(self.feet)) | phase
