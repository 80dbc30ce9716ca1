"""Placement syntax: text -> a checked ``Plan`` of processes, roles and devices.

Roles joined by a comma share a process; entries with common devices time-share them; the other
entries run concurrently. No process is started here.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from embodied_envs.base.errors import choose, show
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.core.tables import tables

# Mode -> roles. In embodied mode the actor holds the critic, a head, and the reference.
ROLES: dict[str, tuple[str, ...]] = {
    "embodied": ("env", "rollout", "actor"),
    "reasoning": ("rollout", "actor", "critic", "reference", "reward"),
}

# placement=NAME -> its component placement, without roles that a run lacks. local: without Ray.
PRESETS: dict[str, dict[str, str]] = tables(__file__)["presets"]

PATH = "cluster.component_placement"
# Maximum number of processes on one device; a larger number is refused as a typing error.
MAX_PROCESSES_PER_DEVICE = 1024
MAX_DEVICES = 16384  # maximum number of devices of all machines

# Role -> roles that it sends requests to: calls within a process, messages between processes.
REQUESTS = {"rollout": ("env", "reward"), "actor": ("critic", "reference")}

# What a process has on its device: nothing; the weights; also optimiser state and gradients.
OFFLOADED, WEIGHTS, ALL = 0, 1, 2

# Phase -> what each role needs on its device. The other roles may be offloaded.
PHASES: dict[str, dict[str, int]] = {
    "collect": {"env": ALL, "rollout": ALL, "reward": ALL},
    "update": {"actor": ALL, "critic": ALL, "reference": ALL},
    "publish": {"actor": WEIGHTS, "rollout": WEIGHTS},
    "evaluate": {"env": ALL, "rollout": ALL, "reward": ALL},
    "save": {"actor": ALL, "critic": ALL, "reference": ALL, "rollout": WEIGHTS, "env": ALL},
}


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
    """

    roles: tuple[str, ...]
    devices: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

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
        devices = set(group.devices)
        return tuple(g for g in self.groups if g is not group and devices & set(g.devices))

    def weights_path(self, rank: int) -> str:
        """Return how rollout process ``rank`` gets the weights: share, ipc, broadcast or store."""
        if self.fused("rollout", "actor"):
            return "share"
        if self.max_lag:
            return "store"  # processes fetch the weights later, when the learner has newer ones
        return "broadcast" if self.actor_beside(rank) is None else "ipc"

    def actor_beside(self, rank: int) -> int | None:
        """Return the actor process on the device of rollout process ``rank``, or None."""
        device = self.group("rollout").ranks[rank][0]
        actors = enumerate(self.group("actor").ranks)
        return next((i for i, devices in actors if device in devices), None)

    def without(self, *roles: str) -> Plan:
        """Return the plan without roles, and without processes that have no others."""
        kept = [(g, tuple(role for role in g.roles if role not in roles)) for g in self.groups]
        return replace(self, groups=tuple(replace(g, roles=others) for g, others in kept if others))

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
        PlacementError: The value is no range, exceeds what is available, or repeats an entry.
    """
    count, positions = len(available), list[int]()
    names = {"all": range(count)}
    if count > 1:
        names |= {"first half": range(count // 2), "second half": range(count // 2, count)}
    for part in list(value) if isinstance(value, (list, tuple)) and value else [value]:
        text = " ".join(str(part).split())
        numbers = re.fullmatch(r"(\d{1,9})(?: ?- ?(\d{1,9}))?", text, re.ASCII)
        low, high = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (count, count)
        if text not in names and not low <= high < count:
            raise PlacementError(
                f"{label}: {show(part)} is no {unit}, and there {'are' if count > 1 else 'is'}"
                f" {count} (0-{count - 1}); write {', '.join(names)}, a number, a range as 0-3 or a"
                " list of these (cluster.num_nodes and devices_per_node set their number)"
            )
        positions += names.get(text, range(low, high + 1))
    if len(set(positions)) < len(positions):
        raise PlacementError(f"{label}: lists a {unit} twice; list it once")
    return tuple(sorted(available[d] for d in positions))


def _roles(entry: str) -> tuple[str, ...]:
    """Return the roles of a comma-separated entry."""
    return tuple(role.strip() for role in str(entry).split(","))


def check_roles(placement: Mapping[str, Any], roles: Sequence[str]) -> None:
    """Check that each role of the run is placed once. Raises PlacementError."""
    placed = list[str]()
    for entry, value in placement.items():
        for role in _roles(entry):
            if role not in roles:
                raise PlacementError(
                    f"{PATH} = {{{entry}: {show(value)}}}: {role or repr(role)} is no role of this"
                    f" run; {choose(role, roles, 'roles: ')}"
                )
            placed.append(role)
    for role in roles:
        if (count := placed.count(role)) != 1:
            problem = f"{role} is placed twice" if count else f"no device for {role}"
            raise PlacementError(f"{PATH} = {show(placement)}: {problem}; name {role} in one entry")


def _group(entry: str, value: Any, hardware: Hardware) -> Group:
    """Return the group of one entry of the placement."""
    label = f"{PATH} = {{{entry}: {show(value)}}}"
    options = value if isinstance(value, Mapping) else {"devices": value}
    for key in options:
        if key not in (known := ("devices", "processes", "node")):
            raise PlacementError(f"{label}: {key} is not known; {choose(str(key), known, '')}")
    node, labels = options.get("node"), list(hardware.labels)
    if node is not None and node not in labels:
        raise PlacementError(
            f"{label}: no node bears the label {node};"
            f" {choose(str(node), labels, 'labels: ')} (cluster.node_groups)"
        )
    devices = ranges(options.get("devices", "all"), hardware.on(node), label)
    ranks = _ranks(devices, options.get("processes"), hardware, label)
    return Group(_roles(entry), devices, ranks)


def _ranks(
    devices: tuple[int, ...], processes: Any, hardware: Hardware, label: str
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each process; processes may share a device, or have several."""
    count = len(devices)
    if processes is None:
        return tuple((d,) for d in devices)
    limit = MAX_PROCESSES_PER_DEVICE * count
    is_count = type(processes) is int and 1 <= processes <= limit
    if not is_count or (processes % count and count % processes):
        raise PlacementError(
            f"{label}: processes = {show(processes)} must divide the {count} devices evenly, or be"
            f" a multiple of {count} up to {limit}; write processes: {count}"
        )
    if processes >= count:
        return tuple((devices[i * count // processes],) for i in range(processes))
    each = count // processes
    ranks = tuple(devices[i : i + each] for i in range(0, count, each))
    for rank in ranks:
        if len({hardware.node(d) for d in rank}) > 1:
            raise PlacementError(
                f"{label}: devices {show(list(rank))} of two nodes; write processes: {count}"
            )
    return ranks


# -------------------------------------------------------------------------------------------- plans
def plan(
    placement: Mapping[str, Any] | str,
    hardware: Hardware,
    *,
    roles: Sequence[str] = ROLES["embodied"],
    stages: int = 1,
    max_lag: int = 0,
) -> Plan:
    """Return the checked plan of a placement.

    Args:
        placement: ``cluster.component_placement``, or the name of a preset.
        hardware: The devices.
        roles: Roles of the run.
        stages: ``cluster.stages``.
        max_lag: ``cluster.max_lag``.

    Raises:
        PlacementError: The placement is malformed, or does not fit the hardware or the options.
    """
    if isinstance(placement, str):
        groups = _preset(placement, hardware, roles)
    else:
        check_roles(placement, roles)
        groups = tuple(_group(entry, value, hardware) for entry, value in placement.items())
    checked = Plan(groups, hardware, stages, max_lag)
    _check_lag(checked)
    return checked


def _preset(name: str, hardware: Hardware, roles: Sequence[str]) -> tuple[Group, ...]:
    """Return the groups of a preset without the roles that the run does not have."""
    if "env" not in roles and "env" in PRESETS[name] and "half" in PRESETS[name]["env"]:
        fact = f"placement = {name}: sets the simulators apart, and a language model has none"
        raise PlacementError(f"{fact}; use fused, colocated or disaggregated")
    groups = list[Group]()
    for entry, devices in PRESETS[name].items():
        members = [role for role in entry.split(",") if role in roles]
        if members and "half" in devices and hardware.total < 2:
            fact = f"placement = {name}: needs 2 devices, and there is 1"
            raise PlacementError(f"{fact}; use fused or colocated, or set cluster.devices_per_node")
        if members:
            groups.append(_group(",".join(members), devices, hardware))
    return tuple(groups)


def _check_lag(p: Plan) -> None:
    """Check that roles which run concurrently share no device. Raises PlacementError."""
    for learner, role in product(("actor", "critic", "reference"), ("env", "rollout", "reward")):
        if not (p.max_lag and p.has(learner) and p.has(role)):
            continue
        if common := set(p.group(learner).devices) & set(p.group(role).devices):
            raise PlacementError(
                f"write cluster.max_lag=0, or placement=disaggregated: {role} and {learner} share"
                f" device {min(common)}, but cluster.max_lag = {p.max_lag}"
            )


def check_numbers(
    p: Plan, *, num_envs: int, group_size: int, global_batch_size: int, tasks: int = 1
) -> None:
    """Check that environments and samples divide evenly over the processes (embodied).

    ``tasks``: number of environments after which their tasks repeat.

    Raises PlacementError.
    """
    _check_processes(p, "env", "rollout")
    _check_processes(p, "rollout", "actor")
    actors, processes = p.processes("actor"), max(map(p.processes, ROLES["embodied"]))
    parts = f"{processes} processes x cluster.stages = {p.stages} x algorithm.group_size ="
    parts = f"{parts} {group_size}{f' x {tasks} tasks' * (tasks > 1)}"
    _check_even("env.num_envs", num_envs, processes * p.stages * group_size * tasks, parts)
    name = "algorithm.global_batch_size"
    _check_even(name, global_batch_size, actors, f"{actors} processes of actor")


def check_sequences(p: Plan, *, prompts: int, group_size: int, batches: Mapping[str, int]) -> None:
    """Check that prompts and responses divide evenly over the processes (reasoning mode).

    Args:
        p: The plan.
        prompts: Prompts of an update.
        group_size: Responses to each prompt.
        batches: Option -> prompts of one of its optimiser steps.

    Raises:
        PlacementError: They do not divide.
    """
    actors, rollouts = p.processes("actor"), p.processes("rollout")
    _check_processes(p, "rollout", "actor")
    for caller, role in (("rollout", "reward"), ("actor", "reference"), ("actor", "critic")):
        count, callers = p.processes(role) if p.has(role) else 1, p.processes(caller)
        # Each actor trains a critic of its own; the other roles can serve several callers.
        if callers % count or (role == "critic" and p.has(role) and count != callers):
            raise PlacementError(
                f"{PATH}: {count} processes of {role} cannot be divided evenly over {callers} of"
                f" {caller}; write processes: {callers} for {role}"
            )
    name = "algorithm.rollout_batch_size"
    _check_even(name, prompts, rollouts, f"{rollouts} processes of rollout")
    # The responses to so many prompts are a multiple of the actors.
    unit = actors // math.gcd(actors, group_size)
    for option, size in {name: prompts, **batches}.items():
        _check_even(option, size, unit, f"{actors} processes of actor")


def _check_processes(p: Plan, one: str, other: str) -> None:
    """Check that the processes of two roles can be grouped. Raises PlacementError."""
    a, b = p.processes(one), p.processes(other)
    if a % b and b % a:
        fact = f"{PATH}: {a} processes of {one} and {b} of {other}: one must divide the other"
        raise PlacementError(f"{fact}; write processes: {b} for {one}")


def _check_even(option: str, value: int, unit: int, parts: str) -> None:
    """Check that an option is a multiple of ``unit``. Raises PlacementError."""
    if value % unit:
        nearest = max(1, round(value / unit)) * unit
        raise PlacementError(
            f"{option} = {value}: cannot be divided evenly over {parts}; write {option}={nearest}"
        )


def lines(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return lines with aligned columns; the last column is wrapped at ``width`` characters."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    table = []
    for *cells, last in rows:
        head = "".join(f"{cell:<{n}}  " for cell, n in zip(cells, widths, strict=True))
        parts = [last]
        if width is not None:
            # No column is narrower than 40 characters: the terminal wraps such lines.
            parts = textwrap.wrap(last, max(40, width - len(head)), break_on_hyphens=False) or [""]
        table += [f"{head}{parts[0]}".rstrip(), *(" " * len(head) + part for part in parts[1:])]
    return table
