"""A tiny checkpoint of OpenVLA with random weights in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from run_helpers import perturb
from safetensors.torch import save_file

from embodied_ppo.policies.vla import openvla_files
from embodied_ppo.policies.vla.openvla import DINO, SIGLIP, OpenVLABody, OpenVLAConfig

# Height and width of the tests' camera images in pixels.
SIDE = 32
STATS = {"q01": [-2.0, 0.0], "q99": [2.0, 1.0], "mask": [True, True]}


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


def tiny_config(
    text: tuple[int, ...], dino: tuple[int, ...], siglip: tuple[int, ...], **options: Any
) -> OpenVLAConfig:
    """Return the sizes of a model.

    Args:
        text: Width, width within the MLPs, layers, heads of the keys and longest text of Llama.
        dino: Width, layers, heads, factor of the width within the MLPs and patch of DINOv2.
        siglip: Width, layers, heads, width within the MLPs and patch of SigLIP.
        options: Other fields of the config.
    """
    vision = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
    sizes = dict(zip((*names, "max_position_embeddings"), text, strict=True))
    return OpenVLAConfig(
        text={"vocab_size": 32064, "num_attention_heads": 4, "pad_token_id": 32000} | sizes,
        dino=DINO | dict(zip((*vision, "mlp_ratio", "patch_size"), dino, strict=True)),
        siglip=SIGLIP
        | dict(zip((*vision, "intermediate_size", "patch_size"), siglip, strict=True)),
        **options,
    )


def write_checkpoint(folder: Path) -> Path:
    """Write a checkpoint whose actions have 2 dimensions and 16 bins."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        folder.mkdir(parents=True, exist_ok=True)
        return _write_openvla(folder)


def write_heads(folder: Path, *, state: int | None, width: int = 16, size: int = 2) -> Path:
    """Write OpenVLA-OFT's regression head, and the projector of a state of so many numbers."""
    shapes = {"layer_norm1": (size * width,), "layer_norm2": (width,)}
    shapes |= {"fc1": (width, size * width), "fc2": (size, width)}
    for i in (0, 1):
        shapes |= {f"mlp_resnet_blocks.{i}.ffn.{k}": (width,) * (k + 1) for k in (0, 1)}
    modules: dict[str, dict[str, Any]] = {
        "action_head": {f"model.{k}": x for k, x in shapes.items()}
    }
    if state is not None:
        modules["proprio_projector"] = {"fc1": (width, state), "fc2": (width, width)}
        raw = json.loads((folder / "config.json").read_text())
        for stats in raw["norm_stats"].values():
            stats["proprio"] = {"q01": [-2.0] * state, "q99": [1.0] * state}
        (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(3)
    for name, layers in modules.items():
        weights = {}
        for key, shape in layers.items():
            weights[f"module.{key}.weight"] = 0.3 * torch.randn(shape, generator=generator)
            weights[f"module.{key}.bias"] = 0.3 * torch.randn(shape[:1], generator=generator)
        torch.save(weights, folder / f"{name}--150000_checkpoint.pt")
    return folder


def write_openvla(body: OpenVLABody, folder: Path) -> Path:
    """Write the weights of a body and its config.json, as the publishers do."""
    config = body.config
    sizes = {"dino": config.dino, "siglip": config.siglip, "image_size": config.image_size}
    raw = {
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "text_config": {"model_type": "llama", **config.text},
        "n_action_bins": config.action_bins,
        "norm_stats": config.norm_stats,
        "vision_sizes": sizes,
    }
    tensors = {
        key: entry.write().clone(memory_format=torch.contiguous_format)
        for key, entry in openvla_files.entries(body).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def _write_openvla(folder: Path) -> Path:
    stats = {"bridge_orig": {"action": STATS}}
    stats["tabletop"] = {"action": STATS | {"q01": [-1.0, -1.0]}}
    config = tiny_config(
        (16, 24, 2, 2, 256),
        dino=(16, 2, 2, 2, 8),
        siglip=(24, 3, 3, 40, 8),
        image_size=SIDE,
        action_bins=16,
        norm_stats=stats,
    )
    body = OpenVLABody(config)
    perturb(body, 0.1, frozen=True)
    with torch.no_grad():
        body.dino.embeddings.position_embeddings[:, 0] = 0
    write_openvla(body, folder)
    tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder
