"""Policies of Stable-Baselines3: the zip file of ``PPO.save`` (or ``A2C.save``).

Layout (2.x): policy.pth with mlp_extractor.policy_net.<i>, mlp_extractor.value_net.<i>, action_net,
value_net and log_std; ``data``, a JSON text whose entries with ":serialized:" are pickles, which
are not read. ``VecNormalize`` is a file of its own: (x - mean) / sqrt(var + epsilon), clamped to
±clip_obs; rewards are divided by the deviation of the discounted return. Actions are clipped to the
bounds of the task.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_ppo.core.errors import ConfigError, one_line
from embodied_ppo.interop.policies import imported, untrusted_files
from embodied_ppo.interop.policies.imported import ImportedPolicy
from embodied_ppo.interop.policies.layers import StateDict
from embodied_ppo.interop.policies.normalizers import NONE, read_normalizer

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
    label = str(path)
    data, weights = _open(path, label)
    if data.get("use_sde"):
        raise ConfigError(
            f"{label}: was trained with gSDE (use_sde=True), which cannot be imported"
        )
    space = data.get("observation_space")
    if isinstance(space, Mapping) and "Dict" in str(space.get(":type:")):
        raise ConfigError(
            f"{label}: reads a dictionary of observations; only policies that read one vector can"
            " be imported"
        )
    # Stable-Baselines3 sets this attribute only if the environment is a VecNormalize.
    wrapped = data.get("_last_original_obs") is not None
    if wrapped and normalizer is None:
        raise ConfigError(
            f"{label}: the training used VecNormalize, which is a file of its own; write"
            " normalizer=FILE, the file of VecNormalize.save, or normalizer=none"
        )
    statistics, scale = None, None
    if normalizer is not None and normalizer != NONE:
        statistics, scale = read_normalizer(normalizer, eps=1e-8, clip=10.0)
    state = StateDict(untrusted_files.tensors(weights, label, "policy.pth"), label)
    actor = [*state.mlp("mlp_extractor.policy_net"), state.linear("action_net")]
    critic = [*state.mlp("mlp_extractor.value_net"), state.linear("value_net")]
    log_std = state.take("log_std")
    state.finish()
    gamma = data.get("gamma")
    return ImportedPolicy(
        label,
        actor,
        critic,
        log_std=log_std,
        normalizer=statistics,
        value_scale=scale,
        activation=_activation(data, label),
        default_activation="tanh",
        options=imported.CATEGORICAL if log_std is None else imported.GAUSSIAN,
        defaults={} if log_std is None else imported.changeable_options("clip"),
        gamma=gamma if isinstance(gamma, float) else None,
    )


def _open(path: Path, label: str) -> tuple[Mapping[str, Any], Any]:
    """Return the JSON of ``data`` and the contents of policy.pth."""
    content = untrusted_files.read_bytes(path, label)
    untrusted_files.check_archive(content, label)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            data = json.loads(archive.read("data"))
            weights = io.BytesIO(archive.read("policy.pth"))
    except (*untrusted_files.DAMAGED, KeyError) as error:
        raise ConfigError(
            f"{label}: is no zip file of model.save of Stable-Baselines3"
            f" ({one_line(error, kind=True)}); name that file, or copy it again"
        ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{label}: data is no JSON object; copy the file again")
    return data, untrusted_files.read_torch(weights, f"{label}, policy.pth")


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
    match = re.search(r"(\w+)'?>?$", str(text))
    name = "" if match is None else match[1]
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{label}: its activation is {text}, and ours are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
