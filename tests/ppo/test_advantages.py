"""Advantages: hand-computed cases, float64 references without masked rows, properties."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import reference_numerics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embodied_ppo.core import running_stats
from embodied_ppo.ppo import advantages, losses

GAMMA: dict[str, Any] = {"gamma": 0.99, "gae_lambda": 0.95}
NAN = float("nan")
ADV_TYPES = ("gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus")
ADV_TYPES += ("reinforce_plus_plus_baseline",)


def estimate(adv_type: str, rows: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Call ``advantages.estimate`` with rows instead of a trajectory."""
    return advantages.estimate(adv_type, SimpleNamespace(steps=None, **rows), **options)  # pyright: ignore[reportArgumentType]


def random_rows(
    T: int, N: int, seed: int, *, holes: float = 0.3, ends: float = 0.2
) -> dict[str, Tensor]:
    """Return random arguments of ``gae`` with flags and masks at random rows."""
    g = torch.Generator().manual_seed(seed)
    done = torch.rand(T, N, generator=g) < ends
    clock = torch.rand(T, N, generator=g) < 0.5
    return {
        "reward": torch.randn(T, N, generator=g),
        "value": torch.randn(T, N, generator=g),
        "next_value": torch.randn(T, N, generator=g),
        "terminated": done & ~clock,
        "truncated": done & clock,
        "mask": torch.rand(T, N, generator=g) >= holes,
    }


def column(*, mask: list[int] | None = None, **rows: list[float]) -> dict[str, Tensor]:
    """Return one column [T, 1] from lists; flags default to False, the mask to True."""
    T = len(rows["reward"])
    out = {name: torch.tensor(x, dtype=torch.float32).unsqueeze(1) for name, x in rows.items()}
    for flag in ("terminated", "truncated"):
        out[flag] = out.get(flag, torch.zeros(T, 1)).bool()
    out["mask"] = torch.tensor(mask or [1] * T).bool().unsqueeze(1)
    return out


def twin(rows: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    out = reference_numerics.gae(**{name: x.tolist() for name, x in rows.items()}, **options)
    return torch.tensor(out[0]), torch.tensor(out[1])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------- gae
def test_gae_by_hand():
    rows = column(
        reward=[1.0, 2.0, 3.0, 4.0],
        value=[1.0, 2.0, 3.0, 4.0],
        next_value=[2.0, 7.0, 4.0, 8.0],
        terminated=[0, 1, 0, 0],
    )
    advantage, returns = advantages.gae(**rows, gamma=0.5, gae_lambda=0.5)
    # row 3: 4 + ½·8 − 4 = 4                      row 2: 3 + ½·4 − 3 = 2, + ¼·4 = 3
    # row 1: the task ended: 2 − 2 = 0, no carry  row 0: 1 + ½·2 − 1 = 1, + ¼·0 = 1
    assert advantage.flatten().tolist() == [1.0, 0.0, 3.0, 4.0]
    assert returns.flatten().tolist() == [2.0, 2.0, 6.0, 8.0]
    assert advantage.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize(
    ("terminated", "truncated", "bootstrap_type", "expected"),
    [
        (1, 0, "standard", 2 - 3.0),  # r − V
        (0, 1, "standard", 2 + 0.5 * 10 - 3.0),  # the clock: V of the final observation counts
        (1, 0, "always", 2 + 0.5 * 10 - 3.0),
        (0, 1, "always", 2 + 0.5 * 10 - 3.0),
        (1, 0, "never", 2 - 3.0),
        (0, 1, "never", 2 - 3.0),
        (0, 0, "never", 2 + 0.5 * 10 - 3.0 + 0.25 * 100),
        # and only here the carry passes: δ of the next row is 100
        (0, 0, "always", 2 + 0.5 * 10 - 3.0 + 0.25 * 100),
    ],
)
def test_gae_at_episode_ends(terminated, truncated, bootstrap_type, expected):
    rows = column(
        reward=[2.0, 100.0],
        value=[3.0, 0.0],
        next_value=[10.0, 0.0],
        terminated=[terminated, 0],
        truncated=[truncated, 0],
    )
    advantage, returns = advantages.gae(
        **rows, gamma=0.5, gae_lambda=0.5, bootstrap_type=bootstrap_type
    )
    assert advantage[0].item() == pytest.approx(expected)
    assert returns[0].item() == pytest.approx(expected + 3.0)


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["standard", "always", "never"]),
    st.booleans(),
)
def test_gae_equals_reference(T, N, seed, holes, gamma, gae_lambda, bootstrap_type, variable):
    rows = random_rows(T, N, seed, holes=holes)
    steps = torch.randint(1, 6, (T, N), generator=torch.Generator().manual_seed(seed))
    options = {"gamma": gamma, "gae_lambda": gae_lambda, "bootstrap_type": bootstrap_type}
    expected = twin(rows, **options, steps=steps.tolist() if variable else None)
    advantage, returns = advantages.gae(**rows, **options, steps=steps if variable else 1)
    close(advantage, expected[0])
    close(returns, expected[1])


