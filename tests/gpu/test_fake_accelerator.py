"""Run ``on_fake_accelerator.py`` in a process of its own: torch cannot forget a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from run_helpers import run_process

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_fake_accelerator() -> None:
    """Code of the GPU path on a device without hardware; the output names what failed."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
    run_process(*command, "tests/gpu/on_fake_accelerator.py", cwd=ROOT, timeout=None)
