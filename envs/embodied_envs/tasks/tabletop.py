"""Tabletop: language-conditioned manipulation of four blocks and four zones by a gantry gripper."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_envs.base.errors import EnvError, check_choice
from embodied_envs.tasks.tabletop_language import COLOURS, Combination, Split, episodes
from embodied_envs.tasks.task import State, Task
from embodied_envs.types import Obs

ObsKind: TypeAlias = Literal["state", "language", "goal"]
OBS: tuple[str, ...] = get_args(ObsKind)
RewardKind: TypeAlias = Literal["shaped", "success"]
REWARDS: tuple[str, ...] = get_args(RewardKind)

# --------------------------------------------------------------------- sizes (m, world coordinates)
# Half the edge of a block in tabletop.xml: the height of its centre on the table.
HALF_EDGE = 0.022
# Distance of each finger from the middle of the open gripper, the limit in tabletop.xml.
FINGER_OPEN = 0.037
# Bounds of the tool's target (the tool is the point between the fingertips); x points away from the
# camera, y to its left, z up.
LOW, HIGH = (-0.19, -0.24, 0.018), (0.19, 0.24, 0.17)
# Change of the tool's and of each finger's target position per step for action 1 (m).
STEP, FINGER_STEP = 0.03, 0.014
# Largest distance along each axis from the tool to its target.
MAX_LEAD = 0.06

# Grid of cells in which blocks and zones start; PITCH is the distance of two cells.
ROWS, COLUMNS, PITCH = 3, 4, 0.11
# Largest offsets from the middle of a cell (m), and the range of a block's half angle (rad).
BLOCK_JITTER, ZONE_JITTER, YAW_RANGE = 0.012, 0.004, 0.1
# Number of layouts in each table of ``_layouts``.
LAYOUTS = 4096
# Distance between the centres of two blocks that start, or are placed, side by side.
BLOCK_DISTANCE = 0.05
# Distances from the block's centre to the tool behind it that count as ready to push.
PUSH_RANGE = (0.03, 0.055)
# Displacement that family slide demands; SLIDE_DISTANCE - 0.02 succeeds.
SLIDE_DISTANCE = 0.1

# DIRECTIONS as (x, y).
DIRECTION_VECTORS = ((0.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-1.0, 0.0))


# ----------------------------------------------------------------------------------------- families
# Features that success depends on.
FEATURES = (
    "a_goal",  # distance (m) from A to its goal; for reach and touch, from the tool
    "a_flat",  # its horizontal part
    "a_drop",  # height of the goal minus height of A
    "b_flat",
    "b_drop",
    "between",  # horizontal distance from A to B; for clear, to the middle of the zone
    "push",  # component of the displacement to the goal along the direction in the sentence
    # Positive if both fingers are open by 6 mm more than a block, or the tool is more than 6 cm
    # away from A and B.
    "free",
    "speed",  # larger speed of A and B (m/s)
)

INF = float("inf")
# Bounds of ``a_drop`` and ``b_drop`` (m) for a block that lies on the table.
LEVEL = (-0.008, 0.008)
# Bounds that require released blocks at rest.
RELEASED = {"free": (0.0, INF), "speed": (-1.0, 0.05)}


@dataclass(frozen=True)
class Rule:
    """Success, goal and start of a family.

    Attributes:
        bounds: Feature -> open interval; success means that all features are inside at once.
        goal: Goal of A: its zone, on B, or beside B. "cell": the cell of role A in the layout: A's
            initial cell, or an empty one if A starts elsewhere (``start``). "a": A is the goal of
            the tool.
        height: Height (m) of the goal; for goals on or beside B and "a" relative to that block.
        start: A starts in its own cell, in its zone, on B or touching B.
        method: "tool": the tool moves to the goal; "push" and "grasp": it moves A this way.
    """

    bounds: dict[str, tuple[float, float]]
    goal: Literal["zone", "cell", "on b", "beside b", "a"] = "zone"
    height: float = HALF_EDGE
    start: Literal["cell", "zone", "on b", "beside b"] = "cell"
    method: Literal["tool", "push", "grasp"] = "grasp"


_A_IN_ZONE = {"a_flat": (-INF, 0.04), "a_drop": LEVEL}
_BOTH_IN_ZONE = _A_IN_ZONE | {"b_flat": (-INF, 0.04), "b_drop": LEVEL} | RELEASED
_BOTH_DOWN = {"a_drop": LEVEL, "b_drop": LEVEL} | RELEASED

RULES: dict[str, Rule] = {
    "reach": Rule({"a_goal": (-INF, 0.04)}, goal="a", height=0.0, method="tool"),
    "touch": Rule({"a_goal": (-INF, 0.03)}, height=LOW[2], method="tool"),
    "push": Rule(_A_IN_ZONE, method="push"),
    "slide": Rule({"push": (-INF, 0.02), "a_drop": LEVEL}, goal="cell", method="push"),
    "lift": Rule({"a_drop": (-INF, 0.02)}, goal="cell", height=0.11),
    "carry": Rule({"a_drop": (-INF, 0.02), "a_flat": (-INF, 0.04)}, height=0.11),
    "put": Rule(_A_IN_ZONE | RELEASED),
    "clear": Rule({"between": (0.08, INF), "a_drop": LEVEL} | RELEASED, goal="cell", start="zone"),
    "gather": Rule(_BOTH_IN_ZONE),
    "sort": Rule(_BOTH_IN_ZONE),
    "stack": Rule(
        _BOTH_DOWN | {"a_flat": (-INF, 0.02), "a_drop": (-0.01, 0.01)},
        goal="on b",
        height=2 * HALF_EDGE,
    ),
    "unstack": Rule(_BOTH_DOWN, goal="cell", start="on b"),
    "beside": Rule(_BOTH_DOWN | {"between": (-INF, 0.06)}, goal="beside b", height=0.0),
    "separate": Rule(_BOTH_DOWN | {"between": (0.1, INF)}, goal="cell", start="beside b"),
}
# Weights in ``Tabletop.reward`` of: tool near the block, block held, block near its goal.
WEIGHTS = {"tool": (0.0, 0.0, 1.0), "push": (0.3, 0.0, 0.7), "grasp": (0.2, 0.2, 0.6)}


class Tabletop(Task):
    """Language-conditioned manipulation. Each world has its own sentence; all share the model.

    Action [N, 4]: change of the target positions, scaled to [-1, 1]. The tool's target moves by up
    to STEP along x, y and z; the fingers open (> 0) or close (< 0) by up to FINGER_STEP each. The
    targets are the state's "ctrl".

    Variables: kind, instruction, combination int64 [N] (indices of ``names``, ``instructions``,
    ``combinations``): kind is the index of a family in ``names``. spot [N, 5, 3]: the
    displacement_offset of ``displacements``; checkpoints store it under this name. A and B are the
    blocks that the sentence names; with one block B is A.
    """

    id = "Tabletop"
    decimation = 3
    max_episode_steps = 100
    stage = "none"  # the functions read no derived field
    fields = ("mocap_pos",)
    privileged_fields = ("geom_friction", "body_mass", "actuator_gainprm", "qfrc_constraint")
    before = ("qpos",)
    reset_noise = 28
    ranges: Mapping[str, tuple[float, float]] = {
        "mass": (0.7, 1.4),
        "friction": (0.8, 1.25),
        "gains": (0.9, 1.1),
        "camera_position": (-0.02, 0.02),
        "camera_angle": (-0.03, 0.03),
        "light": (0.6, 1.4),
        "colour": (-0.06, 0.06),
    }

    def __init__(
        self,
        families: Sequence[str] | None = None,
        split: Split = "train",
        obs: ObsKind = "state",
        reward: RewardKind = "shaped",
        unseen_colour: str | None = None,
        distractors: bool = False,
        jitter: float = 1.0,
    ) -> None:
        """Select the episodes.

        Args:
            families: Names of FAMILIES; one that is written k times has k times as many episodes.
                None: all, equally often.
            split: "train", "unseen_combination", "unseen_wording" or "unseen_colour"; see
                ``tabletop_language.episodes``.
            obs: "state": the full state as one vector. "language": the gripper's state only, for a
                policy that has the camera "front" and the sentence. "goal": the same, with one-hot
                encodings instead of the sentence, for a policy that reads no instructions.
            reward: "shaped": see ``reward``. "success": 1 in the step that ends with success, else
                0.
            unseen_colour: A colour that only the sentences of split "unseen_colour" name; None:
                training names all colours.
            distractors: Whether other objects lie beside the blocks and zones.
            jitter: Factor 0 to 2 of BLOCK_JITTER and ZONE_JITTER.

        Raises:
            EnvError: An argument is unknown.
        """
        check_choice("env.id=Tabletop: obs", obs, OBS)
        check_choice("env.id=Tabletop: reward", reward, REWARDS)
        if not 0 <= jitter <= 2:
            raise EnvError(f"env.id=Tabletop: jitter={jitter} must be from 0 to 2")
        self.distractors, self.jitter = distractors, jitter
        self.sparse = reward == "success"
        chosen = episodes(families, split, unseen_colour)
        self.obs: str = obs
        self.combinations: tuple[Combination, ...] = tuple(chosen)
        self.names = tuple(dict.fromkeys(c.family for c in chosen))
        self._shares = [self.names.index(name) for name in families or self.names]
        self.instructions = tuple(itertools.chain.from_iterable(chosen.values()))
        self._wordings = len(next(iter(chosen.values())))

    # ------------------------------------------------------------------------------------ the model
    def spec(self) -> mujoco.MjSpec:
        """Return a new model of the table, the gripper, four blocks and four zones."""
        spec = mujoco.MjSpec.from_file(str(Path(__file__).with_name("tabletop.xml")))
        for geom in list(spec.geoms):
            if geom.classname.name == "distractor" and not self.distractors:
                spec.delete(geom)
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Create the tables that the functions index by kind and by combination."""

        def real(x: Any) -> Tensor:
            return torch.tensor(np.array(x), dtype=dtype, device=device)

        integer = functools.partial(torch.tensor, dtype=torch.int64, device=device)
        cs, names = self.combinations, self.names
        kinds = [names.index(c.family) for c in cs]
        # One row per kind of episode.
        self._kinds = integer(self._shares)
        self._first = integer([kinds.index(k) for k in range(len(names))])
        self._count = integer([kinds.count(k) for k in range(len(names))])
        bounds = [[RULES[name].bounds.get(f, (-INF, INF)) for f in FEATURES] for name in names]
        self._lower, self._upper = real(bounds).unbind(2)
        # One row per combination.
        rules = [RULES[c.family] for c in cs]
        pairs, tables, *arrays = zip(*map(_combination_arrays, cs), strict=True)
        self._table = integer(tables)
        self._place_weights, self._offset, self._height, self._point_weights = map(real, arrays)
        # qpos: gripper 0:5, then [x, y, z, quaternion] of each block; qvel likewise with 6 each.
        poses = [[range(5 + 7 * i, 12 + 7 * i) for i in pair] for pair in pairs]
        self._xyz = integer([[0, 1, 2] + [i for pose in pair for i in pose[:3]] for pair in poses])
        self._quaternions = integer([[i for pose in pair for i in pose[3:]] for pair in poses])
        self._velocities = integer([[5 + 6 * x + i for x in p for i in range(3)] for p in pairs])
        self._direction = real([_direction_vector(c) for c in cs])
        self._weight = real([WEIGHTS[rule.method] for rule in rules])
        has_b = [[1.0 if "b_flat" in rule.bounds else 0.0] for rule in rules]
        self._goal_weights = real([1.0, 0.0]) + real(has_b) * real([-0.5, 0.5])
        self._pushed = torch.tensor([[rule.method == "push"] for rule in rules], device=device)
        self._one_hot = real([[c.family == name for name in RULES] + _one_hot(c) for c in cs])
        # The same for all.
        self._layouts = integer(_layouts())
        cells = itertools.product(range(ROWS), range(COLUMNS))
        self._cells = real([((row - 1) * PITCH, (column - 1.5) * PITCH) for row, column in cells])
        bodies = [model.body(f"{colour} block") for colour in COLOURS]
        self._block_bodies = [int(body.id) for body in bodies]
        self._block_geoms = [int(body.geomadr[0]) for body in bodies]
        self._table_geom = model.geom("table").id
        self._jitter = self.jitter * real([[BLOCK_JITTER]] * 4 + [[ZONE_JITTER]] * 4)
        self._low, self._high = real(LOW), real(HIGH)
        # Initial pose of the gripper: x, y, z, opening of a finger.
        self._gripper_mean = real([0.0, 0.0, 0.13, 0.018])
        self._gripper_range = real([0.05, 0.05, 0.02, 0.018])

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """Return the bounds -1 and 1 of each of the four action dimensions."""
        return [-1.0] * 4, [1.0] * 4

    # -------------------------------------------------------------------------------- the functions
    def control(self, s: State, action: Tensor) -> Tensor:
        """Return the new target positions [N, 5] of tool and fingers (m).

        The tool's target stays within LOW and HIGH and within MAX_LEAD of the tool.

        Args:
            s: State.
            action: [N, 4], see the class.
        """
        tool, ctrl = s["qpos"][:, :3], s["ctrl"]
        target = ctrl[:, :3] + STEP * action[:, :3]
        low, high = (tool - MAX_LEAD).maximum(self._low), (tool + MAX_LEAD).minimum(self._high)
        target = torch.clamp(target, low, high)
        finger = (ctrl[:, 3:4] + FINGER_STEP * action[:, 3:]).clamp(0.0, FINGER_OPEN)
        return torch.cat((target, finger, finger), dim=1)

    def displacements(
        self, qpos: Tensor, combination: Tensor, displacement_offset: Tensor
    ) -> Tensor:
        """Return five vectors per world, [N, 5, 3] (m).

        0  from A to its goal; for reach and touch from the tool to its goal
        1  from B to its goal, or to where it started
        2  from A to B; for clear from A to the zone
        3  from the tool to A
        4  from the tool to B

        A vector that the family does not have is 0. Each is ``displacement_offset`` [N, 5, 3] plus
        a linear combination of the points tool, A and B in ``qpos`` [N, nq].
        """
        points = qpos.gather(1, self._xyz[combination]).view(-1, 3, 3)
        return torch.baddbmm(displacement_offset, self._point_weights[combination], points)

    def observe(self, s: State) -> Obs:
        """Return the observation.

        obs=language: "state" [N, 12] (tool, fingers, targets of tool and fingers, velocity of the
        tool) and "instruction" int64 [N].

        obs=goal: the same "state" and "goal" [N, 30], one-hot encodings of family, A, B, zone and
        direction.

        obs=state: [N, 91], the same 12 numbers; ``displacements``; velocities and quaternions of A
        and B; vectors from the tool to all blocks, and horizontal ones to all zones; one-hot
        encodings of family, A, B, zone and direction.
        """
        qpos, qvel, combination = s["qpos"], s["qvel"], s["combination"]
        tool = qpos[:, None, :3]
        gripper = (qpos[:, :5], s["ctrl"][:, :4], qvel[:, :3])
        if self.obs == "language":
            return {"state": torch.cat(gripper, dim=1), "instruction": s["instruction"].clone()}
        if self.obs == "goal":
            return {"state": torch.cat(gripper, dim=1), "goal": self._one_hot[combination]}
        displacements = self.displacements(qpos, combination, s["spot"]).flatten(1)
        velocities = qvel.gather(1, self._velocities[combination])
        quaternions = qpos.gather(1, self._quaternions[combination])
        blocks = (qpos[:, 5:].unflatten(1, (4, 7))[:, :, :3] - tool).flatten(1)
        zones = (s["mocap_pos"][:, :, :2] - tool[:, :, :2]).flatten(1)
        objects = (displacements, velocities, quaternions, blocks, zones)
        return torch.cat((*gripper, *objects, self._one_hot[combination]), dim=1)

    def privileged(self, s: State) -> Tensor:
        """Return what neither the camera nor the gripper measures, [N, 149].

        0:15     ``displacements``, m
        15:67    poses (m, quaternions) and velocities (m/s, rad/s) of the blocks
        67:75    positions of the zones, m
        75:105   one-hot encodings of family, A, B, zone and direction
        105:107  positions of the fingers, m
        107:111  masses of the blocks, kg
        111:115  sliding friction between each block and the table
        115:120  stiffness of the actuators, N/m
        120:149  forces of contacts and joint limits on gripper and blocks, N and N m
        """
        qpos, combination = s["qpos"], s["combination"]
        friction = s["geom_friction"][:, :, 0]
        return torch.cat(
            (
                self.displacements(qpos, combination, s["spot"]).flatten(1),
                qpos[:, 5:],
                s["qvel"][:, 5:],
                s["mocap_pos"][:, :, :2].flatten(1),
                self._one_hot[combination],
                qpos[:, 3:5],
                s["body_mass"][:, self._block_bodies],
                # MuJoCo takes the larger friction of the two geoms of a contact.
                friction[:, self._block_geoms].maximum(friction[:, [self._table_geom]]),
                s["actuator_gainprm"][:, :, 0],
                s["qfrc_constraint"],
            ),
            dim=1,
        )

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        """Return phi(s') - phi(s) + [success], in [-1, 2]; a state that does not change gives 0.

        phi = sum over A and B of g * (w1 p(tool, block) + w2 [held] + w3 p(block, goal)) is in
        [0, 1], with the proximity p(x, y) = 0.1 / (0.1 + |x - y|) in metres, w the family's
        WEIGHTS, and the goal weights g = (1, 0), or (1/2, 1/2) if A and B have a goal. A block
        within 3.5 cm of its goal counts as held, with proximity 1 to the tool; B counts for w1 and
        w2 once A is at its goal. To push, the proximity of the tool is that to the nearest point of
        PUSH_RANGE behind the block as seen from the goal. For reach and touch, phi = p(tool, goal).
        With the argument reward="success", phi is 0.
        """
        if self.sparse:
            return self.success(s).to(s["qpos"].dtype)
        combination, offset = s["combination"], s["spot"]
        qpos = torch.cat((before["qpos"], s["qpos"]))
        old, new = self._potential(qpos, combination.repeat(2), offset.repeat(2, 1, 1)).chunk(2)
        return new - old + self.success(s)

    def _potential(self, qpos: Tensor, combination: Tensor, displacement_offset: Tensor) -> Tensor:
        """Return phi [N] of ``reward``."""
        displacements = self.displacements(qpos, combination, displacement_offset)
        to_goal, to_block = displacements[:, :2], displacements[:, 3:]
        distance = _length(to_goal)
        at_goal = distance < 0.035
        # Squared distance of the tool from the block; to push, from PUSH_RANGE on the line behind.
        squared = to_block.square().sum(2)
        behind = (to_block * to_goal)[..., :2].sum(2) / _length(to_goal[..., :2]).clamp_min(1e-6)
        gap = behind - behind.clamp(*PUSH_RANGE)
        squared_push = squared - behind.square() + gap.square()
        squared = torch.where(self._pushed[combination], squared_push, squared)
        proximity = _proximity(squared.relu().sqrt())
        closed = (qpos[:, 3:5] - HALF_EDGE).abs().amax(1, keepdim=True) < 0.006
        held = closed & (to_block.abs().amax(2) < 0.02)
        w1, w2, w3 = self._weight[combination][:, :, None].unbind(1)
        handled = torch.where(at_goal, w1 + w2, w1 * proximity + w2 * held)
        handled = torch.cat((handled[:, :1], handled[:, 1:] * at_goal[:, :1]), dim=1)
        return ((handled + w3 * _proximity(distance)) * self._goal_weights[combination]).sum(1)

    def terminated(self, s: State) -> Tensor:
        """Return bool [N]; an episode ends with success."""
        return self.success(s)

    def success(self, s: State) -> Tensor:
        """Return whether all features lie within the bounds of the family's rule."""
        qpos, combination, kind = s["qpos"], s["combination"], s["kind"]
        displacements = self.displacements(qpos, combination, s["spot"])
        squares = displacements.square()
        flat = squares[..., :2].sum(2)
        distance = (flat + squares[..., 2]).sqrt()
        flat, drop = flat.sqrt(), displacements[..., 2]
        push = (displacements[:, 0, :2] * self._direction[combination]).sum(1)
        opening = qpos[:, 3:5].amin(1) - (HALF_EDGE + 0.006)
        free = opening.maximum(distance[:, 3:].amin(1) - 0.06)
        speed = _length(s["qvel"].gather(1, self._velocities[combination]).view(-1, 2, 3)).amax(1)
        # In the order of FEATURES.
        goals = (distance[:, 0], flat[:, 0], drop[:, 0], flat[:, 1], drop[:, 1])
        features = torch.stack((*goals, flat[:, 2], push, free, speed), dim=1)
        return ((features > self._lower[kind]) & (features < self._upper[kind])).all(1)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Draw kind, combination, wording, layout, jitter, yaw and the gripper's pose."""
        kind = self._kinds[_pick(u[:, 0], len(self._kinds))]
        combination = self._first[kind] + _pick(u[:, 1], self._count[kind])
        instruction = combination * self._wordings + _pick(u[:, 2], self._wordings)
        layout = self._layouts[self._table[combination], _pick(u[:, 3], LAYOUTS)]
        jitter = self._jitter * (2 * u[:, 4:20].unflatten(1, (8, 2)) - 1)
        places = self._cells[layout] + jitter  # [N, 8, 2] by role
        xy = torch.baddbmm(self._offset[combination], self._place_weights[combination], places)
        points = torch.cat((xy, self._height[combination]), dim=2)  # [N, 13, 3]
        blocks, zones, displacement_offset = points.split((4, 4, 5), dim=1)
        half_yaw = YAW_RANGE * (u[:, 20:24, None] - 0.5)
        zero = torch.zeros_like(half_yaw)
        blocks = torch.cat((blocks, torch.cos(half_yaw), zero, zero, torch.sin(half_yaw)), dim=2)
        gripper = self._gripper_mean + self._gripper_range * (2 * u[:, 24:] - 1)
        gripper = torch.cat((gripper, gripper[:, 3:]), dim=1)
        return {
            "qpos": torch.cat((gripper, blocks.flatten(1)), dim=1),
            "ctrl": gripper,
            "mocap_pos": zones,
            "kind": kind,
            "instruction": instruction,
            "combination": combination,
            "spot": displacement_offset,
        }


