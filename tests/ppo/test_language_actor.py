"""PPO of a language model: losses of tokens, and invariances."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import run_helpers
import torch
from run_helpers import tables
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError, TrainingError
from embodied_ppo.cluster import memory_estimate
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options.schema import AlgorithmConfig, KLControlConfig
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.ppo.compiled_step import MinibatchStep, adam_state, adamw_settings
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import FrozenReference, language_ppo
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.training.logging import numbers
from tests.policies.test_causal_lm import make
from tests.ppo.test_compiled_step import eager_step, parameter_names

T, N = 6, 8
PROMPT = [3, 5, 2, 4, 3, 5, 2, 4]
# Tokens of each prompt and response.
LENGTH = [6, 1, 4, 2, 3, 6, 5, 1]
SIZES: dict[str, Any] = {"update_epoch": 2, "global_batch_size": 4}
BASE = AlgorithmConfig(gae_lambda=0.9, value_clip=0.5, huber_delta=None, lr=1e-3, **SIZES)


def experience(
    policy: LanguagePolicy, *, more: int = 0, seed: int = 0, noise: float = 0.0
) -> Trajectory:
    """Return rows of different length with ``more`` columns of padding, and one score per row."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 50, (N, 12), generator=g)
    width, rows = 5 + T - 1 + more, T + more
    row, action = torch.zeros(N, width, dtype=torch.int64), torch.zeros(N, rows, dtype=torch.int64)
    for i, (p, r) in enumerate(zip(PROMPT, LENGTH, strict=True)):
        row[i, : p + r - 1] = tokens[i, : p + r - 1]
        action[i, :r] = tokens[i, p : p + r]
    place = torch.tensor(PROMPT).unsqueeze(1) - 1 + torch.arange(rows)
    place = place.clamp(max=width - 1)
    mask = torch.arange(rows) < torch.tensor(LENGTH).unsqueeze(1)
    with torch.no_grad():
        log_prob = policy.view(policy.hidden(row, place), action).log_prob
    log_prob = log_prob + noise * torch.randn(N, T + 3, generator=g)[:, :1]
    last = torch.arange(rows) == torch.tensor(LENGTH).unsqueeze(1) - 1
    score = torch.rand(N, 1, generator=g) - 0.4  # some are negative
    return run_helpers.trajectory(
        torch.where(last, score, 0.0).T,
        obs={"row": row.T, "place": place.T},
        action=action.T,
        log_prob=torch.where(mask, log_prob, 0.0).T,
        terminated=last.T,
        mask=mask.T,
    )


def learner(config: AlgorithmConfig = BASE, *, critic: bool = True, **options: Any) -> PPO:
    """Return a learner; critic_config and critic_columns are options of the critic."""
    policy = make()
    both: dict[str, Any] = {"length": T, "columns": 4, "updates": 10, "seed": 0}
    names = ("length", "columns", "tokens", "updates", "seed")
    both |= {name: x for name, x in options.items() if name in names}
    values = None
    if critic:
        model = LanguageCritic(copy.deepcopy(policy.model))
        with torch.no_grad():  # values that are not all 0
            model.value_head.weight.copy_(torch.linspace(-0.2, 0.2, 32))
        own = both | {"columns": options.get("critic_columns", both["columns"])}
        own |= {"ranks": options.get("ranks")}
        values = LocalCritic(model, options.get("critic_config", config), **own)
    names = ("recompute", "notice", "ranks", "num_sequences")
    shared: dict[str, Any] = {"num_sequences": N} | {k: x for k, x in options.items() if k in names}
    return language_ppo(policy, values, config, **both, **shared)


def critic_of(x: PPO) -> LocalCritic:
    assert isinstance(x.critic, LocalCritic)
    return x.critic


def reference_of(x: PPO) -> LanguagePolicy:
    assert isinstance(x.actor.reference, FrozenReference)
    return x.actor.reference.policy


def weights(x: PPO) -> list[Tensor]:
    modules = [x.policy, *([] if x.critic is None else [critic_of(x).module])]
    return [p.detach().clone() for m in modules for p in m.parameters()]


def differences(a: PPO, b: PPO) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(weights(a), weights(b), strict=True))


