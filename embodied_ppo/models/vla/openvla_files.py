"""OpenVLA's published files: config.json, its weights' keys, its statistics of actions, its prompts.

What they mean is from openvla/openvla at c8f03f4 and moojink/openvla-oft at 213c5ff. No published weights were at
hand: everything is proven on synthetic checkpoints of the published layout, not on the published ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied_ppo.core.errors import choose, one_line, show
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import json_of, refusing
from embodied_ppo.models.vla.openvla import BOS, DINO, EMPTY, SIGLIP, OpenVLABody, OpenVLAConfig, TowerConfig

ELSE = "name the directory of a model's checkpoint (hf download openvla/openvla-7b --local-dir DIR)"
BACKBONES = {"dinosiglip-vit-so-224px": 224, "dinosiglip-vit-so-384px": 384}
"""vision_backbone_id -> side of the square image, pixels."""


# ------------------------------------------------------------------------------------------------------- configuration
def read_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """From what is in a published config.json. Sizes other than the published ones are in our field ``vision_sizes``.

    Raises ConfigError.
    """
    left = dict(raw)
    backbone = left.pop("vision_backbone_id", None)
    if backbone not in BACKBONES:
        raise ConfigError(
            f"vision_backbone_id={backbone}: " + choose(str(backbone), list(BACKBONES), "read are DINOv2 with SigLIP: ")
        )
    if left.pop("use_fused_vision_backbone", True) is False:
        raise ConfigError("use_fused_vision_backbone=false: models of two towers are read; name one of OpenVLA's")
    strategy = left.pop("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise ConfigError(f"image_resize_strategy={strategy}: only resize-naive, OpenVLA's, is computed")
    text = dict(left.pop("text_config", None) or {})
    if text.get("model_type", "llama") != "llama":
        raise ConfigError(f"text_config.model_type={text['model_type']}: the language model must be llama")
    sizes = dict(left.pop("vision_sizes", None) or {})
    try:
        return OpenVLAConfig(
            vision_backbone_id=backbone,
            text=text,
            dino=TowerConfig(**sizes["dino"]) if "dino" in sizes else DINO,
            siglip=TowerConfig(**sizes["siglip"]) if "siglip" in sizes else SIGLIP,
            image_size=int(sizes.get("image_size", BACKBONES[backbone])),
            registers=int(sizes.get("registers", 4)),
            action_bins=int(left.pop("n_action_bins", 256)),
            pad_to_multiple_of=int(left.pop("pad_to_multiple_of", 64)),
            pad_token_id=int(left.pop("pad_token_id", 32000)),
            norm_stats=left.pop("norm_stats", None) or {},
            others=left,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a field has the wrong type or name ({error}); compare with openvla-7b's") from error


def write_config(config: OpenVLAConfig) -> dict[str, Any]:
    """config.json, as published."""
    written: dict[str, Any] = {"model_type": "openvla", "arch_specifier": "no-align+fused-gelu-mlp"}
    written |= dict(config.others) | {
        "vision_backbone_id": config.vision_backbone_id,
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "text_config": {"model_type": "llama"} | dict(config.text),
        "n_action_bins": config.action_bins,
        "pad_to_multiple_of": config.pad_to_multiple_of,
        "pad_token_id": config.pad_token_id,
        "norm_stats": config.norm_stats,
    }
    published = (DINO, SIGLIP, BACKBONES[config.vision_backbone_id], 4)
    if (config.dino, config.siglip, config.image_size, config.registers) != published:
        written["vision_sizes"] = {
            "dino": vars(config.dino),
            "siglip": vars(config.siglip),
            "image_size": config.image_size,
            "registers": config.registers,
        }
    return written


# ---------------------------------------------------------------------------------------------------- prompt and action
def prompt(instruction: str) -> str:
    """What the published models were trained with (lower case, too)."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def encode_prompts(
    tokenize: Callable[[str], Sequence[int]],
    instructions: Iterable[str],
    *,
    pad: int = 32000,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """int64 ids [B, L] and bool mask [B, L] of prompts, padded on the left: BOS, words, the empty word.

    ``tokenize``: Llama's, text -> ids beginning with BOS (``lambda text: tokenizer(text).input_ids``). Raises
    ConfigError where it gives no BOS.
    """
    rows = []
    for instruction in instructions:
        ids = list(tokenize(prompt(instruction)))
        if not ids or ids[0] != BOS or BOS in ids[1:]:
            raise ConfigError(
                f"tokenizer: {prompt(instruction)!r} gives {ids[:3]}.. but must begin with BOS = {BOS}, once; use the "
                "checkpoint's tokenizer.json, with special tokens"
            )
        rows.append(ids if ids[-1] == EMPTY else [*ids, EMPTY])
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return ids, mask


