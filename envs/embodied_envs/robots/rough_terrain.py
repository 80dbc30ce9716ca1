"""RoughTerrain: any task that follows commands of velocity, on terrain with a curriculum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError, check_count
from embodied_envs.robots.velocity import VelocityCommands
from embodied_envs.tasks.task import State
from embodied_envs.tasks.terrain import KINDS, Terrain, next_level

CURRICULUM, UNIFORM = "curriculum", "uniform"


class RoughTerrain(VelocityCommands):
    """Follow the command on terrain (``Terrain``): flat ground, slopes, stairs, rough ground.

    ``class MyRough(RoughTerrain, MyRobot)`` puts a task on terrain instead of the level plane at
    height 0 of its model. The height of the base is then that above the mean height of the ground
    below the feet. An episode starts on the platform of a tile, in a random direction.

    Observation "height_scan" [N, 117], computed only where an option names it: the height of the
    ground minus that of the base, m, clipped to [-1, 1], at 13 x 9 points of the base's yaw frame,
    10 cm apart: x from -0.6 to 0.6 m, and for each x, y from -0.4 to 0.4 m.

    Curriculum: the first episode of an environment draws kind and level of its terrain evenly. The
    kind stays; the level of each further episode follows from the distance that the robot walked
    in the direction of the commands (``terrain.next_level``).
    """

    # Points of the height scan: first, last, number.
    scan_x_m, scan_y_m = (-0.6, 0.6, 13), (-0.4, 0.4, 9)
    # Height of the start above the home pose: noise of the joints puts no foot in the ground.
    lift_m = 0.04
    # Index of the base's position in qpos.
    base_qpos: int
    # Height of the base at home, m.
    home_height: float

    def __init__(
        self,
        terrain: Sequence[str] | str = KINDS,
        levels: int = 6,
        level: str | int = CURRICULUM,
        terrain_seed: int = 0,
        resample_s: float = 5.0,
        standing: float = 0.1,
        command_curriculum: bool = False,
    ) -> None:
        """Select terrain and commands.

        Args:
            terrain: Names of ``terrain.KINDS``.
            levels: Number of levels.
            level: "curriculum"; "uniform": every episode draws kind and level evenly; a number from
                0 to ``levels`` - 1: all episodes are on this level.
            terrain_seed: Seed of the rough ground.
            resample_s: See ``VelocityCommands``.
            standing: See ``VelocityCommands``.
            command_curriculum: See ``VelocityCommands``.

        Raises:
            EnvError: An argument is invalid.
        """
        super().__init__(resample_s, standing, command_curriculum)
        self.terrain = Terrain(terrain, levels, terrain_seed, id=self.id)
        if level not in (CURRICULUM, UNIFORM):
            path = f"env.id={self.id}: write {CURRICULUM}, {UNIFORM} or a level: env.kwargs.level"
            check_count(path, level, 0, levels - 1)
        self.level, self.names = level, self.terrain.kinds

    # ------------------------------------------------------------------------------------ the model
    def spec(self) -> mujoco.MjSpec:
        """Return the model with the terrain."""
        spec = super().spec()
        plane = mujoco.mjtGeom.mjGEOM_PLANE
        floor = next((geom for geom in spec.worldbody.geoms if geom.type == plane), None)
        if floor is None:
            raise EnvError(f"env.id={self.id}: terrain replaces a floor, and there is no plane")
        floor.name = floor.name or "floor"
        self.terrain.add_to(spec, floor.name)
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        self.terrain.bind(model, device, dtype)
        self.reset_noise += 4  # kind, level, level after the last one, direction
        x, y = np.linspace(*self.scan_x_m), np.linspace(*self.scan_y_m)
        grid = np.stack(np.broadcast_arrays(x[:, None], y), -1).reshape(-1, 2)
        self.grid = torch.tensor(grid, device=device, dtype=dtype)

    # --------------------------------------------------------------------- heights above the ground
    def groups(self) -> Mapping[str, Callable[[State], Tensor]]:
        """Return the observation "height_scan"."""
        base = slice(self.base_qpos, self.base_qpos + 7)
        return {"height_scan": lambda s: self.terrain.scan(s["qpos"][:, base], self.grid)}

    def height(self, s: State) -> Tensor:
        return super().height(s) - self.terrain.height(self.foot_positions(s)[..., :2]).mean(1)

    def foot_heights(self, s: State) -> Tensor:
        return super().foot_heights(s) - self.terrain.height(self.foot_positions(s)[..., :2])

    # ------------------------------------------------------------------------------------ variables
    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        command = s["command"][:, :2]
        speed = command.norm(dim=1)
        forward = (self.base_velocity(s)[:, :2] * command).sum(1) / speed.clamp(min=1e-6)
        return super().advance(s, action, u) | {
            "walked": s["walked"] + self.dt_s * forward,
            "commanded": s["commanded"] + self.dt_s * speed,
        }

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the start on a tile, in a random direction."""
        start = super().reset(u[:, :-4])
        kind, level, _, turn = u[:, -4:].unbind(1)
        kind = (kind * len(self.names)).long()
        if isinstance(self.level, int):
            level = torch.full_like(kind, self.level)
        else:
            level = (level * self.terrain.levels).long()
        zero = torch.zeros_like(turn)
        turned = slice(self.base_qpos + 3, self.base_qpos + 7)
        start["qpos"][:, turned] = _turn(torch.pi * turn, start["qpos"][:, turned])
        return start | {
            "qpos": self._placed(start["qpos"], kind, level),
            "kind": kind,
            "terrain_level": level,
            "walked": zero,
            "commanded": zero,
        }

    def carry_over(self, s: State, start: State, u: Tensor) -> dict[str, Tensor]:
        """Return kind and level of the next episode, and the start on this tile."""
        carried = super().carry_over(s, start, u[:, :-4])
        if self.level != CURRICULUM:
            return carried
        fallen = self.terminated(s)
        missing_s = self.dt_s * (self.max_episode_steps - s["steps"])
        commanded = s["commanded"] + fallen * missing_s * s["command"][:, :2].norm(dim=1)
        level = next_level(
            s["terrain_level"], s["walked"], commanded, fallen, u[:, -2], self.terrain.levels
        )
        kind = s["kind"].clone()
        return carried | {
            "qpos": self._placed(start["qpos"], kind, level),
            "kind": kind,
            "terrain_level": level,
        }

    def _placed(self, qpos: Tensor, kind: Tensor, level: Tensor) -> Tensor:
        """Return ``qpos`` [N, nq] with the base above the middle of a tile."""
        ground, base = self.terrain.center(kind, level), self.base_qpos
        z = ground[:, 2:] + self.home_height + self.lift_m
        return torch.cat([qpos[:, :base], ground[:, :2], z, qpos[:, base + 3 :]], 1)


def _turn(half: Tensor, quaternion: Tensor) -> Tensor:
    """Return quaternions [N, 4], turned about the vertical by 2 · half [N], rad."""
    cos, sin = half.cos()[:, None], half.sin()[:, None]
    w, x, y, z = quaternion.split(1, 1)
    turned = [cos * w - sin * z, cos * x - sin * y, cos * y + sin * x, cos * z + sin * w]
    return torch.cat(turned, 1) + 0.0  # no negative zeros
