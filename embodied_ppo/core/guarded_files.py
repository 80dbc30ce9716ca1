"""Bounded reading of files that others may have changed, and writing of files in one step.

Every file of a run is read here, as a crash, a copy or another person may have damaged it. Only
regular files are opened, which never blocks; their size is compared with a limit before they are
read, so that one damaged run cannot stop a program that shows or compares many.

Functions raise OSError for a file that cannot be opened, and ValueError, whose text is the reason
without the path, for one with other contents. ``refusing_damage`` turns both into CheckpointError.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import CheckpointError, one_line, show_path

# Largest size of a text file that is read at once, bytes; reports of language models have many.
MAX_TEXT_SIZE = 1 << 26
MAX_ROWS_SIZE = 1 << 31  # largest size of metrics.jsonl, bytes
MAX_PATH = 4095  # largest length of a path, bytes


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: It is missing, or a directory, pipe, socket or device, or without ``follow_links``
            a link.
    """
    # Without O_NONBLOCK the opening of a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            error.strerror = "is a link, which is not followed"
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(file, "rb")


def read_bytes(path: Path, limit: int = MAX_TEXT_SIZE, *, follow_links: bool = True) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is larger.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > limit else file.read(limit + 1)
    if size > limit or len(content) > limit:
        raise ValueError(f"has {max(size, len(content))} bytes, the limit is {limit}")
    return content


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, then rename it; on a full disk the old one remains."""
    # A rename on the same disk is atomic, so readers, and a kill, find the old file or the new one.
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size, in hex. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, limit: int = MAX_TEXT_SIZE, *, follow_links: bool = True) -> str:
    """Return the text of a file, as ``read_bytes``; ValueError also if it is not UTF-8."""
    return read_bytes(path, limit, follow_links=follow_links).decode()


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; NaN and Infinity, which earlier versions wrote, are floats.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def check_fields(value: Any, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return ``value`` if it is a mapping whose ``fields`` have these types.

    A field of type int is a whole number from 0; one of type float is any number.

    Raises:
        ValueError: Names the first field that is missing or has another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"contains a {type(value).__name__}, not named entries")
    for name, kind in fields.items():
        if name not in value:
            raise ValueError(f"has no entry {name}")
        entry = value[name]
        accepted = (int, float) if kind is float else kind
        if not isinstance(entry, accepted) or (isinstance(entry, bool) and kind is not bool):
            raise ValueError(f"its entry {name} is a {type(entry).__name__}, not {kind.__name__}")
        if kind is int and entry < 0:
            raise ValueError(f"its entry {name} is {entry}, below 0")
    return value


def read_object(
    path: Path,
    fields: Mapping[str, type] | None = None,
    *,
    limit: int = MAX_TEXT_SIZE,
    follow_links: bool = True,
) -> dict[str, Any]:
    """Return the JSON object in a file; see ``read_bytes``, ``parse_json`` and ``check_fields``.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It has other contents.
    """
    content = read_bytes(path, limit, follow_links=follow_links)
    return check_fields(parse_json(content), fields or {})


def parse_row(line: bytes) -> dict[str, float | None]:
    """Return the numbers of a row of metrics.jsonl; None for those that are not finite.

    Raises:
        ValueError: The line is not a JSON object.
    """
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    numbers = {tag: x for tag, x in row.items() if x is None or isinstance(x, int | float)}
    limit = sys.float_info.max
    return {tag: x if x is None or abs(x) <= limit else None for tag, x in numbers.items()}


def update_of(row: Mapping[str, Any]) -> int:
    """Return the update of a row; ValueError if it has none."""
    update = row.get("update")
    if not isinstance(update, int) or isinstance(update, bool) or not 0 <= update < 2**53:
        raise ValueError("has no number of an update")
    return update


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of metrics.jsonl without line breaks.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It has more than MAX_ROWS_SIZE bytes.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_ROWS_SIZE:
            raise ValueError(f"has {size} bytes, the limit is {MAX_ROWS_SIZE}")
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


@contextmanager
def refusing_damage(path: Path, hint: str) -> Iterator[None]:
    """Raise CheckpointError where the file ``path`` of a run is missing or damaged.

    Args:
        path: The file.
        hint: What to do instead, the first words of the message.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{hint}: {show_path(path)} is missing") from error
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise CheckpointError(f"{hint}: {show_path(path)} cannot be read ({reason})") from error
    except ValueError as error:
        reason = one_line(error)[:120]
        raise CheckpointError(f"{hint}: {show_path(path)} is damaged ({reason})") from error


def as_json(value: Any) -> str:
    """Return one line of strict JSON; nan and inf, which JSON does not have, become null."""

    def plain(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {str(k): plain(v) for k, v in node.items()}
        if isinstance(node, (list, tuple)):
            return [plain(v) for v in node]
        return None if isinstance(node, float) and not math.isfinite(node) else node

    return json.dumps(plain(value), default=str, allow_nan=False)
