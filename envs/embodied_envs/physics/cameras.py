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

from embodied_envs.base.errors import EnvError, check_names
from embodied_envs.physics.domain_randomization import model_field
from embodied_envs.robots.robot_model import FREE, SLIDE, driven_dofs

# Largest number of shapes in one image.
MAX_GEOMS = 2000
# MjData fields that determine an image.
POSE_FIELDS = ("qpos", "mocap_pos", "mocap_quat")
# Half size of a horizontal plane from which on it is a floor, which images for people extend.
LEAST_FLOOR_M = 2.0


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

    def draw(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        camera: int,
        follow: tuple[int, float] | None = None,
    ) -> np.ndarray:
        """Return uint8 [H, W, 3], valid until the next call; camera -1 frames the whole model.

        With ``follow`` = (body, distance in m), camera -1 looks at this robot instead.
        """
        if camera < 0:
            mujoco.mjv_defaultFreeCamera(model, self.camera)
            if follow is not None:
                self.camera.lookat, self.camera.distance = data.subtree_com[follow[0]], follow[1]
                self.camera.elevation = -20
        else:
            self.camera.type, self.camera.fixedcamid = int(mujoco.mjtCamera.mjCAMERA_FIXED), camera
        if follow is not None:  # floors without end are drawn around the camera of the scene
            mujoco.mjv_updateCamera(model, data, self.camera, self.scene)
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
        check_names("env.cameras", names, known)
        self._ids = [known.index(n) for n in names]
        modes, outside = mujoco.mjtCamLight, model.body_weldid[model.cam_bodyid] == 0
        self._follow: tuple[int, float] | None = None
        body = None if render_size is None else travelling_body(model)
        if body is not None:
            # A camera that only turns towards the robot (targetbody) loses it.
            follows = (int(modes.mjCAMLIGHT_TRACK), int(modes.mjCAMLIGHT_TRACKCOM))
            outside = np.isin(model.cam_mode, follows)
        if body is not None or (render_size is not None and model.nu and not outside.any()):
            self._follow = body or 0, 3.5 * robot_radius(model, body or 0)
        self._render_camera = int(outside.argmax()) if outside.any() else -1
        self._source = model
        self._canvases: dict[tuple[int, int], _Canvas] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._canvases)

    def images(self, worlds: Mapping[str, np.ndarray], mask: Tensor) -> dict[str, Tensor]:
        """Return camera -> uint8 [N, 3, H, W], zero where ``mask`` is False.

        Args:
            worlds: POSE_FIELDS and the MjModel fields that differ between worlds, [N, ..].
            mask: bool [N].
        """
        arrays = {x: np.zeros((len(mask), 3, *self.size), dtype=np.uint8) for x in self.names}
        for i in mask.nonzero().flatten().tolist():
            canvas = self._pose(worlds, i, self.size)
            for camera, array in zip(self._ids, arrays.values(), strict=True):
                array[i] = canvas.draw(self._model, self._data, camera).transpose(2, 0, 1)
        return {name: torch.from_numpy(x) for name, x in arrays.items()}

    def render(self, worlds: Mapping[str, np.ndarray], world: int = 0) -> Tensor:
        """Return uint8 [H, W, 3] of one world from the first camera that is not mounted on a link.

        A robot that travels is seen from the first camera that follows it, and its floor has no
        end. Without such a camera all bodies that can move are framed.
        """
        if self.render_size is None:
            raise EnvError("made without pictures; make it with render=True")
        canvas = self._pose(worlds, world, self.render_size)
        model, fields = self._model, ("geom_size", "mat_texrepeat", "mat_texuniform")
        saved = {name: getattr(model, name).copy() for name in fields}
        if self._follow is not None:
            extend_floors(model)
        image = canvas.draw(model, self._data, self._render_camera, self._follow).copy()
        for name, x in saved.items():  # images that are observations show the floor as it is
            getattr(model, name)[...] = x
        return torch.from_numpy(image)

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
        model, data = self._model, self._data
        for name, x in worlds.items():
            model_field(data if name in POSE_FIELDS else model, name)[...] = x[i]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        if new:  # the first image of a context differs from all later ones
            canvas.draw(model, data, self._render_camera)
        return canvas

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


def travelling_body(model: mujoco.MjModel) -> int | None:
    """Return the root body of a robot that can leave its place; None without one.

    It has a free joint, or a slide in the plane that has neither an actuator nor a range, and there
    are actuators in its subtree.
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    driven = driven_dofs(model)
    travels = (model.jnt_type == SLIDE) & (model.jnt_limited == 0) & (abs(data.xaxis[:, 2]) < 0.5)
    travels &= ~np.isin(model.jnt_dofadr, driven)
    travels |= model.jnt_type == FREE
    travels &= np.isin(model.jnt_bodyid, model.body_rootid[model.dof_bodyid[driven]])
    return int(model.jnt_bodyid[travels][0]) if travels.any() else None


def robot_radius(model: mujoco.MjModel, root: int) -> float:
    """Return the distance of a robot's outermost surface from its centre of mass, m.

    With the world as its root the robot consists of all trees of bodies that can move.
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    roots = [root] if root else model.body_rootid[model.jnt_bodyid]
    geoms = np.flatnonzero(np.isin(model.body_rootid[model.geom_bodyid], roots))
    distance = np.linalg.norm(data.geom_xpos[geoms] - data.subtree_com[root], axis=1)
    return float((distance + model.geom_rbound[geoms]).max(initial=0.1))


def extend_floors(model: mujoco.MjModel) -> None:
    """Give horizontal planes no end in images; collisions with a plane do not depend on its size.

    Rays do, so that a model with range finders keeps its floor.
    """
    if (model.sensor_type == int(mujoco.mjtSensor.mjSENS_RANGEFINDER)).any():
        return
    for i in np.flatnonzero(model.geom_type == int(mujoco.mjtGeom.mjGEOM_PLANE)):
        size, material = model.geom_size[i, :2], int(model.geom_matid[i])
        is_level = np.abs(model.geom_quat[i, 1:3]).max() < 1e-6
        if not is_level or size.max() < LEAST_FLOOR_M or size.min() <= 0:
            continue
        if material >= 0 and not model.mat_texuniform[material]:
            model.mat_texrepeat[material] /= 2 * size  # per metre instead of per plane
            model.mat_texuniform[material] = True
        model.geom_size[i, :2] = 0


def _close_all(canvases: dict[tuple[int, int], _Canvas]) -> None:
    """Free the contexts; the finalizer of ``Cameras`` calls it for those not closed before exit."""
    while canvases:
        canvases.popitem()[1].close()
