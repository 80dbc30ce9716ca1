"""Generate a task, a config and a test for a robot from its MJCF."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import mujoco
import numpy as np

from embodied_envs.base.errors import EnvError, one_line, shorten

CONTROL_STEP_S = 0.02
"""Duration of a decision of a new task, s."""

EPISODE_S = 5.0
"""Length of an episode of a new task, s."""

MAX_DISTANCE = 1.0
"""Distance from home at which a falling joint ends the episode, rad or m."""

FALLING = 0.1
"""Threshold of a falling passive joint (a pole falls, a wheel does not).

It is compared with gravity's lever arm as a fraction of the radius of gyration (hinge), and with
the component of gravity along the axis (slide)."""

DISTANCE_SENSORS = {
    int(mujoco.mjtSensor.mjSENS_RANGEFINDER),
    int(mujoco.mjtSensor.mjSENS_GEOMDIST),
    int(mujoco.mjtSensor.mjSENS_GEOMNORMAL),
}
"""Sensors of the distance to other objects, which may be fixed in the world."""

TIMESTEPS = 1e-5, 1.0
"""Smallest and largest timestep of the physics, s."""

TEMPLATES = {
    "{name}.py": "new_task.py.j2",
    "configs/experiment/{name}.yaml": "new_task.yaml.j2",
    "test_{name}.py": "new_task_test.py.j2",
}
"""File in the new folder -> template."""

FREE, BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
"""Types of joints in MjModel; the other types, slide and hinge, have one coordinate."""

RESERVED_NAMES = ("Path", "State", "Task", "Tensor")
"""Names that the generated module imports; its class must have another name."""


@dataclass(frozen=True)
class NewTask:
    """Generated files, assumptions about the model (sentences), and commands to run next."""

    files: tuple[Path, ...]
    assumed: tuple[str, ...]
    commands: tuple[str, ...]


# -------------------------------------------------------------------------------------------- files
def write(name: str, mjcf: Path, out: Path | None = None) -> NewTask:
    """Generate the files of a task.

    Args:
        name: Name of the module, such as my_robot.
        mjcf: The robot's MuJoCo XML, which is not copied.
        out: Folder to write to; None selects ./NAME.

    Raises:
        EnvError: The name is invalid, a file exists, MuJoCo refuses the model, or the model has
            no joint or actuator.
    """
    class_name = _class_name(name)
    folder = Path(name) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise EnvError(f"--out {folder}: is a file; name a folder")
    files = {folder / file.format(name=name): template for file, template in TEMPLATES.items()}
    if existing := [file for file in files if file.exists()]:
        raise EnvError(
            f"{existing[0]} exists and is not overwritten; choose another NAME or another --out DIR"
        )
    model = load(mjcf)
    description = _describe(model, mjcf)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embodied_ppo.tools", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["py"] = _literal
    environment.filters["quoted"] = lambda text: _literal(text)[1:-1]
    path = Path(os.path.relpath(mjcf.resolve(), folder.resolve())).as_posix()
    variables = {"name": name, "kind": class_name, "mjcf": path, **description}
    try:
        for file, template in files.items():
            text = environment.get_template(template).render(variables)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvError(
            f"--out {folder}: cannot be written ({error.strerror}); name another folder"
        ) from error
    programs = Path(sys.executable).parent
    on_path = shutil.which("embodied-ppo") == str(programs / "embodied-ppo")
    prefix = "" if on_path else f"{programs}/"
    commands = (
        f"cd {shlex.quote(str(folder))} && {prefix}python test_{name}.py",
        f"{prefix}embodied-ppo train --config-dir configs experiment={name} run_dir=runs/first",
        f"{prefix}embodied-ppo evaluate checkpoint=runs/first",
    )
    return NewTask(tuple(files), tuple(description["assumed"]), commands)


def load(mjcf: Path) -> mujoco.MjModel:
    """Load a model and check that a task can be generated for it.

    Raises:
        EnvError: With MuJoCo's reason (file, line, element), or with the hint.
    """
    if not mjcf.is_file():
        raise EnvError(f"--mjcf {mjcf}: no such file")
    try:
        model = mujoco.MjSpec.from_file(str(mjcf)).compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        reason, hint = one_line(error).removeprefix("Error: "), ""
        if "file" in reason:
            # Some parsers of URDF resolve package://NAME/ to a folder; MuJoCo reads it as a path.
            hint = "write files of meshes (STL, OBJ) and textures relative to the folder of --mjcf"
            hint += ", without package://; " if "package:" in reason else "; "
        raise EnvError(f"{hint}--mjcf {mjcf}: MuJoCo refuses it: {reason}") from error
    if not model.nu and "<robot" in mjcf.read_text(encoding="utf-8", errors="replace"):
        raise EnvError(_urdf_hint(mjcf))
    if problem := _problem(model):
        raise EnvError(f"--mjcf {mjcf}: {problem}")
    return model


ACTUATOR = '<actuator><motor joint="NAME" ctrlrange="-1 1"/></actuator>'
"""Example of an actuator for messages."""


def _urdf_hint(file: Path) -> str:
    """Return how to convert a URDF, which MuJoCo reads without actuators and with a fixed base."""
    # The result is beside the URDF, because it refers to the same meshes. A path that would be
    # shortened in the message is replaced by FILE.
    path, argument = repr(str(file)), ""
    if len(path) > 42:
        path, argument = "'FILE'", f", --mjcf {shorten(str(file), 30)}"
    return (
        f'convert it: python -c "import mujoco as m;f={path};s=m.MjSpec.from_file(f);s.compile();'
        f"open(f+'.xml','w').write(s.to_xml())\", then add {ACTUATOR} (to walk also a floor and a"
        f" free joint); a URDF has none{argument}"
    )


def _problem(model: mujoco.MjModel) -> str:
    """Return why no task can be generated for a model, with the hint; "" if it is valid."""
    low, high = TIMESTEPS
    if not low <= model.opt.timestep <= high:
        return (
            f"its timestep is {model.opt.timestep:g} s, not from {low:g} to {high:g}; write "
            '<option timestep="0.002"/>'
        )
    invalid = model.key_qpos[~np.isfinite(model.key_qpos)]
    if invalid.size:
        return f"a keyframe's qpos contains {invalid[0]}; correct it"
    if not model.njnt:
        joint = '<joint name="NAME" type="hinge" axis="0 1 0"/>'
        return f"nothing in it can move; add joints to its bodies: {joint}"
    if not model.nu:
        return f"it has no actuators, so there is nothing to learn; add some: {ACTUATOR}"
    for j in range(model.njnt):
        body = model.body(model.jnt_bodyid[j])
        if model.jnt_type[j] == FREE:
            name, element = body.name, f"the free body {body.id}"
        else:
            name, element = model.joint(j).name, f"joint {j} (of body {body.name or body.id})"
        if not name:
            return f'{element} has no name, which the task needs; write name="NAME"'
    fixed = model.body_weldid[model.geom_bodyid] == 0
    solid = (model.geom_contype | model.geom_conaffinity) != 0
    if (fixed & solid).any() or model.npair or model.neq or not model.opt.gravity.any():
        return ""
    driven = _driven_dofs(model)
    for body, dof in _free_bodies(model):
        if driven.isdisjoint(range(dof, dof + 6)):
            return (
                f"body {model.body(body).name} is free and there is no floor, so it falls without "
                'end; add a floor to the worldbody: <geom type="plane" size="5 5 .1"/>, '
                "or remove its free joint"
            )
    return ""


def _class_name(name: str) -> str:
    """Convert my_robot to MyRobot. Raises EnvError if the name cannot be a new module and class."""
    class_name = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise EnvError(
            f"NAME {name!r} must be the name of a Python module: letters, digits and _, "
            "a letter first, such as my_robot"
        )
    if keyword.iskeyword(class_name) or class_name in RESERVED_NAMES:
        raise EnvError(
            f"NAME {name!r}: its class would be called {class_name}, which is taken; write"
            f" {name}_robot"
        )
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise EnvError(
            f"NAME {name!r} is a Python module already ({spec.origin}); choose another name, such"
            f" as {name}_task"
        )
    return class_name


# -------------------------------------------------------------------------------------------- model
def _free_bodies(model: mujoco.MjModel) -> list[tuple[int, int]]:
    """Return (body, first degree of freedom) of every free body."""
    free = np.flatnonzero(model.jnt_type == FREE)
    return [(int(model.jnt_bodyid[j]), int(model.jnt_dofadr[j])) for j in free]


def _driven_dofs(model: mujoco.MjModel) -> set[int]:
    """Return the degrees of freedom on which an actuator acts through its transmission."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    rows = zip(data.moment_rowadr, data.moment_rownnz, strict=True)
    return {int(i) for at, n in rows for i in data.moment_colind[at : at + n]}


