"""Distribution of several choices and numbers: by hand, against torch in float64, with masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import scale_policy
from torch import Tensor
from torch.distributions import Categorical, Normal

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box, Composite, Discrete
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.composite_actions import CompositeActions
from embodied_ppo.ppo import kl, losses

MASKED = {"obs": ArraySpec((4,)), "action_mask": ArraySpec((5,), torch.bool)}
SPEC = Composite((3, 2), Box((-1.0,), (2.0,)))


def policy(spec: Composite | Discrete = SPEC, *, seed: int = 0, **options: object) -> ActorCritic:
    torch.manual_seed(seed)
    actor = ActorCritic(MASKED, spec, ModelConfig(hidden=(8,), **options))  # pyright: ignore[reportArgumentType]
    scale_policy(actor, 1.0)
    with torch.no_grad():
        actor.policy_head.bias.normal_()
    return actor


def observations(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 5, generator=generator) < 0.6
    mask[:, 0] |= ~mask[:, :3].any(1)
    mask[:, 4] |= ~mask[:, 3:].any(1)
    return {"obs": torch.randn(rows, 4, generator=generator), "action_mask": mask}


def test_by_hand() -> None:
    # Logits (0, log 3) and (0, 0, log 2), mean 1, std 2; action (1, 2, 3):
    # log p = log(3/4) + log(2/4) + (-1/2 - log 2 - log(2 pi)/2) = -0.287682 - 0.693147 - 2.112086
    # H = 0.562335 + (2 * 1/4 log 4 + 1/2 log 2 = 1.039721) + (log 2 + 1.418939 = 2.112086)
    actions = CompositeActions((2, 3), 1, dist.NUMBERS["gaussian"])
    parameters = torch.tensor([[0.0, math.log(3), 0.0, 0.0, math.log(2), 1.0]])
    log_std = torch.tensor([math.log(2.0)])
    log_prob = actions.log_prob(torch.tensor([[1.0, 2.0, 3.0]]), parameters, log_std)
    assert log_prob.tolist()[0] == pytest.approx([-0.2876821, -0.6931472, -2.1120857])
    entropy = actions.entropy(parameters, log_std)
    assert entropy.tolist()[0] == pytest.approx([0.5623351, 1.0397208, 2.1120857])
    assert actions.sample(parameters, log_std, None).tolist() == [[1.0, 2.0, 1.0]]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 3)
)
def test_agrees_with_torch(seed: int, choices: list[int], numbers: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = 3, sum(choices) + numbers
    parameters = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    log_std = torch.randn(numbers, generator=generator, dtype=torch.float64)
    actions = CompositeActions(tuple(choices), numbers, dist.NUMBERS["gaussian"])
    noise = actions.noise(3, generator, torch.device("cpu")).double()
    action = actions.sample(parameters, log_std, noise)
    *logits, mean = parameters.split([*choices, numbers], dim=-1)
    expected = [Categorical(logits=x).log_prob(action[:, i])[:, None] for i, x in enumerate(logits)]
    expected.append(Normal(mean, log_std.exp()).log_prob(action[:, len(choices) :]))
    actual = actions.log_prob(action, parameters, log_std)
    torch.testing.assert_close(actual, torch.cat(expected, 1), rtol=1e-9, atol=1e-9)
    entropies = [Categorical(logits=x).entropy()[:, None] for x in logits]
    entropies.append(Normal(mean, log_std.exp()).entropy())
    torch.testing.assert_close(
        actions.entropy(parameters, log_std), torch.cat(entropies, 1), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (SPEC, {}),
        (SPEC, {"state_dependent_std": True}),
        (SPEC, {"recurrent": "gru", "recurrent_size": 4}),
        (SPEC, {"distribution": "beta"}),
        (Composite((3, 2)), {}),
        (Discrete(5), {}),
    ],
)
def test_evaluation_repeats_the_log_probabilities_of_acting(
    spec: Composite | Discrete, options: dict[str, object]
) -> None:
    actor, obs = policy(spec, **options), observations(64)
    if actor.memory_size:
        obs |= {"/memory": torch.randn(64, actor.memory_size), "/start": torch.zeros(64).bool()}
    inputs = actor.encode(obs)
    decision = actor.act(inputs, noise=actor.noise(64, torch.Generator().manual_seed(1)))
    evaluation = actor.evaluate(inputs, decision.action, decision.replay)
    torch.testing.assert_close(evaluation.log_prob, decision.log_prob, rtol=1e-6, atol=1e-6)
    assert evaluation.log_prob.isfinite().all() and evaluation.entropy.isfinite().all()
    joint = losses.reduce_log_prob(evaluation.log_prob, "action_level", batch_dims=1)
    assert joint.flatten().shape == (64,)


def test_masked_choices_have_probability_zero() -> None:
    actor, obs = policy(), observations(500)
    inputs = actor.encode(obs)
    noise = actor.noise(500, torch.Generator().manual_seed(1))
    for action in (actor.act(inputs, noise=noise).action, actor.act(inputs).action):
        chosen = torch.stack([action[:, 0], 3 + action[:, 1]], 1).long()
        assert obs["action_mask"].gather(1, chosen).all()
    evaluation = actor.evaluate(inputs, action, {})
    (evaluation.log_prob.sum() + evaluation.entropy.sum()).backward()
    gradients = [p.grad for p in actor.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in gradients)
    # One possible value: log p = 0 and no entropy, exactly.
    obs["action_mask"][:] = torch.tensor([False, True, False, True, False])
    inputs = actor.encode(obs)
    evaluation = actor.evaluate(inputs, actor.act(inputs).action, {})
    assert (evaluation.log_prob[:, 0, :2] == 0).all() and (evaluation.entropy[:, 0, :2] == 0).all()
    log_prob = actor.evaluate(inputs, torch.zeros(500, 3), {}).log_prob[:, 0, 0]
    assert (log_prob.exp() == 0).all()


def test_exact_kl_adds_up_over_choices() -> None:
    first, second = (policy(Composite((3, 2)), seed=seed) for seed in (0, 1))
    obs = observations(16)
    obs["action_mask"][:] = True
    inputs = first.encode(obs)
    action = first.act(inputs).action
    a, b = (p.evaluate(p.encode(obs), action, {}) for p in (first, second))
    level = losses.reduce_log_prob(a.log_prob, "chunk_level", batch_dims=1)
    actual = kl.estimate(level, level, "full", logits=a.logits, ref_logits=b.logits)
    p = first.policy_head(first.features(inputs)[0])
    q = second.policy_head(second.features(second.encode(obs))[0])
    expected = sum(
        torch.distributions.kl_divergence(Categorical(logits=x), Categorical(logits=y))
        for x, y in zip(p.split([3, 2], 1), q.split([3, 2], 1), strict=True)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["squashed_gaussian", "categorical"])
def test_other_distributions_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="2 choices and 1 numbers; use auto"):
        policy(distribution=kind)
