"""Find the directories of runs. Does not import torch, as ``run_directory`` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

METRICS = "metrics.jsonl"
"""A directory with this file is a run."""
DEPTH = 4
"""Depth of the search for runs below a folder."""


def find_runs(roots: Sequence[Path], *, links: bool = False) -> dict[str, Path]:
    """Return absolute path -> directory of every run that ``roots`` are or contain.

    Args:
        roots: Folders.
        links: Whether symbolic links to folders are followed; each folder is visited once.
    """
    runs: dict[str, Path] = {}
    for root in roots:
        visited: set[str] = set()
        for name, subfolders, files in os.walk(root, followlinks=links):
            folder = Path(name)
            if links:
                real = os.path.realpath(name)
                if real in visited:
                    subfolders.clear()
                    continue
                visited.add(real)
            if METRICS in files:
                # A browser cannot send bytes that are not UTF-8.
                runs[os.fsencode(folder.absolute()).decode(errors="replace")] = folder
            if METRICS in files or len(folder.relative_to(root).parts) >= DEPTH:
                subfolders.clear()
            else:
                subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
    return runs
