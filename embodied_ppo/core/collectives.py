"""Processes that learn together: what each must know of the others, over torch.distributed; alone, nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied_ppo.core import tree

T = TypeVar("T")
CALL = "gathered_call"
"""Method of a module whose weights lie with all ranks: (function, what else it takes) -> the function's result."""


def gathered(module: nn.Module, function: Callable[..., T], *args: Any) -> T:
    """``function(module, *args)``; where each rank holds a part of the module's weights, they are whole meanwhile, and
    again in the backward pass. (To call the module itself needs no such care.)"""
    call = getattr(module, CALL, None)
    return function(module, *args) if call is None else call(function, *args)


def layers(module: nn.Module) -> list[nn.Module]:
    """The elements of its outermost lists of modules: what a transformer repeats."""
    found = []
    for child in module.children():
        found += [*child] if isinstance(child, nn.ModuleList) else layers(child)
    return found


class Ranks:
    """A process that learns alone. ``Together`` is one of several; every result is the same on all of them."""

    rank, world = 0, 1
    sharded = False
    """Whether a rank holds no more than its part of every parameter (``shards.Sharded``)."""

    def add(self, x: Tensor) -> Tensor:
        """Σ over the ranks; may be in place."""
        return x

    def top(self, x: Tensor) -> Tensor:
        """The largest of the ranks, entry by entry; may be in place."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Everyone's, in order of rank; equal shapes."""
        return [x]

    def columns(self, trajectory: T) -> T:
        """Leaves [T, N, ..] of all ranks side by side, [T, world·N, ..]."""
        return trajectory

    def own(self, x: Tensor) -> Tensor:
        """This rank's columns of [T, world·N, ..]."""
        return x

    def add_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Σ over the ranks of every gradient, in place (one that is None everywhere stays None), and of the loss []."""
        return loss

    # ------------------------------------------------------------------------- where a rank holds parts (``sharded``)
    def shard(self, model: nn.Module, methods: Sequence[str]) -> None:
        """Keep this rank's part of every parameter; parameters, gradients and optimiser state are parts from now on.

        ``model`` has ``units`` (see ``types.Policy``); ``methods``: by which its weights are read, all ranks at once.
        """

    def unshard(self, model: nn.Module) -> None:
        """Have all parameters whole until ``reshard``: who acts with them then waits for nobody."""

    def reshard(self, model: nn.Module) -> None:
        """Hold parts again."""

    def passes(self, own: int) -> int:
        """How often this rank has to call a method that it would call ``own`` times: in it ranks wait."""
        return own

    def whole(self, x: Tensor) -> Tensor:
        """All of a tensor that may be this rank's part; all ranks ask for it."""
        return x

    def local(self, x: Tensor) -> Tensor:
        """What this rank holds of it."""
        return x

    def part(self, x: Tensor, like: Tensor) -> Tensor:
        """This rank's part of all of a tensor, where ``like``, which it belongs to, is a part."""
        return x

    def parts(self, module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """``part`` of a state_dict for a module."""
        return state

    def whole_state(self, state: Any) -> Any:
        """Nested state with ``whole`` tensors, on the CPU; the first rank's, the others have None in their places."""
        return state


class Together(Ranks):
    """One of ``world`` processes of a process group that call the same methods in the same order."""

    def __init__(self, group: Any) -> None:
        """``group``: a torch.distributed ProcessGroup whose backend knows the device of the tensors."""
        self.group, self.rank, self.world = group, group.rank(), group.size()

    def _reduce(self, x: Tensor, how: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self.group.allreduce([x], options).wait()
        return x

    def add(self, x: Tensor) -> Tensor:
        return self._reduce(x.contiguous(), dist.ReduceOp.SUM)

    def top(self, x: Tensor) -> Tensor:
        return self._reduce(x.contiguous(), dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> list[Tensor]:
        sent = x.contiguous().view(torch.uint8) if x.dtype is torch.bool else x.contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.world)]
        self.group.allgather([parts], [sent]).wait()
        return [part.view(x.dtype) for part in parts]

    def columns(self, trajectory: T) -> T:
        return tree.map(lambda x: torch.cat(self.gather(x), dim=1), trajectory)

    def own(self, x: Tensor) -> Tensor:
        return x.chunk(self.world, dim=1)[self.rank]

    def add_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """One message: all gradients, the loss, and which parameters have a gradient."""
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=loss.device)
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in parameters]
        summed = self.add(torch.cat([*flat, loss.detach().float().reshape(1), there]))
        *parts, loss, there = summed.split([*(p.numel() for p in parameters), 1, len(parameters)])
        counts = there.tolist()
        for p, part, count in zip(parameters, parts, counts, strict=True):
            p.grad = part.view_as(p).to(p.dtype) if count else None
        return loss[0]
