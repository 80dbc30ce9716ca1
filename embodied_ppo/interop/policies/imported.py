"""A trained policy of another library, and what it becomes: options and weights of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies.layers import Linear, check_chain
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.backbone import ACTIVATIONS

LOG_STD_BOUNDS = (-20.0, 20.0)
"""Bounds of the logarithm of the standard deviation of libraries that have none."""

REWARD_CLIP = 10.0
"""Bound of normalised rewards in CleanRL, and Stable-Baselines3's default."""
NO_EPS = 1e-16
"""``Normalizer.eps`` for libraries that add nothing to the variance.

``model.obs_eps`` must be above 0. Adding 1e-16 changes no float32 variance above 2e-9."""


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

    def equals(self, other: Normalizer) -> bool:
        """Return whether another one computes the same."""
        return self.mean.shape == other.mean.shape and all(
            torch.equal(a, b) for a, b in ((self.mean, other.mean), (self.var, other.var))
        )


@dataclass(frozen=True)
class ValueScale:
    """Units of the critic: value of the rewards = mean + std x output.

    Attributes:
        std: Standard deviation by which rewards or values were divided.
        count: Number of samples behind it.
        mean: Mean that was subtracted from values.
        reward_clip: Bound of the normalised rewards; None: no bound.
    """

    std: float
    count: float
    mean: float = 0.0
    reward_clip: float | None = None


