"""The parts of the reward that have a value of their own (``algorithm.reward_groups``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embodied_ppo.options.schema import AlgorithmConfig, Config

# Name of the group of the intrinsic reward, the last one (``ppo/curiosity.py``).
CURIOSITY = "curiosity"


@dataclass(frozen=True)
class RewardGroup:
    """A part of the reward.

    Attributes:
        name: Name in metrics.
        terms: Reward terms that it consists of; None: what no other group names.
        options: Options of the algorithm with the discount, trace and normalisation of the group.
        normalize: Whether its advantages are standardised before they are added.
        weight: Factor of its advantages.
    """

    name: str
    terms: tuple[str, ...] | None
    options: AlgorithmConfig
    normalize: bool = False
    weight: float = 1.0


def rollout_groups(a: AlgorithmConfig) -> tuple[RewardGroup, ...]:
    """Return the groups of what simulators or graders return; without the option a single one."""
    groups: list[RewardGroup] = []
    for name, group in a.reward_groups.items():
        gamma = a.gamma if group.gamma is None else group.gamma
        trace = a.gae_lambda if group.gae_lambda is None else group.gae_lambda
        options = replace(a, gamma=gamma, gae_lambda=trace)
        terms = None if group.terms == "rest" else tuple(group.terms)
        groups.append(RewardGroup(name, terms, options, group.normalize, group.weight))
    return tuple(groups) or (RewardGroup("reward", None, a),)


def reward_groups(a: AlgorithmConfig) -> tuple[RewardGroup, ...]:
    """Return all groups in the order of the value's outputs."""
    if not a.curiosity.weight:
        return rollout_groups(a)
    # The discount of novelty is that of Burda et al. 2019, whatever the task's is.
    options = replace(a, gamma=0.99, reward_norm="running", reward_clip=None, whiten_rewards=False)
    return (*rollout_groups(a), RewardGroup(CURIOSITY, (), options, weight=a.curiosity.weight))


def value_outputs(config: Config) -> int:
    """Return the number of values of a state that a robot policy has, without PopArt.

    Each action of a chunk has a value with reward_type=action_level, else each reward group.
    """
    a = config.algorithm
    if a.reward_type == "action_level" and config.env.action_chunk > 1:
        return config.env.action_chunk
    return len(reward_groups(a))


def value_names(config: Config) -> tuple[str, ...]:
    """Return what the outputs of a robot policy's value head are values of, in their order."""
    a, number = config.algorithm, value_outputs(config)
    if a.popart is not None:
        return tuple(f"{task} with popart" for task in config.env.tasks or config.env.ids)
    groups = reward_groups(a)
    if number == 1:
        return ("the reward",)
    if number != len(groups):
        return tuple(f"action {i + 1}" for i in range(number))
    return tuple(f"group {group.name}" for group in groups)
