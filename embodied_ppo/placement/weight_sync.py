"""What travels when a policy has learnt: named tensors as one run of bytes, checked name by name at the start.

After ``publish(v)`` every policy process holds the learner's tensors bit for bit (after the cast to its own type) and
answers version v. Four ways: share (one process: nothing moves), ipc (memory of the sender that a process on the same
device reads), broadcast (a collective), store (an object that others fetch).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import PlacementError

ALIGN = 16
BUCKET = 256 << 20
"""Bytes that are sent together: what is on its way needs memory."""


@dataclass(frozen=True)
class Layout:
    """Names, types and shapes of tensors, in order; where each lies in the bytes."""

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Layout:
        kinds = ((name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items())
        return Layout(tuple(kinds))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each, padded."""
        sizes = (torch.Size(s).numel() * getattr(torch, kind).itemsize for _, kind, s in self.entries)
        return [-(-size // ALIGN) * ALIGN for size in sizes]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors that bytes uint8 [total] hold, sharing their memory."""
        found = []
        for part, (_, kind, shape) in zip(flat.split(self.sizes), self.entries, strict=True):
            dtype = getattr(torch, kind)
            found.append(part[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape))
        return found

    def check(self, other: Layout, who: str) -> None:
        """Whether ``other`` has the same names and shapes in the same order (types may differ).

        Raises PlacementError naming the first that differs; ``who`` has the others.
        """
        for mine, theirs in zip(self.entries, other.entries, strict=False):
            if (mine[0], mine[2]) != (theirs[0], theirs[2]):
                raise PlacementError(
                    f"weights: {mine[0]} {list(mine[2])} of the actor is {theirs[0]} {list(theirs[2])} in {who}; "
                    "all processes must build the same model: same version, config and files"
                )
        if len(self.entries) != len(other.entries):
            longer = max(self.entries, other.entries, key=len)
            extra = longer[min(len(self.entries), len(other.entries))][0]
            raise PlacementError(
                f"weights: {extra} is only in {'the actor' if longer is self.entries else who}; all processes must "
                "build the same model: same version, config and files"
            )


def moving(policy: nn.Module, *, everything: bool = False) -> dict[str, Tensor]:
    """What an update can change: trained parameters and buffers; ``everything``: frozen parameters, too."""
    found = {name: p.detach() for name, p in policy.named_parameters() if everything or p.requires_grad}
    return found | dict(policy.named_buffers())


class Parcel:
    """Tensors that are sent or received again and again."""

    def __init__(self, tensors: dict[str, Tensor], layout: Layout | None = None, ranks: Ranks | None = None) -> None:
        """``layout``: the receiver's, whose types are sent; None: as they are. ``ranks``: who holds parts of them."""
        self.tensors, self.layout = list(tensors.values()), layout or Layout.of(tensors)
        self.ranks = ranks or Ranks()

    @torch.no_grad()
    def pack(self, flat: Tensor | None = None) -> Tensor:
        """Bytes uint8 [total], made where the tensors are unless given."""
        if flat is None:
            where = self.tensors[0].device if self.tensors else "cpu"
            flat = torch.zeros(self.layout.total, dtype=torch.uint8, device=where)
        for view, x in zip(self.layout.views(flat), self.tensors, strict=True):
            view.copy_(self.ranks.whole(x))
        return flat

    def buckets(self) -> Iterator[Parcel]:
        """The same in parts of at most BUCKET bytes, or one tensor."""
        start, held, names = 0, 0, [name for name, *_ in self.layout.entries]
        for i, size in enumerate([*self.layout.sizes, BUCKET + 1]):  # the last one only ends what came before
            if i > start and held + size > BUCKET:
                tensors = dict(zip(names[start:i], self.tensors[start:i], strict=True))
                yield Parcel(tensors, Layout(self.layout.entries[start:i]), self.ranks)
                start, held = i, 0
            held += size

    @torch.no_grad()
    def assist(self) -> None:
        """What others have to do while one packs tensors that each holds a part of."""
        for x in self.tensors:
            self.ranks.whole(x)

    @torch.no_grad()
    def unpack(self, flat: Tensor) -> None:
        """Into the tensors, in place."""
        for x, view in zip(self.tensors, self.layout.views(flat), strict=True):
            x.copy_(view)

    def checksum(self) -> str:
        """16 hex digits over all bytes."""
        digest = hashlib.sha256()
        for part in self.buckets():
            digest.update(part.pack().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------ shared memory
class Shelf:
    """Bytes that processes of the same user on this machine can read; nothing is left when their owner ends.

    On the CPU an anonymous file (Linux memfd), reached through /proc; on a GPU an allocation with a CUDA IPC handle.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.flat = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        self.file = os.memfd_create("embodied_ppo_weights")
        os.ftruncate(self.file, max(1, size))
        self.memory = mmap.mmap(self.file, max(1, size))
        self.flat = torch.frombuffer(self.memory, dtype=torch.uint8)[:size]

    def handle(self) -> Any:
        """What another process opens it with."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return self.flat.untyped_storage()._share_cuda_()
        return os.getpid(), self.file, len(self.flat)


def open_shelf(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Bytes uint8 [size] of another process's ``Shelf``."""
    if device.type == "cuda":
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    pid, number, size = handle
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        memory = mmap.mmap(file, max(1, size))
    finally:
        os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
