"""The Dockerfile names what is there: it is built only where there is a builder, so what can rot is
read here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRASH = shutil.ignore_patterns("__pycache__", "*.egg-info")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) in order, without comments, each on one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def words(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def copied() -> dict[str, str]:
    """Source in the checkout -> where it goes, relative to the working directory."""
    pairs = {}
    for rest in words("COPY"):
        *sources, target = [word for word in shlex.split(rest) if not word.startswith("--")]
        pairs |= {
            source: f"{target}/{source}" if target.endswith("/") else target for source in sources
        }
    return pairs


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's working directory before anything is installed: what is copied and nothing
    else.
    """
    home = tmp_path_factory.mktemp("image")
    for source, target in copied().items():
        assert (ROOT / source).exists(), f"COPY {source}"
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, home / target, ignore=TRASH)
        else:
            shutil.copy(ROOT / source, home / target)
    return home


def test_nothing_comes_but_by_copy_of_names() -> None:
    """ADD unpacks and downloads; a folder of everything would take .venv and runs of the host."""
    assert words("ADD") == []
    assert not {".", "./", "*"} & set(copied())


def test_make_finds_what_it_needs(image: Path) -> None:
    assert any("make .venv/base" in rest for rest in words("RUN"))
    for target in (".venv/base", "train"):  # `train` is what a user calls inside
        done = subprocess.run(["make", "-n", target], cwd=image, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_package_installs_from_what_is_copied(image: Path) -> None:
    """The wheel of the editable installation, as pip asks for it: README, licence, version, every
    package's folder.
    """
    script = (
        "import sys; from setuptools import build_meta;"
        " print(build_meta.build_editable(sys.argv[1]))"
    )
    (image / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, "out"], cwd=image, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (image / "out" / done.stdout.split()[-1]).suffix == ".whl"


def test_the_user_is_not_root() -> None:
    """By number: a cluster that asks for another user than root cannot tell from a name."""
    (uid,) = words("USER")[-1:]
    assert int(uid) > 0
    assert any(f"useradd --create-home --uid {uid} ppo" in rest for rest in words("RUN"))
    owners = {re.search(r"--chown=(\w+)", rest) for rest in words("COPY")}
    assert {owner and owner[1] for owner in owners} == {"ppo"}, "make writes beside what is copied"


def test_the_command_is_the_entry() -> None:
    (entry,) = [json.loads(rest) for rest in words("ENTRYPOINT")]
    assert entry == ["embodied-ppo"] and entry[0] in PROJECT["scripts"]
    (command,) = [json.loads(rest) for rest in words("CMD")]
    verb, experiment = command
    assert verb == "train"
    assert (
        ROOT / "configs" / "experiment" / f"{experiment.removeprefix('experiment=')}.yaml"
    ).is_file()
    (home,) = words("WORKDIR")
    assert any(f"PATH={home}/.venv/bin:" in rest for rest in words("ENV"))


def test_what_builds_and_runs_it_says_so() -> None:
    """The commands of its head and of docs/image.md: arguments that are declared, the folder that
    runs are in.
    """
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "docs" / "image.md").read_text()
    declared = {rest.partition("=")[0] for rest in words("ARG")}
    assert set(re.findall(r"--build-arg (\w+)=", text)) == declared
    (home,) = words("WORKDIR")
    assert set(re.findall(r"-v [\w-]+:(\S+)", text)) == {f"{home}/runs"}
