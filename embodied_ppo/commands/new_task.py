"""A task for the user's own robot: from an MJCF to a Task, a config and a test, all written to be changed."""

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
"""What a new task begins with: 50 decisions a second, five seconds; joints that fall end it 1 rad or m from home."""

FALLING = 0.1
"""A passive hinge falls where gravity's lever arm exceeds this part of the radius of gyration, a slide where gravity's
share along it does: a pole falls, a wheel does not."""

DISTANCES = {
    int(mujoco.mjtSensor.mjSENS_RANGEFINDER),
    int(mujoco.mjtSensor.mjSENS_GEOMDIST),
    int(mujoco.mjtSensor.mjSENS_GEOMNORMAL),
}
"""Sensors that measure from the robot to its surroundings, also to those that are fixed in the world."""

TIMESTEPS = 1e-5, 1.0
"""Of physics, s: from 2000 steps in a decision to a step in each."""

TEMPLATES = {
    "{name}.py": "new_task.py.j2",
    "configs/experiment/{name}.yaml": "new_task.yaml.j2",
    "test_{name}.py": "new_task_test.py.j2",
}
"""File in the new folder -> its template."""

FREE, BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
"""Kinds of joint as MjModel numbers them; the others, slides and hinges, have one coordinate."""

IMPORTED = ("Path", "State", "Task", "Tensor")
"""Names that the written task imports: its class needs another."""


@dataclass(frozen=True)
class NewTask:
    """What was written: the files, what was assumed about the model (sentences), what to run next (shell lines)."""

    files: tuple[Path, ...]
    assumed: tuple[str, ...]
    commands: tuple[str, ...]


# -------------------------------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME", help="name of the task's module; the class is named in CamelCase")
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
    """Write task ``name`` for the robot in ``mjcf`` into folder ``out`` (default ./NAME); the MJCF stays where it is.

    Raises EnvError for a name that cannot be one, for files that are there already, and for a model that MuJoCo refuses
    or that there is nothing to learn for.
    """
    kind = _class_name(name)
    folder = Path(name) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise EnvError(f"--out {folder}: is a file; name a folder")
    files = {folder / file.format(name=name): template for file, template in TEMPLATES.items()}
    if there := [file for file in files if file.exists()]:
        raise EnvError(
            f"{there[0]} is there already and stays as it is; give another NAME, or another folder: --out DIR"
        )
    model = load(mjcf)
    found = _describe(model, mjcf)
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
        file: environment.get_template(template).render(name=name, kind=kind, mjcf=path, **found)
        for file, template in files.items()
    }
    try:
        for file, text in texts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from error
    home = Path(sys.executable).parent
    where = "" if shutil.which("embodied-ppo") == str(home / "embodied-ppo") else f"{home}/"
    commands = (
        f"cd {shlex.quote(str(folder))} && {where}python test_{name}.py",
        f"{where}embodied-ppo train --config-dir configs experiment={name} run_dir=runs/first",
        f"{where}embodied-ppo evaluate checkpoint=runs/first",
    )
    return NewTask(tuple(files), tuple(found["assumed"]), commands)


