"""The decode engine against transformers' generation and the learner's log-probabilities; batching
changes nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation import cuda_graphs
from embodied_ppo.rollout.generation.engine import PREFILL_TOKENS, Engine, Generation, _State
from embodied_ppo.rollout.generation.sampling import Sampling, choose
from embodied_ppo.rollout.generation.vllm import VllmEngine, response_seeds, sampling_arguments
from tests.models.test_causal_lm import FAMILIES, make

PROMPTS = [
    [5, 6, 7],
    [8, 9, 10, 11, 12, 13, 14],
    [15],
    [5, 6, 7],
    [5, 6, 7],
    [20, 21, 22, 23],
    [24, 25],
]


def engine(policy: LanguagePolicy, slots: int = 64, **more: Any) -> Engine:
    return Engine(policy, slots=slots, pad_id=0, **more)


def same(a: Generation, b: Generation) -> bool:
    return (
        torch.equal(a.token, b.token)
        and torch.equal(a.length, b.length)
        and torch.equal(a.stopped, b.stopped)
    )


# ------------------------------------------------------------------------------------------- engine
@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_greedy_tokens_are_transformers(kind: str, more: dict[str, Any]) -> None:
    policy = make(kind, **more)
    found = engine(policy, slots=3).generate(
        PROMPTS, Sampling(12, temperature=0.0, stop_ids=(2, 33)), seed=0
    )
    for i, prompt in enumerate(PROMPTS):
        config = GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=[2, 33], pad_token_id=0
        )
        theirs = policy.model.generate(torch.tensor([prompt]), generation_config=config)
        n = int(found.length[i])
        assert found.token[i, :n].tolist() == theirs[0, len(prompt) :].tolist()
        assert (
            bool(found.stopped[i]) == (int(found.token[i, n - 1]) in (2, 33))
            and not found.token[i, n:].any()
        )


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 64])
def test_the_number_of_slots_changes_nothing(slots: int) -> None:
    policy, sampling = make(), Sampling(20, stop_ids=(2, *range(30, 40)))
    whole = engine(policy).generate(PROMPTS, sampling, seed=5)
    assert len(set(whole.length.tolist())) > 3, "lengths should differ"
    parts = engine(policy, slots).generate(PROMPTS, sampling, seed=5)
    assert same(whole, parts)
    torch.testing.assert_close(whole.log_prob, parts.log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_a_repetition_penalty_knows_its_own_row_only(slots: int) -> None:
    """transformers' rule, prompts included; a slot taken over remembers nothing of the response
    before.
    """
    policy = make()
    found = engine(policy, slots).generate(
        PROMPTS, Sampling(12, temperature=0.0, repetition_penalty=1.7), seed=0
    )
    config = GenerationConfig(
        max_new_tokens=12, do_sample=False, repetition_penalty=1.7, eos_token_id=None
    )
    for i, prompt in enumerate(PROMPTS):
        theirs = policy.model.generate(torch.tensor([prompt]), generation_config=config)
        assert found.token[i].tolist() == theirs[0, len(prompt) :].tolist()


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    policy, sampling = make(), Sampling(10)
    all_of_them = engine(policy).generate(PROMPTS, sampling, seed=5)
    few = engine(policy).generate(
        PROMPTS[4:1:-1], sampling, seed=5, samples=torch.tensor([4, 3, 2])
    )
    assert torch.equal(few.token, all_of_them.token[[4, 3, 2]])
    assert not torch.equal(all_of_them.token[0], all_of_them.token[3]), (
        "equal prompts, other randomness"
    )
    assert not torch.equal(
        engine(policy).generate(PROMPTS, sampling, seed=6).token, all_of_them.token
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_learner_s(temperature: float) -> None:
    """After compaction and refills, too."""
    policy = make()
    policy.temperature = temperature
    sampling = Sampling(15, temperature=temperature, stop_ids=(2, *range(30, 36)))
    found = engine(policy, slots=3).generate(PROMPTS, sampling, seed=1)
    for i, prompt in enumerate(PROMPTS):
        n = int(found.length[i])
        row = torch.tensor([[*prompt, *found.token[i, :n].tolist()]])
        place = torch.arange(len(prompt) - 1, len(prompt) - 1 + n).unsqueeze(0)
        view = policy.view(policy.hidden(row, place), row.gather(1, place + 1))
        torch.testing.assert_close(found.log_prob[i, :n], view.log_prob[0], rtol=0, atol=1e-5)
        assert not found.log_prob[i, n:].any()


def test_finished_rows_are_not_computed() -> None:
    """Tokens that go through the model: prompts, and one for each token but the last of a
    response.
    """
    policy, seen = make(), Counter()
    embed = policy.model.model.embed_tokens
    embed.register_forward_hook(lambda m, args, out: seen.update(tokens=args[0].numel()))
    found = engine(policy).generate(PROMPTS, Sampling(20, stop_ids=(2, *range(30, 40))), seed=5)
    unique = [p for i, p in enumerate(PROMPTS) if i == 0 or p != PROMPTS[i - 1]]
    assert seen["tokens"] == len(unique) * max(map(len, PROMPTS)) + int((found.length - 1).sum())


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (1, [[1], [1], [1], [2], [1], [1]]),
        (14, [[1, 1], [1, 2], [1, 1]]),
        (1024, [[1, 1, 1, 2, 1, 1]]),
    ],
)
def test_prompts_read_in_parts_change_nothing(
    tokens: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``parts``: copies of each prompt in a pass.

    The longest has 7 tokens: 14 are two prompts, 1 is one.
    """
    policy, sampling = make(), Sampling(12, stop_ids=(2, *range(30, 40)))
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 1 << 15)
    whole = engine(policy).generate(PROMPTS, sampling, seed=5)
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", tokens)
    read, found = Engine._prefill_part, []

    def note(self: Engine, cache: Any, rows: slice, prompts: Any, copies: list[int]) -> Tensor:
        found.append(copies)
        return read(self, cache, rows, prompts, copies)

    monkeypatch.setattr(Engine, "_prefill_part", note)
    assert equal(engine(policy).generate(PROMPTS, sampling, seed=5), whole)
    assert found == parts


