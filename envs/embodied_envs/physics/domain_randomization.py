"""Domain randomisation: each episode draws the model of its world from the environment's seed."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError, check_choice, check_range
from embodied_envs.robots.robot_model import HINGE, RobotModel, drives_joint


@dataclass(frozen=True)
class Range:
    """MjModel fields that one range changes by a random number x in [low, high].

    Attributes:
        fields: MjModel fields.
        operation: "scale" multiplies by x, "add" adds x.
        columns: Columns of the last dimension that change, of all fields or of each.
        per_element: Whether each element (for example a body) has its own x; else a world has one.
        of_base: Whether only the floating base of the robot changes.
    """

    fields: tuple[str, ...]
    operation: Literal["scale", "add"]
    columns: tuple[slice, ...] = (slice(None),)
    per_element: bool = True
    of_base: bool = False


# Fields with the gains of position servos.
SERVO = ("actuator_gainprm", "actuator_biasprm")

# Name of the option -> what it changes. The numbers are uniform between the two bounds.
# * mass scales body masses and inertias by the same factor (the density).
# * friction scales the sliding friction of geoms, of contact pairs by the larger factor of the two
#   geoms; damping scales the damping of joints.
# * gains scales gain and bias of actuators, but not their force limit; of a position servo these
#   are stiffness and damping.
# * kp scales the gain of actuators and the stiffness of position servos, kd the damping of servos,
#   armature and friction_loss those of joints.
# * payload adds a mass (kg) at the centre of mass of the floating base; com moves this centre along
#   the base's x, y and z (m).
# * motor_strength scales the force of actuators with its limit. The force is the gain times ctrl
#   plus the bias, clamped to the limit; gain, bias and limit are multiplied by the same factor,
#   hence the force. The limit of a joint (actuatorfrcrange) is that of the actuator that drives it.
#   To scale the gear would be wrong: it also changes the length of a position servo, hence the
#   meaning of its target.
# * joint_offset x (rad) shifts what the encoders of hinge joints measure. The bias of a position
#   servo is computed for the angle plus x, and ``joint_offsets`` shifts the angles that the policy
#   reads. To shift ctrl would be wrong: ctrlrange limits the command, not the resulting angle.
# * gravity scales its strength.
# * camera_position moves each camera along x, y and z (m); camera_angle turns it about its own x, y
#   and z (rad).
# * light scales the diffuse light; colour shifts red, green and blue, within 0 to 1.
RANGES: dict[str, Range] = {
    "mass": Range(("body_mass", "body_inertia"), "scale"),
    "friction": Range(("geom_friction", "pair_friction"), "scale", (slice(1), slice(2))),
    "damping": Range(("dof_damping",), "scale"),
    "gains": Range(SERVO, "scale"),
    "kp": Range(SERVO, "scale", (slice(0, 1), slice(1, 2))),
    "kd": Range(("actuator_biasprm",), "scale", (slice(2, 3),)),
    "armature": Range(("dof_armature",), "scale"),
    "friction_loss": Range(("dof_frictionloss",), "scale"),
    "payload": Range(("body_mass",), "add", of_base=True),
    "com": Range(("body_ipos",), "add", of_base=True),
    "motor_strength": Range((*SERVO, "actuator_forcerange", "jnt_actfrcrange"), "scale"),
    "joint_offset": Range(("actuator_biasprm",), "add"),
    "gravity": Range(("opt.gravity",), "scale", per_element=False),
    "camera_position": Range(("cam_pos",), "add"),
    "camera_angle": Range(("cam_quat",), "add"),
    "light": Range(("light_diffuse",), "scale"),
    "colour": Range(("geom_rgba", "mat_rgba"), "add", (slice(3),)),
}


class Randomization:
    """The fields of a model that differ between worlds, and their distribution."""

    def __init__(self, model: mujoco.MjModel, ranges: Mapping[str, tuple[float, float]]) -> None:
        """Read the fields' default values from ``model``.

        Args:
            model: The model that is randomised.
            ranges: Names of RANGES -> (low, high).

        Raises:
            EnvError: A name is unknown, or bounds are not finite, out of order or negative factors,
                or do not fit the model.
        """
        self.ranges = dict(ranges)
        for name, bounds in ranges.items():
            check_choice("env.ranges", name, RANGES)
            is_scale = RANGES[name].operation == "scale"
            check_range(f"env.ranges.{name}", bounds, 0.0 if is_scale else -math.inf)
        for name in ("motor_strength", "gains", "kp", "kd"):
            if tuple(ranges.get(name, (1, 1))) != (1, 1):
                _check_forces(model, name, list(ranges[name]))
        self.base_body = 0
        if named := [name for name in ranges if RANGES[name].of_base]:
            base = RobotModel(model).base
            if base is None:
                raise EnvError(f"remove env.ranges.{named[0]}: the robot has no floating base")
            self.base_body, mass = base, float(model.body_mass[base])
            if (least := ranges.get("payload", (0.0,))[0]) <= -mass:
                low = f"raise env.ranges.payload[0] = {least:g} above"
                raise EnvError(f"{low} -{mass:.3g}: the base has {mass:.3g} kg")
        self.encoders = Encoders(model)
        unused = () if len(self.encoders.gears) else ("joint_offset",)  # no servo's bias changes
        self.base: dict[str, Tensor] = {}
        for name in dict.fromkeys(f for r in ranges if r not in unused for f in RANGES[r].fields):
            x = torch.from_numpy(np.array(model_field(model, name), dtype=np.float64))
            if name == "geom_rgba":  # a geom of the default colour shows that of its material
                plain = (model.geom_matid >= 0) & (model.geom_rgba == (0.5, 0.5, 0.5, 1)).all(1)
                x[plain] = torch.from_numpy(model.mat_rgba[model.geom_matid[plain]]).double()
            if x.numel() and not (name == "jnt_actfrcrange" and not model.jnt_actfrclimited.any()):
                self.base[name] = x
        for name in (name for name in ranges if RANGES[name].operation == "scale"):
            parts = zip(RANGES[name].fields, itertools.cycle(RANGES[name].columns))
            if not any(self.base[k][..., c].any() for k, c in parts if k in self.base):
                raise EnvError(f"remove env.ranges.{name}: all that it scales is 0 in the model")
        # MjModel fields that differ between worlds.
        self.fields = tuple(self.base)
        # For each joint the last actuator that acts on it directly; 0 without one.
        self._driver = torch.zeros(model.njnt, dtype=torch.int64)
        for i in np.flatnonzero(drives_joint(model)).tolist():
            self._driver[model.actuator_trnid[i, 0]] = i
        self._paired = torch.tensor(np.stack([model.pair_geom1, model.pair_geom2])).long()
        self._sizes = {name: self._size(name) for name in ranges}
        # Number of random numbers that one world takes.
        self.size = sum(self._sizes.values())
        self._first = dict(zip(ranges, itertools.accumulate(self._sizes.values(), initial=0)))

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the constant tensors to a device; a CUDA graph allows no copy from the host."""
        self.base = {k: x.to(device, dtype) for k, x in self.base.items()}
        self._driver, self._paired = self._driver.to(device), self._paired.to(device)
        self.encoders.to(device, dtype)

    def draw(self, name: str, u: Tensor) -> Tensor:
        """Return the numbers [N, n] of range ``name``, within its bounds.

        Args:
            name: One of ``ranges``.
            u: Uniform numbers of all ranges, [N, size] in [0, 1).
        """
        (low, high), first = self.ranges[name], self._first[name]
        return low + (high - low) * u[:, first : first + self._sizes[name]]

    def _size(self, name: str) -> int:
        """Return how many random numbers range ``name`` takes for one world."""
        r = RANGES[name]
        if not r.per_element:
            return 1
        if name == "joint_offset":
            return len(self.encoders.joints)
        if r.of_base:
            return 3 if name == "com" else 1
        counts = [len(self.base[f]) for f in r.fields if f in self.base]
        if r.operation == "scale":  # one factor for all fields of an element
            return counts[0] if counts else 0
        return 3 * sum(counts)  # x, y, z; the angles about them; red, green, blue

    def sample(self, u: Tensor) -> dict[str, Tensor]:
        """Map uniform numbers [N, size] in [0, 1) to field -> values [N, ..]."""
        sampled = {f: x.to(u).expand(len(u), *x.shape).clone() for f, x in self.base.items()}
        # The shift of a servo's bias depends on its stiffness, so that it comes last.
        for name in sorted(self.ranges, key=lambda name: name == "joint_offset"):
            r, x, column = RANGES[name], self.draw(name, u), 0
            if name == "joint_offset":
                if "actuator_biasprm" in sampled:
                    self.encoders.shift_bias(sampled["actuator_biasprm"], x)
                continue
            for field, columns in zip(r.fields, itertools.cycle(r.columns)):
                if (value := sampled.get(field)) is None:
                    continue
                if r.operation == "scale":
                    factor = x.index_select(1, self._driver) if field == "jnt_actfrcrange" else x
                    factor = x[:, self._paired].amax(1) if field == "pair_friction" else factor
                    value[..., columns] *= factor.view(*factor.shape, *[1] * (value.ndim - 2))
                elif r.of_base:
                    value[:, self.base_body] += x.view(value[:, self.base_body].shape)
                elif name == "camera_angle":
                    value.copy_(_rotate(value, x.view(len(u), -1, 3)))
                else:
                    part = value[..., columns]
                    count = part[0].numel()
                    part += x[:, column : column + count].view(part.shape)
                    column += count
                if name == "colour":
                    value.clamp_(0.0, 1.0)
        return sampled


