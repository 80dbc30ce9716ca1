"""openpi's training configurations: what openpi's directories do not record.

openpi's config.json contains sizes only. Whether actions are relative to the state, whether π0.5's
prompt contains the state, and which cameras exist is in its program, by the name of a
configuration.

Source: openpi at 15a9616, RLinf's additional names at a3816b5. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from embodied_envs.base.errors import ConfigError, choose


@dataclass(frozen=True)
class OpenPIConfig:
    """A training configuration.

    Attributes:
        horizon: Actions of a chunk.
        images: Number of cameras; 0: not known.
        asset: Folder of the statistics.
        delta: Dimensions of an action that are relative to the state.
        state: Whether the prompt of π0.5 contains the state (``discrete_state_input``).
        adapts: Whether ALOHA's joints and grippers are converted (``adapt_to_pi``).
    """

    horizon: int
    images: int
    asset: str
    delta: tuple[int, ...] = ()
    state: bool = False
    adapts: bool = False


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# Name of a configuration -> its values.
CONFIGS = {
    name: OpenPIConfig(**entry | {"delta": tuple(entry.get("delta", ()))})
    for name, entry in _TABLE.items()
}


def family(name: str) -> str:
    """Return pi0 or pi05, the kind of model of a configuration."""
    return "pi05" if name.startswith("pi05_") else "pi0"


def candidates(kind: str, horizon: int, asset: str | None) -> list[str]:
    """Return the names of the configurations that a directory may have been trained with.

    Args:
        kind: pi0 or pi05.
        horizon: Its ``action_horizon``.
        asset: Folder of its statistics, None: it has none.
    """
    key = kind, horizon, asset
    return [name for name, c in CONFIGS.items() if (family(name), c.horizon, c.asset) == key]


def check(name: str, checkpoint: str) -> None:
    """Refuse a model.config_name that is unknown, or of another model than ``checkpoint``.

    Only config.json and the keys of the weights are read. What cannot be read is accepted: the
    reader of the directory reports it.

    Raises:
        ConfigError: See above.
    """
    label, kind, raw = f"model.checkpoint={checkpoint}", None, {}
    if checkpoint.startswith("published/"):
        kind = checkpoint.removeprefix("published/")
    with contextlib.suppress(OSError, ValueError, TypeError):
        raw = dict(json.loads((Path(checkpoint) / "config.json").read_text()))
        keys = [key for file in Path(checkpoint).glob("*.safetensors") for key in _keys(file)]
        kind = kind_of(keys) if keys else None
    if "type" in raw or "model_type" in raw:
        raise ConfigError(
            f"remove model.config_name={name}: {label} is no directory of openpi and records how it"
            " was trained (model.delta_actions and model.discrete_state_input replace that)"
        )
    find(name, kind, label)


def _keys(file: Path) -> list[str]:
    """Return the keys of a safetensors file: 8 bytes of length, then JSON with the keys."""
    with open(file, "rb") as f:
        return list(json.loads(f.read(min(int.from_bytes(f.read(8), "little"), 10**8))))


def kind_of(keys: Iterable[str]) -> str:
    """Return pi0 or pi05, the kind of a model with weights of these keys."""
    return "pi05" if any("time_mlp_in" in key.split(".") for key in keys) else "pi0"


def find(name: str, kind: str | None, label: str) -> OpenPIConfig:
    """Return the configuration of a name.

    Args:
        name: Its name.
        kind: Kind of the model in the checkpoint directory, None: it is not known.
        label: Option and value of the directory, for messages.

    Raises:
        ConfigError: It is unknown, of another kind of model, or not computed here.
    """
    option = f"model.config_name={name}"
    if name not in CONFIGS:
        names = [x for x in CONFIGS if kind in (None, family(x))]
        raise ConfigError(f"{option}: {choose(name, names, 'known are ')}")
    if kind not in (None, family(name)):
        raise ConfigError(f"{option}: is a configuration of {family(name)}; {label} holds {kind}")
    if CONFIGS[name].adapts:
        raise ConfigError(
            f"{option}: its adapt_to_pi, which converts ALOHA's joints and grippers, does not"
            f" exist here; use another checkpoint than {label}"
        )
    return CONFIGS[name]
