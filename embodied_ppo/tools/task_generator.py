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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import mujoco
import numpy as np
import yaml

from embodied_envs.base.errors import EnvError, one_line
from embodied_envs.robots.observation_parts import COMMAND_UNITS, describe
from embodied_envs.robots.preparation import Preparation, inertia_gains
from embodied_envs.robots.robot_model import FREE, HINGE, SLIDE, RobotModel
from embodied_ppo.core.tables import tables
from embodied_ppo.tools import task_templates

CONTROL_STEP_S = 0.02  # duration of a decision of a new task, s

# Template -> length of an episode of a new task, s.
EPISODE_S = {"home": 5.0, "velocity": 10.0, "hover": 5.0, "reach": 4.0, "pick": 3.0}

PHYSICS_STEP_S = 0.005  # least physics step of a new task with many contacts, velocity or pick, s

# Pattern of MuJoCo's reason -> hint; the first counts.
HINTS: dict[str, Any] = tables(__file__)["hints"]

MAX_GAIN = 1e6  # largest kp and kd that are accepted
HOLD_S = 2.0  # time for which the robot is held at home, s
FLOOR_TOLERANCE_M = 0.05  # largest distance from 0 of the floor under a robot with feet

TIMESTEPS = 1e-5, 1.0  # smallest and largest timestep of the physics, s

FAST = 100.0  # a joint that is faster diverges, rad/s or m/s

STIFF_RAD = 0.2  # a servo whose force limit is reached by a smaller error is stiff

# File in the new folder -> template.
TEMPLATES: dict[str, Any] = tables(__file__)["templates"]
# The same of a task with commands, to train it on a GPU.
GPU_TEMPLATE = {"configs/experiment/{name}_gpu.yaml": "new_task_gpu.yaml.j2"}

# Names that the generated module imports; its class must have another name.
RESERVED_NAMES = ("Path", "Preparation", "RobotTask", "RoughTerrain", "State", "Tensor")

# Example of an actuator for messages.
ACTUATOR = '<actuator><motor joint="NAME" ctrlrange="-1 1"/></actuator>'


@dataclass(frozen=True)
class NewTask:
    """Generated files, assumptions about the model (sentences), and commands to run next."""

    files: tuple[Path, ...]
    assumed: tuple[str, ...]
    commands: tuple[str, ...]


# -------------------------------------------------------------------------------------------- files
def write(
    name: str,
    mjcf: Path,
    out: Path | None = None,
    *,
    urdf: bool = False,
    floating: bool = False,
    preparation: Preparation | None = None,
    template: str = "home",
) -> NewTask:
    """Generate the files of a task.

    Args:
        name: Name of the module, such as my_robot.
        mjcf: The robot's MuJoCo XML, which is not copied.
        out: Folder to write to; None selects ./NAME.
        urdf: Whether ``mjcf`` is a URDF, which is converted to NAME.xml in the folder.
        floating: Whether the base of the URDF is free to move.
        preparation: Gains and floor.
        template: What the robot does, a key of EPISODE_S.

    Raises:
        EnvError: The name is invalid, a file exists, MuJoCo refuses the model, or the model has
            no joint or actuator.
    """
    class_name = _class_name(name)
    folder, preparation = Path(name) if out is None else out, preparation or Preparation()
    if folder.exists() and not folder.is_dir():
        raise EnvError(f"--out {folder}: is a file; name a folder")
    sources = TEMPLATES if template == "home" else TEMPLATES | GPU_TEMPLATE
    files = {folder / file.format(name=name): source for file, source in sources.items()}
    mujoco.set_mju_user_warning(lambda text: None)  # a robot that diverges is named in `assumed`
    converted = [folder / f"{name}.xml"] if urdf else []
    if existing := [file for file in [*files, *converted] if file.exists()]:
        raise EnvError(
            f"{existing[0]} exists and is not overwritten; choose another NAME or another --out DIR"
        )
    try:
        source = mjcf
        if converted:
            text = convert_urdf(mjcf, folder, floating, preparation.floor)
            folder.mkdir(parents=True, exist_ok=True)
            source = converted[0]
            source.write_text(text, encoding="utf-8")
        model = load(source, preparation)
        if template == "velocity":
            # Stiff servos would need larger forces than they have for steps of a useful length.
            preparation = replace(preparation, gains=preparation.gains or "inertia")
        if template in ("velocity", "pick") and model.opt.timestep < PHYSICS_STEP_S:
            preparation = replace(preparation, step_s=PHYSICS_STEP_S)
        description = _describe(source, preparation, template)
        path = Path(os.path.relpath(source.resolve(), folder.resolve())).as_posix()
        description |= {"file": mjcf.name, "name": name, "kind": class_name, "mjcf": path}
        for file, template_file in files.items():
            text = source_templates().get_template(template_file).render(description)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except EnvError:
        for file in converted:  # a corrected command would not overwrite it
            file.unlink(missing_ok=True)
        raise
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
    return NewTask((*converted, *files), tuple(description["assumed"]), commands)


