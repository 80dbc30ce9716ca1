"""The decode engine against transformers' generation and the learner's log-probabilities."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.modes.reasoning.components import Inputs, make_engine
from embodied_ppo.rollout.generation import cuda_graphs
from embodied_ppo.rollout.generation.engine import PREFILL_TOKENS, Engine, Generation, _State
from embodied_ppo.rollout.generation.sampling import Sampling, choose
from embodied_ppo.rollout.generation.vllm import VllmEngine, response_seeds, sampling_arguments
from tests.models.test_causal_lm import FAMILIES, make
from tests.recording_cuda import RecordingCuda

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


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 64])
def test_tokens_do_not_depend_on_the_number_of_slots(slots: int) -> None:
    policy, sampling = make(), Sampling(20, stop_ids=(2, *range(30, 40)))
    expected = engine(policy).generate(PROMPTS, sampling, seed=5)
    assert len(set(expected.length.tolist())) > 3, "lengths should differ"
    assert_equal(engine(policy, slots).generate(PROMPTS, sampling, seed=5), expected)


@pytest.mark.parametrize("slots", [1, 2, 64])
def test_the_repetition_penalty_applies_to_tokens_of_the_same_row(slots: int) -> None:
    """As in transformers, prompts count. The tokens of a slot's previous response do not."""
    policy, sampling = make(), Sampling(12, temperature=0.0, repetition_penalty=1.7)
    result = engine(policy, slots).generate(PROMPTS, sampling, seed=0)
    for i, prompt in enumerate(PROMPTS):
        expected = transformers_tokens(policy, prompt, repetition_penalty=1.7, eos_token_id=None)
        assert result.token[i].tolist() == expected


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


