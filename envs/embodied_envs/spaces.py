"""From Gymnasium's spaces and numpy arrays to our specs and tensors: the part that every numpy simulator shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from embodied_ppo.types import ActionSpec, ArraySpec, Box, Discrete, EnvError, Obs, ObsSpec

from embodied_envs.actions import mapper

Leaf = Callable[[Any], Tensor]


def observations(space: Any, *, id: str, device: torch.device) -> tuple[ObsSpec, Callable[[Any], Obs]]:
    """Spec of one observation, and a function from a batch of them (numpy, leading N) to tensors on ``device``.

    float32      as it is, without a copy              float64, integers, bool, MultiBinary   float32
    uint8        2 or more dimensions: stays uint8     uint8 with 0 or 1 dimension            float32
    Discrete(n)  one-hot float32 [n]                   numbers, shape ()                      float32 [1]
    dictionary   dict[str, Tensor]; nested ones get flat names: {"a": {"b": x}} is {"a/b": x}

    Raises EnvError for Text, Sequence, Graph and other spaces without a fixed shape.
    """
    if isinstance(space, Mapping | spaces.Dict):
        flat = _flatten(space)
        if not flat:
            raise EnvError(f"env.id={id}: its observation dictionary is empty; wrap the environment to observe something")
        pairs = {name: _leaf(leaf, id=f"{id}, observation {name!r}", device=device) for name, leaf in flat.items()}
        spec = {name: pair[0] for name, pair in pairs.items()}
        paths = [(name, tuple(name.split("/")), pair[1]) for name, pair in pairs.items()]
        if all(len(path) == 1 for _, path, _ in paths):
            flat_leaves = [(name, convert) for name, _, convert in paths]
            return spec, lambda obs: {name: convert(obs[name]) for name, convert in flat_leaves}
        return spec, lambda obs: {name: convert(_at(obs, path)) for name, path, convert in paths}
    return _leaf(space, id=id, device=device)


def actions(
    space: Any, *, id: str, mapping: str, device: torch.device
) -> tuple[ActionSpec, Callable[[Tensor], np.ndarray]]:
    """Spec of one action, and a function from the policy's batch (on ``device``) to the simulator's numpy batch.

    Box       float32 [N, A] through ``mapping`` (see actions.mapper), then the simulator's shape [N, *shape]
    Discrete  int64 [N], plus the space's ``start``

    Raises EnvError for every other space.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        if start:
            return Discrete(int(space.n)), lambda action: action.cpu().numpy() + start
        return Discrete(int(space.n)), lambda action: action.cpu().numpy()
    if not isinstance(space, spaces.Box):
        raise EnvError(
            f"env.id={id}: action space {_short(space)} is not supported (one Box or one Discrete is); "
            "wrap the environment so that it takes one vector or one choice"
        )
    if not np.issubdtype(space.dtype, np.floating):
        raise EnvError(
            f"env.id={id}: its actions are a Box of {space.dtype} (whole numbers), and only a Box of floats or a Discrete "
            "is supported; wrap the environment so that it takes one choice"
        )
    low, high = (np.asarray(bound, dtype=np.float64).reshape(-1) for bound in (space.low, space.high))
    box = Box(low=tuple(_bound(x) for x in low), high=tuple(_bound(x) for x in high))
    apply = mapper(mapping, box, device)
    if len(space.shape) == 1:
        return box, lambda action: apply(action).detach().cpu().numpy()
    shape = space.shape
    return box, lambda action: apply(action).detach().cpu().numpy().reshape(-1, *shape)


def _leaf(space: Any, *, id: str, device: torch.device) -> tuple[ArraySpec, Leaf]:
    """Spec and conversion of one array."""
    convert: Leaf
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)
        spec = ArraySpec((n,))

        def convert(x: Any) -> Tensor:
            index = torch.from_numpy(x.astype(np.int64).reshape(-1, 1) - start)
            return torch.zeros(index.shape[0], n).scatter_(1, index, 1.0)

    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        shape = tuple(int(n) for n in space.shape)
        spec = ArraySpec(shape or (1,), torch.uint8 if space.dtype == np.uint8 and len(shape) > 1 else torch.float32)
        if not shape:
            convert = lambda x: torch.from_numpy(np.asarray(x, dtype=np.float32).reshape(-1, 1))  # noqa: E731
        elif spec.dtype == torch.uint8 or space.dtype == np.float32:
            convert = torch.from_numpy
        elif space.dtype == np.float64:
            convert = lambda x: torch.from_numpy(x).float()  # noqa: E731
        else:
            convert = lambda x: torch.from_numpy(x.astype(np.float32))  # noqa: E731
    else:
        raise EnvError(
            f"env.id={id}: observation space {_short(space)} is not supported (Box, Discrete, MultiBinary, MultiDiscrete "
            "and dictionaries of them are); wrap the environment so that it answers arrays of a fixed shape"
        )
    if device.type == "cpu":
        return spec, convert
    return spec, lambda x: convert(x).to(device, non_blocking=True)


def _flatten(space: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": space}} -> {"a/b": space}, in the space's order."""
    out: dict[str, Any] = {}
    for name, leaf in space.items():
        if isinstance(leaf, Mapping | spaces.Dict):
            out |= _flatten(leaf, f"{prefix}{name}/")
        else:
            out[prefix + name] = leaf
    return out


def _at(obs: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        obs = obs[name]
    return obs


def _bound(x: float) -> float:
    """A bound as Python's float; what only float32 or float64's largest number bounds is unbounded."""
    return float(np.sign(x) * np.inf) if abs(x) >= 3.4e38 else float(x)


def _short(space: Any) -> str:
    text = repr(space)
    return text if len(text) <= 80 else f"{text[:77]}..."
