"""Offloading of tensors to the host while other roles use a shared GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embodied_ppo.options.placement import ALL, OFFLOADED, PHASES, WEIGHTS, Group, Plan

# Devices that are offloaded from; on CPU, device and host memory are the same.
OFFLOADED_DEVICES = {"cuda"}


class Residency:
    """The residency level of each group; computes which groups move and moves nothing itself."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.level = dict.fromkeys(plan.groups, ALL)

    def offloads(self, group: Group) -> bool:
        """Return whether the group shares a device, and is offloaded in others' phases."""
        return self.plan.hardware.kind in OFFLOADED_DEVICES and bool(self.plan.sharing(group))

    def moves_before(self, phase: str) -> list[tuple[Group, int]]:
        """Return the groups that move before a phase, with their new levels, and record these.

        Groups that free memory come before those that allocate it, so that both never hold it at
        once. A second call with the same phase returns nothing.
        """
        # The level of a group is the highest that one of its roles needs in the phase.
        need = PHASES[phase]
        moves = []
        for group in filter(self.offloads, self.plan.groups):
            level = max(need.get(role, OFFLOADED) for role in group.roles)
            if level != self.level[group]:
                moves.append((group, level))
        # False sorts before True: groups that free memory come first.
        moves.sort(key=lambda move: move[1] > self.level[move[0]])
        self.level |= dict(moves)
        return moves


@dataclass
class TensorOffloader:
    """Moves the tensors of a process to the host and back.

    Only the storage of a tensor is emptied and filled again. The tensor object, its views and all
    references to them stay valid, but must not be read while it is offloaded.
    """

    # WEIGHTS or ALL -> tensors; called at each move, as optimisers allocate at the first step.
    tensors: Callable[[int], Iterable[Tensor]]
    # Level -> emptied storages, each with its bytes on the host.
    offloaded: dict[int, list[tuple[torch.UntypedStorage, Tensor]]] = field(default_factory=dict)
    # (level, index) -> host memory, pinned for storages on a GPU; reused by later moves.
    host_buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def move_to(self, level: int) -> int:
        """Move tensors so that the device holds those of ``level`` and no others.

        Args:
            level: OFFLOADED, WEIGHTS or ALL.

        Returns:
            Number of bytes that were moved.
        """
        moved, refilled = 0, set[torch.device]()
        for step in (ALL, WEIGHTS):  # optimiser state leaves before the weights
            if step > level and step not in self.offloaded:
                # Copy to the host and empty each storage once.
                storages = enumerate(_storages(self.tensors(step)))
                self.offloaded[step] = [self._offload((step, i), x) for i, x in storages]
                moved += sum(len(host) for _, host in self.offloaded[step])
        for step in (WEIGHTS, ALL):
            if step <= level and step in self.offloaded:
                for storage, host in self.offloaded.pop(step):
                    # Allocate again at a new address, and copy the bytes back.
                    storage.resize_(len(host))
                    _bytes(storage).copy_(host, non_blocking=True)
                    moved += len(host)
                    if storage.device.type == "cuda":
                        refilled.add(storage.device)
        if torch.cuda.is_available():
            # Copies to the host have ended. Copies from it must end before a later call changes the
            # pinned memory.
            for device in refilled:
                torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # on all devices: other processes allocate next
        return moved

    def _offload(
        self, key: tuple[int, int], storage: torch.UntypedStorage
    ) -> tuple[torch.UntypedStorage, Tensor]:
        """Copy a storage to the host and empty it."""
        # Pinned memory is slow to allocate, so it is kept for the next move.
        host = self.host_buffers.get(key)
        if host is None or len(host) != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self.host_buffers[key] = host
        host.copy_(_bytes(storage))
        storage.resize_(0)
        return storage, host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Distinct storages, without empty ones and those that torch does not own (mapped files)."""
    storages: dict[int, torch.UntypedStorage] = {}
    for x in tensors:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.resizable():
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())
