"""Domain randomisation: every world's model a little different, drawn anew with each episode from
its seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_ppo.core.errors import EnvError, choose


@dataclass(frozen=True)
class Range:
    """What one range changes: MjModel fields, and how its number x enters them.

    scale: multiplied by x in [low, high]    add: x is added    each: one x per element (body, geom,
    ..), else one columns: so many of the field's last dimension, from the first on; None for all of
    them
    """

    fields: tuple[str, ...]
    how: Literal["scale", "add"]
    each: bool
    columns: int | None = None


RANGES: dict[str, Range] = {
    "mass": Range(("body_mass", "body_inertia"), "scale", each=True),
    "friction": Range(("geom_friction",), "scale", each=True, columns=1),
    "damping": Range(("dof_damping",), "scale", each=True),
    "gains": Range(("actuator_gainprm", "actuator_biasprm"), "scale", each=True),
    "gravity": Range(("opt.gravity",), "scale", each=False),
    "camera_position": Range(("cam_pos",), "add", each=True),
    "camera_angle": Range(("cam_quat",), "add", each=True),
    "light": Range(("light_diffuse",), "scale", each=True),
    "colour": Range(("geom_rgba", "mat_rgba"), "add", each=True, columns=3),
}
"""By name of the option. mass scales body masses and inertias alike (the density), friction the
sliding coefficient of geoms, damping that of joints, gains the strength of actuators (of a position
servo: stiffness and damping alike), gravity its strength; camera_position moves each camera along
x, y and z (m), camera_angle turns it about its own x, y and z (rad), colour moves red, green and
blue (0 to 1). The numbers are uniform between two bounds.
"""


class Randomization:
    """Which fields of a model differ between worlds, and how they are drawn."""

    def __init__(self, model: mujoco.MjModel, ranges: Mapping[str, tuple[float, float]]) -> None:
        """``ranges``: names of RANGES -> (low, high).

        Raises EnvError for an unknown name or senseless bounds.
        """
        self.ranges = dict(ranges)
        for name, bounds in ranges.items():
            if name not in RANGES:
                raise EnvError(
                    f"env.ranges: {name!r} is unknown; {choose(name, list(RANGES), 'there are ')}"
                )
            scale = RANGES[name].how == "scale"
            if not _fine(bounds) or (scale and bounds[0] < 0):
                kind = "factors 0 <= low <= high" if scale else "low <= high"
                shown = list(bounds) if isinstance(bounds, (list, tuple)) else bounds
                raise EnvError(
                    f"env.ranges.{name}={shown}: it takes two finite numbers [low, high], {kind}"
                )
        self.base: dict[str, Tensor] = {}
        for name in dict.fromkeys(f for r in ranges for f in RANGES[r].fields):
            x = torch.from_numpy(np.array(field(model, name), dtype=np.float64))
            if x.numel():
                self.base[name] = x
        self.fields = tuple(self.base)
        """MjModel fields that differ between worlds."""
        self._sizes = {name: self._size(name) for name in ranges}
        self.size = sum(self._sizes.values())
        """Random numbers for one world."""

    def _size(self, name: str) -> int:
        r = RANGES[name]
        if not r.each:
            return 1
        present = [len(self.base[f]) for f in r.fields if f in self.base]
        if r.how == "scale":  # one factor for all fields of an element
            return present[0] if present else 0
        return 3 * sum(present)  # x, y, z; the angles about them; red, green, blue

    def sample(self, u: Tensor) -> dict[str, Tensor]:
        """Uniform numbers [N, size] in [0, 1) -> field -> values [N, ..]."""
        out = {f: x.to(u).expand(len(u), *x.shape).clone() for f, x in self.base.items()}
        at = 0
        for name, (low, high) in self.ranges.items():
            r, n = RANGES[name], self._sizes[name]
            x = low + (high - low) * u[:, at : at + n]  # [N, n]
            at += n
            taken = 0
            for value in (out[f] for f in r.fields if f in out):
                width = r.columns or value.shape[-1]
                if r.how == "scale":
                    factor = x.view(len(u), n, *[1] * (value.ndim - 2))
                    if r.columns is None:
                        value *= factor
                    else:
                        value[..., :width] *= factor
                elif name == "camera_angle":
                    value.copy_(_turned(value, x.view(len(u), -1, 3)))
                else:
                    count = value.shape[1] * width
                    value[..., :width] += x[:, taken : taken + count].view(len(u), -1, width)
                    taken += count
                if name == "colour":
                    value.clamp_(0.0, 1.0)
        return out


def _fine(bounds: Any) -> bool:
    """Whether they are two finite numbers in order."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return False
    return (
        all(isinstance(x, (int, float)) and math.isfinite(x) for x in bounds)
        and bounds[0] <= bounds[1]
    )


def _turned(quat: Tensor, angles: Tensor) -> Tensor:
    """Quaternions [N, K, 4] (w, x, y, z) turned by rotation vectors [N, K, 3] in their own frame,
    rad.
    """
    angle = angles.norm(dim=-1, keepdim=True)
    axis = angles / angle.clamp_min(1e-12)
    w2, v2 = torch.cos(angle / 2), axis * torch.sin(angle / 2)
    w1, v1 = quat[..., :1], quat[..., 1:]
    w = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    v = w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)
    return torch.cat([w, v], -1)


def field(model: mujoco.MjModel, name: str) -> np.ndarray:
    """``model.body_mass`` for "body_mass", ``model.opt.gravity`` for "opt.gravity"; a view."""
    owner = model
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner  # pyright: ignore[reportReturnType]
