"""Tests of `embodied-ppo new-task`: generated tasks train, and invalid models are refused."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch
import yaml
from toy_envs import BALANCE

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_ppo.commands import main
from embodied_ppo.tools import task_generator

WALKER = """<mujoco model="walker">
  <compiler meshdir="meshes"/>
  <option timestep="0.004"/>
  <default><geom mass=".3"/><position kp="20" dampratio="1"/></default>
  <asset><mesh name="shell" file="shell.obj"/></asset>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body name="cube" pos="1 0 .05"><freejoint/><geom type="box" size=".05 .05 .05"/></body>
    <body name="trunk" pos="0 0 .3">
      <freejoint/>
      <geom type="box" size=".2 .1 .05" mass="2"/>
      <geom type="mesh" mesh="shell" contype="0" conaffinity="0"/>
      <body pos=".2 0 0"><joint name="front" type="hinge" axis="0 1 0" range="10 60" damping="1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -.25" size=".02"/></body>
      <body pos="-.2 0 0"><joint name="back" type="hinge" axis="0 1 0" damping="1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -.25" size=".02"/></body>
      <body pos="0 0 .1"><joint name="neck" type="ball" damping="1"/>
        <geom type="sphere" size=".05" pos="0 0 .1"/></body>
    </body>
  </worldbody>
  <actuator>
    <position name="front" joint="front"/>
    <motor joint="back"/>
    <general name="slow" joint="front" dyntype="filter" dynprm=".1" ctrlrange="-1 2"/>
  </actuator>
  <sensor><framezaxis name="up" objtype="body" objname="trunk"/><jointpos joint="back"/></sensor>
</mujoco>"""
SHELL = "v 0 0 0\nv .1 0 0\nv 0 .1 0\nv 0 0 .1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"
"""A tetrahedron."""


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder beside ``robots``; restore sys.modules afterwards."""
    robots = tmp_path / "robots"
    (robots / "meshes").mkdir(parents=True)
    (robots / "balance.xml").write_text(BALANCE)
    (robots / "walker.xml").write_text(WALKER)
    (robots / "meshes" / "shell.obj").write_text(SHELL)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    importlib.invalidate_caches()
    return folder


def run(command: str) -> str:
    process = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout + process.stderr


@pytest.mark.slow
def test_printed_commands_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["new-task", "my_robot", "--mjcf", "../robots/balance.xml", "--out", "a folder"]
    assert main.main(command) == 0
    out = capsys.readouterr().out
    assert "hinge: no range and no actuator, and gravity moves it, so an episode ends 1 " in out
    assert "push has no ctrlrange: its action is from -1 to 1, [-1.0, 1.0]" in out
    assert "all 1 sensors are observed (1 numbers)" in out
    test, train, evaluate = (line.strip() for line in out.split("next:\n")[1].splitlines())
    small = (
        "env.num_envs=4 algorithm.horizon=16 algorithm.global_batch_size=32 updates=2"
        " evaluation.episodes=1"
    )
    small += " evaluation.num_envs=1 evaluation.video_episodes=0 compile=never"
    run(f"{test}\n{train} {small}\n{evaluate} episodes=1 num_envs=1 video=false")
    assert Path("a folder/runs/first/summary.json").is_file()


@pytest.mark.slow
def test_walker_with_meshes_passes_its_generated_test(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["new-task", "--json", "my_walker", "--mjcf", "../robots/walker.xml"]) == 0
    summary = json.loads(capsys.readouterr().out)
    files = ["my_walker.py", "configs/experiment/my_walker.yaml", "test_my_walker.py"]
    assert summary["files"] == [f"my_walker/{file}" for file in files]
    assumed = "; ".join(summary["assumed"])
    for part in (
        "at home front are in the middle of their range, which excludes 0",
        "trunk is the robot's floating base",
        "cube: objects, observed",
        "front has no ctrlrange: its action is the range of its joint front, [0.1745, 1.0472]",
        "actuator 1 has no ctrlrange: its action is from -1 to 1",
        "back: no range, so it never ends an episode",
        "all 2 sensors are observed (4 numbers)",
        "a decision every 0.02 s (5 x 0.004 s), episodes of 250 decisions",
    ):
        assert part in assumed
    assert "slow has no ctrlrange" not in assumed
    run(summary["commands"][0])


