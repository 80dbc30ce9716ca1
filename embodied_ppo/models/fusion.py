"""Functions of the models that run as one kernel on a GPU.

On a GPU, eager code reads and writes its tensors in memory once for each operation. With Triton,
``torch.compile`` fuses the operations of a function, in the forward and in the backward pass. On a
CPU the functions run as they are written. ``TORCH_COMPILE_DISABLE=1`` in the environment, a
variable of torch, turns the fusion off.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
R = TypeVar("R")
DEVICES = ("cuda",)
"""Types of devices whose tensors are passed to compiled code."""

_compiled: dict[str, Callable[..., Any]] = {}
"""Name of a function -> its compiled code, or the function itself where that failed."""


def _compiles(x: Any) -> bool:
    """Return whether functions of a tensor are compiled."""
    return x.device.type in DEVICES


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, compiled for calls whose first argument is a tensor on a CUDA device.

    The first such call compiles it. If that fails, a warning has the reason, and the function runs
    eagerly from then on. Compiled code keeps little more than its inputs for the backward pass;
    tensors without contents, from which memory is predicted, keep the inputs.
    """
    name = getattr(function, "__name__", "")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _compiles(args[0]):
            return function(*args, **kwargs)
        if isinstance(args[0], FakeTensor):  # a prediction of memory
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        compiled = _compiled.get(name)
        if compiled is None:
            compiled = _compiled[name] = torch.compile(function)
        try:
            return compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # without a C compiler or Triton, for example
            if compiled is function:
                raise
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"{name} runs without torch.compile, which is slower ({reason})", stacklevel=2
            )
            _compiled[name] = function
            return function(*args, **kwargs)

    return call


# ------------------------------------------------------------------------------------------- norms
@fused
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return weight · x / rms(x), rounded to the type of x before the product, as in Llama."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    return weight * y.to(x.dtype)


@fused
def _offset_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return (1 + weight) · x / rms(x), rounded to the type of x at the end, as in Gemma."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    return (y * (1.0 + weight.float())).to(x.dtype)


def normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """Return ``norm(x)``, x [.., D], where ``norm`` is a layer of transformers (Zhang & Sennrich
    2019).
    """
    layer: Any = norm
    name = type(norm).__name__
    if not _compiles(x) or not name.endswith("RMSNorm"):
        return norm(x)
    if "Gemma" in name:
        return _offset_rms_norm(x, layer.weight, layer.eps)
    return _rms_norm(x, layer.weight, layer.variance_epsilon)


# ---------------------------------------------------------------------------- positions and the MLP
@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021).

    Args:
        x: [B, heads, L, d].
        cos: [1 or B, L, d], of each position.
        sin: The same.
        dtype: Type of the result; None: that of the products.
    """
    a, b = x.chunk(2, dim=-1)
    y = x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)
    return y if dtype is None else y.to(dtype)


@fused
def _silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@fused
def _gelu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


PRODUCTS = {"SiLU": _silu_product, "SiLUActivation": _silu_product, "GELUTanh": _gelu_product}
"""Class of an activation of transformers -> activation(gate) · up."""


def gated(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) · up (Shazeer 2020), each [.., I]."""
    product = PRODUCTS.get(type(activation).__name__) if _compiles(gate) else None
    return activation(gate) * up if product is None else product(gate, up)
