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
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import CheckpointError, ConfigError, show
from embodied_ppo.policies import checkpoint_files
from embodied_ppo.policies.checkpoint_files import check_supported, config_errors, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # path of the publisher's model in the ``PeftModel`` that wraps it
# Parts of adapters' parameter names, which the adapter's name, "default", follows in ours.
ADAPTERS = (".lora_A.", ".lora_B.")
# Values of fields of adapter_config.json that ``Adapter`` reads, the default first. Most other
# initialisations (PiSSA, OLoRA, CorDA, LoftQ) change the weights of the base model.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    **dict.fromkeys(("use_dora", "use_qalora", "fan_in_fan_out", "lora_bias"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(("layer_replication", "megatron_config", "trainable_token_indices"), (None,)),
    **dict.fromkeys(("target_parameters", "alora_invocation_tokens"), (None,)),
}


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
    checkpoint_files.copy_permissions(out)


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


def adapter_folder(folder: Path) -> Path | None:
    """Return the directory of an adapter in ``folder``; None: ``folder`` holds a whole model.

    OpenVLA-OFT's training writes the adapter into ``lora_adapter``. Its published models hold one,
    too, beside the merged weights.
    """
    if any(folder.glob("model*.safetensors*")) or any(folder.glob("pytorch_model*.bin*")):
        return None
    return next((x for x in (folder, folder / "lora_adapter") if (x / CONFIG).is_file()), None)


def base_folder(folder: Path) -> Path:
    """Return the directory of an adapter's base model, or ``folder`` if it holds a whole model.

    Raises:
        ConfigError: The adapter names no local directory.
    """
    adapter = adapter_folder(folder)
    if adapter is None:
        return folder
    label = f"model.checkpoint={folder}"
    if folder.name == "lora_adapter" and any(folder.parent.glob("*--*_checkpoint.pt")):
        raise ConfigError(f"write model.checkpoint={folder.parent}: {folder} lacks its heads")
    base = read_json(adapter / CONFIG, label, "").get("base_model_name_or_path")
    if not isinstance(base, str) or not (Path(base) / "config.json").is_file():
        raise ConfigError(
            f"{label}: write the directory of the base model as base_model_name_or_path into"
            f" {adapter / CONFIG}: {show(base)} is no local directory with a config.json"
        )
    return Path(base)


def locate(folder: Path, name: str) -> Path:
    """Return the path of a file in ``folder``, or in the directory of the adapter's base model."""
    return folder / name if (folder / name).exists() else base_folder(folder) / name


class Adapter:
    """Changes that the adapter of a directory makes to the base model; none without an adapter.

    With s = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023, arXiv
    2312.03732), W becomes W + s B A, in float32. Weights of ``modules_to_save`` replace those of
    the base model.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        rename: Callable[[Iterable[str]], Mapping[str, str]],
    ) -> None:
        """Read and check the adapter.

        Args:
            folder: Value of model.checkpoint.
            shapes: Names of the base model's targets -> shapes of their published weights.
            rename: Published keys -> names of targets, see ``published_weights.Rename``.

        Raises:
            ConfigError: The adapter is damaged, of an unsupported kind, or of another model.
        """
        from safetensors.torch import load_file

        self.tensors = dict[str, dict[str, Tensor]]()
        adapter = adapter_folder(folder)
        if adapter is None:
            return
        label = f"model.checkpoint={folder}: "
        raw = read_json(adapter / CONFIG, label.removesuffix(": "), "")
        for name, supported in SUPPORTED.items():
            hint = f"{label}merge it with peft's merge_and_unload: {CONFIG} has "
            check_supported(hint, name, raw.get(name) or supported[0], *supported)
        with config_errors(f"{label}its adapter cannot be read (", "); download it", kind=True):
            rank, alpha = int(raw["r"]), float(raw["lora_alpha"])
            self.scale = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
            stored = load_file(adapter / WEIGHTS)
        for key, x in stored.items():
            part = next((part for part in ADAPTERS if part in key), "")
            weight = key.removeprefix(PREFIX)
            weight = weight.replace(part, ".") if part else weight
            name = rename([weight]).get(weight, weight)
            shape = shapes.get(name, ())
            if part and len(shape) == 2:
                shape = (rank, shape[1]) if part == ADAPTERS[0] else (shape[0], rank)
            if x.shape != shape:
                raise ConfigError(
                    f"{label}its adapter is of another base model or kind: {key} has the shape"
                    f" {list(x.shape)}, and the base model allows {list(shape) or 'no such weight'}"
                )
            self.tensors.setdefault(name, {})[part] = x
        for name, parts in self.tensors.items():
            if parts.keys() not in ({""}, set(ADAPTERS)):
                raise ConfigError(
                    f"{label}its adapter has only a part of {name}; download it again"
                )

    def apply(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of the base model, by its target's name, with the adapter added."""
        parts = self.tensors.get(name)
        if parts is None:
            return weight
        if "" in parts:
            return parts[""]
        a, b = (parts[part].float() for part in ADAPTERS)
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + b @ a * self.scale


def _holds_weights(file: Path) -> bool:
    """Return whether a file contains weights, or is the index of weight files."""
    name = file.name
    return (".safetensors" in name and "processor" not in name) or name.startswith("pytorch_model")


def _write_json(file: Path, contents: Mapping[str, object]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(contents, indent=2) + "\n")
