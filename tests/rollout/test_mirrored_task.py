"""The mirror image of tasks: derived for shipped robots, and refused or named where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor
from toy_robots import QUADRUPED

from embodied_envs import tasks
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.make import compile_model
from embodied_envs.robots.robot_model import Pair, RobotModel
from embodied_envs.robots.robot_task import RobotTask
from embodied_envs.robots.rough_terrain import RoughTerrain
from embodied_envs.robots.velocity import VelocityTask
from embodied_envs.tasks import State
from embodied_envs.tasks.go1_rough import Go1Rough
from embodied_envs.tasks.task import Task
from embodied_ppo.core.mirror import Mirror, SignedPermutation
from embodied_ppo.rollout.mirrored_task import MirrorSearch, derive_mirror
from tests.envs.robots.test_every_robot import Stay, scenes

CUBE = '<body name="cube" pos="1 0 .05"><freejoint/><geom type="box" size=".05 .05 .05"/></body>'
TERMS = {name: {"weight": 1.0} for name in ("tracking_lin_vel", "feet_slip", "pose", "action_rate")}
WALKER = QUADRUPED.replace(CUBE, "").replace('qpos="1 0 .05 1 0 0 0 ', 'qpos="')
GROUPS = ("state", "privileged", "feet")


class Walk(RobotTask):
    """Follow a command, with variables of each kind."""

    id, decimation, step_noise = "Walk", 5, 2
    commands: Mapping[str, tuple[float, float]] = {
        "lin_vel_x": (-1, 1),
        "lin_vel_y": (-1, 1),
        "ang_vel_yaw": (-1, 1),
    }
    fields = (*RobotTask.fields, "geom_xpos")
    privileged_fields = ("body_mass",)

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        self.feet = [foot.geoms[-1] for foot in self.robot.feet]
        self.commands_from, self.reset_noise = self.reset_noise, self.reset_noise + 3

    def observe(self, s: State) -> Tensor:
        return torch.cat([super().observe(s), s["command"], s["noise"]], 1)

    def feet_places(self, s: State) -> Tensor:
        return (s["geom_xpos"][:, self.feet] - s["qpos"][:, None, :3]).flatten(1)

    def groups(self) -> dict[str, Callable[[State], Tensor]]:
        return {"feet": self.feet_places}

    def privileged(self, s: State) -> Tensor:
        return torch.cat([super().privileged(s), s["air"], s["body_mass"]], 1)

    def reward_terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        v, w = self.base_velocity(s), s["qvel"][:, self.base_dof + 5]
        error = torch.cat([v[:, :2], w[:, None]], 1) - s["command"]
        return {"track": (-error.square().sum(1)).exp(), "effort": -self.effort(s)}

    def terminated(self, s: State) -> Tensor:
        return self.fallen(s)

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        down = s["geom_xpos"][:, self.feet, 2] < 0.04
        air = (s["air"] + 0.02).masked_fill(down, 0.0)
        noise = 0.1 * (2 * u - 1)
        return super().advance(s, action, u) | {"air": air, "steps": s["steps"] + 1, "noise": noise}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        start, zero = super().reset(u[:, : self.commands_from]), torch.zeros_like(u[:, 0])
        command = 2 * u[:, self.commands_from :] - 1
        noise = torch.zeros_like(u[:, :2])
        air = torch.zeros_like(u[:, :4])
        return start | {"command": command, "noise": noise, "air": air, "steps": zero}


def search(folder: Path, task: type[Task] = Walk, xml: str = WALKER) -> Mirror:
    """Return the mirror image of ``task`` for the robot of ``xml``."""
    path = folder / "robot.xml"
    path.write_text(xml)
    walk = type(task.__name__, (task,), {"mjcf": path})()
    return MirrorSearch("Walk", walk, compile_model(walk, "Walk")).result(GROUPS)


def places(mirror: SignedPermutation) -> list[int]:
    """Return the permutation as places from 1 with signs."""
    return [sign * (i + 1) for i, sign in zip(mirror.index, mirror.sign, strict=True)]


def test_image_of_a_toy_equals_one_by_hand(tmp_path) -> None:
    """Joints are FL, FR, RL, RR with (roll, pitch) each; actuators are all rolls, then pitches. The
    IMU is turned by 90 degrees, so that its x axis is the base's y axis.
    """
    mirror = search(tmp_path)
    rolls, pitches = [-2, -1, -4, -3], [6, 5, 8, 7]
    assert places(mirror.action) == rolls + pitches
    joints = [-3, 4, -1, 2, -7, 8, -5, 6]

    def moved(by: int, image: list[int]) -> list[int]:
        return [x + by if x > 0 else x - by for x in image]

    state = [-1, 2, 3, 4, -5, -6]  # gravity; angular velocity
    state += moved(6, joints) + moved(14, joints) + moved(22, rolls + pitches)
    state += moved(30, [1, -2, -3]) + [34, 35]  # command; noise, which never changes here
    assert places(mirror.observations["state"]) == state
    feet = [[3 * leg + 1, -(3 * leg + 2), 3 * leg + 3] for leg in (1, 0, 3, 2)]
    assert places(mirror.observations["feet"]) == [x for foot in feet for x in foot]
    # Forces of actuators, base velocity, height, forces of feet; time in the air, masses.
    privileged = rolls + pitches + moved(8, [1, -2, 3, 4, 6, 5, 8, 7]) + [18, 17, 20, 19]
    bodies = [1, 2, 5, 6, 3, 4, 9, 10, 7, 8]
    assert places(mirror.observations["privileged"]) == privileged + moved(20, bodies)
    assert [w for w in mirror.warnings if "never" not in w] == []
    x = torch.randn(5, 8)
    assert torch.equal(mirror.action(mirror.action(x)), x), "bit for bit"


def test_images_of_own_tasks() -> None:
    """Go1Joystick's entries as its docstring lists them, and the rows of the height scan."""
    joints = [-4, 5, 6, -1, 2, 3, -10, 11, 12, -7, 8, 9]

    def moved(by: int) -> list[int]:
        return [x + by if x > 0 else x - by for x in joints]

    go1 = [1, -2, 3, -4, 5, -6, 7, -8, 9, 10, -11, -12, *moved(12), *moved(24), *moved(36)]
    rough = derive_mirror("Go1Rough", {}, ["state", "height_scan"])
    flat = derive_mirror("Go1Joystick", {}, ["obs"])
    assert places(flat.action) == joints
    assert places(rough.observations["state"]) == places(flat.observations["obs"]) == go1
    scan = torch.arange(117).reshape(13, 9).flip(1).flatten() + 1
    assert places(rough.observations["height_scan"]) == scan.tolist()
    assert not flat.warnings and not rough.warnings


