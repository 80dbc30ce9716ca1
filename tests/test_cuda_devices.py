"""Every call of ``torch.cuda`` names its device.

Calls without one act on the current device, which is 0 in a new thread. With ``device=cuda:1`` a
stream, graph or event of device 0 neither orders nor records the kernels of the run.

The rule, for each call ``torch.cuda.NAME(..)`` in embodied_ppo/, envs/ and scripts/:

* ``DEVICE_FREE``: the function concerns no particular device.
* ``DEVICE_ARGUMENT``: the call passes the argument that determines the device.
* Any other function is called in a block ``with torch.cuda.device(..)`` of the same function.

Functions of ``torch.cuda`` are called under this name: not imported from it, not passed as values.
Types (names that begin with a capital letter) may be annotations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("embodied_ppo", "envs", "scripts")
DEVICE_FREE = {
    "CUDAGraph",  # belongs to the device of the stream that it is recorded on
    "current_device",  # is what an index-less device is resolved with
    "device_count",
    "empty_cache",  # of all devices
    "get_sync_debug_mode",
    "graph_pool_handle",
    "init",
    "is_available",
    "is_current_stream_capturing",
    "is_initialized",
    "set_sync_debug_mode",
}
# Function -> position and name of the argument that determines the device.
DEVICE_ARGUMENT: dict[str, tuple[int, str]] = {
    "Stream": (0, "device"),
    "current_stream": (0, "device"),
    "default_stream": (0, "device"),
    "device": (0, "device"),
    "get_device_capability": (0, "device"),
    "get_device_name": (0, "device"),
    "get_device_properties": (0, "device"),
    "get_rng_state": (0, "device"),
    "graph": (2, "stream"),
    "max_memory_allocated": (0, "device"),
    "max_memory_reserved": (0, "device"),
    "mem_get_info": (0, "device"),
    "memory_allocated": (0, "device"),
    "memory_reserved": (0, "device"),
    "memory_stats": (0, "device"),
    "reset_peak_memory_stats": (0, "device"),
    "set_device": (0, "device"),
    "set_rng_state": (1, "device"),
    "stream": (0, "stream"),
    "synchronize": (0, "device"),
    "use_mem_pool": (1, "device"),
}


def cuda_name(node: ast.AST) -> str:
    """Return NAME of an expression ``torch.cuda.NAME``, "" for others."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
        return node.attr
    return ""


def passes_device(call: ast.Call, name: str) -> bool:
    """Return whether a call passes the argument that determines the device."""
    position, keyword = DEVICE_ARGUMENT[name]
    arguments = [x.value for x in call.keywords if x.arg == keyword]
    arguments += call.args[position : position + 1]
    return any(not isinstance(x, ast.Constant | ast.Starred) for x in arguments)


def violations(node: ast.AST, *, guarded: bool = False) -> Iterator[tuple[int, str]]:
    """Yield line and reason of each violation below ``node``.

    Args:
        guarded: Whether ``node`` is in a block ``with torch.cuda.device(..)``.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        guarded = False  # its body may run after the block
    if isinstance(node, ast.Import) and any(x.name.startswith("torch.cuda") for x in node.names):
        yield node.lineno, "import torch, and write torch.cuda.NAME"
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{x.name}" for x in node.names]
        if any(f"{name}.".startswith("torch.cuda.") for name in names):
            yield node.lineno, "import torch, and write torch.cuda.NAME"
    if isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            yield from violations(item, guarded=guarded)
            context = item.context_expr
            guarded |= isinstance(context, ast.Call) and cuda_name(context.func) == "device"
        for child in node.body:
            yield from violations(child, guarded=guarded)
        return
    function = None
    if isinstance(node, ast.Call) and (name := cuda_name(node.func)):
        function = node.func
        if name in DEVICE_ARGUMENT:
            if not passes_device(node, name):
                yield node.lineno, f"torch.cuda.{name}() without its device"
        elif name not in DEVICE_FREE and not guarded:
            yield node.lineno, f"torch.cuda.{name}() outside of 'with torch.cuda.device(..)'"
    if isinstance(node, ast.Attribute) and (name := cuda_name(node)) and name[0].islower():
        yield node.lineno, f"torch.cuda.{name} as a value"
    for child in ast.iter_child_nodes(node):
        if child is not function:
            yield from violations(child, guarded=guarded)


@pytest.mark.slow
def test_every_call_of_torch_cuda_names_its_device() -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, reason in violations(ast.parse(path.read_text()))
    ]
    assert not calls, "\n".join(calls)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("torch.cuda.Stream()", 1),
        ("torch.cuda.Stream(device)", 0),
        ("torch.cuda.Event()", 1),
        ("with torch.cuda.device(d):\n torch.cuda.Event()", 0),
        ("with torch.cuda.device(d):\n def f():\n  torch.cuda.Event()", 1),
        ("from torch.cuda import synchronize", 1),
    ],
)
def test_the_rule(code: str, count: int) -> None:
    assert len([*violations(ast.parse(code))]) == count
