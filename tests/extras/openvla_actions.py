"""Program for a Python with transformers 4.40.1 and timm 0.9.10: run the publishers' OpenVLA.

    python openvla_actions.py CLONE FOLDER parallel|autoregressive

CLONE is a clone of openvla/openvla or moojink/openvla-oft. FOLDER holds

* ``policy/``, a directory in the published layout, perhaps with OpenVLA-OFT's other modules,
* ``inputs.safetensors``: ``images`` uint8 [B, K, 3, side, side], ``state`` [B, n], and ``other``
  uint8 [3, h, w],
* ``tasks.json``, the sentences.

``FOLDER/actions.safetensors`` holds the actions that the publishers' evaluation on LIBERO executes,
[B, C, A] or [B, 1, A], and ``pixels``, the model's input of the image ``other``.

This file imports nothing of this repository.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import timm  # pyright: ignore
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.image_processing_utils import BatchFeature
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


def prepare_imports(clone: Path) -> None:
    """Make the clone's modules importable without what only its training and TensorFlow need."""
    sys.path.insert(0, str(clone))
    for name in ("prismatic", "prismatic.models", "prismatic.training", "prismatic.vla"):
        package = types.ModuleType(name)
        package.__path__ = [str(clone / name.replace(".", "/"))]
        sys.modules[name] = package
    unused = ["tensorflow", "json_numpy", "diffusers.schedulers.scheduling_ddim"]
    unused += ["prismatic.models.film_vit_wrapper", "prismatic.vla.datasets.rlds.utils.data_utils"]
    sys.modules.update({name: MagicMock() for name in unused})
    sys.argv.append("libero")  # OpenVLA-OFT reads sizes of actions from the command line


def bidirectional_mask(self: Any, mask: Tensor, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Attend to all positions, as in the transformers that OpenVLA-OFT names."""
    return torch.zeros(1, 1, x.shape[1], x.shape[1])


def load_model(policy: Path, utils: Any) -> Any:
    """Return the publishers' model of a directory, in float32."""
    raw = json.loads((policy / "config.json").read_text())
    sizes = raw.pop("vision_sizes")
    shrink_towers(sizes)
    config = utils.OpenVLAConfig(**raw)
    config.image_sizes = [sizes["image_size"]] * 2
    model = utils.OpenVLAForActionPrediction(config).eval()
    model.load_state_dict(load_file(policy / "model.safetensors"))
    return model


def load_heads(policy: Path, utils: Any, width: int) -> dict[str, Any]:
    """Return OpenVLA-OFT's modules of the directory, if it has any."""
    heads: dict[str, Any] = {}
    for file in policy.glob("*--*_checkpoint.pt"):
        if file.name.startswith("action_head"):
            heads["action_head"] = utils.L1RegressionActionHead(input_dim=width, hidden_dim=width)
        else:
            heads["proprio_projector"] = utils.ProprioProjector(width, proprio_dim=8)
        next(reversed(heads.values())).load_state_dict(utils.load_component_state_dict(str(file)))
    return heads


def main() -> None:
    """Run the model on each row; it accepts one at a time."""
    clone, folder, decode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    prepare_imports(clone)
    utils = importlib.import_module("experiments.robot.openvla_utils")
    robot = importlib.import_module("experiments.robot.robot_utils")
    policy = folder / "policy"
    model = load_model(policy, utils)
    words = PreTrainedTokenizerFast(
        tokenizer_file=str(policy / "tokenizer.json"),
        model_input_names=["input_ids", "attention_mask"],  # those of Llama's tokenizer
    )
    images = utils.PrismaticImageProcessor.from_pretrained(policy)
    processor = utils.PrismaticProcessor(images, words)
    inputs = load_file(folder / "inputs.safetensors")
    other = Image.fromarray(inputs["other"].permute(1, 2, 0).numpy())
    out = {"pixels": processor("", other)["pixel_values"]}
    BatchFeature.to = lambda self, *_, **__: self  # they convert to bfloat16, our weights are not
    pictures = inputs["images"].permute(0, 1, 3, 4, 2).numpy()
    actions = []
    for row, task in enumerate(json.loads((folder / "tasks.json").read_text())):
        names = ["full_image", "wrist_image"][: len(pictures[row])]
        obs = dict(zip(names, pictures[row], strict=True)) | {"state": inputs["state"][row].numpy()}
        if decode == "parallel":
            modeling_llama.LlamaModel._update_causal_mask = bidirectional_mask  # pyright: ignore
            utils.OPENVLA_IMAGE_SIZE = pictures.shape[2]
            model.vision_backbone.set_num_images_in_input(len(names))
            utils.ACTION_PROPRIO_NORMALIZATION_TYPE = "bounds_q99"
            utils.NormalizationType.BOUNDS, utils.NormalizationType.BOUNDS_Q99 = "", "bounds_q99"
            heads = load_heads(policy, utils, model.language_model.config.hidden_size)
            cfg = types.SimpleNamespace(num_images_in_input=len(names), center_crop=False)
            cfg.unnorm_key, cfg.use_proprio = "robot", "proprio_projector" in heads
            action = utils.get_vla_action(cfg, model, processor, obs, task, **heads)
        else:
            action = [utils.get_vla_action(model, processor, "openvla", obs, task, "robot")]
        action = robot.normalize_gripper_action(np.stack(action), binarize=True)
        actions.append(torch.as_tensor(robot.invert_gripper_action(action)).float())
    save_file(out | {"actions": torch.stack(actions)}, folder / "actions.safetensors")


if __name__ == "__main__":
    main()
