"""Pictures of MuJoCo worlds by OpenGL on the CPU: one context, one scene, world after world."""

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

from embodied_ppo.core.types import EnvError

MAX_GEOMS = 2000
"""Shapes in one picture."""


def gl_context(width: int, height: int) -> Any:
    """An OpenGL context without a screen, by $MUJOCO_GL (egl, osmesa, glfw), else the first of EGL
    and OSMesa to work.

    Raises EnvError with the Debian package to install.
    """
    named = os.environ.get("MUJOCO_GL", "").lower().strip()
    failures = []
    for backend in [named] if named in ("egl", "osmesa", "glfw") else ["egl", "osmesa"]:
        try:
            return importlib.import_module(f"mujoco.{backend}").GLContext(width, height)
        except Exception as error:  # PyOpenGL's own, which cannot be named before PyOpenGL loads; the next is tried
            failures.append(f"{backend}: {type(error).__name__}: {error}")
    raise EnvError(
        f"cameras: no OpenGL without a screen ({'; '.join(failures)}); Debian: apt-get install"
        " libegl1 libgl1-mesa-dri, or libosmesa6 and MUJOCO_GL=osmesa"
    )


class _Canvas:
    """Pictures of one size, [H, W, 3]."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int) -> None:
        self.context = gl_context(width, height)
        self.context.make_current()
        self.rect = mujoco.MjrRect(0, 0, width, height)
        self.mjr = mujoco.MjrContext(model, int(mujoco.mjtFontScale.mjFONTSCALE_100))
        mujoco.mjr_setBuffer(int(mujoco.mjtFramebuffer.mjFB_OFFSCREEN), self.mjr)
        self.scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self.option, self.perturb, self.camera = (
            mujoco.MjvOption(),
            mujoco.MjvPerturb(),
            mujoco.MjvCamera(),
        )
        self.rows = np.empty((height, width, 3), dtype=np.uint8)

    def draw(self, model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
        """uint8 [H, W, 3], valid until the next call; camera -1 looks at the whole model."""
        if camera < 0:
            mujoco.mjv_defaultFreeCamera(model, self.camera)
        else:
            self.camera.type, self.camera.fixedcamid = int(mujoco.mjtCamera.mjCAMERA_FIXED), camera
        everything = int(mujoco.mjtCatBit.mjCAT_ALL)
        mujoco.mjv_updateScene(
            model, data, self.option, self.perturb, self.camera, everything, self.scene
        )
        self.context.make_current()
        mujoco.mjr_render(self.rect, self.scene, self.mjr)
        mujoco.mjr_readPixels(self.rows, None, self.rect, self.mjr)
        return self.rows[::-1]  # OpenGL counts rows from below

    def close(self) -> None:
        """Free the context now: one that is dropped later takes the next one's pictures along."""
        self.mjr.free()
        self.context.free()


class Cameras:
    """What policies and films see of N worlds. No shadows, no multisampling: on a CPU they cost ten
    times the rest.

    OpenGL starts with the first picture.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        names: Sequence[str] = (),
        *,
        size: tuple[int, int] = (64, 64),
        picture_size: tuple[int, int] | None = None,
    ) -> None:
        """``names``: cameras of the model that the policy sees, (height, width) = ``size`` pixels
        each.

        ``picture_size``: (height, width) of ``picture``; None: there are none. Raises EnvError for
        an unknown camera.
        """
        self.names, self.size, self.picture_size = tuple(names), size, picture_size
        known = [model.camera(i).name for i in range(model.ncam)]
        if len(set(names)) < len(names):
            raise EnvError(f"env.cameras={list(names)}: names a camera twice")
        if unknown := [n for n in names if n not in known]:
            raise EnvError(
                f"env.cameras: the model has no camera {unknown[0]!r}; it has"
                f" {', '.join(known) or 'none'}"
            )
        self._ids = [known.index(n) for n in names]
        self._film = 0 if known else -1
        self._source = model
        self._canvas: dict[tuple[int, int], _Canvas] = {}
        self._end = weakref.finalize(self, _close, self._canvas)

    def images(self, worlds: Mapping[str, np.ndarray], where: Tensor) -> dict[str, Tensor]:
        """Camera -> uint8 [N, 3, H, W], zero where bool [N] is False.

        ``worlds``: qpos, mocap_pos, mocap_quat and MjModel fields that differ between worlds, [N,
        ..].
        """
        height, width = self.size
        out = {
            name: torch.zeros(len(where), 3, height, width, dtype=torch.uint8)
            for name in self.names
        }
        arrays = [x.numpy() for x in out.values()]
        for i in where.nonzero().flatten().tolist():
            canvas = self._pose(worlds, i, self.size)
            for camera, array in zip(self._ids, arrays, strict=True):
                array[i] = canvas.draw(self._model, self._data, camera).transpose(2, 0, 1)
        return out

    def picture(self, worlds: Mapping[str, np.ndarray]) -> Tensor:
        """uint8 [H, W, 3] of world 0, by the model's first camera, or of the whole model if it has
        none.
        """
        if self.picture_size is None:
            raise EnvError("made without pictures; make it with render=True")
        canvas = self._pose(worlds, 0, self.picture_size)
        return torch.from_numpy(canvas.draw(self._model, self._data, self._film).copy())

    def _pose(self, worlds: Mapping[str, np.ndarray], i: int, size: tuple[int, int]) -> _Canvas:
        """Put the model into the pose of world ``i``."""
        if new := size not in self._canvas:
            if first := not self._canvas:
                self._prepare()
            self._canvas[size] = _Canvas(self._model, *size)
            if first:
                atexit.register(
                    self._end
                )  # last in, first out: before the end of OpenGL, registered by now
        canvas, model, data = self._canvas[size], self._model, self._data
        for name, x in worlds.items():
            owner = data if name in ("qpos", "mocap_pos", "mocap_quat") else model
            *path, field = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            getattr(owner, field)[...] = x[i]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        if new:
            canvas.draw(
                model, data, self._film
            )  # a context's first picture differs from all later ones
        return canvas

    def _prepare(self) -> None:
        model = self._model = copy.copy(self._source)
        model.light_castshadow[:] = 0
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        sizes = [self.size, self.picture_size or self.size]
        model.vis.global_.offheight = max(h for h, _ in sizes)
        model.vis.global_.offwidth = max(w for _, w in sizes)
        self._data = mujoco.MjData(model)

    def close(self) -> None:
        _close(self._canvas)


def _close(canvases: dict[tuple[int, int], _Canvas]) -> None:
    """Also called for what nobody closed, while OpenGL is still there."""
    while canvases:
        canvases.popitem()[1].close()
