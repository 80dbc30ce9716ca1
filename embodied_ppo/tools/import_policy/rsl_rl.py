"""Policies of rsl_rl: the file of ``OnPolicyRunner.save`` (model_<n>.pt).

Layouts: 5.x has actor_state_dict and critic_state_dict with mlp.<i>, obs_normalizer and
distribution.std_param (or log_std_param; neither with BetaDistribution, whose last layer returns
alpha and beta before softplus(x) + 1). 3.x and 4.x have model_state_dict with actor.<i>,
critic.<i>, std (or log_std), actor_obs_normalizer and critic_obs_normalizer. 1.x and 2.x keep the
normaliser in obs_norm_state_dict. ``EmpiricalNormalization`` computes (x - mean) / (std + 0.01)
without a bound. Actions are passed to the simulator as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import imported, untrusted_files
from embodied_ppo.tools.import_policy.imported import ImportedPolicy, Normalizer
from embodied_ppo.tools.import_policy.layers import StateDict

# ``Normalizer.eps`` where nothing is added; it changes no float32 variance above 2e-9.
NO_EPS = 1e-16
OTHER_NORMALIZER = "normalises observations in another way than the policy"
# Bounds of the logarithm of the standard deviation.
STD_RANGE = (math.log(1e-6), math.log(1e6))
MAPPING_NOTE = (
    "env.action_mapping=none, the library's default; the file does not contain clip_actions"
)
# Entries of 1.x and 2.x beside the model -> the network that they normalise.
SEPARATE_NORMALIZERS = {
    "obs_norm_state_dict": "actor",
    "privileged_obs_norm_state_dict": "critic",
    "critic_obs_norm_state_dict": "critic",
}


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of rsl_rl.

    Args:
        path: The file.
        normalizer: None; the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = untrusted_files.label_of(path)
    content = untrusted_files.read_torch(path, label)
    if not isinstance(content, Mapping):
        raise ConfigError(f"name a file of rsl_rl: {label} holds a {type(content).__name__}")
    if "actor_state_dict" in content:
        prefix, normalizer_name, std_name = ".mlp", ".obs_normalizer", "actor.distribution.{}_param"
        tensors = {
            f"{part}.{key}": x
            for part in ("actor", "critic")
            for key, x in _tensors(content, f"{part}_state_dict", label).items()
        }
    elif "model_state_dict" in content:
        prefix, normalizer_name, std_name = "", "_obs_normalizer", "{}"
        tensors = _tensors(content, "model_state_dict", label)
        tensors |= {  # 1.x and 2.x keep the normalisers beside the model
            f"{part}_obs_normalizer.{key}": x
            for name, part in SEPARATE_NORMALIZERS.items()
            if content.get(name)
            for key, x in _tensors(content, name, label).items()
        }
    else:
        raise ConfigError(
            f"name a file that rsl_rl saved (model_<n>.pt): {label} has neither actor_state_dict"
            " nor model_state_dict"
        )
    state = StateDict(tensors, label)
    actor, critic = state.mlp(f"actor{prefix}"), state.mlp(f"critic{prefix}")
    statistics = _normalizer(state, f"actor{normalizer_name}", label)
    of_critic = _normalizer(state, f"critic{normalizer_name}", label)
    std, log_std = state.take(std_name.format("std")), state.take(std_name.format("log_std"))
    state.finish()
    if log_std is None and std is not None:
        if not bool((std > 0).all()):
            raise ConfigError(f"use another checkpoint: {label} has a standard deviation <= 0")
        log_std = std.log()
    if not actor or not critic:
        raise ConfigError(f"name a file that rsl_rl saved: {label} has no linear layers")
    is_beta = log_std is None and prefix == ".mlp" and actor[-1].outputs % 2 == 0
    if log_std is None and not is_beta:
        raise ConfigError(
            f"name a policy with a standard deviation per action ({std_name.format('std')}):"
            f" {label} has none; policies whose network returns it cannot be imported"
        )
    same_statistics = (statistics is None) == (of_critic is None)
    if statistics is not None and of_critic is not None and actor[0].inputs == critic[0].inputs:
        pairs = (statistics.mean, of_critic.mean), (statistics.var, of_critic.var)
        same_statistics = all(torch.equal(a, b) for a, b in pairs)
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=log_std,
        is_beta=is_beta,
        normalizer=statistics,
        default_activation="elu",
        critic_problem=None if same_statistics else OTHER_NORMALIZER,
        notes=(MAPPING_NOTE,),
        std_bounds=STD_RANGE,
    )


def _tensors(content: Mapping[Any, Any], name: str, label: str) -> dict[str, Tensor]:
    return untrusted_files.tensors(content.get(name), label, name)


def _normalizer(state: StateDict, prefix: str, label: str) -> Normalizer | None:
    """Return and remove the statistics of observations."""
    mean = state.take(f"{prefix}._mean")
    if mean is None:
        return None
    std, _ = state.need(f"{prefix}._std"), state.take(f"{prefix}._var")
    count = state.take(f"{prefix}.count")
    return imported.running_statistics(
        *(mean, std, 1 if count is None else count, label), is_std=True, eps=NO_EPS, std_eps=1e-2
    )
