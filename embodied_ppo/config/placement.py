"""Placement syntax: text -> a checked ``Plan`` of processes, roles and devices, before any process
is started.

Roles joined by a comma share a process; entries with common devices take turns; the rest run at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.core.errors import PlacementError, choose, show

ROLES: dict[str, tuple[str, ...]] = {
    "embodied": ("env", "rollout", "actor"),
    "reasoning": ("rollout", "actor", "critic", "reference", "reward"),
}
"""Mode -> its roles.

In embodied mode the critic is a head of the actor, and the actor holds the reference.
"""

PRESETS: dict[str, dict[str, str]] = {
    "fused": {"env,rollout,actor,critic,reference,reward": "all"},
    "colocated": {"env": "all", "rollout,reward": "all", "actor,reference": "all", "critic": "all"},
    "disaggregated": {"env,rollout,reward": "first half", "actor,critic,reference": "second half"},
    "hybrid": {"env": "first half", "rollout,actor": "second half"},
    "pipelined": {"env": "first half", "rollout": "second half", "actor": "all"},
}
"""Meaning of ``placement=NAME``. Roles that a run does not have are left out. ``local`` runs in
this process, without Ray."""

PATH = "cluster.component_placement"
MOST = 1024
"""Maximum number of processes on one device; more is taken for a typing error."""
MOST_DEVICES = 16384
"""Maximum number of devices of all machines."""

ASKS: dict[str, tuple[str, ...]] = {"rollout": ("env", "reward"), "actor": ("critic", "reference")}
"""Role -> the roles that it sends requests to: a call within a process, a message between
processes.
"""

ASLEEP, WEIGHTS, ALL = 0, 1, 2
"""State of a process on its device: nothing; the weights; also optimiser and gradients."""

PHASES: dict[str, dict[str, int]] = {
    "collect": {"env": ALL, "rollout": ALL, "reward": ALL},
    "update": {"actor": ALL, "critic": ALL, "reference": ALL},
    "publish": {"actor": WEIGHTS, "rollout": WEIGHTS},
    "evaluate": {"env": ALL, "rollout": ALL, "reward": ALL},
    "save": {"actor": ALL, "critic": ALL, "reference": ALL, "rollout": WEIGHTS, "env": ALL},
}
"""Phase -> the state that each role needs on its device. The other roles may be offloaded."""


@dataclass(frozen=True)
class Hardware:
    """Devices, numbered 0 .. D-1 across the nodes.

    Attributes:
        per_node: Number of devices of each node.
        kind: "cuda", or "cpu", where a device is a slot for a process.
        labels: Label -> the nodes that have it.
        memory: Bytes of one device; None: unknown.
    """

    per_node: tuple[int, ...] = (1,)
    kind: str = "cpu"
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: int | None = None

    @property
    def total(self) -> int:
        return sum(self.per_node)

    def node(self, device: int) -> int:
        """Return the node of a device."""
        for number, count in enumerate(self.per_node):
            if device < count:
                return number
            device -= count
        raise AssertionError(device)

    def on(self, label: str | None) -> tuple[int, ...]:
        """Return the devices of the nodes with a label; None: of all nodes."""
        chosen = range(len(self.per_node)) if label is None else self.labels[label]
        return tuple(d for d in range(self.total) if self.node(d) in chosen)


@dataclass(frozen=True)
class Group:
    """Processes with the same roles.

    Attributes:
        roles: Roles of each process.
        devices: Numbers of the devices, ascending.
        ranks: Devices of each process.
        node: Label by which the nodes were selected; None: all nodes.
    """

    roles: tuple[str, ...]
    devices: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    node: str | None = None

    @property
    def name(self) -> str:
        return ",".join(self.roles)

    @property
    def processes(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Plan:
    """Groups of processes on the hardware; every role of the mode is in exactly one of them."""

    groups: tuple[Group, ...]
    hardware: Hardware
    stages: int = 1
    max_lag: int = 0
    weights: str = "auto"

    def has(self, role: str) -> bool:
        """Return whether the run has ``role``."""
        return any(role in g.roles for g in self.groups)

    def group(self, role: str) -> Group:
        """Return the group whose processes have ``role``."""
        return next(g for g in self.groups if role in g.roles)

    def apart(self, asker: str) -> list[str]:
        """Return the roles in other processes that ``asker`` sends requests to."""
        return [
            role for role in ASKS.get(asker, ()) if self.has(role) and not self.fused(asker, role)
        ]

    def processes(self, role: str) -> int:
        return self.group(role).processes

    def fused(self, one: str, other: str) -> bool:
        """Return whether two roles are in the same processes."""
        return self.group(one) is self.group(other)

    def sharing(self, group: Group) -> tuple[Group, ...]:
        """Return the other groups that take turns with ``group`` on common devices."""
        return tuple(
            g for g in self.groups if g is not group and set(g.devices) & set(group.devices)
        )

    def weights_path(self, rank: int) -> str:
        """Return the transport of the actor's weights to rollout process ``rank``: share, ipc,
        broadcast or store.
        """
        if self.fused("rollout", "actor"):
            return "share"
        if self.weights != "auto" or self.max_lag:
            return self.weights if self.weights != "auto" else "store"
        device = self.group("rollout").ranks[rank][0]
        return "ipc" if device in self.group("actor").devices else "broadcast"

    def near(self, rank: int) -> int | None:
        """Return the actor process on the device of rollout process ``rank``, else on its machine;
        None: neither.
        """
        device, ranks = self.group("rollout").ranks[rank][0], self.group("actor").ranks
        neighbours = [i for i, devices in enumerate(ranks) if device in devices]
        neighbours += [
            i
            for i, devices in enumerate(ranks)
            if self.hardware.node(devices[0]) == self.hardware.node(device)
        ]
        return neighbours[0] if neighbours else None

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table of the ranks of each group (columns) on each device (rows); the first row
        is the header.
        """
        h = self.hardware
        table = [("device", "node", *(g.name for g in self.groups))]
        for device in range(h.total):
            cells = []
            for g in self.groups:
                ranks = [str(i) for i, has in enumerate(g.ranks) if device in has]
                cells.append(f"rank {', '.join(ranks)}" if ranks else "-")
            table.append((f"{h.kind} {device}", str(h.node(device)), *cells))
        return table


