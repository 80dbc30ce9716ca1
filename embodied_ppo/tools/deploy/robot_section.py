"""The description of the robot in a deployment bundle, and the source files generated from it."""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import mujoco
import numpy as np

from embodied_envs.base.errors import ConfigError, one_line
from embodied_envs.types import Say
from embodied_ppo.options.schema import RealismConfig
from embodied_ppo.tools.deploy import run_policy
from embodied_ppo.tools.task_generator import source_templates

TRACKED = 3  # episodes of each command in the evaluation of the tracking error
# Files of this folder that run a policy on a robot.
FILES = ("robot_loop.py", "mujoco_robot.py")
# Files that templates generate; the last two are examples of a robot.
SOURCES = ("observation.py", "my_robot.py", "robot_unitree.py", "robot_ros2.py")

# Velocity of a joint, rad/s or m/s, at which the loop stops the robot: at least the first, and the
# second times the largest one in the evaluation.
LEAST_VELOCITY, VELOCITY_FACTOR = 10.0, 2.0
# Quantity of an observation -> what ``Robot.read`` returns for it, where the name differs.
KEYS = {"gravity": "quaternion", "last_action": None, "command": None, "phase": None}
# Command -> the number that follows it.
TRACKS = {
    "lin_vel_x": "base_velocity x",
    "lin_vel_y": "base_velocity y",
    "ang_vel_yaw": "base_angular_velocity z",
}


def nominal_realism(realism: RealismConfig, physics_steps: int, name: str) -> RealismConfig:
    """Return one delay of actions, and one of observations, in the middle of the training's.

    The delay that each joint has besides is drawn in each episode, as in the training.

    Args:
        realism: Options of the training.
        physics_steps: Physics steps of a control step.
        name: The policy's observation.
    """
    late = realism.obs_delay
    if isinstance(late, Mapping):
        late = late.get(name, 0)
    bounds = np.broadcast_to(realism.action_delay, 2)
    parts = 1 if all(float(x).is_integer() for x in bounds) else physics_steps
    action = np.floor(np.mean(bounds) * parts + 0.5) / parts
    return RealismConfig(
        action_delay=int(action) if parts == 1 else float(action),
        joint_delay=realism.joint_delay,
        obs_delay=int(np.floor(np.mean(late) + 0.5)),
        action_rate_limit=realism.action_rate_limit,
    )


def describe(info: Mapping[str, Any], realism: RealismConfig) -> dict[str, Any] | None:
    """Return the section "robot" of policy.json; None where no loop can run the policy.

    Args:
        info: The other sections.
        realism: See ``nominal_realism``.
    """
    names = [x["name"] for x in info["inputs"] if x["role"] == "observation"]
    actions = [x for x in info["outputs"] if x["role"] == "action"]
    control, step_s = info.get("ctrl_of_action"), info["control"]["step_s"]
    if control is None or info["control"]["action_chunk"] > 1 or len(names) > 1:
        return None
    part = {x["quantity"]: x for x in info["observation_parts"]}
    actuators, joints = info["actuators"], {x["name"]: x for x in info["joints"]}
    moved = [a["joint"] for a in actuators if a["joint"] is not None]
    read = list(part["joint_positions"]["names"]) if "joint_positions" in part else moved
    imu = ["quaternion", "angular_velocity"] if info["frame"] else []
    reads = [KEYS.get(x, x) for x in part] or imu
    reads = dict.fromkeys(["joint_positions", "joint_velocities", *filter(None, reads)])
    limit = realism.action_rate_limit
    # Missing bounds are NaN, which fmin and fmax leave out.
    low, high = (np.array(actions[0][k], dtype=float) for k in ("low", "high"))
    if limit is not None:
        half = (high - low) / 2 if info["action_mapping"] == "rescale" else np.ones_like(low)
        limit = (limit * np.where(np.isnan(half), 1.0, half)).tolist()
    neutral = np.fmin(np.fmax(0.0, low), high)
    target = np.array(control["offset"]) + np.array(control["scale"]) * neutral
    least, most = np.array([a["range"] or (np.nan, np.nan) for a in actuators]).T
    delay = np.mean(realism.action_delay) + np.mean(realism.joint_delay)
    commands = part["command"]["names"] if "command" in part else []
    tracks = [TRACKS.get(name) for name in commands]
    return {
        "joints": read,
        "home": [x for name in read for x in joints[name]["home"]],
        "home_target": np.fmin(np.fmax(target, least), most).tolist(),
        "velocity_limit": [],
        "frame": info["frame"],
        "base": info["base"],
        "phase_hz": float(part["phase"]["names"][0]) if "phase" in part else None,
        "reads": list(reads),
        "not_measured": [x for x in reads if x == "velocity"],
        "sensors": list(part["sensors"]["names"]) if "sensors" in part else [],
        "command_names": list(commands),
        "tracks": [] if None in tracks else tracks,
        "action_delay_s": [float(delay) * step_s] * len(actuators),
        "obs_delay": realism.obs_delay,
        "action_rate_limit": limit,
        "tracking": [],
    }


def tracking_commands(info: Mapping[str, Any]) -> list[list[float]]:
    """Return the commands of the evaluation: zeros, and each end of each range; TRACKED times."""
    names = info["robot"]["command_names"]
    zero = [0.0] * len(names)
    commands = [zero]
    for i, name in enumerate(names):
        commands += [[*zero[:i], float(x), *zero[i + 1 :]] for x in info["commands"][name] if x]
    return commands * TRACKED


