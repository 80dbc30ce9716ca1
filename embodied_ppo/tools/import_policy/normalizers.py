"""Files with a normaliser of observations that is kept beside the policy (normalizer=FILE)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import imported, untrusted_files

# Value of normalizer=.. where the training normalised no observations.
NONE = Path("none")
# ``Normalizer.eps`` and ``Normalizer.clip`` if the file does not contain them.
EPS, CLIP = 1e-8, 10.0


def read_normalizer(
    path: Path | None,
) -> tuple[imported.Normalizer | None, imported.ValueScale | None]:
    """Read statistics of observations, and those of returns where the file has them.

    The file is that of ``VecNormalize.save``; a pickle of ``obs_rms`` of Gymnasium's
    ``NormalizeObservation``, or of a dictionary; or one of ``numpy.savez``, with mean, var, count
    and, optional, epsilon, clip, return_var and return_count (of ``NormalizeReward``).

    Args:
        path: The file; without statistics if it is None or ``NONE``.

    Raises:
        ConfigError: The file cannot be read, or has no such statistics.
    """
    if path is None or path == NONE:
        return None, None
    label = f"normalizer={untrusted_files.label_of(path)}"
    with untrusted_files.refusing_damage(label):
        return _read(path, label)


def _read(path: Path, label: str) -> tuple[imported.Normalizer | None, imported.ValueScale | None]:
    if path.suffix == ".npz":
        arrays = untrusted_files.read_npz(path, label)
        scale = None
        if "return_var" in arrays:
            var, count = arrays["return_var"], arrays.get("return_count")
            scale = imported.value_scale(var, count, EPS, imported.REWARD_CLIP, label)
        return _statistics(arrays, label), scale
    value = untrusted_files.read_pickle(path, label)
    values = untrusted_files.entries(value)
    if values is None:
        raise ConfigError(
            "name the file of VecNormalize.save, or of np.savez(FILE, mean=.., var=.., count=..):"
            f" {label} holds a {type(value).__name__}"
        )
    if "obs_rms" not in values and "norm_obs" not in values:
        # The epsilon of a ``RunningMeanStd`` is the count at its start.
        own = {"epsilon": EPS} if isinstance(value, untrusted_files.Record) else {}
        return _statistics(values | own, label), None
    eps = imported.number(values.get("epsilon", EPS), label, "epsilon")
    normalizer, scale = None, None
    if values.get("norm_obs", True):
        rms = values.get("obs_rms")
        if isinstance(rms, Mapping):
            names = untrusted_files.shown(", ".join(map(str, rms)))
            raise ConfigError(
                f"name a policy that reads one vector: {label} normalises {len(rms):,} observations"
                f" by name, {names}"
            )
        bound = imported.number(values.get("clip_obs", CLIP), label, "clip_obs")
        statistics = (untrusted_files.entries(rms) or {}) | {"epsilon": eps, "clip": bound}
        normalizer = _statistics(statistics, label)
    if values.get("norm_reward", False):
        returns = untrusted_files.entries(values.get("ret_rms")) or {}
        bound = imported.number(values.get("clip_reward"), label, "clip_reward")
        scale = imported.value_scale(returns.get("var"), returns.get("count"), eps, bound, label)
    return normalizer, scale


def _statistics(values: Mapping[str, Any], label: str) -> imported.Normalizer:
    """Return the normaliser of mean, var and count, and of epsilon and clip where given."""
    if missing := [name for name in ("mean", "var", "count") if name not in values]:
        raise ConfigError(
            "save mean, var and count with np.savez(FILE, mean=.., var=.., count=..):"
            f" {label} has no {missing[0]}"
        )
    return imported.running_statistics(
        *(values["mean"], values["var"], values["count"], label),
        eps=imported.number(values.get("epsilon", EPS), label, "epsilon"),
        clip=imported.number(values.get("clip", CLIP), label, "clip"),
    )
