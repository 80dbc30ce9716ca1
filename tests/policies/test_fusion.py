"""Functions that a GPU runs as fused kernels: the numbers of transformers' modules and of eager
code, where torch.compile traces them and where it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from embodied_ppo.policies import fusion
from embodied_ppo.policies.token_statistics import Head, TokenStatistics
from tests.policies.test_causal_lm import make as language_model


def norm(kind: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    layer = kind(16, eps=0.01)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 2, 16))  # pyright: ignore[reportCallIssue]
    return layer.to(dtype)


def inputs(dtype: torch.dtype, device: str = "cpu", rows: int = 3) -> dict[str, list[Any]]:
    """Return arguments of each function; floating-point tensors of a type need gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    gate, up = draw(2, rows, 16), draw(2, rows, 16)
    heads = draw(2, rows, 4, 8).transpose(1, 2)
    cos, sin = (draw(1, rows, 8, dtype=torch.float32) for _ in range(2))
    x = draw(2, rows, 16)
    return {
        "llama": [norm(LlamaRMSNorm, dtype).to(device), x],
        "gemma": [norm(GemmaRMSNorm, torch.float32).to(device), x],
        "rotate": [heads, cos, sin, dtype],
        "silu": [ACT2FN["silu"], gate, up],
        "gelu": [ACT2FN["gelu_pytorch_tanh"], gate, up],
    }


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"rotate": fusion.rotate}
FUNCTIONS |= dict.fromkeys(("llama", "gemma"), fusion.normalise)
FUNCTIONS |= dict.fromkeys(("silu", "gelu"), fusion.gated_product)


def results(function: Callable[..., Tensor], arguments: list[Any]) -> list[Tensor]:
    """Return the value and the gradients of a function."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    leaves = {id(x): x.detach().requires_grad_() for x in tensors}
    value = function(*(leaves.get(id(x), x) for x in arguments))
    weights = [w for x in arguments if isinstance(x, nn.Module) for w in x.parameters()]
    some = torch.linspace(-1, 1, value.numel(), device=value.device).view(value.shape)
    gradients = torch.autograd.grad((value.float() * some).sum(), [*leaves.values(), *weights])
    return [value, *gradients]


def statistics(device: str, rows: int = 7) -> list[Tensor]:
    """Return log-probability, entropy and KL of tokens, and the gradients of their sum."""
    generator = torch.Generator().manual_seed(1)
    h, w, rh, rw = (
        torch.randn(n, d, generator=generator).to(device)
        for n, d in ((rows, 8), (50, 8), (rows, 6), (50, 6))
    )
    action = torch.randint(0, 50, (rows,), generator=generator).to(device)
    head = Head(4, torch.float32, 0.7, 2.0, entropy=True)
    h.requires_grad_()
    w.requires_grad_()
    values: Any = TokenStatistics.apply(h, w, action, rh, rw, head)
    loss = (torch.stack(values) * torch.linspace(-1, 1, rows, device=device)).sum()
    return [*values, *torch.autograd.grad(loss, (h, w))]


@pytest.fixture
def traced(monkeypatch) -> None:
    """Compile on the CPU: torch.compile traces the functions, but generates no code."""
    monkeypatch.setattr(fusion, "DEVICES", ("cpu",))
    run_helpers.trace_only(monkeypatch)
    monkeypatch.setattr(fusion, "_compiled", {})


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_functions_give_the_numbers_of_eager_code(
    dtype: torch.dtype, monkeypatch, traced: None
) -> None:
    for name, function in FUNCTIONS.items():
        actual = results(function, inputs(dtype)[name])
        with monkeypatch.context() as eager:
            eager.setattr(fusion, "DEVICES", ())
            expected = results(function, inputs(dtype)[name])
        for x, y in zip(actual, expected, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(
                x, y, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
            )
    assert len(fusion._compiled) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
def test_traced_token_statistics(monkeypatch, traced: None) -> None:
    actual = statistics("cpu")
    monkeypatch.setattr(fusion, "DEVICES", ())
    for x, y in zip(actual, statistics("cpu"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_nothing_is_compiled_within_an_eager_function(traced: None) -> None:
    gate = torch.randn(3, 4)
    product = fusion.eagerly(fusion.gated_product)
    assert torch.equal(product(nn.SiLU(), gate, gate), nn.functional.silu(gate) * gate)
    assert not fusion._compiled
    fusion.gated_product(nn.SiLU(), gate, gate)
    assert len(fusion._compiled) == 1


def test_torchs_variable_disables_the_fusion(monkeypatch, traced: None) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    gate = torch.randn(3, 4)
    fusion.gated_product(nn.SiLU(), gate, gate)
    assert not fusion._compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_layers_with_recomputation(kind: str, monkeypatch, traced: None) -> None:
    """In Gemma 2 the last operation of a layer is fused. Its recomputation ends within it."""
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])

    def gradient(*, recompute: bool) -> Tensor:
        policy = language_model(kind, 0)
        policy.decoder.module.recompute = recompute
        policy.hidden(ids, torch.tensor([[2, 3], [1, 3]])).square().sum().backward()
        weight = policy.model.model.embed_tokens.weight.grad
        assert weight is not None
        return weight

    actual = gradient(recompute=True)
    monkeypatch.setattr(fusion, "DEVICES", ())
    torch.testing.assert_close(actual, gradient(recompute=False), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_one_kernel_on_a_gpu(name: str) -> None:
    """bfloat16 against float32 on the CPU; and the kernels of a forward pass."""
    for rows in (3, 5, 8):
        actual = results(FUNCTIONS[name], inputs(torch.bfloat16, "cuda", rows)[name])
        expected = results(FUNCTIONS[name], inputs(torch.float32, rows=rows)[name])
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x.float().cpu(), y, rtol=0.05, atol=0.05)
    with torch.no_grad():
        arguments = inputs(torch.bfloat16, "cuda")[name]
        FUNCTIONS[name](*arguments)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            FUNCTIONS[name](*arguments)
            torch.cuda.synchronize()
    assert sum(event.device_time > 0 for event in record.events() or []) == 1


@pytest.mark.gpu
def test_token_statistics_on_a_gpu() -> None:
    for rows in (7, 6, 11):
        for x, y in zip(statistics("cuda", rows), statistics("cpu", rows), strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-5)
