"""Joints and actuators of a model as plain data, for the description of an exported policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.robots import observation_parts
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.tasks.task import State, Task

# Type of a joint -> its name, its positions, its velocities, unit of the positions.
JOINTS = {
    mujoco.mjtJoint.mjJNT_FREE: ("free", 7, 6, "m and quaternion"),
    mujoco.mjtJoint.mjJNT_BALL: ("ball", 4, 3, "quaternion"),
    mujoco.mjtJoint.mjJNT_SLIDE: ("slide", 1, 1, "m"),
    mujoco.mjtJoint.mjJNT_HINGE: ("hinge", 1, 1, "rad"),
}
NO_STATE = int(mujoco.mjtDyn.mjDYN_NONE)
# Quantities of an observation in the frame of a body or site.
FRAMES = ("velocity", "angular_velocity", "gravity")
# Action with which the relation of action and ctrl is measured, as a share of its bounds.
PROBE = 0.05


def joints(model: mujoco.MjModel, home: Sequence[float]) -> list[dict[str, Any]]:
    """Return name, type, unit and the ranges [first, end) in qpos and qvel of every joint.

    Besides, its range and its position at ``home``, qpos [nq].
    """
    rows = []
    for i in range(model.njnt):
        kind, positions, velocities, unit = JOINTS[mujoco.mjtJoint(int(model.jnt_type[i]))]
        qpos, qvel = int(model.jnt_qposadr[i]), int(model.jnt_dofadr[i])
        limited = bool(model.jnt_limited[i]) and positions == 1
        row = {"name": model.joint(i).name or f"joint{i}", "type": kind, "unit": unit}
        row |= {"qpos": [qpos, qpos + positions], "qvel": [qvel, qvel + velocities]}
        row["range"] = [float(x) for x in model.jnt_range[i]] if limited else None
        rows.append(row | {"home": list(home[qpos : qpos + positions])})
    return rows


def actuators(model: mujoco.MjModel) -> list[dict[str, Any]]:
    """Return name, joint, kind, unit of ctrl, gear and control range of every actuator.

    The kind is "position" (ctrl is a target), "motor" (gear times ctrl is a force or torque), or
    "other", whose unit is unknown: a servo with a gear, for example, whose ctrl is no angle. ``kp``
    and ``kd`` are those of a position servo on a joint, N m/rad and N m s/rad or N/m and N s/m,
    with the damping of the joint; ``force`` is its largest force before the gear; None without a
    limit.
    """
    rows = []
    for i in range(model.nu):
        joint, unit, kind, damping, force = None, None, "other", 0.0, np.inf
        gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
        fixed = model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED
        if fixed and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE:
            kind = "motor"
        elif fixed and bias[1] == -gain[0] != 0 and model.actuator_dyntype[i] == NO_STATE:
            kind = "position" if model.actuator_gear[i, 0] == 1 else "other"
        if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
            j = int(model.actuator_trnid[i, 0])
            joint = model.joint(j).name or f"joint{j}"
            slides = model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE
            units = {"position": "m" if slides else "rad", "motor": "N/gear"}
            unit = units.get(kind) if slides or kind != "motor" else "N m/gear"
            damping = float(model.dof_damping[model.jnt_dofadr[j]])
            if model.jnt_actfrclimited[j]:
                gear = abs(float(model.actuator_gear[i, 0]))
                force = float(np.abs(model.jnt_actfrcrange[j]).max()) / gear
        if model.actuator_forcelimited[i]:
            force = min(force, float(np.abs(model.actuator_forcerange[i]).max()))
        limited = bool(model.actuator_ctrllimited[i])
        rows.append(
            {
                "name": model.actuator(i).name or f"actuator{i}",
                "joint": joint,
                "kind": kind,
                "unit": unit,
                "gear": float(model.actuator_gear[i, 0]),
                "range": [float(x) for x in model.actuator_ctrlrange[i]] if limited else None,
                "kp": float(gain[0]) if kind == "position" and joint else None,
                "kd": damping - float(bias[2]) if kind == "position" and joint else None,
                "force": force if force < np.inf else None,
            }
        )
    return rows


def control_of_action(
    task: Task, state: Mapping[str, Tensor], low: Tensor, high: Tensor
) -> dict[str, list[float]] | None:
    """Return offset and scale [nu] of ctrl = offset + scale·action, per dimension.

    None where ``task.control`` is another function, for example one that depends on the state. It
    is measured with small actions; a task may limit ctrl besides.

    Args:
        task: The task.
        state: The state that ``control`` reads, [N, ..].
        low: Lowest action, [A].
        high: Highest action, [A].
    """
    finite = torch.isfinite(low) & torch.isfinite(high)
    size = PROBE * torch.where(finite, high - low, torch.ones_like(low))
    ctrl = state["ctrl"]
    if ctrl.shape[1] != len(low):
        return None
    other = {k: x + 0.125 if x.is_floating_point() else x for k, x in state.items()}
    n, size = len(ctrl), size.to(ctrl)

    def control(s: Mapping[str, Tensor], action: Tensor) -> Tensor:
        return task.control(s, action.repeat(n, 1))

    zero = control(state, torch.zeros_like(size))
    # Where ctrl is limited at action 0, as that of an open gripper, actions of one sign move it.
    up, down = (control(state, x)[0] != zero[0] for x in (size, -size))
    size = torch.where(up, size, -size)
    scale = (control(state, size) - zero) / size
    # Equal in another state, and no dimension of the action changes another one of ctrl.
    for i in range(len(size)):
        action = torch.zeros_like(size)
        action[i] = (-0.5 if up[i] and down[i] else 0.5) * size[i]
        if not torch.allclose(control(other, action), zero + scale * action, rtol=1e-4, atol=1e-6):
            return None
    return {"offset": zero[0].tolist(), "scale": scale[0].tolist()}


def frame(model: mujoco.MjModel, name: str) -> dict[str, Any]:
    """Return a site, or else a body, as a body with a position, m, and quaternion in its frame."""
    site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
    if site < 0:
        return {"body": name, "pos": [0.0, 0.0, 0.0], "quat": [1.0, 0.0, 0.0, 0.0]}
    pos, quat = model.site_pos[site].tolist(), model.site_quat[site].tolist()
    return {"body": model.body(model.site_bodyid[site]).name, "pos": pos, "quat": quat}


def describe(
    task: Task, model: mujoco.MjModel, state: State, bounds: tuple[Sequence[float], Sequence[float]]
) -> dict[str, Any]:
    """Return joints, actuators, the relation of action and ctrl, names, units and parts of the
    task's observation, and the physics steps, as plain data.

    The home posture is the start of an episode in the middle of the range of each number.

    Args:
        task: The task.
        model: Its compiled model.
        state: The state that ``control`` reads, [N, ..].
        bounds: Lowest and highest action, [A].
    """
    low, high = map(torch.tensor, bounds)
    middle = torch.full((1, task.reset_noise), 0.5).to(state["qpos"])
    home = task.reset(middle).get("qpos")
    parts, base = task.observation_parts(model), RobotModel(model).base
    names, observed = task.observation_names(model), tree.named(task.observe(state), "state")
    size = observed["state"].shape[1] if "state" in observed else 0
    if size != len(names) or names != observation_parts.describe(parts, model):
        # A subclass observes more.
        parts = []
    frames = {x.names[0] for x in parts if x.quantity in FRAMES}
    trunk = None if base is None else model.body(base).name
    imu = frames.pop() if len(frames) == 1 else trunk
    return {
        "joints": joints(model, (model.qpos0 if home is None else home[0]).tolist()),
        "actuators": actuators(model),
        "observation_names": names,
        "ctrl_of_action": control_of_action(task, state, low, high),
        "observation_parts": [] if frames else [asdict(part) for part in parts],
        "commands": {name: list(ends) for name, ends in task.commands.items()},
        "frame": None if imu is None else frame(model, imu),
        "base": None if trunk is None else frame(model, trunk),
        "physics": {
            "step_s": float(model.opt.timestep),
            "steps": task.decimation,
            "integrator": mujoco.mjtIntegrator(model.opt.integrator).name.removeprefix("mjINT_"),
            "iterations": int(model.opt.iterations),
        },
    }
