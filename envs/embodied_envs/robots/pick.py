"""PickTask: an arm with a gripper lifts a cube to a target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.robot_model import Array, RobotModel
from embodied_envs.robots.target import TargetTask
from embodied_envs.robots.terms import TermTask
from embodied_envs.tasks.task import State

# Body of the cube, and the sites at the tips of the two fingers.
CUBE, TIP = "cube", "robot_tip_"
# Time in which a gripper opens or closes.
SETTLE_S = 1.0
# Least change of the distance between the fingers of a gripper.
LEAST_OPENING_M = 0.01


class PickTerms(TermTask):
    """Terms and success of lifting a cube, for a task that can read the cube and its gripper.

    The command x, y, z is the target of the cube's centre, m. Success: it is within ``tolerance_m``
    of the target and slower than ``still_m_s``.
    """

    tolerance_m, still_m_s = 0.05, 0.2
    # Height of the cube's centre where it rests.
    rest_m: float
    # Height of the gripper below which its fingers touch the ground.
    low_m: float
    # Range of the cube's initial position; that of y is ``cube_y_m``.
    cube_x_m: tuple[float, float]
    cube_y_m: tuple[float, float]
    # Index of the cube's position in qpos.
    cube_qpos: int
    # Index of its velocity in qvel.
    cube_dof: int
    # Change of each target by an action of 1, [nu].
    scale: Tensor
    # Lowest targets, [nu]; ``high`` has the highest.
    low: Tensor
    high: Tensor

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store the range of the cube's initial position."""
        super().bind(model, device, dtype)
        bounds = torch.tensor([self.cube_x_m, self.cube_y_m], device=device, dtype=dtype)
        self.cube_low, self.cube_extent = bounds[:, 0], bounds[:, 1] - bounds[:, 0]

    def control(self, s: State, action: Tensor) -> Tensor:
        return (s["ctrl"] + self.scale * action).clamp(self.low, self.high)

    @abstractmethod
    def grip(self, s: State) -> Tensor:
        """Return the position between the tips of the fingers, m, [N, 3]."""

    def cube(self, s: State) -> Tensor:
        """Return the position of the cube, m, [N, 3]."""
        return s["qpos"][:, self.cube_qpos : self.cube_qpos + 3]

    def cube_velocity(self, s: State) -> Tensor:
        """Return its velocity, m/s, [N, 3]."""
        return s["qvel"][:, self.cube_dof : self.cube_dof + 3]

    def place_cube(self, qpos: Tensor, u: Tensor) -> None:
        """Set the cube's initial position in ``qpos`` [N, nq] from uniform numbers [N, 2]."""
        i = self.cube_qpos
        qpos[:, i : i + 2] = self.cube_low + u * self.cube_extent

    @abstractmethod
    def closing(self, s: State) -> Tensor:
        """Return how far the gripper is closed, [N]: 0 is open, 1 the width of the cube."""

    def alignment(self, s: State) -> Tensor | float:
        """Return a factor of the progress of reaching, [N] in [0, 1]."""
        return 1.0

    def command_errors(self, s: State) -> Tensor:
        return self.cube(s) - s["command"]

    def shared(self, s: State) -> Mapping[str, Tensor]:
        return {} if "reach" in s else self.stages(s)

    def stages(self, s: State) -> dict[str, Tensor]:
        """Return the stages of the task, [N] in [0, 1] each.

        reach   (1 - tanh(5 · distance gripper to cube)) · ``alignment``
        grasp   ``closing`` · nearness, from 0 at 3 cm to 1 at 1 cm
        lift    height of the cube above its rest, 1 at 10 cm
        carry   lift · (1 - tanh(3 · distance cube to target))
        """
        cube = self.cube(s)
        near_m = (cube - self.grip(s)).norm(dim=1)
        far_m = (s["command"] - cube).norm(dim=1)
        lift = ((cube[:, 2] - self.rest_m) / 0.1).clamp(0, 1)
        return {
            "reach": (1 - torch.tanh(5 * near_m)) * self.alignment(s),
            "grasp": self.closing(s).clamp(0, 1) * ((0.03 - near_m) / 0.02).clamp(0, 1),
            "lift": lift,
            "carry": lift * (1 - torch.tanh(3 * far_m)),
        }

    def reward_terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        """Return the terms and the stages."""
        stages = self.stages(s)
        return super().reward_terms(before, {**s, **stages}, action) | stages

    def progress(
        self,
        before: State,
        s: State,
        action: Tensor,
        *,
        reach: float = 1.0,
        grasp: float = 1.0,
        lift: float = 1.0,
        carry: float = 2.0,
    ) -> Tensor:
        """Change of the weighted mean of the stages in the step."""

        def mean(x: Mapping[str, Tensor]) -> Tensor:
            total = reach * x["reach"] + grasp * x["grasp"] + lift * x["lift"] + carry * x["carry"]
            return total / (reach + grasp + lift + carry)

        return mean(s) - mean(self.stages({**before, "command": s["command"]}))

    def ground_contact(self, before: State, s: State, action: Tensor) -> Tensor:
        """1 while the fingers touch the ground."""
        return self.grip(s)[:, 2] < self.low_m

    def success(self, s: State) -> Tensor:
        distance_m, velocity = self.command_errors(s).norm(dim=1), self.cube_velocity(s)
        return (distance_m < self.tolerance_m) & (velocity.norm(dim=1) < self.still_m_s)


