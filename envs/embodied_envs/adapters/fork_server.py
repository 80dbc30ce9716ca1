"""Start of the fork server of ``simulator_processes``, which alone imports this module."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from embodied_envs.adapters.simulator_processes import SHARED

if sys.orig_argv[-1].startswith("from multiprocessing.forkserver import"):
    os.setpgid(0, 0)  # signals to the run do not end it
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
