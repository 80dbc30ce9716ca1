"""Chunked log-probabilities: casts, bytes and memory. test_causal_lm.py checks the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguagePolicy, logit_bytes
from embodied_ppo.models.token_statistics import Head, TokenStatistics
from embodied_ppo.placement.memory_estimate import AllocationCounter
from tests.kernel_counter import KernelCounter
from tests.models.test_causal_lm import make

TOKENS, SIZE, VOCABULARY, ROWS = 512, 32, 2048, 128


def count(policy: LanguagePolicy, *, entropy: bool, bonus: bool) -> tuple[KernelCounter, float]:
    """Return the kernels of both passes over 512 tokens, and the bytes that they move per logit."""
    hidden = torch.randn(TOKENS, SIZE, requires_grad=True)
    action = torch.arange(TOKENS)
    with KernelCounter() as counter:
        view = policy.view(hidden, action, entropy=entropy)
        loss = view.log_prob.sum()
        if bonus:
            assert view.entropy is not None
            loss = loss + view.entropy.sum()
        loss.backward()
    return counter, counter.nbytes / (TOKENS * VOCABULARY)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> LanguagePolicy:
    """A policy of float32 weights and bfloat16 products whose logits are computed in 4 chunks."""
    policy = make(vocab_size=VOCABULARY)
    policy.compute, policy.logit_bytes = torch.bfloat16, 4 * VOCABULARY * ROWS
    monkeypatch.setattr(causal_lm, "LOGIT_BYTES", 0)
    return policy


@pytest.mark.parametrize(
    ("entropy", "bonus", "limit"), [(False, False, 80), (True, False, 105), (True, True, 125)]
)
def test_bytes_of_both_passes(
    policy: LanguagePolicy, entropy: bool, bonus: bool, limit: float
) -> None:
    """A checkpointed pass per chunk, with a cast of the head each, moved 1,180 bytes per logit."""
    counter, per_logit = count(policy, entropy=entropy, bonus=bonus)
    assert limit - 10 < per_logit <= limit, per_logit
    chunks = TOKENS // ROWS
    # Logits of both passes, gradients of hidden states and of the head.
    assert counter.kernels["mm"] == 4 * chunks
    # Head and hidden states once each way, logits twice per chunk, their gradient once.
    assert counter.kernels["_to_copy"] <= 4 + 3 * chunks
    assert counter.kernels["exp"] == (2 if entropy else 1) * chunks
    assert counter.kernels["sub_"] == chunks * bonus


def test_memory_is_that_of_one_chunk(policy: LanguagePolicy) -> None:
    """At most three times the float32 logits of a chunk, and the head in both types."""
    hidden, head = torch.randn(TOKENS, SIZE, requires_grad=True), policy.model.lm_head.weight
    known = [*policy.parameters(), hidden]
    with AllocationCounter(known) as counter:
        view = policy.view(hidden, torch.arange(TOKENS))
        assert view.entropy is not None
        (view.log_prob.sum() + view.entropy.sum()).backward()
    chunk = 4 * ROWS * VOCABULARY
    assert counter.peak < 3.6 * chunk + (4 + 2 + 2) * head.numel()


def test_size_of_chunks() -> None:
    """64 MiB on a CPU, a 64th of a GPU's memory, at most 1 GiB."""
    gib = 1 << 30
    sizes = [("cpu", None), ("cpu", 64 * gib), ("cuda", 24 * gib), ("cuda", 141 * gib)]
    sizes += [("cuda", gib), ("cuda", None)]
    mib = [logit_bytes(*x) >> 20 for x in sizes]
    assert mib == [64, 64, 384, 1024, 64, 64]


def test_gradients_of_one_argument() -> None:
    """Frozen heads and frozen hidden states get no gradient; the other one is the same."""
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    head = Head(rows=4, dtype=torch.float32, temperature=0.5, softcap=None, entropy=True)

    def gradients(**needed: bool) -> list[Tensor | None]:
        x, w = hidden.clone(), weight.clone()
        x.requires_grad_(needed["hidden"])
        w.requires_grad_(needed["weight"])
        statistics: Any = TokenStatistics.apply(x, w, torch.arange(6), None, None, head)
        (statistics[0].sum() + statistics[1].square().sum()).backward()
        return [x.grad, w.grad]

    both = gradients(hidden=True, weight=True)
    for i, names in enumerate(
        ({"hidden": True, "weight": False}, {"hidden": False, "weight": True})
    ):
        one = gradients(**names)
        assert one[1 - i] is None
        torch.testing.assert_close(one[i], both[i])
