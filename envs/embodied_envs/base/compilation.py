"""Compilation of tensor functions with ``torch.compile``, and the precision of their products."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from embodied_envs.base.errors import one_line

T = TypeVar("T")


def is_compilation_disabled() -> bool:
    """Return whether TORCH_COMPILE_DISABLE turns ``torch.compile`` off."""
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1"


# Number of variants that torch may compile of a function in this process: for each number of
# dimensions, size that does not vary, gradient and inference mode, and precision of products.
# Beyond it the function runs eagerly; torch's own limit is 8.
VARIANTS = 64


def compile_function(
    function: Callable[..., T], *, dynamic: bool | None = None
) -> Callable[..., T]:
    """Return ``function`` with ``torch.compile``, which the first call of each variant compiles.

    If that fails (no C compiler, code that torch cannot trace), a warning has the reason, and the
    function runs eagerly from then on.

    Args:
        function: A function of tensors, or a method of an object that has tensors.
        dynamic: Whether sizes may vary without a new variant; None: those that have varied.
    """
    # The import takes more than a second, and only a GPU needs it.
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    config.recompile_limit = max(config.recompile_limit, VARIANTS)
    # Without graph breaks a variant beyond the limit raises an error.
    current: Callable[..., T] = torch.compile(function, fullgraph=True, dynamic=dynamic)

    def call(*args: Any, **kwargs: Any) -> T:
        nonlocal current
        try:
            return current(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            warn_uncompiled(function.__name__, error, stacklevel=4)
            current = function
            return function(*args, **kwargs)

    return call


def warn_uncompiled(name: str, error: Exception, stacklevel: int = 3) -> None:
    """Warn that a function runs eagerly, with the reason.

    Args:
        name: Name of the function.
        error: Raised by ``torch.compile`` or compiled code.
        stacklevel: See ``warnings.warn``.

    Raises:
        torch.OutOfMemoryError: The cause is a lack of GPU memory.
    """
    cause = getattr(error, "inner_exception", error)
    if isinstance(cause, torch.OutOfMemoryError):
        raise cause from None
    warnings.warn(
        f"{name} runs without torch.compile, which is slower ({one_line(cause)})",
        stacklevel=stacklevel,
    )


@contextmanager
def highest_matmul_precision() -> Iterator[None]:
    """Compute matrix products of float32 in float32 within the block, whatever a caller has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