@pytest.mark.parametrize("gamma_lambda", [(0.99, 0.95), (1.0, 1.0)])
def test_gae_equals_reference_on_long_rollout(gamma_lambda):
    rows = random_rows(2048, 2, 0, holes=0.05, ends=0.001)
    options = dict(zip(("gamma", "gae_lambda"), gamma_lambda))
    close(advantages.gae(**rows, **options)[0], twin(rows, **options)[0])


def test_gae_of_one_row_and_of_masked_rows():
    rows = column(reward=[1.0], value=[2.0], next_value=[4.0])
    assert advantages.gae(**rows, gamma=0.5, gae_lambda=0.9)[0].item() == 1.0  # 1 + 2 − 2
    rows = column(reward=[1.0, 1.0], value=[2.0, 3.0], next_value=[4.0, 4.0], mask=[0, 0])
    advantage, returns = advantages.gae(**rows, **GAMMA)
    assert advantage.flatten().tolist() == [0.0, 0.0] and returns.flatten().tolist() == [2.0, 3.0]
    # Before a masked tail a row uses its own next value: 1 + ½·4 − 2.
    cut = column(reward=[1.0, 0.0], value=[2.0, 30.0], next_value=[4.0, 50.0], mask=[1, 0])
    assert advantages.gae(**cut, gamma=0.5, gae_lambda=0.9)[0].flatten().tolist() == [1.0, 0.0]


def test_gae_with_lambda_0_is_td_error():
    rows = random_rows(20, 3, 1, holes=0.0)
    advantage, _ = advantages.gae(**rows, gamma=0.9, gae_lambda=0.0)
    td = rows["reward"] + 0.9 * rows["next_value"] * ~rows["terminated"] - rows["value"]
    close(advantage, td)


def test_gae_with_lambda_1_is_monte_carlo():
    """With consistent values the returns are discounted rewards plus the value at the cut."""
    rows = random_rows(12, 1, 2, holes=0.0, ends=0.0)
    reward, value = rows["reward"], rows["value"]
    rows["next_value"] = torch.cat([value[1:], torch.tensor([[5.0]])])
    rows["terminated"][3] = rows["truncated"][7] = True
    rows["next_value"][7] = -2.0
    returns = advantages.gae(**rows, gamma=0.9, gae_lambda=1.0)[1].flatten()
    for start, end, last in ((0, 3, 0.0), (4, 7, -2.0), (8, 11, 5.0)):
        for t in range(start, end + 1):
            monte_carlo = (
                sum(0.9 ** (i - t) * reward[i].item() for i in range(t, end + 1))
                + 0.9 ** (end + 1 - t) * last
            )
            assert returns[t].item() == pytest.approx(monte_carlo, abs=1e-5)


def test_gae_discounts_chunk_of_k_steps_k_times():
    rows = column(reward=[1.0, 2.0], value=[0.0, 0.0], next_value=[10.0, 10.0])
    advantage, _ = advantages.gae(**rows, gamma=0.5, gae_lambda=0.5, steps=torch.tensor([[3], [2]]))
    # row 1: 2 + ½²·10 = 4.5 ; row 0: 1 + ½³·10 = 2.25, + (¼)³·4.5
    assert advantage.flatten().tolist() == pytest.approx([2.25 + 4.5 / 64, 4.5])
    same = advantages.gae(**rows, gamma=0.5, gae_lambda=0.5, steps=3)[0]
    close(same, advantages.gae(**rows, gamma=0.125, gae_lambda=0.125)[0])


# -------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("seed", range(8))
def test_masked_rows_do_not_change_results(seed):
    rows = random_rows(15, 4, seed)
    expected = advantages.gae(**rows, **GAMMA)
    junk = copy.deepcopy(rows)
    for name in ("reward", "value", "next_value"):
        junk[name][~rows["mask"]] = NAN
    for name in ("terminated", "truncated"):
        junk[name][~rows["mask"]] = True
    advantage, returns = advantages.gae(**junk, **GAMMA)
    assert advantage.equal(expected[0])
    assert returns[rows["mask"]].equal(expected[1][rows["mask"]])
    assert (advantage[~rows["mask"]] == 0).all()
    assert expected[1][~rows["mask"]].equal(rows["value"][~rows["mask"]])


