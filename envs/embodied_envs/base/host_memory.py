"""Memory of the machine or of its container."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

# Parameters of the C library's ``mallopt``.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Freed memory that the C library keeps.
KEPT_BYTES = 1 << 28
# Size from which the C library maps a block separately and unmaps it when it is freed, the largest
# that glibc accepts.
MMAP_THRESHOLD_BYTES = 1 << 25


def keep_freed_memory() -> None:
    """Let the C library reuse freed memory instead of returning it to the system.

    Otherwise each large allocation causes page faults, which take longer than the computation of
    small tensors. It changes no result. C libraries other than glibc ignore it, or lack the
    function.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def free_memory() -> float | None:
    """Return the bytes that this process may still allocate; None if the system reports none.

    The limit is that of the machine (/proc/meminfo) or of the container (cgroup v2).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = [line for line in lines if line.startswith("MemAvailable")]
        free = float(available.split()[1]) * 1024
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, float(text) - float(used.read_text()))
    except (OSError, ValueError):
        return None
    return max(free, 0.0)
