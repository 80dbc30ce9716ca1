"""The words of the house: the values that flow between rooms and the protocols that rooms speak.

Shape letters, used everywhere: T time steps (or response tokens), N environments (or sequences), B samples of a
minibatch, C actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from embodied_ppo.core.errors import CheckpointError, ConfigError, EnvError, PlacementError, ProcessLost, TrainingError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EnvError",
    "PlacementError",
    "ProcessLost",
    "TrainingError",
]  # re-exported
Obs: TypeAlias = "Tensor | dict[str, Tensor]"
"""One tensor, or a flat dictionary of tensors, with equal leading dimensions."""


# ------------------------------------------------------------------------------------------------------------- spaces
@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one observation array of ONE environment (no leading N)."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


ObsSpec: TypeAlias = "ArraySpec | dict[str, ArraySpec]"


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n-1, int64 [N]."""

    n: int


@dataclass(frozen=True)
class Box:
    """Continuous actions, float32 [N, A], as the *policy* emits them.

    ``low`` and ``high`` hold one simulator bound per action dimension, in the simulator's units.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.low)


ActionSpec: TypeAlias = "Discrete | Box"


# -------------------------------------------------------------------------------------------------------- experience
@dataclass(frozen=True, slots=True)
class Step:
    """What a simulator answers to one action of every environment.

    obs         [N, ..]  what to act on next
    reward      [N]      float32, received for this action; [N, C] for a chunk of C actions, 0 where not executed
    terminated  [N]      bool, the task ended
    truncated   [N]      bool, the clock ended it (never True together with terminated)
    mask        [N]      bool, False where this step only reset an ended episode: action ignored, reward 0
    final_obs   [N, ..]  the true successor where terminated | truncated (other rows arbitrary), if ``obs`` holds the
                         next episode's first observation by then; None if ``obs`` itself is the true successor (the
                         simulator resets on the following step)
    success     [N]      bool, or None if the task does not say
    executed    [N, C]   bool, for a chunk of C actions: those before the episode's end; None: there are no chunks
    task        [N]      int64, which of the ``task_names`` the episode of this step is; None if there is one kind
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy decides for N observations.

    action    [N, ..]  what the simulator gets
    log_prob  [N, ..]  float32 behaviour log-probability, as fine as the policy gives it: [N] or [N, C, A]
    value     [N]      float32 V(s); [N, C] where each action of a chunk has a value
    replay             what ``evaluate`` needs beyond obs and action to recompute ``log_prob`` exactly
    """

    action: Tensor
    log_prob: Tensor
    value: Tensor
    replay: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's view of given actions, with gradients.

    log_prob  [B, ..]  shaped as ``Decision.log_prob``
    entropy   [B, ..]  same shape as log_prob
    value     [B], or [B, C] as ``Decision.value``
    logits    [B, K]   categorical policies only, else None
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Experience of one rollout. Dimension 0 is time, dimension 1 of every leaf is N.

    Row t holds s_t, a_t and everything received after a_t: there are no [T+1] tensors and no "done before" flags.

    obs         [T, N, ..]  s_t                            action   [T, N, ..]  a_t
    log_prob    [T, N, ..]  behaviour log-probability       value    [T, N]      V(s_t) when acting
    replay      [T, N, ..]  see ``Decision.replay``
    next_value  [T, N]      V of the true successor, also where the clock cut the episode
    reward      [T, N]      received after a_t, as the simulator gave it; of a chunk of actions Σ γ^i r_i
    terminated  [T, N]      bool                           truncated [T, N]     bool
    mask        [T, N]      bool, part of the objective     version  [T, N]      int64, policy version that acted
    steps       [T, N]      int64, primitive steps that a_t lasted; None: one each

    Where each action of a chunk has a value (reward_type=action_level), value, next_value, reward, terminated,
    truncated and mask are [T, N, C]: the mask ends with the last executed action, which carries the flags.
    """

    obs: Obs
    action: Tensor
    log_prob: Tensor
    value: Tensor
    replay: dict[str, Tensor]
    next_value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    version: Tensor
    steps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A minibatch as the losses see it; leaves are [B, ..] (steps) or [T, B, ..] (whole columns).

    inputs      encoded observations          action, replay   as in Trajectory
    log_prob    behaviour log-probability      value            V_old
    advantage   shaped, normalised             returns          value targets
    mask        bool, part of the objective    weight           off-policy correction, 1 where there is none
    ref_log_prob / ref_logits                  the reference policy's, None without one

    value, advantage, returns and mask are [.., C] where ``Trajectory.value`` is [T, N, C].
    """

    inputs: Any
    action: Tensor
    replay: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    mask: Tensor
    weight: Tensor | None = None
    ref_log_prob: Tensor | None = None
    ref_logits: Tensor | None = None


# ------------------------------------------------------------------------------------------------------------ metrics
@dataclass(frozen=True, slots=True)
class Mean:
    """A metric as (sum, count); a mean of means is not representable."""

    sum: float | Tensor
    count: float | Tensor

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        values = list(values)
        return Mean(float(sum(values)), float(len(values)))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN with nothing counted."""
        count = float(self.count)
        return float(self.sum) / count if count else float("nan")


