"""SmolVLA's published files: lerobot's config.json, weights, statistics, tokenizer.

Published weights were not available: everything is tested with synthetic directories, and against
lerobot with random weights (``make test-lerobot``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.core.errors import one_line, show
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import (
    LOCAL,
    check_finite,
    config_errors,
    import_transformers,
    read_json,
)
from embodied_ppo.models.vla.pi0_files import (
    LARGEST,
    MAX_WORDS,
    Published,
    check_numbers,
    check_shapes,
    statistics,
)

CURE = "name one of SmolVLA (hf download lerobot/smolvla_base --local-dir DIR)"
PREFIX = "model."
VLM_PREFIX = "vlm_with_expert.vlm.model."
EXPERT_PREFIX = "vlm_with_expert.lm_expert."
SELF_ATTENTION_EVERY = 2
"""Layer i of the expert has self-attention if i is a multiple of it, else cross-attention."""

_TEXT = {
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
}
VLM_SIZES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": {
        "text": _TEXT
        | {
            "hidden_size": 960,
            "intermediate_size": 2560,
            "vocab_size": 49280,
            "rms_norm_eps": 1e-5,
        },
        "vision": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
        "scale_factor": 4,
    },
}
"""Sizes of the models that lerobot's ``vlm_model_name`` can name; its directories do not contain
them.
"""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "num_expert_layers": (-1, 0),
    "prefix_length": (-1, 0),
    "self_attn_every_n_layers": (SELF_ATTENTION_EVERY,),
}
"""Values of lerobot's options that are read here; the first one is its default."""

PARAMETERS = (
    (r"^model\.vlm_with_expert\.vlm\.model\.vision_model\.", "trunk.vlm.vision_tower."),
    (r"^model\.vlm_with_expert\.vlm\.model\.connector\.", "trunk.vlm.multi_modal_projector."),
    (r"^model\.vlm_with_expert\.vlm\.model\.text_model\.", "trunk.vlm.language_model."),
    (r"^model\.vlm_with_expert\.lm_expert\.", "expert."),
    (r"^model\.state_proj\.", "trunk.vlm.state_proj."),
    (r"^model\.(action_in_proj|action_time_mlp_)", r"embed.\1"),
    (r"^model\.action_out_proj\.", "velocity."),
)
"""Substitutions that map lerobot's name of a weight to that of the parameter of
``smolvla.SmolVLA``.
"""
MODULES = (
    (r"^trunk\.vlm\.language_model\.", "model.vlm_with_expert.vlm.model.text_model."),
    (r"^expert\.", "model.vlm_with_expert.lm_expert."),
    (r"^embed\.", "model."),
    (r"^velocity\.", "model.action_out_proj."),
)
"""Substitutions that map names of ``smolvla.SmolVLA`` to those of lerobot's modules."""


class SmolVLM(nn.Module):
    """The parts of SmolVLM2 that SmolVLA uses, and the layer that embeds the state.

    The names of the attributes are those of PaliGemma, which ``pi0.Trunk`` reads.
    """

    def __init__(self, config: Any, state_size: int) -> None:
        """Build the parts with random weights.

        Args:
            config: transformers' SmolVLMConfig.
            state_size: N, numbers of a padded state.
        """
        from transformers import LlamaModel
        from transformers.models.smolvlm import modeling_smolvlm

        super().__init__()
        self.config = config
        self.vision_tower = modeling_smolvlm.SmolVLMVisionTransformer(config.vision_config)
        self.multi_modal_projector = modeling_smolvlm.SmolVLMConnector(config)
        self.language_model = LlamaModel(config.text_config)
        self.state_proj = nn.Linear(state_size, config.text_config.hidden_size)


