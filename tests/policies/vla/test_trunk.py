"""Small VLA policies: ``evaluate`` recomputes ``act``; densities, cloning, words, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_helpers import perturb
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, random_observations

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box, Discrete
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla.action_tokens import TokenVLA
from embodied_ppo.policies.vla.flow_matching import FlowVLA
from embodied_ppo.policies.vla.gaussian import GaussianVLA
from embodied_ppo.policies.vla.trunk import sentence_table, word_ids

C, A, B = 3, 2, 7
SPEC = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "reach the blue block, please", "lift it")
FAMILIES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "tokens, one by one": {"decode": "autoregressive"},
    "gaussian": {"policy": "gaussian", "init_log_std": -0.5},
    "flow": {"policy": "flow"},
    "flow, all steps": {"policy": "flow", "flow_chain": "sum"},
    "flow, mean of steps": {"policy": "flow", "flow_chain": "mean", "flow_steps": 3},
    "flow, learned noise": {"policy": "flow", "flow_chain": "sum", "flow_noise": "learned"},
    "flow of one step": {"policy": "flow", "flow_steps": 1},
}


def make(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = ModelConfig(**{"policy": "token", "bins": 16, "width": 32, **options})
    family = {"token": TokenVLA, "flow": FlowVLA, "gaussian": GaussianVLA}[config.policy]
    policy = family(
        SPEC, Box((-1.0,) * (C * A), (1.0,) * (C * A)), config, chunk=C, sentences=SENTENCES
    )
    policy.freeze(config.freeze_trunk)
    perturb(policy, 0.15, frozen=True)  # new heads are zero: all actions would be equally likely
    return policy


def observations(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    return random_observations(SPEC, rows, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"freeze_trunk": True}], ids=str)
def test_evaluate_reproduces_act_for_any_micro_batch(family: str, options: dict[str, Any]) -> None:
    policy = make(**FAMILIES[family], **options)
    inputs = policy.encode(observations())
    for noise in (policy.noise(B, torch.Generator().manual_seed(1)), None):
        d = policy.act(inputs, noise=noise)
        check_evaluate_reproduces_act(
            policy, inputs, d, shape=(B, C, A), sizes=(B, 3, 1), rtol=1e-5
        )
    assert d.value.abs().max() > 0 and torch.equal(d.action, policy.act(inputs).action)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_trunk_gives_equal_actions_and_no_gradient(family: str) -> None:
    policy = make(**FAMILIES[family])
    noise = policy.noise(B, torch.Generator().manual_seed(1))
    d = policy.act(policy.encode(observations()), noise=noise)
    policy.freeze(True)
    policy.FROZEN_ROWS = 3
    inputs = policy.encode(observations())
    frozen = policy.act(inputs, noise=noise)
    assert (frozen.log_prob - d.log_prob).abs().max() < 1e-5 and (
        frozen.value - d.value
    ).abs().max() < 1e-5
    out = policy.evaluate(inputs, frozen.action, frozen.replay)
    (out.log_prob.sum() + out.value.sum()).backward()
    assert all(p.grad is None for p in policy.trunk.parameters())
    groups = [p for group in policy.parameter_groups().values() for p in group]
    assert not {id(p) for p in policy.trunk.parameters()} & {id(p) for p in groups}
    assert policy.decoder.blocks[0].qkv.weight.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_sampling_density(family: str) -> None:
    """The mean ratio E[p'/p] under p is 1, for another policy's p' of the same latents."""
    options = FAMILIES[family] | {"temperature": 1.3} | ({"bins": 4} if "tokens" in family else {})
    policy, other = make(**options), make(**options)
    with torch.no_grad():
        for name in ("head", "mean", "velocity"):
            if hasattr(other, name):
                getattr(other, name).bias[0].add_(0.1)
    rows = 5_000
    obs = tree.map(lambda x: x[:1].expand(rows, *x.shape[1:]), observations())
    inputs = {name: x[:1] for name, x in policy.encode(tree.map(lambda x: x[:1], obs)).items()}
    inputs = {name: x.expand(rows, *x.shape[1:]) for name, x in inputs.items()}
    d = policy.act(inputs, noise=policy.noise(rows, torch.Generator().manual_seed(3)))
    with torch.no_grad():
        new = other.evaluate(inputs, d.action, d.replay).log_prob
    if options.get("flow_chain") == "mean":
        new, d = new * 4, d  # K + 1 terms
        ratio = (new - 4 * d.log_prob).sum((1, 2)).exp()
    else:
        ratio = (new - d.log_prob).sum((1, 2)).exp()
    assert ratio.std() > 0.01
    assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / rows**0.5


def test_autoregressive_tokens_agree_with_uncached_decoding() -> None:
    """Compute each token's distribution from all tokens before it."""
    policy = make(decode="autoregressive")
    inputs = policy.encode(observations())
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(2)))
    bins = d.replay["bins"].flatten(1).long()
    assert policy.before is not None
    memory = policy.trunk(inputs)
    for i in range(C * A):
        before = torch.cat((torch.full((B, 1), 16), bins[:, :i]), dim=1)
        x = policy.query[: i + 1] + memory.summary.unsqueeze(1) + policy.before(before)
        logits = policy.logits(policy.decoder(x, memory, causal=True)[:, -1])
        expected = F.log_softmax(logits.double(), -1).gather(1, bins[:, i : i + 1]).squeeze(1)
        assert (d.log_prob.flatten(1)[:, i] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("eta", [0.5, 1e-4])
def test_chain_agrees_with_float64_reference(eta: float) -> None:
    """Compute the chain step by step in float64; with eta -> 0 it is the deterministic flow."""
    steps = 5
    policy = make(policy="flow", flow_steps=steps, flow_eta=eta, flow_chain="sum")
    inputs = policy.encode(observations())
    noise = policy.noise(B, torch.Generator().manual_seed(2))
    d = policy.act(inputs, noise=noise)
    memory = policy.encode_context(inputs)
    kept = policy.decoder.project_memory(memory)
    x, total, flow = noise[:, 0].double(), torch.zeros(B, C, A, dtype=torch.float64), noise[:, 0]
    for k in range(steps):
        tau, delta = 1 - k / steps, 1 / steps

        def v(at: Tensor, tau: float = tau) -> Tensor:
            return policy._flow(memory, kept, at.float(), torch.full((B,), tau))[0].detach()

        sigma = eta * (tau / (1 - (tau if k else 1 - delta))) ** 0.5
        velocity = v(x).double()
        a, e = x - tau * velocity, x + (1 - tau) * velocity
        mean = a * (1 - (tau - delta)) + e * (tau - delta - sigma**2 * delta / (2 * tau))
        std = sigma * delta**0.5
        assert k or abs(std - eta) < 1e-12  # the first step's deviation is eta
        x = mean + std * noise[:, 1 + k].double()
        total += -0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        flow = flow - delta * v(flow)
    assert (d.action.view(B, C, A) - x).abs().max() < 1e-4
    assert (d.log_prob - total).abs().max() < 1e-3 * (1 if eta == 0.5 else 100)
    if eta < 0.01:
        assert (d.action.view(B, C, A) - flow).abs().max() < 0.01


@pytest.mark.parametrize(("bins", "parts"), [(3, 3), (4, 3), (5, 5), (255, 255), (256, 255)])
def test_bins(bins: int, parts: int) -> None:
    policy = make(bins=bins)
    centres = torch.linspace(-1 + 1 / parts, 1 - 1 / parts, parts)
    assert torch.allclose(policy.actions_of(torch.arange(parts)), centres, atol=1e-6)
    assert policy.actions_of(torch.tensor(bins - 1)) == policy.actions_of(torch.tensor(parts - 1))
    assert torch.equal(policy.bins_of(policy.actions_of(torch.arange(parts))), torch.arange(parts))
    edges = torch.tensor(
        [-2.0, -1.0, -1 + 1.99 / parts, -1 + 2.01 / parts, 1 - 1.99 / parts, 1.0, 3.0]
    )
    assert policy.bins_of(edges).tolist() == [0, 0, 0, 1, parts - 1, parts - 1, parts - 1]
    assert policy.actions_of(policy.bins_of(torch.zeros(1))) == 0  # the action 0 is exact


def test_cloning_loss_ignores_unexecuted_actions() -> None:
    policy, inputs = make(), make().encode(observations())
    action, executed = torch.rand(B, C, A) * 2 - 1, torch.ones(B, C, dtype=torch.bool)
    executed[:, -1] = False
    loss, grounding = policy.bc_loss(inputs, action, executed)
    other = action.clone()
    other[:, -1] = -other[:, -1]
    assert torch.equal(loss, policy.bc_loss(inputs, other, executed)[0])
    assert grounding is not None and grounding.cells is not None
    assert grounding.focus.shape == (B, 32)
    assert grounding.cells.shape == (B, 16 * 24 // 16, 16)
    logits = policy.logits(policy.hidden(policy.trunk(inputs), None)).view(B, C, A, 16)
    rows = -logits.log_softmax(-1).gather(-1, policy.bins_of(action).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(loss, rows[:, :-1].mean(), atol=1e-6)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        policy.bc_loss(inputs, action, executed)[0].backward()
        optimizer.step()
    assert float(policy.bc_loss(inputs, action, executed)[0].detach()) < 0.1 * float(loss.detach())


def test_word_ids_and_padding() -> None:
    assert word_ids("Push the RED block!", 64) == word_ids("push the red block", 64)
    assert len(word_ids("push the red block", 64)) == 4 and 0 not in word_ids(
        "push the red block", 2
    )
    table = sentence_table(SENTENCES, 64)
    assert table.shape == (3, 5) and table[2].tolist()[2:] == [0, 0, 0]
    # A checkpoint can be used with other sentences, and padding has no effect.
    policy, obs = make(), observations(3)
    other = TokenVLA(
        SPEC,
        Box((-1.0,) * (C * A), (1.0,) * (C * A)),
        ModelConfig(policy="token", bins=16, width=32),
        chunk=C,
        sentences=("a very long sentence that makes the table of words wider", *SENTENCES),
    )
    other.load_state_dict(policy.state_dict())
    moved = obs | {"instruction": obs["instruction"] + 1}
    a, b = policy.act(policy.encode(obs)), other.act(other.encode(moved))
    assert (a.log_prob - b.log_prob).abs().max() < 1e-5


@torch.no_grad()
def test_grounding_depends_on_the_selected_word_only() -> None:
    """Images are encoded without the words, and a head reads only the words that it selects."""
    policy, embedded = make(), []
    policy.set_sentences(
        ("take the red block to the blue zone", "take the red block to the green zone")
    )
    obs = tree.map(lambda x: x[:1].expand(2, *x.shape[1:]), observations()) | {
        "instruction": torch.arange(2)
    }
    inputs = policy.encode(obs)
    choose = policy.trunk.choose
    choose.register_forward_hook(lambda module, args, output: embedded.append(args[0]))
    policy.encode_context(inputs)
    choose.bias.zero_()
    for word, same in ((2, True), (6, False)):  # red; blue or green
        choose.weight.copy_(100 * embedded[0][0, word].expand_as(choose.weight))
        memory = policy.encode_context(inputs)
        for x in memory.grounding:
            assert torch.allclose(x[0], x[1], atol=1e-5) == same, word
        assert not torch.allclose(memory.summary[0], memory.summary[1], atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "action", "message"),
    [
        ({"state": ArraySpec((5,))}, Box((-1.0,), (1.0,)), r"env\.cameras"),
        ({"eye": ArraySpec((3, 20, 16), torch.uint8)}, Box((-1.0,), (1.0,)), "eye.*20 x 16"),
        ({"eye": ArraySpec((3, 16, 16), torch.uint8)}, Discrete(4), "discrete"),
    ],
)
def test_refused_specs(spec: dict[str, ArraySpec], action: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenVLA(spec, action, ModelConfig(policy="token"), chunk=1, sentences=())