# End of a shipped scene -> largest difference of accelerations (0: refused), and what is named.
MEASURED: dict[str, tuple[float, str]] = {
    "unitree_go1-scene.xml": (0.005, ""),
    "boston_dynamics_spot-scene.xml": (0.001, ""),
    "google_barkour_vb-scene.xml": (0.001, ""),
    "unitree_g1-scene.xml": (0.001, ""),
    "g1-xmls-scene_mjx_feetonly_flat_terrain.xml": (0.002, "right_hip_roll_joint range"),
    "unitree_h1-scene.xml": (0.004, ""),
    "booster_t1-scene.xml": (0.006, "Right_Knee_Pitch mass of the link 1.79, not 1.73"),
    "berkeley_humanoid-scene.xml": (0.005, ""),
    "robotis_op3-scene.xml": (0.001, ""),
    "apptronik_apollo-scene.xml": (0.06, "r_wrist_pitch inertia"),
    "boston_dynamics_spot-scene_arm.xml": (0.15, "arm"),
    "apollo-xmls-scene_mjx_feetonly_flat_terrain.xml": (0.0, "r_wrist_pitch damping 10, not 0"),
}
QUICK = ("google_barkour_vb-scene.xml", "booster_t1-scene.xml")


@pytest.mark.parametrize(
    "end", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MEASURED]
)
def test_shipped_robots_differ_as_measured(end: str) -> None:
    """docs/tasks.md names these differences."""
    paths = [p for p in scenes() if "-".join(p.parts).endswith(end)]
    if not paths:
        pytest.skip("EnvPool's assets are not installed")
    task = type("Robot", (Stay,), {"mjcf": paths[0]})()
    limit, cause = MEASURED[end]
    search = MirrorSearch("Robot", task, compile_model(task, "Robot"))
    if not limit:
        with pytest.raises(EnvError, match=cause):
            search.result(["state"])
        return
    mirror = search.result(["state", "privileged"])
    assert 1e-5 < search.measured["accelerations"][0] < limit
    assert cause in " ".join(mirror.warnings) and bool(cause) == bool(mirror.warnings)


# ------------------------------------------------------------------------------ planted mistakes
def changed(old: str, new: str) -> str:
    assert WALKER.count(old) == 1, old
    return WALKER.replace(old, new)


