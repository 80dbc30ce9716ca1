"""The robot and its surroundings in the browser, drawn by viser."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
import viser
from mjviser import conversions

from embodied_envs.physics.cameras import LEAST_FLOOR_M, robot_radius
from embodied_ppo.tools.player import Frame, Player, Pull

COMMAND_COLOR, VELOCITY_COLOR, PULL_COLOR = (30, 100, 255), (20, 170, 60), (230, 60, 30)


class Scene:
    """The bodies of the model, arrows of command, velocity and pull, in the browser."""

    def __init__(
        self, server: viser.ViserServer, player: Player, pull: Callable[[Pull | None], None]
    ) -> None:
        """Send the model.

        Args:
            server: The server.
            player: Provides the model.
            pull: Receives a pull by the mouse, None at its end.
        """
        self._server, self._player, self._on_pull = server, player, pull
        self._root = server.scene.add_frame("/world", show_axes=False)
        self._offset = np.zeros(3)
        self._grip: tuple[int, np.ndarray] | None = None
        self._handles: list[tuple[int, Any]] = []
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # body -> position, rotation
        model = player.model
        data = player.positions(player.frames[-1])
        with server.atomic():
            for body in range(model.nbody):
                self._add_body(body)
        self._radius = robot_radius(model, player.base or 0)
        distance = self._radius * (1.0 if player.base is not None else 0.7)
        center = data.xpos[player.base] if player.base is not None else _center(model, data)
        self._draw_offset(data)
        target = center + self._offset
        camera = server.initial_camera
        camera.look_at = tuple(target)
        camera.position = tuple(target + distance * np.array([1.6, -1.9, 1.1]))
        camera.up = (0.0, 0.0, 1.0)

    def _add_body(self, body: int) -> None:
        """Add the visible shapes of a body."""
        model, scene = self._player.model, self._server.scene
        first, count = int(model.body_geomadr[body]), int(model.body_geomnum[body])
        geoms = [g for g in range(first, first + count) if _is_visible(model, g)]
        planes = [g for g in geoms if model.geom_type[g] == int(mujoco.mjtGeom.mjGEOM_PLANE)]
        for geom in planes:
            x, y = model.geom_size[geom, :2]
            endless = min(x, y) <= 0 or max(x, y) >= LEAST_FLOOR_M
            handle = scene.add_grid(
                f"/world/body{body}/plane{geom}",
                width=20.0 if endless else 2 * x,
                height=20.0 if endless else 2 * y,
                infinite_grid=endless,
                fade_distance=40.0,
                plane_color=(225, 228, 232),
                plane_opacity=1.0,
                shadow_opacity=0.3,
                position=model.geom_pos[geom],
                wxyz=model.geom_quat[geom],
            )
        others = [g for g in geoms if g not in planes]
        if not others:
            return
        data = self._player.data
        is_fixed = conversions.is_fixed_body(model, body)
        for number, group in enumerate(conversions.group_geoms_by_visual_compat(model, others)):
            mesh: Any = conversions.merge_geoms(model, group)
            if model.geom_type[group[0]] == int(mujoco.mjtGeom.mjGEOM_HFIELD):
                height = mesh.vertices[:, 2:]  # shades of grey show the terrain
                low, high = np.percentile(height, [2, 98])
                shade = 40 + 120 * np.clip((height - low) / max(1e-6, high - low), 0, 1)
                colors = np.tile(shade, (1, 3)).astype(np.uint8)
                mesh = type(mesh)(mesh.vertices, mesh.faces, vertex_colors=colors, process=False)
            handle = scene.add_mesh_trimesh(
                f"/world/body{body}_{number}",
                mesh,
                position=data.xpos[body],
                wxyz=data.xquat[body],
                cast_shadow=not is_fixed,
            )
            if is_fixed:
                continue
            self._handles.append((body, handle))
            handle.on_drag("left")(functools.partial(self._drag, body))

    async def _drag(self, body: int, event: Any) -> None:
        """Pull a body by the mouse; asynchronous functions are called in order."""
        if event.phase == "end":
            self._grip = None
            self._on_pull(None)
            return
        if event.phase == "start" or self._grip is None or self._grip[0] != body:
            position, rotation = self._drawn[body]
            point = np.array(event.start_position) - self._offset - position
            self._grip = (body, rotation.T @ point)
        self._on_pull(Pull(body, self._grip[1], np.array(event.end_position) - self._offset))

    def draw(self, frame: Frame) -> None:
        """Show a frame."""
        data = self._player.positions(frame)
        with self._server.atomic():
            self._draw_offset(data)
            for body, handle in self._handles:
                handle.position, handle.wxyz = data.xpos[body], data.xquat[body]
                self._drawn[body] = data.xpos[body].copy(), data.xmat[body].reshape(3, 3).copy()
            self._draw_arrows(data, frame)
        self._server.flush()

    def _draw_offset(self, data: mujoco.MjData) -> None:
        """Move the world so that a robot that travels stays in front of the camera."""
        if self._player.base is not None:
            self._offset = -data.xpos[self._player.base] * (1.0, 1.0, 0.0)
            self._root.position = self._offset

    def _draw_arrows(self, data: mujoco.MjData, frame: Frame) -> None:
        """Show command, velocity and pull."""
        scene, arrows = self._server.scene, []
        size = self._radius
        command = dict(zip(self._player.commands, frame.command.tolist(), strict=False))
        base = self._player.base
        if base is not None and len(frame.velocity) == 6:
            forward = data.xmat[base].reshape(3, 3)[:, 0] * (1, 1, 0)
            forward = forward / max(1e-6, float(np.linalg.norm(forward)))
            left = np.array([-forward[1], forward[0], 0.0])
            start = data.xpos[base] + [0, 0, 0.5 * size]
            velocity = frame.velocity[:3] * (1, 1, 0)
            arrows.append((start, start + 1.5 * size * velocity, VELOCITY_COLOR))
            start = start + [0, 0, 0.15 * size]
            x, y = (command.get(f"lin_vel_{axis}", 0.0) for axis in "xy")
            arrows.append((start, start + 1.5 * size * (x * forward + y * left), COMMAND_COLOR))
            turn = command.get("ang_vel_yaw", 0.0)
            tip = data.xpos[base] + 0.9 * size * forward
            arrows.append((tip, tip + size * turn * left, COMMAND_COLOR))
        if {"x", "y", "z"} <= set(command):
            goal = np.array([command[axis] for axis in "xyz"])
            arrows.append((goal + [0, 0, 0.4 * size], goal, COMMAND_COLOR))
        if (pull := self._player.pull) is not None:
            point = data.xpos[pull.body] + data.xmat[pull.body].reshape(3, 3) @ pull.point
            arrows.append((point, pull.target, PULL_COLOR))
        arrows = [a for a in arrows if np.linalg.norm(a[1] - a[0]) > 0.05 * size]
        if not arrows:
            arrows = [(np.zeros(3), np.array([0, 0, 1e-6]), COMMAND_COLOR)]
        scene.add_arrows(
            "/world/arrows",
            np.array([[start, end] for start, end, _ in arrows]),
            np.array([color for *_, color in arrows]),
            shaft_radius=0.025 * size,
            head_radius=0.06 * size,
            head_length=0.12 * size,
        )


def _is_visible(model: mujoco.MjModel, geom: int) -> bool:
    """Return whether MuJoCo's own viewer shows a shape by default: groups 0 to 2, not invisible."""
    material = int(model.geom_matid[geom])
    opacity = model.mat_rgba[material, 3] if material >= 0 else model.geom_rgba[geom, 3]
    return bool(model.geom_group[geom] <= 2 and opacity > 0)


def _center(model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """Return the centre of all bodies that can move, m [3]; of the model without any."""
    bodies = [b for b in range(model.nbody) if not conversions.is_fixed_body(model, b)]
    return data.xpos[bodies].mean(0) if bodies else model.stat.center.copy()
