"""Tests of carrying wheels: small wheels made here, in parts, damaged and incomplete."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "scripts/carry_wheels.py"
_spec = importlib.util.spec_from_file_location("carry_wheels", FILE)
assert _spec is not None and _spec.loader is not None
carry: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(carry)


def write_wheel(folder: Path, name: str, requires: str = "", size: int = 0) -> Path:
    """Write a wheel with one module and ``size`` bytes of data that cannot be compressed."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "value = 7\n" + "#" * size)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Return a folder with a wheel in three parts, and a wheel in one."""
    large = write_wheel(tmp_path, "carry_large", "absent-a; python_version < '3'", size=2000)
    small = write_wheel(tmp_path, "carry_small", "absent-b>=2; extra == ''")
    part_bytes = large.stat().st_size // 3 + 1
    entries = [carry.split(wheel, part_bytes) for wheel in (large, small)]
    python = ".".join(map(str, sys.version_info[:2]))
    (tmp_path / "files.json").write_text(json.dumps({"python": python, "wheels": entries}))
    return tmp_path


@pytest.mark.slow
def test_parts_are_joined_verified_and_installed(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"carry_large-1.0-py3-none-any.whl.part{i}" for i in range(3)]
    assert all((packed / name).is_file() for name in names)
    assert not (packed / "carry_large-1.0-py3-none-any.whl").exists()
    assert carry.main(["unpack", str(packed), "--target", str(packed / "site")]) == 0
    assert (packed / "site/carry_large.py").read_text().startswith("value = 7")
    assert (packed / "site/carry_small.py").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert "missing: absent-b, required by carry-small" in lines
    assert not any("absent-a" in line for line in lines), "for another Python"


def test_incomplete_and_damaged_wheels_are_named(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packed / "carry_large-1.0-py3-none-any.whl.part1").unlink()
    small = packed / "carry_small-1.0-py3-none-any.whl"
    small.write_bytes(small.read_bytes()[:-1] + b"x")
    assert carry.main(["unpack", str(packed), "--target", str(packed / "site")]) == 1
    output = capsys.readouterr().out
    assert "incomplete, not here: carry_large-1.0-py3-none-any.whl.part1" in output
    assert "carry_small-1.0-py3-none-any.whl: damaged: its SHA-256 differs" in output
    assert not (packed / "site").exists()


def test_another_python_is_refused(packed: Path) -> None:
    (packed / "files.json").write_text(json.dumps({"python": "2.7", "wheels": []}))
    with pytest.raises(SystemExit, match=r"is for Python 2\.7, this is Python 3"):
        carry.main(["unpack", str(packed)])


def test_versions_are_the_tested_ones() -> None:
    assert carry.pinned("mujoco").startswith("mujoco==3.")
    assert carry.pinned("mujoco==3.9.0") == "mujoco==3.9.0"
    assert all("==" in carry.pinned(name) for name in carry.PACKAGES)
