"""Tiny checkpoints of X-VLA with random weights in lerobot's layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_pi0_checkpoint import write_tokenizer
from torch import Tensor

from embodied_ppo.models.vla import xvla_files

VISION = {
    "depths": [1, 1],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [16, 32],
    "num_heads": [2, 4],
    "num_groups": [2, 4],
    "window_size": 4,
    "projection_dim": 32,
}
TEXT = {
    "d_model": 32,
    "vocab_size": 300,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CONFIG: dict[str, Any] = {
    "type": "xvla",
    "chunk_size": 6,
    "max_state_dim": 8,
    "max_action_dim": 8,
    "action_mode": "auto",
    "tokenizer_max_length": 40,
    "hidden_size": 24,
    "depth": 2,
    "num_heads": 4,
    "num_domains": 4,
    "len_soft_prompts": 3,
    "dim_time": 8,
    "max_len_seq": 96,
    "num_image_views": 2,
    "resize_imgs_with_padding": [16, 16],
    "florence_config": {"vision_config": VISION, "text_config": TEXT},
}
OLD_VISION = {name: x for name, x in VISION.items() if name != "embed_dim"} | {
    "model_type": "davit",
    "dim_embed": VISION["embed_dim"],
    "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 50},
    "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 100},
    "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
}
"""The configuration of the vision encoder as Microsoft's code names it."""


def published_keys(state: dict[str, Tensor], *, old: bool) -> dict[str, Tensor]:
    """Return the weights of ``xvla_files.Model`` by lerobot's names, or Microsoft's."""
    tensors: dict[str, Tensor] = {}
    for name, x in state.items():
        key = name.replace("model.dit.", "model.transformer.")
        key = key.replace("embed_action_time.", "model.transformer.action_encoder.")
        key = key.replace("action_out_proj.", "model.transformer.action_decoder.")
        key = key.replace("vlm.language_model.", "vlm.language_model.encoder.")
        if old:
            key = key.replace("vlm.language_model.", "vlm.language_model.model.")
            key = key.replace("image_position_embed.", "image_pos_embed.")
            key = key.replace("vlm.multi_modal_projector.", "vlm.")
            if key.endswith("image_projection.weight"):
                key, x = key.removesuffix(".weight"), x.T
            key = re.sub(r"(convs\.\d+\.)conv\.", r"\1proj.", key)
            key = re.sub(r"(_block\.)(conv[12])\.", r"\1\2.fn.dw.", key)
            attention = "window" if "spatial_block" in key else "channel"
            key = re.sub(r"(_block\.)norm1\.", rf"\1{attention}_attn.norm.", key)
            key = re.sub(r"(_block\.)(\w+_attn)\.(?!norm)", r"\1\2.fn.", key)
            key = re.sub(r"(_block\.)norm2\.", r"\1ffn.norm.", key)
            key = re.sub(r"(_block\.)ffn\.fc", r"\1ffn.fn.net.fc", key)
        tensors[key] = x.contiguous()
    word = next(key for key in tensors if key.endswith("encoder.embed_tokens.weight"))
    tensors[word.replace("encoder.embed_tokens", "shared")] = tensors[word].clone()
    return tensors


def write_checkpoint(folder: Path, *, old: bool = False, domain: int = 2, **fields: Any) -> Path:
    """Write a directory of random weights.

    Args:
        folder: Created.
        old: Use the names of Microsoft's Florence-2, as the first published checkpoints.
        domain: Domain that the preprocessor sets.
        **fields: Fields of config.json.
    """
    folder.mkdir(parents=True)
    raw = CONFIG | fields
    if old:
        raw["florence_config"] = {"vision_config": OLD_VISION, "text_config": TEXT}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = xvla_files.Model(raw, domain)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    save_file(published_keys(model.state_dict(), old=old), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    step = {"registry_name": xvla_files.DOMAIN_STEP, "config": {"domain_id": domain}}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    write_tokenizer(folder)
    return folder
