"""REPPO: a step and the targets against float64 references, state, options."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from embodied_ppo.algorithms import advantages, reppo_learner
from embodied_ppo.algorithms.reppo_learner import ENTROPY, ENTROPY_PER_DIMENSION, ReppoLearner
from embodied_ppo.algorithms.reppo_step import (
    DUAL_LR,
    MIN_COEFFICIENT,
    STATISTICS,
    ReppoStep,
    Samples,
    sample_action,
)
from embodied_ppo.commands import main
from embodied_ppo.config.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.core import compile, devices, tree
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, TrainingError, Trajectory
from embodied_ppo.models.action_value import (
    BIN_WIDTH,
    MAX_VALUE,
    NUM_BINS,
    SIGMA_IN_BINS,
    ActionValue,
)
from embodied_ppo.models.actor_critic import ActorCritic

T, N, D, A = 6, 4, 5, 2
MODEL = ModelConfig(
    hidden=(16, 16),
    activation="silu",
    layer_norm=True,
    shared_backbone=False,
    distribution="squashed_gaussian",
    state_dependent_std=True,
    init_log_std=-0.5,
    max_log_std=1.0,
    orthogonal_init=False,
)
CONFIG = AlgorithmConfig(
    type="reppo",
    horizon=T,
    kept_rollouts=3,
    rollouts_per_update=2,
    update_epoch=2,
    global_batch_size=8,
    entropy_bonus=0.01,
    max_grad_norm=0.3,
    max_kl=0.05,
    lr=1e-2,
    value_lr=2e-2,
    adam_eps=1e-8,
)


MAX_KL = 0.04
"""Limit of the KL of single steps."""


def models(seed: int = 0) -> tuple[ActorCritic, ActionValue]:
    torch.manual_seed(seed)
    policy = ActorCritic(ArraySpec((D,)), Box((-1.0,) * A, (1.0,) * A), MODEL).actor_only()
    return policy, ActionValue(policy.encoder, A, MODEL, networks=2)


def learner(config: AlgorithmConfig = CONFIG, **options: Any) -> ReppoLearner:
    policy, critic = models()
    return ReppoLearner(policy, critic, config, num_envs=N, updates=10, seed=3, **options)


def rollout(policy: ActorCritic, seed: int) -> Trajectory:
    """Return a rollout with random rewards, ends of episodes and masked rows after them."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(T + 1, N, D, generator=g)
    decision = policy.act(
        policy.encode(obs[:-1].flatten(0, 1)), noise=torch.randn(T * N, A, generator=g)
    )
    decision = tree.map(lambda x: x.unflatten(0, (T, N)), decision)
    done = torch.rand(T, N, generator=g) < 0.2
    clock = torch.rand(T, N, generator=g) < 0.5
    mask = torch.ones(T, N, dtype=torch.bool)
    mask[1:] = ~done[:-1]  # the row that resets an episode
    done &= mask
    successor = obs[1:].clone()
    successor[done] = torch.randn(int(done.sum()), D, generator=g)
    nan = torch.full((T, N), torch.nan)
    return Trajectory(
        obs=obs[:-1],
        action=decision.action,
        log_prob=decision.log_prob,
        value=nan,
        replay=decision.replay,
        next_value=nan,
        reward=torch.randn(T, N, generator=g),
        terminated=done & ~clock,
        truncated=done & clock,
        mask=mask,
        version=torch.zeros(T, N, dtype=torch.int64),
        next_obs=successor,
    )


# ------------------------------------------------------------------------------------------ targets
@pytest.mark.parametrize("seed", range(5))
def test_retrace_equals_its_definition(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, T, N, generator=g).unbind()
    end = torch.rand(T, N, generator=g) < 0.3
    clock, mask = torch.rand(2, T, N, generator=g).unbind()
    flags = {"terminated": end & (clock < 0.5), "truncated": end & (clock >= 0.5)}
    mask = mask > 0.2
    trace, discount = torch.rand(2, T, N, generator=g).unbind()
    actual = advantages.retrace(
        reward=reward,
        value=value,
        next_value=next_value,
        mask=mask,
        discount=discount,
        trace=trace,
        **flags,
    )
    for n in range(N):
        correction = 0.0  # c_{t+1} D_{t+1}
        for t in reversed(range(T)):
            successor = 0.0 if flags["terminated"][t, n] else float(next_value[t, n])
            if t + 1 == T or end[t, n] or not mask[t + 1, n]:
                correction = 0.0
            target = float(reward[t, n]) + float(discount[t, n]) * (successor + correction)
            assert float(actual[t, n]) == pytest.approx(target, abs=1e-5)
            correction = float(trace[t, n]) * (target - float(value[t, n]))


