"""Terrain: heights of the tiles, interpolation, height scans, and levels of the curriculum."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_envs.tasks.terrain import CELL_M, Terrain, next_level, tile_heights

FLOOR = """<mujoco><option timestep="0.004"/><worldbody>
<geom name="floor" type="plane" size="0 0 .01" friction="0.7" priority="1" conaffinity="0"/>
<body pos="0 0 9"><freejoint/><geom size=".023" contype="0" conaffinity="1"/></body>
</worldbody></mujoco>"""


def bound(terrain: Terrain) -> mujoco.MjModel:
    """Bind the terrain to a model with a floor and a ball; return the model."""
    spec = mujoco.MjSpec.from_string(FLOOR)
    terrain.add_to(spec)
    model = spec.compile()
    terrain.bind(model, torch.device("cpu"), torch.float64)
    return model


@pytest.fixture(scope="module")
def terrain() -> Terrain:
    """All kinds on two levels, on a map of 12 x 24 m, bound to a model."""
    terrain = Terrain(levels=2)
    bound(terrain)
    return terrain


def point(*x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def reference(heights: np.ndarray, x: float, y: float) -> float:
    """Return the height at (x, y) by the plane through the corners of the triangle around it."""
    rows, columns = heights.shape
    u = min(max(x / CELL_M + (columns - 1) / 2, 0.0), columns - 1.0)
    v = min(max(y / CELL_M + (rows - 1) / 2, 0.0), rows - 1.0)
    i, j = min(int(u), columns - 2), min(int(v), rows - 2)
    corners = [(i, j), (i + 1, j + 1), (i + 1, j) if u - i >= v - j else (i, j + 1)]
    matrix = [[a, b, 1.0] for a, b in corners]
    plane = np.linalg.solve(np.array(matrix), [heights[b, a] for a, b in corners])
    return float(plane @ [u, v, 1.0])


# ---------------------------------------------------------------------------------------- the tiles
def test_profiles_of_slopes_and_stairs() -> None:
    """Heights along the positive x axis from the middle of the tile, at half the difficulty."""
    middle = 60

    def at(kind: str, *radii_m: float) -> list[float]:
        tile = tile_heights(kind, 0.5, (0, 0))
        assert np.array_equal(tile, tile.T) and np.array_equal(tile, tile[::-1])  # square rings
        return [float(tile[middle, middle + round(r / CELL_M)]) for r in radii_m]

    # gradient 0.2 from 0.4 m to 1.3 m: 0.18 m high; falls from 1.9 m to 2.8 m
    slope = at("slopes", 0, 0.4, 0.9, 1.3, 1.6, 1.9, 2.4, 2.8, 3.0)
    assert slope == pytest.approx([0, 0, 0.1, 0.18, 0.18, 0.18, 0.08, 0, 0])
    # steps of 7.5 cm and 30 cm at 0.4, 0.7, 1.0 and 1.3 m, and down again
    stairs = at("stairs", 0.35, 0.4, 0.65, 0.7, 1.0, 1.3, 1.9, 2.2, 2.25, 2.8, 2.85)
    assert stairs == pytest.approx([0, *np.array([1, 1, 2, 3, 4, 4, 3, 2, 1]) * 0.075, 0])
    assert not tile_heights("flat", 1.0, (0, 0)).any()


def test_rough_ground_is_a_function_of_level_and_seed() -> None:
    tile = tile_heights("rough", 1.0, (3, 0))
    assert np.array_equal(tile, tile_heights("rough", 1.0, (3, 0)))
    assert np.array_equal(tile / 2, tile_heights("rough", 0.5, (3, 0)))
    for other in ((2, 0), (3, 1)):
        assert abs(tile - tile_heights("rough", 1.0, other)).max() > 0.05
    assert 0.11 < tile.max() <= 0.12 and tile.min() == 0
    # Level within 0.4 m of the middle (8 cells) and over 2.8 m from it; random in between.
    assert not tile[52:69, 52:69].any() and not tile[:5].any() and not tile[:, -5:].any()
    inner = tile[12:108:4, 12:40:4]  # the random heights, every 20 cm
    assert abs(float(inner.mean()) - 0.06) < 0.01 and len(np.unique(inner)) == inner.size


# -------------------------------------------------------------------------------------- the heights
def test_heights_equal_a_slow_reference(terrain: Terrain) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform([-7, -13], [7, 13], (400, 2))  # beyond the map, too
    nodes = 0.5 * CELL_M * rng.integers(-200, 200, (100, 2))  # samples and middles of edges
    points = np.concatenate([points, nodes])
    expected = [reference(terrain.heights, x, y) for x, y in points]
    assert np.ptp(expected) > 0.5
    heights = terrain.height(torch.from_numpy(points))
    torch.testing.assert_close(heights, point(*expected), atol=1e-7, rtol=0)  # of float32 data
    nothing = terrain.height(point(math.nan, math.inf, -math.inf, 1e30).view(2, 2))
    assert bool(nothing.isfinite().all())


def test_heights_equal_mujocos_height_field() -> None:
    terrain = Terrain(["stairs", "rough"], levels=2, seed=5)
    model = bound(terrain)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    hit = np.zeros(1, dtype=np.int32)
    points = np.random.default_rng(1).uniform([-5.9, -5.9], [5.9, 5.9], (200, 2))
    heights = terrain.height(torch.from_numpy(points)).numpy()
    for (x, y), height in zip(points, heights, strict=True):
        start, down = np.array([x, y, 3.0]), np.array([0, 0, -1.0])
        distance = mujoco.mj_ray(model, data, start, down, None, 1, -1, hit)
        assert 3.0 - distance == pytest.approx(height, abs=1e-9)
    geom, floor = model.geom("terrain"), model.geom("floor")
    assert geom.friction[0] == floor.friction[0] == 0.7 and geom.priority[0] == 1
    assert geom.solref.tolist() == [0.008, 1.0]  # two timesteps


def test_clearance_is_the_distance_from_the_plane_below(terrain: Terrain) -> None:
    # Slopes on the last level rise by 0.4: the distance is cos(atan(0.4)) of the height above.
    center = terrain.center(torch.tensor([1]), torch.tensor([1]))[0]
    over = center + point(0.9, 0.0, 0.4 * 0.5 + 0.1)
    cosine = 1 / math.sqrt(1 + 0.4**2)
    points = torch.stack([over, over - point(0, 0, 0.2), center + point(0, 0, 0.3)])
    expected = point(0.1 * cosine, -0.1 * cosine, 0.3)
    torch.testing.assert_close(terrain.clearance(points), expected, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------- the height scan
def pose(position: Tensor, yaw: float, pitch: float = 0.0) -> Tensor:
    """Return qpos [1, 7] of a body that turns by ``yaw``, then pitches (rad)."""
    a, b = yaw / 2, pitch / 2
    quat = [
        math.cos(a) * math.cos(b),
        -math.sin(a) * math.sin(b),
        math.cos(a) * math.sin(b),
        math.sin(a) * math.cos(b),
    ]
    return torch.cat([position, point(*quat)]).unsqueeze(0)


def test_scan_at_hand_computed_points(terrain: Terrain) -> None:
    """On the slope along x, which rises by 40 cm per metre, 30 cm above the ground."""
    center = terrain.center(torch.tensor([1]), torch.tensor([1]))[0]
    body = center + point(0.9, 0.0, 0.2 + 0.3)  # the ground there is 0.2 m above the platform
    grid = point(0, 0, 0.2, 0, 0, 0.1, -0.5, 0.1).view(4, 2)

    def scan(yaw: float, pitch: float = 0.0, limit_m: float = 1.0) -> list[float]:
        return terrain.scan(pose(body, yaw, pitch), grid, limit_m)[0].tolist()

    level, platform = -0.3, -0.5  # 0.5 m behind it is the platform
    assert scan(0.0) == pytest.approx([level, -0.3 + 0.08, level, platform], abs=1e-6)
    # To the left: its x axis is the world's y, its y axis the world's -x.
    turned = [level, level, -0.3 - 0.04, -0.3 - 0.04]
    assert scan(math.pi / 2) == pytest.approx(turned, abs=1e-6)
    assert scan(math.pi / 2, pitch=0.7) == pytest.approx(turned, abs=1e-6)  # horizontal
    # Backwards: 0.5 m behind it is the top, 0.36 m above the platform.
    assert scan(math.pi) == pytest.approx([level, -0.38, level, -0.5 + 0.36], abs=1e-6)
    assert scan(0.0, limit_m=0.25) == pytest.approx([-0.25, -0.22, -0.25, -0.25], abs=1e-6)


# -------------------------------------------------------------------------------------- the levels
@pytest.mark.parametrize(
    ("walked", "commanded", "fallen", "change"),
    [
        (3.0, 4.0, False, 1),  # exactly three quarters
        (2.99, 4.0, False, 0),
        (2.0, 4.0, False, 0),  # exactly half
        (1.99, 4.0, False, -1),
        (-1.0, 4.0, False, -1),
        (2.0, 2.0, False, 1),  # exactly 2 m commanded
        (1.99, 1.99, False, 0),
        (0.0, 1.99, False, 0),
        (0.0, 1.99, True, -1),
        (3.5, 4.0, True, 0),  # far, but fallen
    ],
)
def test_levels_change_at_exact_thresholds(
    walked: float, commanded: float, fallen: bool, change: int
) -> None:
    new = next_level(
        torch.tensor([2]),
        point(walked),
        point(commanded),
        torch.tensor([fallen]),
        point(0.5),
        levels=5,
    )
    assert new.tolist() == [2 + change] and new.dtype == torch.int64


def test_first_and_last_level() -> None:
    """There is none below 0; from the last one, a robot moves to a random one."""
    walked = point(0, 9, 9, 9)
    levels, no = torch.tensor([0, 4, 4, 4]), torch.zeros(4, dtype=torch.bool)
    u = point(0.9, 0.0, 0.59, 0.999)
    assert next_level(levels, walked, torch.full_like(u, 9), no, u, 5).tolist() == [0, 0, 2, 4]
    same = next_level(levels, walked * math.nan, torch.full_like(u, 9), no, u, 5)  # unstable worlds
    assert torch.equal(same, levels)
