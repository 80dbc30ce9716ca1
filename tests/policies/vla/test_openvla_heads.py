"""OpenVLA-OFT's regression head and state token, on tiny directories of the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import run_command
from tiny_openvla_checkpoint import SIDE, write_checkpoint, write_heads
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, random_observations

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla import published
from embodied_ppo.policies.vla.openvla_heads import PATTERN
from embodied_ppo.policies.vla.pretrained import CheckpointVLA, PublishedVLA, RegressionVLA

C, A, B, STATE = 2, 2, 5, 5
SENTENCES = ("push the red block", "lift it", "reach the blue block, please")
SPEC = {
    "state": ArraySpec((STATE,)),
    "front": ArraySpec((3, SIDE, SIDE), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
CLASSES: dict[str, type[PublishedVLA]] = {"gaussian": RegressionVLA, "token": CheckpointVLA}


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_heads(write_checkpoint(tmp_path / "oft"), state=STATE)


def policy_of(folder: Path, policy: str = "gaussian", **options: Any) -> Any:
    options = {"unnorm_key": "bridge_orig", "bins": 16, "init_log_std": -1.0} | options
    config = ModelConfig(policy=policy, checkpoint=str(folder), **options)  # pyright: ignore
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    torch.manual_seed(0)
    return CLASSES[policy](SPEC, box, config, chunk=C, sentences=SENTENCES)


def double(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Apply a linear layer, or a layer norm, whose weight is a vector, in float64."""
    w, b = (weights[f"module.{name}.{end}"].double() for end in ("weight", "bias"))
    if w.ndim == 2:
        return x @ w.T + b
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b


def test_actions_and_state_token_agree_with_the_formulas(folder: Path) -> None:
    """Recompute both modules in float64; q01 = -2, q99 = 1 give p = 2 (s + 2) / 3 - 1, clipped."""
    policy, obs = policy_of(folder), random_observations(SPEC, B)
    head, projector = (torch.load(f, weights_only=True) for f in sorted(folder.glob(PATTERN)))
    inputs = policy.encode(obs)
    p = (2 * (obs["state"].double() + 2) / (3 + 1e-8) - 1).clamp(-1, 1)
    hidden = double(p, projector, "fc1")
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    context = policy.encode_context(inputs)
    tokens = inputs["/images"].shape[1] * policy.body.body.config.grid**2
    token = context.x[:, 1 + tokens].double()
    torch.testing.assert_close(token, double(hidden, projector, "fc2"), rtol=0, atol=1e-5)
    assert context.x.shape[1] == 1 + tokens + inputs["/ids"].shape[1]

    x = policy.body.hidden(context, None).double().view(B, C, -1)
    x = double(double(x, head, "model.layer_norm1"), head, "model.fc1").relu()
    for i in (0, 1):
        name = f"model.mlp_resnet_blocks.{i}.ffn"
        x = x + double(double(x, head, f"{name}.0"), head, f"{name}.1").relu()
    x = double(double(x, head, "model.layer_norm2"), head, "model.fc2")
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
    expected = (x + 1) / 2 * (high - low) + low
    decision = policy.act(inputs)
    action = decision.action.view(B, C, A)
    torch.testing.assert_close(action, expected.float(), rtol=0, atol=1e-5)
    assert torch.equal(decision.action, policy.act(inputs).action)
    other = policy.act(policy.encode(obs | {"state": -obs["state"]})).action
    assert not torch.equal(other, decision.action)

    target = action + torch.tensor([0.4, -0.2])  # x is 2 a / (q99 - q01): errors .2 and .4
    loss, _ = policy.bc_loss(inputs, target, torch.ones(B, C, dtype=torch.bool))
    assert loss.item() == pytest.approx(0.3, abs=1e-5)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.heads.parameters())


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2, "dtype": "bfloat16"}], ids=str)
def test_gaussian_reproduces_its_log_probabilities(folder: Path, options: dict[str, Any]) -> None:
    policy = policy_of(folder, **options)
    inputs = policy.encode(random_observations(SPEC, B))
    for noise in (None, policy.noise(B, torch.Generator().manual_seed(1))):
        d = policy.act(inputs, noise=noise)
        rtol = 0.05 if options else 0.0
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 2), rtol=rtol)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in policy.heads.parameters())


