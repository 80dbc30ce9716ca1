"""The forward pass of decoding against transformers and the learner, and its kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

from embodied_ppo.models import fusion
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation import cuda_graphs, decode_model
from embodied_ppo.rollout.generation.decode_model import DecodeModel
from embodied_ppo.rollout.generation.engine import Engine, _Cache
from embodied_ppo.rollout.generation.sampling import Sampling
from tests.kernel_counter import KernelCounter
from tests.models.test_causal_lm import FAMILIES, make
from tests.rollout.generation.test_engine import PROMPTS, RULES, assert_equal

SUPPORTED = [(kind, more) for kind, more in FAMILIES if kind in decode_model.FAMILIES]
SUPPORTED += [("qwen2", {"num_key_value_heads": 4}), ("qwen2", {"num_key_value_heads": 1})]
each_family = pytest.mark.parametrize(
    ("kind", "more"), SUPPORTED, ids=[f"{k}-{i}" for i, (k, _) in enumerate(SUPPORTED)]
)


def randomise(policy: LanguagePolicy) -> LanguagePolicy:
    """Return the policy with random norms and biases, which are 1 and 0 in new models."""
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return policy


@each_family
def test_logits_equal_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    """Prefill of a prompt and four decode steps, float32."""
    policy = randomise(make(kind, **more))
    ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy.model(input_ids=ids, use_cache=False).logits
    engine = Engine(policy, slots=3, pad_id=0, static=True, copy_weights=True)
    with torch.inference_mode():
        cache = engine._allocate(3, 16)
        rounds, rows = engine._rounds, slice(0, 3)
        assert rounds is not None and rounds.model is not None
        logits = engine._prefill_part(cache, rows, ids[:, :5].tolist(), [1, 1, 1])
        torch.testing.assert_close(logits, expected[:, 4], rtol=1e-5, atol=1e-5)
        for t in range(5, 9):
            rounds.last[:] = ids[:, t]
            rounds.cached[:] = t
            logits = rounds._logits(3, 16)
            torch.testing.assert_close(logits, expected[:, t], rtol=1e-5, atol=1e-5)


@each_family
def test_tokens_equal_those_of_the_policys_own_forward_pass(
    kind: str, more: dict[str, Any]
) -> None:
    """Covers ragged prompts, equal prompts, refills, compaction and every sampling rule."""
    policy = randomise(make(kind, **more))
    engines = [
        Engine(policy, slots=3, pad_id=0, static=x, copy_weights=x or None) for x in (True, False)
    ]
    for sampling in RULES:
        assert_equal(*(e.generate(PROMPTS, sampling, seed=5) for e in engines))


def test_new_weights_are_copied_to_the_same_memory() -> None:
    policy = make()
    engine = Engine(policy, slots=3, pad_id=0, static=True, copy_weights=True)
    before = engine.generate(PROMPTS, RULES[1], seed=0)
    rounds, model = engine._rounds, engine._model
    assert model is not None
    addresses = [x.data_ptr() for x in model.tensors()]
    with torch.no_grad():
        for p in policy.parameters():
            p.neg_()
    after = engine.generate(PROMPTS, RULES[1], seed=0)
    assert engine._rounds is rounds and addresses == [x.data_ptr() for x in model.tensors()]
    assert_equal(after, Engine(policy, slots=3, pad_id=0).generate(PROMPTS, RULES[1], seed=0))
    assert not torch.equal(after.token, before.token)
    engine.sleep()
    assert engine._model is None


@pytest.mark.parametrize(
    ("kind", "compute", "copied"),
    [("qwen2", torch.bfloat16, True), ("qwen2", None, False), ("gemma2", torch.bfloat16, False)],
)
def test_weights_are_copied_where_products_convert_them(
    kind: str, compute: torch.dtype | None, copied: bool
) -> None:
    """Only with fixed shapes, and for families whose forward pass is implemented."""
    policy = make(kind)
    policy.compute = compute or policy.compute
    assert (decode_model.copy_bytes(policy) > 0) == copied
    assert not decode_model.is_supported(copy.deepcopy(policy).bfloat16()), "no float32 weights"
    for static in (True, False):
        engine = Engine(policy, slots=3, pad_id=0, static=static)
        engine.generate(PROMPTS, Sampling(2), seed=0)
        assert (engine._model is not None) == (copied and static)
    if copied:
        model = DecodeModel(policy)
        assert all(x.dtype == torch.bfloat16 for x in model.tensors())
        assert decode_model.copy_bytes(policy) == sum(x.nbytes for x in model.tensors())


def log_probs(policy: LanguagePolicy, ids: Tensor) -> Tensor:
    """Return the learner's log-probabilities of the tokens after the first, [B, L-1]."""
    place = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    with torch.no_grad():
        return policy.view(policy.hidden(ids, place), ids[:, 1:]).log_prob


