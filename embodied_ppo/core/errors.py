"""Exceptions of the package and functions that format their messages.

Each message is one line that names path, value, limit and cure. This module imports no other module
of the package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """An option has a value that cannot be used."""


class PlacementError(ValueError):
    """A placement cannot be used; the message names role, devices, limit and cure."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, the defect and the cure."""


class EnvError(ValueError):
    """A simulator is missing or violates its contract; the message names id, limit and cure."""


class TrainingError(RuntimeError):
    """Training stopped because of a non-finite loss or a failed simulator; names cause and dump."""


class ProcessLost(TrainingError):
    """A process of the run died or does not respond; names role, rank, machine and phase.

    The run can continue after the process is rebuilt.
    """


def nearest(word: str, names: Iterable[str], *, cutoff: float | None = None) -> str | None:
    """Return the name that ``word`` is most likely a misspelling of, None if no name is similar.

    Args:
        word: Name as typed.
        names: Valid names.
        cutoff: Least similarity, ``2 * equal characters / all characters`` of both. The default is
            0.7, and 0.6 for words of up to four characters: one wrong or two exchanged characters
            are accepted.
    """
    least = cutoff or (0.6 if len(word) <= 4 else 0.7)
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=least)
    return near[0] if near else None


LONGEST_LINE = 300
"""Largest length of the line that reports an error, in characters, including ``error: ``."""


def choose(word: str, names: Sequence[str], intro: str) -> str:
    """Return ``did you mean x?`` if a name is similar, followed by ``intro`` and all names."""
    near = nearest(word, names)
    return (f"did you mean {near}? " if near else "") + intro + join_names(names)


def join_names(names: Sequence[str], limit: int = 190) -> str:
    """Join names by commas; beyond ``limit`` characters only the first names and their number."""
    text = ", ".join(names)
    if len(text) <= limit:
        return text or "none"
    return (
        f"{text[:limit].rpartition(', ')[0] or shorten(names[0], limit)}, .. ({len(names)} in all)"
    )


def shorten(text: str, limit: int = LONGEST_LINE) -> str:
    """Shorten ``text`` to at most ``limit`` characters by replacing its middle with `` .. ``.

    A message begins with the option and ends with the cure; a long value is between them.
    """
    if len(text) <= limit:
        return text
    tail = limit * 2 // 5
    return f"{text[: limit - tail - 4]} .. {text[-tail:]}"


def show(value: Any) -> str:
    """Format a value as the command line accepts it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if value and value.isprintable() else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return repr(value)


def one_line(error: BaseException, *, kind: bool = False) -> str:
    """Return an exception's text without line breaks.

    Args:
        error: The exception.
        kind: Prepend its type, for exceptions whose text alone is not informative.
    """
    return " ".join(f"{type(error).__name__}: {error}".split() if kind else str(error).split())


class UsageError(Exception):
    """A command line that no command accepts; one line with the cure."""