class Encoders:
    """The hinge joints with an actuator, and the position servos among these actuators.

    Attributes:
        joints: Number of each hinge.
        servo_index: Number of each position servo, [servos].
        joint_of_servo: Place of its hinge in ``joints``, [servos].
        gears: Its gear, [servos].
    """

    def __init__(self, model: mujoco.MjModel) -> None:
        """Find joints and servos of ``model``."""
        moved = model.actuator_trnid[:, 0]  # the joint of each actuator
        own = np.flatnonzero(drives_joint(model))
        own = own[model.jnt_type[moved[own]] == HINGE]
        self.joints: list[int] = [*dict.fromkeys(moved[own].tolist())]
        gain, bias = model.actuator_gainprm[own, 0], model.actuator_biasprm[own, 1]
        servos = own[(bias == -gain) & (gain != 0)]  # force = gain (ctrl - gear · angle) - ..
        self.gears = torch.tensor(model.actuator_gear[servos, 0])
        self.servo_index = torch.tensor(servos)
        places = [self.joints.index(joint) for joint in moved[servos].tolist()]
        self.joint_of_servo = torch.tensor(places, dtype=torch.int64)

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the tensors to a device."""
        self.gears = self.gears.to(device, dtype)
        self.servo_index = self.servo_index.to(device)
        self.joint_of_servo = self.joint_of_servo.to(device)

    def to_servo_units(self, offset: Tensor) -> Tensor:
        """Convert offsets [N, joints], rad, to the unit of the servos' ctrl, [N, servos]."""
        return offset.index_select(1, self.joint_of_servo) * self.gears.to(offset)

    def shift_bias(self, biasprm: Tensor, offset: Tensor) -> None:
        """Change biasprm [N, nu, 10] so that servos measure the angle plus the offset [N, joints].

        The force is gain · ctrl + b0 + b1 · gear · angle + ..; an angle that is larger by x adds
        b1 · gear · x to b0. Factors of gains and motors scale b0 and b1 alike, hence the order of
        the ranges does not matter.
        """
        servos = biasprm.index_select(1, self.servo_index)
        servos[..., 0] += servos[..., 1] * self.to_servo_units(offset)
        biasprm.index_copy_(1, self.servo_index, servos)


