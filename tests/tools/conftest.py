"""A run that several tests execute again."""

from __future__ import annotations

from pathlib import Path

import pytest

import embodied_ppo as ep
from tests.tools.test_reexecution import TINY


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory) -> Path:
    """Return a run of 5 updates with the checkpoints 2, 4 and 5, which is only read."""
    folder = tmp_path_factory.mktemp("reexecution") / "run"
    return ep.train("cartpole", run_dir=folder, **TINY).run_dir
