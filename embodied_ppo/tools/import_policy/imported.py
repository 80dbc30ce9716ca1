"""A trained policy of another library, and what it becomes: options and weights of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.tools.import_policy.layers import Linear, check_chain
from embodied_ppo.tools.import_policy.untrusted_files import shown

# Bounds of the logarithm of the standard deviation of libraries that have none.
LOG_STD_BOUNDS = (-20.0, 20.0)

REWARD_CLIP = 10.0  # bound of normalised rewards in CleanRL, and Stable-Baselines3's default


@dataclass(frozen=True)
class Normalizer:
    """Statistics of observations: (x - mean) / (sqrt(var + eps) + std_eps), clamped to ±clip.

    Attributes:
        mean: [D].
        var: [D].
        count: Number of observations behind the statistics.
        eps: Added to the variance.
        std_eps: Added to the standard deviation.
        clip: Bound of the result; None: no bound.
    """

    mean: Tensor
    var: Tensor
    count: float
    eps: float = 1e-8
    std_eps: float = 0.0
    clip: float | None = None


@dataclass(frozen=True)
class ValueScale:
    """Units of the critic: value of the rewards = std x output.

    Attributes:
        std: Standard deviation by which rewards were divided.
        count: Number of samples behind it.
        reward_clip: Bound of the normalised rewards.
    """

    std: float
    count: float
    reward_clip: float


@dataclass(frozen=True)
class ImportedPolicy:
    """The networks of a policy.

    Attributes:
        label: Name of the file in messages.
        actor: Layers of the policy, the last one returns means, or logits of choices.
        critic: Layers of the value function; None: the file has none.
        log_std: Logarithms of the standard deviations [A]; None: choices, or the last layer returns
            them.
        normalizer: Statistics of observations; None: they are not normalised.
        value_scale: Units of the critic's output; None: use the units of rewards.
        normalized_rewards: Whether the training divided rewards by a deviation that is not in the
            file.
        default_activation: The library's activation (``model.activation``).
        activation: That of the policy; None: the file does not have it.
        is_beta: Whether the policy is a beta distribution.
        action_mapping: How actions are mapped to the bounds of the task (``env.action_mapping``);
            the user may change it.
        std_bounds: Bounds of the logarithm of the standard deviation; the user may change them.
        critic_problem: Why the value function cannot be imported; None: it can.
        gamma: Discount factor of the training; None: the file does not have it.
        notes: Lines for the user.
    """

    label: str
    actor: list[Linear]
    critic: list[Linear] | None
    default_activation: str
    log_std: Tensor | None = None
    normalizer: Normalizer | None = None
    value_scale: ValueScale | None = None
    normalized_rewards: bool = False
    activation: str | None = None
    is_beta: bool = False
    action_mapping: str = "none"
    std_bounds: tuple[float, float] = LOG_STD_BOUNDS
    critic_problem: str | None = None
    gamma: float | None = None
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError where the layers do not fit together, or are not finite."""
        check_chain(self.actor, "policy", self.label)
        outputs = self.actor[-1].outputs
        deviations = None if self.log_std is None else self.log_std.numel()
        if (self.is_beta and outputs % 2) or deviations not in (None, outputs):
            raise ConfigError(
                f"copy the file again: the policy of {self.label} returns {outputs:,} numbers,"
                f" which do not fit its standard deviations ({show(deviations)})"
            )
        if self.critic is not None:
            check_chain(self.critic, "value function", self.label)
            problem, reads = self.critic_problem, self.critic[0].inputs
            if self.critic[-1].outputs != 1:
                problem = f"has {self.critic[-1].outputs} outputs, and ours has one"
            elif reads != self.actor[0].inputs:
                problem = f"reads {reads} numbers and the policy {self.actor[0].inputs}"
            if problem is not None:
                hint = "write critic=new to import the policy only"
                raise ConfigError(f"{hint}: the value function of {self.label} {problem}")
        layers = [*self.actor, *(self._critic(normalized_rewards=False) or ())]
        values = [x for layer in layers for x in (layer.weight, layer.bias)]
        for x in [*values, *([] if self.log_std is None else [self.log_std])]:
            check_finite(x, self.label)

    @property
    def is_discrete(self) -> bool:
        """Whether the policy returns logits of choices."""
        return self.log_std is None and not self.is_beta

    @property
    def actions(self) -> int:
        """Dimensions of an action, or number of choices."""
        outputs = self.actor[-1].outputs
        return outputs // 2 if self.is_beta else outputs  # both parameters of each dimension

    # -------------------------------------------------------------------------------------- options
    def fixed_options(self) -> dict[str, Any]:
        """Return path -> value of the options that follow from the file, except the activation."""
        n = self.normalizer
        distribution = "categorical" if self.is_discrete else "gaussian"
        options: dict[str, Any] = {
            "model.distribution": "beta" if self.is_beta else distribution,
            "model.policy": "actor_critic",
            "model.network": None,
            "model.hidden": [layer.outputs for layer in self.actor[:-1]],
            "model.base_inputs": None,
            "model.shared_backbone": False,
            "model.recurrent": None,
            "model.history": 1,
            "model.normalize_obs": n is not None,
            "env.action_chunk": 1,
        }
        if self.critic is not None:
            hidden = [layer.outputs for layer in self.critic[:-1]]
            options["model.critic_hidden"] = None if hidden == options["model.hidden"] else hidden
        if n is not None:
            eps = [n.eps, n.std_eps] if n.std_eps else n.eps
            options |= {"model.obs_clip": n.clip, "model.obs_eps": eps}
        if not self.is_discrete:
            options["model.state_dependent_std"] = False
        return options

    def suggested_options(self) -> dict[str, Any]:
        """Return path -> value of options that the user may change."""
        options: dict[str, Any] = {}
        if not self.is_discrete:
            low, high = self.std_bounds
            options = {"model.min_log_std": low, "model.max_log_std": high}
            options["env.action_mapping"] = self.action_mapping
        if self.critic is None:
            return options
        if self.value_scale is None and not self.normalized_rewards:
            return options | {"algorithm.reward_norm": None}
        clip = REWARD_CLIP if self.value_scale is None else self.value_scale.reward_clip
        return options | {
            "algorithm.reward_norm": "running",
            "algorithm.reward_clip": clip,
            "algorithm.reward_clip_order": "after_norm",
        }

    def checked_activation(self, given: str | None) -> str:
        """Return the value of ``model.activation``.

        Args:
            given: What the user has written; None: nothing.

        Raises:
            ConfigError: The user has written another one than the file has.
        """
        if self.activation is None:
            return given or self.default_activation
        if given not in (None, self.activation):
            reason = f"{self.label} has {self.activation}"
            raise ConfigError(f"remove model.activation = {given}: {reason}")
        return self.activation

    # -------------------------------------------------------------------------------------- weights
    def check_sizes(self, policy: ActorCritic, task: str) -> None:
        """Raise ConfigError where the observations or actions of a task have other sizes.

        Args:
            policy: A policy of ours for the task.
            task: Value of ``env.id``, for messages.
        """
        reads, expected = self.actor[0].inputs, policy.encoder.vector_size
        if reads != expected or policy.encoder.images:
            what = "images" if policy.encoder.images else f"{expected:,} numbers"
            names = shown(", ".join(policy.encoder.vectors))
            raise ConfigError(
                "name the task of the training, or select observations with env.obs_keys: env.id ="
                f" {task} has an observation of {what} ({names}), and the policy of {self.label}"
                f" reads {reads:,}"
            )
        if policy.critic_encoder is not None and self.critic is not None:
            raise ConfigError(
                "write critic=new, or model.actor_obs=null model.critic_obs=null and select with"
                f" env.obs_keys: model.critic_obs gives the value function of {task} other"
                f" observations than the policy, and that of {self.label} reads the same"
            )
        values = 1 if policy.value_head is None else policy.value_head.out_features
        if values != 1 and self.critic is not None:
            raise ConfigError(
                f"write critic=new: the options of the run give a state {values} values, of tasks,"
                f" of actions or of reward groups, and {self.label} has one of the reward"
            )
        of_task = f"{policy.actions:,} {'dimensions' if policy.numbers else 'choices'}"
        of_file = f"{self.actions:,} {'choices' if self.is_discrete else 'dimensions'}"
        if of_task != of_file:
            raise ConfigError(
                f"name the task of the training: env.id = {task} has an action of {of_task}, and"
                f" the policy of {self.label} returns {of_file}"
            )
        if self.normalizer is not None and self.normalizer.mean.numel() != reads:
            raise ConfigError(
                f"name the normaliser of this policy: that of {self.label} has"
                f" {self.normalizer.mean.numel():,} numbers, and the policy reads {reads:,}"
            )

    def load_into(self, policy: ActorCritic, *, normalized_rewards: bool) -> None:
        """Replace the weights of a policy of ours, which was built with the options from here.

        Args:
            policy: The policy.
            normalized_rewards: Whether the training divides rewards by ``value_scale.std``.
        """
        weights: dict[str, Tensor] = {}
        networks = [("trunk", "policy_head", self.actor)]
        if critic := self._critic(normalized_rewards=normalized_rewards):
            networks.append(("value_trunk", "value_head", critic))
        for trunk, head, network in networks:
            for i, layer in enumerate(network):
                name = head if i == len(network) - 1 else f"{trunk}.layers.{2 * i}"
                weights |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
        if self.log_std is not None:
            weights["log_std"] = self.log_std
        if (n := self.normalizer) is not None:
            weights |= {"encoder.moments.mean": n.mean, "encoder.moments.var": n.var}
            # With a count of 0, our normaliser does not use mean and variance.
            weights["encoder.moments.count"] = torch.tensor(max(n.count, 1e-4), dtype=torch.float64)
        policy.load_state_dict(policy.state_dict() | weights)

    def _critic(self, *, normalized_rewards: bool) -> list[Linear] | None:
        """Return the critic whose last layer has the units of our rewards."""
        if self.critic is None or self.value_scale is None or normalized_rewards:
            return self.critic
        head, std = self.critic[-1], self.value_scale.std
        return [*self.critic[:-1], Linear(head.weight * std, head.bias * std)]


