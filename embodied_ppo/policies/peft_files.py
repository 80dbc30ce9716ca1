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


def save(
    parameters: Mapping[str, Tensor],
    source: str | Path,
    out: str | Path,
    *,
    rank: int,
    alpha: float,
    task: str | None = None,
) -> None:
    """Write an adapter of the model in ``source``; without ``task``, copy the other files except
    weights, and add ``use_peft`` to lerobot's config.json, so that it reads model and adapter.

    Args:
        parameters: Weights by their names in the publisher's model, ``M.lora_A.weight``.
        source: Directory of the base model; its absolute path is stored.
        out: Directory to write.
        rank: Rank of the adapters.
        alpha: Scale of the adapters, see ``lora.LoRALinear``.
        task: Task of a model of transformers, in peft's names. Nothing is copied, because
            transformers takes a directory with config.json for a whole model.

    Raises:
        OSError: A file cannot be read or written.
    """
    from safetensors.torch import save_file

    source, out = Path(source).resolve(), Path(out)
    if task is None:
        ignored = [f.name for f in source.iterdir() if _holds_weights(f)]
        copy = {"ignore": lambda *_: ignored, "copy_function": shutil.copyfile}
        shutil.copytree(source, out, dirs_exist_ok=True, **copy)
        raw = read_json(out / "config.json", f"model.checkpoint={source}", "download it again")
        if "type" in raw:
            _write_json(out / "config.json", raw | {"use_peft": True})
    modules = {False: set[str](), True: set[str]()}
    for name in parameters:
        adapted = any(part in name for part in ADAPTERS)
        modules[adapted].add(name.rsplit(".", 2 if adapted else 1)[0])
    _write_json(
        out / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": str(source),
            "r": rank,
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": sorted(modules[True]),
            "modules_to_save": sorted(modules[False]) or None,
        },
    )
    tensors = {PREFIX + name: x.detach().contiguous() for name, x in parameters.items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    copy_permissions(out)


@torch.no_grad()
def load_into(parameters: Mapping[str, Tensor], folder: str | Path) -> None:
    """Copy an adapter that ``save`` wrote into a policy that has adapters of the same rank.

    Args:
        parameters: Name in the publisher's model -> trained parameter of the policy.
        folder: Directory of the adapter.

    Raises:
        CheckpointError: The adapter has other parameter names.
        OSError: The weights cannot be read.
    """
    from safetensors.torch import load_file

    stored = load_file(Path(folder) / WEIGHTS)
    names = {PREFIX + name: name for name in parameters}
    if different := sorted(stored.keys() ^ names.keys()):
        fact = f"{different[0]}: missing or unexpected in the adapter ({len(different)} in all)"
        raise CheckpointError(f"{fact}; use the model that it was trained with")
    for key, name in names.items():
        parameters[name].copy_(stored[key])


def check_no_adapter(folder: str | Path) -> None:
    """Check that a directory contains a model, not an adapter.

    Raises:
        ConfigError: It contains an adapter.
    """
    folder = Path(folder)
    if (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors")):
        label = f"model.checkpoint={folder}"
        base = read_json(folder / CONFIG, label, "").get("base_model_name_or_path")
        hint = f"{label}: holds an adapter of {base}, not a model; export with lora=merged"
        raise ConfigError(f"{hint}, or merge it with peft's merge_and_unload")


def _holds_weights(file: Path) -> bool:
    """Return whether a file contains weights, or is the index of weight files."""
    return ".safetensors" in file.name and "processor" not in file.name


def _write_json(file: Path, contents: Mapping[str, object]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(contents, indent=2) + "\n")
