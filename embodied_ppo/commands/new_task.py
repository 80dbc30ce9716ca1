"""`embodied-ppo new-task`: generate a task, a config and a test for a robot from its MJCF."""

from __future__ import annotations

import argparse
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

from embodied_ppo.commands import output
from embodied_ppo.core.errors import EnvError

CONTROL_STEP_S, EPISODE_S, LEASH = 0.02, 5.0, 1.0
"""Defaults of a new task: duration of a decision, length of an episode, and the distance from home
(rad or m) at which a falling joint ends the episode."""

FALLING = 0.1
"""A passive joint falls (a pole does, a wheel does not) if gravity's lever arm exceeds this
fraction of the radius of gyration (hinge), or its component along the axis this fraction
(slide)."""

DISTANCES = {
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

IMPORTED = ("Path", "State", "Task", "Tensor")
"""Names that the generated module imports; its class must have another name."""


@dataclass(frozen=True)
class NewTask:
    """Generated files, assumptions about the model (sentences), and commands to run next."""

    files: tuple[Path, ...]
    assumed: tuple[str, ...]
    commands: tuple[str, ...]


# -------------------------------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", help="name of the task's module; the class is named in CamelCase"
    )
    parser.add_argument("--mjcf", metavar="FILE", required=True, help="MuJoCo XML of the robot")
    parser.add_argument("--out", metavar="DIR", help="folder to write to (default: ./NAME)")
    parser.add_argument("--json", action="store_true", help="print files and assumptions as JSON")


def run(args: argparse.Namespace) -> None:
    """Write the task and print the files, the assumptions and the next commands."""
    task = write(args.name, Path(args.mjcf), Path(args.out) if args.out else None)
    if args.json:
        files = list(map(str, task.files))
        summary = {"files": files, "assumed": task.assumed, "commands": task.commands}
        print(output.as_json(summary))
        return
    sections = (
        ("written", task.files),
        ("assumed, change it there", task.assumed),
        ("next", task.commands),
    )
    for title, lines in sections:
        print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))


