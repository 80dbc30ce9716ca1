"""Low-rank adapters, storage precision, and checkpoints without frozen weights.

``adapt(language, rank=32, alpha=32)`` adds adapters to every linear layer of a module and freezes
its other parameters. Class, forward pass and names of the module stay the same, apart from those of
the layers: ``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``. Adapters are zero at the
start.

``cast_parameters(policy, torch.bfloat16)`` stores frozen parameters in that type and trained ones
in float32. Call it after ``adapt`` and ``requires_grad_``, and run the forward pass in
``autocast(device, dtype)``.

``merge(language)`` adds the adapters to the weights and restores plain linear layers.

``Adapted`` is a base class of policies. After ``set_base_weights(folder)`` a state_dict holds the
trained parameters and, as ``BASE``, the digest of the directory with the frozen ones;
``load_state_dict`` compares it.

Source: Hu et al. 2021, arXiv 2106.09685: y = W x + (alpha / rank) B A x, with B = 0 at the start.
The layers are those of peft; its wrappers, configurations and files are not used.
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
"""Entry of a state_dict, uint8 [32]: digest of the directory that holds the weights which the
state_dict lacks.
"""


# ----------------------------------------------------------------------------------------- adapters
def adapt(module: nn.Module, *, rank: int, alpha: float) -> None:
    """Add adapters to every linear layer of ``module``, in place, and freeze its other parameters.

    Adapters are initialised from torch's global generator.

    Args:
        module: Module to adapt.
        rank: Rank of the adapters.
        alpha: Scale: adapters are multiplied by alpha / rank.

    Raises:
        ConfigError: peft is missing, or the module has no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"model.lora_rank={rank} needs peft ({error}): pip install 'embodied-ppo[vla]'"
        ) from error
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise ConfigError(
            f"model.lora_rank={rank}: {type(module).__name__} has no linear layers; write"
            " lora_rank=0"
        )
    scale: Any = alpha  # peft declares an int but accepts any number
    config = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=0.0, target_modules=names)
    module.requires_grad_(False)
    inject_adapter_in_model(config, module)


def merge(module: nn.Module) -> None:
    """Replace adapted layers by linear layers with weight W + (alpha / rank) B A, in the type
    of W.
    """
    adapted: list[tuple[str, Any]] = [
        (name, layer) for name, layer in module.named_modules() if _adapted(layer)
    ]
    for name, layer in adapted:
        layer.merge()
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, layer.get_base_layer())


def _adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "lora_A") and hasattr(layer, "get_base_layer")


# ---------------------------------------------------------------------------------------- precision
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Store frozen parameters in ``dtype`` and trained ones in float32.

    Most updates are smaller than the resolution of bfloat16 and would be lost in it.
    """
    for p in module.parameters():
        p.data = p.data.to(torch.float32 if p.requires_grad else dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context of a forward pass, in which matrices are multiplied in ``dtype``.

    Converted weights are not cached, because they change between the passes of an update.
    """
    return torch.autocast(
        device.type, torch.bfloat16, enabled=dtype != torch.float32, cache_enabled=False
    )


# ------------------------------------------------------------------------------------------ weights
def digest(folder: str | Path) -> Tensor:
    """Return the sha256 of names and bytes of a directory's config.json and safetensors, uint8
    [32].

    Raises:
        OSError: A file cannot be read.
    """
    files = [
        file
        for file in Path(folder).iterdir()
        if file.suffix == ".safetensors" or file.name == "config.json"
    ]
    files.sort()

    def file_digest(file: Path) -> bytes:
        with open(file, "rb") as f:
            return hashlib.file_digest(f, "sha256").digest()

    total = hashlib.sha256()
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the interpreter lock
        for file, sha256 in zip(files, pool.map(file_digest, files), strict=True):
            total.update(file.name.encode() + b"\0" + sha256)
    return torch.frombuffer(bytearray(total.digest()), dtype=torch.uint8)


class Adapted(nn.Module):
    """Policy whose checkpoints hold only trained parameters and the digest of the base weights.

    This applies after ``set_base_weights(folder)``, which must follow ``adapt``. Otherwise
    checkpoints hold all weights. Copies of the policy (a reference for a KL penalty) share frozen
    parameters.
    """

    base: Tensor | None = None
    """Digest of the base weights, see BASE; None: checkpoints hold all weights."""
    folder: str = ""

    def set_base_weights(self, folder: str | Path) -> None:
        """Exclude frozen parameters from the state_dict; ``folder`` holds them.

        Raises:
            ConfigError: The directory cannot be read.
        """
        try:
            self.base, self.folder = digest(folder), str(folder)
        except OSError as error:
            raise ConfigError(
                f"model.checkpoint={folder}: cannot be read ({error.strerror})"
            ) from error

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return all weights, or with ``base`` the trained ones and its digest."""
        state = super().state_dict(*args, **options)
        if self.base is None:
            return state
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        return {name: x for name, x in state.items() if name not in frozen} | {BASE: self.base}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state_dict.

        Raises:
            CheckpointError: The state belongs to other base weights.
        """
        if self.base is None:
            return super().load_state_dict(state_dict, strict, assign)
        state = dict(state_dict)
        base = state.pop(BASE, None)
        if base is None or not torch.equal(base.cpu(), self.base):
            expected = "none" if base is None else f"{_hex(base)}.."
            raise CheckpointError(
                f"model.checkpoint={self.folder}: its digest is {_hex(self.base)}.., the one that"
                f" adapters were trained on {expected}; name the directory that the run named, as"
                " it was then"
            )
        if strict and (wrong := sorted(set(state) ^ (set(self.state_dict()) - {BASE}))):
            raise CheckpointError(
                f"{wrong[0]}: missing or unexpected; use the model it was trained with"
            )
        return super().load_state_dict(state, strict=False, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        memo |= {id(p): p for p in self.parameters() if not p.requires_grad}
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def _hex(base: Tensor) -> str:
    return bytes(base.tolist()).hex()[:12]
