"""PPO of a robot policy: invariants, hand-computed updates, metrics."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import run_helpers
import torch
from run_helpers import scale_policy
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_envs.base.random import sampling_key
from embodied_envs.types import Composite
from embodied_ppo.core.types import MEAN_SHIFT, ArraySpec, Box, Discrete, Mean, Metrics, Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.ppo.minibatches import SampleCutter
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.rewards import ReturnScaler, clip_rewards, shape_rewards
from embodied_ppo.ppo.robot_actor import robot_ppo

T, N, OBS, ACTIONS = 8, 8, 5, 3
# One optimiser step on the complete rollout without normalisation, for hand-computed numbers.
PLAIN = {
    "normalize_advantages": False,
    "max_grad_norm": None,
    "update_epoch": 1,
    "global_batch_size": T * N,
}


def make(
    options: dict[str, Any] | None = None,
    *,
    discrete: bool = False,
    seed: int = 0,
    gain: float = 0.5,
    **arguments: Any,
) -> PPO:
    """Return the learner of a small policy; ``model`` has model options."""
    model = loader.load(ModelConfig, {"hidden": [16], **arguments.pop("model", {})})
    config = loader.load(
        AlgorithmConfig, {"global_batch_size": 16, "update_epoch": 2, **(options or {})}
    )
    torch.manual_seed(seed)
    actions = Discrete(4) if discrete else Box((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    policy = scale_policy(ActorCritic(ArraySpec((OBS,)), actions, model), gain)
    policy.to(arguments.pop("device", "cpu"))
    return robot_ppo(policy, config, **{"num_envs": N, "updates": 10, "seed": seed, **arguments})


@torch.no_grad()
def experience(learner: PPO, *, seed: int = 0, noise: float = 0.0, rows: int = T) -> Trajectory:
    """Return random experience of the learner's policy.

    The policy that acted differs from it by ``noise``.
    """
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, N, OBS, generator=g) * 2 + 1
    inputs = learner.policy.encode(obs.flatten(0, 1))
    decision = learner.policy.act(inputs, noise=learner.policy.noise(rows * N, g))
    d = tree.map(lambda x: x.unflatten(0, (rows, N)), decision)
    value = d.value + noise * torch.randn(rows, N, generator=g)
    terminated = torch.rand(rows, N, generator=g) < 0.15
    return Trajectory(
        obs=obs,
        action=d.action,
        log_prob=d.log_prob + noise * torch.randn(d.log_prob.shape, generator=g),
        value=value,
        replay=d.replay,
        next_value=torch.cat([value[1:], torch.randn(1, N, generator=g)]),
        reward=torch.randn(rows, N, generator=g) + obs[..., 0],
        terminated=terminated,
        truncated=(torch.rand(rows, N, generator=g) < 0.15) & ~terminated,
        mask=torch.rand(rows, N, generator=g) < 0.8,
        version=torch.zeros(rows, N, dtype=torch.int64),
    )


def full(t: Trajectory) -> Trajectory:
    return replace(t, mask=torch.ones_like(t.mask))


def number(metric: Mean | float) -> float:
    return metric.value if isinstance(metric, Mean) else metric


def numbers(metrics: Metrics) -> dict[str, float]:
    return {tag: number(value) for tag, value in metrics.items()}


def weights(learner: PPO) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in learner.optimizer.model.state_dict().items()}


def gradients(learner: PPO) -> list[Tensor]:
    """Record the flat gradient of every optimiser step from now on."""
    recorded: list[Tensor] = []

    def note(*_: Any) -> None:
        parameters = [p for group in learner.optimizer.adamw.param_groups for p in group["params"]]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        recorded.append(torch.cat([x.flatten() for x in parts]))

    learner.optimizer.adamw.register_step_pre_hook(note)
    return recorded


def disturb_reference(learner: PPO) -> None:
    """Disturb the reference, so that the KL to it is not zero."""
    assert isinstance(learner.actor.reference, torch.nn.Module)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in learner.actor.reference.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))


def assert_close(a: dict[str, float], b: dict[str, float], rel: float) -> None:
    assert a.keys() == b.keys()
    for tag, value in a.items():
        assert b[tag] == pytest.approx(value, rel=rel, abs=1e-7), tag


# ------------------------------------------------------------------- memory must not change numbers
EVERYTHING: dict[str, Any] = run_helpers.options("""clip_ratio_c=1.5 entropy_bonus=0.01
    use_kl_loss=true kl_loss_coef=0.5 max_grad_norm=null use_kl_in_reward=true update_epoch=1""")
EVERYTHING |= {"global_batch_size": T * N}
MICRO_CASES = [
    ({"logprob_type": "token_level", "entropy_type": "token_level"}, False),
    ({"off_policy_correction": "token"}, False),
    ({"kl_loss_type": "full", "kl_penalty": "full"}, True),
    ({"minibatch_unit": "column", "off_policy_correction": "sequence"}, False),
    ({"minibatch_unit": "column", "ratio_level": "sequence", "policy_loss": "cispo"}, False),
    ({"minibatch_unit": "column", "loss_agg_func": "token-mean"}, False),
    ({"minibatch_unit": "column", "loss_agg_func": "seq-mean-token-sum"}, False),
    ({"minibatch_unit": "column", "loss_agg_func": "seq-mean-token-mean"}, False),
    ({"minibatch_unit": "column", "loss_agg_func": "seq-mean-token-sum-norm"}, False),
    ({"loss_agg_func": "trajectory-mean"}, False),
]


@pytest.mark.parametrize(("options", "discrete"), MICRO_CASES)
def test_micro_batch_size_does_not_change_update(options, discrete):
    outcomes = []
    for micro in (None, 8, 24):  # 24 does not divide 64: the last micro-batch is smaller
        learner = make({**EVERYTHING, **options, "micro_batch_size": micro}, discrete=discrete)
        disturb_reference(learner)
        recorded = gradients(learner)
        metrics = learner.update(experience(learner, noise=0.3), update=0)
        assert len(recorded) == 1
        outcomes.append((recorded[0], numbers(metrics)))
    (full_gradient, expected), *parts = outcomes
    for gradient, results in parts:
        assert (gradient - full_gradient).norm() <= 1e-5 * full_gradient.norm()
        assert_close(expected, results, rel=1e-5)
    assert not torch.equal(parts[0][0], full_gradient)  # the sums were really taken apart
    assert expected["kl/to_reference"] != 0
    if "off_policy_correction" in options:
        assert expected["policy/off_policy_weight"] != 1.0
    elif "policy_loss" not in options:
        assert 0 < expected["policy/clip_fraction"] < 1
        assert 0 < expected["policy/dual_clip_fraction"] < 1


# --------------------------------------------------------------------------------- order of rewards
def test_order_of_reward_clip_and_whitening():
    """Scores 0, 4 and 8 (mean 4, unbiased deviation 4); the penalty is 1 in the first column."""
    score, kept = torch.tensor([[0.0, 4.0, 8.0]]), torch.ones(1, 3).bool()
    penalty = torch.tensor([[1.0, 0.0, 0.0]])

    def rewards(**options: Any) -> list[float]:
        c = AlgorithmConfig(**options)
        t: Any = SimpleNamespace(reward=score, terminated=kept, truncated=kept, mask=kept)
        reward = shape_rewards(t, c, ReturnScaler(3), scores_sequences=True) - penalty
        if c.reward_clip is not None and c.reward_clip_order == "after_norm":
            reward = clip_rewards(reward, kept, c.reward_clip)
        return reward[0].tolist()

    clipped = {"reward_clip": 0.5, "reward_norm": "batch"}
    # clamp to 0.5: 0, 0.5, 0.5; mean 1/3, deviation 0.5/sqrt(3): -2/sqrt(3), 1/sqrt(3), 1/sqrt(3);
    # minus the penalty
    root = 3**0.5
    assert rewards(**clipped) == pytest.approx([-2 / root - 1, 1 / root, 1 / root], abs=1e-6)
    # -1, 0, 1 clamped to 0.5; minus the penalty -1.5, clamped again
    assert rewards(**clipped, reward_clip_order="after_norm") == pytest.approx(
        [-0.5, 0.0, 0.5], abs=1e-6
    )
    # -1 + 4, 0 + 4, 1 + 4; minus the penalty
    assert rewards(whiten_rewards=True) == pytest.approx([2.0, 4.0, 5.0], abs=1e-6)


# ----------------------------------------------------------------------------- masks change nothing
def padded(t: Trajectory, rows: int) -> Trajectory:
    """Append ``rows`` masked rows of arbitrary values, NaN included."""
    g = torch.Generator().manual_seed(9)

    def below(x: Tensor) -> Tensor:
        shape = (rows, *x.shape[1:])
        if x.dtype == torch.bool:
            return torch.cat([x, torch.rand(shape, generator=g) < 0.5])
        if x.dtype == torch.int64:
            return torch.cat([x, torch.zeros(shape, dtype=x.dtype)])
        return torch.cat([x, 100 * torch.randn(shape, generator=g)])

    p = tree.map(below, t)
    p.reward[-rows:], p.next_value[-rows:] = torch.nan, torch.inf
    p.mask[-rows:] = False
    return p


@pytest.mark.parametrize("unit", ["step", "column"])
@pytest.mark.parametrize("reward_norm", [None, "batch", "running"])
def test_masked_rows_do_not_change_update(unit, reward_norm):
    options = {**EVERYTHING, "minibatch_unit": unit, "whiten_rewards": True}
    options |= {"reward_norm": reward_norm}
    outcomes = []
    for extra in (0, 3):
        learner = make({**options, "global_batch_size": (T + extra) * N})
        disturb_reference(learner)
        recorded, t = gradients(learner), experience(learner, noise=0.3)
        metrics = numbers(learner.update(padded(t, extra) if extra else t, update=0))
        outcomes.append((recorded[0], metrics, weights(learner)))
    (gradient, metrics, state), (other, others, other_state) = outcomes
    assert (gradient - other).norm() <= 1e-5 * gradient.norm()
    assert_close(metrics, others, rel=1e-5)
    for name in ("mean", "var", "count"):  # nor the normaliser
        torch.testing.assert_close(
            state[f"encoder.moments.{name}"], other_state[f"encoder.moments.{name}"]
        )


def test_fully_masked_rollout_changes_no_weight():
    learner = make(
        run_helpers.options("""use_kl_in_reward=true entropy_bonus=0.01 entropy_target=1.0
            lr_schedule=adaptive""")
    )
    learner.update(experience(learner), update=0)  # momentum that would go on moving weights
    before, t = weights(learner), experience(learner)
    metrics = numbers(learner.update(replace(t, mask=torch.zeros_like(t.mask)), update=1))
    assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())
    assert math.isnan(metrics["policy/loss"]) and math.isnan(metrics["value/clip_fraction"])
    # one minibatch of two without a sample: its step does not happen
    learner = make({**PLAIN, "global_batch_size": N, "minibatch_unit": "column"})
    recorded, t = gradients(learner), experience(learner, rows=1)
    t = replace(t, mask=torch.zeros_like(t.mask))
    t.mask[0, 0] = True
    learner.optimizer.cutter = SampleCutter(replace(learner.config, global_batch_size=1))
    metrics = numbers(learner.update(t, update=0))
    assert len(recorded) == 1 and not math.isnan(metrics["policy/loss"])


# ----------------------------------------------------------------------- exploration (rpo_alpha)
def test_a_shifted_mean_changes_the_log_probability_only():
    # mean 0, std 1, action 0.5, z = 0.2: log p = -(0.5 - 0.2)^2 / 2 - log(2 pi) / 2 = -0.963939
    policy = make(model={"normalize_obs": False}, gain=0).policy
    assert isinstance(policy, ActorCritic)
    inputs, action = policy.encode(torch.zeros(1, OBS)), torch.full((1, ACTIONS), 0.5)
    plain = policy.evaluate(inputs, action, {})
    shifted = policy.evaluate(inputs, action, {MEAN_SHIFT: torch.full((1, ACTIONS), 0.2)})
    assert shifted.log_prob.flatten().tolist() == pytest.approx([-0.9639385] * ACTIONS)
    assert plain.log_prob.flatten().tolist() == pytest.approx([-1.0439385] * ACTIONS)
    assert torch.equal(shifted.entropy, plain.entropy)
    assert torch.equal(shifted.value, plain.value)
    # Of a squashed Gaussian the mean before the tanh; of a composite that of its numbers.
    squashed = make(model={"distribution": "squashed_gaussian"}, gain=0).policy
    replay = {"pre_squash": action}
    plain, shifted = (
        squashed.evaluate(inputs, action.tanh(), replay | shift)
        for shift in ({}, {MEAN_SHIFT: torch.full((1, ACTIONS), 0.2)})
    )
    difference = shifted.log_prob - plain.log_prob
    assert difference.flatten().tolist() == pytest.approx([0.08] * ACTIONS, abs=1e-6)
    assert torch.equal(shifted.entropy, plain.entropy)
    spec = Composite((3,), Box((-1.0,), (1.0,)))
    composite = scale_policy(ActorCritic(ArraySpec((OBS,)), spec, ModelConfig()), 0)
    inputs, action = composite.encode(torch.zeros(1, OBS)), torch.tensor([[1.0, 0.5]])
    plain, shifted = (
        composite.evaluate(inputs, action, shift)
        for shift in ({}, {MEAN_SHIFT: torch.full((1, 2), 0.2)})
    )
    difference = (shifted.log_prob - plain.log_prob).flatten().tolist()
    assert difference == pytest.approx([0, 0.08], abs=1e-6)


@pytest.mark.parametrize("unit", ["step", "column"])
def test_shifts_are_new_in_each_epoch_and_equal_in_each_run(unit):
    class Recorder:
        """Record the shift of the whole batch in each epoch; ``UpdateObserver``."""

        def __init__(self) -> None:
            self.batch: Any = None
            self.shifts: dict[tuple[int, int], Tensor] = {}
            self.update = 0

        def on_batch(self, batch: Any, *, loss: Any) -> None:
            self.batch = batch

        def before_minibatch(self, index: Tensor, *, epoch: int) -> None:
            shift = self.batch.replay[MEAN_SHIFT]
            assert torch.equal(shift, self.shifts.setdefault((self.update, epoch), shift.clone()))

        def after_minibatch(self, statistics: Any) -> None:
            pass

    runs = []
    for _ in range(2):
        learner = make({"rpo_alpha": 0.5, "minibatch_unit": unit})
        recorder: Any = Recorder()
        learner.optimizer.observer = recorder
        for update in range(2):
            recorder.update = update
            learner.update(experience(learner), update=update)
        runs.append((recorder.shifts, weights(learner)))
    (shifts, state), (others, other_state) = runs
    shape = (T, N, ACTIONS) if unit == "column" else (T * N, ACTIONS)
    assert len(shifts) == 4 and all(x.shape == shape for x in shifts.values())
    assert len({x.sum().item() for x in shifts.values()}) == 4
    everything = torch.stack([*shifts.values()])
    assert everything.abs().max() <= 0.5
    assert everything.abs().mean().item() == pytest.approx(0.25, abs=0.03)
    assert all(torch.equal(x, others[key]) for key, x in shifts.items())
    assert all(torch.equal(x, other_state[name]) for name, x in state.items())


def test_zero_shift_is_bit_equal_and_a_shift_changes_the_update_only():
    outcomes = []
    for alpha in (None, 0.0, 0.5):
        learner = make({"rpo_alpha": alpha, "entropy_bonus": 0.01})
        t = experience(learner, noise=0.1)
        assert MEAN_SHIFT not in t.replay  # acting and the recorded log-probabilities have none
        metrics = numbers(learner.update(t, update=0))
        assert MEAN_SHIFT not in t.replay
        outcomes.append((metrics, weights(learner), t))
    (metrics, state, t), zero, shifted = outcomes
    assert metrics == zero[0] and all(torch.equal(x, zero[1][name]) for name, x in state.items())
    assert torch.equal(t.log_prob, shifted[2].log_prob) and torch.equal(t.action, shifted[2].action)
    assert not torch.equal(state["log_std"], shifted[1]["log_std"])
    assert shifted[0]["policy/approx_kl"] > metrics["policy/approx_kl"]


HEADS: list[dict[str, Any]] = [{"distribution": "gaussian"}, {"distribution": "squashed_gaussian"}]
HEADS += [{"distribution": "beta"}, {"state_dependent_std": True}, {"rpo_alpha": 0.3}]


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_each_head_learns_a_target_within_the_bounds(head):
    """Episodes of one step with reward -|a - 0.8 tanh(s)|^2, whose mean is about -2.4 at first."""
    options = {name: x for name, x in head.items() if name == "rpo_alpha"}
    model = {"model": {**{n: x for n, x in head.items() if n not in options}, "hidden": [32]}}
    learner = make({"lr": 3e-3, "entropy_bonus": 0.001, "update_epoch": 4, **options}, **model)
    sampled, means = [], []
    for update in range(80):
        t = full(experience(learner, seed=update))
        assert isinstance(t.obs, Tensor)
        target = 0.8 * ((t.obs[..., :ACTIONS] - 1) / 2).tanh()
        reward = -(t.action - target).square().sum(-1)
        mean = learner.policy.act(learner.policy.encode(t.obs.flatten(0, 1))).action.view_as(target)
        zeros, ones = torch.zeros_like(reward), torch.ones_like(t.mask)
        t = replace(t, reward=reward, next_value=zeros, terminated=ones, truncated=~ones)
        metrics = numbers(learner.update(t, update=update))
        sampled.append(reward.mean().item())
        means.append((mean - target).square().mean().item())
    assert math.isfinite(metrics["policy/entropy"])
    assert sum(sampled[-5:]) / 5 > 0.6 * sampled[0]
    assert sum(means[-5:]) / 5 < 0.25 * means[0]


def test_a_deviation_beyond_its_bound_is_moved_back():
    """At the bound it has a gradient, so that a bonus on the entropy can raise it again."""
    learner = make({"entropy_bonus": 1.0}, model={"min_log_std": -1.0})
    policy = learner.policy
    assert isinstance(policy, ActorCritic) and policy.log_std is not None
    with torch.no_grad():
        policy.log_std.fill_(-3.0)
    learner.update(experience(learner), update=0)
    assert policy.log_std.tolist() == [-1.0] * ACTIONS
    learner.update(experience(learner), update=1)
    assert (policy.log_std > -1).all()


def test_relative_bonus_follows_the_size_of_the_advantages():
    """Its coefficient is entropy_bonus (1 - u/10) x the mean of std(A), weighted by 0.9^age."""
    options = {"entropy_bonus": 0.05, "entropy_schedule": "relative", "reward_norm": None}
    options |= {"normalize_advantages": False}
    learner, deviations = make(options), list[float]()
    learner.record = lambda t, batch, update: deviations.append(
        float(batch.advantage[t.mask.flatten()].double().std())
    )
    for update in range(4):
        t = experience(learner, seed=update)
        metrics = learner.update(replace(t, reward=t.reward * 0.1**update), update=update)
        share = [0.9 ** (update - i) for i in range(update + 1)]
        mean = sum(w * x for w, x in zip(share, deviations, strict=True)) / sum(share)
        expected = 0.05 * (1 - update / 10) * mean
        assert metrics["policy/entropy_coef"] == pytest.approx(expected, rel=1e-4)
    other = make(options)
    other.load_state(learner.state())
    assert other.mean_std == learner.mean_std > 0
    for update in (0, 5):  # a run may get this schedule on resume
        metrics = make(options | {"normalize_advantages": True}).update(t, update=update)
        assert metrics["policy/entropy_coef"] == pytest.approx(0.05 * (1 - update / 10))
    # A rollout without samples changes nothing that could become NaN.
    learner.update(replace(t, mask=torch.zeros_like(t.mask)), update=4)
    assert 0 < learner.mean_std < 1


# ------------------------------------------------------------------------------------- permutations
@pytest.mark.parametrize("unit", ["step", "column"])
def test_every_epoch_is_a_fresh_permutation(unit):
    learner = make({"minibatch_unit": unit, "update_epoch": 3}, model={"normalize_obs": False})
    recorded: list[Tensor] = []
    assert isinstance(learner.policy, ActorCritic)
    learner.policy.trunk.register_forward_pre_hook(
        lambda module, args: recorded.append(args[0][VECTOR][:, 0].clone())
    )
    orders = []
    for update in range(2):
        t = full(experience(learner))
        assert isinstance(t.obs, Tensor)
        t.obs[..., 0] = torch.arange(T * N).reshape(T, N)  # every sample carries its name
        recorded.clear()
        learner.update(t, update=update)
        assert len(recorded) == 3 * 4 and all(len(x) == 16 for x in recorded)
        orders += [torch.cat(recorded[i : i + 4]).long().tolist() for i in range(0, 12, 4)]
    assert all(sorted(order) == list(range(T * N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6
    if unit == "column":  # a minibatch is two whole columns
        assert all({i % N for i in order[:16]} == {order[0] % N, order[1] % N} for order in orders)
    # (seed, update, stage, epoch)
    generator = torch.Generator().manual_seed(sampling_key(0, 1, "shuffle", 2))
    if unit == "step":
        assert orders[5] == torch.randperm(T * N, generator=generator).tolist()


# ------------------------------------------------------------------------------------------- a twin
def plain_ppo(
    policy: ActorCritic, t: Trajectory, c: AlgorithmConfig, *, update: int, seed: int
) -> None:
    """PPO as in CleanRL, for a policy without normaliser and masks."""
    advantage, carry = torch.zeros(T, N), torch.zeros(N)
    for r in reversed(range(T)):
        delta = t.reward[r] + c.gamma * t.next_value[r] * ~t.terminated[r] - t.value[r]
        carry = delta + c.gamma * c.gae_lambda * carry * ~(t.terminated[r] | t.truncated[r])
        advantage[r] = carry
    returns = (advantage + t.value).flatten()
    advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).flatten()
    assert isinstance(t.obs, Tensor)
    obs, action, value = t.obs.flatten(0, 1), t.action.flatten(0, 1), t.value.flatten()
    old = t.log_prob.flatten(0, 1).sum((1, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=c.lr, eps=c.adam_eps)
    for epoch in range(c.update_epoch):
        g = torch.Generator().manual_seed(sampling_key(seed, update, "shuffle", epoch))
        order = torch.randperm(T * N, generator=g)
        for i in order.split(c.global_batch_size):
            features = policy.trunk({VECTOR: obs[i]})
            assert policy.log_std is not None
            normal = torch.distributions.Normal(policy.policy_head(features), policy.log_std.exp())
            new = policy.value_head(features).squeeze(-1)
            ratio = (normal.log_prob(action[i]).sum(-1) - old[i]).exp()
            clipped = ratio.clamp(1 - c.clip_ratio_low, 1 + c.clip_ratio_high)
            policy_loss = torch.max(-advantage[i] * ratio, -advantage[i] * clipped).mean()
            near = value[i] + (new - value[i]).clamp(-0.2, 0.2)
            value_loss = 0.5 * torch.max((new - returns[i]) ** 2, (near - returns[i]) ** 2).mean()
            bonus = c.entropy_bonus * normal.entropy().sum(-1).mean()
            loss = policy_loss - bonus + c.value_loss_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def test_update_equals_cleanrl_ppo():
    options = run_helpers.options("""entropy_bonus=0.01 value_loss_coef=0.5 huber_delta=null
        update_epoch=4 lr=0.001""")
    learner, twin = (make(options, model={"normalize_obs": False}) for _ in range(2))
    assert isinstance(twin.policy, ActorCritic)
    t = full(experience(learner, noise=0.1))
    plain_ppo(twin.policy, t, twin.config, update=2, seed=0)
    learner.update(t, update=2)
    before = weights(make(options, model={"normalize_obs": False}))
    for name, x in weights(twin).items():
        torch.testing.assert_close(weights(learner)[name], x, rtol=1e-4, atol=2e-6)
        assert (x - before[name]).abs().max() > 1e-3  # 16 steps of 1e-3


# ----------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("spoil", ["reward", "obs"])
def test_non_finite_batch_changes_no_weight(spoil):
    learner = make({} if spoil == "reward" else {"global_batch_size": T * N})
    t = full(experience(learner))
    before = weights(learner)
    (t.reward if spoil == "reward" else t.obs)[2, 3] = torch.nan
    with pytest.raises(
        TrainingError, match=r"update 4, epoch 0: .*not finite.*; lower algorithm.lr"
    ):
        learner.update(t, update=4)
    assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())


def test_skipped_advantage_normalisation_is_reported():
    notices: list[str] = []
    learner = make({"global_batch_size": 1}, notice=notices.append)
    t = experience(learner, rows=1)
    t.mask[:] = torch.arange(N) == 0
    learner.update(t, update=0)
    reason = "skipped, fewer than 2 samples in the rollout"
    assert notices == [f"algorithm.normalize_advantages: {reason}"]


# ------------------------------------------------------------------------------- steering the steps
@pytest.mark.parametrize("shared", [True, False])
def test_critic_warmup_trains_critic_only(shared):
    learner = make(
        {"critic_warmup": 2, "weight_decay": 0.1, "use_kl_loss": True},
        model={"shared_backbone": shared},
    )
    critic = {id(p) for p in learner.optimizer.critic}
    start = {name: p.detach().clone() for name, p in learner.optimizer.model.named_parameters()}
    for update in range(2):
        metrics = numbers(learner.update(experience(learner, seed=update), update=update))
        for name, p in learner.optimizer.model.named_parameters():
            assert torch.equal(p, start[name]) == (id(p) not in critic), name
        assert metrics["policy/grad_norm"] == 0 < metrics["value/grad_norm"]
        assert metrics["policy/clip_fraction"] == 0 and metrics["policy/approx_kl"] < 1e-9
    learner.update(experience(learner, seed=2), update=2)
    parameters = learner.optimizer.model.named_parameters()
    assert not any(torch.equal(p, start[name]) for name, p in parameters)


def test_target_kl_stop():
    def epochs(limit: float | None) -> dict[str, float]:
        learner = make({"lr": 0.02, "update_epoch": 6, "target_kl_stop": limit})
        return numbers(learner.update(full(experience(learner)), update=0))

    assert epochs(None)["policy/epochs"] == epochs(1e9)["policy/epochs"] == 6
    assert epochs(1e-9)["policy/epochs"] == 1
    assert 1 < epochs(0.05)["policy/epochs"] < 6


def test_linear_learning_rates():
    learner = make({"lr": 0.01, "value_lr": 0.04, "lr_schedule": "linear"})
    for update, expected in ((0, 1.0), (5, 0.5)):
        metrics = numbers(learner.update(experience(learner), update=update))
        assert metrics["policy/lr"] == pytest.approx(0.01 * expected)
        assert metrics["value/lr"] == pytest.approx(0.04 * expected)


def test_learning_rates_of_actor_and_critic():
    """Adam's first step changes every weight by the learning rate."""
    for options, actor, critic in (
        ({"lr": 1e-3}, 1e-3, 1e-3),
        ({"lr": 1e-3, "value_lr": 1e-5}, 1e-3, 1e-5),
        ({"lr": 0.0, "value_lr": 1e-3}, 0.0, 1e-3),
        ({"lr": 1e-3, "value_lr": 0.0}, 1e-3, 0.0),
    ):
        learner = make({**PLAIN, **options, "adam_eps": 1e-12})
        actors = len(learner.optimizer.actor)
        parameters = [*learner.optimizer.actor, *learner.optimizer.critic]
        start = [p.detach().clone() for p in parameters]
        learner.update(full(experience(learner, noise=0.1)), update=0)
        moved = [(p - q).abs().max().item() for p, q in zip(parameters, start, strict=True)]
        assert moved[:actors] == pytest.approx([actor] * actors, rel=1e-3)
        assert moved[actors:] == pytest.approx([critic] * (len(moved) - actors), rel=1e-2)


