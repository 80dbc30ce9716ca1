"""Language models: forward pass against transformers, log-probabilities in float64."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import options
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies import causal_lm, decoder, lora
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.policies.decoder import Attend, Decoder, Packing

TINY: dict[str, Any] = options("""vocab_size=50 hidden_size=32 intermediate_size=64
    num_hidden_layers=3 num_attention_heads=4 num_key_value_heads=2 head_dim=8
    max_position_embeddings=64 pad_token_id=0 bos_token_id=1 eos_token_id=2""")
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 8.0, "residual_multiplier": 0.3}
GRANITE |= {"attention_multiplier": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 5}),
    ("smollm3", {"no_rope_layers": [1, 1, 0]}),
    ("gemma", {}),
    ("gemma2", GEMMA | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    ("gemma3_text", GEMMA),
    ("phi3", {"sliding_window": 4, "partial_rotary_factor": 0.5}),
    ("granite", GRANITE),
    ("olmo2", {}),
    ("olmo3", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 4}),
    ("glm4", {"attention_bias": True}),
    ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 24}),
]


def make(kind: str = "qwen2", seed: int = 0, **more: Any) -> LanguagePolicy:
    torch.manual_seed(seed)
    model = causal_lm.load(None, {"model_type": kind, **TINY, **more}, section="actor.model")
    with torch.no_grad():  # larger weights, so that outputs depend on inputs
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(5)
    return LanguagePolicy(model)


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens [3, 11] and places [3, 4]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 50, (3, 11), generator=g), torch.tensor(
        [[2, 3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3]]
    )


@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_forward_pass_agrees_with_transformers(kind: str, more: dict[str, Any]) -> None:
    """Compare hidden states at the requested places, and their gradient."""
    policy = make(kind, **more)
    ids, place = rows()
    expected = policy.model(input_ids=ids, use_cache=False).logits
    expected = expected.gather(1, place.unsqueeze(-1).expand(-1, -1, 50))
    logits = policy.logits(policy.hidden(ids, place))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    weights = list(policy.parameters())
    losses = [x.square().sum() for x in (logits, expected)]
    grads = [torch.autograd.grad(x, weights, allow_unused=True) for x in losses]
    assert all((a is None) == (b is None) for a, b in zip(*grads, strict=True))
    for a, b in zip(*grads, strict=True):
        if b is not None:
            assert a is not None and float((a - b).norm() / b.norm().clamp_min(1e-3)) < 1e-4


@pytest.mark.parametrize(
    ("path", "architecture", "message"),
    [
        ("/no/such/place", {}, r"actor\.model\.path=/no/such/place.*config\.json"),
        (None, {"model_type": "qwen2", **TINY, "num_attention_heads": 3}, r"actor\.model"),
        (None, {"model_type": "qwen9"}, r"actor\.model\.architecture.*qwen9"),
        (None, {"model_type": "cohere2", **TINY}, "logits differ by"),
        (None, {"model_type": "llama4_text", **TINY}, "chunked_attention"),
    ],
)
def test_invalid_models(path: str | None, architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        causal_lm.load(path, architecture, section="actor.model")


def test_load_a_directory(tmp_path) -> None:
    policy = make("qwen3")
    policy.model.save_pretrained(tmp_path)
    again = LanguagePolicy(causal_lm.load(str(tmp_path), {}, section="actor.model"))
    ids, place = rows()
    assert torch.equal(policy.hidden(ids, place), again.hidden(ids, place))


class Payload:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("sharded", [False, True])
def test_pickled_weights_run_no_code(sharded: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy, folder = make("qwen3"), tmp_path / "model"
    policy.model.config.save_pretrained(folder)
    state = policy.model.state_dict()
    names = ["pytorch_model.bin"]
    if sharded:
        names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        index = {name: names[i % 2] for i, name in enumerate(state)}
        contents = {"metadata": {"total_size": 0}, "weight_map": index}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(contents))
    for i, name in enumerate(names):
        part = {key: x.clone() for key, x in list(state.items())[i :: len(names)]}
        torch.save(part, folder / name)
    again = LanguagePolicy(causal_lm.load(str(folder), {}, section="actor.model"))
    ids, place = rows()
    assert torch.equal(policy.hidden(ids, place), again.hidden(ids, place))
    # The digest of an adapter's base depends on every shard.
    before = lora.digest(folder)
    torch.save({**torch.load(folder / names[-1]), "x": torch.zeros(1)}, folder / names[-1])
    assert not torch.equal(lora.digest(folder), before)
    for save in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))):
        save({**state, "x": Payload()}, folder / names[-1])
        with pytest.raises(ConfigError, match=r"actor\.model\.path=") as refused:
            causal_lm.load(str(folder), {}, section="actor.model")
        assert "\n" not in str(refused.value) and not Path("pwned").exists()


def test_missing_and_infinite_weights_are_refused(tmp_path) -> None:
    model, head, other = make("qwen3").model, "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
    state = model.state_dict()
    for name, more in ((head, {}), (other, {}), (other, {other: state[other] / 0})):
        rest = {key: x for key, x in state.items() if key != name}
        model.save_pretrained(tmp_path, state_dict=rest | more)
        with pytest.raises(ConfigError, match=rf"actor\.model\.path=.*{name}"):
            causal_lm.load(str(tmp_path), {}, section="actor.model")
        if name == head:  # a critic has another head
            causal_lm.load(str(tmp_path), {}, section="critic.model")


def ragged(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens [3, 11] and places [3, 4] of rows with different lengths.

    The first row has unused places.
    """
    ids, _ = rows(seed)
    return ids, torch.tensor([[2, 3, 0, 0], [6, 7, 8, 9], [0, 1, 2, 3]])


