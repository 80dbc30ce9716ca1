"""Numbers of simulators' infos, which training logs as curves ``env/<name>``."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.observation_names import ACTION_MASK

# Entries that are read elsewhere.
_NO_NUMBERS = ("final_obs", "final_observation", "final_info", "terminal_observation", ACTION_MASK)
# Matches dictionaries whose names are left out (Isaac Lab, rsl_rl).
_GROUPS = r"(^|/)(?:log|extras)/"


def read_numbers(info: Any, num_envs: int) -> dict[str, Tensor]:
    """Return the numbers of a vector's info in new memory; everything else is ignored.

    Names are those of TensorBoard ("a/b" for nested dictionaries, "_" for other characters).

    Args:
        info: A dictionary, nested at most three times, of tensors, arrays, lists and numbers. A
            mask "_name" of Gymnasium's marks the environments that have an entry "name".
        num_envs: Number of environments, N.

    Returns:
        Name -> float32 [N], NaN for environments without the entry, or float32 [1] for a single
        number, which is a mean over environments.
    """
    numbers: dict[str, Tensor] = {}
    for path, number in _entries(info, num_envs):
        if tag := curve_name(path):
            numbers.setdefault(tag, number)
    return numbers


def _is_entry(name: Any) -> bool:
    """Return whether a key names an entry, and no mask."""
    return isinstance(name, str) and not name.startswith("_") and name not in _NO_NUMBERS


@functools.lru_cache(maxsize=4096)
def curve_name(path: str) -> str:
    """Return the name of the curve of an entry "a/b"."""
    return re.sub(r"[^\w./-]+", "_", re.sub(_GROUPS, r"\1", path)).strip("/_")[:100]


def _entries(
    info: Any, num_envs: int, path: str = "", mask: np.ndarray | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield "a/b" and the number, [N] or [1], of each entry of nested dictionaries."""
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if not _is_entry(name):
            continue
        here = info.get(f"_{name}")  # environments that have the entry
        if not (isinstance(here, np.ndarray) and here.dtype == bool and here.shape == (num_envs,)):
            here = mask  # of the dictionary, as in RecordEpisodeStatistics
        if not isinstance(value, np.ndarray) and isinstance(value, Mapping):
            if path.count("/") < 3:
                yield from _entries(value, num_envs, f"{path}{name}/", here)
            continue
        number = to_numbers(value, num_envs)
        if number is None:
            continue
        if here is not None and len(number) == num_envs and not here.all():
            number = number.where(torch.from_numpy(here).to(number.device), torch.nan)
        yield path + name, number


def merge_final(
    now: dict[str, Tensor], last: dict[str, Tensor], ended: Tensor
) -> dict[str, Tensor]:
    """Return the numbers of the executed step, where the infos are those after a reset.

    Args:
        now: Numbers of the info, [N] or [1] each.
        last: Numbers of the last steps of the episodes that ended.
        ended: bool [N].
    """
    merged = dict(now)
    for name in (now | last) if last else ():
        x, final = (part.get(name) for part in (now, last))
        if any(part is not None and len(part) != len(ended) for part in (x, final)):
            continue
        fill = torch.full(ended.shape, torch.nan, device=ended.device)
        x, final = (fill if part is None else part.to(ended.device) for part in (x, final))
        merged[name] = torch.where(ended, final, x)
    return merged


def single_numbers(info: Any) -> dict[str, float]:
    """Return the numbers of one environment's info by their paths "a/b".

    Gymnasium's vectors fail if an entry has another shape or type in another environment, and round
    a float where the first environment has returned an integer.
    """
    numbers: dict[str, float] = {}
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, float | np.floating) and _is_entry(name):  # most are
            numbers[name] = float(value)
        else:
            numbers |= {path: float(number[0]) for path, number in _entries({name: value}, 1)}
    return numbers


def to_numbers(value: Any, num_envs: int) -> Tensor | None:
    """Return N numbers or one as float32 [N] or [1] in new memory; None for other values."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if isinstance(value, Tensor):
            if value.is_complex() or value.numel() not in (1, num_envs):
                return None
            return value.detach().reshape(-1).to(torch.float32, copy=True)
        if not isinstance(value, bool | int | float | np.ndarray | np.generic | list | tuple):
            return None
        array = np.asarray(value)
        if array.dtype == object:  # numbers of some environments
            array = np.array([_float(x) for x in array.reshape(-1)])
        if array.dtype.kind in "biuf" and array.size in (1, num_envs):
            return torch.from_numpy(array.reshape(-1).astype(np.float32))
    return None


def _float(value: Any) -> float:
    """Return a number as a float, anything else as NaN."""
    return float(value) if isinstance(value, bool | int | float | np.number | np.bool_) else np.nan
