"""The decode engine against transformers' generation and the learner's log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation import cuda_graphs
from embodied_ppo.rollout.generation.engine import Engine, Generation
from embodied_ppo.rollout.generation.sampling import Sampling, choose
from tests.policies.test_causal_lm import FAMILIES, make

PROMPTS = [[5, 6, 7], [*range(8, 15)], [15], [5, 6, 7], [5, 6, 7], [20, 21, 22, 23], [24, 25]]
each_family = pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)


CODE = lambda ids: "".join(chr(60 + i) for i in ids)


def engine(policy: LanguagePolicy, slots: int = 64, **more: Any) -> Engine:
    return Engine(policy, slots=slots, pad_id=0, **more)


def assert_equal(a: Generation, b: Generation, *, atol: float = 1e-5) -> None:
    """Check for equal tokens and nearly equal log-probabilities."""
    assert all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("token", "length", "stopped"))
    torch.testing.assert_close(a.log_prob, b.log_prob, rtol=0, atol=atol)


# ------------------------------------------------------------------------------------------- engine
def transformers_tokens(policy: LanguagePolicy, prompt: list[int], **options: Any) -> list[int]:
    """Return the response of transformers' greedy generation, at most 12 tokens."""
    config = GenerationConfig(max_new_tokens=12, do_sample=False, **options)
    output = policy.model.generate(torch.tensor([prompt]), generation_config=config)
    return output[0, len(prompt) :].tolist()


@each_family
def test_greedy_tokens_equal_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    policy, sampling = make(kind, **more), Sampling(12, temperature=0.0, stop_ids=(2, 33))
    result = engine(policy, slots=3).generate(PROMPTS, sampling, seed=0)
    for i, prompt in enumerate(PROMPTS):
        n = int(result.length[i])
        expected = transformers_tokens(policy, prompt, eos_token_id=[2, 33], pad_token_id=0)
        assert result.token[i, :n].tolist() == expected
        assert bool(result.stopped[i]) == (expected[-1] in (2, 33))
        assert not result.token[i, n:].any()


def test_a_response_depends_on_seed_and_sample_number() -> None:
    policy, sampling = make(), Sampling(10)
    token = engine(policy).generate(PROMPTS, sampling, seed=5).token
    samples = torch.tensor([4, 3, 2])
    subset = engine(policy).generate(PROMPTS[4:1:-1], sampling, seed=5, samples=samples)
    assert torch.equal(subset.token, token[[4, 3, 2]])
    assert not torch.equal(token[0], token[3]), "equal prompts, other random numbers"
    assert not torch.equal(engine(policy).generate(PROMPTS, sampling, seed=6).token, token)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_equal_the_learners(temperature: float) -> None:
    """Also after compaction and refills."""
    policy = make()
    policy.temperature = temperature
    sampling = Sampling(15, temperature=temperature, stop_ids=(2, *range(30, 36)))
    result = engine(policy, slots=3).generate(PROMPTS, sampling, seed=1)
    for i, prompt in enumerate(PROMPTS):
        n = int(result.length[i])
        row = torch.tensor([[*prompt, *result.token[i, :n].tolist()]])
        place = torch.arange(len(prompt) - 1, len(prompt) - 1 + n).unsqueeze(0)
        view = policy.view(policy.hidden(row, place), row.gather(1, place + 1))
        torch.testing.assert_close(result.log_prob[i, :n], view.log_prob[0], rtol=0, atol=1e-5)
        assert not result.log_prob[i, n:].any()


def test_a_stop_text_ends_a_response() -> None:
    policy = make()
    full_text = CODE(engine(policy).generate(PROMPTS, Sampling(20), seed=5).token[1].tolist())
    stop = full_text[6:8]
    result = engine(policy, decode=CODE).generate(PROMPTS, Sampling(20, stop=(stop,)), seed=5)
    text = CODE(result.token[1, : int(result.length[1])].tolist())
    assert bool(result.stopped[1]) and text == full_text[: full_text.index(stop) + 2]


def test_new_weights_are_used_immediately() -> None:
    policy, sampling = make(), Sampling(10, temperature=0.0)
    e = engine(policy)
    before = e.generate(PROMPTS, sampling, seed=0)
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    e.update_weights(1)
    assert e.version == 1
    assert not torch.equal(e.generate(PROMPTS, sampling, seed=0).token, before.token)
    e.sleep()
    assert e.generate(PROMPTS, sampling, seed=0).token.shape == (7, 10)


