"""Properties of a robot that follow from its MJCF: numbers and indices, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import mujoco
import numpy as np
from numpy.typing import NDArray

from embodied_envs.robots.observation_parts import MEASURED_SENSORS, Part, sensor_name

Array: TypeAlias = "NDArray[np.float64]"
Kind: TypeAlias = Literal["position", "velocity", "force"]

# Values of mjtJoint.
FREE, BALL, SLIDE, HINGE = range(4)
FILTERS = (int(mujoco.mjtDyn.mjDYN_FILTER), int(mujoco.mjtDyn.mjDYN_FILTEREXACT))
# Values of mjtDyn.
INTEGRATOR, MUSCLE = int(mujoco.mjtDyn.mjDYN_INTEGRATOR), int(mujoco.mjtDyn.mjDYN_MUSCLE)
# Feet are links whose lowest point is at most this far above that of the robot.
GROUND_M = 0.02
# Bounds of the action scale of position servos of hinges.
SCALE_RAD = (0.2, 0.5)
# Share of the force limit that an error of one action scale causes.
SCALE_OF_FORCE = 1.0
# Largest distance of a subtree's centre from its mirror image, and largest share of its mass by
# which a pair differs.
MIRROR_M, MIRROR_MASS = 0.05, 0.1

# Site of the observations, added by ``Preparation``, in the place of the model's IMU.
IMU = "robot_imu"


@dataclass(frozen=True)
class Actuator:
    """An actuator in the unit of its ctrl: rad, m (position), rad/s, m/s (velocity), or a force.

    Attributes:
        name: Its name, or that of its joint.
        kind: What ctrl is: the target of a position or velocity servo, or a force.
        joint: The hinge or slide that it moves; None: a ball joint, tendon, site or body.
        kp: Stiffness, N m/rad or N/m; 0 unless kind is position.
        kd: Damping of the servo without that of the joint.
        force: Largest absolute force before the gear; infinite without a limit.
        low: Lowest control; minus infinity for a servo of a continuous joint.
        high: Highest control.
        home: Control of the home posture.
        scale: Change of the control by an action of 1.
    """

    name: str
    kind: Kind
    joint: int | None
    kp: float
    kd: float
    force: float
    low: float
    high: float
    home: float
    scale: float

    @property
    def largest_force(self) -> float:
        """The force limit; without one the force of a servo whose error is half its range."""
        error = 0.5 * (self.high - self.low)
        error = error if 0 < error < np.inf else 1.0
        return self.force if np.isfinite(self.force) else (self.kp or self.kd or 1.0) * error


@dataclass(frozen=True)
class Foot:
    """A link that stands on the ground: its name, body, colliding geoms, and leg joints.

    The joints are those from the base to the foot that belong to no other foot's leg.
    """

    name: str
    body: int
    geoms: tuple[int, ...]
    leg: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A joint and its mirror image, which is itself for a joint in the plane of symmetry.

    In mirrored postures the position of ``right`` is ``sign`` times that of ``left`` in the other.
    """

    left: int
    right: int
    sign: int


