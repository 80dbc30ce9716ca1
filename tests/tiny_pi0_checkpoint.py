"""Tiny checkpoints of π0 with random weights in lerobot's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import run_helpers
import torch
from safetensors.torch import save_file

from embodied_ppo.policies.vla.pi05 import use_adaptive_norms

# lerobot's normalization_mapping of π0.5.
QUANTILES = {"STATE": "QUANTILES", "ACTION": "QUANTILES"}


def tiny_config(*, key_heads: int = 1, **fields: Any) -> Any:
    """Return transformers' PI0Config with images of 16 x 16 pixels and 6 actions per chunk.

    States and actions have 8 numbers.
    """
    from transformers import PI0Config

    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
    }
    gemma |= {"head_dim": 8, "vocab_size": 300}
    vision = run_helpers.options("""model_type=siglip_vision_model hidden_size=32 patch_size=8
        intermediate_size=64 image_size=16 num_hidden_layers=2 num_attention_heads=2
        vision_use_head=false""")
    vlm = {
        "model_type": "paligemma",
        "text_config": gemma | {"hidden_size": 64, "intermediate_size": 128},
        "vision_config": vision,
        "projection_dim": 64,
        "image_token_id": 300,
    }
    options = {"chunk_size": 6, "max_state_dim": 8, "max_action_dim": 8} | fields
    return PI0Config(
        vlm_config=vlm, dit_config=gemma | {"hidden_size": 32, "intermediate_size": 64}, **options
    )


def tiny_model(seed: int = 0, *, kind: str = "pi0", **fields: Any) -> Any:
    """Return a model with larger weights than initial ones, so that every part has an effect."""
    from transformers import PI0ForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PI0ForConditionalGeneration(tiny_config(**fields))
        if kind == "pi05":
            model = use_adaptive_norms(model)
        run_helpers.perturb(model, 0.1, frozen=True)
    return model


def published_key(key: str) -> str:
    """Map transformers' name of a weight to lerobot's (0.4; lerobot/pi0_base)."""
    key = key.replace("embed_action_time.", "")
    for name, published in (
        ("model.vlm.language_model.embed_tokens", "paligemma_with_expert.paligemma.lm_head"),
        (
            "model.vlm.vision_tower.",
            "paligemma_with_expert.paligemma.model.vision_tower.vision_model.",
        ),
        ("model.vlm.", "paligemma_with_expert.paligemma.model."),
        ("model.dit.embed_tokens", "paligemma_with_expert.gemma_expert.lm_head"),
        ("model.dit.", "paligemma_with_expert.gemma_expert.model."),
    ):
        key = key.replace(name, published)
    return f"model.{key}"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte, 3 to 258, after a begin of sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    words = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    words.decoder = decoders.ByteLevel()  # pyright: ignore
    words.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


def write_checkpoint(
    folder: Path,
    *,
    statistics: dict[str, Any] | None = None,
    seed: int = 0,
    kind: str = "pi0",
    asset: str | None = None,
    **fields: Any,
) -> Path:
    """Write a checkpoint.

    Args:
        folder: Created if necessary.
        statistics: The normaliser's tensors by lerobot's names, or openpi's norm_stats.
        seed: Of the weights.
        kind: pi0 or pi05.
        asset: Folder of the statistics, for openpi's layout instead of lerobot's.
        **fields: Fields of transformers' PI0Config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(seed, kind=kind, **fields)
    prefix = "" if asset is None else "model."
    save_file(
        {
            published_key(k).removeprefix(prefix): x.contiguous()
            for k, x in model.state_dict().items()
        },
        folder / "model.safetensors",
    )
    config = model.config.to_dict()
    if asset is not None:
        sizes = {name: config[name] for name in ("vlm_config", "dit_config")}
        config = {"action_dim": config["max_action_dim"], "action_horizon": config["chunk_size"]}
        config |= sizes
        file = folder / "assets" / asset / "norm_stats.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"norm_stats": statistics or {}}))
        statistics = None
    elif kind == "pi05":
        config |= {"type": "pi05", "normalization_mapping": QUANTILES}
        del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    write_tokenizer(folder)
    if statistics:
        save_file(
            statistics, folder / "policy_preprocessor_step_5_normalizer_processor.safetensors"
        )
    return folder