def separate_rows(decoder: Decoder, packing: Packing) -> Attend:
    """Return attention of packed rows, computed row by row; the slow reference of ``varlen``."""

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = packing.start.diff().tolist()
        rows = zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat(
            [decoder.causal(row[0].shape[2], None, q.device)(i, *row) for row in rows], dim=2
        )

    return attend


def test_packing_by_hand() -> None:
    """The rows have 4, 10 and 4 tokens; the width of 11 bounds the longest."""
    p = decoder.pack(ragged()[1], 11)
    assert p.start.tolist() == [0, 4, 14, 18] and p.longest == 11 and len(p.index) == 18
    assert p.index.tolist() == [0, 1, 2, 3, *range(11, 21), 22, 23, 24, 25]
    assert p.position.tolist() == [0, 1, 2, 3, *range(10), 0, 1, 2, 3]
    assert p.at.tolist() == [[2, 3, 0, 0], [10, 11, 12, 13], [14, 15, 16, 17]]


@pytest.mark.parametrize(
    ("kind", "more"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)]
)
def test_packed_rows_agree_with_padded_rows(kind: str, more: dict[str, Any]) -> None:
    """Compare hidden states and their gradient."""
    policy = make(kind, **more)
    decoder = policy.decoder.module
    ids, place = ragged()
    padded = decoder(ids, place=place)
    packed = decoder.packed(ids, place, partial(separate_rows, decoder))
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    # Σx² is constant: x is normalised
    weight, some = (policy.model.model.embed_tokens.weight, torch.randn_like(padded))
    grads = [torch.autograd.grad((x * some).sum(), weight)[0] for x in (packed, padded)]
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-5


