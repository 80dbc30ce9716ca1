"""Terrain of rising difficulty as one height field, for any task with a floor.

A task calls ``Terrain.add_to`` in its ``spec`` and ``Terrain.bind`` in its ``bind``; ``height``,
``clearance`` and ``scan`` then read the same heights that the feet touch.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError, check_count, check_names
from embodied_envs.base.random import uniform

# Name of the height field and its geom.
NAME = "terrain"
KINDS = ("flat", "slopes", "stairs", "rough")
# Distance of two height samples. A riser of the stairs is one cell wide.
CELL_M = 0.05
TILE_CELLS = 120
# Length of a tile, 6 m.
TILE_M = TILE_CELLS * CELL_M
# Height of the flat parts above the plane of the floor, so that a foot touches one of the two.
LIFT_M = 0.005
# Hardest level: gradient of the slopes (22 degrees), height of one of four steps of the stairs,
# largest height of the rough ground, m.
GRADIENT, STEP_M, ROUGH_M = 0.4, 0.15, 0.12
# Cells of a step of the stairs, and of a patch of the rough ground.
_TREAD, _PATCH = 6, 4
# Cells from a tile's centre to the first and to the last riser; cells from a riser to the top.
_RISE, _FALL, _TOP = 8, 56, 18
# Share of the commanded distance that moves a robot up, and least commanded distance, m, of an
# episode that changes the level; see ``next_level``.
FAR, LEAST_M = 0.75, 2.0


class Terrain:
    """Square tiles of 6 m: rows of rising difficulty along x, one column for each kind along y.

    In the middle of a tile is a flat platform of 0.8 m. Slopes and stairs are square rings around
    it: they rise from 0.4 to 1.3 m from the centre, stay level, and fall from 1.9 m to 2.8 m, so
    that a robot that walks outwards goes up and down. Rough ground has a random height every 20 cm
    and is linear between. Level l of L has (l + 1)/L times the gradient or height of the hardest
    level. The plane of the floor continues around the tiles.

    The heights are a function of (kind, level, levels, seed).
    """

    def __init__(
        self, kinds: Sequence[str] | str = KINDS, levels: int = 6, seed: int = 0, id: str = ""
    ) -> None:
        """Compute the heights.

        Args:
            kinds: Names of KINDS, or one name; the columns are in their order.
            levels: Number of rows, L, 1 to 20.
            seed: Seed of the rough ground.
            id: ``env.id``, for messages.

        Raises:
            EnvError: An argument is invalid; the message names it as an option of ``env.kwargs``.
        """
        prefix = f"env.id={id}: env.kwargs"
        self.kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        check_names(f"{prefix}.terrain", self.kinds, KINDS)
        if not self.kinds:
            raise EnvError(f"{prefix}.terrain=[]: name at least one of {', '.join(KINDS)}")
        check_count(f"{prefix}.levels", levels, 1, 20)
        check_count(f"{prefix}.terrain_seed", seed, 0, 2**31 - 1)
        self.levels, self.seed = levels, seed
        # float64 [rows along y, columns along x], m above the plane of the floor.
        self.heights = self._heights()

    def _heights(self) -> np.ndarray:
        """Return the heights of all tiles; those at the edge of the map are 0, as outside."""
        n = TILE_CELLS
        heights = np.zeros((len(self.kinds) * n + 1, self.levels * n + 1))
        for k, kind in enumerate(self.kinds):
            for level in range(self.levels):
                tile = tile_heights(kind, (level + 1) / self.levels, (level, self.seed))
                heights[k * n : (k + 1) * n + 1, level * n : (level + 1) * n + 1] = tile
        heights += LIFT_M
        heights[[0, -1]] = 0.0
        heights[:, [0, -1]] = 0.0
        return heights

    # ------------------------------------------------------------------------------------ the model
    def add_to(self, spec: mujoco.MjSpec, floor: str = "floor") -> None:
        """Add the geom "terrain" to the world, with the floor's material and contacts.

        Args:
            spec: The model.
            floor: Name of the geom of the floor, a plane at z = 0.
        """
        rows, columns = self.heights.shape
        top = float(self.heights.max())
        half = [0.5 * CELL_M * (columns - 1), 0.5 * CELL_M * (rows - 1)]
        data = (self.heights / top).ravel().tolist()
        spec.add_hfield(name=NAME, nrow=rows, ncol=columns, size=[*half, top, 0.1], userdata=data)
        plane, kind = spec.geom(floor), mujoco.mjtGeom.mjGEOM_HFIELD
        geom = spec.worldbody.add_geom(name=NAME, type=kind, hfieldname=NAME)
        contact = "contype conaffinity condim priority friction margin gap solmix solimp"
        for x in f"{contact} material rgba group".split():
            setattr(geom, x, getattr(plane, x))
        # Once the centre of a foot is below the surface, MuJoCo pushes it towards the sides of the
        # nearest triangle's prism, and it stays in the ground. The stiffest contact that is stable
        # (2 timesteps instead of 20 ms) prevents that.
        geom.solref = [2 * spec.option.timestep, 1.0]

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Create the tensors from the heights of ``model``, which are float32."""
        field = model.hfield(NAME)
        rows, columns = int(field.nrow[0]), int(field.ncol[0])
        half = field.size[:2]

        def tensor(x: np.ndarray | list[float]) -> Tensor:
            return torch.tensor(np.asarray(x), device=device, dtype=dtype)

        self._flat = tensor(field.data.astype(np.float64).ravel() * field.size[2])
        self._columns = columns
        self._corner, self._end = tensor(-half), tensor([columns - 1, rows - 1])
        x = TILE_M * (np.arange(self.levels) - 0.5 * (self.levels - 1))
        y = TILE_M * (np.arange(len(self.kinds)) - 0.5 * (len(self.kinds) - 1))
        xy = tensor(np.stack(np.broadcast_arrays(x, y[:, None]), -1).reshape(-1, 2))
        # [kinds * levels, 3], the ground in the middle of each tile, m.
        self.centers = torch.cat([xy, self.height(xy).unsqueeze(1)], 1)

    # -------------------------------------------------------------------------------- the functions
    def center(self, kind: Tensor, level: Tensor) -> Tensor:
        """Return the ground in the middle of tiles, m, [N, 3]; both arguments are int64 [N]."""
        return self.centers[kind * self.levels + level]

    def height(self, xy: Tensor) -> Tensor:
        """Return the height of the ground, m, [..], at points [.., 2]."""
        return self._surface(xy)[0]

    def clearance(self, points: Tensor) -> Tensor:
        """Return the distance of points [.., 3] from the plane of the triangle below them, m, [..].

        It is negative below the ground.
        """
        height, slope = self._surface(points[..., :2])
        return (points[..., 2] - height) * (1 + slope).rsqrt()

    def scan(self, qpos: Tensor, grid: Tensor, limit_m: float = 1.0) -> Tensor:
        """Return heights of the ground around a body relative to the body, m, [N, P].

        Args:
            qpos: [N, 7 or more], position and quaternion of the body.
            grid: [P, 2], points in the body's yaw frame (x where the body's x axis points,
                horizontally; y to the left), m.
            limit_m: The heights are clipped to plus and minus this value.
        """
        w, x, y, z = qpos[:, 3:7].unbind(1)
        heading = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z)], 1)
        c, s = (heading / heading.norm(dim=1, keepdim=True).clamp(min=1e-6)).split(1, 1)
        along, left = grid.unbind(1)
        xy = torch.stack([c * along - s * left, s * along + c * left], 2)  # [N, P, 2]
        height = self.height(qpos[:, None, :2] + xy)
        return (height - qpos[:, 2:3]).clamp(-limit_m, limit_m)

    def _surface(self, xy: Tensor) -> tuple[Tensor, Tensor]:
        """Return height, m, and squared gradient of the ground, [..] each, at points [.., 2].

        MuJoCo divides the cell between samples (i, j) and (i + 1, j + 1) into two triangles by the
        diagonal between these two. The height outside the map is that of its edge, 0.
        """
        # An unstable world has positions that are not finite, which must not become an index.
        u = ((xy.nan_to_num() - self._corner) / CELL_M).clamp(min=0).minimum(self._end)
        corner = u.floor().minimum(self._end - 1)
        fx, fy = (u - corner).unbind(-1)
        i, j = corner.long().unbind(-1)
        first = j * self._columns + i
        # The third corner of the triangle is (i + 1, j), where x comes first, else (i, j + 1).
        third = torch.where(fx >= fy, first + 1, first + self._columns)
        start, middle = self._flat.take(first), self._flat.take(third)
        near, far = middle - start, self._flat.take(first + self._columns + 1) - middle
        height = start + torch.maximum(fx, fy) * near + torch.minimum(fx, fy) * far
        return height, (near.square() + far.square()) / CELL_M**2


