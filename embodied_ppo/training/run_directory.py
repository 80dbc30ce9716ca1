"""Directory of a run: location, lock, and the checkpoint to resume."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml

from embodied_envs.base import watchdog
from embodied_envs.base.errors import ConfigError, join_names, show, show_path
from embodied_envs.types import Say
from embodied_ppo.core import guarded_files
from embodied_ppo.core.version import __version__
from embodied_ppo.options import loader
from embodied_ppo.options.batch_sizes import total_updates
from embodied_ppo.options.reward_groups import value_names
from embodied_ppo.options.schema import Config
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_files import METRICS, PARENT, Parent

# Kind -> names of options: what each may change in a run that starts from a checkpoint.
_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_OPTIONS: dict[str, tuple[str, ...]] = {kind: tuple(x.split()) for kind, x in _TABLE.items()}
FREE_ON_RESUME, FIXED_ON_RESUME = _OPTIONS["free_on_resume"], _OPTIONS["fixed_on_resume"]
ROUNDING_OPTIONS, SAME_FUNCTION = _OPTIONS["rounding"], _OPTIONS["same_function"]
TASKS, PATHS, SOURCES = _OPTIONS["tasks"], _OPTIONS["paths"], _OPTIONS["sources"]
# Files that a run writes into its directory.
FILES = ("config.yaml", "metrics.jsonl", "log.txt", "summary.json", "trackers.json")
FILES += (PARENT, "metrics.sha256")
LOCK = ".lock"  # name of the file in a run directory that the training process locks


def absolute(config: Config) -> Config:
    """Make all paths in a config absolute, so that the run can be evaluated from any folder."""

    def absolute_path(value: str) -> str:
        return str(Path(value).expanduser().absolute())

    def absolute_source(value: str) -> str:
        file, colon, name = value.partition(":")
        return f"{absolute_path(file)}{colon}{name}" if file.endswith(".py") else value

    def changed(section: Any, option: str, function: Callable[[str], str]) -> Any:
        name, _, inner = option.partition(".")
        value = getattr(section, name)
        if inner:
            value = changed(value, inner, function)
        elif isinstance(value, tuple):
            value = tuple(map(function, value))
        elif isinstance(value, dict):
            value = {function(path): weight for path, weight in value.items()}
        elif value is not None:
            value = function(value)
        return replace(section, **{name: value})

    for options, function in ((PATHS, absolute_path), (SOURCES, absolute_source)):
        for option in options:
            config = changed(config, option, function)
    terms = {
        name: replace(
            term,
            grader=term.grader and absolute_source(term.grader),
            model=term.model and absolute_path(term.model),
        )
        for name, term in config.reward.terms.items()
    }
    return replace(config, reward=replace(config.reward, terms=terms))


def new_run_dir(config: Config) -> Path:
    """Return runs/NAME/<time>-<seed>."""
    # Milliseconds, because jobs of a sweep start in the same second.
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]
    return Path("runs") / config.name / f"{stamp}-{config.seed}"


def locate(config: Config, say: Say) -> tuple[Path, str | None]:
    """Return the run directory and the checkpoint to resume.

    Args:
        config: Options, of which ``run_dir``, ``resume``, ``name`` and ``seed`` are read.
        say: Called with a line for the user.

    Returns:
        The directory, and the path of a checkpoint, "newest" (of this run), or None (a new run).

    Raises:
        ConfigError, CheckpointError: The directory or the checkpoint cannot be used.
    """
    # New run: its directory must not contain the checkpoints of another one.
    if config.resume is None:
        run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(config)
        if checkpoint.steps(run_dir / "checkpoints"):
            fact = f"run_dir={show_path(run_dir)}: already contains a run"
            raise ConfigError(f"{fact}; continue it with resume=auto or name another")
        return run_dir, None
    # auto: continue the newest run of this name and seed, or start one.
    if config.resume == "auto":
        if config.run_dir:
            run_dir = Path(config.run_dir)
        else:
            # Names begin with the time of the start, so the last name is the newest run. They end
            # with milliseconds and seed; a branch ends with its update, RUN-fork-UPDATE.
            runs = sorted((Path("runs") / config.name).glob(f"*.???-{config.seed}"))
            run_dir = next((r for r in reversed(runs) if checkpoint.steps(r / "checkpoints")), None)
        # The same command therefore starts a run and continues it after an interruption.
        if run_dir is None or not checkpoint.steps(run_dir / "checkpoints"):
            say(
                f"resume=auto: {config.name!r} with seed {config.seed} starts, without a checkpoint"
            )
            return run_dir or new_run_dir(config), None
        return run_dir, "newest"
    # resume=RUN: continue in the directory of that run.
    if (Path(config.resume) / "checkpoints").is_dir() and not config.run_dir:
        return Path(config.resume), "newest"
    # resume=CHECKPOINT: continue its run, or branch into another directory.
    source = checkpoint.find(config.resume)
    home = source.parent.parent if source.parent.name == "checkpoints" else source.parent
    run_dir = Path(config.run_dir) if config.run_dir else home
    # A branch does not change the run that it leaves.
    if run_dir.resolve() != home:
        # A run that was killed before its first checkpoint has rows, too.
        rows = run_dir / METRICS
        if checkpoint.steps(run_dir / "checkpoints") or (rows.is_file() and rows.stat().st_size):
            fact = f"run_dir={show_path(run_dir)}: holds another run already"
            raise ConfigError(f"{fact}; name a new one, or leave it out")
        return run_dir, str(source)
    # In the same directory, an older checkpoint would overwrite the later ones.
    newest = next(reversed(checkpoint.steps(source.parent).values()), source).name
    if newest != source.name:
        raise ConfigError(
            f"start a branch with run_dir=NEW, or continue the run with resume={show_path(home)}:"
            f" resume={show_path(config.resume)} has continued to {newest}, which this run would"
            " overwrite"
        )
    return run_dir, str(source)


def parent_of(config: Config, source: checkpoint.Checkpoint, run_dir: Path) -> Parent | None:
    """Return where a run branches from another one; None where it continues itself.

    Args:
        config: Options of the branch.
        source: The checkpoint to resume.
        run_dir: Directory of the branch.
    """
    # If a checkpoint was moved out of its run, the folder that contains it counts as the run.
    folder = source.path.parent
    home = folder.parent if folder.name == "checkpoints" else folder
    # RUN/checkpoints may be a link to a folder on another disk.
    if home.resolve() == run_dir.resolve() or folder == (run_dir / "checkpoints").resolve():
        return None
    return branch(home, source, run_dir, stored_config(source), config)


def branch(
    home: Path, source: checkpoint.Checkpoint, run_dir: Path, trained: Config, config: Config
) -> Parent:
    """Return the record of a branch.

    Args:
        home: Directory of the run that it leaves.
        source: The state at the branch.
        run_dir: Directory of the branch.
        trained: Options of the run.
        config: Options of the branch.
    """
    return Parent(
        run=str(home.resolve()),
        relative=os.path.relpath(home.resolve(), run_dir.resolve()),
        update=source.update,
        policy_sha256=str(source.manifest["files"][checkpoint.POLICY]["sha256"]),
        options=differences(trained, config),
    )


def differences(trained: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return path -> (value in a stored run, value now) of the options that differ."""
    # Stored options contain absolute paths, so the new ones must, too.
    old, new = (loader.flat(loader.relevant(c)) for c in (trained, absolute(config)))
    paths = new.keys() & old.keys() - {"run_dir", "resume"}
    return {p: (old[p], now) for p, now in new.items() if p in paths and old[p] != now}


