"""Count the kernels that a GPU would launch, and the bytes that they read and write, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach"}
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "alias"}
ONE_KERNEL = (F.rms_norm,)
"""Functions that are one kernel on a GPU and several operations on a CPU."""


class KernelCounter(TorchDispatchMode):
    """Context that counts operations except views.

    Attributes:
        kernels: Operation -> calls.
        nbytes: Bytes of the arguments and results of these calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.nbytes = 0
        self._functions = _FusedFunctions(self)

    def __enter__(self) -> Self:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_KERNEL and not self._functions.inside:
            self.count(name, (args, kwargs or {}), out)
        return out

    def count(self, name: str, arguments: Any, out: Any) -> None:
        """Count one kernel."""
        self.kernels[name] += 1
        tensors = [x for x in pytree.tree_leaves((arguments, out)) if isinstance(x, Tensor)]
        self.nbytes += sum(x.numel() * x.element_size() for x in tensors)

    def as_one_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, each call of which counts as one kernel."""

        def call(*args: Any) -> Any:
            self._functions.inside = True
            try:
                out = function(*args)
            finally:
                self._functions.inside = False
            self.count(function.__name__, args, out)
            return out

        return call

    @property
    def total(self) -> int:
        """Number of kernels."""
        return self.kernels.total()


class _FusedFunctions(TorchFunctionMode):
    """Count each call of ``ONE_KERNEL`` as one kernel."""

    def __init__(self, counter: KernelCounter) -> None:
        super().__init__()
        self.counter, self.inside = counter, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in ONE_KERNEL or self.inside:
            return func(*args, **kwargs)
        self.inside = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.inside = False
        self.counter.count(func.__name__, (args, kwargs), out)
        return out
