"""``model.network=FILE.py:Class``: file of a user's network, its copy in a run, and its class."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, choose, one_line, show
from embodied_envs.types import Say
from embodied_ppo.core import guarded_files

FOLDER = "network"  # Folder of the copies in a run directory. The name of a copy is its hash.


@dataclass(frozen=True)
class NetworkFile:
    """The file of a network at the start of a run.

    Attributes:
        spec: Value of ``model.network``.
        data: Contents of the file.
    """

    spec: str
    data: bytes

    @property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of the contents."""
        return hashlib.sha256(self.data).hexdigest()[:12]

    def spec_in(self, run_dir: Path) -> str:
        """Return the value of ``model.network`` that names the copy in a run directory."""
        return f"{_copy(run_dir, self.hash)}:{_split(self.spec)[1]}"

    @contextmanager
    def saved(self, run_dir: Path) -> Iterator[None]:
        """Write the copy into a run directory; remove it if the block fails."""
        copy = _copy(run_dir, self.hash)
        is_new = not copy.exists()
        if is_new:
            copy.parent.mkdir(exist_ok=True)
            guarded_files.replace_file(copy, self.data)
        try:
            yield
        except BaseException:
            if is_new:
                copy.unlink(missing_ok=True)
                with suppress(OSError):  # it holds other copies
                    copy.parent.rmdir()
            raise


def read(spec: str) -> NetworkFile:
    """Read the file of a network. Raises ConfigError without such a file."""
    path, _ = _split(spec)
    if not path.is_file():
        names = sorted(file.name for file in path.parent.glob("*.py"))
        files = choose(path.name, names, "in its folder: ")
        raise ConfigError(f"model.network = {spec}: {path} is no file; {files}")
    return NetworkFile(spec, path.read_bytes())


def select(
    spec: str, stored: str | None, run_dir: Path, *, allow: bool, resumes: bool, say: Say
) -> NetworkFile:
    """Return the file that a process executes, the user's or the run's copy, and report it.

    Args:
        spec: Value of ``model.network`` in the training.
        stored: Hash of the file with which the checkpoint was trained; None: the run keeps no copy.
        run_dir: Directory of the run of that checkpoint.
        allow: Execute a changed file (``allow_changed_task``).
        resumes: Whether the training continues. A changed file is then refused; an evaluation
            executes the run's copy instead.
        say: Reports a file that is changed or missing.

    Raises:
        CheckpointError: The copy is needed, and is damaged or missing.
        ConfigError: There is no file, or it has changed and must not be executed.
    """
    path, name = _split(spec)
    if stored is None:
        return read(spec)
    copy, cause = _copy(run_dir, stored), "does not exist here"
    if path.is_file():
        file, cause = read(spec), "changed since training"
        if file.hash == stored:
            return file
        if allow:
            say(f"network: executing {path}, which {cause} (allow_changed_task=true)")
            return file
        if resumes:
            raise ConfigError(
                f"resume: model.network = {spec} changed since the checkpoint; restore it (the"
                f" run's copy: {copy}), or write allow_changed_task=true"
            )
    with guarded_files.refusing_damage(copy, "restore the file that model.network names"):
        file = NetworkFile(f"{copy}:{name}", copy.read_bytes())
        if file.hash != stored:
            raise ValueError("the run wrote another file (sha256)")
    say(f"network: {path} {cause}; executing the run's copy {copy}")
    return file


def import_file(spec: str) -> ModuleType:
    """Import the file of a network, once for each content. Raises ConfigError if it fails."""
    file, (path, _) = read(spec), _split(spec)
    name = f"embodied_ppo_network_{file.hash}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        # Not by importlib, which would write bytecode into the run directory.
        exec(compile(file.data, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"model.network = {spec}: cannot be imported ({one_line(error, kind=True)}); fix it"
        ) from error
    return module


def build(
    spec: str, shapes: Mapping[str, tuple[int, ...]], options: Mapping[str, Any]
) -> nn.Module:
    """Return the user's network, ``Class(shapes, **options)``.

    Raises:
        ConfigError: The file or class is missing, is no ``nn.Module``, or its constructor fails.
    """
    label = f"model.network = {spec}"
    module, (_, name) = import_file(spec), _split(spec)
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        classes = {n: v for n, v in vars(module).items() if isinstance(v, type)}
        own = {n: v for n, v in classes.items() if v.__module__ == module.__name__}
        names = [n for n, v in own.items() if issubclass(v, nn.Module)]
        fact = "is not in the file" if cls is None else "is no subclass of torch.nn.Module"
        raise ConfigError(f"{label}: {name} {fact}; {choose(name, names, 'networks in it: ')}")
    try:
        return cls(dict(shapes), **options)
    # The class is written by the user, so its constructor may raise any exception; each becomes one
    # line that names the option.
    except Exception as error:
        call = ", ".join(["shapes", *(f"{key}={show(value)}" for key, value in options.items())])
        raise ConfigError(
            f"{label}: {name}({call}) failed ({one_line(error, kind=True)}); shapes ="
            f" {dict(shapes)}; fix it, or model.network_options"
        ) from error


def count_features(spec: str, network: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the number of features D of a network.

    Args:
        spec: Value of ``model.network``, for messages.
        network: The network.
        inputs: Two observations.

    Raises:
        ConfigError: ``forward`` fails, or does not return float32 [2, D].
    """
    try:
        with torch.no_grad():
            features = network(dict(inputs))
        if not isinstance(features, Tensor):
            raise TypeError(f"returned {type(features).__name__}, not a tensor")
        shape, dtype = list(features.shape), str(features.dtype).removeprefix("torch.")
        if dtype != "float32" or len(shape) != 2 or shape[0] != 2 or not shape[1]:
            raise TypeError(f"returned {dtype} {shape}, not features, float32 [2, D]")
    except Exception as error:  # as in ``build``, for the user's ``forward``
        shapes = {name: list(x.shape) for name, x in inputs.items()}
        raise ConfigError(
            f"model.network = {spec}: forward failed with two observations {shapes}"
            f" ({one_line(error, kind=True)}); fix it"
        ) from error
    return shape[1]


def _split(spec: str) -> tuple[Path, str]:
    """Return the file and the name of the class. Raises ConfigError for another form."""
    source, _, name = spec.rpartition(":")
    if not source.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"model.network = {spec}: must be FILE.py:Class, as in model.network=my_network.py:Net"
        )
    return Path(source).expanduser(), name


def _copy(run_dir: Path, digest: str) -> Path:
    return run_dir.absolute() / FOLDER / f"{digest}.py"
