"""OpenVLA's published files: configuration, keys of the weights, action statistics, prompts.

Their meaning follows openvla/openvla at c8f03f4 and moojink/openvla-oft at 213c5ff. Published
weights were not available: everything is tested with synthetic checkpoints of the published layout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embodied_ppo.core.errors import choose, one_line, show
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import (
    check_finite,
    config_errors,
    import_transformers,
    pad_left,
    read_json,
)
from embodied_ppo.models.vla.openvla import (
    BOS,
    DINO,
    EMPTY,
    MEANS,
    SIGLIP,
    OpenVLABody,
    OpenVLAConfig,
    TowerConfig,
)

CURE = "name the directory of a model's checkpoint (hf download openvla/openvla-7b --local-dir DIR)"
BACKBONES = {"dinosiglip-vit-so-224px": 224, "dinosiglip-vit-so-384px": 384}
"""vision_backbone_id -> side of the square image, pixels."""


# ------------------------------------------------------------------------------------ configuration
def read_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """Convert the contents of a published config.json.

    Sizes other than the published ones are in our additional field ``vision_sizes``.

    Raises:
        ConfigError: A field is not supported.
    """
    extra_fields = dict(raw)
    backbone = extra_fields.pop("vision_backbone_id", None)
    if backbone not in BACKBONES:
        raise ConfigError(
            f"vision_backbone_id={backbone}: "
            + choose(str(backbone), list(BACKBONES), "read are DINOv2 with SigLIP: ")
        )
    if extra_fields.pop("use_fused_vision_backbone", True) is False:
        raise ConfigError(
            "use_fused_vision_backbone=false: models of two towers are read; name one of OpenVLA's"
        )
    strategy = extra_fields.pop("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise ConfigError(
            f"image_resize_strategy={strategy}: only resize-naive, OpenVLA's, is computed"
        )
    text = dict(extra_fields.pop("text_config", None) or {})
    if text.get("model_type", "llama") != "llama":
        raise ConfigError(
            f"text_config.model_type={text['model_type']}: the language model must be llama"
        )
    sizes = dict(extra_fields.pop("vision_sizes", None) or {})
    try:
        return OpenVLAConfig(
            vision_backbone_id=backbone,
            text=text,
            dino=TowerConfig(**sizes["dino"]) if "dino" in sizes else DINO,
            siglip=TowerConfig(**sizes["siglip"]) if "siglip" in sizes else SIGLIP,
            image_size=int(sizes.get("image_size", BACKBONES[backbone])),
            registers=int(sizes.get("registers", 4)),
            action_bins=int(extra_fields.pop("n_action_bins", 256)),
            pad_to_multiple_of=int(extra_fields.pop("pad_to_multiple_of", 64)),
            pad_token_id=int(extra_fields.pop("pad_token_id", 32000)),
            norm_stats=extra_fields.pop("norm_stats", None) or {},
            extra_fields=extra_fields,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a field has the wrong type or name ({error}); compare with openvla-7b's"
        ) from error


def read_preprocessor(raw: Mapping[str, Any], config: OpenVLAConfig) -> OpenVLAConfig:
    """Return ``config`` with the means and deviations of preprocessor_config.json.

    openvla-7b's are rounded to bfloat16, so that they differ from ImageNet's.

    Raises:
        ConfigError: A field is damaged, or its image processing is not the one of ``OpenVLABody``.
    """
    label, side = "preprocessor_config.json", config.image_size
    for name, value, supported in (
        ("image_resize_strategy", raw.get("image_resize_strategy"), "resize-naive"),
        *(("interpolations", x, "bicubic") for x in raw.get("interpolations") or ()),
        *(("input_sizes", x, [3, side, side]) for x in raw.get("input_sizes") or ()),
    ):
        if value is not None and value != supported:
            raise ConfigError(f"{label}: {name} has {show(value)}; supported is {show(supported)}")
    moments: dict[str, tuple[float, ...]] = {}
    for name in ("means", "stds"):
        rows = raw.get(name)
        if rows is None:
            continue
        try:
            numbers = tuple(float(x) for row in rows for x in row)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{label}: {name} must be numbers ({error})") from error
        if len(numbers) != len(MEANS) or (name == "stds" and min(numbers) <= 0):
            raise ConfigError(
                f"{label}: {name} must have three numbers for each of both towers (stds above 0),"
                f" but is {show(rows)}; download it again"
            )
        moments[name] = numbers
    return replace(config, **moments)


def write_config(config: OpenVLAConfig) -> dict[str, Any]:
    """Return the contents of config.json in the published layout."""
    written: dict[str, Any] = {"model_type": "openvla", "arch_specifier": "no-align+fused-gelu-mlp"}
    written |= dict(config.extra_fields) | {
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


# -------------------------------------------------------------------------------- prompt and action
def prompt(instruction: str) -> str:
    """Return the prompt that the published models were trained with, in lower case."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def encode_prompts(
    tokenize: Callable[[str], Sequence[int]], instructions: Iterable[str], *, pad: int = 32000
) -> tuple[Tensor, Tensor]:
    """Tokenise prompts, padded on the left: BOS, words, the empty word.

    Args:
        tokenize: Llama's tokenizer, text -> ids that begin with BOS (``lambda text:
            tokenizer(text).input_ids``).
        instructions: Sentences.
        pad: Id of padding.

    Returns:
        int64 ids [B, L] and bool mask [B, L].

    Raises:
        ConfigError: The tokenizer adds no BOS.
    """
    rows = []
    for instruction in instructions:
        ids = list(tokenize(prompt(instruction)))
        if not ids or ids[0] != BOS or BOS in ids[1:]:
            raise ConfigError(
                f"tokenizer: {prompt(instruction)!r} gives {ids[:3]}.. but must begin with BOS ="
                f" {BOS}, once; use the checkpoint's tokenizer.json, with special tokens"
            )
        rows.append(ids if ids[-1] == EMPTY else [*ids, EMPTY])
    return pad_left(rows, pad)


