"""CUDA graphs of tensor functions: one launch executes all kernels of a program."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from embodied_envs.base.compilation import is_compilation_disabled, warn_uncompiled

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A program with example arguments.

    Attributes:
        program: Function of all tensors. A call with arguments of 0 must leave the state unchanged:
            ``CudaGraph`` warms up with such calls. On a CPU also a list of functions of
            the same tensors.
        state: First arguments: tensors that have the same storage in every call. The program may
            change them.
        arguments: The other arguments.
    """

    program: Any
    state: Sequence[Tensor]
    arguments: Sequence[Tensor]


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs of a device are recorded on.

    All graphs share it, because cuBLAS keeps a workspace of up to 32 MiB for each stream.
    """
    return torch.cuda.Stream(device)


def record_graph(
    program: Callable[[], T], device: torch.device, *, warm_up: Callable[[], Any], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record a program as a CUDA graph.

    A graph that is recorded on another device's stream than that of the program's tensors is empty,
    and its replays change nothing. Therefore everything here names the device.

    Args:
        program: Launches kernels on the current stream and does not wait for them.
        device: Device of the program's tensors.
        warm_up: Runs the program before it is recorded, so that libraries are loaded and their
            workspaces allocated.
        pool: Memory pool that several graphs share; None: a pool of its own.

    Returns:
        The graph, and the result of ``program``, whose tensors each replay overwrites.
    """
    with torch.cuda.device(device):
        stream, current = _recording_stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            warm_up()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = program()
    return graph, result


# Largest state of a fused program; larger networks spend their time in matrix products.
FUSED_BYTES = 1 << 28


def fuse(program: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Return a program whose elementwise operations and reductions are few kernels.

    Args:
        program: A function of tensors that launches kernels and does not wait for them.
        tensors: Its arguments; a call with them must not change anything that matters.

    Returns:
        The compiled program; ``program`` itself, with a warning, if it cannot be compiled.
    """
    try:
        graph = trace(program, tensors)
        compiled = torch.no_grad()(torch.compile(graph, fullgraph=True, dynamic=False))
        compiled(*tensors)  # compiles it
    # Fusion is optional, and torch's tracer and compiler raise many types (AssertionError for a
    # tensor that is no argument). An error of the program itself is raised again by its warm-up.
    except Exception as error:
        warn_uncompiled(type(program).__name__, error)
        return program
    return compiled


def trace(program: Callable[..., Any], tensors: Sequence[Tensor]) -> nn.Module:
    """Return the operations of a program, with those of its backward pass, as a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(program, tracing_mode="fake")(*tensors)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


class CudaGraph:
    """A program captured as one CUDA graph, which one launch executes."""

    def __init__(self, example: Example) -> None:
        """Fuse the kernels of a small program, run it three more times to warm up, and capture it.

        The warm-up neither copies nor changes the state: its arguments are 0. Only the memory of
        the arguments is allocated; the first call fills it.
        """
        self.arguments = [torch.zeros_like(x) for x in example.arguments]
        # Tensor that each argument is a copy of, and its version.
        self.last: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self.arguments)
        tensors = [*example.state, *self.arguments]
        program, device = example.program, self.arguments[0].device
        is_small = sum(x.nbytes for x in example.state) <= FUSED_BYTES
        if device.type == "cuda" and is_small and not is_compilation_disabled():
            program = fuse(program, tensors)

        def warm_up() -> None:
            for _ in range(3):
                program(*tensors)

        self.graph, result = record_graph(lambda: program(*tensors), device, warm_up=warm_up)
        self.results = [result] if isinstance(result, Tensor) else list(result)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the results in new memory.

        Args:
            tensors: State and arguments. The state is not read: the graph has its storage. An
                argument that is the same object as in the last call, unchanged, is not copied.
                Only operations of torch count as changes, and not those of a CUDA graph.
        """
        for i, x in enumerate(tensors[len(tensors) - len(self.arguments) :]):
            last = self.last[i]
            if last is None or x is not last[0]() or x._version != last[1]:
                self.arguments[i].copy_(x)
                # Inference tensors have no version. A reference would keep the rollout in memory.
                self.last[i] = None if x.is_inference() else (weakref.ref(x), x._version)
        self.graph.replay()
        return [x.clone() for x in self.results]
