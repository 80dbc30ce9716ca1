"""Complete the model of a robot before it is compiled: servos, gains, floor, IMU and contacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import mujoco
import numpy as np

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.robot_model import FILTERS, HINGE, IMU, Actuator, Array, RobotModel

# Pattern of joint names -> stiffness and damping (N m/rad and N m s/rad), or "inertia".
Gains: TypeAlias = "Mapping[str, tuple[float, float]] | Literal['inertia']"

# Of a servo whose gains follow from the inertia that it moves.
FREQUENCY_HZ, DAMPING_RATIO = 6.0, 1.0
# Such a servo yields at most this much to the weight that it carries at home.
SAG_RAD = 0.1
# Largest angle of the servo's oscillation in a physics step, rad.
STABLE = 1.0
# Least iterations of the solver where gains differ from those that the model was tuned for.
ITERATIONS = 20
FOUND = 1 << int(mujoco.mjtConDataField.mjCONDATA_FOUND)
# Sites that ``prepare`` adds at the sole of each foot.
SOLE = "robot_sole_"
GYRO, FORCE = "robot_gyro", "robot_force_"
# Sensors that ``prepare`` adds: the gyroscope; the force on each foot, in the last physics step;
# the number of contacts of each foot and of the robot, after it.
CONTACT, CONTACTS = "robot_contact_", "robot_contacts"


@dataclass(frozen=True)
class Preparation:
    """How the model of a file is completed.

    Attributes:
        gains: Gains of the servos of matching joints, which replace those of the model; "inertia":
            all follow from the inertia and weight at home. Torque motors of hinges with a range
            become servos in any case, by default with gains from inertia.
        floor: Whether a floor is added.
        key: Keyframe of the home posture, see ``RobotModel``.
        step_s: Physics step, with implicit damping, pyramidal friction cones and ITERATIONS of the
            solver: three times faster than many models of a file; None: all as in the file.
        contacts: Name -> two geoms whose contacts are counted, see ``RobotTask.touches``.
    """

    gains: Gains = field(default_factory=dict)
    floor: bool = False
    key: str | int | None = None
    step_s: float | None = None
    contacts: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def prepare(self, mjcf: Path) -> mujoco.MjSpec:
        """Return the completed model of a file.

        Raises:
            EnvError: A pattern of ``gains`` matches no joint.
            ValueError: MuJoCo refuses the file.
        """
        spec = mujoco.MjSpec.from_file(str(mjcf))
        if self.floor:
            add_floor(spec)
        if self.step_s is not None:
            spec.option.timestep, spec.option.iterations = self.step_s, ITERATIONS
            spec.option.cone = mujoco.mjtCone.mjCONE_PYRAMIDAL
            _tune_solver(spec)
        robot = RobotModel(spec.compile(), self.key)
        if servos := self.servos(robot):
            _tune_solver(spec)
            states = robot.model.actuator_actadr[[*servos]]
            for key in spec.keys:  # a keyframe may leave its states out
                key.act = np.delete(key.act, states[(states >= 0) & (states < len(key.act))])
        for i, (kp, kd) in servos.items():
            _make_servo(spec.actuators[i], robot.actuators[i], robot, kp, kd)
        _add_sensors(spec, robot, self.contacts)
        return spec

    def servos(self, robot: RobotModel) -> dict[int, tuple[float, float]]:
        """Return the actuators that become position servos or get other gains -> kp and kd."""
        model, servos = robot.model, dict[int, tuple[float, float]]()
        derived, given = inertia_gains(robot), {} if self.gains == "inertia" else dict(self.gains)
        moved = {i: a.joint for i, a in enumerate(robot.actuators) if a.joint is not None}
        for i, joint in moved.items():
            is_motor = robot.actuators[i].kind == "force" and model.jnt_type[joint] == HINGE
            # Not a muscle, damper, or integrator.
            is_motor &= model.actuator_gaintype[i] == int(mujoco.mjtGain.mjGAIN_FIXED)
            is_motor &= model.actuator_dyntype[i] in (int(mujoco.mjtDyn.mjDYN_NONE), *FILTERS)
            is_servo = self.gains == "inertia" and robot.actuators[i].kp > 0
            if is_servo or (is_motor and model.jnt_limited[joint]):
                servos[i] = derived[joint]
        names = {i: model.joint(joint).name for i, joint in moved.items()}
        for pattern, gains in given.items():
            matches = [i for i, name in names.items() if fnmatchcase(name, pattern)]
            if not matches:
                known = ", ".join(names.values())
                raise EnvError(
                    f"name joints with an actuator ({known}): gains: {pattern!r} matches none"
                )
            servos |= dict.fromkeys(matches, gains)
        return servos


def inertia_gains(robot: RobotModel) -> dict[int, tuple[float, float]]:
    """Return joint -> kp and kd of a servo that suits the inertia and the weight at home.

    kp = I (2 pi f)² with the inertia I = 1 / (M⁻¹)_ii that the joint's torque accelerates, but at
    least the torque that holds the weight divided by SAG_RAD, and kd = 2 zeta sqrt(kp I).
    """
    model, data, gains = robot.model, robot.data, {}
    inverse, step_s = np.zeros((model.nv, model.nv)), float(model.opt.timestep)
    mujoco.mj_solveM(model, data, inverse, np.eye(model.nv))
    load = np.abs(_holding_force(robot))
    for joint in robot.joints:
        dof = int(model.jnt_dofadr[joint])
        inertia = 1.0 / max(float(inverse[dof, dof]), 1e-9)
        kp = max(inertia * (2 * np.pi * FREQUENCY_HZ) ** 2, load[dof] / SAG_RAD)
        kp = min(kp, inertia * (STABLE / step_s) ** 2)
        kd = 2 * DAMPING_RATIO * (kp * inertia) ** 0.5 - float(model.dof_damping[dof])
        gains[joint] = (float(f"{kp:.6g}"), float(f"{max(0.0, kd):.6g}"))
    return gains


def _holding_force(robot: RobotModel) -> Array:
    """Return the generalised force [nv] at home with the weight on the feet, in equal parts."""
    model, data = robot.model, robot.data
    force = data.qfrc_bias.copy()
    if robot.base is None or not robot.feet:
        return force
    for foot in robot.feet:
        lowest = min(foot.geoms, key=robot.lowest_point)
        jacobian = np.zeros((3, model.nv))
        mujoco.mj_jac(model, data, jacobian, None, data.geom_xpos[lowest], foot.body)
        force -= jacobian[2] * robot.weight / len(robot.feet)
    return force


def add_floor(spec: mujoco.MjSpec) -> None:
    """Add a level plane at height 0."""
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    spec.worldbody.add_geom(name="floor", type=plane, size=[5, 5, 0.1], rgba=[0.7, 0.7, 0.7, 1])


def _make_servo(
    element: mujoco.MjsActuator, actuator: Actuator, robot: RobotModel, kp: float, kd: float
) -> None:
    """Turn an actuator of a joint into a position servo in rad or m with the same force limit."""
    model, joint = robot.model, actuator.joint
    assert joint is not None
    gear = abs(float(element.gear[0])) or 1.0
    element.set_to_position(kp=kp, kv=kd)
    element.actlimited, element.actrange = False, [0, 0]  # a servo has no state
    element.gear = [1, 0, 0, 0, 0, 0]
    element.ctrllimited, element.ctrlrange = model.jnt_limited[joint], model.jnt_range[joint]
    if np.isfinite(actuator.force):
        element.forcelimited, limit = True, actuator.force * gear
        element.forcerange = [-limit, limit]


def _tune_solver(spec: mujoco.MjSpec) -> None:
    """Integrate the servos' damping implicitly, with enough iterations of the solver."""
    if spec.option.integrator == int(mujoco.mjtIntegrator.mjINT_EULER):
        spec.option.integrator = int(mujoco.mjtIntegrator.mjINT_IMPLICITFAST)
    spec.option.iterations = max(spec.option.iterations, ITERATIONS)
    spec.option.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_EULERDAMP)


