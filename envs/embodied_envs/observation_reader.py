"""Observations as a simulator or a robot returns them -> the tensors that a policy reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.adapters.base import Adapter
from embodied_envs.base import tree
from embodied_envs.base.action_mask import check_action_mask
from embodied_envs.base.errors import EnvError
from embodied_envs.types import ActionSpec, ArraySpec, Obs, ObsSpec, VectorEnv


class ObservationReader:
    """Converts observations outside of a training environment as the environment's adapter does.

    Numpy arrays and numbers are what the simulator returns (float64, indices of a ``Discrete``
    space, nested dictionaries). Tensors are what ``VectorEnv`` returns. Both have one observation,
    or N of them with the dimension N first.
    """

    def __init__(self, env: VectorEnv) -> None:
        """Keep what describes the observations of ``env``, which may be closed afterwards.

        Args:
            env: The simulators.
        """
        env = env.simulator  # without action chunks and history
        self.id: str = env.id
        self.spec: ObsSpec = env.obs_spec
        self._specs = tree.named(self.spec)
        self._leaves: dict[str, spaces.Leaf] = env.leaves if isinstance(env, Adapter) else {}
        self._action_spec: ActionSpec = env.action_spec
        space = env.observation_space
        self._spaces = {} if space is None else spaces.flatten(space)
        # Dimensions of one observation as the simulator returns it.
        self._dims = {
            name: len((self._spaces[name].shape or ()) if name in self._spaces else spec.shape)
            for name, spec in self._specs.items()
        }

    def __call__(self, obs: Any) -> tuple[Obs, bool]:
        """Convert observations.

        Args:
            obs: An array or tensor, or a dictionary or tuple of them, nested or with names "a/b".
                Entries that the policy does not read may be missing.

        Returns:
            Tensors [N, ..], and whether ``obs`` has the dimension N (False: N is 1).

        Raises:
            EnvError: An entry is missing, or has another shape.
        """
        is_dict = isinstance(self.spec, dict)
        # A list is one array, unless the policy reads several.
        is_nested = isinstance(obs, Mapping) or (is_dict and isinstance(obs, tuple | list))
        values: dict[str, Any] = dict.fromkeys(self._specs, obs)
        if is_nested:
            values = {name: spaces.entry(obs, name) for name in self._specs}
        if is_nested != is_dict or any(name and x is None for name, x in values.items()):
            given = (", ".join(spaces.flatten(obs)) or "nothing") if is_nested else "one array"
            wanted = ", ".join(self._specs) if is_dict else "one array"
            raise EnvError(f"env.id={self.id}: obs is {given}; the policy reads {wanted}")
        converted = {n: self._convert(n, values[n], spec) for n, spec in self._specs.items()}
        tensors = {name: x for name, (x, _) in converted.items()}
        batched = {is_batched for _, is_batched in converted.values()}
        if len({len(x) for x in tensors.values()}) > 1 or len(batched) > 1:
            shapes = ", ".join(f"{name} {list(np.shape(values[name]))}" for name in tensors)
            raise EnvError(f"env.id={self.id}: obs has different numbers of observations: {shapes}")
        if not len(next(iter(tensors.values()))):
            raise EnvError(f"env.id={self.id}: pass at least one observation; obs has 0 rows")
        result: Obs = tensors if is_dict else tensors[""]
        check_action_mask(self.id, self._action_spec, result)
        return result, batched.pop()

    def _check_choice(self, name: str, x: Any) -> None:
        """Raise EnvError where a choice of the simulator has a value that its space lacks."""
        space = self._spaces.get(name)
        if not isinstance(space, Discrete) or isinstance(x, Tensor) or x.dtype.kind not in "biuf":
            return
        low, high = int(space.start), int(space.start + space.n - 1)
        wrong = x[(x < low) | (x > high) | (x != np.round(x))]
        if wrong.size:
            raise EnvError(
                f"env.id={self.id}: obs{f'[{name!r}]' if name else ''} is {wrong[0]}; it must be a"
                f" whole number from {low} to {high}"
            )

    def _convert(self, name: str, value: Any, spec: ArraySpec) -> tuple[Tensor, bool]:
        """Return a tensor [N, ..] and whether ``value`` has the dimension N."""
        if isinstance(value, Tensor):
            x, dims, leaf = value, len(spec.shape), None
        else:
            try:
                x: Any = np.ascontiguousarray(value).reshape(np.shape(value))
            except (TypeError, ValueError):  # a list of lists of different lengths
                x = np.empty((), dtype=object)
            dims, leaf = self._dims[name], self._leaves.get(name)
        is_batched = x.ndim == dims + 1
        self._check_choice(name, x)
        if (is_batched or x.ndim == dims) and (leaf is None or x.dtype.kind in "biuf"):
            tensor = (leaf or torch.as_tensor)(x if is_batched else x[None])
            is_image = spec.dtype == torch.uint8
            if tensor.shape[1:] == spec.shape and (not is_image or tensor.dtype == torch.uint8):
                return tensor.to(spec.dtype), is_batched
        entry, kind = f"obs[{name!r}]" if name else "obs", str(spec.dtype).removeprefix("torch.")
        raise EnvError(
            f"env.id={self.id}: {entry} is {x.dtype} {list(x.shape)}; the policy reads {kind}"
            f" {list(spec.shape)}, or [N, ..] of them"
        )
