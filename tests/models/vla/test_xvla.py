"""X-VLA: ``evaluate`` recomputes ``act``, the chain's formula, what is read, files and export.

Agreement with lerobot is tested in tests/extras/test_lerobot.py.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import run_command
from safetensors.torch import load_file, save_file
from tiny_xvla_checkpoint import CONFIG, write_checkpoint
from vla_policy_checks import (
    check_evaluate_reproduces_act,
    perturb_new_parameters,
    random_observations,
)

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, ObsSpec
from embodied_ppo.models import peft_files
from embodied_ppo.models.vla import xvla_files
from embodied_ppo.models.vla.pi0 import KEPT, KEYS
from embodied_ppo.models.vla.xvla import XVLA

C, A, B, H, N = 3, 2, 4, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((3,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "lift it", "go to the cup")
TRUNKS = [{}, {"freeze_trunk": True}, {"lora_rank": 4}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("xvla") / "tiny")


def make(folder: Path, *, size: int = A, spec: Any = SPEC, **options: Any) -> XVLA:
    torch.manual_seed(0)
    config = ModelConfig(policy="flow", checkpoint=str(folder), **options)
    box = Box((-1.0,) * (C * size), (1.0,) * (C * size))
    policy = XVLA(spec, box, config, chunk=C, sentences=SENTENCES)
    perturb_new_parameters(policy)
    return policy


def perturb(policy: XVLA) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))


@pytest.mark.parametrize("trunk", TRUNKS, ids=str)
@pytest.mark.parametrize("chain", [{}, {"flow_chain": "sum", "flow_noise": "learned"}], ids=str)
def test_evaluate_reproduces_act(folder: Path, chain: Any, trunk: Any) -> None:
    policy = make(folder, **chain, **trunk)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    assert (KEYS in inputs) == ("freeze_trunk" in trunk)
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 1), rtol=1e-4)
    policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
    other = (policy.domain + 1) % 4  # the layers of other domains, and what only they could reach
    for name, p in policy.named_parameters():
        if p.requires_grad and "lora_" not in name and not name.startswith("value_head"):
            reached = p.grad is not None and p.grad.abs().max() > 0
            unread = "aux_visual_proj.weight"  # there is one view
            assert reached or name.endswith(unread), name
            if name.startswith(("embed.", "velocity.", "expert.soft_prompt_hub")):
                assert p.grad is not None and p.grad[other].abs().max() == 0


def test_chain_by_hand(folder: Path) -> None:
    """x' = t' e + (1 - t') a(x, t) with the initial noise e, as lerobot; the last x' is a."""
    policy = make(folder, flow_steps=3)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    field = policy.field(policy.encode_context(inputs))
    e = policy.initial_noise[:, :N].expand(B, -1, -1)
    a = torch.zeros_like(e)
    for i in (3, 2, 1):
        t = i / 3
        a, _ = field(e * t + a * (1 - t), torch.full((B,), t))
    action = policy.act(inputs).action.view(B, C, A)
    assert (action - a[:, :C, :A]).abs().max() < 1e-5


def test_stochastic_step_by_hand(folder: Path) -> None:
    """At t = 2/3 of 3 steps with eta = 0.5: var = 0.25 / 3 * (2/3) / (1/3) = 1/6.

    The mean is (2/3) a + (1/3 - (1/6) / (4/3)) e = (2/3) a + (5/24) e.
    """
    policy = make(folder, flow_steps=3, flow_eta=0.5)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    field = policy.field(policy.encode_context(inputs))
    x, e = torch.randn(2, B, H, N).unbind()
    a, _ = field(x, torch.full((B,), 2 / 3))
    _, mean, log_std = policy._step(field, torch.cat((x, e), -1), torch.ones(B, dtype=torch.int64))
    torch.testing.assert_close(mean[..., :N], 2 / 3 * a + 5 / 24 * e, rtol=1e-5, atol=1e-5)
    assert (log_std[..., :N] - math.log(1 / 6) / 2).abs().max() < 1e-6
    assert torch.equal(mean[..., N:], e) and bool((log_std[..., N:] == -math.inf).all())


def test_grippers_are_not_read_and_become_probabilities(tmp_path: Path) -> None:
    spec: ObsSpec = dict(SPEC) | {"state": ArraySpec((12,))}
    fields = {"action_mode": "ee6d", "max_state_dim": 20}
    policy = make(write_checkpoint(tmp_path / "ee6d", **fields), size=10, spec=spec)
    obs = random_observations(spec, B, 0)
    context = policy.encode_context(policy.encode(obs))
    x, tau = torch.randn(B, H, 20), torch.rand(B)
    a, _ = policy.field(context)(x, tau)
    x[..., [9, 19]] += 1
    changed = policy.encode_context(policy.encode(obs | {"state": obs["state"].clone()}))
    changed.state[:, 9] += 1
    b, _ = policy.field(changed)(x, tau)
    assert torch.equal(a, b)
    changed.state[:, 8] += 1
    assert not torch.equal(policy.field(changed)(x, tau)[0], a)
    action = policy.denormalize_actions(torch.full((1, 1, 10), 2.0), context)
    expected = [2.0] * 9 + [1 / (1 + math.exp(-2))]
    assert action.flatten().tolist() == pytest.approx(expected)
    loss, _ = policy.action_loss(context, torch.rand(B, C, 10), torch.Generator().manual_seed(0))
    assert loss.shape == (B, C, 10)
    loss.sum().backward()
    assert policy.velocity.fc.weight.grad is not None


def test_domain_and_missing_views(folder: Path, tmp_path: Path) -> None:
    """The preprocessor names the domain; views that the robot lacks are tokens of zeros."""
    policy = make(folder)
    obs = random_observations(SPEC, B, 0)
    assert policy.domain == 2 and policy.trunk.image_tokens() == 5
    context = policy.encode_context(policy.encode(obs))
    features = torch.cat((context.keys[0], context.values[0]), dim=-1)
    assert features.shape == (B, 1, 2 * 5 + 40, 32)
    assert bool((features[:, :, 45:] == 0).all()) and not bool((features[:, :, :45] == 0).any())
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "policy_preprocessor.json").unlink()
    second = make(other)
    assert second.domain == 0
    action = second.act(second.encode(obs)).action
    assert not torch.equal(action, policy.act(policy.encode(obs)).action)


def test_both_layouts_of_florence_give_equal_actions(folder: Path, tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path / "old", old=True)
    keys = load_file(old / "model.safetensors")
    assert "model.vlm.image_projection" in keys
    assert keys.keys() != load_file(folder / "model.safetensors").keys()
    obs = random_observations(SPEC, B, 0)
    actions = [policy.act(policy.encode(obs)).action for policy in (make(folder), make(old))]
    assert torch.equal(*actions)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("trunk", TRUNKS, ids=str)
def test_export_and_read_again(trunk: Any, old: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", old=old)
    policy = make(folder, **trunk)
    perturb(policy)
    obs = random_observations(SPEC, B, 0)
    action = policy.act(policy.encode(obs)).action
    if trunk.get("lora_rank"):
        adapter = peft_files.Adapter(4, 32.0, policy.published_parameters(folder))
        peft_files.save(adapter, folder, tmp_path / "adapter")
        again = make(folder, **trunk)
        read = peft_files.load(tmp_path / "adapter")
        peft_files.apply(read, again.published_parameters(folder))
        assert torch.equal(again.act(again.encode(obs)).action, action)
        layer = "model.vlm.language_model.encoder.layers.0.fc1.lora_A.weight"
        assert layer in read.parameters and not any("pos_emb" in n for n in read.parameters)
    policy.export(folder, tmp_path / "out")
    again = make(tmp_path / "out")
    difference = (again.act(again.encode(obs)).action - action).abs().max()
    assert difference < 1e-4 if trunk.get("lora_rank") else difference == 0
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert {n: x.shape for n, x in before.items()} == {n: x.shape for n, x in after.items()}
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert "model.transformer.action_decoder.fc.weight" in changed
    assert any("image_proj" in name for name in changed) == (not trunk)


def test_prefix_memory(folder: Path) -> None:
    policy = make(folder, freeze_trunk=True)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    kept = sum(inputs[name].nbytes for name in KEPT) + 4 * N * B
    assert policy.prefix_bytes() * B == kept
    assert policy.kept_inputs(4, 32) == KEPT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_mode": "so101_bimanual"}, "action_mode=so101_bimanual; supported is"),
        ({"use_proprio": False}, "use_proprio=false; supported is use_proprio=true"),
        (
            {"action_mode": "joint"},
            "action_mode=joint and max_state_dim=8; action_mode=joint needs",
        ),
        ({"depth": 0}, "depth=0; it must be a whole number >= 1"),
        ({"hidden_size": "24"}, "hidden_size=24; it must be a whole number"),
        ({"hidden_size": 28}, "but config.json describes ["),
        ({"num_domains": 2}, "has domain_id=2, the model num_domains = 2"),
        ({"florence_config": {}}, "config.json is refused: "),
        ({"depth": 3}, "the weights lack expert.blocks.2."),
    ],
)
def test_refusals(fields: Any, message: str, folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "config.json").write_text(json.dumps(CONFIG | fields))
    with pytest.raises(ConfigError) as e:
        xvla_files.read(damaged)
    assert str(e.value).startswith(f"model.checkpoint={damaged}: ") and message in str(e.value)


def test_weights_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    weights["model.transformer.norm.weight"][2] = math.nan
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weight model\.transformer\.norm\.weight contains NaN"):
        xvla_files.read(damaged)


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "free", resize_imgs_with_padding=None)
    spec: ObsSpec = dict(SPEC) | {"wrist": ArraySpec((3, 16, 16), torch.uint8)}
    with pytest.raises(ConfigError, match="images must have one size"):
        make(folder, spec=spec)
    policy = make(folder)
    assert policy.trunk.image_tokens() == 2 * 3 + 1
    policy.act(policy.encode(random_observations(SPEC, B, 0)))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_arithmetic_and_checkpointing(folder: Path, options: Any) -> None:
    obs = random_observations(SPEC, B, 0)
    policies = make(folder), make(folder, **options)
    results = []
    for policy in policies:
        inputs = policy.encode(obs)
        d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
        out = policy.evaluate(inputs, d.action, d.replay)
        (out.log_prob.sum() + out.value.sum()).backward()
        gradient = policy.velocity.fc.weight.grad
        assert gradient is not None and bool(gradient.isfinite().all())
        results.append((d.action, gradient))
    tolerance = 0.1 if "dtype" in options else 1e-4
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < tolerance * a.abs().max()


@pytest.mark.slow
def test_clone_train_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Cloning, PPO with adapters, evaluation and both exports on Tabletop."""
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "tiny", max_state_dim=16)
    options = [f"model.checkpoint={folder}", "experiment=pi0_tabletop", "model.lora_rank=2"]
    options += ["model.freeze_trunk=false", "model.dtype=float32", "env.num_envs=4", "updates=1"]
    options += [
        "env.action_chunk=4",
        "env.image_size=16",
        "env.max_episode_steps=8",
        "algorithm.horizon=2",
        "algorithm.global_batch_size=8",
    ]
    options += ["algorithm.micro_batch_size=4", "evaluation.episodes=2", "run_dir=run"]
    options += [
        "cloning.dataset=null",
        "cloning.foresight_steps=1",
        "cloning.steps=1",
        "cloning.episodes=4",
        "cloning.batch_size=4",
        "device=cpu",
    ]
    summary = run_command(capsys, "train", *options)
    assert summary["updates"] == 1
    exported = run_command(capsys, "export", "checkpoint=run", "out=adapter", "lora=adapter")
    assert exported["action_difference"] == 0
    exported = run_command(capsys, "export", "checkpoint=run", "out=merged")
    assert exported["action_difference"] < 1e-4