def _falls(model: mujoco.MjModel, joint: int, pose: np.ndarray) -> bool:
    """Return whether gravity moves a hinge or slide near ``pose`` [nq]."""
    data = mujoco.MjData(model)
    dof, mass = int(model.jnt_dofadr[joint]), float(model.body_subtreemass[model.jnt_bodyid[joint]])
    weight = mass * float(np.linalg.norm(model.opt.gravity))
    slide = model.jnt_type[joint] == int(mujoco.mjtJoint.mjJNT_SLIDE)
    size = 1.0 if slide else float(np.sqrt(model.dof_M0[dof] / mass))  # radius of gyration, m
    forces = []
    for offset in (-0.5, 0.0, 0.5):
        data.qpos[:] = pose
        data.qpos[model.jnt_qposadr[joint]] += offset
        mujoco.mj_forward(model, data)
        forces.append(abs(float(data.qfrc_bias[dof])))  # at rest: gravity only, N or N m
    return max(forces) > FALLING * weight * size


def _global_sensors(model: mujoco.MjModel, pose: np.ndarray) -> list[int]:
    """Return the sensors of global positions: they change when free bodies shift in x and y."""
    data = mujoco.MjData(model)
    readings = []
    for shift in ((0.0, 0.0), (0.37, -0.53)):
        data.qpos[:] = pose
        for body, _ in _free_bodies(model):
            start = int(model.jnt_qposadr[model.body_jntadr[body]])
            data.qpos[start : start + 2] += shift
        mujoco.mj_forward(model, data)
        readings.append(data.sensordata.copy())
    changed = ~np.isclose(*readings, rtol=0, atol=1e-6)

    def is_global(i: int) -> bool:
        kind = int(model.sensor_type[i])
        if kind == int(mujoco.mjtSensor.mjSENS_CONTACT):  # the home pose may have no contact
            position = int(mujoco.mjtConDataField.mjCONDATA_POS)
            return bool(int(model.sensor_intprm[i, 0]) >> position & 1)
        # Velocities and forces are not positions: they change only if the ground differs.
        if model.sensor_needstage[i] != int(mujoco.mjtStage.mjSTAGE_POS):
            return False
        first = model.sensor_adr[i]
        is_changed = bool(changed[first : first + model.sensor_dim[i]].any())
        return is_changed and kind not in DISTANCE_SENSORS

    return [i for i in range(model.nsensor) if is_global(i)]


