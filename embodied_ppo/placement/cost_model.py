"""Candidate placements, and a prediction of the seconds per update of each from measurements.

    collect = T x (acting + simulating), which overlap where they are in different processes
    update  = training on a share of the columns + all-reduce of gradients
    publish = transfer of the weights

Processes on one machine share its cores: no phase is shorter than its CPU seconds divided by the
number of cores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from typing import Any

from embodied_ppo.config.placement import ALL, OFFLOADED, PRESETS, WEIGHTS, Hardware, Need, Plan
from embodied_ppo.placement.offload import Residency

CALL_S = 0.002
"""Overhead of one round of calls by the driver, seconds (docs/experiments.md)."""


# ------------------------------------------------------------------------------------------ choices
@dataclass(frozen=True)
class Choice:
    """Options that determine where roles run.

    Attributes:
        placement: Option ``placement``.
        component_placement: Option ``cluster.component_placement``.
        stages: Option ``cluster.stages``.
    """

    placement: str = "local"
    component_placement: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 1

    @property
    def name(self) -> str:
        """The placement as text, in the syntax of the options."""
        entries = [_entry(roles, value) for roles, value in self.component_placement.items()]
        text = " | ".join(entries) or self.placement
        return text if self.stages == 1 else f"{text}, {self.stages} stages"


def _entry(roles: str, value: Any) -> str:
    """One entry of component_placement as text."""
    if not isinstance(value, Mapping):
        return f"{roles}: {value}"
    return f"{roles}: {value['devices']} x {value['processes']}"


PARTITIONS = (
    ("env,rollout,actor",),
    ("env,rollout", "actor"),
    ("env", "rollout,actor"),
    ("env,actor", "rollout"),
    ("env", "rollout", "actor"),
)
"""Partitions of the three roles into kinds of processes."""
CUTS = 16
"""Maximum number of boundaries at which the devices may be divided between groups."""
PER_DEVICE = (1, 2, 4)
"""Numbers of simulator-only processes per device that are tried."""


def choices(
    hardware: Hardware,
    cores: int,
    partitions: Sequence[Sequence[str]] = PARTITIONS,
    presets: Sequence[str] = (*PRESETS,),
) -> list[Choice]:
    """Return candidate placements; ``config.placement.plan`` rejects invalid ones.

    The groups of a candidate all have the same devices (the first k), or divide the devices, or one
    has all devices and the others divide them.

    Args:
        hardware: The devices.
        cores: CPU cores. Processes that only simulate are several per device while each has a core.
        partitions: Partitions of the roles into groups.
        presets: Names of placement presets to include.
    """
    candidates = [Choice()]
    for name in presets:
        pipelined = _can_pipeline(PRESETS[name])
        candidates += [Choice(name, stages=stages) for stages in ((1, 2) if pipelined else (1,))]
    for per_device, groups in product(PER_DEVICE, partitions):
        if per_device > 1 and groups[0] != "env":
            continue
        pipelined = _can_pipeline(groups)
        for spans in _spans(len(groups), hardware.total):
            count = len(spans[0]) * per_device
            if per_device > 1 and count > max(cores, hardware.total):
                continue
            placed: dict[str, Any] = {
                group: _devices(span) for group, span in zip(groups, spans, strict=True)
            }
            if per_device > 1:
                placed["env"] = {"devices": placed["env"], "processes": count}
            candidates += [
                Choice("local", placed, stages) for stages in ((1, 2) if pipelined else (1,))
            ]
    return candidates


def _can_pipeline(groups: Iterable[str]) -> bool:
    """Whether simulators and rollouts are apart, so that two stages can overlap."""
    roles_of = [group.split(",") for group in groups]
    return any("env" in roles and "rollout" not in roles for roles in roles_of)


def _devices(span: range) -> int | str:
    """Devices in the syntax of component_placement."""
    return span.start if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def _spans(groups: int, total: int) -> Iterator[tuple[range, ...]]:
    """Yield the devices of each group, for all candidates with ``groups`` groups."""
    devices, step = range(total), -(-total // CUTS)
    points = range(step, total, step)
    for k in (*points, total):
        yield (range(k),) * groups
    for cut in _cuts(devices, points, groups):
        if groups > 1:
            yield cut
    for full in range(groups):  # the group that has all devices
        if groups == 2:
            for k in points:
                yield (range(k), devices) if full else (devices, range(k))
        elif groups == 3:
            for cut in _cuts(devices, points, 2):
                spans = iter(cut)
                yield tuple(devices if i == full else next(spans) for i in range(3))


def _cuts(devices: range, points: range, groups: int) -> Iterator[tuple[range, ...]]:
    """Yield all divisions of the devices into consecutive ranges with boundaries at ``points``."""
    for inner in combinations(points, groups - 1):
        boundaries = (0, *inner, len(devices))
        yield tuple(devices[a:b] for a, b in pairwise(boundaries))


def meaning(p: Plan) -> tuple[Any, ...]:
    """Return a key that is equal for plans that run alike, to remove duplicates."""
    cpu = p.hardware.kind == "cpu"

    def locations(devices: tuple[int, ...]) -> tuple[int, ...]:
        # All device slots of one machine's CPU are equivalent.
        return tuple(p.hardware.node(d) for d in devices) if cpu else devices

    groups = sorted(
        (g.roles, tuple(sorted(locations(devices) for devices in g.ranks))) for g in p.groups
    )
    transports = tuple(p.weights_path(rank) for rank in range(p.processes("rollout")))
    return p.stages, tuple(groups), transports


# ------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class Line:
    """Seconds for n items: fixed + each * n."""

    fixed: float
    each: float

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line by weighted least squares.

        argmin Σ ((fixed + each * n - y) / y)^2  subject to  fixed >= 0, each >= 0

    Args:
        points: (n, y) with y > 0. Where all n are equal, the line passes through the origin.
    """
    w = [1 / y**2 for _, y in points]
    w1 = sum(w)
    wn = sum(u * n for u, (n, _) in zip(w, points, strict=True))
    wy = sum(1 / y for _, y in points)
    wnn = sum(u * n * n for u, (n, _) in zip(w, points, strict=True))
    wny = sum(n / y for n, y in points)
    determinant = w1 * wnn - wn * wn
    if len({n for n, _ in points}) == 1:
        return Line(0.0, wny / wnn)
    fixed, each = (wy * wnn - wny * wn) / determinant, (w1 * wny - wn * wy) / determinant
    if fixed < 0:
        return Line(0.0, wny / wnn)
    return Line(fixed, each) if each >= 0 else Line(wy / w1, 0.0)


