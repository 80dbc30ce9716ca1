"""Cameras: OpenGL of the CPU engine."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "env.close()", "del env"])
def test_process_exits_without_output_however_cameras_are_closed(end: str) -> None:
    """EGL ends at exit too, and prints an error for contexts that are freed after it."""
    code = f"""
import embodied_envs
options = {{"cameras": ["front"], "image_size": (16, 16), "num_threads": 1}}
options |= {{"render": True, "render_size": (20, 30)}}
env = embodied_envs.make("Tabletop", num_envs=2, seeds=[0, 1], simulator="mujoco", **options)
env.reset()
env.render()
{end}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
