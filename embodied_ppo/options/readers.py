"""Which mode reads an option, and under which conditions, as declared on its field in
``schema``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from embodied_ppo.options.schema import Config, EvaluateConfig, Mode, ReadIf


@dataclass(frozen=True)
class Reader:
    """What reads one option.

    Attributes:
        mode: The only mode that reads it; None: both modes do.
        conditions: All of them must hold for the option to be read.
    """

    mode: Mode | None
    conditions: tuple[ReadIf, ...]


@cache
def readers(cls: type = Config) -> dict[str, Reader]:
    """Return path -> reader of every section and option of ``cls``, in the order of the source."""
    return dict(_readers(cls, "", Reader(None, ())))


def _readers(cls: type, prefix: str, inherited: Reader) -> Iterator[tuple[str, Reader]]:
    """Yield the readers of a section; what an option does not declare it inherits from its
    section.
    """
    for field in fields(cls):
        path, data = prefix + field.name, field.metadata
        mode = data.get("mode") or inherited.mode
        reader = Reader(mode, data.get("read_if") or inherited.conditions)
        nested: type | None = data.get("section")
        if nested is None:
            yield path, reader
        else:
            yield path, Reader(reader.mode, ())
            yield from _readers(nested, f"{path}.", reader)


def mode_of(path: str, cls: type = Config) -> Mode | None:
    """Return the only mode that reads an option or section; None where both do, or ``cls`` has no
    such path.
    """
    reader = readers(cls).get(path)
    return None if reader is None else reader.mode


def unread(config: Config | EvaluateConfig, mode: Mode | None = None) -> Iterator[tuple[str, str]]:
    """Yield the options that the values of other options leave without effect.

    Args:
        config: The options.
        mode: Mode of the run; conditions of the other mode are not considered.

    Yields:
        (path, condition under which it is read, as text).
    """
    for path, reader in readers(type(config)).items():
        for condition in reader.conditions:
            if condition.mode in (None, mode) and not condition.holds(config):
                yield path, condition.text
                break
