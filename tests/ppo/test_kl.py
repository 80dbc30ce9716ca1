"""KL: estimators, their gradients and expectations, penalty and controller."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference_numerics
import torch
from hypothesis import given
from hypothesis import strategies as st

from embodied_ppo.ppo import kl, rewards

SAMPLED = ("k1", "abs", "k2", "k3")


def value_and_gradient(delta: float, kind: str) -> tuple[float, float]:
    lp = torch.tensor([delta - 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    out = kl.estimate(lp, ref, kind)
    out.sum().backward()
    assert lp.grad is not None and ref.grad is None  # the reference never learns
    return out.item(), lp.grad.item()


# --------------------------------------------------------------------------------------- estimators
@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [  # Δ = −0.5
        ("k1", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),  # ½·0.25 ; gradient Δ
        ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5)),  # 1.6487 − 1 − 0.5 ; gradient 1 − e^{−Δ}
        ("k1+", -0.5, -0.5),
        ("abs+", 0.5, -0.5),
        ("k2+", 0.125, -0.5),
        ("k3+", math.exp(0.5) - 1.5, -0.5),
    ],
)
def test_value_and_gradient_by_hand(kind, value, gradient):
    assert value_and_gradient(-0.5, kind) == (pytest.approx(value), pytest.approx(gradient))


def test_k3_clamps():
    # Δ = −3: e^3 − 4 = 16.09 -> 10, without gradient ; Δ = 15: e^{−15} + 14 -> 10 ; Δ = ±50 stays
    # finite
    assert value_and_gradient(-3.0, "k3") == (10.0, 0.0)
    assert value_and_gradient(15.0, "k3") == (10.0, 0.0)
    assert value_and_gradient(-50.0, "k3") == (10.0, 0.0)
    assert value_and_gradient(-50.0, "k3+") == (10.0, -50.0)  # the '+' form still pulls back
    # ½Δ²: not lost in e^x − 1
    assert value_and_gradient(1e-9, "k3")[0] == pytest.approx(5e-19, rel=1e-3)


@given(st.floats(-60, 60), st.floats(-60, 60), st.sampled_from(SAMPLED), st.booleans())
def test_estimators_equal_reference(lp, ref, kind, plus):
    out = kl.estimate(
        torch.tensor(lp, dtype=torch.float64),
        torch.tensor(ref, dtype=torch.float64),
        kind + "+" * plus,
    )
    assert out.item() == pytest.approx(reference_numerics.kl(lp, ref, kind), rel=1e-9, abs=1e-12)


def test_expectation_of_estimators_is_exact_kl():
    """Sums over the actions of a categorical: E[k1] = E[k3] = KL; E[k2] is close but biased."""
    logits = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64)
    ref_logits = torch.tensor([0.1, 0.2, 0.6, -0.5], dtype=torch.float64)
    p, lp, ref = logits.softmax(-1), logits.log_softmax(-1), ref_logits.log_softmax(-1)
    exact = reference_numerics.categorical_kl(p.tolist(), ref.exp().tolist())
    full = kl.estimate(lp, None, "full", logits=logits, ref_logits=ref_logits)
    assert full.item() == pytest.approx(exact, abs=1e-12)
    expected = {
        kind: (p * kl.estimate(lp, ref, kind)).sum().item()
        for kind in ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")
    }
    assert expected["k1"] == expected["k1+"] == pytest.approx(exact, abs=1e-12)
    assert expected["k3"] == expected["k3+"] == pytest.approx(exact, abs=1e-12)
    assert expected["k2"] == pytest.approx(exact, rel=0.2) and abs(expected["k2"] - exact) > 1e-4
    assert 0.01 < exact < 1


def test_expected_gradients_as_a_loss():
    """Σ_a π(a)·∂kl/∂lp(a)·∇lp(a), with π(a) as a weight: 0 for k1, KL's own for k2 and '+', KL(ref
    || π)'s for k3.
    """
    ref_logits = torch.tensor([0.1, 0.2, 0.6, -0.5], dtype=torch.float64)

    def gradient(loss_of):
        logits = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
        (out,) = torch.autograd.grad(loss_of(logits), logits)
        return out

    def sampled(kind):
        def loss(logits):
            lp = logits.log_softmax(-1)
            return (lp.exp().detach() * kl.estimate(lp, ref_logits.log_softmax(-1), kind)).sum()

        return gradient(loss)

    forward = gradient(
        lambda x: kl.estimate(x, None, "full", logits=x, ref_logits=ref_logits).sum()
    )
    assert forward.abs().max() > 0.01
    learning = ref_logits.clone().requires_grad_()
    assert not kl.estimate(
        learning, None, "full", logits=ref_logits, ref_logits=learning
    ).requires_grad
    reverse = gradient(
        lambda x: (ref_logits.softmax(-1) * (ref_logits.log_softmax(-1) - x.log_softmax(-1))).sum()
    )
    torch.testing.assert_close(
        sampled("k1"), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0
    )
    for kind in ("k2", "k1+", "abs+", "k2+", "k3+"):
        torch.testing.assert_close(sampled(kind), forward, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(sampled("k3"), reverse, atol=1e-12, rtol=1e-9)


def test_full_by_hand_with_an_impossible_action():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)  # ½, ½, 0
    ref_logits = torch.tensor([[math.log(0.25), math.log(0.75), float("-inf")]])
    out = kl.estimate(torch.zeros(1), None, "full", logits=logits, ref_logits=ref_logits)
    # ½·ln(½/¼) + ½·ln(½/¾) = ½·(0.6931 − 0.4055) = 0.1438
    assert out.shape == (1,)
    assert out.item() == pytest.approx(0.5 * (math.log(2) + math.log(2 / 3)), rel=1e-6)
    out.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


# ------------------------------------------------------------------------------------------ penalty
def test_penalty_by_hand():
    reward = torch.tensor([[1.0, 2.0], [0.0, 5.0]])
    mask = torch.tensor([[True, True], [True, False]])
    divergence = torch.tensor([[0.5, -1.0], [2.0, float("nan")]])
    penalised, metrics = rewards.subtract_kl_penalty(reward, divergence, mask, 0.1)
    assert penalised.tolist() == [pytest.approx([0.95, 2.1]), pytest.approx([-0.2, 5.0])]
    # mean over columns of the mean over rows: ((0.5 + 2) / 2 - 1) / 2
    mean: Any = metrics["kl/to_reference"]
    assert mean.value == pytest.approx(0.125) and metrics["kl/coef"] == 0.1
