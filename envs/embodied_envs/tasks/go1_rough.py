"""Go1Rough: the Go1 of Go1Joystick on slopes, stairs and rough ground, with a curriculum."""

from __future__ import annotations

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.robots.rough_terrain import RoughTerrain
from embodied_envs.tasks.go1 import FOOT_M, Go1Joystick
from embodied_envs.tasks.task import State


class Go1Rough(RoughTerrain, Go1Joystick):
    """Go1Joystick on terrain, see ``RoughTerrain``.

    Action, observation "state", reward and success are those of Go1Joystick. The height of the
    trunk (its limit of 15 cm, and number 33 of "privileged") is that above the mean height of the
    ground below the feet. The friction of "privileged" is that of the terrain. Only feet collide.
    """

    id = "Go1Rough"
    # Position of the camera of videos relative to the robot: above the hills around it.
    camera_m = (1.5, -2.2, 1.6)

    def spec(self) -> mujoco.MjSpec:
        """Return the robot and the terrain; the first camera looks down at the robot."""
        spec = super().spec()
        camera, back = spec.cameras[0], np.array(self.camera_m)
        camera.pos = back
        right = np.cross([0.0, 0.0, 1.0], back)
        camera.alt.xyaxes = [*right, *np.cross(back, right)]
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        self.floor = model.geom("terrain").id

    def down(self, s: State) -> Tensor:
        return self.terrain.clearance(self.foot_positions(s)) < FOOT_M
