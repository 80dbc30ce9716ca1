"""Placement syntax: text -> a checked ``Plan`` of processes, roles and devices.

Roles joined by a comma share a process; entries with common devices time-share them; the other
entries run concurrently. No process is started here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.config.rules.base import divisors
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
"""Component placement that ``placement=NAME`` stands for.

Roles that a run does not have are left out. ``local`` runs in this process, without Ray.
"""

PATH = "cluster.component_placement"
MAX_PROCESSES_PER_DEVICE = 1024
"""Maximum number of processes on one device; a larger number is refused as a typing error."""
MAX_DEVICES = 16384
"""Maximum number of devices of all machines."""

REQUESTS: dict[str, tuple[str, ...]] = {
    "rollout": ("env", "reward"),
    "actor": ("critic", "reference"),
}
"""Role -> the roles that it sends requests to: a call within a process, a message between
processes.
"""

OFFLOADED, WEIGHTS, ALL = 0, 1, 2
"""What a process has on its device: nothing; the weights; also optimiser state and gradients."""

PHASES: dict[str, dict[str, int]] = {
    "collect": {"env": ALL, "rollout": ALL, "reward": ALL},
    "update": {"actor": ALL, "critic": ALL, "reference": ALL},
    "publish": {"actor": WEIGHTS, "rollout": WEIGHTS},
    "evaluate": {"env": ALL, "rollout": ALL, "reward": ALL},
    "save": {"actor": ALL, "critic": ALL, "reference": ALL, "rollout": WEIGHTS, "env": ALL},
}
"""Phase -> what each role needs on its device. The other roles may be offloaded."""


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

    def remote_roles(self, caller: str) -> list[str]:
        """Return the roles in other processes that ``caller`` sends requests to."""
        present = [role for role in REQUESTS.get(caller, ()) if self.has(role)]
        return [role for role in present if not self.fused(caller, role)]

    def processes(self, role: str) -> int:
        return self.group(role).processes

    def fused(self, one: str, other: str) -> bool:
        """Return whether two roles are in the same processes."""
        return self.group(one) is self.group(other)

    def sharing(self, group: Group) -> tuple[Group, ...]:
        """Return the other groups that time-share devices with ``group``."""
        return tuple(
            g for g in self.groups if g is not group and set(g.devices) & set(group.devices)
        )

    def weights_path(self, rank: int) -> str:
        """Return how rollout process ``rank`` gets the weights: share, ipc, broadcast or store."""
        if self.fused("rollout", "actor"):
            return "share"
        if self.weights != "auto" or self.max_lag:
            return self.weights if self.weights != "auto" else "store"
        device = self.group("rollout").ranks[rank][0]
        return "ipc" if device in self.group("actor").devices else "broadcast"

    def nearest_actor(self, rank: int) -> int | None:
        """Return the actor process on the device, else on the node, of rollout process ``rank``."""
        device, ranks = self.group("rollout").ranks[rank][0], self.group("actor").ranks
        node_of = self.hardware.node
        on_device = [i for i, devices in enumerate(ranks) if device in devices]
        on_node = [i for i, devices in enumerate(ranks) if node_of(devices[0]) == node_of(device)]
        return next(iter(on_device + on_node), None)

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table: the ranks of each group (columns) on each device (rows), with header."""
        h = self.hardware
        table = [("device", "node", *(g.name for g in self.groups))]
        for device in range(h.total):
            cells = []
            for g in self.groups:
                ranks = [str(i) for i, devices in enumerate(g.ranks) if device in devices]
                cells.append(f"rank {', '.join(ranks)}" if ranks else "-")
            table.append((f"{h.kind} {device}", str(h.node(device)), *cells))
        return table


