"""Build policies with the sizes of published models and without weights, to plan runs.

``policy_of_sizes`` builds a policy from the fields of config.json. Its parameters are fake tensors:
they have shapes and types, but no memory and no values. ``CONFIGS`` contains these fields for the
published models, so that ``model.checkpoint=published/pi0`` needs no file.

Source of the sizes: lerobot (pi0, pi05 and their Gemma variants, SmolVLA), openvla/openvla-7b.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.errors import choose
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import config_errors, read_json
from embodied_ppo.models.vla import openvla, openvla_files, pi0_files, pi05_model, smolvla_files
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pi0_files import PromptTokenizer, Published, Statistics
from embodied_ppo.models.vla.pi05 import PI05
from embodied_ppo.models.vla.pretrained import CheckpointVLA, OpenVLA
from embodied_ppo.models.vla.smolvla import SmolVLA

PREFIX = "published/"
"""Prefix of the values of model.checkpoint that name an entry of CONFIGS."""
CONFIGS: dict[str, dict[str, Any]] = {
    "pi0": {"type": "pi0"},
    "pi05": {"type": "pi05"},
    "smolvla": {
        "type": "smolvla",
        "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    },
    "openvla": {
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
    },
}
"""Name -> fields of its config.json; the defaults of missing fields are the published values."""
RECIPES = {
    "pi0_libero": "pi0",
    "pi05_libero": "pi05",
    "smolvla_libero": "smolvla",
    "openvla_7b": "openvla",
    "openvla_oft": "openvla",
}
"""Shipped recipe -> entry of CONFIGS that planning uses if model.checkpoint is ``???``."""
_FLOW: dict[str, type[PI0]] = {"pi0": PI0, "pi05": PI05, "smolvla": SmolVLA}


def fields(checkpoint: str) -> dict[str, Any]:
    """Return the fields of config.json of ``published/NAME`` or of a directory.

    Raises:
        ConfigError: The model or the directory does not exist.
    """
    if not checkpoint.startswith(PREFIX):
        cure = f"plan with {PREFIX}NAME before the download: {', '.join(CONFIGS)}"
        return read_json(Path(checkpoint) / "config.json", f"model.checkpoint={checkpoint}", cure)
    name = checkpoint.removeprefix(PREFIX)
    if name not in CONFIGS:
        raise ConfigError(
            f"model.checkpoint={checkpoint}: {choose(name, list(CONFIGS), 'published sizes: ')}"
        )
    return dict(CONFIGS[name])


def can_build(checkpoint: str) -> bool:
    """Return whether ``policy_of_sizes`` can build this kind of model."""
    raw = fields(checkpoint)
    return str(raw.get("type") or raw.get("model_type")) in (*_FLOW, "openvla")


def policy_of_sizes(
    env: Any, config: ModelConfig, *, chunk: int, values: int, mapping: str = "none"
) -> PI0 | CheckpointVLA:
    """Return a policy on the CPU whose parameters are fake tensors.

    Args:
        env: Spaces of the environment, see ``EnvDescription``.
        config: Options of the section ``model``; ``checkpoint`` as for ``fields``.
        chunk: Actions of a chunk.
        values: Outputs of the value head.
        mapping: Value of env.action_mapping.

    Raises:
        ConfigError: The task, the options and the sizes are not compatible.
    """
    assert config.checkpoint is not None
    raw = fields(config.checkpoint)
    kind = str(raw.get("type") or raw.get("model_type"))
    sentences: Sequence[str] = getattr(env, "instructions", ())
    options: dict[str, Any] = {
        "chunk": chunk,
        "sentences": sentences,
        "mapping": mapping,
        "values": values,
    }
    policy: PI0 | CheckpointVLA
    if kind in _FLOW:
        published = flow_sizes(raw, config.checkpoint, env, chunk)
        policy = _FLOW[kind](env.obs_spec, env.action_spec, config, published, **options)
    else:
        closes = getattr(env, "gripper_closes", None)
        policy = _OpenVLASizes(env.obs_spec, env.action_spec, config, closes=closes, **options)
    _replace_meta_tensors(policy)
    return policy


def flow_sizes(
    raw: Mapping[str, Any], checkpoint: str, env: Any, chunk: int, *, device: str = "meta"
) -> Published:
    """Return what is read from the directory of a flow model, with new instead of stored weights.

    Args:
        raw: Fields of config.json.
        checkpoint: The directory, for error messages.
        env: Spaces of the environment.
        chunk: Actions of a chunk.
        device: Device of the model's new weights; "meta": they have no memory.
    """
    label, folder = f"model.checkpoint={checkpoint}", Path(checkpoint)
    words = raw.get("tokenizer_max_length") or pi0_files.MAX_WORDS
    with config_errors(f"{label}: config.json is refused: "):
        if raw.get("type") == "smolvla":
            sizes = smolvla_files.vlm_config(raw, label)
            with torch.device(device):
                model: Any = smolvla_files.Model(raw, sizes)
        else:
            sizes = pi0_files.read_config(raw, folder)
            model_class = pi05_model.model_class() if raw.get("type") == "pi05" else None
            if model_class is None:
                from transformers import PI0ForConditionalGeneration as model_class
            with torch.device(device):
                model = model_class(sizes)
    tokenize: Any = PromptTokenizer(_WordCounter(), words, clean=False)
    if raw.get("type") == "smolvla":
        tokenize = _smolvla_tokenizer(words)
    # With statistics, as in published directories, no running normaliser changes the prefix.
    vectors = [s for s in dict(env.obs_spec).values() if len(s.shape) == 1]
    numbers = sum(s.shape[0] for s in vectors)
    action = Statistics([0.0] * (env.action_spec.size // chunk), [1.0])
    action.std = action.std.expand_as(action.mean)
    state = Statistics(torch.zeros(numbers), torch.ones(numbers)) if numbers else None
    return Published(model, tokenize, state, action, antialias=False)


class _WordCounter:
    """Tokenizer with one token per word, digit, space before a digit, and punctuation mark.

    The ids are arbitrary. A published tokenizer splits some words into several tokens, so it may
    return longer sequences.
    """

    bos_token_id = 2

    def __call__(self, text: str, **_: Any) -> Any:
        parts = re.findall(r"\d|\s(?=\d)|[^\W\d]+|[^\w\s]|\n", text)
        return SimpleNamespace(input_ids=[3 + zlib.crc32(part.encode()) % 200 for part in parts])


def _smolvla_tokenizer(words: int) -> Any:
    """Return a function that tokenizes a prompt of SmolVLA, at most ``words`` tokens."""
    counter = _WordCounter()
    return lambda sentence: counter(sentence.removesuffix("\n") + "\n").input_ids[:words]


class _OpenVLASizes(CheckpointVLA):
    """OpenVLA with parameters on the meta device."""

    def _open(self, config: ModelConfig) -> Any:
        """Return the model without reading weights."""
        assert config.checkpoint is not None
        raw = fields(config.checkpoint)
        key = config.unnorm_key or "any"
        sizes = openvla_files.read_config(raw)
        bounds = {"q01": [-1.0] * self.size, "q99": [1.0] * self.size}
        bounds["mask"] = [*[True] * (self.size - 1), False]
        sizes = replace(sizes, norm_stats={key: {"action": bounds}})
        self.actions = openvla_files.ActionTokens.from_config(sizes, key)
        dtype = self.dtype if self.rank else torch.float32
        body = openvla.OpenVLABody(sizes, dtype=dtype, device="meta")
        body.recompute = config.gradient_checkpointing
        body.center_crop, body.stop_token = config.center_crop, not config.omit_stop_token
        counter = _WordCounter()

        def tokenize(text: str) -> list[int]:
            return [openvla.BOS, *counter(text).input_ids]

        return OpenVLA(body, tokenize, actions=self.chunk * self.size)

    def set_base_weights(self, folder: str | Path) -> None:
        """Do nothing, because there are no weights to compare."""


def _replace_meta_tensors(module: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake tensors on the CPU, in place."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies: dict[int, Any] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in copies:
                    with mode:
                        empty = torch.empty(p.shape, dtype=p.dtype)
                    copies[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
                part._parameters[name] = copies[id(p)]
        for name, x in part._buffers.items():
            if x is not None and x.is_meta:
                with mode:
                    part._buffers[name] = torch.empty(x.shape, dtype=x.dtype)
