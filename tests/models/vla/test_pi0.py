"""π0: ``evaluate`` recomputes ``act``, agreement with transformers, layouts of files."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_smolvla_checkpoint
import torch
from run_helpers import run_command
from safetensors.torch import load_file, save_file
from tiny_pi0_checkpoint import tiny_model, write_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vla_policy_checks import (
    check_evaluate_reproduces_act,
    perturb_new_parameters,
    random_observations,
)

import embodied_envs
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.commands import main
from embodied_ppo.config.schema import AlgorithmConfig, Config, ModelConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, CheckpointError, ConfigError, Discrete, ObsSpec
from embodied_ppo.models.vla import pi0_files
from embodied_ppo.models.vla.pi0 import FROZEN_ROWS, KEPT, KEYS, PI0, TimeEncoding
from embodied_ppo.modes.embodied.mode import EmbodiedMode
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import checkpoint

C, A, B, H, N = 3, 2, 5, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "wrist": ArraySpec((16, 16, 3), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "reach the blue block, please", "lift it")
CHAINS: dict[str, dict[str, Any]] = {
    "one": {},
    "sum": {"flow_chain": "sum"},
    "mean": {"flow_chain": "mean", "flow_steps": 3},
    "sum, learned": {"flow_chain": "sum", "flow_noise": "learned"},
    "mean, learned": {"flow_chain": "mean", "flow_noise": "learned", "temperature": 0.7},
}
TRUNKS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"freeze_trunk": True},
    "adapters": {"lora_rank": 4},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pi0") / "tiny")


def make(
    folder: Path, seed: int = 0, spec: ObsSpec = SPEC, size: int = A, chunk: int = C, **options: Any
) -> PI0:
    torch.manual_seed(seed)
    config = ModelConfig(policy="flow", checkpoint=str(folder), **options)
    box = Box((-1.0,) * (chunk * size), (1.0,) * (chunk * size))
    policy = PI0(spec, box, config, chunk=chunk, sentences=SENTENCES)
    perturb_new_parameters(policy)
    return policy


def observations(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    return random_observations(SPEC, rows, seed)


# ----------------------------------------------------------------------------- act and evaluate
@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("chain", CHAINS)
def test_evaluate_reproduces_act_for_any_micro_batch(folder: Path, chain: str, trunk: str) -> None:
    policy = make(folder, **CHAINS[chain], **TRUNKS[trunk])
    inputs = policy.encode(observations())
    assert (KEYS in inputs) == (trunk == "frozen")
    for noise in (policy.noise(B, torch.Generator().manual_seed(1)), None):
        d = policy.act(inputs, noise=noise)
        assert d.replay["latents"].shape == (B, policy.stochastic + 1, H, N)
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 2, 1))
    assert d.value.abs().max() > 0 and torch.equal(d.action, policy.act(inputs).action)


def test_a_chain_copies_the_prefix_once(folder: Path) -> None:
    """The steps of a chain write their keys behind one copy of the prefix."""
    policy = make(folder, freeze_trunk=True)
    inputs = policy.encode(observations())
    prefix = inputs[KEYS].shape[3]

    class Copies(TorchDispatchMode):
        """Counts the copies of tensors that hold the keys of prefix and actions."""

        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            allocates = func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.constant_pad_nd)
            if allocates and out.ndim == 4 and out.shape[2] == prefix + 1 + H:
                self.count += 1
            return out

    layers = len(policy.expert.layers)
    stored = inputs[KEYS].clone()
    with Copies() as copies:
        d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    assert copies.count == 2 * layers  # keys and values; 2 * layers * steps with a copy per step
    assert torch.equal(inputs[KEYS], stored)
    with Copies() as copies:
        log_prob = policy.evaluate(inputs, d.action, d.replay).log_prob
    assert copies.count == 2 * layers and torch.equal(log_prob, d.log_prob)


@pytest.mark.parametrize("chain", ["one", "sum, learned"])
def test_kept_and_recomputed_prefixes_agree(folder: Path, chain: str) -> None:
    policy = make(folder, **CHAINS[chain], freeze_trunk=True)
    obs, noise = observations(), policy.noise(B, torch.Generator().manual_seed(1))
    kept = policy.encode(obs)
    policy.memory_gb = 0.0
    recomputed = policy.encode(obs)
    assert KEYS in kept and KEYS not in recomputed
    d, e = policy.act(kept, noise=noise), policy.act(recomputed, noise=noise)
    assert all((x - y).abs().max() < 1e-5 for x, y in zip(tree.leaves(d), tree.leaves(e)))
    gradients = []
    for inputs in (kept, recomputed):
        policy.zero_grad()
        out = policy.evaluate(inputs, d.action, d.replay)
        assert (out.log_prob - d.log_prob).abs().max() < 1e-5
        (out.log_prob.sum() + out.value.sum()).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert all(
        (g - gradients[1][n]).abs().max() < 1e-3 * (1 + g.abs().max())
        for n, g in gradients[0].items()
    )


def frozen_run(folder: Path, num_envs: int, keep: bool) -> tuple[Any, ...]:
    """Return policy, rollout and learner in a real simulator."""
    env = embodied_envs.make(
        "Tabletop",
        num_envs=num_envs,
        seeds=list(range(num_envs)),
        simulator="mujoco",
        cameras=("front",),
        image_size=(16, 16),
        action_chunk=C,
        kwargs={"obs": "language"},
        max_episode_steps=2 * C,
    )
    assert isinstance(env.action_spec, Box)
    size = env.action_spec.size // C
    policy = make(folder, spec=env.obs_spec, size=size, freeze_trunk=True, dtype="float32")
    policy.set_sentences(env.instructions)  # pyright: ignore[reportArgumentType]
    config = AlgorithmConfig(update_epoch=1, global_batch_size=num_envs, micro_batch_size=num_envs)
    rollout = Rollout(env, policy, seed=0, kept_inputs=KEPT if keep else ())
    learner = actor_critic_learner(policy, config, num_envs=num_envs, updates=3, seed=0)
    return policy, rollout, learner


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [32, 3])
def test_update_uses_the_prefixes_of_acting(num_envs: int, tmp_path: Path) -> None:
    """With 32 environments, acting and learner compute the same batches: equal bit for bit."""
    folder, steps = write_checkpoint(tmp_path / "tiny", max_state_dim=32), 3
    runs = [frozen_run(folder, num_envs, keep) for keep in (True, False)]
    policy = runs[0][0]
    assert policy.kept_inputs(steps, num_envs, None) == (KEPT if num_envs == 32 else ())
    assert not policy.kept_inputs(steps, num_envs, 5)
    calls: dict[Any, int] = Counter()
    for p, *_ in runs:
        p.trunk.register_forward_hook(lambda trunk, *_: calls.update([trunk]))
    for update in range(2):
        trajectories, metrics = [], []
        for p, rollout, learner in runs:
            t = rollout.collect(steps, update=update, version=update)[0]
            trajectories.append(t)
            assert calls.pop(p.trunk) > steps, "acting and values of final observations"
            before = {name: x.data_ptr() for name, x in (t.kept or {}).items()}
            inputs = learner.actor.encode(t)
            assert all(inputs[name].data_ptr() == x for name, x in before.items()), "no copy"
            calls.clear()
            metrics.append(learner.update(t, update=update))
            evaluations = 0 if before else -(-steps * num_envs // FROZEN_ROWS)
            assert calls.pop(p.trunk, 0) == evaluations
            assert not t.kept, "the caller may hold the trajectory for longer than the batch"
        weights = [list(p.parameters()) for p, *_ in runs]
        for x, y in zip(*weights, strict=True):
            # Sums of few rows depend on the alignment of memory. Two updates move a weight by 6e-4.
            assert torch.equal(x, y) if num_envs == 32 else (x - y).abs().max() < 1e-5
        if num_envs == 32:
            assert metrics[0] == metrics[1]
            leaves = [list(tree.leaves(t)) for t in trajectories]
            assert all(map(torch.equal, *leaves))


def test_prefix_memory(folder: Path) -> None:
    """A prefix has 2 cameras x 4 patches and the longest sentence's 28 + 2 tokens.

    These are 38 tokens, each with 2 layers x (key and value) x 8 numbers.
    """
    policy = make(folder, freeze_trunk=True)
    inputs = policy.encode(observations())
    size = sum(x[0].numel() * x.itemsize for x in inputs.values())
    assert policy.prefix_bytes() == size == 38 * (2 * 2 * 8 * 4 + 1) + 4 * 64 + 4 * 8
    policy.memory_gb = 10.5 * size / 1e9
    assert policy.max_kept_rows() == 10
    notice = str(policy.memory_notice(10))
    assert "10 prefixes of 0.00" in notice and "kept through the epochs" in notice
    assert "at most 10 (algorithm.horizon x env.num_envs) are kept" in str(policy.memory_notice(11))
    assert make(folder).memory_notice(11) is None


def test_published_sizes() -> None:
    """The model has 3.5 G parameters, 0.3 G of them the expert's; a prefix has 10.3 MB.

    The prefix is of two cameras of 256 tokens and 48 words, 18 layers, one key head of 256, in
    bfloat16. The weights are on the meta device, without storage.
    """
    from transformers import PI0ForConditionalGeneration

    published = pi0_files.read_config({"type": "pi0"}, "DIR")
    with torch.device("meta"):
        body = PI0ForConditionalGeneration(published)
        spec = {
            **dict(SPEC),
            "state": ArraySpec((8,)),
        }  # pyright: ignore[reportCallIssue, reportArgumentType]
        config = ModelConfig(policy="flow", checkpoint="DIR", freeze_trunk=True, dtype="bfloat16")
        words = pi0_files.Published(body, lambda sentence: range(48))
        policy = PI0(
            spec, Box((-1.0,) * 35, (1.0,) * 35), config, words, chunk=5, sentences=SENTENCES
        )
    count = {
        trained: sum(p.numel() for p in policy.parameters() if p.requires_grad is trained)
        for trained in (True, False)
    }
    assert count[False] / 1e9 == pytest.approx(2.92, abs=0.01)
    expert = sum(p.numel() for p in policy.parameter_groups()["actor"])
    assert expert / 1e9 == pytest.approx(0.315, abs=0.002) and 0 < count[True] - expert < 2e7
    assert policy.prefix_bytes() == 560 * (18 * 2 * 256 * 2 + 1) + 4 * 2048 + 4 * 32 == 10_330_800
    policy.memory_gb = 75.0
    assert policy.max_kept_rows() == 7259
    assert policy.noise(1).shape == (1, 3, 50, 32)


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["one", "sum", "sum, learned"])
def test_log_probabilities_are_the_sampling_density(folder: Path, chain: str) -> None:
    """The mean ratio E[p'/p] under p is 1, for another policy's p' of the same latents."""
    policy, other = (make(folder, freeze_trunk=True, **CHAINS[chain]) for _ in range(2))
    with torch.no_grad():
        other.velocity.bias.add_(0.03)
    rows = 3000
    inputs = {n: x.expand(rows, *x.shape[1:]) for n, x in policy.encode(observations(1)).items()}
    d = policy.act(inputs, noise=policy.noise(rows, torch.Generator().manual_seed(3)))
    with torch.no_grad():
        ratio = (other.evaluate(inputs, d.action, d.replay).log_prob - d.log_prob).sum((1, 2)).exp()
    assert ratio.std() > 0.01
    assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / rows**0.5


# ----------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_flow_agrees_with_transformers(key_heads: int, tmp_path: Path) -> None:
    """Compare a complete chain, and a single velocity with its gradient."""
    policy = make(write_checkpoint(tmp_path, key_heads=key_heads), flow_steps=5)
    reference = tiny_model(key_heads=key_heads)
    # transformers encodes the time in float32, openpi in float64.
    reference.embed_action_time.sinusoid_embeds = policy.embed.sinusoid_embeds
    obs, K = observations(), 2
    inputs = policy.encode(obs)
    pixels = torch.stack([policy.trunk.pixels(inputs[name]) for name in ("front", "wrist")], dim=1)
    ids = inputs["/words"]
    image = torch.full((B, K * 4), 300)
    arguments: dict[str, Any] = {
        "state": inputs["/vector"],
        "input_ids": torch.cat((image, ids.clamp_min(0)), dim=1),
        "attention_mask": torch.cat((torch.ones_like(image), (ids >= 0).long()), dim=1),
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(B, K, dtype=torch.bool),
    }
    end = reference.sample_actions(**arguments, noise=policy.start(B), num_steps=5)
    action = policy.act(inputs).action.view(B, C, A)
    assert (action - end[:, :C, :A]).abs().max() < 1e-5 and action.abs().max() > 0.01
    x, tau = torch.randn(B, H, N), torch.rand(B)
    v = reference(**arguments, noise=x, timestep=tau).logits
    w, _ = policy.field(policy.encode_context(inputs))(x, tau)
    assert (v - w).abs().max() < 1e-5 * (1 + v.abs().max())
    v.square().sum().backward()
    w.square().sum().backward()
    q = "language_model.layers.0.self_attn.q_proj.weight"
    for a, b in (
        (reference.model.vlm.get_parameter(q), policy.trunk.vlm.get_parameter(q)),
        (reference.action_out_proj.weight, policy.velocity.weight),
    ):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() < 1e-4 * (1 + a.grad.abs().max())


def test_word_padding_has_no_effect(folder: Path) -> None:
    policy, obs = make(folder), observations(3)
    noise = policy.noise(3, torch.Generator().manual_seed(1))
    a = policy.act(policy.encode(obs), noise=noise)
    policy.set_sentences(
        ("a very long sentence that does not occur in the other tests of this file", *SENTENCES)
    )
    b = policy.act(policy.encode(obs | {"instruction": obs["instruction"] + 1}), noise=noise)
    assert (a.log_prob - b.log_prob).abs().max() < 1e-5 and (a.value - b.value).abs().max() < 1e-5


def test_actions_depend_on_every_observation(folder: Path) -> None:
    policy, obs = make(folder), observations()
    d = policy.act(policy.encode(obs), noise=policy.noise(B, torch.Generator().manual_seed(1)))
    base = policy.evaluate(policy.encode(obs), d.action, d.replay)
    for name, x in obs.items():
        other = obs | {name: torch.flip(x, dims=(-1,)) if name != "instruction" else (x + 1) % 3}
        changed = policy.evaluate(policy.encode(other), d.action, d.replay)
        assert (changed.log_prob - base.log_prob).abs().max() > 1e-5, name
        assert (changed.value - base.value).abs().max() > 1e-5, name


def test_pixel_preprocessing(folder: Path) -> None:
    pixels = make(folder).trunk.pixels
    levels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 16, 16)
    assert torch.equal(pixels(levels).unique(), torch.tensor([-1.0, 1.0]))
    # A wide white image becomes 4 x 16 pixels of white with black above and below.
    wide = pixels(torch.full((1, 3, 8, 32), 255, dtype=torch.uint8))
    assert wide.shape == (1, 3, 16, 16)
    assert bool((wide[..., 6:10, :] > 0.9999).all()) and bool((wide[..., :6, :] == -1).all())
    assert bool((wide[..., 10:, :] == -1).all())


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_trained_parameters_only(
    folder: Path, trunk: str, checkpointing: bool
) -> None:
    policy = make(folder, **TRUNKS[trunk], gradient_checkpointing=checkpointing, flow_chain="sum")
    policy.train()
    inputs = policy.encode(observations())
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    for _ in range(2):  # the second backward pass needs nothing of the first graph
        policy.zero_grad()
        policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
    reached = {
        name
        for name, p in policy.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    groups = policy.parameter_groups()
    assert {id(p) for g in groups.values() for p in g} == {
        id(p) for p in policy.parameters() if p.requires_grad
    }
    assert {"expert.layers.0.self_attn.q_proj.weight", "embed.state_proj.weight"} <= reached
    vlm = {name for name in reached if name.startswith("trunk.vlm")}
    if trunk == "frozen":
        assert not vlm
    elif trunk == "adapters":
        assert vlm and all("lora_" in name for name in vlm)
    else:
        assert "trunk.vlm.vision_tower.embeddings.patch_embedding.weight" in vlm
        assert "trunk.vlm.language_model.layers.0.mlp.up_proj.weight" in vlm


def test_activation_checkpointing_keeps_gradients(folder: Path) -> None:
    gradients = []
    for recompute in (False, True):
        policy = make(folder, gradient_checkpointing=recompute)
        policy.train()
        inputs = policy.encode(observations())
        d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
        policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("detach", [True, False])
def test_detach_value_stops_the_value_gradient(folder: Path, detach: bool) -> None:
    policy = make(folder, detach_value=detach)
    inputs = policy.encode(observations())
    d = policy.act(inputs)
    policy.evaluate(inputs, d.action, d.replay).value.sum().backward()
    groups = policy.parameter_groups()
    assert all(p.grad is not None for p in groups["critic"])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in groups["actor"]) != detach


