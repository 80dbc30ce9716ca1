"""Contents and kinds of files that a run directory of another person may have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

DEPTH = 100_000
_ROW = '{"update": %s, "run": %s, "relative": "x", "policy_sha256": "x", "options": {}, "x": %s}\n'
_CONTENTS: dict[str, bytes] = {
    "deep list": b"[" * DEPTH + b"]" * DEPTH,
    "not UTF-8": b"\xff\xfe{",
    "large number": (_ROW % ("1e999", "1e999", "1e999")).encode(),
    "large integer": (_ROW % ("9" * 5000, '"x"', "9" * 400)).encode(),
    "long name": (_ROW % ("4", '"%s"' % ("/x" * 2500), '"%s"' % ("y" * 5000))).encode(),
    "wrong types": b'{"update": [], "updates": {}, "files": [], "format": "1", "options": 3}',
}


# Name -> function that creates a file, which does not exist yet.
WRITERS: dict[str, Callable[[Path], object]] = {
    **{
        name: (lambda path, content=content: path.write_bytes(content))
        for name, content in _CONTENTS.items()
    },
    "3 GB": lambda path: (path.touch(), os.truncate(path, 3 << 30)),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop of links": lambda path: path.symlink_to(path.name),
    "missing": lambda path: None,
}


def put(path: Path, kind: str) -> None:
    """Replace a file of a run by one of ``WRITERS``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    WRITERS[kind](path)
