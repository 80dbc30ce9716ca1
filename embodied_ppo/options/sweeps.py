"""Overrides with several values: the runs of a sweep."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import ConfigError, shorten
from embodied_ppo.options.compose import group_choice, parse_line, plain, prepare
from embodied_ppo.options.config_folders import ConfigFolders, config_folders
from embodied_ppo.options.loader import Loaded

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# Folder of the sweeps; a sweep whose jobs have the same name is in SWEEPS/NAME.
SWEEPS = "runs/sweeps/"
READ = ("hydra.sweep.dir", "hydra.sweeper.params")  # options of Hydra that a sweep reads
# Largest number of values of one option, and of runs of a sweep, that are listed.
MAX_SWEEP = 10_000
MAX_FOLDER_NAME = 120  # maximum length of the name of a job's folder, characters


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep.

    Attributes:
        number: Position in the sweep, from 0.
        lines: Overrides of the run, ``option=value``.
        options: Option -> value of those that differ between the runs; the seed is last.
        folder: Run directory.
        loaded: Options of the run.
    """

    number: int
    lines: Sequence[str]
    options: Mapping[str, str]
    folder: Path
    loaded: Loaded


def sweep_jobs(args: argparse.Namespace) -> tuple[Path, list[SweepJob]]:
    """Return the folder and the runs of a sweep: all combinations of the values.

    A run is in a folder of its own unless run_dir names one.

    Raises:
        ConfigError: A run is refused, or another sweeper or launcher is chosen.
    """
    folders = config_folders(args)
    overrides = [parse_line(line, folders) for line in args.overrides]
    for override in overrides:
        if override.is_hydra_override() and not override.key_or_group.startswith(READ):
            raise ConfigError(
                f"remove {override.input_line}: --multirun reads {' and '.join(READ)} only"
            )
    hydra = _hydra_section(overrides, folders)
    for part, target in ("sweeper", "BasicSweeper"), ("launcher", "BasicLauncher"):
        if not hydra[part]._target_.endswith(f".{target}"):
            raise ConfigError(
                f"hydra/{part} = {hydra[part]._target_}: is not used; --multirun starts the runs"
                " itself, several at the same time (--jobs N); remove it"
            )
    listed = _params(hydra, overrides, folders)
    listed += [override for override in overrides if not override.is_hydra_override()]
    for override in listed:
        if override.is_interval_sweep():
            raise ConfigError(
                f"write a list of values: {override.input_line} is an interval, which --multirun"
                " does not read"
            )
    values = [_values(o) if o.is_sweep_override() else (str(o.input_line),) for o in listed]
    if math.prod(map(len, values)) > MAX_SWEEP:
        number = math.prod(map(len, values))
        raise ConfigError(f"write fewer values: these are {number} runs, the limit is {MAX_SWEEP}")
    runs: list[tuple[list[str], dict[str, str], Loaded]] = []
    run_dirs: dict[str, int] = {}
    for number, combination in enumerate(itertools.product(*values)):
        lines: list[str] = []
        differing: dict[str, str] = {}
        for override, value in zip(listed, combination, strict=True):
            if override.is_sweep_override():
                differing[override.key_or_group] = value
                value = f"{override.get_key_element()}={value}"
            lines.append(value)
        try:
            loaded = prepare(args, lines)
        except ValueError as e:
            text = " ".join(line.lstrip("+") for line in lines)
            raise type(e)(f"job {number} ({text}): {e}") from e
        folder = loaded.config.run_dir
        if folder is not None and run_dirs.setdefault(folder, number) != number:
            jobs_of = f"job {run_dirs[folder]} and of job {number}"
            raise ConfigError(f"run_dir = {folder} is that of {jobs_of}; leave run_dir out")
        # With the seed last, folders of runs that differ in the seed only are next to each other.
        options = dict(sorted(differing.items(), key=lambda pair: pair[0] == "seed"))
        runs.append((lines, options, loaded))
    sweep = _sweep_folder(hydra, {loaded.config.name for _, _, loaded in runs})
    jobs: list[SweepJob] = []
    for number, (lines, options, loaded) in enumerate(runs):
        folder = loaded.config.run_dir
        if folder is None:
            folder = str(job_folder(sweep, options, number, {job.folder for job in jobs}))
        loaded = replace(loaded, config=replace(loaded.config, run_dir=folder))
        jobs.append(SweepJob(number, lines, options, Path(folder), loaded))
    return sweep, jobs


def _hydra_section(overrides: Sequence[Override], folders: ConfigFolders) -> Any:
    """Return section hydra of the composed configs."""
    chosen = [
        str(o.input_line) if o.is_hydra_override() else group_choice(o)
        for o in overrides
        if o.is_hydra_override() or (folders.selects(o) and not o.is_sweep_override())
    ]
    return folders.compose(folders.primary, chosen).hydra


def _params(hydra: Any, overrides: Sequence[Override], folders: ConfigFolders) -> list[Override]:
    """Return hydra.sweeper.params of a config without those that the command line replaces."""
    given = {o.key_or_group for o in overrides}
    params = plain(hydra.sweeper.params or {})
    return [parse_line(f"{k}={v}", folders) for k, v in params.items() if k not in given]


def _sweep_folder(hydra: Any, names: Collection[str]) -> Path:
    """Return hydra.sweep.dir, which by default has the name of the jobs."""
    folder = Path(hydra.sweep.dir)
    if len(names) == 1 and str(plain(hydra.sweep)["dir"]).startswith(f"{SWEEPS}${{"):
        return Path(SWEEPS) / next(iter(names)) / folder.relative_to(SWEEPS)
    return folder


def _values(override: Override) -> tuple[str, ...]:
    """Return the values of a list or range.

    Raises:
        ConfigError: There are none, or more than MAX_SWEEP.
    """
    from hydra.errors import HydraException

    try:
        values = tuple(itertools.islice(override.sweep_string_iterator(), MAX_SWEEP + 1))
    except (HydraException, ValueError, OverflowError):  # a glob, or a range with step 0
        values = ()
    if not 0 < len(values) <= MAX_SWEEP:
        raise ConfigError(
            f"write 1 to {MAX_SWEEP} values, for example {override.key_or_group}=1,2 or"
            f" range(START,STOP,STEP): {shorten(str(override.input_line), 100)} has"
            f" {'none' if not values else 'more'}"
        )
    return values


def job_folder(
    sweep: Path, options: Mapping[str, str], number: int, taken: Collection[Path] = ()
) -> Path:
    """Return the folder of a job, such as ``lr-0.001_seed-0``.

    It is named after the options that differ between jobs. An option is named without its section
    where that is unambiguous. Characters that a command line would have to quote become ``-``. The
    job's number is appended to a name that is too long or ``taken``, and is the name where no
    option differs.
    """
    leaves = [key.rpartition(".")[2] for key in options]
    parts = [
        f"{leaf if leaves.count(leaf) == 1 else key}-{value.strip(chr(39) + chr(34) + '[]{}()')}"
        for (key, value), leaf in zip(options.items(), leaves, strict=True)
    ]
    name = re.sub(r"[^\w.-]+", "-", "_".join(parts).replace("+", ""), flags=re.ASCII).strip(".-")
    if len(name) > MAX_FOLDER_NAME or sweep / name in taken:
        name = f"{name[:MAX_FOLDER_NAME]}-{number}".lstrip("-")
    return sweep / (name or str(number))
