"""Tiny checkpoints of SmolVLA with random weights in lerobot's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from run_helpers import options, perturb
from safetensors.torch import save_file
from tiny_pi0_checkpoint import write_tokenizer

from embodied_ppo.policies.vla import smolvla

STATISTICS = {
    f"{name}.{kind}": torch.full((size,), value)
    for name, size in (("observation.state", 3), ("action", 2))
    for kind, value in (("mean", 0.25), ("std", 0.5))
}
TEXT = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
CONFIG = options("""type=smolvla chunk_size=6 max_state_dim=8 max_action_dim=8
    num_vlm_layers=4""")
CONFIG |= {"vlm_config": {"text": TEXT, "vision": VISION, "scale_factor": 2}}


def published_key(key: str) -> str:
    """Map the name of a weight in ``SmolVLAModel`` to lerobot's."""
    for name, published in (
        ("embed_action_time.", ""),
        ("model.vlm.state_proj.", "state_proj."),
        ("model.vlm.vision_tower.", "vlm_with_expert.vlm.model.vision_model."),
        ("model.vlm.multi_modal_projector.", "vlm_with_expert.vlm.model.connector."),
        ("model.vlm.language_model.", "vlm_with_expert.vlm.model.text_model."),
        ("model.dit.", "vlm_with_expert.lm_expert."),
    ):
        key = key.replace(name, published)
    return f"model.{key}"


def write_checkpoint(folder: Path, *, statistics: bool = True, **fields: Any) -> Path:
    """Write a directory of random weights in lerobot's layout."""
    folder.mkdir(parents=True)
    raw = CONFIG | fields
    torch.manual_seed(0)
    model = smolvla.build_model(raw, folder)
    perturb(model, 0.1, frozen=True)
    tensors = {published_key(k): x.contiguous() for k, x in model.state_dict().items()}
    save_file(
        tensors | {"model.vlm_with_expert.vlm.lm_head.weight": torch.zeros(300, 48)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(raw))
    write_tokenizer(folder)
    if statistics:
        name = "policy_preprocessor_step_5_normalizer_processor.safetensors"
        save_file(STATISTICS, folder / name)
    return folder
