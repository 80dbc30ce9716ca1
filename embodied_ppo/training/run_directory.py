"""Directory of a run: location, lock, and the checkpoint to resume."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo import __version__
from embodied_ppo.config import loader
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import Config
from embodied_ppo.core import watchdog
from embodied_ppo.core.errors import show
from embodied_ppo.core.types import CheckpointError, ConfigError
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_files import PARENT, Parent

FREE_ON_RESUME = (
    *("updates", "env_steps", "save_every", "keep_last", "eval_every", "evaluation", "run_dir"),
    *("resume", "name", "description", "allow_changed_task"),
    *("trackers", "tracker_project", "tracker_run_name"),
)
"""Options that may change on resume without a message; all other changes are reported."""
ROUNDING_OPTIONS = ("device", "threads", "matmul_precision", "compile")
"""Options that change results by rounding only; one line reports all changes."""
SAME_FUNCTION = ("mode", "model.policy", "model.activation", "model.heads", "model.decode")
SAME_FUNCTION += ("model.distribution", "model.actor_obs", "env.action_mapping", "env.action_chunk")
SAME_FUNCTION += ("model.std_function", "model.obs_eps", "model.obs_std_eps")
"""Options with other values of which the same weights are another function."""
FIXED_ON_RESUME = (
    *("mode", "algorithm.horizon", "env.num_envs", "seed", "teacher"),
    # With other values the same weights are another function.
    *("model.activation", "model.std_function", "model.heads", "model.decode"),
    # With other values the weights do not fit the model, or belong to other observations.
    *("model.policy", "model.hidden", "model.critic_hidden", "model.shared_backbone"),
    *("model.actor_obs", "model.critic_obs"),
)
"""Options that must not change on resume."""
FILES = ("config.yaml", "metrics.jsonl", "log.txt", "summary.json", "trackers.json")
FILES += (PARENT, "metrics.sha256")
"""Files that a run writes into its directory."""
FOLDERS = ("checkpoints", "tensorboard", "reports", "videos")
"""Folders that a run writes into its directory."""
LOCK = ".lock"
"""Name of the file in a run directory that the training process locks."""


def absolute(config: Config) -> Config:
    """Make all paths in a config absolute, so that the run can be evaluated from any folder."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    def source_file(spec: str) -> str:
        file, colon, name = spec.partition(":")
        return f"{full(file)}{colon}{name}" if file.endswith(".py") else spec

    actor, critic, data, reward = config.actor, config.critic, config.data, config.reward
    return replace(
        config,
        model=replace(
            config.model,
            checkpoint=full(config.model.checkpoint),
            network=config.model.network and source_file(config.model.network),
        ),
        cloning=replace(config.cloning, dataset=full(config.cloning.dataset)),
        teacher=full(config.teacher),
        initial_policy=full(config.initial_policy),
        actor=replace(
            actor,
            model=replace(actor.model, path=full(actor.model.path)),
            tokenizer=full(actor.tokenizer),
        ),
        critic=replace(critic, model=replace(critic.model, path=full(critic.model.path))),
        data=replace(
            data,
            train=tuple(map(str, map(full, data.train))),
            eval=tuple(map(str, map(full, data.eval))),
        ),
        reward=replace(
            reward,
            grader=source_file(reward.grader),
            path=full(reward.path),
            model=replace(reward.model, path=full(reward.model.path)),
        ),
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it; on a full disk the old one remains."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def new_run_dir(config: Config) -> Path:
    """Return runs/NAME/<time>-<seed>, which does not exist yet."""
    # Milliseconds, because jobs of a sweep start in the same second.
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]
    path = Path("runs") / config.name / f"{stamp}-{config.seed}"
    for i in range(1, 1000):
        if not path.exists():
            return path
        path = path.with_name(f"{stamp}.{i}-{config.seed}")
    raise ConfigError(f"run_dir: {path} and 999 others exist; name one with run_dir=DIR")


