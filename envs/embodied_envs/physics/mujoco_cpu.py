"""N MuJoCo worlds on CPU threads, one model in memory: ``mujoco.batch`` (MuJoCo 3.17), else threads
over MjData.
"""

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

from embodied_envs.physics.cameras import Cameras
from embodied_envs.physics.domain_randomization import Randomization, field
from embodied_ppo.core.types import EnvError

try:
    from mujoco.batch import Batch
except ImportError:  # before 3.17
    Batch = None

_STATE = ("time", "qpos", "qvel", "act", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""What the next physics step depends on. qacc_warmstart is where the solver begins."""


class BatchPhysics:
    """See ``Physics``. float64; tensors are views of the simulator's memory."""

    device, dtype, waits = torch.device("cpu"), torch.float64, True

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
        """``fields``: MjData and MjModel fields to show besides INITIAL_FIELDS. Raises EnvError for
        one unknown.
        """
        model.opt.disableflags |= int(
            mujoco.mjtDisableBit.mjDSBL_AUTORESET
        )  # what blows up is ours to see and reset
        mujoco.set_mju_user_warning(_warn)
        self.model, self.cameras, self.randomization = model, cameras, randomization
        self.draws = randomization.size
        simple = stage != "forces" and Batch is not None
        self.worlds = (_Batch if simple else _Threads)(model, num_envs, num_threads, stage)
        names = dict.fromkeys([*_STATE, *fields])
        shown: dict[str, np.ndarray] = {}
        for name in names:
            if hasattr(mujoco.MjData, name):
                shown[name] = self.worlds.data(name)
            elif hasattr(model, name):
                one = np.asarray(getattr(model, name), dtype=np.float64)
                shown[name] = (
                    self.worlds.expand(name)
                    if name in randomization.fields
                    else np.broadcast_to(one, (num_envs, *one.shape))
                )
            else:
                raise EnvError(f"MuJoCo has no field {name!r} in MjData or MjModel")
        with (
            warnings.catch_warnings()
        ):  # numpy's arrays of outputs are read-only; so are ours, by agreement
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.fields = {name: torch.from_numpy(x) for name, x in shown.items()}
        self.varied = {k: self.worlds.expand(k) for k in randomization.fields}

    def step(self, ctrl: Tensor, substeps: int) -> None:
        """Set ctrl [N, nu] and advance."""
        self.fields["ctrl"].copy_(ctrl)
        self.worlds.step(substeps)

    def reset(self, where: Tensor, values: Mapping[str, Tensor], u: Tensor) -> None:
        """See ``Physics``; ``u`` is [N, draws]."""
        ids = where.nonzero().flatten().numpy()
        if not ids.size:
            return
        self._vary(ids, u[where])
        self.worlds.reset(ids)
        for name, value in values.items():
            self.fields[name][where] = value[where]
        self.worlds.forward(ids)

    def _vary(self, ids: np.ndarray, u: Tensor) -> None:
        """Draw the model of some worlds anew."""
        if not self.varied:
            return
        for name, value in self.randomization.sample(u).items():
            self.varied[name][ids] = value.numpy()
        self.worlds.set_const(ids)

    def images(self, where: Tensor) -> dict[str, Tensor]:
        """See ``Physics``."""
        return self.cameras.images(self._kinematics(), where) if self.cameras.names else {}

    def picture(self) -> Tensor:
        """See ``Physics``."""
        return self.cameras.picture(self._kinematics())

    def _kinematics(self) -> dict[str, np.ndarray]:
        """What a picture of world i depends on, [N, ..]."""
        return {
            k: self.fields[k].numpy() for k in ("qpos", "mocap_pos", "mocap_quat")
        } | self.varied

    def state(self) -> dict[str, Tensor]:
        """See ``Physics``."""
        own = {k: self.fields[k].clone() for k in _STATE}
        return own | {f"model/{k}": torch.from_numpy(x.copy()) for k, x in self.varied.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See ``Physics``.

        Derived fields are those of the state: with stage none, not those one physics step ago.
        """
        everywhere = np.arange(len(self.fields["qpos"]))
        for k, x in self.varied.items():
            x[:] = state[f"model/{k}"].numpy()
        if self.varied:
            self.worlds.set_const(everywhere)
        for k in _STATE:
            self.fields[k].copy_(state[k])
        self.worlds.forward(everywhere)
        self.fields["qacc_warmstart"].copy_(state["qacc_warmstart"])

    def captured(self, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """See ``Physics``."""
        return step

    def close(self) -> None:
        self.cameras.close()
        self.worlds.close()


class _Batch:
    """The worlds of mujoco.batch."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int, stage: str) -> None:
        assert Batch is not None
        self.batch = Batch(model, num_envs, num_threads)
        self.stage = int(
            mujoco.mjtStage.mjSTAGE_VEL if stage == "velocity" else mujoco.mjtStage.mjSTAGE_NONE
        )

    def data(self, name: str) -> np.ndarray:
        """An MjData field [N, ..], live; written to only where it is part of the state."""
        return self.batch.bind(name)

    def expand(self, name: str) -> np.ndarray:
        """An MjModel field with a value for each world, [N, ..], live."""
        return self.batch.expand(name)

    def step(self, substeps: int) -> None:
        self.batch.step(nstep=substeps, stage=self.stage)

    def reset(self, ids: np.ndarray) -> None:
        """The model's defaults, derived fields untouched."""
        self.batch.reset(ids.astype(np.int32), stage=int(mujoco.mjtStage.mjSTAGE_NONE))

    def forward(self, ids: np.ndarray) -> None:
        self.batch.forward(ids.astype(np.int32))

    def set_const(self, ids: np.ndarray) -> None:
        """After changes of expanded fields."""
        self.batch.set_const(ids.astype(np.int32))

    def close(self) -> None:
        del self.batch


class _Threads:
    """One MjData for each world, and threads over ``mj_step``, which lets go of Python's lock."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, num_threads: int, stage: str) -> None:
        self.model, self.stage = model, stage
        self.datas = [mujoco.MjData(model) for _ in range(num_envs)]
        self.models = [model] * num_envs
        self.arrays: dict[str, np.ndarray] = {}
        self.views: list[list[tuple[np.ndarray, Any]]] = [[] for _ in self.datas]
        self.varied: dict[str, np.ndarray] = {}
        self.pool = ThreadPoolExecutor(num_threads)
        self.blocks = [b for b in np.array_split(np.arange(num_envs), num_threads) if b.size]

    def data(self, name: str) -> np.ndarray:
        array = np.stack([np.asarray(getattr(d, name), dtype=np.float64) for d in self.datas])
        self.arrays[name] = array
        if name != "time":
            for views, row, d in zip(self.views, array, self.datas, strict=True):
                views.append((row, getattr(d, name)))
        return array

    def expand(self, name: str) -> np.ndarray:
        if name not in self.varied:
            if self.models[0] is self.model:
                self.models = [copy.copy(self.model) for _ in self.datas]
            self.varied[name] = np.stack([field(m, name) for m in self.models])
        return self.varied[name]

    def step(self, substeps: int) -> None:
        list(self.pool.map(lambda ids: [self._step(i, substeps) for i in ids], self.blocks))

    def _step(self, i: int, substeps: int) -> None:
        m, d = self.models[i], self.datas[i]
        d.ctrl[:] = self.arrays["ctrl"][i]
        mujoco.mj_step(m, d, nstep=substeps)
        if self.stage == "velocity":
            mujoco.mj_step1(m, d)
        elif self.stage == "forces":
            mujoco.mj_rnePostConstraint(m, d)
        self._show(i)

    def _show(self, i: int) -> None:
        for row, view in self.views[i]:
            row[...] = view
        self.arrays["time"][i] = self.datas[i].time

    def reset(self, ids: np.ndarray) -> None:
        for i in ids:
            mujoco.mj_resetData(self.models[i], self.datas[i])
            self._show(i)

    def forward(self, ids: np.ndarray) -> None:
        """Of the state that the arrays hold."""
        for i in ids:
            for name in _STATE:
                if name == "time":
                    self.datas[i].time = float(self.arrays[name][i])
                else:
                    getattr(self.datas[i], name)[...] = self.arrays[name][i]
            mujoco.mj_forward(self.models[i], self.datas[i])
            self._show(i)

    def set_const(self, ids: np.ndarray) -> None:
        for i in ids:
            for name, x in self.varied.items():
                field(self.models[i], name)[...] = x[i]
            mujoco.mj_setConst(self.models[i], self.datas[i])

    def close(self) -> None:
        self.pool.shutdown()


def _warn(text: str) -> None:
    """MuJoCo's warnings become Python's, not lines in MUJOCO_LOG.TXT; a world that blows up is
    counted instead.
    """
    if "simulation is unstable" not in text and "settotalmass" not in text:
        warnings.warn(f"MuJoCo: {text}", stacklevel=2)
