"""Options of earlier versions that run directories contain: what replaces them, and which values of
a stored run have the effect that is now the only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embodied_envs.base.errors import ConfigError, show


@dataclass(frozen=True)
class Removed:
    """An option that no longer exists.

    Attributes:
        hint: What to write instead, or why nothing has to be written.
        accepted: Values of a stored run that need no replacement; None: all.
        same_as: Option whose value is accepted, too.
    """

    hint: str
    accepted: Sequence[Any] | None = None
    same_as: str | None = None

    def accepts(self, value: Any, options: Mapping[str, Any]) -> bool:
        """Return whether a stored run with this value and these other options can continue."""
        if self.same_as is not None and value == options.get(self.same_as):
            return True
        return self.accepted is None or value in self.accepted


def _read() -> dict[str, Removed]:
    """Read removed.yaml."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text).items()
    return {path: Removed(**(x if isinstance(x, dict) else {"hint": x})) for path, x in entries}


# Options that were removed after runs were written with them, by path.
REMOVED = _read()


def without_removed(options: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return stored options, path -> value, without those of earlier versions.

    Args:
        options: All options of a layer.
        label: The layer, for messages.

    Raises:
        ConfigError: A removed option has a value with another effect.
    """
    current = {path: value for path, value in options.items() if path not in REMOVED}
    for path in options.keys() & REMOVED.keys():
        if not REMOVED[path].accepts(options[path], options):
            raise ConfigError(
                f"use the version that trained the run: {path} = {show(options[path])} ({label})"
                f" was removed; in new runs {REMOVED[path].hint}"
            )
    return current | _merged(options)


def _merged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that replace two of earlier versions."""
    merged: dict[str, Any] = {}
    if (file := options.get("reward.path")) is not None:
        merged["reward.grader"] = f"{file}:{options.get('reward.name', 'compute_score')}"
    if options.get("model.std_function") == "softplus" and options["model.state_dependent_std"]:
        merged["model.state_dependent_std"] = "softplus"
    if std_eps := options.get("model.obs_std_eps"):
        merged["model.obs_eps"] = [options["model.obs_eps"], std_eps]
    if "algorithm.adam_beta1" in options:
        merged["algorithm.adam_betas"] = [options[f"algorithm.adam_beta{i}"] for i in (1, 2)]
    if options.get("algorithm.chunk_reward") == "sum":
        merged["algorithm.reward_type"] = "chunk_sum"
    for name, by in (("reward_shift", "mean"), ("reward_scale", "std")):
        if options.get(f"algorithm.{name}") and options["algorithm.reward_norm"] != "running":
            merged["algorithm.reward_norm_by"] = by
    if options.get("algorithm.entropy_end", 1.0) != 1.0:
        merged["algorithm.entropy_schedule"] = "linear"
    # The bound fell during the run: weights respect it, and a resumed run has the first one.
    if isinstance(bound := options.get("model.max_log_std"), list | tuple):
        merged["model.max_log_std"] = bound[0]
    return merged
