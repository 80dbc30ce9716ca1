"""Functions of the models that a GPU runs as fused kernels.

On a GPU, eager code reads and writes its tensors in memory once for each operation. With Triton,
``torch.compile`` fuses elementwise operations and reductions, in the forward and in the backward
pass. On a CPU the functions run as they are written. ``TORCH_COMPILE_DISABLE=1`` in the
environment, a variable of torch, disables the fusion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from embodied_envs.base.compilation import compile_function, is_compilation_disabled

P = ParamSpec("P")
R = TypeVar("R")
DEVICES = ("cuda",)  # types of devices whose tensors are passed to compiled code
# Function -> its compiled code.
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, compiled for calls whose first argument is a tensor on a CUDA device.

    The first such call compiles it. If that fails (no C compiler), a warning has the reason, and
    the function runs eagerly from then on. Compiled code keeps little more than its inputs for the
    backward pass; tensors without contents, from which memory is predicted, keep the inputs.

    Args:
        function: A function of tensors without side effects. Its first argument is a tensor.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _compiles(args[0]):
            return function(*args, **kwargs)
        if isinstance(args[0], FakeTensor):  # a prediction of memory
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        if function not in _compiled:
            _compiled[function] = compile_function(function)
        return _compiled[function](*args, **kwargs)

    return call


# Whether an ``eagerly`` function is running.
_eager = ContextVar("_eager", default=False)


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with fusion disabled during its calls.

    A call of compiled code takes 0.05 to 0.1 ms of the host more than eager code, backward pass
    included (measured on a CPU). For few tokens that is longer than the kernels of eager code.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _eager.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _eager.reset(token)

    return call


def _compiles(x: Any) -> bool:
    """Return whether functions of a tensor are compiled."""
    return x.device.type in DEVICES and not _eager.get() and not is_compilation_disabled()


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


# Families of transformers whose class ``<family>RMSNorm`` computes ``_rms_norm``.
ROUNDED_FIRST = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3")
# Families of transformers whose class ``<family>RMSNorm`` computes ``_offset_rms_norm``.
WITH_OFFSET = ("Gemma", "Gemma2", "Gemma3")


def normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """Return ``norm(x)`` (Zhang & Sennrich 2019), [.., D].

    Args:
        norm: A layer that normalises, which is not called if its class is known.
        x: [.., D].
    """
    layer: Any = norm
    if _compiles(x):
        family = type(norm).__name__.removesuffix("RMSNorm")
        if family in ROUNDED_FIRST:
            return _rms_norm(x, layer.weight, layer.variance_epsilon)
        if family in WITH_OFFSET:
            return _offset_rms_norm(x, layer.weight, layer.eps)
    return norm(x)


# ---------------------------------------------------------------------------- positions and the MLP
@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return x with rotary position embedding (Su et al. 2021), [B, heads, L, d].

    Args:
        x: [B, heads, L, d].
        cos: [1 or B, L, d], of each position.
        sin: [1 or B, L, d].
        dtype: Type of the result; None: use that of the products.
    """
    a, b = x.chunk(2, dim=-1)
    y = x * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)
    return y if dtype is None else y.to(dtype)


@fused
def _silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) · up."""
    return F.silu(gate) * up


@fused
def _gelu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return GELU(gate) · up, with the approximation by tanh."""
    return F.gelu(gate, approximate="tanh") * up


# Class of an activation -> function of (gate, up) that computes activation(gate) · up.
GATED_PRODUCTS = {"SiLU": _silu_product, "SiLUActivation": _silu_product, "GELUTanh": _gelu_product}


def gated_product(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) · up (Shazeer 2020), [.., I].

    Args:
        activation: The activation, which is not called if its class is known.
        gate: [.., I].
        up: [.., I].
    """
    product = GATED_PRODUCTS.get(type(activation).__name__) if _compiles(gate) else None
    return activation(gate) * up if product is None else product(gate, up)
