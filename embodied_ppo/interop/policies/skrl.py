"""Policies of skrl: the file of ``agent.save`` (agent_<n>.pt, best_agent.pt).

Layout (1.x and 2.x): policy, value, observation_preprocessor (1.x: state_preprocessor) and
value_preprocessor, a state_dict each. The names of layers are those of the user's model or of
``gaussian_model``: the linear layers are taken in the order of the file, and the parameter whose
name has log_std. A model that policy and value share has a layer whose name contains "value".
``RunningStandardScaler`` computes (x - mean) / (std + 1e-8), clamped to ±5. Actions are passed to
the simulator as they are, unless the model has clip_actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies import imported, untrusted_files
from embodied_ppo.interop.policies.imported import NO_EPS, ImportedPolicy, Normalizer, ValueScale
from embodied_ppo.interop.policies.layers import Linear, StateDict

BOUNDS = (-20.0, 2.0)
"""Bounds of the logarithm of the standard deviation."""


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of skrl.

    Args:
        path: The file.
        normalizer: Must be None: the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = str(path)
    imported.refuse_normalizer(normalizer, "skrl")
    content = untrusted_files.read_torch(path, label)
    if not isinstance(content, Mapping) or "policy" not in content:
        raise ConfigError(f"{label}: has no entry policy; name a file that agent.save wrote")
    policy = untrusted_files.tensors(content["policy"], label, "policy")
    value = untrusted_files.tensors(content.get("value") or policy, label, "value")
    log_std = _take_log_std(policy)
    _take_log_std(value)
    layers, of_value = _linear_layers(policy, label), _linear_layers(value, label)
    shared = policy.keys() == value.keys() and any("value" in name for name in layers)
    if shared:
        actor = [layer for name, layer in layers.items() if "value" not in name]
        critic = [layer for name, layer in layers.items() if "value" in name]
    else:
        actor, critic = [*layers.values()], [*of_value.values()]
    if not actor:
        raise ConfigError(f"{label}: policy has no linear layers; name a file of agent.save")
    if not content.get("value"):
        critic = None
    statistics = _normalizer(content, "observation_preprocessor", label)
    if statistics is None:
        statistics = _normalizer(content, "state_preprocessor", label)
    scale = None
    if (of_values := _normalizer(content, "value_preprocessor", label)) is not None:
        std, mean = math.sqrt(float(of_values.var)), float(of_values.mean)
        scale = ValueScale(std, of_values.count, mean=mean)
    gaussian = log_std is not None
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=log_std,
        normalizer=statistics,
        value_scale=None if critic is None else scale,
        shared_trunk=shared and len(actor) > 1,
        options=imported.GAUSSIAN if gaussian else imported.CATEGORICAL,
        defaults=imported.changeable_options("none", BOUNDS) if gaussian else {},
        notes=(imported.mapping_note("none", "contain clip_actions"),) if gaussian else (),
    )


def _take_log_std(tensors: dict[str, Tensor]) -> Tensor | None:
    """Return and remove the parameter with the logarithms of the standard deviations."""
    names = [name for name, x in tensors.items() if "log_std" in name and x.ndim <= 2]
    parameters = [
        tensors.pop(name) for name in names if tensors[name].numel() == tensors[name].size(-1)
    ]
    return parameters[0].flatten() if parameters else None


def _linear_layers(tensors: dict[str, Tensor], label: str) -> dict[str, Linear]:
    """Return all linear layers by name, in the order of the file. Raises ConfigError."""
    state = StateDict(tensors, label)
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    layers = {name: state.linear(name) for name in names if tensors[f"{name}.weight"].ndim == 2}
    state.finish()
    return layers


def _normalizer(content: Mapping[Any, Any], name: str, label: str) -> Normalizer | None:
    """Return running statistics."""
    if not content.get(name):
        return None
    state = StateDict(untrusted_files.tensors(content[name], label, name), label)
    mean, var = state.need("running_mean"), state.need("running_variance")
    count = float(state.need("current_count"))
    flat = mean.flatten().double(), var.flatten().double()
    return Normalizer(*flat, count, eps=NO_EPS, std_eps=1e-8, clip=5.0)
