"""Optimiser steps of two networks that share no weight, on two threads. Skip it at first.

The gradients of a policy and of a value function with separate networks need each other in one
number only, the norm of all gradients, which clips them. So each network's gradients are a compiled
program of their own (``compiled_step.Gradients``), and a loop in C++ (paired_steps.cpp) runs the
two programs and AdamW for all minibatches of an epoch, in two threads if there are two cores. The
operations are those of ``compiled_step.MinibatchStep``, so that weights do not depend on the number
of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import TrainingError
from embodied_ppo.core import compile
from embodied_ppo.options.schema import AlgorithmConfig


class _Network(ctypes.Structure):
    """See paired_steps.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("run", "model", "inputs")),
        *((name, ctypes.c_int64) for name in ("input_count", "parameters")),
        *((name, ctypes.c_void_p) for name in ("results", "sizes", "weights", "row")),
    ]


class _Steps(ctypes.Structure):
    """See paired_steps.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("copy", "pointer", "free_tensor", "indices")),
        *((name, ctypes.c_int64) for name in ("index", "count", "columns", "settings_columns")),
        *((name, ctypes.c_void_p) for name in ("settings", "rows")),
        *((x, ctypes.c_float) for x in ("beta1_rest", "lerp", "beta2", "beta2_rest", "eps")),
        *(("max_norm", ctypes.c_float), ("done", ctypes.c_int64 * 2), ("failed", ctypes.c_int64)),
    ]


@functools.cache
def _native() -> tuple[Any, list[Any]]:
    """Return ``train`` of paired_steps.cpp, and the functions of torch's C interface that it calls.

    Raises:
        TrainingError: The file cannot be compiled.
    """
    try:
        train = compile.native_functions(Path(__file__).with_suffix(".cpp")).train
    except RuntimeError as error:
        raise TrainingError(f"repair the C++ compiler, or use compile=never: {error}") from error
    train.restype = ctypes.c_int64
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    names = ("new_tensor_handle", "get_data_ptr", "delete_tensor_object")
    return train, [getattr(torch_library, f"aoti_torch_{name}") for name in names]


@functools.cache
def _second_thread() -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(1, "critic", torch.set_num_threads, (threads,))


# A forked process does not have the thread, and would wait for it for ever.
os.register_at_fork(after_in_child=_second_thread.cache_clear)


def _pointer(function: Any) -> Any:
    return ctypes.cast(function, ctypes.c_void_p)


def take_steps(
    programs: Sequence[Any],
    state: Sequence[Tensor],
    actors: int,
    inputs: Sequence[Tensor],
    config: AlgorithmConfig,
    settings: Tensor,
    indices: Sequence[Tensor],
    *,
    columns: int,
    threads: int,
) -> Tensor:
    """Take steps until one is not finite, and return their statistics, float32 [steps, K].

    Args:
        programs: ``compile.CFunction``s of ``Gradients`` of the actor and of the critic.
        state: Parameters, first moments, second moments; each first those of the actor.
        actors: Number of the actor's parameters.
        inputs: Arguments of the programs, the first of ``indices`` included.
        config: Options of the algorithm.
        settings: Rows of ``adamw_settings``, contiguous.
        indices: Samples (or columns) of each minibatch.
        columns: K.
        threads: 2 or 1.

    Raises:
        RuntimeError: A program failed.
    """
    train, functions = _native()
    n, place = len(state) // 3, next(i for i, x in enumerate(inputs) if x is indices[0])
    arguments, places = compile.handles(inputs), compile.handles(indices)
    rows, networks = torch.zeros(len(indices), columns), (_Network * 2)()
    memory = []  # keeps the arrays until the end
    for network, program, (start, stop) in zip(
        networks, programs, ((0, actors), (actors, n)), strict=True
    ):
        tensors = [x for kind in range(3) for x in state[kind * n + start : kind * n + stop]]
        count = stop - start
        arrays = [
            (ctypes.c_void_p * (count + 1))(),
            (ctypes.c_int64 * count)(*(x.numel() for x in tensors[:count])),
            (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors)),
            (ctypes.c_float * (2 * columns))(),
        ]
        memory.append(arrays)
        network.run, network.model = _pointer(program.run), program.container
        network.inputs, network.input_count = _pointer(arguments), len(arguments)
        network.parameters = count
        network.results, network.sizes, network.weights, network.row = map(_pointer, arrays)
    (beta1, beta2), clip = config.adam_betas, config.max_grad_norm
    steps = _Steps(
        *map(_pointer, (*functions, places)),
        *(place, len(indices), columns, settings.shape[1], settings.data_ptr(), rows.data_ptr()),
        # lerp(m, g, w) is m + w (g - m) for w < 1/2, else g + (w - 1)(g - m).
        *(1 - beta1, 1 - beta1 if 1 - beta1 < 0.5 else -beta1, beta2, 1 - beta2, config.adam_eps),
        -1.0 if clip is None else clip,
    )
    call = functools.partial(train, ctypes.byref(steps), networks)
    other = None
    if threads > 1:
        other = _second_thread().submit(call, ctypes.c_int64(1), ctypes.c_int64(2))
    taken = call(ctypes.c_int64(0), ctypes.c_int64(2 if other is None else 1))
    if other is not None:
        other.result()
    compile.owned([*arguments, *places])  # frees them
    if taken < 0:
        raise RuntimeError("the compiled code of a minibatch failed; stderr has its message")
    return rows[:taken]
