"""What a task is: a model, and tensor functions from batched simulator fields to observation,
reward and the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.core.types import Obs

if TYPE_CHECKING:
    import mujoco

Stage: TypeAlias = Literal["velocity", "none", "forces"]
State: TypeAlias = "Mapping[str, Tensor]"
"""By name, [N, ..]: MjData and MjModel fields in MuJoCo's own names, shapes and units (m, rad, s,
N), and the task's own variables. Live: a function that keeps one clones it."""


class Task(ABC):
    """N worlds stepped together; an engine brings the physics. Subclass it, once for every engine.

    Functions compute with tensors only, in the dtype and on the device they are given: float64 on
    the CPU engine, float32 on the GPU. They never look at a value (no ``if tensor``, no
    ``.item()``) and make no tensor from Python numbers (``bind`` does): then a control step is
    captured as one CUDA graph.

    The order of a control step is: ``control``, ``decimation`` physics steps, ``reward``,
    ``terminated``, ``success``, ``advance``, ``observe``; where the episode ended, ``reset`` and
    ``observe`` again. Randomness arrives as ``u``, uniform in [0, 1), a function of (seed, episode,
    step): the same in every engine and after a resume.
    """

    id: ClassVar[str]
    """Name for ``env.id``."""
    decimation: int = 1
    """Physics steps in one control step."""
    max_episode_steps: int = 1000
    """Clock limit in control steps."""
    fields: tuple[str, ...] = ()
    """MjData and MjModel fields that the functions read, besides qpos, qvel and ctrl."""
    before: tuple[str, ...] = ()
    """The entries of the state that ``reward`` wants as they were before the control step."""
    stage: Stage = "velocity"
    """What holds after a control step. velocity: positions, velocities and their sensors (xpos,
    sensordata, ..) are those of qpos and qvel. none: all derived fields describe the state one
    physics step ago, as Gymnasium reads them; cheaper. forces: as none, and contact forces
    (cfrc_ext) of that step are computed."""
    reset_noise: int = 0
    """Numbers that ``reset`` wants for each world; ``bind`` may set it."""
    step_noise: int = 0
    """Numbers that ``advance`` wants for each world."""
    names: tuple[str, ...] = ()
    """Names of the kinds of episode, if there are several; the variable "kind" [N] then holds their
    index.
    """
    instructions: tuple[str, ...] = ()
    """Every sentence an episode can be given; the variable "instruction" [N] then holds its index.
    """
    ranges: Mapping[str, tuple[float, float]] = {}
    """Domain randomisation that suits the task, see ``randomization.RANGES``; applied where it is
    asked for.
    """

    # ------------------------------------------------------------------------------------ the model
    @abstractmethod
    def spec(self) -> mujoco.MjSpec:
        """The model, fresh at every call: an engine may change it."""

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:  # noqa: B027
        """Called once, before any other function: look names up in ``model``, make the constant
        tensors.

        A name that the model lacks is a KeyError of MuJoCo's, which the engine turns into an
        EnvError.
        """

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """Lowest and highest action, one each per dimension; here: the control range, infinite
        where it has none.
        """
        limited = model.actuator_ctrllimited.astype(bool)
        low = [
            float(x) if on else float("-inf")
            for x, on in zip(model.actuator_ctrlrange[:, 0], limited)
        ]
        high = [
            float(x) if on else float("inf")
            for x, on in zip(model.actuator_ctrlrange[:, 1], limited)
        ]
        return low, high

    # -------------------------------------------------------------------------------- the functions
    def control(self, s: State, action: Tensor) -> Tensor:
        """Action [N, A] within its bounds -> ctrl [N, nu]."""
        return action

    @abstractmethod
    def observe(self, s: State) -> Obs:
        """[N, D], or a dictionary of [N, ..]."""

    @abstractmethod
    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        """[N]; ``before`` holds the fields that the attribute of this name lists."""

    def terminated(self, s: State) -> Tensor:
        """bool [N], the task has ended; here: never."""
        return torch.zeros_like(s["qpos"][:, 0], dtype=torch.bool)

    def success(self, s: State) -> Tensor | None:
        """bool [N], the task has succeeded; None: it does not say."""
        return None

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        """The task's variables [N, ..] that change with a control step; ``u`` is [N,
        step_noise].
        """
        return {}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """[N, reset_noise] -> how an episode begins: any of qpos, qvel, act, ctrl, mocap_pos,
        mocap_quat (the model's defaults else), and every variable of the task, [N, ..] each.
        Variables keep the dtype they have here.
        """
        return {}
