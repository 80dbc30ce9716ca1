"""π0's published files: config.json of transformers or of lerobot, weights, statistics, tokenizer.

``read`` takes a directory of either kind. Weights with lerobot's keys (``model.paligemma_with_expert...``) are renamed
by transformers itself. No published weights were at hand: everything is proven on synthetic directories with the
published layout, not on the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import json_of, refusing

ELSE = "name one of π0 (hf download lerobot/pi0_base --local-dir DIR)"

VARIANTS: dict[str, dict[str, int]] = {
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
}
"""What lerobot's ``paligemma_variant`` and ``action_expert_variant`` name, as far as the two differ."""
GEMMA = {
    "model_type": "gemma",
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 257152,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
SHARED = (
    "chunk_size",
    "max_state_dim",
    "max_action_dim",
    "num_inference_steps",
    "min_period",
    "max_period",
)
"""Fields of lerobot's config.json that transformers' has, too."""
FORMER = {
    r"paligemma\.language_model\.model\.": "paligemma.model.language_model.",
    r"paligemma\.language_model\.lm_head": "paligemma.lm_head",
    r"paligemma\.vision_tower": "paligemma.model.vision_tower",
    r"paligemma\.multi_modal_projector": "paligemma.model.multi_modal_projector",
}
"""Keys of lerobot before 0.4 -> those since, which transformers knows."""
OTHERS = {
    "pi05": "π0.5, whose expert is another (adaptive norms, the state among the words)",
    "pi0_fast": "π0-FAST, whose actions are tokens",
    "smolvla": "SmolVLA",
    "act": "ACT",
    "diffusion": "a diffusion policy",
    "openvla": "OpenVLA, read with model.policy=token",
}
"""Kinds of directories that are known and not read here."""


@dataclass(frozen=True)
class Statistics:
    """Of a dataset: x is (a - mean) / (std + 1e-8), back it is x std + mean. float32 [n], in the dataset's units."""

    mean: Tensor
    std: Tensor

    def only(self, n: int, what: str) -> Statistics:
        """The first n numbers, which those of a padded dataset are. Raises ConfigError where there are fewer."""
        if len(self.mean) < n:
            raise ConfigError(
                f"model.checkpoint: its statistics of {what} are of {len(self.mean)} numbers, the task's has {n}; use "
                "a checkpoint of this robot, or a directory without statistics (model.normalize_obs then counts them)"
            )
        return Statistics(self.mean[:n].float(), self.std[:n].float())


@dataclass(frozen=True)
class Published:
    """What a directory holds.

    model     transformers' PI0ForConditionalGeneration, float32
    tokenize  a sentence to ids, begin of sequence and end of line included
    state, action   None: the model's numbers are the robot's
    """

    model: Any
    tokenize: Callable[[str], Sequence[int]]
    state: Statistics | None = None
    action: Statistics | None = None


def read(folder: str | Path) -> Published:
    """Raises ConfigError: what is missing, or what kind of directory it is."""
    folder = Path(folder)
    raw = json_of(folder / "config.json", f"model.checkpoint={folder}", ELSE)
    return Published(_model(folder, raw), _words(folder), *statistics(folder, raw))


# ------------------------------------------------------------------------------------------------------- configuration
def read_config(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """transformers' PI0Config of either kind of config.json. Raises ConfigError."""
    transformers = _transformers()
    kind = str(raw.get("model_type") or raw.get("type") or "nothing it says")
    try:
        if raw.get("model_type") == "pi0":
            return transformers.PI0Config.from_dict(dict(raw))
        if raw.get("type") == "pi0":
            return transformers.PI0Config(**lerobot_fields(raw))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model.checkpoint={folder}: config.json is refused: {one_line(error)}") from error
    cure = "name a directory of π0 (lerobot's or transformers'), or another model.policy"
    raise ConfigError(f"model.checkpoint={folder}: is a directory of {OTHERS.get(kind, kind)}, not of π0; {cure}")


def lerobot_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' fields for what lerobot's config.json says; what it does not say is as published."""
    sizes = []
    for name, usual in (("paligemma_variant", "gemma_2b"), ("action_expert_variant", "gemma_300m")):
        variant = raw.get(name, usual)
        if variant not in VARIANTS:
            raise ConfigError(f"config.json: {name}={variant} is not one of {', '.join(VARIANTS)}")
        sizes.append(GEMMA | VARIANTS[variant])
    text, expert = sizes
    side = (raw.get("image_resolution") or raw.get("resize_imgs_with_padding") or (224, 224))[0]
    vision = SIGLIP | {"image_size": side, "projection_dim": text["hidden_size"]}
    vlm = {"model_type": "paligemma", "text_config": text, "vision_config": vision}
    vlm |= {"projection_dim": text["hidden_size"], "image_token_id": text["vocab_size"]}
    fields = {name: raw[name] for name in SHARED if name in raw}
    if "num_steps" in raw:  # lerobot before 0.4
        fields.setdefault("num_inference_steps", raw["num_steps"])
    return fields | {"vlm_config": vlm, "dit_config": expert}


def _model(folder: Path, raw: Mapping[str, Any]) -> Any:
    config = read_config(raw, folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.checkpoint={folder}: holds no weights (model.safetensors); download it completely")
    transformers = _transformers()
    with refusing(f"model.checkpoint={folder}: transformers refuses: "):
        model, told = transformers.PI0ForConditionalGeneration.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            key_mapping=FORMER,
        )
    unknown = [name for name in told["unexpected_keys"] if "normalize_" not in name]
    for what, names in (("lack", told["missing_keys"]), ("have an unknown", unknown)):
        if names:
            raise ConfigError(
                f"model.checkpoint={folder}: the weights {what} {min(names)} ({len(names)} in all); they are of "
                "another model"
            )
    return model


def _transformers() -> Any:
    try:
        import transformers
        from transformers import PI0Config  # noqa: F401
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"model.checkpoint needs transformers 5.23 or later ({error}): pip install 'embodied-ppo[vla]'"
        ) from error
    logging.disable_progress_bar()
    return transformers


# ----------------------------------------------------------------------------------------------------------- the words
class Words:
    """A tokenizer of transformers as π0 is told: begin of sequence, sentence, end of line."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, sentence: str) -> list[int]:
        cleaned = sentence.strip().replace("_", " ").replace("\n", " ")  # as openpi
        ids = self.tokenizer(cleaned + "\n", add_special_tokens=False).input_ids
        return [self.tokenizer.bos_token_id, *ids]


def _words(folder: Path) -> Words:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ConfigError(
            f"model.checkpoint={folder}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json of "
            "google/paligemma-3b-pt-224 into it"
        )
    try:
        found = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"model.checkpoint={folder}: its tokenizer cannot be read: {one_line(error)}") from error
    if found.bos_token_id is None:
        raise ConfigError(f"model.checkpoint={folder}: its tokenizer has no begin of sequence; use PaliGemma's")
    return Words(found)


# ---------------------------------------------------------------------------------------------------------- statistics
def statistics(folder: Path, raw: Mapping[str, Any]) -> tuple[Statistics | None, Statistics | None]:
    """Of states and of actions, from wherever the directory keeps them; None where it has none. Raises ConfigError.

    transformers: processor_config.json. lerobot: *normalizer_processor.safetensors (0.4 and later), or buffers among
    the weights. openpi: norm_stats.json.
    """
    for feature, how in (raw.get("normalization_mapping") or {}).items():
        if feature in ("STATE", "ACTION") and how not in ("MEAN_STD", "IDENTITY"):
            raise ConfigError(
                f"model.checkpoint={folder}: normalization_mapping.{feature}={how}; read are MEAN_STD and IDENTITY"
            )
    identity = {k for k, how in (raw.get("normalization_mapping") or {}).items() if how == "IDENTITY"}
    found = _statistics(folder)
    state, action = (found.get(name) for name in ("state", "action"))
    return None if "STATE" in identity else state, None if "ACTION" in identity else action


def _statistics(folder: Path) -> dict[str, Statistics]:
    processor = folder / "processor_config.json"
    if processor.is_file():
        told = json_of(processor, f"model.checkpoint={folder}", ELSE)
        found = {name: (told.get(f"{key}_mean"), told.get(f"{key}_std")) for name, key in _TRANSFORMERS.items()}
        if made := {name: _made(mean, std) for name, (mean, std) in found.items() if mean is not None}:
            return made
    for file in sorted(folder.rglob("norm_stats.json")):
        told = json_of(file, f"model.checkpoint={folder}", ELSE)
        told = told.get("norm_stats", told)
        named = {name: told[key] for name, key in (("state", "state"), ("action", "actions")) if key in told}
        return {name: _made(x["mean"], x["std"]) for name, x in named.items()}
    out: dict[str, Statistics] = {}
    for file in sorted(folder.glob("*normalizer_processor.safetensors")) + sorted(folder.glob("model*.safetensors")):
        for name, feature in _LEROBOT.items():
            for pair in () if name in out else _pairs(file, feature):
                if all(bool(x.isfinite().all()) for x in pair):  # lerobot's buffers are infinite until filled
                    out[name] = _made(*pair)
    return out


_TRANSFORMERS = {"state": "state", "action": "actions"}
_LEROBOT = {"state": "observation.state", "action": "action"}


def _pairs(file: Path, feature: str) -> list[tuple[Tensor, Tensor]]:
    """Means and deviations in a safetensors file: action.mean, or normalize_targets.buffer_action.mean and the like."""
    from safetensors import SafetensorError, safe_open

    tail = f"buffer_{feature.replace('.', '_')}.mean"
    try:
        with safe_open(file, framework="pt") as f:
            held = set(f.keys())
            means = sorted(key for key in held if key == f"{feature}.mean" or key.endswith(tail))
            pairs = [(key, key.removesuffix("mean") + "std") for key in means]
            return [(f.get_tensor(mean), f.get_tensor(std)) for mean, std in pairs if std in held]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.checkpoint: {file} cannot be read: {one_line(error)}") from error


def _made(mean: Any, std: Any) -> Statistics:
    mean, std = (torch.as_tensor(x, dtype=torch.float32).flatten() for x in (mean, std))
    return Statistics(mean, std)
