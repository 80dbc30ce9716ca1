"""Tests of the wheel: it contains all packages and configs, and works in another environment."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_helpers import run_process

ROOT = Path(__file__).resolve().parents[2]
# Folder of the checkout -> folder of the wheel.
INSTALLED = {
    "embodied_ppo": "embodied_ppo",
    "configs": "embodied_ppo/configs",
    "envs/embodied_envs": "embodied_envs",
}
TRASH = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


def run(*command: object, cwd: Path) -> str:
    """Run a command without the import paths of the tests and return its standard output."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return run_process(*command, cwd=cwd, env=env)


def sources() -> set[str]:
    """Return the names in the wheel of all files of the checkout that belong there."""
    names = set()
    for source, target in INSTALLED.items():
        for path in (ROOT / source).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(part == "__pycache__" or part.startswith(".") for part in parts)
            if path.is_file() and not hidden:
                names.add(f"{target}/{path.relative_to(ROOT / source).as_posix()}")
    return names


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Return the folder of the source distribution and the wheel that is built from it.

    The folder is $EMBODIED_PPO_DIST, else both are built from a copy of the checkout.
    """
    if given := os.environ.get("EMBODIED_PPO_DIST"):
        return (ROOT / given).resolve()
    copy = tmp_path_factory.mktemp("checkout")
    for name in INSTALLED:
        shutil.copytree(ROOT / name, copy / name, ignore=TRASH)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("embodied_ppo-*.whl")
    return path


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory) -> Path:
    """Return ``bin`` of a new environment with the wheel and the packages of this environment.

    A path line in a .pth file adds site-packages without running its .pth files, one of which is
    the editable installation of the checkout.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(paths))
    return home / "bin"


@pytest.mark.slow
def test_wheel_contains_the_files_of_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert names == sources(), "pyproject.toml: [tool.setuptools] packages and package-data"
    assert "embodied_ppo/configs/train.yaml" in names
    assert info, "the wheel contains the licence"


def test_sdist_builds_without_the_checkout(dist: Path) -> None:
    (path,) = dist.glob("embodied_ppo-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    required = {"pyproject.toml", "LICENSE", "README.md", "configs/train.yaml"}
    assert required | {"envs/embodied_envs/__init__.py"} <= names


@pytest.mark.slow
def test_wheel_works_from_another_directory(bin_dir: Path, tmp_path) -> None:
    script = (
        "import embodied_envs, embodied_ppo.configs, importlib.resources as lib\n"
        "config = lib.files('embodied_ppo.configs') / 'train.yaml'\n"
        "print(embodied_envs.__file__, embodied_ppo.__file__, config, sep='\\n')"
    )
    for line in run(bin_dir / "python", "-c", script, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(bin_dir.parent) and Path(line).is_file(), line


@pytest.mark.slow
def test_imports_are_declared() -> None:
    """Check that all imported packages are declared in pyproject.toml, and no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base = {canonicalize_name(Requirement(r).name) for r in project["dependencies"]}
    optional = {
        canonicalize_name(Requirement(r).name)
        for extra in extras
        if extra != "dev"
        for r in extras[extra]
    }

    imported = set()
    for path in (path for name in INSTALLED for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    # The files of a bundle import each other without a package.
    imported -= {*sys.stdlib_module_names, "embodied_ppo", "embodied_envs", "robot_loop"}
    owners = packages_distributions()
    used = {canonicalize_name(owner) for name in imported for owner in owners.get(name, [name])}

    # Users install vllm: it pins another torch and transformers (docs/dependencies.md).
    # mlflow-skinny, which is not installed here, contains the module mlflow.
    assert used - base - optional - {"mlflow"} == {"vllm"}, "imported, not declared"
    indirect = {
        "tensorboard",  # torch.utils.tensorboard writes with it
        "imageio-ffmpeg",  # imageio writes mp4 with it
        "mujoco",  # gymnasium's MuJoCo tasks
        "ray",  # clusters
    }
    assert base - used - indirect == set(), "declared, not imported"