# ------------------------------------------------------------------------------------------ grammar
def ranges(
    value: Any, available: Sequence[int], label: str, what: str = "device"
) -> tuple[int, ...]:
    """Parse ``all``, ``2``, ``0-3``, ``first half``, ``second half`` or a list of these.

    Args:
        value: The text, number or list.
        available: Devices or nodes that the numbers index.
        label: Beginning of error messages.
        what: What is numbered, for error messages.

    Returns:
        The selected entries of ``available``, ascending.

    Raises:
        PlacementError: The value is no range, or exceeds what is available.
    """
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    count, positions = len(available), list[int]()
    if not parts:
        raise PlacementError(f"{label}: names no {what}; write all, a number or a range as 0-3")
    for part in parts:
        positions += _range(part, count, label, what)
    twice = sorted({d for d in positions if positions.count(d) > 1})
    if twice:
        raise PlacementError(f"{label}: {what} {twice[0]} is listed twice; list it once")
    return tuple(sorted(available[d] for d in positions))


def _range(part: Any, count: int, label: str, what: str) -> range:
    text = " ".join(str(part).split())
    if text == "all":
        return range(count)
    if text in ("first half", "second half"):
        if count < 2:
            raise PlacementError(
                f"{label}: there is {count} {what}, which has no halves; write all"
            )
        return range(count // 2) if text == "first half" else range(count // 2, count)
    if "," in text:
        raise PlacementError(
            f"{label}: {show(part)} is more than one range; write a list, as [{text}]"
        )
    first, dash, last = text.partition("-")
    numbers = [first.strip(), *([last.strip()] if dash else [])]
    if isinstance(part, bool) or not all(n.isdecimal() and len(n) < 10 for n in numbers):
        raise PlacementError(
            f"{label}: {show(part)} is no {what}; write all, a number, a range as 0-3, 'first"
            " half', 'second half', or a list of these"
        )
    low, high = int(first), int(last) if dash else int(first)
    if high < low:
        raise PlacementError(f"{label}: {text} runs backwards; write {high}-{low}")
    if high >= count:
        there = f"0-{count - 1}" if count > 1 else "0"
        raise PlacementError(
            f"{label}: {text} needs {what} {high}, but there {'are' if count > 1 else 'is'} {count}"
            f" ({there}); write"
            f" {'0' if low >= count or low == count - 1 == 0 else f'{low}-{count - 1}'}, or say"
            " what there is in cluster.num_nodes and cluster.devices_per_node"
        )
    return range(low, high + 1)


def _roles(entry: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in str(entry).split(","))


def check_roles(placement: Mapping[str, Any], mode: str, *, without: Sequence[str] = ()) -> None:
    """Check that each role of the run is placed once. Raises PlacementError."""
    placed, whole = list[str](), f"{PATH} = {show(placement)}"
    for entry, value in placement.items():
        label = f"{PATH} = {{{entry}: {show(value)}}}"
        for role in _roles(entry):
            if role not in ROLES[mode]:
                why = f"{role or repr(role)} is no role of mode={mode}"
                if role in ASKS["actor"]:  # a role of the other mode
                    why += " (it is part of the actor)"
                raise PlacementError(f"{label}: {why}; {choose(role, ROLES[mode], 'roles: ')}")
            if role in without:
                raise PlacementError(f"{label}: this run has no {role}; leave it out")
            if role in placed:
                raise PlacementError(f"{whole}: {role} is placed twice; name it once")
            placed.append(role)
    for role in ROLES[mode]:
        if role not in placed and role not in without:
            joined = ",".join([*(_roles(next(iter(placement))) if placement else ()), role])
            raise PlacementError(
                f"{whole}: no device for {role}; join it to an entry, as '{joined}', or give it"
                " its own"
            )


def _group(entry: str, value: Any, hardware: Hardware) -> Group:
    label = f"{PATH} = {{{entry}: {show(value)}}}"
    devices, processes, node = value, None, None
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in ("devices", "processes", "node")]
        if unknown:
            raise PlacementError(
                f"{label}: {unknown[0]} is not known;"
                f" {choose(str(unknown[0]), ('devices', 'processes', 'node'), '')}"
            )
        devices, processes, node = (
            value.get("devices", "all"),
            value.get("processes"),
            value.get("node"),
        )
    if node is not None and node not in list(hardware.labels):
        raise PlacementError(
            f"{label}: no node bears the label {node};"
            f" {choose(str(node), list(hardware.labels), 'labels: ')} (cluster.node_groups)"
        )
    where = ranges(devices, hardware.on(node), label)
    ranks = _ranks(where, processes, hardware, label)
    return Group(_roles(entry), where, ranks, node)


