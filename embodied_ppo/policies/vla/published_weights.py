"""Weights of published directories: which files hold them, checks, reading and writing.

Each family maps the keys of its files to the parameters of its policy. A published tensor may
consist of several parameters (a fused projection), or be a slice of one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import yaml
from torch import Tensor

from embodied_envs.base.errors import ConfigError, join_names, show
from embodied_ppo.options import openpi_configs
from embodied_ppo.policies import checkpoint_files, peft_files

M = TypeVar("M")
# Substitutions (regular expression, replacement) of names, in order.
Patterns: TypeAlias = "Sequence[tuple[str, str]]"
# Types of weights in safetensors files that are read; others are quantised.
FLOATING = ("F64", "F32", "F16", "BF16")
_FILE = Path(__file__).with_name("published.yaml")
# Model -> its sizes, and the names of its weights.
TABLES: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))


class PublishedTensor(NamedTuple):
    """A published tensor: its shape and the slices of our parameters that it consists of."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]

    def read(self, tensor: Tensor) -> None:
        """Copy a published tensor into our parameters, converted to their type and device."""
        rows = tensor.reshape(-1, *self.parts[0].shape[1:])
        for part, row in zip(self.parts, rows.split([len(part) for part in self.parts])):
            part.copy_(row)

    def write(self) -> Tensor:
        """Return the published tensor; it shares memory with a parameter if it consists of one."""
        tensor = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return tensor.reshape(self.shape)


# Name -> published tensor.
Targets: TypeAlias = "Mapping[str, PublishedTensor]"
# Maps the keys of all files to names of targets, and leaves out the keys that no layer reads.
Rename: TypeAlias = "Callable[[Iterable[str]], Mapping[str, str]]"


# Type in config.json -> model.policy that reads it.
KINDS = {"pi0": "flow", "pi05": "flow", "smolvla": "flow", "openvla": "token"}


def read_kind(folder: Path, policy: str) -> tuple[str, dict[str, Any]]:
    """Return the type of a checkpoint directory and its config.json.

    Args:
        folder: The directory.
        policy: Value of ``model.policy``.

    Raises:
        ConfigError: config.json cannot be read, or another policy, or none, reads the type.
    """
    label = f"model.checkpoint={folder}"
    file, hint = peft_files.locate(folder, "config.json"), "hf download NAME --local-dir DIR"
    raw = checkpoint_files.read_json(file, label, f"download one ({hint})")
    kind = raw.get("model_type") or raw.get("type")
    if kind is None and "action_horizon" in raw:  # openpi's config.json names no type
        kind = openpi_configs.kind_of(read_headers(weight_files(peft_files.base_folder(folder))))
    reader, name = KINDS.get(str(kind)), kind
    if kind == "openvla" and any(folder.glob("action_head--*")):
        reader, name = "gaussian", "openvla with a regression head (action_head)"
    if reader == policy:
        return str(kind), raw
    if reader is not None:
        raise ConfigError(f"{label}: holds {name}; write model.policy={reader}")
    raise ConfigError(
        f"{label}: holds {show(kind)}; model.policy=flow reads π0, π0.5 and SmolVLA,"
        " model.policy=token OpenVLA and OpenVLA-OFT, gaussian OpenVLA-OFT's regression head"
    )


