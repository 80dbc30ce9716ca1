"""Small VLA policies: ``evaluate`` recomputes ``act``; densities, cloning, words, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, random_observations

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, Discrete
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.flow_matching import FlowVLA
from embodied_ppo.models.vla.gaussian import GaussianVLA
from embodied_ppo.models.vla.trunk import MASKED_WORD, WORDS, sentence_table, word_ids

C, A, B = 3, 2, 7
SPEC = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "reach the blue block, please", "lift it")
DECODE = ("parallel", "autoregressive")
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
Family = TokenVLA | FlowVLA | GaussianVLA


def make(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = ModelConfig(
        **{"policy": "token", "bins": 16, "width": 32, "word_buckets": 64, **options}
    )
    family = {"token": TokenVLA, "flow": FlowVLA, "gaussian": GaussianVLA}[config.policy]
    policy = family(
        SPEC, Box((-1.0,) * (C * A), (1.0,) * (C * A)), config, chunk=C, sentences=SENTENCES
    )
    policy.freeze(config.freeze_trunk)
    with torch.no_grad():  # new heads are zero: all actions would be equally likely
        for p in policy.parameters():
            p.add_(0.15 * torch.randn_like(p))
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


@pytest.mark.slow
@pytest.mark.parametrize("decode", DECODE)
def test_mode_and_frequencies_of_samples(decode: str) -> None:
    policy = make(decode=decode, bins=4)
    one = policy.encode(tree.map(lambda x: x[:1].expand(4000, *x.shape[1:]), observations()))
    sampled = policy.act(one, noise=policy.noise(4000, torch.Generator().manual_seed(0)))
    first = sampled.replay["bins"][:, 0, 0].long()
    p = policy.evaluate(one, sampled.action, sampled.replay).log_prob[:, 0, 0].exp()
    for k in range(4):
        chosen = first == k
        if chosen.any():
            assert abs(float(chosen.float().mean()) - float(p[chosen][0])) < 0.03
    mode = policy.act(one)
    assert torch.equal(mode.action, policy.act(one).action)
    assert bool((mode.log_prob[:, 0, 0].exp() >= p.max() - 1e-5).all())


def test_actions_depend_on_observations_and_earlier_tokens() -> None:
    """Images, words and state change every action; an earlier token changes the later ones, with
    autoregressive decoding only.
    """
    for decode in DECODE:
        policy, obs = make(decode=decode), observations()
        d = policy.act(policy.encode(obs))
        base = policy.evaluate(policy.encode(obs), d.action, d.replay)
        for name in obs:
            other = obs | {
                name: (
                    torch.flip(obs[name], dims=(-1,))
                    if name != "instruction"
                    else (obs[name] + 1) % 3
                )
            }
            changed = policy.evaluate(policy.encode(other), d.action, d.replay)
            assert (changed.log_prob - base.log_prob).abs().max() > 1e-4, (decode, name)
            assert (changed.value - base.value).abs().max() > 1e-4, (decode, name)
        bins = d.replay["bins"].clone()
        bins[:, 1, 0] = (bins[:, 1, 0] + 1) % 16
        changed = (
            policy.evaluate(policy.encode(obs), d.action, {"bins": bins}).log_prob - base.log_prob
        )
        assert changed[:, 0].abs().max() < 1e-6  # earlier tokens do not depend on it
        assert (changed[:, 1, 1:].abs().max() > 1e-4) == (decode == "autoregressive")


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


@pytest.mark.slow
def test_flow_chain_one_draws_one_stochastic_step() -> None:
    policy, rows = make(policy="flow", flow_steps=4), 4000
    one = policy.encode(tree.map(lambda x: x[:1].expand(rows, *x.shape[1:]), observations()))
    noise = policy.noise(rows, torch.Generator().manual_seed(0))
    d = policy.act(one, noise=noise)
    assert torch.bincount(d.replay["step"], minlength=4).tolist() == pytest.approx(
        [1000] * 4, abs=150
    )
    assert d.replay["latents"].shape == (rows, 2, C, A)  # two of five
    # Two chains with equal first latents and stochastic steps differ by the noise of the step.
    other = noise.clone()
    other[:, 1] = 0
    mean = policy.act(one, noise=other).replay["latents"][:, 1]
    std = torch.tensor([0.5, 0.5 * 3**0.5 / 2, 0.25, 0.5 / 12**0.5])[d.replay["step"]].view(
        -1, 1, 1
    )
    assert torch.allclose(d.replay["latents"][:, 1], mean + std * noise[:, 1], atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_cloning_approaches_the_demonstrations(family: str) -> None:
    policy, inputs = make(**FAMILIES[family]), make().encode(observations())
    action, executed = torch.rand(B, C, A) * 2 - 1, torch.ones(B, C, dtype=torch.bool)
    executed[:, -1] = False
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    copies = 8 if "flow" in family else 1  # a flow draws another time and noise for each copy
    steps = 40 if "tokens" in family else 200 if family == "flow of one step" else 100
    many = {name: x.repeat(copies, *[1] * (x.dim() - 1)) for name, x in inputs.items()}
    for i in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(i)
        loss, grounding = policy.bc_loss(
            many, action.repeat(copies, 1, 1), executed.repeat(copies, 1), generator
        )
        loss.backward()
        optimizer.step()
    assert grounding is not None and grounding.focus.shape == (copies * B, 32)
    distance = (policy.act(inputs).action.view(B, C, A) - action).abs()[:, :-1].mean()
    assert distance < 0.15, distance  # 0.66 by chance


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("detach", [True, False])
def test_value_head_is_the_only_critic_parameter_group(family: str, detach: bool) -> None:
    policy = make(**FAMILIES[family], detach_value=detach)
    groups = policy.parameter_groups()
    assert {id(p) for g in groups.values() for p in g} == {id(p) for p in policy.parameters()}
    inputs = policy.encode(observations())
    d = policy.act(inputs)
    policy.evaluate(inputs, d.action, d.replay).value.sum().backward()
    assert all(p.grad is not None for p in groups["critic"])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in groups["actor"]) != detach


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
        ModelConfig(policy="token", bins=16, width=32, word_buckets=64),
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
    policy, embedded = make(word_buckets=256), []
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


@torch.no_grad()
def test_equal_words_between_masked_words_have_different_embeddings() -> None:
    """The sentence has one word twice, as in "nudge the red cube over to the red circle"."""
    policy, embedded = make(), []
    policy.trunk.choose.register_forward_hook(lambda module, args, output: embedded.append(args[0]))
    inputs = policy.encode(observations(1))
    for pads in (0, 3):
        words = torch.tensor(
            [[MASKED_WORD, 5, MASKED_WORD, MASKED_WORD, MASKED_WORD, 5, MASKED_WORD, *pads * [0]]]
        )
        policy.encode_context(inputs | {WORDS: words})
    (a, b), n = embedded, 7
    assert torch.allclose(a[0], b[0, :n], atol=1e-6)
    assert (a[0, 1] - a[0, 5]).abs().max() > 0.1
    assert torch.allclose(
        policy.act(inputs | {WORDS: words}).log_prob,
        policy.act(inputs | {WORDS: words[:, :n]}).log_prob,
    )


@pytest.mark.parametrize(
    ("spec", "action", "message"),
    [
        (
            {"state": ArraySpec((5,))},
            Box((-1.0,), (1.0,)),
            "holds no image; name a camera with env.cameras=.front.",
        ),
        (
            {"eye": ArraySpec((3, 20, 16), torch.uint8)},
            Box((-1.0,), (1.0,)),
            "'eye': 20 x 16 pixels",
        ),
        (
            {"eye": ArraySpec((3, 16, 16), torch.uint8)},
            Discrete(4),
            "the task's actions are discrete",
        ),
    ],
)
def test_refused_specs(spec: dict[str, ArraySpec], action: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenVLA(spec, action, ModelConfig(policy="token"), chunk=1, sentences=())
