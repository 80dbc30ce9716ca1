"""Tests of `embodied-ppo new-task`: generated tasks train, and invalid models are refused."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
import yaml
from run_helpers import assert_refused, metric_rows, run_process
from toy_envs import BALANCE
from toy_robots import DRONE, MODELS, QUADRUPED

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.tasks.panda import asset_file
from embodied_ppo.commands import main
from embodied_ppo.tools import task_generator

WALKER = (MODELS / "walker.xml").read_text()
# A tetrahedron.
SHELL = "v 0 0 0\nv .1 0 0\nv 0 .1 0\nv 0 0 .1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch) -> Path:
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


SMALL = """env.num_envs=4 algorithm.horizon=16 algorithm.global_batch_size=32 updates=2 \
evaluation.episodes=1 evaluation.num_envs=1 evaluation.video_episodes=0 compile=never"""
run = functools.partial(run_process, "bash", "-ec")


@pytest.mark.slow
def test_printed_commands_succeed(capsys) -> None:
    command = ["new-task", "my_robot", "--mjcf", "../robots/balance.xml", "--out", "a folder"]
    assert main.main(command) == 0
    out = capsys.readouterr().out
    assert "hinge: no range and no actuator, and gravity moves it, so an episode ends 1 " in out
    assert "push has no ctrlrange: its control is from -1 to 1" in out
    assert "push: control = home control + 1 · action" in out
    test, train, evaluate = (line.strip() for line in out.split("next:\n")[1].splitlines())
    run(f"{test}\n{train} {SMALL}\n{evaluate} episodes=1 num_envs=1 video=false")
    assert Path("a folder/runs/first/summary.json").is_file()


@pytest.mark.slow
def test_walker_with_meshes_passes_its_generated_test(capsys) -> None:
    assert main.main(["new-task", "--json", "my_walker", "--mjcf", "../robots/walker.xml"]) == 0
    summary = json.loads(capsys.readouterr().out)
    files = ["my_walker.py", "configs/experiment/my_walker.yaml", "test_my_walker.py"]
    assert summary["files"] == [f"my_walker/{file}" for file in files]
    assumed = "; ".join(summary["assumed"])
    for part in (
        "at home front are in the middle of their range, which excludes 0",
        "trunk is the robot's floating base",
        "cube, body 5: objects or ball joints, not part of observation and reward",
        "back has no ctrlrange: its control is from -1 to 1",
        "back: no range, so it never ends an episode",
        "13 numbers are observed",
        "a decision every 0.02 s (5 x 0.004 s), episodes of 250 decisions",
    ):
        assert part in assumed, assumed
    assert "slow has no ctrlrange" not in assumed
    run(summary["commands"][0])


def test_generated_task_starts_and_ends_as_described() -> None:
    """Action 0 is home, the reward there 1, and a fall and a joint's range end the episode."""
    task_generator.write("my_walker", Path("../robots/walker.xml"))
    sys.path.append("my_walker")
    env = embodied_envs.make("my_walker:MyWalker", num_envs=1, seeds=[0])
    assert env.action_spec.low == (-1.0,) * 3 and env.action_spec.high == (1.0,) * 3
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    # Gravity, angular velocity, 2 hinges with velocities, 3 actions.
    assert env.obs_spec.shape == (3 + 3 + 2 + 2 + 3,)
    s["qpos"][0], s["actuator_force"][0] = task.home, 0
    zero_action = torch.zeros(1, 3, dtype=torch.float64)

    def reward() -> float:
        terms = task.reward_terms({}, s, zero_action)
        assert task.reward({}, s, zero_action) == task.total(terms)
        return task.total(terms).item()

    assert reward() == 1.0 and not task.terminated(s)
    s["actuator_force"][0] = task.force_limit  # 1 - 0.01
    assert reward() == pytest.approx(0.99)
    s["actuator_force"][0] = 0
    front = env.physics.model.joint("front").qposadr[0]
    s["qpos"][0, front] += 0.3  # 1 / (1 + 10 · 0.09)
    assert reward() == pytest.approx(1 / 1.9)
    s["qpos"][0, front] += 0.3
    assert task.terminated(s), "0.61 + 0.6 exceeds 1.05 by more than a tenth of 0.87"
    s["qpos"][0] = task.home
    s["qpos"][0, 9] = 0.45 * task.home_height
    assert task.terminated(s), "the height is below half of that at home"
    env.close()


