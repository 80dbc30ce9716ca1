"""Files of a checkpoint's directory, as publishers leave them and downloads break them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied_ppo.errors import ConfigError, one_line


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
