"""Read and write adapters in the layout of the package peft, without importing peft.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. For each module M of
the publisher's model, the second file contains

* ``base_model.model.M.lora_A.weight`` [rank, D] and ``.lora_B.weight`` [O, rank], if M has an
  adapter (M is one of ``target_modules``),
* its weights ``base_model.model.M.weight``, .., if all parameters of M are trained
  (``modules_to_save``).

peft multiplies B A by ``lora_alpha / r``, as ``lora.LoRALinear`` does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_ppo.policies.checkpoint_files import copy_permissions, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Path of the publisher's model in the ``PeftModel`` that wraps it."""
ADAPTERS = (".lora_A.", ".lora_B.")
"""Parts of the parameter names of adapters. In our names, the name of the adapter, "default",
follows them.
"""


@dataclass(frozen=True)
class Adapter:
    """Contents of an adapter directory.

    Attributes:
        rank: Rank of the adapters.
        alpha: Scale of the adapters, see ``lora.LoRALinear``.
        parameters: Weights by their names in the publisher's model, ``M.lora_A.weight``.
    """

    rank: int
    alpha: float
    parameters: Mapping[str, Tensor]


def save(adapter: Adapter, source: str | Path, out: str | Path) -> None:
    """Write an adapter of the model in ``source``, and copy the other files except weights.

    ``use_peft`` is added to lerobot's config.json, so that lerobot reads the base model and the
    adapter.

    Args:
        adapter: The adapter.
        source: Directory of the base model; its absolute path is stored.
        out: Directory to write.

    Raises:
        OSError: A file cannot be read or written.
    """
    from safetensors.torch import save_file

    source, out = Path(source).resolve(), Path(out)
    weights = [f.name for f in source.iterdir() if _holds_weights(f)]
    shutil.copytree(
        source, out, dirs_exist_ok=True, ignore=lambda *_: weights, copy_function=shutil.copyfile
    )
    raw = read_json(out / "config.json", f"model.checkpoint={source}", "download it again")
    if "type" in raw:
        _write_json(out / "config.json", raw | {"use_peft": True})
    modules = {False: set[str](), True: set[str]()}
    for name in adapter.parameters:
        adapted = any(part in name for part in ADAPTERS)
        modules[adapted].add(name.rsplit(".", 2 if adapted else 1)[0])
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    _write_json(
        out / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": str(source),
            "r": adapter.rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": sorted(modules[True]),
            "modules_to_save": sorted(modules[False]) or None,
        },
    )
    tensors = {PREFIX + name: x.detach().contiguous() for name, x in adapter.parameters.items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    copy_permissions(out)


def load(folder: str | Path) -> Adapter:
    """Read an adapter that ``save`` wrote.

    Raises:
        ConfigError: adapter_config.json is missing or damaged.
        OSError: The weights cannot be read.
    """
    from safetensors.torch import load_file

    raw = read_json(Path(folder) / CONFIG, f"out={folder}", "name the directory of an adapter")
    tensors = load_file(Path(folder) / WEIGHTS)
    parameters = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    return Adapter(int(raw["r"]), float(raw["lora_alpha"]), parameters)


@torch.no_grad()
def apply(adapter: Adapter, parameters: Mapping[str, Tensor]) -> None:
    """Copy an adapter into the parameters of a policy that has adapters of the same rank.

    Args:
        adapter: The adapter.
        parameters: Name in the publisher's model -> trained parameter of the policy.

    Raises:
        CheckpointError: The adapter has other parameter names.
    """
    if different := sorted(adapter.parameters.keys() ^ parameters.keys()):
        raise CheckpointError(
            f"{different[0]}: missing or unexpected in the adapter ({len(different)} in all); use"
            " the model that it was trained with"
        )
    for name, x in adapter.parameters.items():
        parameters[name].copy_(x)


def check_no_adapter(folder: str | Path) -> None:
    """Check that a directory contains a model, not an adapter.

    Raises:
        ConfigError: It contains an adapter.
    """
    folder = Path(folder)
    if (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors")):
        label = f"model.checkpoint={folder}"
        base = read_json(folder / CONFIG, label, "").get("base_model_name_or_path")
        raise ConfigError(
            f"{label}: holds an adapter of {base}, not a model; export with lora=merged, or merge"
            " it with peft's merge_and_unload"
        )


def _holds_weights(file: Path) -> bool:
    """Return whether a file contains weights, or is the index of weight files."""
    return ".safetensors" in file.name and "processor" not in file.name


def _write_json(file: Path, contents: Mapping[str, object]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(contents, indent=2) + "\n")
