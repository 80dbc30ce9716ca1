"""Memory of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from embodied_ppo.core.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()

def allocate():
    for _ in range(4):
        tensors = [torch.ones(1 << 20) for _ in range(16)]  # 64 MiB
        del tensors

allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Print the pages that the system provides while 64 MiB, 16,384 pages, are allocated four times."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_reused() -> None:
    def faults(argument: str) -> int:
        command = [sys.executable, "-c", FAULTS, argument]
        # A fixed threshold: otherwise glibc adapts it to the blocks that were freed earlier.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
        process = subprocess.run(command, capture_output=True, check=True, env=environment)
        return int(process.stdout)

    assert faults("kept") < 1000 < 4 * 8192 < faults("returned")