def _ranks(
    where: tuple[int, ...], processes: Any, hardware: Hardware, label: str
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each process: one, or several processes per device, or several devices
    per process.
    """
    count = len(where)
    if processes is None:
        return tuple((d,) for d in where)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise PlacementError(
            f"{label}: processes = {show(processes)} must be a number >= 1; leave it out: {count}"
        )
    if processes > MOST * count:
        raise PlacementError(
            f"{label}: processes = {processes} are more than {MOST} on a device; write processes:"
            f" {count}"
        )
    if processes % count and count % processes:
        near = [n for n in range(1, 2 * count + 1) if n % count == 0 or count % n == 0]
        best = min(near, key=lambda n: abs(n - processes))
        raise PlacementError(
            f"{label}: {processes} processes do not divide evenly over {count} devices; write"
            f" processes: {best}"
        )
    if processes >= count:
        return tuple((where[i * count // processes],) for i in range(processes))
    each = count // processes
    ranks = tuple(where[i : i + each] for i in range(0, count, each))
    for devices in ranks:
        if len({hardware.node(d) for d in devices}) > 1:
            raise PlacementError(
                f"{label}: a process would have devices {show(list(devices))} of two nodes; write"
                f" processes: {count}"
            )
    return ranks


# -------------------------------------------------------------------------------------------- plans
def plan(
    placement: Mapping[str, Any] | str,
    hardware: Hardware,
    *,
    mode: str = "embodied",
    without: Sequence[str] = (),
    stages: int = 1,
    max_lag: int = 0,
    weights: str = "auto",
) -> Plan:
    """Return the checked plan of a placement.

    Args:
        placement: ``cluster.component_placement``, or the name of a preset.
        hardware: The devices.
        mode: Mode of the run.
        without: Roles of the mode that this run does not have.
        stages: ``cluster.stages``.
        max_lag: ``cluster.max_lag``.
        weights: ``cluster.weights``.

    Raises:
        PlacementError: The placement is malformed, or does not fit the hardware or the options.
    """
    if isinstance(placement, str):
        groups = _preset(
            placement, hardware, mode, [role for role in ROLES[mode] if role not in without]
        )
    else:
        check_roles(placement, mode, without=without)
        groups = tuple(_group(entry, value, hardware) for entry, value in placement.items())
    p = Plan(groups, hardware, stages, max_lag, weights)
    _check_lag(p)
    _check_weights(p)
    return p


def _preset(name: str, hardware: Hardware, mode: str, wanted: Sequence[str]) -> tuple[Group, ...]:
    groups = list[Group]()
    if "env" not in ROLES[mode] and PRESETS[name].get("env") == "first half":
        raise PlacementError(
            f"placement = {name}: sets the simulators apart, and mode=reasoning has none; use"
            " fused, colocated or disaggregated"
        )
    for entry, devices in PRESETS[name].items():
        roles = [role for role in entry.split(",") if role in wanted]
        if not roles:
            continue
        if "half" in devices and hardware.total < 2:
            raise PlacementError(
                f"placement = {name}: needs 2 devices, and there is 1; use fused or colocated, or"
                " say what there is in cluster.devices_per_node"
            )
        groups.append(_group(",".join(roles), devices, hardware))
    return tuple(groups)


def _check_lag(p: Plan) -> None:
    if not p.max_lag:
        return
    for learner in ("actor", "critic", "reference"):
        for role in ("env", "rollout", "reward"):
            if not (p.has(learner) and p.has(role)):
                continue
            if common := set(p.group(learner).devices) & set(p.group(role).devices):
                raise PlacementError(
                    f"cluster.max_lag = {p.max_lag}: {role} and {learner} share device"
                    f" {min(common)}, so they cannot run at once; write cluster.max_lag=0, or give"
                    f" {learner} its own devices (placement=disaggregated)"
                )


def _check_weights(p: Plan) -> None:
    for rank in range(p.processes("rollout")):
        if p.weights_path(rank) == "ipc" and p.near(rank) is None:
            node = p.hardware.node(p.group("rollout").ranks[rank][0])
            raise PlacementError(
                f"cluster.weights = ipc: rollout rank {rank} is on node {node}, which has no actor"
                " to read the memory of; leave it out (auto)"
            )


def check_numbers(p: Plan, *, num_envs: int, group_size: int, global_batch_size: int) -> None:
    """Check that environments and samples divide evenly over the processes (embodied).

    Raises PlacementError.
    """
    counts = {role: p.processes(role) for role in ROLES["embodied"]}
    for one, other in (("env", "rollout"), ("rollout", "actor")):
        a, b = counts[one], counts[other]
        if a % b and b % a:
            raise PlacementError(
                f"{PATH}: {a} processes of {one} and {b} of {other}: one must divide the other; "
                f"write processes: {_divisor(b, a)} for {one}"
            )
    most = max(counts.values()) * p.stages
    if num_envs % (most * group_size):
        grouped = f" x algorithm.group_size = {group_size}" if group_size > 1 else ""
        step = most * group_size
        raise PlacementError(
            f"env.num_envs = {num_envs}: cannot be dealt out evenly over {max(counts.values())}"
            f" processes x cluster.stages = {p.stages}{grouped}; write"
            f" env.num_envs={max(step, round(num_envs / step) * step)}"
        )
    if global_batch_size % counts["actor"]:
        near = max(1, round(global_batch_size / counts["actor"])) * counts["actor"]
        raise PlacementError(
            f"algorithm.global_batch_size = {global_batch_size}: cannot be dealt out evenly over"
            f" {counts['actor']} processes of actor; write algorithm.global_batch_size={near}"
        )


def check_sequences(p: Plan, *, prompts: int, group_size: int, batches: Mapping[str, int]) -> None:
    """Check that prompts and responses divide evenly over the processes (reasoning mode).

    Args:
        p: The plan.
        prompts: Prompts of an update.
        group_size: Responses to each prompt.
        batches: Option -> responses of one of its optimiser steps.

    Raises:
        PlacementError: They do not divide.
    """
    actors, acts = p.processes("actor"), p.processes("rollout")
    if acts % actors and actors % acts:
        raise PlacementError(
            f"{PATH}: {acts} processes of rollout and {actors} of actor: one must divide the other;"
            f" write processes: {_divisor(actors, acts)} for rollout"
        )
    if p.has("critic") and p.processes("critic") != actors:
        raise PlacementError(
            f"{PATH}: {p.processes('critic')} processes of critic and {actors} of actor: each actor"
            f" has its own critic; write processes: {actors} for critic"
        )
    for asker, role in (("rollout", "reward"), ("actor", "reference")):
        if p.has(role) and p.processes(asker) % p.processes(role):
            raise PlacementError(
                f"{PATH}: {p.processes(role)} processes of {role} cannot be dealt out evenly over"
                f" {p.processes(asker)} of {asker}; write processes:"
                f" {_divisor(p.processes(asker), 1)} for {role}"
            )
    if prompts % acts:
        near = max(1, round(prompts / acts)) * acts
        raise PlacementError(
            f"algorithm.rollout_batch_size = {prompts}: cannot be dealt out evenly over {acts}"
            f" processes of rollout; write algorithm.rollout_batch_size={near}"
        )
    for option, responses in {
        "algorithm.rollout_batch_size": prompts * group_size,
        **batches,
    }.items():
        if responses % actors:
            near = max(1, round(responses / actors)) * actors
            while near % group_size:
                near += actors
            raise PlacementError(
                f"{option} = {responses // group_size}: {responses} responses cannot be dealt out"
                f" evenly over {actors} processes of actor; write {option}={near // group_size}"
            )


def _divisor(of: int, near: int) -> int:
    """Return the divisor or multiple of ``of`` that is nearest to ``near``."""
    return min(
        (n for n in range(1, 2 * max(of, near) + 1) if n % of == 0 or of % n == 0),
        key=lambda n: abs(n - near),
    )


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as aligned lines of text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ------------------------------------------------------------------------------------------- memory
Need = Mapping[str, int]
"""Purpose (weights, gradients, optimiser, experience, activations) -> peak memory of one process,
bytes.
"""
CONTEXT = 500_000_000
"""Memory of the CUDA context of one process, bytes (estimated, not measured)."""
ROOM = 0.92
"""Fraction of a device's memory to plan with; the driver, the allocator and other programs use the
remainder.
"""


@dataclass(frozen=True)
class Load:
    """Memory of a device (on the CPU: of a machine) in the phase that needs most.

    Attributes:
        where: The device or node.
        phase: The phase.
        parts: Name of a group -> bytes of each of its processes there.
    """

    where: str
    phase: str
    parts: Mapping[str, Sequence[int]]

    @property
    def total(self) -> int:
        return sum(map(sum, self.parts.values()))


def loads(p: Plan, needs: Mapping[str, Need]) -> list[Load]:
    """Return the load of every device that is used.

    On the CPU all processes of a machine share its memory, and none is offloaded. On a GPU, groups
    that take turns need what the phase requires, and each process keeps a CUDA context.

    Args:
        p: The plan.
        needs: Name of a group -> need of one of its processes.
    """
    gpu = p.hardware.kind == "cuda"
    most: dict[str, Load] = {}
    for phase in ("collect", "update", "publish"):
        wanted = PHASES[phase]
        places: dict[str, dict[str, list[int]]] = {}
        for g in p.groups:
            need = needs[g.name]
            level = (
                max(wanted.get(role, ASLEEP) for role in g.roles) if gpu and p.sharing(g) else ALL
            )
            size = {ASLEEP: 0, WEIGHTS: need.get("weights", 0), ALL: sum(need.values())}[
                level
            ] + CONTEXT * gpu
            for has in g.ranks:
                for device in has:
                    where = f"cuda {device}" if gpu else f"node {p.hardware.node(device)}"
                    places.setdefault(where, {}).setdefault(g.name, []).append(size // len(has))
        for where, parts in places.items():
            load = Load(where, phase, parts)
            if where not in most or load.total > most[where].total:
                most[where] = load
    return list(most.values())


def check_memory(
    p: Plan,
    needs: Mapping[str, Need],
    sharded: Callable[[], Mapping[str, Need]] | None = None,
    *,
    least: bool = False,
) -> None:
    """Check that everything fits into memory in every phase.

    Args:
        p: The plan.
        needs: As for ``loads``.
        sharded: Returns the needs with cluster.shard, where it is off and could be on.
        least: Micro-batches cannot be smaller.

    Raises:
        PlacementError: A device is too small; the message has the sum.
    """
    excess = _too_much(p, needs, least)
    if excess is None:
        return
    message, cure = excess
    if sharded is not None and _too_much(p, sharded(), least) is None:
        cure = (
            f"write cluster.shard=true: {p.processes('actor')} processes of actor then hold a part"
            " of the model each"
        )
    raise PlacementError(f"{message}; {cure}")


def _too_much(p: Plan, needs: Mapping[str, Need], least: bool) -> tuple[str, str] | None:
    """Return the message about the first device that is too small, and a cure; None: everything
    fits.
    """
    limit = p.hardware.memory
    if limit is None:
        return None
    for load in loads(p, needs):
        if load.total > ROOM * limit:
            largest = max(load.parts, key=lambda name: sum(load.parts[name]))
            purposes = ", ".join(
                f"{what} {amount(size)}" for what, size in needs[largest].items() if size
            )
            parts = " + ".join(
                f"{len(sizes)} x {amount(sizes[0])} ({name})" for name, sizes in load.parts.items()
            )
            context = (
                f", {amount(CONTEXT)} of each for CUDA itself" if p.hardware.kind == "cuda" else ""
            )
            return (
                (
                    f"placement: {load.where} needs {parts} = {amount(load.total)} to {load.phase},"
                    f" more than {ROOM:.0%} of its {amount(limit)}; one process of {largest}:"
                    f" {purposes}{context}"
                ),
                _memory_cure(p, needs[largest], least),
            )
    return None


def amount(size: int) -> str:
    """Return bytes as text in GB or MB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def _memory_cure(p: Plan, need: Need, least: bool) -> str:
    most = max(need, key=lambda what: need[what])
    smallest = "use gradient_checkpointing, a smaller model" + (
        " or fewer env.num_envs" if p.has("env") else ""
    )
    return {
        "activations": smallest if least else "lower algorithm.micro_batch_size",
        "experience": "lower algorithm.horizon or env.num_envs, or use more devices",
        "cache": "lower rollout.slots",
        "weights": "use a smaller model, or give roles devices of their own",
    }.get(most, "train adapters (model.lora_rank), or give roles devices of their own")


def memory_rows(p: Plan, needs: Mapping[str, Need]) -> list[tuple[str, ...]]:
    """Return a table of the memory of one process: purposes (rows) x groups (columns); the first
    row is the header.
    """
    kinds = list(dict.fromkeys(what for need in needs.values() for what in need))
    table = [("one process needs", *(g.name for g in p.groups))]
    for what in kinds:
        table.append((what, *(amount(needs[g.name].get(what, 0)) for g in p.groups)))
    table.append(("together", *(amount(sum(needs[g.name].values())) for g in p.groups)))
    return table
