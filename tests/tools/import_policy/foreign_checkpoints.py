"""Small checkpoints in the layouts of other libraries, written without these libraries.

Each function writes a file and returns the actor, a ``torch.nn.Module`` of normalised observations.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Sizes of HalfCheetah, and widths of the hidden layers.
OBS, ACTIONS, HIDDEN = 17, 6, (8, 5)
MEAN, VAR, COUNT = np.linspace(-1, 1, OBS), np.linspace(0.5, 3, OBS), 1000.0


def mlp(outputs: int, hidden: Sequence[int] = HIDDEN, inputs: int = OBS) -> nn.Sequential:
    """Return linear layers with tanh between them; seeded by the caller."""
    sizes, layers = [inputs, *hidden], list[nn.Module]()
    for i, size in enumerate(hidden):
        layers += [nn.Linear(sizes[i], size), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def state(network: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the weights, PREFIX.<i>.weight and PREFIX.<i>.bias."""
    return {f"{prefix}.{name}": x for name, x in network.state_dict().items()}


def fake_class(full_name: str) -> type:
    """Return a class that pickles under another module's name."""
    module, _, name = full_name.rpartition(".")
    parts = module.split(".")
    for i in range(len(parts)):
        sys.modules.setdefault(".".join(parts[: i + 1]), types.ModuleType(parts[i]))
    cls = getattr(sys.modules[module], name, None) or type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, cls)
    return cls


def forget(package: str) -> None:
    """Remove the modules of ``fake_class`` again."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def named(full_name: str, **values: Any) -> Any:
    """Return an object of a class of another library."""
    thing = fake_class(full_name)()
    vars(thing).update(values)
    return thing


# -------------------------------------------------------------------------------------------- files
def sb3(
    path: Path, *, extra: dict[str, Tensor] | None = None, choices: bool = False, **data: Any
) -> nn.Module:
    """Write a file of ``PPO.save``, of a policy without standard deviations for ``choices``."""
    actor, critic = mlp(ACTIONS), mlp(1, (7,))
    weights = {} if choices else {"log_std": torch.full((ACTIONS,), -0.5)}
    for network, hidden, head in ((actor, "policy", "action_net"), (critic, "value", "value_net")):
        *layers, last = [x for x in network if isinstance(x, nn.Linear)]
        for i, layer in enumerate(layers):
            weights |= state(layer, f"mlp_extractor.{hidden}_net.{2 * i}")
        weights |= state(last, head)
    buffer = io.BytesIO()
    torch.save(weights | (extra or {}), buffer)
    content = {"policy_kwargs": {}, "gamma": 0.99, "use_sde": False, **data}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(content))
        archive.writestr("policy.pth", buffer.getvalue())
    return actor


def vec_normalize(path: Path, **changes: Any) -> None:
    """Write a file of ``VecNormalize.save``."""
    package = "stable_baselines3.common"

    def rms(mean: Any, var: Any) -> Any:
        values = {"mean": mean, "var": var, "count": COUNT, "epsilon": 1e-4}
        return named(f"{package}.running_mean_std.RunningMeanStd", **values)

    values: dict[str, Any] = {
        "norm_obs": True,
        "norm_reward": True,
        "epsilon": 1e-8,
        "clip_obs": 2.0,
        "clip_reward": 10.0,
        "gamma": 0.99,
        "obs_rms": rms(MEAN, VAR),
        "ret_rms": rms(np.float64(0.3), np.float64(9.0)),
    }
    thing = named(f"{package}.vec_env.vec_normalize.VecNormalize", **values, **changes)
    path.write_bytes(pickle.dumps(thing))
    forget("stable_baselines3")


def rsl_rl(path: Path, layout: int = 5, *, beta: bool = False, **changes: Any) -> nn.Module:
    """Write a file of ``OnPolicyRunner.save`` of version 1, 3 or 5, or of its BetaDistribution."""
    actor, critic = mlp(2 * ACTIONS if beta else ACTIONS), mlp(1, (7,))
    var = torch.from_numpy(VAR).float()[None]
    normalizer = {
        "_mean": torch.from_numpy(MEAN).float()[None],
        "_var": var,
        "_std": var.sqrt(),
        "count": torch.tensor(1000),
    }
    std, networks = torch.full((ACTIONS,), 0.7), state(actor, "actor") | state(critic, "critic")

    def prefixed(prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.{name}": x for name, x in normalizer.items()}

    if layout == 5:
        content: dict[str, Any] = {
            "actor_state_dict": state(actor, "mlp")
            | prefixed("obs_normalizer")
            | ({} if beta else {"distribution.std_param": std}),
            "critic_state_dict": state(critic, "mlp") | prefixed("obs_normalizer"),
        }
    elif layout == 3:
        both = prefixed("actor_obs_normalizer") | prefixed("critic_obs_normalizer")
        content = {"model_state_dict": {"std": std, **networks, **both}}
    else:
        content = {
            "model_state_dict": {"std": std, **networks},
            "obs_norm_state_dict": normalizer,
            "privileged_obs_norm_state_dict": normalizer,
        }
    torch.save({**content, "optimizer_state_dict": {}, "iter": 3, "infos": None, **changes}, path)
    return actor


def cleanrl(path: Path, *, choices: int = 0) -> nn.Module:
    """Write a file of ppo_continuous_action.py, or of ppo.py with ``choices``."""
    actor, critic = mlp(choices or ACTIONS), mlp(1)
    weights = state(actor, "actor" if choices else "actor_mean") | state(critic, "critic")
    if not choices:
        weights["actor_logstd"] = torch.full((1, ACTIONS), -0.5)
    torch.save(weights, path)
    return actor