@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_a_step_of_even_rows_equals_one_of_uneven_rows(kind: str, more: dict[str, Any]) -> None:
    """Prompts of one length alone take the path that writes a column of the cache; with a longer
    one they do not.
    """
    policy, sampling = make(kind, **more), Sampling(12)
    even = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    alone = engine(policy).generate(even, sampling, seed=5)
    among = engine(policy).generate([*even, [20, 21, 22, 23, 24]], sampling, seed=5)
    assert torch.equal(among.token[:3], alone.token)
    torch.testing.assert_close(among.log_prob[:3], alone.log_prob, rtol=0, atol=1e-5)


def test_a_model_s_own_settings_do_not_leak_in() -> None:
    policy, sampling = make(), Sampling(10)
    before = engine(policy).generate(PROMPTS, sampling, seed=5)
    policy.model.generation_config = GenerationConfig(
        temperature=0.1, top_k=1, repetition_penalty=1.5, eos_token_id=7
    )
    assert same(engine(policy).generate(PROMPTS, sampling, seed=5), before)


def test_stop_texts() -> None:
    policy = make()
    decode = lambda ids: "".join(chr(60 + i) for i in ids)
    free = engine(policy).generate(PROMPTS, Sampling(20), seed=5)
    text = decode(free.token[1].tolist())
    stop = text[6:8]
    found = engine(policy, decode=decode).generate(PROMPTS, Sampling(20, stop=(stop,)), seed=5)
    assert (
        bool(found.stopped[1])
        and decode(found.token[1, : int(found.length[1])].tolist()) == text[: text.index(stop) + 2]
    )


def test_a_stop_text_may_need_many_tokens_for_a_character() -> None:
    decode = lambda ids: bytes(ids).decode(errors="replace")
    stop = "\N{OCTAGONAL SIGN}" * 4  # 16 tokens
    told = list(f"ab{stop}".encode())
    state = _State(1, 1, Sampling(30, stop=(stop,)), 0, torch.zeros(1, 30), 256, None)
    state.token[0, : len(told)] = torch.tensor(told)
    assert state._ends_with_stop(0, len(told), decode) and not state._ends_with_stop(
        0, len(told) - 1, decode
    )


def test_new_weights_are_used_at_once() -> None:
    policy, sampling = make(), Sampling(10, temperature=0.0)
    e = engine(policy)
    before = e.generate(PROMPTS, sampling, seed=0)
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    e.update_weights(1)
    assert e.version == 1 and not torch.equal(
        e.generate(PROMPTS, sampling, seed=0).token, before.token
    )
    e.sleep()
    e.wake()
    assert e.generate(PROMPTS, sampling, seed=0).token.shape == (7, 10)


# ------------------------------------------------------------------------------------- fixed shapes
RULES = [
    Sampling(20, stop_ids=(2, *range(30, 40))),
    Sampling(20, temperature=0.0, stop_ids=tuple(range(20, 40))),
    Sampling(
        13, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.5, stop_ids=(2,)
    ),
    Sampling(1),
]
CODE = lambda ids: "".join(chr(60 + i) for i in ids)


