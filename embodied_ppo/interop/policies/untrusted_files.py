"""Files of other libraries, read without executing anything that they name.

A pickle can name any function of any module, and reading it calls that function. The reader here
knows a fixed list of names. Arrays and dictionaries are rebuilt by functions of this module, and
the objects of listed containers become ``Container``, which only stores their attributes. Any other
name is refused.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from embodied_ppo.core.errors import ConfigError, one_line

DAMAGED = (
    *(pickle.UnpicklingError, EOFError, RuntimeError, LookupError, ValueError, TypeError),
    *(AttributeError, AssertionError, OverflowError, MemoryError, OSError, zipfile.BadZipFile),
    *(NotImplementedError, ImportError),
)
"""Exceptions that a damaged file can raise."""
NUMBERS = re.compile(r"[<>|=]?[biuf]\d{1,2}")
"""Types of arrays that are read: bool, whole and floating-point numbers."""
GLOBAL = re.compile(r"(?:GLOBAL|class|function) `?([\w.]+)")
"""The name in a message of ``torch.load`` that refuses one."""


class _DisallowedName(Exception):
    """A name that a pickle wants, and that is not on the list."""


class _Constructor:
    """A function that a pickle may call. A pickle cannot change it: it has no attributes to set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"sets {name} of a function")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("sets the state of a function")


class Container:
    """An object of a class that is not imported: its attributes, and nothing else.

    Attributes:
        values: Its attributes.
        arguments: Arguments of its construction.
    """

    values: dict[str, Any]
    arguments: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self.values, self.arguments = {}, args
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.values.update(part)


def _array(*args: Any) -> np.ndarray:
    """Return an array whose contents ``__setstate__`` sets; replaces ``_reconstruct`` of numpy."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _dtype(name: Any, *args: Any) -> np.dtype:
    """Return a type of numbers, as a copy, whose byte order ``__setstate__`` may set."""
    if not (isinstance(name, str) and NUMBERS.fullmatch(name)):
        raise _DisallowedName(f"an array of {name!r}")
    return np.dtype(name, False, True)  # pyright: ignore[reportCallIssue]


def _scalar(dtype: Any, data: Any) -> int | float | bool:
    """Return a number."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise pickle.UnpicklingError("a scalar without a type")
    return np.frombuffer(data, dtype, count=1)[0].item()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Return an array of a pickle of protocol 5."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise pickle.UnpicklingError("an array without a type")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: Any, encoding: Any) -> bytes:
    """Return the bytes of a pickle of protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes of an unknown encoding")
    return text.encode("latin1")


def _jax_array(function: Any, args: Any, state: Any, *more: Any) -> np.ndarray:
    """Return an array of JAX as one of numpy."""
    if not isinstance(function, _Constructor):
        raise pickle.UnpicklingError("an array of JAX without an array of numpy")
    array = function(*args)
    array.__setstate__(state)
    return array


_ARRAY, _DTYPE, _SCALAR = _Constructor(_array), _Constructor(_dtype), _Constructor(_scalar)
_BUFFER, _ENCODE = _Constructor(_from_buffer), _Constructor(_encode)


class _ArrayType(Container):
    """Stands for numpy.ndarray, which pickles only name."""


ALLOWED: dict[str, Any] = {
    "numpy.ndarray": _ArrayType,
    "numpy.dtype": _DTYPE,
    "collections.OrderedDict": collections.OrderedDict,
    "_codecs.encode": _ENCODE,
    "jax._src.array._reconstruct_array": _Constructor(_jax_array),
}
for _core in ("core", "_core"):
    ALLOWED[f"numpy.{_core}.multiarray._reconstruct"] = _ARRAY
    ALLOWED[f"numpy.{_core}.multiarray.scalar"] = _SCALAR
    ALLOWED[f"numpy.{_core}.numeric._frombuffer"] = _BUFFER


class _Reader(pickle.Unpickler):
    """Unpickler that knows the names of ``ALLOWED`` and those of ``containers``."""

    def __init__(self, file: io.BytesIO, containers: Collection[str]) -> None:
        super().__init__(file)
        self.containers = containers
        self.classes: dict[str, Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name in ALLOWED:
            return ALLOWED[name]
        if name not in self.containers:
            raise _DisallowedName(name)
        if name not in self.classes:  # of this file only, so that no file can change another's
            self.classes[name] = type(global_name, (Container,), {})
        return self.classes[name]

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("refers to data outside of the file")


def check_archive(data: bytes, label: str) -> None:
    """Raise ConfigError for a compressed archive, which could be of any size when it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (*DAMAGED, UnicodeDecodeError):
        return  # the reader of the file reports it
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ConfigError(
            f"{label}: the archive is compressed; save it again with the library, which writes"
            " uncompressed archives"
        )


