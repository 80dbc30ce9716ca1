"""algorithm.symmetry: the losses against references, exact ratios, memory, and what is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core.mirror import Mirror, SignedPermutation
from embodied_ppo.core.recurrent_state import MEMORY, START
from embodied_ppo.core.types import ArraySpec, Box, Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo.minibatches import take
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import RobotLoss, robot_ppo
from embodied_ppo.ppo.symmetry import repeated

T, N, OBS, ACTIONS = 6, 4, 5, 3
OBSERVATION = SignedPermutation((1, 0, 2, 3, 4), (1, 1, -1, 1, -1))
MIRROR = Mirror(SignedPermutation((1, 0, 2), (-1, -1, -1)), {"obs": OBSERVATION})
PLAIN = {"normalize_advantages": False, "max_grad_norm": None, "update_epoch": 1}


def make(options: dict[str, Any], **model: Any) -> PPO:
    """Return a learner with the mirror image; the old policy is far from symmetric."""
    torch.manual_seed(0)
    config = loader.load(AlgorithmConfig, {"global_batch_size": T * N, **PLAIN, **options})
    settings = loader.load(ModelConfig, {"hidden": [16], **model})
    policy = ActorCritic(ArraySpec((OBS,)), Box((-1.0,) * ACTIONS, (1.0,) * ACTIONS), settings)
    run_helpers.scale_policy(policy, 0.5)
    mirror = None if config.symmetry is None else MIRROR
    return robot_ppo(policy, config, num_envs=N, updates=100, seed=0, mirror=mirror)


@torch.no_grad()
def experience(learner: PPO, seed: int = 0, memory: Tensor | None = None) -> Trajectory:
    """Return a rollout of the policy; ``memory``: its state before, else episodes start."""
    g, policy = torch.Generator().manual_seed(seed), learner.policy
    rows, start = [], torch.full((N,), memory is None)
    state = torch.zeros(N, policy.memory_size) if memory is None else memory
    for _ in range(T):
        x = torch.randn(N, OBS, generator=g) + 1
        obs = {"obs": x, MEMORY: state, START: start} if policy.memory_size else x
        decision = policy.act(policy.encode(obs), noise=policy.noise(N, g))
        rows.append((obs, decision))
        start = torch.rand(N, generator=g) < 0.2
        state = decision.memory if decision.memory is not None else state
    obs, d = tree.stack(rows)
    fields = {"value": d.value, "replay": d.replay, "next_value": d.value.roll(-1, 0)}
    fields |= {"action": d.action, "log_prob": d.log_prob}
    reward, mask = torch.randn(T, N, generator=g), torch.rand(T, N, generator=g) < 0.8
    return run_helpers.trajectory(reward, obs=obs, mask=mask, **fields)


def loss_of(learner: PPO, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = learner.optimizer.loss
    loss.coefficients["entropy"] = learner.config.entropy_bonus
    return loss(batch)


def changed(learner: PPO) -> None:
    """Move the weights away from those that acted."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in learner.policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("symmetry", ["augment", "loss", "both"])
