"""π0's published files: configuration, weights, statistics and tokenizer.

``read`` accepts the directories of transformers, of lerobot, and those that openpi's conversion to
torch writes. transformers renames weights with lerobot's keys (``model.paligemma_with_expert...``);
openpi's lack the first part.
Published weights were not available: everything is tested
with synthetic directories of the published layout, and against lerobot with random weights
(``make test-lerobot``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import (
    LOCAL,
    LOCAL_WEIGHTS,
    config_errors,
    import_transformers,
    read_json,
)

MAX_WORDS = 48
"""Tokens of a prompt after which lerobot and openpi cut it off."""
CURE = "name one of π0 (hf download lerobot/pi0_base --local-dir DIR)"

VARIANTS: dict[str, dict[str, int]] = {
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
}
"""Sizes that differ between the values of lerobot's ``paligemma_variant`` and
``action_expert_variant``.
"""
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
SHARED_FIELDS = (
    "chunk_size",
    "max_state_dim",
    "max_action_dim",
    "num_inference_steps",
    "min_period",
    "max_period",
)
"""Fields that the config.json of lerobot and of transformers have in common."""
UNUSED_HEAD = "unused_head"
OLD_KEYS = {
    r"paligemma\.language_model\.model\.": "paligemma.model.language_model.",
    r"paligemma\.language_model\.lm_head": "paligemma.lm_head",
    r"paligemma\.vision_tower": "paligemma.model.vision_tower",
    r"paligemma\.multi_modal_projector": "paligemma.model.multi_modal_projector",
}
"""Keys of lerobot before 0.4 -> later keys, which transformers converts."""
LANGUAGE_HEAD = r"paligemma\.(language_model\.)?lm_head"
WORD_EMBEDDINGS = r"paligemma\.(model\.language_model|language_model\.model)\.embed_tokens"
"""Keys of lerobot. Its first checkpoints hold the tied weights as lm_head, those that lerobot 0.5
and later wrote hold both, of which only embed_tokens is trained and used."""
UNSUPPORTED = {
    "pi05": "π0.5, whose expert is another (adaptive norms, the state among the words)",
    "pi0_fast": "π0-FAST, whose actions are tokens",
    "smolvla": "SmolVLA",
    "act": "ACT",
    "diffusion": "a diffusion policy",
    "openvla": "OpenVLA, read with model.policy=token",
}
"""Policy types that are recognised but not supported here."""


class Statistics(nn.Module):
    """Mean and standard deviation of a dataset, float32 [n], in its units.

    They are buffers that a checkpoint does not contain.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Any, std: Any) -> None:
        """Convert lists or tensors of n numbers."""
        super().__init__()
        for name, x in (("mean", mean), ("std", std)):
            buffer = torch.as_tensor(x, dtype=torch.float32).flatten()
            self.register_buffer(name, buffer, persistent=False)

    @classmethod
    def of_openpi(cls, mean: Any, std: Any) -> Statistics:
        """Return openpi's: it adds 1e-6 to the deviation in both directions."""
        return cls(mean, torch.as_tensor(std, dtype=torch.float64) + 1e-6)

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / (std + 1e-8), as lerobot and transformers."""
        return (x - self.mean) / (self.std + 1e-8)

    def denormalize(self, x: Tensor) -> Tensor:
        """Return x std + mean."""
        return x * self.std + self.mean

    def first(self, n: int, name: str) -> Statistics:
        """Return the statistics of the first n numbers; the others are padding.

        Raises:
            ConfigError: There are fewer numbers.
        """
        if len(self.mean) < n:
            raise ConfigError(
                f"model.checkpoint: its statistics of {name} have {len(self.mean)} numbers, the"
                f" task's {name} {n}; use a checkpoint of this robot, or a directory without"
                " statistics (model.normalize_obs then computes them)"
            )
        return Statistics(self.mean[:n], self.std[:n])


@dataclass(frozen=True)
class Published:
    """Contents of a checkpoint directory.

    Attributes:
        model: transformers' PI0ForConditionalGeneration, float32.
        tokenize: Sentence -> ids, including begin of sequence and end of line.
        state: Statistics of the state, None: the model uses the robot's units.
        action: Statistics of the actions, None: the model uses the robot's units.
        antialias: Whether images that are larger than the model's are filtered before they are
            sampled. lerobot does not.
        relative: Dimensions of an action that are relative to the state.
    """

    model: Any
    tokenize: Callable[[str], Sequence[int]]
    state: Statistics | None = None
    action: Statistics | None = None
    antialias: bool = True
    relative: tuple[int, ...] = ()


def read(folder: str | Path) -> Published:
    """Read a checkpoint directory.

    Raises:
        ConfigError: A file is missing, or the directory holds another kind of model.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json", f"model.checkpoint={folder}", CURE)
    lerobot = raw.get("type") == "pi0"
    words = int(raw.get("tokenizer_max_length") or MAX_WORDS)
    return Published(
        _model(folder, raw),
        _tokenizer(folder, words, clean=not lerobot),
        *statistics(folder, raw),
        antialias=not lerobot,
        relative=_relative(raw) if lerobot else (),
    )


