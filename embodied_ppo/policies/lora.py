"""Low-rank adapters, storage precision, and checkpoints without frozen weights.

``adapt(language, rank=32, alpha=32)`` adds adapters to every linear layer of a module and freezes
its other parameters. Class, forward pass and names of the module stay the same, apart from those of
the layers: ``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``. Adapters are zero at the
start.

``cast_parameters(policy, torch.bfloat16)`` stores frozen parameters in that type and trained ones
in float32. Call it after ``adapt`` and ``requires_grad_``, and run the forward pass in
``autocast(device, dtype)``.

``project((q_proj, k_proj, v_proj), x)`` applies layers to one input; their adapters then share the
product with A and its gradient. Layers without adapters are called one after another.

``merge(language)`` adds the adapters to the weights and restores plain linear layers;
``remove(language)`` restores the layers without adapters.

``Adapted`` is a base class of policies. After ``set_base_weights(folder)`` a state_dict holds the
trained parameters and, as ``BASE``, the digest of the directory with the frozen ones;
``load_state_dict`` compares it.

Source: Hu et al. 2021, arXiv 2106.09685: y = W x + (alpha / rank) B A x, with B = 0 at the start.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_ppo.policies import peft_files

# Entry of a state_dict, uint8 [32]: digest of the directory with the weights that it lacks.
BASE = "base_sha256"


# ----------------------------------------------------------------------------------------- adapters
class LoRALinear(nn.Module):
    """Frozen linear layer with a trained adapter: y = W x + b + (alpha / rank) B A x.

    The attributes' names are keys of checkpoints, ``lora_A.default.weight`` [rank, D] and
    ``lora_B.default.weight`` [O, rank].
    """

    def __init__(self, base_layer: nn.Linear, *, rank: int, alpha: float) -> None:
        """Wrap a layer; A is random, B is 0.

        Args:
            base_layer: Layer W, b, which must stay frozen.
            rank: Rank of the adapter.
            alpha: Scale of the adapter, see the formula.
        """
        super().__init__()
        self.base_layer, self.scale = base_layer, alpha / rank
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        down = nn.Linear(base_layer.in_features, rank, bias=False)
        up = nn.Linear(rank, base_layer.out_features, bias=False)
        # ``nn.Linear`` has drawn A already. It is drawn again so that a seed gives the adapters
        # that it gave to earlier versions.
        nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
        nn.init.zeros_(up.weight)
        self.lora_A: Any = nn.ModuleDict({"default": down})
        self.lora_B: Any = nn.ModuleDict({"default": up})
        for adapter in (down, up):
            adapter.weight = nn.Parameter(adapter.weight.detach().to(base_layer.weight))

    @property
    def a(self) -> Tensor:
        """A, [rank, D]."""
        return self.lora_A["default"].weight

    @property
    def b(self) -> Tensor:
        """(alpha / rank) B, [O, rank]."""
        return self.lora_B["default"].weight * self.scale

    @property
    def weight(self) -> Tensor:
        """A new tensor W + (alpha / rank) B A, [O, D], of the wider of their types."""
        return self.base_layer.weight + self.b @ self.a

    @property
    def bias(self) -> Tensor | None:
        """b, [O]."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [.., D] to [.., O]."""
        return project((self,), x)[0]