@pytest.mark.slow
def test_velocity_template_trains_and_is_evaluated_with_a_command() -> None:
    Path("../robots/dog.xml").write_text(QUADRUPED)
    command = ["new-task", "dog", "--mjcf", "../robots/dog.xml", "--template", "velocity"]
    assert main.main(command) == 0
    assert 'Preparation(gains="inertia"' in Path("dog/dog.py").read_text()
    config = yaml.safe_load(Path("dog/configs/experiment/dog.yaml").read_text())
    assert config["env"]["commands"]["lin_vel_x"] == [-0.8, 1.0]
    assert config["env"]["rewards"]["tracking_lin_vel"] == {"weight": 1.0, "sigma": 0.25}
    program = f"PYTHONPATH=dog {Path(sys.executable).parent}/embodied-ppo"
    run(f"{sys.executable} dog/test_dog.py")  # the first command that new-task prints
    train = f"{program} train --quiet --config-dir dog/configs experiment=dog {SMALL}"
    train += " env.max_episode_steps=30"
    changes = "env.rewards.tracking_lin_vel.weight=2 ~env.rewards.pose"
    run(f"{train} {changes} env.rewards.fast_joints.weight=-0.1 run_dir=run")
    row = metric_rows(Path("run"))[-1]
    assert {"env/tracking_lin_vel", "env/fast_joints", "env/error_ang_vel_yaw"} <= set(row)
    assert "env/pose" not in row
    still = "{lin_vel_x: [0.7, 0.7], lin_vel_y: [0, 0], ang_vel_yaw: [0, 0]}"
    evaluate = f"{program} evaluate checkpoint=run episodes=2 num_envs=2 video=false out=r"
    run(f"{evaluate} 'env.commands={still}'")
    report = json.loads(Path("r/report.json").read_text())
    numbers = report["tasks"]["dog:Dog"]["numbers"]
    assert 0.4 < numbers["error_lin_vel_x"]["mean"] < 1, "an untrained robot that stands"
    assert numbers["error_lin_vel_y"]["mean"] < 0.4 and "fast_joints" in numbers
    assert report["config"]["env"]["rewards"]["tracking_lin_vel"]["weight"] == 2
    rough = "env.id=dog:DogRough 'model.critic_obs=[state,height_scan,privileged]'"
    run(f"{train} {rough} run_dir=rough")
    # A robot without feet.
    command = ["new-task", "cart", "--mjcf", "../robots/balance.xml", "--template", "velocity"]
    assert main.main(command) == 2 and not Path("cart").exists()


def test_target_templates_name_the_tip_and_targets_around_it() -> None:
    arm = asset_file("mujoco_menagerie/franka_emika_panda/scene.xml")
    task_generator.write("arm", arm, template="reach")
    config = yaml.safe_load(Path("arm/configs/experiment/arm.yaml").read_text())
    assert 'tip = "link7"' in Path("arm/arm.py").read_text()
    model = mujoco.MjModel.from_xml_path(str(arm))
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_forward(model, data)
    home, random, reached = data.qpos.copy(), np.random.default_rng(0), []
    tip = data.body("link7").xpos.copy()
    for _ in range(20_000):  # postures of actions; some joints at the ends
        data.qpos[:7] = home[:7] + 0.5 * random.uniform(-1.5, 1.5, 7).clip(-1, 1)
        mujoco.mj_kinematics(model, data)
        reached.append(data.body("link7").xpos.copy())
    box = np.array([config["env"]["commands"][axis] for axis in "xyz"]).T
    assert (box[0] < tip).all() and (tip < box[1]).all() and np.prod(box[1] - box[0]) > 0.004
    for sides in itertools.product((0, 1), repeat=3):
        corner = np.choose(sides, box)
        assert np.linalg.norm(np.array(reached) - corner, axis=1).min() < 0.04
    task_generator.write("picker", arm, template="pick")
    config = yaml.safe_load(Path("picker/configs/experiment/picker.yaml").read_text())["env"]
    assert config["commands"]["y"] == [-0.075, 0.075] and config["commands"]["z"] == [0.1, 0.4]
    assert set(config["rewards"]) == {"progress", "ground_contact"}
    Path("../robots/drone.xml").write_text(DRONE)
    task_generator.write("drone", Path("../robots/drone.xml"), template="hover")
    sys.path += ["arm", "drone", "picker"]
    for name in ("arm:Arm", "drone:Drone", "picker:Picker"):
        term = (
            {"progress": {"weight": 10}}
            if "picker" in name
            else {"target": {"weight": 1, "scale_m": 0.1}}
        )
        rewards = {**term, "fast_joints": {"weight": -1}}
        commands = {"z": [0.6, 0.6]}
        env = embodied_envs.make(name, num_envs=1, seeds=[0], rewards=rewards, commands=commands)
        env.reset()
        assert env.step(torch.zeros(1, env.action_spec.size)).info
        env.close()
    Path("../robots/dog.xml").write_text(QUADRUPED)
    space = QUADRUPED.replace("<option", '<option gravity="0 0 0"')
    Path("../robots/space.xml").write_text(space)
    pairs = ("hover", "dog"), ("reach", "drone"), ("velocity", "drone"), ("velocity", "space")
    for template, robot in pairs:
        with pytest.raises(EnvError, match="--template"):
            task_generator.write("other", Path(f"../robots/{robot}.xml"), template=template)


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
    assert "spinner, drawer: objects or ball joints, not part of observation and reward" in assumed
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
    assert task.assumed[0] == "the home posture is keyframe 'home'"
    sys.path.append(".")
    env = embodied_envs.make("posed:Posed", num_envs=8, seeds=list(range(8)))
    assert 0.01 < float(env.reset()[:, :2].abs().max()) <= 0.05
    assert env.task.home.tolist() == [0.5, 0.25]
    env.close()