Advance: TypeAlias = Callable[[str, int, int], None]
"""Hears how much of what takes long is done: what, how many, of how many."""

Metrics: TypeAlias = "dict[str, Mean | float]"
"""Tag (a row of docs/metrics.md) -> a mean over samples, or a plain number that is not averaged."""


# ---------------------------------------------------------------------------------------------------------- protocols
@runtime_checkable
class VectorEnv(Protocol):
    """N environments stepped together. Tensors in, tensors out, on ``device``.

    A simulator may also have
      task_names    tuple[str, ..]: the kinds of episode that ``Step.task`` counts
      instructions  tuple[str, ..]: the sentences that an observation "instruction" [N] counts
      gripper_closes  float: the last action of a step that closes a gripper; its negative opens it
      unstable      int64 []: worlds reset because their simulation blew up, so far
      step_s        float: seconds of simulation in one call of ``step``
    """

    id: str
    """What ``env.id`` named."""
    num_envs: int
    """N."""
    obs_spec: ObsSpec
    """Of one environment."""
    action_spec: ActionSpec
    """Of one environment."""
    max_episode_steps: int | None
    """Clock limit in calls of ``step``; None if the simulator does not say."""
    device: torch.device
    """Where observations arrive and actions are expected."""

    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]. Called once after construction or ``restart``."""
        ...

    def step(self, action: Tensor) -> Step:
        """Act in every environment. ``action`` is float32 [N, A] or int64 [N]."""
        ...

    def reset_where(self, where: Tensor) -> Obs | None:
        """Begin a new episode where bool [N], the others stand still: [N, ..], arbitrary in the rows of the others.

        Asked for where an episode is under way or has just ended. None: the simulator cannot.
        """
        ...

    def restart(self, seeds: list[int]) -> None:
        """Begin again as if newly made with one seed per environment; ``reset`` must follow."""
        ...

    def state(self) -> dict[str, Any] | None:
        """Everything needed to continue bit for bit, or None: then actions are replayed since the last ``restart``."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Continue from ``state()``; returns the observation to act on next."""
        ...

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0; raises EnvError where the simulator was made without pictures."""
        ...

    def close(self) -> None: ...


class Policy(Protocol):
    """Observations to decisions; an ``nn.Module`` whose state_dict is the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...

    def encode(self, obs: Obs) -> Any:
        """Raw observations [B, ..] -> model inputs [B, ..] (normalised; images stay uint8), without gradient."""
        ...

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """The randomness of one ``act`` on so many rows, [rows, ..]; float32."""
        ...

    def act(self, inputs: Any, *, noise: Tensor | None = None) -> Decision:
        """Sample with ``noise``, the only randomness; None: the distribution's mode. Without gradient."""
        ...

    def evaluate(self, inputs: Any, action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        """Log-probability, entropy and value of given actions, with gradients."""
        ...

    def value(self, inputs: Any) -> Tensor:
        """V(s) [B], or [B, C] as ``Decision.value``; never samples."""
        ...

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """'actor' and 'critic': disjoint, together every trainable parameter."""
        ...

    def units(self) -> list[nn.Module]:
        """Large modules that are called one after another, or with ``ranks.gathered``: where learners hold a part of
        each parameter, each is whole only while it computes. All else is whole as long as a method of the policy runs.
        """
        ...

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """Merge raw observations [M, ..] where ``mask`` [M] into the normaliser."""
        ...


class Learner(Protocol):
    cpu_s: dict[str, float]
    """CPU seconds of this process so far, by phase."""

    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Epochs over one trajectory; ``update`` counts from 0."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything beyond the weights that the next update depends on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PendingRow:
    """The row of an update whose checkpoint is written before the update is evaluated and logged.

    metrics  of the rollout and the update      evaluation_due  whether an evaluation's metrics join them
    """

    metrics: Metrics
    evaluation_due: bool


class System(Protocol):
    """Where things run; the loop's only partner."""

    @property
    def unit(self) -> Literal["env_steps", "tokens"]:
        """What experience is counted in."""
        ...

    steps: int
    """Experience learned from so far, in ``unit``."""

    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]:
        """Experience of ``horizon`` steps per environment (a handle: tensors do not pass through the driver)."""
        ...

    def update(self, experience: Any, *, update: int) -> Metrics: ...

    def publish(self, version: int) -> None:
        """After this every policy process holds the learner's weights bit for bit."""
        ...

    def evaluate(self, update: int) -> Metrics:
        """Measure the policy; a checkpoint saved after the same update gets the score."""
        ...

    def save(self, update: int, row: PendingRow | None = None) -> Path:
        """Write a checkpoint. ``row``: what a resumed run logs of the update if this one ends before it has."""
        ...

    def close(self) -> None: ...