def test_gae_ignores_reset_row():
    """The row before a reset row is done and has its own next_value."""
    with_dummy = column(
        reward=[1.0, 2.0, NAN, 3.0],
        value=[1.0, 1.0, 50.0, 4.0],
        next_value=[1.0, 9.0, 4.0, 6.0],
        truncated=[0, 1, 0, 0],
        mask=[1, 1, 0, 1],
    )
    without = {name: x[[0, 1, 3]] for name, x in with_dummy.items()}
    advantage = advantages.gae(**with_dummy, **GAMMA)[0]
    assert advantage[[0, 1, 3]].equal(advantages.gae(**without, **GAMMA)[0])
    # the value of the final observation
    assert advantage[1].item() == pytest.approx(2 + 0.99 * 9 - 1)


def test_gae_ignores_masked_tokens_inside_response():
    """Two masked tool tokens between two tokens of the policy."""
    value = [1.0, 2.0, 30.0, 40.0, 5.0, 6.0]
    with_hole = column(
        reward=[0.0, 0.0, 7.0, 7.0, 0.0, 1.0],
        value=value,
        next_value=value[1:] + [99.0],
        terminated=[0, 0, 0, 0, 0, 1],
        mask=[1, 1, 0, 0, 1, 1],
    )
    unmasked = [0, 1, 4, 5]
    without = {name: x[unmasked].clone() for name, x in with_hole.items()}
    without["next_value"][1] = 5.0  # as the trajectory without tool tokens would have it
    advantage, returns = advantages.gae(**with_hole, **GAMMA)
    expected = advantages.gae(**without, **GAMMA)
    assert advantage[unmasked].equal(expected[0]) and returns[unmasked].equal(expected[1])
    delta = 0.99 * 5.0 - 2.0
    later = 0.99 * 6.0 - 5.0 + 0.99 * 0.95 * (1.0 - 6.0)
    assert advantage[1].item() == pytest.approx(delta + 0.99 * 0.95 * later, rel=1e-6)


def test_decoupled_and_length_adaptive_gae_by_hand():
    """Two responses of 1 and 4 tokens with score 1 and values ½, γ = 1, α = ½."""
    mask = torch.tensor([[1, 1], [0, 1], [0, 1], [0, 1]]).bool()
    last = torch.tensor([[1, 0], [0, 0], [0, 0], [0, 1]]).bool()
    value = torch.full((4, 2), 0.5)
    following = torch.cat([value[1:], value[:1]])
    x = {"reward": last.float(), "value": value, "next_value": following, "mask": mask}
    x |= {"terminated": last, "truncated": last & False}
    decoupled: dict[str, Any] = {"gamma": 1.0, "gae_lambda": 0.0, "gae_lambda_value": 1.0}
    # l = 1: ½·1 < 1, so λ = 0; l = 4: λ = 1 − 1/(½·4) = ½
    assert advantages.length_adaptive_lambda(mask, 0.5).tolist() == [0.0, 0.5]
    advantage, returns = estimate("gae", x, **decoupled, length_adaptive_alpha=0.5)
    # δ = 0, 0, 0, 1 − ½, and A_t = ½·A_{t+1}
    assert advantage.T.tolist() == [[0.5, 0, 0, 0], [0.0625, 0.125, 0.25, 0.5]]
    assert returns[mask].tolist() == [1.0] * 5  # Monte Carlo: the score
    # Without α the advantage has λ = 0: the TD error.
    advantage, same = estimate("gae", x, **decoupled)
    assert advantage.T.tolist() == [[0.5, 0, 0, 0], [0, 0, 0, 0.5]] and same.equal(returns)


@pytest.mark.parametrize("seed", range(3))
def test_length_adaptive_gae_equals_the_reference_on_ragged_batches(seed):
    """Each response by itself, with its own λ, in float64; as in NeMo RL, which gives the same."""
    rows = random_rows(80, 7, seed)
    advantage, returns = estimate(
        "gae", rows, gamma=0.99, gae_lambda=0.9, gae_lambda_value=1.0, length_adaptive_alpha=0.05
    )
    for n in range(7):
        one = {name: tensor[:, n : n + 1] for name, tensor in rows.items()}
        policy_lambda = max(0.0, 1 - 1 / max(1.0, 0.05 * int(one["mask"].sum())))
        close(advantage[:, n : n + 1], twin(one, gamma=0.99, gae_lambda=policy_lambda)[0].float())
        close(returns[:, n : n + 1], twin(one, gamma=0.99, gae_lambda=1.0)[1].float())