@pytest.mark.parametrize("distribution", ["gaussian", "squashed_gaussian", "beta"])
def test_losses_equal_a_float64_reference(symmetry: str, distribution: str) -> None:
    """Two separate evaluations in float64: originals, and images that are mirrored by hand."""
    options = {"symmetry": symmetry, "symmetry_coef": 0.7} if symmetry != "augment" else {}
    learner = make(
        {"symmetry": symmetry, "entropy_bonus": 0.01, **options}, distribution=distribution
    )
    batch, _ = learner.prepare(experience(learner))
    changed(learner)
    loss, stats = loss_of(learner, batch)

    c, policy = learner.config, learner.policy.double()
    m, mask = batch.mirror, batch.mask
    assert m is not None

    def parts(
        x: Any, action: Tensor, replay: dict[str, Tensor], old: Tensor, v: Tensor, w: Any = 1.0
    ) -> tuple[Tensor, ...]:
        out = policy.evaluate(
            tree.map(Tensor.double, x), action.double(), tree.map(Tensor.double, replay)
        )
        ratio = (out.log_prob.sum(-1) - old.double()).exp()
        a = batch.advantage.double()[:, None]
        surrogate = (w * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))[mask].mean()
        error = [
            (z - batch.returns.double()).abs()
            for z in (out.value, v + (out.value - v).clamp(-0.2, 0.2))
        ]
        huber = [torch.where(e < 10, 0.5 * e * e, 10 * (e - 5)) for e in error]
        value_loss, entropy = torch.maximum(*huber), out.entropy.sum(-1)
        return surrogate, value_loss[mask].mean(), entropy[mask].mean(), out.mean

    def mirrored(x: Tensor) -> Tensor:
        return torch.stack([-x[:, 1], -x[:, 0], -x[:, 2]], 1)

    pi, value, entropy, mean = parts(
        batch.inputs, batch.action, batch.replay, batch.log_prob, batch.value
    )
    replay = {k: mirrored(x) for k, x in batch.replay.items()}
    weight = (m.log_prob - batch.log_prob).double().exp().clamp(max=1.0)
    assert 0 < (weight[mask] < 0.9).double().mean() < 1
    images = m.inputs, mirrored(batch.action), replay, m.log_prob, m.value
    pi_m, value_m, _, mean_m = parts(*images, weight)
    difference = (mean_m - mirrored(mean)).square().mean(-1)[mask].mean()
    expected = pi + value
    if symmetry != "loss":
        expected = 0.5 * (pi + pi_m) + 0.5 * (value + value_m)
    expected = expected - 0.01 * entropy
    if symmetry != "augment":
        expected = expected + c.symmetry_coef * difference
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert stats["symmetry_error"].item() == pytest.approx(difference.item(), rel=1e-5)
    assert difference > 1e-3


def test_symmetry_loss_by_hand() -> None:
    """mu(s) = W s with an image that exchanges both observations and both actions.

    W = [[1, 2], [0, 1]], s = (1, 0): mu(s) = (1, 0), M s = (0, 1), mu(M s) = (2, 1),
    M mu(s) = (0, 1); ((2 - 0)^2 + (1 - 1)^2) / 2 = 2.
    """
    swap = SignedPermutation((1, 0), (1, 1))
    config = loader.load(
        AlgorithmConfig, {"symmetry": "loss", "global_batch_size": 1, "horizon": 1, **PLAIN}
    )
    settings = loader.load(
        ModelConfig, {"hidden": [2], "activation": "relu", "normalize_obs": False}
    )
    policy = ActorCritic(ArraySpec((2,)), Box((-1.0, -1.0), (1.0, 1.0)), settings)
    with torch.no_grad():
        policy.trunk.layers[0].weight.copy_(torch.eye(2))
        policy.policy_head.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    learner = robot_ppo(
        policy, config, num_envs=1, updates=1, seed=0, mirror=Mirror(swap, {"obs": swap})
    )
    one = torch.ones(1, 1)
    acted = {"action": torch.zeros(1, 1, 2), "log_prob": torch.zeros(1, 1, 1, 2)}
    obs = torch.tensor([[[1.0, 0.0]]])
    t = run_helpers.trajectory(one, obs=obs, value=one, next_value=one, **acted)
    batch, _ = learner.prepare(t)
    _, stats = loss_of(learner, batch)
    assert stats["symmetry_error"].item() == pytest.approx(2.0)