@dataclass(frozen=True)
class ImportedPolicy:
    """The networks of a policy.

    Attributes:
        label: Name of the file in messages.
        actor: Layers of the policy, the last one returns means, or logits of choices.
        critic: Layers of the value function; None: the file has none. With ``shared_trunk`` only
            the last one, which reads the actor's features.
        log_std: Logarithms of the standard deviations [A]; None: choices, or the last layer returns
            them.
        normalizer: Statistics of observations; None: they are not normalised.
        value_scale: Units of the critic's output; None: those of the rewards.
        normalized_rewards: Whether the training divided rewards by a deviation that is not in the
            file.
        activation: Name of the activation (``model.activation``); None: the file does not have it.
        default_activation: The library's default; None: it has none.
        shared_trunk: Whether actor and critic share their hidden layers.
        options: Further options that the policy needs, by path.
        defaults: Further options that the user may change, by path.
        critic_problem: Why the value function cannot be imported; None: it can.
        gamma: Discount factor of the training; None: the file does not have it.
        notes: Lines for the user.
    """

    label: str
    actor: list[Linear]
    critic: list[Linear] | None
    log_std: Tensor | None = None
    normalizer: Normalizer | None = None
    value_scale: ValueScale | None = None
    normalized_rewards: bool = False
    activation: str | None = None
    default_activation: str | None = None
    shared_trunk: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    critic_problem: str | None = None
    gamma: float | None = None
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError where the layers do not fit together, or are not finite."""
        check_chain(self.actor, "policy", self.label)
        if self.critic is not None:
            before = [self.actor[-2]] if self.shared_trunk and len(self.actor) > 1 else []
            check_chain([*before, *self.critic], "value function", self.label)
            problem = self.critic_problem
            if self.critic[-1].outputs != 1:
                problem = f"has {self.critic[-1].outputs} outputs, and ours has one"
            elif not self.shared_trunk and self.critic[0].inputs != self.actor[0].inputs:
                problem = (
                    f"reads {self.critic[0].inputs} numbers and the policy {self.actor[0].inputs},"
                    " other observations whose names are not in the file"
                )
            if problem is not None:
                raise ConfigError(
                    f"{self.label}: the value function {problem}; write critic=new to import the"
                    " policy only"
                )
        values = [x for layer in self.layers for x in (layer.weight, layer.bias)]
        values += [] if self.log_std is None else [self.log_std]
        values += [] if self.normalizer is None else [self.normalizer.mean, self.normalizer.var]
        if not all(bool(x.isfinite().all()) for x in values):
            raise ConfigError(f"{self.label}: contains NaN or infinity; use an earlier checkpoint")

    @property
    def layers(self) -> list[Linear]:
        """All linear layers."""
        return [*self.actor, *(self.critic or [])]

    @property
    def has_state_dependent_std(self) -> bool:
        """Whether the last layer returns means and standard deviations."""
        return bool(self.options.get("model.state_dependent_std", False))

    @property
    def actions(self) -> int:
        """Dimensions of an action, or number of choices."""
        outputs = self.actor[-1].outputs
        return outputs // 2 if self.has_state_dependent_std else outputs

    # -------------------------------------------------------------------------------------- options
    def fixed_options(self) -> dict[str, Any]:
        """Return path -> value of the options that follow from the file, except the activation."""
        n = self.normalizer
        options: dict[str, Any] = {
            "model.policy": "actor_critic",
            "model.network": None,
            "model.backbone": "mlp",
            "model.hidden": [layer.outputs for layer in self.actor[:-1]],
            "model.layer_norm": False,
            "model.shared_backbone": self.shared_trunk,
            "model.recurrent": None,
            "model.history": 1,
            "model.normalize_obs": n is not None,
            "env.action_chunk": 1,
        }
        if not self.shared_trunk and self.critic is not None:
            hidden = [layer.outputs for layer in self.critic[:-1]]
            options["model.critic_hidden"] = None if hidden == options["model.hidden"] else hidden
        if n is not None:
            options |= {"model.obs_clip": n.clip, "model.obs_eps": n.eps}
            options["model.obs_std_eps"] = n.std_eps
        return options | dict(self.options)

    def suggested_options(self) -> dict[str, Any]:
        """Return path -> value of options that the user may change."""
        options = dict(self.defaults)
        if self.critic is None:
            return options
        if self.value_scale is None and not self.normalized_rewards:
            return options | {"algorithm.reward_norm": None}
        clip = REWARD_CLIP if self.value_scale is None else self.value_scale.reward_clip
        options |= {"algorithm.reward_norm": "running"}
        if clip is not None:
            options |= {"algorithm.reward_clip": clip, "algorithm.reward_clip_order": "after_norm"}
        return options

    def checked_activation(self, given: str | None) -> str:
        """Return the value of ``model.activation``.

        Args:
            given: What the user has written; None: nothing.

        Raises:
            ConfigError: The file has none and the user has written none, or they differ.
        """
        if self.activation is not None:
            if given not in (None, self.activation):
                raise ConfigError(
                    f"model.activation = {given}: {self.label} has {self.activation}; leave it out"
                )
            return self.activation
        chosen = given or self.default_activation
        if chosen is None:
            raise ConfigError(
                f"{self.label}: the file does not contain the activation; write that of the"
                f" training, model.activation=elu ({', '.join(ACTIVATIONS)})"
            )
        return chosen

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
            names = ", ".join(policy.encoder.vectors)
            raise ConfigError(
                f"env.id = {task}: its observation has {what} ({names}), and the policy of"
                f" {self.label} reads {reads:,}; name the task of the training, or select"
                " observations with env.obs_keys"
            )
        if policy.critic_encoder is not None and self.critic is not None:
            raise ConfigError(
                f"env.id = {task}: model.critic_obs gives the value function other observations"
                f" than the policy, and that of {self.label} reads the same; write critic=new, or"
                " model.actor_obs=null model.critic_obs=null and select with env.obs_keys"
            )
        kind = "choices" if policy.kind == "categorical" else "dimensions"
        if self.actions != policy.actions:
            raise ConfigError(
                f"env.id = {task}: its action has {policy.actions} {kind}, and the policy of"
                f" {self.label} returns {self.actions}; name the task of the training"
            )
        if self.normalizer is not None and self.normalizer.mean.numel() != reads:
            raise ConfigError(
                f"{self.label}: the normaliser has {self.normalizer.mean.numel()} numbers, and the"
                f" policy reads {reads}; name the normaliser of this policy"
            )
        has_std = self.log_std is not None or self.has_state_dependent_std
        if has_std == (policy.kind == "categorical"):
            of_task, of_file = ("discrete", "continuous") if has_std else ("continuous", "discrete")
            raise ConfigError(
                f"env.id = {task}: its actions are {of_task}, and the policy of {self.label} has"
                f" {of_file} actions; name the task of the training"
            )

    def load_into(self, policy: ActorCritic, *, normalized_rewards: bool) -> None:
        """Replace the weights of a policy of ours, which was built with the options from here.

        Args:
            policy: The policy.
            normalized_rewards: Whether the training divides rewards by ``value_scale.std``.
        """
        state = policy.state_dict()
        networks = [("trunk", "policy_head", self.actor)]
        if self.critic is not None:
            networks.append(("value_trunk", "value_head", self._critic(normalized_rewards)))
        for trunk, head, network in networks:
            for i, layer in enumerate(network):
                name = head if i == len(network) - 1 else f"{trunk}.layers.{2 * i}"
                _copy(state, f"{name}.weight", layer.weight)
                _copy(state, f"{name}.bias", layer.bias)
        if self.log_std is not None:
            _copy(state, "log_std", self.log_std)
        if self.normalizer is not None:
            n = self.normalizer
            _copy(state, "encoder.moments.mean", n.mean)
            _copy(state, "encoder.moments.var", n.var)
            # With a count of 0, our normaliser does not use mean and variance.
            count = torch.tensor(max(n.count, 1e-4), dtype=torch.float64)
            _copy(state, "encoder.moments.count", count)
        policy.load_state_dict(state)

    def _critic(self, normalized_rewards: bool) -> list[Linear]:
        """Return the critic whose last layer has the units of our rewards."""
        assert self.critic is not None
        scale = self.value_scale
        if scale is None:
            return self.critic
        unit = scale.std if normalized_rewards else 1.0
        head = self.critic[-1]
        factor, offset = scale.std / unit, scale.mean / unit
        return [*self.critic[:-1], Linear(head.weight * factor, head.bias * factor + offset)]


def _copy(state: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Replace a tensor of a state_dict by one of equal shape and its own type."""
    assert state[name].shape == value.shape, name
    state[name] = value.to(state[name].dtype)