# ------------------------------------------------------------------------------------- what is read
def test_advantages_of_packed_rows_equal_single_rows() -> None:
    """Compare with a float64 reference that computes each row without padding."""
    x = learner()
    t = experience(x.policy)
    batch, metrics = x.prepare(t)
    assert isinstance(t.obs, dict)
    advantage = torch.zeros(T, N, dtype=torch.float64)
    returns = torch.zeros(T, N, dtype=torch.float64)
    critic: Any = critic_of(x).module
    for i, (p, r) in enumerate(zip(PROMPT, LENGTH, strict=True)):
        ids = t.obs["row"][: p + r - 1, i].unsqueeze(0)
        with torch.no_grad():
            value = critic.value(ids, torch.arange(p - 1, p - 1 + r).unsqueeze(0))[0].double()
        torch.testing.assert_close(batch.value[:r, i].double(), value, rtol=0, atol=1e-5)
        carry = 0.0
        for k in reversed(range(r)):
            following = float(value[k + 1]) if k + 1 < r else 0.0
            delta = float(t.reward[k, i]) + 0.99 * following - float(value[k])
            carry = delta + 0.99 * 0.9 * carry
            advantage[k, i], returns[k, i] = carry, carry + value[k]
    torch.testing.assert_close(batch.returns.double()[t.mask], returns[t.mask], rtol=0, atol=1e-5)
    flat = advantage[t.mask]
    expected = (flat - flat.mean()) * torch.rsqrt(flat.var() + 1e-8)
    torch.testing.assert_close(batch.advantage.double()[t.mask], expected, rtol=0, atol=1e-4)
    assert not batch.advantage[~t.mask].any()
    assert numbers(metrics)["advantage/mean"] == pytest.approx(float(flat.mean()), abs=1e-5)


@pytest.mark.parametrize("kl", ["k1", "k2", "full"])
def test_kl_in_the_reward_is_per_token(kl: Any) -> None:
    c = replace(BASE, use_kl_in_reward=True, kl_penalty=kl, kl_ctrl=KLControlConfig(kl_coef=0.5))
    x = learner(c)
    t = experience(x.policy)
    with torch.no_grad():
        reference_of(x).model.lm_head.weight.mul_(0.7)
    plain = learner().prepare(t)[0]
    batch, metrics = x.prepare(t)
    assert isinstance(t.obs, dict)
    row, place = t.obs["row"].T, t.obs["place"].T
    with torch.no_grad():
        own, other = x.policy.hidden(row, place), reference_of(x).hidden(row, place)
        p, q = (m.logits(h).log_softmax(-1) for m, h in ((x.policy, own), (reference_of(x), other)))
    delta = (p - q).gather(-1, t.action.T.unsqueeze(-1)).squeeze(-1).T
    distance = {"k1": delta, "k2": delta.square() / 2, "full": (p.exp() * (p - q)).sum(-1).T}[kl]
    # returns differ by the discounted sum of penalties with λ-traces; with γ = λ = 1 exactly their
    # sum
    y = learner(replace(c, gamma=1.0, gae_lambda=1.0))
    reference_of(y).load_state_dict(reference_of(x).state_dict())
    actual = y.prepare(t)[0].returns
    penalties = torch.where(t.mask, distance, 0.0)
    expected = t.reward.sum(0) - 0.5 * penalties.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(actual[t.mask], expected[t.mask], rtol=0, atol=1e-4)
    assert not torch.equal(batch.returns, plain.returns)
    columns = [float(distance[:r, i].mean()) for i, r in enumerate(LENGTH)]
    assert numbers(metrics)["kl/to_reference"] == pytest.approx(sum(columns) / N, abs=1e-5)