def test_results_carry_no_gradient():
    rows = random_rows(5, 2, 5)
    rows["value"].requires_grad_()
    assert not any(x.requires_grad for x in advantages.gae(**rows, **GAMMA))


# -------------------------------------------------------------------------------------- critic-free
SCORE = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 5.0, 1.0, 2.0])


def test_grpo_by_hand():
    # group (1, 3): mean 2, unbiased deviation √2: ∓1/√2 ; group (2, 2): 0/(0 + eps) = 0
    out = advantages.grpo(SCORE[:4], 2)
    assert out.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0, 0.0], abs=1e-5)
    assert advantages.grpo(SCORE[:4], 2, normalize_std=False).tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_rloo_by_hand():
    # (0, 5, 1, 2): 0 − 8/3, 5 − 3/3, 1 − 7/3, 2 − 6/3
    assert advantages.rloo(SCORE[4:], 4).tolist() == pytest.approx([-8 / 3, 4.0, -4 / 3, 0.0])


@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 10_000))
def test_group_estimators_equal_reference(group_size, groups, seed):
    score = torch.randn(group_size * groups, generator=torch.Generator().manual_seed(seed))
    s = score.tolist()
    assert advantages.grpo(score, group_size).tolist() == pytest.approx(
        reference_numerics.grpo(s, group_size), abs=1e-6, rel=1e-6
    )
    plain = advantages.grpo(score, group_size, normalize_std=False)
    assert plain.tolist() == pytest.approx(
        reference_numerics.grpo(s, group_size, normalize_std=False), abs=1e-6
    )
    assert advantages.rloo(score, group_size).tolist() == pytest.approx(
        reference_numerics.rloo(s, group_size), abs=1e-6
    )
    close(plain.reshape(groups, group_size).sum(1), torch.zeros(groups), 1e-5)


def test_dr_grpo_by_hand():
    """Check Dr. GRPO: no division by the deviation of the group or the length of a column."""
    # Column 0 succeeds after 1 step, column 1 fails after 3: scores 1 and 0, mean 1/2.
    mask = torch.tensor([[1, 1], [0, 1], [0, 1]]).bool()
    reward, zero = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), torch.zeros(3, 2)
    rows = {"reward": reward, "value": zero, "next_value": zero, "mask": mask}
    advantage, _ = estimate(
        "dr_grpo",
        rows | {"terminated": zero.bool(), "truncated": zero.bool()},
        gamma=1.0,
        gae_lambda=1.0,
        group_size=2,
    )
    assert advantage.tolist() == [[0.5, -0.5], [0.0, -0.5], [0.0, -0.5]]
    # With r = 1 and the constant length 4: ((-0.5·1)/4 + (0.5·3)/4) / 2 = (-1/8 + 3/8) / 2 = 1/8.
    loss = losses.aggregate(-advantage, mask, aggregation="seq-mean-token-sum-norm", length=4.0)
    assert loss.item() == pytest.approx(1 / 8)


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.rloo])
def test_groups_ignore_fully_masked_columns(estimator):
    valid = torch.tensor([True, True, False, True, False, False, True, False])
    out = estimator(SCORE, 4, valid=valid)
    assert out[[0, 1, 3]].tolist() == pytest.approx(estimator(SCORE[[0, 1, 3]], 3).tolist())
    assert out[[2, 4, 5, 6, 7]].tolist() == [0.0] * 5  # not valid, or alone in its group