def test_targets_of_a_new_rollout() -> None:
    trainer = learner()
    t = rollout(trainer.policy, 0)
    trainer._keep(t)
    samples, _, weight = trainer._targets(trainer.kept[0], torch.Generator().manual_seed(0))
    # The policy that acted is the current one, so that no trace is cut.
    torch.testing.assert_close(weight, torch.ones(T, N))
    ends = t.terminated
    assert bool(ends.any())
    scaled = t.reward / float(trainer.return_scaler.std)
    torch.testing.assert_close(samples.target.view(T, N)[ends], scaled[ends])


def test_values_of_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, entropy and traces: r + γ Q(s', mean action), with final observations."""
    trainer = learner(replace(CONFIG, gae_lambda=0.0))
    trainer.parameters[-1][ENTROPY] = -80.0
    monkeypatch.setattr(
        reppo_learner, "sample_action", lambda m, s, noise: sample_action(m, s, 0 * noise)
    )
    t = rollout(trainer.policy, 4)
    assert bool(t.truncated.any()) and t.next_obs is not None
    assert not torch.equal(t.next_obs[:-1], t.obs[1:])
    trainer._keep(t)
    samples, _, _ = trainer._targets(trainer.kept[0], torch.Generator())
    inputs = trainer.policy.encode(t.next_obs.flatten(0, 1))
    value = trainer.critic(inputs, trainer.policy.distribution(inputs)[0].tanh()).view(T, N)
    expected = t.reward / trainer.return_scaler.std.float() + CONFIG.gamma * value * ~t.terminated
    torch.testing.assert_close(samples.target.view(T, N)[t.mask], expected[t.mask])


# ---------------------------------------------------------------------------------------- one step
def double_step(
    policy: ActorCritic,
    critic: ActionValue,
    log_coefficients: Tensor,
    optimizers: list[torch.optim.Optimizer],
    b: Samples,
    noise: Tensor,
    target_entropy: float,
) -> None:
    """Take a step as ``ReppoStep`` defines it, in float64, with torch's AdamW."""
    edges = torch.linspace(
        -MAX_VALUE - BIN_WIDTH / 2, MAX_VALUE + BIN_WIDTH / 2, NUM_BINS + 1, dtype=torch.float64
    )
    grid = torch.linspace(-MAX_VALUE, MAX_VALUE, NUM_BINS, dtype=torch.float64)
    centre = b.target.clamp(-MAX_VALUE, MAX_VALUE)[:, None]
    mass = torch.erf((edges - centre) / (SIGMA_IN_BINS * BIN_WIDTH * math.sqrt(2))).diff(dim=1)
    mass = mass / mass.sum(1, keepdim=True)
    for optimizer in optimizers:
        optimizer.zero_grad()
    losses = [functional.cross_entropy(x, mass) for x in critic.logits(b.inputs, b.action)]
    torch.stack(losses).sum().backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), CONFIG.max_grad_norm or 0)
    optimizers[1].step()

    alpha, beta = log_coefficients.detach().exp()
    mean, log_std = policy.distribution(b.inputs)
    u = mean + log_std.exp() * noise
    normal = torch.distributions.Normal(mean, log_std.exp())
    log_prob = (normal.log_prob(u) - torch.log1p(-(u.tanh() ** 2))).sum(-1)
    q = (critic.logits(b.inputs, u.tanh()).softmax(-1) @ grid).amin(0)
    old = torch.distributions.Normal(b.mean, b.log_std.exp())
    kl = torch.distributions.kl_divergence(old, normal).sum(-1)
    near = (kl < MAX_KL).double().detach()
    loss = (near * (alpha * log_prob - q) + (1 - near) * beta * kl).mean()
    optimizers[0].zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CONFIG.max_grad_norm or 0)
    optimizers[0].step()
    entropy, mean_kl = -log_prob.detach().mean(), kl.detach().mean()
    excess = torch.stack([entropy - target_entropy, MAX_KL - mean_kl])
    (log_coefficients.exp() * excess).sum().backward()
    optimizers[2].step()
    log_coefficients.data.clamp_(min=math.log(MIN_COEFFICIENT))


