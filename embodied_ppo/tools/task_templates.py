"""Templates of ``new-task``: base class, commands and weighted terms of the reward for a robot."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import yaml
from mujoco import minimize

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.pick import find_gripper
from embodied_envs.robots.robot_model import HINGE, Array, RobotModel, ancestors
from embodied_envs.robots.velocity import QUADRUPED, VelocityTask

_FILE = Path(__file__).parent / "templates" / "rewards.yaml"
# Terms of hover, reach and pick; of robots with feet those besides QUADRUPED.
REWARDS: dict[str, dict[str, dict[str, float]]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
# Weight of the squared torques as shares of weight times height of the base (Go1Joystick).
TORQUE = -0.22
GAIT_HZ = 1.5  # steps per second of each foot of a biped
# Largest distance of the target from home in x, y and z, m; of an arm at most 0.3 lengths.
HALF_RANGE_M = {"hover": 1.0, "reach": 0.2, "pick": 0.15}
REACHED_M = 0.01  # distance of a tip from a target that it reaches
LIFT_M = 0.1  # least height of a cube's target above the ground
SITES = ("grip", "tip", "tool", "attachment", "end")  # Parts of names of sites at the end of an arm


def parts(robot: RobotModel, template: str) -> dict[str, Any]:
    """Return what a template adds: base class, commands, terms, attributes, observed numbers.

    Raises:
        EnvError: The robot cannot do that.
    """
    parts: dict[str, Any] = {"module": "robot_task", "base": "RobotTask", "least": "", "added": 0}
    parts |= {"commands": {}, "rewards": {}, "attributes": []}
    if template == "velocity":
        if len(robot.feet) < 2 or not robot.weight:
            raise EnvError(
                "write --template reach for an arm, hover for a drone: --template velocity needs"
                f" gravity, a floating base and two feet; {len(robot.feet)} found"
            )
        rewards = velocity_rewards(robot)
        parts |= {"module": "velocity", "base": "VelocityTask", "rewards": rewards}
        parts |= {"commands": VelocityTask.commands, "added": 3, "least": ", at least 0"}
        if "feet_phase" in rewards:
            hertz = f"gait_hz = {GAIT_HZ}  # steps per second of each foot"
            parts |= {"attributes": [hertz], "added": 5}
    elif template != "home":
        hovers = template == "hover"
        if (robot.base is not None) is not hovers or len(robot.feet) > 1:
            needed = "a floating base without legs" if hovers else "a fixed base"
            raise EnvError(f"write another --template: {template} needs a robot with {needed}")
        gripper = find_gripper(robot) if template == "pick" else None
        tip, size = _tip_of(robot), HALF_RANGE_M[template]
        place = _place(robot.data, tip) if gripper is None else gripper.grip
        box = size * np.array([[-1, -1, 0], [1, 1, 1]])  # a drone: above the ground
        if not hovers:
            root = robot.data.xpos[min(robot.roots)]
            box = _reachable(robot, tip, min(size, 0.3 * float(np.linalg.norm(place - root))))
        ranges = dict(zip("xyz", (place + box).T.round(3).tolist(), strict=True))
        tip_line = f'tip = "{tip}"  # site or body that moves to the target'
        parts |= {"module": "target", "base": "TargetTask", "rewards": REWARDS[template]}
        parts |= {"commands": ranges, "attributes": [tip_line], "added": 6 if hovers else 3}
        if gripper is not None:
            start = "\n    ".join(f"cube_{k}_m = {tuple(ranges[k])}  # its start" for k in "xy")
            low = round(gripper.ground_m + LIFT_M, 3)
            ranges["z"] = [low, round(low + 2 * size, 3)]
            parts |= {"module": "pick", "base": "PickTask", "attributes": [start]}
            parts["added"] += 10 + robot.model.nu
    return parts


def velocity_rewards(robot: RobotModel) -> dict[str, dict[str, float]]:
    """Return the terms for a robot with two or more feet."""
    scale = robot.weight * float(robot.home[robot.base_qpos + 2])  # N m
    torques = {"torques": {"weight": float(f"{TORQUE / scale**2:.2g}")}}
    biped = REWARDS["biped"] if len(robot.feet) == 2 else {}
    return {**QUADRUPED, **biped, **torques, **REWARDS["limits"]}


def _tip_of(robot: RobotModel) -> str:
    """Return the site or body that reaches a target: the base, or the last link with a hinge.

    A site on this link, or fixed to it, is preferred if its name contains one of SITES. Raises
    EnvError if the link has no name.
    """
    model = robot.model
    if robot.base is not None:
        return model.body(robot.base).name
    bodies = [int(model.jnt_bodyid[j]) for j in robot.joints if model.jnt_type[j] == HINGE]
    last = max(bodies or [0], key=lambda body: len(ancestors(model, body)))
    fixed = model.body_weldid[model.site_bodyid] == model.body_weldid[last]
    names = [model.site(int(i)).name for i in np.flatnonzero(fixed)]
    sites = [name for name in names if any(part in name.lower() for part in SITES)]
    if not (tip := (sites or [model.body(last).name])[0]):
        raise EnvError(f'write name="tip" in body {last} of the MJCF, which moves to the target')
    return tip


def _place(data: mujoco.MjData, tip: str) -> Array:
    """Return the position of a site or body, m, [3]."""
    is_site = mujoco.mj_name2id(data.model, mujoco.mjtObj.mjOBJ_SITE, tip) >= 0
    return (data.site(tip) if is_site else data.body(tip)).xpos.copy()


def _reachable(robot: RobotModel, tip: str, size: float) -> Array:
    """Return the box around ``tip`` at home whose corners actions reach, m, [lowest, highest; 3].

    Postures are searched by least squares. No side is farther from home than ``size``.
    """
    model, data = robot.model, mujoco.MjData(robot.model)
    # Joint -> largest distance from home: that of a servo is the scale of its action.
    spans: dict[int, float] = {}
    for i, actuator in enumerate(robot.actuators):
        if actuator.joint in robot.joints:
            span = actuator.scale / abs(model.actuator_gear[i, 0])
            spans[actuator.joint] = span if actuator.kind == "position" else np.inf
    joints, span = [*spans], np.array([*spans.values()])
    places = model.jnt_qposadr[joints]
    home, circle = robot.home[places], np.full(len(joints), np.pi)
    limited = model.jnt_limited[joints].astype(bool)
    bounds = np.where(limited, model.jnt_range[joints].T, [-circle, circle])
    bounds = bounds.clip(home - span, home + span)

    def tips(postures: Array) -> Array:
        """Return the positions [3, B] of postures [joints, B]."""
        positions = []
        for posture in postures.T:
            data.qpos[:] = robot.home
            data.qpos[places] = posture
            mujoco.mj_kinematics(model, data)
            positions.append(_place(data, tip))
        return np.array(positions).T

    center = tips(home[:, None])
    start = (home + 0.1 * span.clip(max=1)).clip(*bounds)  # a straight arm has no gradient at home

    def is_reached(offset: Array) -> bool:
        target = center + offset[:, None]
        posture, _ = minimize.least_squares(
            start, lambda x: tips(x) - target, list(bounds), verbose=0, max_iter=30
        )
        return bool(np.linalg.norm(tips(posture[:, None]) - target) < REACHED_M)

    # The sides first, then all of them by one factor, until the corners are reached.
    shares = np.linspace(1, 0, 11)
    axes = size * np.vstack((-np.eye(3), np.eye(3)))
    sides = [next(x for x in shares if x == 0 or is_reached(x * axis)) for axis in axes]
    box = size * np.array([[-1], [1]]) * np.reshape(sides, (2, 3))
    corners = [np.choose(ends, box) for ends in itertools.product((0, 1), repeat=3)]
    return next(x for x in shares if x == 0 or all(is_reached(x * c) for c in corners)) * box
