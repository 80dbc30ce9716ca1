"""The forward pass of decoding against transformers and the learner, and its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_helpers import perturb

from embodied_ppo.cluster.weight_sync import weight_tensors
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.policies import lora
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation import decode_model
from embodied_ppo.rollout.generation.engine import Engine
from tests.policies.test_causal_lm import FAMILIES, make
from tests.rollout.generation.test_engine import PROMPTS, RULES, assert_equal

SUPPORTED = [
    (kind, more)
    for kind, more in FAMILIES
    if kind in decode_model.FAMILIES and kind != "smollm3"  # has a layer without rotary embedding
]
SUPPORTED += [("smollm3", {"no_rope_layers": [1, 1, 1]})]
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


@pytest.mark.parametrize("kind", ["smollm3", "granite", "phi3", "qwen3_moe"])
def test_other_layers_are_decoded_without_a_copy(kind: str) -> None:
    """The tokens are still those of the policy's own forward pass."""
    policy = randomise(make(kind, **dict(FAMILIES)[kind]))
    assert not decode_model.is_supported(policy)
    copied = Engine(policy, slots=3, pad_id=0, static=True, copy_weights=True)
    own = Engine(policy, slots=3, pad_id=0, static=False)
    assert_equal(*(e.generate(PROMPTS, RULES[0], seed=5) for e in (copied, own)))


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


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_engines_of_every_family_get_the_learners_weights(
    kind: str, more: dict[str, Any], adapted: bool
) -> None:
    """First all tensors are sent, then those of an update; adapters are merged into the copy."""
    more = {**more, "tie_word_embeddings": not adapted}
    learner, actor, merged = (randomise(make(kind, seed, **more)) for seed in range(3))
    for policy in (learner, actor) if adapted else ():
        policy.requires_grad_(False)
        lora.adapt(policy.decoder.module.layers, rank=2, alpha=4.0)
        for layer in lora.adapted_layers(policy).values():
            lora.cast_parameters(layer, torch.bfloat16)
        policy.compute = merged.compute = torch.bfloat16
    sender, receiver = (Worker(WorkerSpec((), {}), policy=x) for x in (learner, actor))
    options: dict[str, Any] = {"slots": 3, "pad_id": 0, "static": True, "copy_weights": True}
    engine = Engine(actor, **options)
    receiver.on_weights_updated = engine.update_weights
    for version in (0, 1):
        layout = sender.weight_layout(frozen=not version)
        for worker in (sender, receiver):
            worker.prepare_weight_sync(layout, "actor", frozen=not version)
        perturb(learner, 0.1)
        receiver.import_ipc(version, sender.export_ipc())
        responses = engine.generate(PROMPTS, RULES[1], seed=0)
    sent, received = (weight_tensors(x, frozen=True) for x in (learner, actor))
    assert all(torch.equal(x, received[name]) for name, x in sent.items())
    expected = Engine(learner, **options).generate(PROMPTS, RULES[1], seed=0)
    assert torch.equal(responses.token, expected.token)
    assert torch.equal(responses.log_prob, expected.log_prob)
    assert (engine._model is not None) == decode_model.is_supported(learner)
    merged.model.load_state_dict(dict(lora.merged_state(learner.model)))
    if engine._model is not None:
        copied = decode_model.DecodeModel(merged)
        copied.refresh()
        assert all(map(torch.equal, engine._model.tensors(), copied.tensors()))
