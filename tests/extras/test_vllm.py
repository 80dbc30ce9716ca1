"""vLLM compared with the policy whose weights it uses.

Needs a separate environment: make test-vllm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, without a GPU
sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.generation.vllm import VllmEngine
from tests.policies.test_causal_lm import make

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [5, 6, 7], [20, 21, 22, 23]]
SAMPLING = Sampling(12, temperature=0.8, stop_ids=(2, *range(30, 34)))


@pytest.fixture(scope="module")
def policy_and_engine(tmp_path_factory) -> Iterator[tuple[LanguagePolicy, VllmEngine]]:
    # Sizes that vLLM's CPU kernels support.
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    policy = make(tie_word_embeddings=True, **sizes)
    policy.temperature = SAMPLING.temperature
    path = tmp_path_factory.mktemp("model")
    policy.model.save_pretrained(path)
    words = {f"w{i}": i for i in range(50)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), eos_token="w2"
    ).save_pretrained(path)
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    engine = VllmEngine(
        policy,
        str(path),
        pad_id=0,
        slots=8,
        width=32,
        texts=True,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
    )
    assert torch.equal(torch.get_rng_state(), expected)
    yield policy, engine


def matches_policy(policy: LanguagePolicy, responses: Any) -> bool:
    """Return whether log-probabilities equal the policy's."""
    for i, prompt in enumerate(PROMPTS):
        n = int(responses.length[i])
        row = torch.tensor([[*prompt, *responses.token[i, :n].tolist()]])
        position = torch.arange(len(prompt) - 1, len(prompt) - 1 + n).unsqueeze(0)
        view = policy.view(policy.hidden(row, position), row.gather(1, position + 1))
        if float((view.log_prob[0].detach() - responses.log_prob[i, :n]).abs().max()) > 1e-3:
            return False
    return True


def test_responses_match_the_policy(policy_and_engine: tuple[LanguagePolicy, VllmEngine]) -> None:
    policy, engine = policy_and_engine
    responses = engine.generate(PROMPTS, SAMPLING, seed=3)
    assert matches_policy(policy, responses) and len(set(responses.length.tolist())) > 1, (
        "lengths should differ"
    )
    for i, n in enumerate(responses.length.tolist()):
        assert bool(responses.stopped[i]) == (int(responses.token[i, n - 1]) in SAMPLING.stop_ids)
        assert not responses.token[i, n:].any() and not responses.log_prob[i, n:].any()
        assert not set(responses.token[i, : n - 1].tolist()) & set(SAMPLING.stop_ids)


def test_new_weights_are_used_at_once(policy_and_engine: tuple[LanguagePolicy, VllmEngine]) -> None:
    """The prefix cache, which holds prompts of 16 or more tokens, is invalidated, too."""
    policy, engine = policy_and_engine
    greedy, prompts = Sampling(8, temperature=0.0), [list(range(5, 23)), *PROMPTS]
    before, repeated = (engine.generate(prompts, greedy, seed=0) for _ in range(2))
    assert torch.equal(before.token, repeated.token)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    assert torch.equal(engine.generate(prompts, greedy, seed=0).token, before.token), (
        "the engine has its own copy"
    )
    engine.update_weights(1)
    after = engine.generate(prompts, greedy, seed=0)
    assert engine.version == 1 and not torch.equal(after.token, before.token)
    assert matches_policy(policy, engine.generate(PROMPTS, SAMPLING, seed=3))
    engine.sleep()
    assert torch.equal(engine.generate(prompts, greedy, seed=0).token, after.token)
