"""Go1Joystick: a Unitree Go1, a quadruped of 12.7 kg, follows velocity commands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import mujoco
import torch
from torch import Tensor

from embodied_envs.robots.observation_parts import Part
from embodied_envs.robots.velocity import QUADRUPED, VelocityCommands
from embodied_envs.tasks.panda import asset_file
from embodied_envs.tasks.task import State

# A foot, whose radius is 23 mm, is on the ground where its centre is lower than this.
FOOT_M = 0.026


class Go1Joystick(VelocityCommands):
    """Walk on flat ground for 500 steps of 20 ms and follow the command.

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

    Reward: the weighted terms ``rewards``, in sum at least 0. The episode ends if the trunk is
    lower than 15 cm or tilts by 60 degrees. Commands and success: ``VelocityCommands``.

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
    step_noise = 4 + 1 + 33
    base_qpos, base_dof = 0, 0
    rewards: Mapping[str, Mapping[str, float]] = QUADRUPED
    action_scale_rad = 0.5
    # Largest noise: velocity, m/s, angular velocity, rad/s, gravity, joint positions, rad, and
    # joint velocities, rad/s.
    sensor_noise = (0.1,) * 3 + (0.2,) * 3 + (0.05,) * 3 + (0.03,) * 12 + (1.5,) * 12

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
        """Store the home pose and the feet."""
        super().bind(model, device, dtype)
        tensor = partial(torch.tensor, device=device, dtype=dtype)
        feet = [model.site(name).id for name in ("FR", "FL", "RR", "RL")]
        self.feet, self.floor = torch.tensor(feet, device=device), model.geom("floor").id
        self.qpos0, self.home = tensor(model.key("home").qpos), tensor(model.key("home").ctrl)
        self.home_height, self.reset_noise = float(self.qpos0[2]), 4 + 12 + 33
        self.low, self.high = tensor(model.actuator_ctrlrange).unbind(1)
        self.noise = tensor(self.sensor_noise)

    def control(self, s: State, action: Tensor) -> Tensor:
        return (self.home + self.action_scale_rad * action).clamp(self.low, self.high)

    def observe(self, s: State) -> Tensor:
        body, joints = self.measured(s)
        body, joints = body + s["noise"][:, :9], joints + s["noise"][:, 9:]
        return torch.cat([body, s["command"], joints, s["last_action"]], 1)

    def measured(self, s: State) -> tuple[Tensor, Tensor]:
        """Return motion and direction of the trunk [N, 9], and of the joints [N, 24]."""
        trunk = [self.base_velocity(s), self.base_angular_velocity(s), self.base_gravity(s)]
        return torch.cat(trunk, 1), torch.cat([self.joint_positions(s), s["qvel"][:, 6:]], 1)

    def observation_parts(self, model: mujoco.MjModel) -> list[Part]:
        joints = tuple(model.joint(i).name for i in range(1, model.njnt))
        return [
            Part("velocity", ("trunk",)),
            Part("angular_velocity", ("trunk",)),
            Part("gravity", ("trunk",)),
            Part("command", tuple(self.commands)),
            Part("joint_positions", joints, offset=tuple(model.key("home").qpos[7:].tolist())),
            Part("joint_velocities", joints),
            Part("last_action", joints),
        ]

    def privileged(self, s: State) -> Tensor:
        true_state = [*self.measured(s), self.height(s)[:, None]]
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

    # -------------------------------------------------------------------------- what the terms read
    def joint_positions(self, s: State) -> Tensor:
        return s["qpos"][:, 7:] - self.home

    def down(self, s: State) -> Tensor:
        """Return bool [N, 4], whether each foot is on the ground."""
        return self.foot_positions(s)[..., 2] < FOOT_M

    def terminated(self, s: State) -> Tensor:
        return (self.height(s) < 0.15) | (self.base_gravity(s)[:, 2] > -0.5)

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return super().advance(s, action, u) | {"noise": self.noise * (2 * u[:, 5:] - 1)}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the home pose with noise of up to 0.1 rad on each joint, and a command."""
        qpos = self.qpos0.repeat(len(u), 1)
        qpos[:, 7:] += 0.2 * u[:, 4:16] - 0.1
        return {
            "qpos": qpos,
            "ctrl": self.home.repeat(len(u), 1),
            "noise": self.noise * (2 * u[:, 16:] - 1),
            "last_action": torch.zeros_like(qpos[:, 7:]),
            **self.begin(u[:, :4], 4),
        }
