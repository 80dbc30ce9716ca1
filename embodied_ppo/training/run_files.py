"""Find the directories of runs, read where they branch. Does not import torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import CheckpointError, ConfigError, show_path
from embodied_ppo.core import guarded_files

METRICS = "metrics.jsonl"  # a directory with this file is a run
SWEEP = "sweep.json"  # file in the folder of a sweep that lists its runs
PARENT = "parent.json"  # file of a branch that names the run from which it was started
DEPTH = 4  # depth of the search for runs below a folder
# Message of log.txt; without those of trackers, which may follow the line on the end of the run.
MESSAGE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?!warning: |wandb: |mlflow: )(.*)$", re.M)


def check_exists(path: str | Path, option: str) -> None:
    """Check the path of a checkpoint or run, the value of ``option``.

    Raises:
        CheckpointError: It does not exist.
    """
    if not os.path.exists(path):
        fact = f"{option}={show_path(path)}: does not exist"
        raise CheckpointError(f"{fact}; give a run directory or runs/../checkpoints/step_*")


def check_compared(path: str | Path) -> None:
    """Check the path of a run, a checkpoint or a folder of runs that is compared.

    Raises:
        ConfigError: It does not exist.
    """
    if not os.path.exists(path):
        raise ConfigError(
            f"{show_path(path)}: does not exist; name a run, a checkpoint or a folder"
        )


def find_runs(roots: Sequence[Path], *, links: bool = False) -> dict[str, Path]:
    """Return absolute path -> directory of every run that ``roots`` are or contain.

    Args:
        roots: Folders.
        links: Whether symbolic links to folders are followed.
    """
    runs: dict[str, Path] = {}
    for root in roots:
        for name, subfolders, files in os.walk(root, followlinks=links):
            folder = Path(name)
            if METRICS in files:
                # A browser cannot send bytes that are not UTF-8.
                runs[os.fsencode(folder.absolute()).decode(errors="replace")] = folder
            # A run contains no other runs, so the search ends there. ``os.walk`` enters
            # ``subfolders``.
            if METRICS in files or len(folder.relative_to(root).parts) >= DEPTH:
                subfolders.clear()
            else:
                subfolders[:] = sorted(n for n in subfolders if not n.startswith("."))
    return runs


def in_sweep_order(run_dirs: Sequence[Path]) -> list[Path]:
    """Return run directories by folder, those of a sweep in the order of its runs.

    The first run of a sweep has the values that the user wrote first.
    """

    def key(run_dir: Path) -> tuple[str, int, str]:
        folder, names = run_dir.parent, list[str]()
        # Without a readable list, runs are in the order of their names.
        with suppress(OSError, ValueError, KeyError, TypeError):
            runs = guarded_files.read_object(folder / SWEEP, {"runs": list})["runs"]
            names = [str(row["folder"]) for row in runs]
        position = names.index(run_dir.name) if run_dir.name in names else len(names)
        return str(folder), position, run_dir.name

    return sorted(run_dirs, key=key)


def differing_options(options: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return every option that differs between runs, with its values in the order of the runs.

    A value is None if the run does not read the option. Runs without any option are not compared.
    """
    names = dict.fromkeys(name for values in options for name in values)
    return [
        {"option": name, "values": [values.get(name) for values in options]}
        for name in names
        if len({values.get(name) for values in options if values}) > 1
    ]


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
        # The relative path first: both folders may have been copied to another place.
        for path in (run_dir / self.relative, Path(self.run)):
            # A path in parent.json may be too long, or contain a null character or a loop of links.
            with suppress(OSError, ValueError, RuntimeError):
                if (path := path.resolve()).joinpath("config.yaml").is_file():
                    return path
        return None


# Entries of parent.json.
PARENT_FIELDS = {"run": str, "relative": str, "update": int, "policy_sha256": str, "options": dict}


def read_parent(run_dir: Path, *, follow_links: bool = True) -> Parent | None:
    """Return the parent of a run; None for a run that began by itself.

    Raises:
        CheckpointError: parent.json is damaged.
    """
    path = run_dir / PARENT
    hint = "remove parent.json if the parent of the run does not matter"
    with guarded_files.refusing_damage(path, hint):
        try:
            content = guarded_files.read_object(path, PARENT_FIELDS, follow_links=follow_links)
        except FileNotFoundError:
            return None
        # The file may come from another machine or an editor, so each entry is checked.
        if not all(isinstance(x, list) and len(x) == 2 for x in content["options"].values()):
            raise ValueError("its entry options is not a pair of values for each option")
        content["options"] = {name: (old, new) for name, (old, new) in content["options"].items()}
        return Parent(**{name: content[name] for name in PARENT_FIELDS})


# --------------------------------------------------------------------------------------------- rows
def metric_rows(run_dir: Path) -> Iterator[tuple[bytes, dict[str, float | None] | None]]:
    """Yield (line, row) of each line of metrics.jsonl; row is None for a damaged line.

    A row has the number of an update. Its other entries are numbers, None for those that are not
    finite.

    Raises:
        CheckpointError: The file is missing or cannot be read.
    """
    path = run_dir / METRICS
    with guarded_files.refusing_damage(path, "name another run"):
        for line in guarded_files.read_lines(path):
            try:
                # Damaged lines are yielded as well, because callers report their positions.
                row = guarded_files.parse_row(line)
                guarded_files.update_of(row)
            except ValueError:
                row = None
            yield line, row
