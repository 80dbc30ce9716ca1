"""Conversion of Gymnasium's spaces to our specs, and of observations and actions to tensors."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from embodied_envs import types
from embodied_envs.adapters.actions import mapper
from embodied_envs.base import images
from embodied_envs.base.errors import EnvError, choose, show
from embodied_envs.base.observation_names import ACTION_MASK, names_observation
from embodied_envs.types import ActionSpec, ArraySpec, Box, Composite, Discrete, Obs, ObsSpec

Leaf = Callable[[Any], Tensor]
# Names of observations of simulation only: privileged_state (Playground), critic (Isaac Lab).
PRIVILEGED = re.compile(r"(^|[_/.])(privileged|priv|critic)([_/.]|$)", re.IGNORECASE)


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
    prefix, fault = f"env.id={id}: env.obs_keys (or model.actor_obs, model.critic_obs)", ""
    unknown = [key for key in keys if not any(names_observation(key, name) for name in names)]
    if not names:
        named = ", ".join(keys) or "nothing"
        fault = f" names {named}: its observation is one array; leave the option out"
    elif not keys:
        fault = f"=[] selects nothing; write null for all, or some of [{','.join(groups)}]"
    elif unknown:
        known = choose(unknown[0], groups, "it has ")
        fault = f": {unknown[0]!r} is not in its observation; {known}"
    if fault:
        raise EnvError(f"{prefix}{fault}")
    return [name for name in names if any(names_observation(key, name) for key in keys)]


def _undecided(groups: list[str], privileged: list[str], id: str) -> EnvError:
    """Return the error for privileged observations that no option assigns to a network."""
    secret = list(dict.fromkeys(name.partition("/")[0] for name in privileged))
    actor = ",".join(group for group in groups if group not in secret)
    if not 0 < len(actor) <= 100:
        actor = "NAME,NAME"
    return EnvError(
        f"env.id={id}: its observation has {privileged[0]}, which exists in simulation only, and no"
        f" option names the networks that read it; write model.actor_obs=[{actor}]"
        f" model.critic_obs=[{','.join([actor, *secret])}] (with model.policy=actor_critic), or"
        f" env.obs_keys=[{actor}] to leave it out"
    )


def observations(
    space: Any,
    *,
    id: str,
    device: torch.device,
    keys: Sequence[str] | None = None,
    choices: tuple[int, ...] = (),
    new_arrays: bool = False,
    image_layout: str | None = None,
    keep_float64: bool = False,
) -> tuple[ObsSpec, dict[str, Leaf]]:
    """Return the spec of one observation, and conversions of its arrays to tensors.

    float32                        unchanged
    float64, integers, bool        float32
    MultiBinary, MultiDiscrete     float32
    uint8, 2 or more dimensions    uint8, unchanged
    uint8, 0 or 1 dimension        float32
    Discrete(n)                    float32 [n], one-hot
    numbers, shape ()              float32 [1]
    dictionary, Tuple              dict[str, Tensor] with flat names: {"a": {"b": x}} is {"a/b": x},
                                   and entry i of a Tuple has the name "item<i>"
    entry "action_mask"            bool [K] where actions are choices (K values in total). ``keys``
                                   always contains it

    The tensors are new memory: the simulator may change its arrays afterwards.

    Args:
        space: Gymnasium's space of one observation, or a dictionary of spaces.
        id: ``env.id``, for messages.
        device: Where the tensors are created.
        keys: Entries of a dictionary to select, see ``select_observations``.
        choices: Values of each choice of an action, ``choices_of``.
        new_arrays: Whether the simulator never changes an array that it has returned, so that
            tensors may share its memory.
        image_layout: ``env.image_layout``, see ``images.decide``.
        keep_float64: Whether vectors of float64, or of integers above 2^24, whose bounds exceed
            ``COARSE``, stay float64. Numbers below it are rounded to float32 nevertheless.

    Returns:
        The spec, and for each name (one array has the name "") a function from numpy [N, ..] to a
        tensor [N, ..].

    Raises:
        EnvError: A space has no fixed shape (Text, Sequence, Graph), or ``keys`` is wrong.
    """
    flat, nested = flatten(space), is_nested(space)
    if not flat:
        raise EnvError(f"wrap the environment to observe something: env.id={id} observes nothing")
    if choices and any(name.startswith(f"{ACTION_MASK}/") for name in flat):
        kind = type(space[ACTION_MASK]).__name__
        raise EnvError(
            f"env.id={id}: return action_mask as one array, np.concatenate of the masks of all"
            f" choices in their order (docs/tasks.md); it is a {kind}"
        )
    has_mask = bool(choices) and ACTION_MASK in flat
    public = [name for name in flat if name and not (has_mask and name == ACTION_MASK)]
    specs: dict[str, ArraySpec] = {}
    leaves: dict[str, Leaf] = {}
    for name in select_observations(public, keys, id=id) if nested else [""]:
        label = f"{id}, observation {name!r}" if name else id
        specs[name], leaf = _leaf(flat[name], label, new_arrays, image_layout, keep_float64)
        leaves[name] = leaf
        if device.type != "cpu":
            leaves[name] = lambda x, leaf=leaf: leaf(x).to(device, non_blocking=True)
    if has_mask:
        mask = _mask(flat[ACTION_MASK], choices, id=id, device=device)
        specs[ACTION_MASK], leaves[ACTION_MASK] = mask
    if not nested:
        select_observations((), keys, id=id)
        return specs[""], leaves
    return specs, leaves


def reader(leaves: dict[str, Leaf]) -> Callable[[Any], Obs]:
    """Return a function that converts a batch of observations to tensors.

    The batch is an array if the only name is "", else nested dictionaries of arrays.
    """
    if "" in leaves:
        return leaves[""]
    return lambda obs: {name: leaf(entry(obs, name)) for name, leaf in leaves.items()}


def entry(nested: Any, name: str) -> Any:
    """Return the entry "a/b" of nested dictionaries and tuples, whose keys may contain a slash.

    None: there is no such entry.
    """
    if isinstance(nested, Mapping) and name in nested:
        return nested[name]
    first, _, last = name.partition("/")
    try:
        value = nested[int(first[4:])] if isinstance(nested, tuple | list) else nested[first]
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    return entry(value, last) if last else value


@dataclass(frozen=True)
class ActionArray:
    """One array of the simulator's action: columns ``first`` .. of the choices or numbers.

    Attributes:
        space: Discrete, MultiDiscrete, MultiBinary or Box.
        shape: Shape of the array in one environment.
        dtype: Its dtype.
        first: Its first column among the choices, or among the numbers.
        choices: Values of each choice, flattened; empty for numbers.
        low: Lowest value of each element, in the simulator's units, flattened.
        high: Highest value of each element.
    """

    space: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    choices: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def limits(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the bounds of whole numbers, int64 [size] each."""
        low, high = (
            # Bounds of uint64 may be above the largest int64.
            np.clip(x.astype(object), -(2**63), 2**63 - 1).astype(np.int64).reshape(-1)
            for x in (self.space.low, self.space.high)
        )
        return torch.from_numpy(low).to(device), torch.from_numpy(high).to(device)


