"""Recurrent layers whose state is replaced by zeros where an episode starts.

T steps, B sequences, D inputs, H units, G gates (GRU 3, LSTM 4), S numbers of state (GRU H, LSTM
2·H). torch's own layers cannot replace the state in the middle of a sequence. The gradient is
written out, because automatic differentiation of the steps takes four times as long on a CPU. The
steps are unrolled, so that a minibatch can be compiled or recorded as a CUDA graph.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from embodied_ppo.policies.initialization import orthogonal_

# Kind of layer -> number of gates, G.
GATES = {"gru": 3, "lstm": 4}
LONGEST = 50  # steps after which the slowest unit of a new layer has forgotten its state


class Steps(NamedTuple):
    """Values of all steps that the gradient needs, and the results.

    Attributes:
        hidden: [T, B, H], output of each step.
        state: [B, S] after the last step.
        saved: Tensors [T, B, ..], see ``gru_steps`` and ``lstm_steps``.
    """

    hidden: Tensor
    state: Tensor
    saved: tuple[Tensor, ...]


def gru_steps(x: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Steps:
    """Run a GRU (Cho et al. 2014, with the reset gate after the matrix product, as in torch).

        h ← keep·h
        r = σ(x_r + W_r h + b_r),  z = σ(x_z + W_z h + b_z)
        n = tanh(x_n + r·(W_n h + b_n))
        h ← (1 - z)·n + z·h

    Args:
        x: [T, B, 3H], inputs of the gates r, z, n with their biases.
        state: [B, H], h before the first step.
        keep: [T, B, 1], 0 where an episode starts, else 1.
        weight: [H, 3H], W transposed.
        bias: [3H].

    Returns:
        The steps; saved are (r, z) joined [T, B, 2H], n, W_n h + b_n and keep·h.
    """
    size, h = state.shape[-1], state
    hidden: list[Tensor] = []
    saved: list[tuple[Tensor, ...]] = []
    for gates, kept in zip(x.unbind(), keep.unbind(), strict=True):
        before = h * kept
        product = torch.addmm(bias, before, weight)
        rz = torch.sigmoid(gates[:, : 2 * size] + product[:, : 2 * size])
        candidate = product[:, 2 * size :]
        n = torch.tanh(torch.addcmul(gates[:, 2 * size :], rz[:, :size], candidate))
        h = torch.lerp(n, before, rz[:, size:])
        hidden.append(h)
        saved.append((rz, n, candidate, before))
    return Steps(torch.stack(hidden), h, tuple(map(torch.stack, zip(*saved, strict=True))))


def gru_gradients(
    grad: Tensor, saved: tuple[Tensor, ...], keep: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``gru_steps``.

    Args:
        grad: [T, B, H], gradient of ``Steps.hidden``.
        saved: ``Steps.saved``.
        keep: As in ``gru_steps``.
        weight: As in ``gru_steps``.

    Returns:
        Gradients of x [T, B, 3H], of the matrix products W h + b [T, B, 3H], and of the state.
    """
    rz, n, candidate, before = saved
    r, z = rz.chunk(2, dim=-1)
    to_n = (1 - z) * (1 - n * n)  # derivative of h by the argument of n, and so on
    to_z = (before - n) * z * (1 - z)
    factors = torch.cat([to_n * candidate * r * (1 - r), to_z, to_n * r], dim=-1)
    transposed = weight.t()
    dh = torch.zeros_like(before[0])
    totals: list[Tensor] = []  # gradient of h after each step, last step first
    products: list[Tensor] = []
    for g, factor, z_t, kept in zip(*map(_reversed, (grad, factors, z, keep)), strict=True):
        dh = dh + g
        product = dh.repeat(1, 3) * factor
        totals.append(dh)
        products.append(product)
        dh = torch.addmm(dh * z_t, product, transposed) * kept
    dproduct = torch.stack(products[::-1])
    dn = torch.stack(totals[::-1]) * to_n
    return torch.cat([dproduct[..., : 2 * n.shape[-1]], dn], dim=-1), dproduct, dh


