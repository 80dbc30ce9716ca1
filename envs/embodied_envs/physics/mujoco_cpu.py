"""N MuJoCo worlds on CPU threads: ``mujoco.batch`` (MuJoCo 3.17), else one MjData per world."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base import random
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.cameras import POSE_FIELDS, Cameras
from embodied_envs.physics.domain_randomization import Randomization, model_field
from embodied_envs.physics.engine import STATE_FIELDS, T

try:
    from mujoco.batch import Batch
except ImportError:  # before 3.17
    Batch = None

# ``Task.stage`` -> the last stage that is computed after a control step.
STAGES = {
    "none": int(mujoco.mjtStage.mjSTAGE_NONE),
    "velocity": int(mujoco.mjtStage.mjSTAGE_VEL),
    "forces": int(mujoco.mjtStage.mjSTAGE_ACC),
}


class BatchPhysics:
    """``Physics`` in float64 on CPU threads; the tensors are views of the simulator's memory."""

    device, dtype, host_readable = torch.device("cpu"), torch.float64, True

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        num_threads: int,
        *,
        fields: Sequence[str],
        stage: str,
        cameras: Cameras,
        randomization: Randomization,
    ) -> None:
        """Allocate the worlds.

        Args:
            model: The model of all worlds; its automatic reset is switched off.
            num_envs: Number of worlds, N.
            num_threads: Threads that step them.
            fields: MjData and MjModel fields to expose besides STATE_FIELDS.
            stage: See ``Task.stage``.
            cameras: Renderer of the images.
            randomization: Fields that differ between worlds.

        Raises:
            EnvError: A field is unknown.
        """
        # MujocoEnv detects unstable worlds and resets them.
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        mujoco.set_mju_user_warning(_warn)
        self.model, self.cameras, self.randomization = model, cameras, randomization
        self.random_size = randomization.size
        worlds: Any = _Threads if stage == "forces" or Batch is None else Batch
        self.worlds = worlds(model, num_envs, num_threads)
        self._stage = STAGES[stage]
        arrays: dict[str, np.ndarray] = {}
        for name in dict.fromkeys([*STATE_FIELDS, *fields]):
            if hasattr(mujoco.MjData, name):
                arrays[name] = self.worlds.bind(name)
            elif not hasattr(model, name):
                raise EnvError(f"MuJoCo has no field {name!r} in MjData or MjModel")
            elif name in randomization.fields:
                arrays[name] = self.worlds.expand(name)
            else:
                x = np.asarray(getattr(model, name), dtype=np.float64)
                arrays[name] = np.broadcast_to(x, (num_envs, *x.shape))
        with warnings.catch_warnings():  # arrays of derived fields are read-only, and not written
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.fields = {name: torch.from_numpy(x) for name, x in arrays.items()}
        self.varied = {k: self.worlds.expand(k) for k in randomization.fields}

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance by ``substeps`` physics steps."""
        self.fields["ctrl"].copy_(ctrl)
        self.worlds.step(nstep=substeps, stage=self._stage)

    def reset(self, mask: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """See ``Physics``; ``u`` is [N, random_size]."""
        ids = mask.nonzero().flatten().numpy().astype(np.int32)
        if not ids.size:
            return
        if self.varied:
            for name, value in self.randomization.sample(u[mask]).items():
                self.varied[name][ids] = value.numpy()
            self.worlds.set_const(ids)
        # The state becomes the model's default; derived fields stay as they are.
        self.worlds.reset(ids, stage=STAGES["none"])
        for name, value in values.items():
            self.fields[name][mask] = value[mask]
        self.worlds.forward(ids)

    def uniform(self, seed: Tensor, stream: int, count: Tensor, size: int) -> Tensor:
        """See ``Physics``."""
        return random.uniform(seed, stream, count, size, self.dtype)

    def images(self, mask: Tensor) -> dict[str, Tensor]:
        """See ``Physics``."""
        return self.cameras.images(self._image_inputs(), mask) if self.cameras.names else {}

    def render(self, world: int = 0) -> Tensor:
        """See ``Physics``."""
        return self.cameras.render(self._image_inputs(), world)

    def _image_inputs(self) -> dict[str, np.ndarray]:
        """Return the arrays [N, ..] that the images depend on."""
        return {k: self.fields[k].numpy() for k in POSE_FIELDS} | self.varied

    def state(self) -> dict[str, Tensor]:
        """See ``Physics``."""
        fields = {k: self.fields[k].clone() for k in STATE_FIELDS}
        return fields | {f"model/{k}": torch.from_numpy(x.copy()) for k, x in self.varied.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See ``Physics``.

        Derived fields are those of the state: with stage none, not those one physics step ago.
        """
        ids = np.arange(len(self.fields["qpos"]), dtype=np.int32)
        for k, x in self.varied.items():
            x[:] = state[f"model/{k}"].numpy()
        if self.varied:
            self.worlds.set_const(ids)
        for k in STATE_FIELDS:
            self.fields[k].copy_(state[k])
        self.worlds.forward(ids)
        # forward() solved for the accelerations and overwrote the solver's start.
        self.fields["qacc_warmstart"].copy_(state["qacc_warmstart"])

    def capture(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return ``step``; there is no faster program on a CPU."""
        return step

    def fuse(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function``; on a CPU there is no faster one."""
        return function

    def close(self) -> None:
        """Free renderer and worlds."""
        self.cameras.close()
        del self.worlds


class _Threads:
    """The methods of ``mujoco.batch.Batch`` with one MjData per world, stepped by threads.

    ``mj_step`` releases Python's lock. Stage "forces" needs this class: ``mujoco.batch`` does not
    compute contact forces.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int) -> None:
        self.model = model
        self.datas = [mujoco.MjData(model) for _ in range(num_envs)]
        self.models = [model] * num_envs
        self.arrays: dict[str, np.ndarray] = {}
        self.varied: dict[str, np.ndarray] = {}
        self.pool = ThreadPoolExecutor(num_threads)
        self.blocks = [b for b in np.array_split(np.arange(num_envs), num_threads) if b.size]

    def bind(self, name: str) -> np.ndarray:
        rows = [np.asarray(getattr(d, name), dtype=np.float64) for d in self.datas]
        self.arrays[name] = np.stack(rows)
        return self.arrays[name]

    def expand(self, name: str) -> np.ndarray:
        if name not in self.varied:
            if self.models[0] is self.model:
                self.models = [copy.copy(self.model) for _ in self.datas]
            self.varied[name] = np.stack([model_field(m, name) for m in self.models])
        return self.varied[name]

    def step(self, *, nstep: int, stage: int) -> None:
        list(self.pool.map(lambda ids: [self._step(i, nstep, stage) for i in ids], self.blocks))

    def _step(self, i: int, substeps: int, stage: int) -> None:
        m, d = self.models[i], self.datas[i]
        d.ctrl[:] = self.arrays["ctrl"][i]
        d.qvel[:] = self.arrays["qvel"][i]  # which a push has changed
        mujoco.mj_step(m, d, nstep=substeps)
        if stage == STAGES["velocity"]:
            mujoco.mj_step1(m, d)
        elif stage == STAGES["forces"]:
            mujoco.mj_rnePostConstraint(m, d)
        self._export(i)

    def _export(self, i: int) -> None:
        """Copy the fields of world ``i`` to the arrays."""
        for name, array in self.arrays.items():
            array[i] = getattr(self.datas[i], name)

    def reset(self, ids: np.ndarray, stage: int) -> None:
        for i in ids:
            mujoco.mj_resetData(self.models[i], self.datas[i])
            self._export(i)

    def forward(self, ids: np.ndarray) -> None:
        """Compute the derived fields of the state in the arrays."""
        for i in ids:
            for name in STATE_FIELDS:
                setattr(self.datas[i], name, self.arrays[name][i])
            mujoco.mj_forward(self.models[i], self.datas[i])
            self._export(i)

    def set_const(self, ids: np.ndarray) -> None:
        for i in ids:
            for name, x in self.varied.items():
                model_field(self.models[i], name)[...] = x[i]
            mujoco.mj_setConst(self.models[i], self.datas[i])


def _warn(text: str) -> None:
    """Turn a warning of MuJoCo into Python's instead of a line in MUJOCO_LOG.TXT.

    An unstable world causes no warning, because ``MujocoEnv.unstable`` counts it.
    """
    if "simulation is unstable" not in text and "settotalmass" not in text:
        warnings.warn(f"MuJoCo: {text}", stacklevel=2)
