"""Learners that hold a part of every parameter each (torch's FSDP2), for models that do not fit one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from embodied_ppo.core.collectives import CALL, Together, gathered

# What our modules return may be a view of something; nothing writes into it.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


class Sharded(Together):
    """``Together``, after ``shard`` each with a part of every parameter, gradient and moment of the optimiser.

    The units of a model (``types.Policy.units``) are gathered one after another, each for its own forward and backward
    pass; what belongs to none is gathered for the whole pass. A gradient is summed part by part as soon as it is there.
    """

    sharded = True

    def __init__(self, group: Any, device: str) -> None:
        """``group``: torch.distributed's default group. ``device``: kind of device that parts lie on."""
        super().__init__(group)
        self.mesh = DeviceMesh.from_group(group, device)

    def shard(self, model: nn.Module, methods: Sequence[str]) -> None:
        made: Any = model
        for unit in (*made.units(), model):
            parts: FSDPModule = fully_shard(unit, mesh=self.mesh, reshard_after_forward=True)
            parts.set_gradient_divide_factor(1.0)  # the sum: losses are divided by what all ranks have
            parts.set_force_sum_reduction_for_comms(True)
            setattr(unit, CALL, _caller(unit))
            register_fsdp_forward_method(unit, CALL)
        for name in methods:
            register_fsdp_forward_method(model, name)
        gathered(model, lambda model: None)  # torch takes who is called first for the root of all units

    def unshard(self, model: nn.Module) -> None:
        for unit in _units(model):
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)

    def reshard(self, model: nn.Module) -> None:
        for unit in _units(model):
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)
        root: Any = model
        root.reset_iter_state()  # forgets who was called when acting: prefetching must be the same on all ranks

    def passes(self, own: int) -> int:
        return int(self.top(torch.tensor(own, device=self.mesh.device_type)))

    def add_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Gradients have been added up in the backward pass."""
        return self.add(loss.detach().float().clone())

    def whole(self, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def local(self, x: Tensor) -> Tensor:
        return x._local_tensor if isinstance(x, DTensor) else x

    def part(self, x: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or x.shape != like.shape:
            return x
        return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)

    def parts(self, module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
        own = module.state_dict()
        return {name: self.part(x, own[name]) if name in own else x for name, x in state.items()}

    def whole_state(self, state: Any) -> Any:
        def whole(x: DTensor) -> Tensor | None:
            full = self.whole(x.detach())  # one at a time
            return None if self.rank else full.cpu()

        return tree_map_only(DTensor, whole, state)


def _caller(unit: nn.Module) -> Callable[..., Any]:
    return lambda function, *args: function(unit, *args)


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