def test_reward_and_termination_of_a_generated_task() -> None:
    """The reward is 1 at home, minus effort and distance; a fall and a joint's range end it."""
    task_generator.write("my_walker", Path("../robots/walker.xml"))
    sys.path.append("my_walker")
    env = embodied_envs.make("my_walker:MyWalker", num_envs=1, seeds=[0])
    assert env.action_spec.low == (0.1745, -1.0, -1.0)
    assert env.action_spec.high == (1.0472, 1.0, 2.0)
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    # positions: 7 of the cube, 5 of the trunk (no x and y), 2 hinges, 4 of the neck;
    # 6 + 6 + 2 + 3 velocities; 1 filter; 4 of sensors
    assert env.obs_spec.shape == (18 + 17 + 1 + 4,)
    s["qpos"][0] = task.home
    zero_action = torch.zeros(1, 3, dtype=torch.float64)
    assert task.reward({}, s, zero_action).tolist() == [1.0] and not task.terminated(s)
    # |action| / strength = 1 in each dimension: 1 - 0.01
    assert task.reward({}, s, task.strength[None]).item() == pytest.approx(0.99)
    front = env.physics.model.joint("front").qposadr[0]
    s["qpos"][0, front] += 0.3  # 1 / (1 + 10 · 0.09)
    assert task.reward({}, s, zero_action).item() == pytest.approx(1 / 1.9)
    s["qpos"][0, front] += 0.3
    assert task.terminated(s), "0.61 + 0.6 exceeds 1.05 by more than a tenth of 0.87"
    s["qpos"][0] = task.home
    assert task.turns[-1].tolist() == [10, 11, 12, 13]
    # The trunk is turned by 120 degrees: the distance is 1 - cos² 60 degrees = 0.75.
    s["qpos"][0, 10:14] = torch.tensor([0.5, 0.0, 0.0, 0.75**0.5])
    assert 1 / task.reward({}, s, zero_action).item() - 1 == pytest.approx(10 * 0.75)
    s["qpos"][0] = task.home
    s["qpos"][0, 9] = 0.14
    assert task.terminated(s), "the height is below half of 0.3"
    env.close()


POSITIONS = """<sensor>
    <framepos name="place" objtype="body" objname="trunk"/><subtreecom name="mass" body="trunk"/>
    <framepos name="to_start" objtype="body" objname="trunk" reftype="site" refname="start"/>
    <contact name="touched" body1="trunk" data="pos"/>
    <framepos name="to_cube" objtype="body" objname="cube" reftype="body" refname="trunk"/>
    <framelinvel name="speed" objtype="body" objname="trunk"/>"""


def test_sensors_of_global_positions_are_not_observed() -> None:
    site = '<worldbody><site name="start" pos="1 1 0"/>'
    text = WALKER.replace("<sensor>", POSITIONS).replace("<worldbody>", site)
    Path("../robots/lost.xml").write_text(text)
    written = task_generator.write("my_lost", Path("../robots/lost.xml"))
    line = (
        "4 of 8 sensors are observed (10 numbers); not place, mass, to_start, touched: positions in"
        " the world"
    )
    assert line in written.assumed
    sys.path.append("my_lost")
    env = embodied_envs.make("my_lost:MyLost", num_envs=1, seeds=[0])
    assert env.obs_spec.shape == (18 + 17 + 1 + 10,)
    task, s, model = env.task, {k: x.clone() for k, x in env.s.items()}, env.physics.model
    observations = []
    for shift in (0.0, 0.7):
        data = mujoco.MjData(model)
        data.qpos[:] = task.home
        for body in ("trunk", "cube"):
            start = model.jnt_qposadr[model.body(body).jntadr[0]]
            data.qpos[start : start + 2] += shift
        mujoco.mj_forward(model, data)
        s["qpos"][0], s["sensordata"][0] = torch.tensor(data.qpos), torch.tensor(data.sensordata)
        observations.append(task.observe(s)[0])
    changed = (observations[0] - observations[1]).abs() > 1e-6
    assert changed.nonzero().flatten().tolist() == [0, 1], "x and y of the cube, which is an object"
    env.close()


