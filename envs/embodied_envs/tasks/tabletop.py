"""Tabletop: a small gantry gripper, four blocks, four zones, and a sentence that says what to do
with them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied_envs.tasks.tabletop_language import COLOURS, Combination, Split, episodes
from embodied_envs.tasks.task import State, Task
from embodied_ppo.core.errors import EnvError, choose
from embodied_ppo.core.types import Obs

ObsKind: TypeAlias = Literal["state", "language"]
OBS: tuple[str, ...] = get_args(ObsKind)

# --------------------------------------------------------------------- sizes (m, world coordinates)
HALF = 0.022
"""Half the edge of a block: its centre's height on the table."""
ZONE = 0.05
"""Radius of a zone."""
LOW, HIGH = (-0.19, -0.24, 0.018), (0.19, 0.24, 0.17)
"""Where the point between the fingertips may be sent. x points away from the camera, y to its left,
z up.
"""
OPEN = 0.037
"""How far each finger is from the middle of the gripper when it is open."""
STEP, FINGER_STEP = 0.03, 0.014
"""How far an action of 1 moves the target of the gripper, and of each finger."""
LEAD = 0.06
"""How far the target may run ahead of the gripper."""

ROWS, COLUMNS, PITCH = 3, 4, 0.11
"""Blocks and zones begin in cells of a grid, PITCH apart."""
BLOCK_JITTER, ZONE_JITTER, TURN = 0.012, 0.004, 0.1
"""How far from the middle of the cell (m) and how far turned (rad) at most."""
LAYOUTS = 4096
APART = 0.05
"""Between the centres of two blocks that begin side by side, or are set side by side."""
BEHIND = (0.03, 0.055)
"""How far behind a block the closed gripper pushes it, from where it touches it to a little before.
"""
SHOVE = 0.1
"""How far family slide wants a block to be moved; SHOVE - 0.02 succeeds."""

COLOUR_VALUES = {
    "red": "0.9 0.1 0.1",
    "green": "0.1 0.7 0.15",
    "blue": "0.1 0.25 0.95",
    "yellow": "1 0.85 0.1",
}
WAYS = ((0.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-1.0, 0.0))
"""DIRECTIONS as (x, y)."""


# ----------------------------------------------------------------------------------------- families
FEATURES = (
    "a_goal",  # distance (m) to A's goal: of A, and for reach and touch of the tool
    "a_flat",  # the same, seen from above
    "a_drop",  # how much lower than its goal A is
    "b_flat",
    "b_drop",
    "between",  # from A to B, for clear to the middle of the zone, seen from above
    "push",  # how far the goal is from A along the direction asked for
    # how much further both fingers are open than 6 mm more than a block, or A and B are away than 6
    # cm
    "free",
    "speed",  # of A and B (m/s)
)
"""What success is judged by."""

DOWN, REST = (-0.008, 0.008), {"free": (0.0, float("inf")), "speed": (-1.0, 0.05)}


def _less(high: float) -> tuple[float, float]:
    return float("-inf"), high


def _more(low: float) -> tuple[float, float]:
    return low, float("inf")


@dataclass(frozen=True)
class Rule:
    """What a family asks for.

    bounds  feature -> what it must lie between at once
    goal    where A is to go: its zone, on or beside B, or its own cell (it begins there, or that
    cell is free);
            "a": the tool is to go to A
    height  of A's goal (m), or how much higher than B or A
    start   A begins in its own cell, in its zone, on B or touching B
    moves   "tool": the gripper itself is to be there; "push": from behind; "grasp": between the
    fingers
    """

    bounds: dict[str, tuple[float, float]]
    goal: Literal["zone", "cell", "on b", "beside b", "a"] = "zone"
    height: float = HALF
    start: Literal["cell", "zone", "on b", "beside b"] = "cell"
    moves: Literal["tool", "push", "grasp"] = "grasp"