def tokenizer(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Return the ``tokenize`` function of a directory's tokenizer.json.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    file = Path(path) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"OpenVLA needs tokenizers ({error}): pip install 'embodied-ppo[vla]'"
        ) from error
    if not file.is_file():
        raise ConfigError(f"model.checkpoint={path}: holds no tokenizer.json; download it")
    with config_errors(
        f"model.checkpoint={path}: {file.name} cannot be read (", "); download it again", kind=True
    ):
        words = Tokenizer.from_file(str(file))
    return lambda text: words.encode(text).ids


@dataclass(frozen=True)
class ActionTokens:
    """Conversion between actions, bins and vocabulary ids in OpenVLA's convention.

    n edges -1 = e_0 < .. < e_{n-1} = 1, evenly spaced, enclose n-1 intervals. Bin k in 0..n-1
    contains e_k <= x < e_{k+1}; its id is vocab_size - 1 - k (published: vocab_size minus the
    number of edges not above x). Bin n-1 contains x = 1 alone and has the centre of the last
    interval, as bin n-2. The value of a bin is (e_k + e_{k+1}) / 2.

    Units: for an action a of the environment, x = 2 (a - q01) / (q99 - q01 + 1e-8) - 1 in [-1, 1]
    in dimensions with ``mask``, else x = a. The inverse is a = ½ (x + 1) (q99 - q01) + q01.

    Attributes:
        edges: float64 [n].
        low: float64 [A], q01 in the units of the environment.
        high: float64 [A], q99 in the units of the environment.
        mask: bool [A], dimensions that are normalised; usually not the gripper's.
    """

    edges: Tensor
    low: Tensor
    high: Tensor
    mask: Tensor

    @classmethod
    def from_config(cls, config: OpenVLAConfig, unnorm_key: str | None = None) -> ActionTokens:
        """Read the statistics of one dataset in ``norm_stats``; ``unnorm_key`` None selects the
        only one.

        Raises:
            ConfigError: The dataset is unknown, or its statistics are inconsistent.
        """
        names = sorted(config.norm_stats)
        if unnorm_key is None and len(names) == 1:
            unnorm_key = names[0]
        if unnorm_key is None or unnorm_key not in config.norm_stats:
            raise ConfigError(
                f"unnorm_key={show(unnorm_key)}: "
                + choose(str(unnorm_key), names, "norm_stats has: ")
            )
        label = f"norm_stats.{unnorm_key}.action"
        stats = config.norm_stats[unnorm_key].get("action", {})
        for name in ("q01", "q99"):
            if name not in stats:
                raise ConfigError(
                    f"{label}: has no {name} but {sorted(stats)}; actions are scaled by q01 and q99"
                )
        low, high = (torch.tensor(stats[name], dtype=torch.float64) for name in ("q01", "q99"))
        mask = torch.tensor(stats.get("mask", [True] * len(low)), dtype=torch.bool)
        if not low.shape == high.shape == mask.shape or low.ndim != 1:
            sizes = f"{tuple(low.shape)}, {tuple(high.shape)}, {tuple(mask.shape)}"
            raise ConfigError(
                f"{label}: q01, q99 and mask have shapes {sizes} but must be one list each, equally"
                " long"
            )
        if bool((low > high).any()):
            raise ConfigError(
                f"{label}: q01 must not exceed q99 but does in dimension"
                f" {int((low > high).int().argmax())}"
            )
        width = 2 / (config.action_bins - 1)
        edges = torch.arange(config.action_bins, dtype=torch.float64) * width - 1
        edges[-1] = 1.0
        return cls(edges, low, high, mask)

    def to(self, device: torch.device | str) -> ActionTokens:
        """Copy all tensors to a device."""
        moved = {name: getattr(self, name).to(device) for name in ("edges", "low", "high", "mask")}
        return replace(self, **moved)

    @property
    def dim(self) -> int:
        """Number of action dimensions, A."""
        return self.low.shape[0]

    def bins(self, action: Tensor) -> Tensor:
        """Convert actions of the environment [.., A] to bins, int64.

        Values outside [q01, q99] (or [-1, 1]) are clipped.
        """
        a = action.double()
        x = torch.where(self.mask, 2 * (a - self.low) / (self.high - self.low + 1e-8) - 1, a)
        return torch.bucketize(x.clamp(-1, 1).contiguous(), self.edges, right=True) - 1

    def values(self, bins: Tensor) -> Tensor:
        """Return the centres of bins of any shape, float64 in (-1, 1)."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2
        return centers[bins.long().clamp_max(len(centers) - 1)]

    def actions(self, bins: Tensor) -> Tensor:
        """Convert bins [.., A] to actions in the units of the environment, float32."""
        x = self.values(bins)
        return torch.where(self.mask, 0.5 * (x + 1) * (self.high - self.low) + self.low, x).float()


# ------------------------------------------------------------------------------------------ weights
class Part(NamedTuple):
    """Slice of one of our parameters along ``dim``; length -1: to the end."""

    name: str
    dim: int = 0
    start: int = 0
    length: int = -1

    def view(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the slice as a view."""
        parameter = parameters[self.name]
        length = parameter.shape[self.dim] - self.start if self.length < 0 else self.length
        return parameter.detach().narrow(self.dim, self.start, length)