# ------------------------------------------------------------------------------------- fixed shapes
RULES = [
    Sampling(20, stop_ids=(2, *range(30, 40))),
    Sampling(20, temperature=0.0, stop_ids=tuple(range(20, 40))),
    Sampling(13, temperature=0.7, top_k=9, top_p=0.9, stop_ids=(2,)),
    Sampling(1),
]


@pytest.fixture(params=[(8, 128, 8), (3, 8, 2)], ids=str)
def buckets(request, monkeypatch) -> None:
    """Set (steps of a round, multiple of keys, slots of the smallest bucket)."""
    names = ("ROUND_STEPS", "KEY_MULTIPLE", "MIN_SLOTS")
    for name, value in zip(names, request.param, strict=True):
        monkeypatch.setattr(cuda_graphs, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("slots", [3, 64])
def test_fixed_shapes_give_the_same_tokens(slots: int) -> None:
    """Covers ragged prompts, groups, refills, compaction, ends within a round, reused memory."""
    policy = make()
    static = engine(policy, slots, static=True)
    for sampling in RULES:
        dynamic = engine(policy, slots).generate(PROMPTS, sampling, seed=5)
        assert_equal(static.generate(PROMPTS, sampling, seed=5), dynamic)
    text = CODE(engine(policy).generate(PROMPTS, Sampling(20), seed=5).token[1].tolist())
    stops = Sampling(20, stop=(text[5:7], text[0]), stop_ids=(2,))
    both = [
        engine(policy, slots, decode=CODE, static=x).generate(PROMPTS, stops, seed=5)
        for x in (False, True)
    ]
    assert_equal(*both)
    assert both[0].stopped.any()


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_responses_go_on_where_they_ended(slots: int, static: bool) -> None:
    """Parts of a generation give the tokens of a whole one, whatever the number of slots."""
    policy, sampling = make(), Sampling(20, stop_ids=(2, *range(30, 40)))
    e, whole = engine(policy, slots, static=static), None
    expected = engine(policy).generate(PROMPTS, sampling, seed=5)
    assert len(set(expected.length.tolist())) > 3, "lengths should differ"
    for prompts, most in ((PROMPTS[:5], 2), (PROMPTS, 3), (PROMPTS, 3), (PROMPTS, 0)):
        enough = lambda incomplete, most=most: len(incomplete) <= most
        whole = e.generate(prompts, sampling, seed=5, begun=whole, enough=enough)
        complete = whole.stopped | (whole.length == 20)
        assert 0 <= int((~complete).sum()) <= most
    assert whole is not None
    assert_equal(whole, expected)


@each_family
def test_fixed_shapes_of_every_family(kind: str, more: dict[str, Any]) -> None:
    policy = make(kind, **more)
    both = [engine(policy, 3, static=x).generate(PROMPTS, RULES[0], seed=5) for x in (False, True)]
    assert_equal(*both)


def test_moved_weights_and_sleep_discard_graphs() -> None:
    policy = make()
    e = engine(policy, static=True)
    e.generate(PROMPTS, RULES[0], seed=0)
    rounds = e._rounds
    assert rounds is not None
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()  # in place
    expected = engine(policy).generate(PROMPTS, RULES[0], seed=0)
    assert_equal(e.generate(PROMPTS, RULES[0], seed=0), expected)
    assert e._rounds is rounds
    policy.model.lm_head.weight.data = policy.model.lm_head.weight.data.clone()
    e.generate(PROMPTS, RULES[0], seed=0)
    assert e._rounds is not rounds
    e.sleep()
    assert e._rounds is None and e._cache is None


SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select"}
SYNCHRONISING |= {"lift_fresh", "lift_fresh_copy"}


class RefuseSynchronisation(TorchDispatchMode):
    """Refuse operations that a CUDA graph cannot hold: reads of values and tensors of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in SYNCHRONISING, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", RULES[2:3], ids=["filtered"])
@each_family
def test_a_step_can_be_recorded(kind: str, more: dict[str, Any], sampling: Sampling) -> None:
    """On a CPU: a step does not synchronise, and its results stay at the same addresses."""
    e = engine(make(kind, **more), static=True)
    e.generate(PROMPTS, sampling, seed=0)
    r = e._rounds
    assert r is not None
    addresses = {name: x.data_ptr() for name, x in vars(r).items() if isinstance(x, Tensor)}
    with torch.inference_mode():
        r.cached.fill_(3)
        r._step_index.zero_()
        with RefuseSynchronisation():
            r.step(4, 16, sampling)
    assert addresses == {name: x.data_ptr() for name, x in vars(r).items() if isinstance(x, Tensor)}
    assert r.cached.tolist() == [4, 4, 4, 4, 3, 3, 3] and r._step_index.tolist() == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [3, 64])
def test_graphs_give_the_same_tokens(slots: int) -> None:
    policy = make().cuda()
    e = engine(policy, slots)

    def check(sampling: Sampling) -> None:
        eager = engine(policy, slots, static=False).generate(PROMPTS, sampling, seed=5)
        assert_equal(e.generate(PROMPTS, sampling, seed=5), eager, atol=1e-4)

    for sampling in RULES:
        check(sampling)
    assert e._rounds is not None and e._rounds.graphs
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    e.update_weights(1)
    check(RULES[0])


@pytest.mark.gpu
def test_fused_decoding_gives_the_same_tokens() -> None:
    """A copy of the weights, and a vocabulary of several blocks."""
    policy = make(vocab_size=1280).cuda()
    options: dict[str, Any] = {"slots": 3, "pad_id": 0}
    fused = Engine(policy, **options, static=True, copy_weights=True)
    for sampling in RULES:
        eager = engine(policy, 3, static=False).generate(PROMPTS, sampling, seed=5)
        assert_equal(fused.generate(PROMPTS, sampling, seed=5), eager, atol=1e-4)


# ----------------------------------------------------------------------------------------- sampling
LOGITS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log()


def frequencies(sampling: Sampling) -> list[float]:
    """Return the share of each token for 1000 evenly spaced numbers."""
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    token, _ = choose(LOGITS.expand(1000, -1), sampling, u)
    return [round(float((token == i).double().mean()), 3) for i in range(5)]


def test_sampling_parameters() -> None:
    """Expected values by hand from p = (.1, .4, .05, .3, .15)."""
    assert frequencies(Sampling(1)) == [0.1, 0.4, 0.05, 0.3, 0.15]
    assert frequencies(Sampling(1, temperature=0.0)) == [0, 1, 0, 0, 0]
    # p² / Σ p² = (.01, .16, .0025, .09, .0225) / .285
    assert frequencies(Sampling(1, temperature=0.5)) == pytest.approx(
        [0.035, 0.561, 0.009, 0.316, 0.079], abs=1e-3
    )
    assert frequencies(Sampling(1, top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert frequencies(Sampling(1, top_k=9)) == [0.1, 0.4, 0.05, 0.3, 0.15]
    assert frequencies(Sampling(1, top_p=0.5)) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-3)
    assert frequencies(Sampling(1, top_p=0.01)) == [0, 1, 0, 0, 0]
    logits = torch.arange(320.0).view(64, 5).sin()  # top_p is below the rounding error
    token, _ = choose(logits, Sampling(1, top_p=1e-12), torch.rand(64).double())
    assert torch.equal(token, logits.argmax(-1))


def test_log_probabilities_ignore_filters() -> None:
    token, log_prob = choose(LOGITS, Sampling(1, top_k=1), torch.tensor([0.5]).double())
    assert token.tolist() == [1] and float(log_prob.exp()) == pytest.approx(0.4)


@pytest.mark.parametrize("vocabulary", [5, 257, 4096])
def test_two_levels_draw_the_tokens_of_one_cumulative_sum(vocabulary: int) -> None:
    """The vocabularies are one block, blocks that divide it, and blocks that need padding."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 30.0):
        logits = scale * torch.randn(500, vocabulary, generator=generator)
        p, u = logits.softmax(-1), torch.rand(500, dtype=torch.float64, generator=generator)
        total = p.double().cumsum(-1)
        token, log_prob = choose(logits, Sampling(1), u)
        assert torch.equal(token, (total <= (u * total[:, -1]).unsqueeze(-1)).sum(-1))
        torch.testing.assert_close(log_prob, p.gather(1, token.unsqueeze(1)).squeeze(1).log())
        ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        for end in ends:
            token, _ = choose(logits, Sampling(1), end.expand(500))
            assert (p.gather(1, token.unsqueeze(1)) > 0).all()
    token, _ = choose(torch.full((1, vocabulary), float("nan")), Sampling(1), ends[:1])
    assert 0 <= int(token) < vocabulary