def _add_sensors(
    spec: mujoco.MjSpec, robot: RobotModel, contacts: Mapping[str, tuple[str, str]]
) -> None:
    """Add the IMU of a floating robot, and sensors of its contacts with the ground."""
    for name, (one, other) in contacts.items():
        geom = mujoco.mjtObj.mjOBJ_GEOM
        _add_contacts(spec, name, (geom, one), (geom, other))
    if robot.base is None:
        return
    model, body, place = robot.model, robot.base, {}
    if robot.imu is not None:
        body = int(model.site_bodyid[robot.imu])
        place = {"pos": model.site_pos[robot.imu], "quat": model.site_quat[robot.imu]}
    bodies = {element.id: element for element in spec.bodies}
    bodies[body].add_site(name=IMU, size=[0.005] * 3, group=5, **place)
    kind, objects, fields = mujoco.mjtSensor, mujoco.mjtObj, mujoco.mjtConDataField
    spec.add_sensor(name=GYRO, type=kind.mjSENS_GYRO, objtype=objects.mjOBJ_SITE, objname=IMU)
    force, world = 1 << int(fields.mjCONDATA_FORCE), (objects.mjOBJ_BODY, "world")
    for n, foot in enumerate(robot.feet):
        if not bodies[foot.body].name:
            bodies[foot.body].name = f"robot_foot_{n}"
        sole = robot.sole(foot) - robot.data.xpos[foot.body]
        place = {"pos": sole @ robot.data.xmat[foot.body].reshape(3, 3)}
        bodies[foot.body].add_site(name=f"{SOLE}{n}", size=[0.005] * 3, group=5, **place)
        part = objects.mjOBJ_BODY, bodies[foot.body].name
        # The sum of all contacts' forces, in the world's frame. A sensor with forces would count
        # the contacts of the physics step before.
        _add_contacts(spec, f"{FORCE}{n}", part, world, [force, 3, 1])
        _add_contacts(spec, f"{CONTACT}{n}", part, world)
    root = bodies[robot.base]
    root.name = root.name or "robot_base"
    _add_contacts(spec, CONTACTS, (objects.mjOBJ_XBODY, root.name), world)  # the whole robot


def _add_contacts(
    spec: mujoco.MjSpec,
    name: str,
    one: tuple[mujoco.mjtObj, str],
    other: tuple[mujoco.mjtObj, str],
    fields: Sequence[int] = (FOUND, 0, 1),
) -> None:
    """Add a sensor of contacts; by default it counts them."""
    sensor = spec.add_sensor(name=name, type=mujoco.mjtSensor.mjSENS_CONTACT)
    (sensor.objtype, sensor.objname), (sensor.reftype, sensor.refname) = one, other
    sensor.intprm = fields