def load(mjcf: Path) -> mujoco.MjModel:
    """The model; raises EnvError with MuJoCo's reason (file, line, element), or the cure for what makes no task."""
    if not mjcf.is_file():
        raise EnvError(f"--mjcf {mjcf}: no such file")
    try:
        model = mujoco.MjSpec.from_file(str(mjcf)).compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        place = f" (meshes and textures are looked for from {mjcf.resolve().parent})" if "file" in str(error) else ""
        raise EnvError(f"--mjcf {mjcf}: MuJoCo refuses it: {error}{place}") from error
    where = f"--mjcf {mjcf}:"
    if not TIMESTEPS[0] <= model.opt.timestep <= TIMESTEPS[1]:
        raise EnvError(
            f"{where} its timestep is {model.opt.timestep:g} s, not from {TIMESTEPS[0]:g} to {TIMESTEPS[1]:g}; write "
            '<option timestep="0.002"/>'
        )
    if not np.isfinite(model.key_qpos).all():
        raise EnvError(f"{where} a keyframe's qpos holds {model.key_qpos[~np.isfinite(model.key_qpos)][0]}; mend it")
    if not model.njnt:
        raise EnvError(f"{where} nothing in it can move; give its bodies joints: <joint name=.. type=hinge axis=../>")
    if not model.nu:
        cure = '<actuator><motor name=".." joint=".." ctrlrange="-1 1"/></actuator>'
        if "<robot" in mjcf.read_text(encoding="utf-8", errors="replace"):
            save = f"s = mujoco.MjSpec.from_file({str(mjcf)!r}); s.compile(); open('robot.xml', 'w').write(s.to_xml())"
            raise EnvError(
                f"{where} is a URDF, which MuJoCo reads without actuators, and its base stands fixed in the world; "
                f'save it as MJCF: python -c "import mujoco; {save}", then add to that file {cure}, and a floor and a '
                "free joint if it is to move about"
            )
        raise EnvError(f"{where} it has no actuators, so there is nothing to learn; add some: {cure}")
    for j in range(model.njnt):
        free = model.jnt_type[j] == FREE
        body = model.body(model.jnt_bodyid[j])
        if not (body.name if free else model.joint(j).name):
            what = f"the free body {body.id}" if free else f"joint {j} (of body {body.name or body.id})"
            raise EnvError(f"{where} {what} has no name, by which the task finds it; write name=..")
    still = model.body_weldid[model.geom_bodyid] == 0
    solid = (model.geom_contype | model.geom_conaffinity) != 0
    held = bool((still & solid).any()) or model.npair or model.neq or not model.opt.gravity.any()
    driven = _driven(model)
    for body, dof in _free(model):
        if not held and driven.isdisjoint(range(dof, dof + 6)):
            raise EnvError(
                f"{where} body {model.body(body).name} floats freely and there is nothing to stand on, so it falls for "
                'ever; add a floor to the worldbody: <geom type="plane" size="5 5 .1"/>, or take its free joint away'
            )
    return model


def _class_name(name: str) -> str:
    """my_robot -> MyRobot. Raises EnvError for what cannot name a module and a class of its own."""
    kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise EnvError(f"NAME {name!r} names a Python module: letters, digits and _, a letter first; as my_robot")
    if keyword.iskeyword(kind) or kind in IMPORTED:
        raise EnvError(f"NAME {name!r}: its class would be called {kind}, which is taken; write {name}_robot")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:
        raise EnvError(f"NAME {name!r} is a Python module already ({spec.origin}); choose another, as {name}_task")
    return kind


# ---------------------------------------------------------------------------------------- the model
def _free(model: mujoco.MjModel) -> list[tuple[int, int]]:
    """(body, first degree of freedom) of everything that floats."""
    free = np.flatnonzero(model.jnt_type == FREE)
    return [(int(model.jnt_bodyid[j]), int(model.jnt_dofadr[j])) for j in free]