@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_shared_prefixes_agree_with_padded_rows(kind: str, more: dict[str, Any]) -> None:
    policy = make(kind, **more)
    decoder = policy.decoder.module
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 5, (12, 8), generator=generator)  # many equal prefixes
    place = torch.arange(3, 7).repeat(12, 1)
    place[2], place[5, 2:] = 0, 0  # masked, and shorter
    positions = torch.arange(8).unsqueeze(0)
    padded = decoder(ids, positions, attend=decoder.causal(8, place, ids.device), place=place)
    shared = decoder(ids, place=place)
    torch.testing.assert_close(shared, padded, rtol=1e-5, atol=1e-5)
    some = torch.randn(shared.shape, generator=generator)
    weights = [p for p in decoder.parameters() if p.requires_grad]
    for x, y in zip(
        *(torch.autograd.grad((x * some).sum(), weights) for x in (shared, padded)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_varlen_attention_agrees_with_separate_rows(groups: int) -> None:
    """Compare hidden states and gradient in bfloat16 on a GPU; ``forward`` selects the kernel."""
    policy = make(num_key_value_heads=groups).to("cuda", torch.bfloat16)
    decoder = policy.decoder.module
    ids, place = (x.cuda() for x in ragged())
    assert decoder._packs(ids)
    weight, some = policy.model.model.embed_tokens.weight, torch.randn(32, device="cuda")
    fast, slow = (
        decoder.packed(ids, place, blocks)
        for blocks in (decoder.varlen, partial(separate_rows, decoder))
    )
    assert torch.equal(decoder(ids, place=place), fast)
    torch.testing.assert_close(fast, slow, rtol=0.05, atol=0.05)
    grads = [torch.autograd.grad((x.float() * some).sum(), weight)[0].float() for x in (fast, slow)]
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 0.05


# ------------------------------------------------------------------------- token log-probabilities
@pytest.mark.parametrize("chunk", [64 << 20, 4 * 50 * 5], ids=["at once", "in chunks of 5"])
@pytest.mark.parametrize(("kind", "temperature"), [("qwen2", 1.0), ("qwen2", 0.7), ("gemma2", 0.7)])
def test_view_agrees_with_float64_reference(
    kind: str, temperature: float, chunk: int, monkeypatch
) -> None:
    monkeypatch.setattr(causal_lm, "LOGIT_BYTES", chunk)
    capped = {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}
    more = capped if kind == "gemma2" else {}
    policy, reference = (make(kind, seed, **more) for seed in (0, 1))
    policy.temperature = temperature
    ids, place = rows()
    action = ids.gather(1, place + 1)
    hidden, other = policy.hidden(ids, place), reference.hidden(ids, place).detach()
    view = policy.view(hidden, action, reference=reference, ref_hidden=other)

    def distribution(hidden: Tensor, model: LanguagePolicy) -> Tensor:
        logits = hidden.double() @ model.model.lm_head.weight.double().T
        if kind == "gemma2":
            logits = 2 * torch.tanh(logits / 2)
        return (logits / temperature).softmax(-1)

    p, q = distribution(hidden, policy), distribution(other, reference)
    expected = p.gather(-1, action.unsqueeze(-1)).squeeze(-1).log()
    assert view.distance is not None
    for actual, reference_value in (
        (view.log_prob, expected),
        (view.entropy, -(p * p.log()).sum(-1)),
        (view.distance, (p * (p / q).log()).sum(-1)),
    ):
        assert actual.dtype == torch.float32 and actual.shape == (3, 4)
        torch.testing.assert_close(actual.double(), reference_value, rtol=1e-5, atol=1e-5)
    weights = [policy.model.lm_head.weight, policy.model.model.embed_tokens.weight]
    entropy, distance = -(p * p.log()).sum(-1), (p * (p / q).log()).sum(-1)
    some = torch.linspace(-1, 2, 12).view(3, 4)  # another gradient for each token
    for factors in ((1, 2, 3), (1, 0, 0), (0, 2, 0), (0, 0, 3)):
        both = [(view.log_prob, expected), (view.entropy, entropy), (view.distance, distance)]
        used = [(f, *pair) for f, pair in zip(factors, both, strict=True) if f]
        actual, expected_gradient = (
            torch.autograd.grad(
                torch.stack([(f * some * x[i]).sum() for f, *x in used]).sum(),
                weights,
                retain_graph=True,
            )
            for i in (0, 1)
        )
        for a, b in zip(actual, expected_gradient, strict=True):
            assert float((a - b).norm() / b.norm()) < 1e-5, factors


def test_recomputed_layers_give_equal_gradients() -> None:
    policy = make()
    ids, place = rows()
    grads = []
    for recompute in (False, True):
        policy.decoder.module.recompute = recompute
        loss = policy.view(policy.hidden(ids, place), ids.gather(1, place + 1)).log_prob.sum()
        grads.append(torch.autograd.grad(loss, policy.model.model.embed_tokens.weight)[0])
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------------------------------- critic
def test_critic_is_zero_at_the_start_and_trains_all_parameters() -> None:
    critic = LanguageCritic(make().model)
    ids, place = rows()
    value = critic.value(ids, place)
    assert value.shape == (3, 4) and torch.equal(value, torch.zeros(3, 4))
    with torch.no_grad():
        critic.value_head.weight.normal_()
    critic.value(ids, place).sum().backward()
    missing = [
        name
        for name, p in critic.named_parameters()
        if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert missing == []


@pytest.mark.parametrize("masked", [False, True])
def test_elementary_attention_agrees_with_the_kernel(masked: bool) -> None:
    attention = decoder.Attention(0.3, None, None)
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    mask = (
        attention.visible_keys(torch.tensor([[1, 2, 3, 4, 0]]), torch.arange(5)).unsqueeze(1)
        if masked
        else None
    )
    graph = make_fx(lambda *x: attention(*x, mask))(q, k, v)
    assert "scaled_dot_product" not in graph.code
    torch.testing.assert_close(graph(q, k, v), attention(q, k, v, mask), rtol=1e-5, atol=1e-6)
