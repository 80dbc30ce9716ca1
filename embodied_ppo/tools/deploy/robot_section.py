"""What a deployment bundle says about the robot, and the source files that are generated for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pprint import pformat
from typing import Any

import numpy as np

from embodied_ppo.options.schema import RealismConfig

LEAST_VELOCITY, VELOCITY_FACTOR = 10.0, 2.0
"""Velocity of a joint, rad/s or m/s, at which the loop stops the robot: at least the first, and the
second times the largest one in trace and evaluation."""
KEYS = {"gravity": "quaternion", "last_action": None, "command": None, "phase": None}
"""Quantity of an observation -> what ``Robot.read`` returns for it, where the name differs."""
TRACKS = {
    "lin_vel_x": "base_velocity x",
    "lin_vel_y": "base_velocity y",
    "ang_vel_yaw": "base_angular_velocity z",
}
"""Command -> the number that follows it."""


def nominal_realism(realism: RealismConfig, physics_steps: int, name: str) -> RealismConfig:
    """Return one delay of actions and observations in the middle of those of the training.

    Args:
        realism: Options of the training.
        physics_steps: Physics steps of a control step.
        name: The policy's observation.
    """
    late = realism.obs_delay
    if isinstance(late, Mapping):
        late = late.get(name, 0)
    bounds = realism.action_delay
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    parts = 1 if float(low).is_integer() and float(high).is_integer() else physics_steps
    action = np.floor((low + high) / 2 * parts + 0.5) / parts
    return RealismConfig(
        action_delay=int(action) if parts == 1 else float(action),
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
    parts: list[dict[str, Any]] = info["observation_parts"]
    part = {x["quantity"]: x for x in parts}
    actuators, joints = info["actuators"], {x["name"]: x for x in info["joints"]}
    moved = [a["joint"] for a in actuators if a["joint"] is not None]
    read = list(part["joint_positions"]["names"]) if "joint_positions" in part else moved
    imu = ["quaternion", "angular_velocity"] if info["frame"] else []
    reads = [KEYS.get(x, x) for x in part] or imu
    reads = dict.fromkeys(["joint_positions", "joint_velocities", *filter(None, reads)])
    limit = realism.action_rate_limit
    low, high = (np.array(actions[0][k], dtype=object) for k in ("low", "high"))
    if limit is not None and info["action_mapping"] == "rescale":
        limit = [limit if None in x else limit * (x[1] - x[0]) / 2 for x in zip(low, high)]
    elif limit is not None:
        limit = [limit] * len(low)
    neutral = [
        np.clip(0.0, -np.inf if a is None else a, np.inf if b is None else b)
        for a, b in zip(low, high)
    ]
    target = np.array(control["offset"]) + np.array(control["scale"]) * neutral
    ranges = np.array([a["range"] or (-np.inf, np.inf) for a in actuators], dtype=float)
    action_delay = realism.action_delay
    assert not isinstance(action_delay, tuple)
    sizes = {"velocity": 3, "angular_velocity": 3, "gravity": 3, "phase": 2}
    noise = [[x["noise"]] * sizes.get(x["quantity"], len(x["names"])) for x in parts]
    exact = all(x["quantity"] != "sensors" for x in parts)
    commands = part["command"]["names"] if "command" in part else []
    tracks = [TRACKS.get(name) for name in commands]
    return {
        "joints": read,
        "home": [x for name in read for x in joints[name]["home"]],
        "home_target": np.clip(target, ranges[:, 0], ranges[:, 1]).tolist(),
        "velocity_limit": [],
        "frame": info["frame"],
        "base": info["base"],
        "phase_hz": float(part["phase"]["names"][0]) if "phase" in part else None,
        "reads": list(reads),
        "not_measured": [x for x in reads if x == "velocity"],
        "sensors": list(part["sensors"]["names"]) if "sensors" in part else [],
        "noise": [x for row in noise for x in row] if exact and any(map(any, noise)) else [],
        "command_names": list(commands),
        "tracks": [] if None in tracks else tracks,
        "action_delay_s": action_delay * step_s,
        "action_delay_steps": int(action_delay),
        "obs_delay": realism.obs_delay,
        "action_rate_limit": limit,
        "tracking": [],
    }


def velocity_limits(info: Mapping[str, Any], qvel: np.ndarray) -> list[float]:
    """Return the velocity of each joint at which the loop stops the robot; ``qvel`` is [T, nv]."""
    fastest, joints = np.abs(qvel).max(0), {x["name"]: x for x in info["joints"]}
    speeds = [float(fastest[joints[name]["qvel"][0]]) for name in info["robot"]["joints"]]
    return [max(LEAST_VELOCITY, VELOCITY_FACTOR * speed) for speed in speeds]


def tracking_commands(info: Mapping[str, Any]) -> list[list[float]]:
    """Return the commands of the evaluation: zeros, and each end of each range alone."""
    names = info["robot"]["command_names"]
    zero = [0.0] * len(names)
    commands = [zero]
    for i, name in enumerate(names):
        commands += [[*zero[:i], float(x), *zero[i + 1 :]] for x in info["commands"][name] if x]
    return commands


# ------------------------------------------------------------------------------- generated sources
def observation_source(info: Mapping[str, Any]) -> str:
    """Return the source of observation.py: the function, or a stub with names and units."""
    (spec,) = [x for x in info["inputs"] if x["role"] == "observation"]
    parts: Sequence[Mapping[str, Any]] = info["observation_parts"]
    shape = " x ".join(map(str, spec["shape"]))
    lines = [
        f'"""Observation of {info["task"]} for robots: numpy only."""',
        "",
        "import numpy as np",
        "",
        "",
        "def observe(state):",
        f'    """Return the observation, {spec["dtype"]} [{shape}].',
        "",
        "    ``state`` has what ``Robot.read`` returns, and besides",
        "    gravity      [3], direction of gravity in the IMU's frame, from the quaternion",
        "    command      [C], last_action [A], phase [2]: those of the loop",
        '    """',
    ]
    if not parts:
        units = spec["unit"] if isinstance(spec["unit"], list) else [spec["unit"]] * 10**6
        rows = zip(spec["names"] or [], units, strict=False)
        lines += [f"    # {i}: {name}, {unit or '-'}" for i, (name, unit) in enumerate(rows)]
        hint = f"write observe() in observation.py: {info['task']} declares no observation_parts"
        return "\n".join([*lines, f"    raise NotImplementedError({hint!r})", ""])
    constants = {"JOINTS": info["robot"]["joints"]}
    rows, first = list[str](), 0
    for part in parts:
        quantity, size = part["quantity"], len(part["names"])
        text, value = quantity.replace("_", " "), f'state["{quantity}"]'
        if quantity in ("velocity", "angular_velocity", "gravity"):
            text, size = f"{text} of {part['names'][0]} in its own frame", 3
        elif quantity == "phase":
            text, size = "cosine and sine of the phase of the gait", 2
        elif quantity in ("command", "sensors"):
            text += f": {', '.join(part['names'])}"
        if quantity == "velocity":
            text += ", m/s: from your estimator, no robot measures it"
        if part["offset"]:
            constants["HOME"], value = list(part["offset"]), f"{value} - HOME"
        rows += [f"        # {first}: {text}", f"        {value},"]
        first += size
    at = lines.index("def observe(state):")
    head = [f"{k} = {pformat(x, width=90, compact=True)}" for k, x in constants.items()]
    head = [x.replace("HOME = ", "HOME = np.array(") + ")" * x.startswith("HOME") for x in head]
    result = f'    return np.concatenate(parts).astype("{spec["dtype"]}")'
    body = ["    parts = [", *rows, "    ]", result, ""]
    return "\n".join([*lines[: at - 2], "", *head, "", "", *lines[at:], *body])


