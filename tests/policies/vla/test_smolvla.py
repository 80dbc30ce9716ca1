"""SmolVLA: ``evaluate`` recomputes ``act``, what attends to what, files and export.

Agreement with lerobot is tested in tests/extras/test_lerobot.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_smolvla_checkpoint import CONFIG, write_checkpoint
from vla_policy_checks import check_evaluate_reproduces_act, flow_policy, random_observations

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, ObsSpec
from embodied_ppo.policies.vla import smolvla
from embodied_ppo.policies.vla.pi0 import KEYS
from embodied_ppo.policies.vla.smolvla import SmolVLA

C, A, B, H, N = 3, 2, 4, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((3,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "lift it", "go to the cup")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("smolvla") / "tiny")


def make(folder: Path, **options: Any) -> SmolVLA:
    return flow_policy(SmolVLA, folder, SPEC, SENTENCES, chunk=C, size=A, **options)


@pytest.mark.parametrize("trunk", [{}, {"freeze_trunk": True}, {"lora_rank": 4}], ids=str)
@pytest.mark.parametrize("chain", [{}, {"flow_chain": "sum", "flow_noise": "learned"}], ids=str)
def test_evaluate_reproduces_act(folder: Path, chain: Any, trunk: Any) -> None:
    policy = make(folder, **chain, **trunk)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    assert (KEYS in inputs) == ("freeze_trunk" in trunk)
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 1), rtol=1e-4)
    policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
    unused = "layers.3." if not trunk else ""  # of the last layer, only keys and values are read
    for name, p in policy.named_parameters():
        if p.requires_grad and "lora_" not in name and not name.startswith("value_head"):
            if not (unused and "language_model" in name):
                reached = p.grad is not None and p.grad.abs().max() > 0
                assert reached or "embed_tokens" in name or "post_layernorm" in name, name


def test_attention(folder: Path) -> None:
    """Later actions do not reach earlier ones; the state reaches no image or word."""
    policy = make(folder)
    obs = random_observations(SPEC, B, 0)
    context = policy.encode_context(policy.encode(obs))
    x, tau = torch.randn(B, H, N), torch.rand(B)
    v, _ = policy.field(context)(x, tau)
    changed = x.clone()
    changed[:, 4] += 1
    w, _ = policy.field(context)(changed, tau)
    assert torch.equal(v[:, :4], w[:, :4]) and (v[:, 4:] - w[:, 4:]).abs().min(0).values.max() > 0
    other = policy.encode_context(policy.encode(obs | {"state": obs["state"] + 1}))
    for before, after in zip(context.keys, other.keys, strict=True):
        assert torch.equal(before[:, :, :-1], after[:, :, :-1])
        assert not torch.equal(before[:, :, -1], after[:, :, -1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("attention_mode", "self_attn"), ("chunk_size", "12"), ("max_period", 0)),
        *(("vlm_config", []), ("resize_imgs_with_padding", [8, 8])),
    ],
)
def test_refused_configurations(key: str, value: Any, folder: Path, tmp_path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    with pytest.raises(ConfigError, match=re.escape(f"{key}={value}")):
        smolvla.read(damaged)


@pytest.mark.parametrize(("layers", "expected"), [(16, 16), (0, 32), (-1, 32), (40, 32)])
def test_number_of_layers(layers: int, expected: int) -> None:
    """Zero or less: all layers of SmolVLM2, as in lerobot, which has no more than these."""
    name = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    raw = {"vlm_model_name": name, "num_vlm_layers": layers}
    assert smolvla.vlm_config(raw, "x").text_config.num_hidden_layers == expected


def test_weights_of_another_shape_are_not_broadcast(folder: Path, tmp_path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.action_out_proj.bias"] = weights["model.action_out_proj.bias"][:1].clone()
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.action_out_proj.bias \[1\]"):
        smolvla.read(damaged)