def test_finished_rows_are_not_computed() -> None:
    """The model processes distinct prefixes of prompts, and responses except the last tokens."""
    policy, counts = make(), Counter()
    embed = policy.model.model.embed_tokens
    embed.register_forward_hook(lambda m, args, out: counts.update(tokens=args[0].numel()))
    sampling = Sampling(20, stop_ids=(2, *range(30, 40)))
    length = engine(policy).generate(PROMPTS, sampling, seed=5).length
    prefixes = {tuple(p[: i + 1]) for p in PROMPTS for i in range(len(p))}
    assert counts["tokens"] == len(prefixes) + int((length - 1).sum())


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (1, [[1], [1], [1], [2], [1], [1]]),
        (14, [[1, 1], [1, 2], [1, 1]]),
        (1024, [[1, 1, 1, 2, 1, 1]]),
    ],
)
def test_tokens_do_not_depend_on_the_size_of_prefill_passes(
    tokens: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``parts``: copies of each prompt in a pass.

    The longest prompt has 7 tokens, so 14 tokens are two prompts and 1 token is one.
    """
    policy, sampling = make(), Sampling(12, stop_ids=(2, *range(30, 40)))
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 1 << 15)
    expected = engine(policy).generate(PROMPTS, sampling, seed=5)
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", tokens)
    prefill_part, passes = Engine._prefill_part, []

    def record(self: Engine, cache: Any, rows: slice, prompts: Any, copies: list[int]) -> Tensor:
        passes.append(copies)
        return prefill_part(self, cache, rows, prompts, copies)

    monkeypatch.setattr(Engine, "_prefill_part", record)
    assert_equal(engine(policy).generate(PROMPTS, sampling, seed=5), expected)
    assert passes == parts


@each_family
def test_a_step_of_even_rows_equals_one_of_uneven_rows(kind: str, more: dict[str, Any]) -> None:
    """Prompts of equal lengths take the path that writes a column of the cache."""
    policy, sampling = make(kind, **more), Sampling(12)
    even = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    separate = engine(policy).generate(even, sampling, seed=5)
    among = engine(policy).generate([*even, [20, 21, 22, 23, 24]], sampling, seed=5)
    assert torch.equal(among.token[:3], separate.token)
    torch.testing.assert_close(among.log_prob[:3], separate.log_prob, rtol=0, atol=1e-5)


def test_generation_settings_of_the_model_are_ignored() -> None:
    policy, sampling = make(), Sampling(10)
    before = engine(policy).generate(PROMPTS, sampling, seed=5)
    policy.model.generation_config = GenerationConfig(
        temperature=0.1, top_k=1, repetition_penalty=1.5, eos_token_id=7
    )
    assert_equal(engine(policy).generate(PROMPTS, sampling, seed=5), before)


def test_a_stop_text_ends_a_response() -> None:
    policy = make()
    full_text = CODE(engine(policy).generate(PROMPTS, Sampling(20), seed=5).token[1].tolist())
    stop = full_text[6:8]
    result = engine(policy, decode=CODE).generate(PROMPTS, Sampling(20, stop=(stop,)), seed=5)
    text = CODE(result.token[1, : int(result.length[1])].tolist())
    assert bool(result.stopped[1]) and text == full_text[: full_text.index(stop) + 2]


def test_a_stop_text_may_have_several_tokens_per_character() -> None:
    decode = lambda ids: bytes(ids).decode(errors="replace")
    stop = "\N{OCTAGONAL SIGN}" * 4  # 16 tokens
    tokens = list(f"ab{stop}".encode())
    state = _State(1, Sampling(30, stop=(stop,)), 0, torch.zeros(1, 30), 256, None)
    state.token[0, : len(tokens)] = torch.tensor(tokens)
    assert state._ends_with_stop(0, len(tokens), decode)
    assert not state._ends_with_stop(0, len(tokens) - 1, decode)


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


@pytest.fixture(params=[(8, 128, 8), (3, 8, 2), (1, 4, 1)], ids=str)
def buckets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set (steps of a round, multiple of keys, slots of the smallest bucket)."""
    names = ("ROUND_STEPS", "KEY_MULTIPLE", "MIN_SLOTS")
    for name, value in zip(names, request.param, strict=True):
        monkeypatch.setattr(cuda_graphs, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("slots", [1, 3, 64])
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


@each_family
def test_fixed_shapes_of_every_family(kind: str, more: dict[str, Any]) -> None:
    policy = make(kind, **more)
    both = [engine(policy, 3, static=x).generate(PROMPTS, RULES[0], seed=5) for x in (False, True)]
    assert_equal(*both)


@pytest.mark.slow
def test_buckets() -> None:
    e = engine(make(), 20, static=True)
    e.generate([PROMPTS[0]] * 30, Sampling(200), seed=0)  # 203 tokens and a round: two times 128
    assert e._rounds is not None
    sizes = ((1, 1), (8, 128), (9, 129), (17, 300))
    buckets = [e._rounds.bucket(active, widest) for active, widest in sizes]
    assert buckets == [(8, 128), (8, 128), (16, 256), (20, 256)]


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


@pytest.mark.parametrize("sampling", RULES[:3], ids=["sample", "greedy", "filtered"])
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


def test_a_graph_is_recorded_on_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(make(), static=True)
    e.generate(PROMPTS, RULES[0], seed=0)
    r, cuda = e._rounds, RecordingCuda(monkeypatch)
    assert r is not None
    with torch.inference_mode():
        r.cached.fill_(3)
        r._step_index.zero_()
        first, again = (r._graph(4, 16, RULES[0]) for _ in range(2))
    device = r.last.device
    assert cuda.recorded == [(device, device)] and len(r.graphs) == 1 and first == again
    assert r.cached.tolist() == [4, 4, 4, 4, 3, 3, 3]  # the warm-up's step was undone


@pytest.mark.parametrize("static", [False, True])
def test_products_in_bfloat16(static: bool) -> None:
    """The cache is rounded; log-probabilities are near those of float32."""
    policy = make()
    exact = engine(policy, static=static).generate(PROMPTS, Sampling(1), seed=5)
    policy.compute = torch.bfloat16
    e = engine(policy, static=static)
    rounded = e.generate(PROMPTS, Sampling(1), seed=5)
    assert e._cache is not None and e._cache.keys[0].dtype == torch.bfloat16
    equal = rounded.token == exact.token
    assert equal.float().mean() > 0.5 and rounded.log_prob.dtype == torch.float32
    torch.testing.assert_close(rounded.log_prob[equal], exact.log_prob[equal], rtol=0, atol=0.1)
    assert not torch.equal(rounded.log_prob, exact.log_prob)
    e.generate(PROMPTS, Sampling(12), seed=5)


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


# --------------------------------------------------------------------------------------------- vLLM
def test_arguments_of_vllm() -> None:
    sampling = Sampling(7, temperature=0.5, top_p=0.9, stop_ids=(2, 3), stop=("x",))
    expected = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.9,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2, 3],
        "stop": ["x"],
        "ignore_eos": True,
        "detokenize": True,
        "logprobs": 0,
        "seed": 11,
    }
    assert expected.items() <= sampling_arguments(sampling, 11).items()
    expected = {"top_k": 4, "detokenize": False, "stop": []}
    assert expected.items() <= sampling_arguments(Sampling(7, top_k=4), 0).items()


def test_seeds_of_responses() -> None:
    seeds = response_seeds(3, torch.arange(100))
    assert len(set(seeds)) == 100 and all(0 <= x < 2**53 for x in seeds)
    assert response_seeds(3, torch.tensor([7, 2])) == [seeds[7], seeds[2]]
    assert not set(response_seeds(4, torch.arange(100))) & set(seeds)