@pytest.mark.parametrize("trunk", TRUNKS)
def test_bfloat16(folder: Path, trunk: str) -> None:
    """Trained parameters stay float32, kept keys are bfloat16, actions equal those of float32
    except for rounding.
    """
    policy, plain = (
        make(folder, dtype=dtype, **TRUNKS[trunk]) for dtype in ("bfloat16", "float32")
    )
    noise = policy.noise(B, torch.Generator().manual_seed(1))
    assert all(
        p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16)
        for p in policy.parameters()
    )
    inputs = policy.encode(observations())
    if trunk == "frozen":
        assert inputs[KEYS].dtype == torch.bfloat16
    d, e = policy.act(inputs, noise=noise), plain.act(plain.encode(observations()), noise=noise)
    assert d.log_prob.dtype == d.value.dtype == d.action.dtype == torch.float32
    assert 0 < (d.action - e.action).abs().max() < 0.1
    out = policy.evaluate(inputs, d.action, d.replay)
    assert (out.log_prob - d.log_prob).abs().max() < 1e-4
    out.log_prob.sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in policy.parameters())


@pytest.mark.slow
def test_cloning_approaches_the_demonstrations(folder: Path) -> None:
    policy, obs = make(folder), observations()
    action, executed = torch.rand(B, C, A) * 2 - 1, torch.ones(B, C, dtype=torch.bool)
    executed[:, -1] = False
    inputs = tree.map(lambda x: x.repeat(4, *[1] * (x.dim() - 1)), policy.encode(obs))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    before = (policy.act(policy.encode(obs)).action.view(B, C, A) - action).abs()[:, :-1].mean()
    for i in range(80):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(i)
        loss, grounding = policy.bc_loss(
            inputs, action.repeat(4, 1, 1), executed.repeat(4, 1), generator
        )
        loss.backward()
        optimizer.step()
    assert grounding is not None and grounding.focus.shape == (4 * B, 64)
    after = (policy.act(policy.encode(obs)).action.view(B, C, A) - action).abs()[:, :-1].mean()
    assert after < 0.25 < before


