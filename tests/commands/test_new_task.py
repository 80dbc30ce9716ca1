"""embodied-ppo new-task: what it writes for a robot works as it stands, and what makes no task is
refused.
"""

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
from embodied_ppo.commands import main, new_task
from embodied_ppo.core.errors import EnvError

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
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with robots in a folder beside it; modules found there are forgotten
    afterwards.
    """
    robots = tmp_path / "robots"
    (robots / "meshes").mkdir(parents=True)
    (robots / "balance.xml").write_text(BALANCE)
    (robots / "walker.xml").write_text(WALKER)
    (robots / "meshes" / "shell.obj").write_text(SHELL)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    importlib.invalidate_caches()
    return here


def run(command: str) -> str:
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_printed_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.main(["new-task", "my_robot", "--mjcf", "../robots/balance.xml", "--out", "a folder"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "hinge: no range and no actuator, and gravity moves it, so an episode ends 1 (rad, m) from"
        " home" in out
    )
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
def test_a_walker_with_meshes_passes_its_test_and_says_what_was_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["new-task", "--json", "my_walker", "--mjcf", "../robots/walker.xml"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [
        f"my_walker/{x}" for x in ("my_walker.py", "configs/experiment/my_walker.yaml")
    ] + ["my_walker/test_my_walker.py"]
    said = "; ".join(told["assumed"])
    for part in (
        "at home front are in the middle of their range",
        "trunk is the robot's floating base",
        "cube: objects, observed",
        "front has no ctrlrange: its action is the range of its joint front, [0.1745, 1.0472]",
        "actuator 1 has no ctrlrange: its action is from -1 to 1",
        "back: no range, so it never ends an episode",
        "all 2 sensors are observed (4 numbers)",
        "a decision every 0.02 s (5 x 0.004 s), episodes of 250 decisions",
    ):
        assert part in said
    assert "slow has no ctrlrange" not in said
    run(told["commands"][0])


def test_what_the_task_computes() -> None:
    """Home is worth 1 a step, less the effort; away from it less; a fallen trunk and a joint out of
    range end it.
    """
    new_task.write("my_walker", Path("../robots/walker.xml"))
    sys.path.append("my_walker")
    env = embodied_envs.make("my_walker:MyWalker", num_envs=1, seeds=[0])
    assert env.action_spec.low == (0.1745, -1.0, -1.0) and env.action_spec.high == (
        1.0472,
        1.0,
        2.0,
    )
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    # 7 of the cube, 5 of the trunk (no x, y), 2 hinges, 4 of the neck; 6 + 6 + 2 + 3 velocities; 1
    # filter; 4 of sensors
    assert env.obs_spec.shape == (18 + 17 + 1 + 4,)
    s["qpos"][0] = task.home
    still = torch.zeros(1, 3, dtype=torch.float64)
    assert task.reward({}, s, still).tolist() == [1.0] and not task.terminated(s)
    # |action| / strength = 1 in each dimension: 1 - 0.01
    assert task.reward({}, s, task.strength[None]).item() == pytest.approx(0.99)
    front = env.physics.model.joint("front").qposadr[0]
    s["qpos"][0, front] += 0.3  # 1 / (1 + 10 · 0.09)
    assert task.reward({}, s, still).item() == pytest.approx(1 / 1.9)
    s["qpos"][0, front] += 0.3
    assert task.terminated(s), "0.61 + 0.6 is beyond 1.05 by over a tenth of 0.87"
    s["qpos"][0] = task.home
    s["qpos"][0, 10:14] = torch.tensor(
        [0.0, 0.0, 0.0, 1.0]
    )  # the trunk turned by half a turn: 1 / (1 + 10 ..)
    assert task.turns[-1].tolist() == [10, 11, 12, 13]
    s["qpos"][0, 10:14], expected = (
        torch.tensor([0.5, 0.0, 0.0, 0.75**0.5]),
        1 - 0.25,
    )  # by 120 degrees: cos² 60
    away = 1 / task.reward({}, s, still).item() - 1
    assert away == pytest.approx(10 * expected)
    s["qpos"][0] = task.home
    s["qpos"][0, 9] = 0.14
    assert task.terminated(s), "under half of 0.3"
    env.close()


POSITIONS = """<sensor>
    <framepos name="place" objtype="body" objname="trunk"/><subtreecom name="mass" body="trunk"/>
    <framepos name="to_start" objtype="body" objname="trunk" reftype="site" refname="start"/>
    <contact name="touched" body1="trunk" data="pos"/>
    <framepos name="to_cube" objtype="body" objname="cube" reftype="body" refname="trunk"/>
    <framelinvel name="speed" objtype="body" objname="trunk"/>"""


def test_positions_in_the_world_are_not_observed_through_sensors() -> None:
    text = WALKER.replace("<sensor>", POSITIONS).replace(
        "<worldbody>", '<worldbody><site name="start" pos="1 1 0"/>'
    )
    Path("../robots/lost.xml").write_text(text)
    written = new_task.write("my_lost", Path("../robots/lost.xml"))
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
  <body name="upper"><joint name="upper" axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02"/>
    <body name="wheel" pos="0 0 -.2"><joint name="wheel" axis="0 1 0"/>
      <geom type="cylinder" size=".05 .01" zaxis="0 1 0"/></body></body>
  <body name="spinner" pos="0 0 -.4"><joint name="spinner" axis="0 1 0"/><geom size=".02" pos=".05 0 0"/></body>
  <body name="drawer"><joint name="drawer" type="slide" axis="1 0 0" range=".1 .3"/><geom size=".02"/></body>
  </worldbody><actuator><motor joint="upper" ctrlrange="-1 1"/></actuator></mujoco>"""


