"""Parts of observations that other programs, such as those on a robot, can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mujoco

Quantity: TypeAlias = (
    Literal["velocity", "angular_velocity", "gravity", "command", "phase", "sensors"]
    | Literal["joint_positions", "joint_velocities", "last_action"]
)

# Type of the MJCF's sensors that a robot has, besides those of joints and IMU -> unit.
MEASURED_SENSORS: dict[int, str | None] = {
    int(getattr(mujoco.mjtSensor, f"mjSENS_{name}")): unit
    for name, unit in (
        *(("TOUCH", "N"), ("FORCE", "N"), ("TORQUE", "N m"), ("RANGEFINDER", "m")),
        *(("TENDONPOS", None), ("TENDONVEL", None)),
    )
}

# Unit of each usual command: velocities forward, to the left and of turning left; a position.
COMMAND_UNITS = {"lin_vel_x": "m/s", "lin_vel_y": "m/s", "ang_vel_yaw": "rad/s"} | dict.fromkeys(
    ("x", "y", "z"), "m"
)


@dataclass(frozen=True)
class Part:
    """Consecutive numbers of an observation, see ``Task.observation_parts``.

    quantity          names                   numbers
    velocity          one body or site        its velocity in its own frame, m/s
    angular_velocity  one body or site        its angular velocity in its own frame, rad/s
    gravity           one body or site        direction of gravity in its frame
    command           ``Task.commands``       the variable "command"
    phase             one rate, Hz            cosine and sine of a phase with this rate
    joint_positions   hinges and slides       positions minus ``offset``, rad and m
    joint_velocities  hinges and slides       rad/s and m/s
    sensors           sensors of the model    all numbers of each
    last_action       of the action           the action that was executed last

    Attributes:
        quantity: What the numbers are.
        names: What they belong to.
        offset: What is subtracted from each number; empty: nothing.
    """

    quantity: Quantity
    names: tuple[str, ...]
    offset: tuple[float, ...] = ()


def describe(parts: Sequence[Part], model: mujoco.MjModel) -> list[tuple[str, str | None]]:
    """Return name and unit of each number of an observation of ``parts``."""
    rows: list[tuple[str, str | None]] = []
    units = {"velocity": "m/s", "angular velocity": "rad/s"}
    for part in parts:
        text = part.quantity.replace("_", " ")
        if part.quantity in ("velocity", "angular_velocity", "gravity"):
            rows += [(f"{text} {axis}", units.get(text)) for axis in "xyz"]
        elif part.quantity == "command":
            rows += [(f"command {name}", COMMAND_UNITS.get(name)) for name in part.names]
        elif part.quantity == "phase":
            rows += [("gait phase cosine", None), ("gait phase sine", None)]
        elif part.quantity == "last_action":
            rows += [(f"{name.removesuffix('_joint')} last action", None) for name in part.names]
        elif part.quantity == "sensors":
            ids = {sensor_name(model, k): k for k in range(model.nsensor)}
            for name in part.names:
                unit = MEASURED_SENSORS.get(int(model.sensor_type[ids[name]]))
                rows += [(f"{name} {i}", unit) for i in range(model.sensor_dim[ids[name]])]
        else:
            text, per_time = "velocity", "/s"
            if part.quantity == "joint_positions":
                text, per_time = "position minus home" if part.offset else "position", ""
            for name in part.names:
                hinge = model.joint(name).type[0] == mujoco.mjtJoint.mjJNT_HINGE
                unit = ("rad" if hinge else "m") + per_time
                rows.append((f"{name.removesuffix('_joint')} {text}", unit))
    return rows


def sensor_name(model: mujoco.MjModel, sensor: int) -> str:
    """Return the name of a sensor; "sensor 3" for number 3 without one."""
    return model.sensor(sensor).name or f"sensor {sensor}"