# ---------------------------------------------------------------------------------------- the files
def write(name: str, mjcf: Path, out: Path | None = None) -> NewTask:
    """Generate the files of a task.

    Args:
        name: Name of the module, such as my_robot.
        mjcf: The robot's MuJoCo XML, which is not copied.
        out: Folder to write to; None selects ./NAME.

    Raises:
        EnvError: The name is invalid, a file exists, MuJoCo refuses the model, or the model has
            nothing to learn.
    """
    kind = _class_name(name)
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
        loader=jinja2.PackageLoader("embodied_ppo.commands", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["py"] = _literal
    environment.filters["quoted"] = lambda text: _literal(text)[1:-1]
    path = Path(os.path.relpath(mjcf.resolve(), folder.resolve())).as_posix()
    texts = {
        file: (
            environment.get_template(template).render(
                name=name, kind=kind, mjcf=path, **description
            )
        )
        for file, template in files.items()
    }
    try:
        for file, text in texts.items():
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
        EnvError: With MuJoCo's reason (file, line, element), or with the cure.
    """
    if not mjcf.is_file():
        raise EnvError(f"--mjcf {mjcf}: no such file")
    try:
        model = mujoco.MjSpec.from_file(str(mjcf)).compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        place = (
            f" (meshes and textures are searched from {mjcf.resolve().parent})"
            if "file" in str(error)
            else ""
        )
        raise EnvError(f"--mjcf {mjcf}: MuJoCo refuses it: {error}{place}") from error
    where = f"--mjcf {mjcf}:"
    if not TIMESTEPS[0] <= model.opt.timestep <= TIMESTEPS[1]:
        raise EnvError(
            f"{where} its timestep is {model.opt.timestep:g} s, not from {TIMESTEPS[0]:g} to "
            f"{TIMESTEPS[1]:g}; write "
            '<option timestep="0.002"/>'
        )
    if not np.isfinite(model.key_qpos).all():
        raise EnvError(
            f"{where} a keyframe's qpos holds {model.key_qpos[~np.isfinite(model.key_qpos)][0]};"
            " correct it"
        )
    if not model.njnt:
        raise EnvError(
            f"{where} nothing in it can move; add joints to its bodies: <joint name=.. type=hinge"
            " axis=../>"
        )
    if not model.nu:
        cure = '<actuator><motor name=".." joint=".." ctrlrange="-1 1"/></actuator>'
        if "<robot" in mjcf.read_text(encoding="utf-8", errors="replace"):
            save = (
                f"s = mujoco.MjSpec.from_file({str(mjcf)!r}); s.compile(); open('robot.xml',"
                " 'w').write(s.to_xml())"
            )
            raise EnvError(
                f"{where} is a URDF, which MuJoCo reads without actuators and with a fixed base; "
                f'save it as MJCF: python -c "import mujoco; {save}", '
                f"then add to that file {cure}, "
                "and a floor and a free joint if the robot is mobile"
            )
        raise EnvError(
            f"{where} it has no actuators, so there is nothing to learn; add some: {cure}"
        )
    for j in range(model.njnt):
        free = model.jnt_type[j] == FREE
        body = model.body(model.jnt_bodyid[j])
        if not (body.name if free else model.joint(j).name):
            what = (
                f"the free body {body.id}"
                if free
                else f"joint {j} (of body {body.name or body.id})"
            )
            raise EnvError(f"{where} {what} has no name, which the task needs; write name=..")
    still = model.body_weldid[model.geom_bodyid] == 0
    solid = (model.geom_contype | model.geom_conaffinity) != 0
    supported = (
        bool((still & solid).any()) or model.npair or model.neq or not model.opt.gravity.any()
    )
    driven = _driven(model)
    for body, dof in _free(model):
        if not supported and driven.isdisjoint(range(dof, dof + 6)):
            raise EnvError(
                f"{where} body {model.body(body).name} floats freely above nothing, so it falls "
                'forever; add a floor to the worldbody: <geom type="plane" size="5 5 .1"/>, '
                "or remove its free joint"
            )
    return model


def _class_name(name: str) -> str:
    """Convert my_robot to MyRobot. Raises EnvError if the name cannot be a new module and class."""
    kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise EnvError(
            f"NAME {name!r} must be the name of a Python module: letters, digits and _, "
            "a letter first, such as my_robot"
        )
    if keyword.iskeyword(kind) or kind in IMPORTED:
        raise EnvError(
            f"NAME {name!r}: its class would be called {kind}, which is taken; write {name}_robot"
        )
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise EnvError(
            f"NAME {name!r} is a Python module already ({spec.origin}); choose another name, such"
            f" as {name}_task"
        )
    return kind


# ---------------------------------------------------------------------------------------- model
def _free(model: mujoco.MjModel) -> list[tuple[int, int]]:
    """Return (body, first degree of freedom) of every free body."""
    free = np.flatnonzero(model.jnt_type == FREE)
    return [(int(model.jnt_bodyid[j]), int(model.jnt_dofadr[j])) for j in free]


def _driven(model: mujoco.MjModel) -> set[int]:
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
    """Return sensors of positions in the world: they change if free bodies shift in x and y."""
    data = mujoco.MjData(model)
    readings = []
    for shift in ((0.0, 0.0), (0.37, -0.53)):
        data.qpos[:] = pose
        for body, _ in _free(model):
            at = int(model.jnt_qposadr[model.body_jntadr[body]])
            data.qpos[at : at + 2] += shift
        mujoco.mj_forward(model, data)
        readings.append(data.sensordata.copy())
    changed = ~np.isclose(*readings, rtol=0, atol=1e-6)

    def is_global(i: int) -> bool:
        kind = int(model.sensor_type[i])
        if kind == int(mujoco.mjtSensor.mjSENS_CONTACT):  # the home pose may have no contact
            return bool(
                int(model.sensor_intprm[i, 0]) >> int(mujoco.mjtConDataField.mjCONDATA_POS) & 1
            )
        # velocities and forces are not positions; they change only with the ground
        of_position = (
            model.sensor_needstage[i] == int(mujoco.mjtStage.mjSTAGE_POS) and kind not in DISTANCES
        )
        first = model.sensor_adr[i]
        return of_position and bool(changed[first : first + model.sensor_dim[i]].any())

    return [i for i in range(model.nsensor) if is_global(i)]


def _describe(model: mujoco.MjModel, mjcf: Path) -> dict[str, Any]:
    """Return the values of the templates' variables, and the sentences ``assumed``."""
    assumed: list[str] = []
    driven = _driven(model)
    roots = {int(model.body_rootid[model.dof_bodyid[i]]) for i in driven}
    single = [j for j in range(model.njnt) if model.jnt_type[j] not in (FREE, BALL)]
    of_robot = [
        j for j in single if not roots or int(model.body_rootid[model.jnt_bodyid[j]]) in roots
    ]
    joints = of_robot or single
    balls = [model.joint(j).name for j in np.flatnonzero(model.jnt_type == BALL)]

    key, pose = None, model.qpos0.copy()
    if model.nkey:
        names = [model.key(k).name for k in range(model.nkey)]
        at = names.index("home") if "home" in names else 0
        key, pose = names[at] or at, model.key_qpos[at]
        assumed.append(f"the home pose is keyframe {key!r}")
    else:
        assumed.append("the home pose is qpos0 of the MJCF (there is no keyframe)")
    moved = {}
    for j in single if key is None else []:
        low, high = model.jnt_range[j]
        if model.jnt_limited[j] and not low <= pose[model.jnt_qposadr[j]] <= high:
            moved[model.joint(j).name] = round(float(low + high) / 2, 4)
    if moved:
        assumed.append(
            f"at home {', '.join(moved)} are in the middle of their range, because 0 is outside"
            " of it"
        )

    floating = [body for body, _ in _free(model)]
    robots = [body for body in floating if int(model.body_rootid[body]) in roots]
    base = model.body(robots[0]).name if robots else None
    falls = False
    if robots:
        falls = bool(pose[model.jnt_qposadr[model.body_jntadr[robots[0]]] + 2] > 0)
        end = (
            "an episode ends below half its height at home"
            if falls
            else "its height at home is not above 0"
        )
        assumed.append(f"{base} is the robot's floating base: its x and y are not observed; {end}")
    objects = [model.body(body).name for body in floating if body not in robots[:1]]
    if objects := [*objects, *(model.joint(j).name for j in single if j not in joints)]:
        assumed.append(f"{', '.join(objects)}: objects, observed, not part of the reward")

    bounds = [_bounds(model, i) for i in range(model.nu)]
    actuators = [model.actuator(i).name or f"actuator {i}" for i in range(model.nu)]
    unlimited = [i for i in range(model.nu) if not model.actuator_ctrllimited[i]]
    for i in unlimited:
        assumed.append(
            f"{actuators[i]} has no ctrlrange: its action is {bounds[i][2]}, {list(bounds[i][:2])}"
        )
    unlimited_joints = [j for j in joints if not model.jnt_limited[j]]
    falling = [
        j
        for j in unlimited_joints
        if int(model.jnt_dofadr[j]) not in driven and _falls(model, j, pose)
    ]
    leash = {model.joint(j).name: LEASH for j in falling}
    if leash:
        assumed.append(
            f"{', '.join(leash)}: no range and no actuator, and gravity moves it, so an episode "
            f"ends {LEASH:g} "
            "(rad, m) from home"
        )
    if turning := [
        model.joint(j).name for j in unlimited_joints if model.joint(j).name not in leash
    ]:
        assumed.append(f"{', '.join(turning)}: no range, so it never ends an episode")
    hidden = _global_sensors(model, pose) if base else []
    sensed = [
        n
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
            f"({len(sensed)} numbers); not "
            f"{names}: positions in the world"
        )
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
        "balls": balls,
        "key": key,
        "moved": moved,
        "base": base,
        "falls": falls,
        "actuators": actuators,
        "bounds": [b[:2] for b in bounds] if unlimited else None,
        "act": model.na,
        "sensors": len(sensed),
        "sensed": [int(n) for n in sensed] if hidden and sensed else None,
        "size": model.nq + model.nv + model.na + len(sensed) - (2 if base else 0),
        "decimation": decimation,
        "step_s": step_s,
        "episode": episode,
        "assumed": assumed,
    }


def _bounds(model: mujoco.MjModel, i: int) -> tuple[float, float, str]:
    """Return the lowest and highest control of actuator i, and how they were determined."""
    if model.actuator_ctrllimited[i]:
        low, high = model.actuator_ctrlrange[i]
        return float(low), float(high), "its ctrlrange"
    joint = int(model.actuator_trnid[i, 0])
    servo = (
        model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_AFFINE)
        and model.actuator_biasprm[i, 1] != 0
    )
    if (
        servo
        and model.actuator_trntype[i] == int(mujoco.mjtTrn.mjTRN_JOINT)
        and model.jnt_limited[joint]
    ):
        low, high = model.jnt_range[joint]
        return (
            round(float(low), 4),
            round(float(high), 4),
            f"the range of its joint {model.joint(joint).name}",
        )
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
