"""Python API: the names that ``embodied_ppo`` offers, and when it imports them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import embodied_ppo
from embodied_ppo import run
from embodied_ppo.config import loader


def test_import_does_not_load_torch() -> None:
    code = "import sys, embodied_ppo; print(embodied_ppo.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [embodied_ppo.__version__, "False"]


def test_names_are_those_of_the_modules() -> None:
    assert embodied_ppo.train is run.train and embodied_ppo.evaluate is run.evaluate
    assert embodied_ppo.load is loader.load
    with pytest.raises(AttributeError, match="compare"):
        _ = embodied_ppo.compare  # pyright: ignore[reportAttributeAccessIssue]
