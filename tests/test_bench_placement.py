"""The benchmark of placements, for real: what it prints, and that two stages overlap simulation and acting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_two_stages_overlap(tmp_path: Path) -> None:
    """A ratio within one run; 0.5 and messages is what can be reached."""
    out = tmp_path / "out.json"
    words = [sys.executable, "scripts/bench_placement.py", "--rounds", "0", "--json", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found) == 6 and all(value > 0 for value in found.values())
    one, two = (value for name, value in found.items() if "stage" in name)
    assert one >= 40 and 20 <= two < 0.8 * one
    assert done.stdout.count("|") == 3 * len(found)
