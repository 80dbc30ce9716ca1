"""Exceptions of the package and functions that format their messages.

Each message is one line that names hint, path, value and limit. This module imports no other module
of the package.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """An option has a value that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, the defect and the hint."""


class EnvError(ValueError):
    """A simulator is missing or violates its contract; the message names id, limit and hint."""


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


# Largest length of the line that reports an error, in characters, including ``error: ``.
LONGEST_LINE = 300


def choose(word: str, names: Sequence[str], intro: str) -> str:
    """Return ``did you mean x?`` if a name is similar, followed by ``intro`` and all names."""
    near = nearest(word, names)
    return (f"did you mean {near}? " if near else "") + intro + join_names(names)


def check_choice(path: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise EnvError unless ``value`` is one of ``choices``; the message begins with ``path``."""
    if value not in (known := list(choices)):
        hint = choose(str(value), [str(x) for x in known], "choose one of ")
        raise EnvError(f"{path}={value!r} is unknown; {hint}")


def check_names(path: str, names: Sequence[str], choices: Iterable[str]) -> None:
    """Raise EnvError unless every one of ``names`` is one of ``choices``, and none occurs twice."""
    for name in names:
        check_choice(path, name, choices)
        if list(names).count(name) > 1:
            raise EnvError(f"{path}={list(names)} has {name!r} more than once")


def check_keys(path: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise EnvError unless every option ``path.key`` is one of ``known``."""
    for key in keys:
        if key not in known:
            hint = choose(key, list(known), "there are ") if known else "remove it: there are none"
            raise EnvError(f"{path}.{key} is unknown; {hint}")


def check_count(path: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise EnvError unless ``value`` is a whole number from ``low`` to ``high``."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):
        limits = f", at least {low}" if high is None else f" from {low} to {high}"
        raise EnvError(f"{path}={value!r} must be a whole number{limits}")


def check_range(path: str, value: Any, low: float = -math.inf) -> None:
    """Raise EnvError unless ``value`` is two finite numbers in order, at least ``low``."""
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    is_valid = is_pair and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in value
    )
    if not is_valid or not low <= value[0] <= value[1]:
        least = f"{low:g} <= " if math.isfinite(low) else ""
        raise EnvError(f"write two finite numbers, {least}low <= high: {path}={show(value)}")


def join_names(names: Sequence[str], limit: int = 190) -> str:
    """Join names by commas; beyond ``limit`` characters only the first names and their number."""
    text = ", ".join(names)
    if len(text) <= limit:
        return text or "none"
    shown = text[:limit].rpartition(", ")[0] or shorten(names[0], limit)
    hidden = len(names) - max(1, text[:limit].count(", "))
    return f"{shown} and {hidden} more" if hidden else shown


def shorten(text: str, limit: int) -> str:
    """Shorten a value to at most ``limit`` characters by replacing its middle with ``…``."""
    if len(text) <= limit:
        return text
    tail = limit * 2 // 5
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def fit_message(message: str, limit: int = LONGEST_LINE) -> str:
    """Shorten the values in a message until it has at most ``limit`` characters.

    Values are words (paths, numbers, names), then quotations and brackets. Their middle is
    replaced with ``…``. The other text, such as the hint, is kept; only a message that is too long
    without its values is shortened in its longest clause.
    """
    for pattern, least in _VALUES:
        while (excess := len(message) - limit) > 0:
            longest = max(re.findall(pattern, message), key=len, default="")
            if len(longest) <= least:
                break
            size = max(least, len(longest) - excess, len(longest) * 2 // 3)
            message = message.replace(longest, shorten(longest, size), 1)
    return shorten(message, limit)


# Patterns of values, and the number of characters that is left of one.
_VALUES = (
    (r"[^\s=]+", 40),
    (r"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}""", 40),
    (r"[^;:]+", 60),
)


# Largest length of a path in a message, characters; the end of a longer path is shown.
LONGEST_PATH = 100


def show_path(path: object) -> str:
    """Format a path for a message; a long one without its first folders."""
    text = show(str(path))
    return text if len(text) <= LONGEST_PATH else f"…{text[1 - LONGEST_PATH :]}"


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
