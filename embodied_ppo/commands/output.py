"""Printing that several commands share: JSON, tables, summaries, notes about aliases."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embodied_ppo.core.guarded_files import as_json
from embodied_ppo.options.placement import lines as layout

if TYPE_CHECKING:
    from embodied_ppo.options.loader import Loaded

__all__ = ["as_json", "layout"]


def table(rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print rows with aligned columns; on a terminal the last column is wrapped."""
    indent = "  " if title else ""
    width = shutil.get_terminal_size().columns - len(indent) if sys.stdout.isatty() else None
    if rows and title:
        print(title)
    for line in layout(rows, width):
        print(indent + line)


def stdout_to_stderr() -> contextlib.AbstractContextManager[object]:
    """Redirect what simulators, graders and Ray print to stderr: stdout holds only results."""
    return contextlib.redirect_stdout(sys.stderr)


def print_aliases(loaded: Loaded, args: argparse.Namespace) -> None:
    """Print each option that was given by another framework's name, unless --quiet."""
    for written, read in () if args.quiet else loaded.aliases:
        print(f"{written} is read as {read}", file=sys.stderr)


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print the numbers and texts of a summary, one per line, with their 95 % intervals.

    Nested entries are left out; the files of the run have them.
    """
    flat = {k: v for k, v in summary.items() if not isinstance(v, (Mapping, list, tuple))}
    intervals = {
        name: f" ({low:.6g} to {high:.6g}, 95 %)"
        for name, (low, high) in summary.get("ci95", {}).items()
    }
    rows = []
    for name, value in flat.items():
        text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
        rows.append([name, text + intervals.get(name, "")])
    table(rows)


def print_result(
    result: Any, args: argparse.Namespace, show: Callable[[Any], None] = print_summary
) -> None:
    """Print the result of a command: as JSON if --json, else by ``show``."""
    if args.json:
        print(as_json(result), flush=True)
    else:
        show(result)
