"""Data types that simulators and their users exchange.

A ``VectorEnv`` describes its observations and actions with specifications and returns a ``Step``
for each action.

Shape letters:
    N: environments.
    C: actions of an action chunk.
    A: columns of numbers in an action.
    D: columns of choices in an action.
    K: values of a choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.base.images import ImageLayout, decide
from embodied_envs.base.observation_names import ACTION_MASK

# One tensor, or a flat dictionary of tensors, with equal leading dimensions.
Obs: TypeAlias = "Tensor | dict[str, Tensor]"
# Reports a line to the user.
Say: TypeAlias = Callable[[str], None]
# Value of ``max_episode_steps`` for episodes without a time limit.
NO_LIMIT = 2**31 - 1
# Magnitude above which neighbours in float32 are more than 0.001 apart. Observations in float64
# keep their type if they may be larger.
COARSE = 8192.0


# ------------------------------------------------------------------------------------------- spaces
@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one observation array of one environment, without the leading N."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    # How it is read as an image; None: as ``images.decide`` decides for bytes, else a vector.
    image: ImageLayout | None = field(default=None, compare=False)

    @property
    def layout(self) -> ImageLayout | None:
        """How it is read as an image; None: it is a vector."""
        if self.image is not None or self.dtype != torch.uint8:
            return self.image
        return decide(self.shape, self.dtype)


ObsSpec: TypeAlias = "ArraySpec | dict[str, ArraySpec]"


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n-1; a batch of them is int64 [N]."""

    n: int


@dataclass(frozen=True)
class Box:
    """Continuous actions as the policy emits them; a batch of them is float32 [N, A].

    Attributes:
        low: Lower simulator bound of each action dimension, in the simulator's units.
        high: Upper simulator bound of each action dimension.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of action dimensions, A."""
        return len(self.low)