@pytest.mark.parametrize("model", [{}, {"recurrent": "gru", "recurrent_size": 4}])
def test_ratios_begin_at_one_for_samples_and_images(model: dict[str, Any]) -> None:
    """The old log-probability of an image is that of the policy, not that of the sample."""
    columns = {"minibatch_unit": "column", "horizon": T} if model else {}
    learner = make({"symmetry": "both", **columns}, **model)
    batch, _ = learner.prepare(experience(learner))
    terms = learner.optimizer.loss.evaluate(batch)
    m = batch.mirror
    assert m is not None and terms.mirror is not None
    torch.testing.assert_close(terms.log_prob, batch.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(terms.mirror.log_prob, m.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(terms.mirror.value, m.value, rtol=0, atol=1e-5)
    assert (m.log_prob - batch.log_prob).abs().max() > 0.1, "the policy is not symmetric"


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_images_of_episodes_have_a_memory_of_their_own(kind: str) -> None:
    """Two rollouts equal one of an episode that acts on mirrored observations step by step."""
    options = {"symmetry": "augment", "minibatch_unit": "column", "horizon": T, "lr": 0.0}
    learner = make(options, recurrent=kind, recurrent_size=4)
    first = experience(learner)
    last = tree.index(first.obs, -1)
    policy = learner.policy
    after = policy.act(policy.encode(last)).memory
    second = experience(learner, seed=1, memory=after)
    state, expected = torch.zeros(N, policy.memory_size), []
    for t in range(2 * T):
        obs = tree.index((first if t < T else second).obs, t % T)
        x = OBSERVATION(obs["obs"])
        inputs = policy.encode({"obs": x, MEMORY: state, START: obs[START]})
        decision = policy.act(inputs)
        state = decision.memory
        expected.append(decision.value)
    learner.prepare(first)
    saved = learner.symmetry.state()
    batch, _ = learner.prepare(second)
    assert batch.mirror is not None
    torch.testing.assert_close(batch.mirror.value, torch.stack(expected[T:]), rtol=0, atol=1e-6)
    torch.testing.assert_close(learner.symmetry.memory, state, rtol=0, atol=1e-6)
    # A learner that is restored continues with it.
    other = make(options, recurrent=kind, recurrent_size=4)
    other.symmetry.load_state(saved)
    again, _ = other.prepare(second)
    assert again.mirror is not None and torch.equal(again.mirror.value, batch.mirror.value)


def test_micro_batches_and_images_in_chunks_do_not_change_the_loss() -> None:
    learner = make({"symmetry": "both", "micro_batch_size": T * N // 4})
    batch, _ = learner.prepare(experience(learner))
    whole, _ = loss_of(learner, batch)
    rows = batch.mask.sum()
    parts = [take(batch, i, "step") for i in torch.arange(T * N).split(T * N // 4)]
    sums = sum(loss_of(learner, replace(part, rows=rows))[0].item() for part in parts)
    assert sums == pytest.approx(whole.item(), rel=1e-5)
    assert repeated(MIRROR.action, 6)(torch.arange(6.0)).tolist() == [-1, 0, -2, -4, -3, -5]


def test_statistics_of_originals_and_tied_moments() -> None:
    """KL, entropy and clipping are those of the originals, and the moments are symmetric."""
    runs = {}
    for symmetry in (None, "augment"):
        learner = make({"symmetry": symmetry})
        t = experience(learner)
        batch, _ = learner.prepare(t)
        _, stats = loss_of(learner, batch)
        runs[symmetry] = {
            k: stats[k].item() for k in ("approx_kl", "entropy", "clip_fraction", "count")
        }
        learner.actor.observe(t if learner.symmetry is None else learner.symmetry.with_images(t))
        moments = learner.policy.encoder.moments
    assert runs[None] == runs["augment"]
    assert moments.mean[2].abs() < 1e-6 and moments.mean[0] == pytest.approx(float(moments.mean[1]))
    assert moments.mean[3].abs() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("symmetry", ["augment", "loss"])
def test_a_trained_policy_is_symmetric_where_the_observation_is(symmetry: str) -> None:
    """The action of a self-mirrored observation is its own image, as it was not before."""
    options = {"normalize_advantages": True, "max_grad_norm": 0.5, "lr": 3e-3}
    options |= {"lr_schedule": "linear"} | ({"symmetry_coef": 5.0} if symmetry == "loss" else {})
    learner = make({"symmetry": symmetry, "update_epoch": 4, "global_batch_size": 12, **options})
    standing = torch.tensor([[0.3, 0.3, 0.0, 1.0, 0.0]])
    assert torch.equal(OBSERVATION(standing), standing)

    def asymmetry() -> float:
        mean = learner.policy.distribution(learner.policy.encode(standing))[0].detach()
        return float((MIRROR.action(mean) - mean).abs().max())

    before = asymmetry()
    for update in range(100):
        t = experience(learner, seed=update)
        reward = -(t.action - torch.tensor([0.5, -0.5, 0.0])).square().sum(-1)
        learner.update(replace(t, reward=reward), update=update)
    assert before > 0.1 and asymmetry() < 0.25 * before


def test_loss_without_symmetry_has_no_images() -> None:
    learner = make({})
    assert isinstance(learner.optimizer.loss, RobotLoss) and learner.symmetry is None
    batch, _ = learner.prepare(experience(learner))
    assert batch.mirror is None and "symmetry" not in learner.state()