def equal(a: Generation, b: Generation) -> bool:
    torch.testing.assert_close(a.log_prob, b.log_prob, rtol=0, atol=1e-5)
    return same(a, b)


@pytest.fixture(params=[(8, 128, 8), (3, 8, 2), (1, 4, 1)], ids=str)
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """(steps of a round, keys, least slots)."""
    for name, value in zip(("ROUND", "WIDTH", "SLOTS"), request.param, strict=True):
        monkeypatch.setattr(cuda_graphs, name, value)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_fixed_shapes_change_nothing(slots: int) -> None:
    """Ragged prompts, groups, refills, compaction, ends within a round; one engine for all rules,
    memory used again.
    """
    policy = make()
    static = engine(policy, slots, static=True)
    for sampling in RULES:
        free = engine(policy, slots).generate(PROMPTS, sampling, seed=5)
        assert equal(static.generate(PROMPTS, sampling, seed=5), free)
    text = CODE(engine(policy).generate(PROMPTS, Sampling(20), seed=5).token[1].tolist())
    stops = Sampling(20, stop=(text[5:7], text[0]), stop_ids=(2,))
    both = [
        engine(policy, slots, decode=CODE, static=x).generate(PROMPTS, stops, seed=5)
        for x in (False, True)
    ]
    assert equal(*both) and both[0].stopped.any()


@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_fixed_shapes_of_every_family(kind: str, more: dict[str, Any]) -> None:
    policy = make(kind, **more)
    both = [engine(policy, 3, static=x).generate(PROMPTS, RULES[0], seed=5) for x in (False, True)]
    assert equal(*both)


def test_buckets() -> None:
    e = engine(make(), 20, static=True)
    e.generate([PROMPTS[0]] * 30, Sampling(200), seed=0)  # 203 tokens and a round: two times 128
    assert e._rounds is not None
    found = [
        e._rounds.bucket(active, widest)
        for active, widest in ((1, 1), (8, 128), (9, 129), (17, 300))
    ]
    assert found == [(8, 128), (8, 128), (16, 256), (20, 256)]


def test_new_weights_elsewhere_and_sleep_forget_graphs() -> None:
    policy = make()
    e = engine(policy, static=True)
    e.generate(PROMPTS, RULES[0], seed=0)
    kept = e._rounds
    assert kept is not None
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()  # in place
    assert equal(
        e.generate(PROMPTS, RULES[0], seed=0), engine(policy).generate(PROMPTS, RULES[0], seed=0)
    )
    assert e._rounds is kept
    policy.model.lm_head.weight.data = policy.model.lm_head.weight.data.clone()
    e.generate(PROMPTS, RULES[0], seed=0)
    assert e._rounds is not kept
    e.sleep()
    assert e._rounds is None and e._cache is None


class Recordable(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: looking at values, and tensors that the host makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "lift_fresh",
            "lift_fresh_copy",
        ), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", RULES[:3], ids=["sample", "greedy", "filtered"])
@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_a_step_looks_at_nothing(kind: str, more: dict[str, Any], sampling: Sampling) -> None:
    """What graphs record, on a CPU; and all that it leaves lies where it lay before."""
    e = engine(make(kind, **more), static=True)
    e.generate(PROMPTS, sampling, seed=0)
    r = e._rounds
    assert r is not None
    places = {name: x.data_ptr() for name, x in vars(r).items() if isinstance(x, Tensor)}
    with torch.inference_mode():
        r.held.fill_(3)
        r._at.zero_()
        with Recordable():
            r.step(4, 16, sampling)
    assert places == {name: x.data_ptr() for name, x in vars(r).items() if isinstance(x, Tensor)}
    assert r.held.tolist() == [4, 4, 4, 4, 3, 3, 3] and r._at.tolist() == [1]


@pytest.mark.parametrize("static", [False, True])
def test_products_in_bfloat16(static: bool) -> None:
    """Weights stay float32; a rounded cache; near float32's log-probabilities."""
    policy = make()
    whole = engine(policy, static=static).generate(PROMPTS, Sampling(1), seed=5)
    policy.compute = torch.bfloat16
    e = engine(policy, static=static)
    found = e.generate(PROMPTS, Sampling(1), seed=5)
    assert e._cache is not None and e._cache.keys[0].dtype == torch.bfloat16
    same_token = found.token == whole.token
    assert same_token.float().mean() > 0.5 and found.log_prob.dtype == torch.float32
    torch.testing.assert_close(
        found.log_prob[same_token], whole.log_prob[same_token], rtol=0, atol=0.1
    )
    assert not torch.equal(found.log_prob, whole.log_prob)
    e.generate(PROMPTS, Sampling(12), seed=5)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [3, 64])
