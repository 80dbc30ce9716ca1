"""Go1Joystick: a Unitree Go1, a quadruped of 12.7 kg, follows velocity commands."""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from embodied_envs.robots.robot_task import to_body_frame
from embodied_envs.tasks.panda import asset_file
from embodied_envs.tasks.task import State, Task

FOOT_M = 0.026
"""A foot, whose radius is 23 mm, is on the ground where its centre is lower than this."""


class Go1Joystick(Task):
    """Walk on flat ground for 500 steps of 20 ms and follow the command.

    The command is forward and sideways velocity (m/s) and yaw rate (rad/s). It changes every 5 s on
    average; one in ten is to stand still.

    Action [N, 12] in [-1, 1]: the position targets of the joints are the home pose plus 0.5 rad
    times the action.

    Observation [N, 48], in the trunk's frame (x forward, y left, z up). All but command and last
    action have uniform noise, ``sensor_noise``:
    0:3    velocity, m/s
    3:6    angular velocity, rad/s
    6:9    direction of gravity
    9:12   command
    12:24  joint positions minus home, rad
    24:36  joint velocities, rad/s
    36:48  last action

    Privileged observation [N, 87]:
    0:33   velocity, angular velocity, gravity, joint positions and velocities without noise
    33     height of the trunk, m
    34:38  whether each foot is on the ground
    38:42  seconds since each foot left the ground
    42     sliding friction of the ground, which that of the feet does not change
    43:56  masses of the bodies, kg
    56:68  stiffness of the actuators, N m/rad
    68:86  forces of contacts and joint limits on the trunk (N, N m) and the joints, N m
    86     share of the episode that has passed

    Reward: the sum of ``reward_terms``, at least 0. The episode ends if the trunk is lower than 15
    cm or tilts by 60 degrees. Success is decided in the last of 500 steps: the mean errors of
    velocity and yaw rate are below 0.2 m/s and 0.3 rad/s.

    Robot, gains, noise and contacts (feet only) are those of Go1JoystickFlatTerrain in MuJoCo
    Playground (Zakka et al. 2025). Different are the physics steps, 4 of 5 ms instead of 5 of 4 ms,
    and the solver's iterations, 3 instead of 1, which has errors of 0.2 rad/s. Joints and feet are
    in the order front right, front left, rear right, rear left.
    """

    id = "Go1Joystick"
    decimation, max_episode_steps = 4, 500
    fields, before = ("site_xpos", "actuator_force"), ("site_xpos",)
    privileged_fields = ("geom_friction", "body_mass", "actuator_gainprm", "qfrc_constraint")
    reads_joints_from_state = True
    reset_noise, step_noise = 4 + 12 + 33, 4 + 1 + 33
    ranges: Mapping[str, tuple[float, float]] = {
        "mass": (0.8, 1.2),
        "friction": (0.5, 1.5),
        "gains": (0.9, 1.1),
    }

    commands: Mapping[str, tuple[float, float]] = {
        "lin_vel_x": (-0.8, 1.0),
        "lin_vel_y": (-0.5, 0.5),
        "ang_vel_yaw": (-1.0, 1.0),
    }
    still = 0.1
    """Share of commands that are zero."""
    change = 0.004
    """Probability of a new command in a step: once in 5 s."""
    action_scale_rad = 0.5
    tolerance = (0.2, 0.3)
    """Largest mean errors of a success, m/s and rad/s."""
    sensor_noise = (0.1,) * 3 + (0.2,) * 3 + (0.05,) * 3 + (0.03,) * 12 + (1.5,) * 12
    """Largest noise: velocity, m/s, angular velocity, rad/s, gravity, joint positions, rad, and
    joint velocities, rad/s."""
    air_s = 0.2
    """Desired time of a foot between two contacts."""

    def spec(self) -> mujoco.MjSpec:
        """Return the robot, whose feet collide, drawn as the shapes of its collision model."""
        scene = "mujoco_playground/_src/locomotion/go1/xmls/scene_mjx_feetonly_flat_terrain.xml"
        spec = mujoco.MjSpec.from_file(str(asset_file(scene)))
        visual_geoms = [geom for geom in spec.geoms if geom.classname.name == "visual"]
        for element in [*spec.sensors, *visual_geoms, *spec.meshes]:
            spec.delete(element)
        for geom in spec.geoms:
            if geom.name != "floor":
                geom.group, geom.rgba = 0, (0.2, 0.22, 0.25, 1)
        spec.material("groundplane").rgba = (0.7, 0.7, 0.7, 1)
        spec.option.timestep, spec.option.iterations = 0.005, 3
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store the home pose, the feet, and the bounds of commands."""

        def tensor(x: ArrayLike) -> Tensor:
            return torch.tensor(np.asarray(x), device=device, dtype=dtype)

        self.dt_s = model.opt.timestep * self.decimation
        feet = [model.site(name).id for name in ("FR", "FL", "RR", "RL")]
        self.feet, self.floor = torch.tensor(feet, device=device), model.geom("floor").id
        self.qpos0, self.home = tensor(model.key("home").qpos), tensor(model.key("home").ctrl)
        self.low, self.high = tensor(model.actuator_ctrlrange).unbind(1)
        bounds = tensor(list(self.commands.values()))
        self.noise = tensor(self.sensor_noise)
        self.least, self.extent = bounds[:, 0], bounds[:, 1] - bounds[:, 0]

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """Return -1 and 1 for every dimension."""
        return [-1.0] * model.nu, [1.0] * model.nu

    def control(self, s: State, action: Tensor) -> Tensor:
        return (self.home + self.action_scale_rad * action).clamp(self.low, self.high)

    def observe(self, s: State) -> Tensor:
        body = torch.cat([velocity(s), s["qvel"][:, 3:6], gravity(s)], 1) + s["noise"][:, :9]
        joints = torch.cat([s["qpos"][:, 7:] - self.home, s["qvel"][:, 6:]], 1) + s["noise"][:, 9:]
        return torch.cat([body, s["command"], joints, s["last_action"]], 1)

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        axes = "xyz"
        joints = [model.joint(i).name.removesuffix("_joint") for i in range(1, model.njnt)]
        return [
            *((f"velocity {axis}", "m/s") for axis in axes),
            *((f"angular velocity {axis}", "rad/s") for axis in axes),
            *((f"gravity {axis}", None) for axis in axes),
            *(("command forward", "m/s"), ("command sideways", "m/s"), ("command yaw", "rad/s")),
            *((f"{joint} position minus home", "rad") for joint in joints),
            *((f"{joint} velocity", "rad/s") for joint in joints),
            *((f"{joint} last action", None) for joint in joints),
        ]

    def privileged(self, s: State) -> Tensor:
        joints = [s["qpos"][:, 7:] - self.home, s["qvel"][:, 6:]]
        true_state = [velocity(s), s["qvel"][:, 3:6], gravity(s), *joints, self.height(s)[:, None]]
        model = [
            # The floor has the higher priority, so its friction is that of the contacts.
            s["geom_friction"][:, self.floor, :1],
            s["body_mass"][:, 1:],
            s["actuator_gainprm"][:, :, 0],
        ]
        elapsed = s["steps"].unsqueeze(1) / self.max_episode_steps
        return torch.cat(
            [*true_state, self.down(s), s["air"], *model, s["qfrc_constraint"], elapsed], 1
        )

    # ----------------------------------------------------------------------------------- the reward
    def reward_terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        """Return the terms of the reward, [N] each; the signs are those of the factors below.

        track   exp(-4·error²) of the horizontal velocity
        turn    exp(-4·error²) of the yaw rate
        bounce  vertical velocity squared
        sway    roll and pitch rate squared
        tilt    gravity's component in the trunk's plane, squared
        pose    joint positions minus home, squared
        effort  torques squared
        change  change of the action, squared
        air     for each foot that lands: its seconds in the air minus ``air_s``
        stuck   1 while all feet are on the ground
        slip    horizontal speed of feet on the ground, squared

        The terms air and stuck are 0 while the command is to stand still.
        """
        move, turn = self.errors(s)
        v, w, qpos = velocity(s), s["qvel"][:, 3:6], s["qpos"]
        down = self.down(s)
        moving = s["command"].square().sum(1) > 0
        old_xy, xy = (x["site_xpos"][:, self.feet, :2] for x in (before, s))
        foot_velocity = (xy - old_xy) / self.dt_s
        landed = down & (s["air"] > 0)
        return {
            "track": torch.exp(-4 * move.square()),
            "turn": 0.5 * torch.exp(-4 * turn.square()),
            "bounce": -0.5 * v[:, 2].square(),
            "sway": -0.01 * w[:, :2].square().sum(1),
            "tilt": -1.0 * gravity(s)[:, :2].square().sum(1),
            "pose": -0.1 * (qpos[:, 7:] - self.home).square().sum(1),
            "effort": -2e-4 * s["actuator_force"].square().sum(1),
            "change": -0.01 * (action - s["last_action"]).square().sum(1),
            "air": 1.0 * (landed * (s["air"] - self.air_s)).sum(1) * moving,
            "stuck": -0.3 * (down.all(1) & moving),
            "slip": -0.05 * (down * foot_velocity.square().sum(2)).sum(1),
        }

    def errors(self, s: State) -> tuple[Tensor, Tensor]:
        """Return the errors of horizontal velocity, m/s, and yaw rate, rad/s, [N] each."""
        move = (velocity(s)[:, :2] - s["command"][:, :2]).norm(dim=1)
        return move, (s["qvel"][:, 5] - s["command"][:, 2]).abs()

    def down(self, s: State) -> Tensor:
        """Return bool [N, 4], whether each foot is on the ground."""
        return s["site_xpos"][:, self.feet, 2] < FOOT_M

    def height(self, s: State) -> Tensor:
        """Return the height of the trunk above the ground, m, [N]."""
        return s["qpos"][:, 2]

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return self.total(self.reward_terms(before, s, action))

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        return torch.stack(list(terms.values())).sum(0).clamp(min=0)

    def terminated(self, s: State) -> Tensor:
        return (self.height(s) < 0.15) | (gravity(s)[:, 2] > -0.5)

    def success(self, s: State) -> Tensor:
        steps, error = s["steps"], s["error"]
        move, turn = (error[:, i] < tolerance * steps for i, tolerance in enumerate(self.tolerance))
        return (steps >= self.max_episode_steps - 1) & move & turn

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {
            "command": torch.where(u[:, 4:5] < self.change, self.command(u), s["command"]),
            "noise": self.noise * (2 * u[:, 5:] - 1),
            "last_action": action,
            "air": (s["air"] + self.dt_s).masked_fill(self.down(s), 0.0),
            "steps": s["steps"] + 1,
            "error": s["error"] + torch.stack(self.errors(s), 1),
        }

    def command(self, u: Tensor) -> Tensor:
        """Return a command [N, 3] from uniform numbers [N, 4 or more]."""
        return (self.least + u[:, :3] * self.extent) * (u[:, 3:4] >= self.still)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the home pose with noise of up to 0.1 rad on each joint, and a command."""
        qpos = self.qpos0.repeat(len(u), 1)
        qpos[:, 7:] += 0.2 * u[:, 4:16] - 0.1
        zero = torch.zeros_like(qpos[:, 0])
        return {
            "qpos": qpos,
            "ctrl": self.home.repeat(len(u), 1),
            "command": self.command(u),
            "noise": self.noise * (2 * u[:, 16:] - 1),
            "last_action": torch.zeros_like(qpos[:, 7:]),
            "air": torch.zeros_like(qpos[:, :4]),
            "steps": zero,
            "error": torch.stack([zero, zero], 1),
        }


def velocity(s: State) -> Tensor:
    """Return the trunk's velocity in its own frame, m/s, [N, 3]."""
    return to_body_frame(s["qpos"][:, 3:7], s["qvel"][:, :3])


def gravity(s: State) -> Tensor:
    """Return the direction of gravity in the trunk's frame, [N, 3].

    It is minus the third row of the rotation matrix from trunk to world.
    """
    w, x, y, z = s["qpos"][:, 3:7].unbind(1)
    return torch.stack([2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1], 1)