def _describe(model: mujoco.MjModel, mjcf: Path) -> dict[str, Any]:
    """Return the values of the templates' variables, and the sentences ``assumed``."""
    assumed: list[str] = []
    driven = _driven_dofs(model)
    roots = {int(model.body_rootid[model.dof_bodyid[i]]) for i in driven}
    single = [j for j in range(model.njnt) if model.jnt_type[j] not in (FREE, BALL)]
    joints = [
        j for j in single if not roots or int(model.body_rootid[model.jnt_bodyid[j]]) in roots
    ]
    joints = joints or single
    key, pose, moved = _home(model, single, assumed)
    floating = [body for body, _ in _free_bodies(model)]
    robots = [body for body in floating if int(model.body_rootid[body]) in roots]
    base = model.body(robots[0]).name if robots else None
    falls = False
    if robots:
        falls = bool(pose[model.jnt_qposadr[model.body_jntadr[robots[0]]] + 2] > 0)
        below_half = "an episode ends below half its height at home"
        end = below_half if falls else "its height at home is not above 0"
        assumed.append(f"{base} is the robot's floating base: its x and y are not observed; {end}")
    objects = [model.body(body).name for body in floating if body not in robots[:1]]
    if objects := [*objects, *(model.joint(j).name for j in single if j not in joints)]:
        assumed.append(f"{', '.join(objects)}: objects, observed, not part of the reward")

    bounds = [_bounds(model, i) for i in range(model.nu)]
    actuators = [model.actuator(i).name or f"actuator {i}" for i in range(model.nu)]
    unlimited = [i for i in range(model.nu) if not model.actuator_ctrllimited[i]]
    for i in unlimited:
        *control_range, source = bounds[i]
        assumed.append(f"{actuators[i]} has no ctrlrange: its action is {source}, {control_range}")
    leash = _leash(model, joints, driven, pose, assumed)
    sensed, hides_sensors = _observed_sensors(model, pose, base is not None, assumed)
    timestep = float(model.opt.timestep)
    decimation = max(1, round(CONTROL_STEP_S / timestep))
    step_s = decimation * timestep
    episode = max(1, round(EPISODE_S / step_s))
    assumed.append(
        f"a decision every {step_s:g} s ({decimation} x {timestep:g} s), episodes of {episode}"
        " decisions"
    )
    return {
        "file": mjcf.name,
        "joints": [model.joint(j).name for j in joints],
        "leash": leash,
        "limited": bool(leash) or any(model.jnt_limited[j] for j in joints),
        "balls": [model.joint(j).name for j in np.flatnonzero(model.jnt_type == BALL)],
        "key": key,
        "moved": moved,
        "base": base,
        "falls": falls,
        "actuators": actuators,
        "bounds": [b[:2] for b in bounds] if unlimited else None,
        "act": model.na,
        "sensors": len(sensed),
        "sensed": sensed if hides_sensors and sensed else None,
        "size": model.nq + model.nv + model.na + len(sensed) - (2 if base else 0),
        "decimation": decimation,
        "step_s": step_s,
        "episode": episode,
        "assumed": assumed,
    }


