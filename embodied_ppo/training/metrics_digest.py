"""Digests of the rows of metrics.jsonl, by which a later change of any row is found.

    d_i = SHA-256(d_(i-1) + row_i),   d_0 = ""

metrics.sha256 holds one line "UPDATE d_i" for each row. Every checkpoint and summary.json hold the
last d_i at that time. Digests are never computed again from metrics.jsonl: a resumed run continues
those of metrics.sha256, so an edited row does not get a new digest.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from embodied_ppo.core import guarded_files

FILE = "metrics.sha256"
_LINE = re.compile(rb"(\d{1,15}) ([0-9a-f]{64})")


def chain(previous: str, row: bytes) -> str:
    """Return the digest of a row in hex.

    Args:
        previous: Digest of the row before; "" for the first one.
        row: The row without its line break.
    """
    return hashlib.sha256(previous.encode() + row).hexdigest()


def read(path: Path) -> list[tuple[int, str]]:
    """Return (update, digest) of each line of metrics.sha256; damaged lines are left out.

    Raises:
        CheckpointError: The file cannot be read.
    """
    with guarded_files.refusing_damage(path, "remove metrics.sha256 to go on without digests"):
        try:
            text = guarded_files.read_bytes(path, guarded_files.MAX_ROWS_SIZE)
        except FileNotFoundError:
            return []
    # A line that a kill has cut is left out, and its row is written again.
    matches = map(_LINE.fullmatch, text.splitlines())
    return [(int(match[1]), match[2].decode()) for match in matches if match]


class MetricsDigest:
    """The open file metrics.sha256 of a run."""

    def __init__(self, run_dir: Path, completed_updates: int, *, is_logged: bool) -> None:
        """Drop the digests of rows that the run will repeat, and open the file.

        Args:
            run_dir: Directory of the run.
            completed_updates: Updates that a resumed run has completed; 0: a new run.
            is_logged: Whether metrics.jsonl has the row of ``completed_updates``.
        """
        path = run_dir / FILE
        # The row of a checkpoint may be missing after a kill. The run then writes it first.
        last = completed_updates if is_logged else completed_updates - 1
        entries = [entry for entry in read(path) if entry[0] <= last] if completed_updates else []
        self.first_update, self.update, self.value = None, None, ""
        if entries:
            self.first_update, (self.update, self.value) = entries[0][0], entries[-1]
        lines = (f"{update} {value}\n" for update, value in entries)
        guarded_files.replace_file(path, "".join(lines))
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def add(self, update: int, row: str) -> None:
        """Append the digest of a row; call this before the row is written. Raises OSError."""
        value = chain(self.value, row.encode())
        self._file.write(f"{update} {value}\n")
        # Runs from before this file existed have digests for their later rows only.
        self.first_update = update if self.first_update is None else self.first_update
        self.update, self.value = update, value

    def record(self) -> dict[str, Any] | None:
        """Return what checkpoints and summary.json record; None without a row.

        ``first`` and ``last`` are the updates of the first and of the last row with a digest.
        """
        if self.update is None:
            return None
        return {"first": self.first_update, "last": self.update, "sha256": self.value}

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()