def source_templates() -> jinja2.Environment:
    """Return the templates of sources that this package writes for users."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embodied_ppo.tools", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["py"] = _literal
    environment.filters["quoted"] = lambda text: _literal(text)[1:-1]
    return environment


def load(mjcf: Path, preparation: Preparation | None = None) -> mujoco.MjModel:
    """Load a model and check that a task can be generated for it.

    Raises:
        EnvError: With MuJoCo's reason (file, line, element), or with the hint.
    """
    _, model = _compile(mjcf, "--mjcf")
    if not model.nu and "<robot" in mjcf.read_text(encoding="utf-8", errors="replace"):
        raise EnvError(f"write --urdf {mjcf} instead of --mjcf: it is a URDF, without actuators")
    if problem := _problem(model, floor=bool(preparation and preparation.floor)):
        raise EnvError(f"--mjcf {mjcf}: {problem}")
    return model


def _compile(file: Path, option: str, floating: bool = False) -> tuple[Any, mujoco.MjModel]:
    """Read and compile a file. Raises EnvError with MuJoCo's reason and a hint."""
    if not file.is_file():
        raise EnvError(f"name an existing file: {option} {file}: no such file")
    try:
        spec = mujoco.MjSpec.from_file(str(file))
        if floating and (base := spec.worldbody.first_body()):
            base.add_freejoint(name="floating_base")
        return spec, spec.compile()
    except (ValueError, OSError, mujoco.FatalError) as error:
        reason = one_line(error).removeprefix("Error: ")
        hint = next((f"{hint}; " for x, hint in HINTS.items() if re.search(x, reason)), "")
        raise EnvError(
            f"{hint.replace('FILE', file.name)}{option} {file}: MuJoCo refuses it: {reason}"
        ) from error


def convert_urdf(urdf: Path, folder: Path, floating: bool, floor: bool) -> str:
    """Return the MJCF of a URDF with a position servo for each joint, to be saved in ``folder``.

    Raises:
        EnvError: MuJoCo refuses it, or no task can be generated for it.
    """
    spec, _ = _compile(urdf, "--urdf", floating)
    # Paths of meshes are relative to the folder of the URDF.
    meshes = urdf.resolve().parent / spec.compiler.meshdir
    spec.compiler.meshdir = os.path.relpath(meshes, folder.resolve())
    if spec.actuators:
        raise EnvError(f"write --mjcf {urdf} instead of --urdf: it is an MJCF with actuators")
    # A joint that mimics another one has no motor.
    mimics = {e.name1 for e in spec.equalities if e.type == mujoco.mjtEq.mjEQ_JOINT}
    joints = [j for j in spec.joints if j.type in (SLIDE, HINGE) and j.name not in mimics]
    for joint in joints:
        actuator = spec.add_actuator(name=joint.name, target=joint.name)
        actuator.trntype = mujoco.mjtTrn.mjTRN_JOINT
    model = spec.compile()
    if problem := _problem(model, floor=floor):
        raise EnvError(f"--urdf {urdf}: {problem}")
    gains = inertia_gains(RobotModel(model))
    for actuator, joint in zip(spec.actuators, joints, strict=True):
        kp, kd = gains[model.joint(joint.name).id]
        actuator.set_to_position(kp=kp, kv=kd)
    spec.compile()
    return spec.to_xml()


def read_gains(kp: float | None, kd: float | None, file: str | None) -> Any:
    """Return the gains of a ``Preparation`` from --kp and --kd, or from --gains.

    Raises:
        EnvError: They are not positive numbers, or the file is none of gains.
    """
    if kp is None and kd is None and file is None:
        return {}
    if file == "inertia" and kp is None and kd is None:
        return file
    if file is None:
        rows: Any = {"*": [kp, kd]}
    elif kp is not None or kd is not None:
        raise EnvError("write --kp and --kd, or --gains, not both")
    else:
        try:
            rows = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise EnvError(f"name a readable file: --gains {file}: {one_line(error)}") from error
    valid = isinstance(rows, dict) and all(
        isinstance(row, list)
        and len(row) == 2
        and all(isinstance(x, (int, float)) and 0 <= x <= MAX_GAIN for x in row)
        and row[0] > 0
        for row in rows.values()
    )
    if not valid or not rows:
        option = f"--kp {kp} --kd {kd}" if file is None else f"--gains {file}"
        raise EnvError(
            f"write both --kp 40 --kd 1, or a YAML file of lines such as '*_hip: [40, 1]' (joint:"
            f" [kp, kd], N m/rad and N m s/rad, 0 < kp, at most {MAX_GAIN:g}): {option}"
        )
    return {str(joint): (float(row[0]), float(row[1])) for joint, row in rows.items()}


