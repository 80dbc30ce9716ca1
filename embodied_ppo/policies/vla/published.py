"""Build policies with the sizes of published models and without weights, to plan runs.

``policy_of_sizes`` builds a policy from the fields of config.json. Its parameters are fake tensors:
they have shapes and types, but no memory and no values. ``CONFIGS`` contains these fields for the
published models, so that ``model.checkpoint=published/pi0`` needs no file.

Source of the sizes: lerobot (pi0, pi05 and their Gemma variants, SmolVLA), openvla/openvla-7b.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from embodied_envs.base.errors import ConfigError, choose
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import peft_files
from embodied_ppo.policies.checkpoint_files import read_json
from embodied_ppo.policies.initialization import replace_meta_tensors
from embodied_ppo.policies.vla import openvla, openvla_files, pi0_files, pretrained
from embodied_ppo.policies.vla.openvla_heads import ActionHead, StateProjector
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pi0_files import PromptTokenizer, Published, Statistics
from embodied_ppo.policies.vla.pi05 import PI05
from embodied_ppo.policies.vla.published_weights import TABLES
from embodied_ppo.policies.vla.smolvla import SmolVLA

PREFIX = "published/"  # prefix of the values of model.checkpoint that name an entry of CONFIGS
# Name -> fields of its config.json; the defaults of missing fields are the published values.
CONFIGS: dict[str, dict[str, Any]] = TABLES["configs"]
# Shipped recipe -> entry of CONFIGS that planning uses if model.checkpoint is ``???``.
RECIPES: dict[str, str] = TABLES["recipes"]
# Policies of published flow models by the result of ``published_weights.read_kind``.
FLOW_FAMILIES: dict[str, type[PI0]] = {"pi0": PI0, "pi05": PI05, "smolvla": SmolVLA}


def fields(checkpoint: str) -> dict[str, Any]:
    """Return the fields of config.json of ``published/NAME`` or of a directory.

    Raises:
        ConfigError: The model or the directory does not exist.
    """
    if not checkpoint.startswith(PREFIX):
        hint = f"plan with {PREFIX}NAME before the download: {', '.join(CONFIGS)}"
        file = peft_files.locate(Path(checkpoint), "config.json")
        return read_json(file, f"model.checkpoint={checkpoint}", hint)
    name = checkpoint.removeprefix(PREFIX)
    if name not in CONFIGS:
        raise ConfigError(
            f"model.checkpoint={checkpoint}: {choose(name, list(CONFIGS), 'published sizes: ')}"
        )
    return dict(CONFIGS[name])


def _kind(raw: Mapping[str, Any]) -> str:
    """Return the type that a config.json names."""
    return str(raw.get("type") or raw.get("model_type"))


def can_build(checkpoint: str) -> bool:
    """Return whether ``policy_of_sizes`` can build this kind of model."""
    return _kind(fields(checkpoint)) in (*FLOW_FAMILIES, "openvla")


def policy_of_sizes(
    env: Any, config: ModelConfig, **options: Any
) -> PI0 | pretrained.CheckpointVLA | pretrained.RegressionVLA:
    """Return a policy on the CPU whose parameters are fake tensors.

    Args:
        env: Spaces of the environment, see ``EnvInfo``.
        config: Options of the section ``model``; ``checkpoint`` as for ``fields``.
        options: Further arguments of the policy's constructor.

    Raises:
        ConfigError: The task, the options and the sizes are not compatible.
    """
    assert config.checkpoint is not None
    raw = fields(config.checkpoint)
    spaces, policy_class = (env.obs_spec, env.action_spec, config), FLOW_FAMILIES.get(_kind(raw))
    policy: PI0 | pretrained.CheckpointVLA | pretrained.RegressionVLA
    if policy_class is not None:
        policy = policy_class(*spaces, flow_sizes(policy_class, raw, config), **options)
    else:
        sizes_class = _TokenSizes if config.policy == "token" else _RegressionSizes
        policy = sizes_class(*spaces, closes=env.gripper_closes, **options)
    replace_meta_tensors(policy)
    return policy


def flow_sizes(policy_class: type[PI0], raw: Mapping[str, Any], config: ModelConfig) -> Published:
    """Return what is read from the directory of a flow model, with a model on the device meta.

    Args:
        policy_class: Class of the family.
        raw: Fields of config.json.
        config: Options of the section ``model``.
    """
    words = raw.get("tokenizer_max_length") or pi0_files.MAX_WORDS["pi0"]
    with torch.device("meta"):
        model = policy_class.build_model(raw, str(config.checkpoint))
    tokenize = PromptTokenizer(_WordCounter(), words, clean=False)
    # With statistics, as in published directories, no running normaliser changes the prefix.
    largest = model.config.max_state_dim, model.config.max_action_dim
    state, action = (Statistics(torch.zeros(n), torch.zeros(n)) for n in largest)
    # Names of openpi's configurations are for its directories, which do not record these two.
    known: Any = None if config.config_name else True
    relative = () if known else None
    return Published(model, tokenize, state, action, False, relative, discrete_state=known)


class _WordCounter:
    """Tokenizer with one token per word, digit, space before a digit, and punctuation mark.

    The ids are arbitrary. A published tokenizer splits some words into several tokens, so it may
    return longer sequences.
    """

    bos_token_id = 2

    def __call__(self, text: str, **_: Any) -> Any:
        parts = re.findall(r"\d|\s(?=\d)|[^\W\d]+|[^\w\s]|\n", text)
        return SimpleNamespace(input_ids=[3 + zlib.crc32(part.encode()) % 200 for part in parts])


class _OpenVLASizes(pretrained.PublishedVLA):
    """OpenVLA with parameters on the meta device."""

    def _load(
        self, config: ModelConfig, dtype: torch.dtype
    ) -> tuple[openvla.OpenVLABody, pretrained.Tokenize]:
        """Return the networks without reading weights, with statistics of any task."""
        sizes = openvla_files.read_config(fields(str(config.checkpoint)))
        bounds = {"q01": [-1.0] * self.size, "q99": [1.0] * self.size}
        bounds["mask"] = [*[True] * (self.size - 1), False]
        state = {"q01": [-1.0], "q99": [1.0]}
        stats = {config.unnorm_key or "any": {"action": bounds, "proprio": state}}
        sizes = replace(sizes, norm_stats=stats)
        with torch.device("meta"):
            body = openvla.OpenVLABody(sizes, dtype=dtype)
        counter = _WordCounter()
        return body, lambda text: [openvla.BOS, *counter(text).input_ids]

    def set_base_weights(self, folder: str | Path, option: str = "model.checkpoint") -> None:
        """Do nothing: there are no files whose digest a checkpoint could hold."""

    def _load_heads(self, folder: Path, vectors: int) -> dict[str, nn.Module]:
        """Return the modules that the policy has, without reading weights."""
        width = self.body.hidden_size
        with torch.device("meta"):
            heads: dict[str, nn.Module] = {}
            if isinstance(self, pretrained.RegressionVLA):
                heads["action_head"] = ActionHead(width, self.size)
            if vectors:
                heads["proprio_projector"] = StateProjector(width, vectors)
        return heads


class _TokenSizes(_OpenVLASizes, pretrained.CheckpointVLA):
    """The same with action tokens."""


class _RegressionSizes(_OpenVLASizes, pretrained.RegressionVLA):
    """The same with the regression head."""
