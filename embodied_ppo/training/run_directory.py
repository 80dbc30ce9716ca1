"""Where a run lives: its directory, its lock, and the checkpoint that it continues from."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
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
from embodied_ppo.core.types import CheckpointError, ConfigError
from embodied_ppo.training import checkpoint

# Options that may differ between a run and its continuation without a word; every other difference
# is told.
FREE_ON_RESUME = (
    "updates",
    "env_steps",
    "save_every",
    "keep_last",
    "eval_every",
    "evaluation",
    "run_dir",
    "resume",
)
FREE_ON_RESUME += ("name", "description", "allow_changed_task")
ROUNDING_OPTIONS = ("device", "threads", "matmul_precision", "compile")
"""Options that change results by rounding alone: one line names all that differ."""
FIXED_ON_RESUME = ("mode", "algorithm.horizon", "env.num_envs", "seed")
FIXED_ON_RESUME += (
    "model.activation",
    "model.heads",
    "model.decode",
)  # the same weights would mean something else


LOCK = ".lock"
"""File in a run directory that the process which trains in it holds a lock on."""


def absolute(config: Config) -> Config:
    """Models, tokenizers, data, demonstrations and graders by full path: the run may be evaluated
    from anywhere.
    """

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

    def grader(spec: str) -> str:
        place, colon, name = spec.partition(":")
        return f"{full(place)}{colon}{name}" if place.endswith(".py") else spec

    actor, critic, data, reward = config.actor, config.critic, config.data, config.reward
    return replace(
        config,
        model=replace(config.model, checkpoint=full(config.model.checkpoint)),
        cloning=replace(config.cloning, dataset=full(config.cloning.dataset)),
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
            grader=grader(reward.grader),
            path=full(reward.path),
            model=replace(reward.model, path=full(reward.model.path)),
        ),
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file under another name, then rename it: a full disk leaves the old one."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def new_run_dir(config: Config) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[
        :-3
    ]  # jobs of a sweep start in the same second
    path = Path("runs") / config.name / f"{stamp}-{config.seed}"
    for i in range(1, 1000):
        if not path.exists():
            return path
        path = path.with_name(f"{stamp}.{i}-{config.seed}")
    raise ConfigError(f"run_dir: {path} and 999 like it exist; name one with run_dir=DIR")


def locate(config: Config, say: Callable[[str], None]) -> tuple[Path, str | None]:
    """The run directory, and what to continue from: a path, "newest" of the run, or None."""
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
                " starting anew"
            )
            return run_dir or new_run_dir(config), None
        return run_dir, "newest"
    if (Path(config.resume) / "checkpoints").is_dir() and not config.run_dir:
        return Path(config.resume), "newest"
    found = checkpoint.find(config.resume)
    home = found.parent.parent if found.parent.name == "checkpoints" else found.parent
    run_dir = Path(config.run_dir) if config.run_dir else home
    if run_dir.resolve() != home:
        if checkpoint.steps(run_dir / "checkpoints"):
            raise ConfigError(
                f"run_dir={run_dir}: holds another run already; name a new one, or leave it out"
            )
        return run_dir, str(found)
    newest = next(
        (step.name for step in reversed(checkpoint.steps(found.parent).values())), found.name
    )
    if newest != found.name:
        raise ConfigError(
            f"resume={config.resume}: the run has gone on to {newest}, which continuing here would"
            f" mix up; branch off with run_dir=NEW, or continue the run with resume={home}"
        )
    return run_dir, str(found)


def stored_options(source: checkpoint.Checkpoint) -> dict[str, Any]:
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


def check_resume(
    config: Config,
    source: checkpoint.Checkpoint,
    updates: int,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Tell every option that differs from the checkpoint's; refuse those that cannot."""
    old = loader.flat(stored_options(source))
    for path, now in loader.flat(loader.relevant(config)).items():
        if path.split(".")[0] in (*FREE_ON_RESUME, *ROUNDING_OPTIONS) or old.get(path) == now:
            continue
        if path in FIXED_ON_RESUME:
            raise ConfigError(
                f"{path}={now}: the run to resume has {old.get(path)}, which its weights, counters"
                " or random streams rest on; leave it (and experiment=: resume= alone has the"
                " run's own options), or start a new run"
            )
        say(f"resume: {path} was {old.get(path)}, is {now}")
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
    length = [
        total_updates(
            loader.load(Config, stored_options(source) | {"resume": None}, source=loader.STORED)
        ),
        updates,
    ]
    if schedule in ("linear", "cosine") and length[0] != length[1]:
        say(
            f"resume: the run was to have {length[0]} updates, now {length[1]}:"
            f" lr_schedule={schedule} spans them anew"
        )
    if source.update > updates:
        raise ConfigError(
            f"updates={updates}: the checkpoint {source.path} has done {source.update}; ask for"
            " more"
        )


@contextmanager
def claimed(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, str | None]]:
    """Lock the run directory, then yield what ``locate`` returns under the lock.

    Another process may have trained in the directory between the first look and the lock.
    """
    run_dir, _ = locate(config, lambda line: None)
    with locked(run_dir):
        pinned = (
            replace(config, run_dir=str(run_dir)) if config.resume in (None, "auto") else config
        )
        yield locate(pinned, say)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Make the directory and let one process train in it; a new one that stays empty is removed
    again.

    Raises ConfigError where another process trains in it or it cannot be written.
    """
    absent = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        file = _lock(run_dir)
    except (OSError, ConfigError):
        _remove_empty(absent)
        raise
    with file:
        with suppress(
            OSError
        ):  # a full disk: the owner's name is only for the message of a refused process
            file.truncate(0)
            file.write(f"pid {watchdog.command_pid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            if absent and os.listdir(run_dir) == [LOCK]:
                (run_dir / LOCK).unlink()
                _remove_empty(absent)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove what is empty of a folder and its parents."""
    for folder in folders:
        with suppress(OSError):  # not made, or another process uses it
            folder.rmdir()


def _lock(run_dir: Path) -> FileIO:
    """Open and lock the lock file; another process that was refused may remove it in between."""
    path = run_dir / LOCK
    for _ in range(100):
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = FileIO(path, "a+")  # unbuffered: on a full disk the write fails, not the closing
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            line = f"run_dir={run_dir}: cannot be written ({error.strerror}); name another"
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
            line = f"run_dir={run_dir}: {owner} is training in it; wait, or name another"
            raise ConfigError(line) from error
        file.close()
    raise ConfigError(f"run_dir={run_dir}: is removed as soon as it is made; name another")


PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "mujoco",
    "envpool",
    "hydra-core",
    "tensorboard",
    "transformers",
)


def arithmetic(config: Config, device: torch.device) -> dict[str, Any]:
    """What the rounding of floating-point results depends on besides the options of the
    algorithm.
    """
    cuda = device.type == "cuda"
    return {
        "threads": config.threads or torch.get_num_threads(),
        "matmul_precision": config.matmul_precision,
        "compile": config.compile,
        "device": (
            torch.cuda.get_device_name(device)
            if cuda
            else f"cpu ({torch.backends.cpu.get_cpu_capability()})"
        ),
        "torch": versions()["torch"],
    }


@functools.cache
def versions() -> dict[str, str]:
    found = {"embodied_ppo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