# ----------------------------------------------------------------------------------------- episodes
# Roles of the places of a layout: 0 to 3 the blocks A, B and two others; 4 to 7 the zones of A, B
# and two others.
BLOCK_A, BLOCK_B, ZONE_A, ZONE_B = 0, 1, 4, 5


def _combination_arrays(c: Combination) -> tuple[Any, ...]:
    """Return the start of a combination's episodes and the goals of A and B as arrays.

    An episode has 13 points: the four blocks by colour, the four zones by colour and the five rows
    of the variable "spot". Their x and y are place_weights [13, 8] times the places [8, 2] of a
    layout plus offset [13, 2]; their z is height [13, 1]; in metres.

    Returns:
        The colours of A and B, the index of the table of layouts, place_weights, offset, height,
        and the factors [5, 3] of tool, A and B in ``Tabletop.displacements``.
    """
    rule, has_b = RULES[c.family], c.b >= 0
    a = max(c.a, 0)  # touch names no block
    a, b = blocks = (a, c.b if has_b else a)
    zones = (c.a, c.b) if c.family == "sort" else (max(c.z, 0), max(c.z, 0))
    weights = np.zeros((5, 3))
    weights[3], weights[4] = (-1, 1, 0), (-1, 0, 1)
    place_weights, offset, height = np.zeros((13, 8)), np.zeros((13, 2)), np.zeros((13, 1))

    def place(row: int, role: int | None, z: float, x: float = 0.0, y: float = 0.0) -> None:
        place_weights[row] = np.arange(8) == role
        offset[row], height[row] = (x, y), z

    # Initial positions of blocks and zones.
    for colour in range(4):
        place(colour, _roles(*blocks)[colour], HALF_EDGE)
        place(4 + colour, 4 + _roles(*zones)[colour], 0.0)
    match rule.start:
        case "zone":
            place(a, ZONE_A, HALF_EDGE)
        case "on b":
            place(a, BLOCK_B, 3 * HALF_EDGE)
        case "beside b":
            place(a, BLOCK_B, HALF_EDGE, x=BLOCK_DISTANCE / 2)
            place(b, BLOCK_B, HALF_EDGE, x=-BLOCK_DISTANCE / 2)
    # Row 0 of the displacements: the goal of A or of the tool.
    match rule.goal:
        case "zone":
            place(8, ZONE_A, rule.height)
        case "cell":
            dx, dy = _direction_vector(c)
            place(8, BLOCK_A, rule.height, SLIDE_DISTANCE * dx, SLIDE_DISTANCE * dy)
        case "beside b":
            place(8, None, rule.height, x=-BLOCK_DISTANCE)
        case "on b" | "a":
            place(8, None, rule.height)
    tool, to_a, to_b = rule.method == "tool", rule.goal == "a", rule.goal in ("on b", "beside b")
    weights[0] = (-tool, to_a - (not tool), to_b)
    # Rows 1 and 2: the goal of B, and the distance of A from B or from the zone.
    if has_b:
        place(9, {"sort": ZONE_B, "gather": ZONE_A}.get(c.family, BLOCK_B), HALF_EDGE)
        weights[1], weights[2] = (0, 0, -1), (0, -1, 1)
    if rule.start == "zone":
        place(10, ZONE_A, HALF_EDGE)
        weights[2] = (0, -1, 0)
    table = {"push": 5, "beside": 6, "separate": 7}.get(c.family, c.d + 1)
    return blocks, table, place_weights, offset, height, weights


