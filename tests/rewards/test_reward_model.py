"""Reward models: saving and loading, scores that depend on the text only, training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_ppo.core.errors import ConfigError, TrainingError
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.rewards import reward_model
from embodied_ppo.rewards.graders import Grade, Sample
from embodied_ppo.rewards.reward_model import RewardModel, load, new, train

transformers = pytest.importorskip("transformers")
WORDS = ["[pad]", "[eos]", *"abcdefghijklmnopqrst", "\n", "?"]
SMALL: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FAMILIES = ("qwen2", "llama")


def characters(pad: str | None = "[pad]", eos: str | None = "[eos]", more: int = 0) -> Any:
    """Return a tokenizer with one token per character, and one for ``[eos]``."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = [*WORDS, *(f"more{i}" for i in range(more))]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token=eos, unk_token="?"
    )


def random_model(kind: str = "qwen2", seed: int = 0, **more: Any) -> Any:
    """Return a new model with weights so large that every token changes the score."""
    torch.manual_seed(seed)
    model = new({"model_type": kind, **SMALL, **more})
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    return model


def save(model: Any, path: Path, tokenizer: Any = None) -> str:
    model.save_pretrained(path)
    (tokenizer or characters()).save_pretrained(path)
    return str(path)


def batch(
    responses: list[str], prompts: list[str] | None = None
) -> tuple[list[Sample], list[Prompt]]:
    texts = prompts or ["abc\n"] * len(responses)
    samples: list[Sample] = [("test", r, "", {}) for r in responses]
    return samples, [Prompt((), text, "", "test", {}, i) for i, text in enumerate(texts)]


def scores(model: RewardModel, responses: list[str]) -> list[float]:
    return [g.score for g in model.grade(*batch(responses))]


def texts(count: int, seed: int = 0) -> list[str]:
    r = random.Random(seed)
    return ["".join(r.choices("abcdefghij", k=r.randint(1, 40))) for _ in range(count)]


# ------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_loaded_model_gives_the_same_scores(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    model.config.reward_offset = 0.375
    before = scores(RewardModel(model, characters()), texts(9))
    loaded, tokenizer = load(save(model, tmp_path))
    assert not loaded.training and scores(RewardModel(loaded, tokenizer), texts(9)) == before
    assert max(before) - min(before) > 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_scores_equal_those_of_transformers(kind: str) -> None:
    """The padding token has its own id here, which transformers needs."""
    model, tokenizer = random_model(kind), characters()
    rows = [f"abc\n{text}[eos]" for text in texts(7)]
    inputs = tokenizer(rows, padding=True, padding_side="right", return_tensors="pt")
    expected = model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
    ).logits.squeeze(-1)
    result = torch.tensor(scores(RewardModel(model, tokenizer), texts(7)))
    torch.testing.assert_close(result, expected.detach())


def test_a_new_model_scores_0() -> None:
    model = new({"model_type": "qwen2", **SMALL, "attention_dropout": 0.5})
    assert scores(RewardModel(model, characters()), ["a", "bc"]) == [0, 0] and not model.training


def test_the_head_of_a_bfloat16_model_computes_in_float32(tmp_path: Path) -> None:
    path = save(random_model(), tmp_path)
    exact, rounded = (RewardModel(*load(path, dtype=t)) for t in (torch.float32, torch.bfloat16))
    assert rounded.model.dtype == torch.bfloat16
    for a, b in zip(scores(exact, texts(9)), scores(rounded, texts(9)), strict=True):
        assert a != b and b == pytest.approx(a, abs=0.5)


def _empty(path: Path) -> None: ...


def _causal(path: Path) -> None:
    fields = {k: v for k, v in SMALL.items() if k != "bos_token_id"}
    config = transformers.AutoConfig.for_model("qwen2", **fields)
    save(transformers.AutoModelForCausalLM.from_config(config), path)


def _labels(path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL, num_labels=3)
    save(transformers.AutoModelForSequenceClassification.from_config(config), path)


def _encoder(path: Path) -> None:
    config = transformers.AutoConfig.for_model("bert", **SMALL, num_labels=1)
    save(transformers.AutoModelForSequenceClassification.from_config(config), path)


def _no_tokenizer(path: Path) -> None:
    random_model().save_pretrained(path)


def _no_end(path: Path) -> None:
    save(random_model(), path, characters(eos=None))


def _other_tokenizer(path: Path) -> None:
    save(random_model(), path, characters(more=5))


def _truncated(path: Path) -> None:
    save(random_model(), path)
    with Path(path, "model.safetensors").open("r+b") as file:
        file.truncate(3000)


def _own_code(path: Path) -> None:
    save(random_model(), path)
    auto_map = {"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M"}
    config = {"model_type": "mine", "auto_map": auto_map}
    Path(path, "config.json").write_text(json.dumps(config))
    Path(path, "code.py").write_text("raise SystemExit('ran')")


