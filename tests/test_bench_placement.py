"""The benchmark of placements, for real: what it prints, that two stages overlap, and what must not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def bench(out: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What it prints, and its figures."""
    command = [sys.executable, "scripts/bench_placement.py", "--rounds", "0", "--json", str(out), "--processes", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def test_two_stages_overlap(tmp_path: Path) -> None:
    """A ratio within one run; 0.5 and messages is what can be reached."""
    told, found = bench(tmp_path / "out.json")
    assert len(found) == 6 and all(value > 0 for value in found.values())
    one, two = (value for name, value in found.items() if "stage" in name)
    assert one >= 40 and 20 <= two < 0.8 * one
    assert told.count("|") == 3 * len(found)


@pytest.mark.slow
def test_what_driver_and_processes_hold_does_not_grow(tmp_path: Path) -> None:
    """From 2 to 4 processes; a pool of Ray's may grow by a few threads at any time."""
    told, found = bench(tmp_path / "out.json", "2", "4", "--placements", "disaggregated")
    assert "| disaggregated, processes | 2 | 4 |" in told
    few, many = (
        {name.partition(": ")[2]: x for name, x in found.items() if name.startswith(f"disaggregated x {count}: ")}
        for count in (2, 4)
    )
    assert len(few) == len(many) == 8
    grown = {name: many[name] - x for name, x in few.items()}
    assert grown["driver, threads"] <= 6 and many["driver, threads"] <= 40
    assert grown["driver, file descriptors"] <= 2 * 1 + 6  # a connection to each
    assert grown["driver, MB of memory"] <= 2 * 2 + 10
    assert many["driver, kB over TCP an update"] <= 4 * 10  # experience of each: 150 kB
    assert many["TCP connections of a process (median)"] <= 10
    assert grown["TCP connections of the first learner"] <= 2 * 3
    assert many["/dev/shm, MB"] <= 10
