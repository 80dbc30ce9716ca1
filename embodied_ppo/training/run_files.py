"""Find the directories of runs. Does not import torch, as ``run_directory`` does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

METRICS = "metrics.jsonl"
"""A directory with this file is a run."""
SWEEP = "sweep.json"
"""File in the folder of a sweep that lists its runs."""
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


def in_sweep_order(run_dirs: Sequence[Path]) -> list[Path]:
    """Return run directories with those of a sweep in the order of its runs.

    The first run of a sweep has the values that the user wrote first.
    """

    def key(run_dir: Path) -> tuple[str, int, str]:
        folder, names = run_dir.parent, list[str]()
        with suppress(OSError, ValueError, KeyError, TypeError):
            runs = json.loads((folder / SWEEP).read_text())["runs"]
            names = [str(row["folder"]) for row in runs]
        position = names.index(run_dir.name) if run_dir.name in names else len(names)
        return str(folder), position, run_dir.name

    return sorted(run_dirs, key=key)
