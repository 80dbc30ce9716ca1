"""The interface of a task: a model, and tensor functions of batched simulator fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from embodied_envs.robots.observation_parts import Part, describe
from embodied_envs.types import Obs

if TYPE_CHECKING:
    import mujoco

Stage: TypeAlias = Literal["velocity", "none", "forces"]
# Name -> tensor [N, ..]: fields of MjData and MjModel in MuJoCo's names, shapes and units (m, rad,
# s, N), and the task's own variables. The engine updates the tensors in place, so a function that
# stores one must clone it.
State: TypeAlias = "Mapping[str, Tensor]"
# Term of a reward: a function of (before, s, action) and numbers by name that returns [N].
Term: TypeAlias = "Callable[..., Tensor]"


class Task(ABC):
    """Base class of tasks. One subclass runs on every engine; N worlds are stepped together.

    The functions compute with tensors only, in the dtype and on the device that ``bind`` gets:
    float64 on the CPU engine, float32 on the GPU. They never read a value on the host (no ``if
    tensor``, no ``.item()``) and create no tensor from Python numbers; ``bind`` creates constants.
    A control step can then be captured as one CUDA graph. On a GPU ``torch.compile`` also traces
    all functions but ``control`` and ``bind``; those that it cannot trace run eagerly.

    The order of a control step is: ``control``, ``decimation`` physics steps, ``reward``,
    ``terminated``, ``success``, ``advance``, ``observe``; where the episode ended, ``reset``,
    ``carry_over`` and ``observe`` again. Random numbers are the argument ``u``, uniform in [0, 1).
    They are a function of (seed, episode, step), equal in every engine and after a resume.
    """

    # Name for ``env.id``.
    id: ClassVar[str]
    # Physics steps in one control step.
    decimation: int = 1
    # Time limit in control steps.
    max_episode_steps: int = 1000
    # MjData and MjModel fields that the functions read, besides qpos, qvel and ctrl.
    fields: tuple[str, ...] = ()
    # MjData and MjModel fields that only ``privileged`` reads.
    privileged_fields: tuple[str, ...] = ()
    # Entries of the state whose values before the control step ``reward`` reads.
    before: tuple[str, ...] = ()
    # Derived fields that are computed after a control step.
    #
    # velocity: positions, velocities and their sensors (for example xpos) follow from qpos and
    # qvel. none: derived fields are those of the state one physics step ago, as Gymnasium reads
    # them; this is cheaper. forces: as none, with the contact forces (cfrc_ext) of that step.
    stage: Stage = "velocity"
    # Random numbers per world for ``reset``; ``bind`` may set it.
    reset_noise: int = 0
    # Random numbers per world for ``advance``.
    step_noise: int = 0
    # Names of the kinds of episode, indexed by the variable "kind" [N]; empty: there is one.
    names: tuple[str, ...] = ()
    # All sentences that an episode can have, indexed by the variable "instruction" [N].
    instructions: tuple[str, ...] = ()
    # Whether ``env.ranges.joint_offset`` may shift the joints: ``control`` and ``observe`` read
    # joint positions only from s["qpos"] and the servos' targets only from s["ctrl"], and the
    # targets that they return or remember are those of the policy.
    #
    # These functions then get the state as the robot measures it; ``reward``, ``privileged`` and
    # all others get the true one.
    reads_joints_from_state: bool = False
    # Ranges of the domain randomisation, used with env.randomize; see
    # ``domain_randomization.RANGES``.
    ranges: Mapping[str, tuple[float, float]] = {}

    # Command -> its range, which ``env.commands`` changes, in the order of the variable "command"
    # [N, C]. See COMMAND_UNITS.
    commands: Mapping[str, tuple[float, float]] = {}
    # Term of the reward -> its weight and parameters, which ``env.rewards`` changes.
    rewards: Mapping[str, Mapping[str, float]] = {}

    # ------------------------------------------------------------------------------------ the model
    @abstractmethod
    def spec(self) -> mujoco.MjSpec:
        """Return a new model at every call, because an engine may change it."""

    @classmethod
    def has_privileged(cls) -> bool:
        """Return whether the task overrides ``privileged``."""
        return cls.privileged is not Task.privileged

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:  # noqa: B027
        """Look up names in ``model`` and create the constant tensors, before any other function.

        For a name that the model lacks MuJoCo raises KeyError, which becomes an EnvError.
        """

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """Return the lowest and the highest action per dimension.

        By default these are the control range, infinite for an actuator without one.
        """
        limited = model.actuator_ctrllimited.astype(bool)
        low, high = model.actuator_ctrlrange.T
        return np.where(limited, low, -np.inf).tolist(), np.where(limited, high, np.inf).tolist()

    # -------------------------------------------------------------------------------- the functions
    def control(self, s: State, action: Tensor) -> Tensor:
        """Map an action [N, A] within its bounds to ctrl [N, nu]."""
        return action

    @abstractmethod
    def observe(self, s: State) -> Obs:
        """Return the observation: [N, D], or a dictionary of tensors [N, ..]."""

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        """Return name and unit of each number of ``observe`` (of its entry "state").

        They describe an exported policy. By default they follow from ``observation_parts``.
        """
        return describe(self.observation_parts(model), model)

    def observation_parts(self, model: mujoco.MjModel) -> list[Part]:
        """Return the parts of ``observe`` (of its entry "state") in their order.

        The program that runs an exported policy on a robot computes the observation from them. By
        default there are none, and the user of such a program writes the function.
        """
        return []

    def privileged(self, s: State) -> Tensor | None:
        """Return what exists in simulation only, [N, D], in float: friction, masses, forces.

        It becomes the observation "privileged" beside "state" and is computed only where
        ``model.critic_obs`` (or another list of observations) names it. None: the task has none.
        """
        return None

    def groups(self) -> Mapping[str, Callable[[State], Tensor]]:
        """Return further observations: name -> function of the state that returns [N, ..].

        Like ``privileged``, each is offered beside "state" and computed only where an option
        (``model.critic_obs``, ``model.actor_obs``, ``env.obs_keys``) names it.
        """
        return {}

    @abstractmethod
    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        """Return the reward [N]; ``before`` has the fields that the attribute ``before`` lists."""

    def reward_terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        """Return numbers [N] to log as curves ``env/<name>``, such as the terms of the reward."""
        return {}

    def available_terms(self) -> Mapping[str, Term]:
        """Return the terms that ``rewards`` can name."""
        return {}

    def total(self, terms: dict[str, Tensor]) -> Tensor | None:
        """Return the reward [N] from ``reward_terms``, so that they are computed once in a step.

        None, the default: ``reward`` computes it.
        """
        return None

    def terminated(self, s: State) -> Tensor:
        """Return bool [N], whether the task has ended; by default it never ends."""
        return torch.zeros_like(s["qpos"][:, 0], dtype=torch.bool)

    def success(self, s: State) -> Tensor | None:
        """Return bool [N], whether the task has succeeded; None: it does not define success."""
        return None

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        """Return the variables [N, ..] that a control step changes; ``u`` is [N, step_noise]."""
        return {}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the initial state of an episode; ``u`` is [N, reset_noise].

        It has every variable of the task and any of qpos, qvel, act, ctrl, mocap_pos and
        mocap_quat, which are the model's defaults otherwise, [N, ..] each. The dtype of a variable
        does not change later.
        """
        return {}

    def mirrored(self, name: str, x: Tensor) -> Tensor | None:
        """Return the mirror image of a variable [N, ..] in the plane y = 0 of a robot's base.

        None: it follows from ``advance``. By default only that of the commands is stated:
        velocities and places to the left, and turning left, change their sign.
        """
        if name != "command" or not self.commands:
            return None
        flips = [-1.0 if n == "y" or n.endswith(("_y", "_yaw")) else 1.0 for n in self.commands]
        return x * x.new_tensor(flips)

    def carry_over(self, s: State, start: State, u: Tensor) -> dict[str, Tensor]:
        """Return entries of the initial state that follow from the episode before, [N, ..] each.

        A curriculum changes its level here. Like all variables, the level is part of a checkpoint.
        The function is not applied to the first episode of an environment, so an evaluation, which
        measures first episodes, has initial states from ``reset`` alone. A variable named
        "terrain_level" is logged as ``rollout/terrain_level``.

        Args:
            s: The state in which the episode ended.
            start: Result of ``reset``, whose entries of equal names are replaced.
            u: The random numbers of ``reset``, [N, reset_noise].
        """
        return {}