BALL = (
    '<mujoco><worldbody>{}<body name="ball"><freejoint/><geom'
    ' size=".1"/>{}</body></worldbody>{}</mujoco>'
)
ARM = '<body><joint name="j"/><geom size=".1" pos=".1 0 0"/></body>'
MOTOR = '<actuator><motor joint="j"/></actuator>'
KEY = '<keyframe><key {}="{}"/></keyframe>'
URDF = """<robot name="arm"><link name="base"><inertial><mass value="2"/>
<inertia ixx=".1" iyy=".1" izz=".1" ixy="0" ixz="0" iyz="0"/></inertial></link>
<link name="arm"><inertial><mass value="1"/>
<inertia ixx=".1" iyy=".1" izz=".1" ixy="0" ixz="0" iyz="0"/></inertial></link>
<joint name="j" type="revolute"><parent link="base"/><child link="arm"/><axis xyz="0 1 0"/>
<limit lower="-1" upper="1" effort="10" velocity="3"/></joint></robot>"""


def arm_model(*, body: str = ARM, rest: str = MOTOR, option: str = "") -> str:
    return f"<mujoco>{option}<worldbody>{body}</worldbody>{rest}</mujoco>"


REFUSED_MJCF = {
    "robot.xml: MuJoCo refuses it: XML parse error": "<mujoco><worldbody></mujoco>",
    "relative to the folder of robot.xml; --mjcf robot.xml: MuJoCo refuses it: .*shell.obj": WALKER,
    "nothing in it can move": "<mujoco/>",
    "it has no actuators, .*<motor joint=": arm_model(rest=""),
    "write --floor: body ball is free": BALL.format("", ARM, MOTOR),
    "move .* by 0.3 m": QUADRUPED.replace('"5 5 .1"', '"5 5 .1" pos="0 0 -.3"'),
    r'write name="NAME" in joint 0 \(of body b\)': arm_model(
        body=f'<body name="b"><joint/><geom size=".1"/>{ARM}</body>'
    ),
    "timestep is 0 s, not": arm_model(option='<option timestep="0"/>'),
    "^name the MJCF or URDF of a robot, in valid XML; ": "not XML",
    "^name the MJCF or URDF of a robot.*empty file": "",
    "^write files .* includes.*no.xml": '<mujoco><include file="no.xml"/></mujoco>',
    "correct its keyframes: one contains nan": arm_model(rest=MOTOR + KEY.format("ctrl", "nan")),
    "correct keyframe 0: j is at 2, outside its range from -1.05 to 1.05": arm_model(
        body=ARM.replace('"j"', '"j" range="-60 60"'), rest=MOTOR + KEY.format("qpos", 2)
    ),
    "no actuator moves a hinge, a slide or a floating base; add some": arm_model(
        body=ARM.replace('"j"', '"j" type="ball"')
    ),
    "write position, velocity or motor for actuators with several controls": arm_model(
        rest=MOTOR.replace("<motor", "<pid")
    ),
}
REFUSED = [
    *(("robot.xml", text, message) for message, text in REFUSED_MJCF.items()),
    ("robot.urdf", URDF, "write --urdf robot.urdf instead of --mjcf"),
    ("robot.xacro", URDF, "^convert a xacro first: xacro robot.xacro > robot.urdf; "),
]