def test_wheels_and_objects_may_turn() -> None:
    """Only what gravity moves on the robot itself ends an episode; a spinner beside the robot is an
    object.
    """
    Path("finger.xml").write_text(FINGER)
    said = "; ".join(new_task.write("my_finger", Path("finger.xml"), Path(".")).assumed)
    assert (
        "spinner, drawer: objects, observed, not part of the reward" in said
        and "so an episode ends" not in said
    )
    assert "upper, wheel: no range, so it never ends an episode" in said
    sys.path.append(".")
    env = embodied_envs.make("my_finger:MyFinger", num_envs=1, seeds=[0])
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    s["qpos"][0] = task.home
    assert task.home[3] == 0.2, "the middle of the drawer's range"
    still = torch.zeros(1, 1, dtype=torch.float64)
    s["qpos"][0, 2:] += torch.tensor([20.0, 0.2])
    assert task.reward({}, s, still).item() == 1.0 and not task.terminated(s).any()
    env.close()


def test_the_home_pose_is_the_keyframe_of_that_name() -> None:
    keys = (
        '<keyframe><key name="other" qpos="1 0"/><key name="home" qpos=".5'
        ' .25"/></keyframe></mujoco>'
    )
    Path("robot.xml").write_text(BALANCE.replace("</mujoco>", keys))
    assert (
        new_task.write("posed", Path("robot.xml"), Path(".")).assumed[0]
        == "the home pose is keyframe 'home'"
    )
    sys.path.append(".")
    env = embodied_envs.make("posed:Posed", num_envs=8, seeds=list(range(8)))
    away = env.reset()[:, :2] - torch.tensor([0.5, 0.25])
    assert 0.01 < float(away.abs().max()) <= 0.05
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
        r"MuJoCo refuses it: .*shell.obj.* \(meshes and textures are searched from .*here\)",
    ),
    ("robot.xml", "<mujoco/>", "nothing in it can move"),
    (
        "robot.xml",
        f"<mujoco><worldbody>{ARM}</worldbody></mujoco>",
        "it has no actuators, .*<motor name=",
    ),
    ("robot.xml", BALL.format("", ARM, MOTOR), "body ball floats freely above nothing"),
    (
        "robot.xml",
        BALL.format("", ARM, MOTOR).replace(' name="ball"', ""),
        "the free body 1 has no name",
    ),
    (
        "robot.urdf",
        URDF,
        (
            "robot.urdf: is a URDF, which MuJoCo reads without actuators and .* save it as MJCF:"
            " python -c"
        ),
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
    (
        "robot.xml",
        (
            f"<mujoco><worldbody>{ARM}</worldbody>{MOTOR}<keyframe><key"
            ' qpos="nan"/></keyframe></mujoco>'
        ),
        "qpos holds nan",
    ),
]


