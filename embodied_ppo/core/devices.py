"""The device of a process: PyTorch's current one, its memory, and the GPU that MuJoCo renders on.

Streams, events and CUDA graphs that are created without a device belong to the current device. The
current device is a property of the thread, and 0 in each new one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import Say

# Environment variable with the index of the device that MuJoCo's EGL renderer uses.
EGL_VARIABLE = "MUJOCO_EGL_DEVICE_ID"
# Value that this package wrote to ``EGL_VARIABLE``; while both are equal, processes replace it.
DERIVED_VARIABLE = "EMBODIED_PPO_EGL_DEVICE_ID"


def activate(device: torch.device) -> torch.device:
    """Make a CUDA device the current one of this thread.

    Args:
        device: Any device; CUDA without an index is the current CUDA device.

    Returns:
        The device with its index; other devices as they are.
    """
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def use_deterministic_algorithms(device: torch.device) -> None:
    """Have torch compute equal bits in each run on a CUDA device; a CPU does so anyway.

    Call this before the first matrix product on the device. cuBLAS, cuDNN, fused attention and
    Inductor then select algorithms without atomic additions and without timing them. An operation
    that has none raises RuntimeError. MuJoCo Warp's engine in embodied_envs follows this setting.
    """
    if device.type != "cuda":
        return
    # Otherwise cuBLAS selects workspaces, and with them algorithms, by what other streams do.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling new memory would only help code that reads memory before it writes it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
    torch.use_deterministic_algorithms(True)


def device_memory_gb(device: torch.device) -> float:
    """Return the memory of a GPU, or of the machine, in GB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def egl_device_id(environment: Mapping[str, str], device: torch.device) -> str | None:
    """Return the value of ``EGL_VARIABLE`` for a process that uses ``device``.

    EGL numbers all GPUs of the machine, whereas CUDA numbers those in CUDA_VISIBLE_DEVICES.

    Args:
        environment: Environment variables of the process.
        device: CUDA device of the process, with its index.

    Returns:
        The index; None where CUDA_VISIBLE_DEVICES contains a UUID instead of one.
    """
    index, visible = device.index, environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",")]
    entry = entries[index] if index < len(entries) else ""
    return entry if entry.isdecimal() else None


def egl_device_count() -> int:
    """Return the number of devices that EGL can render on; 0 without EGL or its extension."""
    try:
        get_address = ctypes.CDLL("libEGL.so.1").eglGetProcAddress
    except OSError:
        return 0
    get_address.restype = ctypes.c_void_p
    address = get_address(b"eglQueryDevicesEXT")
    if not address:
        return 0
    # EGLBoolean eglQueryDevicesEXT(EGLint max_devices, EGLDeviceEXT* devices, EGLint* num_devices)
    query = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
    )(address)
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0


def select_egl_device(device: torch.device, notice: Say) -> None:
    """Have MuJoCo render on the process's GPU; call this before the first image.

    A value that the user has set is kept.

    Args:
        device: Device of the process, CUDA with its index; nothing changes for others.
        notice: Called with a line where the GPU's index among EGL's devices is unknown.
    """
    if device.type != "cuda" or os.environ.get(EGL_VARIABLE) != os.environ.get(DERIVED_VARIABLE):
        return
    value = egl_device_id(os.environ, device)
    reason = "CUDA_VISIBLE_DEVICES does not name this process's GPU by its index"
    # A machine without NVIDIA's EGL driver has Mesa's software renderer as its only device.
    if value is not None and int(value) > 0 and int(value) >= (count := egl_device_count()):
        value, reason = None, f"EGL has {count} devices, and this process uses GPU {value}"
    for name in (EGL_VARIABLE, DERIVED_VARIABLE):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if value is None:
        notice(f"{EGL_VARIABLE} is not set: {reason}; images are rendered on EGL's first device")


def upload(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor of nested sequences of Python numbers on a device.

    It is copied from pinned memory: a copy of pageable memory would make the host wait until the
    device has done all earlier work.
    """
    if device.type == "cpu":
        return torch.tensor(numbers)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def select_device(
    name: str, threads: int, *, deterministic: bool = False, notice: Say = lambda line: None
) -> torch.device:
    """Return the device of the option ``device``, and set the number of torch's threads.

    A CUDA device becomes the current one, and the one that MuJoCo renders on.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        threads: CPU threads of tensor operations; 0: torch's default.
        deterministic: Whether two runs on one CUDA device compute equal bits.
        notice: Called with lines for the log.

    Returns:
        The device, CUDA with its index.

    Raises:
        ConfigError: The machine has no such device.
    """
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device, count = torch.device(name), torch.cuda.device_count()
    except RuntimeError as error:
        raise ConfigError(f"use auto, cpu, cuda or cuda:N: device={name}") from error
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name}: torch finds {count} CUDA devices; use device=cpu or auto"
        )
    if deterministic:
        use_deterministic_algorithms(device)
    device = activate(device)
    select_egl_device(device, notice)
    return device
