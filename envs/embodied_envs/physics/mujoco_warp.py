"""N MuJoCo worlds on a GPU: the engine ``Physics`` on mujoco_warp.

On device "cpu" the same kernels run on one core. Kernels are compiled at the first use of a model
(10 to 40 s) and stored in ~/.cache/warp (or $WARP_CACHE_PATH).
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from mujoco_warp import OverflowType
from torch import Tensor

from embodied_envs.base import compilation, random, tree
from embodied_envs.base.errors import EnvError
from embodied_envs.physics import warp_kernels, warp_model, warp_order
from embodied_envs.physics.cameras import POSE_FIELDS, Cameras
from embodied_envs.physics.domain_randomization import Randomization, model_field
from embodied_envs.physics.engine import STATE_FIELDS, T
from embodied_envs.physics.warp_model import adapt_model, capacity_message, resolve_devices

# Types of devices on which the functions of ``WarpPhysics.fuse`` are compiled.
FUSED_DEVICES = ("cuda",)

# Fields that a reset sets to 0, because MuJoCo's mj_forward computes them only for a sensor.
_FORCES = ("cacc", "cfrc_int", "cfrc_ext")

# Derived fields that follow from positions.
_FROM_POSITION = {
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat"),
    *("site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
    *("subtree_com", "cdof", "cinert", "flexvert_xpos", "flexedge_length", "ten_length", "ten_J"),
    *("actuator_length", "actuator_moment"),
}

# Derived fields of positions and velocities; ``WarpPhysics._make_current`` computes them, too.
_FROM_VELOCITY = {
    *("ten_velocity", "actuator_velocity", "cvel", "cdof_dot", "qfrc_bias", "qfrc_passive"),
    *("qfrc_spring", "qfrc_damper", "qfrc_gravcomp"),
}

# Derived fields that follow from positions, velocities and controls.
_FROM_CONTROL = ("actuator_force", "qfrc_actuator")

# Fields from which the following constants are computed.
_MASS_FIELDS = {"body_mass", "body_inertia", "body_ipos", "dof_armature"}
# Constants of the model that follow from masses, without those of tracking cameras: they do not
# follow cam_pos.
_MASS_CONSTANTS = (
    *("body_subtreemass", "body_invweight0", "dof_invweight0"),
    *("tendon_invweight0", "actuator_acc0"),
)
_CONTACT_OVERFLOW = int(
    OverflowType.BROADPHASE | OverflowType.NARROWPHASE | OverflowType.CCD | OverflowType.HFIELD
)
# Bits of Data.overflow that mean lost contacts, and those that mean lost constraints.
_ROW_OVERFLOW = int(OverflowType.NEFC | OverflowType.NJMAX_NNZ)


class WarpPhysics:
    """``Physics`` in float32 on mujoco_warp; the tensors are views of the simulator's memory.

    Each group of kernels is recorded in its second call and replayed from then on. This holds on a
    CPU too, where single launches cost more than the physics of a hundred worlds. Equal states and
    actions give equal bits on a GPU if ``torch.use_deterministic_algorithms`` is on.
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
        """Allocate the worlds.

        Args:
            model: The model of all worlds.
            num_envs: Number of worlds, N.
            device: "cuda" or "cpu".
            fields: MjData and MjModel fields to expose besides STATE_FIELDS.
            stage: See ``Task.stage``.
            cameras: Names and sizes of the images, and the renderer of ``render``.
            randomization: Fields that differ between worlds.
            nconmax: Contacts per world, on average over the worlds; None: ``default_capacities``.
                ``measured_capacities`` returns what play needs.
            njmax: Rows of the constraint Jacobian per world (4 for a contact with pyramidal
                friction, 1 for a joint at its limit); None: ``default_capacities``.

        Raises:
            EnvError: mujoco_warp lacks a feature of the model, or a field is unknown.
        """
        self.device, self._warp_device = resolve_devices(device)
        self.host_readable = self._on_cpu = self.device.type == "cpu"
        self.model, self.cameras, self.randomization = adapt_model(model), cameras, randomization
        self.random_size, self.stage, self.num_envs = randomization.size, stage, num_envs
        self._graphs: dict[Hashable, Any] = {}
        self._streams: dict[int, Any] = {}
        contacts, rows = warp_model.default_capacities(self.model)
        self._nconmax, self._njmax = nconmax or contacts, njmax or rows
        with wp.ScopedDevice(self._warp_device):
            self._allocate()
        host = mujoco.MjData(self.model)
        names = dict.fromkeys([*STATE_FIELDS, *fields])
        self.fields = {name: self._field(name, host) for name in names}
        self._derived = [k for k in self.fields if k not in STATE_FIELDS and hasattr(self.data, k)]
        current = {*_FROM_POSITION, *_FROM_VELOCITY, *_FROM_CONTROL, *_FORCES}
        # Whether a reset must solve for accelerations.
        self._reset_solves = not current.issuperset(self._derived) or bool(
            self._warp_model.sensor_rne_postconstraint
        )
        # Whether a derived field or a sensor follows from velocities.
        self._needs_velocity = not _FROM_POSITION.issuperset({*self._derived} - {*_FORCES})
        self._render_context = self._make_render_context() if cameras.names else None

    def _allocate(self) -> None:
        """Allocate model and data; a field that differs between worlds gets a row for each."""
        varied = self.randomization.fields
        self._varies_mass = not _MASS_FIELDS.isdisjoint(varied)
        batched = [k for k in varied if k != "opt.gravity"]
        batched += _MASS_CONSTANTS if self._varies_mass else ()
        n, sizes = self.num_envs, {"nconmax": self._nconmax, "njmax": self._njmax}
        try:
            m = mjw.put_model(self.model, batch_sizes=dict.fromkeys(batched, n))
            d = mjw.make_data(self.model, nworld=n, **sizes)
        except (NotImplementedError, ValueError) as error:  # a feature that mujoco_warp lacks
            raise EnvError(f"use simulator=mujoco: mujoco_warp refuses it ({error})") from error
        m.opt.warn_overflow = 0  # no printed warnings, because ``_check_overflow`` raises
        if torch.are_deterministic_algorithms_enabled():
            m.opt.deterministic = True
            if not self._on_cpu:  # whose threads run one after another
                m.callback.contactfilter = warp_order.sort_contacts
                m.callback.control = warp_order.sort_rows
        if "opt.gravity" in varied:
            gravity = np.tile(self.model.opt.gravity, (self.num_envs, 1))
            m.opt.gravity = wp.array(gravity, dtype=wp.vec3)
        self._warp_model, self.data = m, d
        self._warp_mask = wp.zeros(self.num_envs, dtype=bool)
        # Worlds that ``_set_defaults`` resets, bool [N].
        self._mask = wp.to_torch(self._warp_mask)
        self._warp_peak_counts = wp.zeros(5, dtype=int)
        # Largest counts so far: contacts lost, rows lost; candidate pairs and contacts of all
        # worlds; rows of one world.
        self._peak_counts = wp.to_torch(self._warp_peak_counts)
        # Copy of ``_peak_counts`` on the host.
        self._host_counts = torch.zeros(5, dtype=torch.int32, pin_memory=not self._on_cpu)
        sensors = (m.sensor_contact_pos_adr, m.sensor_limitpos_adr, m.sensor_limitvel_adr)
        owner = np.repeat(np.arange(self.model.nsensor), self.model.sensor_dim)
        columns = np.flatnonzero(np.isin(owner, np.concatenate([x.numpy() for x in sensors])))
        # Columns of sensordata that need constraints (contacts, limits); 0 without any.
        self._constraint_columns = wp.array(columns, dtype=int)
        self.randomization.to(self.device, self.dtype)
        base = self.randomization.base
        shapes = {k: model_field(self.model, k).shape for k in varied}
        self.varied = {k: self._view(model_field(m, k), shape, k) for k, shape in shapes.items()}
        # mujoco_warp adds the damping of actuators to that of joints.
        damping = {k: x for k, x in self.varied.items() if k == "dof_damping"}
        self._actuator_damping = {k: x[:1] - base[k] for k, x in damping.items()}

    def _field(self, name: str, host: mujoco.MjData) -> Tensor:
        """Return a field of MjData or MjModel in MuJoCo's shape, [N, ..]."""
        if name in self.varied:
            return self.varied[name]
        if isinstance(array := getattr(self.data, name, None), wp.array):
            return self._view(array, np.shape(getattr(host, name)), name)
        if not hasattr(self.model, name):
            if hasattr(mujoco.MjData, name):
                raise EnvError(f"mujoco_warp does not show {name!r}; use simulator=mujoco")
            raise EnvError(f"MuJoCo has no field {name!r} in MjData or MjModel")
        value = np.asarray(getattr(self.model, name))
        x = torch.tensor(value, dtype=self.dtype, device=self.device)
        return x.expand(self.num_envs, *x.shape)

    def _view(self, array: Any, shape: tuple[int, ...], name: str) -> Tensor:
        """Return a view of a warp array in MuJoCo's shape: [N, nbody, 3, 3] is [N, nbody, 9]."""
        if 0 in shape:
            return torch.zeros(self.num_envs, *shape, dtype=self.dtype, device=self.device)
        x = wp.to_torch(array)
        if x.numel() != self.num_envs * math.prod(shape):
            raise EnvError(f"mujoco_warp keeps {name!r} in another layout; use simulator=mujoco")
        return x.view(self.num_envs, *shape)

    # ---------------------------------------------------------------------------------------- steps
    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance by ``substeps`` physics steps.

        Raises:
            EnvError: Contacts or constraints exceeded their capacity. A GPU reports this some
                steps later, by ``poll_overflow``.
        """
        self.fields["ctrl"].copy_(ctrl)
        self._launch(("step", substeps), lambda: self._advance(substeps))
        if self.host_readable:
            self._host_counts.copy_(self._peak_counts)
            self._check_overflow()

    def _advance(self, substeps: int) -> None:
        """Launch the kernels of a control step."""
        for _ in range(substeps):
            mjw.step(self._warp_model, self.data)
        if self.stage == "velocity":
            self._make_current()
        elif self.stage == "forces":
            mjw.rne_postconstraint(self._warp_model, self.data)
        d = self.data
        counts = [d.overflow, d.ncollision, d.nacon, d.nefc]
        bits = [_CONTACT_OVERFLOW, _ROW_OVERFLOW]
        wp.launch(warp_kernels.update_peaks, d.nworld, [*bits, *counts, self._warp_peak_counts])

    def _make_current(self) -> None:
        """Compute the derived fields and sensors of the current qpos and qvel.

        Without a field that follows from velocities, those of positions suffice.
        """
        m, d = self._warp_model, self.data
        columns = self._constraint_columns
        if columns.size or m.nsensorcollision:
            mjw.fwd_position(m, d, factorize=False)
        else:
            mjw.fwd_kinematics(m, d)
            mjw.transmission(m, d)
        if not self._needs_velocity:
            return
        wp.launch(warp_kernels.clear, dim=(d.nworld, columns.size), inputs=[columns, d.sensordata])
        mjw.sensor_pos(m, d)
        mjw.fwd_velocity(m, d)
        mjw.sensor_vel(m, d)

    def reset(self, mask: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """See ``Physics``; ``u`` is [N, random_size]. The other worlds do not change."""
        if self.host_readable and not bool(mask.any()):
            return
        self._mask.copy_(mask)
        old_derived = {k: self.fields[k].clone() for k in self._derived}
        if self.varied:
            self._set(mask, self.varied, self.randomization.sample(u))
            for name, x in self._actuator_damping.items():
                self._set(mask, self.varied, {name: self.varied[name] + x})
        self._launch("defaults", self._set_defaults)
        self._set(mask, self.fields, values)
        for name in set(_FORCES) & set(self._derived):
            self.fields[name].masked_fill_(mask.view(-1, 1, 1), 0.0)
        if self._derived or self.stage == "velocity":
            self._launch("derive", self._compute_derived)
        self._set(~mask, self.fields, old_derived)

    def _set_defaults(self) -> None:
        """Set the model's defaults where ``_mask``, after the constants of a new random model."""
        if self._varies_mass:
            mjw.set_const(self._warp_model, self.data, restore=False)
        mjw.reset_data(self._warp_model, self.data, self._warp_mask)

    def _compute_derived(self) -> None:
        """Compute the derived fields of the current state, except _FORCES."""
        if self._reset_solves:
            mjw.forward(self._warp_model, self.data)
        else:
            self._make_current()
            if set(_FROM_CONTROL) & set(self._derived):
                mjw.fwd_actuation(self._warp_model, self.data)

    @staticmethod
    def _set(mask: Tensor, fields: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy values [N, ..] into the fields of the same names, where bool [N]."""
        for name, value in values.items():
            x = fields[name]
            torch.where(mask.view(-1, *[1] * (x.ndim - 1)), value, x, out=x)

    def uniform(self, seed: Tensor, stream: int, count: Tensor, size: int) -> Tensor:
        """See ``Physics``. One kernel instead of the 44 of ``base.random.uniform``."""
        out = torch.empty(len(seed), size, dtype=self.dtype, device=self.device)
        key, arrays = wp.uint64(random.stream_key(stream)), map(wp.from_torch, (seed, count, out))
        with self.scope():
            wp.launch(warp_kernels.uniform, out.shape, [key, *arrays])
        return out

    # --------------------------------------------------------------------------------------- images
    def images(self, mask: Tensor) -> dict[str, Tensor]:
        """See ``Physics``. All worlds are rendered."""
        if self._render_context is None:
            return {}
        height, width = self.cameras.size
        # Stages none and forces leave derived fields one physics step old; rendering updates them.
        derived = self._derived if self.stage != "velocity" else ()
        old_derived = {k: self.fields[k].clone() for k in derived}
        self._launch("render", self._render)
        for name, x in old_derived.items():
            self.fields[name].copy_(x)
        # [N, cameras, H, W, (blue, green, red, alpha)] -> [N, cameras, 3, H, W]
        pixels = self._pixels.view(self.num_envs, -1, height, width, 4)[..., :3].flip(-1)
        pixels = pixels.permute(0, 1, 4, 2, 3)
        order = self._camera_order.index
        return {name: pixels[:, order(name)].contiguous() for name in self.cameras.names}

    def _make_render_context(self) -> Any:
        """Create a ray tracer that shades by OpenGL's formulas.

        It has no sites, tendons and reflections.
        """
        size, n = (self.cameras.size[1], self.cameras.size[0]), self.num_envs
        # mujoco_warp returns the images in the order of the model's cameras.
        self._camera_order = sorted(self.cameras.names, key=lambda n: self.model.camera(n).id)
        images: dict[str, Any] = {"render_rgb": True, "render_depth": False, "render_seg": False}
        with wp.ScopedDevice(self._warp_device):
            context = mjw.create_render_context(
                self.model,
                nworld=n,
                cam_res=size,
                cam_active=self._camera_order,
                render_skybox=True,
                **images,
            )
        self._pixels = wp.to_torch(context.rgb_data).view(torch.uint8)
        return context

    def _render(self) -> None:
        """Launch the kernels that render all worlds."""
        m, d = self._warp_model, self.data
        if self.stage != "velocity":
            mjw.kinematics(m, d)
            mjw.com_pos(m, d)
            mjw.camlight(m, d)
        mjw.refit_bvh(m, d, self._render_context)
        mjw.render(m, d, self._render_context)

    def render(self, world: int = 0) -> Tensor:
        """See ``Physics``; OpenGL renders on the CPU."""
        inputs = {k: self.fields[k] for k in POSE_FIELDS} | self.varied
        return self.cameras.render(
            {k: x[world : world + 1].cpu().numpy() for k, x in inputs.items()}
        )

    # ---------------------------------------------------------------------------------------- state
    def state(self) -> dict[str, Tensor]:
        """See ``Physics``.

        Raises:
            EnvError: Contacts or constraints exceeded their capacity.
        """
        self._host_counts.copy_(self._peak_counts)
        self._check_overflow()
        fields = {k: self.fields[k].clone() for k in (*STATE_FIELDS, *self._derived)}
        return fields | {f"model/{k}": x.clone() for k, x in self.varied.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See ``Physics``."""
        self._mask.fill_(True)
        for k, x in self.varied.items():
            x.copy_(state[f"model/{k}"])
        self._launch("defaults", self._set_defaults)
        for k in STATE_FIELDS:
            self.fields[k].copy_(state[k])
        self._launch("derive", self._compute_derived)
        # Again, because the computation overwrites the solver's start and stale derived fields.
        for k in (*STATE_FIELDS, *self._derived):
            self.fields[k].copy_(state[k])

    def close(self) -> None:
        """Free the graphs and the OpenGL contexts."""
        self._graphs.clear()
        self.cameras.close()

    # --------------------------------------------------------------------------------------- graphs
    def capture(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return ``step`` as one CUDA graph, on a CPU ``step`` itself."""
        return step if self._on_cpu else _CapturedStep(self, step)

    def fuse(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function``; on a GPU compiled, so that few kernels do its work."""
        if self.device.type not in FUSED_DEVICES or compilation.is_compilation_disabled():
            return function
        # The gradient mode of the caller and its precision of matrix products would each be a
        # variant of the compiled code.
        compiled = torch.no_grad()(compilation.compile_function(function, dynamic=False))
        return compilation.highest_matmul_precision()(compiled)

    def _launch(self, name: Hashable, kernels: Callable[[], None]) -> None:
        """Run ``kernels``, which launches warp kernels only, on torch's current stream."""
        with self.scope():
            # On a GPU the whole control step is one graph. The first call compiles.
            if not self._on_cpu or name not in self._graphs:
                kernels()
                self._graphs.setdefault(name, None)
                return
            if self._graphs[name] is None:
                with wp.ScopedCapture(device=self._warp_device) as capture:
                    kernels()
                self._graphs[name] = capture.graph
            wp.capture_launch(self._graphs[name])

    def scope(self) -> AbstractContextManager[Any]:
        """Return a context in which warp launches kernels on torch's current stream."""
        if self._on_cpu:
            return wp.ScopedDevice(self._warp_device)
        stream = torch.cuda.current_stream(self.device)
        # Kept, because warp identifies the stream of a recording by its Python object.
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = wp.stream_from_torch(stream)
        return wp.ScopedStream(self._streams[stream.cuda_stream], sync_enter=False)

    # ------------------------------------------------------------------------------------- overflow
    def poll_overflow(self) -> None:
        """Check the counts that the last call requested, then request the current ones.

        Neither synchronises with the GPU.

        Raises:
            EnvError: Contacts or constraints exceeded their capacity.
        """
        self._check_overflow()
        self._host_counts.copy_(self._peak_counts, non_blocking=True)  # pinned memory

    def measured_capacities(self) -> dict[str, int]:
        """Return ``nconmax`` and ``njmax`` that hold twice the largest counts so far.

        They are at least a third of the present capacities, because a trained policy can touch more
        than what was measured, and at most the present ones.
        """
        candidates, contacts, rows = self._peak_counts.tolist()[2:]
        per_world = max(candidates, contacts) / self.num_envs
        nconmax = max(math.ceil(2 * per_world), math.ceil(self._nconmax / 3))
        njmax = max(2 * rows, math.ceil(self._njmax / 3))
        njmax = 16 * math.ceil(njmax / 16)  # whole tiles; also fewer variants of compiled kernels
        return {"nconmax": min(nconmax, self._nconmax), "njmax": min(njmax, self._njmax)}

    def _check_overflow(self) -> None:
        """Raise EnvError if the counts on the host say that contacts or constraints were lost."""
        contacts_lost, rows_lost, candidates, contacts, rows = self._host_counts.tolist()
        if contacts_lost:
            peak = math.ceil(max(candidates, contacts) / self.num_envs)
            raise EnvError(capacity_message("nconmax", self._nconmax, "contacts per world", peak))
        if rows_lost:
            quantity = "rows of constraints in one world"
            raise EnvError(capacity_message("njmax", self._njmax, quantity, rows))


class _CapturedStep:
    """A control step, or a reset of single worlds, on a GPU: eager in its first two calls, which
    compile kernels, then a graph.

    Warp records the graph, because the solver loops until convergence and torch's graphs have no
    loops. Tensors that torch allocates while recording come from a memory pool that only this
    graph uses.
    """

    def __init__(self, physics: WarpPhysics, step: Callable[[Tensor], Any]) -> None:
        self.physics, self.step, self.calls = physics, step, 0
        self.graph: Any = None

    def __call__(self, action: Tensor) -> Any:
        """Return ``step(action)`` in new tensors.

        Raises:
            EnvError: Contacts exceeded their capacity some steps ago.
        """
        self.calls += 1
        if self.calls == 3:
            try:
                self._capture(action)
            except RuntimeError as error:
                warnings.warn(f"no CUDA graph of steps: they are slower ({error})", stacklevel=2)
        if self.graph is None:
            with compilation.highest_matmul_precision():
                result = self.step(action)
        else:
            self.action.copy_(action)
            with self.physics.scope():
                wp.capture_launch(self.graph)
            result = tree.map(Tensor.clone, self.result)
        self.physics.poll_overflow()
        return result

    def _capture(self, action: Tensor) -> None:
        """Record the step; ``action`` and ``result`` are the graph's input and output tensors."""
        device, self.action = self.physics.device, action.clone()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device):
            self.pool = torch.cuda.MemPool()
        with (
            _no_garbage_collection(),
            torch.cuda.stream(stream),
            torch.cuda.use_mem_pool(self.pool, device),
            self.physics.scope(),
            compilation.highest_matmul_precision(),
            wp.ScopedCapture() as capture,
        ):
            self.result = self.step(self.action)
        self.graph = capture.graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: memory freed while recording would be freed in every replay."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