def test_steps_equal_torchs_optimizers_in_float64() -> None:
    trainer = learner()
    policy, critic = (copy.deepcopy(m).double() for m in (trainer.policy, trainer.critic))
    log_coefficients = trainer.parameters[-1].double().requires_grad_()
    settings = {"eps": CONFIG.adam_eps, "weight_decay": 0.0}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters, lr=lr, **settings)
        for parameters, lr in (
            (policy.parameters(), CONFIG.lr),
            (critic.parameters(), CONFIG.value_lr),
            ([log_coefficients], DUAL_LR),
        )
    ]
    g = torch.Generator().manual_seed(5)
    M, B = 24, 8
    mean, log_std = 0.3 * torch.randn(M, A, generator=g), torch.full((M, A), -0.5)
    samples = Samples(
        inputs={"/vector": torch.randn(M, D, generator=g)},
        action=torch.rand(M, A, generator=g) * 2 - 1,
        target=4 * torch.randn(M, generator=g),
        mean=mean,
        log_std=log_std,
    )
    step = ReppoStep(trainer.policy, trainer.critic, CONFIG, samples, trainer.entropy_target)
    rows = trainer._settings(6, 0)
    for i in range(6):
        index = torch.randint(M, (B,), generator=g)
        noise = torch.randn(B, A, generator=g)
        state = [*trainer.parameters, *trainer.first_moments, *trainer.second_moments]
        statistics = step(
            *state, rows[i], torch.tensor(MAX_KL), index, noise, *tree.leaves(samples)
        )
        assert len(statistics) == len(STATISTICS)
        minibatch = tree.map(lambda x, index=index: x[index].double(), samples)
        double_step(
            policy,
            critic,
            log_coefficients,
            optimizers,
            minibatch,
            noise.double(),
            trainer.entropy_target,
        )
    for actual, expected in (
        (trainer.policy, policy),
        (trainer.critic, critic),
    ):
        for p, q in zip(actual.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.double(), q, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        trainer.parameters[-1].double(), log_coefficients.detach(), rtol=1e-5, atol=1e-5
    )
    assert trainer.entropy_target == A * ENTROPY_PER_DIMENSION


def test_schedule_is_that_of_the_policy_only() -> None:
    trainer = learner(replace(CONFIG, lr_schedule="linear"))
    trainer.steps = 10**6  # without the bias corrections of the first steps
    first, last = trainer._settings(1, 0)[0], trainer._settings(1, 9)[0]
    torch.testing.assert_close(first[:, 0], torch.tensor([CONFIG.lr, CONFIG.value_lr, DUAL_LR]))
    torch.testing.assert_close(
        last[:, 0], torch.tensor([0.1 * CONFIG.lr, CONFIG.value_lr, DUAL_LR])
    )


def test_limit_of_the_kl_follows_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    call = ReppoStep.__call__

    def recorded(self: ReppoStep, *tensors: Tensor) -> Tensor:
        limits.append(float(tensors[-len([*tree.leaves(self.samples)]) - 3]))
        return call(self, *tensors)

    monkeypatch.setattr(ReppoStep, "__call__", recorded)
    trainer = learner(replace(CONFIG, lr_schedule="linear"))
    for update in (0, 9):
        trainer.update(rollout(trainer.policy, update), update=update)
    assert [*dict.fromkeys(limits)] == pytest.approx([CONFIG.max_kl, 0.1 * CONFIG.max_kl])


def test_coefficients_have_a_lower_limit() -> None:
    """Entropies far above the target do not bring α so low that it could not rise in time."""
    trainer = learner(replace(CONFIG, entropy_target=-100.0))
    assert float(trainer.coefficients[ENTROPY]) == pytest.approx(CONFIG.entropy_bonus)
    with torch.no_grad():
        trainer.parameters[-1].fill_(math.log(1.001 * MIN_COEFFICIENT))
    trainer.update(rollout(trainer.policy, 0), update=0)
    assert float(trainer.coefficients[ENTROPY]) == pytest.approx(MIN_COEFFICIENT)
    assert float(learner(replace(CONFIG, entropy_bonus=0.0)).coefficients[ENTROPY]) == (
        pytest.approx(MIN_COEFFICIENT)
    )


def test_step_with_settings_0_changes_nothing() -> None:
    """A CUDA graph is recorded with arguments that are 0."""
    trainer = learner()
    trainer.update(rollout(trainer.policy, 0), update=0)
    state = [*trainer.parameters, *trainer.first_moments, *trainer.second_moments]
    before = [x.clone() for x in state]
    samples, _, _ = trainer._samples(torch.Generator())
    step = trainer._program(samples)
    index = torch.zeros(8, dtype=torch.int64)
    zeros = torch.zeros(3, 2), torch.zeros(()), index, torch.zeros(8, A)
    step(*state, *zeros, *tree.leaves(samples))
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))