def check_finite(x: Tensor, label: str) -> None:
    """Raise ConfigError unless all numbers are finite as float32, the type of our weights."""
    if not bool(x.float().isfinite().all()):
        problem = "contains NaN, infinity, or numbers that exceed float32"
        raise ConfigError(f"use an earlier checkpoint: {label} {problem}")


def number(value: Any, label: str, name: str) -> float:
    """Return one number from 0.

    Args:
        value: A number, or an array or tensor with one number.
        label: Name of the file in messages.
        name: Name of the number in messages.

    Raises:
        ConfigError: It is something else, not finite, or negative.
    """
    try:
        result = float(np.asarray(value).item())
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not 0 <= result < math.inf:
        problem = f"is no finite number >= 0: {shown(str(value), 30)}"
        raise ConfigError(f"use another checkpoint: {name} of {label} {problem}")
    return result


def running_statistics(
    mean: Any, spread: Any, count: Any, label: str, *, is_std: bool = False, **options: Any
) -> Normalizer:
    """Return a normaliser whose numbers are checked.

    Args:
        mean: Array or tensor [D].
        spread: Variances, or standard deviations [D].
        count: Number of observations.
        label: Name of the file in messages.
        is_std: Whether ``spread`` are standard deviations.
        options: Other fields of ``Normalizer``.

    Raises:
        ConfigError: A number is missing, not finite, negative, or the sizes differ.
    """
    arrays = [np.asarray(value) for value in (mean, spread)]
    if any(x.dtype.kind not in "iuf" for x in arrays) or arrays[0].size != arrays[1].size:
        problem = f"mean and deviation of {label} are no arrays of as many numbers"
        raise ConfigError(f"use the statistics of one training: {problem}")
    mean, spread = (torch.from_numpy(x.astype(np.float64)).flatten() for x in arrays)
    if bool((spread < 0).any()):
        raise ConfigError(f"use another checkpoint: a deviation of {label} is negative")
    var = spread.square() if is_std else spread
    check_finite(torch.cat([mean, var]), label)
    return Normalizer(mean, var, number(count, label, "count"), **options)


def value_scale(var: Any, count: Any, eps: float, reward_clip: float, label: str) -> ValueScale:
    """Return the units of a critic from the variance of returns. Raises ConfigError."""
    std = math.sqrt(number(var, label, "the variance of returns") + eps)
    check_finite(torch.tensor(std**2, dtype=torch.float64), label)
    return ValueScale(std, number(count, label, "the count of returns"), reward_clip)