LEFT = '<joint name="FL_roll" axis="1 0 0" range="-.5 .5"/>'
SERVO = '<position name="FR_roll" joint="FR_roll" forcerange="-10 10"/>'
TRUNK = '<geom type="box" size=".2 .1 .05" mass="4"/>'
MODELS: dict[str, tuple[str, str]] = {
    # changed model, what the message or a warning names
    "damping": (changed(LEFT, LEFT.replace("/>", ' damping="5"/>')), "FR_roll damping"),
    "armature": (changed(LEFT, LEFT.replace("/>", ' armature=".5"/>')), "FR_roll armature"),
    "friction loss": (changed(LEFT, LEFT.replace("/>", ' frictionloss="1"/>')), "frictionloss"),
    "stiffness": (changed(LEFT, LEFT.replace("/>", ' stiffness="20"/>')), "FR_roll stiffness"),
    "range": (changed(LEFT, LEFT.replace("-.5 .5", "-.5 .8")), "FR_roll range"),
    "axis": (changed(LEFT, LEFT.replace("1 0 0", "0 0 1")), "joint FL_roll has no"),
    "mass": (changed(LEFT, f'{LEFT}<geom size=".01" mass=".03"/>'), "mass of the link"),
    "heavy leg": (changed(LEFT, f'{LEFT}<geom size=".01" mass="3"/>'), "FL_roll has no"),
    "place": (changed('pos="0.2 0.15 0"', 'pos="0.3 0.15 0"'), "joint FL_roll has no"),
    "trunk": (changed(TRUNK, TRUNK.replace("/>", ' pos="0 .09 0"/>')), "centre of mass at y"),
    "gain": (changed(SERVO, SERVO.replace("/>", ' kp="90"/>')), "FR_roll"),
    "force": (changed(SERVO, SERVO.replace("10 10", "10 3")), "forcerange"),
    "gear": (changed(SERVO, SERVO.replace("/>", ' gear="2"/>')), "FR_roll"),
    "actuator": (changed(SERVO, SERVO.replace('joint="FR_roll"', 'joint="FL_roll"')), "FL_roll"),
    "object": (
        WALKER.replace("<worldbody>", f"<worldbody>{CUBE}", 1).replace(
            'qpos="0 0 .3', 'qpos="1 0 .05 1 0 0 0 0 0 .3'
        ),
        "joint 0 has no",
    ),
    "home": (changed(".1 0 -.1 0 .1 0 -.1 0", ".3 0 -.1 0 .1 0 -.1 0"), "FL_roll position"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_unequal_sides_is_refused_or_named(name: str, tmp_path) -> None:
    xml, cause = MODELS[name]
    try:
        report = " ".join(search(tmp_path, xml=xml).warnings)
    except EnvError as error:
        report = str(error)
    assert cause in report


def test_the_direction_of_a_joint_s_axis_changes_signs_only(tmp_path) -> None:
    """The mirror follows from the axes: a roll axis that points backwards is no mistake."""
    turned = changed(LEFT, LEFT.replace("1 0 0", "-1 0 0"))
    turned = turned.replace("0 0 .3 1 0 0 0  .1", "0 0 .3 1 0 0 0  -.1")
    mirror = search(tmp_path, xml=turned)
    assert places(mirror.action)[:2] == [2, 1] and not any("differ" in w for w in mirror.warnings)


def left_only(self: Walk, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
    terms = Walk.reward_terms(self, before, s, action)
    return terms | {"left": self.joint_positions(s)[:, 0].square()}


def four_numbers(self: Walk) -> dict[str, Callable[[State], Tensor]]:
    return {"feet": lambda s: self.feet_places(s)[:, :4]}


def swapped(self: Walk, s: State, action: Tensor) -> Tensor:
    return Walk.control(self, s, action[:, [0, 2, 1, 3, 4, 5, 6, 7]])


def louder(self: Walk, s: State) -> Tensor:
    x = Walk.observe(self, s)
    return torch.cat([x[:, :6], 2 * x[:, 6:7], x[:, 7:]], 1)


def squared(self: Walk, s: State) -> Tensor:
    x = Walk.observe(self, s)
    return torch.cat([x[:, :6], x[:, 6:7].square(), x[:, 7:]], 1)


def declared(**images: list[int]) -> Callable[[Walk, str, Tensor], Tensor | None]:
    """Return a method ``mirrored`` with images as places from 1 with signs."""

    def mirrored(self: Walk, name: str, x: Tensor) -> Tensor | None:
        if name not in images:
            return Walk.mirrored(self, name, x)
        places = torch.tensor(images[name])
        return x[:, places.abs() - 1] * places.sign()

    return mirrored


def phases(self: Walk, u: Tensor) -> dict[str, Tensor]:
    phase = torch.zeros_like(u[:, :4])
    phase[:, ::3] = 0.5
    return Walk.reset(self, u) | {"phase": phase}


def slippery(self: Walk, s: State) -> Tensor:
    return Walk.fallen(self, s) | (s["geom_xpos"][:, self.feet[0], 2] < 0.04)


TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "yaw of the command": ({"mirrored": declared(command=[1, -2, 3])}, "track"),
    "side of the command": ({"mirrored": declared(command=[1, 2, -3])}, "track"),
    "command twice": ({"mirrored": declared(command=[1, -3, -3])}, "variable command"),
    "no image of a variable": ({"reset": phases}, "variable phase"),
    "feet": ({"mirrored": declared(air=[1, 2, 3, 4])}, "variable air"),
    "last action": ({"mirrored": declared(last_action=[*range(1, 9)])}, "variable last_action"),
    "reward of one side": ({"reward_terms": left_only}, "term left"),
    "feet of one end": ({"groups": four_numbers}, "observation feet[1]"),
    "legs of the action": ({"control": swapped}, "controls"),
    "scale of an observation": ({"observe": louder}, "FL_roll position"),
    "square of an observation": ({"observe": squared}, "observation FL_roll position"),
    "scale of an action": ({"action_scale": {"FR_roll": 0.5}}, "controls"),
    "end of an episode": ({"terminated": slippery}, "terminated"),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_with_unequal_sides_is_refused(name: str, tmp_path) -> None:
    members, cause = TASKS[name]
    with pytest.raises(EnvError, match="has no mirror image") as error:
        search(tmp_path, type("Walk", (Walk,), members))
    assert cause in str(error.value)


def test_rows_of_a_height_scan_without_partners_are_refused() -> None:
    class Shifted(Go1Rough):
        scan_y_m = (-0.4, 0.3, 8)

    task = Shifted()
    with pytest.raises(EnvError, match=r"height_scan\[\d+\]"):
        MirrorSearch("Shifted", task, compile_model(task, "Shifted")).result(["height_scan"])


WRONG_PAIRS: dict[str, Callable[[tuple[Pair, ...]], list[Pair]]] = {
    "sign of a roll": lambda p: [Pair(p[0].left, p[0].right, 1), *p[1:]],
    "sign of a pitch": lambda p: [p[0], Pair(p[1].left, p[1].right, -1), *p[2:]],
    "legs across": lambda p: [Pair(p[i].left, p[(i + 2) % 4].right, p[i].sign) for i in range(4)],
    "no exchange": lambda p: [Pair(j, j, x.sign) for x in p for j in (x.left, x.right)],
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_wrong_pairs_of_joints_are_refused(name: str, tmp_path, monkeypatch) -> None:
    right = RobotModel.pairs.func  # pyright: ignore[reportAttributeAccessIssue]
    wrong = property(lambda self: tuple(WRONG_PAIRS[name](right(self))))
    monkeypatch.setattr(RobotModel, "pairs", wrong)
    with pytest.raises(EnvError, match="has no mirror image"):
        search(tmp_path)


def test_two_mirrorings_must_be_the_identity() -> None:
    assert SignedPermutation((1, 0, 2), (-1, -1, 1)).moved() is None
    assert SignedPermutation((1, 2, 0), (1, 1, 1)).moved() == 0
    assert SignedPermutation((1, 0), (-1, 1)).moved() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("end", "hz"), [("unitree_go1-scene.xml", None), ("h1-scene.xml", 1.25)])
def test_tasks_of_velocity_have_images(end: str, hz: float | None) -> None:
    """On terrain, with the phase of a gait: the image of two feet's phase is half a period later,
    so that cosine and sine, the last two numbers, change their signs.
    """
    paths = [p for p in scenes() if "-".join(p.parts).endswith(end)]
    if not paths:
        pytest.skip("EnvPool's assets are not installed")
    attributes = {"id": "V", "mjcf": paths[0], "gait_hz": hz}
    task_class = type("Velocity", (RoughTerrain, VelocityTask), attributes)
    task = tasks.make("Velocity", task_class, {}, rewards=TERMS)
    names = ["state", "privileged", "height_scan"]
    mirror = MirrorSearch("Velocity", task, compile_model(task, "Velocity")).result(names)
    state = mirror.observations["state"]
    command = [1, -1, -1]
    assert list(state.sign[-5:] if hz else state.sign[-3:]) == command + ([-1, -1] if hz else [])
    assert places(mirror.observations["height_scan"])[:9] == list(range(9, 0, -1))