FINGER = """<mujoco model="finger"><worldbody>
  <body name="upper"><joint name="upper" axis="0 1 0"/>
    <geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02"/>
    <body name="wheel" pos="0 0 -.2"><joint name="wheel" axis="0 1 0"/>
      <geom type="cylinder" size=".05 .01" zaxis="0 1 0"/></body></body>
  <body name="spinner" pos="0 0 -.4"><joint name="spinner" axis="0 1 0"/>
    <geom size=".02" pos=".05 0 0"/></body>
  <body name="drawer"><joint name="drawer" type="slide" axis="1 0 0" range=".1 .3"/>
    <geom size=".02"/></body>
  </worldbody><actuator><motor joint="upper" ctrlrange="-1 1"/></actuator></mujoco>"""


def test_wheels_and_objects_do_not_end_an_episode() -> None:
    """Only joints of the robot that gravity moves end an episode; the spinner is an object."""
    Path("finger.xml").write_text(FINGER)
    assumed = "; ".join(task_generator.write("my_finger", Path("finger.xml"), Path(".")).assumed)
    assert "spinner, drawer: objects, observed, not part of the reward" in assumed
    assert "so an episode ends" not in assumed
    assert "upper, wheel: no range, so it never ends an episode" in assumed
    sys.path.append(".")
    env = embodied_envs.make("my_finger:MyFinger", num_envs=1, seeds=[0])
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    s["qpos"][0] = task.home
    assert task.home[3] == 0.2, "the middle of the drawer's range"
    zero_action = torch.zeros(1, 1, dtype=torch.float64)
    s["qpos"][0, 2:] += torch.tensor([20.0, 0.2])
    assert task.reward({}, s, zero_action).item() == 1.0 and not task.terminated(s).any()
    env.close()


def test_home_pose_is_the_keyframe_home() -> None:
    keys = (
        '<keyframe><key name="other" qpos="1 0"/><key name="home" qpos=".5'
        ' .25"/></keyframe></mujoco>'
    )
    Path("robot.xml").write_text(BALANCE.replace("</mujoco>", keys))
    task = task_generator.write("posed", Path("robot.xml"), Path("."))
    assert task.assumed[0] == "the home pose is keyframe 'home'"
    sys.path.append(".")
    env = embodied_envs.make("posed:Posed", num_envs=8, seeds=list(range(8)))
    distance = (env.reset()[:, :2] - torch.tensor([0.5, 0.25])).abs()
    assert 0.01 < float(distance.max()) <= 0.05
    env.close()


BALL = (
    '<mujoco><worldbody>{}<body name="ball"><freejoint/><geom'
    ' size=".1"/>{}</body></worldbody>{}</mujoco>'
)
ARM = '<body><joint name="j"/><geom size=".1" pos=".1 0 0"/></body>'
MOTOR = '<actuator><motor joint="j"/></actuator>'
URDF = """<robot name="arm"><link name="base"/><link name="arm"><inertial><mass value="1"/>
<inertia ixx=".1" iyy=".1" izz=".1" ixy="0" ixz="0" iyz="0"/></inertial></link>
<joint name="j" type="revolute"><parent link="base"/><child link="arm"/><axis xyz="0 1 0"/>
<limit lower="-1" upper="1" effort="10" velocity="3"/></joint></robot>"""
REFUSED = [
    ("robot.xml", "<mujoco><worldbody></mujoco>", "robot.xml: MuJoCo refuses it: XML parse error"),
    (
        "robot.xml",
        WALKER,
        "relative to the folder of --mjcf; --mjcf robot.xml: MuJoCo refuses it: .*shell.obj",
    ),
    ("robot.xml", "<mujoco/>", "nothing in it can move"),
    (
        "robot.xml",
        f"<mujoco><worldbody>{ARM}</worldbody></mujoco>",
        "it has no actuators, .*<motor joint=",
    ),
    ("robot.xml", BALL.format("", ARM, MOTOR), "body ball is free and there is no floor"),
    (
        "robot.urdf",
        URDF,
        "convert it: python -c .* a URDF has none",
    ),
    (
        "robot.xml",
        (
            '<mujoco><worldbody><body name="b"><joint/><geom'
            f' size=".1"/>{ARM}</body></worldbody>{MOTOR}</mujoco>'
        ),
        r"joint 0 \(of body b\) has no name",
    ),
    (
        "robot.xml",
        f'<mujoco><option timestep="0"/><worldbody>{ARM}</worldbody>{MOTOR}</mujoco>',
        "timestep is 0 s, not",
    ),
]