def test_max_grad_norm():
    learner = make({**PLAIN, "max_grad_norm": 0.05})
    recorded = gradients(learner)
    t = full(experience(learner))
    metrics = numbers(learner.update(t, update=0))
    assert recorded[0].norm().item() == pytest.approx(0.05, rel=1e-4)
    free = make(PLAIN)
    unclipped = gradients(free)
    free.update(t, update=0)
    # reported before clipping
    norm = math.hypot(metrics["policy/grad_norm"], metrics["value/grad_norm"])
    assert norm == pytest.approx(unclipped[0].norm().item(), rel=1e-5) and norm > 0.05
    torch.testing.assert_close(recorded[0] * norm / 0.05, unclipped[0], rtol=1e-3, atol=1e-6)


def test_entropy_target_adapts_bonus():
    options = {"entropy_bonus": 0.01, "update_epoch": 1}
    entropy = ACTIONS * (0.5 * math.log(2 * math.pi * math.e))  # log_std = 0: 4.2568
    for target, direction in ((entropy + 5, 1), (entropy - 5, -1)):
        learner = make({**options, "entropy_target": target})
        rows = [numbers(learner.update(experience(learner), update=u)) for u in range(3)]
        expected = [0.01 * math.exp(0.1 * direction * u) for u in range(3)]
        assert [row["policy/entropy_coef"] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert "policy/entropy_coef" not in make(options).update(experience(make()), update=0)


# ------------------------------------------------------------------------------------ the reference
def test_kl_penalty_is_subtracted_from_reward():
    """The result equals that for rewards r - beta (lp - lp_ref)."""
    learner = make({"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.3}})
    disturb_reference(learner)
    t = experience(learner, noise=0.2)
    assert isinstance(learner.actor.reference, ActorCritic)
    with torch.no_grad():
        flat = tree.flatten_time(t)
        ref = learner.actor.reference.evaluate(
            learner.actor.reference.encode(flat.obs), flat.action, flat.replay
        )
    distance = t.log_prob.sum((2, 3)) - ref.log_prob.sum((1, 2)).reshape(T, N)
    other = make()
    metrics = numbers(learner.update(t, update=0))
    other.update(replace(t, reward=t.reward - 0.3 * distance), update=0)
    for name, x in weights(other).items():
        torch.testing.assert_close(weights(learner)[name], x, rtol=1e-4, atol=1e-6)
    per_column = [distance[:, i][t.mask[:, i]].mean().item() for i in range(N)]
    assert metrics["kl/to_reference"] == pytest.approx(sum(per_column) / N, rel=1e-4)
    assert metrics["kl/coef"] == 0.3


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_adaptive_kl_coefficient(aggregation):
    """e = clip(KL/target - 1, +-0.2) ; beta *= 1 + e n / horizon, for each aggregation."""
    ctrl = {"type": "adaptive", "kl_coef": 0.1, "horizon": 80, "target_kl": 1.0}
    options = {"use_kl_in_reward": True, "kl_ctrl": ctrl, "minibatch_unit": "column"}
    learner = make({**options, "loss_agg_func": aggregation})
    metrics = numbers(learner.update(experience(learner), update=0))
    assert metrics["kl/coef"] == 0.1  # the value before the update
    assert abs(metrics["kl/to_reference"]) < 1e-5  # the policy training began with acted
    metrics = numbers(learner.update(experience(learner), update=1))
    assert metrics["kl/coef"] == pytest.approx(0.1 * (1 - 0.2 * N / 80))
    disturb_reference(learner)
    distance = numbers(learner.update(experience(learner), update=2))["kl/to_reference"]
    before, error = learner.kl_coef, min(max(distance / 1.0 - 1, -0.2), 0.2)
    after = numbers(learner.update(experience(learner), update=3))["kl/coef"]
    assert before == after and error != 0
    assert after == pytest.approx(0.1 * (1 - 0.02) ** 2 * (1 + error * N / 80))


def test_kl_loss_keeps_policy_near_reference():
    distances = []
    for coef in (0.0, 100.0):
        learner = make({"use_kl_loss": True, "kl_loss_coef": coef, "lr": 3e-3, "update_epoch": 10})
        distances.append(numbers(learner.update(experience(learner), update=0)))
        assert "kl/coef" not in distances[-1]
    assert distances[1]["kl/to_reference"] < 0.2 * distances[0]["kl/to_reference"]
    assert distances[1]["policy/approx_kl"] < 0.5 * distances[0]["policy/approx_kl"]


def test_reference_is_initial_policy():
    """The reference keeps its normaliser when that of the policy changes."""
    learner = make({"use_kl_loss": True, "lr": 1e-12})
    initial = make().policy
    first = numbers(learner.update(experience(learner), update=0))["kl/to_reference"]
    assert first < 1e-9  # nothing has moved yet
    t = experience(learner, seed=1)  # now the weights are the same, and the normaliser is not
    flat = tree.flatten_time(t)
    now = learner.policy.evaluate(learner.policy.encode(flat.obs), flat.action, flat.replay)
    then = initial.evaluate(initial.encode(flat.obs), flat.action, flat.replay)
    delta = (now.log_prob - then.log_prob).sum((1, 2))
    k3 = (torch.expm1(-delta) + delta).clamp(max=10)[flat.mask].mean().item()
    results = numbers(learner.update(t, update=1))["kl/to_reference"]
    assert results == pytest.approx(k3, rel=1e-4) and k3 > 1e-4


# ------------------------------------------------------------------------------------ another acted
def test_off_policy_weights_by_hand():
    """lp_acted = lp - s: weights e^s are capped at 1.5; the ratio starts at 1."""
    shift = torch.tensor([0.1, -0.2, 1.0, 0.0] * 2)  # per column
    for kind, per_sample, capped in (("token", shift, 0.25), ("sequence", shift * T, 0.5)):
        learner = make({**PLAIN, "off_policy_correction": kind, "off_policy_cap": 1.5})
        t = full(experience(learner))
        acted = t.log_prob.clone()
        acted[..., 0, 0] -= shift
        metrics = numbers(learner.update(replace(t, log_prob=acted), update=0))
        expected = per_sample.exp().clamp(max=1.5).mean().item()
        assert metrics["policy/off_policy_weight"] == pytest.approx(expected, rel=1e-5)
        # A quarter of the samples has the smallest weight, and one or two quarters have the cap.
        smallest = per_sample.min().exp().item()
        assert metrics["policy/off_policy_weight_5"] == pytest.approx(smallest, rel=1e-5)
        assert metrics["policy/off_policy_weight_95"] == 1.5
        assert metrics["policy/off_policy_capped"] == capped
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        uncorrected = numbers(make(PLAIN).update(replace(t, log_prob=acted), update=0))
        assert "policy/off_policy_weight" not in uncorrected
        assert uncorrected["policy/ratio_max"] == pytest.approx(math.e, rel=1e-4)


# ----------------------------------------------------------------------------- metrics, known cases
def test_policy_metrics_by_hand():
    """One step on the rollout with gamma = 0: A = r - V; the ratio is e^-s for lp_old = lp + s."""
    learner = make({**PLAIN, "gamma": 0.0, "clip_ratio_c": 1.3, "clip_ratio_high": 0.1})
    t = full(experience(learner))
    shift = torch.tensor([0.0, 0.4, -0.4, -0.15, 0.0, 0.4, -0.4, -0.15]).expand(T, N)
    old = t.log_prob.clone()
    old[..., 0, 1] += shift
    advantage = torch.where(torch.arange(N) < 4, 1.0, -2.0).expand(T, N)
    t = replace(t, log_prob=old, reward=t.value + advantage)
    metrics = numbers(learner.update(t, update=0))
    # r = 1, 0.670, 1.492, 1.162. A = 1: clipped above 1.1 (two of four). A = -2: below 0.8 (one of
    # four).
    assert metrics["policy/clip_fraction"] == pytest.approx(3 / 8)
    # A = -2: l = 2 r against 2 x 1.3: r = 1.492 alone is bounded
    assert metrics["policy/dual_clip_fraction"] == pytest.approx(1 / 8)
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(0.4), rel=1e-4)
    r = [math.exp(-s) for s in (0.0, 0.4, -0.4, -0.15)]
    assert metrics["policy/approx_kl"] == pytest.approx(
        sum(x - 1 - math.log(x) for x in r) / 4, rel=1e-4
    )
    positive = -(1 + r[1] + 1.1 + 1.1) / 4  # -min(A r, A clip(r))
    negative = 2 * (1 + 0.8 + 1.3 + r[3]) / 4
    assert metrics["policy/loss"] == pytest.approx((positive + negative) / 2, rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(
        ACTIONS * 0.5 * math.log(2 * math.pi * math.e), rel=1e-5
    )
    assert metrics["policy/epochs"] == 1 and metrics["policy/lr"] == pytest.approx(3e-4)
    assert metrics["policy/grad_norm"] > 0
    # before any normalisation: half +1, half -2; unbiased deviation sqrt(1.5^2 x 64 / 63)
    assert metrics["advantage/mean"] == pytest.approx(-0.5, rel=1e-5)
    assert metrics["advantage/std"] == pytest.approx(1.5 * math.sqrt(64 / 63), rel=1e-5)
    assert "policy/dual_clip_fraction" not in make().update(t, update=0)


def zero_values(learner):
    """Return the learner with a value head whose output is 0."""
    with torch.no_grad():
        learner.optimizer.model.value_head.weight.zero_()
    return learner


def test_clipped_rewards_and_advantages_by_hand():
    """gamma = 0, V = 0: A = clamp(r, +-3); at ratio 1 the loss is -mean(A)."""
    learner = zero_values(make({**PLAIN, "gamma": 0.0, "reward_clip": 3.0}))
    t = full(experience(learner))
    t = replace(t, reward=torch.where(torch.arange(N) < 6, 100.0, -5.0).expand(T, N).clone())
    metrics = numbers(learner.update(t, update=0))
    assert metrics["advantage/mean"] == pytest.approx(3 * (6 - 2) / 8)
    assert metrics["policy/loss"] == pytest.approx(-1.5, rel=1e-5)
    # mean 1.5, deviation sqrt(6.75): (3 - 1.5)/2.598 = 0.577 and -1.732 are both clamped: -(6 -
    # 2)/8 x 0.25
    clipped = {"advantage_clip": 0.25, "normalize_advantages": True}
    learner = zero_values(make({**PLAIN, "gamma": 0.0, "reward_clip": 3.0, **clipped}))
    metrics = numbers(learner.update(t, update=0))
    assert metrics["policy/loss"] == pytest.approx(-0.125, rel=1e-5)
    assert metrics["advantage/mean"] == pytest.approx(1.5)


def test_value_metrics_by_hand():
    """gamma = 0: R = r. V_old is off by 0.3 in columns 0 .. 2 of 8, so |V - V_old| > 0.2 in 3/8."""
    learner = make({**PLAIN, "gamma": 0.0, "value_clip": 0.2, "huber_delta": 1.0})
    t = full(experience(learner))
    off = torch.tensor([0.3, -0.3, 0.3, 0.1, 0, 0, 0, 0]).expand(T, N)
    reward = t.value + torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 4.0])
    metrics = numbers(learner.update(replace(t, value=t.value + off, reward=reward), update=0))
    assert metrics["value/clip_fraction"] == pytest.approx(3 / 8)
    # R - V = 0 but in column 7: h(4) = 1 x (4 - 1/2); clipped: V_c is off by 0.1 in columns 0 .. 2:
    # h(0.1) = 0.005
    assert metrics["value/loss"] == pytest.approx((3.5 + 3 * 0.005) / 8, rel=1e-4)
    error, spread = (reward - t.value - off).var(unbiased=False), reward.var(unbiased=False)
    assert metrics["value/explained_variance"] == pytest.approx(
        (1 - error / spread).item(), rel=1e-5
    )
    assert 0.05 < abs(metrics["value/explained_variance"]) < 0.99
    assert metrics["advantage/zero_fraction"] == 3 / 8  # columns 4 .. 6
    assert "value/clip_fraction" not in make({"value_clip": None}).update(t, update=0)


@pytest.mark.parametrize(
    "adv_type", ["grpo", "rloo", "reinforce_plus_plus_baseline", "reinforce_plus_plus"]
)
def test_group_advantages(adv_type):
    """Equal returns in columns 0 to 3 give advantage 0; mean and std are before normalisation."""
    learner = make({"adv_type": adv_type, "group_size": 4, "normalize_advantages": True})
    t = full(experience(learner))
    t.terminated[:], t.truncated[:] = False, False
    t.terminated[-1] = True
    t.reward[:, :4] = 0.0
    metrics = numbers(learner.update(t, update=0))
    assert metrics["advantage/zero_fraction"] == pytest.approx(0.5)
    assert metrics["advantage/std"] > 0 and metrics["advantage/std"] != pytest.approx(1.0, abs=1e-3)
    before = weights(learner)
    raw = make({"adv_type": adv_type, "group_size": 4, "normalize_advantages": False})
    raw.update(t, update=0)
    # the option is read
    assert any(not torch.equal(x, before[name]) for name, x in weights(raw).items())


# --------------------------------------------------------------------------------------- checkpoint
STATEFUL: dict[str, Any] = run_helpers.options("""lr_schedule=adaptive reward_norm=running
    use_kl_in_reward=true use_kl_loss=true entropy_bonus=0.01 entropy_target=3.0""")
STATEFUL |= {"kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 50.0}}


def test_state_resumes_bit_for_bit():
    learner = make(STATEFUL)
    for update in range(2):
        learner.update(experience(learner, seed=update), update=update)
    buffer = io.BytesIO()
    torch.save({"learner": learner.state(), "policy": learner.optimizer.model.state_dict()}, buffer)
    resumed = make(STATEFUL, seed=0)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed.optimizer.model.load_state_dict(saved["policy"])
    resumed.load_state(saved["learner"])
    assert learner.optimizer.adaptive_factor != 1.0
    assert learner.kl_coef != 0.1
    assert learner.entropy_coef != 0.01
    a: dict[str, float] = {}
    for update in range(2, 4):
        t = experience(learner, seed=update)
        a, b = numbers(learner.update(t, update=update)), numbers(resumed.update(t, update=update))
        assert a == b
        assert all(torch.equal(x, weights(resumed)[name]) for name, x in weights(learner).items())
    forgetful = make(STATEFUL)
    forgetful.optimizer.model.load_state_dict(saved["policy"])
    assert numbers(forgetful.update(experience(learner, seed=2), update=2)) != a


def test_constant_coefficients_follow_config_after_resume():
    learner = make(STATEFUL)
    learner.update(experience(learner), update=0)
    options = run_helpers.options("""lr=0.123 weight_decay=0.5 entropy_bonus=0.7
        use_kl_in_reward=true adam_betas=[0.5,0.999]""")
    options |= {"kl_ctrl": {"kl_coef": 0.9}}
    changed = make(options)
    changed.load_state(learner.state())
    metrics = numbers(changed.update(experience(changed), update=1))
    assert metrics["policy/lr"] == 0.123
    assert metrics["kl/coef"] == 0.9
    assert changed.entropy_coef == 0.7
    assert changed.optimizer.adamw.param_groups[0]["weight_decay"] == 0.5
    assert changed.optimizer.adamw.param_groups[0]["betas"] == (0.5, 0.999)


def test_updates_without_a_reward_train_the_value_only() -> None:
    for reward, moves, decays in ((0.0, False, True), (0.0, False, False), (1.0, True, True)):
        learner = make({"noise_correlation": 0.9}, model={"shared_backbone": False})
        learner.decays_head = decays
        t = experience(learner)
        t.reward.zero_()[2, 1] = reward
        before = weights(learner)
        learner.update(t, update=0)
        after = weights(learner)
        changed = {name for name, x in after.items() if not torch.equal(x, before[name])}
        assert "value_head.weight" in changed
        assert moves == any(name.startswith("trunk") for name in changed)
        # The policy returns slowly to actions around 0, if it was not trained before.
        name, factor = "policy_head.weight", 0.99 if decays else 1.0
        assert moves != torch.equal(after[name], before[name] * factor)


# ------------------------------------------------------------------------------------------- golden
@pytest.mark.gpu
@pytest.mark.parametrize("discrete", [False, True])
def test_gpu_update_equals_cpu_update(discrete):
    results = []
    for device in ("cpu", "cuda"):
        options = {**EVERYTHING, **STATEFUL, "off_policy_correction": "token"}
        learner = make(options, discrete=discrete, device=device)
        t = experience(make(options, discrete=discrete), noise=0.3)
        t = tree.map(lambda x, device=device: x.to(device), t)
        results.append(numbers(learner.update(t, update=0)))
        assert all(p.is_cuda == (device == "cuda") for p in learner.optimizer.model.parameters())
    assert_close(results[0], results[1], rel=1e-3)


GOLDEN_TAGS = run_helpers.words("""policy/loss value/loss policy/entropy policy/approx_kl
    advantage/std policy/grad_norm""")
GOLDEN = {  # those, and the sum of all weights' absolute values
    "gaussian": [-0.034117233, 4.505033, 4.2714901, 0.0094506652, 2.3729406, 2.2682903, 31.386405],
    "discrete": [-0.023480248, 5.1803288, 1.3553469, 0.0047311342, 2.5351651, 2.2558212, 32.628648],
    "columns": [-0.16615319, 0.22671288, 28.789072, 0.0093913321, 0.646361, 9.6150904, 31.089889],
}


@pytest.mark.parametrize("name", ["gaussian", "discrete", "columns"])
def test_update_equals_recorded_numbers(name):
    """Compare fixed seeds with recorded numbers, which a refactoring must not change.

    To record them again run pytest -s, and give the reason.
    """
    options = {
        "gaussian": {"entropy_bonus": 0.01, "lr_schedule": "cosine"},
        "discrete": {"clip_ratio_c": 2.0, "use_kl_loss": True, "kl_loss_coef": 0.1},
        "columns": {
            "minibatch_unit": "column",
            "loss_agg_func": "seq-mean-token-sum",
            "reward_norm": "running",
        },
    }[name]
    learner, metrics = make({"lr": 1e-3, **options}, discrete=name == "discrete"), {}
    for update in range(3):
        t = experience(learner, seed=update, noise=0.1)
        metrics = numbers(learner.update(t, update=update))
    parameters = learner.optimizer.model.parameters()
    total = sum(float(p.detach().double().abs().sum()) for p in parameters)
    results = [*(metrics[tag] for tag in GOLDEN_TAGS), total]
    print(name, [float(f"{value:.8g}") for value in results])
    assert results == pytest.approx(GOLDEN[name], rel=1e-5, abs=1e-6)