class ActionConverter:
    """Converts the policy's actions to those of a Gymnasium space, or of our ``Box``.

    The results are new memory, which the simulator may change, and every row of them is in the
    space unless ``mapping`` is none.

    Box               float32 [N, A] through ``mapping`` (see actions.mapper), then reshaped to
                      [N, *shape]; rounded and clipped if the space contains integers
    Discrete          int64 [N], plus the space's ``start``
    MultiDiscrete, MultiBinary, Tuple and Dict of all these
                      a ``Composite`` (float32 [N, D + A], choices first), or a ``Box`` if there are
                      no choices

    All arrays have the dtype of their space, and are new memory.
    """

    def __init__(self, space: Any, *, id: str, mapping: str, device: torch.device) -> None:
        """Read the space.

        Args:
            space: Gymnasium's space of one action.
            id: ``env.id``, for messages.
            mapping: ``env.action_mapping``.
            device: Device of the policy's actions.

        Raises:
            EnvError: The space, or a part of it, is another one, or is empty.
        """
        self.space = space
        # Name -> array, in the order of the space; a single one has the name "".
        self.arrays: dict[str, ActionArray] = {}
        self._starts: dict[str, Tensor] = {}  # of choices
        self._limits: dict[str, tuple[Tensor, Tensor]] = {}  # of whole numbers
        choices, numbers, rounded = list[int](), list[tuple[float, float]](), list[str]()
        names: dict[bool, list[str]] = {True: [], False: []}  # of choices, and of numbers
        for name, leaf in flatten(space).items():
            array = _action_array(leaf, name, len(choices), len(numbers), id)
            self.arrays[name], label = array, name or "action"
            columns = [f"{label}[{i}]" for i in range(len(array.low))] if array.shape else [label]
            names[bool(array.choices)] += columns
            choices += array.choices
            if array.choices:
                start = torch.tensor(array.low, dtype=torch.int64, device=device)
                self._starts[name] = start.reshape(array.shape)
                continue
            numbers += zip(array.low, array.high, strict=True)
            if not array.dtype.is_floating_point:
                rounded.append(label)
                self._limits[name] = array.limits(device)
        if not choices and not numbers:
            raise EnvError(f"wrap env.id={id} to take an action: {_short(space)} is empty")
        if rounded:
            warnings.warn(
                f"env.id={id}: {', '.join(rounded)} is a Box of integers: the policy's numbers are"
                " rounded to the nearest one and clipped to its bounds",
                stacklevel=2,
            )
        box = Box(*(tuple(x[i] for x in numbers) for i in (0, 1)))
        self.spec: ActionSpec = Composite(tuple(choices), box, tuple(names[True] + names[False]))
        if not choices:
            self.spec = box
        elif isinstance(space, spaces.Discrete):
            self.spec = Discrete(choices[0])
        self._choices, self._map = len(choices), mapper(mapping, box, device, id=id)

    def function(self) -> Callable[[Tensor], Any]:
        """Return ``__call__``, or an equal function without conversions that change nothing."""
        array = next(iter(self.arrays.values()))
        if isinstance(self.space, spaces.Discrete) and array.dtype == torch.int64:
            start = int(self.space.start)
            return lambda action: action + start
        elif isinstance(self.space, spaces.Box) and len(array.shape) == 1:
            if array.dtype.is_floating_point:
                return lambda action: self._map(action).to(array.dtype)
        return self

    @property
    def structure(self) -> Any:
        """Names of the arrays in the structure of the space."""
        return nest(self.space, {name: name for name in self.arrays})

    def __call__(self, action: Tensor) -> Any:
        """Return the simulator's actions [N, ..] of the policy's: an array, or nested ones."""
        return nest(self.space, self.split(action))

    def split(self, action: Tensor) -> dict[str, Tensor]:
        """Return the arrays [N, ..] of the policy's actions [N, ..] by name."""
        if isinstance(self.spec, Discrete):
            action = action.unsqueeze(-1)
        choices, numbers = action[..., : self._choices], action[..., self._choices :]
        numbers = self._map(numbers) if not isinstance(self.spec, Discrete) else numbers
        result: dict[str, Tensor] = {}
        for name, array in self.arrays.items():
            part = slice(array.first, array.first + len(array.low))
            x = (choices if array.choices else numbers)[..., part]
            if array.choices:
                x = x.long()
            elif name in self._limits:
                x = x.round().long().clamp(*self._limits[name])
            x = x.unflatten(-1, array.shape) if array.shape else x[..., 0]
            if name in self._starts:
                x = x + self._starts[name]
            result[name] = x.to(array.dtype)
        return result


