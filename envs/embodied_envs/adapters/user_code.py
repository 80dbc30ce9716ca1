"""Boundary to user code and optional packages: their exceptions become ``EnvError``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from embodied_ppo.core.types import EnvError


@contextlib.contextmanager
def wrap_errors(prefix: str, suffix: str = "") -> Iterator[None]:
    """Re-raise any exception of the block as an EnvError that states its class and text.

    Args:
        prefix: Text before the class and the text of the exception.
        suffix: Text after them.

    Raises:
        EnvError: The block raised an exception. An EnvError of the block passes unchanged.
    """
    try:
        yield
    except EnvError:
        raise
    except Exception as error:  # user code may raise any class
        raise EnvError(f"{prefix}{type(error).__name__}: {error}{suffix}") from error


def import_user_module(id: str, module: str) -> ModuleType:
    """Import the user's module that ``env.id`` names before the colon.

    Raises:
        EnvError: The import failed.
    """
    cure = "fix or install it, or put its folder on PYTHONPATH"
    with wrap_errors(f"env.id={id}: cannot import {module!r} (", f"); {cure}"):
        return importlib.import_module(module)
