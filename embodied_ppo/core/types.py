"""Data types and protocols that the folders of the package exchange and implement.

A rollout produces one ``Trajectory`` per update: a ``VectorEnv`` returns a ``Step`` for each
action, a ``Policy`` returns a ``Decision`` for each observation. The learner cuts the trajectory
into ``Batch`` minibatches and calls ``Policy.evaluate`` on each. Every metric is a ``Mean`` (sum
and count) or a plain number.

Shape letters, used in the whole package:
    T: time steps of a rollout, or tokens of a response.
    N: environments, or sequences.
    B: samples of a minibatch.
    C: actions of an action chunk.
    A: action dimensions.
    M: observations merged into a normaliser, T * N at most.
    K: actions to choose from (categorical policies).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Generator, Tensor, nn

from embodied_envs.types import (
    ActionSpec,
    ArraySpec,
    Box,
    Composite,
    Discrete,
    Obs,
    ObsSpec,
    Step,
    VectorEnv,
    choices_of,
    has_action_mask,
)
from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    ProcessLost,
    TrainingError,
)

# What tasks and scripts of users import from here.
__all__ = ["ActionSpec", "ArraySpec", "Box", "Composite", "Discrete", "Obs", "ObsSpec", "Step"]
__all__ += ["VectorEnv", "choices_of", "has_action_mask"]
__all__ += ["CheckpointError", "ConfigError", "EnvError", "PlacementError", "ProcessLost"]
__all__ += ["TrainingError"]


# --------------------------------------------------------------------------------------- experience
@dataclass(frozen=True, slots=True)
class Decision:
    """Actions that a policy chose for N observations.

    Attributes:
        action: [N, ..], passed to the simulator.
        log_prob: float32 log-probability under the behaviour policy, [N], or [N, C, A] where the
            policy factorises over actions and dimensions.
        value: float32 [N], V(s). [N, C] where each action of a chunk has its own value, [N, G]
            where each reward group has.
        replay: Tensors besides observation and action that ``Policy.evaluate`` needs to recompute
            ``log_prob`` exactly.
        memory: float32 [N, S], state of a policy with memory after these observations
            (``core.recurrent_state``). None for a policy without.
    """

    action: Tensor
    log_prob: Tensor
    value: Tensor
    replay: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Log-probability, entropy and value of given actions, with gradients.

    Attributes:
        log_prob: [B, ..], shaped as ``Decision.log_prob``.
        entropy: [B, ..], same shape as ``log_prob``.
        value: [B], or [B, C] or [B, G] as ``Decision.value``.
        logits: [B, K] for categorical policies, [B, D, K] for several choices without numbers, else
            None.
        mean: [B, C·A], mean of the numbers (squashed_gaussian: before the tanh); None for others.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    logits: Tensor | None = None
    mean: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Experience of one rollout. In every leaf, dimension 0 is time and dimension 1 is N.

    Row t holds s_t, a_t and everything received after a_t. There are no [T+1] tensors and no flags
    that refer to the step before.

    Attributes:
        obs: [T, N, ..], s_t. For a policy with memory it contains the state before s_t and the
            marks of first steps, see ``core.recurrent_state``.
        action: [T, N, ..], a_t.
        log_prob: [T, N, ..], log-probability under the behaviour policy.
        value: [T, N], V(s_t) at the time of acting.
        replay: [T, N, ..], see ``Decision.replay``.
        next_value: [T, N], V of the true successor state, also where the time limit cut the
            episode.
        reward: [T, N], received after a_t, unscaled. For a chunk of actions Σ γ^i r_i.
        terminated: bool [T, N], see ``Step``.
        truncated: bool [T, N], see ``Step``.
        mask: bool [T, N], rows that are part of the objective.
        version: int64 [T, N], version of the policy that acted.
        steps: int64 [T, N], simulator steps that a_t lasted. None: one each.
        kept: [T, N, ..], those inputs of the policy that acting has computed and that no update
            changes, see ``PI0.encode``. The learner empties the dictionary. None: nothing is kept.
        collected: int64 [T, N], whose sum is the number of collected environment steps or tokens,
            including those of groups that were dropped. None: count those of the trajectory.
        grades: float64 [1, N, K], see ``rollout.recorded_responses``. None: nothing is recorded.

    Where each action of a chunk has a value (reward_type=action_level), ``value``, ``next_value``,
    ``reward``, ``terminated``, ``truncated`` and ``mask`` are [T, N, C]. The mask then ends with
    the last executed action, which carries the flags.

    Where the reward has G groups (algorithm.reward_groups), ``value``, ``next_value`` and
    ``reward`` are [T, N, G].
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
    kept: dict[str, Tensor] | None = None
    collected: Tensor | None = None
    grades: Tensor | None = None

    def lag(self, version: int) -> Mean:
        """Return the updates between acting and ``version``, averaged over unmasked rows."""
        mask = self.mask.reshape(*self.version.shape, -1).any(-1)
        return Mean(*torch.stack([((version - self.version) * mask).sum(), mask.sum()]).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What every loss of a minibatch reads; each loss adds its own fields.

    Leaves are [B, ..] (steps) or [T, B, ..] (whole columns).

    Attributes:
        mask: bool, elements that are part of the objective.
        rows: Unmasked rows of the complete minibatch of all ranks, float64 scalar, by which the
            loss of a part of it is divided. None: this is the complete minibatch.
        columns: As ``rows``, columns with an unmasked row. None where steps are drawn.
    """

    mask: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBatch(Samples):
    """What the loss of a critic reads.

    Attributes:
        inputs: Encoded observations, see ``Policy.encode``.
        value: V_old, the value at the time of acting.
        returns: Targets of the value function.
    """

    inputs: Any
    value: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredSamples:
    """Mirror images of samples (``algorithm.symmetry``), evaluated before the update.

    Attributes:
        inputs: Encoded images of the observations.
        action: Images of the actions.
        replay: As in ``Batch``, of these actions.
        log_prob: Log-probability of the image of the action.
        weight: min(1, π(M a | M s) / π(a | s)): the samples come from the mirrored policy.
        value: Value of the image of the observation.
    """

    inputs: Any
    action: Tensor
    replay: dict[str, Tensor]
    log_prob: Tensor
    weight: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(ValueBatch):
    """What the loss of a policy reads.

    Attributes:
        action: As in ``Trajectory``.
        replay: As in ``Trajectory``.
        log_prob: Log-probability under the behaviour policy.
        advantage: Shaped and normalised advantage.
        weight: Off-policy correction, None where every weight is 1.
        share: Factor of the loss of each element, see ``losses.aggregate``; None: 1.
        ref_log_prob: Log-probability under the reference policy, None without one.
        ref_logits: Logits of the reference policy, None without one.
        mirror: Mirror images of the samples; None without ``algorithm.symmetry``.
        positive: bool, elements of columns with a positive score, whose probability the loss
            raises. None without ``algorithm.positive_nll_weight``.
        positive_rows: As ``rows``, those of ``positive``.

    ``value``, ``advantage``, ``returns`` and ``mask`` are [.., C] where each action of a chunk has
    a value; ``value`` and ``returns`` are [.., G] where each reward group has.
    """

    action: Tensor
    replay: dict[str, Tensor]
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor | None = None
    share: Tensor | None = None
    ref_log_prob: Tensor | None = None
    ref_logits: Tensor | None = None
    mirror: MirroredSamples | None = None
    positive: Tensor | None = None
    positive_rows: Tensor | None = None