def check_seeds(id: str, seeds: list[int], num_envs: int) -> None:
    """Raise EnvError unless ``seeds`` has ``num_envs`` entries in [0, 2**31)."""
    if len(seeds) != num_envs:
        raise EnvError(f"give one each: env.id={id}: {len(seeds)} seeds for {num_envs}")
    if invalid := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise EnvError(f"env.id={id}: seed {invalid[0]} must be in [0, 2**31), as simulators do")


def action_shape(spec: ActionSpec, num_envs: int) -> torch.Size:
    """Return the shape of one step's actions: [N, A] or [N]."""
    return torch.Size([num_envs] if isinstance(spec, Discrete) else [num_envs, spec.size])


def check_action(id: str, action: Tensor, shape: torch.Size) -> None:
    """Raise EnvError for actions of another shape, which C++ simulators do not detect."""
    if action.shape != shape:
        raise EnvError(
            f"env.id={id}: actions of shape {list(action.shape)}; it takes {list(shape)}"
        )


def _mask(
    space: Any, choices: tuple[int, ...], *, id: str, device: torch.device
) -> tuple[ArraySpec, Leaf]:
    """Return spec and conversion of the mask of choices, which are concatenated."""
    size, shape = sum(choices), getattr(space, "shape", None)
    if shape is None or math.prod(shape) != size:
        raise EnvError(
            f"env.id={id}: return action_mask with {size} entries, those of all {len(choices)}"
            f" choices; its space is {_short(space)}"
        )

    def convert(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(x).reshape(-1, size) != 0).to(device)

    return ArraySpec((size,), torch.bool), convert


