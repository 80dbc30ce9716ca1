"""Run the benchmark of placements: stages overlap, and resources do not grow with processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_stages_overlap_and_resources_do_not_grow_with_processes(tmp_path: Path) -> None:
    """Compare 2 with 4 processes; thread pools of Ray may grow by a few threads at any time."""
    out = tmp_path / "out.json"
    command = [sys.executable, "scripts/bench_placement.py", "--rounds", "0", "--json", str(out)]
    command += ["--processes", "2", "4", "--placements", "disaggregated"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    figures: dict[str, float] = json.loads(out.read_text())
    few, many = (
        {
            name.partition(": ")[2]: x
            for name, x in figures.items()
            if name.startswith(f"disaggregated x {count}: ")
        }
        for count in (2, 4)
    )
    common = {
        name: x for name, x in figures.items() if " x 2: " not in name and " x 4: " not in name
    }
    assert (
        len(common) == 6
        and all(x > 0 for x in common.values())
        and process.stdout.count("|") > 3 * 6
    )
    one, two = (x for name, x in common.items() if "stage" in name)
    assert one >= 40 and 20 <= two < 0.8 * one  # the lower bound is 0.5 plus messages

    assert "| disaggregated, processes | 2 | 4 |" in process.stdout
    assert len(few) == len(many) == 8
    grown = {name: many[name] - x for name, x in few.items()}
    assert grown["driver, threads"] <= 6 and many["driver, threads"] <= 40
    assert grown["driver, file descriptors"] <= 2 * 1 + 6  # a connection to each
    assert grown["driver, MB of memory"] <= 2 * 2 + 10
    assert many["driver, kB over TCP per update"] <= 4 * 10  # experience of each: 150 kB
    assert many["TCP connections of a process (median)"] <= 10
    assert grown["TCP connections of the first learner"] <= 2 * 3
    assert many["/dev/shm, MB"] <= 10