# ------------------------------------------------------------------------------------ configuration
def read_config(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """Return transformers' PI0Config for either kind of config.json.

    Raises:
        ConfigError: It describes another kind of model or is damaged.
    """
    transformers = _transformers()
    kind = str(raw.get("model_type") or raw.get("type") or "missing")
    try:
        if raw.get("model_type") == "pi0":
            return transformers.PI0Config.from_dict(dict(raw))
        if raw.get("type") == "pi0":
            return transformers.PI0Config(**lerobot_fields(raw))
        if kind == "missing" and "action_horizon" in raw:
            return transformers.PI0Config(**openpi_fields(raw))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.checkpoint={folder}: config.json is refused: {one_line(error)}"
        ) from error
    name = UNSUPPORTED.get(kind, kind)
    raise ConfigError(
        f"model.checkpoint={folder}: is a directory of {name}, not of π0; name a directory of π0"
        " (lerobot's, transformers' or openpi's), or another model.policy"
    )


def lerobot_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for lerobot's config.json; missing ones are as
    published.
    """
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
    fields = {name: raw[name] for name in SHARED_FIELDS if name in raw}
    if "num_steps" in raw:  # lerobot before 0.4
        fields.setdefault("num_inference_steps", raw["num_steps"])
    return fields | {"vlm_config": vlm, "dit_config": expert}


def openpi_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for the config.json of openpi's
    convert_jax_model_to_pytorch.
    """
    names = ("paligemma_variant", "action_expert_variant")
    fields = lerobot_fields({name: raw[name] for name in names if name in raw})
    size = int(raw.get("action_dim", 32))
    sizes = {"chunk_size": int(raw["action_horizon"])}
    return fields | sizes | {"max_state_dim": size, "max_action_dim": size}