def _driven(model: mujoco.MjModel) -> set[int]:
    """Degrees of freedom on which an actuator acts, through whatever transmission."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    rows = zip(data.moment_rowadr, data.moment_rownnz, strict=True)
    return {int(i) for at, n in rows for i in data.moment_colind[at : at + n]}


def _falls(model: mujoco.MjModel, joint: int, pose: np.ndarray) -> bool:
    """Whether gravity moves a hinge or slide near ``pose`` [nq]: a pole falls, a wheel does not."""
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
        forces.append(abs(float(data.qfrc_bias[dof])))  # at rest: of gravity alone, N or N m
    return max(forces) > FALLING * weight * size


def _global_sensors(model: mujoco.MjModel, pose: np.ndarray) -> list[int]:
    """Sensors that report positions in the world: they change when all that floats is shifted along x and y."""
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
        if kind == int(mujoco.mjtSensor.mjSENS_CONTACT):  # there may be no contact at home
            return bool(int(model.sensor_intprm[i, 0]) >> int(mujoco.mjtConDataField.mjCONDATA_POS) & 1)
        # velocities and forces change only with the ground: these are no positions
        of_position = model.sensor_needstage[i] == int(mujoco.mjtStage.mjSTAGE_POS) and kind not in DISTANCES
        first = model.sensor_adr[i]
        return of_position and bool(changed[first : first + model.sensor_dim[i]].any())

    return [i for i in range(model.nsensor) if is_global(i)]


def _describe(model: mujoco.MjModel, mjcf: Path) -> dict[str, Any]:
    """What the templates say about the model, and the sentences ``assumed``."""
    assumed: list[str] = []
    driven = _driven(model)
    roots = {int(model.body_rootid[model.dof_bodyid[i]]) for i in driven}
    single = [j for j in range(model.njnt) if model.jnt_type[j] not in (FREE, BALL)]
    of_robot = [j for j in single if not roots or int(model.body_rootid[model.jnt_bodyid[j]]) in roots]
    joints = of_robot or single
    balls = [model.joint(j).name for j in np.flatnonzero(model.jnt_type == BALL)]

    key, pose = None, model.qpos0.copy()
    if model.nkey:
        names = [model.key(k).name for k in range(model.nkey)]
        at = names.index("home") if "home" in names else 0
        key, pose = names[at] or at, model.key_qpos[at]
        assumed.append(f"the home pose is keyframe {key!r}")
    else:
        assumed.append("the home pose is the one the MJCF draws (there is no keyframe)")
    moved = {}
    for j in single if key is None else []:
        low, high = model.jnt_range[j]
        if model.jnt_limited[j] and not low <= pose[model.jnt_qposadr[j]] <= high:
            moved[model.joint(j).name] = round(float(low + high) / 2, 4)
    if moved:
        assumed.append(f"at home {', '.join(moved)} stand in the middle of their range, for 0 lies outside of it")

    floating = [body for body, _ in _free(model)]
    robots = [body for body in floating if int(model.body_rootid[body]) in roots]
    base = model.body(robots[0]).name if robots else None
    falls = False
    if robots:
        falls = bool(pose[model.jnt_qposadr[model.body_jntadr[robots[0]]] + 2] > 0)
        end = (
            "an episode ends when it is under half its height at home" if falls else "its height at home is not above 0"
        )
        assumed.append(f"{base} is the robot's floating base: its x and y are not observed; {end}")
    objects = [model.body(body).name for body in floating if body not in robots[:1]]
    if objects := [*objects, *(model.joint(j).name for j in single if j not in joints)]:
        assumed.append(f"{', '.join(objects)}: objects, observed, not part of the reward")

    bounds = [_bounds(model, i) for i in range(model.nu)]
    actuators = [model.actuator(i).name or f"actuator {i}" for i in range(model.nu)]
    unlimited = [i for i in range(model.nu) if not model.actuator_ctrllimited[i]]
    for i in unlimited:
        assumed.append(f"{actuators[i]} has no ctrlrange: its action is {bounds[i][2]}, {list(bounds[i][:2])}")
    loose = [j for j in joints if not model.jnt_limited[j]]
    falling = [j for j in loose if int(model.jnt_dofadr[j]) not in driven and _falls(model, j, pose)]
    leash = {model.joint(j).name: LEASH for j in falling}
    if leash:
        assumed.append(
            f"{', '.join(leash)}: no range and no actuator, and gravity moves it, so an episode ends {LEASH:g} "
            "(rad, m) from home"
        )
    if turning := [model.joint(j).name for j in loose if model.joint(j).name not in leash]:
        assumed.append(f"{', '.join(turning)}: no range, so nothing ends an episode there")
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
            f"{model.nsensor - len(hidden)} of {model.nsensor} sensors are observed ({len(sensed)} numbers); not "
            f"{names}: positions in the world"
        )
    timestep = float(model.opt.timestep)
    decimation = max(1, round(CONTROL_STEP_S / timestep))
    step_s = decimation * timestep
    episode = max(1, round(EPISODE_S / step_s))
    assumed.append(f"a decision every {step_s:g} s ({decimation} x {timestep:g} s), episodes of {episode} decisions")
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
    """Lowest and highest control of actuator i, and where they come from."""
    if model.actuator_ctrllimited[i]:
        low, high = model.actuator_ctrlrange[i]
        return float(low), float(high), "its ctrlrange"
    joint = int(model.actuator_trnid[i, 0])
    servo = model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_AFFINE) and model.actuator_biasprm[i, 1] != 0
    if servo and model.actuator_trntype[i] == int(mujoco.mjtTrn.mjTRN_JOINT) and model.jnt_limited[joint]:
        low, high = model.jnt_range[joint]
        return (
            round(float(low), 4),
            round(float(high), 4),
            f"the range of its joint {model.joint(joint).name}",
        )
    return -1.0, 1.0, "from -1 to 1"


def _literal(value: Any) -> str:
    """A value as Python source in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
