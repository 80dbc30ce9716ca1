"""Render images of MuJoCo worlds with OpenGL on the CPU, one world after the other."""

from __future__ import annotations

import atexit
import copy
import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.physics.domain_randomization import model_field
from embodied_ppo.core.errors import EnvError, one_line

MAX_GEOMS = 2000
"""Largest number of shapes in one image."""
POSE_FIELDS = ("qpos", "mocap_pos", "mocap_quat")
"""MjData fields that determine an image."""
HIDDEN = -1.0
"""Coordinate of a body that an image does not show."""


def gl_context(width: int, height: int) -> Any:
    """Create an off-screen OpenGL context of ``width`` x ``height`` pixels.

    $MUJOCO_GL selects the backend (egl, osmesa, glfw); otherwise EGL is tried, then OSMesa.

    Raises:
        EnvError: No backend works; the message names the Debian packages to install.
    """
    selected = os.environ.get("MUJOCO_GL", "").lower().strip()
    failures = []
    for backend in [selected] if selected in ("egl", "osmesa", "glfw") else ["egl", "osmesa"]:
        try:
            return importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        except Exception as error:  # PyOpenGL's exception classes exist only after its import
            failures.append(f"{backend}: {type(error).__name__}: {error}")
    raise EnvError(
        f"cameras: no OpenGL without a screen ({'; '.join(failures)}); Debian: apt-get install"
        " libegl1 libgl1-mesa-dri, or libosmesa6 and MUJOCO_GL=osmesa"
    )


