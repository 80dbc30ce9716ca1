"""Static tests of the Dockerfile, because images are built only where there is a builder."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from run_helpers import run_process

ROOT = Path(__file__).resolve().parents[2]
TRASH = shutil.ignore_patterns("__pycache__", "*.egg-info")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, without comments, each on one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    parts = (line.partition(" ") for line in lines if line)
    return [(name, text) for name, _, text in parts]


def arguments(instruction: str) -> list[str]:
    """Return the arguments of each occurrence of an instruction."""
    return [text for name, text in instructions() if name == instruction]


def copied() -> dict[str, str]:
    """Return source in the checkout -> target relative to the working directory."""
    targets = {}
    for text in arguments("COPY"):
        *sources, target = [part for part in shlex.split(text) if not part.startswith("--")]
        for source in sources:
            targets[source] = f"{target}/{source}" if target.endswith("/") else target
    return targets


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """Return the image's working directory with the copied files only."""
    home = tmp_path_factory.mktemp("image")
    for source, target in copied().items():
        assert (ROOT / source).exists(), f"COPY {source}"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, home / target, ignore=TRASH)
        else:
            shutil.copy(ROOT / source, home / target)
    return home


def test_files_are_copied_by_name() -> None:
    """ADD would unpack and download; a copy of ``.`` would include .venv and runs."""
    assert arguments("ADD") == []
    assert not {".", "./", "*"} & set(copied())


def test_make_targets_have_their_files(image: Path) -> None:
    assert any("make .venv/base" in text for text in arguments("RUN"))
    for target in (".venv/base", "train"):  # users call `train` in the container
        run_process("make", "-n", target, cwd=image)


def test_package_can_be_built_from_the_copied_files(image: Path) -> None:
    """Build the wheel of the editable installation with the backend's hook that pip calls."""
    script = (
        "import sys; from setuptools import build_meta;"
        " print(build_meta.build_editable(sys.argv[1]))"
    )
    (image / "out").mkdir()
    output = run_process(sys.executable, "-c", script, "out", cwd=image)
    assert (image / "out" / output.split()[-1]).suffix == ".whl"