def lstm_steps(x: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor) -> Steps:
    """Run an LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

        h, c ← keep·h, keep·c
        i, f, o = σ(x_k + W_k h + b_k) for k in i, f, o,  g = tanh(x_g + W_g h + b_g)
        c ← f·c + i·g,  h ← o·tanh(c)

    Args:
        x: [T, B, 4H], inputs of the gates i, f, g, o with their biases.
        state: [B, 2H], h and c before the first step.
        keep: [T, B, 1], 0 where an episode starts, else 1.
        weight: [H, 4H], W transposed.
        bias: [4H].

    Returns:
        The steps; saved are the four gates [T, B, 4H], keep·c, tanh(c) and keep·h.
    """
    h, c = state.chunk(2, dim=-1)
    hidden: list[Tensor] = []
    saved: list[tuple[Tensor, ...]] = []
    for gates, kept in zip(x.unbind(), keep.unbind(), strict=True):
        before, cell = h * kept, c * kept
        i, f, g, o = (gates + torch.addmm(bias, before, weight)).chunk(4, dim=-1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * cell + i * g
        tanh_c = torch.tanh(c)
        h = o * tanh_c
        hidden.append(h)
        saved.append((torch.cat([i, f, g, o], dim=-1), cell, tanh_c, before))
    results = tuple(map(torch.stack, zip(*saved, strict=True)))
    return Steps(torch.stack(hidden), torch.cat([h, c], dim=-1), results)


def lstm_gradients(
    grad: Tensor, saved: tuple[Tensor, ...], keep: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``lstm_steps``, as ``gru_gradients`` does; x and W h + b have one."""
    gates, cell, tanh_c, before = saved
    i, f, g, o = gates.chunk(4, dim=-1)
    to_cell = o * (1 - tanh_c * tanh_c)  # derivative of h by c
    factors = torch.cat([g * i * (1 - i), cell * f * (1 - f), i * (1 - g * g)], dim=-1)
    to_o = tanh_c * o * (1 - o)
    transposed = weight.t()
    dh, dc = torch.zeros_like(before[0]), torch.zeros_like(before[0])
    products: list[Tensor] = []
    steps = zip(*map(_reversed, (grad, to_cell, factors, to_o, f, keep)), strict=True)
    for grad_t, to_cell_t, factor, to_o_t, f_t, kept in steps:
        dh = dh + grad_t
        dc = dc + dh * to_cell_t
        product = torch.cat([dc.repeat(1, 3) * factor, dh * to_o_t], dim=-1)
        products.append(product)
        dh, dc = product @ transposed * kept, dc * f_t * kept
    dproduct = torch.stack(products[::-1])
    return dproduct, dproduct, torch.cat([dh, dc], dim=-1)


def _reversed(x: Tensor) -> tuple[Tensor, ...]:
    """Return the steps of [T, ..], last one first."""
    return x.unbind()[::-1]


class _Sequence(torch.autograd.Function):
    """``gru_steps`` or ``lstm_steps`` with the written-out gradient."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, x: Tensor, state: Tensor, keep: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps = (gru_steps if kind == "gru" else lstm_steps)(x, state, keep, weight, bias)
        ctx.kind = kind
        ctx.save_for_backward(keep, weight, *steps.saved)
        ctx.mark_non_differentiable(steps.state)  # the next rollout is not differentiated
        return steps.hidden, steps.state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keep, weight, *saved = ctx.saved_tensors
        gradients = gru_gradients if ctx.kind == "gru" else lstm_gradients
        dx, dproduct, dstate = gradients(grads[0], tuple(saved), keep, weight)
        flat = dproduct.flatten(0, 1)
        before = saved[-1].flatten(0, 1)  # keep·h
        return None, dx, dstate, None, before.t() @ flat, flat.sum(0)


class RecurrentLayer(nn.Module):
    """A GRU or LSTM."""

    def __init__(self, kind: Literal["gru", "lstm"], inputs: int, size: int) -> None:
        """Create the layer with orthogonal weights.

        Biases are 0, except those of the gates that keep the state, which make its units forget
        within 1 to ``LONGEST`` steps (Tallec and Ollivier 2018, "Can recurrent neural networks warp
        time?", eq. 14, with evenly spaced times).

        Args:
            kind: Kind of layer.
            inputs: Input features, D.
            size: Units, H.
        """
        super().__init__()
        self.kind, self.size = kind, size
        self.state_size = size if kind == "gru" else 2 * size  # numbers of the state, S
        gates = GATES[kind]
        self.input_weight = nn.Parameter(torch.zeros(gates * size, inputs))
        self.hidden_weight = nn.Parameter(torch.zeros(size, gates * size))
        self.input_bias = nn.Parameter(torch.zeros(gates * size))
        self.hidden_bias = nn.Parameter(torch.zeros(gates * size))
        with torch.no_grad():
            for gate in range(gates):
                part = slice(gate * size, (gate + 1) * size)
                orthogonal_(self.input_weight[part])
                orthogonal_(self.hidden_weight[:, part])
            # Gate z of the GRU and f of the LSTM, both second, keep the state.
            steps = torch.linspace(1.0, LONGEST - 1.0, size)
            self.input_bias[size : 2 * size] = steps.log()
            if kind == "lstm":
                self.input_bias[:size] = -steps.log()

    def forward(self, x: Tensor, state: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Run T steps.

        Args:
            x: [T, B, D].
            state: [B, S], before the first step.
            start: bool [T, B], where an episode starts.

        Returns:
            Output of each step [T, B, H], and the state after the last one [B, S], without
            gradient.
        """
        gates = nn.functional.linear(x, self.input_weight, self.input_bias)
        keep = (~start).to(x.dtype).unsqueeze(-1)
        arguments = gates, state, keep, self.hidden_weight, self.hidden_bias
        if torch.is_grad_enabled():
            return _Sequence.apply(self.kind, *arguments)  # pyright: ignore[reportReturnType]
        steps = (gru_steps if self.kind == "gru" else lstm_steps)(*arguments)
        return steps.hidden, steps.state