def project(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Apply linear layers to the same x [.., D], each with result [.., O].

    Adapted layers multiply in the type of their frozen weights. Apart from the conversions of A, B
    and, if it has another type, x, no operation is elementwise: sums are accumulated in the matrix
    products.
    """
    adapted = [layer for layer in layers if isinstance(layer, LoRALinear)]
    if len(adapted) < len(layers):
        return [layer(x) for layer in layers]
    dtype = adapted[0].base_layer.weight.dtype
    a = torch.cat([layer.a for layer in adapted]).to(dtype)
    weights = [layer.base_layer.weight for layer in adapted]
    biases = [layer.base_layer.bias for layer in adapted]
    ups = [layer.b.to(dtype) for layer in adapted]
    return list(_AdaptedProduct.apply(x.to(dtype), a, *weights, *biases, *ups))


class _AdaptedProduct(torch.autograd.Function):
    """y_i = x W_i^T + b_i + l_i B_i^T for i = 1 .. k, with (l_1 .. l_k) = x A^T.

    With gradients g_i of y_i and e_i = g_i B_i, e = (e_1 .. e_k)::

        dB_i = g_i^T l_i        dA = e^T x        dx = e A + sum_i g_i W_i

    W_i and b_i are frozen. x is stored once for all k layers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the k results.

        Args:
            ctx: Stores tensors for the backward pass.
            x: [.., D].
            a: [k rank, D].
            tensors: k weights [O_i, D], k biases [O_i] or None, k scaled B [O_i, rank].
        """
        count = len(tensors) // 3
        weights, biases, ups = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.T
        results = []
        parts = low.chunk(count, dim=1)
        for weight, bias, up, part in zip(weights, biases, ups, parts, strict=True):
            y = F.linear(rows, weight, bias)
            torch.addmm(y, part, up.T, out=y)
            results.append(y.view(*x.shape[:-1], -1))
        ctx.save_for_backward(rows, low, a, *weights, *ups)
        ctx.shape, ctx.count = x.shape, count
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``forward``'s arguments."""
        rows, low, a, *others = ctx.saved_tensors
        weights, ups = others[: ctx.count], others[ctx.count :]
        flat = [g.reshape(-1, g.shape[-1]) for g in gradients]
        low_gradient = torch.cat([g @ up for g, up in zip(flat, ups, strict=True)], dim=1)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = low_gradient @ a
            for g, weight in zip(flat, weights, strict=True):
                torch.addmm(d_x, g, weight, out=d_x)
            d_x = d_x.view(ctx.shape)
        parts = low.chunk(ctx.count, dim=1)
        d_ups = [g.T @ part for g, part in zip(flat, parts, strict=True)]
        return d_x, low_gradient.T @ rows, *[None] * 2 * ctx.count, *d_ups


def adapt(module: nn.Module, *, rank: int, alpha: float) -> None:
    """Add adapters to every linear layer of ``module``, in place, and freeze its other parameters.

    Adapters are initialised from torch's global generator.

    Args:
        module: Module to adapt.
        rank: Rank of the adapters.
        alpha: Scale: adapters are multiplied by alpha / rank.

    Raises:
        ConfigError: The rank exceeds that of every weight matrix.
    """
    layers = {name: x for name, x in module.named_modules() if isinstance(x, nn.Linear)}
    largest = max((min(x.weight.shape) for x in layers.values()), default=rank)
    if rank > largest:
        raise ConfigError(f"write at most lora_rank={largest}, the largest of this model: {rank}")
    module.requires_grad_(False)
    for name, layer in layers.items():
        module.set_submodule(name, LoRALinear(layer, rank=rank, alpha=alpha))


def merge(module: nn.Module) -> None:
    """Replace adapted layers by linear layers with weight W + (alpha / rank) B A, in the type
    of W.
    """
    for layer in adapted_layers(module).values():
        with torch.no_grad():
            layer.base_layer.weight += layer.b @ layer.a
    remove(module)


def remove(module: nn.Module) -> None:
    """Replace adapted layers by their frozen linear layers."""
    for name, layer in adapted_layers(module).items():
        module.set_submodule(name, layer.base_layer)


def adapted_layers(module: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers with adapters by name."""
    return {name: x for name, x in module.named_modules() if isinstance(x, LoRALinear)}


def merged_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of ``module`` after ``merge``, one after another."""
    adapted = adapted_layers(module)
    for key, x in module.state_dict().items():
        owner, _, kind = key.replace(".base_layer.", ".").rpartition(".")
        if ".lora_" not in key:
            is_sum = owner in adapted and kind == "weight"
            yield f"{owner}.{kind}", (adapted[owner].weight if is_sum else x).detach()


def shared(module: nn.Module) -> dict[int, Any]:
    """Return the memo with which ``copy.deepcopy`` shares frozen parameters."""
    return {id(p): p for p in module.parameters() if not p.requires_grad}


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
    enabled = dtype != torch.float32
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


# ------------------------------------------------------------------------------------------ weights
def digest(folder: str | Path) -> Tensor:
    """Return the sha256 of names and bytes of a directory's config.json and safetensors (without
    them: pytorch_model*.bin), with those of an adapter's base model, uint8 [32].

    Raises:
        OSError: A file cannot be read.
    """
    folder = Path(folder)
    adapter, base = peft_files.adapter_folder(folder), peft_files.base_folder(folder)
    names = ("config.json", peft_files.CONFIG if adapter else "")
    files = [
        file
        for directory in dict.fromkeys((folder, adapter or folder, base))
        for file in sorted(directory.iterdir())
        if file.suffix == ".safetensors"
        or file.name in names
        or (file.match("pytorch_model*.bin") and not any(directory.glob("model*.safetensors")))
    ]

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

    # Digest of the base weights, see BASE; None: checkpoints hold all weights.
    base: Tensor | None = None
    # Option and directory of the base weights, for messages.
    source: str = ""

    def set_base_weights(self, folder: str | Path, option: str = "model.checkpoint") -> None:
        """Exclude frozen parameters from the state_dict; ``folder``, of an option, holds them."""
        self.base, self.source = digest(folder), f"{option}={folder}"

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return all weights, or with ``base`` the trained ones and its digest."""
        state = super().state_dict(*args, **options)
        if self.base is None:
            return state
        # Tied weights have two names.
        parameters = self.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in parameters if not p.requires_grad}
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
            expected = "none" if base is None else f"{_hex(base)}…"
            raise CheckpointError(
                f"{self.source}: its digest is {_hex(self.base)}…, the one that"
                f" adapters were trained on {expected}; name the directory that the run named, as"
                " it was then"
            )
        if strict and (wrong := sorted(set(state) ^ (set(self.state_dict()) - {BASE}))):
            raise CheckpointError(
                f"{wrong[0]}: missing or unexpected; use the model it was trained with"
            )
        return super().load_state_dict(state, strict=False, assign=assign)

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        memo |= shared(self)
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def _hex(base: Tensor) -> str:
    return bytes(base.tolist()).hex()[:12]