def test_graphs_change_nothing(slots: int) -> None:
    policy = make().cuda()
    e = engine(policy, slots)
    for sampling in RULES:
        free = engine(policy, slots, static=False).generate(PROMPTS, sampling, seed=5)
        found = e.generate(PROMPTS, sampling, seed=5)
        assert same(found, free)
        torch.testing.assert_close(found.log_prob, free.log_prob, rtol=0, atol=1e-4)
    assert e._rounds is not None and e._rounds.graphs
    with torch.no_grad():
        policy.model.lm_head.weight.neg_()
    e.update_weights(1)
    free = engine(policy, slots, static=False).generate(PROMPTS, RULES[0], seed=5)
    assert same(e.generate(PROMPTS, RULES[0], seed=5), free)


# --------------------------------------------------------------------------------------------- vLLM
def test_what_vllm_is_told() -> None:
    known = sampling_arguments(
        Sampling(7, temperature=0.5, top_k=0, top_p=0.9, stop_ids=(2, 3), stop=("x",)), 11
    )
    assert (
        known["top_k"] == -1
        and known["top_p"] == 0.9
        and known["temperature"] == 0.5
        and known["max_tokens"] == 7
    )
    assert (
        known["stop_token_ids"] == [2, 3]
        and known["stop"] == ["x"]
        and known["detokenize"]
        and known["seed"] == 11
    )
    assert known["ignore_eos"] and known["logprobs"] == 0 and known["repetition_penalty"] == 1.0
    plain = sampling_arguments(Sampling(7, top_k=4), 0)
    assert plain["top_k"] == 4 and not plain["detokenize"] and plain["stop"] == []


def test_seeds_of_responses() -> None:
    all_of_them = response_seeds(3, torch.arange(100))
    assert len(set(all_of_them)) == 100 and all(0 <= x < 2**53 for x in all_of_them)
    assert response_seeds(3, torch.tensor([7, 2])) == [all_of_them[7], all_of_them[2]]
    assert not set(response_seeds(4, torch.arange(100))) & set(all_of_them)


def test_without_vllm_there_is_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ConfigError,
        match=r"rollout.engine=vllm needs vLLM .*pip install vllm .*rollout.engine=builtin",
    ):
        VllmEngine(make(), "/nowhere", pad_id=0)


# ----------------------------------------------------------------------------------------- sampling
LOGITS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log()


def frequencies(sampling: Sampling, occurred: Tensor | None = None) -> list[float]:
    """Of 1000 evenly spaced numbers."""
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    seen = None if occurred is None else occurred.expand(1000, -1)
    token, _ = choose(LOGITS.expand(1000, -1), sampling, u, seen)
    return [round(float((token == i).double().mean()), 3) for i in range(5)]


def test_what_each_rule_does() -> None:
    """By hand from p = (.1, .4, .05, .3, .15)."""
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
    assert frequencies(Sampling(1, min_p=0.3)) == pytest.approx(
        [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], abs=1e-3
    )
    # token 1 occurred: its logit log .4 < 0 doubles, p = .16; Σ = .76
    second = torch.tensor([[False, True, False, False, False]])
    expected = [0.1 / 0.76, 0.16 / 0.76, 0.05 / 0.76, 0.3 / 0.76, 0.15 / 0.76]
    assert frequencies(Sampling(1, repetition_penalty=2.0), second) == pytest.approx(
        expected, abs=1e-3
    )


def test_the_log_probability_is_that_before_filters() -> None:
    u = torch.tensor([0.5], dtype=torch.float64)
    token, log_prob = choose(LOGITS, Sampling(1, top_k=1), u)
    assert token.tolist() == [1] and float(log_prob.exp()) == pytest.approx(0.4)
    _, log_prob = choose(LOGITS, Sampling(1, temperature=0.5), u)
    assert float(log_prob.exp()) == pytest.approx(0.16 / 0.285)


def test_the_ends_of_the_unit_interval_are_possible_tokens() -> None:
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3)):
        token, _ = choose(logits, Sampling(1), torch.tensor([u], dtype=torch.float64))
        assert int(token) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_k", -1),
        ("top_p", 0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("stop", ("",)),
    ],
)
def test_senseless_rules_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{field} = .*must be"):
        Sampling(4, **{field: value})