def _relative(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions of actions that lerobot's config.json declares relative."""
    if not raw.get("use_relative_actions"):
        return ()
    size = int((raw.get("output_features") or {})["action"]["shape"][0])
    names = raw.get("action_feature_names") or []
    excluded = [str(token).lower() for token in raw.get("relative_exclude_joints") or () if token]
    absolute = {i for i, name in enumerate(names) if any(t in str(name).lower() for t in excluded)}
    return tuple(i for i in range(size) if i not in absolute)


def _model(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Load the weights."""
    config = read_config(raw, folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.checkpoint={folder}: holds no weights (model.safetensors); download it"
            " completely"
        )
    keys = _keys(folder)
    if any("time_mlp_in" in key.split(".") for key in keys):
        raise ConfigError(
            f"model.checkpoint={folder}: holds weights of {UNSUPPORTED['pi05']}; name a directory"
            " of π0"
        )
    transformers = _transformers()
    with config_errors(f"model.checkpoint={folder}: transformers refuses: "):
        model, loading_info = transformers.PI0ForConditionalGeneration.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            key_mapping=_renamed_keys(keys),
            **LOCAL_WEIGHTS,
        )
    unknown = [
        name
        for name in loading_info["unexpected_keys"]
        if "normalize_" not in name and UNUSED_HEAD not in name
    ]
    # The expert has no words; some files lack its embeddings.
    missing = [name for name in loading_info["missing_keys"] if "dit.embed_tokens" not in name]
    for problem, names in (("lack", missing), ("have an unknown", unknown)):
        if names:
            raise ConfigError(
                f"model.checkpoint={folder}: the weights {problem} {min(names)} ({len(names)}"
                " in all); they are of another model"
            )
    return model


def _keys(folder: Path) -> set[str]:
    """Return the keys of all weights; none if a file is damaged, which transformers reports."""
    from safetensors import SafetensorError, safe_open

    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as f:
                keys |= set(f.keys())
        except (SafetensorError, OSError):
            return set()
    return keys


def _renamed_keys(keys: set[str]) -> dict[str, str]:
    """Return patterns of keys -> new keys, which transformers converts."""
    if any(re.search(WORD_EMBEDDINGS, key) for key in keys):
        return {LANGUAGE_HEAD: UNUSED_HEAD} | OLD_KEYS
    return OLD_KEYS


def _transformers() -> Any:
    return import_transformers("model.checkpoint", "PI0Config", version="5.23")


# ---------------------------------------------------------------------------------------- tokenizer
class PromptTokenizer:
    """Tokenizer in π0's format: begin of sequence, sentence, end of line."""

    def __init__(self, tokenizer: Any, words: int, *, clean: bool) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: PaliGemma's.
            words: Length after which a prompt is cut off.
            clean: Replace underscores and ends of lines in the sentence, as openpi; lerobot does
                not.
        """
        self.tokenizer, self.words, self.clean = tokenizer, words, clean

    def __call__(self, sentence: str) -> list[int]:
        if self.clean:
            sentence = sentence.strip().replace("_", " ").replace("\n", " ")
        sentence = sentence.removesuffix("\n") + "\n"
        ids = self.tokenizer(sentence, add_special_tokens=False).input_ids
        return [self.tokenizer.bos_token_id, *ids][: self.words]


def _tokenizer(folder: Path, words: int, *, clean: bool) -> PromptTokenizer:
    """Load the tokenizer; see ``PromptTokenizer``."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in files):
        raise ConfigError(
            f"model.checkpoint={folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json of google/paligemma-3b-pt-224 into it"
        )
    try:
        tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model.checkpoint={folder}: its tokenizer cannot be read: {one_line(error)}"
        ) from error
    if tokenizer.bos_token_id is None:
        raise ConfigError(
            f"model.checkpoint={folder}: its tokenizer has no begin of sequence; use PaliGemma's"
        )
    return PromptTokenizer(tokenizer, words, clean=clean)


# --------------------------------------------------------------------------------------- statistics
def statistics(folder: Path, raw: Mapping[str, Any]) -> tuple[Statistics | None, Statistics | None]:
    """Return the statistics of states and actions, None where the directory has none.

    transformers stores them in processor_config.json, lerobot in *normalizer_processor.safetensors
    (0.4 and later) or as buffers among the weights, openpi in norm_stats.json.

    Raises:
        ConfigError: A file is damaged, or uses another normalisation.
    """
    modes = raw.get("normalization_mapping") or {}
    for feature, mode in modes.items():
        if feature in ("STATE", "ACTION") and mode not in ("MEAN_STD", "IDENTITY"):
            raise ConfigError(
                f"model.checkpoint={folder}: normalization_mapping.{feature}={mode}; supported are "
                "MEAN_STD and IDENTITY"
            )
    identity = {feature for feature, mode in modes.items() if mode == "IDENTITY"}
    available = _statistics(folder)
    state, action = (available.get(name) for name in ("state", "action"))
    return None if "STATE" in identity else state, None if "ACTION" in identity else action


def _statistics(folder: Path) -> dict[str, Statistics]:
    """Search the files that may hold statistics."""
    processor = folder / "processor_config.json"
    if processor.is_file():
        options = read_json(processor, f"model.checkpoint={folder}", CURE)
        pairs = {
            name: (options.get(f"{key}_mean"), options.get(f"{key}_std"))
            for name, key in _STATISTICS_KEYS.items()
        }
        stats = {name: Statistics(*pair) for name, pair in pairs.items() if pair[0] is not None}
        if stats:
            return stats
    files = sorted(folder.rglob("norm_stats.json"))
    if len(files) > 1:
        raise ConfigError(
            f"model.checkpoint={folder}: holds statistics of {len(files)} robots"
            f" ({', '.join(file.parent.name for file in files)}); keep one norm_stats.json"
        )
    for file in files:
        stats = read_json(file, f"model.checkpoint={folder}", CURE)
        stats = stats.get("norm_stats", stats)
        named = {name: stats[key] for name, key in _STATISTICS_KEYS.items() if key in stats}
        return {name: Statistics.of_openpi(x["mean"], x["std"]) for name, x in named.items()}
    out: dict[str, Statistics] = {}
    files = sorted(folder.glob("*normalizer_processor.safetensors"))
    for file in files + sorted(folder.glob("model*.safetensors")):
        for name, feature in _LEROBOT_FEATURES.items():
            for pair in () if name in out else _pairs(file, feature):
                # lerobot's buffers are infinite until filled.
                if all(bool(x.isfinite().all()) for x in pair):
                    out[name] = Statistics(*pair)
    return out


_STATISTICS_KEYS = {"state": "state", "action": "actions"}
_LEROBOT_FEATURES = {"state": "observation.state", "action": "action"}


def _pairs(file: Path, feature: str) -> list[tuple[Tensor, Tensor]]:
    """Return means and deviations in a safetensors file.

    Their keys are action.mean, or normalize_targets.buffer_action.mean and the like.
    """
    from safetensors import SafetensorError, safe_open

    tail = f"buffer_{feature.replace('.', '_')}.mean"
    try:
        with safe_open(file, framework="pt") as f:
            keys = set(f.keys())
            means = sorted(key for key in keys if key == f"{feature}.mean" or key.endswith(tail))
            pairs = [(key, key.removesuffix("mean") + "std") for key in means]
            return [(f.get_tensor(mean), f.get_tensor(std)) for mean, std in pairs if std in keys]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.checkpoint: {file} cannot be read: {one_line(error)}") from error