def locate(config: Config, say: Callable[[str], None]) -> tuple[Path, str | None]:
    """Return the run directory and the checkpoint to resume.

    Args:
        config: Options, of which ``run_dir``, ``resume``, ``name`` and ``seed`` are read.
        say: Called with a line for the user.

    Returns:
        The directory, and the path of a checkpoint, "newest" (of this run), or None (a new run).

    Raises:
        ConfigError, CheckpointError: The directory or the checkpoint cannot be used.
    """
    if config.resume is None:
        run_dir = Path(config.run_dir) if config.run_dir else new_run_dir(config)
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"run_dir={run_dir}: is a file; name a directory")
        if checkpoint.steps(run_dir / "checkpoints"):
            raise ConfigError(
                f"run_dir={run_dir}: holds a run already; continue it with resume=auto or name"
                " another"
            )
        return run_dir, None
    if config.resume == "auto":
        if config.run_dir:
            run_dir = Path(config.run_dir)
        else:
            runs = sorted((Path("runs") / config.name).glob(f"*-{config.seed}"))
            run_dir = next((r for r in reversed(runs) if checkpoint.steps(r / "checkpoints")), None)
        if run_dir is None or not checkpoint.steps(run_dir / "checkpoints"):
            say(
                f"resume=auto: no checkpoint of {config.name!r} with seed {config.seed} yet;"
                " starting a new run"
            )
            return run_dir or new_run_dir(config), None
        return run_dir, "newest"
    if (Path(config.resume) / "checkpoints").is_dir() and not config.run_dir:
        return Path(config.resume), "newest"
    source = checkpoint.find(config.resume)
    home = source.parent.parent if source.parent.name == "checkpoints" else source.parent
    run_dir = Path(config.run_dir) if config.run_dir else home
    if run_dir.resolve() != home:
        if checkpoint.steps(run_dir / "checkpoints"):
            raise ConfigError(
                f"run_dir={run_dir}: holds another run already; name a new one, or leave it out"
            )
        return run_dir, str(source)
    newest = next(reversed(checkpoint.steps(source.parent).values()), source).name
    if newest != source.name:
        raise ConfigError(
            f"resume={config.resume}: the run has continued to {newest}, which this run would"
            f" overwrite; start a branch with run_dir=NEW, or continue the run with resume={home}"
        )
    return run_dir, str(source)


def parent_of(config: Config, source: checkpoint.Checkpoint, run_dir: Path) -> Parent | None:
    """Return where a run branches from another one; None where it continues itself.

    Args:
        config: Options of the branch.
        source: The checkpoint to resume.
        run_dir: Directory of the branch.
    """
    folder = source.path.parent
    home = folder.parent if folder.name == "checkpoints" else folder
    if home.resolve() == run_dir.resolve():
        return None
    return branch(home, source, run_dir, loader.flat(stored_options(source)), config)


def branch(
    home: Path,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    old: Mapping[str, Any],
    config: Config,
) -> Parent:
    """Return the record of a branch.

    Args:
        home: Directory of the run that it leaves.
        source: The state at the branch.
        run_dir: Directory of the branch.
        old: Options of the run, path -> value.
        config: Options of the branch.
    """
    new = loader.flat(loader.relevant(absolute(config)))
    return Parent(
        run=str(home.resolve()),
        relative=os.path.relpath(home.resolve(), run_dir.resolve()),
        update=source.update,
        policy_sha256=str(source.manifest["files"][checkpoint.POLICY]["sha256"]),
        options={
            path: (old[path], now)
            for path, now in new.items()
            if path in old and old[path] != now and path not in ("run_dir", "resume")
        },
    )


def stored_options(source: checkpoint.Checkpoint) -> dict[str, Any]:
    """Return the options in the config.yaml of a checkpoint; raises CheckpointError."""
    file = source.path / checkpoint.CONFIG
    try:
        options = loader.plain_yaml(source.config_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: is no YAML ({' '.join(str(error).split())}); use another checkpoint"
        ) from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{file}: holds no options; use another checkpoint")
    return options


def changed_options(config: Config, source: checkpoint.Checkpoint) -> dict[str, Any]:
    """Return path -> value of the options with another value than in a checkpoint's run."""
    old = loader.flat(stored_options(source))
    return {
        path: now
        for path, now in loader.flat(loader.relevant(absolute(config))).items()
        if path in old and old[path] != now and path not in (*ROUNDING_OPTIONS, "run_dir", "resume")
    }


