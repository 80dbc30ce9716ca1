"""Policies of Brax: the pickle of ``brax.io.model.save_params`` with the parameters of PPO.

Layout (0.10 to 0.14): a tuple (statistics, policy, value); older files lack the value. Networks are
params/hidden_<i> with kernel [in, out] and bias. With distribution_type=tanh_normal (the default)
the policy returns mean and x; actions are tanh, and the standard deviation is softplus(x) + 0.001.
With distribution_type=normal the layers are MLP_0/hidden_<i> and Dense_0, and std_param or
std_logparam has the deviations. Observations are (x - mean) / std.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies import imported, untrusted_files
from embodied_ppo.interop.policies.imported import ImportedPolicy, Normalizer
from embodied_ppo.interop.policies.layers import Linear, StateDict
from embodied_ppo.interop.policies.untrusted_files import Container

STATISTICS = "brax.training.acme.running_statistics"
CONTAINERS = (
    *(f"{STATISTICS}.{n}" for n in ("RunningStatisticsState", "NestedMeanStd")),
    *(f"{STATISTICS}.NormalizationMode", "brax.training.types.UInt64"),
    *("flax.core.frozen_dict.FrozenDict", "brax.training.agents.ppo.losses.PPONetworkParams"),
)
MIN_STD = 0.001
"""Added to softplus of the network's output."""
EPS = 1e-12
"""Square of the smallest standard deviation of observations."""


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of Brax.

    Args:
        path: The file.
        normalizer: Must be None: the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = str(path)
    imported.refuse_normalizer(normalizer, "brax")
    if path.is_dir():
        raise ConfigError(
            f"{label}: is a directory, as Orbax writes it; load it in Brax and save the parameters"
            " with brax.io.model.save_params"
        )
    content = untrusted_files.read_pickle(path, label, CONTAINERS)
    if isinstance(content, list | tuple) and len(content) in (2, 3):
        statistics, *networks = content
    else:
        raise ConfigError(
            f"{label}: holds no (statistics, policy, value); save the params that ppo.train returns"
            " with brax.io.model.save_params"
        )
    state = StateDict(_flatten(networks[0], label), label)
    critic = None
    if len(networks) == 2:
        values = StateDict(_flatten(networks[1], label), label)
        critic = _hidden(values, "hidden_")
        values.finish()
    log_std = None
    if "Dense_0.kernel" in state.tensors:
        actor = [*_hidden(state, "MLP_0.hidden_"), _dense(state, "Dense_0")]
        std, log_std = state.take("std_param.value"), state.take("std_logparam.log_value")
        if std is not None:
            log_std = imported.log_std_of(std, label)
        options, defaults = imported.GAUSSIAN, imported.changeable_options("none")
    else:
        actor = _hidden(state, "hidden_")
        options = {
            "model.distribution": "squashed_gaussian",
            "model.state_dependent_std": True,
            "model.std_function": "softplus",
            "model.min_log_std": math.log(MIN_STD),
            "model.max_log_std": imported.LOG_STD_BOUNDS[1],
        }
        defaults = {"env.action_mapping": "rescale"}
    state.finish()
    if not actor:
        raise ConfigError(f"{label}: the policy has no layers hidden_<i>; save the params of PPO")
    return ImportedPolicy(
        label,
        actor,
        critic or None,
        log_std=log_std,
        normalizer=_normalizer(statistics, label),
        default_activation="silu",
        options=options,
        defaults=defaults,
        notes=(
            imported.mapping_note(
                str(defaults["env.action_mapping"]), "say whether an action wrapper was used"
            ),
        ),
    )


def _flatten(value: Any, label: str) -> dict[str, Tensor]:
    """Return nested parameters by name, float32. Raises ConfigError."""
    if isinstance(value, Container):
        value = value.values or next(iter(value.arguments), None)
        value = value.get("_dict", value) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and [*value] == ["params"]:
        return _flatten(value["params"], label)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label}: a network is a {type(value).__name__} and no dictionary")
    tensors: dict[str, Tensor] = {}
    for name, entry in value.items():
        if isinstance(entry, np.ndarray) and entry.dtype.kind == "f":
            tensors[str(name)] = torch.from_numpy(np.array(entry, dtype=np.float32))
        else:
            inner = _flatten(entry, label)
            tensors |= {f"{name}.{key}": x for key, x in inner.items()}
    return tensors


def _hidden(state: StateDict, prefix: str) -> list[Linear]:
    """Return and remove the layers PREFIX<i>, in this order."""
    layers = []
    while f"{prefix}{len(layers)}.kernel" in state.tensors:
        layers.append(_dense(state, f"{prefix}{len(layers)}"))
    return layers


def _dense(state: StateDict, name: str) -> Linear:
    """Return and remove one layer, whose kernel is [in, out]. Raises ConfigError."""
    state.tensors[f"{name}.weight"] = state.need(f"{name}.kernel").T.contiguous()
    return state.linear(name)


def _normalizer(value: Any, label: str) -> Normalizer | None:
    """Return the statistics of observations; None: the training did not normalise them."""
    values = value.values if isinstance(value, Container) else value
    if not isinstance(values, Mapping) or not {"mean", "std", "count"} <= values.keys():
        raise ConfigError(f"{label}: has no statistics of observations (mean, std, count)")
    mean, std, count = values["mean"], values["std"], values["count"]
    if isinstance(mean, Mapping | Container):
        raise ConfigError(
            f"{label}: reads a dictionary of observations; only policies that read one vector can"
            " be imported"
        )
    if isinstance(count, Container):  # a whole number of 64 bits
        count = float(count.values["hi"]) * 2.0**32 + float(count.values["lo"])
    if not all(isinstance(x, np.ndarray) and x.dtype.kind == "f" for x in (mean, std)):
        raise ConfigError(f"{label}: the statistics of observations are no arrays of numbers")
    if float(count) == 0:
        return None
    var = torch.from_numpy(np.array(std, dtype=np.float64)).flatten().square()
    return Normalizer(
        torch.from_numpy(np.array(mean, dtype=np.float64)).flatten(), var, float(count), eps=EPS
    )