def log_std_of(std: Tensor, label: str) -> Tensor:
    """Return the logarithm of standard deviations [A]. Raises ConfigError if one is not above 0."""
    if not bool((std > 0).all()):
        raise ConfigError(f"{label}: a standard deviation is not above 0; use another checkpoint")
    return std.log()


CATEGORICAL = {"model.distribution": "categorical"}
"""Options of a policy of discrete actions."""
GAUSSIAN = {"model.distribution": "gaussian", "model.state_dependent_std": False}
"""Options of a Gaussian policy with one standard deviation per dimension."""


def changeable_options(
    mapping: str, bounds: tuple[float, float] = LOG_STD_BOUNDS
) -> dict[str, Any]:
    """Return the options of a Gaussian policy that the user may change.

    Args:
        mapping: How actions are mapped to the bounds of the task, ``env.action_mapping``.
        bounds: Bounds of the logarithm of the standard deviation.
    """
    low, high = bounds
    return {
        "model.min_log_std": low,
        "model.max_log_std": high,
        "env.action_mapping": mapping,
    }


def mapping_note(mapping: str, missing: str) -> str:
    """Return a note about the action mapping of a library where its file does not contain it.

    Args:
        mapping: The library's default.
        missing: What the file does not do, for example "contain clip_actions".
    """
    return f"env.action_mapping={mapping}, the library's default; the file does not {missing}"


def refuse_normalizer(path: Path | None, library: str) -> None:
    """Raise ConfigError where a normaliser is given to a library whose files contain it."""
    if path is not None:
        raise ConfigError(
            f"normalizer={path}: is not read, a file of {library} contains its normaliser; leave it"
            " out"
        )