@pytest.mark.parametrize(("file", "text", "message"), REFUSED, ids=[x[2][:30] for x in REFUSED])
def test_invalid_models_are_refused(file: str, text: str, message: str) -> None:
    Path(file).write_text(text)
    with pytest.raises(EnvError, match=message):
        task_generator.write("my_robot", Path(file))
    assert {str(p) for p in Path().iterdir()} == {file}, "nothing is written"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--floating", "remove --floating: write <freejoint/> in the base"),
        ("--floor", "remove --floor: it has a geom of the name floor"),
        ("--template=reach", 'write name="tip" in body 1 of the MJCF'),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(option: str, message: str, capsys) -> None:
    floor = '<geom name="floor" type="plane" size="1 1 .1"/>'
    Path("a.xml").write_text(arm_model(body=floor + ARM))
    assert_refused(capsys, ["new-task", "my_arm", "--mjcf", "a.xml", option], message)
    assert not Path("my_arm").exists()


def test_robot_that_diverges_at_home_is_named_with_its_joint(capfd) -> None:
    """A servo of 1e6 N m/rad at a timestep of 20 ms; one whose damping is too large for the arm."""
    servo = '<actuator><position joint="j" kp="1e6"/></actuator>'
    Path("a.xml").write_text(arm_model(rest=servo, option='<option timestep=".02"/>'))
    link = '<joint name="{0}" axis="{1}" damping="1"/>'
    link += '<geom type="capsule" fromto="0 0 0 0 0 .3" size=".03"/>'
    body = f"<body>{link.format('pan', '0 0 1')}<body pos='0 0 .3'>{link.format('lift', '0 1 0')}"
    servos = "".join(f'<position joint="{j}" kp="60" kv="9"/>' for j in ("pan", "lift"))
    text = f"<mujoco><worldbody>{body}</body></body></worldbody><actuator>{servos}</actuator>"
    Path("b.xml").write_text(f"{text}</mujoco>")
    for name, joint in (("a", "j"), ("b", "pan")):
        assumed = task_generator.write(f"stiff_{name}", Path(f"{name}.xml"), Path(".")).assumed
        (line,) = [x for x in assumed if x.startswith("held at home")]
        assert "it diverges after" in line and f"joint {joint} first: use <option integ" in line
    assert "WARNING" not in capfd.readouterr().err and not Path("MUJOCO_LOG.TXT").exists()


def test_urdf_becomes_a_model_with_servos(capsys) -> None:
    Path("robot.urdf").write_text(URDF)
    command = ["new-task", "my_arm", "--urdf", "robot.urdf"]
    assert main.main(command) == 0
    model = mujoco.MjModel.from_xml_path("my_arm/my_arm.xml")
    assert (model.nq, model.nu, model.actuator("j").name) == (1, 1, "j")
    assert model.jnt_actfrcrange.tolist() == [[-10, 10]], "the effort of the URDF"
    # I = 0.1, f = 6 Hz: kp = 142, kd = 2 sqrt(14.2).
    assert model.actuator_gainprm[0, 0] == pytest.approx(142.1, abs=0.1)
    Path("mjcf.urdf").write_text(arm_model())
    instead = "write --mjcf mjcf.urdf instead of --urdf"
    assert_refused(capsys, "new-task x --urdf mjcf.urdf", instead)
    second = URDF[URDF.index('<link name="arm"') : -8].replace('"arm"', '"b"').replace('"j"', '"k"')
    Path("mimic.urdf").write_text(
        URDF[:-8] + second.replace("<axis", '<mimic joint="j" multiplier="-1"/><axis') + "</robot>"
    )
    assert main.main(["new-task", "mimic", "--urdf", "mimic.urdf"]) == 0
    model = mujoco.MjModel.from_xml_path("mimic/mimic.xml")
    assert (model.njnt, model.nu, model.neq) == (2, 1, 1), "a joint that mimics has no servo"
    walks = [*command, "--out", "walks"]
    assert_refused(capsys, [*walks, "--template=velocity"], "write --template reach for an arm")
    assert not [*Path("walks").glob("*")], "a corrected command may write the same files"
    Path("walks").rmdir()
    assert_refused(capsys, [*walks, "--floating"], "write --floor: body base is free")
    assert not Path("walks").exists()
    assert main.main([*walks, "--floating", "--floor"]) == 0
    sys.path.append("walks")
    env = embodied_envs.make("my_arm:MyArm", num_envs=1, seeds=[0])
    assert env.physics.model.nq == 8 and env.task.robot.ground == 0
    env.close()