def tokenizer(path: str | Path, *, what: str = "model.path") -> Callable[[str], Sequence[int]]:
    """The ``tokenize`` of a directory's tokenizer.json. Raises ConfigError."""
    file = Path(path) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(f"OpenVLA needs tokenizers ({error}): pip install 'embodied-ppo[vla]'") from error
    if not file.is_file():
        raise ConfigError(f"{what}={path}: holds no tokenizer.json; download it")
    with refusing(f"{what}={path}: {file.name} cannot be read (", "); download it again", kind=True):
        words = Tokenizer.from_file(str(file))
    return lambda text: words.encode(text).ids


@dataclass(frozen=True)
class ActionTokens:
    """Actions, their bins and their ids, as OpenVLA counts them.

    n edges -1 = e_0 < .. < e_{n-1} = 1, evenly spaced, enclose n-1 intervals. Bin k in 0..n-1 holds e_k <= x < e_{k+1};
    its id is vocab_size - 1 - k (published: vocab_size less the number of edges not above x). Bin n-1 holds x = 1 alone
    and means the last interval's centre, as bin n-2 does. A bin's value is (e_k + e_{k+1}) / 2.

    Units: x in [-1, 1] is mask ? 2 (a - q01) / (q99 - q01 + 1e-8) - 1 : a of the environment's action a, each dimension
    by itself; back it is a = ½ (x + 1) (q99 - q01) + q01.
    """

    vocab_size: int
    """Without padding."""
    edges: Tensor
    """float64 [n]"""
    low: Tensor
    """float64 [A], q01 in the environment's units"""
    high: Tensor
    """float64 [A], q99"""
    mask: Tensor
    """bool [A]: dimensions that are normalised; the gripper's is usually not"""

    @classmethod
    def of(cls, config: OpenVLAConfig, unnorm_key: str | None = None) -> ActionTokens:
        """By the statistics of one of the datasets in ``norm_stats``; None: of the only one. Raises ConfigError."""
        names = sorted(config.norm_stats)
        if unnorm_key is None and len(names) == 1:
            unnorm_key = names[0]
        if unnorm_key is None or unnorm_key not in config.norm_stats:
            raise ConfigError(f"unnorm_key={show(unnorm_key)}: " + choose(str(unnorm_key), names, "norm_stats has: "))
        where, stats = f"norm_stats.{unnorm_key}.action", config.norm_stats[unnorm_key].get("action", {})
        for name in ("q01", "q99"):
            if name not in stats:
                raise ConfigError(f"{where}: has no {name} but {sorted(stats)}; actions are scaled by q01 and q99")
        low, high = (torch.tensor(stats[name], dtype=torch.float64) for name in ("q01", "q99"))
        mask = torch.tensor(stats.get("mask", [True] * len(low)), dtype=torch.bool)
        if not low.shape == high.shape == mask.shape or low.ndim != 1:
            sizes = f"{tuple(low.shape)}, {tuple(high.shape)}, {tuple(mask.shape)}"
            raise ConfigError(f"{where}: q01, q99 and mask have shapes {sizes} but must be one list each, equally long")
        if bool((low > high).any()):
            raise ConfigError(
                f"{where}: q01 must not exceed q99 but does in dimension {int((low > high).int().argmax())}"
            )
        edges = torch.arange(config.action_bins, dtype=torch.float64) * (2 / (config.action_bins - 1)) - 1
        edges[-1] = 1.0
        return cls(config.vocab_size, edges, low, high, mask)

    def to(self, device: torch.device | str) -> ActionTokens:
        moved = {name: getattr(self, name).to(device) for name in ("edges", "low", "high", "mask")}
        return replace(self, **moved)

    @property
    def dim(self) -> int:
        """A."""
        return self.low.shape[0]

    def ids(self, bins: Tensor) -> Tensor:
        """int64 vocabulary ids of bins, any shape; and back."""
        return self.vocab_size - 1 - bins.long()

    def bins(self, action: Tensor) -> Tensor:
        """int64 [.., A] of the environment's actions [.., A]; what lies outside [q01, q99] (or [-1, 1]) is clipped."""
        a = action.double()
        x = torch.where(self.mask, 2 * (a - self.low) / (self.high - self.low + 1e-8) - 1, a)
        return torch.bucketize(x.clamp(-1, 1).contiguous(), self.edges, right=True) - 1

    def values(self, bins: Tensor) -> Tensor:
        """float64 in (-1, 1) of bins, any shape."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2
        return centers[bins.long().clamp_max(len(centers) - 1)]

    def actions(self, bins: Tensor) -> Tensor:
        """float32 [.., A] in the environment's units of bins [.., A]."""
        x = self.values(bins)
        return torch.where(self.mask, 0.5 * (x + 1) * (self.high - self.low) + self.low, x).float()