def _action_array(space: Any, name: str, choices: int, numbers: int, id: str) -> ActionArray:
    """Return the description of a part of an action, after so many choices and numbers."""
    if isinstance(space, spaces.Discrete):
        start, sizes = np.array([space.start]), np.array([space.n])
    elif isinstance(space, spaces.MultiDiscrete):
        start, sizes = (np.asarray(x).reshape(-1) for x in (space.start, space.nvec))
    elif isinstance(space, spaces.MultiBinary):
        sizes = np.full(math.prod(space.shape), 2)
        start = np.zeros_like(sizes)
    elif isinstance(space, Box):
        return ActionArray(space, (space.size,), torch.float32, numbers, (), space.low, space.high)
    elif isinstance(space, spaces.Box):
        infinite = 3.4e38
        if not np.issubdtype(space.dtype, np.floating):
            # The extreme values of a wide type stand for a missing bound, as those of floats do.
            info = np.iinfo(space.dtype)
            infinite = float(info.max) if info.bits >= 32 else np.inf
        low, high = (
            tuple(_bound(float(x), infinite) for x in np.asarray(bound).reshape(-1))
            for bound in (space.low, space.high)
        )
        return ActionArray(space, space.shape, _torch_dtype(space.dtype), numbers, (), low, high)
    else:
        part = f" of {name!r}" if name else ""
        raise _unsupported(id, "gymnasium.ActionWrapper", f"action space {_short(space)}{part}")
    return ActionArray(
        space,
        tuple(space.shape or ()),
        _torch_dtype(space.dtype),
        choices,
        tuple(map(int, sizes)),
        tuple(map(float, start)),
        tuple(map(float, start + sizes - 1)),
    )


def _unsupported(id: str, wrapper: str, space: str) -> EnvError:
    """Return the error for a space that is none of those that the adapters read."""
    return EnvError(
        f"env.id={id}: wrap the environment in a {wrapper} with a Box, Discrete, MultiDiscrete or"
        f" MultiBinary, or a Dict or Tuple of them; {space} is not supported"
    )


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(1, dtype)).dtype


