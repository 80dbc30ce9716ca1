"""Taking turns: who holds its memory on a device in which phase, and how what waits moves to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied_ppo.config.placement import ALL, ASLEEP, PHASES, WEIGHTS, Group, Plan

MOVES = {"cuda"}
"""Kinds of devices whose memory is worth freeing: a CPU's is the host's already."""


class Residency:
    """The level of every group; decides, and moves nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.level = dict.fromkeys(plan.groups, ALL)

    def turns(self, g: Group) -> bool:
        """Whether what a group has on its devices leaves them for others."""
        return self.plan.hardware.kind in MOVES and bool(self.plan.sharing(g))

    def before(self, phase: str) -> list[tuple[Group, int]]:
        """Groups whose level changes, those that give memory back first. Asked twice, nothing changes again.

        Only groups that share a device with another move; whoever is alone keeps everything.
        """
        need = PHASES[phase]
        found = []
        for g in filter(self.turns, self.plan.groups):
            level = max(need.get(role, ASLEEP) for role in g.roles)
            if level != self.level[g]:
                found.append((g, level))
        found.sort(key=lambda step: step[1] > self.level[step[0]])
        self.level |= dict(found)
        return found


@dataclass
class Luggage:
    """The tensors of a process by what they are for, and where they are while it sleeps.

    A tensor's storage is emptied and filled again: the tensor itself, its views and whoever holds them stay.
    """

    tensors: Callable[[int], Iterable[Tensor]]
    """WEIGHTS or ALL -> tensors of that level; asked anew each time, for optimisers make theirs late."""
    kept: dict[int, list[tuple[torch.UntypedStorage, Tensor]]] = field(default_factory=dict)
    """Level -> emptied storages with their bytes on the host."""
    hosts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(level, place in it) -> memory of the host, pinned if it is for a GPU's; used again and again."""

    @torch.no_grad()
    def move(self, level: int) -> int:
        """Have on the device what ``level`` needs, and no more; bytes moved."""
        moved = 0
        for step in (ALL, WEIGHTS):  # the optimiser leaves before the weights
            if step > level and step not in self.kept:
                self.kept[step] = [self._empty((step, i), x) for i, x in enumerate(_storages(self.tensors(step)))]
                moved += sum(len(host) for _, host in self.kept[step])
        for step in (WEIGHTS, ALL):
            if step <= level and step in self.kept:
                for storage, host in self.kept.pop(step):
                    storage.resize_(len(host))
                    _bytes(storage).copy_(host, non_blocking=True)
                    moved += len(host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return moved

    def _empty(self, place: tuple[int, int], storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Tensor]:
        host = self.hosts.get(place)
        if host is None or len(host) != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self.hosts[place] = host
        host.copy_(_bytes(storage))
        storage.resize_(0)
        return storage, host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each once; those that hold nothing, or memory that is not torch's (a file's), stay."""
    found: dict[int, torch.UntypedStorage] = {}
    for x in tensors:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())
