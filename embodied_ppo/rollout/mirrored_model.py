"""The mirror image of a robot's physical state, and how much left and right of its model differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mujoco
import numpy as np

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.robot_model import Array, RobotModel
from embodied_ppo.core.mirror import SignedPermutation, permutation

# Signs of the image of a position or velocity, of an angular velocity, and of a quaternion.
POINT, TURN, QUATERNION = (1, -1, 1), (-1, 1, -1), (1, -1, 1, -1)
DOF_FIELDS = ("damping", "armature", "frictionloss")


@dataclass
class StateMirror:
    """The mirror image of the physical state of a model.

    Raises EnvError, without ``env.id``, if a joint or actuator has none.
    """

    model: mujoco.MjModel
    robot: RobotModel = field(init=False)

    def __post_init__(self) -> None:
        model, self.robot = self.model, RobotModel(self.model)
        if self.robot.base is None:
            raise EnvError("its robot has no free base, and so no left and right")
        self.joint: dict[int, tuple[int, int]] = {}
        for p in self.robot.pairs:
            self.joint |= {p.left: (p.right, p.sign), p.right: (p.left, p.sign)}
        base = int(model.body_jntadr[self.robot.base])
        for j in range(model.njnt):
            if j != base and j not in self.joint:
                raise EnvError(f"joint {self.name('joint', j)} has no mirror image")
        qpos, qvel = ([(0, 1)] * n for n in (model.nq, model.nv))
        for k, sign in enumerate((*POINT, *QUATERNION)):
            qpos[self.robot.base_qpos + k] = self.robot.base_qpos + k, sign
        for k, sign in enumerate((*POINT, *TURN)):
            qvel[self.robot.base_dof + k] = self.robot.base_dof + k, sign
        for j, (other, sign) in self.joint.items():
            qpos[model.jnt_qposadr[j]] = int(model.jnt_qposadr[other]), sign
            qvel[model.jnt_dofadr[j]] = int(model.jnt_dofadr[other]), sign
        self.qpos, self.qvel = permutation(qpos), permutation(qvel)
        self.ctrl = self._actuators()
        states = [(0, 1)] * model.na
        for i, (other, sign) in enumerate(zip(self.ctrl.index, self.ctrl.sign, strict=True)):
            for k in range(model.actuator_actnum[i]):
                states[model.actuator_actadr[i] + k] = int(model.actuator_actadr[other]) + k, sign
        self.act = permutation(states)

    def name(self, kind: str, i: int) -> str:
        """Return the name of an element, or its number."""
        return getattr(self.model, kind)(i).name or str(i)

    def _actuators(self) -> SignedPermutation:
        """Pair actuators by the directions in which they move the joints, and by their kinds."""
        model, data = self.model, mujoco.MjData(self.model)
        mujoco.mj_forward(model, data)
        moment = np.zeros((model.nu, model.nv))
        mujoco.mju_sparse2dense(
            moment, data.actuator_moment, data.moment_rownnz, data.moment_rowadr, data.moment_colind
        )
        direction = moment / np.linalg.norm(moment, axis=1, keepdims=True).clip(1e-9)
        along = self.qvel.array(direction) @ direction.T
        kinds = np.stack([model.actuator_dyntype, model.actuator_gaintype, model.actuator_biastype])
        taken, pairs = set[int](), []
        for i in range(model.nu):
            # Several actuators of a joint differ in kind or gains.
            fits = (np.abs(along[i]) > 0.9) & (kinds == kinds[:, i : i + 1]).all(0)
            gains = np.abs(model.actuator_biasprm - model.actuator_biasprm[i])[:, :3].sum(1)
            gains += np.array([1e9 if k in taken else 0.0 for k in range(model.nu)])
            k = int(np.where(fits, gains, np.inf).argmin())
            if not fits[k] or k in taken:
                raise EnvError(f"actuator {self.name('actuator', i)} has no mirror image")
            taken.add(k)
            gain = model.actuator_gainprm[[i, k], 0]
            pairs.append((k, int(np.sign(along[i, k]) * (np.sign(gain[0] * gain[1]) or 1))))
        return permutation(pairs)

    def elements(self, name: str) -> list[int]:
        """Return the mirror image of each entry of a field of the model, such as body_mass."""
        model, kind = self.model, name.partition("_")[0]
        if kind in ("actuator", "dof"):
            return list((self.ctrl if kind == "actuator" else self.qvel).index)
        if kind not in ("body", "geom", "site"):
            return list(range(len(getattr(model, name))))
        # The image of an element of a link is the nearest one of the same type of the other link.
        body = np.arange(model.nbody) if kind == "body" else getattr(model, f"{kind}_bodyid")
        weld, data = model.body_weldid[body], mujoco.MjData(model)
        shape = model.geom_type if kind == "geom" else np.zeros(len(body))
        mujoco.mj_forward(model, data)
        frame = data.xmat[self.robot.base].reshape(3, 3)
        place = data.xipos if kind == "body" else getattr(data, f"{kind}_xpos")
        place = (place - data.xpos[self.robot.base]) @ frame
        images = list(range(len(body)))
        for i, link in enumerate(map(int, weld)):
            if link and model.body_jntnum[link] and int(model.body_jntadr[link]) in self.joint:
                link = int(model.jnt_bodyid[self.joint[int(model.body_jntadr[link])][0]])
            fits = (weld == link) & (shape == shape[i])
            if fits.any() and link:
                distance = np.linalg.norm(place - place[i] * POINT, axis=1)
                images[i] = int(np.where(fits, distance, np.inf).argmin())
        return images

    # --------------------------------------------------------------------------------- differences
    def fields(self) -> Iterator[tuple[float, str]]:
        """Yield relative differences of the numbers of paired joints, links and actuators.

        Each has a text that names them and both values.
        """
        model, robot = self.model, self.robot
        place = robot.data.xmat[robot.base].reshape(3, 3)[:, 1] @ (
            robot.data.subtree_com[robot.base] - robot.data.xpos[robot.base]
        )
        width = float(np.ptp(robot.data.xanchor[list(robot.joints), 1])) or 1.0
        yield abs(place) / width, f"centre of mass at y = {place:.2g} m"
        for p in robot.pairs:
            sides, label = [p.left, p.right], self.name("joint", p.right)
            limits = np.where(model.jnt_limited[sides, None], model.jnt_range[sides], np.inf)
            yield _differing_ranges(f"{label} range", p.sign, *limits)
            dofs, bodies = model.jnt_dofadr[sides], model.jnt_bodyid[sides]
            entries = [(x, getattr(model, f"dof_{x}")[dofs]) for x in DOF_FIELDS]
            entries += [("stiffness", model.jnt_stiffness[sides])]
            entries += [("mass of the link", model.body_mass[bodies])]
            inertia = np.sort(model.body_inertia[bodies], axis=1)
            entries += [("inertia of the link", inertia[:, k]) for k in range(3)]
            yield from _differences(label, entries)
        for i, (k, sign) in enumerate(zip(self.ctrl.index, self.ctrl.sign, strict=True)):
            pair, label = [k, i], f"actuator {self.name('actuator', i)}"
            if i <= k:
                continue
            entries = [("gear", np.linalg.norm(model.actuator_gear[pair], axis=1))]
            entries += [("gain", model.actuator_gainprm[pair, 0])]
            entries += [("bias", model.actuator_biasprm[pair, n]) for n in (1, 2)]
            yield from _differences(label, entries)
            for name in ("force", "ctrl"):
                limited = getattr(model, f"actuator_{name}limited")[pair, None]
                limits = np.where(limited, getattr(model, f"actuator_{name}range")[pair], np.inf)
                yield _differing_ranges(f"{label} {name}range", sign, *limits)

    def acceleration(self, states: Mapping[str, Array]) -> tuple[float, str]:
        """Return the median relative difference of accelerations without constraints, and a joint.

        The joint is the one that differs most.

        Args:
            states: qpos, qvel, ctrl and act, [K, ..] each.
        """
        model, data = copy.copy(self.model), mujoco.MjData(self.model)
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT)
        results = []
        for image in (False, True):
            accelerations = []
            for k in range(len(states["qpos"])):
                mujoco.mj_resetData(model, data)
                for name, x in states.items():
                    row = getattr(self, name).array(x[k]) if image else x[k]
                    getattr(data, name)[:] = row
                mujoco.mj_forward(model, data)
                accelerations.append(data.qacc.copy())
            results.append(np.stack(accelerations))
        expected, measured = self.qvel.array(results[0]), results[1]
        error = np.abs(measured - expected)
        ratio = np.linalg.norm(error, axis=1) / np.linalg.norm(expected, axis=1).clip(1e-9)
        joint = int(model.dof_jntid[int(np.median(error, axis=0).argmax())])
        return float(np.median(ratio)), f"joint {self.name('joint', joint)}"


def _differences(label: str, entries: Sequence[tuple[str, Array]]) -> Iterator[tuple[float, str]]:
    """Yield the relative difference of two numbers each, with a text."""
    for name, (left, right) in entries:
        error = abs(left - right) / max(abs(left), abs(right), 1e-9)
        yield float(error), f"{label} {name} {right:.4g}, not {left:.4g}"


def _differing_ranges(label: str, sign: int, left: Array, right: Array) -> tuple[float, str]:
    """Return how much a range [2] differs from the image of the left one, and a text."""
    image = left if sign > 0 or np.isinf(left).any() else -left[::-1]
    if np.isinf(image).any() or np.isinf(right).any():
        return float((image != right).any()), f"{label} of one side only"
    error = np.abs(image - right).max() / max(np.ptp(image), 1e-9)
    return float(error), f"{label} {_show(right)}, not {_show(image)}"


def _show(x: Array) -> str:
    return "{:.3g}..{:.3g}".format(*x)
