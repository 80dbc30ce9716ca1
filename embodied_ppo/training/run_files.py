"""Find the directories of runs. Does not import torch, as ``run_directory`` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

METRICS = "metrics.jsonl"
"""A directory with this file is a run."""
DEPTH = 4
"""Depth of the search for runs below a folder."""


def find_runs(roots: Sequence[Path]) -> dict[str, Path]:
    """Return absolute path -> directory of every run that ``roots`` are or contain."""
    runs: dict[str, Path] = {}
    for root in roots:
        for name, subfolders, files in os.walk(root):
            folder = Path(name)
            if METRICS in files:
                # A browser cannot send bytes that are not UTF-8.
                runs[os.fsencode(folder.absolute()).decode(errors="replace")] = folder
            if METRICS in files or len(folder.relative_to(root).parts) >= DEPTH:
                subfolders.clear()
            else:
                subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
    return runs
