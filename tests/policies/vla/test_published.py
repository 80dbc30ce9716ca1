"""Published sizes: parameters by hand, and equality with policies that have weights."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_openvla_checkpoint
import tiny_pi0_checkpoint
import tiny_smolvla_checkpoint
import torch

from embodied_envs.types import ArraySpec, Box, ObsSpec
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla import published
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pi05 import PI05
from embodied_ppo.policies.vla.pretrained import CheckpointVLA
from embodied_ppo.policies.vla.smolvla import SmolVLA

pytest.importorskip("transformers")


class Spaces:
    """Two cameras, a state of eight numbers and actions of seven, in chunks."""

    instructions = ("pick up the bowl", "put it down")
    gripper_closes = 1.0

    def __init__(self, side: int = 224, chunk: int = 1, size: int = 7, state: int = 8) -> None:
        image = ArraySpec((3, side, side), torch.uint8)
        self.obs_spec: ObsSpec = {"state": ArraySpec((state,)), "front": image, "wrist": image}
        self.action_spec = Box((-1.0,) * size * chunk, (1.0,) * size * chunk)


def parameters(policy: Any, *, trained: bool = False) -> int:
    return sum(p.numel() for p in policy.parameters() if p.requires_grad or not trained)


def linear(inputs: int, outputs: int) -> int:
    """Return the numbers of a linear layer with bias."""
    return inputs * outputs + outputs


def siglip(width: int, layers: int, inner: int, patch: int, tokens: int) -> int:
    layer = 4 * linear(width, width) + linear(width, inner) + linear(inner, width) + 4 * width
    return linear(3 * patch**2, width) + tokens * width + layers * layer + 2 * width


@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla", "openvla"])
def test_sizes_equal_those_of_weights(kind: str, tmp_path) -> None:
    """Names, shapes, types and training of all parameters, with and without adapters."""
    folder = tmp_path / kind
    if kind == "openvla":
        tiny_openvla_checkpoint.write_checkpoint(folder)
    elif kind == "smolvla":
        tiny_smolvla_checkpoint.write_checkpoint(folder)
    else:
        tiny_pi0_checkpoint.write_checkpoint(folder, kind=kind)
    env = Spaces(16, 2, 2, 3)
    if kind == "pi0":
        env.obs_spec = ArraySpec((3, 16, 16), torch.uint8)  # one image, not a dictionary
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
        sizes = published.policy_of_sizes(
            env, config, chunk=2, values=1, sentences=env.instructions
        )
        described, expected = (
            {n: (p.shape, p.dtype, p.requires_grad) for n, p in x.named_parameters()}
            for x in (sizes, loaded)
        )
        assert described == expected