def test_reinforce_by_hand():
    """The return-to-go uses no value and is not whitened; a time limit ends the sum."""
    rows = column(
        reward=[1.0, 2.0, 9.0, 4.0], value=[7.0] * 4, truncated=[0, 1, 0, 0], mask=[1, 1, 0, 1]
    )
    rows["next_value"] = torch.full_like(rows["reward"], 5.0)
    # 4 ; masked: 0 ; 2 ; 1 + 0.5 x 2
    advantage, _ = estimate("reinforce", rows, gamma=0.5, gae_lambda=0.9)
    assert advantage.flatten().tolist() == [2.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_equals_reference(seed):
    rows = random_rows(10, 4, seed)
    done, mask = rows["terminated"] | rows["truncated"], rows["mask"].tolist()
    raw = reference_numerics.return_to_go(rows["reward"].tolist(), done.tolist(), mask, gamma=0.9)
    close(estimate("reinforce_plus_plus", rows, gamma=0.9, gae_lambda=0.9)[0], torch.tensor(raw))


# ----------------------------------------------------------------------------------------- estimate
def test_estimate_selects_estimator():
    rows = random_rows(6, 4, 7)
    rows["mask"][:, 3] = False  # an empty column: counts in no group
    mask = rows["mask"]
    gae = advantages.gae(**rows, **GAMMA)
    out = {name: estimate(name, rows, **GAMMA, group_size=2) for name in ADV_TYPES}
    assert out["gae"][0].equal(gae[0]) and out["gae"][1].equal(gae[1])
    score = torch.where(mask, rows["reward"], 0.0).sum(0)
    for name, estimator in (("grpo", advantages.grpo), ("rloo", advantages.rloo)):
        close(out[name][0], mask * estimator(score, 2, valid=mask.any(0)))
        assert (out[name][0][:, 2:] == 0).all()  # column 2 is alone
    zero = torch.zeros(6, 4)
    rewards_only = rows | {"value": zero, "next_value": zero}
    to_go = advantages.gae(**rewards_only, gamma=0.99, gae_lambda=1.0)[0]
    for name in ("reinforce", "reinforce_plus_plus"):
        close(out[name][0], to_go)
    centred = mask * advantages.grpo(score, 2, normalize_std=False, valid=mask.any(0))
    close(out["reinforce_plus_plus_baseline"][0], centred)
    for name in ADV_TYPES[1:]:
        close(out[name][1], advantages.gae(**rows, gamma=0.99, gae_lambda=1.0)[1])
        assert len(out[name][0].unique()) > 2  # none is constant


@pytest.mark.parametrize("adv_type", ADV_TYPES[1:])
def test_critic_free_advantages_do_not_read_values(adv_type):
    rows = random_rows(6, 4, 8)
    other = rows | {"value": rows["value"] + 3.0, "next_value": rows["next_value"] * 2}
    a, b = (estimate(adv_type, r, **GAMMA, group_size=2)[0] for r in (rows, other))
    assert a.equal(b)


# ------------------------------------------------------------------------------------ normalisation
def test_normalize_by_hand():
    mask = torch.tensor([[True, True], [False, True]])
    # mean 3, unbiased variance (4 + 0 + 4)/2 = 4
    out, used = advantages.normalize(torch.tensor([[1.0, 3.0], [50.0, 5.0]]), mask)
    close(out, torch.tensor([[-1.0, 0.0], [0.0, 1.0]]))
    assert [x.item() for x in used] == [3.0, 4.0, 3.0]


@pytest.mark.parametrize("seed", range(4))
def test_normalize_equals_reference(seed):
    g = torch.Generator().manual_seed(seed)
    a, mask = torch.randn(20, 6, generator=g) * 7 + 100, torch.rand(20, 6, generator=g) < 0.5
    out, _ = advantages.normalize(a, mask)
    close(out, torch.tensor(reference_numerics.standardise(a.tolist(), mask.tolist())))
    mean, var, _ = running_stats.masked_moments(out, mask)
    assert mean.item() == pytest.approx(0, abs=1e-6) and var.item() == pytest.approx(1, abs=1e-6)
    close(advantages.normalize(out, mask)[0], out)  # whitening twice is whitening once


def test_normalize_of_one_and_of_equal_entries():
    a = torch.tensor([[3.0, 8.0]])
    out, used = advantages.normalize(a, torch.tensor([[True, False]]))
    assert out.equal(a) and used.count.item() == 1
    out, used = advantages.normalize(a, torch.tensor([[True, True]]))
    assert used.count.item() == 2 and not out.equal(a)
    a = torch.full((30, 7), 0.1)
    assert advantages.normalize(a, torch.ones_like(a).bool())[0].abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_gpu_scan_equals_cpu_scan(rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x, carry = (torch.randn(rows, 5, generator=g, dtype=torch.float64) for _ in range(2))
    carry[torch.rand(rows, 5, generator=g) < 0.2] = 0.0
    doubled = advantages._scan_by_doubling(carry, x.clone())
    torch.testing.assert_close(doubled, advantages.scan(carry, x.clone()), rtol=1e-12, atol=1e-12)
