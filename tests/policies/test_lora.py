"""Adapters: values and gradients by a reference, shared products, kernels of a pass, merging."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies import lora
from embodied_ppo.policies.lora import LoRALinear, project

OUTPUTS, WIDTH, RANK = (6, 10, 4), 8, 2


def adapted_layers(
    dtype: torch.dtype = torch.float32, *, alpha: float = 6.0, bias: bool = True
) -> list[LoRALinear]:
    """Return layers with the same input; their A and B are random."""
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(WIDTH, size, bias=bias, dtype=dtype) for size in OUTPUTS)
    lora.adapt(module, rank=RANK, alpha=alpha)
    lora.cast_parameters(module, dtype)
    for p in module.parameters():
        if p.requires_grad:
            nn.init.normal_(p)
    return [layer for layer in module if isinstance(layer, LoRALinear)]


def by_formula(layer: LoRALinear, x: Tensor, alpha: float) -> Tensor:
    """Return W x + b + (alpha / rank) B A x."""
    base = layer.base_layer
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return F.linear(x, base.weight, base.bias) + (x @ a.T @ b.T) * (alpha / RANK)


def gradients(layers: list[LoRALinear], results: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the gradients of A, B and x for a loss that weights all results differently."""
    weights = [torch.arange(y.numel()).view(y.shape).sin() for y in results]
    loss = torch.stack([(y.float() * w).sum() for y, w in zip(results, weights)]).sum()
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, [*trained, x]))


@pytest.mark.parametrize("alpha", [4.0, 6.0])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_follow_the_formula(alpha: float, bias: bool) -> None:
    layers = adapted_layers(alpha=alpha, bias=bias)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    results, expected = project(layers, x), [by_formula(layer, x, alpha) for layer in layers]
    for y, z, layer in zip(results, expected, layers, strict=True):
        torch.testing.assert_close(y, z)
        if alpha / RANK == 2.0:  # a factor of 2 is exact, so that no rounding differs
            assert torch.equal(layer(x), z)
    for g, h in zip(gradients(layers, results, x), gradients(layers, expected, x), strict=True):
        torch.testing.assert_close(g, h)


def test_gradients_agree_with_finite_differences() -> None:
    layers = adapted_layers(torch.float64)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.double()
    assert torch.autograd.gradcheck(lambda x, *_: tuple(project(layers, x)), (x, *trained))


def test_bfloat16_differs_by_rounding_only() -> None:
    layers, exact = adapted_layers(torch.bfloat16), adapted_layers(torch.float64)
    for a, b in zip(layers, exact, strict=True):
        b.load_state_dict(a.state_dict())
        b.double()
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    with lora.autocast(x.device, torch.bfloat16):
        results = project(layers, x)
    for y, z in zip(results, project(exact, x.double()), strict=True):
        assert (y.double() - z).abs().max() < 0.02 * z.abs().max()


def test_plain_layers_are_called_one_after_another() -> None:
    layers, x = [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)], torch.randn(2, WIDTH)
    assert all(torch.equal(y, f(x)) for y, f in zip(project(layers, x), layers, strict=True))


def test_new_adapters_change_nothing_and_keep_their_keys() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(nn.Linear(4, 3, bias=False)))
    x = torch.randn(2, WIDTH)
    before = module(x)
    lora.adapt(module, rank=RANK, alpha=1.0)
    assert torch.equal(module(x), before)
    assert [name for name, p in module.named_parameters() if p.requires_grad] == [
        f"{layer}.lora_{side}.default.weight" for layer in ("0", "1.0") for side in "AB"
    ]
    assert "0.base_layer.weight" in module.state_dict()
    assert "0.base_layer.bias" in module.state_dict()
    with pytest.raises(ConfigError, match="4, the largest of this model: 5"):
        lora.adapt(nn.Linear(WIDTH, 4), rank=5, alpha=1.0)


def test_merging_keeps_the_function() -> None:
    module, x = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3)), torch.randn(2, WIDTH)
    lora.adapt(module, rank=RANK, alpha=3.0)
    adapted = module[0]
    assert isinstance(adapted, LoRALinear)
    nn.init.normal_(adapted.lora_B["default"].weight)
    expected = module(x)
    lora.merge(module)
    assert [type(layer) for layer in module] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(module(x), expected)
