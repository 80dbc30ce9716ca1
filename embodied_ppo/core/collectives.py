"""Collective operations of processes that train together, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied_envs.base import tree

T = TypeVar("T")
# Name of the method of sharded modules that calls ``function(module, *args)``.
CALL = "gathered_call"


def gathered(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(module, *args)``, called with gathered weights.

    FSDP2 gathers the weights when the module itself is called. Functions that read the weights in
    another way must be called through this function, which gathers them in the backward pass, too.
    """
    call = getattr(module, CALL, None)
    return function(module, *args) if call is None else call(function, *args)


def layers(module: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost ``ModuleList``s: a transformer's blocks."""
    blocks = []
    for child in module.children():
        blocks += [*child] if isinstance(child, nn.ModuleList) else layers(child)
    return blocks


class Ranks:
    """A single process that trains alone; ``RankGroup`` is one of several ranks.

    All ranks call the same methods in the same order, and get equal results unless stated
    otherwise. Methods may write their result into the argument.
    """

    rank, world = 0, 1
    # Whether each rank holds only its shard of every parameter (``fsdp.Sharded``).
    sharded = False

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks."""
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have equal shapes, in order of rank."""
        return [x]

    def all_gather_columns(self, trajectory: T) -> T:
        """Concatenate the leaves [T, N, ..] of all ranks to [T, world * N, ..]."""
        return trajectory

    def local_columns(self, x: Tensor) -> Tensor:
        """Return this rank's columns of [T, world * N, ..]; inverts ``all_gather_columns``."""
        return x

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Sum the gradients and the loss over ranks.

        Args:
            parameters: Their ``grad`` is replaced by the sum. One that is None on all ranks stays
                None.
            loss: The loss of this rank, [].

        Returns:
            The sum of the losses, [].
        """
        return loss

    # ----------------------------------------------------------- sharded parameters
    def shard(self, model: nn.Module, methods: Sequence[str]) -> None:
        """Shard the parameters of a model; gradients and optimiser state are shards from now on.

        Args:
            model: Model with ``units`` (see ``types.Policy``), which are gathered one after
                another.
            methods: Names of methods that read the weights; all ranks call them together.
        """

    def unshard(self, model: nn.Module) -> None:
        """All-gather the parameters until ``reshard()``; inference then needs no collectives."""

    def reshard(self, model: nn.Module) -> None:
        """Free the gathered parameters."""

    def max_passes(self, passes: int) -> int:
        """Return the maximum of ``passes`` over ranks.

        A rank with fewer forward passes must add dummy ones: each pass contains collectives.
        """
        return passes

    def full_tensor(self, x: Tensor) -> Tensor:
        """Return the full tensor of a shard; a collective operation.

        Other tensors are returned as they are.
        """
        return x

    def local_tensor(self, x: Tensor) -> Tensor:
        """Return the local shard of a tensor. Other tensors are returned as they are."""
        return x

    def shard_tensor(self, x: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor ``x`` if ``like`` is sharded."""
        return x

    def shard_state(self, module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the shards of a full state_dict, for a module."""
        return state

    def full_state(self, state: Any) -> Any:
        """Return nested state with full tensors on the CPU; other ranks than 0 get None."""
        return state


class RankGroup(Ranks):
    """One of several processes of a process group."""

    def __init__(self, group: Any) -> None:
        """``group``: ProcessGroup of torch.distributed that supports the tensors' device."""
        self.group, self.rank, self.world = group, group.rank(), group.size()

    def _reduce(self, x: Tensor, operation: Any) -> Tensor:
        """All-reduce in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self.group.allreduce([x], options).wait()
        return x

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return self._reduce(x.contiguous(), dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self._reduce(x.contiguous(), dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        local = x.contiguous()
        if x.dtype is torch.bool:  # gloo does not support bool
            local = local.view(torch.uint8)
        outputs = [torch.empty_like(local) for _ in range(self.world)]
        self.group.allgather([outputs], [local]).wait()
        return [output.view(x.dtype) for output in outputs]

    def all_gather_columns(self, trajectory: T) -> T:
        return tree.map(lambda x: torch.cat(self.all_gather(x), dim=1), trajectory)

    def local_columns(self, x: Tensor) -> Tensor:
        return x.chunk(self.world, dim=1)[self.rank]

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """See ``Ranks``. One all-reduce for all gradients, the loss and flags."""
        # A parameter may have a gradient on some ranks only; the sum of the flags shows whether any
        # rank has one.
        flags = [float(p.grad is not None) for p in parameters]
        has_gradient = torch.tensor(flags, device=loss.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = [x.flatten().float() for x in gradients]
        parts = [*flat, loss.detach().float().reshape(1), has_gradient]
        sizes = [*(p.numel() for p in parameters), 1, len(parameters)]
        *gradients, loss, counts = self.all_reduce_sum(torch.cat(parts)).split(sizes)
        for p, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
            p.grad = gradient.view_as(p).to(p.dtype) if count else None
        return loss[0]