def _problem(model: mujoco.MjModel, *, floor: bool) -> str:
    """Return why no task can be generated for a model, with the hint; "" if it is valid."""
    low, high = TIMESTEPS
    if not low <= model.opt.timestep <= high:
        reason = f"its timestep is {model.opt.timestep:g} s, not from {low:g} to {high:g}"
        return f'write <option timestep="0.002"/>: {reason}'
    if not np.isfinite([*model.key_qpos.flat, *model.key_ctrl.flat, *model.key_act.flat]).all():
        return "correct its keyframes: one contains nan or inf"
    if not model.njnt:
        return (
            'nothing in it can move; add <joint name="NAME" type="hinge" axis="0 1 0"/> to bodies'
        )
    if not model.nu:
        return f"it has no actuators, so there is nothing to learn; add some: {ACTUATOR}"
    if len(model.actuator_gaintype) != model.nu:
        return "write position, velocity or motor for actuators with several controls, such as pid"
    robot, fixed = RobotModel(model), model.body_weldid[model.geom_bodyid] == 0
    if robot.base is None and not robot.joints:
        return f"no actuator moves a hinge, a slide or a floating base; add some: {ACTUATOR}"
    if robot.feet and abs(ground := robot.ground or 0.0) > FLOOR_TOLERANCE_M:
        return f"move floor and robot by {-ground:.3g} m: heights are measured from 0"
    for j in robot.joints:
        at, (low, high) = robot.home[model.jnt_qposadr[j]], model.jnt_range[j]
        if not model.joint(j).name:
            body = model.body(model.jnt_bodyid[j])
            return f'write name="NAME" in joint {j} (of body {body.name or body.id})'
        if model.jnt_limited[j] and max(low - at, at - high) > 0.1 * (high - low):
            where = f"{at:.3g}, outside its range from {low:.3g} to {high:.3g}"
            return f"correct keyframe {robot.key}: {model.joint(j).name} is at {where}"
    if floor and mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_GEOM, "floor") >= 0:
        return "remove --floor: it has a geom of the name floor already"
    has_ground = (((model.geom_contype | model.geom_conaffinity) != 0) & fixed).any()
    if floor or has_ground or model.npair or model.neq or not model.opt.gravity.any():
        return ""
    for j in np.flatnonzero(model.jnt_type == FREE):
        if robot.driven.isdisjoint(range(model.jnt_dofadr[j], model.jnt_dofadr[j] + 6)):
            body = model.body(model.jnt_bodyid[j]).name
            return f"write --floor: body {body} is free and there is no floor below it"
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
def _describe(mjcf: Path, preparation: Preparation, template: str) -> dict[str, Any]:
    """Return the values of the templates' variables, and the sentences ``assumed``."""
    original = RobotModel(_compile(mjcf, "--mjcf")[1])
    servos = preparation.servos(original)
    model = preparation.prepare(mjcf).compile()
    robot = RobotModel(model)
    parts = task_templates.parts(robot, template)
    size = len(describe(robot.parts(), model)) + parts["added"]
    timestep = float(model.opt.timestep)
    decimation = max(1, round(CONTROL_STEP_S / timestep))
    step_s = decimation * timestep
    episode = max(1, round(EPISODE_S[template] / step_s))
    observed = "positions minus home and velocities of the joints, last action"
    if parts["commands"]:
        observed += ", command" if template == "velocity" else ", vector to the target"
    given = {"gains": preparation.gains, "floor": preparation.floor, "step_s": preparation.step_s}
    return parts | {
        "template": template,
        "units": COMMAND_UNITS,
        "preparation": ", ".join(f"{k}={_literal(x)}" for k, x in given.items() if x),
        "privileged": robot.base is not None
        or len(robot.joints) < model.njnt
        or template == "pick",
        "actuators": [a.name for a in robot.actuators],
        "size": size,
        "observed": observed if robot.base is None else f"gravity, angular velocity, {observed}",
        "decimation": decimation,
        "step_s": step_s,
        "episode": episode,
        "assumed": [
            *_body_sentences(original, robot),
            *_actuator_sentences(original, robot, servos),
            _hold_home(robot),
            f"{size} numbers are observed; velocity and height of the base, contacts, objects"
            " and forces are observations of the critic only",
            f"a decision every {step_s:g} s ({decimation} x {timestep:g} s), episodes of {episode}"
            " decisions",
        ],
    }


