"""Boundary to user code and optional packages: their exceptions become ``EnvError``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from embodied_envs.base.errors import EnvError, one_line


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
        raise EnvError(f"{prefix}{one_line(error, kind=True)}{suffix}") from error


def import_user_module(id: str, module: str) -> ModuleType:
    """Import the user's module that ``env.id`` names before the colon.

    Raises:
        EnvError: The import failed.
    """
    if module.endswith(".py"):
        path, name = PurePath(module), id.rpartition(":")[2]
        raise EnvError(
            f"write env.id={path.stem}:{name}, in the folder {path.parent} or with"
            f" PYTHONPATH={path.parent}: env.id={id} names a file instead of a module"
        )
    hint = "fix or install it, or put its folder on PYTHONPATH"
    with wrap_errors(f"env.id={id}: cannot import {module!r} (", f"); {hint}"):
        return importlib.import_module(module)


def named_object(id: str) -> Any:
    """Return what "package.module:name" names; None if there is nothing.

    Raises:
        EnvError: The module cannot be imported.
    """
    module, colon, name = id.rpartition(":")
    if not colon or not name.isidentifier():
        return None
    return getattr(import_user_module(id, module), name, None)


def copy_arrays(value: Any) -> Any:
    """Return ``value`` in memory of its own.

    Arrays, tensors, dictionaries, lists and tuples are copied; other objects are returned as they
    are.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copy_arrays(x) for name, x in value.items()}
    is_list = type(value) in (list, tuple)
    return type(value)(copy_arrays(x) for x in value) if is_list else value