@pytest.mark.slow
@pytest.mark.parametrize(("chain", "updates"), [("one", 40), ("sum", 30)])
def test_ppo_learns_one_target_per_sentence(folder: Path, chain: str, updates: int) -> None:
    """The reward is -(a - target of the sentence)².

    It is -1.7 at the start, and -0.17 for the best policy that ignores the words.
    """
    policy, rows = make(folder, freeze_trunk=True, **CHAINS[chain]), 96
    generator = torch.Generator().manual_seed(0)
    obs = observations(rows)
    inputs = policy.encode(obs)
    target = torch.tensor([-0.5, 0.0, 0.5])[obs["instruction"]].view(-1, 1, 1)
    parameters = [p for group in policy.parameter_groups().values() for p in group]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    rewards = []
    for _ in range(updates):
        d = policy.act(inputs, noise=policy.noise(rows, generator))
        reward = -(d.action.view(rows, C, A) - target).square().mean((1, 2))
        rewards.append(float(reward.mean()))
        advantage = (reward - reward.mean()) / reward.std()
        for _ in range(2):
            log_prob = policy.evaluate(inputs, d.action, d.replay).log_prob
            ratio = (log_prob - d.log_prob).sum((1, 2)).exp()
            optimizer.zero_grad()
            (-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    assert rewards[0] < -1 and sum(rewards[-5:]) / 5 > -0.13


# -------------------------------------------------------------------------------------- weights
def test_lerobot_layout_is_read_completely(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert (
        "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers.0.layer_norm1.bias"
        in tensors
    )
    assert (
        "model.action_in_proj.weight" in tensors
        and "model.paligemma_with_expert.paligemma.lm_head.weight" in tensors
    )
    state, expected = pi0_files.read(folder).model.state_dict(), tiny_model().state_dict()
    assert state.keys() == expected.keys() and all(
        torch.equal(x, expected[name]) for name, x in state.items()
    )
    assert len(tensors) == len(expected)


@pytest.mark.parametrize("layout", ["transformers", "lerobot before 0.4"])
def test_transformers_and_old_lerobot_layouts(layout: str, folder: Path, tmp_path: Path) -> None:
    other, expected = write_checkpoint(tmp_path / "tiny", seed=1), tiny_model()
    if layout == "transformers":
        expected.save_pretrained(other)
    else:
        tensors = load_file(folder / "model.safetensors")
        renamed = {}
        for key, x in tensors.items():
            key = key.replace("paligemma.lm_head", "paligemma.language_model.lm_head")
            key = key.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
            renamed[key.replace("paligemma.model.", "paligemma.")] = x
        assert renamed.keys() != tensors.keys()
        save_file(renamed, other / "model.safetensors")
    state = pi0_files.read(other).model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(x, expected.state_dict()[name]) for name, x in state.items())


def test_embeddings_are_read_where_a_head_is_present(folder: Path, tmp_path: Path) -> None:
    """lerobot 0.5 and later write both; the head was not trained and is not used."""
    other = write_checkpoint(tmp_path / "tiny")
    tensors = load_file(other / "model.safetensors")
    prefix = "model.paligemma_with_expert.paligemma"
    head = tensors[f"{prefix}.lm_head.weight"]
    trained = {f"{prefix}.model.language_model.embed_tokens.weight": head + 1}
    save_file(tensors | trained, other / "model.safetensors")
    embeddings = pi0_files.read(other).model.model.vlm.language_model.embed_tokens.weight
    assert torch.equal(embeddings, head + 1)


def test_prompts_of_the_layouts(folder: Path, tmp_path: Path) -> None:
    """openpi replaces underscores, lerobot does not; both end with one end of line, at most 48."""
    tokenizer = pi0_files.read(folder).tokenize.tokenizer
    for clean, text in ((True, "take it a b"), (False, " take_it\na_b")):
        tokenize = pi0_files.PromptTokenizer(tokenizer, 48, clean=clean)
        ids = tokenize(" take_it\na_b\n")
        assert tokenizer.decode(ids) == f"<bos>{text}\n" and tokenize("x\n") == tokenize("x")
        assert len(tokenize(99 * "x")) == 48 and tokenize(99 * "x")[0] == ids[0]


def test_lerobot_directories_are_read_as_lerobot_does(folder: Path, tmp_path: Path) -> None:
    """Larger images are sampled without a filter; prompts keep their underscores."""
    sizes = pi0_files.read_config(json.loads((folder / "config.json").read_text()), folder)
    other = write_checkpoint(tmp_path / "tiny")
    raw = {"type": "pi0", "tokenizer_max_length": 9}
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_files, "read_config", lambda *_: sizes)
        policy, filtered = make(other), make(folder)
        published = pi0_files.read(other)
    assert not published.antialias and len(published.tokenize(99 * "x")) == 9
    stripes = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    stripes[..., ::2] = 255
    assert not torch.equal(policy.trunk.pixels(stripes), filtered.trunk.pixels(stripes))
    # With a factor of two, the sample lies between two columns.
    assert policy.trunk.pixels(stripes).abs().max() < 1e-6