def test_gains_are_those_of_the_options(capsys) -> None:
    """In a file the last matching line counts."""
    Path("robot.xml").write_text(FINGER)
    Path("gains.yaml").write_text("'*': [20, 1]\nupper: [30, 2]\n")
    rows = {(): None, ("--kp", "40", "--kd", "3"): (40, 3), ("--gains", "gains.yaml"): (30, 2)}
    for i, (options, gains) in enumerate(rows.items()):
        assert main.main(["new-task", f"a{i}", "--mjcf", "robot.xml", *options]) == 0
        sys.path.append(f"a{i}")
        env = embodied_envs.make(f"a{i}:A{i}", num_envs=1, seeds=[0])
        (actuator,) = env.task.robot.actuators
        assert actuator.kind == ("position" if gains else "force"), "of a continuous joint"
        assert gains is None or (actuator.kp, actuator.kd) == gains
        env.close()
    Path("bad.yaml").write_text("upper: 3")
    for options, message in (
        (["--kp", "40"], "write both --kp 40 --kd 1"),
        (["--kp", "-1", "--kd", "1"], "write both --kp 40 --kd 1"),
        (["--gains", "bad.yaml"], "or a YAML file of lines"),
        (["--gains", "none.yaml"], "name a readable file: --gains none.yaml: "),
        (["--gains", "gains.yaml", "--kp", "3"], "not both"),
    ):
        assert_refused(capsys, ["new-task", "b", "--mjcf", "robot.xml", *options], message)


def test_names_of_a_model_are_escaped() -> None:
    file, name = Path('a\n"""b: \'${x}.xml'), "&quot;&quot;&quot;&#10;1/0&#10;\\"
    model = f"<mujoco><worldbody>{ARM}</worldbody>{MOTOR}</mujoco>".replace('"j"', f'"{name}"')
    file.write_text(model.replace("<motor", f'<motor name="{name}"'))
    for written in task_generator.write("my_robot", file).files:
        if written.suffix == ".py":
            namespace: dict[str, Any] = {"__name__": "my_robot", "__file__": str(written)}
            exec(compile(written.read_text(), str(written), "exec"), namespace)
        else:
            assert file.name in yaml.safe_load(written.read_text())["description"]


def test_free_robot_with_thrusters_or_a_floor_is_valid() -> None:
    Path("a.xml").write_text(BALL.format('<geom type="plane" size="1 1 1"/>', ARM, MOTOR))
    task_generator.load(Path("a.xml"))
    thrust = '<actuator><motor site="s" gear="0 0 1 0 0 0"/></actuator>'
    no_feet = BALL.format("", '<site name="s"/>', thrust).replace("<geom", '<geom contype="0"')
    Path("b.xml").write_text(no_feet.replace("<geom", '<geom conaffinity="0"'))
    assumed = task_generator.write("flies", Path("b.xml")).assumed
    assert "gravity and angular velocity are those of the base" in assumed
    assert any(x.startswith("held at home for 2 s, its base sinks by ") for x in assumed)
    sys.path.append("flies")
    env = embodied_envs.make("flies:Flies", num_envs=1, seeds=[0], obs_keys=["privileged"])
    assert env.obs_spec["privileged"].shape == (1 + 3 + 1,), "force, velocity, height; no feet"
    env.close()
    unnamed = '<body><joint type="slide"/><geom size=".1" pos="1 0 0"/></body>'
    Path("c.xml").write_text(f"<mujoco><worldbody>{ARM}{unnamed}</worldbody>{MOTOR}</mujoco>")
    task_generator.load(Path("c.xml"))  # joints of objects need no name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-robot", "letters, digits and _"),
        ("none", "would be called None"),
        ("state", "would be called State, which is taken; write state_robot"),
        ("json", "is a Python module already"),
    ],
)
def test_invalid_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        task_generator.write(name, Path("../robots/balance.xml"))


def test_existing_files_are_not_overwritten(capsys) -> None:
    command = ["new-task", "my_robot", "--mjcf", "../robots/balance.xml"]
    assert main.main(command) == 0
    Path("my_robot/my_robot.py").write_text("edited")
    assert_refused(capsys, command, "my_robot/my_robot.py exists and is not overwritten")
    assert Path("my_robot/my_robot.py").read_text() == "edited"
    Path("file").touch()
    unwritable = "cannot be written (Not a directory); name"
    for out, message in (("file", "is a file; name a folder"), ("file/x", unwritable)):
        assert_refused(capsys, [*command, "--out", out], message)
    assert_refused(capsys, "new-task x --mjcf nowhere.xml", "--mjcf nowhere.xml: no such file")
    assert_refused(capsys, "new-task x", "--mjcf")