def _check_forces(model: mujoco.MjModel, name: str, value: list[float]) -> None:
    """Refuse models whose forces a factor of gain, bias and (motor_strength) limit does not scale.

    Raises EnvError.
    """
    # The types up to AFFINE are linear; muscles and others follow.
    is_linear = model.actuator_gaintype <= int(mujoco.mjtGain.mjGAIN_AFFINE)
    is_linear &= model.actuator_biastype <= int(mujoco.mjtBias.mjBIAS_AFFINE)
    counts = np.bincount(model.actuator_trnid[drives_joint(model), 0], minlength=model.njnt)
    shared = np.flatnonzero(model.jnt_actfrclimited.astype(bool) & (counts != 1))
    fault = ""
    if not is_linear.all():
        i = int(is_linear.argmin())
        fault = f"actuator {model.actuator(i).name or i} has no linear gain and bias, as a muscle"
    elif name == "motor_strength" and (shared.size or model.tendon_actfrclimited.any()):
        part = model.joint(int(shared[0])).name if shared.size else "a tendon"
        fault = f"the limit actuatorfrcrange of {part} is not that of one actuator (forcerange)"
    if fault:
        raise EnvError(f"write env.ranges.{name}=[1,1]: env.ranges.{name}={value}: {fault}")


def _rotate(quat: Tensor, angles: Tensor) -> Tensor:
    """Rotate quaternions [N, K, 4] (w, x, y, z) by rotation vectors [N, K, 3] (rad).

    The vectors are in each quaternion's own frame: the product is quat * exp(angles / 2).
    """
    angle = angles.norm(dim=-1, keepdim=True)
    axis = angles / angle.clamp_min(1e-12)
    w2, v2 = torch.cos(angle / 2), axis * torch.sin(angle / 2)
    w1, v1 = quat[..., :1], quat[..., 1:]
    w = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    v = w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)
    return torch.cat([w, v], -1)


def model_field(owner: Any, name: str) -> Any:
    """Return a view of a field of MjModel or MjData by its path, for example "opt.gravity"."""
    return operator.attrgetter(name)(owner)