def measure(
    info: Mapping[str, Any],
    model: mujoco.MjModel,
    commands: Sequence[Sequence[float]],
    rows: Mapping[str, np.ndarray],
    golden: Mapping[str, np.ndarray] | None,
    out: Path,
) -> None:
    """Add tracking errors and limits of velocities to the section; check observation.py.

    Args:
        info: Content of policy.json.
        model: The model of the training.
        commands: Commands of the episodes, from ``tracking_commands``.
        rows: Recorded steps with these commands; row["episode"] is the index of the command.
        golden: The trace, whose observations follow from its states; None: they do not.
        out: Folder of the bundle.

    Raises:
        ConfigError: The generated observation is not that of the trace.
    """
    robot, step_s = info["robot"], info["control"]["step_s"]
    simulation = run_policy.load_file(out / "mujoco_robot.py")
    device = simulation.MujocoRobot(info, copy.copy(model))

    def states(recorded: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        for qpos, qvel in zip(recorded["state/qpos"], recorded["state/qvel"], strict=True):
            device.reset(qpos, qvel)
            yield device.measure()

    fastest, joints = np.abs(rows["state/qvel"]).max(0), {x["name"]: x for x in info["joints"]}
    speeds = [float(fastest[joints[name]["qvel"][0]]) for name in robot["joints"]]
    robot["velocity_limit"] = [max(LEAST_VELOCITY, VELOCITY_FACTOR * speed) for speed in speeds]
    tracking: dict[tuple[float, ...], Any] = {}
    for i, command in enumerate(commands):
        own = rows["episode"] == i
        measured = list(states({k: x[own] for k, x in rows.items()}))
        state = {k: np.stack([x[k] for x in measured]) for k in measured[0]}
        empty = {"command": list(command), "errors": [], "seconds": []}
        if "state/action_delay" in rows:  # that of each joint, in the first of the episodes
            delay = np.broadcast_to(rows["state/action_delay"][own][0], len(info["actuators"]))
            empty["action_delay_s"] = (delay * step_s).tolist()
        row = tracking.setdefault(tuple(command), empty)
        row["errors"].append(simulation.tracking_error(robot, command, state, step_s))
        row["seconds"].append(len(measured) * step_s)
    robot["tracking"] = list(tracking.values())
    if golden is None or not info["observation_parts"]:
        return
    (spec,) = [x for x in info["inputs"] if x["role"] == "observation"]
    observe = run_policy.load_file(out / "observation.py").observe
    gravity = run_policy.load_file(out / "robot_loop.py").gravity
    # Command, last action, phase and sensors do not follow from positions and velocities.
    unknown = {"last_action": len(info["actuators"]), "command": len(robot["command_names"])}
    nan = {k: np.full(size, np.nan) for k, size in (unknown | {"phase": 2}).items()}
    wrong = np.zeros(spec["shape"], bool)
    for row, state in zip(golden[f"observation/{spec['name']}"], states(golden), strict=True):
        if "quaternion" in state:
            state["gravity"] = gravity(state["quaternion"])
        difference = np.abs(observe(state | {"sensors": np.nan * state["sensors"]} | nan) - row)
        wrong |= difference > 1e-4 * (1 + np.abs(row))  # not NaN
    if wrong.any():
        hint, names = f"correct {info['task']}.observation_parts", np.array(spec["names"])[wrong]
        raise ConfigError(f"{hint}: observe() has other values of {', '.join(names)}")


def write_files(info: Mapping[str, Any], simulator: Any, out: Path, say: Say) -> None:
    """Write the files that run the policy on a robot; ``say`` reports a missing scene."""
    for name in FILES:
        shutil.copyfile(Path(__file__).parent / name, out / name)
    (spec,) = [x for x in info["inputs"] if x["role"] == "observation"]
    units = spec["unit"] if isinstance(spec["unit"], list) else itertools.repeat(spec["unit"])
    numbers = list(zip(spec["names"] or [], units, strict=False))
    sources = source_templates()
    sources.filters["rows"] = lambda values: pformat(list(values), width=90, compact=True)
    for name in SOURCES:
        text = sources.get_template(f"{name}.j2").render(info, spec=spec, numbers=numbers)
        (out / name).write_text(text, encoding="utf-8")
    try:
        with warnings.catch_warnings():  # about an attribute that Gymnasium's models have
            warnings.filterwarnings("ignore", message=".*settotalmass")
            _write_scene(simulator.task.spec(), out / "scene")
    except (OSError, ValueError) as error:
        shutil.rmtree(out / "scene", ignore_errors=True)
        reason = f"that of {info['task']} cannot be written: {one_line(error)}"
        say(f"give --mujoco a scene of yours: the bundle has none, {reason}")


def _write_scene(spec: mujoco.MjSpec, folder: Path) -> None:
    """Write a model as ``folder``/scene.xml, with its files beside it, and read it.

    Geometry that does not collide, and its meshes, are left out; masses stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, compiler = Path(spec.modelfiledir), spec.compiler
    compiler.discardvisual = True
    spec.compile()
    compiler.discardvisual = False
    for kind, elements in (
        (compiler.meshdir, [*spec.meshes, *spec.hfields, *spec.skins]),
        (compiler.texturedir, spec.textures),
    ):
        for i, element in enumerate(elements):
            if element.file:
                name = f"{type(element).__name__}{i}_{Path(element.file).name}"
                shutil.copyfile(source / kind / element.file, folder / name)
                element.file = name
    compiler.meshdir = compiler.texturedir = ""
    spec.modelfiledir = str(folder)
    spec.compile()
    (folder / "scene.xml").write_text(spec.to_xml(), encoding="utf-8")
    mujoco.MjModel.from_xml_path(str(folder / "scene.xml"))