def test_missing_vllm_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    message = r"rollout.engine=vllm needs vLLM .*pip install vllm .*rollout.engine=builtin"
    with pytest.raises(ConfigError, match=message):
        VllmEngine(make(), "/nowhere", pad_id=0, gpu_memory_utilization=0.4)


class VllmModule:
    """Stand-in for the module ``vllm``, which records the options of its engine."""

    options: dict[str, Any]
    reset: bool | None = None
    """What ``reset_prefix_cache`` returns."""
    SamplingParams = dict

    def LLM(self, **options: Any) -> VllmModule:
        self.options = options
        return self

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights" and dict(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> bool | None:
        return self.reset


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_options_and_prefix_cache_of_vllm(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setitem(sys.modules, "vllm", module := VllmModule())
    c = Config()
    rollout = replace(c.rollout, engine="vllm", gpu_memory_utilization=share)
    actor = replace(c.actor, model=replace(c.actor.model, path="/nowhere"))
    config = replace(c, rollout=rollout, actor=actor)
    inputs = Inputs(config, SimpleNamespace(pad_token_id=0), [], [], make(), (2,), 32)
    e = make_engine(inputs)
    assert module.options["gpu_memory_utilization"] == share
    for module.reset in (None, True):  # None: the engine does not report the result
        e.update_weights(1)
    module.reset = False
    with pytest.raises(RuntimeError, match="vLLM cannot discard its prefix cache while a request"):
        e.update_weights(2)


# ----------------------------------------------------------------------------------------- sampling
LOGITS = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log()


def frequencies(sampling: Sampling, occurred: Tensor | None = None) -> list[float]:
    """Return the share of each token for 1000 evenly spaced numbers."""
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    occurred_rows = None if occurred is None else occurred.expand(1000, -1)
    token, _ = choose(LOGITS.expand(1000, -1), sampling, u, occurred_rows)
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
    assert frequencies(Sampling(1, min_p=0.3)) == pytest.approx(
        [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], abs=1e-3
    )
    # Token 1 occurred: its logit log .4 < 0 doubles, p = .16; Σ = .76.
    second = torch.tensor([[False, True, False, False, False]])
    expected = [0.1 / 0.76, 0.16 / 0.76, 0.05 / 0.76, 0.3 / 0.76, 0.15 / 0.76]
    assert frequencies(Sampling(1, repetition_penalty=2.0), second) == pytest.approx(
        expected, abs=1e-3
    )


def test_log_probabilities_ignore_filters() -> None:
    u = torch.tensor([0.5], dtype=torch.float64)
    token, log_prob = choose(LOGITS, Sampling(1, top_k=1), u)
    assert token.tolist() == [1] and float(log_prob.exp()) == pytest.approx(0.4)
    _, log_prob = choose(LOGITS, Sampling(1, temperature=0.5), u)
    assert float(log_prob.exp()) == pytest.approx(0.16 / 0.285)


def test_both_ends_of_the_unit_interval_give_possible_tokens() -> None:
    logits = torch.tensor([[-1e9, 0.0, -1e9, 0.0, -1e9]])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3)):
        token, _ = choose(logits, Sampling(1), torch.tensor([u], dtype=torch.float64))
        assert int(token) == expected


@pytest.mark.parametrize("vocabulary", [5, 64, 257, 1000, 4096])
def test_two_levels_draw_the_tokens_of_one_cumulative_sum(vocabulary: int) -> None:
    """The vocabularies are one block, blocks that divide it, and blocks that need padding."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 30.0):
        logits = scale * torch.randn(500, vocabulary, generator=generator)
        p, u = logits.softmax(-1), torch.rand(500, dtype=torch.float64, generator=generator)
        total = p.double().cumsum(-1)
        expected = (total <= (u * total[:, -1]).unsqueeze(-1)).sum(-1)
        token, log_prob = choose(logits, Sampling(1), u)
        assert torch.equal(token, expected)
        torch.testing.assert_close(log_prob, p.gather(1, token.unsqueeze(1)).squeeze(1).log())
        ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        for end in ends:
            token, _ = choose(logits, Sampling(1), end.expand(500))
            assert (p.gather(1, token.unsqueeze(1)) > 0).all()
    token, _ = choose(torch.full((1, vocabulary), float("nan")), Sampling(1), ends[:1])
    assert 0 <= int(token) < vocabulary


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
def test_invalid_sampling_parameters_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{field} = .*must be"):
        Sampling(4, **{field: value})