class RobotModel:
    """What a task needs to know about the robot of a compiled model.

    The robot consists of the kinematic trees that hold an actuator; all other bodies are objects.
    Bodies, joints and geoms are indices of ``model``.
    """

    def __init__(self, model: mujoco.MjModel, key: str | int | None = None) -> None:
        """Read ``model``.

        Args:
            model: The compiled model.
            key: Name or number of the keyframe of the home posture; None selects one whose name
                contains "bent", "home" or "stand", in this order, else the first. Without a
                keyframe the posture is qpos0, with joints in the middle of ranges that exclude it.
        """
        self.model = model
        names = [model.key(k).name.lower() for k in range(model.nkey)]
        parts = ("bent", "home", "stand", "")
        candidates = [k for part in parts for k, name in enumerate(names) if part in name]
        # Number of the keyframe of the home posture; None without one.
        self.key: int | None = next(iter(candidates), None) if key is None else model.key(key).id
        # Home posture, qpos [nq]. The lowest foot touches the ground, unless thrusters lift it.
        self.home: Array = (model.qpos0 if self.key is None else model.key_qpos[self.key]).copy()
        for j in np.flatnonzero(model.jnt_limited & (model.jnt_type >= SLIDE)):
            (low, high), i = model.jnt_range[j], model.jnt_qposadr[j]
            if self.key is None and not low <= self.home[i] <= high:
                self.home[i] = (low + high) / 2
        flies = self.base is not None and self.base_dof + 2 in self.driven
        if self.base is not None and self.ground is not None and self.links and not flies:
            self.home[self.base_qpos + 2] += self.ground - self._lowest(self.links)
            vars(self).pop("data")  # computed with the old height

    # ----------------------------------------------------------------------------- trees and joints
    @cached_property
    def data(self) -> mujoco.MjData:
        """The home posture at rest."""
        data = mujoco.MjData(self.model)
        data.qpos[:] = self.home
        mujoco.mj_forward(self.model, data)
        return data

    @cached_property
    def driven(self) -> frozenset[int]:
        """Degrees of freedom that actuators move."""
        return frozenset(map(int, driven_dofs(self.model)))

    @cached_property
    def roots(self) -> frozenset[int]:
        """Root bodies of the robot."""
        dofs = list(self.driven)
        return frozenset(map(int, self.model.body_rootid[self.model.dof_bodyid[dofs]]))

    @cached_property
    def base(self) -> int | None:
        """Body of the free joint whose subtree holds an actuator; None: the base is fixed."""
        free = self.model.jnt_bodyid[self.model.jnt_type == FREE]
        return next((int(body) for body in free if int(body) in self.roots), None)

    @property
    def base_qpos(self) -> int:
        """Index of the base's position in qpos; its quaternion follows."""
        return int(self.model.jnt_qposadr[self.model.body_jntadr[self.base]])

    @property
    def base_dof(self) -> int:
        """Index of the base's velocity in qvel; its angular velocity follows."""
        return int(self.model.jnt_dofadr[self.model.body_jntadr[self.base]])

    @cached_property
    def joints(self) -> tuple[int, ...]:
        """Hinges and slides of the robot, driven or not."""
        roots = self.model.body_rootid[self.model.jnt_bodyid]
        own = np.isin(roots, list(self.roots)) & (self.model.jnt_type >= SLIDE)
        return tuple(map(int, np.flatnonzero(own)))

    @property
    def weight(self) -> float:
        """Weight of the robot, N."""
        mass = self.model.body_subtreemass[list(self.roots)].sum()
        return float(mass * np.linalg.norm(self.model.opt.gravity))

    def falls(self, joint: int) -> bool:
        """Return whether a joint has no actuator and gravity moves it: that of a pole, not a wheel.

        Its force near home exceeds a tenth of the weight times the radius of gyration (hinge).
        """
        model, data, dof = self.model, mujoco.MjData(self.model), int(self.model.jnt_dofadr[joint])
        mass, forces = float(model.body_subtreemass[model.jnt_bodyid[joint]]), [0.0]
        for offset in (-0.5, 0.0, 0.5) if dof not in self.driven else ():
            data.qpos[:] = self.home
            data.qpos[model.jnt_qposadr[joint]] += offset
            mujoco.mj_forward(model, data)
            forces.append(abs(float(data.qfrc_bias[dof])))  # at rest: gravity only, N or N m
        gyration = float(np.sqrt(model.dof_M0[dof] / max(mass, 1e-9)))  # m; 1 for a slide
        return max(forces) > 0.1 * mass * float(np.linalg.norm(model.opt.gravity)) * gyration

    # ------------------------------------------------------------------------------------ actuators
    @cached_property
    def actuators(self) -> tuple[Actuator, ...]:
        """All actuators in the order of ctrl."""
        return tuple(self._actuator(i) for i in range(self.model.nu))

    def _actuator(self, i: int) -> Actuator:
        """Describe actuator ``i``."""
        model, bias, force = self.model, self.model.actuator_biasprm[i], np.inf
        gain, gear = (float(x[i, 0]) or 1.0 for x in (model.actuator_gainprm, model.actuator_gear))
        is_affine = model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_AFFINE)
        kind: Kind = "force"
        if is_affine and (bias[1] or bias[2] == -gain):
            # The control of an integrator is the velocity of its target.
            is_position = bias[1] and model.actuator_dyntype[i] != INTEGRATOR
            kind = "position" if is_position else "velocity"
        is_muscle = model.actuator_gaintype[i] == int(mujoco.mjtGain.mjGAIN_MUSCLE)
        joint: int | None = int(model.actuator_trnid[i, 0])
        if not drives_joint(model)[i] or model.jnt_type[joint] < SLIDE:
            joint = None
        low, high = (float(x) for x in model.actuator_ctrlrange[i])
        has_range = model.actuator_ctrllimited[i]
        # The force limit: the smallest of actuator, joint, and control of a motor.
        if model.actuator_forcelimited[i]:
            force = np.abs(model.actuator_forcerange[i]).max()
        if joint is not None and model.jnt_actfrclimited[joint]:
            force = min(force, np.abs(model.jnt_actfrcrange[joint]).max() / abs(gear))
        if is_muscle:  # the peak force, given or scaled by the inertia
            _, _, peak, scale = model.actuator_gainprm[i, :4]
            force = min(force, peak if peak > 0 else scale / max(model.actuator_acc0[i], 1e-9))
        elif kind == "force" and has_range:
            force = min(force, abs(gain) * max(abs(low), abs(high)))
        # The control range: that of the joint; of others the largest force, or the speed it brakes.
        if not has_range:
            high = np.inf if kind == "position" else force / abs(gain) if force < np.inf else 1.0
            low = -high
            if is_muscle or model.actuator_dyntype[i] == MUSCLE:
                low, high = 0.0, 1.0
            if kind == "position" and joint is not None and model.jnt_limited[joint]:
                low, high = sorted((gear * model.jnt_range[joint]).tolist())
        # At home: a servo without force. A keyframe's control can be that of another posture.
        home = 0.0 if self.key is None else float(model.key_ctrl[self.key, i])
        if kind == "position":
            home = self._target(i)
        home = min(max(home, low), high)
        # The scale reaches at least one end of the range, except that of a hinge's servo.
        scale = max(home - low, high - home)
        if kind != "position":
            scale = min(x for x in (home - low, high - home) if x > 0)
        elif joint is not None:
            reach = SCALE_OF_FORCE * force / abs(float(bias[1]))
            # An arm need not balance, so that it may move far.
            least = SCALE_RAD[self.base is None]
            hinge = abs(gear) * float(np.clip(reach / abs(gear), least, SCALE_RAD[1]))
            scale = min(hinge if model.jnt_type[joint] == HINGE else np.inf, 0.5 * (high - low))
        scale = scale if scale < np.inf else 1.0
        name = "" if joint is None else model.joint(joint).name
        name = model.actuator(i).name or name or f"actuator{i}"
        kp = -float(bias[1]) if kind == "position" else 0.0
        kd = -float(bias[2]) if is_affine else 0.0
        return Actuator(name, kind, joint, kp, kd, float(force), low, high, home, scale)

    def _target(self, i: int) -> float:
        """Return the control or state with which a position servo has no force at home."""
        bias, gain = self.model.actuator_biasprm[i], float(self.model.actuator_gainprm[i, 0]) or 1.0
        return -float(bias[0] + bias[1] * self.data.actuator_length[i]) / gain

    @cached_property
    def home_act(self) -> Array:
        """States of the actuators at home [na]: a filter's control, an integrator's target."""
        model = self.model
        act = np.zeros(model.na) if self.key is None else model.key_act[self.key].copy()
        for i in map(int, np.flatnonzero(model.actuator_actadr >= 0)):
            at, kind = model.actuator_actadr[i], model.actuator_dyntype[i]
            if kind in FILTERS:
                act[at] = self.actuators[i].home
            elif kind == INTEGRATOR and model.actuator_biasprm[i, 1]:
                limits = (
                    model.actuator_actrange[i] if model.actuator_actlimited[i] else (None, None)
                )
                act[at] = np.clip(self._target(i), *limits)
        return act

    # ------------------------------------------------------------------------------ ground and feet
    @cached_property
    def ground(self) -> float | None:
        """Height of the ground, m: what is fixed below a floating base, else the highest level
        plane that is fixed in the world; None without one."""
        model = self.model
        planes = model.geom_type == int(mujoco.mjtGeom.mjGEOM_PLANE)
        planes &= model.body_weldid[model.geom_bodyid] == 0
        planes &= np.abs(self.data.geom_xmat[:, 8] - 1) < 1e-6
        if self.base is not None:
            surface = self.surface_below(self.data.xpos[self.base], planes)
            if surface is not None:
                return surface
        return float(self.data.geom_xpos[planes, 2].max()) if planes.any() else None

    def surface_below(self, point: Array, others: Any = False) -> float | None:
        """Return the height of what is fixed below a point, m: what collides, or is in ``others``
        (bool [ngeom]); None without one."""
        model, point, geom = self.model, point.copy(), np.zeros(1, np.int32)
        fixed = ((model.geom_contype | model.geom_conaffinity) != 0) | others
        fixed &= model.body_weldid[model.geom_bodyid] == 0
        down = np.array([0.0, 0.0, -1.0])
        while (distance := mujoco.mj_ray(model, self.data, point, down, None, 1, -1, geom)) >= 0:
            point[2] -= distance
            if fixed[geom[0]]:
                return float(point[2])
            point[2] -= 1e-6
        return None

    @cached_property
    def links(self) -> dict[int, tuple[int, ...]]:
        """Body of each rigid link of a floating robot -> its geoms that can touch the ground."""
        model, weld = self.model, self.model.body_weldid[self.model.geom_bodyid]
        collides = (model.geom_contype | model.geom_conaffinity) != 0
        collides[model.pair_geom1] = collides[model.pair_geom2] = True
        collides &= model.body_rootid[model.geom_bodyid] == self.base
        rows = {int(body): np.flatnonzero(collides & (weld == body)) for body in weld[collides]}
        return {body: tuple(map(int, geoms)) for body, geoms in rows.items()}

    def lowest_point(self, geom: int) -> float:
        """Return the height of a geom's lowest point at home, m."""
        model, kind, types = self.model, self.model.geom_type[geom], mujoco.mjtGeom
        down, size = -self.data.geom_xmat[geom].reshape(3, 3)[2], model.geom_size[geom]
        reach = np.abs(down) @ size  # of a box; an ellipsoid is treated as its box
        if kind in (int(types.mjGEOM_SPHERE), int(types.mjGEOM_CAPSULE)):
            reach = size[0] + size[1] * abs(down[2])  # the second size of a sphere is 0
        elif kind == int(types.mjGEOM_CYLINDER):
            reach = size[0] * np.hypot(down[0], down[1]) + size[1] * abs(down[2])
        elif kind == int(types.mjGEOM_MESH):
            first = model.mesh_vertadr[mesh := model.geom_dataid[geom]]
            reach = (model.mesh_vert[first : first + model.mesh_vertnum[mesh]] @ down).max()
        return float(self.data.geom_xpos[geom, 2] - reach)

    def _lowest(self, bodies: Iterable[int]) -> float:
        return min(self.lowest_point(geom) for body in bodies for geom in self.links[body])

    def sole(self, foot: Foot) -> Array:
        """Return the middle of the points of a foot that touch the ground at home, m, [3]."""
        lowest = {geom: self.lowest_point(geom) for geom in foot.geoms}
        geoms = [g for g, z in lowest.items() if z < min(lowest.values()) + GROUND_M]
        xy = self.data.geom_xpos[geoms, :2].mean(0)
        return np.array([*xy, min(lowest.values())])

    @cached_property
    def feet(self) -> tuple[Foot, ...]:
        """The last links of a floating robot that stand on the ground at home."""
        model = self.model
        if self.base is None or not self.links:
            return ()
        moving = model.body_weldid[model.body_parentid[model.jnt_bodyid]]
        paths = {
            body: ancestors(model, body)
            for body in set(self.links) - set(map(int, moving))  # no joint below
            if self._lowest([body]) < self._lowest(self.links) + GROUND_M
        }
        common = [b for path in paths.values() for b in path]
        legs = {body: [b for b in path if common.count(b) == 1] for body, path in paths.items()}
        feet = []
        for body in sorted(paths):
            leg = tuple(j for j in self.joints if model.jnt_bodyid[j] in legs[body])
            feet.append(Foot(model.body(body).name or f"body{body}", body, self.links[body], leg))
        return tuple(feet)

    # ------------------------------------------------------------------------- symmetry and sensors
    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Joints with their mirror images in the plane y = 0 of a floating base, at qpos0.

        A pair has equal types, mirrored centres of mass of the subtrees, mirrored axes, and masses
        that differ by at most a tenth. A joint without an image is in no pair.
        """
        if self.base is None:
            return ()
        model, data, joints = self.model, mujoco.MjData(self.model), np.array(self.joints, int)
        mujoco.mj_forward(model, data)
        frame, bodies = data.xmat[self.base].reshape(3, 3), model.jnt_bodyid[joints]
        centre = (data.subtree_com[bodies] - data.xpos[self.base]) @ frame
        axis, mass = data.xaxis[joints] @ frame, model.body_subtreemass[bodies]
        mirror, pairs = np.array([1.0, -1.0, 1.0]), []
        hinge = model.jnt_type[joints] == HINGE
        for a, joint in enumerate(joints):
            # The axis of a rotation is mirrored with the opposite sign.
            along = axis @ (mirror * axis[a] * (-1 if hinge[a] else 1))
            distance = np.linalg.norm(centre - mirror * centre[a], axis=1)
            matches = (hinge == hinge[a]) & (np.abs(along) > 0.95) & (distance < MIRROR_M)
            matches &= np.abs(mass - mass[a]) <= MIRROR_MASS * mass[a]
            b = int(np.where(matches, distance, np.inf).argmin())
            if matches[b] and (centre[a, 1] > centre[b, 1] or a == b):
                pairs.append(Pair(int(joint), int(joints[b]), 1 if along[b] > 0 else -1))
        return tuple(pairs)

    @cached_property
    def imu(self) -> int | None:
        """The robot's site whose name contains "imu", the base's first; None without one."""
        model = self.model
        names = [model.site(i).name.lower() for i in range(model.nsite)]
        roots = model.body_rootid[model.site_bodyid]
        sites = [i for i, name in enumerate(names) if "imu" in name and int(roots[i]) in self.roots]
        weld = model.body_weldid[model.site_bodyid]
        return min(sites, key=lambda i: weld[i] != self.base, default=None)

    def parts(self) -> list[Part]:
        """Return the parts of the observation of ``RobotTask``: what the robot measures."""
        model, imu = self.model, [] if self.base is None else [(IMU,)]
        joints = tuple(model.joint(j).name for j in self.joints)
        home = tuple(self.home[model.jnt_qposadr[list(self.joints)]].tolist())
        kinds = np.isin(model.sensor_type, list(MEASURED_SENSORS))
        sensors = tuple(sensor_name(model, int(k)) for k in np.flatnonzero(kinds))
        return [
            *(Part("gravity", site) for site in imu),
            *(Part("angular_velocity", site) for site in imu),
            Part("joint_positions", joints, offset=home),
            Part("joint_velocities", joints),
            *([Part("sensors", sensors)] if sensors else []),
            Part("last_action", tuple(actuator.name for actuator in self.actuators)),
        ]


def ancestors(model: mujoco.MjModel, body: int) -> list[int]:
    """Return a body and the bodies above it, without the world."""
    return [body, *ancestors(model, int(model.body_parentid[body]))] if body else []


def drives_joint(model: mujoco.MjModel) -> NDArray[np.bool_]:
    """Return whether each actuator acts on one joint, [nactuator]."""
    kinds = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)
    return np.isin(model.actuator_trntype, [int(kind) for kind in kinds])


def driven_dofs(model: mujoco.MjModel) -> NDArray[np.int32]:
    """Return the degrees of freedom that actuators move."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return np.unique(data.moment_colind[: int(data.moment_rownnz.sum())])