def stored_config(source: checkpoint.Checkpoint) -> Config:
    """Return the options in the config.yaml of a checkpoint.

    Raises:
        CheckpointError: The file is damaged.
        ConfigError: Its options are not of this version.
    """
    path = source.path / checkpoint.CONFIG
    # ``resume`` belongs to the command that continued the run and not to the run.
    options = {**read_options(path), "resume": None}
    return loader.load(Config, options, source=f"{loader.STORED}, {path}")


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in the config.yaml of a run or checkpoint; raises CheckpointError."""
    with guarded_files.refusing_damage(path, "use another checkpoint or run"):
        return guarded_files.check_fields(loader.read_yaml(path), {})


def check_values(config: Config, trained: Config, source: str) -> None:
    """Raise ConfigError if ``source`` has values, or deviations of returns, of other rewards."""
    then, now = value_names(trained), value_names(config)
    kept = config.mode == "embodied" or config.algorithm.reward_norm == "running"
    if kept and then != now:
        raise ConfigError(
            "write algorithm.reward_groups, algorithm.curiosity.weight and algorithm.popart as in"
            f" {source}: its values are those of {join_names(then, 90)}, and these options need"
            f" those of {join_names(now, 90)}"
        )


def check_fixed_options(config: Config, trained: Config) -> None:
    """Raise ConfigError if an option that must not change differs from that of ``trained``."""
    old, new = (loader.flat(loader.relevant(c)) for c in (trained, config))
    several = any(isinstance(options.get("env.id"), list) for options in (old, new))
    for path in (*FIXED_ON_RESUME, *(TASKS if several else ())):
        if path in new and old.get(path) != (now := new[path]):
            raise ConfigError(
                f"leave out {path} and experiment= (resume= alone restores the run's options), or"
                " start a new run from the weights with train initial_policy=RUN:"
                f" {path}={show(now)[:40]}: the run to resume has {show(old.get(path))[:40]}, on"
                " which its counters or random numbers depend"
            )
    check_values(config, trained, "the run to resume")


def check_resume(
    config: Config, source: checkpoint.Checkpoint, updates: int, device: torch.device, say: Say
) -> None:
    """Report the options that differ from the checkpoint's and may change results.

    Args:
        config: Options of this run.
        source: The checkpoint to resume.
        updates: Updates of the complete run.
        device: Device of this run.
        say: Called with a line for each difference.

    Raises:
        ConfigError: An option in FIXED_ON_RESUME differs, or the checkpoint has more updates.
    """
    trained = stored_config(source)
    check_fixed_options(config, trained)
    old = loader.flat(loader.relevant(trained))
    # Other options may change, but then the run is not the uninterrupted one, so report each.
    for path, now in loader.flat(loader.relevant(config)).items():
        if path.split(".")[0] in (*FREE_ON_RESUME, *ROUNDING_OPTIONS) or old.get(path) == now:
            continue
        say(f"resume: {path} was {show(old.get(path))}, is {show(now)}")
    # Hardware, threads and compilation change the order of sums, which changes roundings.
    now = arithmetic(config, device)
    then = {"deterministic": False} | source.manifest["arithmetic"]  # earlier versions lack it
    if changes := [
        f"{name} was {then[name]}, is {now[name]}" for name in now if then.get(name) != now[name]
    ]:
        say(f"resume: {', '.join(changes)}: results differ by rounding from an uninterrupted run")
    # These schedules depend on the number of updates, so a longer run has other learning rates.
    a, planned = config.algorithm, total_updates(trained)
    schedules = {
        f"lr_schedule={a.lr_schedule}": a.lr_schedule in ("linear", "cosine"),
        f"entropy_schedule={a.entropy_schedule}": a.entropy_schedule != "constant",
    }
    covering = ", ".join(name for name, applies in schedules.items() if applies)
    if covering and planned != updates:
        change = f"the run had {planned} updates, now {updates}"
        say(f"resume: {change}: {covering} covers the new number")
    if source.update > updates:
        fact = f"updates={updates}: the checkpoint {source.path} has completed {source.update}"
        raise ConfigError(f"{fact}; set more")


@contextmanager
def claimed(config: Config, say: Say) -> Iterator[tuple[Path, str | None]]:
    """Lock the run directory, then yield the result of ``locate``.

    It is computed again under the lock, because another process may have trained in the directory
    before.
    """
    # Without messages, because the call under the lock repeats them.
    run_dir, _ = locate(config, lambda line: None)
    with locked(run_dir):
        # Remove what killed processes left.
        for name in FILES:
            (run_dir / f"{name}.new").unlink(missing_ok=True)
        checkpoint.remove_temporary(run_dir / "checkpoints")
        # Keep the directory that is locked: under another time or a newer run, ``locate`` would
        # name another one.
        if config.resume in (None, "auto"):
            config = replace(config, run_dir=str(run_dir))
        yield locate(config, say)


@contextmanager
def locked(run_dir: Path, option: str = "run_dir") -> Iterator[None]:
    """Create and lock a run directory; at the end, remove the lock, and the directory if empty.

    Args:
        run_dir: The directory.
        option: The option that names it, for messages.

    Raises:
        ConfigError: Another process trains in it, or it cannot be written.
    """
    # Only folders that this call creates are removed at the end.
    absent = [path for path in (run_dir, *run_dir.parents) if not os.path.exists(path)]
    path = run_dir / LOCK
    try:
        with _lock(path, option) as file:
            # On a full disk only the message of a refused process lacks the owner.
            with suppress(OSError):
                file.truncate(0)
                file.write(f"pid {watchdog.command_pid()} on {socket.gethostname()}\n".encode())
            try:
                yield
            finally:
                with suppress(OSError):  # the directory was removed, or its disk is read-only
                    # Another process may own a new file, after the directory was removed.
                    if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                        path.unlink()
    finally:
        for folder in absent:
            with suppress(OSError):  # it has files, or another process uses it
                folder.rmdir()


def _lock(path: Path, option: str) -> FileIO:
    """Open and lock the file ``path``."""
    folder = show_path(path.parent)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(path, "a+")  # unbuffered: on a full disk the write fails, not the closing
        except FileNotFoundError:  # another process has just removed the directory
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # the command line has its own message
                raise
            raise ConfigError(
                f"name another: {option}={folder} cannot be written ({error.strerror})"
            ) from error
        try:
            # The system releases the lock when this process ends, also after a kill.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # The owner has written its process id and host into the file.
            file.seek(0)
            owner = file.readall().decode(errors="replace").strip() or "another process"
            file.close()
            fact = f"{owner} is training in it; wait, or name another"
            if not isinstance(error, BlockingIOError):  # a network disk without locks
                fact = f"cannot be locked ({error.strerror}); name a folder on another disk"
            raise ConfigError(f"{option}={folder}: {fact}") from error
        # A lock on a file that its owner has just removed would exclude no other process.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "envpool", "hydra-core", "tensorboard")
PACKAGES += ("transformers",)


def arithmetic(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the settings besides the algorithm's options that rounding depends on."""
    # The vector instructions of a CPU determine the order of sums.
    name = f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "threads": config.threads or torch.get_num_threads(),
        "matmul_precision": "highest",  # an option of earlier versions
        "compile": config.compile,
        "deterministic": config.deterministic,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "torch": versions()["torch"],
    }


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this package, Python and the installed PACKAGES."""
    installed = {"embodied_ppo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


@contextmanager
def report_write_errors(out: Path) -> Iterator[None]:
    """Raise ConfigError where a file in ``out`` cannot be written within the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"out={out}: cannot be written ({error.strerror}); name another directory"
        ) from error