def test_times_are_encoded_in_float64() -> None:
    """At τ = 0.7 the fastest angle is 2 π 0.7 / 0.004 = 350 π: sin 0, cos 1."""
    tau = torch.tensor([0.7], dtype=torch.float64).float()
    code = TimeEncoding(4, (4e-3, 4.0))(tau)
    exact = 2 * math.pi * float(tau) / torch.tensor([4e-3, 4.0], dtype=torch.float64)
    assert code.dtype == torch.float32
    assert (code - torch.cat((exact.sin(), exact.cos())).float()).abs().max() < 1e-6


def test_openpi_layout(folder: Path, tmp_path: Path) -> None:
    """config.json has no type, keys have no "model.", and 1e-6 is added to deviations."""
    expected = tiny_model()
    sizes = expected.config
    other = write_checkpoint(tmp_path / "tiny", seed=1)
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.removeprefix("model."): x for key, x in tensors.items()}
    del renamed["paligemma_with_expert.gemma_expert.lm_head.weight"]  # never used
    save_file(renamed, other / "model.safetensors")
    raw = {"action_dim": 8, "action_horizon": 6, "paligemma_variant": "gemma_2b"}
    (other / "config.json").write_text(json.dumps(raw))
    (other / "assets" / "robot").mkdir(parents=True)
    statistics = {"mean": [1.0] * 8, "std": [0.0] * 8}
    (other / "assets" / "robot" / "norm_stats.json").write_text(
        json.dumps({"norm_stats": {"state": statistics, "actions": statistics}})
    )
    config = pi0_files.read_config(raw, other)
    assert (config.chunk_size, config.max_state_dim, config.max_action_dim) == (6, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_files, "read_config", lambda *_: sizes)
        published = pi0_files.read(other)
    state = expected.state_dict()
    del state["model.dit.embed_tokens.weight"]
    loaded = published.model.state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in state.items())
    assert published.antialias and published.action is not None and not published.relative
    x = published.action.denormalize(torch.full((1, 8), 2.0))
    assert (x - 1 - 2e-6).abs().max() < 1e-6 and float(published.action.std[0]) == pytest.approx(
        1e-6
    )
    (other / "assets" / "other").mkdir()
    (other / "assets" / "other" / "norm_stats.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"statistics of 2 robots \(other, robot\); keep one"):
        pi0_files.statistics(other, raw)
    renamed |= {"time_mlp_in.weight": torch.zeros(1)}
    save_file(renamed, other / "model.safetensors")
    assert pi0_files.kind(other) == "pi05"
    (other / "config.json").write_text(json.dumps({"type": "pi0"}))
    with pytest.raises(ConfigError, match=r"has type pi0, the weights are those of pi05"):
        pi0_files.read(other)


@pytest.mark.parametrize("trunk", ["trained", "frozen"])
def test_relative_actions_become_absolute(folder: Path, trunk: str) -> None:
    relative = make(folder, delta_actions=(1,), normalize_obs=False, **TRUNKS[trunk])
    plain = make(folder, normalize_obs=False, **TRUNKS[trunk])
    obs = observations()
    noise = plain.noise(B, torch.Generator().manual_seed(1))
    inputs, context = relative.encode(obs), relative.encode_context(relative.encode(obs))
    d, e = relative.act(inputs, noise=noise), plain.act(plain.encode(obs), noise=noise)
    difference = (d.action - e.action).view(B, C, A)
    assert not difference[..., 0].any() and torch.equal(d.log_prob, e.log_prob)
    assert (difference[..., 1] - obs["state"][:, 1:2]).abs().max() < 1e-6
    latent = relative.normalize_actions(d.action.view(B, C, A), context)
    assert (latent - e.action.view(B, C, A)).abs().max() < 1e-6
    check_evaluate_reproduces_act(relative, inputs, d, shape=(B, C, A), sizes=(B, 2))
    with pytest.raises(ConfigError, match=r"model.delta_actions=\[2\]: .* below 2, or \[\]"):
        make(folder, delta_actions=(2,))


def test_lerobot_names_relative_actions() -> None:
    raw = {"use_relative_actions": True, "output_features": {"action": {"shape": [4]}}}
    assert pi0_files._relative(raw, Path("x")) == (0, 1, 2, 3)
    raw |= {"relative_exclude_joints": ["gripper"]}
    raw |= {"action_feature_names": ["pan.pos", "Gripper.pos", "roll.pos"]}
    assert pi0_files._relative(raw, Path("x")) == (0, 2, 3)
    assert pi0_files._relative(raw | {"use_relative_actions": False}, Path("x")) == ()


@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
def test_checkpoint_of_a_run(folder: Path, trunk: str, tmp_path: Path) -> None:
    """A checkpoint holds all weights, or the trained ones and the digest of the base weights."""
    policy, other = (make(folder, seed=s, **TRUNKS[trunk]) for s in (0, 1))
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.1)
    torch.save(policy.state_dict(), tmp_path / "policy.pt")
    weights = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert any(name.startswith("trunk.vlm.vision_tower") for name in weights) == (
        trunk == "trained"
    )
    checkpoint.load_weights(other, weights, "policy.pt")
    noise = policy.noise(B, torch.Generator().manual_seed(1))
    d, e = (p.act(p.encode(observations()), noise=noise) for p in (policy, other))
    assert torch.equal(d.log_prob, e.log_prob) and torch.equal(d.value, e.value)
    if trunk != "trained":
        another = make(write_checkpoint(tmp_path / "another", seed=3), **TRUNKS[trunk])
        with pytest.raises(CheckpointError, match="its digest is"):
            another.load_state_dict(weights)
    copied = copy.deepcopy(policy)  # a reference for a KL penalty
    assert torch.equal(copied.act(copied.encode(observations()), noise=noise).log_prob, d.log_prob)


