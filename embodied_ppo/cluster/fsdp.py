"""Sharded learners (torch's FSDP2), for models that do not fit one device."""

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

from embodied_ppo.core.collectives import CALL, RankGroup, gathered

# Our modules may return views. FSDP2 warns about in-place writes to them, which our code does not
# do.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


class Sharded(RankGroup):
    """``RankGroup`` whose ranks hold a shard of each parameter, gradient and optimiser moment.

    The units of a model (``types.Policy.units``) are gathered one after another, each for its
    forward and backward pass. Parameters outside the units are gathered for the whole pass.
    Gradients are reduce-scattered as soon as a unit's backward pass has ended.
    """

    sharded = True

    def __init__(self, group: Any, device: str) -> None:
        """Shard over a process group.

        Args:
            group: torch.distributed's default process group.
            device: Kind of device that shards are on ("cpu", "cuda").
        """
        super().__init__(group)
        self.mesh = DeviceMesh.from_group(group, device)

    def shard(self, model: nn.Module, methods: Sequence[str]) -> None:
        policy: Any = model
        for unit in (*policy.units(), model):
            fsdp: FSDPModule = fully_shard(unit, mesh=self.mesh, reshard_after_forward=True)
            # Sum gradients instead of averaging: losses are divided by the number of samples of all
            # ranks.
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
            setattr(unit, CALL, _caller(unit))
            register_fsdp_forward_method(unit, CALL)
        for name in methods:
            register_fsdp_forward_method(model, name)
        # FSDP2 makes the module that is called first the root of all units; it must be the model.
        gathered(model, lambda model: None)

    def unshard(self, model: nn.Module) -> None:
        for unit in _units(model):
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)

    def reshard(self, model: nn.Module) -> None:
        for unit in _units(model):
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)
        root: Any = model
        # FSDP2 prefetches in the order of earlier calls, which differs between ranks after acting.
        root.reset_iter_state()

    def max_passes(self, passes: int) -> int:
        return int(self.all_reduce_max(torch.tensor(passes, device=self.mesh.device_type)))

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """See ``Ranks``. FSDP2 has summed the gradients in the backward pass."""
        return self.all_reduce_sum(loss.detach().float().clone())

    def full_tensor(self, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def local_tensor(self, x: Tensor) -> Tensor:
        return x._local_tensor if isinstance(x, DTensor) else x

    def shard_tensor(self, x: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or x.shape != like.shape:
            return x
        return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)

    def shard_state(self, module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
        shards = module.state_dict()
        own = {name: x for name, x in state.items() if name in shards}
        return {**state, **{name: self.shard_tensor(x, shards[name]) for name, x in own.items()}}

    def full_state(self, state: Any) -> Any:
        def gather(x: DTensor) -> Tensor | None:
            # One tensor at a time, so that the device never holds the full model.
            full_tensor = self.full_tensor(x.detach())
            return None if self.rank else full_tensor.cpu()

        return tree_map_only(DTensor, gather, state)


def _caller(unit: nn.Module) -> Callable[..., Any]:
    """The method ``CALL`` of a unit."""
    return lambda function, *args: function(unit, *args)


def _units(model: nn.Module) -> list[FSDPModule]:
    """All sharded modules of a model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