class Header(NamedTuple):
    """Place, shape and type of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def patterns(model: str, name: str) -> Patterns:
    """Return substitutions of TABLES."""
    return tuple((pattern, replacement) for pattern, replacement in TABLES[model][name])


def substitute(name: str, patterns: Patterns) -> str:
    """Return ``name`` after all substitutions."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the files that its index names.

    Raises:
        ConfigError: There are none, or one is missing.
    """
    label, index = f"model.checkpoint={folder}", folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise ConfigError(
            f"{label}: holds neither model.safetensors nor {index.name}; download it completely"
            " (other formats, .bin or .pt, can run code when they are read: convert them first)"
        )
    names = checkpoint_files.read_json(index, label, "").get("weight_map")
    problem = f"{label}: {index.name} has no usable weight_map: "
    with checkpoint_files.config_errors(problem, "; download it"):
        files = [folder / str(name) for name in sorted(set(dict(names or {}).values()))]
        for file in files:
            if file.parent != folder:
                raise ValueError(f"{file} lies outside")
            if not file.is_file():
                raise ValueError(f"{file} is missing")
    return files


def read_headers(files: Iterable[Path]) -> dict[str, Header]:
    """Return the headers of all tensors of safetensors files by their keys.

    Raises:
        ConfigError: A file is damaged.
    """
    from safetensors import safe_open

    headers: dict[str, Header] = {}
    for file in files:
        label = f"model.checkpoint={file.parent}: {file.name} cannot be read ("
        with (
            checkpoint_files.config_errors(label, "); download it again", kind=True),
            safe_open(file, framework="pt") as f,
        ):
            for key in f.keys():  # noqa: SIM118
                view = f.get_slice(key)
                headers[key] = Header(file, tuple(view.get_shape()), view.get_dtype())
    return headers


@torch.no_grad()
def load(
    folder: Path,
    build: Callable[[], tuple[M, Targets]],
    rename: Rename,
    optional: Sequence[str] = (),
) -> M:
    """Return a model with the weights of a directory; each target is filled exactly once.

    Args:
        folder: The directory.
        build: Builds the model and its targets. It is first called on the device meta: sizes that
            do not fit the files then allocate no memory.
        rename: Keys of the files -> names of targets.
        optional: Targets that the files may lack.

    Raises:
        ConfigError: The files are damaged, or hold the weights of another model.
    """
    from safetensors import safe_open

    headers = read_headers(weight_files(peft_files.base_folder(folder)))
    names = rename(headers)
    shapes = {name: headers[key].shape for key, name in names.items()}
    adapter = peft_files.Adapter(folder, shapes, rename)
    with torch.device("meta"):
        _, expected = build()
    _check(folder, headers, names, {name: x.shape for name, x in expected.items()}, optional)
    model, targets = build()
    for file in {header.file for header in headers.values()}:
        with safe_open(file, framework="pt") as tensors:
            for key, name in names.items():
                if headers[key].file == file:
                    tensor = adapter.apply(name, tensors.get_tensor(key))
                    checkpoint_files.check_finite([(key, tensor)], f"model.checkpoint={folder}")
                    targets[name].read(tensor)
    return model


def _check(
    folder: Path,
    headers: Mapping[str, Header],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Sequence[str],
) -> None:
    """Check that files hold exactly the weights of a model; arguments as in ``load``."""
    given = {names[key]: key for key in names}
    wrong, quantised = [], []
    for name, key in given.items():
        header, shape = headers[key], shapes.get(name)
        if shape is not None and header.shape != shape:
            wrong.append(f"{key} {list(header.shape)} instead of {list(shape)}")
        if header.dtype not in FLOATING:
            quantised.append(f"{key} {header.dtype}")
    problems = {
        "missing": [name for name in shapes if name not in given and name not in optional],
        "unexpected": [key for name, key in given.items() if name not in shapes],
        "of another shape": wrong,
        "not of a floating type (quantised?)": quantised,
    }
    text = "; ".join(
        f"{len(keys)} {problem}: {join_names(keys)}" for problem, keys in problems.items() if keys
    )
    if text:
        raise ConfigError(
            f"model.checkpoint={folder}: the weights are not those of the model that config.json"
            f" describes: {text}; use the files of one model"
        )


def save(targets: Targets, source: str | Path, out: str | Path, rename: Rename) -> None:
    """Write trained parameters in the layout of the directory that they were read from.

    All files of the directory are copied; weights are replaced by the targets of their name.

    Args:
        targets: Published tensors; those that stay as they are may be missing.
        source: The directory that the policy was built from.
        out: Directory to write.
        rename: Keys of the files -> names of targets.

    Raises:
        ConfigError: The directory has no weight for a target.
        OSError: A file cannot be read or written.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    source, out = Path(source), Path(out)
    base = peft_files.base_folder(source)
    files = weight_files(base)
    headers = read_headers(files)
    names = rename(headers)
    shapes = {name: headers[key].shape for key, name in names.items()}
    adapter = peft_files.Adapter(source, shapes, rename)
    if missing := sorted(set(targets) - set(names.values())):
        raise ConfigError(
            f"model.checkpoint={source}: has no weight {missing[0]} ({len(missing)} in all) that"
            " the policy has trained; export from the directory that the run was started with"
        )
    skipped = [file.name for file in files]
    if base != source:  # the files of the base model that the adapter's directory lacks
        skipped += [peft_files.CONFIG, peft_files.WEIGHTS, "lora_adapter"]
    copy: Any = {"ignore": lambda *_: skipped, "copy_function": shutil.copyfile}
    for folder in dict.fromkeys((base, source)):
        shutil.copytree(folder, out, dirs_exist_ok=True, **copy)
    for file in files:
        tensors, storages = dict[str, Tensor](), set[int]()
        with safe_open(file, framework="pt") as published:
            metadata = published.metadata()
            for key in published.keys():  # noqa: SIM118
                target = targets.get(names.get(key, ""))
                if target is None:
                    x = published.get_tensor(key)
                    tensors[key] = adapter.apply(names.get(key, ""), x).to(x.dtype)
                    continue
                x = target.write().detach()
                storage = x.untyped_storage()
                # safetensors refuses tensors that share memory (slices, tied weights).
                shared = storage.nbytes() != x.nbytes or storage.data_ptr() in storages
                if shared or not x.is_contiguous():
                    x = x.clone(memory_format=torch.contiguous_format)
                storages.add(storage.data_ptr())
                tensors[key] = x
        save_file(tensors, out / file.name, metadata=metadata)
    checkpoint_files.copy_permissions(out)