def test_bfloat16_is_nearer_to_the_learner_than_a_bfloat16_model() -> None:
    """Log-probabilities of decoding and of the learner, both with products in bfloat16.

    A model of bfloat16 weights also rounds the residual stream.
    """
    policy = randomise(make(num_hidden_layers=12, hidden_size=64, intermediate_size=128))
    with torch.no_grad():
        for p in policy.parameters():
            if p.ndim > 1:
                p.div_(p.std() * p.shape[1] ** 0.5)
    policy.compute = torch.bfloat16
    engine = Engine(policy, slots=64, pad_id=0, static=True)
    result = engine.generate([[3, 4, 5]] * 64, Sampling(12), seed=0)
    assert engine._model is not None
    ids = torch.cat((torch.tensor([[3, 4, 5]] * 64), result.token), dim=1)
    learner = log_probs(policy, ids)[:, 2:]
    rounded = log_probs(copy.deepcopy(policy).bfloat16(), ids)[:, 2:]
    copied, rounded_model = (
        (x - learner).square().mean().sqrt() for x in (result.log_prob, rounded)
    )
    assert 0 < copied < 0.8 * rounded_model, (copied, rounded_model)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_fused_functions_give_the_tokens_of_eager_code(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile traces the functions, but generates no code. The vocabulary has blocks."""
    policy = randomise(make(kind, vocab_size=1280))
    options: dict[str, Any] = {"slots": 3, "pad_id": 0, "static": True, "copy_weights": True}
    expected = Engine(policy, **options).generate(PROMPTS, Sampling(6), seed=0)
    run_helpers.trace_only(monkeypatch)
    monkeypatch.setattr(fusion, "DEVICES", ("cpu",))
    monkeypatch.setattr(fusion, "_compiled", {})
    actual = Engine(policy, **options).generate(PROMPTS, Sampling(6), seed=0)
    assert_equal(actual, expected)
    names = {function.__name__ for function in fusion._compiled}
    assert names >= {"_normalise", "_add_and_normalise", "_rotate", "_gate", "_block_sums"}


# ------------------------------------------------------------------------------------------ kernels
def kernels(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, copied: bool) -> int:
    """Return the kernels of a decode step of 24 layers; sizes other than the depth do not matter.

    Fused functions count as one kernel each. The vocabulary of Qwen 2.5, 151,936 tokens, is a
    multiple of 128, too.
    """
    policy = make(kind, num_hidden_layers=24, vocab_size=1280, tie_word_embeddings=True)
    policy.compute = torch.bfloat16
    policy.to(dtype)
    with torch.no_grad():  # inference mode would hide parts of operations
        model = DecodeModel(policy) if copied else None
        if model is not None:
            model.refresh()
        rounds = cuda_graphs.StaticDecode(policy, _Cache(policy, 8, 128).both, model)
        with KernelCounter() as counter:
            monkeypatch.setattr(fusion, "DEVICES", ("cpu",))
            monkeypatch.setattr(fusion, "_compiled", {})
            monkeypatch.setattr(fusion, "compile_function", counter.as_one_kernel)
            rounds.step(8, 128, Sampling(1))
    return counter.total


@pytest.mark.parametrize(
    ("kind", "dtype", "copied", "limit"),
    [
        ("qwen2", torch.float32, True, 285),
        ("qwen3", torch.float32, True, 285),
        ("qwen2", torch.float32, False, 820),
        ("qwen2", torch.bfloat16, False, 465),
    ],
)
def test_kernels_of_a_decode_step(
    kind: str, dtype: torch.dtype, copied: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit - 10 <= kernels(kind, dtype, monkeypatch, copied=copied) <= limit