def _hold_home(robot: RobotModel) -> str:
    """Return what happens to the robot that is held at home for HOLD_S."""
    model, data = robot.model, mujoco.MjData(robot.model)
    data.qpos[:], data.ctrl[:] = robot.home, [a.home for a in robot.actuators]
    data.act[:] = robot.home_act
    data.qvel[:] = 0.01  # an unstable equilibrium must not hold
    fastest = 0
    for step in range(round(HOLD_S / model.opt.timestep)):
        mujoco.mj_step(model, data)
        if data.time < (step + 0.5) * model.opt.timestep:  # MuJoCo resets what diverges
            name = model.joint(model.dof_jntid[fastest]).name or "of the base"
            return (
                f"held at home it diverges after {step * model.opt.timestep:.2g} s, joint {name}"
                ' first: use <option integrator="implicitfast"/>, a smaller timestep, more damping,'
                " or --gains inertia"
            )
        if np.abs(data.qvel[fastest]) < FAST:  # once it diverges, others follow
            fastest = int(np.abs(data.qvel).argmax())
    joints = list(robot.joints)
    distance = np.abs(data.qpos - robot.home)[model.jnt_qposadr[joints]]
    text = f"held at home for {HOLD_S:g} s"
    if joints:
        name = model.joint(joints[int(distance.argmax())]).name
        text += f", {name} moves most, {distance.max():.2g} (rad, m)"
    if robot.base is not None:
        text += f", its base sinks by {(robot.home - data.qpos)[robot.base_qpos + 2]:.2g} m"
    return text


def _body_sentences(original: RobotModel, robot: RobotModel) -> Iterator[str]:
    """Yield what is assumed of posture, base, feet, pairs, objects and joints without a range."""
    model = robot.model

    def names(joints: Iterable[int]) -> str:
        return ", ".join(model.joint(j).name for j in joints)

    if robot.key is None:
        yield "the home posture is qpos0 of the MJCF (there is no keyframe)"
    else:
        yield f"the home posture is keyframe {model.key(robot.key).name or robot.key!r}"
    changed = robot.home != model.qpos0
    moved = [j for j in robot.joints if robot.key is None and changed[model.jnt_qposadr[j]]]
    if moved:
        yield f"at home {names(moved)} are in the middle of their range, which excludes 0"
    if robot.base is not None:
        falls = robot.home[robot.base_qpos + 2] > 0
        end = "an episode ends below half its height at home" if falls else "it never falls"
        feet = ", ".join(foot.name for foot in robot.feet) or "none"
        yield f"{model.body(robot.base).name} is the robot's floating base: {end}; feet: {feet}"
        imu = "the base" if original.imu is None else f"site {model.site(original.imu).name}"
        yield f"gravity and angular velocity are those of {imu}"
        pairs = [
            f"{names([p.left])} and {names([p.right])}" for p in robot.pairs if p.left != p.right
        ]
        if pairs:
            yield f"left and right: {'; '.join(pairs)}"
    others = set(model.jnt_bodyid) - {model.jnt_bodyid[j] for j in robot.joints} - {robot.base}
    if others:
        bodies = ", ".join(model.body(body).name or f"body {body}" for body in sorted(others))
        yield f"{bodies}: objects or ball joints, not part of observation and reward"
    continuous = [j for j in robot.joints if not model.jnt_limited[j]]
    falling = [j for j in continuous if robot.falls(j)]
    if falling:
        yield (
            f"{names(falling)}: no range and no actuator, and gravity moves it, so an episode ends"
            " 1 (rad, m) from home"
        )
    if turning := [j for j in continuous if j not in falling]:
        yield f"{names(turning)}: no range, so it never ends an episode"


def _actuator_sentences(
    original: RobotModel, robot: RobotModel, servos: Mapping[int, tuple[float, float]]
) -> Iterator[str]:
    """Yield what is assumed of the actuators."""
    scales: dict[float, list[str]] = {}
    for a in robot.actuators:
        scales.setdefault(float(f"{a.scale:.2g}"), []).append(a.name)
    for scale, group in scales.items():
        yield f"{', '.join(group)}: control = home control + {scale:g} · action"
    names = [f"{original.actuators[i].name} {kp:g} {kd:g}" for i, (kp, kd) in servos.items()]
    if names:
        yield f"servos with new kp and kd, some instead of motors: {', '.join(names)}"
    for i, a in enumerate(robot.actuators):
        if not robot.model.actuator_ctrllimited[i] and a.kind != "position":
            yield f"{a.name} has no ctrlrange: its control is from {a.low:g} to {a.high:g}"
    stiff = [
        a.name
        for i, a in enumerate(robot.actuators)
        if a.joint is not None and i not in servos and a.kp * STIFF_RAD > a.force
    ]
    if stiff:
        yield (
            f"{', '.join(stiff)}: stiff servos, at their force limit before an error of"
            f" {STIFF_RAD:g} rad; --gains inertia makes them soft"
        )


def _literal(value: Any) -> str:
    """Format a value as Python source with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    return repr(value)
