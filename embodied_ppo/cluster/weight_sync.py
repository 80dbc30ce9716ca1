"""Weight synchronisation: named tensors as one buffer of bytes, and the ways to transfer it.

After ``publish(v)`` each rollout process holds the learner's tensors bit for bit (after the cast to
its own dtypes) and has version v. There are four transports: share (one process, no transfer), ipc
(memory of the sender that a process on the same device maps), broadcast (a collective operation),
store (an object in Ray's object store).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.cluster.channels import ALIGN, tensor_views
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.errors import PlacementError

BUCKET = 256 << 20  # bytes that are sent in one operation; bounds the extra memory of a transfer


@dataclass(frozen=True)
class WeightLayout:
    """Names, dtypes and shapes of tensors in order, which determine their offsets in a buffer.

    Attributes:
        entries: (name, dtype, shape) of each tensor.
    """

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> WeightLayout:
        """Return the layout of named tensors."""
        types = {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
        return WeightLayout(tuple((k, types[k], tuple(x.shape)) for k, x in tensors.items()))

    @property
    def sizes(self) -> list[int]:
        """Size of each tensor, padded to ``ALIGN``, bytes."""
        sizes = (
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for _, dtype, shape in self.entries
        )
        return [-(-size // ALIGN) * ALIGN for size in sizes]

    @property
    def total(self) -> int:
        """Size of the buffer, bytes."""
        return sum(self.sizes)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer, uint8 [total], as views of its memory."""
        return tensor_views(buffer, [(dtype, shape) for _, dtype, shape in self.entries])

    def check(self, other: WeightLayout, process: str) -> None:
        """Check that two layouts have the same names and shapes in order; dtypes may differ.

        Args:
            other: Layout of a rollout process; ``self`` is the actor's.
            process: Name of that process, for the message.

        Raises:
            PlacementError: The first entry that differs.
        """
        missing = ("nothing", "", ())
        for entry, other_entry in zip_longest(self.entries, other.entries, fillvalue=missing):
            (name, _, shape), (other_name, _, other_shape) = entry, other_entry
            if (name, shape) != (other_name, other_shape):
                raise PlacementError(
                    f"weights: {name} {list(shape)} of the actor is {other_name}"
                    f" {list(other_shape)} in {process}; all processes must build the same model:"
                    " same version, config and files"
                )


def weight_tensors(policy: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Return the tensors that an update can change: trained parameters and buffers.

    Args:
        policy: The model.
        frozen: Include parameters that are not trained.
    """
    parameters = {k: p.detach() for k, p in policy.named_parameters() if frozen or p.requires_grad}
    return parameters | dict(policy.named_buffers())


class WeightBuffer:
    """Packs named tensors into bytes and unpacks them, again and again."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        layout: WeightLayout | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Pack and unpack ``tensors``.

        Args:
            tensors: Name -> tensor, which ``unpack`` writes in place.
            layout: Layout of the receiver, whose dtypes are sent; None: the layout of ``tensors``.
            ranks: Processes that hold a shard of each tensor; None: this process holds all of it.
        """
        self.tensors, self.layout = list(tensors.values()), layout or WeightLayout.of(tensors)
        self.ranks = ranks or Ranks()

    @torch.no_grad()
    def pack(self, buffer: Tensor | None = None) -> Tensor:
        """Return the bytes of the tensors, uint8 [total].

        With sharded tensors this is a collective operation; the other ranks call ``join_gather``.

        Args:
            buffer: Written and returned; None: a new one on the device of the tensors.
        """
        if buffer is None:
            device = self.tensors[0].device if self.tensors else "cpu"
            # Zeros, so that equal tensors have equal bytes, also between them.
            buffer = torch.zeros(self.layout.total, dtype=torch.uint8, device=device)
        for view, x in zip(self.layout.views(buffer), self.tensors, strict=True):
            # ``copy_`` casts to the receiver's type.
            view.copy_(self.ranks.full_tensor(x))
        return buffer

    def buckets(self) -> Iterator[WeightBuffer]:
        """Yield buffers of consecutive tensors, each of at most ``BUCKET`` bytes or one tensor."""
        names = [name for name, *_ in self.layout.entries]
        start, bucket_size = 0, 0
        for i, size in enumerate([*self.layout.sizes, BUCKET + 1]):  # BUCKET + 1 closes the last
            if i > start and bucket_size + size > BUCKET:
                # The next tensor does not fit: close the bucket before it.
                tensors = dict(zip(names[start:i], self.tensors[start:i], strict=True))
                yield WeightBuffer(tensors, WeightLayout(self.layout.entries[start:i]), self.ranks)
                start, bucket_size = i, 0
            bucket_size += size

    @torch.no_grad()
    def join_gather(self) -> None:
        """Take part in the all-gathers of another rank's ``pack``, in the same order."""
        for x in self.tensors:
            self.ranks.full_tensor(x)

    @torch.no_grad()
    def unpack(self, buffer: Tensor) -> None:
        """Copy bytes, uint8 [total], into the tensors."""
        for x, view in zip(self.tensors, self.layout.views(buffer), strict=True):
            x.copy_(view)


# ------------------------------------------------------------------------------------ shared memory
class SharedWeightBuffer:
    """Bytes that other processes of the same user on this machine can map.

    On a GPU the buffer is an allocation with a CUDA IPC handle. On the CPU it is an anonymous file
    (Linux memfd), which other processes open through /proc; the kernel frees it when its owner
    ends, so that a crash leaves nothing.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate ``size`` bytes."""
        self.device = device
        self._ipc_handle: tuple[int, Any] | None = None  # (address that it is of, handle)
        if device.type == "cuda":
            self.flat = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        self.file = os.memfd_create("embodied_ppo_weights")
        os.ftruncate(self.file, max(1, size))  # mmap rejects a length of 0
        self.memory = mmap.mmap(self.file, max(1, size))
        # Writes go to the file's pages, which the other process maps.
        self.flat = torch.frombuffer(self.memory, dtype=torch.uint8)[:size]

    def handle(self) -> Any:
        """Return the picklable handle for ``open_shared_buffer``."""
        if self.device.type == "cuda":
            finish_work(self.device)
            return self._share()
        return os.getpid(), self.file, len(self.flat)

    def _share(self) -> Any:
        """Return the CUDA IPC handle.

        Each call of ``_share_cuda_`` allocates an event and a reference count that live as long as
        the storage. It is therefore called once, and again only where the storage has moved.
        """
        storage = self.flat.untyped_storage()
        address = storage.data_ptr()
        if self._ipc_handle is None or self._ipc_handle[0] != address:
            self._ipc_handle = address, storage._share_cuda_()
        return self._ipc_handle[1]


def finish_work(device: torch.device) -> None:
    """Wait for the work of a CUDA device, in particular reads and writes of a shared buffer.

    The streams of two processes are not ordered: writes must have ended before the other process
    reads, and reads before it writes again.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_shared_buffer(handle: Sequence[Any], device: torch.device) -> Tensor:
    """Map another process's ``SharedWeightBuffer``; return its bytes, uint8 [size]."""
    if device.type == "cuda":
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    pid, descriptor, size = handle
    # The mapping stays valid after the file is closed.
    file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        memory = mmap.mmap(file, max(1, size))
    finally:
        os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
