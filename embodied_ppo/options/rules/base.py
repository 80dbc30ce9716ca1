"""What the rules of both modes need: the refusal of one combination, and numbers for hints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from embodied_envs.base.errors import ConfigError
from embodied_ppo.options.schema import Config

# Largest number of steps of an update; ``divisors`` of more would take seconds.
LARGEST_ROLLOUT = 10**10

# Values of algorithm.adv_type that compare the members of a group.
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")


def refuse(condition: object, message: str, error: type[ValueError] = ConfigError) -> None:
    """Raise an error if a combination of options is impossible."""
    if condition:
        raise error(message)


def refuse_any(refusals: Mapping[str, object]) -> None:
    """Raise ConfigError with the first message of message -> condition whose condition holds."""
    for message, condition in refusals.items():
        refuse(condition, message)


def one_process(config: Config) -> bool:
    """Return whether all roles are in this process."""
    return config.placement == "local" and not config.cluster.component_placement


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
    refuse(
        adaptive and a.kl_ctrl.horizon <= 0.2 * sequences,
        f"algorithm.kl_ctrl.horizon = {a.kl_ctrl.horizon:g} must be > 0.2 x {product} ="
        f" {0.2 * sequences:g}, or the coefficient could become 0 or negative; write"
        f" algorithm.kl_ctrl.horizon={10 * sequences}",
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
