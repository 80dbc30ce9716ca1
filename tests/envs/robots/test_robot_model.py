"""RobotModel: what is derived from small models by hand, and from robots that EnvPool ships."""

from __future__ import annotations

from functools import cache

import mujoco
import numpy as np
import pytest
from toy_robots import QUADRUPED

from embodied_envs.robots.preparation import Preparation, inertia_gains
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.tasks.panda import asset_file


@cache
def quadruped() -> RobotModel:
    return RobotModel(mujoco.MjModel.from_xml_string(QUADRUPED))


def names(robot: RobotModel, joints: tuple[int, ...]) -> list[str]:
    return [robot.model.joint(j).name for j in joints]


def test_base_and_home_posture() -> None:
    """The feet, whose centres are 0.2 cos(0.1) below the trunk, touch the floor: r = 0.03."""
    robot = quadruped()
    model = robot.model
    assert robot.base == model.body("trunk").id and robot.roots == {robot.base}
    assert robot.key == 1, "the keyframe home, not the first one"
    assert names(robot, robot.joints)[:3] == ["FL_roll", "FL_pitch", "FR_roll"]
    assert robot.home[robot.base_qpos + 2] == pytest.approx(0.2 * np.cos(0.1) + 0.03, abs=1e-6)
    assert robot.home[2] == 0.05 and robot.ground == 0
    assert robot.weight == pytest.approx((4 + 4 * 0.5) * 9.81)
    assert robot.imu == model.site("imu").id
    assert RobotModel(model, key="other").home[robot.base_qpos + 2] == pytest.approx(0.23)


def test_feet_legs_and_pairs() -> None:
    robot = quadruped()
    assert [foot.name for foot in robot.feet] == [f"{n}_shank" for n in ("FL", "FR", "RL", "RR")]
    assert names(robot, robot.feet[1].leg) == ["FR_roll", "FR_pitch"]
    assert robot.model.geom("FR_foot").id in robot.feet[1].geoms
    pairs = {(*names(robot, (p.left, p.right)), p.sign) for p in robot.pairs}
    # Mirrored in y = 0, a roll turns to the other side and a pitch to the same one.
    expected = {
        (f"{x}L_{j}", f"{x}R_{j}", s) for x in "FR" for j, s in (("roll", -1), ("pitch", 1))
    }
    assert pairs == expected


def test_actuators() -> None:
    servo, limited, motor = (quadruped().actuators[i] for i in (0, 4, 6))
    expected = ("FL_roll", "position", 40, 1, 10)
    assert (servo.name, servo.kind, servo.kp, servo.kd, servo.force) == expected
    # 10 N m / (40 N m/rad) = 0.25 rad; the range is that of the joint.
    assert (servo.home, servo.low, servo.high, servo.scale) == (pytest.approx(0.1), -0.5, 0.5, 0.25)
    assert limited.name == "FL_pitch" and limited.force == 20, "the joint's actuatorfrcrange"
    # A motor without ctrlrange: 20 N m / gear 4.
    assert (motor.kind, motor.force, motor.low, motor.high, motor.scale) == ("force", 5, -5, 5, 5)


CONTINUOUS = """<mujoco><worldbody>
  <body name="upper"><joint name="upper" axis="0 1 0"/>
    <geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02"/>
    <body pos="0 0 -.2"><joint name="wheel" axis="0 1 0"/>
      <geom type="cylinder" size=".05 .01" zaxis="0 1 0"/></body>
    <body pos="0 0 -.2"><joint name="pole" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 0 0 .2" size=".02"/></body></body>
  <body name="drawer"><joint name="drawer" type="slide" axis="1 0 0" range=".1 .3"/>
    <geom size=".02"/></body></worldbody>
  <actuator><position joint="upper" kp="20" forcerange="-16 16"/>
    <velocity joint="upper" kv="2" forcerange="-6 6"/>
    <general joint="upper" dyntype="filter" dynprm=".1" ctrlrange="-1 2"/></actuator></mujoco>"""


def test_continuous_joints_velocity_servos_and_objects() -> None:
    robot = RobotModel(mujoco.MjModel.from_xml_string(CONTINUOUS))
    position, velocity, force = robot.actuators
    # 16 / 20 is more than the largest scale; the target has no limits.
    assert (position.scale, position.low, position.high) == (0.5, -np.inf, np.inf)
    assert (velocity.kind, velocity.low, velocity.high, velocity.scale) == ("velocity", -3, 3, 3)
    assert (force.kind, force.scale, force.home) == ("force", 1, 0), "as far as in both directions"
    assert names(robot, robot.joints) == ["upper", "wheel", "pole"]
    assert [robot.falls(j) for j in robot.joints] == [False, False, True]
    assert robot.base is None and robot.feet == () and robot.pairs == ()
    assert robot.home.tolist() == [0, 0, 0, 0.2], "the middle of the drawer's range"


ARM = """<mujoco><worldbody><body name="arm"><joint name="j" axis="0 1 0" range="-60 60"/>
    <geom type="capsule" fromto="0 0 0 0 0 .3" size=".02" mass="{mass}"/></body></worldbody>
  <actuator>{actuator}</actuator><keyframe><key qpos=".5"/></keyframe></mujoco>"""
