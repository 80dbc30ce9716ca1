"""Files with a normaliser of observations that is kept beside the policy (normalizer=FILE)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy.imported import (
    REWARD_CLIP,
    Normalizer,
    ValueScale,
    number,
    running_statistics,
    value_scale,
)
from embodied_ppo.tools.import_policy.untrusted_files import (
    Record,
    entries,
    label_of,
    read_npz,
    read_pickle,
    refusing_damage,
    shown,
)

NONE = Path("none")
"""Value of normalizer=.. where the training normalised no observations."""


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
    label = f"normalizer={label_of(path)}"
    with refusing_damage(label):
        return _read(path, label, eps, clip)


def _read(
    path: Path, label: str, eps: float, clip: float | None
) -> tuple[Normalizer | None, ValueScale | None]:
    if path.suffix == ".npz":
        arrays = read_npz(path, label)
        scale = None
        if "return_var" in arrays:
            var, count = arrays["return_var"], arrays.get("return_count")
            scale = value_scale(var, count, 1e-8, REWARD_CLIP, label)
        return _statistics(arrays, label, eps, clip), scale
    value = read_pickle(path, label)
    values = entries(value)
    if values is None:
        raise ConfigError(
            "name the file of VecNormalize.save, or of np.savez(FILE, mean=.., var=.., count=..):"
            f" {label} holds a {type(value).__name__}"
        )
    if "obs_rms" not in values and "norm_obs" not in values:
        values = _without_epsilon(values) if isinstance(value, Record) else values
        return _statistics(values, label, eps, clip), None
    eps = number(values.get("epsilon", eps), label, "epsilon")
    normalizer, scale = None, None
    if values.get("norm_obs", True):
        rms = values.get("obs_rms")
        if isinstance(rms, Mapping):
            names = shown(", ".join(map(str, rms)))
            raise ConfigError(
                f"name a policy that reads one vector: {label} normalises {len(rms):,} observations"
                f" by name, {names}"
            )
        bound = number(values.get("clip_obs", clip), label, "clip_obs")
        normalizer = _statistics(_without_epsilon(entries(rms) or {}), label, eps, bound)
    if values.get("norm_reward", False):
        returns = entries(values.get("ret_rms")) or {}
        bound = number(values.get("clip_reward"), label, "clip_reward")
        scale = value_scale(returns.get("var"), returns.get("count"), eps, bound, label)
    return normalizer, scale


def _without_epsilon(rms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a ``RunningMeanStd``, whose epsilon is the count at its start."""
    return {name: x for name, x in rms.items() if name != "epsilon"}


def _statistics(
    values: Mapping[str, Any], label: str, eps: float, clip: float | None
) -> Normalizer:
    """Return the normaliser of mean, var and count, and of epsilon and clip where given."""
    if missing := [name for name in ("mean", "var", "count") if name not in values]:
        raise ConfigError(
            "save mean, var and count with np.savez(FILE, mean=.., var=.., count=..):"
            f" {label} has no {missing[0]}"
        )
    return running_statistics(
        *(values["mean"], values["var"], values["count"], label),
        eps=number(values.get("epsilon", eps), label, "epsilon"),
        clip=number(values["clip"], label, "clip") if "clip" in values else clip,
    )