@pytest.mark.parametrize(("file", "text", "said"), REFUSED, ids=[x[2][:30] for x in REFUSED])
def test_models_that_make_no_task_are_refused(file: str, text: str, said: str) -> None:
    Path(file).write_text(text)
    with pytest.raises(EnvError, match=said):
        new_task.write("my_robot", Path(file))
    assert [str(p) for p in Path().iterdir()] == [file], "nothing is written"


def test_the_cure_for_a_urdf_makes_an_mjcf_that_lacks_actuators_only() -> None:
    Path("robot.urdf").write_text(URDF)
    with pytest.raises(EnvError) as caught:
        new_task.write("my_robot", Path("robot.urdf"))
    code = re.search(r'python -c "(.*?)", then', str(caught.value))
    assert code is not None
    subprocess.run([sys.executable, "-c", code[1]], check=True, timeout=60)
    text = Path("robot.xml").read_text()
    Path("robot.xml").write_text(
        text.replace("</mujoco>", '<actuator><motor name="m" joint="j"/></actuator></mujoco>')
    )
    assert new_task.write("my_robot", Path("robot.xml")).files


def test_names_of_a_model_stay_names() -> None:
    file, name = Path('a\n"""b: \'${x}.xml'), "&quot;&quot;&quot;&#10;1/0&#10;\\"
    model = f"<mujoco><worldbody>{ARM}</worldbody>{MOTOR}</mujoco>".replace('"j"', f'"{name}"')
    file.write_text(model.replace("<motor", f'<motor name="{name}"'))
    for written in new_task.write("my_robot", file).files:
        if written.suffix == ".py":
            namespace: dict[str, Any] = {"__name__": "my_robot", "__file__": str(written)}
            exec(compile(written.read_text(), str(written), "exec"), namespace)
            assert namespace.get("JOINTS", ('"""\n1/0\n\\',)) == ('"""\n1/0\n\\',)
        else:
            assert file.name in yaml.safe_load(written.read_text())["description"]


def test_a_free_robot_with_thrusters_or_a_floor_is_none_of_these() -> None:
    Path("a.xml").write_text(BALL.format('<geom type="plane" size="1 1 1"/>', ARM, MOTOR))
    new_task.load(Path("a.xml"))
    thrust = '<actuator><motor site="s" gear="0 0 1 0 0 0"/></actuator>'
    Path("b.xml").write_text(BALL.format("", '<site name="s"/>', thrust))
    new_task.load(Path("b.xml"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-robot", "letters, digits and _"),
        ("class", "letters, digits and _"),
        ("_", "letters, digits and _"),
        ("none", "would be called None"),
        ("task", "would be called Task, which is taken; write task_robot"),
        ("json", "is a Python module already"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        new_task.write(name, Path("../robots/balance.xml"))


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["new-task", "my_robot", "--mjcf", "../robots/balance.xml"]
    assert main.main(command) == 0
    Path("my_robot/my_robot.py").write_text("mine")
    assert main.main(command) == 2
    assert "my_robot/my_robot.py exists and is not overwritten" in capsys.readouterr().err
    assert Path("my_robot/my_robot.py").read_text() == "mine"
    Path("file").touch()
    for out, said in (
        ("file", "is a file; name a folder"),
        ("file/x", "cannot be written (Not a directory); name"),
    ):
        assert main.main([*command, "--out", out]) == 2 and said in capsys.readouterr().err
    assert main.main(["new-task", "x", "--mjcf", "nowhere.xml"]) == 2
    assert "--mjcf nowhere.xml: no such file" in capsys.readouterr().err
    assert main.main(["new-task", "x"]) == 2 and "--mjcf" in capsys.readouterr().err
