"""Policies of Brax: the pickle of ``brax.io.model.save_params`` with the parameters of PPO.

Layout (0.10 to 0.14): a tuple (statistics, policy, value); older files lack the value. Networks are
params/hidden_<i> with kernel [in, out] and bias. With distribution_type=tanh_normal (the default)
the policy returns mean and x; actions are tanh, and the standard deviation is softplus(x) + 0.001.
With distribution_type=normal the layers are MLP_0/hidden_<i> and Dense_0, and std_param or
std_logparam has the deviations. Observations are (x - mean) / std.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import imported, untrusted_files
from embodied_ppo.tools.import_policy.imported import ImportedPolicy, Normalizer
from embodied_ppo.tools.import_policy.layers import Linear, StateDict
from embodied_ppo.tools.import_policy.untrusted_files import entries, shown

MIN_STD = 0.001
"""Added to softplus of the network's output."""
EPS = 1e-12
"""Square of the smallest standard deviation of observations."""


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of Brax.

    Args:
        path: The file.
        normalizer: None; the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = untrusted_files.label_of(path)
    if path.is_dir():
        raise ConfigError(
            "load it in Brax and save the parameters with brax.io.model.save_params:"
            f" {label} is a directory, as Orbax writes it"
        )
    content = untrusted_files.read_pickle(path, label)
    if isinstance(content, list | tuple) and len(content) in (2, 3):
        statistics, *networks = content
    else:
        raise ConfigError(
            "save the params that ppo.train returns with brax.io.model.save_params:"
            f" {label} holds no (statistics, policy, value)"
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
        options, mapping = {}, "none"
    else:
        actor = _hidden(state, "hidden_")
        options = {
            "model.distribution": "squashed_gaussian",
            "model.state_dependent_std": True,
            "model.std_function": "softplus",
            "model.min_log_std": math.log(MIN_STD),
            "model.max_log_std": imported.LOG_STD_BOUNDS[1],
        }
        mapping = "rescale"
    state.finish()
    if not actor:
        raise ConfigError(f"save the params of PPO: the policy of {label} has no layers hidden_<i>")
    return ImportedPolicy(
        label,
        actor,
        critic or None,
        log_std=log_std,
        normalizer=_normalizer(statistics, label),
        default_activation="silu",
        options=options,
        action_mapping=mapping,
        mapping_unknown="say whether an action wrapper was used",
    )


def _flatten(network: Any, label: str) -> dict[str, Tensor]:
    """Return nested parameters by name, float32. Raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    for name, x in _named_leaves(network):
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            raise ConfigError(
                "save the params that ppo.train returns with brax.io.model.save_params:"
                f" {shown(name)} of {label} is a {type(x).__name__} and no array of numbers"
            )
        with np.errstate(all="ignore"):  # ``ImportedPolicy.check`` refuses infinity
            tensors[name] = torch.from_numpy(x.astype(np.float32))
    return tensors


def _named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries; levels that are named params are left out."""
    children = entries(value)
    if children is None:
        yield name.removeprefix("."), value
    for key, child in (children or {}).items():
        yield from _named_leaves(child, name if key == "params" else f"{name}.{key}")


def _hidden(state: StateDict, prefix: str) -> list[Linear]:
    """Return and remove the layers PREFIX<i>, in this order."""
    layers = []
    while f"{prefix}{len(layers)}.kernel" in state.tensors:
        layers.append(_dense(state, f"{prefix}{len(layers)}"))
    return layers


def _dense(state: StateDict, name: str) -> Linear:
    """Return and remove one layer, whose kernel is [in, out]. Raises ConfigError."""
    kernel = state.need(f"{name}.kernel")
    state.tensors[f"{name}.weight"] = kernel.T.contiguous() if kernel.ndim == 2 else kernel
    return state.linear(name)


def _normalizer(value: Any, label: str) -> Normalizer | None:
    """Return the statistics of observations; None: the training did not normalise them."""
    values = entries(value)
    if values is None or not {"mean", "std", "count"} <= values.keys():
        raise ConfigError(
            f"save the params of PPO: {label} has no statistics of observations (mean, std, count)"
        )
    mean, std, count = values["mean"], values["std"], values["count"]
    if isinstance(mean, Mapping):
        raise ConfigError(
            f"name a policy that reads one vector: {label} reads a dictionary of observations"
        )
    if halves := entries(count):  # a whole number of 64 bits
        high, low = (imported.number(halves.get(x), label, "count") for x in ("hi", "lo"))
        count = high * 2.0**32 + low
    if imported.number(count, label, "count") == 0:
        return None
    return imported.running_statistics(mean, std, count, label, is_std=True, eps=EPS)