@pytest.mark.parametrize(
    ("make", "reason", "cure"),
    [
        (_empty, "holds no config.json", "name a directory that transformers wrote (hf download"),
        (_no_tokenizer, "holds no tokenizer", "save the one of the model's training there"),
        (
            _causal,
            "a checkpoint of Qwen2ForCausalLM without score.weight, which would be random",
            "name a reward",
        ),
        (_labels, "has 3 labels", "name a model with num_labels=1"),
        (
            _encoder,
            "BertForSequenceClassification has no linear head named score",
            "name a causal model, such as",
        ),
        (_no_end, "its tokenizer has no end token", "set eos_token in tokenizer_config.json"),
        (
            _other_tokenizer,
            "its tokenizer has 29 tokens, the model 24",
            "save the one of the model's training",
        ),
        (_truncated, "transformers refuses: ", "name a complete directory"),
        (_own_code, "transformers refuses: ", "name a complete directory"),
    ],
)
def test_invalid_directories_are_refused(
    make: Callable[[Path], None], reason: str, cure: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path))
    message = str(error.value)
    assert message.startswith(f"reward.model.path={tmp_path}: {reason}"), message
    assert f"; {cure}" in message and "\n" not in message, message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen9", "transformers refuses a reward model: .*qwen9"), ("bert", "no linear head")],
)
def test_invalid_architectures_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"architecture=.*{kind}.*{reason}.*; (write|name) "):
        new({"model_type": kind, **SMALL})


# ------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize("kind", FAMILIES)
def test_scores_do_not_depend_on_batches(kind: str) -> None:
    model, responses = random_model(kind), texts(30)
    expected = pytest.approx(scores(RewardModel(model, characters()), responses), abs=1e-5)
    for limit in (1, 100, 333):
        judge = RewardModel(model, characters(), batch_tokens=limit)
        assert scores(judge, responses) == expected
    judge = RewardModel(model, characters(), batch_tokens=200)
    assert scores(judge, responses[::-1])[::-1] == expected


def test_batches_have_at_most_batch_tokens_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, original = [], reward_model._scores

    def record(model: Any, rows: Any) -> torch.Tensor:
        sizes.append((len(rows), max(map(len, rows))))
        return original(model, rows)

    monkeypatch.setattr(reward_model, "_scores", record)
    scores(RewardModel(random_model(), characters(), batch_tokens=50), texts(30))
    assert sum(n for n, _ in sizes) == 30 and len(sizes) < 30
    assert all(n * longest <= 50 or n == 1 for n, longest in sizes)


