"""Modules of the user's, by the name before the colon of env.id."""

from __future__ import annotations

import importlib
from types import ModuleType

from embodied_ppo.types import EnvError


def imported(id: str, module: str) -> ModuleType:
    """Raises EnvError if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise EnvError(
            f"env.id={id}: cannot import {module!r} ({type(error).__name__}: {error}); mend or install it, "
            "or put its folder on PYTHONPATH"
        ) from error
