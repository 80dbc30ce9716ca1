"""Tables of constants, which are data and not code."""

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def tables(module: str) -> dict[str, Any]:
    """Return the tables of a module's folder, whose ``__file__`` ``module`` is."""
    return yaml.safe_load(Path(module).with_name("tables.yaml").read_text(encoding="utf-8"))