class PickTask(PickTerms, TargetTask):
    """Lift a cube with any arm that has a gripper.

    Action: changes of the actuators' targets, a fifth of the scales of ``RobotTask``; of the
    gripper, which is open at the start, half its range. Observation: that of ``TargetTask``, then
    the vector from the gripper to the cube, the cube's x and z axes, the opening of the gripper, m,
    and the targets of the actuators minus home. The episode ends if the cube is ``far_m`` away.
    """

    tip = CUBE
    max_episode_steps, far_m = 150, 1.0
    before = ("qpos", "xpos", "site_xpos")

    def spec(self) -> mujoco.MjSpec:
        """Return the robot with sites on its fingers, and the cube in the middle of its place."""
        spec = super().spec()
        self.gripper = gripper = find_gripper(RobotModel(spec.compile(), self.preparation.key))
        bodies = {element.id: element for element in spec.bodies}
        for n, (body, point) in enumerate(zip(gripper.fingers, gripper.points, strict=True)):
            bodies[body].add_site(name=f"{TIP}{n}", pos=point, size=[0.003] * 3, group=5)
        half = gripper.cube_half_m
        place = [sum(self.cube_x_m) / 2, sum(self.cube_y_m) / 2, gripper.ground_m + half[2]]
        cube = spec.worldbody.add_body(name=CUBE, pos=place)
        cube.add_freejoint(name=CUBE)
        box = mujoco.mjtGeom.mjGEOM_BOX
        cube.add_geom(type=box, size=half, friction=[1, 0.03, 0.003], rgba=[0.9, 0.5, 0.1, 1])
        for key in spec.keys:
            key.qpos = [*key.qpos, *place, 1, 0, 0, 0]
            key.qvel = [*key.qvel, *[0] * 6] if len(key.qvel) else key.qvel
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        gripper, hand = self.gripper, self.gripper.actuators
        self.tips = torch.tensor([model.site(f"{TIP}{n}").id for n in range(2)], device=device)
        joint = model.joint(CUBE)
        self.cube_qpos, self.cube_dof = int(joint.qposadr[0]), int(joint.dofadr[0])
        self.rest_m = gripper.ground_m + gripper.cube_half_m[2]
        self.low_m = gripper.ground_m + 0.012
        # The fingers start open.
        self.scale = 0.2 * self.scale
        for i, control in hand.items():
            self.home_control[i] = control
            self.scale[i] = 0.5 * (self.high[i] - self.low[i])
        for i, x in gripper.qpos.items():
            self.home[i] = x
        self.reset_noise += 2

    def grip(self, s: State) -> Tensor:
        return s["site_xpos"][:, self.tips].mean(1)

    def opening(self, s: State) -> Tensor:
        """Return the distance between the fingers, m, [N]; 0 is closed."""
        tips = s["site_xpos"][:, self.tips]
        return (tips[:, 0] - tips[:, 1]).norm(dim=1) - self.gripper.closed_m

    def closing(self, s: State) -> Tensor:
        width = 2 * self.gripper.cube_half_m[0]
        return (self.gripper.opening_m - self.opening(s)) / (self.gripper.opening_m - width)

    def observe(self, s: State) -> Tensor:
        axes = cube_axes(s["qpos"][:, self.cube_qpos + 3 : self.cube_qpos + 7]).flatten(1)
        to_cube, targets = self.cube(s) - self.grip(s), s["ctrl"] - self.home_control
        return torch.cat([super().observe(s), to_cube, axes, self.opening(s)[:, None], targets], 1)

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        return [
            *super().observation_names(model),
            *((f"gripper to cube {axis}", "m") for axis in "xyz"),
            *((f"cube {edge} axis {axis}", None) for edge in "xz" for axis in "xyz"),
            ("opening", "m"),
            *((f"{a.name} target minus home", None) for a in self.robot.actuators),
        ]

    def terminated(self, s: State) -> Tensor:
        middle = self.cube_low + 0.5 * self.cube_extent
        cube = self.cube(s)
        fallen = cube[:, 2] < self.rest_m - 0.1
        return fallen | ((cube[:, :2] - middle).norm(dim=1) > self.far_m)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the start of ``TargetTask`` with open fingers, and the cube in its range."""
        start = super().reset(u[:, :-2])
        self.place_cube(start["qpos"], u[:, -2:])
        return start


# -------------------------------------------------------------------------------------- the gripper
@dataclass(frozen=True)
class Gripper:
    """Two fingers of a hand, and the ground below them.

    Attributes:
        fingers: Their bodies.
        points: The tips in the frames of these bodies, m.
        actuators: Actuator of the gripper -> control of the open gripper.
        qpos: Index in qpos -> position of the open gripper.
        opening_m: How far the tips move apart.
        closed_m: Distance of the tips of the closed gripper.
        ground_m: Height of what is fixed below the gripper at home.
        grip: Position between the tips at home, m.
    """

    fingers: tuple[int, int]
    points: tuple[Array, Array]
    actuators: Mapping[int, float]
    qpos: Mapping[int, float]
    opening_m: float
    closed_m: float
    ground_m: float
    grip: Array

    @property
    def cube_half_m(self) -> tuple[float, float, float]:
        """Half the edges of a cube for it: half as wide as it opens, at most 4 cm, and higher."""
        width = min(0.04, 0.5 * self.opening_m)
        return width / 2, width / 2, 0.75 * width


def find_gripper(robot: RobotModel) -> Gripper:
    """Return the gripper of an arm: the two longest fingers of the hand, the last that has several.

    Raises:
        EnvError: There is none, or nothing is below it.
    """
    model, weld = robot.model, robot.model.body_weldid
    above = {int(b): int(weld[model.body_parentid[b]]) for b in set(model.jnt_bodyid)}
    moved = [int(model.jnt_bodyid[j]) for j in robot.joints]

    def path(body: int) -> list[int]:
        return [body, *path(above[body])] if body in above else []

    leaves = [body for body in moved if body not in above.values()]
    hands = [body for body in moved if sum(body in path(leaf)[1:] for leaf in leaves) > 1]
    hand = max(hands, key=lambda body: len(path(body)), default=0)
    inside = [j for j in robot.joints if hand in path(int(model.jnt_bodyid[j]))[1:]]
    dofs = set(map(int, model.jnt_dofadr[inside]))
    actuators = [i for i in range(model.nu) if _dofs(robot, i) <= dofs]
    if robot.base is not None or not actuators:
        raise EnvError(
            "write another --template: pick needs an arm with a fixed base and a gripper"
        )
    corners = {x: _corners(robot, x) for x in leaves if hand in path(x)[1:]}
    center = robot.data.xpos[hand]
    one, two = sorted(corners, key=lambda x: -np.linalg.norm(corners[x] - center, axis=1).max())[:2]
    # The tip: 1 cm before the end of a finger, along the hand and between its sides.
    middle = {x: corners[x].mean(0) for x in (one, two)}
    across = middle[one] - middle[two]
    along = (middle[one] + middle[two]) / 2 - center
    along -= across * (across @ along) / max(across @ across, 1e-9)
    along /= np.linalg.norm(along)
    points = []
    for x in (one, two):
        tip = middle[x] + along * (((corners[x] - middle[x]) @ along).max() - 0.01)
        points.append((tip - robot.data.xpos[x]) @ robot.data.xmat[x].reshape(3, 3))
    ends = {control: _settle(robot, actuators, control) for control in (0, 1)}

    def tips(data: mujoco.MjData) -> Array:
        rows = zip((one, two), points, strict=True)
        return np.array([data.xpos[x] + data.xmat[x].reshape(3, 3) @ p for x, p in rows])

    distance = {k: float(np.linalg.norm(np.subtract(*tips(data)))) for k, data in ends.items()}
    opened = max(distance, key=distance.__getitem__)
    opening = distance[opened] - distance[1 - opened]
    if opening < LEAST_OPENING_M:
        raise EnvError("write another --template: pick needs a gripper that opens by 1 cm or more")
    grip = tips(robot.data).mean(0)
    if (ground := robot.surface_below(grip)) is None:
        raise EnvError("write --floor: pick needs something fixed below the gripper")
    return Gripper(
        fingers=(one, two),
        points=(points[0], points[1]),
        actuators={i: float(ends[opened].ctrl[i]) for i in actuators},
        qpos={int(a): float(ends[opened].qpos[a]) for a in model.jnt_qposadr[inside]},
        opening_m=opening,
        closed_m=distance[1 - opened],
        ground_m=ground,
        grip=grip,
    )


def _dofs(robot: RobotModel, actuator: int) -> set[int]:
    """Return the degrees of freedom that an actuator moves."""
    data = robot.data
    first, count = int(data.moment_rowadr[actuator]), int(data.moment_rownnz[actuator])
    return set(map(int, data.moment_colind[first : first + count]))


def _corners(robot: RobotModel, body: int) -> Array:
    """Return the corners of the boxes around the geoms of a link at home, m, [corners, 3]."""
    model, data, corners = robot.model, robot.data, []
    for geom in np.flatnonzero(model.body_weldid[model.geom_bodyid] == body):
        center, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
        signs = np.stack(np.meshgrid(*[(-1, 1)] * 3), -1).reshape(-1, 3)
        corners.append(
            (center + signs * half) @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom]
        )
    return np.concatenate(corners) if corners else data.xpos[[body]]


def _settle(robot: RobotModel, actuators: list[int], end: int) -> mujoco.MjData:
    """Return the robot at home after SETTLE_S with the gripper at an end of its control range."""
    model, data = robot.model, mujoco.MjData(robot.model)
    data.qpos[:], data.act[:] = robot.home, robot.home_act
    data.ctrl[:] = [a.home for a in robot.actuators]
    for i in actuators:
        data.ctrl[i] = (robot.actuators[i].low, robot.actuators[i].high)[end]
    mujoco.mj_step(model, data, round(SETTLE_S / model.opt.timestep))
    return data


def cube_axes(quat: Tensor) -> Tensor:
    """Return the x and z axes [N, 2, 3] of a unit quaternion (w, x, y, z) [N, 4]."""
    w, x, y, z = quat.unbind(1)
    x_axis = torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], 1)
    z_axis = torch.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], 1)
    return torch.stack([x_axis, z_axis], 1)
