"""Find the directories of runs, read where they branch. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied_ppo.core.errors import CheckpointError, ConfigError

METRICS = "metrics.jsonl"
"""A directory with this file is a run."""
SWEEP = "sweep.json"
"""File in the folder of a sweep that lists its runs."""
PARENT = "parent.json"
"""File of a branch that names the run from which it was started."""
DEPTH = 4
"""Depth of the search for runs below a folder."""


def check_exists(path: str | Path, option: str) -> None:
    """Check the path of a checkpoint or run, the value of ``option``.

    Raises:
        CheckpointError: It does not exist.
    """
    if not Path(path).exists():
        raise CheckpointError(
            f"{option}={path}: does not exist; give a run directory or runs/../checkpoints/step_*"
        )


def check_compared(path: str | Path) -> None:
    """Check the path of a run, a checkpoint or a folder of runs that is compared.

    Raises:
        ConfigError: It does not exist.
    """
    if not Path(path).exists():
        raise ConfigError(f"{path}: does not exist; name a run, a checkpoint or a folder")


def find_runs(roots: Sequence[Path], *, links: bool = False) -> dict[str, Path]:
    """Return absolute path -> directory of every run that ``roots`` are or contain.

    Args:
        roots: Folders.
        links: Whether symbolic links to folders are followed; each folder is visited once.
    """
    runs: dict[str, Path] = {}
    for root in roots:
        visited: set[str] = set()
        for name, subfolders, files in os.walk(root, followlinks=links):
            folder = Path(name)
            if links:
                real = os.path.realpath(name)
                if real in visited:
                    subfolders.clear()
                    continue
                visited.add(real)
            if METRICS in files:
                # A browser cannot send bytes that are not UTF-8.
                runs[os.fsencode(folder.absolute()).decode(errors="replace")] = folder
            if METRICS in files or len(folder.relative_to(root).parts) >= DEPTH:
                subfolders.clear()
            else:
                subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
    return runs


def in_sweep_order(run_dirs: Sequence[Path]) -> list[Path]:
    """Return run directories with those of a sweep in the order of its runs.

    The first run of a sweep has the values that the user wrote first.
    """

    def key(run_dir: Path) -> tuple[str, int, str]:
        folder, names = run_dir.parent, list[str]()
        with suppress(OSError, ValueError, KeyError, TypeError):
            runs = json.loads((folder / SWEEP).read_text())["runs"]
            names = [str(row["folder"]) for row in runs]
        position = names.index(run_dir.name) if run_dir.name in names else len(names)
        return str(folder), position, run_dir.name

    return sorted(run_dirs, key=key)


# ------------------------------------------------------------------------------------------ parents
@dataclass(frozen=True)
class Parent:
    """Where a run branches from another one: content of parent.json.

    Attributes:
        run: Directory of the other run, absolute.
        relative: The same relative to the directory of the branch, for folders that are moved
            together.
        update: Completed updates of the other run at the branch.
        policy_sha256: SHA-256 of the policy's file at the branch.
        options: Option -> (value in the other run, value in the branch).
    """

    run: str
    relative: str
    update: int
    policy_sha256: str
    options: Mapping[str, tuple[Any, Any]]

    def text(self) -> str:
        """Return the content of parent.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def path(self, run_dir: Path) -> Path | None:
        """Return the directory of the other run; None where it does not exist any more.

        Args:
            run_dir: Directory of the branch.
        """
        for path in (run_dir.resolve() / self.relative, Path(self.run)):
            if (path / "config.yaml").is_file():
                return path.resolve()
        return None


def parse_parent(text: str) -> Parent:
    """Parse parent.json.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The text is damaged.
    """
    content = json.loads(text)
    return Parent(
        run=str(content["run"]),
        relative=str(content["relative"]),
        update=int(content["update"]),
        policy_sha256=str(content["policy_sha256"]),
        options={str(name): (old, new) for name, (old, new) in content["options"].items()},
    )


def read_parent(run_dir: Path) -> Parent | None:
    """Return the parent of a run; None for a run that began by itself.

    Raises:
        CheckpointError: parent.json is damaged.
    """
    path = run_dir / PARENT
    try:
        return parse_parent(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: is damaged ({error!r}); remove it if the parent of the run does not matter"
        ) from error
