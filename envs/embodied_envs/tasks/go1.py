"""A Unitree Go1, a robot dog of 12.7 kg, walks as a joystick says."""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from embodied_envs.tasks.panda import assets
from embodied_envs.tasks.task import State, Task


class Go1Joystick(Task):
    """500 steps of 20 ms on flat ground. Every 5 s on average another command comes: forward and
    sideways velocity (m/s) and yaw rate (rad/s); one in ten is to stand still.

    Action [N, 12] in [-1, 1]: 0.5 times it is added to the home pose of the joints and becomes
    their position targets.

    Observation [N, 48], of the trunk in its own frame (x forward, y left, z up):
    0:3 velocity, m/s   3:6 angular velocity, rad/s   6:9 direction of gravity   9:12 command
    12:24 joint positions minus home, rad   24:36 joint velocities, rad/s   36:48 last action
    What is measured is off by uniform noise, ``sensor_noise``.

    Reward: ``terms``, summed, at least 0. The episode ends where the trunk is lower than 15 cm or
    tilts by 60 degrees. Success, at the last of 500 steps: until then the velocity was off by less
    than 0.2 m/s and the yaw rate by less than 0.3 rad/s, on average.

    Robot, gains and contacts (feet only) are those of Go1JoystickFlatTerrain in MuJoCo Playground
    (Zakka et al. 2025), noise too, but with 4 physics steps of 5 ms for 5 of 4 ms, and 3 iterations
    of the solver for 1 (errs by 0.2 rad/s). Joints and feet come in the order front right, front
    left, rear right, rear left.
    """

    id = "Go1Joystick"
    decimation, max_episode_steps = 4, 500
    fields, before = ("site_xpos", "actuator_force"), ("site_xpos",)
    reset_noise, step_noise = 4 + 12 + 33, 4 + 1 + 33
    ranges: Mapping[str, tuple[float, float]] = {
        "mass": (0.8, 1.2),
        "friction": (0.5, 1.5),
        "gains": (0.9, 1.1),
    }

    forward_m_s, sideways_m_s, yaw_rad_s = (-0.8, 1.0), (-0.5, 0.5), (-1.0, 1.0)
    """Commands."""
    still = 0.1
    """Share of commands that are zero."""
    change = 0.004
    """Probability of another command in a step: once in 5 s."""
    action_scale_rad = 0.5
    tolerance = (0.2, 0.3)
    """Mean errors that are a success, m/s and rad/s."""
    sensor_noise = (0.1,) * 3 + (0.2,) * 3 + (0.05,) * 3 + (0.03,) * 12 + (1.5,) * 12
    """Largest errors: velocity, m/s, angular velocity, rad/s, gravity, joint positions, rad, and
    velocities, rad/s.
    """
    air_s = 0.2
    """Wanted time of a foot between two contacts."""

    def spec(self) -> mujoco.MjSpec:
        """The robot with feet that collide; seen as the boxes and capsules of its full collision
        model.
        """
        scene = "mujoco_playground/_src/locomotion/go1/xmls/scene_mjx_feetonly_flat_terrain.xml"
        spec = mujoco.MjSpec.from_file(str(assets(scene)))
        for element in [
            *spec.sensors,
            *(g for g in spec.geoms if g.classname.name == "visual"),
            *spec.meshes,
        ]:
            spec.delete(element)
        for geom in spec.geoms:
            if geom.name != "floor":
                geom.group, geom.rgba = 0, (0.2, 0.22, 0.25, 1)
        spec.material("groundplane").rgba = (0.7, 0.7, 0.7, 1)
        spec.option.timestep, spec.option.iterations = 0.005, 3
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """The home pose, the feet, and the commands' box."""

        def tensor(x: ArrayLike) -> Tensor:
            return torch.tensor(np.asarray(x), device=device, dtype=dtype)

        self.dt_s = model.opt.timestep * self.decimation
        self.feet = torch.tensor(
            [model.site(name).id for name in ("FR", "FL", "RR", "RL")], device=device
        )
        self.qpos0, self.home = tensor(model.key("home").qpos), tensor(model.key("home").ctrl)
        self.low, self.high = (
            tensor(model.actuator_ctrlrange[:, 0]),
            tensor(model.actuator_ctrlrange[:, 1]),
        )
        bounds = tensor([self.forward_m_s, self.sideways_m_s, self.yaw_rad_s])
        self.noise = tensor(self.sensor_noise)
        self.least, self.extent = bounds[:, 0], bounds[:, 1] - bounds[:, 0]

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """-1 to 1."""
        return [-1.0] * model.nu, [1.0] * model.nu

    def control(self, s: State, action: Tensor) -> Tensor:
        return (self.home + self.action_scale_rad * action).clamp(self.low, self.high)

    def observe(self, s: State) -> Tensor:
        body = torch.cat([velocity(s), s["qvel"][:, 3:6], gravity(s)], 1) + s["noise"][:, :9]
        joints = torch.cat([s["qpos"][:, 7:] - self.home, s["qvel"][:, 6:]], 1) + s["noise"][:, 9:]
        return torch.cat([body, s["command"], joints, s["last_action"]], 1)

    # ----------------------------------------------------------------------------------- the reward
    def terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        """The reward's parts, [N] each.

        track, turn      exp(-4·error²) of the velocity in the plane, and half of that of the yaw
        rate
        bounce, sway     vertical velocity and roll and pitch rate, squared
        tilt, pose       gravity's part in the trunk's plane, and joint positions from home, squared
        effort, change   torques, and the action's change, squared
        air              for each foot that lands, unless told to stand: seconds that it was in the
        air, beyond 0.2
        stuck            all feet on the ground, unless told to stand
        slip             speed of feet on the ground in the plane, squared
        """
        move, turn = self.errors(s)
        v, w, qpos = velocity(s), s["qvel"][:, 3:6], s["qpos"]
        down = self.down(s)
        moving = s["command"].square().sum(1) > 0
        travel = (
            s["site_xpos"][:, self.feet, :2] - before["site_xpos"][:, self.feet, :2]
        ) / self.dt_s
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
            "slip": -0.05 * (down * travel.square().sum(2)).sum(1),
        }

    def errors(self, s: State) -> tuple[Tensor, Tensor]:
        """How far the velocity in the plane, m/s, and the yaw rate, rad/s, are from the command,
        [N] each.
        """
        move = (velocity(s)[:, :2] - s["command"][:, :2]).norm(dim=1)
        return move, (s["qvel"][:, 5] - s["command"][:, 2]).abs()

    def down(self, s: State) -> Tensor:
        """Which feet are on the ground, bool [N, 4]: their balls of 23 mm, give or take 3 mm."""
        return s["site_xpos"][:, self.feet, 2] < 0.026

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return torch.stack(list(self.terms(before, s, action).values())).sum(0).clamp(min=0)

    def terminated(self, s: State) -> Tensor:
        return (s["qpos"][:, 2] < 0.15) | (gravity(s)[:, 2] > -0.5)

    def success(self, s: State) -> Tensor:
        steps = s["steps"]
        good = [s["error"][:, i] < tolerance * steps for i, tolerance in enumerate(self.tolerance)]
        return (steps >= self.max_episode_steps - 1) & good[0] & good[1]

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
        """[N, 3] from [N, 4 or more]."""
        return (self.least + u[:, :3] * self.extent) * (u[:, 3:4] >= self.still)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """The home pose with joints off by up to 0.1 rad; a command; no time spent and nothing done
        yet.
        """
        qpos = self.qpos0.repeat(len(u), 1)
        qpos[:, 7:] += 0.2 * u[:, 4:16] - 0.1
        none = torch.zeros_like(qpos[:, 0])
        return {
            "qpos": qpos,
            "ctrl": self.home.repeat(len(u), 1),
            "command": self.command(u),
            "noise": self.noise * (2 * u[:, 16:] - 1),
            "last_action": torch.zeros_like(qpos[:, 7:]),
            "air": torch.zeros_like(qpos[:, :4]),
            "steps": none,
            "error": torch.stack([none, none], 1),
        }


def rotated(s: State, world: Tensor) -> Tensor:
    """A vector of the world, [N, 3], in the trunk's frame: v + 2 (w (v × r) + (v × r) × r),
    quaternion (w, r).
    """
    w, r = s["qpos"][:, 3:4], s["qpos"][:, 4:7]
    side = torch.linalg.cross(world, r)
    return world + 2 * (w * side + torch.linalg.cross(side, r))


def velocity(s: State) -> Tensor:
    """The trunk's, in its own frame, m/s, [N, 3]."""
    return rotated(s, s["qvel"][:, :3])


def gravity(s: State) -> Tensor:
    """Its direction in the trunk's frame, [N, 3]: minus the third row of the rotation from trunk to
    world.
    """
    w, x, y, z = s["qpos"][:, 3:7].unbind(1)
    return torch.stack([2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1], 1)