def refusal(label: str, name: str) -> ConfigError:
    """Return the refusal of a file that needs ``name``."""
    return ConfigError(
        f"{label}: needs {name}, and only numbers are read from such a file, never code; save the"
        " weights (state_dict, params) without other objects"
    )


def read_bytes(path: Path, label: str) -> bytes:
    """Return the contents of a file. Raises ConfigError for a directory or a missing file."""
    if path.is_dir():
        raise ConfigError(f"{label}: is a directory; name the file in it")
    if path.exists() and not path.is_file():  # a pipe or a device has no end
        raise ConfigError(f"{label}: is a pipe or a device; name a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror}); name a file") from error


def read_pickle(path: Path, label: str, containers: Collection[str] = ()) -> Any:
    """Read a pickle of numbers, arrays, dictionaries and containers.

    Args:
        path: The file.
        label: Name of the file in messages.
        containers: Full names of classes whose objects become ``Container``.

    Raises:
        ConfigError: The file is missing or damaged, or names anything else.
    """
    data = read_bytes(path, label)
    try:
        return _Reader(io.BytesIO(data), containers).load()
    except _DisallowedName as error:
        raise refusal(label, str(error)) from error
    except (*DAMAGED, RecursionError) as error:
        raise ConfigError(
            f"{label}: is no pickle, or is damaged ({one_line(error, kind=True)}); copy it again"
        ) from error


def read_torch(source: Path | io.BytesIO, label: str) -> Any:
    """Read a file of ``torch.save`` with ``weights_only=True``, and numbers of numpy.

    Args:
        source: The file, or its contents.
        label: Name of the file in messages.

    Raises:
        ConfigError: The file is missing or damaged, or names anything but tensors and numbers.
    """
    if isinstance(source, Path):
        source = io.BytesIO(read_bytes(source, label))
    check_archive(source.getvalue(), label)
    types = [(type(np.dtype(x)), f"numpy.dtype of {x}") for x in ("f4", "f8", "i4", "i8", "bool")]
    try:
        with (
            torch.serialization.safe_globals([*((x, n) for n, x in ALLOWED.items()), *types]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # about the protocol of damaged files
            return torch.load(source, map_location="cpu", weights_only=True)
    except _DisallowedName as error:
        raise refusal(label, str(error)) from error
    except (*DAMAGED, RecursionError) as error:
        if match := GLOBAL.search(str(error)):
            raise refusal(label, match[1]) from error
        raise ConfigError(
            f"{label}: is no file of torch.save, or is damaged ({one_line(error, kind=True)}); copy"
            " it again"
        ) from error


def read_npz(path: Path, label: str) -> dict[str, np.ndarray]:
    """Read the arrays of a file of ``numpy.savez``. Raises ConfigError."""
    data = read_bytes(path, label)
    check_archive(data, label)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (*DAMAGED, KeyError) as error:
        raise ConfigError(
            f"{label}: is no file of numpy.savez, or is damaged ({one_line(error, kind=True)})"
        ) from error


def tensors(value: Any, label: str, name: str) -> dict[str, Tensor]:
    """Return a state_dict: name -> float32 tensor (float64 stays). Raises ConfigError."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{label}: {name} holds no named tensors; name a checkpoint of a policy")
    for key, x in value.items():
        if not isinstance(x, Tensor):
            raise ConfigError(f"{label}: {name} has {key!r}, a {type(x).__name__} and no tensor")
    return {str(key): x if x.dtype == torch.float64 else x.float() for key, x in value.items()}
