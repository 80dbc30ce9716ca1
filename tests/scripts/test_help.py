"""``--help`` of every script that parses its command line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "scripts"
SCRIPTS = [
    path.name
    for path in sorted(FOLDER.glob("*.py"))
    if "parse_args(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed(name: str, capsys, monkeypatch) -> None:
    """Scripts that pass their arguments to a command once failed with a traceback."""
    assert {"bench.py", "structure.py"} <= {*SCRIPTS}
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")
