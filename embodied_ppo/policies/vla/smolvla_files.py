"""SmolVLA's published files: lerobot's config.json, weights, statistics, tokenizer.

Published weights were not available: everything is tested with synthetic directories, and against
lerobot with random weights (``make test-lerobot``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.policies.checkpoint_files import (
    check_supported,
    config_errors,
    import_transformers,
    load_tokenizer,
)
from embodied_ppo.policies.vla.pi0_files import (
    LARGEST,
    MAX_WORDS,
    Published,
    check_numbers,
    statistics,
    targets_of,
)
from embodied_ppo.policies.vla.published_weights import (
    Patterns,
    Targets,
    load,
    read_kind,
    substitute,
)

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

PARAMETERS: Patterns = (
    (r"^model\.vlm_with_expert\.vlm\.model\.vision_model\.", "trunk.vlm.vision_tower."),
    (r"^model\.vlm_with_expert\.vlm\.model\.connector\.", "trunk.vlm.multi_modal_projector."),
    (r"^model\.vlm_with_expert\.vlm\.model\.text_model\.", "trunk.vlm.language_model."),
    (r"^model\.(vlm_with_expert\.lm_expert|dit)\.", "expert."),
    (r"^model\.state_proj\.", "trunk.vlm.state_proj."),
    (r"^model\.vlm\.", "trunk.vlm."),
    (r"^(model|embed_action_time)\.(action_in_proj|action_time_mlp_)", r"embed.\2"),
    (r"^(model\.)?action_out_proj\.", "velocity."),
)
"""Substitutions that map the name of a weight, in lerobot's files and in ``SmolVLAModel``, to that
of the parameter of ``smolvla.SmolVLA``.
"""
MODULES: Patterns = (
    (r"^trunk\.vlm\.language_model\.", "model.vlm_with_expert.vlm.model.text_model."),
    (r"^expert\.", "model.vlm_with_expert.lm_expert."),
    (r"^embed\.", "model."),
    (r"^velocity\.", "model.action_out_proj."),
)
"""Substitutions that map names of ``smolvla.SmolVLA`` to those of lerobot's modules."""


class SmolVLM(nn.Module):
    """The parts of SmolVLM2 that SmolVLA uses, and the layer that embeds the state.

    The names of the attributes are those of PaliGemma, which ``pi0.PI0Trunk`` reads.
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


class SmolVLAModel(nn.Module):
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
    _, raw = read_kind(folder, "flow")
    for name, values in SUPPORTED.items():
        check_supported(f"{label}: config.json has ", name, raw.get(name, values[0]), *values)
    check_numbers(raw, label)

    def build() -> tuple[SmolVLAModel, Targets]:
        model = build_model(raw, folder)
        return model, targets_of(model, PARAMETERS)

    model = load(folder, build, rename)
    words = raw.get("tokenizer_max_length") or MAX_WORDS
    tokenize = SentenceTokenizer(load_tokenizer(folder, *VLM_SIZES), words)
    stats = statistics(folder, raw, "MEAN_STD")
    return Published(model, tokenize, *stats, antialias=False, modules=MODULES)


def build_model(raw: Mapping[str, Any], folder: str | Path) -> SmolVLAModel:
    """Return the model of lerobot's config.json with new weights. Raises ConfigError."""
    label = f"model.checkpoint={folder}"
    with config_errors(f"{label}: config.json is refused: "):
        return SmolVLAModel(raw, vlm_config(raw, label))


def rename(keys: Iterable[str]) -> dict[str, str]:
    """Return key of a file -> name of the parameter of ``smolvla.SmolVLA``.

    No layer reads the head of SmolVLM2; statistics are no weights.
    """
    read_keys = (key for key in keys if "lm_head" not in key and "normalize" not in key)
    return {key: substitute(key, PARAMETERS) for key in read_keys}


@dataclass(frozen=True)
class SentenceTokenizer:
    """Sentence -> at most ``words`` ids, including end of line."""

    tokenizer: Any
    words: int

    def __call__(self, sentence: str) -> list[int]:
        return self.tokenizer(sentence.removesuffix("\n") + "\n").input_ids[: self.words]


def vlm_config(raw: Mapping[str, Any], label: str) -> Any:
    """Return transformers' SmolVLMConfig.

    Args:
        raw: lerobot's config.json.
        label: Beginning of the message.

    Raises:
        ConfigError: The sizes of ``vlm_model_name`` are not known.
    """
    transformers = import_transformers("model.checkpoint")
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
