"""Code that is not ours: the user's own, and packages of which only some versions fit."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from embodied_ppo.core.types import EnvError


@contextlib.contextmanager
def blamed(before: str, after: str = "") -> Iterator[None]:
    """What is raised inside becomes the EnvError ``before``, its kind and text, ``after``; EnvErrors pass."""
    try:
        yield
    except EnvError:
        raise
    except Exception as error:  # code that is not ours runs inside, which may raise anything
        raise EnvError(f"{before}{type(error).__name__}: {error}{after}") from error


def imported(id: str, module: str) -> ModuleType:
    """The user's module before the colon of env.id. Raises EnvError if it cannot be imported."""
    with blamed(f"env.id={id}: cannot import {module!r} (", "); mend or install it, or put its folder on PYTHONPATH"):
        return importlib.import_module(module)