_A_IN_ZONE = {"a_flat": _less(0.04), "a_drop": DOWN}
_BOTH_IN_ZONE = _A_IN_ZONE | {"b_flat": _less(0.04), "b_drop": DOWN} | REST
_BOTH_DOWN = {"a_drop": DOWN, "b_drop": DOWN} | REST

RULES: dict[str, Rule] = {
    "reach": Rule({"a_goal": _less(0.04)}, goal="a", height=0.0, moves="tool"),
    "touch": Rule({"a_goal": _less(0.03)}, height=LOW[2], moves="tool"),
    "push": Rule(_A_IN_ZONE, moves="push"),
    "slide": Rule({"push": _less(0.02), "a_drop": DOWN}, goal="cell", moves="push"),
    "lift": Rule({"a_drop": _less(0.02)}, goal="cell", height=0.11),
    "carry": Rule({"a_drop": _less(0.02), "a_flat": _less(0.04)}, height=0.11),
    "put": Rule(_A_IN_ZONE | REST),
    "clear": Rule({"between": _more(0.08), "a_drop": DOWN} | REST, goal="cell", start="zone"),
    "gather": Rule(_BOTH_IN_ZONE),
    "sort": Rule(_BOTH_IN_ZONE),
    "stack": Rule(
        _BOTH_DOWN | {"a_flat": _less(0.02), "a_drop": (-0.01, 0.01)}, goal="on b", height=2 * HALF
    ),
    "unstack": Rule(_BOTH_DOWN, goal="cell", start="on b"),
    "beside": Rule(_BOTH_DOWN | {"between": _less(0.06)}, goal="beside b", height=0.0),
    "separate": Rule(_BOTH_DOWN | {"between": _more(0.1)}, goal="cell", start="beside b"),
}
WEIGHTS = {"tool": (0.0, 0.0, 1.0), "push": (0.3, 0.0, 0.7), "grasp": (0.2, 0.2, 0.6)}
"""What phi in ``Tabletop.reward`` gives for the gripper near the block, the block held, the block
near its goal.
"""


