"""Which placements there are to choose from, and the seconds of an update that each would take: measurements in, a
prediction out. Nothing is started.

    collect = T x a step of acting and simulating, which overlap where they are apart
    update  = learning from a share of the columns, and the sums of gradients
    publish = weights on their way

On each machine processes that run at once share its cores: no phase is shorter than its CPU seconds over the cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from typing import Any

from embodied_ppo.config.placement import ALL, ASLEEP, PRESETS, WEIGHTS, Hardware, Need, Plan
from embodied_ppo.placement.offload import Residency

CALL_S = 0.002
"""From the driver's asking processes for a phase to their beginning, and back (docs/experiments.md)."""


# ------------------------------------------------------------------------------------------------------------- choices
@dataclass(frozen=True)
class Choice:
    """Options that say where roles run."""

    placement: str = "local"
    component_placement: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 1

    @property
    def name(self) -> str:
        entries = [_entry(roles, value) for roles, value in self.component_placement.items()]
        where = " | ".join(entries) or self.placement
        return where if self.stages == 1 else f"{where}, {self.stages} stages"


def _entry(roles: str, value: Any) -> str:
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
"""Ways to put three roles into processes."""
CUTS = 16
"""Places at most where the devices are cut."""
PER_DEVICE = (1, 2, 4)
"""Processes of simulators alone on a device."""


def choices(
    hardware: Hardware,
    cores: int,
    partitions: Sequence[Sequence[str]] = PARTITIONS,
    presets: Sequence[str] = (*PRESETS,),
) -> list[Choice]:
    """local, ``presets``, and every partition of the roles over the devices; what is legal ``plan`` says.

    Entries all have the same devices (the first k), or the devices are cut among them, or one has all and the others
    are cut. Simulators that are alone may be several processes on a device, as long as there are ``cores`` for them.
    """
    found = [Choice()]
    for name in presets:
        apart = _stages(PRESETS[name])
        found += [Choice(name, stages=stages) for stages in ((1, 2) if apart else (1,))]
    for each, groups in product(PER_DEVICE, partitions):
        if each > 1 and groups[0] != "env":
            continue
        apart = _stages(groups)
        for spans in _spans(len(groups), hardware.total):
            count = len(spans[0]) * each
            if each > 1 and count > max(cores, hardware.total):
                continue
            placed: dict[str, Any] = {group: _devices(span) for group, span in zip(groups, spans, strict=True)}
            if each > 1:
                placed["env"] = {"devices": placed["env"], "processes": count}
            found += [Choice("local", placed, stages) for stages in ((1, 2) if apart else (1,))]
    return found


def _stages(groups: Iterable[str]) -> bool:
    """Whether there are simulators, and apart from rollouts: two stages of them can overlap."""
    homes = [group.split(",") for group in groups]
    return any("env" in home and "rollout" not in home for home in homes)