# ------------------------------------------------------------------------------------------ grammar
def ranges(
    value: Any, available: Sequence[int], label: str, unit: str = "device"
) -> tuple[int, ...]:
    """Parse ``all``, ``2``, ``0-3``, ``first half``, ``second half`` or a list of these.

    Args:
        value: The text, number or list.
        available: Devices or nodes that the numbers index.
        label: Beginning of error messages.
        unit: Name of a numbered thing in error messages.

    Returns:
        The selected entries of ``available``, ascending.

    Raises:
        PlacementError: The value is no range, or exceeds what is available.
    """
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    count, positions = len(available), list[int]()
    if not parts:
        raise PlacementError(f"{label}: names no {unit}; write all, a number or a range as 0-3")
    for part in parts:
        positions += _range(part, count, label, unit)
    repeated = sorted({d for d in positions if positions.count(d) > 1})
    if repeated:
        raise PlacementError(f"{label}: {unit} {repeated[0]} is listed twice; list it once")
    return tuple(sorted(available[d] for d in positions))


def _range(part: Any, count: int, label: str, unit: str) -> range:
    text = " ".join(str(part).split())
    if text == "all":
        return range(count)
    if text in ("first half", "second half"):
        if count < 2:
            raise PlacementError(
                f"{label}: there is {count} {unit}, which has no halves; write all"
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
            f"{label}: {show(part)} is no {unit}; write all, a number, a range as 0-3, 'first"
            " half', 'second half', or a list of these"
        )
    low, high = int(first), int(last) if dash else int(first)
    if high < low:
        raise PlacementError(f"{label}: {text} runs backwards; write {high}-{low}")
    if high >= count:
        last_valid = count - 1
        valid = f"0-{last_valid}" if count > 1 else "0"
        cure = "0" if low > last_valid or last_valid == low == 0 else f"{low}-{last_valid}"
        raise PlacementError(
            f"{label}: {text} needs {unit} {high}, but there {'are' if count > 1 else 'is'} {count}"
            f" ({valid}); write {cure}, or set the available devices with cluster.num_nodes and"
            " cluster.devices_per_node"
        )
    return range(low, high + 1)


def _roles(entry: str) -> tuple[str, ...]:
    """Return the roles of a comma-separated entry."""
    return tuple(role.strip() for role in str(entry).split(","))


def check_roles(placement: Mapping[str, Any], mode: str, *, without: Sequence[str] = ()) -> None:
    """Check that each role of the run is placed once. Raises PlacementError."""
    placed, all_entries = list[str](), f"{PATH} = {show(placement)}"
    for entry, value in placement.items():
        label = f"{PATH} = {{{entry}: {show(value)}}}"
        for role in _roles(entry):
            if role not in ROLES[mode]:
                reason = f"{role or repr(role)} is no role of mode={mode}"
                if role in REQUESTS["actor"]:  # a role of the other mode
                    reason += " (it is part of the actor)"
                raise PlacementError(f"{label}: {reason}; {choose(role, ROLES[mode], 'roles: ')}")
            if role in without:
                raise PlacementError(f"{label}: this run has no {role}; leave it out")
            if role in placed:
                raise PlacementError(f"{all_entries}: {role} is placed twice; name it once")
            placed.append(role)
    for role in ROLES[mode]:
        if role not in placed and role not in without:
            joined = ",".join([*(_roles(next(iter(placement))) if placement else ()), role])
            raise PlacementError(
                f"{all_entries}: no device for {role}; join it to an entry, as '{joined}', or give"
                " it its own"
            )


def _group(entry: str, value: Any, hardware: Hardware) -> Group:
    """Return the group of one entry of the placement."""
    label = f"{PATH} = {{{entry}: {show(value)}}}"
    options = value if isinstance(value, Mapping) else {"devices": value}
    known = ("devices", "processes", "node")
    if unknown := [key for key in options if key not in known]:
        raise PlacementError(
            f"{label}: {unknown[0]} is not known; {choose(str(unknown[0]), known, '')}"
        )
    node = options.get("node")
    if node is not None and node not in list(hardware.labels):
        raise PlacementError(
            f"{label}: no node bears the label {node};"
            f" {choose(str(node), list(hardware.labels), 'labels: ')} (cluster.node_groups)"
        )
    devices = ranges(options.get("devices", "all"), hardware.on(node), label)
    ranks = _ranks(devices, options.get("processes"), hardware, label)
    return Group(_roles(entry), devices, ranks, node)


