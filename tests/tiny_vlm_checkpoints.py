"""Tiny checkpoints of vision-language models with random weights in the published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.models.vla import openvla_files
from embodied_ppo.models.vla.openvla import OpenVLABody, OpenVLAConfig, TowerConfig

SIDE = 32
"""Height and width of the tests' camera images in pixels."""
KINDS = ("smolvlm", "idefics3", "paligemma", "llava", "qwen2_5_vl", "qwen3_vl", "openvla")
STATS = {"q01": [-2.0, 0.0], "q99": [2.0, 1.0], "mask": [True, True]}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "vocab_size": 400,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
    "image_size": SIDE,
}
QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
PREPROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.4, 0.6], "resample": 3}
CHAT = (
    "{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c['type'] == 'image'"
    " %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}Assistant:"
)


def tokenizer(*special: str) -> Any:
    """Return a byte tokenizer: <pad> 0, <s> 1, </s> 2, 256 bytes, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    t = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return fast


def write_checkpoint(kind: str, folder: Path) -> Path:
    """Write a checkpoint of one of KINDS; OpenVLA's actions have 2 dimensions and 16 bins."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        folder.mkdir(parents=True, exist_ok=True)
        return _openvla(folder) if kind == "openvla" else _vision_language(kind, folder)


def _openvla(folder: Path) -> Path:
    config = OpenVLAConfig(
        text={
            "vocab_size": 32064,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 32000,
        },
        dino=TowerConfig(hidden_size=16, layers=2, heads=2, intermediate_size=32, patch_size=8),
        siglip=TowerConfig(hidden_size=24, layers=3, heads=3, intermediate_size=40, patch_size=8),
        image_size=SIDE,
        action_bins=16,
        norm_stats={
            "bridge_orig": {"action": STATS},
            "tabletop": {"action": STATS | {"q01": [-1.0, -1.0]}},
        },
    )
    body = OpenVLABody(config)
    with torch.no_grad():
        for p in body.parameters():
            p.add_(0.1 * torch.randn_like(p))
        body.dino.embeddings.position_embeddings[:, 0] = 0
    openvla_files.save(body, folder)
    tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _vision_language(kind: str, folder: Path) -> Path:
    import transformers as t

    preprocessor: dict[str, Any] = dict(PREPROCESSOR)
    if kind in ("smolvlm", "idefics3"):
        words = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<|im_start|>")
        words.chat_template = CHAT.replace("IMAGE", "<image>")
        family = t.SmolVLMConfig if kind == "smolvlm" else t.Idefics3Config
        config = family(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=SIGLIP,
            scale_factor=2,
            image_token_id=words.convert_tokens_to_ids("<image>"),
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    elif kind in ("paligemma", "llava"):
        words = tokenizer("<image>")
        image = words.convert_tokens_to_ids("<image>")
        vision = SIGLIP | {"model_type": "siglip_vision_model"}
        if kind == "paligemma":
            config = t.PaliGemmaConfig(
                text_config=TEXT | {"model_type": "gemma"},
                vision_config=vision | {"projection_dim": 32},
                projection_dim=32,
                hidden_size=32,
                image_token_index=image,
            )
        else:
            config = t.LlavaConfig(
                text_config=TEXT | {"model_type": "llama"},
                vision_config=vision,
                image_token_index=image,
                vision_feature_select_strategy="full",
                vision_feature_layer=-1,
            )
    else:
        names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
        words = tokenizer(*names.values(), "<|im_start|>")
        words.chat_template = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
        ids: dict[str, Any] = {
            f"{name}_token_id": words.convert_tokens_to_ids(word) for name, word in names.items()
        }
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
        text = TEXT | {"rope_parameters": rope}
        if kind == "qwen2_5_vl":
            vision = QWEN | {"window_size": 32, "fullatt_block_indexes": [1]}
            config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        else:
            vision = QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
            config = t.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        preprocessor |= {"min_pixels": 64, "max_pixels": 4096}
    model = t.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder
