"""Files of other libraries, read without executing anything that they name.

Files of PyTorch are read by ``torch.load(weights_only=True)``. Other pickles are read by an
unpickler that constructs arrays of numpy; every other class or function that a pickle names becomes
a ``Record``, which stores its state.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, one_line, shorten
from embodied_ppo.core import guarded_files

# Exceptions that a damaged file can raise; RecursionError is a RuntimeError.
DAMAGED = (
    *(pickle.UnpicklingError, EOFError, RuntimeError, LookupError, ValueError, TypeError),
    *(AttributeError, AssertionError, OverflowError, MemoryError, OSError, ImportError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, struct.error),
)
LARGEST_FILE = 2**30  # largest size of a file, in bytes
# Packages whose names a pickle may use.
PACKAGES = ("numpy.", "gymnasium.", "gym.", "stable_baselines3.")
# How PyTorch names what a file needs.
NEEDED_NAME = re.compile(r"GLOBAL (\S+)")


# ----------------------------------------------------------------------------------------- messages
def shown(value: Any, limit: int = 60) -> str:
    """Return a name of a file for messages, printable and short."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return shorten(text, limit)


def label_of(path: Path) -> str:
    """Return the name of a file in messages, which leaves room for the hint and the defect."""
    return shown(str(path), 90)


@contextmanager
def refusing_damage(label: str) -> Iterator[None]:
    """Raise ConfigError where the file ``label`` is damaged, or of another kind."""
    try:
        yield
    except ConfigError:
        raise
    except DAMAGED as error:
        problem = f"is damaged, or another kind of file ({shown(one_line(error, kind=True), 80)})"
        raise ConfigError(f"copy the file again: {label} {problem}") from error


def refuse_name(label: str, name: str) -> ConfigError:
    """Return the refusal of a file that needs ``name``."""
    return ConfigError(
        f"save the weights (state_dict, params) without other objects: {label} needs {shown(name)},"
        " and only numbers are read from such a file, never code"
    )


# -------------------------------------------------------------------------------------------- files
def read_bytes(path: Path, label: str) -> bytes:
    """Return the contents of a file. Raises ConfigError for a directory or a missing file."""
    try:
        if path.is_dir():
            raise ConfigError(f"name the file in it: {label} is a directory")
        return guarded_files.read_bytes(path, LARGEST_FILE)
    except OSError as error:
        raise ConfigError(f"name a file: {label} cannot be read ({error.strerror})") from error
    except ValueError as error:
        hint = "save the weights without optimiser and data"
        raise ConfigError(f"{hint}: {label} {one_line(error)}") from error


def read_archive(data: bytes, label: str) -> dict[str, bytes]:
    """Return the files of an uncompressed archive, whose checksums are right.

    Raises:
        ConfigError: The archive is compressed: it could then be of any size.
        One of ``DAMAGED``: It is no archive, or is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members):
            hint = "save it again with the library, which writes uncompressed archives"
            raise ConfigError(f"{hint}: {label} is compressed")
        return {m.filename: archive.read(m) for m in members}


def read_npz(path: Path, label: str) -> dict[str, np.ndarray]:
    """Read the arrays of a file of ``numpy.savez``. Raises ConfigError, or one of ``DAMAGED``."""
    with np.load(io.BytesIO(read_bytes(path, label)), allow_pickle=False) as arrays:
        return dict(arrays)


# ------------------------------------------------------------------------------------------ pickles
class Record:
    """An object of another package, of which only the state is kept."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Accept the arguments with which the pickle would construct the object."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
_SCALAR: Any = np.float64(0).__reduce__()[0]
# Name in a pickle -> what is called.
_ALLOWED: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy.core.multiarray.scalar": _SCALAR,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),  # bytes of protocol 2
    "__builtin__.bytes": bytes,
    "collections.OrderedDict": dict,
}


class _Unpickler(pickle.Unpickler):
    """Builds lists, dictionaries, numbers, texts, arrays of numpy and ``Record``."""

    def __init__(self, data: bytes, label: str) -> None:
        super().__init__(io.BytesIO(data))
        self.label = label

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full_name in _ALLOWED:
            return _ALLOWED[full_name]
        if not full_name.startswith(PACKAGES):
            raise refuse_name(self.label, full_name)
        return type("Named", (Record,), {})


def read_pickle(path: Path, label: str) -> Any:
    """Read a pickle of numbers, texts, lists, dictionaries, arrays and records.

    Raises:
        ConfigError: The file is missing, or names anything outside ``PACKAGES``.
        One of ``DAMAGED``.
    """
    data = read_bytes(path, label)
    # genops compares the length of every argument with the bytes that follow; the memo is a list.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and argument is not None and int(argument) > len(data):
            raise pickle.UnpicklingError(f"stores an object at index {argument}")
    return _Unpickler(data, label).load()


def entries(value: Any) -> dict[Any, Any] | None:
    """Return the attributes of an object or the entries of a dictionary; None for other values."""
    if isinstance(value, Record):
        value = value.state or {}
    return value if isinstance(value, dict) else None


# ----------------------------------------------------------------------------------------- PyTorch
def read_torch(source: Path | bytes, label: str) -> Any:
    """Read a file of ``torch.save``: tensors, numbers, lists and dictionaries.

    Args:
        source: The file, or its contents.
        label: Name of the file in messages.

    Raises:
        ConfigError: The file is missing, or names anything else.
        One of ``DAMAGED``.
    """
    data = read_bytes(source, label) if isinstance(source, Path) else source
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if match := NEEDED_NAME.search(str(error)):
            raise refuse_name(label, match[1]) from error
        raise pickle.UnpicklingError("it is no file of torch.save") from error


def tensors(value: Any, label: str, name: str) -> dict[str, Tensor]:
    """Return a state_dict: name -> float32 tensor (float64 stays).

    Raises:
        ConfigError: An entry is no tensor, or no floating-point one; a single whole number is
            accepted, which counts something.
    """
    hint = "name a checkpoint of a policy"
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{hint}: {shown(name)} of {label} holds no named tensors")
    tensors: dict[str, Tensor] = {}
    for key, x in value.items():
        where = f"{shown(str(key))} in {shown(name)} of {label}"
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.device.type != "cpu":
            raise ConfigError(f"{hint}: {where} is a {type(x).__name__} and no dense tensor")
        if not x.is_floating_point() and (x.numel() != 1 or x.dtype == torch.bool):
            hint = "save the weights as floating-point numbers"
            raise ConfigError(f"{hint}: {where} has the type {x.dtype}")
        tensors[str(key)] = (x if x.dtype == torch.float64 else x.float()).detach()
    return tensors