class Tabletop(Task):
    """Language-conditioned manipulation. Every world has its own sentence; the model is the same.

    families   names of FAMILIES; None: all
    split      "train", "unseen_combination" or "unseen_wording", see ``tabletop_language.episodes``
    obs        "state": everything, flat; "language": the gripper only, for a policy that has the
    camera "front" and
               the sentence

    An action [N, 4] in [-1, 1] is a velocity: it moves the target of the gripper by up to STEP
    along x, y and z, and opens (> 0) or closes (< 0) the fingers by up to FINGER_STEP each. The
    targets are the state's "ctrl".

    Variables: kind, instruction, combination int64 [N] (rows of ``names``, ``instructions``,
    ``combinations``); spot [N, 5, 3], see ``way``. A and B are the blocks that the sentence names;
    B is A where it names one.
    """

    id = "Tabletop"
    decimation = 3
    max_episode_steps = 100
    stage = "none"  # nothing is read but the state itself
    fields = ("mocap_pos",)
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
        self, families: Sequence[str] | None = None, split: Split = "train", obs: ObsKind = "state"
    ) -> None:
        if obs not in OBS:
            raise EnvError(
                f"env.id=Tabletop: obs={obs!r} is unknown; {choose(str(obs), OBS, 'there are ')}"
            )
        chosen = episodes(families, split)
        self.obs: str = obs
        self.combinations: tuple[Combination, ...] = tuple(chosen)
        self.names = tuple(dict.fromkeys(c.family for c in chosen))
        self.instructions = tuple(
            sentence for sentences in chosen.values() for sentence in sentences
        )
        self._wordings = len(next(iter(chosen.values())))

    # ------------------------------------------------------------------------------------ the model
    def spec(self) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(_mjcf())

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        def real(x: Any) -> Tensor:
            return torch.tensor(np.array(x), dtype=dtype, device=device)

        def whole(x: Any) -> Tensor:
            return torch.tensor(np.array(x), dtype=torch.int64, device=device)

        cs, names = self.combinations, self.names
        kinds = [names.index(c.family) for c in cs]
        # One row per kind of episode.
        self._first = whole([kinds.index(k) for k in range(len(names))])
        self._count = whole([kinds.count(k) for k in range(len(names))])
        bounds = [
            [RULES[name].bounds.get(feature, (-np.inf, np.inf)) for feature in FEATURES]
            for name in names
        ]
        self._above, self._below = real(bounds).unbind(2)
        # One row per combination.
        plans = [_plan(c) for c in cs]
        self._group = whole([plan.group for plan in plans])
        self._mix, self._shift = (
            real([plan.mix for plan in plans]),
            real([plan.shift for plan in plans]),
        )
        self._height, self._points = (
            real([plan.height for plan in plans]),
            real([plan.points for plan in plans]),
        )
        tool, blocks = (
            [0, 1, 2],
            [[range(5 + 7 * x, 12 + 7 * x) for x in plan.two] for plan in plans],
        )
        self._xyz = whole([tool + [i for block in two for i in block[:3]] for two in blocks])
        self._quaternions = whole([[i for block in two for i in block[3:]] for two in blocks])
        self._velocities = whole(
            [[5 + 6 * x + i for x in plan.two for i in range(3)] for plan in plans]
        )
        self._way = real([WAYS[c.d] if c.d >= 0 else (0.0, 0.0) for c in cs])
        self._weight = real([WEIGHTS[RULES[c.family].moves] for c in cs])
        self._share = real(
            [(0.5, 0.5) if "b_flat" in RULES[c.family].bounds else (1.0, 0.0) for c in cs]
        )
        self._pushed = torch.tensor([[RULES[c.family].moves == "push"] for c in cs], device=device)
        self._words = real([[c.family == name for name in RULES] + _one_hot(c) for c in cs])
        # Everywhere.
        self._layouts = whole(_layouts())
        self._cells = real(
            [
                ((i // COLUMNS - 1) * PITCH, (i % COLUMNS - 1.5) * PITCH)
                for i in range(ROWS * COLUMNS)
            ]
        )
        self._jitter = real([[BLOCK_JITTER]] * 4 + [[ZONE_JITTER]] * 4)
        self._low, self._high = real(LOW), real(HIGH)
        self._hand, self._spread = real([0.0, 0.0, 0.13, 0.018]), real([0.05, 0.05, 0.02, 0.018])

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        return [-1.0] * 4, [1.0] * 4

    # -------------------------------------------------------------------------------- the functions
    def control(self, s: State, action: Tensor) -> Tensor:
        tool, ctrl = s["qpos"][:, :3], s["ctrl"]
        target = ctrl[:, :3] + STEP * action[:, :3]
        target = torch.clamp(
            target, (tool - LEAD).maximum(self._low), (tool + LEAD).minimum(self._high)
        )
        finger = (ctrl[:, 3:4] + FINGER_STEP * action[:, 3:]).clamp(0.0, OPEN)
        return torch.cat((target, finger, finger), dim=1)

    def way(self, qpos: Tensor, combination: Tensor, spot: Tensor) -> Tensor:
        """[N, 5, 3] (m): from A, for reach and touch from the tool, to where it is to be; from B to
        where it is to be, or began; from A to B, for clear to the zone; from the tool to A; from
        the tool to B. 0 where there is none.

        Each is ``spot`` [N, 5, 3] plus the combination's multiples of the points tool, A and B in
        ``qpos`` [N, nq].
        """
        points = qpos.gather(1, self._xyz[combination]).view(-1, 3, 3)
        return torch.baddbmm(spot, self._points[combination], points)

    def observe(self, s: State) -> Obs:
        """language: "state" [N, 12], tool, fingers, targets of tool and fingers, velocity of the
        tool, and "instruction" int64 [N]. state [N, 91]:
        also ``way``; velocities and quaternions of A and B; from the tool to all blocks and, flat,
        to all zones; one-hot the family, A, B, the zone and the direction."""
        qpos, qvel, combination = s["qpos"], s["qvel"], s["combination"]
        tool = qpos[:, None, :3]
        own = (qpos[:, :5], s["ctrl"][:, :4], qvel[:, :3])
        if self.obs == "language":
            return {"state": torch.cat(own, dim=1), "instruction": s["instruction"].clone()}
        way = self.way(qpos, combination, s["spot"]).flatten(1)
        velocities = qvel.gather(1, self._velocities[combination])
        quaternions = qpos.gather(1, self._quaternions[combination])
        blocks = (qpos[:, 5:].unflatten(1, (4, 7))[:, :, :3] - tool).flatten(1)
        zones = (s["mocap_pos"][:, :, :2] - tool[:, :, :2]).flatten(1)
        return torch.cat(
            (*own, way, velocities, quaternions, blocks, zones, self._words[combination]), dim=1
        )

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        """Progress and success: phi(s') - phi(s) + [success], in [-1, 2]; standing still earns
        nothing.

        phi = sum over A and B of share * (w1 near(tool, block) + w2 [held] + w3 near(block, goal))
        is in [0, 1], with near(x, y) = 0.1 / (0.1 + |x - y|) in metres, w = WEIGHTS of the way in
        which the family moves things, and share = (1, 0), or (1/2, 1/2) where both have a goal. A
        block within 3.5 cm of its goal counts as near and held; B counts for w1 and w2 from when A
        is there. To push, the tool is near where it is BEHIND the block as seen from the goal. For
        reach and touch, phi = near(tool, goal).
        """
        combination, spot = s["combination"], s["spot"]
        qpos = torch.cat((before["qpos"], s["qpos"]))
        phi = self._potential(qpos, combination.repeat(2), spot.repeat(2, 1, 1))
        old, new = phi.chunk(2)
        return new - old + self.success(s)

    def _potential(self, qpos: Tensor, combination: Tensor, spot: Tensor) -> Tensor:
        """phi [N], see ``reward``."""
        way = self.way(qpos, combination, spot)
        goal, hand = way[:, :2], way[:, 3:]
        far = _length(goal)
        there = far < 0.035
        off = hand.square().sum(2)
        behind = (hand * goal)[..., :2].sum(2) / _length(goal[..., :2]).clamp_min(1e-6)
        gap = behind - behind.clamp(*BEHIND)
        near = _near(
            torch.where(self._pushed[combination], off - behind.square() + gap.square(), off)
            .relu()
            .sqrt()
        )
        closed = (qpos[:, 3:5] - HALF).abs().amax(1, keepdim=True) < 0.006
        held = closed & (hand.abs().amax(2) < 0.02)
        w1, w2, w3 = self._weight[combination][:, :, None].unbind(1)
        handled = torch.where(there, w1 + w2, w1 * near + w2 * held)
        handled = torch.cat((handled[:, :1], handled[:, 1:] * there[:, :1]), dim=1)
        return ((handled + w3 * _near(far)) * self._share[combination]).sum(1)

    def terminated(self, s: State) -> Tensor:
        return self.success(s)

    def success(self, s: State) -> Tensor:
        """All features lie within the bounds of the family's rule."""
        qpos, combination, kind = s["qpos"], s["combination"], s["kind"]
        way = self.way(qpos, combination, s["spot"])
        square = way.square()
        flat = square[..., :2].sum(2)
        whole = (flat + square[..., 2]).sqrt()
        flat = flat.sqrt()
        push = (way[:, 0, :2] * self._way[combination]).sum(1)
        open_ = qpos[:, 3:5].amin(1) - (HALF + 0.006)
        free = open_.maximum(whole[:, 3:].amin(1) - 0.06)
        speed = _length(s["qvel"].gather(1, self._velocities[combination]).view(-1, 2, 3)).amax(1)
        features = torch.stack(
            (
                whole[:, 0],
                flat[:, 0],
                way[:, 0, 2],
                flat[:, 1],
                way[:, 1, 2],
                flat[:, 2],
                push,
                free,
                speed,
            ),
            dim=1,
        )
        return ((features > self._above[kind]) & (features < self._below[kind])).all(1)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        kind = _pick(u[:, 0], len(self.names))
        combination = self._first[kind] + _pick(u[:, 1], self._count[kind])
        instruction = combination * self._wordings + _pick(u[:, 2], self._wordings)
        layout = self._layouts[self._group[combination], _pick(u[:, 3], LAYOUTS)]
        places = self._cells[layout] + self._jitter * (
            2 * u[:, 4:20].unflatten(1, (8, 2)) - 1
        )  # [N, 8, 2] by role
        xy = torch.baddbmm(self._shift[combination], self._mix[combination], places)
        blocks, zones, spot = torch.cat((xy, self._height[combination]), dim=2).split(
            (4, 4, 5), dim=1
        )
        yaw = TURN * (u[:, 20:24, None] - 0.5)  # half the angle
        zero = torch.zeros_like(yaw)
        blocks = torch.cat((blocks, torch.cos(yaw), zero, zero, torch.sin(yaw)), dim=2)
        hand = self._hand + self._spread * (2 * u[:, 24:] - 1)
        hand = torch.cat((hand, hand[:, 3:]), dim=1)
        return {
            "qpos": torch.cat((hand, blocks.flatten(1)), dim=1),
            "ctrl": hand,
            "mocap_pos": zones,
            "kind": kind,
            "instruction": instruction,
            "combination": combination,
            "spot": spot,
        }


# ------------------------------------------------------------------------------ episodes in numbers
BLOCK_A, BLOCK_B, ZONE_A, ZONE_B = 0, 1, 4, 5
"""Roles of the places of a layout: 0 to 3 are for the blocks A, B and two others, 4 to 7 for the
zones of A, B, ..
"""


class Plan(NamedTuple):
    """A combination in numbers: how its episodes begin, and where A and B are to go.

    The 13 points of an episode are the four blocks by colour, the four zones by colour and the
    variable "spot": mix [13, 8] times the places of a layout plus shift [13, 2], at height [13, 1],
    in metres.
    """

    two: tuple[int, int]
    """Colours of A and B."""
    group: int
    """Which table of layouts."""
    mix: NDArray[np.float64]
    shift: NDArray[np.float64]
    height: NDArray[np.float64]
    points: NDArray[np.float64]
    """[5, 3] multiples of tool, A and B in ``Tabletop.way``."""


def _plan(c: Combination) -> Plan:
    rule, names_b = RULES[c.family], c.b >= 0
    a = max(c.a, 0)  # touch names no block
    two = (a, c.b if names_b else a)
    zones = (c.a, c.b) if c.family == "sort" else (max(c.z, 0), max(c.z, 0))
    points = np.zeros((5, 3))
    points[3], points[4] = (-1, 1, 0), (-1, 0, 1)
    mix, shift, height = np.zeros((13, 8)), np.zeros((13, 2)), np.zeros((13, 1))

    def place(row: int, role: int | None, z: float, x: float = 0.0, y: float = 0.0) -> None:
        mix[row], shift[row], height[row] = np.arange(8) == role, (x, y), z

    # How the blocks and the zones begin.
    for colour in range(4):
        place(colour, _roles(*two)[colour], HALF)
        place(4 + colour, 4 + _roles(*zones)[colour], 0.0)
    match rule.start:
        case "zone":
            place(two[0], ZONE_A, HALF)
        case "on b":
            place(two[0], BLOCK_B, 3 * HALF)
        case "beside b":
            place(two[0], BLOCK_B, HALF, x=APART / 2)
            place(two[1], BLOCK_B, HALF, x=-APART / 2)
    # Where A is to go, and from where the way is measured.
    match rule.goal:
        case "zone":
            place(8, ZONE_A, rule.height)
        case "cell":
            dx, dy = WAYS[c.d] if c.d >= 0 else (0.0, 0.0)
            place(8, BLOCK_A, rule.height, SHOVE * dx, SHOVE * dy)
        case "beside b":
            place(8, None, rule.height, x=-APART)
        case "on b" | "a":
            place(8, None, rule.height)
    tool, to_a, to_b = rule.moves == "tool", rule.goal == "a", rule.goal in ("on b", "beside b")
    points[0] = (-tool, to_a - (not tool), to_b)
    # B, and what A is to be near or far from.
    if names_b:
        place(9, {"sort": ZONE_B, "gather": ZONE_A}.get(c.family, BLOCK_B), HALF)
        points[1], points[2] = (0, 0, -1), (0, -1, 1)
    if rule.start == "zone":
        place(10, ZONE_A, HALF)
        points[2] = (0, -1, 0)
    group = {"push": 5, "beside": 6, "separate": 7}.get(c.family, c.d + 1)
    return Plan(two, group, mix, shift, height, points)


def _roles(first: int, second: int) -> tuple[int, ...]:
    """For each colour its role: 0 ``first``, 1 ``second`` if it is another, then what is left."""
    order = [*dict.fromkeys((first, second, *range(4)))]
    return tuple(order.index(colour) for colour in range(4))


@functools.cache
def _layouts() -> NDArray[np.int64]:
    """Cells of blocks A, B and two others, and of the zones of A, B and two others: [8, LAYOUTS,
    8].

    Table 0 has all. In 1 to 4, one for each direction, the next cell of A is on the table and free
    of blocks. In 5, A can be pushed to its zone straight, and along x and then y, with no block in
    the way. In 6, the next cell of B on the camera's side has no other block than A. In 7, A and B
    are not next to each other.
    """
    cells = np.argsort(np.random.default_rng(0).random((32 * LAYOUTS, ROWS * COLUMNS)), axis=1)[
        :, :8
    ]
    at = np.stack((cells // COLUMNS, cells % COLUMNS), axis=2)  # [.., 8, 2]
    a, b, others, zone = at[:, :1], at[:, 1:2], at[:, 1:4], at[:, 4:5]

    def free(cell: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (others != cell).any(2).all(1) & ((cell >= 0) & (cell < (ROWS, COLUMNS))).all((1, 2))

    corner = np.concatenate((zone[..., :1], a[..., 1:]), axis=2)
    ways = [_off(others, one, two) for one, two in ((a, corner), (corner, zone), (a, zone))]
    tables = [
        np.ones(len(cells), dtype=bool),
        *(free(a + np.array(way, dtype=int)) for way in WAYS),
    ]
    tables.append((np.minimum.reduce(ways) > 0.8).all(1))
    tables.append((at[:, 2:4] != b - (1, 0)).any(2).all(1))
    tables.append(abs(a - b).sum((1, 2)) > 1)
    return np.stack([cells[table][:LAYOUTS] for table in tables])


def _off(
    x: NDArray[np.int64], one: NDArray[np.int64], two: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Distance [M, K] of points [M, K, 2] from the line between points [M, 1, 2]."""
    along = two - one
    t = ((x - one) * along).sum(2, keepdims=True) / np.maximum(
        (along * along).sum(2, keepdims=True), 1
    )
    return np.linalg.norm(x - one - t.clip(0, 1) * along, axis=2)


# ---------------------------------------------------------------------------------- small functions
def _one_hot(c: Combination) -> list[bool]:
    """[16] of A, B, the zone and the direction; none where the sentence has none."""
    return [x == i for x in (c.a, c.b, c.z, c.d) for i in range(4)]


def _length(x: Tensor) -> Tensor:
    """[.., D] -> [..], Euclidean."""
    return x.square().sum(-1).sqrt()


def _near(distance: Tensor) -> Tensor:
    """1 at 0, 1/2 at 10 cm."""
    return 0.1 / (0.1 + distance)


def _pick(u: Tensor, n: int | Tensor) -> Tensor:
    """Uniform [0, 1) -> int64 in [0, n); rounding may not reach n."""
    return (u * n).long().clamp(max=n - 1)


def _mjcf() -> str:
    """qpos: gripper x, y, z, left and right finger, then the blocks, 7 each; qvel: 5, then 6 each.
    mocap: the zones.

    The joints of the gripper are in world coordinates: its body's origin is the point between the
    fingertips.
    """
    rgba = {name: f"{value} 1" for name, value in COLOUR_VALUES.items()}
    blocks = "".join(
        f"""<body name="{c} block" pos="{0.1 * i} 0 {HALF}"><freejoint/><geom class="block" rgba="{rgba[c]}"/></body>"""
        for i, c in enumerate(COLOURS)
    )
    zones = "".join(
        f"""<body name="{c} zone" mocap="true" pos="{0.1 * i} 0.1 0"><geom class="zone" rgba="{rgba[c]}"/></body>"""
        for i, c in enumerate(COLOURS)
    )
    fingers = "".join(
        f"""<body name="{side} finger">
        <joint name="{side}" axis="0 {sign} 0" range="-0.001 {OPEN}" limited="true" armature="0.5"/>
        <geom class="hand" size="0.018 0.008 0.025" pos="0 {sign * 0.008} 0.013" mass="0.1"/></body>"""
        for side, sign in (("left", 1), ("right", -1))
    )
    return f"""<mujoco model="tabletop">
    <option timestep="0.0166667" integrator="implicitfast" cone="elliptic" iterations="10" ls_iterations="10"/>
    <visual><quality offsamples="0" shadowsize="0" numslices="20" numstacks="2" numquads="1"/>
        <map znear="0.1" zfar="10"/>
        <headlight ambient="0.45 0.45 0.45" diffuse="0.3 0.3 0.3" specular="0 0 0"/></visual>
    <default>
        <geom type="box"/>
        <joint type="slide"/>
        <position dampratio="1"/>
        <default class="block">
            <geom size="{HALF} {HALF} {HALF}" mass="0.1" contype="2" conaffinity="7"
            friction="0.7 0.01 0.001"/></default>
        <default class="hand"><geom contype="4" conaffinity="0" condim="4" priority="1" friction="1.5 0.05 0.001"
            solimp="0.95 0.99 0.001"
            rgba="0.25 0.25 0.28 1"/></default>
        <default class="zone"><geom type="cylinder" size="{ZONE} 0.0005" contype="0" conaffinity="0"/></default>
    </default>
    <worldbody>
        <light pos="-0.3 0.3 1.5" dir="0.2 -0.2 -1" directional="true" castshadow="false" diffuse="0.4 0.4 0.4"/>
        <geom name="table" type="plane" size="1 1 0.1" contype="1" conaffinity="0" rgba="0.7 0.67 0.63 1"/>
        <camera name="front" pos="-0.74 0 1.05" xyaxes="0 -1 0 0.8 0 0.6" fovy="27"/>
        <body name="hand" gravcomp="1">
            <joint name="x" axis="1 0 0"/><joint name="y" axis="0 1 0"/><joint name="z" axis="0 0 1"/>
            <geom class="hand" size="0.012 0.054 0.006" pos="0 0 0.044" mass="1"/>
            {fingers}
        </body>
        {blocks}{zones}
    </worldbody>
    <actuator>
        <position joint="x" kp="1200"/><position joint="y" kp="1200"/><position joint="z" kp="1200"/>
        <position joint="left" kp="300"/><position joint="right" kp="300"/>
    </actuator>
    </mujoco>"""
