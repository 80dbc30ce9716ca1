"""Recurrent layers: values and gradients against a float64 reference and torch's own layers."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from embodied_ppo.policies.recurrent import LONGEST, RecurrentLayer

Kind = Literal["gru", "lstm"]
KINDS: tuple[Kind, ...] = ("gru", "lstm")
T, B, D, H = 6, 3, 5, 4


def layer(kind: Kind) -> RecurrentLayer:
    torch.manual_seed(1)
    result = RecurrentLayer(kind, D, H).double()
    for p in result.parameters():
        nn.init.uniform_(p, -0.5, 0.5)  # also the biases
    return result


def inputs(kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, B, D], a state [B, S] and marks of first steps, which are not all equal."""
    torch.manual_seed(0)
    size = H if kind == "gru" else 2 * H
    start = torch.zeros(T, B, dtype=torch.bool)
    start[0, 1] = start[2, 0] = start[5, 2] = start[3] = True
    return torch.randn(T, B, D).double(), torch.randn(B, size).double(), start


@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_that_of_torch_from_each_start_on(kind: Kind) -> None:
    """torch's layer runs each part of a column between two starts, from a state of zeros."""
    ours, (x, state, start) = layer(kind), inputs(kind)
    torch_layer = (nn.GRU if kind == "gru" else nn.LSTM)(D, H).double()
    parameters = {
        "weight_ih_l0": ours.input_weight,
        "weight_hh_l0": ours.hidden_weight.t(),
        "bias_ih_l0": ours.input_bias,
        "bias_hh_l0": ours.hidden_bias,
    }
    torch_layer.load_state_dict({name: p.detach() for name, p in parameters.items()})
    out, after = ours(x, state, start)
    for b in range(B):
        h = state[b].view(1, 1, -1)
        for t in range(T):
            h = torch.zeros_like(h) if start[t, b] else h
            memory = h if kind == "gru" else tuple(part.contiguous() for part in h.chunk(2, -1))
            expected, memory = torch_layer(x[t, b].view(1, 1, D), memory)
            h = memory if kind == "gru" else torch.cat(memory, -1)
            torch.testing.assert_close(out[t, b], expected[0, 0], rtol=0, atol=1e-12)
        torch.testing.assert_close(after[b], h.flatten(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_written_gradient_equals_numerical_one(kind: Kind) -> None:
    ours, (x, state, start) = layer(kind), inputs(kind)
    names = [name for name, _ in ours.named_parameters()]

    def output(x: Tensor, state: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(ours, values, (x, state, start))[0]

    leaves = [y.detach().requires_grad_() for y in (x, state, *ours.parameters())]
    assert torch.autograd.gradcheck(output, leaves)


def test_gru_of_one_unit_by_hand() -> None:
    """x_r = x_z = 0, x_n = 1, W = 0, h = 0.5: r = z = 1/2, n = tanh(1), h' = n/2 + h/2."""
    gru = RecurrentLayer("gru", 1, 1)
    with torch.no_grad():
        for p in gru.parameters():
            p.zero_()
        gru.input_weight[2] = 1.0
        out, after = gru(torch.ones(1, 1, 1), torch.full((1, 1), 0.5), torch.tensor([[False]]))
    assert out[0, 0].tolist() == pytest.approx([(math.tanh(1) + 0.5) / 2])
    assert after.item() == out[0, 0, 0].item()


@pytest.mark.parametrize("kind", KINDS)
def test_new_units_forget_within_1_to_longest_steps(kind: Kind) -> None:
    """A keeping gate of σ(log(s - 1)) = 1 - 1/s keeps its state for about s steps."""
    bias = RecurrentLayer(kind, D, H).input_bias
    keep = torch.sigmoid(bias[H : 2 * H])
    assert 1 / (1 - keep.max().item()) == pytest.approx(LONGEST)
    assert keep.min().item() == pytest.approx(0.5)


def test_gradient_of_inputs_before_a_start_is_zero() -> None:
    ours, (x, state, start) = layer("gru"), inputs("gru")
    x.requires_grad_()
    ours(x, state, start)[0][4].sum().backward()  # every column starts at step 3
    assert x.grad is not None
    assert bool((x.grad[:3] == 0).all()) and bool((x.grad[3:5] != 0).all())
