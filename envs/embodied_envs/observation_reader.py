"""Observations as a simulator or a robot returns them -> the tensors that a policy reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_ppo.core.types import ArraySpec, EnvError, Obs, ObsSpec


class ObservationReader:
    """Converts observations outside of a training environment as the environment's adapter does.

    Numpy arrays and numbers are what the simulator returns (float64, indices of a ``Discrete``
    space, nested dictionaries). Tensors are what ``VectorEnv`` returns. Both have one observation,
    or N of them with the dimension N first.
    """

    def __init__(self, env: Any) -> None:
        """Keep what describes the observations of ``env``, which may be closed afterwards.

        Args:
            env: A ``VectorEnv``.
        """
        while hasattr(env, "env"):  # of ``ChunkedActions`` and ``HistoryEnv``
            env = env.env
        self.id: str = env.id
        self.spec: ObsSpec = env.obs_spec
        self._specs = self.spec if isinstance(self.spec, dict) else {"": self.spec}
        self._leaves: dict[str, spaces.Leaf] = getattr(env, "leaves", {})
        space = getattr(env, "observation_space", None)
        is_dict = isinstance(self.spec, dict)
        flat = {} if space is None else spaces.flatten(space) if is_dict else {"": space}
        self._dims = {
            name: len((flat[name].shape or ()) if name in flat else spec.shape)
            for name, spec in self._specs.items()
        }
        """Dimensions of one observation as the simulator returns it."""

    def __call__(self, obs: Any) -> tuple[Obs, bool]:
        """Convert observations.

        Args:
            obs: An array or tensor, or a dictionary of them, nested or with names "a/b". Entries
                that the policy does not read may be missing.

        Returns:
            Tensors [N, ..], and whether ``obs`` has the dimension N (False: N is 1).

        Raises:
            EnvError: An entry is missing, or has another shape.
        """
        if isinstance(obs, Mapping) != isinstance(self.spec, dict):
            expected = ", ".join(self._specs) if isinstance(self.spec, dict) else "one array"
            given = ", ".join(map(str, obs)) if isinstance(obs, Mapping) else "one array"
            raise EnvError(f"env.id={self.id}: obs is {given}; the policy reads {expected}")
        flat = _flatten(obs) if isinstance(obs, Mapping) else {"": obs}
        tensors: dict[str, Tensor] = {}
        batched: dict[str, bool] = {}
        for name, spec in self._specs.items():
            if name not in flat:
                raise EnvError(
                    f"env.id={self.id}: obs has no {name!r}, it has {', '.join(flat) or 'nothing'};"
                    f" the policy reads {', '.join(self._specs)}"
                )
            tensors[name], batched[name] = self._convert(name, flat[name], spec)
        if len({len(x) for x in tensors.values()}) > 1 or len({*batched.values()}) > 1:
            shapes = ", ".join(f"{name} {list(np.shape(flat[name]))}" for name in tensors)
            raise EnvError(f"env.id={self.id}: obs has different numbers of observations: {shapes}")
        is_batched = next(iter(batched.values()))
        return (tensors if isinstance(self.spec, dict) else tensors[""]), is_batched

    def _convert(self, name: str, value: Any, spec: ArraySpec) -> tuple[Tensor, bool]:
        """Return a tensor [N, ..] and whether ``value`` has the dimension N."""
        if isinstance(value, Tensor):
            x, dims, leaf = value, len(spec.shape), None
        else:
            x = np.ascontiguousarray(value).reshape(np.shape(value))
            dims, leaf = self._dims[name], self._leaves.get(name)
        is_batched = x.ndim == dims + 1
        if is_batched or x.ndim == dims:
            rows = x if is_batched else x[None]
            tensor = leaf(rows) if leaf is not None else torch.as_tensor(rows)
            is_image = spec.dtype == torch.uint8
            if tensor.shape[1:] == spec.shape and (not is_image or tensor.dtype == torch.uint8):
                return tensor.to(spec.dtype), is_batched
        entry = f"obs[{name!r}]" if name else "obs"
        kind = str(spec.dtype).removeprefix("torch.")
        raise EnvError(
            f"env.id={self.id}: {entry} is {x.dtype} {list(x.shape)}; the policy reads {kind}"
            f" {list(spec.shape)}, or [N, ..] of them"
        )


def _flatten(obs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"a/b": x} of {"a": {"b": x}}."""
    flat: dict[str, Any] = {}
    for name, value in obs.items():
        is_dict = isinstance(value, Mapping)
        flat |= _flatten(value, f"{prefix}{name}/") if is_dict else {f"{prefix}{name}": value}
    return flat
