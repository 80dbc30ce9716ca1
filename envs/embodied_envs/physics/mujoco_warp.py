"""N MuJoCo worlds on a GPU: mujoco_warp behind ``Physics``. On device "cpu" the same kernels run on
one core.

Kernels are compiled at the first use of a model (10 to 40 s) and kept in ~/.cache/warp (or
$WARP_CACHE_PATH).
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from mujoco_warp import OverflowType
from torch import Tensor

from embodied_envs.physics.cameras import Cameras
from embodied_envs.physics.domain_randomization import Randomization, field
from embodied_ppo.core import tree
from embodied_ppo.core.types import EnvError

_STATE = ("time", "qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""What the next physics step depends on. qacc_warmstart is where the solver begins."""

_FORCES = ("cacc", "cfrc_int", "cfrc_ext")
"""Zero after a reset, as in MuJoCo, whose mj_forward does not compute them (unless a sensor wants
them).
"""

_CURRENT = {
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "xanchor",
    "xaxis",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
}
_CURRENT |= {
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
    "subtree_com",
    "cdof",
    "cinert",
}
_CURRENT |= {
    "flexvert_xpos",
    "flexedge_length",
    "ten_length",
    "ten_J",
    "actuator_length",
    "actuator_moment",
}
_CURRENT |= {
    "ten_velocity",
    "actuator_velocity",
    "cvel",
    "cdof_dot",
    "qfrc_bias",
    "qfrc_passive",
    "qfrc_spring",
}
_CURRENT |= {"qfrc_damper", "qfrc_gravcomp", *_FORCES}
"""Derived fields that ``WarpPhysics._make_current`` computes, or a reset sets to 0."""

_DEPENDENT = (
    "body_subtreemass",
    "body_invweight0",
    "dof_invweight0",
    "tendon_invweight0",
    "actuator_acc0",
)
"""Constants of the model that follow from masses.

(Those of tracking cameras stay: they do not move with cam_pos.)
"""