# ------------------------------------------------------------------------------------------------------------- weights
class Part(NamedTuple):
    """A region of one of our parameters: ``length`` from ``start`` along ``dim``; length -1: to its end."""

    name: str
    dim: int = 0
    start: int = 0
    length: int = -1

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        whole = parameters[self.name]
        length = whole.shape[self.dim] - self.start if self.length < 0 else self.length
        return whole.detach().narrow(self.dim, self.start, length)


def layout(config: OpenVLAConfig) -> dict[str, tuple[Part, ...]]:
    """Published key -> parts of our parameters, which follow each other along dimension 0.

    The language model's keys are not among them: they are ours.
    """
    found: dict[str, tuple[Part, ...]] = {}

    def both(key: str, *names: str) -> None:
        """Weight and bias."""
        for end in ("weight", "bias"):
            found[f"{key}.{end}"] = tuple(Part(f"{name}.{end}") for name in names)

    for i in (1, 2, 3):
        both(f"projector.fc{i}", f"projector.fc{i}")

    key, ours = "vision_backbone.featurizer", "dino"
    found[f"{key}.cls_token"] = (Part(f"{ours}.embeddings.cls_token"),)
    found[f"{key}.reg_token"] = (Part(f"{ours}.embeddings.register_tokens"),)
    found[f"{key}.pos_embed"] = (Part(f"{ours}.embeddings.position_embeddings", 1, 1),)
    both(f"{key}.patch_embed.proj", f"{ours}.embeddings.patch_embeddings.projection")
    both(f"{key}.norm", f"{ours}.layernorm")
    for i in range(config.dino.layers):
        block, layer = f"{key}.blocks.{i}", f"{ours}.encoder.layer.{i}"
        for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
            both(f"{block}.{name}", f"{layer}.{name}")
        both(f"{block}.attn.qkv", *(f"{layer}.attention.{x}_proj" for x in "qkv"))
        both(f"{block}.attn.proj", f"{layer}.attention.o_proj")
        for j in (1, 2):
            found[f"{block}.ls{j}.scale_factor"] = (Part(f"{layer}.layer_scale{j}.lambda1"),)

    key, ours = "vision_backbone.fused_featurizer", "siglip"
    found[f"{key}.pos_embed"] = (Part(f"{ours}.embeddings.position_embedding.weight"),)
    both(f"{key}.patch_embed.proj", f"{ours}.embeddings.patch_embedding")
    both(f"{key}.norm", f"{ours}.post_layernorm")
    for i in range(config.siglip.layers):
        block, layer = f"{key}.blocks.{i}", f"{ours}.encoder.layers.{i}"
        for j in (1, 2):
            both(f"{block}.norm{j}", f"{layer}.layer_norm{j}")
            both(f"{block}.mlp.fc{j}", f"{layer}.mlp.fc{j}")
        both(f"{block}.attn.qkv", *(f"{layer}.self_attn.{x}_proj" for x in "qkv"))
        both(f"{block}.attn.proj", f"{layer}.self_attn.out_proj")
    pool, head, size = f"{key}.attn_pool", f"{ours}.head", config.siglip.hidden_size
    found[f"{pool}.latent"] = (Part(f"{head}.probe"),)
    for end in ("weight", "bias"):
        found[f"{pool}.q.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, 0, size),)
        found[f"{pool}.kv.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, size),)
    both(f"{pool}.proj", f"{head}.attention.out_proj")
    both(f"{pool}.norm", f"{head}.layernorm")
    for j in (1, 2):
        both(f"{pool}.mlp.fc{j}", f"{head}.mlp.fc{j}")
    return found


@dataclass(frozen=True)
class Entry:
    """A published tensor: its shape, and what it is made of here (memory shared with our parameters)."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]

    def read(self, tensor: Tensor) -> None:
        """Copy into our parameters; type and device become theirs."""
        rows = tensor.reshape(-1, *self.parts[0].shape[1:]).split([len(part) for part in self.parts])
        for part, row in zip(self.parts, rows):
            part.copy_(row)

    def write(self) -> Tensor:
        """As published; shares memory with a parameter where it is one."""
        whole = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return whole.reshape(self.shape)


def entries(body: OpenVLABody) -> dict[str, Entry]:
    """Published key -> what is behind it, for every parameter of ``body`` once."""
    parameters = dict(body.named_parameters())
    named = layout(body.config)
    named |= {name: (Part(name),) for name in parameters if name.startswith("language_model.")}
    missing = set(parameters) - {part.name for parts in named.values() for part in parts}
    assert not missing, f"transformers has parameters that no published key fills: {sorted(missing)}"
    found = {}
    for key, parts in named.items():
        tensors = tuple(part.of(parameters) for part in parts)
        shape = (sum(len(x) for x in tensors), *tensors[0].shape[1:])
        if key.endswith("fused_featurizer.pos_embed"):
            shape = (1, *shape)
        found[key] = Entry(shape, tensors)
    return found


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    what: str = "model.path",
) -> OpenVLABody:
    """From a directory of the published layout: config.json, and model.safetensors or its shards with their index.

    Every key is used exactly once. Where dataset_statistics.json is there (fine-tuned models), its statistics go before
    config.json's. ``what``: the option, for messages. Raises ConfigError.
    """
    folder, where = Path(path), f"{what}={path}"
    try:
        from safetensors import SafetensorError
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ConfigError(f"OpenVLA needs transformers ({error}): pip install 'embodied-ppo[vla]'") from error
    raw = json_of(folder / "config.json", where, ELSE)
    statistics = folder / "dataset_statistics.json"
    if statistics.is_file():
        raw["norm_stats"] = (raw.get("norm_stats") or {}) | json_of(statistics, where, ELSE)
    heads = sorted(file.name for file in folder.glob("*--*checkpoint.pt"))
    if heads:
        raise ConfigError(
            f"{where}: holds {heads[0]}: a head or projector beside the model (regression, diffusion, proprioception, "
            "FiLM) that is not computed; name a checkpoint with action tokens alone"
        )
    files = _weights(folder, where)
    try:
        config = read_config(raw)
        with no_init_weights():
            body = OpenVLABody(config, dtype=dtype, device=device)
        expected = entries(body)
        found = _check(files, expected)
        _copy(found, expected)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{where}: weights cannot be read ({one_line(error, kind=True)}); download them again"
        ) from error
    return body


def save(body: OpenVLABody, path: str | Path) -> None:
    """The published layout, which ``load`` reads: config.json and model.safetensors, in the body's type.

    Each is written to another name first. The tokenizer's files are the checkpoint's and are not written.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, entry in entries(body).items():
        tensor = entry.write()
        alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[key] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(write_config(body.config), indent=2) + "\n")
    os.replace(part, folder / "config.json")


def _weights(folder: Path, where: str) -> list[Path]:
    """The files that hold weights."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / "model.safetensors.index.json").is_file():
        raise ConfigError(
            f"{where}: holds neither model.safetensors nor model.safetensors.index.json; other formats (.bin, .pt) "
            "can run code when they are read: convert them to safetensors first"
        )
    names = json_of(folder / "model.safetensors.index.json", where, ELSE).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{where}: model.safetensors.index.json has no weight_map; download it again")
    files = [folder / str(name) for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != folder:
            raise ConfigError(f"{where}: model.safetensors.index.json names {file}, outside; download it again")
        if not file.is_file():
            raise ConfigError(f"{where}: {file.name} is in model.safetensors.index.json but missing; download it")
    return files


def _check(files: Sequence[Path], expected: Mapping[str, Entry]) -> dict[str, tuple[Path, str]]:
    """Key -> file and its name there, if the files hold exactly what is expected. Raises ConfigError."""
    from safetensors import safe_open

    found: dict[str, tuple[Path, str]] = {}
    wrong, twice, quantised = [], [], []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                key = name[: -len("gamma")] + "scale_factor" if name.endswith((".ls1.gamma", ".ls2.gamma")) else name
                if key in found:
                    twice.append(name)
                found[key] = file, name
                view = tensors.get_slice(name)
                shape = tuple(view.get_shape())
                if key in expected and shape != expected[key].shape:
                    wrong.append(f"{name} {list(shape)} instead of {list(expected[key].shape)}")
                if key in expected and view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    quantised.append(f"{name} {view.get_dtype()}")
    problems = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [found[key][1] for key in found if key not in expected],
        "of another shape": wrong,
        "twice": twice,
        "not of a floating type (quantised?)": quantised,
    }
    text = "; ".join(f"{len(keys)} {how}: {_some(keys)}" for how, keys in problems.items() if keys)
    if text:
        raise ConfigError(
            f"the weights are not those of the model that config.json describes: {text}. Are vision_backbone_id and "
            "text_config those that the weights were written with? (LoRA adapters must be merged first)"
        )
    return found


@torch.no_grad()
def _copy(found: Mapping[str, tuple[Path, str]], expected: Mapping[str, Entry]) -> None:
    from safetensors import safe_open

    for file in dict.fromkeys(file for file, _ in found.values()):
        with safe_open(file, framework="pt") as tensors:
            for key, (holder, name) in found.items():
                if holder == file:
                    expected[key].read(tensors.get_tensor(name))


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", .." if len(keys) > 3 else "")