def _roles(first: int, second: int) -> tuple[int, ...]:
    """Return each colour's role: 0 for ``first``, 1 for another ``second``, then the others."""
    order = [*dict.fromkeys((first, second, *range(4)))]
    return tuple(order.index(colour) for colour in range(4))


@functools.cache
def _layouts() -> NDArray[np.int64]:
    """Return tables of layouts [8, LAYOUTS, 8]: the cell of each role.

    Table 0 is unrestricted. In tables 1 to 4, one for each direction, the neighbour cell of A in
    that direction is on the table and free of blocks. In 5, no block obstructs a push of A to its
    zone, neither straight nor along x and then y. In 6, the neighbour cell of B on the camera's
    side holds no block except A. In 7, A and B are not neighbours.
    """
    order = np.random.default_rng(0).random((32 * LAYOUTS, ROWS * COLUMNS))
    cells = np.argsort(order, axis=1)[:, :8]
    grid = np.stack((cells // COLUMNS, cells % COLUMNS), axis=2)  # [.., 8, 2]
    a, b, others, zone = grid[:, :1], grid[:, 1:2], grid[:, 1:4], grid[:, 4:5]

    def is_free(cell: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (others != cell).any(2).all(1) & ((cell >= 0) & (cell < (ROWS, COLUMNS))).all((1, 2))

    corner = np.concatenate((zone[..., :1], a[..., 1:]), axis=2)
    segments = ((a, corner), (corner, zone), (a, zone))
    clearance = np.minimum.reduce([_segment_distance(others, *segment) for segment in segments])
    tables = [
        np.ones(len(cells), dtype=bool),
        *(is_free(a + np.array(vector, dtype=int)) for vector in DIRECTION_VECTORS),
        (clearance > 0.8).all(1),
        (grid[:, 2:4] != b - (1, 0)).any(2).all(1),
        abs(a - b).sum((1, 2)) > 1,
    ]
    return np.stack([cells[table][:LAYOUTS] for table in tables])


def _segment_distance(
    x: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the distance [M, K] of points [M, K, 2] from the segment between two [M, 1, 2]."""
    along = end - start
    length = np.maximum((along * along).sum(2, keepdims=True), 1)  # squared
    t = ((x - start) * along).sum(2, keepdims=True) / length
    return np.linalg.norm(x - start - t.clip(0, 1) * along, axis=2)


# ---------------------------------------------------------------------------------- small functions
def _direction_vector(c: Combination) -> tuple[float, float]:
    """Return the direction as (x, y), 0 without one."""
    return DIRECTION_VECTORS[c.d] if c.d >= 0 else (0.0, 0.0)


def _one_hot(c: Combination) -> list[bool]:
    """Return [16]: one-hot A, B, the zone and the direction; 0 for those the sentence lacks."""
    return [x == i for x in (c.a, c.b, c.z, c.d) for i in range(4)]


def _length(x: Tensor) -> Tensor:
    """Return the Euclidean length [..] of vectors [.., D]."""
    return x.square().sum(-1).sqrt()


def _proximity(distance: Tensor) -> Tensor:
    """Return the proximity: 1 at distance 0, 1/2 at 10 cm."""
    return 0.1 / (0.1 + distance)


def _pick(u: Tensor, n: int | Tensor) -> Tensor:
    """Map uniform [0, 1) to int64 in [0, n); the clamp excludes n after rounding."""
    return (u * n).long().clamp(max=n - 1)