class WarpPhysics:
    """See ``Physics``. float32; tensors are views of the simulator's memory.

    What runs kernels is recorded in its second call and replayed from then on, on a CPU too:
    launching them one by one costs more there than the physics of a hundred worlds.
    """

    dtype = torch.float32

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        *,
        device: torch.device | str,
        fields: Sequence[str],
        stage: str,
        cameras: Cameras,
        randomization: Randomization,
        nconmax: int | None = None,
        njmax: int | None = None,
    ) -> None:
        """``fields``: MjData and MjModel fields to show besides INITIAL_FIELDS.

        ``nconmax``: contacts per world, on average over the worlds; ``njmax``: rows of the
        constraint Jacobian per world (4 for a contact with pyramidal friction, 1 for a joint at its
        limit). None: what the shapes of the model are likely to need. Raises EnvError for what
        mujoco_warp lacks.
        """
        self.device, self._warp_device = devices(device)
        self._on_cpu = self.device.type == "cpu"
        self.waits = self.records = self._on_cpu
        """Whether kernels run in graphs of their own; on a GPU the whole control step is one."""
        self.model, self.cameras, self.randomization = supported(model), cameras, randomization
        self.draws, self.stage, self.num_envs = randomization.size, stage, num_envs
        self._graphs: dict[Hashable, Any] = {}
        self._streams: dict[int, Any] = {}
        contacts, rows = sizes(self.model)
        self._nconmax, self._njmax = nconmax or contacts, njmax or rows
        with wp.ScopedDevice(self._warp_device):
            self._allocate()
        host = mujoco.MjData(self.model)
        self.fields = {name: self._field(name, host) for name in dict.fromkeys([*_STATE, *fields])}
        """See ``Physics``."""
        self._derived = [k for k in self.fields if k not in _STATE and hasattr(self.data, k)]
        self._solves = not _CURRENT.issuperset(self._derived) or bool(
            self._warp_model.sensor_rne_postconstraint
        )
        """Whether a reset has to solve for accelerations."""
        self._render = self._renderer() if cameras.names else None

    def _allocate(self) -> None:
        """The simulator's model and data; a field that differs between worlds gets a row for
        each.
        """
        varied = self.randomization.fields
        self._weighs = "body_mass" in varied or "body_inertia" in varied
        batched = [
            *(k for k in varied if k != "opt.gravity"),
            *(_DEPENDENT if self._weighs else ()),
        ]
        try:
            m = mjw.put_model(self.model, batch_sizes=dict.fromkeys(batched, self.num_envs))
            d = mjw.make_data(
                self.model, nworld=self.num_envs, nconmax=self._nconmax, njmax=self._njmax
            )
        except (NotImplementedError, ValueError) as error:  # how mujoco_warp says what it lacks
            raise EnvError(
                f"mujoco_warp cannot simulate this model ({error}); use simulator=mujoco"
            ) from error
        m.opt.warn_overflow = 0  # printed; ``_check_overflow`` raises instead
        if "opt.gravity" in varied:
            m.opt.gravity = wp.array(
                np.tile(self.model.opt.gravity, (self.num_envs, 1)), dtype=wp.vec3
            )
        self._warp_model, self.data = m, d
        self._mask = wp.zeros(self.num_envs, dtype=bool)
        self._where = wp.to_torch(self._mask)
        self._counts = [wp.to_torch(x) for x in (d.overflow, d.ncollision, d.nacon, d.nefc)]
        self._worst = torch.zeros(5, dtype=torch.int64, device=self.device)
        """Contacts lost, rows lost; most candidate pairs and contacts in all worlds, most rows in
        one.
        """
        self._seen = torch.zeros(5, dtype=torch.int64, pin_memory=not self._on_cpu)
        """``_worst`` as the host knows it."""
        sensors = [
            x.numpy()
            for x in (m.sensor_contact_pos_adr, m.sensor_limitpos_adr, m.sensor_limitvel_adr)
        ]
        places = [
            (int(self.model.sensor_adr[i]), int(self.model.sensor_dim[i]))
            for i in np.concatenate(sensors)
        ]
        self._of_constraints = wp.array(
            [start + j for start, size in places for j in range(size)], dtype=int
        )
        """Columns of sensordata: contacts and limits, which want constraints, and are 0 where there
        are none.
        """
        self.randomization.base = {
            k: x.to(self.device, self.dtype) for k, x in self.randomization.base.items()
        }
        self.varied = {k: self._view(field(m, k), field(self.model, k).shape, k) for k in varied}
        # mujoco_warp adds the damping of actuators to that of joints
        self._extra = {
            k: x[:1] - self.randomization.base[k]
            for k, x in self.varied.items()
            if k == "dof_damping"
        }

    def _field(self, name: str, host: mujoco.MjData) -> Tensor:
        """A field of MjData or MjModel in MuJoCo's shape, [N, ..]."""
        if name in self.varied:
            return self.varied[name]
        if isinstance(array := getattr(self.data, name, None), wp.array):
            return self._view(array, np.shape(getattr(host, name)), name)
        if not hasattr(self.model, name):
            known = hasattr(mujoco.MjData, name)
            raise EnvError(
                f"mujoco_warp does not show {name!r}; use simulator=mujoco"
                if known
                else f"MuJoCo has no field {name!r} in MjData or MjModel"
            )
        one = torch.tensor(
            np.asarray(getattr(self.model, name)), dtype=self.dtype, device=self.device
        )
        return one.expand(self.num_envs, *one.shape)

    def _view(self, array: Any, shape: tuple[int, ...], name: str) -> Tensor:
        """Without the inner dimensions that warp's matrices have: [N, nbody, 3, 3] is [N, nbody,
        9].
        """
        if 0 in shape:
            return torch.zeros(self.num_envs, *shape, dtype=self.dtype, device=self.device)
        x = wp.to_torch(array)
        if x.numel() != self.num_envs * math.prod(shape):
            raise EnvError(f"mujoco_warp keeps {name!r} in another layout; use simulator=mujoco")
        return x.view(self.num_envs, *shape)

    # ---------------------------------------------------------------------------------------- steps
    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance.

        Raises EnvError when contacts or constraints did not fit, on a GPU later.
        """
        self.fields["ctrl"].copy_(ctrl)
        self._launch(("step", substeps), lambda: self._advance(substeps))
        overflow, candidates, contacts, rows = self._counts
        lost = [(overflow & bits != 0).any() for bits in _overflows()]
        now = torch.stack([*lost, candidates[0], contacts[0], rows.max()])
        torch.maximum(self._worst, now, out=self._worst)
        if self.waits:
            self._seen.copy_(self._worst)
            self._check_overflow()

    def _advance(self, substeps: int) -> None:
        for _ in range(substeps):
            mjw.step(self._warp_model, self.data)
        if self.stage == "velocity":
            self._make_current()
        elif self.stage == "forces":
            mjw.rne_postconstraint(self._warp_model, self.data)

    def _make_current(self) -> None:
        """Positions, velocities and their sensors of the present qpos and qvel."""
        m, d = self._warp_model, self.data
        if self._of_constraints.size or m.nsensorcollision:
            mjw.fwd_position(m, d, factorize=False)
        else:
            mjw.fwd_kinematics(m, d)
            mjw.transmission(m, d)
        wp.launch(
            _clear,
            dim=(d.nworld, self._of_constraints.size),
            inputs=[self._of_constraints, d.sensordata],
        )
        mjw.sensor_pos(m, d)
        mjw.fwd_velocity(m, d)
        mjw.sensor_vel(m, d)

    def reset(self, where: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """See ``Physics``; ``u`` is [N, draws]. Nothing of the other worlds changes."""
        if self.waits and not bool(where.any()):
            return
        self._where.copy_(where)
        kept = {k: self.fields[k].clone() for k in self._derived}
        if self.varied:
            self._set(where, self.varied, self.randomization.sample(u))
            for name, x in self._extra.items():
                self._set(where, self.varied, {name: self.varied[name] + x})
        self._launch("defaults", self._defaults)
        self._set(where, self.fields, values)
        for name in set(_FORCES) & set(self._derived):
            self.fields[name].masked_fill_(where.view(-1, 1, 1), 0.0)
        if self._derived or self.stage == "velocity":
            self._launch("refresh", self._refresh)
        self._set(~where, self.fields, kept)

    def _defaults(self) -> None:
        """The model's defaults where ``_mask``, after constants that follow from a model drawn
        anew.
        """
        if self._weighs:
            mjw.set_const(self._warp_model, self.data, restore=False)
        mjw.reset_data(self._warp_model, self.data, self._mask)

    def _refresh(self) -> None:
        """All derived fields, of the present, except those that a step leaves behind after it."""
        if self._solves:
            mjw.forward(self._warp_model, self.data)
        else:
            self._make_current()

    @staticmethod
    def _set(where: Tensor, fields: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Values [N, ..] into fields, where bool [N]."""
        for name, value in values.items():
            x = fields[name]
            x.copy_(torch.where(where.view(-1, *[1] * (x.ndim - 1)), value, x))

    # --------------------------------------------------------------------------------------- images
    def images(self, where: Tensor) -> dict[str, Tensor]:
        """See ``Physics``. All worlds at once; on a CPU none if no one wants any."""
        if self._render is None:
            return {}
        height, width = self.cameras.size
        if self.waits and not bool(where.any()):
            empty = torch.zeros(self.num_envs, 3, height, width, dtype=torch.uint8)
            return {name: empty.clone() for name in self.cameras.names}
        kept = (
            {k: self.fields[k].clone() for k in self._derived} if self.stage != "velocity" else {}
        )
        self._launch("draw", self._draw)
        for name, x in kept.items():
            self.fields[name].copy_(x)
        # [N, cameras, H, W, (blue, green, red, alpha)] -> [N, cameras, 3, H, W]
        pixels = (
            self._pixels.view(self.num_envs, -1, height, width, 4)[..., :3]
            .flip(-1)
            .permute(0, 1, 4, 2, 3)
        )
        return {name: pixels[:, i].contiguous() for i, name in enumerate(self._order)}

    def _renderer(self) -> Any:
        """Rays instead of OpenGL, shaded by the same formulas.

        There are no sites, tendons and reflections.
        """
        height, width = self.cameras.size
        active = sorted(self.cameras.names, key=lambda name: self.model.camera(name).id)
        with wp.ScopedDevice(self._warp_device):
            render = mjw.create_render_context(
                self.model,
                nworld=self.num_envs,
                cam_res=(width, height),
                cam_active=active,
                render_rgb=True,
                render_depth=False,
                render_seg=False,
                render_skybox=True,
            )
        self._order = active
        self._pixels = wp.to_torch(render.rgb_data).view(torch.uint8)
        return render

    def _draw(self) -> None:
        m, d = self._warp_model, self.data
        if self.stage != "velocity":
            mjw.kinematics(m, d)
            mjw.com_pos(m, d)
            mjw.camlight(m, d)
        mjw.refit_bvh(m, d, self._render)
        mjw.render(m, d, self._render)

    def picture(self) -> Tensor:
        """See ``Physics``; by OpenGL on the CPU."""
        shown = {k: self.fields[k] for k in ("qpos", "mocap_pos", "mocap_quat")} | self.varied
        return self.cameras.picture({k: x[:1].cpu().numpy() for k, x in shown.items()})

    # ---------------------------------------------------------------------------------------- state
    def state(self) -> dict[str, Tensor]:
        """See ``Physics``. Raises EnvError if contacts or constraints have been lost."""
        self._seen.copy_(self._worst)
        self._check_overflow()
        own = {k: self.fields[k].clone() for k in (*_STATE, *self._derived)}
        return own | {f"model/{k}": x.clone() for k, x in self.varied.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See ``Physics``."""
        self._where.fill_(True)
        for k, x in self.varied.items():
            x.copy_(state[f"model/{k}"])
        self._launch("defaults", self._defaults)
        for k in _STATE:
            self.fields[k].copy_(state[k])
        self._launch("refresh", self._refresh)
        for k in (*_STATE, *self._derived):
            self.fields[k].copy_(state[k])

    def close(self) -> None:
        """Free what a graph holds."""
        self._graphs.clear()
        self.cameras.close()

    # --------------------------------------------------------------------------------------- graphs
    def captured(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """See ``Physics``: on a GPU the whole function becomes one CUDA graph."""
        return step if self._on_cpu else _Captured(self, step)

    def _launch(self, name: Hashable, kernels: Callable[[], None]) -> None:
        """Run ``kernels``, which launches nothing but warp's, on the stream that torch is on."""
        with self.scope():
            if not self.records or name not in self._graphs:  # the first call compiles
                kernels()
                self._graphs.setdefault(name, None)
                return
            if self._graphs[name] is None:
                self._graphs[name] = self._record(kernels)
            wp.capture_launch(self._graphs[name])

    def _record(self, kernels: Callable[[], None]) -> Any:
        if self._on_cpu:
            with wp.ScopedCapture(device=self._warp_device) as capture:
                kernels()
            return capture.graph
        stream = torch.cuda.Stream(self.device)  # the default stream cannot be recorded
        with (
            _NoGarbageCollection(),
            torch.cuda.stream(stream),
            self.scope(),
            wp.ScopedCapture() as capture,
        ):
            kernels()
        return capture.graph

    def scope(self) -> AbstractContextManager[Any]:
        """In which warp's kernels go where torch's do."""
        if self._on_cpu:
            return wp.ScopedDevice(self._warp_device)
        present = torch.cuda.current_stream(self.device)
        if (
            present.cuda_stream not in self._streams
        ):  # warp knows a stream that it records by the object
            self._streams[present.cuda_stream] = wp.stream_from_torch(present)
        return wp.ScopedStream(self._streams[present.cuda_stream], sync_enter=False)

    # ------------------------------------------------------------------------------------- overflow
    def watch(self) -> None:
        """Raise EnvError if the host knows of lost contacts or constraints; then ask anew, without
        waiting.
        """
        self._check_overflow()
        self._seen.copy_(self._worst, non_blocking=True)  # pinned memory

    def _check_overflow(self) -> None:
        contacts_lost, rows_lost, candidates, contacts, rows = self._seen.tolist()
        if contacts_lost:
            most = math.ceil(max(candidates, contacts) / self.num_envs)
            raise EnvError(_too_small("nconmax", self._nconmax, "contacts per world", most))
        if rows_lost:
            raise EnvError(
                _too_small("njmax", self._njmax, "rows of constraints in one world", rows)
            )


@wp.kernel(enable_backward=False)
def _clear(columns: wp.array[int], out: wp.array2d[float]):
    """out[:, columns] = 0"""
    world, i = wp.tid()  # pyright: ignore
    out[world, columns[i]] = 0.0  # pyright: ignore


class _Captured:
    """A control step on a GPU: as written in its first two calls, which compile kernels, then one
    CUDA graph.

    Warp does the recording, since the solver loops until it has converged and torch's graphs have
    no loops; what torch allocates meanwhile comes from a pool that nobody else uses as long as the
    graph lives.
    """

    def __init__(self, physics: WarpPhysics, step: Callable[[Tensor], Any]) -> None:
        self.physics, self.step, self.calls = physics, step, 0
        self.graph: Any = None

    def __call__(self, action: Tensor) -> Any:
        """``step(action)`` in tensors of its own.

        Raises EnvError some steps after contacts were lost.
        """
        self.calls += 1
        if self.calls == 3:
            try:
                self._capture(action)
            except RuntimeError as error:
                warnings.warn(
                    f"no CUDA graph of the whole control step, slower without ({error})",
                    stacklevel=2,
                )
                self.physics.records = True
        if self.graph is None:
            answer = self.step(action)
        else:
            self.action.copy_(action)
            with self.physics.scope():
                wp.capture_launch(self.graph)
            answer = tree.map(Tensor.clone, self.answer)
        self.physics.watch()
        return answer

    def _capture(self, action: Tensor) -> None:
        device, self.action = self.physics.device, action.clone()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device):
            self.pool = torch.cuda.MemPool()
        with (
            _NoGarbageCollection(),
            torch.cuda.stream(stream),
            torch.cuda.use_mem_pool(self.pool, device),
            self.physics.scope(),
            wp.ScopedCapture() as capture,
        ):
            self.answer = self.step(self.action)
        self.graph = capture.graph