class _Canvas:
    """OpenGL context for images of one size."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int) -> None:
        self.context = gl_context(width, height)
        self.context.make_current()
        self.rect = mujoco.MjrRect(0, 0, width, height)
        self.mjr = mujoco.MjrContext(model, int(mujoco.mjtFontScale.mjFONTSCALE_100))
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self.mjr)
        self.scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self.option, self.perturb = mujoco.MjvOption(), mujoco.MjvPerturb()
        self.camera = mujoco.MjvCamera()
        self.pixels = np.empty((height, width, 3), dtype=np.uint8)

    def draw(self, model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
        """Return uint8 [H, W, 3], valid until the next call; camera -1 frames the whole model."""
        if camera < 0:
            mujoco.mjv_defaultFreeCamera(model, self.camera)
        else:
            self.camera.type, self.camera.fixedcamid = int(mujoco.mjtCamera.mjCAMERA_FIXED), camera
        categories = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(
            model, data, self.option, self.perturb, self.camera, categories, self.scene
        )
        self.context.make_current()
        mujoco.mjr_render(self.rect, self.scene, self.mjr)
        mujoco.mjr_readPixels(self.pixels, None, self.rect, self.mjr)
        return self.pixels[::-1]  # OpenGL's first row is the bottom row

    def close(self) -> None:
        """Free the context now; a later garbage collection would break the images of the next."""
        self.mjr.free()
        self.context.free()


class Cameras:
    """Images of N worlds for policies and videos.

    There are no shadows and no multisampling, which cost ten times as much as the other rendering
    on a CPU. OpenGL is initialised by the first image.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        names: Sequence[str] = (),
        *,
        size: tuple[int, int] = (64, 64),
        render_size: tuple[int, int] | None = None,
    ) -> None:
        """Select the cameras.

        Args:
            model: The model that all worlds share.
            names: Cameras whose images are part of the observation.
            size: (height, width) of these images in pixels.
            render_size: (height, width) of ``render``; None: it is not available.

        Raises:
            EnvError: A camera is unknown or named twice.
        """
        self.names, self.size, self.render_size = tuple(names), size, render_size
        known = [model.camera(i).name for i in range(model.ncam)]
        if len(set(names)) < len(names):
            raise EnvError(f"env.cameras={list(names)}: names a camera twice")
        if unknown := [n for n in names if n not in known]:
            raise EnvError(
                f"env.cameras: the model has no camera {unknown[0]!r}; it has"
                f" {', '.join(known) or 'none'}"
            )
        self._ids = [known.index(n) for n in names]
        self._render_camera = 0 if known else -1
        self._source = model
        self._canvases: dict[tuple[int, int], _Canvas] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._canvases)

    def images(self, worlds: Mapping[str, np.ndarray], mask: Tensor) -> dict[str, Tensor]:
        """Return camera -> uint8 [N, 3, H, W], zero where ``mask`` is False.

        Args:
            worlds: POSE_FIELDS and the MjModel fields that differ between worlds, [N, ..].
            mask: bool [N].
        """
        images = {
            name: torch.zeros(len(mask), 3, *self.size, dtype=torch.uint8) for name in self.names
        }
        arrays = [x.numpy() for x in images.values()]
        for i in mask.nonzero().flatten().tolist():
            canvas = self._pose(worlds, i, self.size)
            for camera, array in zip(self._ids, arrays, strict=True):
                array[i] = canvas.draw(self._model, self._data, camera).transpose(2, 0, 1)
        return images

    def locate(
        self, worlds: Mapping[str, np.ndarray], bodies: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Return where the centres of O bodies are in the images.

        Args:
            worlds: As for ``images``.
            bodies: Names of the bodies.

        Returns:
            Camera -> float32 [N, O, 2]: x to the right and y down, in [0, 1] from edge to edge of
            the image; HIDDEN where the centre is outside the image, or another body covers it.

        Raises:
            EnvError: The model has no such body.
        """
        if not self._canvases:
            self._prepare()
        model, data = self._model, self._data
        try:
            ids = [model.body(name).id for name in bodies]
        except KeyError as error:
            raise EnvError(f"captions: {one_line(error)}") from error
        count = len(worlds["qpos"])
        points = {
            name: np.full((count, len(ids), 2), HIDDEN, dtype=np.float32) for name in self.names
        }
        hit = np.zeros(1, dtype=np.int32)
        for i in range(count):
            self._set_pose(worlds, i)
            for name, camera in zip(self.names, self._ids, strict=True):
                start = data.cam_xpos[camera].copy()
                ray = data.xpos[ids] - start  # [O, 3]
                # The camera looks along its -z axis, with x to the right and y up.
                x, y, z = (ray @ data.cam_xmat[camera].reshape(3, 3)).T
                scale = 2 * np.tan(np.radians(model.cam_fovy[camera]) / 2) * np.maximum(-z, 1e-9)
                u = 0.5 + x / scale * self.size[0] / self.size[1]
                v = 0.5 - y / scale
                inside = (z < 0) & (u >= 0) & (u <= 1) & (v >= 0) & (v <= 1)
                for k in inside.nonzero()[0]:
                    mujoco.mj_ray(model, data, start, ray[k], None, 1, -1, hit)
                    if hit[0] >= 0 and model.geom_bodyid[hit[0]] == ids[k]:
                        points[name][i, k] = u[k], v[k]
        return points

    def render(self, worlds: Mapping[str, np.ndarray], world: int = 0) -> Tensor:
        """Return uint8 [H, W, 3] of one world from the model's first camera.

        A model without cameras is framed as a whole.
        """
        if self.render_size is None:
            raise EnvError("made without pictures; make it with render=True")
        canvas = self._pose(worlds, world, self.render_size)
        return torch.from_numpy(canvas.draw(self._model, self._data, self._render_camera).copy())

    def _pose(self, worlds: Mapping[str, np.ndarray], i: int, size: tuple[int, int]) -> _Canvas:
        """Set the model to the pose of world ``i`` and return the canvas of ``size``."""
        if new := size not in self._canvases:
            if first := not self._canvases:
                self._prepare()
            self._canvases[size] = _Canvas(self._model, *size)
            if first:
                # atexit runs the last registration first: our contexts are freed before the
                # library's own handler, registered by the line above, ends OpenGL.
                atexit.register(self._finalizer)
        canvas = self._canvases[size]
        self._set_pose(worlds, i)
        if new:  # the first image of a context differs from all later ones
            canvas.draw(self._model, self._data, self._render_camera)
        return canvas

    def _set_pose(self, worlds: Mapping[str, np.ndarray], i: int) -> None:
        """Set the model to the pose of world ``i``."""
        model, data = self._model, self._data
        for name, x in worlds.items():
            model_field(data if name in POSE_FIELDS else model, name)[...] = x[i]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)

    def _prepare(self) -> None:
        """Copy the model without shadows and multisampling."""
        model = self._model = copy.copy(self._source)
        model.light_castshadow[:] = 0
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        sizes = [self.size, self.render_size or self.size]
        model.vis.global_.offheight = max(h for h, _ in sizes)
        model.vis.global_.offwidth = max(w for _, w in sizes)
        self._data = mujoco.MjData(model)

    def close(self) -> None:
        """Free all OpenGL contexts."""
        _close_all(self._canvases)


def _close_all(canvases: dict[tuple[int, int], _Canvas]) -> None:
    """Free the contexts; the finalizer of ``Cameras`` calls it for those not closed before exit."""
    while canvases:
        canvases.popitem()[1].close()