def test_tokens_read_the_state_and_the_written_heads_are_read_again(folder: Path, tmp_path) -> None:
    policy, obs = policy_of(folder), random_observations(SPEC, B)
    with torch.no_grad():
        for p in policy.heads.parameters():
            p.add_(0.1)
    expected = policy.act(policy.encode(obs)).action
    policy.export(folder, tmp_path / "out")
    again = policy_of(tmp_path / "out")
    assert torch.equal(again.act(again.encode(obs)).action, expected)
    (folder / "action_head--150000_checkpoint.pt").unlink()
    token = policy_of(folder, "token")
    assert "/state" in token.encode(obs) and set(token.heads) == {"proprio_projector"}


def test_planned_sizes_are_those_of_the_weights(folder: Path) -> None:
    class Spaces:
        obs_spec, action_spec = SPEC, Box((-1.0,) * (C * A), (1.0,) * (C * A))
        gripper_closes = None

    config = ModelConfig(policy="gaussian", checkpoint=str(folder), unnorm_key="bridge_orig")
    sizes = published.policy_of_sizes(Spaces(), config, chunk=C, sentences=SENTENCES)
    shapes = [{n: p.shape for n, p in x.named_parameters()} for x in (sizes, policy_of(folder))]
    assert shapes[0] == shapes[1]


def test_wrong_files_are_refused(folder: Path, tmp_path) -> None:
    head = folder / "action_head--150000_checkpoint.pt"
    with pytest.raises(ConfigError, match=r"model\.policy=gaussian"):
        policy_of(folder, "token")
    weights = torch.load(head, weights_only=True)
    for change, named in (
        ({"module.model.fc2.weight": torch.zeros(7, 16)}, r"fc2\.weight is \(7, 16\).*\(2, 16\)"),
        ({"module.model.fc2.bias": torch.full((2,), torch.nan)}, "fc2.bias contains NaN"),
        ({"module.other.weight": torch.zeros(1)}, "no ActionHead.*other"),
    ):
        torch.save({**weights, **change}, head)
        with pytest.raises(ConfigError, match=named):
            policy_of(folder)
    head.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"action_head.*cannot be read"):
        policy_of(folder)
    torch.save(weights, head)
    torch.save({}, folder / "noisy_action_projector--150000_checkpoint.pt")
    with pytest.raises(ConfigError, match=r"noisy_action_projector.*is not computed"):
        policy_of(folder)
    (folder / "noisy_action_projector--150000_checkpoint.pt").unlink()
    raw = json.loads((folder / "config.json").read_text())
    del raw["norm_stats"]["bridge_orig"]["proprio"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"bridge_orig\.proprio: has no q01"):
        policy_of(folder)


@pytest.mark.slow
def test_clone_train_evaluate_and_export(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder.parent)
    for file in folder.glob(PATTERN):
        file.unlink()
    write_heads(folder, state=12, size=4)
    stats = {n: {"q01": [-1.0] * k, "q99": [1.0] * k} for n, k in (("action", 4), ("proprio", 12))}
    (folder / "dataset_statistics.json").write_text(json.dumps({"four": stats}))
    options = f"""
        experiment=tabletop_gaussian model.checkpoint={folder} model.unnorm_key=four updates=2
        cloning.steps=20 cloning.episodes=4 cloning.batch_size=8 cloning.foresight_steps=0
        env.num_envs=4 env.max_episode_steps=8 env_steps=null algorithm.horizon=4
        algorithm.global_batch_size=8 algorithm.critic_warmup=0 eval_every=2
        save_every=1 evaluation.episodes=2
        evaluation.num_envs=2 evaluation.video_episodes=0 device=cpu"""
    summary = run_command(capsys, "train", *options.split(), "run_dir=run")
    assert summary["updates"] == 2
    evaluation = run_command(
        capsys, "evaluate", "checkpoint=run", "episodes=2", "num_envs=2", "video=false"
    )
    assert evaluation["eval/return"] == pytest.approx(summary["final_return"])
    assert run_command(capsys, "export", "checkpoint=run", "out=exported")["action_difference"] == 0