def check_fixed_options(config: Config, old: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option in FIXED_ON_RESUME differs from ``old``, path -> value."""
    for path, now in loader.flat(loader.relevant(config)).items():
        if path in FIXED_ON_RESUME and old.get(path) != now:
            raise ConfigError(
                f"{path}={now}: the run to resume has {old.get(path)}, on which its weights,"
                " counters or random numbers depend; leave it out (and experiment=: resume= alone"
                " restores the run's options), or start a new run"
            )


def check_resume(
    config: Config,
    source: checkpoint.Checkpoint,
    updates: int,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Report every option that differs from the checkpoint's.

    Args:
        config: Options of this run.
        source: The checkpoint to resume.
        updates: Updates of the complete run.
        device: Device of this run.
        say: Called with a line for each difference.

    Raises:
        ConfigError: An option in FIXED_ON_RESUME differs, or the checkpoint has more updates.
    """
    old = loader.flat(stored_options(source))
    check_fixed_options(config, old)
    for path, now in loader.flat(loader.relevant(config)).items():
        if path.split(".")[0] in (*FREE_ON_RESUME, *ROUNDING_OPTIONS) or old.get(path) == now:
            continue
        say(f"resume: {path} was {show(old.get(path))}, is {show(now)}")
    now, then = arithmetic(config, device), source.arithmetic()
    if then.keys() <= {"torch"}:  # written by an older version: its options are what is known
        now |= {name: getattr(config, name) for name in ROUNDING_OPTIONS}
        then |= {name: old.get(name, now[name]) for name in ROUNDING_OPTIONS}
    if changes := [
        f"{name} was {then[name]}, is {now[name]}" for name in now if then.get(name) != now[name]
    ]:
        say(
            f"resume: {', '.join(changes)}: results differ by rounding from those of an"
            " uninterrupted run"
        )
    schedule = config.algorithm.lr_schedule
    options = stored_options(source) | {"resume": None}
    planned = total_updates(loader.load(Config, options, source=loader.STORED))
    if schedule in ("linear", "cosine", "adaptive_linear") and planned != updates:
        say(
            f"resume: the run had {planned} updates, now {updates}: lr_schedule={schedule} covers"
            " the new number"
        )
    if source.update > updates:
        raise ConfigError(
            f"updates={updates}: the checkpoint {source.path} has completed {source.update}; set"
            " more"
        )


@contextmanager
def claimed(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, str | None]]:
    """Lock the run directory, then yield the result of ``locate``.

    It is computed again under the lock, because another process may have trained in the directory
    before.
    """
    run_dir, _ = locate(config, lambda line: None)
    _check_entries(run_dir)
    with locked(run_dir):
        pinned = (
            replace(config, run_dir=str(run_dir)) if config.resume in (None, "auto") else config
        )
        yield locate(pinned, say)


def _check_entries(run_dir: Path) -> None:
    """Raise ConfigError for a directory in place of a file that a run writes, or the reverse."""
    misplaced = [(name, "directory", "file") for name in FILES if (run_dir / name).is_dir()]
    for name in FOLDERS:
        if (path := run_dir / name).exists() and not path.is_dir():
            misplaced.append((name, "file", "directory"))
    for name, kind, written in misplaced:
        raise ConfigError(
            f"{run_dir / name}: is a {kind}, and a run writes a {written} of this name; remove it,"
            " or name another run_dir"
        )


@contextmanager
def locked(run_dir: Path, option: str = "run_dir") -> Iterator[None]:
    """Create and lock a run directory; remove it at the end if it is new and empty.

    Args:
        run_dir: The directory.
        option: The option that names it, for messages.

    Raises:
        ConfigError: Another process trains in it, or it cannot be written.
    """
    absent = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        file = _lock(run_dir, option)
    except (OSError, ConfigError):
        _remove_empty(absent)
        raise
    with file:
        # On a full disk only the message of a refused process lacks the owner.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"pid {watchdog.command_pid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            if absent and os.listdir(run_dir) == [LOCK]:
                (run_dir / LOCK).unlink()
                _remove_empty(absent)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those folders that are empty; children come before their parents."""
    for folder in folders:
        with suppress(OSError):  # it does not exist, or another process uses it
            folder.rmdir()


def _lock(run_dir: Path, option: str) -> FileIO:
    """Open and lock the lock file, which a refused process may remove in between."""
    path = run_dir / LOCK
    for _ in range(100):
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = FileIO(path, "a+")  # unbuffered: on a full disk the write fails, not the closing
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG and option == "run_dir":
                raise
            line = f"{option}={run_dir}: cannot be written ({error.strerror}); name another"
            raise ConfigError(line) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:
            pass
        except OSError as error:
            file.seek(0)
            owner = file.readall().decode(errors="replace").strip() or "another process"
            file.close()
            line = f"{option}={run_dir}: {owner} is training in it; wait, or name another"
            raise ConfigError(line) from error
        file.close()
    raise ConfigError(f"{option}={run_dir}: is removed as soon as it is created; name another")


PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "envpool", "hydra-core", "tensorboard")
PACKAGES += ("transformers",)


def arithmetic(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the settings besides the algorithm's options that rounding depends on."""
    name = f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "threads": config.threads or torch.get_num_threads(),
        "matmul_precision": config.matmul_precision,
        "compile": config.compile,
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