KINDS = {
    # kind, low, high, home, states at home, and whether it becomes a servo
    '<motor joint="j" ctrlrange="-2 2"/>': ("force", -2, 2, 0, [], True),
    '<muscle joint="j" force="20"/>': ("force", 0, 1, 0, [0], False),
    '<damper joint="j" kv="5" ctrlrange="0 1"/>': ("force", 0, 1, 0, [], False),
    '<intvelocity joint="j" kp="50" ctrlrange="-3 3" actrange="-1 1"/>': (
        *("velocity", -3, 3, 0, [0.5], False),
    ),
    '<general joint="j" dyntype="integrator" ctrlrange="-2 2"/>': ("force", -2, 2, 0, [0], False),
    '<position joint="j" kp="9" timeconst=".1" ctrlrange="-1 1"/>': (
        *("position", -1, 1, 0.5, [0.5], False),
    ),
}


@pytest.mark.parametrize("actuator", KINDS)
def test_kinds_of_actuators(actuator: str) -> None:
    kind, low, high, home, act, becomes_servo = KINDS[actuator]
    robot = RobotModel(mujoco.MjModel.from_xml_string(ARM.format(mass=1, actuator=actuator)))
    (a,) = robot.actuators
    assert (a.kind, a.low, a.high, a.home) == (kind, low, high, home)
    assert robot.home_act.tolist() == act
    assert bool(Preparation().servos(robot)) == becomes_servo
    if "muscle" in actuator:
        assert a.largest_force == 20


GROUNDS = {
    '<geom type="plane" size="5 5 .1"/>': 0,
    '<geom type="box" size="5 5 .1" pos="0 0 -.3"/>': -0.2,
    '<geom type="plane" size="5 5 .1"/><body><geom type="box" size="1 1 .2"/></body>': 0.2,
    '<geom type="hfield" hfield="h"/><geom type="plane" size="5 5 .1" pos="0 0 -1"/>': 0,
    '<geom type="plane" size="5 5 .1" pos="0 0 9"/>': 9,
    "": None,
}


@pytest.mark.parametrize("ground", GROUNDS)
def test_ground_is_what_is_below_the_base(ground: str) -> None:
    text = QUADRUPED.replace('<geom name="floor" type="plane" size="5 5 .1"/>', ground)
    asset = '<asset><hfield name="h" nrow="3" ncol="3" size="5 5 1 1"/></asset><worldbody>'
    robot = RobotModel(mujoco.MjModel.from_xml_string(text.replace("<worldbody>", asset)))
    assert robot.ground == (None if ground == "" else pytest.approx(GROUNDS[ground], abs=1e-5))
    if robot.ground is not None:
        assert min(map(robot.lowest_point, robot.feet[0].geoms)) == pytest.approx(
            robot.ground, abs=1e-5
        )


def test_keyframes_and_thrusters() -> None:
    """Names of keyframes match in any case; a robot with thrusters keeps its height."""
    home = mujoco.MjModel.from_xml_string(QUADRUPED.replace('"home"', '"HOME"'))
    assert RobotModel(home).key == 1
    thrust = '<actuator><motor site="imu" gear="0 0 1 0 0 0"/>'
    robot = RobotModel(mujoco.MjModel.from_xml_string(QUADRUPED.replace("<actuator>", thrust)))
    assert robot.home[robot.base_qpos + 2] == 0.3


def test_gains_follow_from_inertia_and_weight() -> None:
    """A pendulum of 1 kg at 0.5 m, horizontal: I = 0.25 kg m², weight 4.905 N m."""
    text = """<mujoco><option timestep="{}"/><worldbody><body><joint name="j" axis="0 1 0"/>
      <geom size=".001" pos=".5 0 0" mass="1"/></body></worldbody>
      <actuator><motor joint="j"/></actuator></mujoco>"""
    kp, kd = inertia_gains(RobotModel(mujoco.MjModel.from_xml_string(text.format(0.002))))[0]
    assert kp == pytest.approx(0.25 * (12 * np.pi) ** 2, rel=1e-3)  # 355 > 49 N m / rad
    assert kd == pytest.approx(2 * np.sqrt(kp * 0.25), rel=1e-3)
    # With a long timestep the oscillation may turn by at most 1 rad in a step: 0.25 · 25² .
    kp, _ = inertia_gains(RobotModel(mujoco.MjModel.from_xml_string(text.format(0.04))))[0]
    assert kp == pytest.approx(0.25 * 25**2, rel=1e-3)
    # A tiny arm has gains, too.
    tiny = ARM.format(mass=1e-6, actuator='<motor joint="j"/>')
    kp, kd = inertia_gains(RobotModel(mujoco.MjModel.from_xml_string(tiny)))[0]
    assert kp > 0 and kd > 0


SCENES = {
    "unitree_go1": (["FR_calf", "FL_calf", "RR_calf", "RL_calf"], 6),
    "google_barkour_vb": (["lower_leg_front_left", "lower_leg_2", "lower_leg_3", "lower_leg_4"], 6),
}


@pytest.mark.parametrize("robot", SCENES)
def test_feet_and_pairs_of_shipped_robots(robot: str) -> None:
    feet, pairs = SCENES[robot]
    file = asset_file(f"mujoco_menagerie/{robot}/scene.xml")
    model = RobotModel(mujoco.MjSpec.from_file(str(file)).compile())
    assert [foot.name for foot in model.feet] == feet
    assert [len(foot.leg) for foot in model.feet] == [3] * 4
    assert len(model.pairs) == pairs
