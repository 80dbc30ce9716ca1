"""SmolVLA: ``evaluate`` recomputes ``act``, what attends to what, files and export.

Agreement with lerobot is tested in tests/extras/test_lerobot.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_smolvla_checkpoint import CONFIG, write_checkpoint
from vla_policy_checks import (
    check_evaluate_reproduces_act,
    perturb_new_parameters,
    random_observations,
)

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, ObsSpec
from embodied_ppo.models.vla import smolvla_files
from embodied_ppo.models.vla.pi0 import KEPT, KEYS
from embodied_ppo.models.vla.smolvla import SmolVLA

C, A, B, H, N = 3, 2, 4, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((3,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "lift it", "go to the cup")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("smolvla") / "tiny")


def make(folder: Path, **options: Any) -> SmolVLA:
    torch.manual_seed(0)
    config = ModelConfig(policy="flow", checkpoint=str(folder), **options)
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = SmolVLA(SPEC, box, config, chunk=C, sentences=SENTENCES)
    perturb_new_parameters(policy)
    return policy


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


def test_word_padding_has_no_effect(folder: Path) -> None:
    policy = make(folder)
    obs = random_observations(SPEC, B, 0) | {"instruction": torch.ones(B, dtype=torch.int64)}
    action = policy.act(policy.encode(obs)).action
    policy.set_sentences(SENTENCES[1:2] * 2)
    assert (policy.act(policy.encode(obs)).action - action).abs().max() < 1e-5


@pytest.mark.parametrize("trunk", [{}, {"freeze_trunk": True}, {"lora_rank": 4}], ids=str)
def test_export_and_read_again(folder: Path, trunk: Any, tmp_path: Path) -> None:
    policy = make(folder, **trunk)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    obs = random_observations(SPEC, B, 0)
    action = policy.act(policy.encode(obs)).action
    policy.export(folder, tmp_path / "out")
    again = make(tmp_path / "out")
    difference = (again.act(again.encode(obs)).action - action).abs().max()
    assert difference < 1e-5 if trunk.get("lora_rank") else difference == 0
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not torch.equal(
        before["model.action_out_proj.weight"], after["model.action_out_proj.weight"]
    )


def test_prefix_memory(folder: Path, tmp_path: Path) -> None:
    policy = make(folder, freeze_trunk=True)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    kept = sum(inputs[name].nbytes for name in KEPT) + 4 * N * B
    assert policy.prefix_bytes() * B == kept
    assert policy.kept_inputs(4, 32) == KEPT
    without = make(write_checkpoint(tmp_path / "t", statistics=False), freeze_trunk=True)
    assert without.kept_inputs(4, 32) == ()  # the prefix contains the normalised state


def test_refusals(tmp_path: Path) -> None:
    for number, (fields, message) in enumerate(
        (
            ({"attention_mode": "self_attn"}, "attention_mode=self_attn; supported is"),
            ({"self_attn_every_n_layers": 3}, "self_attn_every_n_layers=3; supported"),
            ({"vlm_model_name": "some/other"}, "vlm_model_name=some/other is"),
        )
    ):
        path = tmp_path / str(number)
        write_checkpoint(path)
        raw = CONFIG | fields
        if "vlm_model_name" in fields:
            del raw["vlm_config"]
        (path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=message):
            make(path)
    for layers in (6, 0, -1):  # the weights have 4; 0 and -1: all 32 layers of the model
        (path / "config.json").write_text(json.dumps(CONFIG | {"num_vlm_layers": layers}))
        with pytest.raises(ConfigError, match="the weights lack"):
            make(path)


@pytest.mark.parametrize(("layers", "expected"), [(16, 16), (0, 32), (-1, 32), (40, 32)])
def test_number_of_layers(layers: int, expected: int) -> None:
    """Zero or less: all layers of SmolVLM2, as in lerobot, which has no more than these."""
    name = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    raw = {"vlm_model_name": name, "num_vlm_layers": layers}
    assert smolvla_files.vlm_config(raw, "x").text_config.num_hidden_layers == expected


@pytest.mark.slow
def test_all_layers_of_the_model_are_read(tmp_path: Path) -> None:
    sizes = CONFIG["vlm_config"]
    sizes = sizes | {"text": sizes["text"] | {"num_hidden_layers": 6}}
    folder = write_checkpoint(tmp_path / "all", num_vlm_layers=0, vlm_config=sizes)
    policy = make(folder)
    assert len(policy.trunk.vlm.language_model.layers) == len(policy.expert.layers) == 6


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    value: float, folder: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.action_out_proj.bias"][2] = value
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weight model\.action_out_proj\.bias contains NaN"):
        smolvla_files.read(damaged)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("chunk_size", "12", "config.json has chunk_size=12; it must be a whole number >= 1"),
        ("num_vlm_layers", None, "num_vlm_layers=null; it must be a whole number"),
        ("max_period", 0, "max_period=0; it must be a finite number > 0"),
        ("max_action_dim", 9, "but config.json describes ["),
        ("vlm_config", [], "vlm_config=[]; it must be an object"),
    ],
)
def test_damaged_configurations_are_refused(
    key: str, value: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    with pytest.raises(ConfigError) as e:
        smolvla_files.read(damaged)
    assert str(e.value).startswith(f"model.checkpoint={damaged}: ") and message in str(e.value)


def test_weights_of_another_shape_are_not_broadcast(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.action_out_proj.bias"] = weights["model.action_out_proj.bias"][:1].clone()
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.action_out_proj.bias has the shape \[1\]"):
        smolvla_files.read(damaged)
