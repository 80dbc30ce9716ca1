"""Go1Rough: the Go1 of Go1Joystick on slopes, stairs and rough ground, with a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.tasks.go1 import FOOT_M, Go1Joystick, velocity
from embodied_envs.tasks.task import State
from embodied_envs.tasks.terrain import KINDS, Terrain, next_level

CURRICULUM, UNIFORM = "curriculum", "uniform"


class Go1Rough(Go1Joystick):
    """Follow the command on terrain (``Terrain``): flat ground, slopes, stairs, rough ground.

    Action, observation "state", reward and success are those of Go1Joystick. The height of the
    trunk (its limit of 15 cm, and number 33 of "privileged") is that above the mean height of the
    ground below the feet. The friction of "privileged" is that of the terrain. Only feet collide.

    An episode starts on the platform of a tile, in a random direction.

    Observation "height_scan" [N, 117], computed only where an option names it: the height of the
    ground minus that of the trunk, m, clipped to [-1, 1], at 13 x 9 points of the trunk's yaw
    frame, 10 cm apart: x from -0.6 to 0.6 m, and for each x, y from -0.4 to 0.4 m.

    Curriculum: the first episode of an environment draws kind and level of its terrain evenly. The
    kind stays; the level of each further episode follows from the distance that the robot walked
    in the direction of the commands (``terrain.next_level``).
    """

    id = "Go1Rough"
    reset_noise = Go1Joystick.reset_noise + 4
    """Further random numbers: kind, level, level after the last one, direction."""
    scan_x_m, scan_y_m = (-0.6, 0.6, 13), (-0.4, 0.4, 9)
    """Points of the height scan: first, last, number."""
    lift_m = 0.04
    """Height of the start above the home pose: noise of the joints puts no foot in the ground."""
    camera_m = (1.5, -2.2, 1.6)
    """Position of the camera of videos relative to the robot: above the hills around it."""

    def __init__(
        self,
        terrain: Sequence[str] | str = KINDS,
        levels: int = 6,
        level: str | int = CURRICULUM,
        terrain_seed: int = 0,
    ) -> None:
        """Select the terrain.

        Args:
            terrain: Names of ``terrain.KINDS``.
            levels: Number of levels.
            level: "curriculum"; "uniform": every episode draws kind and level evenly; a number from
                0 to ``levels`` - 1: all episodes are on this level.
            terrain_seed: Seed of the rough ground.

        Raises:
            EnvError: An argument is invalid.
        """
        self.terrain = Terrain(terrain, levels, terrain_seed, id=self.id)
        is_level = isinstance(level, int) and not isinstance(level, bool) and 0 <= level < levels
        if level not in (CURRICULUM, UNIFORM) and not is_level:
            raise EnvError(
                f"env.id={self.id}: env.kwargs.level={level!r} must be {CURRICULUM}, {UNIFORM} or a"
                f" whole number from 0 to {levels - 1} (env.kwargs.levels={levels})"
            )
        self.level, self.names = level, self.terrain.kinds

    # ------------------------------------------------------------------------------------ the model
    def spec(self) -> mujoco.MjSpec:
        """Return the robot and the terrain; the first camera looks down at the robot."""
        spec = super().spec()
        self.terrain.add_to(spec)
        camera, back = spec.cameras[0], np.array(self.camera_m)
        camera.pos = back
        right = np.cross([0.0, 0.0, 1.0], back)
        camera.alt.xyaxes = [*right, *np.cross(back, right)]
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        self.terrain.bind(model, device, dtype)
        self.floor = model.geom("terrain").id
        x, y = np.linspace(*self.scan_x_m), np.linspace(*self.scan_y_m)
        grid = np.stack(np.broadcast_arrays(x[:, None], y), -1).reshape(-1, 2)
        self.grid = torch.tensor(grid, device=device, dtype=dtype)

    # --------------------------------------------------------------------- heights above the ground
    def groups(self) -> Mapping[str, Callable[[State], Tensor]]:
        """Return the observation "height_scan"."""
        return {"height_scan": lambda s: self.terrain.scan(s["qpos"], self.grid)}

    def height(self, s: State) -> Tensor:
        ground = self.terrain.height(s["site_xpos"][:, self.feet, :2]).mean(1)
        return s["qpos"][:, 2] - ground

    def down(self, s: State) -> Tensor:
        return self.terrain.clearance(s["site_xpos"][:, self.feet]) < FOOT_M

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        command = s["command"][:, :2]
        speed = command.norm(dim=1)
        forward = (velocity(s)[:, :2] * command).sum(1) / speed.clamp(min=1e-6)
        return super().advance(s, action, u) | {
            "walked": s["walked"] + self.dt_s * forward,
            "commanded": s["commanded"] + self.dt_s * speed,
        }

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the start of Go1Joystick on a tile, in a random direction."""
        start = super().reset(u[:, :-4])
        kind, level, _, turn = u[:, -4:].unbind(1)
        kind = (kind * len(self.names)).long()
        if isinstance(self.level, int):
            level = torch.full_like(kind, self.level)
        else:
            level = (level * self.terrain.levels).long()
        zero = torch.zeros_like(turn)
        half = torch.pi * turn
        start["qpos"][:, 3:7] = torch.stack([half.cos(), zero, zero, half.sin()], 1)
        return start | {
            "qpos": self._placed(start["qpos"], kind, level),
            "kind": kind,
            "terrain_level": level,
            "walked": zero,
            "commanded": zero,
        }

    def carry_over(self, s: State, start: State, u: Tensor) -> dict[str, Tensor]:
        """Return kind and level of the next episode, and the start on this tile."""
        if self.level != CURRICULUM:
            return {}
        fallen = self.terminated(s)
        missing_s = self.dt_s * (self.max_episode_steps - s["steps"])
        missing = fallen * missing_s * s["command"][:, :2].norm(dim=1)
        commanded = s["commanded"] + missing
        level = next_level(
            s["terrain_level"], s["walked"], commanded, fallen, u[:, -2], self.terrain.levels
        )
        kind = s["kind"].clone()
        return {
            "qpos": self._placed(start["qpos"], kind, level),
            "kind": kind,
            "terrain_level": level,
        }

    def _placed(self, qpos: Tensor, kind: Tensor, level: Tensor) -> Tensor:
        """Return ``qpos`` [N, 19] with the trunk above the middle of a tile."""
        ground = self.terrain.center(kind, level)
        z = ground[:, 2:] + self.qpos0[2] + self.lift_m
        return torch.cat([ground[:, :2], z, qpos[:, 3:]], 1)
