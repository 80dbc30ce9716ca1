"""Published sizes: parameters by hand, and equality with policies that have weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pi0_checkpoint
import tiny_smolvla_checkpoint
import tiny_vlm_checkpoints
import torch

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, ObsSpec
from embodied_ppo.models.vla import published
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pi05 import PI05
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.models.vla.smolvla import SmolVLA

pytest.importorskip("transformers")


class Spaces:
    """Two cameras, a state of eight numbers and actions of seven, in chunks."""

    instructions = ("pick up the bowl", "put it down")
    gripper_closes = 1.0

    def __init__(self, side: int = 224, chunk: int = 1, size: int = 7, state: int = 8) -> None:
        image = ArraySpec((3, side, side), torch.uint8)
        self.obs_spec: ObsSpec = {"state": ArraySpec((state,)), "front": image, "wrist": image}
        self.action_spec = Box((-1.0,) * size * chunk, (1.0,) * size * chunk)


def build(name: str, policy: str, **options: Any) -> Any:
    config = ModelConfig(policy=policy, checkpoint=f"published/{name}", **options)  # pyright: ignore
    return published.policy_of_sizes(Spaces(), config, chunk=1, values=1)


def parameters(policy: Any, *, trained: bool = False) -> int:
    return sum(p.numel() for p in policy.parameters() if p.requires_grad or not trained)


def linear(inputs: int, outputs: int) -> int:
    """Return the numbers of a linear layer with bias."""
    return inputs * outputs + outputs


def attention_layers(count: int, width: int, heads: int, keys: int, inner: int) -> int:
    """Return the numbers of Llama's or Gemma's layers; heads and keys: sizes of q and of k, v."""
    return count * (2 * width * (heads + keys) + 3 * width * inner + 2 * width)


def siglip(width: int, layers: int, inner: int, patch: int, tokens: int) -> int:
    layer = 4 * linear(width, width) + linear(width, inner) + linear(inner, width) + 4 * width
    return linear(3 * patch**2, width) + tokens * width + layers * layer + 2 * width


def value_head(width: int, hidden: int) -> int:
    return linear(width, hidden) + linear(hidden, 1)


SO400M = siglip(1152, 27, 4304, 14, 256)
PALIGEMMA = (
    SO400M
    + linear(1152, 2048)
    + attention_layers(18, 2048, 2048, 256, 16384)
    + 2048
    + 257152 * 2048
)
EXPERT = attention_layers(18, 1024, 2048, 256, 4096) + 1024
ACTIONS = linear(32, 1024) + linear(1024, 32)


def test_parameters_of_pi0() -> None:
    """3.24 G as published, without the expert's unused word embeddings, and a value head."""
    policy = build("pi0", "flow", freeze_trunk=True)
    own = ACTIONS + linear(32, 1024) + linear(2048, 1024) + linear(1024, 1024)
    head = value_head(2048 + 32, 4 * (2048 + 32))
    assert parameters(policy, trained=True) == EXPERT + own + head
    assert parameters(policy) == PALIGEMMA + EXPERT + own + head
    assert round((PALIGEMMA + EXPERT + own) / 1e9, 2) == 3.24


def test_parameters_of_pi05() -> None:
    """Each of 37 norms is a linear layer to scale, shift and gate instead of one scale."""
    policy = build("pi05", "flow", freeze_trunk=True)
    norms = 37 * (linear(1024, 3 * 1024) - 1024)
    own = ACTIONS + 2 * linear(1024, 1024) + norms
    head = value_head(2048 + 32, 4 * (2048 + 32))
    assert parameters(policy) == PALIGEMMA + EXPERT + own + head


def test_parameters_of_smolvla() -> None:
    """450 M as published, with the language head of 49,280 words."""
    policy = build("smolvla", "flow", freeze_trunk=True)
    vlm = siglip(768, 12, 3072, 16, 1024) + 768 * 16 * 960
    vlm += attention_layers(16, 960, 960, 320, 2560) + 960 + 49280 * 960 + linear(32, 960)
    # Keys and values of every second layer have the width of the trunk's.
    expert = attention_layers(16, 720, 960, 320, 2048) + 720 + 8 * 2 * 320 * (320 - 720)
    own = linear(32, 720) + linear(1440, 720) + linear(720, 720) + linear(720, 32)
    head = value_head(960 + 32, 4 * (960 + 32))
    assert parameters(policy, trained=True) == expert + own + head
    assert parameters(policy) == vlm + expert + own + head
    assert round((vlm + expert + own + 49280 * 960) / 1e6) == 450


@pytest.mark.slow
def test_parameters_of_openvla() -> None:
    """7.54 G as published, adapters of rank 32 on seven layers of each block, and a value head."""
    policy = build("openvla", "token", lora_rank=32, dtype="bfloat16", decode="parallel")
    llama = attention_layers(32, 4096, 4096, 4096, 11008) + 4096 + 2 * 32064 * 4096
    layer = 4 * linear(1024, 1024) + linear(1024, 4096) + linear(4096, 1024) + 6 * 1024
    dino = linear(3 * 14**2, 1024) + (1 + 4 + 257) * 1024 + 24 * layer + 2 * 1024
    pool = 1152 + 4 * linear(1152, 1152) + 2 * 1152 + linear(1152, 4304) + linear(4304, 1152)
    projector = linear(2176, 8704) + linear(8704, 4096) + linear(4096, 4096)
    base = llama + dino + SO400M + pool + projector
    adapters = 32 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    head = value_head(4096, 512)
    assert parameters(policy, trained=True) == adapters + head
    assert parameters(policy) == base + adapters + head
    assert round(base / 1e9, 2) == 7.54


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "openvla"])
def test_sizes_equal_those_of_weights(kind: str, tmp_path: Path) -> None:
    """Names, shapes, types and training of all parameters, with and without adapters."""
    folder = tmp_path / kind
    if kind == "openvla":
        tiny_vlm_checkpoints.write_checkpoint(kind, folder)
    elif kind == "smolvla":
        tiny_smolvla_checkpoint.write_checkpoint(folder)
    else:
        tiny_pi0_checkpoint.write_checkpoint(folder, kind=kind)
    env = Spaces(16, 2, 2, 3)
    classes: dict[str, Any] = {"pi0": PI0, "pi05": PI05, "smolvla": SmolVLA}
    for rank in (0, 4):
        policy = "token" if kind == "openvla" else "flow"
        options: dict[str, Any] = {"lora_rank": rank, "dtype": "bfloat16"}
        if kind == "openvla":
            options |= {"decode": "parallel", "unnorm_key": "tabletop", "bins": 16}
        config = ModelConfig(policy=policy, checkpoint=str(folder), **options)  # pyright: ignore
        loaded = classes.get(kind, CheckpointVLA)(
            env.obs_spec, env.action_spec, config, chunk=2, sentences=env.instructions
        )
        sizes = published.policy_of_sizes(env, config, chunk=2, values=1)
        described, expected = (
            {n: (p.shape, p.dtype, p.requires_grad) for n, p in x.named_parameters()}
            for x in (sizes, loaded)
        )
        assert described == expected


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean pi0"):
        published.fields("published/pi00")
    with pytest.raises(ConfigError, match=r"published/NAME before the download: pi0, pi05"):
        published.fields(str(tmp_path / "none"))