class ActionTime(nn.Module):
    """Embeds noisy actions and the time of the flow, as π0.

    Attributes:
        sinusoid_embeds: Maps times [B] to [B, D]; ``pi0.PI0`` sets it.
    """

    def __init__(self, actions: int, width: int) -> None:
        """Build the layers.

        Args:
            actions: N, numbers of a padded action.
            width: D of the action expert.
        """
        super().__init__()
        self.sinusoid_embeds: nn.Module = nn.Identity()
        self.action_in_proj = nn.Linear(actions, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def forward(self, x: Tensor, tau: Tensor) -> Tensor:
        """Return tokens [B, H, D] of latents x [B, H, N] at times tau [B]."""
        h = self.action_in_proj(x)
        time = self.sinusoid_embeds(tau).to(h.dtype).unsqueeze(1).expand_as(h)
        h = self.action_time_mlp_in(torch.cat((h, time), dim=2))
        return self.action_time_mlp_out(nn.functional.silu(h))


class Model(nn.Module):
    """All weights, with the attributes that ``pi0.PI0`` reads from transformers' model."""

    def __init__(self, raw: Mapping[str, Any], config: Any) -> None:
        """Build the model with random weights.

        Args:
            raw: lerobot's config.json.
            config: transformers' SmolVLMConfig.
        """
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        text = config.text_config
        width = int(text.hidden_size * raw.get("expert_width_multiplier", 0.75))
        expert = LlamaConfig(**text.to_dict() | expert_sizes(width))
        states, actions = (raw.get(f"max_{x}_dim", 32) for x in ("state", "action"))
        self.config = SimpleNamespace(
            chunk_size=raw.get("chunk_size", 50),
            max_state_dim=states,
            max_action_dim=actions,
            min_period=raw.get("min_period", 4e-3),
            max_period=raw.get("max_period", 4.0),
            vlm_config=config,
            dit_config=expert,
        )
        self.model = nn.Module()
        self.model.vlm = SmolVLM(config, states)
        body: Any = LlamaModel(expert)
        self.model.dit = body
        keys = text.num_key_value_heads * text.head_dim
        for i, layer in enumerate(body.layers):
            if is_cross_layer(i):
                layer.self_attn.k_proj = nn.Linear(keys, keys, bias=False)
                layer.self_attn.v_proj = nn.Linear(keys, keys, bias=False)
        body.embed_tokens = None
        self.embed_action_time = ActionTime(actions, width)
        self.action_out_proj = nn.Linear(width, actions)


def expert_sizes(width: int) -> dict[str, int]:
    """Return the sizes of the expert that differ from the language model's, as in lerobot.

    The inner width is 8/3 of ``width``, rounded up to a multiple of 256.
    """
    inner = int(4 * int(2 * width / 3))
    return {"hidden_size": width, "intermediate_size": 256 * math.ceil(inner / 256)}


def is_cross_layer(i: int) -> bool:
    """Return whether layer i of the expert attends to the prefix only."""
    return i % SELF_ATTENTION_EVERY != 0


def read(folder: str | Path) -> Published:
    """Read a checkpoint directory.

    Raises:
        ConfigError: A file is missing or damaged, or an option of the model is not supported.
    """
    folder = Path(folder)
    label = f"model.checkpoint={folder}"
    raw = read_json(folder / "config.json", label, CURE)
    for name, values in SUPPORTED.items():
        if raw.get(name, values[0]) not in values:
            raise ConfigError(
                f"{label}: config.json has {name}={show(raw[name])}; supported is"
                f" {name}={show(values[0])}"
            )
    check_numbers(raw, label)
    with config_errors(f"{label}: config.json is refused: "):
        config = vlm_config(raw, label)
        with torch.device("meta"):
            empty = Model(raw, config)
    sizes = {name: tuple(x.shape) for name, x in empty.state_dict().items()}
    check_shapes(folder, sizes, weight_names(empty).get)
    model = Model(raw, config)
    _load(model, folder, label)
    words = raw.get("tokenizer_max_length") or MAX_WORDS
    return Published(model, _tokenizer(folder, words), *statistics(folder, raw), antialias=False)


def vlm_config(raw: Mapping[str, Any], label: str) -> Any:
    """Return transformers' SmolVLMConfig.

    Args:
        raw: lerobot's config.json.
        label: Beginning of the message.

    Raises:
        ConfigError: The sizes of ``vlm_model_name`` are not known.
    """
    transformers = import_transformers("model.checkpoint", "SmolVLMConfig", version="5.23")
    name = raw.get("vlm_model_name")
    sizes = raw.get("vlm_config") or VLM_SIZES.get(str(name))
    if sizes is None:
        raise ConfigError(
            f"{label}: vlm_model_name={name} is not known; supported is {', '.join(VLM_SIZES)}"
        )
    text = {"model_type": "llama", "attention_bias": False, "num_hidden_layers": 32} | sizes["text"]
    layers = raw.get("num_vlm_layers", 16)
    if type(layers) is not int or layers > LARGEST["num_hidden_layers"]:
        raise ConfigError(
            f"{label}: config.json has num_vlm_layers={show(layers)}; it must be a whole number <="
            f" {LARGEST['num_hidden_layers']}, download it again"
        )
    if layers > 0:  # otherwise lerobot uses all layers of the vision-language model
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    return transformers.SmolVLMConfig(
        text_config=text, vision_config=sizes["vision"], scale_factor=sizes["scale_factor"]
    )


def weight_names(model: Model) -> dict[str, str]:
    """Return the published name of each weight -> its name in ``model``."""
    names = {}
    for name in model.state_dict():
        key = name.removeprefix("embed_action_time.")
        for ours, theirs in (
            ("model.vlm.state_proj.", "state_proj."),
            ("model.vlm.vision_tower.", f"{VLM_PREFIX}vision_model."),
            ("model.vlm.multi_modal_projector.", f"{VLM_PREFIX}connector."),
            ("model.vlm.language_model.", f"{VLM_PREFIX}text_model."),
            ("model.dit.", EXPERT_PREFIX),
        ):
            if key.startswith(ours):
                key = theirs + key.removeprefix(ours)
                break
        names[PREFIX + key] = name
    return names


def _load(model: Model, folder: Path, label: str) -> None:
    """Copy the weights of a directory into the model."""
    from safetensors import SafetensorError, safe_open

    names, state = weight_names(model), model.state_dict()
    files = [f for f in sorted(folder.glob("*.safetensors")) if "processor" not in f.name]
    if not files:
        raise ConfigError(f"{label}: holds no weights (model.safetensors); download it completely")
    missing, unknown = set(names), []
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    if key in names:
                        state[names[key]].copy_(tensors.get_tensor(key))
                        missing.discard(key)
                    elif "lm_head" not in key and "normalize" not in key:
                        unknown.append(key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{label}: the weights cannot be read: {one_line(error)}; download them again"
        ) from error
    for problem, keys in (("lack", missing), ("have an unknown", unknown)):
        if keys:
            raise ConfigError(
                f"{label}: the weights {problem} {min(keys)} ({len(keys)} in all); they are of"
                " another model, or incomplete"
            )
    check_finite(((key, state[name]) for key, name in names.items()), label)


def _tokenizer(folder: Path, words: int) -> Callable[[str], Sequence[int]]:
    """Return the tokenizer of a directory: sentence -> ids, including end of line."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.checkpoint={folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json of HuggingFaceTB/SmolVLM2-500M-Video-Instruct into it"
        )
    transformers = import_transformers("model.checkpoint", "AutoTokenizer", version="5.23")
    with config_errors(f"model.checkpoint={folder}: its tokenizer cannot be read: "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)

    def tokenize(sentence: str) -> list[int]:
        return tokenizer(sentence.removesuffix("\n") + "\n").input_ids[:words]

    return tokenize