@dataclass(frozen=True)
class Cost:
    """Seconds for n environments.

    Attributes:
        wall: Wall time.
        cpu: CPU time, summed over cores.
    """

    wall: Line
    cpu: Line


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of an update and of its phases.

    ``whole_s`` is less than the sum of the phases where rollouts run ahead of the learner.
    """

    collect_s: float
    update_s: float
    publish_s: float
    whole_s: float


@dataclass(frozen=True, kw_only=True)
class Machine(ABC):
    """Cost of moving data on this machine, and the amount of data of an update.

    A subclass adds the costs of a mode's roles.

    Attributes:
        compiled: Whether most updates run compiled code.
        message_s: Seconds of a message between processes.
        byte_s: Seconds of each byte of a message.
        copy_byte_s: Seconds to copy a byte in memory.
        cores: Throughput of all cores of this machine, relative to one core.
        experience_bytes: Experience of all rollouts.
        weights_bytes: Weights that are published.
    """

    compiled: bool
    message_s: float
    byte_s: float
    copy_byte_s: float
    cores: float
    experience_bytes: float
    weights_bytes: float

    def summary(self) -> str:
        """Return the measurements as text."""
        return f"a message {self.message_s * 1e6:.3g} us; {self.cores:.2g} cores"

    @abstractmethod
    def predict(self, p: Plan | None, needs: Mapping[str, Need]) -> Prediction:
        """Predict the seconds of an update.

        Args:
            p: The plan; None: one process.
            needs: Group name -> memory, as for ``config.placement.check_memory``.
        """


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """Measurements of a robot policy's run on this machine.

    Attributes:
        num_envs: Number of environments.
        horizon: Steps per environment and update.
        steps: Optimiser steps per update.
        simulate: One step of n environments.
        act: Whether compiled -> one decision for n environments, with the other work of collecting.
        learn: Whether compiled -> an update of one learner from n columns.
        step_bytes: Action and step of one environment.
        gradient_bytes: Gradients that learners all-reduce.
    """

    num_envs: int
    horizon: int
    steps: int
    simulate: Cost
    act: Mapping[bool, Cost]
    learn: Mapping[bool, Cost]
    step_bytes: float
    gradient_bytes: float

    def summary(self) -> str:
        """See ``Machine``."""
        n = self.num_envs
        act, learn = (list(costs.values())[-1] for costs in (self.act, self.learn))
        return (
            f"a step of {n} environments {self.simulate.wall(n) * 1e3:.3g} ms, deciding"
            f" {act.wall(n) * 1e3:.3g} ms, learning {learn.wall(n):.3g} s per update;"
            f" {super().summary()}"
        )

    def predict(self, p: Plan | None, needs: Mapping[str, Need]) -> Prediction:
        """See ``Machine``."""
        n, (acts, learns) = self.num_envs, code(p, self.compiled)
        act, learn = self.act[acts], self.learn[learns]
        if p is None:
            collect = self.horizon * (self.simulate.wall(n) + act.wall(n))
            update = learn.wall(n)
            return Prediction(collect, update, 0.0, collect + update)
        a = p.processes("actor")
        return prediction(
            p,
            self,
            needs,
            collect=self.horizon * _cycle(p, self, act),
            collecting=_collecting(p, self, act),
            update=learn.wall(n / a),
            updating=loads(p, {"actor": learn.cpu(n / a)}),
            sums=sums(a, self, self.steps, self.gradient_bytes),
        )


# --------------------------------------------------------------------------------------- prediction
def code(p: Plan | None, compiled: bool) -> tuple[bool, bool]:
    """Return whether acting and learning are compiled in a placement.

    Offloaded roles are not compiled, nor are minibatches of several learners.
    """
    if p is None:
        return compiled, compiled
    offloads = Residency(p).offloads
    acts, learns = (compiled and not offloads(p.group(role)) for role in ("rollout", "actor"))
    return acts, learns and p.processes("actor") == 1


def prediction(
    p: Plan,
    m: Machine,
    needs: Mapping[str, Need],
    *,
    collect: float,
    collecting: Mapping[int, float],
    update: float,
    updating: Mapping[int, float],
    sums: float,
) -> Prediction:
    """Predict the seconds of an update from those of its phases.

    Args:
        p: The plan.
        m: Cost of moving data.
        needs: Group name -> memory, as for ``config.placement.check_memory``.
        collect: Seconds to collect with enough cores.
        collecting: Node -> CPU seconds to collect.
        update: Seconds to train with enough cores.
        updating: Node -> CPU seconds to train.
        sums: Seconds to all-reduce gradients.
    """
    r, a = p.processes("rollout"), p.processes("actor")
    collect = max(collect, max(collecting.values()) / m.cores)
    update = max(update, max(updating.values()) / m.cores) + sums
    if not p.fused("rollout", "actor"):
        # Experience is copied into the object store, out of it, and to concatenate it.
        collect += m.experience_bytes / r * m.copy_byte_s
        update += m.experience_bytes / min(a, r) * 2 * m.copy_byte_s
        if _nodes(p, "rollout") != _nodes(p, "actor"):
            update += m.experience_bytes / a * m.byte_s
    publish = _publish(p, m) + CALL_S
    collect, update = collect + CALL_S, update + CALL_S + _swaps(p, needs) * m.copy_byte_s
    total = collect + update + publish
    if p.max_lag:
        both = max(
            collecting.get(node, 0.0) + updating.get(node, 0.0)
            for node in collecting.keys() | updating.keys()
        )
        total = max(collect, update + publish, both / m.cores)
    return Prediction(collect, update, publish, total)


def _nodes(p: Plan, role: str) -> set[int]:
    """Nodes of a role."""
    return {p.hardware.node(d) for d in p.group(role).devices}


def loads(p: Plan, seconds: Mapping[str, float]) -> dict[int, float]:
    """Return node -> CPU seconds.

    Args:
        p: The plan.
        seconds: Role -> CPU seconds of one process.
    """
    totals: dict[int, float] = defaultdict(float)
    for role, process_s in seconds.items():
        for devices in p.group(role).ranks:
            totals[p.hardware.node(devices[0])] += process_s
    return totals


@dataclass(frozen=True)
class _Step:
    """One step of collecting.

    Attributes:
        rows: Environments per batch of decisions.
        simulated: Environments per request to one simulator process.
        callers: Rollout processes per simulator process.
        servers: Simulator processes per rollout process.
        message_s: Seconds of a request and its reply.
    """

    rows: float
    simulated: float
    callers: float
    servers: float
    message_s: float


def _step(p: Plan, m: Measured) -> _Step:
    e, r = p.processes("env"), p.processes("rollout")
    simulated = m.num_envs / max(e, r) / p.stages
    remote = not p.fused("env", "rollout")
    message_s = 2 * m.message_s + simulated * m.step_bytes * m.byte_s if remote else 0.0
    return _Step(m.num_envs / r / p.stages, simulated, max(1.0, r / e), max(1.0, e / r), message_s)


def _cycle(p: Plan, m: Measured, act: Cost) -> float:
    """Seconds in which each environment of a rollout process makes one step.

    Acting and simulating form a pipeline of two resources. The cycle time is the larger of the load
    of the busier resource and the latency of one stage through both.
    """
    s = _step(p, m)
    acting = act.wall(s.rows) + s.servers * s.message_s / 2
    simulating = m.simulate.wall(s.simulated) + s.message_s / 2
    if p.fused("env", "rollout"):
        return p.stages * (acting + simulating)
    return max(p.stages * acting, p.stages * s.callers * simulating, acting + simulating)


def _collecting(p: Plan, m: Measured, act: Cost) -> dict[int, float]:
    """Node -> CPU seconds of a rollout."""
    s = _step(p, m)
    acting = act.cpu(s.rows) + s.servers * s.message_s / 2
    simulating = s.callers * (m.simulate.cpu(s.simulated) + s.message_s / 2)
    times = m.horizon * p.stages
    return loads(p, {"rollout": times * acting, "env": times * simulating})


def sums(world: int, m: Machine, steps: int, gradient_bytes: float) -> float:
    """Return the seconds of an update's all-reduces: gradients and sample counts.

    A ring all-reduce over W ranks takes 2 (W - 1) messages of 1 / W of the data each.

    Args:
        world: Number of learners.
        m: Cost of messages.
        steps: Optimiser steps.
        gradient_bytes: Gradients of one step.
    """
    if world == 1:
        return 0.0
    messages = 2 * (world - 1)
    return steps * (2 * messages * m.message_s + messages / world * gradient_bytes * m.byte_s)


def _publish(p: Plan, m: Machine) -> float:
    """Seconds to pack, send and unpack the weights."""
    paths = [p.weights_path(rank) for rank in range(p.processes("rollout"))]
    if p.max_lag:
        paths = ["store" if path != "share" else path for path in paths]
    copies_s = 0.0 if set(paths) == {"share"} else 2 * m.weights_bytes * m.copy_byte_s + m.message_s
    return copies_s + paths.count("broadcast") * m.weights_bytes * m.byte_s


def _swaps(p: Plan, needs: Mapping[str, Need]) -> int:
    """Bytes that are offloaded and loaded in an update, one group after another."""
    residency, moved = Residency(p), 0
    # The first update starts with everything loaded; all later ones equal the second.
    for _ in range(2):
        moved = 0
        for phase in ("collect", "update", "publish"):
            before = dict(residency.level)
            for g, level in residency.moves_before(phase):
                moved += abs(
                    _resident_bytes(needs[g.name], level)
                    - _resident_bytes(needs[g.name], before[g])
                )
    return moved


def _resident_bytes(need: Need, level: int) -> int:
    """Bytes of a process on the device at a residency level, between phases."""
    weights = need.get("weights", 0)
    return {
        OFFLOADED: 0,
        WEIGHTS: weights,
        ALL: weights + need.get("gradients", 0) + need.get("optimiser", 0),
    }[level]