def _leaf(
    space: Any, id: str, new_arrays: bool, image_layout: str | None, keep_float64: bool
) -> tuple[ArraySpec, Leaf]:
    """Return spec and conversion of one array."""
    if isinstance(space, spaces.Discrete):
        spec, convert = ArraySpec((int(space.n),)), _one_hot(int(space.n), int(space.start), id)
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        shape = tuple(int(n) for n in space.shape)
        is_bytes = space.dtype == np.uint8 and len(shape) > 1
        dtype = torch.uint8 if is_bytes else torch.float32
        low, high = _range(space)
        image = images.decide(
            shape, dtype, low=low, high=high, layout=image_layout, name=f"env.id={id}: observation"
        )
        if is_bytes and image_layout is None:
            image = None  # as the spec itself decides
        integers = np.issubdtype(space.dtype, np.integer)
        limit = 2**24 if integers else types.COARSE if space.dtype == np.float64 else np.inf
        is_wide = keep_float64 and image is None and max(abs(low), abs(high)) > limit
        dtype = torch.float64 if is_wide else dtype
        spec = ArraySpec(shape or (1,), dtype, image)
        is_unchanged = is_bytes or space.dtype == np.float32
        own = torch.from_numpy if new_arrays else lambda x: torch.from_numpy(np.array(x, order="C"))
        # With cold CPU caches after a simulator step, a conversion by torch takes 50 % longer.
        change = own if is_unchanged else lambda x: torch.from_numpy(x.astype(np.float32))
        convert = _keep_large if is_wide else change if shape else _numbers
    else:
        space = f"observation space {_short(space)}"
        raise _unsupported(id, "gymnasium.ObservationWrapper", space)
    return spec, convert


def _range(space: Any) -> tuple[float, float]:
    """Return the smallest and largest number of a space of arrays."""
    if isinstance(space, spaces.Box):
        empty = not space.low.size
        return (0.0, 0.0) if empty else (float(np.min(space.low)), float(np.max(space.high)))
    return 0.0, 1.0 if isinstance(space, spaces.MultiBinary) else float(np.max(space.nvec))


def _keep_large(x: np.ndarray) -> Tensor:
    """Convert to float64; numbers below COARSE are those of float32, as in other observations."""
    y = np.array(x, dtype=np.float64).reshape(len(x), *np.shape(x)[1:] or (1,))
    return torch.from_numpy(np.where(np.abs(y) < types.COARSE, y.astype(np.float32), y))


def _numbers(x: np.ndarray) -> Tensor:
    """Convert [N] to float32 [N, 1]."""
    return torch.from_numpy(np.array(x, dtype=np.float32).reshape(-1, 1))


def _one_hot(n: int, start: int, id: str) -> Leaf:
    """Return a conversion of integers [N] >= ``start`` to float32 [N, n]."""

    def convert(x: np.ndarray) -> Tensor:
        index = torch.from_numpy(x.astype(np.int64).reshape(-1, 1) - start)
        if wrong := x[(x < start) | (x >= start + n)].tolist():
            raise EnvError(f"return {start} to {start + n - 1}: env.id={id} returned {wrong[0]}")
        return torch.zeros(index.shape[0], n).scatter_(1, index, 1.0)

    return convert


def flatten(space: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"a/b": space} of {"a": {"b": space}}, in the space's order.

    Entry i of a tuple has the name "item<i>"; a space that is not nested has the name "".
    """
    if not is_nested(space):
        return {prefix.removesuffix("/"): space}
    if not isinstance(space, Mapping | spaces.Dict):
        space = {f"item{i}": leaf for i, leaf in enumerate(space)}
    flat: dict[str, Any] = {}
    for name, leaf in space.items():
        parts = flatten(leaf, f"{prefix}{name}/")
        if common := flat.keys() & parts.keys():
            raise EnvError(
                f"rename an entry of the space: {show(min(common))} is both a name with a slash"
                " and an entry of a nested dictionary"
            )
        flat |= parts
    return flat


def nest(space: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return values by name, see ``flatten``, in the structure of a space."""
    if isinstance(space, Mapping | spaces.Dict):
        return {name: nest(x, values, f"{prefix}{name}/") for name, x in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(x, values, f"{prefix}item{i}/") for i, x in enumerate(space))
    return values[prefix.removesuffix("/")]


def is_nested(space: Any) -> bool:
    """Return whether a space, or a value, is a dictionary or a tuple."""
    return isinstance(space, Mapping | spaces.Dict | spaces.Tuple | tuple)


def _bound(x: float, infinite: float) -> float:
    """Return a bound; from ``infinite`` on, the largest number of its type, it is infinity."""
    return float(np.sign(x) * np.inf) if abs(x) >= infinite else x


def _short(space: Any) -> str:
    text = " ".join(repr(space).split())
    return text if len(text) <= 80 else type(space).__name__
