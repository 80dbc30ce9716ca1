"""Interface of the rules of a mode, the batch sizes that it computes, and helpers for messages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from embodied_ppo.config.schema import Config, Mode
from embodied_ppo.core.errors import ConfigError

LARGEST_ROLLOUT = 10**10
"""Maximum number of steps of one update: a larger rollout fits in no memory, and ``divisors`` would
take seconds.
"""

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Values of algorithm.adv_type that compare the members of a group."""


@dataclass(frozen=True)
class Passes:
    """Passes over a rollout.

    Attributes:
        epochs: Number of passes.
        minibatches: Number of minibatches of each pass.
        size: Samples of a minibatch (in reasoning: prompts).
    """

    epochs: int
    minibatches: int
    size: int

    @property
    def steps(self) -> int:
        """Number of optimiser steps of an update."""
        return self.epochs * self.minibatches

    def describe(self, unit: str) -> str:
        """Return the passes as text; ``unit`` follows the size of a minibatch."""
        epochs = f"{self.epochs:,} epoch{'s' * (self.epochs != 1)}"
        minibatches = f"{self.minibatches:,} minibatch{'es' * (self.minibatches != 1)}"
        steps = f"{self.steps:,} optimiser step{'s' * (self.steps != 1)}"
        return f"{epochs} x {minibatches} of {self.size:,}{unit} = {steps}"


@dataclass(frozen=True)
class Batches:
    """Batch sizes of an update.

    Attributes:
        samples: Samples of a rollout (in reasoning: responses).
        actor: Passes of the actor.
        critic: Passes of the critic; None: it is trained with the actor, or there is none.
    """

    samples: int
    actor: Passes
    critic: Passes | None = None


class ModeRules(ABC):
    """What a mode decides about options.

    The methods take options whose types and bounds are checked.
    """

    mode: ClassVar[Mode]
    policy_name: ClassVar[str]
    """What the mode trains, in messages, for example "robot policy"."""
    loss_type: ClassVar[str]
    """The only value of algorithm.loss_type."""
    loss_type_mismatch: ClassVar[str]
    """Why the other value is refused: continues "algorithm.loss_type = VALUE", for example "is the
    loss of a model with a value head, but ..".
    """
    group_members: ClassVar[str]
    """What algorithm.group_size counts, in messages, for example "environments"."""
    batch_unit: ClassVar[str]
    """What follows the size of a minibatch in ``batch_lines``."""
    default_experiment: ClassVar[str | None] = None
    """Experiment of ``train mode=..`` without experiment=; None: that of configs/train.yaml."""
    experiment_sections: ClassVar[tuple[str, ...]] = ()
    """Prefixes of options that, given on the command line, replace the default experiment."""
    required_options: ClassVar[Mapping[str, str]]
    """Options without a usable default -> what to write."""
    group_overrides: ClassVar[Mapping[str, str | None]] = {}
    """Config group -> member that an experiment of the mode selects in its defaults list."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuse combinations of options that the mode cannot run. Raises ConfigError."""

    def check_algorithm(self, config: Config) -> None:
        """Refuse options of section algorithm that exclude each other in this mode only."""
        return

    def check_placement(self, config: Config) -> None:
        """Refuse options of section cluster that have no meaning in this mode.

        Raises PlacementError.
        """
        return

    def check_tuning(self, config: Config) -> None:
        """Refuse what ``tune`` cannot time. Raises ConfigError."""
        return

    def unused_roles(self, config: Config) -> list[str]:
        """Return the roles of the mode that this run does not have."""
        return []

    @abstractmethod
    def batches(self, config: Config) -> Batches:
        """Return the batch sizes. The options are checked, so every division is exact."""

    def batch_lines(self, config: Config, updates: int) -> list[str]:
        """Return rollout, minibatches and run as one line of text each."""
        b = self.batches(config)
        learning = b.actor.describe(self.batch_unit)
        if limits := " and ".join(self._micro_batches(config)):
            learning += f" (micro-batches of at most {limits})"
        if b.critic is not None and b.critic != b.actor:
            learning = f"actor: {learning}; critic: {b.critic.describe(self.batch_unit)}"
        return [self._rollout_line(config, b), learning, self._run_line(config, b, updates)]

    @abstractmethod
    def _micro_batches(self, config: Config) -> list[str]:
        """Return the limits of a forward and backward pass."""

    @abstractmethod
    def _rollout_line(self, config: Config, b: Batches) -> str:
        """Return what a rollout consists of."""

    @abstractmethod
    def _run_line(self, config: Config, b: Batches, updates: int) -> str:
        """Return what a run consists of."""


# ------------------------------------------------------------------------------ shared by the modes
def group_comparison(config: Config) -> str | None:
    """Return the option, with its value, that compares the members of a group, if there is one."""
    a = config.algorithm
    if a.adv_type in GROUP_ESTIMATORS:
        return f"algorithm.adv_type = {a.adv_type}"
    return f"algorithm.reward_norm = {a.reward_norm}" if a.reward_norm == "group" else None


def check_controller(config: Config, sequences: int, product: str) -> None:
    """Check the horizon of the adaptive KL controller. Raises ConfigError.

    Args:
        config: The options.
        sequences: Sequences of a rollout.
        product: The options whose product ``sequences`` is.
    """
    a = config.algorithm
    adaptive = a.use_kl_in_reward and a.kl_ctrl.type == "adaptive"
    # An update multiplies the coefficient by 1 + error x sequences / horizon with error >= -0.2.
    if adaptive and a.kl_ctrl.horizon <= 0.2 * sequences:
        raise ConfigError(
            f"algorithm.kl_ctrl.horizon = {a.kl_ctrl.horizon:g} must be > 0.2 x {product} ="
            f" {0.2 * sequences:g}, or the coefficient could become 0 or negative; write"
            f" algorithm.kl_ctrl.horizon={10 * sequences}"
        )


def divisors(n: int) -> list[int]:
    """Return the divisors of ``n``, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_multiples(unit: int, value: int) -> str:
    """Return the closest positive multiples of ``unit`` below and above ``value``."""
    below = value // unit * unit
    return ", ".join(str(x) for x in (below, below + unit) if x)


def nearest_values(allowed: Sequence[int], value: int) -> str:
    """Return the closest allowed numbers below and above ``value``."""
    below, above = [x for x in allowed if x <= value][-1:], [x for x in allowed if x > value][:1]
    return ", ".join(map(str, below + above))
