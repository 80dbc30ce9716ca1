"""What can be refused or fail: each message names path, value, limit and cure in one line. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """A refused option."""


class PlacementError(ValueError):
    """A refused placement: names role, devices, limit and cure."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the file, what is wrong with it and the cure."""


class EnvError(ValueError):
    """A simulator that is missing or breaks its contract: names id, limit and cure."""


class TrainingError(RuntimeError):
    """Training stopped by itself (non-finite loss, dead simulator): names cause and dump."""


class ProcessLost(TrainingError):
    """A process of the run died or is silent: names role, rank, machine and phase. Rebuilt, the run can go on."""


def nearest(word: str, names: Iterable[str], *, cutoff: float | None = None) -> str | None:
    """Return the name that ``word`` is most likely a typing error of, None where no name is near.

    Args:
        cutoff: Least similarity, ``2 * equal characters / all characters`` of both. The default is 0.7, and 0.6 for
            words of up to four characters: one wrong or two exchanged characters are near.
    """
    least = cutoff or (0.6 if len(word) <= 4 else 0.7)
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=least)
    return near[0] if near else None


LONGEST_LINE = 300
"""Characters of the line that reports a refused input, with its ``error: ``."""


def choose(word: str, names: Sequence[str], intro: str) -> str:
    """``did you mean x?`` where one is near, and what there is."""
    near = nearest(word, names)
    return (f"did you mean {near}? " if near else "") + intro + listed(names)


def listed(names: Sequence[str], limit: int = 190) -> str:
    """Names joined by commas, the first ones where all of them have more than ``limit`` characters."""
    text = ", ".join(names)
    if len(text) <= limit:
        return text or "none"
    return f"{text[:limit].rpartition(', ')[0] or shortened(names[0], limit)}, .. ({len(names)} in all)"


def shortened(text: str, limit: int = LONGEST_LINE) -> str:
    """``text`` of at most ``limit`` characters: its middle gives way to `` .. ``.

    A message begins with the option and ends with the cure; a long value is between them.
    """
    if len(text) <= limit:
        return text
    tail = limit * 2 // 5
    return f"{text[: limit - tail - 4]} .. {text[-tail:]}"


def show(value: Any) -> str:
    """A value as the command line would take it."""
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
    """An exception's text without line breaks; ``kind``: after its type, where the text alone says little."""
    return " ".join(f"{type(error).__name__}: {error}".split() if kind else str(error).split())


class UsageError(Exception):
    """A command line that no command understands; one line with the cure."""