# --------------------------------------------------------------------------------------- the update
def test_newest_rollouts_are_kept_and_random_ones_are_used() -> None:
    trainer = learner()
    before = [p.clone() for p in trainer.parameters]
    rollouts = [rollout(trainer.policy, seed) for seed in range(4)]
    metrics = trainer.update(rollouts[0], update=0)
    assert trainer.steps == 6 == CONFIG.update_epoch * T * N // CONFIG.global_batch_size
    assert all(not torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))
    assert metrics["policy/epochs"] == 2.0
    assert {"policy/kl", "policy/kl_coef", "value/mean"} <= metrics.keys()
    for i, t in enumerate(rollouts[1:], 1):
        trainer.update(t, update=i)
    assert trainer.steps == 24
    assert [int(k.reward is t.reward) for k, t in zip(trainer.kept, rollouts[1:], strict=True)] == [
        1
    ] * 3
    assert int(trainer.policy.encoder.moments.count) == int(  # pyright: ignore
        sum(t.mask.sum() for t in rollouts)
    )
    chosen = [trainer._chosen(torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(len(pair) == 2 and pair[1] is trainer.kept[2] for pair in chosen)
    assert {int(pair[0] is trainer.kept[0]) for pair in chosen} == {0, 1}


def test_rollouts_that_exceed_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 3 * (4 * (T + 1) * N * D + T * N * (8 * A + 15))
    samples = 2 * 2 * T * N * 4 * (D + 3 * A + 1)
    monkeypatch.setattr(devices, "free_memory", lambda device: float(kept + samples))
    trainer = learner()
    trainer.update(rollout(trainer.policy, 0), update=0)
    sizes = {name: x.nbytes for name, x in vars(trainer.kept[0]).items()}
    assert sum(sizes.values()) - sizes["final_obs"] - sizes["ends"] == kept // 3
    monkeypatch.setattr(devices, "free_memory", lambda device: float(kept + samples - 1))
    message = (
        "algorithm.kept_rollouts = 3: these rollouts need 0.0 GiB and the samples of"
        " algorithm.rollouts_per_update = 2 need 0.0 GiB, and 0.0 GiB are free; lower"
    )
    with pytest.raises(ConfigError, match=message):
        learner()


def test_changed_entropy_bonus_counts_after_resume() -> None:
    trainer = learner()
    trainer.update(rollout(trainer.policy, 0), update=0)
    state, alpha = copy.deepcopy(trainer.state()), float(trainer.coefficients[ENTROPY])
    for bonus, expected in ((CONFIG.entropy_bonus, alpha), (0.5, 0.5)):
        other = learner(replace(CONFIG, entropy_bonus=bonus))
        other.load_state(state)
        assert float(other.coefficients[ENTROPY]) == pytest.approx(expected)


def test_state_continues_bit_for_bit() -> None:
    trainer = learner()
    trainer.update(rollout(trainer.policy, 0), update=0)
    trainer.update(rollout(trainer.policy, 1), update=1)
    state, weights = copy.deepcopy(trainer.state()), copy.deepcopy(trainer.policy.state_dict())
    t = rollout(trainer.policy, 2)
    expected = trainer.update(t, update=2)
    other = learner()
    other.policy.load_state_dict(weights)
    other.load_state(state)
    assert other.update(t, update=2) == expected
    for p, q in zip(trainer.parameters, other.parameters, strict=True):
        assert torch.equal(p, q)


def test_masked_rollout_changes_no_weight() -> None:
    trainer = learner()
    before = [p.clone() for p in trainer.parameters]
    t = rollout(trainer.policy, 0)
    trainer.update(replace(t, mask=torch.zeros_like(t.mask)), update=0)
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_not_finite_reward_ends_the_run() -> None:
    trainer = learner()
    t = rollout(trainer.policy, 0)
    t.reward[0, 0] = torch.inf
    with pytest.raises(TrainingError, match="update 0, minibatch 0: a loss or a gradient is not"):
        trainer.update(t, update=0)


@pytest.mark.slow
def test_compiled_updates_equal_eager_updates() -> None:
    eager = learner()
    compiled = learner(compile_schedule=compile.CompileSchedule(0, required=True))
    for update in range(3):
        t = rollout(eager.policy, update)
        eager.update(t, update=update)
        compiled.update(t, update=update)
    compiled.close()
    for p, q in zip(eager.parameters, compiled.parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_reppo_refuses_discrete_actions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = ["algorithm=reppo", "model=reppo", "env.id=CartPole-v1", f"run_dir={tmp_path / 'run'}"]
    assert main.main(["train", *recipe]) == 2
    error = capsys.readouterr().err
    assert "algorithm.type = reppo: needs continuous actions, and those of CartPole-v1" in error
    assert not (tmp_path / "run").exists()