def _ranks(
    devices: tuple[int, ...], processes: Any, hardware: Hardware, label: str
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each process; processes may share a device, or have several."""
    count = len(devices)
    if processes is None:
        return tuple((d,) for d in devices)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise PlacementError(
            f"{label}: processes = {show(processes)} must be a number >= 1; leave it out: {count}"
        )
    if processes > MAX_PROCESSES_PER_DEVICE * count:
        raise PlacementError(
            f"{label}: processes = {processes} are more than {MAX_PROCESSES_PER_DEVICE} on a"
            f" device; write processes: {count}"
        )
    if processes % count and count % processes:
        raise PlacementError(
            f"{label}: {processes} processes do not divide evenly over {count} devices; write"
            f" processes: {_nearest_divisor(count, processes)}"
        )
    if processes >= count:
        return tuple((devices[i * count // processes],) for i in range(processes))
    each = count // processes
    ranks = tuple(devices[i : i + each] for i in range(0, count, each))
    for rank in ranks:
        if len({hardware.node(d) for d in rank}) > 1:
            raise PlacementError(
                f"{label}: a process would have devices {show(list(rank))} of two nodes; write"
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
        groups = _preset(placement, hardware, mode, without)
    else:
        check_roles(placement, mode, without=without)
        groups = tuple(_group(entry, value, hardware) for entry, value in placement.items())
    checked = Plan(groups, hardware, stages, max_lag, weights)
    _check_lag(checked)
    _check_weights(checked)
    return checked


def _preset(name: str, hardware: Hardware, mode: str, without: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups of a preset without the roles that the run does not have."""
    if "env" not in ROLES[mode] and PRESETS[name].get("env") == "first half":
        raise PlacementError(
            f"placement = {name}: sets the simulators apart, and mode={mode} has none; use"
            " fused, colocated or disaggregated"
        )
    present = set(ROLES[mode]) - set(without)
    groups = list[Group]()
    for entry, devices in PRESETS[name].items():
        roles = [role for role in entry.split(",") if role in present]
        if roles and "half" in devices and hardware.total < 2:
            raise PlacementError(
                f"placement = {name}: needs 2 devices, and there is 1; use fused or colocated, or"
                " set the available devices with cluster.devices_per_node"
            )
        if roles:
            groups.append(_group(",".join(roles), devices, hardware))
    return tuple(groups)


def _check_lag(p: Plan) -> None:
    """Check that roles which run concurrently share no device. Raises PlacementError."""
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
    """Check that ``ipc`` has an actor on every node with a rollout. Raises PlacementError."""
    for rank in range(p.processes("rollout")):
        if p.weights_path(rank) == "ipc" and p.nearest_actor(rank) is None:
            node = p.hardware.node(p.group("rollout").ranks[rank][0])
            raise PlacementError(
                f"cluster.weights = ipc: rollout rank {rank} is on node {node}, which has no actor"
                " to read the memory of; leave it out (auto)"
            )


def check_group_filter(p: Plan, group_filter: str | None) -> None:
    """Refuse to filter groups in several parts of a rollout.

    Each part would fill its own share of the batch, so that results would depend on the placement.

    Args:
        p: The plan.
        group_filter: algorithm.group_filter.

    Raises:
        PlacementError: Rollouts have several processes or stages.
    """
    if group_filter is None:
        return
    for path, count in (("processes of rollout", p.processes("rollout")), ("stages", p.stages)):
        if count > 1:
            raise PlacementError(
                f"algorithm.group_filter = {group_filter}: one rollout fills the batch, but the"
                f" placement has {count} {path}; place rollout in one process with"
                " cluster.stages=1, or write algorithm.group_filter=null"
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
                f"write processes: {_nearest_divisor(b, a)} for {one}"
            )
    processes = max(counts.values())
    unit = processes * p.stages * group_size
    if num_envs % unit:
        groups = f" x algorithm.group_size = {group_size}" if group_size > 1 else ""
        raise PlacementError(
            f"env.num_envs = {num_envs}: cannot be divided evenly over {processes} processes x"
            f" cluster.stages = {p.stages}{groups}; write"
            f" env.num_envs={_nearest_multiple(unit, num_envs)}"
        )
    actors = counts["actor"]
    if global_batch_size % actors:
        raise PlacementError(
            f"algorithm.global_batch_size = {global_batch_size}: cannot be divided evenly over"
            f" {actors} processes of actor; write"
            f" algorithm.global_batch_size={_nearest_multiple(actors, global_batch_size)}"
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
    actors, rollouts = p.processes("actor"), p.processes("rollout")
    if rollouts % actors and actors % rollouts:
        raise PlacementError(
            f"{PATH}: {rollouts} processes of rollout and {actors} of actor: one must divide the"
            f" other; write processes: {_nearest_divisor(actors, rollouts)} for rollout"
        )
    if p.has("critic") and p.processes("critic") != actors:
        raise PlacementError(
            f"{PATH}: {p.processes('critic')} processes of critic and {actors} of actor: each actor"
            f" has its own critic; write processes: {actors} for critic"
        )
    for caller, role in (("rollout", "reward"), ("actor", "reference")):
        if p.has(role) and p.processes(caller) % p.processes(role):
            raise PlacementError(
                f"{PATH}: {p.processes(role)} processes of {role} cannot be divided evenly over"
                f" {p.processes(caller)} of {caller}; write processes: 1 for {role}"
            )
    if prompts % rollouts:
        raise PlacementError(
            f"algorithm.rollout_batch_size = {prompts}: cannot be divided evenly over {rollouts}"
            " processes of rollout; write"
            f" algorithm.rollout_batch_size={_nearest_multiple(rollouts, prompts)}"
        )
    sizes = {"algorithm.rollout_batch_size": prompts * group_size, **batches}
    for option, responses in sizes.items():
        if responses % actors:
            nearest = _nearest_multiple(actors, responses)
            while nearest % group_size:
                nearest += actors
            raise PlacementError(
                f"{option} = {responses // group_size}: {responses} responses cannot be divided"
                f" evenly over {actors} processes of actor; write {option}={nearest // group_size}"
            )


def _nearest_divisor(count: int, value: int) -> int:
    """Return the divisor or multiple of ``count`` that is nearest to ``value``."""
    multiples = [value // count * count, (value // count + 1) * count]
    candidates = sorted({*divisors(count), *filter(None, multiples)})
    return min(candidates, key=lambda n: abs(n - value))


def _nearest_multiple(unit: int, value: int) -> int:
    """Return the positive multiple of ``unit`` that is nearest to ``value``."""
    return max(1, round(value / unit)) * unit


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as aligned lines of text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# ------------------------------------------------------------------------------------------- memory
Need = Mapping[str, int]
"""Purpose (weights, gradients, optimiser, ...) -> peak memory of one process, bytes."""
CUDA_CONTEXT = 500_000_000
"""Memory of the CUDA context of one process, bytes (estimated, not measured)."""
USABLE_MEMORY = 0.92
"""Fraction of a device's memory to plan with.

The driver, the allocator and other programs use the remainder.
"""


@dataclass(frozen=True)
class Load:
    """Memory of a device (on the CPU: of a machine) in the phase that needs most.

    Attributes:
        place: The device or node.
        phase: The phase.
        parts: Name of a group -> bytes of each of its processes there.
    """

    place: str
    phase: str
    parts: Mapping[str, Sequence[int]]

    @property
    def total(self) -> int:
        return sum(map(sum, self.parts.values()))


def loads(p: Plan, needs: Mapping[str, Need]) -> list[Load]:
    """Return the load of every device that is used.

    On the CPU all processes of a machine share its memory, and none is offloaded. On a GPU, groups
    that time-share a device need what the phase requires, and each process keeps a CUDA context.

    Args:
        p: The plan.
        needs: Name of a group -> need of one of its processes.
    """
    gpu = p.hardware.kind == "cuda"
    largest: dict[str, Load] = {}
    for phase in ("collect", "update", "publish"):
        places: dict[str, dict[str, list[int]]] = {}
        for g in p.groups:
            need, level = needs[g.name], ALL
            if gpu and p.sharing(g):
                level = max(PHASES[phase].get(role, OFFLOADED) for role in g.roles)
            sizes = {OFFLOADED: 0, WEIGHTS: need.get("weights", 0), ALL: sum(need.values())}
            size = sizes[level] + CUDA_CONTEXT * gpu
            for devices in g.ranks:
                for device in devices:
                    place = f"cuda {device}" if gpu else f"node {p.hardware.node(device)}"
                    parts = places.setdefault(place, {}).setdefault(g.name, [])
                    parts.append(size // len(devices))
        for place, parts in places.items():
            load = Load(place, phase, parts)
            if place not in largest or load.total > largest[place].total:
                largest[place] = load
    return list(largest.values())


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
    excess = _excess(p, needs, least)
    if excess is None:
        return
    message, cure = excess
    if sharded is not None and _excess(p, sharded(), least) is None:
        cure = (
            f"write cluster.shard=true: {p.processes('actor')} processes of actor then hold a part"
            " of the model each"
        )
    raise PlacementError(f"{message}; {cure}")


def _excess(p: Plan, needs: Mapping[str, Need], least: bool) -> tuple[str, str] | None:
    """Return the message about the first device that is too small, and a cure, if there is one."""
    limit = p.hardware.memory
    if limit is None:
        return None
    for load in loads(p, needs):
        if load.total <= USABLE_MEMORY * limit:
            continue
        largest = max(load.parts, key=lambda name: sum(load.parts[name]))
        purposes = [f"{purpose} {amount(size)}" for purpose, size in needs[largest].items() if size]
        if p.hardware.kind == "cuda":
            purposes.append(f"{amount(CUDA_CONTEXT)} of each for CUDA itself")
        parts = " + ".join(
            f"{len(sizes)} x {amount(sizes[0])} ({name})" for name, sizes in load.parts.items()
        )
        message = (
            f"placement: {load.place} needs {parts} = {amount(load.total)} to {load.phase}, more"
            f" than {USABLE_MEMORY:.0%} of its {amount(limit)}; one process of {largest}:"
            f" {', '.join(purposes)}"
        )
        return message, _memory_cure(p, needs[largest], least)
    return None


def amount(size: int) -> str:
    """Return bytes as text in GB or MB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def _memory_cure(p: Plan, need: Need, least: bool) -> str:
    """Return what reduces the largest part of the memory of a process."""
    envs = " or fewer env.num_envs" if p.has("env") else ""
    smallest = f"use gradient_checkpointing, a smaller model{envs}"
    return {
        "activations": smallest if least else "lower algorithm.micro_batch_size",
        "experience": "lower algorithm.horizon or env.num_envs, or use more devices",
        "cache": "lower rollout.slots",
        "weights": "use a smaller model, or give roles devices of their own",
    }.get(
        max(need, key=lambda purpose: need[purpose]),
        "train adapters (model.lora_rank), or give roles devices of their own",
    )


def memory_rows(p: Plan, needs: Mapping[str, Need]) -> list[tuple[str, ...]]:
    """Return a table of the memory of one process: purposes (rows) x groups (columns)."""
    group_needs = [needs[g.name] for g in p.groups]
    purposes = list(dict.fromkeys(purpose for need in needs.values() for purpose in need))
    return [
        ("memory per process", *(g.name for g in p.groups)),
        *((purpose, *(amount(n.get(purpose, 0)) for n in group_needs)) for purpose in purposes),
        ("total", *(amount(sum(n.values())) for n in group_needs)),
    ]
