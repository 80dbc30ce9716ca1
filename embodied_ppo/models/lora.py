"""What a run on a large checkpoint trains and keeps: low-rank adapters, a precision for each, a digest of the rest.

``adapt(language, rank=32, alpha=32)`` puts adapters on every linear layer of a module and freezes all else in it;
    the module's class, its forward pass and its names (but for the layers': ``q_proj.base_layer.weight``,
    ``q_proj.lora_A.default.weight``) stay. Adapters begin as zero: the module computes what it did.
``settle(policy, torch.bfloat16)`` stores what is frozen in that type and what is trained in float32; call it after
    ``adapt`` and ``requires_grad_``, run the forward pass within ``arithmetic(device, dtype)``.
``merge(language)`` adds adapters to the weights they stand beside and takes them out again: plain linear layers.
``Adapted`` is a base class of policies: after ``rests_on(folder)`` state_dicts hold what is trained and, as ``BASE``,
    the digest of the directory that holds the rest; ``load_state_dict`` compares it.

Low-rank adapters: Hu et al. 2021, arXiv 2106.09685: y = W x + (alpha / rank) B A x, with B = 0 at the start. The layers
are peft's; nothing of peft's own wrappers, configurations and files is used.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.core.types import CheckpointError, ConfigError

BASE = "base_sha256"
"""Entry of a state_dict, uint8 [32]: the digest of the checkpoint that holds the weights which are not in it."""


# ------------------------------------------------------------------------------------------------------------ adapters
def adapt(module: nn.Module, *, rank: int, alpha: float) -> None:
    """Adapters on every linear layer of ``module``, in place; all else in it is frozen.

    Initialised from torch's global generator. Raises ConfigError without peft, or where there is no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"model.lora_rank={rank} needs peft ({error}): pip install 'embodied-ppo[vla]'") from error
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise ConfigError(f"model.lora_rank={rank}: {type(module).__name__} has no linear layers; write lora_rank=0")
    scale: Any = alpha  # peft declares an int, and multiplies by lora_alpha / r whatever it is
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=names)
    module.requires_grad_(False)
    inject_adapter_in_model(config, module)


def merge(module: nn.Module) -> None:
    """W + (alpha / rank) B A in place of adapters, in W's type; ``module`` has plain linear layers again."""
    adapted: list[tuple[str, Any]] = [(name, layer) for name, layer in module.named_modules() if _adapted(layer)]
    for name, layer in adapted:
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, layer.get_base_layer())


def _adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "lora_A") and hasattr(layer, "get_base_layer")


# ----------------------------------------------------------------------------------------------------------- precision
def settle(module: nn.Module, dtype: torch.dtype) -> None:
    """Frozen parameters are stored in ``dtype``, trained ones in float32: updates smaller than bf16's steps count."""
    for p in module.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else dtype)


def arithmetic(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context of forward passes: weights of any type are multiplied in ``dtype``.

    (Rounded weights are not kept within it: they change between the passes of an update.)
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32, cache_enabled=False)


# ------------------------------------------------------------------------------------------------------------- weights
def digest(folder: str | Path) -> Tensor:
    """uint8 [32]: sha256 of the names and bytes of a directory's config.json and safetensors. Raises OSError."""
    files = [file for file in Path(folder).iterdir() if file.suffix == ".safetensors" or file.name == "config.json"]
    files.sort()

    def one(file: Path) -> bytes:
        with open(file, "rb") as f:
            return hashlib.file_digest(f, "sha256").digest()

    whole = hashlib.sha256()
    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        for file, found in zip(files, pool.map(one, files), strict=True):
            whole.update(file.name.encode() + b"\0" + found)
    return torch.frombuffer(bytearray(whole.digest()), dtype=torch.uint8)


class Adapted(nn.Module):
    """A policy whose checkpoints hold only what is trained, beside the digest of the directory that holds the rest.

    ``rests_on(folder)`` after ``adapt`` makes it so; before, or without it, all weights are held. Copies of the policy
    (a reference for a KL penalty) share what is frozen.
    """

    base: Tensor | None = None
    """See BASE."""
    folder: str = ""

    def rests_on(self, folder: str | Path) -> None:
        """Raises ConfigError where the directory cannot be read."""
        try:
            self.base, self.folder = digest(folder), str(folder)
        except OSError as error:
            raise ConfigError(f"model.checkpoint={folder}: cannot be read ({error.strerror})") from error

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **options)
        if self.base is None:
            return whole
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        return {name: x for name, x in whole.items() if name not in frozen} | {BASE: self.base}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Raises CheckpointError where the state rests on other weights."""
        if self.base is None:
            return super().load_state_dict(state_dict, strict, assign)
        state = dict(state_dict)
        base = state.pop(BASE, None)
        if base is None or not torch.equal(base.cpu(), self.base):
            told = "none" if base is None else f"{_hex(base)}.."
            raise CheckpointError(
                f"model.checkpoint={self.folder}: its digest is {_hex(self.base)}.., the one that adapters were "
                f"trained on {told}; name the directory that the run named, as it was then"
            )
        if strict and (wrong := sorted(set(state) ^ (set(self.state_dict()) - {BASE}))):
            raise CheckpointError(f"{wrong[0]}: missing or unexpected; use the model it was trained with")
        return super().load_state_dict(state, strict=False, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        memo |= {id(p): p for p in self.parameters() if not p.requires_grad}
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def _hex(base: Tensor) -> str:
    return bytes(base.tolist()).hex()[:12]