def _devices(span: range) -> int | str:
    return span.start if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def _spans(groups: int, total: int) -> Iterator[tuple[range, ...]]:
    """Devices of each of so many groups."""
    whole, step = range(total), -(-total // CUTS)
    points = range(step, total, step)
    for k in (*points, total):
        yield (range(k),) * groups
    for cut in _cuts(whole, points, groups):
        if groups > 1:
            yield cut
    for one in range(groups):
        if groups == 2:
            for k in points:
                yield (range(k), whole) if one else (whole, range(k))
        elif groups == 3:
            for cut in _cuts(whole, points, 2):
                rest = iter(cut)
                yield tuple(whole if i == one else next(rest) for i in range(3))


def _cuts(whole: range, points: range, parts: int) -> Iterator[tuple[range, ...]]:
    for at in combinations(points, parts - 1):
        ends = (0, *at, len(whole))
        yield tuple(whole[a:b] for a, b in pairwise(ends))


def meaning(p: Plan) -> tuple[Any, ...]:
    """Equal for plans that run alike. Slots of one machine's CPU are all the same."""
    cpu = p.hardware.kind == "cpu"

    def where(devices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(p.hardware.node(d) for d in devices) if cpu else devices

    groups = sorted((g.roles, tuple(sorted(where(has) for has in g.ranks))) for g in p.groups)
    return (p.stages, tuple(groups), tuple(p.weights_path(rank) for rank in range(p.processes("rollout"))))


# -------------------------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class Line:
    """fixed + each x n."""

    fixed: float
    each: float

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Through (n, y > 0): argmin Σ ((fixed + each n - y) / y)^2, neither below 0. One n: through the origin."""
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
    """Of something done for n environments: seconds by the clock and of CPUs."""

    wall: Line
    cpu: Line


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What moving things takes here, and what there is to move in an update.

    compiled                          whether most of the run is compiled code
    message_s, byte_s, copy_byte_s    a message between processes, a byte in one, a byte copied in memory
    cores                             of this machine: how much more they do together than one
    experience_bytes, weights_bytes   of all rollouts; what is published
    """

    compiled: bool
    message_s: float
    byte_s: float
    copy_byte_s: float
    cores: float
    experience_bytes: float
    weights_bytes: float

    def told(self) -> str:
        """For people."""
        return f"a message {self.message_s * 1e6:.3g} us; {self.cores:.2g} cores"


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """A run of a robot policy on this machine.

    num_envs, horizon, steps          of the run; ``steps``: of the optimiser in an update
    simulate                          a step of n environments
    act, learn                        compiled or not -> deciding for n environments, with all that collecting is
                                      besides; an update from the n columns of one learner
    step_bytes, gradient_bytes        of an environment's action and step; what learners add up
    """

    num_envs: int
    horizon: int
    steps: int
    simulate: Cost
    act: Mapping[bool, Cost]
    learn: Mapping[bool, Cost]
    step_bytes: float
    gradient_bytes: float

    def told(self) -> str:
        """See ``Machine``."""
        n, act, learn = self.num_envs, *(list(costs.values())[-1] for costs in (self.act, self.learn))
        return (
            f"a step of {n} environments {self.simulate.wall(n) * 1e3:.3g} ms, deciding {act.wall(n) * 1e3:.3g} ms, "
            f"learning {learn.wall(n):.3g} s an update; {super().told()}"
        )


# ---------------------------------------------------------------------------------------------------------- prediction
@dataclass(frozen=True)
class Prediction:
    """Seconds of an update; ``whole``: by the clock, less than the sum where rollouts run ahead."""

    collect_s: float
    update_s: float
    publish_s: float
    whole_s: float


def code(p: Plan | None, compiled: bool) -> tuple[bool, bool]:
    """Whether acting and learning are compiled: what takes turns on a GPU is not, nor minibatches of several."""
    if p is None:
        return compiled, compiled
    turns = Residency(p).turns
    acts, learns = (compiled and not turns(p.group(role)) for role in ("rollout", "actor"))
    return acts, learns and p.processes("actor") == 1


def predicted(p: Plan | None, m: Measured, needs: Mapping[str, Need]) -> Prediction:
    """Of an update; None: in one process. ``needs``: of ``plan.check_memory``."""
    acts, learns = code(p, m.compiled)
    act, learn = m.act[acts], m.learn[learns]
    if p is None:
        collect = m.horizon * (m.simulate.wall(m.num_envs) + act.wall(m.num_envs))
        update = learn.wall(m.num_envs)
        return Prediction(collect, update, 0.0, collect + update)
    a = p.processes("actor")
    return prediction(
        p,
        m,
        needs,
        collect=m.horizon * _cycle(p, m, act),
        collecting=_collecting(p, m, act),
        update=learn.wall(m.num_envs / a),
        updating=loads(p, {"actor": learn.cpu(m.num_envs / a)}),
        sums=sums(a, m, m.steps, m.gradient_bytes),
    )


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
    """Of an update whose phases take ``collect`` and ``update`` seconds where nobody waits for a core, and
    ``collecting``, ``updating`` CPU seconds of each node; with what moving things takes. ``sums``: of gradients."""
    r, a = p.processes("rollout"), p.processes("actor")
    collect = max(collect, max(collecting.values()) / m.cores)
    update = max(update, max(updating.values()) / m.cores) + sums
    if not p.fused("rollout", "actor"):  # into the object store, out of it, and side by side
        collect += m.experience_bytes / r * m.copy_byte_s
        update += m.experience_bytes / min(a, r) * 2 * m.copy_byte_s
        if _nodes(p, "rollout") != _nodes(p, "actor"):
            update += m.experience_bytes / a * m.byte_s
    publish = _publish(p, m) + CALL_S
    collect, update = collect + CALL_S, update + CALL_S + _swaps(p, needs) * m.copy_byte_s
    whole = collect + update + publish
    if p.max_lag:
        both = max(collecting.get(node, 0.0) + updating.get(node, 0.0) for node in collecting.keys() | updating.keys())
        whole = max(collect, update + publish, both / m.cores)
    return Prediction(collect, update, publish, whole)


def _nodes(p: Plan, role: str) -> set[int]:
    return {p.hardware.node(d) for d in p.group(role).devices}


def loads(p: Plan, seconds: Mapping[str, float]) -> dict[int, float]:
    """Node -> CPU seconds there, of what one process of a role takes."""
    found: dict[int, float] = defaultdict(float)
    for role, each in seconds.items():
        for has in p.group(role).ranks:
            found[p.hardware.node(has[0])] += each
    return found


@dataclass(frozen=True)
class _Step:
    """One step of collecting.

    rows, asked  environments that are decided for at once, that one process of simulators is asked for at once
    callers      rollout processes that one process of simulators has
    servers      processes of simulators that one rollout process has
    message_s    of a question and its answer
    """

    rows: float
    asked: float
    callers: float
    servers: float
    message_s: float


def _step(p: Plan, m: Measured) -> _Step:
    e, r = p.processes("env"), p.processes("rollout")
    asked = m.num_envs / max(e, r) / p.stages
    apart = not p.fused("env", "rollout")
    talk = 2 * m.message_s + asked * m.step_bytes * m.byte_s if apart else 0.0
    return _Step(m.num_envs / r / p.stages, asked, max(1.0, r / e), max(1.0, e / r), talk)


def _cycle(p: Plan, m: Measured, act: Cost) -> float:
    """Seconds in which every environment of a rollout process makes a step.

    Whoever acts and whoever simulates are two stations that the stages visit by turns: the busier of them, or the way
    through both, says how long a round takes.
    """
    s = _step(p, m)
    one, other = act.wall(s.rows) + s.servers * s.message_s / 2, m.simulate.wall(s.asked) + s.message_s / 2
    if p.fused("env", "rollout"):
        return p.stages * (one + other)
    return max(p.stages * one, p.stages * s.callers * other, one + other)


def _collecting(p: Plan, m: Measured, act: Cost) -> dict[int, float]:
    """Node -> CPU seconds of a rollout."""
    s = _step(p, m)
    acting = act.cpu(s.rows) + s.servers * s.message_s / 2
    simulating = s.callers * (m.simulate.cpu(s.asked) + s.message_s / 2)
    times = m.horizon * p.stages
    return loads(p, {"rollout": times * acting, "env": times * simulating})


def sums(world: int, m: Machine, steps: int, gradient_bytes: float) -> float:
    """Seconds of adding up gradients over ``world`` learners in so many steps, and their number of samples before:
    rings of messages."""
    if world == 1:
        return 0.0
    there = 2 * (world - 1)
    return steps * (2 * there * m.message_s + there / world * gradient_bytes * m.byte_s)


def _publish(p: Plan, m: Machine) -> float:
    """Weights into a message and out of it, and their way."""
    paths = [p.weights_path(rank) for rank in range(p.processes("rollout"))]
    if p.max_lag:
        paths = ["store" if path != "share" else path for path in paths]
    found = 0.0 if set(paths) == {"share"} else 2 * m.weights_bytes * m.copy_byte_s + m.message_s
    return found + paths.count("broadcast") * m.weights_bytes * m.byte_s


def _swaps(p: Plan, needs: Mapping[str, Need]) -> int:
    """Bytes that leave GPUs and come back in an update: groups do so one after the other, their processes at once."""
    residency, moved = Residency(p), 0
    for _ in range(2):  # the second time as ever after
        moved = 0
        for phase in ("collect", "update", "publish"):
            before = dict(residency.level)
            for g, level in residency.before(phase):
                moved += abs(_held(needs[g.name], level) - _held(needs[g.name], before[g]))
    return moved


def _held(need: Need, level: int) -> int:
    """Bytes between phases."""
    weights = need.get("weights", 0)
    return {ASLEEP: 0, WEIGHTS: weights, ALL: weights + need.get("gradients", 0) + need.get("optimiser", 0)}[level]
