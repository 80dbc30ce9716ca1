"""Program for a Python with transformers 4.40.1 and timm 0.9.10: run the publishers' OpenVLA.

    python openvla_actions.py CLONE FOLDER parallel|autoregressive

CLONE is a clone of openvla/openvla or moojink/openvla-oft. FOLDER holds ``policy/``, a directory in
the published layout, and ``inputs.safetensors``: ``pixels`` [B, 6, side, side] and the prompts
``ids0`` .. of each row. The actions, and with parallel decoding the hidden states, are written to
``FOLDER/actions.safetensors``.

This file imports nothing of this repository.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import timm  # pyright: ignore
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama import modeling_llama


def shrink_towers(sizes: dict[str, dict[str, int]]) -> None:
    """Let timm construct towers of these sizes; the publishers name those of the large ones."""
    create_model = timm.create_model

    def create(name: str, **options: Any) -> Any:
        tower = sizes["dino" if "dino" in name else "siglip"]
        width = tower["hidden_size"]
        return create_model(
            name,
            **options,
            embed_dim=width,
            depth=tower["num_hidden_layers"],
            num_heads=tower["num_attention_heads"],
            patch_size=tower["patch_size"],
            mlp_ratio=tower.get("mlp_ratio") or (tower["intermediate_size"] + 1e-3) / width,
        )

    timm.create_model = create


def import_model(clone: Path) -> tuple[Any, Any]:
    """Return the model's class and its configuration's, without the packages' dependencies."""
    sys.path.insert(0, str(clone))
    for name in ("prismatic", "prismatic.training", "prismatic.vla"):
        package = types.ModuleType(name)
        package.__path__ = [str(clone / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.argv.append("libero")  # OpenVLA-OFT reads sizes of actions from the command line
    files = "prismatic.extern.hf"
    model = importlib.import_module(f"{files}.modeling_prismatic")
    config = importlib.import_module(f"{files}.configuration_prismatic")
    return model.OpenVLAForActionPrediction, config.OpenVLAConfig


def bidirectional_mask(self: Any, mask: Tensor, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Attend to all positions, as in the transformers that OpenVLA-OFT names."""
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def main() -> None:
    """Run the model on each row; it accepts one at a time."""
    clone, folder, decode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    raw = json.loads((folder / "policy" / "config.json").read_text())
    sizes = raw.pop("vision_sizes")
    shrink_towers(sizes)
    model_class, config_class = import_model(clone)
    config = config_class(**raw)
    config.image_sizes = [sizes["image_size"]] * 2
    model = model_class(config).eval()
    model.load_state_dict(load_file(folder / "policy" / "model.safetensors"))
    if decode == "parallel":
        modeling_llama.LlamaModel._update_causal_mask = bidirectional_mask  # pyright: ignore
    inputs = load_file(folder / "inputs.safetensors")
    out: dict[str, Tensor] = {}
    for row in range(len(inputs["pixels"])):
        ids = inputs[f"ids{row}"]
        with torch.no_grad():
            result = model.predict_action(
                ids,
                unnorm_key="robot",
                do_sample=False,
                pixel_values=inputs["pixels"][row : row + 1],
                attention_mask=torch.ones_like(ids),
            )
        actions, hidden = result if decode == "parallel" else (result, None)
        out[f"actions{row}"] = torch.as_tensor(actions).float()
        if hidden is not None:
            out[f"hidden{row}"] = hidden[0].contiguous()
    save_file(out, folder / "actions.safetensors")


if __name__ == "__main__":
    main()