def layout(config: OpenVLAConfig) -> dict[str, tuple[Part, ...]]:
    """Map published keys to slices of our parameters, concatenated along dimension 0.

    The keys of the language model are not included, because they are equal.
    """
    parts_by_key: dict[str, tuple[Part, ...]] = {}

    def add_layer(key: str, *names: str) -> None:
        """Add weight and bias of a layer."""
        for end in ("weight", "bias"):
            parts_by_key[f"{key}.{end}"] = tuple(Part(f"{name}.{end}") for name in names)

    for i in (1, 2, 3):
        add_layer(f"projector.fc{i}", f"projector.fc{i}")

    key, prefix = "vision_backbone.featurizer", "dino"
    parts_by_key[f"{key}.cls_token"] = (Part(f"{prefix}.embeddings.cls_token"),)
    parts_by_key[f"{key}.reg_token"] = (Part(f"{prefix}.embeddings.register_tokens"),)
    parts_by_key[f"{key}.pos_embed"] = (Part(f"{prefix}.embeddings.position_embeddings", 1, 1),)
    add_layer(f"{key}.patch_embed.proj", f"{prefix}.embeddings.patch_embeddings.projection")
    add_layer(f"{key}.norm", f"{prefix}.layernorm")
    for i in range(config.dino.layers):
        block, layer = f"{key}.blocks.{i}", f"{prefix}.encoder.layer.{i}"
        for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
            add_layer(f"{block}.{name}", f"{layer}.{name}")
        add_layer(f"{block}.attn.qkv", *(f"{layer}.attention.{x}_proj" for x in "qkv"))
        add_layer(f"{block}.attn.proj", f"{layer}.attention.o_proj")
        for j in (1, 2):
            parts_by_key[f"{block}.ls{j}.scale_factor"] = (Part(f"{layer}.layer_scale{j}.lambda1"),)

    key, prefix = "vision_backbone.fused_featurizer", "siglip"
    parts_by_key[f"{key}.pos_embed"] = (Part(f"{prefix}.embeddings.position_embedding.weight"),)
    add_layer(f"{key}.patch_embed.proj", f"{prefix}.embeddings.patch_embedding")
    add_layer(f"{key}.norm", f"{prefix}.post_layernorm")
    for i in range(config.siglip.layers):
        block, layer = f"{key}.blocks.{i}", f"{prefix}.encoder.layers.{i}"
        for j in (1, 2):
            add_layer(f"{block}.norm{j}", f"{layer}.layer_norm{j}")
            add_layer(f"{block}.mlp.fc{j}", f"{layer}.mlp.fc{j}")
        add_layer(f"{block}.attn.qkv", *(f"{layer}.self_attn.{x}_proj" for x in "qkv"))
        add_layer(f"{block}.attn.proj", f"{layer}.self_attn.out_proj")
    pool, head, size = f"{key}.attn_pool", f"{prefix}.head", config.siglip.hidden_size
    parts_by_key[f"{pool}.latent"] = (Part(f"{head}.probe"),)
    for end in ("weight", "bias"):
        parts_by_key[f"{pool}.q.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, 0, size),)
        parts_by_key[f"{pool}.kv.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, size),)
    add_layer(f"{pool}.proj", f"{head}.attention.out_proj")
    add_layer(f"{pool}.norm", f"{head}.layernorm")
    for j in (1, 2):
        add_layer(f"{pool}.mlp.fc{j}", f"{head}.mlp.fc{j}")
    return parts_by_key


@dataclass(frozen=True)
class Entry:
    """Published tensor: its shape and the slices of our parameters that it consists of."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]

    def read(self, tensor: Tensor) -> None:
        """Copy a published tensor into our parameters, converted to their type and device."""
        rows = tensor.reshape(-1, *self.parts[0].shape[1:])
        for part, row in zip(self.parts, rows.split([len(part) for part in self.parts])):
            part.copy_(row)

    def write(self) -> Tensor:
        """Return the published tensor; it shares memory with a parameter if it consists of one."""
        tensor = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return tensor.reshape(self.shape)


def entries(body: OpenVLABody) -> dict[str, Entry]:
    """Map published keys to their entries; each parameter of ``body`` occurs once."""
    parameters = dict(body.named_parameters())
    named = layout(body.config)
    named |= {name: (Part(name),) for name in parameters if name.startswith("language_model.")}
    missing = set(parameters) - {part.name for parts in named.values() for part in parts}
    assert not missing, (
        f"transformers has parameters that no published key fills: {sorted(missing)}"
    )
    entries_by_key = {}
    for key, parts in named.items():
        tensors = tuple(part.view(parameters) for part in parts)
        shape = (sum(len(x) for x in tensors), *tensors[0].shape[1:])
        if key.endswith("fused_featurizer.pos_embed"):
            shape = (1, *shape)
        entries_by_key[key] = Entry(shape, tensors)
    return entries_by_key


def load(path: str | Path, *, dtype: torch.dtype = torch.float32) -> OpenVLABody:
    """Load a directory of the published layout.

    It holds config.json, and model.safetensors or its shards with their index. Every key is used
    exactly once. Statistics in dataset_statistics.json (fine-tuned models) replace those in
    config.json, means and deviations in preprocessor_config.json those of ImageNet.

    Args:
        path: The directory.
        dtype: Type of the weights.

    Raises:
        ConfigError: A file is missing, damaged, or of another model.
    """
    folder, label = Path(path), f"model.checkpoint={path}"
    import_transformers("OpenVLA")
    from safetensors import SafetensorError
    from transformers.initialization import no_init_weights

    raw = read_json(folder / "config.json", label, CURE)
    statistics = folder / "dataset_statistics.json"
    if statistics.is_file():
        raw["norm_stats"] = (raw.get("norm_stats") or {}) | read_json(statistics, label, CURE)
    heads = sorted(file.name for file in folder.glob("*--*checkpoint.pt"))
    if heads:
        raise ConfigError(
            f"{label}: holds {heads[0]}: a head or projector beside the model (regression,"
            " diffusion, proprioception, FiLM) that is not computed; name a checkpoint with action"
            " tokens alone"
        )
    files = _weight_files(folder, label)
    try:
        config = read_config(raw)
        preprocessor = folder / "preprocessor_config.json"
        if preprocessor.is_file():
            config = read_preprocessor(read_json(preprocessor, label, CURE), config)
        with no_init_weights():
            body = OpenVLABody(config, dtype=dtype)
        expected = entries(body)
        locations = _check(files, expected)
        _copy(locations, expected)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{label}: weights cannot be read ({one_line(error, kind=True)}); download them again"
        ) from error
    return body


def save(body: OpenVLABody, path: str | Path) -> None:
    """Write config.json and model.safetensors in the published layout, in the body's type.

    Each file is written under a temporary name and renamed. The tokenizer's files are not written.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, entry in entries(body).items():
        tensor = entry.write()
        # safetensors refuses tensors that share memory or are not contiguous.
        separate = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[key] = tensor if separate else tensor.clone(memory_format=torch.contiguous_format)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(write_config(body.config), indent=2) + "\n")
    os.replace(part, folder / "config.json")


def _weight_files(folder: Path, label: str) -> list[Path]:
    """Return the files that hold weights."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / "model.safetensors.index.json").is_file():
        raise ConfigError(
            f"{label}: holds neither model.safetensors nor model.safetensors.index.json; other"
            " formats (.bin, .pt) can run code when they are read: convert them to safetensors"
            " first"
        )
    names = read_json(folder / "model.safetensors.index.json", label, CURE).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(
            f"{label}: model.safetensors.index.json has no weight_map; download it again"
        )
    files = [folder / str(name) for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != folder:
            raise ConfigError(
                f"{label}: model.safetensors.index.json names {file}, outside; download it again"
            )
        if not file.is_file():
            raise ConfigError(
                f"{label}: {file.name} is in model.safetensors.index.json but missing; download it"
            )
    return files


def _check(files: Sequence[Path], expected: Mapping[str, Entry]) -> dict[str, tuple[Path, str]]:
    """Return file and name of each key if the files hold exactly the expected tensors.

    Raises:
        ConfigError: They do not.
    """
    from safetensors import safe_open

    locations: dict[str, tuple[Path, str]] = {}
    wrong, twice, quantised = [], [], []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                key = re.sub(r"(\.ls[12]\.)gamma$", r"\1scale_factor", name)
                if key in locations:
                    twice.append(name)
                locations[key] = file, name
                view = tensors.get_slice(name)
                shape = tuple(view.get_shape())
                if key in expected and shape != expected[key].shape:
                    wrong.append(f"{name} {list(shape)} instead of {list(expected[key].shape)}")
                if key in expected and view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    quantised.append(f"{name} {view.get_dtype()}")
    problems = {
        "missing": [key for key in expected if key not in locations],
        "unexpected": [locations[key][1] for key in locations if key not in expected],
        "of another shape": wrong,
        "twice": twice,
        "not of a floating type (quantised?)": quantised,
    }
    text = "; ".join(
        f"{len(keys)} {problem}: {_first_keys(keys)}" for problem, keys in problems.items() if keys
    )
    if text:
        raise ConfigError(
            f"the weights are not those of the model that config.json describes: {text}. Are"
            " vision_backbone_id and text_config those that the weights were written with? (LoRA"
            " adapters must be merged first)"
        )
    return locations


@torch.no_grad()
def _copy(locations: Mapping[str, tuple[Path, str]], expected: Mapping[str, Entry]) -> None:
    """Copy all tensors from the files into the parameters.

    Raises:
        ConfigError: A tensor contains NaN or infinity.
    """
    from safetensors import safe_open

    for file in dict.fromkeys(file for file, _ in locations.values()):
        with safe_open(file, framework="pt") as tensors:
            for key, (holder, name) in locations.items():
                if holder == file:
                    tensor = tensors.get_tensor(name)
                    check_finite([(name, tensor)], "")
                    expected[key].read(tensor)


def _first_keys(keys: Sequence[str]) -> str:
    """List the first three keys."""
    return ", ".join(keys[:3]) + (", .." if len(keys) > 3 else "")