@pytest.mark.parametrize(("file", "text", "message"), REFUSED, ids=[x[2][:30] for x in REFUSED])
def test_invalid_models_are_refused(file: str, text: str, message: str) -> None:
    Path(file).write_text(text)
    with pytest.raises(EnvError, match=message):
        task_generator.write("my_robot", Path(file))
    written = {str(p) for p in Path().iterdir()} - {"MUJOCO_LOG.TXT"}  # MuJoCo writes its warning
    assert written == {file}, "nothing is written"


def test_hint_for_a_urdf_writes_an_mjcf_without_actuators() -> None:
    Path("robot.urdf").write_text(URDF)
    with pytest.raises(EnvError) as error:
        task_generator.write("my_robot", Path("robot.urdf"))
    code = re.search(r'python -c "(.*?)", then', str(error.value))
    assert code is not None
    subprocess.run([sys.executable, "-c", code[1]], check=True, timeout=60)
    actuator = '<actuator><motor name="m" joint="j"/></actuator></mujoco>'
    text = Path("robot.urdf.xml").read_text()
    Path("robot.urdf.xml").write_text(text.replace("</mujoco>", actuator))
    assert task_generator.write("my_robot", Path("robot.urdf.xml")).files


def test_names_of_a_model_are_escaped() -> None:
    file, name = Path('a\n"""b: \'${x}.xml'), "&quot;&quot;&quot;&#10;1/0&#10;\\"
    model = f"<mujoco><worldbody>{ARM}</worldbody>{MOTOR}</mujoco>".replace('"j"', f'"{name}"')
    file.write_text(model.replace("<motor", f'<motor name="{name}"'))
    for written in task_generator.write("my_robot", file).files:
        if written.suffix == ".py":
            namespace: dict[str, Any] = {"__name__": "my_robot", "__file__": str(written)}
            exec(compile(written.read_text(), str(written), "exec"), namespace)
            assert namespace.get("JOINTS", ('"""\n1/0\n\\',)) == ('"""\n1/0\n\\',)
        else:
            assert file.name in yaml.safe_load(written.read_text())["description"]


def test_free_robot_with_thrusters_or_a_floor_is_valid() -> None:
    Path("a.xml").write_text(BALL.format('<geom type="plane" size="1 1 1"/>', ARM, MOTOR))
    task_generator.load(Path("a.xml"))
    thrust = '<actuator><motor site="s" gear="0 0 1 0 0 0"/></actuator>'
    Path("b.xml").write_text(BALL.format("", '<site name="s"/>', thrust))
    task_generator.load(Path("b.xml"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-robot", "letters, digits and _"),
        ("none", "would be called None"),
        ("task", "would be called Task, which is taken; write task_robot"),
        ("json", "is a Python module already"),
    ],
)
def test_invalid_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        task_generator.write(name, Path("../robots/balance.xml"))


def test_existing_files_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["new-task", "my_robot", "--mjcf", "../robots/balance.xml"]
    assert main.main(command) == 0
    Path("my_robot/my_robot.py").write_text("edited")
    assert main.main(command) == 2
    assert "my_robot/my_robot.py exists and is not overwritten" in capsys.readouterr().err
    assert Path("my_robot/my_robot.py").read_text() == "edited"
    Path("file").touch()
    unwritable = "cannot be written (Not a directory); name"
    for out, message in (("file", "is a file; name a folder"), ("file/x", unwritable)):
        assert main.main([*command, "--out", out]) == 2 and message in capsys.readouterr().err
    assert main.main(["new-task", "x", "--mjcf", "nowhere.xml"]) == 2
    assert "--mjcf nowhere.xml: no such file" in capsys.readouterr().err
    assert main.main(["new-task", "x"]) == 2 and "--mjcf" in capsys.readouterr().err
