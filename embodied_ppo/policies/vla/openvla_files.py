"""OpenVLA's published files: configuration, keys of the weights, action statistics.

Their meaning follows openvla/openvla at c8f03f4 and moojink/openvla-oft at 213c5ff. Published
weights were not available: everything is tested with synthetic checkpoints of the published layout.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, choose, show
from embodied_ppo.policies import checkpoint_files, peft_files
from embodied_ppo.policies.checkpoint_files import check_supported, config_errors, read_json
from embodied_ppo.policies.vla import published_weights
from embodied_ppo.policies.vla.openvla import DINO, MEANS, SIGLIP, OpenVLABody, OpenVLAConfig
from embodied_ppo.policies.vla.published_weights import PublishedTensor, Targets

# vision_backbone_id -> side of the square image, pixels.
BACKBONES = {"dinosiglip-vit-so-224px": 224, "dinosiglip-vit-so-384px": 384}


# ------------------------------------------------------------------------------------ configuration
def read_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """Convert the contents of a published config.json.

    Sizes other than the published ones are in our additional field ``vision_sizes``.

    Raises:
        ConfigError: A field is not supported.
    """
    backbone = raw.get("vision_backbone_id")
    if backbone not in BACKBONES:
        raise ConfigError(
            f"vision_backbone_id={backbone}: "
            + choose(str(backbone), list(BACKBONES), "read are DINOv2 with SigLIP: ")
        )
    text = dict(raw.get("text_config") or {})
    for name, supported in (("use_fused_vision_backbone", True), ("image_resize_strategy", RESIZE)):
        check_supported("", name, raw.get(name, supported), supported)
    check_supported("", "text_config.model_type", text.get("model_type", "llama"), "llama")
    sizes = dict(raw.get("vision_sizes") or {})
    with config_errors("a field has the wrong type or name (", "); compare with openvla-7b's"):
        return OpenVLAConfig(
            text=text,
            dino=DINO | sizes.get("dino", {}),
            siglip=SIGLIP | sizes.get("siglip", {}),
            image_size=int(sizes.get("image_size", BACKBONES[backbone])),
            action_bins=int(raw.get("n_action_bins", 256)),
            pad_to_multiple_of=int(raw.get("pad_to_multiple_of", 64)),
            pad_token_id=int(raw.get("pad_token_id", 32000)),
            norm_stats=raw.get("norm_stats") or {},
        )


RESIZE = "resize-naive"  # OpenVLA's image_resize_strategy


def read_preprocessor(raw: Mapping[str, Any], config: OpenVLAConfig) -> OpenVLAConfig:
    """Return ``config`` with the means and deviations of preprocessor_config.json.

    openvla-7b's are rounded to bfloat16, so that they differ from ImageNet's.

    Raises:
        ConfigError: A field is damaged, or its image processing is not the one of ``OpenVLABody``.
    """
    label, side = "preprocessor_config.json", config.image_size
    for name, value, supported in (
        ("image_resize_strategy", raw.get("image_resize_strategy"), RESIZE),
        *(("interpolations", x, "bicubic") for x in raw.get("interpolations") or ()),
        *(("input_sizes", x, [3, side, side]) for x in raw.get("input_sizes") or ()),
    ):
        check_supported(f"{label}: ", name, supported if value is None else value, supported)
    moments: dict[str, tuple[float, ...]] = {}
    for name in ("means", "stds"):
        rows = raw.get(name)
        if rows is None:
            continue
        with config_errors(f"{label}: {name}: ", "; download it again"):
            numbers = tuple(float(x) for row in rows for x in row)
            if len(numbers) != len(MEANS) or (name == "stds" and min(numbers) <= 0):
                raise ValueError(f"{show(rows)} must be three numbers per tower, stds above 0")
        moments[name] = numbers
    return replace(config, **moments)


# ---------------------------------------------------------------------------------------- the words
def tokenizer(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Return the ``tokenize`` function of a directory's tokenizer.json, or tokenizer.model.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    from tokenizers import Tokenizer

    file = peft_files.locate(Path(path), "tokenizer.json")
    model = peft_files.locate(Path(path), "tokenizer.model")
    if not file.is_file() and model.is_file():
        sentencepiece = checkpoint_files.SentencePiece(model.parent)
        return lambda text: sentencepiece(text).input_ids
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
    def from_config(
        cls, config: OpenVLAConfig, unnorm_key: str | None = None, of: str = "action"
    ) -> ActionTokens:
        """Read the statistics of one dataset in ``norm_stats``; ``unnorm_key`` None selects the
        only one. ``of`` proprio reads those of the robot's state.

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
        label = f"norm_stats.{unnorm_key}.{of}"
        with config_errors(f"{label}: cannot be read (", "); download it again", kind=True):
            stats = config.norm_stats[unnorm_key].get(of, {})
            if missing := {"q01", "q99"} - set(stats):
                raise ConfigError(
                    f"{label}: has no {min(missing)} but {sorted(stats)}; {of}s are scaled by q01"
                    " and q99"
                )
            low, high = (torch.tensor(stats[name], dtype=torch.float64) for name in ("q01", "q99"))
            mask = torch.tensor(stats.get("mask", [True] * len(low)), dtype=torch.bool)
            if low.ndim != 1 or not low.shape == high.shape == mask.shape:
                raise ValueError("q01, q99 and mask must be one list each, equally long")
            if not bool((high - low).isfinite().all()) or bool((low > high).any()):
                raise ValueError("q01 and q99 must be finite, and q01 must not exceed q99")
        width = 2 / (config.action_bins - 1)
        edges = torch.arange(config.action_bins, dtype=torch.float64) * width - 1
        edges[-1] = 1.0
        return cls(edges, low, high, mask)

    def to(self, device: torch.device | str) -> ActionTokens:
        """Copy all tensors to a device."""
        moved = {name: getattr(self, name).to(device) for name in ("edges", "low", "high", "mask")}
        return replace(self, **moved)

    def scaled(self, action: Tensor) -> Tensor:
        """Convert actions of the environment [.., A] to x, float64."""
        a = action.double()
        return torch.where(self.mask, 2 * (a - self.low) / (self.high - self.low + 1e-8) - 1, a)

    def bins(self, action: Tensor) -> Tensor:
        """Convert actions of the environment [.., A] to bins, int64.

        Values outside [q01, q99] (or [-1, 1]) are clipped.
        """
        x = self.scaled(action)
        return torch.bucketize(x.clamp(-1, 1).contiguous(), self.edges, right=True) - 1

    def values(self, bins: Tensor) -> Tensor:
        """Return the centres of bins of any shape, float64 in (-1, 1)."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2
        return centers[bins.long().clamp_max(len(centers) - 1)]

    def unscaled(self, x: Tensor) -> Tensor:
        """Convert x [.., A] to actions in the units of the environment, float32."""
        return torch.where(self.mask, 0.5 * (x + 1) * (self.high - self.low) + self.low, x).float()


# ------------------------------------------------------------------------------------------ weights
# Substitutions: parameter of a vision tower -> published key; q, k and v are rows of one key.
NAMES = published_weights.patterns("openvla", "modules")
TOWER = "vision_backbone."


def entries(body: OpenVLABody) -> dict[str, PublishedTensor]:
    """Map published keys to their tensors; each parameter of ``body`` occurs once."""
    parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for name, p in body.named_parameters():
        is_vision = name.startswith(("dino.", "siglip."))
        key = published_weights.substitute(name, NAMES) if is_vision else name
        x = p.detach()
        if key == f"{TOWER}featurizer.pos_embed":
            x = x[:, 1:]  # timm's class token has no position
        if ".q_kv." in key:
            size = body.config.siglip["hidden_size"]
            parts[key.replace(".q_kv.", ".q.")].append((0, x[:size]))
            parts[key.replace(".q_kv.", ".kv.")].append((0, x[size:]))
        else:
            letter = re.search(r"\.([qkv])_proj\.", name) if key != name else None
            parts[key].append(("qkv".index(letter[1]) if letter else 0, x))
    tensors: dict[str, PublishedTensor] = {}
    for key, rows in parts.items():
        xs = tuple(x for _, x in sorted(rows, key=lambda row: row[0]))
        shape = (sum(len(x) for x in xs), *xs[0].shape[1:])
        if key == f"{TOWER}fused_featurizer.pos_embed":
            shape = (1, *shape)
        tensors[key] = PublishedTensor(shape, xs)
    return tensors


def rename(keys: Iterable[str]) -> dict[str, str]:
    """Return key of a file -> key of ``entries``; timm calls ``scale_factor`` gamma."""
    return {key: re.sub(r"(\.ls[12]\.)gamma$", r"\1scale_factor", key) for key in keys}


def load(
    path: str | Path, *, dtype: torch.dtype = torch.float32, policy: str = "token"
) -> OpenVLABody:
    """Load a directory of the published layout.

    It holds config.json, and model.safetensors or its shards with their index. Every key is used
    exactly once. Statistics in dataset_statistics.json (fine-tuned models) replace those in
    config.json, means and deviations in preprocessor_config.json those of ImageNet.

    Args:
        path: The directory.
        dtype: Type of the weights.
        policy: Value of model.policy.

    Raises:
        ConfigError: A file is missing, damaged, or of another model.
    """
    folder, label = Path(path), f"model.checkpoint={path}"
    checkpoint_files.import_transformers("OpenVLA")
    from transformers.initialization import no_init_weights

    _, raw = published_weights.read_kind(folder, policy)
    statistics = peft_files.locate(folder, "dataset_statistics.json")
    if statistics.is_file():
        raw["norm_stats"] = (raw.get("norm_stats") or {}) | read_json(statistics, label, "")
    preprocessor = peft_files.locate(folder, "preprocessor_config.json")
    try:
        config = read_config(raw)
        if preprocessor.is_file():
            config = read_preprocessor(read_json(preprocessor, "", ""), config)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error

    def build() -> tuple[OpenVLABody, Targets]:
        with config_errors(f"{label}: "), no_init_weights():
            body = OpenVLABody(config, dtype=dtype)
        return body, entries(body)

    return published_weights.load(folder, build, rename)
