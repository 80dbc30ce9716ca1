"""Memory of the machine or of its container."""

from __future__ import annotations

from pathlib import Path


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