@contextmanager
def export_folder(out: Path) -> Iterator[None]:
    """Create the folder of an export, and remove it if the export fails.

    Raises:
        ConfigError: ``out`` contains files, or is not writable.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"name a new directory: out={show_path(out)} is not an empty directory")
    with report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # also an interrupt
        shutil.rmtree(out)
        raise


def check_writable(out: Path) -> None:
    """Raise ConfigError if no file can be written in a folder.

    It is called before a computation whose result is written there.
    """
    with report_write_errors(out):
        existing = next(path for path in (out, *out.parents) if os.path.exists(path))
        # A trial is reliable, unlike permission bits: the disk may be full or read-only.
        TemporaryFile(dir=existing).close()


def config_hash(config: Config) -> str:
    """Return 12 hex digits over every option that can change a result."""
    return options_hash(loader.relevant(config))


def options_hash(options: Mapping[str, Any]) -> str:
    """Return ``config_hash`` of the options in a config.yaml."""
    plain = dict(options)
    # These options name or describe a run and do not change its results.
    unrelated = ("name", "description", "run_dir", "resume", "keep_last", "allow_changed_task")
    for path in (*unrelated, "trackers", "tracker_project", "tracker_run_name"):
        plain.pop(path, None)
    return digest(plain)[:12]


def digest(plain: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain options, in hex."""
    # Keys are sorted, so that the order in a file does not change the hash.
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
