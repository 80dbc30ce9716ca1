"""π0's published files: configuration, weights, statistics and tokenizer.

``read`` accepts the directories of transformers, of lerobot, and those that openpi's conversion to
torch writes. transformers renames weights with lerobot's keys (``model.paligemma_with_expert...``);
openpi's keys lack ``model.``. Published weights were not available: everything is tested with
synthetic directories of the published layout, and against lerobot with random weights (``make
test-lerobot``).
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from embodied_ppo.core.errors import one_line, show
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import (
    LOCAL,
    LOCAL_WEIGHTS,
    check_finite,
    config_errors,
    import_transformers,
    read_json,
)
from embodied_ppo.models.vla import pi05_model

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
PERIODS = ("min_period", "max_period")
LARGEST = {
    "chunk_size": 10**4,
    "action_horizon": 10**4,
    "max_state_dim": 10**4,
    "max_action_dim": 10**4,
    "action_dim": 10**4,
    "tokenizer_max_length": 10**5,
    "num_hidden_layers": 1000,
    "num_attention_heads": 1000,
    "num_key_value_heads": 1000,
    "head_dim": 10**5,
    "hidden_size": 10**6,
    "intermediate_size": 10**6,
    "vocab_size": 10**7,
    "image_size": 10**4,
    "patch_size": 10**4,
    "scale_factor": 100,
}
"""Largest accepted values of fields of config.json that are positive whole numbers."""
SECTIONS = ("vlm_config", "dit_config", "text_config", "vision_config", "text", "vision")
"""Fields of config.json that contain more of them."""
UNUSED_HEAD = "unused_head"
"""Key to which an ``lm_head`` that no layer reads is renamed, so that it is ignored."""
OLD_KEYS = {
    r"paligemma\.language_model\.model\.": "paligemma.model.language_model.",
    r"paligemma\.language_model\.lm_head": "paligemma.lm_head",
    r"paligemma\.vision_tower": "paligemma.model.vision_tower",
    r"paligemma\.multi_modal_projector": "paligemma.model.multi_modal_projector",
}
"""Keys of lerobot before 0.4 -> later keys, which transformers converts."""
LANGUAGE_HEAD = r"paligemma\.(language_model\.)?lm_head"
WORD_EMBEDDINGS = r"paligemma\.(model\.language_model|language_model\.model)\.embed_tokens"
"""Patterns of lerobot's keys. Its first checkpoints hold the tied weights as lm_head. Those of
lerobot 0.5 and later hold both, of which only embed_tokens is trained and used.
"""
ADAPTIVE_KEYS = {r"^(model\.)?time_mlp_": "embed_action_time.time_mlp_"}
"""Keys that only π0.5 has -> keys of transformers' π0 with the modules of ``pi05_model``."""
OTHER_KINDS = ("smolvla", "xvla")
"""Types in the config.json that ``smolvla_files`` and ``xvla_files`` read."""
KINDS = ("pi0", "pi05")
"""Types in lerobot's config.json that are read here."""
UNSUPPORTED = {
    "pi0_fast": "π0-FAST, whose actions are tokens",
    "smolvla": "SmolVLA",
    "xvla": "X-VLA",
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
    def from_openpi(cls, mean: Any, std: Any) -> Statistics:
        """Return the statistics of openpi, which adds 1e-6 to std, also when it denormalises."""
        return cls(mean, torch.as_tensor(std, dtype=torch.float64) + 1e-6)

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / (std + 1e-8), as lerobot and transformers."""
        return (x - self.mean) / (self.std + 1e-8)

    def denormalize(self, x: Tensor) -> Tensor:
        """Return x std + mean."""
        return x * self.std + self.mean

    @classmethod
    def from_quantiles(cls, low: Any, high: Any) -> Statistics:
        """Return the statistics that map the quantiles low [n] to -1 and high [n] to 1."""
        low, high = (torch.as_tensor(x, dtype=torch.float64) for x in (low, high))
        return cls((low + high) / 2, (high - low) / 2)

    @classmethod
    def from_openpi_quantiles(cls, low: Any, high: Any) -> Statistics:
        """Return the statistics of openpi, which adds 1e-6 to the distance of the quantiles."""
        return cls.from_quantiles(low, torch.as_tensor(high, dtype=torch.float64) + 1e-6)

    def first(self, n: int, name: str, label: str) -> Statistics:
        """Return the statistics of the first n numbers; the others are padding.

        Args:
            n: Numbers of the task.
            name: states or actions.
            label: Option and value, for messages.

        Raises:
            ConfigError: There are fewer numbers.
        """
        if len(self.mean) < n:
            raise ConfigError(
                f"{label}: its statistics of {name} have {len(self.mean)} numbers, the"
                f" task's {name} {n}; use a checkpoint of this robot, or a directory without"
                " statistics (model.normalize_obs then computes them)"
            )
        return Statistics(self.mean[:n], self.std[:n])


@dataclass(frozen=True)
class Published:
    """Contents of a checkpoint directory.

    Attributes:
        model: transformers' PI0ForConditionalGeneration, or ``pi05_model.model_class``; float32.
        tokenize: Sentence -> ids, including begin of sequence and end of line; ``read`` returns a
            PromptTokenizer.
        state: Statistics of the state, None: the model uses the robot's units.
        action: Statistics of the actions, None: the model uses the robot's units.
        antialias: Whether images are filtered before they are reduced to the size of the model's;
            lerobot omits this.
        relative: Indices of the dimensions of an action that are relative to the state.
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
    read_config(raw, folder)
    lerobot = raw.get("type") in KINDS
    words = raw.get("tokenizer_max_length") or MAX_WORDS
    return Published(
        _model(folder, raw),
        _tokenizer(folder, words, clean=not lerobot),
        *statistics(folder, raw),
        antialias=not lerobot,
        relative=_relative(raw, folder) if lerobot else (),
    )


# ------------------------------------------------------------------------------------ configuration
def read_config(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """Return transformers' PI0Config for the config.json of transformers, lerobot or openpi.

    Raises:
        ConfigError: It describes another kind of model or is damaged.
    """
    transformers = _transformers()
    label = f"model.checkpoint={folder}"
    declared = raw.get("model_type") or raw.get("type")
    if declared is None and "action_horizon" not in raw:
        raise ConfigError(f"{label}: config.json names no type of model; {CURE}")
    if declared is None or raw.get("type") in KINDS or raw.get("model_type") == "pi0":
        check_numbers(raw, label)
        raw = dict(raw) | {name: float(raw[name]) for name in PERIODS if name in raw}
        with config_errors(f"{label}: config.json is refused: "):
            if raw.get("model_type") == "pi0":
                return transformers.PI0Config.from_dict(raw)
            fields = openpi_fields(raw) if declared is None else lerobot_fields(raw)
            return transformers.PI0Config(**fields)
    name = UNSUPPORTED.get(str(declared), declared)
    raise ConfigError(
        f"{label}: is a directory of {name}, not of π0 or π0.5; name one of these"
        " (lerobot's or openpi's; π0 also transformers'), of SmolVLA or X-VLA, or another"
        " model.policy"
    )


def check_numbers(raw: Mapping[str, Any], label: str) -> None:
    """Check the fields of a config.json that all layouts have in common, and the sizes below them.

    Args:
        raw: The config.json.
        label: Option and value, for messages.

    Raises:
        ConfigError: A field has another type, or is out of range.
    """
    for name in PERIODS:
        x = raw.get(name, 1.0)
        if not _is_number(x) or not 0 < x < math.inf:
            raise ConfigError(
                f"{label}: config.json has {name}={show(x)}; it must be a finite number > 0,"
                " download it again"
            )
    for name in ("vlm_config", "dit_config", "normalization_mapping"):
        if name in raw and not isinstance(raw[name], dict | None if "map" in name else dict):
            raise ConfigError(
                f"{label}: config.json has {name}={show(raw[name])}; it must be an object,"
                " download it again"
            )
    parts: list[tuple[str, Mapping[str, Any]]] = [("", raw)]
    while parts:
        path, part = parts.pop()
        for name, x in part.items():
            limit = LARGEST.get(name)
            optional = name == "tokenizer_max_length" and x is None
            if limit is not None and not optional and (type(x) is not int or not 1 <= x <= limit):
                raise ConfigError(
                    f"{label}: config.json has {path}{name}={show(x)}; it must be a whole number >="
                    f" 1 and <= {limit}, download it again"
                )
            if isinstance(x, dict) and name in SECTIONS:
                parts.append((f"{path}{name}.", x))


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def lerobot_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for lerobot's config.json; missing ones are as
    published.
    """
    fields = {name: raw[name] for name in SHARED_FIELDS if name in raw}
    if "num_steps" in raw:  # lerobot before 0.4
        fields.setdefault("num_inference_steps", raw["num_steps"])
    if "vlm_config" in raw and "dit_config" in raw:  # sizes that are none of lerobot's variants
        return fields | {name: raw[name] for name in ("vlm_config", "dit_config")}
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
    return fields | {"vlm_config": vlm, "dit_config": expert}


def kind(folder: str | Path) -> str:
    """Return which of KINDS or OTHER_KINDS a checkpoint directory holds.

    Raises:
        ConfigError: It holds another kind of model, or config.json cannot be read.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json", f"model.checkpoint={folder}", CURE)
    if raw.get("type") in OTHER_KINDS:
        return raw["type"]
    read_config(raw, folder)
    return _kind(folder, raw)


def _kind(folder: Path, raw: Mapping[str, Any]) -> str:
    """Return which of KINDS a directory holds; openpi's config.json does not name it."""
    declared = raw.get("type") or raw.get("model_type")
    if declared is None:
        declared = "pi05" if _adaptive(_keys(folder)) else "pi0"
    return str(declared)


def _adaptive(keys: Iterable[str]) -> bool:
    """Return whether keys of weights are those of π0.5."""
    return any("time_mlp_in" in key.split(".") for key in keys)


def openpi_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for the config.json that openpi's conversion writes."""
    names = ("paligemma_variant", "action_expert_variant")
    fields = lerobot_fields({name: raw[name] for name in names if name in raw})
    size = int(raw.get("action_dim", 32))
    sizes = {"chunk_size": int(raw["action_horizon"])}
    return fields | sizes | {"max_state_dim": size, "max_action_dim": size}


def _relative(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Return the dimensions of actions that lerobot's config.json declares relative."""
    if not raw.get("use_relative_actions"):
        return ()
    with config_errors(f"model.checkpoint={folder}: use_relative_actions: ", kind=True):
        size = int((raw.get("output_features") or {})["action"]["shape"][0])
        names = raw.get("action_feature_names") or []
        excluded = [
            str(token).lower() for token in raw.get("relative_exclude_joints") or () if token
        ]
        absolute = {
            i for i, name in enumerate(names) if any(t in str(name).lower() for t in excluded)
        }
    return tuple(i for i in range(size) if i not in absolute)


def _model(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Load the weights."""
    config = read_config(raw, folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.checkpoint={folder}: holds no weights (model.safetensors); download it"
            " completely"
        )
    keys, declared = _keys(folder), _kind(folder, raw)
    adaptive = _adaptive(keys)
    if adaptive != (declared == "pi05"):
        held = "pi05" if adaptive else "pi0"
        raise ConfigError(
            f"model.checkpoint={folder}: config.json has type {declared}, the weights are those of"
            f" {held}; use the config.json of these weights"
        )
    transformers = _transformers()
    model_class = transformers.PI0ForConditionalGeneration
    if adaptive:
        model_class = pi05_model.model_class()
    with (
        config_errors(f"model.checkpoint={folder}: config.json is refused: "),
        torch.device("meta"),
    ):
        sizes = {
            parameter_name(key, PARAMETERS): tuple(x.shape)
            for key, x in model_class(config).state_dict().items()
        }
    check_shapes(folder, sizes, lambda key: parameter_name(key, PARAMETERS))
    with config_errors(f"model.checkpoint={folder}: transformers refuses: "):
        model, loading_info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            key_mapping=_renamed_keys(keys) | (ADAPTIVE_KEYS if adaptive else {}),
            **LOCAL_WEIGHTS,
        )
    unknown = [
        name
        for name in loading_info["unexpected_keys"]
        if "normalize_" not in name and UNUSED_HEAD not in name
    ]
    # The expert embeds no words; some files lack its unused embeddings.
    missing = [name for name in loading_info["missing_keys"] if "dit.embed_tokens" not in name]
    for problem, names in (("lack", missing), ("have an unknown", unknown)):
        if names:
            raise ConfigError(
                f"model.checkpoint={folder}: the weights {problem} {min(names)} ({len(names)}"
                " in all); they are of another model"
            )
    published = {parameter_name(key, PARAMETERS): key for key in keys}
    named = ((parameter_name(name, PARAMETERS), p) for name, p in model.named_parameters())
    # The expert's unused embeddings may be in no file.
    weights = ((published[name], p) for name, p in named if name in published)
    check_finite(weights, f"model.checkpoint={folder}")
    return model


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the safetensors files of a directory, by their keys.

    Raises:
        ConfigError: A file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118
                    shapes[key] = tuple(f.get_slice(key).get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model.checkpoint={folder}: {file.name} cannot be read: {one_line(error)};"
                " download it again"
            ) from error
    return shapes


def _keys(folder: Path) -> set[str]:
    """Return the keys of all weights."""
    return set(weight_shapes(folder))


def check_shapes(
    folder: Path, sizes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str | None]
) -> None:
    """Check that the weights of a directory have the sizes that its config.json describes.

    Args:
        folder: The directory.
        sizes: Shapes of the model's parameters by name.
        rename: Maps the published name of a weight to that of the parameter.

    Raises:
        ConfigError: A weight has another shape, or a file is damaged.
    """
    for key, shape in weight_shapes(folder).items():
        size = sizes.get(rename(key) or "")
        if size is not None and size != shape:
            raise ConfigError(
                f"model.checkpoint={folder}: the weight {key} has the shape {list(shape)}, but"
                f" config.json describes {list(size)}; use the config.json of these weights"
            )


def _renamed_keys(keys: set[str]) -> dict[str, str]:
    """Return patterns of keys -> keys that transformers converts."""
    if any(re.search(WORD_EMBEDDINGS, key) for key in keys):
        return {LANGUAGE_HEAD: UNUSED_HEAD} | OLD_KEYS
    return OLD_KEYS


def _transformers() -> Any:
    return import_transformers("model.checkpoint", "PI0Config", version="5.23")


# ---------------------------------------------------------------------------------------- tokenizer
class PromptTokenizer:
    """Tokenizer in π0's format: begin of sequence, sentence, end of line.

    ``prompt`` is the beginning of π0.5's format. The ids of the state follow it.
    """

    def __init__(self, tokenizer: Any, words: int, *, clean: bool) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: PaliGemma's.
            words: Number of tokens after which a prompt of π0 is cut off.
            clean: Replace underscores and ends of lines in the sentence, as openpi; lerobot does
                not.
        """
        self.tokenizer, self.words, self.clean = tokenizer, words, clean

    def __call__(self, sentence: str) -> list[int]:
        if self.clean:
            sentence = _clean(sentence)
        ids = self.ids(sentence.removesuffix("\n") + "\n")
        return [self.tokenizer.bos_token_id, *ids][: self.words]

    def prompt(self, sentence: str) -> list[int]:
        """Return begin of sequence and the words before the state."""
        return [self.tokenizer.bos_token_id, *self.ids(f"Task: {_clean(sentence)}, State:")]

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, without begin of sequence."""
        return self.tokenizer(text, add_special_tokens=False).input_ids


def _clean(sentence: str) -> str:
    """Replace underscores and line breaks of a sentence by spaces, as openpi."""
    return sentence.strip().replace("_", " ").replace("\n", " ")


def _tokenizer(folder: Path, words: int, *, clean: bool) -> PromptTokenizer:
    """Load the tokenizer; see ``PromptTokenizer``."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in files):
        raise ConfigError(
            f"model.checkpoint={folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json of google/paligemma-3b-pt-224 into it"
        )
    with config_errors(f"model.checkpoint={folder}: its tokenizer cannot be read: "):
        tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, **LOCAL)
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
        if feature in ("STATE", "ACTION") and mode not in MODES:
            raise ConfigError(
                f"model.checkpoint={folder}: normalization_mapping.{feature}={mode}; supported are "
                f"{', '.join(MODES)}"
            )
    default = "QUANTILES" if _kind(folder, raw) == "pi05" else "MEAN_STD"
    state, action = (
        _statistics(folder, name, modes.get(feature, default))
        for name, feature in (("state", "STATE"), ("action", "ACTION"))
    )
    return state, action


def _statistics(folder: Path, name: str, mode: str) -> Statistics | None:
    """Search the files that may hold statistics.

    Args:
        folder: Checkpoint directory.
        name: state or action.
        mode: One of MODES.
    """
    if mode == "IDENTITY":
        return None
    quantiles = mode == "QUANTILES"
    build = Statistics.from_quantiles if quantiles else Statistics
    ends = ("q01", "q99") if quantiles else ("mean", "std")
    key, label = _STATISTICS_KEYS[name], f"model.checkpoint={folder}"
    processor = folder / "processor_config.json"
    if processor.is_file() and not quantiles:
        options = read_json(processor, label, CURE)
        pair = [options.get(f"{key}_{end}") for end in ends]
        if None not in pair:
            return build(*_checked(pair, processor, name, ends))
    files = sorted(folder.rglob("norm_stats.json"))
    if len(files) > 1:
        raise ConfigError(
            f"model.checkpoint={folder}: holds statistics of {len(files)} robots"
            f" ({', '.join(file.parent.name for file in files)}); keep one norm_stats.json"
        )
    if files:
        stats = read_json(files[0], label, CURE)
        stats = stats.get("norm_stats", stats)
        stats = stats.get(key) if isinstance(stats, dict) else stats
        build = Statistics.from_openpi_quantiles if quantiles else Statistics.from_openpi
        if stats is None:
            return None
        pair = [stats.get(end) if isinstance(stats, dict) else None for end in ends]
        return build(*_checked(pair, files[0], name, ends))
    feature = _LEROBOT_FEATURES[name]
    files = sorted(folder.glob("*normalizer_processor.safetensors"))
    for file in files + sorted(folder.glob("model*.safetensors")):
        for pair in _pairs(file, feature, ends):
            # lerobot's buffers are infinite until filled.
            if not all(bool(x.isinf().all()) for x in pair):
                return build(*_checked(pair, file, name, ends))
    held = {key for key in weight_shapes(folder) if key.startswith(f"{feature}.")}
    if held and not all(f"{feature}.{end}" in held for end in ends):
        raise ConfigError(
            f"{label}: its statistics of {name}s are {', '.join(sorted(held))}, but"
            f" normalization_mapping.{name.upper()}={mode} needs {' and '.join(ends)}; download the"
            " files of one model"
        )
    return None


def _checked(
    pair: Sequence[Any], file: Path, name: str, ends: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Return two lists of statistics as float64 tensors of one length.

    Raises:
        ConfigError: They are damaged.
    """
    label = f"model.checkpoint={file.parent}: statistics of {name}s in {file.name}"
    with config_errors(f"{label} cannot be read: ", "; download it again", kind=True):
        a, b = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in pair)
    problem = None
    if not len(a) or len(a) != len(b):
        problem = f"have {len(a)} numbers {ends[0]} and {len(b)} {ends[1]}"
    elif not (a.isfinite().all() and b.isfinite().all()):
        problem = "are not finite"
    elif ends[1] == "std" and (b < 0).any():
        problem = "have a negative std"
    elif ends[1] == "q99" and (b < a).any():
        problem = "have a q99 below q01"
    if problem is not None:
        raise ConfigError(f"{label} {problem}; download it again")
    return a, b


MODES = ("MEAN_STD", "QUANTILES", "IDENTITY")
"""Values of lerobot's normalization_mapping that are read here. QUANTILES maps q01 to -1 and q99
to 1.
"""
_STATISTICS_KEYS = {"state": "state", "action": "actions"}
_LEROBOT_FEATURES = {"state": "observation.state", "action": "action"}


def _pairs(file: Path, feature: str, ends: tuple[str, str]) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of statistics of a feature in a safetensors file.

    ``ends`` are the last parts of their keys, as (mean, std) of action.mean, action.std or
    normalize_targets.buffer_action.mean, normalize_targets.buffer_action.std.
    """
    from safetensors import SafetensorError, safe_open

    first, second = ends
    tail = f"buffer_{feature.replace('.', '_')}.{first}"
    try:
        with safe_open(file, framework="pt") as f:
            keys = set(f.keys())
            firsts = sorted(k for k in keys if k == f"{feature}.{first}" or k.endswith(tail))
            pairs = [(key, key.removesuffix(first) + second) for key in firsts]
            return [(f.get_tensor(a), f.get_tensor(b)) for a, b in pairs if b in keys]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.checkpoint: {file} cannot be read: {one_line(error)}") from error


# ------------------------------------------------------------------------------------------- export
PARAMETERS = (
    (r"^model\.(?=paligemma_with_expert|action_|state_proj|time_mlp|embed_action|model\.)", ""),
    (r"^paligemma_with_expert\.paligemma\.", "paligemma."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "expert."),
    (r"^model\.dit\.", "expert."),
    (r"^model\.vlm\.", "paligemma."),
    (r"^paligemma\.model\.", "paligemma."),
    (r"^paligemma\.language_model\.model\.", "paligemma.language_model."),
    (
        r"^paligemma\.(language_model\.)?lm_head\.",
        "paligemma.language_model.embed_tokens.",
    ),
    (r"^paligemma\.vision_tower\.vision_model\.", "paligemma.vision_tower."),
    (r"^paligemma\.", "trunk.vlm."),
    (r"^(embed_action_time\.)?(state_proj|action_in_proj|(action_)?time_mlp_)", r"embed.\2"),
    (r"^action_out_proj\.", "velocity."),
)
"""Substitutions, in order, that map the published name of a weight, of all layouts that are read,
to the name of the parameter of ``pi0.PI0``.
"""


Patterns: TypeAlias = "Sequence[tuple[str, str]]"
_LEROBOT_MODULES = (
    (r"^trunk\.vlm\.", "model.paligemma_with_expert.paligemma.model."),
    (r"^expert\.", "model.paligemma_with_expert.gemma_expert.model."),
    (r"^embed\.", "model."),
    (r"^velocity\.", "model.action_out_proj."),
)
_TRANSFORMERS_MODULES = (
    (r"^trunk\.vlm\.", "model.vlm."),
    (r"^expert\.", "model.dit."),
    (r"^embed\.", "embed_action_time."),
    (r"^velocity\.", "action_out_proj."),
)


def module_names(folder: str | Path) -> Patterns:
    """Return substitutions that map names of ``pi0.PI0`` to those of the publisher's model.

    Keys of a file may differ from these, because the publisher's code renames keys of old files.

    Raises:
        ConfigError: config.json cannot be read.
    """
    raw = read_json(Path(folder) / "config.json", f"model.checkpoint={folder}", CURE)
    if "type" in raw:
        return _LEROBOT_MODULES
    if "model_type" in raw:
        return _TRANSFORMERS_MODULES
    return (*_LEROBOT_MODULES, (r"^model\.", ""))  # openpi


def parameter_name(key: str, patterns: Patterns) -> str:
    """Return the name of the policy's parameter for a published weight; see PARAMETERS."""
    for pattern, replacement in patterns:
        key = re.sub(pattern, replacement, key)
    return key


def save(
    parameters: Mapping[str, Tensor],
    source: str | Path,
    out: str | Path,
    patterns: Patterns = PARAMETERS,
    transposed: Callable[[str], bool] = lambda key: False,
) -> None:
    """Write trained parameters in the layout of the directory that they were read from.

    All files of the directory are copied; weights are replaced by the parameters of their name.

    Args:
        parameters: Parameters of ``pi0.PI0`` by their names there, adapters merged. The names of
            weights that stay as they are may be missing.
        source: The directory that the policy was built from.
        out: Directory to write.
        patterns: Substitutions of published names, see PARAMETERS.
        transposed: Returns whether a published weight is the transpose of the parameter.

    Raises:
        ConfigError: The directory has no weight for a parameter.
        OSError: A file cannot be read or written.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    source, out = Path(source), Path(out)
    files = [file for file in source.glob("*.safetensors") if "processor" not in file.name]
    skipped = [file.name for file in files]
    shutil.copytree(
        source, out, dirs_exist_ok=True, ignore=lambda *_: skipped, copy_function=shutil.copyfile
    )
    missing = set(parameters)
    for file in files:
        tensors = {}
        with safe_open(file, framework="pt") as published:
            metadata = published.metadata()
            for key in published.keys():  # noqa: SIM118
                name = parameter_name(key, patterns)
                missing.discard(name)
                value = parameters.get(name)
                if value is not None and transposed(key):
                    value = value.T
                tensors[key] = (
                    published.get_tensor(key) if value is None else value.detach().contiguous()
                )
        # safetensors refuses tensors that share memory, as tied weights do.
        seen: set[int] = set()
        for key, x in tensors.items():
            if x.data_ptr() in seen:
                tensors[key] = x.clone()
            seen.add(x.data_ptr())
        part = out / f"{file.name}.part"
        save_file(tensors, part, metadata=metadata)
        os.replace(part, out / file.name)
    if missing:
        raise ConfigError(
            f"model.checkpoint={source}: has no weight {min(missing)} ({len(missing)} in all) that"
            " the policy has trained; export from the directory that the run was started with"
        )