def _home(
    model: mujoco.MjModel, joints: list[int], assumed: list[str]
) -> tuple[Any, np.ndarray, dict[str, float]]:
    """Return the keyframe of the home pose (None without one), the pose, and moved joints."""
    key, pose = None, model.qpos0.copy()
    if model.nkey:
        names = [model.key(k).name for k in range(model.nkey)]
        index = names.index("home") if "home" in names else 0
        key, pose = names[index] or index, model.key_qpos[index]
        assumed.append(f"the home pose is keyframe {key!r}")
    else:
        assumed.append("the home pose is qpos0 of the MJCF (there is no keyframe)")
    moved = {}
    for j in joints if key is None else []:
        low, high = model.jnt_range[j]
        if model.jnt_limited[j] and not low <= pose[model.jnt_qposadr[j]] <= high:
            moved[model.joint(j).name] = round(float(low + high) / 2, 4)
    if moved:
        names = ", ".join(moved)
        assumed.append(f"at home {names} are in the middle of their range, which excludes 0")
    return key, pose, moved


def _leash(
    model: mujoco.MjModel,
    joints: list[int],
    driven: set[int],
    pose: np.ndarray,
    assumed: list[str],
) -> dict[str, float]:
    """Return name -> distance from home that ends an episode, of joints that gravity moves."""
    leash, turning = {}, []
    for j in joints:
        if model.jnt_limited[j]:
            continue
        if int(model.jnt_dofadr[j]) not in driven and _falls(model, j, pose):
            leash[model.joint(j).name] = MAX_DISTANCE
        else:
            turning.append(model.joint(j).name)
    if leash:
        assumed.append(
            f"{', '.join(leash)}: no range and no actuator, and gravity moves it, so an episode "
            f"ends {MAX_DISTANCE:g} (rad, m) from home"
        )
    if turning:
        assumed.append(f"{', '.join(turning)}: no range, so it never ends an episode")
    return leash


def _observed_sensors(
    model: mujoco.MjModel, pose: np.ndarray, floats: bool, assumed: list[str]
) -> tuple[list[int], bool]:
    """Return the observed entries of sensordata, and whether sensors are left out."""
    hidden = _global_sensors(model, pose) if floats else []
    sensed = [
        int(n)
        for i in range(model.nsensor)
        if i not in hidden
        for n in range(model.sensor_adr[i], model.sensor_adr[i] + model.sensor_dim[i])
    ]
    if model.nsensordata and not hidden:
        assumed.append(f"all {model.nsensor} sensors are observed ({model.nsensordata} numbers)")
    elif hidden:
        names = ", ".join(model.sensor(i).name or f"sensor {i}" for i in hidden)
        assumed.append(
            f"{model.nsensor - len(hidden)} of {model.nsensor} sensors are observed "
            f"({len(sensed)} numbers); not {names}: positions in the world"
        )
    return sensed, bool(hidden)


def _bounds(model: mujoco.MjModel, i: int) -> tuple[float, float, str]:
    """Return the lowest and highest control of actuator i, and the source of these limits."""
    if model.actuator_ctrllimited[i]:
        low, high = model.actuator_ctrlrange[i]
        return float(low), float(high), "its ctrlrange"
    joint = int(model.actuator_trnid[i, 0])
    affine = model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_AFFINE)
    is_servo = affine and model.actuator_biasprm[i, 1] != 0
    moves_joint = model.actuator_trntype[i] == int(mujoco.mjtTrn.mjTRN_JOINT)
    if is_servo and moves_joint and model.jnt_limited[joint]:
        low, high = (round(float(x), 4) for x in model.jnt_range[joint])
        return low, high, f"the range of its joint {model.joint(joint).name}"
    return -1.0, 1.0, "from -1 to 1"


def _literal(value: Any) -> str:
    """Format a value as Python source with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
