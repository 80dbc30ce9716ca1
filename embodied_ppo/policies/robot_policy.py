"""Construct the policy of a robot from ``config.model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_envs.types import EnvInfo, VectorEnv
from embodied_ppo.core.types import Policy
from embodied_ppo.options.reward_groups import value_outputs
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.backbone import Encoder
from embodied_ppo.policies.popart import PopArt
from embodied_ppo.policies.vla import published
from embodied_ppo.policies.vla.action_tokens import TokenVLA
from embodied_ppo.policies.vla.flow_matching import FlowVLA
from embodied_ppo.policies.vla.gaussian import GaussianVLA
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pretrained import CheckpointVLA, RegressionVLA
from embodied_ppo.policies.vla.published_weights import read_kind

FAMILIES = {"token": TokenVLA, "flow": FlowVLA, "gaussian": GaussianVLA}
OPENVLA = {"token": CheckpointVLA, "gaussian": RegressionVLA}

CONSTANTS_SHOWN = 8  # constant inputs that a line and a report name
Family: TypeAlias = "TokenVLA | FlowVLA | GaussianVLA | PI0 | CheckpointVLA | RegressionVLA"
AnyPolicy: TypeAlias = "ActorCritic | Family"


def make_policy(config: Config, env: VectorEnv | EnvInfo, *, weights: bool = True) -> AnyPolicy:
    """Return the policy of ``config.model`` for the spaces of ``env``; the seed sets its weights.

    Args:
        config: Options of the run.
        env: Spaces of the environment.
        weights: Whether the weights of model.checkpoint are read; otherwise its config.json is
            enough, and the parameters have no values (``policies.vla.published``).

    Raises:
        ConfigError: The policy family lacks what an option needs, or a directory of weights does
            not fit.
    """
    a, m, chunk = config.algorithm, config.model, config.env.action_chunk
    spaces = env.obs_spec, env.action_spec, m
    sizes: dict[str, Any] = {"chunk": chunk, "values": value_outputs(config)}
    vla: dict[str, Any] = sizes | {"sentences": env.instructions}
    published_vla: dict[str, Any] = vla | {"mapping": config.env.action_mapping}
    if m.checkpoint is not None and not weights and published.can_build(m.checkpoint):
        return published.policy_of_sizes(env, m, **published_vla)
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        if m.policy == "actor_critic":
            tasks = len(config.env.tasks or config.env.ids)
            popart = None if a.popart is None else PopArt(tasks, a.popart)
            policy = ActorCritic(*spaces, **sizes, popart=popart)
        elif m.checkpoint is None:
            policy = FAMILIES[m.policy](*spaces, **vla)
            policy.freeze(m.freeze_trunk)
        elif m.policy == "flow":
            kind, _ = read_kind(Path(m.checkpoint), "flow")
            policy = published.FLOW_FAMILIES[kind](*spaces, **published_vla)
        else:
            policy = OPENVLA[m.policy](*spaces, closes=env.gripper_closes, **published_vla)
    has_mean = isinstance(policy, ActorCritic) and policy.numbers and not policy.is_beta
    if a.rpo_alpha is not None and not has_mean:
        raise ConfigError(
            f"write algorithm.rpo_alpha=null: {a.rpo_alpha:g} shifts the mean of a (squashed)"
            " Gaussian of model.policy=actor_critic, and this policy has none"
        )
    if not isinstance(policy, ActorCritic) or policy.numbers:
        for path, on in (("kl_loss_type", a.use_kl_loss), ("kl_penalty", a.use_kl_in_reward)):
            if on and getattr(a, path) == "full":
                raise ConfigError(
                    f"algorithm.{path}=full: needs the logits of a categorical policy; use k3"
                )
    return policy.to(env.device)


def sampling_temperature(policy: Policy, temperature: float) -> float | None:
    """Return ``temperature`` for policies that have one, else None.

    Raises:
        ConfigError: The policy has none, and ``temperature`` is not 1.
    """
    if hasattr(policy, "temperature"):
        return temperature
    if temperature != 1:
        raise ConfigError(
            f"temperature = {temperature:g}: model.policy=actor_critic has none; remove it"
        )
    return None


def constant_inputs(policy: Policy) -> list[str]:
    """Return the names of the first inputs that had one value in all of the training."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    encoders = [m for m in modules if isinstance(m, Encoder)]
    names = list(dict.fromkeys(x for encoder in encoders for x in encoder.constant_inputs()))
    if len(names) > CONSTANTS_SHOWN:
        names = [*names[:CONSTANTS_SHOWN], f"{len(names) - CONSTANTS_SHOWN} others"]
    return names