@dataclass(frozen=True)
class Composite:
    """Several choices and numbers in one action; a batch of them is float32 [N, D + A].

    The first D columns are choices, whole numbers 0 .. n-1. The others are as those of a ``Box``.

    Attributes:
        choices: Values n of each choice, D of them.
        box: Bounds of the numbers, A of them; there may be none.
        names: Name of each column.
    """

    choices: tuple[int, ...]
    box: Box = Box((), ())
    names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of columns, D + A."""
        return len(self.choices) + self.box.size


ActionSpec: TypeAlias = "Discrete | Box | Composite"


def choices_of(spec: ActionSpec) -> tuple[int, ...]:
    """Return the number of values of each choice of an action; () for a ``Box``."""
    if isinstance(spec, Discrete):
        return (spec.n,)
    return spec.choices if isinstance(spec, Composite) else ()


def has_action_mask(spec: ObsSpec) -> bool:
    """Return whether observations contain a mask of choices (``ACTION_MASK``)."""
    return isinstance(spec, dict) and ACTION_MASK in spec and spec[ACTION_MASK].dtype == torch.bool


# -------------------------------------------------------------------------------------------- steps
@dataclass(frozen=True, slots=True)
class Step:
    """Result of one action in every environment.

    Attributes:
        obs: [N, ..], the observation to act on next.
        reward: float32 [N], received for this action. For a chunk of C actions [N, C], 0 where an
            action was not executed.
        terminated: bool [N], the task ended the episode.
        truncated: bool [N], the time limit ended the episode. Never True together with
            ``terminated``.
        mask: bool [N], False where this step only reset an ended episode. The action was ignored
            and the reward is 0.
        final_obs: [N, ..], the true successor state in rows where ``terminated | truncated``; other
            rows are arbitrary. Set where ``obs`` already holds the first observation of the next
            episode. None if ``obs`` itself is the true successor because the simulator resets on
            the following step.
        success: bool [N], or None if the task does not report success.
        executed: bool [N, C], the actions of a chunk before the episode's end. None without chunks.
        task: int64 [N], index into ``task_names`` of the episode of this step. None with a single
            task.
        info: Other numbers of the step by name, such as the terms of the reward: [N] ([N, C] with
            chunks), NaN for environments without one; or another shape [K] for means over
            environments. They become curves ``env/<name>``.
        success_at_end: bool [N], success in the last executed action of a chunk. None: ``success``.
    """

    obs: Obs
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    final_obs: Obs | None = None
    success: Tensor | None = None
    executed: Tensor | None = None
    task: Tensor | None = None
    info: dict[str, Tensor] | None = None
    success_at_end: Tensor | None = None


def starts(step: Step) -> Tensor:
    """Return whether ``step.obs`` is the first observation of an episode, bool [N].

    A simulator that resets on the next step first returns the last observation of the episode
    again. Its new episode begins after the masked step.
    """
    resets_later = step.final_obs is None
    return ~step.mask if resets_later else step.terminated | step.truncated | ~step.mask


# --------------------------------------------------------------------------------------- simulators
@dataclass(frozen=True)
class EnvInfo:
    """What is known about simulators without a step, for example to build a policy.

    Attributes:
        id: Value of the option ``env.id``.
        obs_spec: Observation of one environment.
        action_spec: Action of one environment.
        max_episode_steps: Time limit in calls of ``step``; None if the simulator reports none.
        device: Device of the returned observations and of the expected actions.
        step_s: Control period, simulated seconds of one call of ``step``; None if unknown.
        task_names: The tasks that ``Step.task`` indexes.
        instructions: The sentences that an observation "instruction" [N] indexes.
        gripper_closes: Value of the last action dimension that closes the gripper; its negative
            opens it. None without a gripper.
        counts_unstable: Whether ``VectorEnv.unstable`` is a number.
        has_levels: Whether ``VectorEnv.terrain_level`` is a tensor.
    """

    id: str
    obs_spec: ObsSpec
    action_spec: ActionSpec
    max_episode_steps: int | None
    device: torch.device
    step_s: float | None = None
    task_names: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    gripper_closes: float | None = None
    counts_unstable: bool = False
    has_levels: bool = False


# Attributes of ``VectorEnv`` that ``EnvInfo`` contains.
_DESCRIBED = [f.name for f in fields(EnvInfo) if f.name not in ("counts_unstable", "has_levels")]


class VectorEnv(ABC):
    """N environments that step together. Takes and returns tensors on ``device``.

    The first attributes have no default. The others describe what only some simulators have.
    """

    # Number of environments, N.
    num_envs: int
    id: str
    obs_spec: ObsSpec
    action_spec: ActionSpec
    max_episode_steps: int | None
    device: torch.device
    step_s: float | None = None
    task_names: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    # For the attributes from ``id`` on see ``EnvInfo``.
    gripper_closes: float | None = None
    # Gymnasium's space of one observation, or a dictionary of spaces; None for our own tasks.
    observation_space: Any = None
    # Gymnasium's space of one action; None for our own tasks.
    action_space: Any = None
    # Maps the policy's actions to the simulator's.
    to_simulator: Callable[[Tensor], Any] = staticmethod(lambda action: action)
    # Physics steps of one step where the simulator can delay the control by some of them.
    physics_steps: int | None = None
    # Whether a step renders images; some simulators can omit it.
    cameras_enabled = True
    # Whether there is ``truncate_next``; if not, callers use ``reset_where`` after the step.
    can_truncate = False
    # Whether ``send`` and ``receive`` are the halves of a step, which runs in the meantime.
    is_asynchronous = False

    @property
    def info(self) -> EnvInfo:
        """Description of these environments."""
        return EnvInfo(
            **{name: getattr(self, name) for name in _DESCRIBED},
            counts_unstable=self.unstable is not None,
            has_levels=self.terrain_level is not None,
        )

    def error(self, message: str) -> EnvError:
        """Return the exception of a message about this simulator."""
        return EnvError(f"env.id={self.id}: {message}")

    def copy_info(self, info: EnvInfo) -> None:
        """Take over the description of other environments."""
        for name in _DESCRIBED:
            setattr(self, name, getattr(info, name))

    # --------------------------------------------------------------- what only some simulators have
    @property
    def simulator(self) -> VectorEnv:
        """The environments inside all wrappers."""
        return self

    @property
    def unstable(self) -> Tensor | None:
        """int64 [], number of worlds that were reset so far because their simulation diverged."""
        return None

    @property
    def terrain_level(self) -> Tensor | None:
        """int64 [N], level of the curriculum of every environment."""
        return None

    def mechanism(self) -> dict[str, Any]:
        """Return joints, actuators and names of observations of our own tasks, else {}."""
        return {}

    def joint_state(self) -> dict[str, Tensor]:
        """Return positions and velocities [N, ..] of our own tasks, else {}."""
        return {}

    def truncate_next(self, where: Tensor) -> None:
        """Let the next ``step`` truncate episodes of environments, bool [N].

        Unless they end in that step by themselves, it sets ``truncated`` and ``final_obs``, and
        starts new episodes.
        """
        raise NotImplementedError

    def send(self, action: Tensor) -> None:
        """Start a step without waiting for it."""
        raise NotImplementedError

    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""
        raise NotImplementedError

    # --------------------------------------------------------------------- what every simulator has
    @abstractmethod
    def reset(self) -> Obs:
        """Start a new episode in every environment and return observations [N, ..].

        The caller invokes it once after construction and after each ``restart``.
        """

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Execute an action in every environment: float32 [N, A] or [N, D + A], or int64 [N]."""

    def reset_where(self, where: Tensor) -> Obs | None:
        """Start a new episode in selected environments and leave the others unchanged.

        Args:
            where: bool [N], environments to reset; there may be none. Their episode is in progress
                or has just ended.

        Returns:
            Observations [N, ..], arbitrary in rows that are not reset. None if the simulator cannot
            reset single environments.
        """
        return None

    @abstractmethod
    def restart(self, seeds: list[int]) -> None:
        """Return to the state after construction, with one seed per environment.

        ``reset`` must follow.
        """

    def state(self) -> dict[str, Any] | None:
        """Return everything that is needed to continue bit for bit.

        None: the simulator cannot save its state. The caller then replays the actions since the
        last ``restart``.
        """
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Continue from ``state()`` and return the observations to act on next, [N, ..]."""
        raise EnvError(f"env.id={self.id}: its state cannot be loaded; use restart(seeds) instead")

    @abstractmethod
    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3].

        Raises:
            EnvError: The simulator was built without rendering.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the simulator's processes and memory."""
