"""The models of an update as ``ppo.PPO`` calls them: actor, critic and reference.

``robot_actor`` and ``language_actor`` implement the actor. The critic is a head of the policy
(``SharedCritic``), a model of its own (``critic.LocalCritic``, or in another process
``cluster.remote_models``), or absent (None). Only language models have references and critics in
other processes, so these read ``Rows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.core.types import Evaluation, Trajectory, ValueBatch

# Observations of a language model: "row" int64 [L, N], prompt and response without a gap; "place"
# int64 [T, N], the position in it of the token before each response token.
Rows: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True, slots=True)
class OptimizationStats:
    """Statistics of the minibatches of an update.

    Attributes:
        sums: Statistic -> its sum over all minibatches; of names that end in "_max" the largest.
            "steps" counts the minibatches that took an optimiser step.
        epochs: Epochs that have started; fewer than ``update_epoch`` after an early stop.
    """

    sums: Mapping[str, float]
    epochs: int


# Statistics of a model that was not optimised.
NO_STATS = OptimizationStats({}, 0)


class Actor(Protocol):
    """A policy, and its reference if the options need one."""

    @property
    def policy(self) -> Any:
        """The policy."""
        ...

    @property
    def recompute(self) -> bool:
        """Whether the behaviour's log-probabilities are always recomputed."""
        ...

    @property
    def scores_sequences(self) -> bool:
        """Whether a column has one reward, the score of the whole sequence."""
        ...

    def reshard(self) -> None:
        """Free the gathered parameters of policy and reference."""

    def encode(self, t: Trajectory) -> Any:
        """Return the observations as inputs of the policy, [T, N, ..]."""
        ...

    def log_prob(self, inputs: Any, t: Trajectory) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities of actions, [T, N, ..], and values; None: not computed here."""
        ...

    def reference_view(self, t: Trajectory) -> Evaluation:
        """Return log-probabilities and logits (or hidden states) under the reference."""
        ...

    def kl_to_reference(
        self, inputs: Any, t: Trajectory, behaviour: Tensor, reference: Evaluation
    ) -> Tensor:
        """Return the KL divergence by the estimator kl_penalty, shaped as the mask."""
        ...

    def observe(self, t: Trajectory) -> None:
        """Merge the observations into the policy's normaliser, see ``Policy.observe``."""

    def initialize(self) -> None:
        """Copy the policy's weights to a reference in another process."""

    def reference_state(self) -> Any:
        """Return the reference's weights; None without a reference."""
        ...

    def load_reference(self, state: Any) -> None:
        """Restore the result of ``reference_state``."""

    def state_tensors(self) -> list[Any]:
        """Return the reference's tensors that are in this process, in nested containers."""
        ...


class Reference(Protocol):
    """A language model before training, in this process or another one."""

    def initialize(self, actor: Any) -> None:
        """Initialise from ``actor``, once and before any other call."""

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        """Return what ``language_actor.evaluate_tokens`` returns."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def state_tensors(self) -> Any:
        """Return the tensors, in nested containers, that are in this process between updates."""
        ...


class Critic(Protocol):
    """A model of its own that computes values, and its optimiser."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the newest update."""
        ...

    def initialize(self, actor: Any) -> None:
        """Initialise from ``actor``, once and before any other call.

        A critic with its own weights ignores it.
        """

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        """Return float32 [T, N], 0 where masked."""
        ...

    def begin(self, batch: ValueBatch, update: int) -> None:
        """Start to learn ``batch.returns`` [T, N]; ``batch.value`` is the result of ``values``."""

    def end(self) -> OptimizationStats:
        """Wait for the optimisation that ``begin`` has started."""
        ...

    def state(self) -> dict[str, Any]:
        """Return "critic_weights", and as "critic" all other state of the next update."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""

    def state_tensors(self) -> Any:
        """Return the tensors, in nested containers, that are in this process between updates."""
        ...

    def close(self) -> None:
        """Release processes and memory."""


class SharedCritic:
    """Marks a critic that is a part of the policy, and its loss a part of the policy's loss."""


def with_values(t: Trajectory, critic: Critic | None) -> Trajectory:
    """Return the trajectory with the values of a separate critic, and 0 without a critic."""
    assert isinstance(t.obs, dict)
    # Estimators without a critic read no values; zeros only keep the shapes.
    value = torch.zeros_like(t.value) if critic is None else critic.values(t.obs, t.mask)
    # The last row has no successor: the response ends there, and its next value is never read.
    return replace(t, value=value, next_value=torch.cat([value[1:], torch.zeros_like(value[:1])]))
