"""Reading checkpoint directories of other publishers, including damaged ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.core.errors import ConfigError, one_line


@contextlib.contextmanager
def config_errors(before: str, after: str = "", *, kind: bool = False) -> Iterator[None]:
    """Convert exceptions of transformers and tokenizers to ConfigError.

    Out-of-memory errors are not converted.

    Args:
        before: Text before the exception's message.
        after: Text after it.
        kind: Include the exception's type, see ``one_line``.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    # The libraries do not document their exceptions. 400 invalid configurations raised
    # RuntimeError, AttributeError, KeyError, ZeroDivisionError and two classes of huggingface_hub;
    # safetensors has its own class, tokenizers raises Exception itself, and a chat template can
    # raise anything.
    except Exception as error:
        raise ConfigError(f"{before}{one_line(error, kind=kind)}{after}") from error


def share(folder: str | Path) -> None:
    """Give safetensors files the permissions of config.json beside them.

    safetensors writes files that only their owner may read.
    """
    mode = (Path(folder) / "config.json").stat().st_mode & 0o777
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(mode)


def read_json(file: Path, label: str, cure: str) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        file: The file.
        label: Option and value, for messages; "" if the caller adds it.
        cure: Advice on which directory to name instead.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    label = f"{label}: " if label else ""
    if not file.is_file():
        problem = f"holds no {file.name}" if file.parent.is_dir() else "there is no such directory"
        raise ConfigError(f"{label}{problem}; {cure}")
    try:
        value = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        cause = one_line(error, kind=True)
        raise ConfigError(
            f"{label}{file.name} cannot be read ({cause}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{label}{file.name} must hold one JSON object; download it again")
    return value