@pytest.mark.parametrize("add_eos", [True, False])
def test_an_end_token_with_the_id_of_the_padding_is_scored(add_eos: bool, tmp_path: Path) -> None:
    """The score is that of the last token, alone or in a batch. transformers takes another one."""
    model = random_model(pad_token_id=None)
    model, tokenizer = load(save(model, tmp_path, characters(pad=None)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id == 1
    responses = ["a", "ab[eos]cdefgh", "abcd[eos]", "b[eos][eos]", "abcdefghijkl"]
    results = scores(RewardModel(model, tokenizer, add_eos=add_eos), responses)
    for response, score in zip(responses, results, strict=True):
        text = f"abc\n{response}" + ("[eos]" if add_eos and not response.endswith("[eos]") else "")
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        single = model.score(model.model(input_ids=ids).last_hidden_state)[0, -1, 0]
        assert score == pytest.approx(single.item(), abs=1e-5)
        other = model(input_ids=ids).logits.item()
        assert (abs(other - score) < 1e-4) == (not text.endswith("[eos]"))


def test_the_prompt_is_scored_without_special_tokens() -> None:
    judge = RewardModel(random_model(), characters())
    samples, prompts = batch(["b", "b", "ab"], ["ja", "jb", "j"])
    a, b, c = (g.score for g in judge.grade(samples, prompts))
    assert a == c != b
    assert judge.grade([], []) == []


class Rule:
    """Grade "a" as correct; "f" fails.

    ``returns_correct``: whether the grades have ``correct``.
    """

    def __init__(self, returns_correct: bool = True) -> None:
        self.returns_correct, self.failures, self.closed = returns_correct, 0, False
        self.last_failure: str | None = None

    def grade(self, samples: Any, prompts: Any) -> list[Grade]:
        return [self._grade(response) for _, response, _, _ in samples]

    def _grade(self, response: str) -> Grade:
        if response == "f":
            self.failures, self.last_failure = self.failures + 1, "ValueError: f"
            return Grade(0.0, failed=True)
        correct = response == "a"
        flag = correct if self.returns_correct else None
        return Grade(float(correct), answer=response, correct=flag, format_ok=True)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("returns_correct", [True, False])
def test_a_rule_determines_correctness_but_not_the_score(returns_correct: bool) -> None:
    rule = Rule(returns_correct)
    judge = RewardModel(random_model(), characters(), rule=rule)
    without_rule = RewardModel(judge.model, judge.tokenizer)
    grades = judge.grade(*batch(["a", "b", "f"]))
    assert [g.score for g in grades] == scores(without_rule, ["a", "b", "f"])
    expected = [("a", True, True), ("b", False, True), (None, False, None)]
    assert [(g.answer, g.correct, g.format_ok) for g in grades] == expected
    assert not any(g.failed for g in grades) and judge.failures == 1
    assert judge.last_failure == "only the rule failed, the score is valid: ValueError: f"
    judge.close()
    assert rule.closed
    assert [g.correct for g in without_rule.grade(*batch(["a"]))] == [None]


def test_failures_score_0_and_are_reported() -> None:
    model = random_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS.index("t")] = math.nan
    judge = RewardModel(model, characters(), rule=Rule())
    grades = judge.grade(*batch(["a", "abt", "b" * 60, "b"]))
    assert [g.failed for g in grades] == [False, True, True, False]
    assert grades[1].score == grades[2].score == 0
    assert grades[0].score == scores(RewardModel(model, characters()), ["a"])[0] != 0
    assert grades[1].answer == "abt" and judge.failures == 2
    sample = "sample 1 of 4 (data_source = test, response = 'abt')"
    assert judge.last_failure == f"{sample}: the model's score is nan"
    judge.grade(*batch(["a"]))
    judge.grade(*batch(["b" * 60]))
    assert judge.failures == 3
    assert judge.last_failure.endswith("): the text has 65 tokens, the model's limit is 64")
    empty = RewardModel(model, characters(), add_eos=False).grade(*batch([""], [""]))
    assert empty == [Grade(0.0, failed=True)]


# ----------------------------------------------------------------------------------------- training
def preferences(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Return pairs in which the response with a "q" is better."""
    r = random.Random(seed)
    pairs = []
    for prompt in texts(count, seed):
        worse, better = ("".join(r.choices("abcdefgh", k=r.randint(3, 12))) for _ in range(2))
        at = r.randrange(len(better))
        pairs.append((f"{prompt[:5]}\n", f"{better[:at]}q{better[at + 1 :]}", worse))
    return pairs


def trained(pairs: Any = None, **more: Any) -> tuple[Any, dict[str, float]]:
    torch.manual_seed(1)
    model = new({"model_type": "qwen2", **SMALL})
    options = {"steps": 60, "batch_size": 32, "lr": 3e-3, "seed": 0} | more
    return model, train(model, characters(), pairs or preferences(400), **options)


@pytest.mark.slow
def test_training_on_preferences_and_the_mean_score(tmp_path: Path) -> None:
    notices: list[str] = []
    model, metrics = trained(notice=notices.append)
    assert set(metrics) == {"loss", "accuracy"}
    assert metrics["accuracy"] >= 0.95 and metrics["loss"] < 0.3
    assert len(notices) == 5 and notices[0].startswith("reward model: step 12 of 60, loss 0.")
    judge, held_out = RewardModel(model, characters()), preferences(400)[360:]
    prompts, better, worse = map(list, zip(*held_out))
    high, low = (
        torch.tensor([g.score for g in judge.grade(*batch(responses, prompts))])
        for responses in (better, worse)
    )
    assert abs(float(torch.cat((high, low)).mean())) < 1e-5 and float(high.mean()) > 1
    assert metrics["accuracy"] == pytest.approx(float((high > low).float().mean()))
    # -log sigmoid(d) = log(1 + exp(-d))
    loss = float(torch.log1p(torch.exp(-(high - low).double())).mean())
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    loaded = RewardModel(*load(save(model, tmp_path)))
    assert scores(loaded, ["aqa", "aba"]) == scores(judge, ["aqa", "aba"])


def test_the_loss_before_training_is_log_2() -> None:
    _, metrics = trained(steps=0)
    assert metrics == {"loss": pytest.approx(math.log(2)), "accuracy": 0}


def test_equal_seeds_give_equal_models() -> None:
    (a, x), (b, y), (c, _) = (trained(seed=seed, steps=5) for seed in (3, 3, 4))
    assert x == y and a.config.reward_offset == b.config.reward_offset != c.config.reward_offset
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))


@pytest.mark.slow
def test_held_out_pairs_are_not_trained_on() -> None:
    pairs = preferences(400)
    reversed_pairs = pairs[:360] + [
        (prompt, worse, better) for prompt, better, worse in pairs[360:]
    ]
    (a, x), (b, y) = trained(steps=10), trained(reversed_pairs, steps=10)
    assert x["loss"] != y["loss"] and x["accuracy"] + y["accuracy"] == pytest.approx(1)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", "b", "c")], "reward.model.pairs=1: .*; write 1000"),
        (
            [("a", "b", "c"), ("a", "b", "c" * 70)],
            "reward.model.pairs: the text has 72 tokens.*pair 1.*; leave it out",
        ),
    ],
)
def test_invalid_pairs_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(random_model(), characters(), pairs, steps=1, batch_size=2, lr=1e-3, seed=0)


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = random_model()
    with torch.no_grad():
        model.score.weight.fill_(math.inf)
    message = r"the loss of step 1 is .*; lower reward.model.lr=0.001"
    with pytest.raises(TrainingError, match=message):
        train(model, characters(), preferences(20), steps=1, batch_size=2, lr=1e-3, seed=0)