def test_scores_are_normalised_per_sequence() -> None:
    """A row has one score, whatever its length."""
    x = learner(replace(BASE, reward_norm="batch", gamma=1.0, gae_lambda=1.0))
    t = experience(x.policy)
    score = t.reward.sum(0)
    expected = (score - score.mean()) * torch.rsqrt(score.var() + 1e-8)
    actual = x.prepare(t)[0].returns
    for i, r in enumerate(LENGTH):
        torch.testing.assert_close(actual[:r, i], expected[i].expand(r), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------- denominators
def test_value_loss_uses_aggregation_of_critic() -> None:
    """seq-mean-token-mean: the mean over rows of each row's mean of (R - V)^2 / 2; null: the mean
    over tokens.
    """
    full = replace(BASE, update_epoch=1, global_batch_size=N, value_clip=None)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        x = learner(full, columns=N, critic_config=replace(full, loss_agg_func=aggregation))
        t = experience(x.policy)
        batch, _ = x.prepare(t)
        square = (batch.returns - batch.value).double().square() / 2
        rows = [square[:r, i] for i, r in enumerate(LENGTH)]
        by_row = sum(float(row.mean()) for row in rows) / N
        expected = by_row if aggregation == "seq-mean-token-mean" else float(torch.cat(rows).mean())
        assert numbers(x.update(t, update=0))["value/loss"] == pytest.approx(expected, rel=1e-4)


def test_loss_scale_factor_replaces_the_response_length() -> None:
    c = replace(BASE, update_epoch=1, loss_agg_func="seq-mean-token-sum-norm")
    norms = []
    for factor in (None, float(T), 4.0 * T):
        x = learner(replace(c, loss_scale_factor=factor), critic_config=BASE)
        norms.append(numbers(x.update(experience(x.policy, noise=0.3), update=0))["policy/loss"])
    assert norms[0] == norms[1] and norms[2] != norms[0]
    single = []
    for factor in (2.0, 8.0):
        one_step = replace(c, global_batch_size=N, loss_scale_factor=factor)
        x = learner(one_step, columns=N, critic_config=BASE)
        single.append(numbers(x.update(experience(x.policy, noise=0.3), update=0))["policy/loss"])
    assert single[0] == pytest.approx(4 * single[1], rel=1e-5) and single[0] != 0


def test_positive_nll_is_a_mean_over_tokens_of_responses_with_a_positive_score() -> None:
    """A score counts with its penalties and before it is normalised."""
    c = replace(BASE, reward_norm="batch", update_epoch=1, global_batch_size=N)
    x, plain = (learner(replace(c, positive_nll_weight=w), columns=N) for w in (0.5, 0.0))
    t = experience(x.policy)
    positive = t.mask & (t.reward.sum(0) > 0)
    assert 0 < positive.any(0).sum() < N and positive.sum() != t.mask.sum() / 2
    nll = -float(t.log_prob[positive].mean())
    batch = x.prepare(t)[0]
    loss, without = (y.optimizer.loss(y.prepare(t)[0])[0].item() for y in (x, plain))
    assert loss - without == pytest.approx(0.5 * nll, rel=1e-5)
    none = x.optimizer.loss(replace(batch, positive=batch.mask & False))[0].item()
    assert none == pytest.approx(without, abs=1e-7)
    assert numbers(x.update(t, update=0))["policy/positive_nll"] == pytest.approx(nll, rel=1e-5)


# ----------------------------------------------------------------------------- what changes nothing
OPTIONS: dict[str, Any] = tables(__file__)["options"]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("tokens", [1, 13, 40])
def test_micro_batch_size_does_not_change_result(case: str, tokens: int) -> None:
    c = replace(BASE, **OPTIONS[case])
    full, parts = learner(c), learner(c, tokens=tokens)
    t = experience(full.policy, noise=0.1)
    for x in (full, parts):
        x.update(t, update=0)
    assert differences(full, parts) < 2e-5  # AdamW's first steps divide by tiny numbers
    a, b = (x.optimizer.adamw.state_dict()["state"][0]["exp_avg"] for x in (full, parts))
    assert float((a - b).norm() / a.norm()) < 1e-5


@pytest.mark.parametrize("case", OPTIONS)
def test_padding_does_not_change_result(case: str) -> None:
    c = replace(BASE, **OPTIONS[case])
    short, long = learner(c), learner(c)
    outcomes = [
        numbers(x.update(experience(x.policy, more=m), update=0))
        for x, m in ((short, 0), (long, 3))
    ]
    assert differences(short, long) < 2e-5
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("which", ["actor", "critic"])
def test_program_equals_eager_step(case: str, which: str) -> None:
    """Run the function that is compiled as Python code."""
    c = replace(BASE, **OPTIONS[case])
    eager, program = learner(c), learner(c)
    t = experience(eager.policy, noise=0.1)
    index = torch.tensor([5, 0, 3, 6])
    batches = [x.prepare(t)[0] for x in (eager, program)]
    if which == "critic":
        batches = [
            replace(b, log_prob=b.value, weight=None, ref_log_prob=None, ref_logits=None)
            for b in batches
        ]
    one, two = ((x if which == "actor" else critic_of(x)).optimizer for x in (eager, program))
    expected = eager_step(one, batches[0], index, 0.01)
    compute = MinibatchStep(two.loss, *parameter_names(two), batches[1], two.buffers)
    state = adam_state(two.adamw)
    lr, coefficients = [two.config.lr] * 2, [0.01] * len(two.loss.coefficients)
    (settings,) = adamw_settings(two.config, 1, lr=lr, steps=[0, 0], coefficients=coefficients)
    tensors = [*state.parameters, *state.first, *state.second, settings, index]
    tensors += [two.model.get_buffer(name) for name in two.buffers]
    actual = compute(*tensors, *tree.leaves(batches[1]))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert differences(eager, program) < 2e-5


# -------------------------------------------------------------------------------------- what learns
def test_critic_warmup_skips_actor_updates() -> None:
    x = learner(replace(BASE, critic_warmup=2))
    t, modules = experience(x.policy), (x.policy, critic_of(x).module)
    for update in range(4):
        before = [[p.detach().clone() for p in m.parameters()] for m in modules]
        x.update(t, update=update)
        now = [list(m.parameters()) for m in modules]
        moved = [
            any(not torch.equal(p, q) for p, q in zip(a, b, strict=True))
            for a, b in zip(before, now, strict=True)
        ]
        assert moved == [update >= 2, True]


def test_critic_warmup_ends_when_the_critic_explains_enough() -> None:
    c = replace(BASE, critic_warmup=4, gae_lambda_value=1.0, critic_warmup_variance=0.999)
    critic = replace(c, lr=1e-2, update_epoch=10)
    x = learner(c, critic_config=critic)
    t = experience(x.policy)
    rows = [numbers(x.update(t, update=update)) for update in range(4)]
    explained = [row["value/explained_variance"] for row in rows]
    # Nothing explains 99.9 %: critic_warmup is the limit.
    assert [row["value/warmup"] for row in rows] == [1, 1, 1, 0] and max(explained) < 0.999
    assert explained == sorted(explained)
    limit = (explained[1] + explained[2]) / 2
    lines: list[str] = []
    y = learner(replace(c, critic_warmup_variance=limit), critic_config=critic, notice=lines.append)
    before = [p.clone() for p in y.policy.parameters()]
    rows = [numbers(y.update(t, update=update)) for update in range(3)]
    assert [row["value/warmup"] for row in rows] == [1, 1, 0] and "update 3" in lines[0]
    assert all(torch.equal(p, q) for p, q in zip(before, y.policy.parameters(), strict=True))
    # A resumed learner trains the policy, too, although 4 updates were not reached.
    resumed = learner(replace(c, critic_warmup_variance=limit), critic_config=critic)
    resumed.load_state(copy.deepcopy(y.state()))
    for z in (y, resumed):
        row = numbers(z.update(t, update=3))
        assert "value/warmup" not in row and row["policy/grad_norm"] > 0
    assert differences(y, resumed) == 0


def test_reference_is_frozen_and_optional() -> None:
    assert learner().actor.reference is None
    x = learner(replace(BASE, use_kl_loss=True))
    before = [p.clone() for p in reference_of(x).parameters()]
    first = numbers(x.update(experience(x.policy), update=0))
    later = numbers(x.update(experience(x.policy), update=1))
    assert all(torch.equal(p, q) for p, q in zip(before, reference_of(x).parameters(), strict=True))
    assert later["kl/to_reference"] > first["kl/to_reference"] >= 0


@pytest.mark.parametrize(
    "adv_type", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_estimators_without_a_critic(adv_type: Any) -> None:
    x = learner(replace(BASE, adv_type=adv_type, group_size=4, gamma=1.0), critic=False)
    before = weights(x)
    metrics = numbers(x.update(experience(x.policy), update=0))
    assert any(not torch.equal(p, q) for p, q in zip(before, weights(x), strict=True))
    assert metrics["policy/grad_norm"] > 0 and metrics["advantage/std"] > 0
    assert not [tag for tag in metrics if tag.startswith("value/")]


def test_critic_has_own_learning_rate_schedule() -> None:
    x = learner(BASE, critic_config=replace(BASE, lr=7e-3, update_epoch=5), critic_columns=2)
    metrics = numbers(x.update(experience(x.policy), update=0))
    assert metrics["policy/lr"] == 1e-3 and metrics["value/lr"] == 7e-3
    steps = [int(d.optimizer.adamw.state_dict()["state"][0]["step"]) for d in (x, critic_of(x))]
    assert steps == [2 * 2, 5 * 4]


def test_recomputed_log_probs_replace_rollout_log_probs() -> None:
    x = learner(recompute=True)
    t = experience(x.policy, noise=0.3)
    batch, _ = x.prepare(t)
    exact = experience(x.policy)
    torch.testing.assert_close(batch.log_prob[t.mask], exact.log_prob[t.mask], rtol=0, atol=1e-5)
    # A full KL penalty uses the policy's distribution, too, but the ratio has the rollout's.
    for c in (BASE, replace(BASE, use_kl_in_reward=True, kl_penalty="full")):
        assert torch.equal(learner(c).prepare(t)[0].log_prob, t.log_prob)


@pytest.mark.slow
def test_state_resumes_bit_for_bit(tmp_path) -> None:
    options: dict[str, Any] = run_helpers.options("""use_kl_in_reward=true
        reward_norm=running entropy_bonus=0.01 entropy_target=2.0""")
    options |= {"kl_ctrl": KLControlConfig(type="adaptive", kl_coef=0.1, horizon=100)}
    c = replace(BASE, **options)
    x = learner(c)
    ts = [experience(x.policy, seed=i) for i in range(4)]
    for i in range(2):
        x.update(ts[i], update=i)
    torch.save({"policy": x.policy.state_dict(), "learner": x.state()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    y = learner(c)
    y.policy.load_state_dict(saved["policy"])
    y.load_state(saved["learner"])
    for i in (2, 3):
        outcomes = [numbers(z.update(ts[i], update=i)) for z in (x, y)]
        assert outcomes[0] == outcomes[1]
    assert differences(x, y) == 0 and x.kl_coef == y.kl_coef != 0.1
    other = learner(replace(c, kl_ctrl=replace(c.kl_ctrl, kl_coef=0.5)))
    other.load_state(saved["learner"])
    assert other.kl_coef == 0.5


def test_state_of_other_sizes_is_loaded_and_one_without_critic_refused() -> None:
    learner(num_sequences=2 * N).load_state(learner().state())
    x = learner(replace(BASE, adv_type="grpo", group_size=4), critic=False)
    with pytest.raises(ConfigError, match="no critic to continue with"):
        learner().load_state(x.state())


def test_bfloat16_products_keep_float32_weights() -> None:
    exact, rounded = learner(), learner(recompute=True)  # by the rounded policy itself
    rounded.policy.compute = torch.bfloat16
    critic: Any = critic_of(rounded).module
    critic.compute = torch.bfloat16
    t = experience(exact.policy)
    assert isinstance(t.obs, dict)
    ids, place = t.obs["row"].T, t.obs["place"].T
    with torch.no_grad():
        views = [x.policy.view(x.policy.hidden(ids, place), t.action.T) for x in (exact, rounded)]
    assert all(x.dtype == torch.float32 for view in views for x in (view.log_prob, view.entropy))
    error = float((views[0].log_prob - views[1].log_prob)[t.mask.T].abs().max())
    assert 1e-5 < error < 0.3  # rounded it is, to 8 bits
    before = weights(rounded)
    metrics, plain = numbers(rounded.update(t, update=0)), numbers(exact.update(t, update=0))
    assert all(x.dtype == torch.float32 for x in weights(rounded))
    assert differences(exact, rounded) > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(rounded), strict=True))
    assert metrics["policy/approx_kl"] == pytest.approx(plain["policy/approx_kl"], rel=0.3)
    assert metrics["value/loss"] == pytest.approx(plain["value/loss"], rel=0.1)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_forward_batch_size_does_not_change_result(size: int) -> None:
    full, parts = learner(), learner(replace(BASE, micro_batch_size=size))
    for x in (full, parts):
        x.update(experience(x.policy), update=0)
    assert differences(full, parts) < 1e-6


def test_critic_that_is_not_finite_fails_update() -> None:
    x = learner()
    t = experience(x.policy)
    with torch.no_grad():
        next(iter(critic_of(x).module.parameters())).fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        x.update(t, update=0)
    x.close()


def test_running_reward_norm_counts_each_response_once() -> None:
    """A score belongs to a sequence: the deviation is that of 8 numbers."""
    for clip in (None, 0.3):
        x = learner(replace(BASE, reward_norm="running", reward_clip=clip))
        t = experience(x.policy)
        scores = torch.where(t.mask, t.reward, 0.0).sum(0)
        scores = scores if clip is None else scores.clamp(-clip, clip)
        x.prepare(t)
        assert int(x.returns[0].moments.count) == N
        assert float(x.returns[0].std) == pytest.approx(
            float(scores.double().std(correction=0)), rel=1e-3
        )


# ------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_predicted_memory_of_step(role: str) -> None:
    """The prediction is within 20 % of the memory of a real forward and backward pass."""
    x = learner()
    t = experience(x.policy)
    batch, _ = x.prepare(replace(t, mask=torch.ones_like(t.mask)))
    optimizer = x.optimizer if role == "actor" else critic_of(x).optimizer
    model: Any = optimizer.model
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    known = [*model.parameters(), *model.buffers(), *tree.leaves(batch)]
    with memory_estimate.AllocationCounter(known) as living:
        optimizer.loss(batch)[0].backward()
    outcomes = memory_estimate.language_step(model, N, batch.inputs["row"].shape[0], T)
    assert outcomes == pytest.approx(living.peak, rel=0.2)
