"""Taking turns: who holds its memory on a device in which phase, and how what waits moves to the host and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied_ppo.placement.plan import ALL, ASLEEP, PHASES, WEIGHTS, Group, Plan

MOVES = {"cuda"}
"""Kinds of devices whose memory is worth freeing: a CPU's is the host's already."""


class Residency:
    """The level of every group; decides, and moves nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.level = dict.fromkeys(plan.groups, ALL)

    def before(self, phase: str) -> list[tuple[Group, int]]:
        """Groups whose level changes, those that give memory back first. Asked twice, nothing changes again.

        Only groups that share a device with another move; whoever is alone keeps everything.
        """
        if self.plan.hardware.kind not in MOVES:
            return []
        need = PHASES[phase]
        found = []
        for g in self.plan.groups:
            if not self.plan.sharing(g):
                continue
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

    tensors: Mapping[int, Iterable[Tensor]]
    """WEIGHTS and ALL -> tensors of that level; asked anew each time, for optimisers make theirs late."""
    level: int = ALL
    kept: dict[int, list[tuple[torch.UntypedStorage, Tensor]]] = field(default_factory=dict)
    """Level -> emptied storages with their bytes on the host (pinned if they came from a GPU), reused."""
    hosts: dict[int, Tensor] = field(default_factory=dict)
    moved_bytes: int = 0
    """By the last ``move``."""

    @torch.no_grad()
    def move(self, level: int) -> None:
        """Have on the device what ``level`` needs, and no more."""
        self.moved_bytes = 0
        for step in (ALL, WEIGHTS):  # the optimiser leaves before the weights
            if step > level and step not in self.kept:
                self.kept[step] = [self._empty(x) for x in _storages(self.tensors[step])]
        for step in (WEIGHTS, ALL):
            if step <= level and step in self.kept:
                for storage, host in self.kept.pop(step):
                    storage.resize_(len(host))
                    _bytes(storage).copy_(host, non_blocking=True)
                    self.moved_bytes += len(host)
        self.level = level
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _empty(self, storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Tensor]:
        size = storage.nbytes()
        host = self.hosts.get(id(storage))
        if host is None or len(host) != size:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self.hosts[id(storage)] = host
        host.copy_(_bytes(storage))
        storage.resize_(0)
        self.moved_bytes += size
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