class _NoGarbageCollection:
    """What is freed while a graph is recorded would be freed in every replay."""

    def __enter__(self) -> None:
        self.on = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.on:
            gc.enable()


# ---------------------------------------------------------------------------------------- the model
def devices(device: torch.device | str) -> tuple[torch.device, Any]:
    """Torch's and warp's."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise EnvError(f"mujoco_warp runs on cuda (or cpu), not on {device}; use simulator=mujoco")
    wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)  # not a line for each kernel
    wp.init()
    if device.type == "cuda":
        if not wp.is_cuda_available():
            raise EnvError(
                "warp cannot use this CUDA driver (driver 580 or newer); use simulator=mujoco"
            )
        device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
    return device, wp.device_from_torch(device)


def supported(model: mujoco.MjModel) -> mujoco.MjModel:
    """A copy as mujoco_warp wants it.

    Raises EnvError for features with a memory that a reset would not see.
    """
    model = copy.copy(model)
    if model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP):
        raise EnvError(
            "bodies that sleep (flag sleep) are not supported on a GPU; use simulator=mujoco"
        )
    if getattr(model, "nhistory", 0):
        raise EnvError(
            "actuators and sensors with a delay are not supported on a GPU; use simulator=mujoco"
        )
    bits = (
        mujoco.mjtDisableBit.mjDSBL_AUTORESET,
        mujoco.mjtDisableBit.mjDSBL_MIDPHASE,
    )  # no such thing there
    model.opt.disableflags &= ~sum(int(b) for b in bits)
    if int(model.opt.solver) == int(mujoco.mjtSolver.mjSOL_PGS):
        warnings.warn(
            "mujoco_warp has no PGS solver: the model is simulated with Newton's", stacklevel=2
        )
        model.opt.solver = int(mujoco.mjtSolver.mjSOL_NEWTON)
    return model


def sizes(model: mujoco.MjModel) -> tuple[int, int]:
    """(nconmax, njmax) for every moving shape on the ground and touched once more, within [16, 256]
    contacts.

    A sphere touches in 1 point, a capsule in 2, other shapes in 4; a contact has 2·(dimensions - 1)
    rows.
    """
    points = {int(mujoco.mjtGeom.mjGEOM_SPHERE): 1, int(mujoco.mjtGeom.mjGEOM_CAPSULE): 2}
    solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    moving = solid & (model.body_weldid[model.geom_bodyid] != 0)
    contacts = sum(points.get(int(kind), 4) + 1 for kind in model.geom_type[moving])
    contacts = min(max(contacts, 16), 256)
    per_contact = max(1, 2 * (int(model.geom_condim[solid].max(initial=1)) - 1))
    limits = int(model.jnt_limited.sum() + model.tendon_limited.sum())
    friction = int((model.dof_frictionloss > 0).sum() + (model.tendon_frictionloss > 0).sum())
    return contacts, 6 * model.neq + friction + limits + contacts * per_contact


def _overflows() -> tuple[int, int]:
    """Bits of Data.overflow: contacts lost, constraints lost."""
    contacts = (
        OverflowType.BROADPHASE | OverflowType.NARROWPHASE | OverflowType.CCD | OverflowType.HFIELD
    )
    return int(contacts), int(OverflowType.NEFC | OverflowType.NJMAX_NNZ)


def _too_small(option: str, limit: int, what: str, seen: int) -> str:
    """The sentence with the value to set; the counts are of a step's last substep, not always the
    one that lost.
    """
    needed = math.ceil(1.25 * seen) if seen > limit else 2 * limit
    return (
        f"env.kwargs.{option}={limit} is too small for the {what} (at most {seen} seen); set"
        f" {needed} or more"
    )
