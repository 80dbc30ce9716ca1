"""Policies of rsl_rl: the file of ``OnPolicyRunner.save`` (model_<n>.pt).

Layouts: 5.x has actor_state_dict and critic_state_dict with mlp.<i>, obs_normalizer and
distribution.std_param (or log_std_param). 3.x and 4.x have model_state_dict with actor.<i>,
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

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies import imported, untrusted_files
from embodied_ppo.interop.policies.imported import NO_EPS, ImportedPolicy, Normalizer
from embodied_ppo.interop.policies.layers import StateDict

STD_RANGE = (math.log(1e-6), math.log(1e6))
"""Bounds of the logarithm of the standard deviation."""


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of rsl_rl.

    Args:
        path: The file.
        normalizer: Must be None: the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = str(path)
    imported.refuse_normalizer(normalizer, "rsl_rl")
    content = untrusted_files.read_torch(path, label)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{label}: holds a {type(content).__name__}; name a file of rsl_rl")
    if "actor_state_dict" in content:
        states = [
            StateDict(untrusted_files.tensors(content.get(name), label, name), label)
            for name in ("actor_state_dict", "critic_state_dict")
        ]
        actor_state, critic_state = states
        actor, critic = actor_state.mlp("mlp"), critic_state.mlp("mlp")
        prefixes = "obs_normalizer", "obs_normalizer"
        std, log_std = "distribution.std_param", "distribution.log_std_param"
    elif "model_state_dict" in content:
        tensors = untrusted_files.tensors(content["model_state_dict"], label, "model_state_dict")
        actor_state = critic_state = StateDict(tensors | _separate_normalizers(content), label)
        states = [actor_state]
        actor, critic = actor_state.mlp("actor"), actor_state.mlp("critic")
        prefixes, std, log_std = ("actor_obs_normalizer", "critic_obs_normalizer"), "std", "log_std"
    else:
        raise ConfigError(
            f"{label}: has neither actor_state_dict nor model_state_dict; name a file that rsl_rl"
            " saved (model_<n>.pt)"
        )
    statistics = _normalizer(actor_state, prefixes[0])
    of_critic = _normalizer(critic_state, prefixes[1])
    logarithm = actor_state.take(log_std)
    if logarithm is None and (deviation := actor_state.take(std)) is not None:
        logarithm = imported.log_std_of(deviation, label)
    for state in states:
        state.finish()
    if not actor or not critic:
        raise ConfigError(f"{label}: has no linear layers; name a file that rsl_rl saved")
    if logarithm is None:
        raise ConfigError(
            f"{label}: has no standard deviation per action ({std} or {log_std}); policies whose"
            " network returns it cannot be imported"
        )
    same = (statistics is None) == (of_critic is None)
    if same and statistics is not None and of_critic is not None:
        same = statistics.equals(of_critic) or actor[0].inputs != critic[0].inputs
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=logarithm,
        normalizer=statistics,
        default_activation="elu",
        options=imported.GAUSSIAN,
        defaults=imported.changeable_options("none", STD_RANGE),
        critic_problem=None if same else "normalises observations in another way than the policy",
        notes=(imported.mapping_note("none", "contain clip_actions"),),
    )


def _separate_normalizers(content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the normalisers that 1.x and 2.x keep beside the model, named as 3.x names them."""
    normalizers = {}
    for part, names in (
        ("actor", ("obs_norm_state_dict",)),
        ("critic", ("privileged_obs_norm_state_dict", "critic_obs_norm_state_dict")),
    ):
        for name in names:
            if isinstance(content.get(name), Mapping):
                normalizers |= {
                    f"{part}_obs_normalizer.{key}": x for key, x in content[name].items()
                }
    return {name: x for name, x in normalizers.items() if isinstance(x, torch.Tensor)}


def _normalizer(state: StateDict, prefix: str) -> Normalizer | None:
    """Return and remove the statistics of observations."""
    mean = state.take(f"{prefix}._mean")
    if mean is None:
        return None
    std, _ = state.need(f"{prefix}._std"), state.take(f"{prefix}._var")
    count = state.take(f"{prefix}.count")
    return Normalizer(
        mean.flatten().double(),
        std.flatten().double().square(),
        float(1 if count is None else count),
        eps=NO_EPS,
        std_eps=1e-2,
    )
