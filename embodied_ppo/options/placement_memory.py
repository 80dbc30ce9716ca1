"""Whether a plan fits into the memory of its devices, in every phase of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embodied_ppo.core.errors import PlacementError
from embodied_ppo.core.tables import tables
from embodied_ppo.options.placement import ALL, OFFLOADED, PHASES, WEIGHTS, Plan

# Purpose (weights, gradients, optimiser, ...) -> peak memory of one process, bytes.
Need = Mapping[str, int]
# Memory of the CUDA context of one process, bytes (estimated, not measured).
CUDA_CONTEXT = 500_000_000
# Share of a device's memory to plan with; driver, allocator and other programs use the rest.
USABLE_MEMORY = 0.92


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


# Purpose that needs most memory -> what reduces it.
MEMORY_HINTS: dict[str, str] = tables(__file__)["memory_hints"]
# What reduces gradients and the state of the optimiser.
STATE_HINT = "train adapters (lora_rank)"


def check_memory(p: Plan, needs: Mapping[str, Need]) -> None:
    """Check that everything fits into memory in every phase.

    Args:
        p: The plan.
        needs: As for ``loads``.

    Raises:
        PlacementError: A device is too small; the message has the sum.
    """
    limit = p.hardware.memory
    for load in loads(p, needs):
        if limit is None or load.total <= USABLE_MEMORY * limit:
            continue
        largest = max(load.parts, key=lambda name: sum(load.parts[name]))
        need = needs[largest]
        order = sorted(need, key=lambda purpose: -need[purpose])
        # The largest two, because a longer line would be shortened.
        purposes = [f"{purpose} {amount(need[purpose])}" for purpose in order[:2] if need[purpose]]
        if p.hardware.kind == "cuda":
            purposes.append(f"CUDA {amount(CUDA_CONTEXT)}")
        parts = " + ".join(
            f"{len(sizes)} x {amount(sizes[0])} ({name})" for name, sizes in load.parts.items()
        )
        hint = MEMORY_HINTS.get(order[0], STATE_HINT)
        if p.processes("actor") > 1 and hint in (MEMORY_HINTS["weights"], STATE_HINT):
            hint += ", or cluster.shard=true"
        raise PlacementError(
            f"placement: {load.place} needs {parts} = {amount(load.total)} to {load.phase}, more"
            f" than {USABLE_MEMORY:.0%} of its {amount(limit)}; each {largest}:"
            f" {', '.join(purposes)}; {hint}"
        )


def amount(size: int) -> str:
    """Return bytes as text in GB or MB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def memory_rows(p: Plan, needs: Mapping[str, Need]) -> list[tuple[str, ...]]:
    """Return a table of the memory of one process: purposes (rows) x groups (columns)."""
    group_needs = [needs[g.name] for g in p.groups]
    purposes = list(dict.fromkeys(purpose for need in needs.values() for purpose in need))
    return [
        ("memory per process", *(g.name for g in p.groups)),
        *((purpose, *(amount(n.get(purpose, 0)) for n in group_needs)) for purpose in purposes),
        ("total", *(amount(sum(n.values())) for n in group_needs)),
    ]
