"""Policies of Stable-Baselines3: the zip file of ``PPO.save`` (or ``A2C.save``).

Layout (2.x): policy.pth with mlp_extractor.policy_net.<i>, mlp_extractor.value_net.<i>, action_net,
value_net and log_std; ``data``, a JSON text whose entries with ":serialized:" are pickles, which
are not read. ``VecNormalize`` is a file of its own: (x - mean) / sqrt(var + epsilon), clamped to
±clip_obs; rewards are divided by the deviation of the discounted return. Actions are clipped to the
bounds of the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core import guarded_files
from embodied_ppo.tools.import_policy import imported, untrusted_files
from embodied_ppo.tools.import_policy.imported import ImportedPolicy
from embodied_ppo.tools.import_policy.layers import StateDict
from embodied_ppo.tools.import_policy.normalizers import read_normalizer

ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu", "GELU": "gelu"}


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of Stable-Baselines3.

    Args:
        path: The zip file.
        normalizer: The file of ``VecNormalize.save``; None or ``NONE``: the
            training did not use it.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = untrusted_files.label_of(path)
    data, weights = _open(path, label)
    if data.get("use_sde"):
        reason = "was trained with use_sde=True, which cannot be imported"
        raise ConfigError(f"name a policy without gSDE: {label} {reason}")
    if "Dict" in _type(data, "observation_space"):
        reason = "reads a dictionary of observations"
        raise ConfigError(f"name a policy that reads one vector: {label} {reason}")
    # Stable-Baselines3 sets this attribute only if the environment is a VecNormalize.
    if data.get("_last_original_obs") is not None and normalizer is None:
        raise ConfigError(
            "write normalizer=FILE, the file of VecNormalize.save, or normalizer=none: the training"
            f" of {label} used VecNormalize, which is a file of its own"
        )
    statistics, scale = read_normalizer(normalizer)
    state = StateDict(untrusted_files.tensors(weights, label, "policy.pth"), label)
    actor = [*state.mlp("mlp_extractor.policy_net"), state.linear("action_net")]
    if "MultiBinary" in _type(data, "action_space"):
        # One logit l for each element: p(1) = sigmoid(l), which are the logits (0, l) of a choice.
        head = actor[-1]
        weight, bias = (
            torch.stack([torch.zeros_like(x), x], dim=1).flatten(0, 1)
            for x in (head.weight, head.bias)
        )
        actor[-1] = imported.Linear(weight, bias)
    critic = [*state.mlp("mlp_extractor.value_net"), state.linear("value_net")]
    log_std = state.take("log_std")
    state.finish()
    gamma: Any = data.get("gamma")
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=log_std,
        normalizer=statistics,
        value_scale=scale,
        activation=_activation(data, label),
        default_activation="tanh",
        action_mapping="clip",
        gamma=gamma if isinstance(gamma, float) and 0 <= gamma <= 1 else None,
    )


def _type(data: Mapping[str, Any], name: str) -> str:
    """Return the type of an entry that is written beside its pickle, "" without one."""
    entry = data.get(name)
    return str(entry.get(":type:")) if isinstance(entry, Mapping) else ""


def _open(path: Path, label: str) -> tuple[Mapping[str, Any], Any]:
    """Return the JSON of ``data`` and the contents of policy.pth."""
    members = untrusted_files.read_archive(untrusted_files.read_bytes(path, label), label)
    if not {"data", "policy.pth"} <= members.keys():
        raise ConfigError(
            f"name the zip file of model.save of Stable-Baselines3: {label} has no data and"
            " policy.pth"
        )
    data = guarded_files.parse_json(members["data"])
    if not isinstance(data, Mapping):
        raise ConfigError(f"copy the file again: data of {label} is no JSON object")
    return data, untrusted_files.read_torch(members["policy.pth"], label)


def _activation(data: Mapping[str, Any], label: str) -> str | None:
    """Return the activation of ``policy_kwargs``, a class that is written beside the pickle.

    It is tanh if it is not set there, and None where that is not known: in a class of the user.
    """
    arguments, cls = data.get("policy_kwargs"), data.get("policy_class")
    text = arguments.get("activation_fn") if isinstance(arguments, Mapping) else None
    if text is None:
        module = cls.get("__module__") if isinstance(cls, Mapping) else None
        known = isinstance(arguments, Mapping) and module == "stable_baselines3.common.policies"
        return "tanh" if known else None
    name = str(text).removesuffix(">").removesuffix("'").rpartition(".")[2]
    if name not in ACTIVATIONS:
        known, actual = ", ".join(ACTIVATIONS), untrusted_files.shown(str(text))
        raise ConfigError(f"name a policy with {known}: the activation of {label} is {actual}")
    return ACTIVATIONS[name]