def tile_heights(kind: str, difficulty: float, key: tuple[int, int]) -> np.ndarray:
    """Return the heights of one tile, m, float64 [TILE_CELLS + 1, TILE_CELLS + 1], 0 at its edges.

    Args:
        kind: One of KINDS.
        difficulty: Share of the hardest gradient or height, 0 to 1.
        key: (level, seed), from which the rough ground is drawn.
    """
    offset = np.abs(np.arange(TILE_CELLS + 1) - TILE_CELLS // 2)
    radius = np.maximum(offset[:, None], offset)  # cells from the centre, of a square ring
    inside = np.minimum(radius - _RISE, _FALL - radius)  # cells from the nearest end of the ring
    if kind == "slopes":
        return difficulty * GRADIENT * CELL_M * inside.clip(0, _TOP)
    if kind == "stairs":
        return difficulty * STEP_M * (inside // _TREAD + 1).clip(0, _TOP // _TREAD + 1)
    if kind == "rough":
        level, seed = key
        n = TILE_CELLS // _PATCH + 1
        u = uniform(torch.tensor([seed]), level, torch.zeros(1, dtype=torch.int64), n * n)
        coarse = u.view(1, 1, n, n)
        # Bilinear between the random heights; exact at them (align_corners).
        fine = torch.nn.functional.interpolate(
            coarse, size=2 * [TILE_CELLS + 1], mode="bilinear", align_corners=True
        )
        window = (inside / _PATCH).clip(0, 1)
        return difficulty * ROUGH_M * fine[0, 0].numpy() * window
    return np.zeros(radius.shape)


def next_level(
    level: Tensor, walked: Tensor, commanded: Tensor, fallen: Tensor, u: Tensor, levels: int
) -> Tensor:
    """Return the level of the next episode, int64 [N].

    A robot that walked at least FAR of the commanded distance without a fall moves one level up,
    one that walked less than half of it moves one down. From the last level, a robot that would
    move up moves to a random level. An episode without a fall that commanded less than LEAST_M
    changes nothing: the robot might not have left its platform.

    Args:
        level: int64 [N], level of the episode that has ended.
        walked: [N], distance walked in the direction of the commands, m.
        commanded: [N], distance that the commands of the episode add up to, m; after a fall of the
            whole episode.
        fallen: bool [N], whether the episode ended with a fall.
        u: [N], uniform random numbers in [0, 1).
        levels: Number of levels.
    """
    is_long = commanded >= LEAST_M
    up = ~fallen & is_long & (walked >= FAR * commanded)
    down = (fallen | is_long) & (walked < 0.5 * commanded)
    moved = (level + up.long() - down.long()).clamp(min=0)
    return torch.where(moved >= levels, (u * levels).long(), moved)
