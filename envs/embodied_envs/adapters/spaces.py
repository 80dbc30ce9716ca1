"""Conversion of Gymnasium's spaces to our specs, and of observations and actions to tensors."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from embodied_envs.adapters.actions import mapper
from embodied_ppo.core.errors import choose
from embodied_ppo.core.observation_names import names_observation
from embodied_ppo.core.types import (
    ActionSpec,
    ArraySpec,
    Box,
    Discrete,
    EnvError,
    Obs,
    ObsSpec,
)

Leaf = Callable[[Any], Tensor]
PRIVILEGED = re.compile(r"(^|[_/.])(privileged|priv|critic)([_/.]|$)", re.IGNORECASE)
"""Matches names of observations that exist only in simulation.

Examples are privileged_state (Playground) and critic (Isaac Lab).
"""


def is_privileged(name: str) -> bool:
    """Return whether a name marks an observation that exists in simulation only."""
    return PRIVILEGED.search(name) is not None


def select_observations(names: Sequence[str], keys: Sequence[str] | None, *, id: str) -> list[str]:
    """Return the observations that ``keys`` selects, in the simulator's order.

    Args:
        names: Flat names ("a/b") of a dictionary of observations; empty where the observation is
            one array.
        keys: Entries of ``env.obs_keys``, or of ``model.actor_obs`` and ``model.critic_obs``.
            They are names, or first parts of names ("a" selects "a/b" and "a/c"). None selects all.
        id: ``env.id``, for messages.

    Raises:
        EnvError: A key does not exist, or ``keys`` is None and a name matches ``PRIVILEGED``.
    """
    groups = list(dict.fromkeys(name.partition("/")[0] for name in names))
    if keys is None:
        privileged = [name for name in names if is_privileged(name)]
        if privileged:
            raise _undecided(groups, privileged, id)
        return list(names)
    prefix = f"env.id={id}: env.obs_keys (or model.actor_obs, model.critic_obs)"
    if not names:
        raise EnvError(
            f"{prefix} names {', '.join(keys) or 'nothing'}: its observation is one array; leave"
            " the option out"
        )
    if not keys:
        raise EnvError(
            f"{prefix}=[] selects nothing; write null for all, or some of [{','.join(groups)}]"
        )
    for key in keys:
        if not any(names_observation(key, name) for name in names):
            raise EnvError(
                f"{prefix}: {key!r} is not in its observation; {choose(key, groups, 'it has ')}"
            )
    return [name for name in names if any(names_observation(key, name) for key in keys)]


def _undecided(groups: list[str], privileged: list[str], id: str) -> EnvError:
    """Return the error for privileged observations that no option assigns to a network."""
    secret = list(dict.fromkeys(name.partition("/")[0] for name in privileged))
    public = [group for group in groups if group not in secret]
    actor = ",".join(public)
    if not 0 < len(actor) <= 100:
        actor = "NAME,.."
    return EnvError(
        f"env.id={id}: its observation has {privileged[0]}, which exists in simulation only, and no"
        f" option names the networks that read it; write model.actor_obs=[{actor}]"
        f" model.critic_obs=[{','.join([actor, *secret])}] (with model.policy=actor_critic), or"
        f" env.obs_keys=[{actor}] to leave it out"
    )


def observations(
    space: Any, *, id: str, device: torch.device, keys: Sequence[str] | None = None
) -> tuple[ObsSpec, dict[str, Leaf]]:
    """Return the spec of one observation, and conversions of its arrays to tensors.

    float32                        unchanged, without a copy
    float64, integers, bool        float32
    MultiBinary, MultiDiscrete     float32
    uint8, 2 or more dimensions    uint8, unchanged
    uint8, 0 or 1 dimension        float32
    Discrete(n)                    float32 [n], one-hot
    numbers, shape ()              float32 [1]
    dictionary                     dict[str, Tensor] with flat names: {"a": {"b": x}} is {"a/b": x}

    Args:
        space: Gymnasium's space of one observation, or a dictionary of spaces.
        id: ``env.id``, for messages.
        device: Where the tensors are created.
        keys: Entries of a dictionary to select, see ``select_observations``.

    Returns:
        The spec, and for each name (one array has the name "") a function from numpy [N, ..] to a
        tensor [N, ..].

    Raises:
        EnvError: A space has no fixed shape (Text, Sequence, Graph), or ``keys`` is wrong.
    """
    if not isinstance(space, Mapping | spaces.Dict):
        select_observations((), keys, id=id)
        spec, leaf = _leaf(space, id=id, device=device)
        return spec, {"": leaf}
    flat = flatten(space)
    if not flat:
        raise EnvError(
            f"env.id={id}: its observation dictionary is empty; wrap the environment to observe"
            " something"
        )
    names = select_observations(list(flat), keys, id=id)
    specs: dict[str, ArraySpec] = {}
    leaves: dict[str, Leaf] = {}
    for name in names:
        specs[name], leaves[name] = _leaf(
            flat[name], id=f"{id}, observation {name!r}", device=device
        )
    return specs, leaves


def reader(leaves: dict[str, Leaf]) -> Callable[[Any], Obs]:
    """Return a function that converts a batch of observations to tensors.

    The batch is an array if the only name is "", else nested dictionaries of arrays.
    """
    if "" in leaves:
        return leaves[""]
    paths = [(name, name.split("/"), leaf) for name, leaf in leaves.items()]
    return lambda obs: {
        name: leaf(functools.reduce(operator.getitem, path, obs)) for name, path, leaf in paths
    }


def actions(
    space: Any, *, id: str, mapping: str, device: torch.device
) -> tuple[ActionSpec, Callable[[Tensor], Tensor]]:
    """Return the spec of one action, and a function from the policy's actions to the simulator's.

    Box       float32 [N, A] through ``mapping`` (see actions.mapper), then reshaped to [N, *shape]
    Discrete  int64 [N], plus the space's ``start``

    Args:
        space: Gymnasium's space of one action.
        id: ``env.id``, for messages.
        mapping: ``env.action_mapping``.
        device: Device of the policy's actions.

    Raises:
        EnvError: The space is neither a Box of floats nor a Discrete.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Discrete(int(space.n)), lambda action: action + start if start else action
    if not isinstance(space, spaces.Box):
        raise EnvError(
            f"env.id={id}: action space {_short(space)} is not supported (one Box or one Discrete"
            " is); wrap the environment so that it takes one vector or one choice"
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvError(
            f"env.id={id}: its actions are a Box of {space.dtype} (integers), and only a Box of"
            " floats or a Discrete is supported; wrap the environment so that it takes one choice"
        )
    low, high = (
        tuple(_bound(x) for x in np.asarray(bound, dtype=np.float64).reshape(-1))
        for bound in (space.low, space.high)
    )
    box, shape = Box(low=low, high=high), space.shape
    apply = mapper(mapping, box, device)
    return box, apply if len(shape) == 1 else lambda action: apply(action).reshape(-1, *shape)


def check_seeds(id: str, seeds: list[int], num_envs: int) -> None:
    """Raise EnvError unless ``seeds`` has ``num_envs`` entries in [0, 2**31)."""
    if len(seeds) != num_envs:
        raise EnvError(
            f"env.id={id}: {len(seeds)} seeds for {num_envs} environments; give one each"
        )
    if invalid := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise EnvError(
            f"env.id={id}: seed {invalid[0]} is outside [0, 2**31); simulators store seeds in 32"
            " bits"
        )


def action_shape(spec: ActionSpec, num_envs: int) -> torch.Size:
    """Return the shape of one step's actions: [N, A] or [N]."""
    return torch.Size([num_envs] if isinstance(spec, Discrete) else [num_envs, spec.size])


def action_shape_error(id: str, action: Tensor, shape: torch.Size) -> EnvError:
    """Return the error for actions of another shape, which C++ simulators do not detect."""
    return EnvError(
        f"env.id={id}: actions of shape {list(action.shape)}; it takes {list(shape)}, environments"
        " first"
    )


def success_key_error(id: str, key: str | None, info_keys: Iterable[str]) -> EnvError:
    """Return the error for a success key that is not in the info of a step that ends an episode."""
    names = ", ".join(sorted(name for name in info_keys if not name.startswith(("_", "final_"))))
    return EnvError(
        f"env.id={id}: success_key={key!r} is not in the info of a step that ends an episode; "
        f"it has {names or 'nothing'}"
    )


def resize_image(frame: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize uint8 [h, w, 3] to uint8 [H, W, 3] of ``size`` = (H, W) by averaging over areas."""
    image = torch.from_numpy(np.ascontiguousarray(frame))
    if tuple(image.shape[:2]) == tuple(size):
        return image
    chw = image.permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(chw, size=size, mode="area")[0]
    return resized.permute(1, 2, 0).round().to(torch.uint8)


def _leaf(space: Any, *, id: str, device: torch.device) -> tuple[ArraySpec, Leaf]:
    """Return spec and conversion of one array."""
    if isinstance(space, spaces.Discrete):
        spec, convert = ArraySpec((int(space.n),)), _one_hot(int(space.n), int(space.start))
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        shape = tuple(int(n) for n in space.shape)
        is_image = space.dtype == np.uint8 and len(shape) > 1
        spec = ArraySpec(shape or (1,), torch.uint8 if is_image else torch.float32)
        is_unchanged = is_image or space.dtype == np.float32
        convert = _numbers if not shape else _same if is_unchanged else _to_float
    else:
        raise EnvError(
            f"env.id={id}: observation space {_short(space)} is not supported (Box, Discrete,"
            " MultiBinary, MultiDiscrete and dictionaries of them are); wrap the environment so"
            " that it returns fixed-shape arrays"
        )
    if device.type == "cpu":
        return spec, convert
    return spec, lambda x: convert(x).to(device, non_blocking=True)


def _same(x: np.ndarray) -> Tensor:
    """Share memory: simulators return a new array every step (``checks.check_env`` verifies it)."""
    return torch.from_numpy(x)


def _to_float(x: np.ndarray) -> Tensor:
    """Convert with numpy: with cold CPU caches after a simulator step, torch takes 50 % longer."""
    return torch.from_numpy(x.astype(np.float32))


def _numbers(x: np.ndarray) -> Tensor:
    """Convert [N] to float32 [N, 1]."""
    return torch.from_numpy(np.array(x, dtype=np.float32).reshape(-1, 1))


def _one_hot(n: int, start: int) -> Leaf:
    """Return a conversion of integers [N] >= ``start`` to float32 [N, n]."""

    def convert(x: np.ndarray) -> Tensor:
        index = torch.from_numpy(x.astype(np.int64).reshape(-1, 1) - start)
        return torch.zeros(index.shape[0], n).scatter_(1, index, 1.0)

    return convert


def flatten(space: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"a/b": space} of {"a": {"b": space}}, in the space's order."""
    flat: dict[str, Any] = {}
    for name, leaf in space.items():
        is_dict = isinstance(leaf, Mapping | spaces.Dict)
        flat |= flatten(leaf, f"{prefix}{name}/") if is_dict else {prefix + name: leaf}
    return flat


def _bound(x: float) -> float:
    """Return a bound as float; the largest number of float32 or float64 stands for infinity."""
    return float(np.sign(x) * np.inf) if abs(x) >= 3.4e38 else float(x)


def _short(space: Any) -> str:
    text = repr(space)
    return text if len(text) <= 80 else f"{text[:77]}..."
