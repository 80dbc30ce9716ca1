"""Policies of rl_games: the .pth file of ``A2CAgent.save``.

Layout (1.6): model with a2c_network.actor_mlp.<i>, mu, value, sigma (a parameter, or a layer with
fixed_sigma=False), logits for choices, critic_mlp.<i> with separate=True; running_mean_std and
value_mean_std. Observations are (x - mean) / sqrt(var + 1e-5), clamped to ±5; values are
mean + sqrt(var + 1e-5) x output. With clip_actions (the default) actions are clamped to [-1, 1] and
mapped to the bounds of the task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies import imported, untrusted_files
from embodied_ppo.interop.policies.imported import ImportedPolicy, Normalizer, ValueScale
from embodied_ppo.interop.policies.layers import Linear, StateDict

EPS = 1e-5
REWARD_NOTE = (
    "values have the units of reward_shaper, which the file does not contain; if it scaled rewards,"
    " let the value function learn first with algorithm.critic_warmup=10"
)


def read(path: Path, normalizer: Path | None) -> ImportedPolicy:
    """Read a policy of rl_games.

    Args:
        path: The file.
        normalizer: Must be None: the file contains the normaliser.

    Raises:
        ConfigError: The file is damaged, or holds another policy than one of linear layers.
    """
    label = str(path)
    imported.refuse_normalizer(normalizer, "rl_games")
    content = untrusted_files.read_torch(path, label)
    if not isinstance(content, Mapping) or "model" not in content:
        raise ConfigError(f"{label}: has no entry model; name a file that rl_games saved (.pth)")
    tensors = untrusted_files.tensors(content["model"], label, "model")
    state = StateDict({_name(name): x for name, x in tensors.items()}, label)
    statistics, value_scale = _normalizer(state, "running_mean_std"), None
    if (of_values := _normalizer(state, "value_mean_std")) is not None:
        std = math.sqrt(float(of_values.var) + EPS)
        value_scale = ValueScale(std, of_values.count, mean=float(of_values.mean))
    hidden, critic_hidden = state.mlp("actor_mlp"), state.mlp("critic_mlp")
    log_std, options, defaults = None, imported.CATEGORICAL, {}
    if "logits.weight" in state.tensors:
        head = state.linear("logits")
    else:
        head, options, defaults = (
            state.linear("mu"),
            imported.GAUSSIAN,
            imported.changeable_options("rescale"),
        )
        if (log_std := state.take("sigma")) is None:
            sigma = state.linear("sigma")
            head = Linear(
                torch.cat([head.weight, sigma.weight]), torch.cat([head.bias, sigma.bias])
            )
            options = {**options, "model.state_dependent_std": True}
    critic = [*critic_hidden, state.linear("value")]
    state.finish()
    central = "assymetric_vf_nets" in content  # the spelling of rl_games
    notes = () if value_scale is None else (REWARD_NOTE,)
    policy = ImportedPolicy(
        label,
        [*hidden, head],
        critic,
        log_std=log_std,
        normalizer=statistics,
        value_scale=value_scale,
        shared_trunk=not critic_hidden and bool(hidden),
        options=options,
        defaults=defaults,
        critic_problem="is a central value function, which reads other observations"
        if central
        else None,
        notes=notes,
    )
    if defaults:
        policy = replace(
            policy, notes=(*notes, imported.mapping_note("rescale", "contain clip_actions"))
        )
    return policy


def _name(name: str) -> str:
    """Return the name of a tensor without the prefixes of modules around the network."""
    return name.replace("_orig_mod.", "").removeprefix("a2c_network.")


def _normalizer(state: StateDict, prefix: str) -> Normalizer | None:
    """Return and remove running statistics."""
    mean = state.take(f"{prefix}.running_mean")
    if mean is None:
        return None
    var, count = state.need(f"{prefix}.running_var"), state.need(f"{prefix}.count")
    flat = mean.flatten().double(), var.flatten().double()
    return Normalizer(*flat, float(count), eps=EPS, clip=5.0)
