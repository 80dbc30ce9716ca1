"""The intrinsic reward by random network distillation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import reference_numerics as reference
import torch
from run_helpers import scale_policy

from embodied_envs.base import tree
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.ppo.curiosity import FEATURES, LEARNING_RATE, Curiosity
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.rewards import ReturnScaler
from embodied_ppo.ppo.robot_actor import RobotActor, robot_ppo
from tests.integration.test_resume import assert_same
from tests.ppo import test_robot_actor
from tests.ppo.test_robot_actor import ACTIONS, OBS, PLAIN, N, T, numbers
from tests.ppo.test_robot_actor_ranks import run_ranks

CURIOUS = {"weight": 0.5, "decay": 10}


def make(options: dict[str, Any] | None = None) -> tuple[PPO, Curiosity]:
    model = loader.load(ModelConfig, {"hidden": [8], "normalize_obs": False})
    torch.manual_seed(0)
    box = Box((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    policy = ActorCritic(ArraySpec((OBS,)), box, model, values=2)
    scale_policy(policy, 0.5)
    config = loader.load(AlgorithmConfig, {**PLAIN, "curiosity": CURIOUS, **(options or {})})
    learner = robot_ppo(policy, config, num_envs=N, updates=10, seed=0)
    assert learner.curiosity is not None
    return learner, learner.curiosity


def experience(seed: int = 0) -> Trajectory:
    """Return experience with one reward and two values."""
    t = test_robot_actor.experience(test_robot_actor.make(), seed=seed)
    g = torch.Generator().manual_seed(seed)
    value, next_value = (torch.randn(T, N, 2, generator=g) for _ in range(2))
    return replace(t, value=value, next_value=next_value)


def test_reward_and_weight_by_hand() -> None:
    """The predictor is the target, except for its last biases: the error is 0.5² everywhere."""
    learner, curiosity = make()
    curiosity.predictor.load_state_dict(curiosity.target.state_dict())
    with torch.no_grad():
        curiosity.predictor[1].bias += 0.5  # pyright: ignore[reportOperatorIssue]
    t = experience()
    rewarded, metrics = curiosity.with_reward(t, learner.actor.encode(t))
    assert torch.equal(rewarded.reward[..., 0], t.reward)
    torch.testing.assert_close(rewarded.reward[..., 1], torch.full((T, N), 0.25))
    assert numbers(metrics)["curiosity/reward"] == pytest.approx(0.25)
    # 0.5 x (1 - 4/10), and 0 from update 10 on
    for update, weight in ((0, 0.5), (4, 0.3), (10, 0.0), (99, 0.0)):
        groups = curiosity.groups_at(learner.groups, update)
        assert [g.weight for g in groups] == [1.0, pytest.approx(weight)]


def test_advantage_against_reference() -> None:
    """A = A_reward + 0.5·A_curiosity: clamped rewards, and errors divided by the deviation of G."""
    options = {"reward_clip": 0.5, "reward_clip_order": "after_norm", "gamma": 0.9}
    learner, curiosity = make(options)
    t = experience()
    rewarded, _ = curiosity.with_reward(t, learner.actor.encode(t))
    batch, metrics = learner.prepare(t)
    bonus, expected = rewarded.reward[..., 1].double(), torch.zeros(T, N, dtype=torch.float64)
    # G of each environment restarts at 0 after the end of an episode; population deviation.
    done, sums = t.terminated | t.truncated, []
    for n in range(N):
        g = 0.0
        for row in range(T):
            if t.mask[row, n]:
                g = 0.99 * g + float(bonus[row, n])
                sums.append(g)
                g = 0.0 if done[row, n] else g
    std = float((torch.tensor(sums).double().var(correction=0) + 1e-8).sqrt())
    rewards = ((t.reward.double().clamp(-0.5, 0.5), 0.9, 1.0), (bonus / std, 0.99, 0.5))
    for k, (reward, gamma, weight) in enumerate(rewards):
        fields = (reward, t.value[..., k], t.next_value[..., k], t.terminated, t.truncated, t.mask)
        a, _ = reference.gae(*(x.tolist() for x in fields), gamma=gamma, gae_lambda=0.95)
        expected += weight * torch.tensor(a, dtype=torch.float64)
    actual = batch.advantage.unflatten(0, (T, N)).double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert 0 < numbers(metrics)["advantage/share/curiosity"] < 1


def test_deviation_of_newest_returns_by_hand() -> None:
    """With R = 2 the newest rollout has the weight 1/2 (each return is one reward here)."""
    scaler, done = ReturnScaler(2, rollouts=2), torch.ones(1, 2, dtype=torch.bool)
    for reward in ([0.0, 8.0], [0.0, 8.0], [0.0, 8.0], [1.0, 3.0]):
        scaler.update(torch.tensor([reward]), done, done, gamma=0.9)
    # variance 16 and 1, means 4 and 2: (16 + 1)/2 + (1/4)·2² = 9.5
    assert float(scaler.std) == pytest.approx(9.5**0.5)


@pytest.mark.parametrize("unit", ["step", "column"])
def test_step_against_reference(unit: str) -> None:
    """One step of Adam on the mean error of unmasked samples, with clipped gradients."""
    learner, curiosity = make({"minibatch_unit": unit, "max_grad_norm": 0.01})
    batch, _ = learner.prepare(experience())
    target, predictor = (copy.deepcopy(x).double() for x in (curiosity.target, curiosity.predictor))
    index = torch.tensor([0, 2, 3])
    inputs, mask = tree.map(
        lambda x: x.index_select(1 if unit == "column" else 0, index),
        (batch.inputs["/vector"], batch.mask),
    )
    x = {"/vector": inputs[mask].double()}
    loss = ((target(x) - predictor(x)) ** 2).sum() / (FEATURES * int(mask.sum()))
    gradients = torch.autograd.grad(loss, [*predictor.parameters()])
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    curiosity.step(batch, index)
    for p, before, g in zip(
        curiosity.predictor.parameters(), predictor.parameters(), gradients, strict=True
    ):
        g = g * min(1.0, 0.01 / (float(norm) + 1e-6))
        # the first step: both moments without bias are g and g²
        expected = before - LEARNING_RATE * g / (g.abs() + 1e-8)
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-6)
    assert float(curiosity.losses[0]) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_visited_states_become_less_novel_than_others() -> None:
    learner, curiosity = make({"update_epoch": 20})
    t = experience()
    seen = learner.actor.encode(t)
    unseen = {"/vector": -seen["/vector"]}
    before = [float(curiosity.with_reward(t, x)[0].reward[..., 1].mean()) for x in (seen, unseen)]
    for update in range(5):
        learner.update(t, update=update)
    after = [float(curiosity.with_reward(t, x)[0].reward[..., 1].mean()) for x in (seen, unseen)]
    assert after[0] / before[0] < 0.8 * after[1] / before[1]


def test_restored_learner_continues_bit_for_bit() -> None:
    learner, _ = make({"reward_norm": "running"})
    other, curiosity = make({"reward_norm": "running"})
    learner.update(experience(), update=0)
    with torch.no_grad():  # as if another process had drawn another target
        curiosity.target[1].weight.zero_()  # pyright: ignore[reportCallIssue]
    other.policy.load_state_dict(learner.policy.state_dict())
    other.load_state(copy.deepcopy(learner.state()))
    for x in (learner, other):
        x.update(experience(1), update=1)
    assert_same(learner.state(), other.state())
    assert_same(learner.policy.state_dict(), other.policy.state_dict())


def test_number_of_ranks_does_not_change_result() -> None:
    t = experience()

    def learned(world: int) -> list[PPO]:
        learners = [make({"update_epoch": 3})[0] for _ in range(world)]

        def work(ranks: Ranks) -> None:
            learner = learners[ranks.rank]
            assert isinstance(learner.actor, RobotActor) and learner.curiosity is not None
            learner.optimizer.ranks = learner.actor.ranks = learner.curiosity.ranks = ranks
            learner.update(
                tree.map(lambda x: x.chunk(world, dim=1)[ranks.rank].contiguous(), t), update=0
            )

        run_ranks(world, work)
        return learners

    (one,), (first, second) = learned(1), learned(2)
    assert first.curiosity and second.curiosity and one.curiosity
    assert_same(first.curiosity.state(), second.curiosity.state())
    for a, b in zip(
        tree.leaves([one.curiosity.state()["predictor"], one.policy.state_dict()]),
        tree.leaves([first.curiosity.state()["predictor"], first.policy.state_dict()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_observations_that_are_not_normalised_are_not_clipped() -> None:
    """Beyond the bound of normalised observations, states would all look the same."""
    for normalize_obs, equal in ((False, False), (True, True)):
        config = loader.load(ModelConfig, {"hidden": [8], "normalize_obs": normalize_obs})
        policy = ActorCritic(ArraySpec((1,)), Box((-1.0,), (1.0,)), config, values=2)
        options = loader.load(AlgorithmConfig, {**PLAIN, "curiosity": CURIOUS})
        curiosity = Curiosity(policy.encoder, options, seed=0, ranks=Ranks())
        inputs = curiosity._own({VECTOR: torch.tensor([[20.0], [30.0]])})
        first, second = curiosity.error(inputs).tolist()
        assert (first == second) is equal