def robot_source(info: Mapping[str, Any]) -> str:
    """Return the source of my_robot.py, the stub of the five functions."""
    section = info["robot"]
    reads = {
        "quaternion": "w x y z of the IMU",
        "angular_velocity": "rad/s in the IMU's frame",
        "velocity": "m/s; no robot measures it: estimate it, for example from legs and IMU",
        "sensors": ", ".join(section["sensors"]),
    }
    order = "in the order of JOINTS"
    keys = [f'        #     "{k}": ...,  # {reads.get(k, order)}' for k in section["reads"]]
    units = sorted({a["unit"] for a in info["actuators"] if a["unit"]})
    actuators = [actuator["name"] for actuator in info["actuators"]]
    return "\n".join(
        [
            f'"""Your robot for {info["task"]}: python run_policy.py --loop my_robot.py"""',
            "",
            "from robot_loop import Robot",
            "",
            f"JOINTS = {pformat(section['joints'], width=90, compact=True)}",
            f"ACTUATORS = {pformat(actuators, width=90, compact=True)}",
            "",
            "",
            "class MyRobot(Robot):",
            "    def read(self):",
            "        # return {  # the newest measurement, at once",
            '        #     "time_s": ...,  # when it was measured, on the clock of now()',
            *keys,
            "        # }",
            '        raise NotImplementedError("my_robot.py: write read()")',
            "",
            "    def write(self, target, kp, kd):",
            f"        # {' and '.join(units)}, in the order of ACTUATORS",
            '        raise NotImplementedError("my_robot.py: write write()")',
            "",
            "    def stop(self):",
            "        pass  # kp = 0 and kd > 0 in all motors",
            "",
            "    # now() and sleep() are those of the computer's clock.",
            "",
        ]
    )