# Entry of ``Batch.replay``, shaped as ``action``, that ``evaluate`` adds to means (rpo_alpha).
MEAN_SHIFT = "mean_shift"


# ------------------------------------------------------------------------------------------ metrics
@dataclass(frozen=True, slots=True)
class Mean:
    """Metric as (sum, count), which adds up correctly over ranks and minibatches of any size."""

    sum: float | Tensor
    count: float | Tensor

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        """Return the mean of plain numbers."""
        values = list(values)
        return Mean(float(sum(values)), float(len(values)))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; NaN where the count is 0."""
        count = float(self.count)
        return float(self.sum) / count if count else float("nan")


# Progress callback ``(task, completed, total)`` of a long operation.
ProgressCallback: TypeAlias = Callable[[str, int, int], None]

# Tag (a row of docs/metrics.md) -> a mean over samples, or a plain number that is not averaged.
Metrics: TypeAlias = "dict[str, Mean | float]"


def add_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of several rollouts: add ``Mean`` objects (sums and counts) and numbers."""
    merged: Metrics = {}
    for part in metrics:
        for tag, value in part.items():
            before = merged.get(tag)
            merged[tag] = value if before is None else before + value  # pyright: ignore[reportOperatorIssue]
    return merged


# ---------------------------------------------------------------------------------------- protocols
class Policy(Protocol):
    """Maps observations to actions. An ``nn.Module`` whose state_dict is the checkpoint.

    A policy with memory has in addition:
        memory_size: int, numbers of its state, S. Observations contain the state and the marks of
            first steps (``core.recurrent_state``); ``Decision.memory`` is the state after them.
        evaluate_columns: ``evaluate`` for columns [T, B, ..] with gradients through time, see
            ``ActorCritic.evaluate_columns``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and all other state of the policy."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Restore the result of ``state_dict``."""

    def encode(self, obs: Obs) -> Any:
        """Return model inputs [B, ..] of raw observations [B, ..], without gradient.

        Vectors are normalised; images stay uint8.
        """
        ...

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """Return the random numbers of one ``act`` on ``rows`` observations, float32 [rows, ..]."""
        ...

    def act(self, inputs: Any, *, noise: Tensor | None = None) -> Decision:
        """Choose actions without gradient.

        Args:
            inputs: Result of ``encode``.
            noise: Result of ``noise``, the only source of randomness. None: the mode of the
                distribution.
        """
        ...

    def evaluate(self, inputs: Any, action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        """Return log-probability, entropy and value of given actions, with gradients."""
        ...

    def value(self, inputs: Any) -> Tensor:
        """Return V(s), [B], or [B, C] as ``Decision.value``. Never samples."""
        ...

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the groups 'actor' and 'critic': disjoint, together every trainable parameter."""
        ...

    def units(self) -> list[nn.Module]:
        """Return the large modules that parameter sharding gathers one at a time.

        They are called one after another, or through ``collectives.gathered``. A sharded learner
        holds the full parameters of such a module only while it computes. All other parameters are
        gathered for the duration of each policy method.
        """
        ...

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """Merge raw observations [M, ..] where ``mask`` [M] is True into the normaliser.

        A learned deviation is moved to its bounds.
        """


class UpdateObserver(Protocol):
    """Receives what updates in this process read and compute; it changes nothing.

    The methods are called in this order: ``on_experience``, ``on_batch``, for each minibatch
    ``before_minibatch`` and ``after_minibatch``, then ``on_update``.
    """

    def on_experience(self, experience: Trajectory, *, update: int) -> None:
        """Receive a rollout before the update that learns from it; ``update`` counts from 0."""

    def on_batch(self, batch: Samples, *, loss: Any) -> None:
        """Receive the samples, with advantages and returns, and the loss of a minibatch."""

    def before_minibatch(self, index: Tensor, *, epoch: int) -> None:
        """Receive the indices of a minibatch in the batch; the weights are those before its step.

        Args:
            index: int64 [B], samples or, with minibatch_unit=column, columns.
            epoch: Number of the epoch, from 0.
        """

    def after_minibatch(self, statistics: Mapping[str, float]) -> None:
        """Receive the statistics of the minibatch, see ``minibatches.MinibatchLoss``."""

    def on_update(self, metrics: Metrics) -> None:
        """Receive the metrics of the completed update."""


class Learner(Protocol):
    """Updates the policy from trajectories: ``ppo.PPO`` or ``DistillationLearner``."""

    # CPU time of this process so far in seconds, by phase.
    cpu_s: dict[str, float]

    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Run the epochs of one update over a trajectory; ``update`` counts from 0."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything besides the weights that the next update depends on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""

    def set_observer(self, observer: UpdateObserver) -> None:
        """Call ``observer`` with the batch and the minibatches of each update."""

    def close(self) -> None:
        """Release processes and memory."""


@dataclass(frozen=True)
class PendingRow:
    """Log row of an update whose checkpoint is written before the update is evaluated and logged.

    Attributes:
        metrics: Metrics of the rollout and the update.
        evaluation_due: Whether metrics of an evaluation will be added.
    """

    metrics: Metrics
    evaluation_due: bool


class System(Protocol):
    """Rollout, learner and evaluation in some placement, as the training loop calls them."""

    # Unit in which experience is counted.
    unit: Literal["env_steps", "tokens"]
    # Experience used for learning so far, in ``unit``.
    steps: int

    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]:
        """Collect ``horizon`` steps in each environment.

        Returns:
            A handle of the experience, whose tensors do not pass through the driver, and metrics.
        """
        ...

    def update(self, experience: Any, *, update: int) -> Metrics:
        """Update the learner with the result of ``collect``."""
        ...

    def publish(self, version: int) -> None:
        """Copy the learner's weights to every policy process, bit for bit."""

    def evaluate(self, update: int) -> Metrics:
        """Measure the policy.

        The score is written into the checkpoint that was saved before, after the same update.
        """
        ...

    def save(self, update: int, row: PendingRow | None = None) -> Path:
        """Write a checkpoint and return its path.

        Args:
            update: Number of the update.
            row: Metrics that a resumed run logs for this update if this run ends before logging
                them.
        """
        ...

    def close(self) -> None:
        """Release processes and memory."""
