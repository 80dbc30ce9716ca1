"""Cameras: OpenGL of the CPU engine."""

from __future__ import annotations

import subprocess
import sys

import mujoco
import numpy as np
import pytest
from toy_envs import BALANCE

from embodied_envs.physics import cameras


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


QUADRUPED = """<mujoco><worldbody><geom type="plane" size="5 5 .1"/>
<camera name="fixed" pos="0 -3 1" xyaxes="1 0 0 0 0 1"/>
<body name="trunk" pos="0 0 .3"><freejoint name="root"/><geom type="box" size=".2 .1 .05"/>
<body><joint name="leg" axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02"/>
</body></body></worldbody><actuator><motor joint="leg"/></actuator></mujoco>"""


def test_own_robot_is_followed_beyond_its_floor() -> None:
    """100 m from the origin, the robot looks as at the origin, on a floor of 10 m."""
    model = mujoco.MjModel.from_xml_string(QUADRUPED)
    assert cameras.travelling_body(model) == 1
    assert cameras.travelling_body(mujoco.MjModel.from_xml_string(BALANCE)) is None
    renderer = cameras.Cameras(model, render_size=(60, 80))
    qpos = np.tile(model.qpos0, (2, 1))
    qpos[1, :2] = 100.0
    worlds = {"qpos": qpos, "mocap_pos": np.zeros((2, 0, 3)), "mocap_quat": np.zeros((2, 0, 4))}
    near, far = (renderer.render(worlds, i).float() for i in range(2))
    assert float(near.std()) > 5 and float((near - far).abs().mean()) < 12
    assert renderer._model.geom_size[0].tolist() == [5, 5, 0.1], "for observations"
    renderer.close()


def test_robot_that_stays_is_framed_without_its_floor() -> None:
    """A gripper of 6 cm on a floor of 20 m fills a part of the picture; before it was a pixel."""
    model = mujoco.MjModel.from_xml_string("""<mujoco><worldbody>
      <geom type="plane" size="10 10 .1" rgba="0 0 0 1"/><body name="wrist" pos="0 0 1">
      <body><joint name="j" type="slide" range="0 .04"/>
      <geom type="box" size=".03 .03 .03" rgba="1 1 1 1"/></body></body></worldbody>
      <actuator><position joint="j"/></actuator></mujoco>""")
    renderer = cameras.Cameras(model, render_size=(60, 80))
    empty = {"mocap_pos": np.zeros((1, 0, 3)), "mocap_quat": np.zeros((1, 0, 4))}
    picture = renderer.render({"qpos": np.zeros((1, 1)), **empty}, 0)
    assert float((picture > 50).float().mean()) > 0.03
    renderer.close()
