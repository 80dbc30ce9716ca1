"""Directories of checkpoints, as publishers leave them and downloads break them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.core.errors import ConfigError, one_line


@contextlib.contextmanager
def refusing(before: str, after: str = "", *, kind: bool = False) -> Iterator[None]:
    """Reading or building by transformers or tokenizers: what they raise becomes the ConfigError ``before`` its text
    ``after``. ``kind``: see ``one_line``. No memory stays what it is.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    # They declare nothing. Seen for 400 configurations of nonsense: RuntimeError, AttributeError, KeyError,
    # ZeroDivisionError and two of huggingface_hub's; safetensors has its own.
    except Exception as error:  # tokenizers raises the class itself, and a chat template is a program
        raise ConfigError(f"{before}{one_line(error, kind=kind)}{after}") from error


def share(folder: str | Path) -> None:
    """safetensors writes files that only their owner may read; theirs become the rights of config.json beside them."""
    mode = (Path(folder) / "config.json").stat().st_mode & 0o777
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(mode)


def json_of(file: Path, where: str, cure: str) -> dict[str, Any]:
    """One JSON object. ``where`` is the option and its value, "" where the caller says it; ``cure``: which directory
    to name instead. Raises ConfigError.
    """
    where = f"{where}: " if where else ""
    if not file.is_file():
        lacks = f"holds no {file.name}" if file.parent.is_dir() else "there is no such directory"
        raise ConfigError(f"{where}{lacks}; {cure}")
    try:
        value = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        cause = one_line(error, kind=True)
        raise ConfigError(f"{where}{file.name} cannot be read ({cause}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}{file.name} must hold one JSON object; download it again")
    return value