def test_lerobot_config_has_the_published_sizes() -> None:
    raw = {
        "type": "pi0",
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "chunk_size": 50,
        "n_action_steps": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 10,
        "image_resolution": [224, 224],
        "min_period": 4e-3,
        "max_period": 4.0,
    }
    from transformers import PI0Config

    parsed, published = pi0_files.read_config(raw, "DIR"), PI0Config()
    for part, names in {
        "vlm_config.text_config": (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim vocab_size"
        ),
        "vlm_config.vision_config": (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads patch_size "
            "image_size"
        ),
        "vlm_config": "image_token_id projection_dim",
        "dit_config": (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
        ),
        "": "chunk_size max_state_dim max_action_dim num_inference_steps min_period max_period",
    }.items():
        for name in names.split():
            values = []
            for config in (parsed, published):
                for step in filter(None, part.split(".")):
                    config = getattr(config, step)
                values.append(getattr(config, name))
            assert values[0] == values[1], (part, name)
    assert pi0_files.lerobot_fields(raw | {"chunk_size": 10})["chunk_size"] == 10


MEANS = {"observation.state": [1.0, 2, 3, 4, 5], "action": [0.5, -0.5]}
DEVIATIONS = {"observation.state": [2.0] * 5, "action": [2.0, 4.0]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["lerobot", "lerobot before", "transformers", "openpi"])
def test_statistics(layout: str, folder: Path, tmp_path: Path) -> None:
    """States are (s - mean) / std and actions x std + mean, in each layout of a directory."""
    other = write_checkpoint(tmp_path / "tiny")
    named = {f"{n}.mean": torch.tensor(x) for n, x in MEANS.items()}
    named |= {f"{n}.std": torch.tensor(x) for n, x in DEVIATIONS.items()}
    if layout == "lerobot":
        save_file(named, other / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    elif layout == "lerobot before":
        tensors = load_file(other / "model.safetensors")
        buffers = {
            f"normalize_targets.buffer_action.{x}": torch.full((2,), torch.inf)
            for x in ("mean", "std")
        }
        for name, x in named.items():
            feature, _, moment = name.rpartition(".")
            step = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
            buffers[f"{step}.buffer_{feature.replace('.', '_')}.{moment}"] = x
        save_file(tensors | buffers, other / "model.safetensors")
    elif layout == "transformers":
        statistics = {
            "state_mean": MEANS["observation.state"],
            "state_std": DEVIATIONS["observation.state"],
        }
        statistics |= {"actions_mean": MEANS["action"], "actions_std": DEVIATIONS["action"]}
        (other / "processor_config.json").write_text(json.dumps(statistics))
    else:
        stats = {"state": "observation.state", "actions": "action"}
        statistics = {
            k: {"mean": MEANS[n] + [0.0] * 3, "std": DEVIATIONS[n] + [0.0] * 3}
            for k, n in stats.items()
        }
        (other / "assets" / "robot").mkdir(parents=True)
        (other / "assets" / "robot" / "norm_stats.json").write_text(
            json.dumps({"norm_stats": statistics})
        )
    policy, plain, obs = make(other), make(folder, normalize_obs=False), observations()
    inputs = policy.encode(obs)
    expected = (obs["state"] - named["observation.state.mean"]) / (2 + 1e-6 * (layout == "openpi"))
    assert (inputs["/vector"][:, :5] - expected).abs().max() < 1e-6 and not inputs["/vector"][
        :, 5:
    ].any()
    same = {**obs, "state": expected}
    noise = policy.noise(B, torch.Generator().manual_seed(1))
    d, e = policy.act(inputs, noise=noise), plain.act(plain.encode(same), noise=noise)
    scaled = e.action.view(B, C, A) * named["action.std"] + named["action.mean"]
    assert (d.action.view(B, C, A) - scaled).abs().max() < 1e-4
    assert (
        policy.normalize_actions(d.action.view(B, C, A), policy.encode_context(inputs))
        - e.action.view(B, C, A)
    ).abs().max() < 1e-4
    assert (d.log_prob - e.log_prob).abs().max() < 1e-4  # of the latents, which have no units
    policy.observe(obs, torch.ones(B, dtype=torch.bool))
    assert torch.equal(policy.encode(obs)["/vector"], inputs["/vector"])


# ------------------------------------------------------------------------------------- commands
SMALL = [
    *(f"env.{x}" for x in ("num_envs=4", "image_size=16", "max_episode_steps=8")),
    *(f"algorithm.{x}" for x in ("horizon=4", "global_batch_size=8", "update_epoch=2")),
    *(f"evaluation.{x}" for x in ("episodes=2", "num_envs=2", "video_episodes=0")),
]


@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
def test_train_and_evaluate(
    trunk: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "tiny", max_state_dim=32)
    options = [
        f"model.{name}={str(value).lower()}"
        for name, value in {"freeze_trunk": False, **TRUNKS[trunk]}.items()
    ]
    options += ["algorithm.micro_batch_size=4"]
    options += ["model.dtype=float32", "updates=2", "save_every=1", f"model.checkpoint={folder}"]
    summary = run_command(capsys, "train", "experiment=pi0_tabletop", *SMALL, *options)
    assert summary["updates"] == 2 and summary["final_return"] is not None
    evaluation = run_command(
        capsys,
        "evaluate",
        f"checkpoint={summary['checkpoint']}",
        "episodes=2",
        "video=false",
    )
    assert evaluation["eval/return"] == summary["final_return"]
    weights = torch.load(Path(summary["checkpoint"]) / "policy.pt", weights_only=True)
    assert any(name.startswith("trunk.vlm.vision_tower") for name in weights) == (
        trunk == "trained"
    )
    if "lora_rank" in TRUNKS[trunk]:
        export = ("export", f"checkpoint={summary['checkpoint']}", "lora=adapter", "out=adapter")
        assert run_command(capsys, *export)["action_difference"] == 0
    else:
        export = ("export", f"checkpoint={summary['checkpoint']}", "out=merged")
        assert run_command(capsys, *export)["action_difference"] == 0
        assert main.main([*export[:-1], "lora=adapter", "out=adapter"]) == 2
        assert "has no adapters (model.lora_rank=0)" in capsys.readouterr().err
    log = next(tmp_path.rglob("log.txt")).read_text()
    assert ("kept through the epochs of an update" in log) == (trunk == "frozen")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi0_libero", "pi05_libero", "smolvla_libero", "libero_vla"])
def test_libero_experiments_on_another_simulator(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another simulator replaces LIBERO, whose meshes are not part of this repository."""
    monkeypatch.chdir(tmp_path)
    options = [
        "env.id=Tabletop",
        "env.cameras=[front]",
        "env.kwargs.obs=language",
        "updates=1",
        "algorithm.horizon=4",
    ]
    if name != "libero_vla":
        sizes = {"max_state_dim": 32, "chunk_size": 10}
        if name == "smolvla_libero":
            folder = tiny_smolvla_checkpoint.write_checkpoint(
                tmp_path / "tiny", statistics=False, **sizes
            )
        else:
            folder = write_checkpoint(tmp_path / "tiny", kind=name.removesuffix("_libero"), **sizes)
        options += [
            f"model.checkpoint={folder}",
            "algorithm.micro_batch_size=4",
            "algorithm.update_epoch=1",
        ]
    else:
        options += ["cloning.dataset=null", "cloning.foresight_steps=2", "cloning.batch_size=4"]
        options += ["cloning.steps=2", "cloning.episodes=8", "model.width=16", "model.depth=1"]
    summary = run_command(capsys, "train", f"experiment={name}", *SMALL, *options)
    assert summary["updates"] == 1 and summary["final_success"] is not None


# --------------------------------------------------------------------------------------- errors
def test_missing_transformers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs transformers .*pip install 'embodied-ppo\[vla\]'"
    ):
        make(folder)


@pytest.mark.slow
def test_refused_checkpoints_and_options(folder: Path, tmp_path: Path) -> None:
    def refused(text: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            make(options.pop("folder", folder), **options)

    refused("there is no such directory; name one of π0", folder=tmp_path / "nowhere")
    refused("holds no config.json", folder=tmp_path)
    for kind, message in (
        ("smolvla", "a directory of SmolVLA"),
        ("what", "of what, not of π0"),
    ):
        other = tmp_path / kind
        other.mkdir()
        (other / "config.json").write_text(json.dumps({"type": kind}))
        refused(message, folder=other)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla"}))
    refused("OpenVLA, read with model.policy=token", folder=tmp_path)
    empty = write_checkpoint(tmp_path / "empty")
    (empty / "tokenizer.json").unlink()
    (empty / "tokenizer_config.json").unlink()
    refused("holds no tokenizer; copy", folder=empty)
    tensors = load_file(empty / "model.safetensors")
    save_file(
        {k: x for k, x in tensors.items() if "state_proj" not in k}, empty / "model.safetensors"
    )
    refused("the weights lack embed_action_time.state_proj.bias .2 in all", folder=empty)
    (empty / "model.safetensors").unlink()
    refused("holds no weights", folder=empty)
    refused("actions have 9 dimensions, the model's max_action_dim = 8", size=9)
    refused(
        "env.action_chunk=7: the model plans chunk_size = 6 actions; write env.action_chunk=6",
        chunk=7,
    )
    refused(
        "states have 9 numbers, the model reads max_state_dim = 8",
        spec={**dict(SPEC), "state": ArraySpec((9,))},
    )  # pyright: ignore
    refused("holds no image", spec={"state": ArraySpec((5,))})
    refused(
        "adapters are on what model.freeze_trunk=true freezes; keep one",
        lora_rank=4,
        freeze_trunk=True,
    )
    few = write_checkpoint(
        tmp_path / "few",
        statistics={
            "observation.state.mean": torch.ones(3),
            "observation.state.std": torch.ones(3),
        },
    )
    refused("its statistics of states have 3 numbers, the task's states 5", folder=few)
    with pytest.raises(ConfigError, match="the task's actions are discrete"):
        config = ModelConfig(policy="flow", checkpoint=str(folder))
        PI0(SPEC, Discrete(4), config, chunk=1, sentences=())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("chunk_size", "12", "config.json has chunk_size=12; it must be a whole number >= 1"),
        ("chunk_size", -1, "config.json has chunk_size=-1; it must be a whole number >= 1"),
        ("chunk_size", 10**9, "chunk_size=1000000000; it must be a whole number >= 1 and <= 10000"),
        ("min_period", "a", "min_period=a; it must be a finite number > 0"),
        ("tokenizer_max_length", -4, "tokenizer_max_length=-4; it must be a whole number"),
        ("dit_config", [], "dit_config=[]; it must be an object"),
        ("vlm_config", {}, "has the shape [300, 64], but config.json describes [257152, 2048]"),
        ("normalization_mapping", "x", "normalization_mapping=x; it must be an object"),
        ("model_type", None, "config.json names no type of model"),
    ],
)
def test_damaged_configurations_are_refused(
    key: str, value: Any, message: str, folder: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    raw = json.loads((folder / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ConfigError) as e:
        pi0_files.read(damaged)
    assert str(e.value).startswith(f"model.checkpoint={damaged}: ") and message in str(e.value)


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        (None, None),
        ([1], "cannot be read|have 0 numbers"),
        ({"mean": [1, 2]}, "cannot be read"),
        ({"mean": "a", "std": "b"}, "cannot be read"),
        ({"mean": [1, [2]], "std": [1, 1]}, "cannot be read"),
        ({"mean": [1, 2], "std": [1]}, "have 2 numbers mean and 1 std"),
        ({"mean": [1, 2], "std": [1, -1]}, "have a negative std"),
        ({"mean": [1, math.nan], "std": [1, 1]}, "are not finite"),
    ],
)
def test_damaged_statistics_are_refused(
    stats: Any, message: str | None, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": stats}}))
    raw = json.loads((folder / "config.json").read_text())
    if message is None:
        assert pi0_files.statistics(tmp_path, raw) == (None, None)
        return
    with pytest.raises(ConfigError, match=f"statistics of states in norm_stats.json ({message})"):
        pi0_files.statistics(tmp_path, raw)


def test_statistics_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    save_file({"action.min": torch.zeros(2)}, tmp_path / "a_normalizer_processor.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="ACTION=MEAN_STD needs mean and std"):
        pi0_files.statistics(tmp_path, raw)


def test_damaged_weights_and_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = (folder / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        pi0_files.read(damaged)
    (damaged / "model.safetensors").write_bytes(weights)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: i + (i > 2) * 900 for k, i in vocabulary.items()}
    (damaged / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="model has embeddings of 300 words"):
        make(damaged)
    (damaged / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        make(damaged)


def test_weights_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    weights = load_file(folder / "model.safetensors")
    name = "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    weights[name][3, 4] = math.inf
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(f"the weight {name} contains NaN or")):
        pi0_files.read(damaged)


def test_export_into_the_source_directory_is_refused(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(policy="flow", checkpoint=str(tmp_path)))
    run: Any = SimpleNamespace(config=config)
    with pytest.raises(ConfigError, match=r"out=.*inside: is inside model\.checkpoint="):
        EmbodiedMode().write_model(run, tmp_path / "inside")
