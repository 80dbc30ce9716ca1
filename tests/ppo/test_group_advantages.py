"""Reward groups: advantages and values of several rewards, against a float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import reference_numerics as reference
import torch
from run_helpers import run_command, scale_policy

from embodied_envs.types import ArraySpec, Box
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo import advantages
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import robot_ppo
from tests.integration.test_resume import assert_same, check_resume, rows
from tests.ppo import test_robot_actor
from tests.ppo.test_robot_actor import ACTIONS, OBS, PLAIN, N, T, full, numbers

TWO = {"near": {"terms": ["a"]}, "far": {}}


def make(options: dict[str, Any], *, groups: int = 2) -> PPO:
    """Return the learner of a policy whose value is linear in the observation."""
    model = loader.load(ModelConfig, {"hidden": [], "normalize_obs": False})
    torch.manual_seed(0)
    box = Box((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    policy = ActorCritic(ArraySpec((OBS,)), box, model, values=groups)
    scale_policy(policy, 0.5)
    config = loader.load(AlgorithmConfig, {**PLAIN, **options})
    return robot_ppo(policy, config, num_envs=N, updates=10, seed=0)


def experience(groups: int = 2) -> Trajectory:
    """Return experience with a reward and values for each group."""
    t = test_robot_actor.experience(test_robot_actor.make())
    g = torch.Generator().manual_seed(1)
    value, next_value, reward = (torch.randn(T, N, groups, generator=g) for _ in range(3))
    return replace(t, value=value, next_value=next_value, reward=reward)


def total(t: Trajectory) -> Trajectory:
    """Return the experience with one reward and one value, the sums over groups."""
    return replace(t, **{x: getattr(t, x).sum(-1) for x in ("value", "next_value", "reward")})


def test_weighted_sum_by_hand() -> None:
    a, b = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[4.0], [-4.0], [9.0]])
    mask = torch.tensor([[True], [True], [False]])
    a[2], b[2] = 0.0, 0.0
    parts, shares = advantages.weighted_sum(
        [a, b], mask, weights=[2.0, 0.5], normalized=[True, False]
    )
    # A_a has mean 2 and unbiased variance 2: (1 - 2)/sqrt(2) = -0.7071, times 2 is -1.4142
    torch.testing.assert_close(parts, torch.tensor([[-(2**0.5) + 2.0], [2**0.5 - 2.0], [0.0]]))
    # sums of magnitudes: 2 x 1.4142 and 2 + 2
    assert [float(x) for x in shares] == pytest.approx([2.8284 / 6.8284, 4 / 6.8284], rel=1e-4)


def test_two_equal_groups_are_their_sum() -> None:
    t = experience()
    batch, metrics = make({"reward_groups": TWO}).prepare(t)
    one, expected = make({}, groups=1).prepare(total(t))
    torch.testing.assert_close(batch.advantage, one.advantage)
    torch.testing.assert_close(batch.returns.sum(-1), one.returns)
    for tag, value in numbers(expected).items():
        assert numbers(metrics)[tag] == pytest.approx(value, rel=1e-5), tag
    # A value that is linear in fixed features changes as that of one group under gradient descent.
    changes = []
    for values, options, experienced in ((2, {"reward_groups": TWO}, t), (1, {}, total(t))):
        learner = make({**options, "value_clip": None, "huber_delta": None}, groups=values)
        head: Any = learner.policy.value_head
        batch, _ = learner.prepare(experienced)
        old = batch.value
        with torch.no_grad():
            head.weight.zero_()
            head.bias.zero_()
        learner.optimizer.loss(replace(batch, value=old))[0].backward()
        changes.append(head.weight.grad.sum(0))
    torch.testing.assert_close(*changes)


@pytest.mark.parametrize("norm", [None, "running"])
def test_groups_against_reference(norm: str | None) -> None:
    """Own discount, trace, normalisation and weight of each group; one step of the loss."""
    settings = {"near": (0.5, 0.3, True, 2.0), "far": (0.99, 0.95, False, 0.25)}
    names = ("gamma", "gae_lambda", "normalize", "weight")
    groups: dict[str, Any] = {k: dict(zip(names, x, strict=True)) for k, x in settings.items()}
    groups["near"] |= {"terms": ["a"]}
    options = {"reward_norm": norm, "value_clip": 0.2, "huber_delta": 0.5}
    t = experience()
    learner = make({**options, "reward_groups": groups})
    batch, metrics = learner.prepare(t)
    x = torch.Tensor.tolist
    flags = [x(y) for y in (t.terminated, t.truncated, t.mask)]
    parts, errors = [], []
    view = learner.policy.evaluate(batch.inputs, batch.action, batch.replay)
    value = view.value.unflatten(0, (T, N))
    for k, (gamma, gae_lambda, normalize, weight) in enumerate(settings.values()):
        reward = t.reward[..., k].double()
        if norm:
            reward = reward / learner.returns[k].std
        a, r = reference.gae(
            x(reward), x(t.value[..., k]), x(t.next_value[..., k]), *flags,
            gamma=gamma, gae_lambda=gae_lambda,
        )  # fmt: skip
        a = reference.standardise(a, flags[2]) if normalize else a
        parts.append(weight * torch.tensor(a, dtype=torch.float64))
        torch.testing.assert_close(
            batch.returns.unflatten(0, (T, N))[..., k].double()[t.mask],
            torch.tensor(r, dtype=torch.float64)[t.mask],
            rtol=1e-5,
            atol=1e-6,
        )
        flat = [y[t.mask].tolist() for y in (value[..., k], t.value[..., k], torch.tensor(r))]
        errors.append(sum(reference.value_loss(*flat, clip=0.2, delta=0.5)[0]))
    expected = sum(parts)
    torch.testing.assert_close(
        batch.advantage.unflatten(0, (T, N)).double(), expected, rtol=1e-5, atol=1e-6
    )
    _, stats = learner.optimizer.loss(batch)
    # the mean over samples of the sum over groups
    assert float(stats["value_loss"]) == pytest.approx(sum(errors) / int(t.mask.sum()), rel=1e-5)
    sizes = [float(part[t.mask].abs().sum()) for part in parts]
    share = numbers(metrics)["advantage/share/near"]
    assert share == pytest.approx(sizes[0] / sum(sizes), rel=1e-5)
    explained = 1 - (batch.returns - batch.value)[..., 1][batch.mask].var() / (
        batch.returns[..., 1][batch.mask].var()
    )
    assert numbers(metrics)["value/explained_variance/far"] == pytest.approx(
        float(explained), rel=1e-4
    )


def test_one_group_equals_no_group() -> None:
    t = full(test_robot_actor.experience(test_robot_actor.make()))
    plain, other = make({}, groups=1), make({"reward_groups": {"all": {}}}, groups=1)
    for learner in (plain, other):
        learner.update(t, update=0)
    assert_same(plain.policy.state_dict(), other.policy.state_dict())
    assert_same(plain.state(), other.state())


def test_gdpo_by_hand() -> None:
    """Each reward of a group of two responses is standardised before they are added.

    The second reward is 1000 times as large, and counts as much as the first.
    """
    options = {"adv_type": "grpo", "group_size": 2, "reward_groups": TWO}
    t = full(experience())
    reward = torch.zeros(T, N, 2)
    reward[-1, 0::2] = torch.tensor([1.0, 0.0])
    reward[-1, 1::2] = torch.tensor([0.0, 3000.0])
    t = replace(
        t,
        reward=reward,
        terminated=torch.zeros_like(t.mask).index_fill(0, torch.tensor([T - 1]), True),
    )
    batch, _ = make(options).prepare(t)
    # s = (1, 0): mean 0.5, deviation sqrt(0.5), A = ±0.5/sqrt(0.5) = ±0.7071; the sum is 0
    torch.testing.assert_close(batch.advantage, torch.zeros(T * N), atol=1e-5, rtol=0)
    heavier = {**options, "reward_groups": {"near": {"terms": ["a"], "weight": 3.0}, "far": {}}}
    batch, _ = make(heavier).prepare(t)
    expected = torch.tensor([2**0.5, -(2**0.5)]).repeat(T * N // 2)
    torch.testing.assert_close(batch.advantage, expected, atol=1e-4, rtol=0)


GROUPS = "{run: {terms: [reward_run], gamma: 0.9, normalize: true}, rest: {weight: 0.5}}"
TRAIN = ("env.id=HalfCheetah-v4", "env.num_envs=4", "env.num_threads=1", "model.hidden=[16]")
TRAIN += ("algorithm.horizon=8", "algorithm.global_batch_size=16", "algorithm.update_epoch=2")
TRAIN += ("evaluation.episodes=0", "threads=1", "device=cpu", f"algorithm.reward_groups={GROUPS}")
TRAIN += ("algorithm.reward_norm=running",)
RECURRENT = ("model.recurrent=gru", "model.recurrent_size=8", "algorithm.minibatch_unit=column")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("compile=never",),
        ("compile=always",),
        (*RECURRENT, "compile=never"),
        ("env.action_chunk=2",),
        ("algorithm.curiosity.weight=0.5", "algorithm.curiosity.decay=8", "compile=always"),
    ],
    ids=["eager", "compiled", "recurrent", "chunks", "curiosity"],
)
def test_run_with_groups_resumes_bit_for_bit(options: tuple[str, ...], tmp_path, capsys) -> None:
    whole = tmp_path / "whole"
    lines = (*TRAIN, *options, "updates=4", "save_every=2", f"run_dir={whole}")
    run_command(capsys, "train", *lines)
    check_resume(whole, tmp_path / "half", at=2, updates=4)
    assert 0 < rows(whole)[-1]["advantage/share/run"] < 1
    run_command(capsys, "evaluate", f"checkpoint={whole}", "episodes=2", "video=false")
