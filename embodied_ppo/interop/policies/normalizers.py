"""Files with a normaliser of observations that is kept beside the policy (normalizer=FILE)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.interop.policies.imported import REWARD_CLIP, Normalizer, ValueScale
from embodied_ppo.interop.policies.untrusted_files import Container, read_npz, read_pickle

NONE = Path("none")
"""Value of normalizer=.. where the training normalised no observations."""
VEC_NORMALIZE = "stable_baselines3.common.vec_env.vec_normalize.VecNormalize"
RUNNING_MEAN_STD = (
    "stable_baselines3.common.running_mean_std.RunningMeanStd",
    "gymnasium.wrappers.utils.RunningMeanStd",
    "gymnasium.wrappers.normalize.RunningMeanStd",
    "gym.wrappers.normalize.RunningMeanStd",
)
SPACES = tuple(
    f"{package}.spaces.{name}"
    for package in ("gymnasium", "gym")
    for name in ("box.Box", "discrete.Discrete", "dict.Dict", "multi_discrete.MultiDiscrete")
)
RANDOM = (
    *("numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor"),
    *("numpy.random._pcg64.PCG64", "numpy.random.bit_generator.SeedSequence"),
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
)
"""Random numbers of spaces; they are not read."""


def read_normalizer(
    path: Path, *, eps: float, clip: float | None
) -> tuple[Normalizer | None, ValueScale | None]:
    """Read statistics of observations, and those of returns where the file has them.

    The file is that of ``VecNormalize.save``; a pickle of ``obs_rms`` of Gymnasium's
    ``NormalizeObservation``, or of a dictionary; or one of ``numpy.savez``, with mean, var, count
    and, optional, epsilon, clip, return_var and return_count (of ``NormalizeReward``).

    Args:
        path: The file.
        eps: ``Normalizer.eps`` if the file does not contain it.
        clip: ``Normalizer.clip`` if the file does not contain it.

    Raises:
        ConfigError: The file cannot be read, or has no such statistics.
    """
    label = f"normalizer={path}"
    if path.suffix == ".npz":
        arrays = read_npz(path, label)
        scale = None
        if "return_var" in arrays:
            std = math.sqrt(_number(arrays["return_var"], label, "return_var") + 1e-8)
            count = _number(arrays.get("return_count"), label, "return_count")
            scale = ValueScale(std, count, reward_clip=REWARD_CLIP)
        return _statistics(arrays, label, eps, clip), scale
    value = read_pickle(path, label, (VEC_NORMALIZE, *RUNNING_MEAN_STD, *SPACES, *RANDOM))
    values = _values(value)
    if values is None:
        raise ConfigError(f"{label}: holds a {type(value).__name__} and no normaliser")
    if "obs_rms" not in values and "norm_obs" not in values:
        values = _without_epsilon(value) if isinstance(value, Container) else values
        return _statistics(values, label, eps, clip), None
    eps = _number(values.get("epsilon", eps), label, "epsilon")
    normalizer = None
    if values.get("norm_obs", True):
        rms = values.get("obs_rms")
        if isinstance(rms, Mapping):
            raise ConfigError(
                f"{label}: normalises {len(rms)} observations by name ({', '.join(map(str, rms))});"
                " only one vector can be imported"
            )
        bound = _number(values.get("clip_obs", clip), label, "clip_obs")
        normalizer = _statistics(_without_epsilon(rms), label, eps, bound)
    scale = None
    if values.get("norm_reward", False):
        returns = _values(values.get("ret_rms")) or {}
        var = _number(returns.get("var"), label, "ret_rms.var")
        scale = ValueScale(
            std=math.sqrt(var + eps),
            count=_number(returns.get("count"), label, "ret_rms.count"),
            reward_clip=_number(values.get("clip_reward"), label, "clip_reward"),
        )
    return normalizer, scale


def _values(value: Any) -> Mapping[str, Any] | None:
    """Return the attributes of an object, or the entries of a dictionary."""
    if isinstance(value, Container):
        return value.values
    return value if isinstance(value, Mapping) else None


def _without_epsilon(rms: Any) -> dict[str, Any]:
    """Return the attributes of a ``RunningMeanStd``, whose epsilon is the count at its start."""
    return {name: x for name, x in (_values(rms) or {}).items() if name != "epsilon"}


def _statistics(
    values: Mapping[str, Any], label: str, eps: float, clip: float | None
) -> Normalizer:
    """Return the normaliser of mean, var and count, and of epsilon and clip where given."""
    missing = [name for name in ("mean", "var", "count") if name not in values]
    if missing:
        raise ConfigError(
            f"{label}: has no {missing[0]}; save mean, var and count, np.savez(FILE, mean=..,"
            " var=.., count=..)"
        )
    bound = clip if "clip" not in values else _number(values["clip"], label, "clip")
    return Normalizer(
        _vector(values["mean"], label, "mean"),
        _vector(values["var"], label, "var"),
        _number(values["count"], label, "count"),
        eps=_number(values.get("epsilon", eps), label, "epsilon"),
        clip=bound,
    )


def _vector(value: Any, label: str, name: str) -> Tensor:
    """Return numbers as float64 [D]. Raises ConfigError."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise ConfigError(f"{label}: {name} is no array of numbers")
    return torch.from_numpy(np.array(value, dtype=np.float64)).flatten()


def _number(value: Any, label: str, name: str) -> float:
    """Return one number. Raises ConfigError."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iuf":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{label}: {name} is no number")
    return float(value)
