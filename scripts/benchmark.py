"""Shared parts of the benchmark scripts: commands, paired timing, tables and stored results.

Import this module before torch: it limits each process to one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
Job = tuple[str, int]
"""Experiment or variant, and seed."""


# ---------------------------------------------------------------------------------------- commands
def run_command(command: str, *options: str, cwd: Path | None = None) -> dict[str, Any]:
    """Run ``embodied-ppo COMMAND --json`` and return its result.

    Raises:
        SystemExit: The command failed; the message holds the end of its stderr.
    """
    line = [sys.executable, "-m", "embodied_ppo.commands.main", command, "--quiet", "--json"]
    process = subprocess.run([*line, *options], cwd=cwd, capture_output=True, text=True)
    if process.returncode:
        text = f"{command} {' '.join(options)}: exit {process.returncode}\n{process.stderr[-2000:]}"
        raise SystemExit(text)
    return json.loads(process.stdout)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def argument_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with those common arguments that have a default in ``defaults``.

    Args:
        description: The docstring of the script.
        defaults: Of ``seeds``, ``rounds``, ``runs`` (a folder) and ``json`` (a file or None).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if "seeds" in defaults:
        parser.add_argument("--seeds", type=int, default=defaults["seeds"])
        parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
        parser.add_argument("--override", action="append", default=[], help="option of every run")
    if "rounds" in defaults:
        parser.add_argument("--rounds", type=int, default=defaults["rounds"])
    if "runs" in defaults:
        parser.add_argument("--runs", type=Path, default=defaults["runs"], help="run directories")
    if "json" in defaults:
        parser.add_argument("--json", type=Path, default=defaults["json"], help="also write a file")
    return parser


def run_jobs(run: Callable[..., Any], jobs: Iterable[Job], number: int) -> Iterator[Any]:
    """Yield ``run(*job)`` of each job in order, with ``number`` jobs at the same time."""
    with ThreadPoolExecutor(number) as pool:
        yield from pool.map(lambda job: run(*job), jobs)


# ------------------------------------------------------------------------------------------ timing
def cpu_ms(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of each call in each round.

    The calls alternate within a round, because the speed of a shared machine changes within
    minutes. A first round warms up and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                times[name].append((time.process_time() - start) * 1e3)
    return times


# ---------------------------------------------------------------------------------------- printing
def print_header(columns: Sequence[str]) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(columns)
    print("|---" * len(columns) + "|", flush=True)


def print_row(cells: Iterable[str]) -> None:
    """Print one line of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


# -------------------------------------------------------------------------------- stored results
class Results:
    """Entries of a file below docs/results; an entry replaces the one with the same key."""

    def __init__(self, name: str, key: Sequence[str], order: Callable[[Any], Any]) -> None:
        self.file, self.key, self.order = RESULTS / name, key, order

    def load(self) -> list[dict[str, Any]]:
        """Return all entries."""
        return json.loads(self.file.read_text()) if self.file.exists() else []

    def save(self, entry: dict[str, Any]) -> None:
        """Add an entry in the place of the one with the same key."""
        others = [e for e in self.load() if any(e[name] != entry[name] for name in self.key)]
        entries = sorted([*others, entry], key=self.order)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n")


def provenance(options: Sequence[str]) -> dict[str, str]:
    """Return the command of a training run, the commit and the date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "command": "embodied-ppo train " + " ".join(options),
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
    }
