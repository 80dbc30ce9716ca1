"""Reward models: from and to directories, scores that depend on the text alone, preferences that
are learnt.
"""

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
    """One token per character, and ``[eos]`` is one, too."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = [*WORDS, *(f"more{i}" for i in range(more))]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token=eos, unk_token="?"
    )


def opinionated(kind: str = "qwen2", seed: int = 0, **more: Any) -> Any:
    """A new model with weights so large that everything depends on everything."""
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


def ask(
    responses: list[str], prompts: list[str] | None = None
) -> tuple[list[Sample], list[Prompt]]:
    texts = prompts or ["abc\n"] * len(responses)
    samples: list[Sample] = [("test", r, "", {}) for r in responses]
    return samples, [Prompt((), text, "", "test", {}, i) for i, text in enumerate(texts)]


def scores(judge: RewardModel, responses: list[str]) -> list[float]:
    return [g.score for g in judge.grade(*ask(responses))]


def texts(count: int, seed: int = 0) -> list[str]:
    r = random.Random(seed)
    return ["".join(r.choices("abcdefghij", k=r.randint(1, 40))) for _ in range(count)]


# ------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_saved_model_scores_the_same(kind: str, tmp_path: Path) -> None:
    model = opinionated(kind)
    model.config.reward_offset = 0.375
    before = scores(RewardModel(model, characters()), texts(9))
    again, tokenizer = load(save(model, tmp_path), dtype=torch.float32, device="cpu")
    assert not again.training and scores(RewardModel(again, tokenizer), texts(9)) == before
    assert max(before) - min(before) > 1


@pytest.mark.parametrize("kind", FAMILIES)
def test_scores_are_transformers_own(kind: str) -> None:
    """Where padding has an id of its own."""
    model, tokenizer = opinionated(kind), characters()
    rows = tokenizer(
        [f"abc\n{t}[eos]" for t in texts(7)],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    theirs = model(
        input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]
    ).logits.squeeze(-1)
    torch.testing.assert_close(
        torch.tensor(scores(RewardModel(model, tokenizer), texts(7))), theirs.detach()
    )


def test_a_new_model_has_no_opinion() -> None:
    model = new({"model_type": "qwen2", **SMALL, "attention_dropout": 0.5})
    assert scores(RewardModel(model, characters()), ["a", "bc"]) == [0, 0] and not model.training


def test_low_precision_has_a_head_in_float32(tmp_path: Path) -> None:
    path = save(opinionated(), tmp_path)
    fine, coarse = (
        RewardModel(*load(path, dtype=t, device="cpu")) for t in (torch.float32, torch.bfloat16)
    )
    assert coarse.model.dtype == torch.bfloat16
    for a, b in zip(scores(fine, texts(9)), scores(coarse, texts(9)), strict=True):
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
    opinionated().save_pretrained(path)


def _no_end(path: Path) -> None:
    save(opinionated(), path, characters(eos=None))


def _other_tokenizer(path: Path) -> None:
    save(opinionated(), path, characters(more=5))


def _torn(path: Path) -> None:
    save(opinionated(), path)
    with Path(path, "model.safetensors").open("r+b") as file:
        file.truncate(3000)


def _own_code(path: Path) -> None:
    save(opinionated(), path)
    told = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M"},
    }
    Path(path, "config.json").write_text(json.dumps(told))
    Path(path, "code.py").write_text("raise SystemExit('ran')")


@pytest.mark.parametrize(
    ("make", "reason", "cure"),
    [
        (_empty, "holds no config.json", "name a directory that transformers wrote (hf download"),
        (_no_tokenizer, "holds no tokenizer", "save the one that the model was trained with there"),
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
            "save the one that the model was trained",
        ),
        (_torn, "transformers refuses: ", "name a complete directory"),
        (_own_code, "transformers refuses: ", "name a complete directory"),
    ],
)
def test_what_cannot_be_loaded(
    make: Callable[[Path], None], reason: str, cure: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load(str(tmp_path), dtype=torch.float32, device="cpu")
    message = str(refused.value)
    assert (
        message.startswith(f"reward.model.path={tmp_path}: {reason}") and f"; {cure}" in message
    ), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen9", "transformers refuses a reward model: .*qwen9"), ("bert", "no linear head")],
)
def test_what_cannot_be_made(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"architecture=.*{kind}.*{reason}.*; (write|name) "):
        new({"model_type": kind, **SMALL})


# ------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize("kind", FAMILIES)
def test_batches_change_nothing(kind: str) -> None:
    model, responses = opinionated(kind), texts(30)
    whole = scores(RewardModel(model, characters()), responses)
    for budget in (1, 100, 333):
        parts = scores(RewardModel(model, characters(), batch_tokens=budget), responses)
        assert parts == pytest.approx(whole, abs=1e-5)
    backwards = scores(RewardModel(model, characters(), batch_tokens=200), responses[::-1])[::-1]
    assert backwards == pytest.approx(whole, abs=1e-5)


def test_batches_keep_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, inner = [], reward_model._scores
    monkeypatch.setattr(
        reward_model,
        "_scores",
        lambda m, r: sizes.append((len(r), max(map(len, r)))) or inner(m, r),
    )
    scores(RewardModel(opinionated(), characters(), batch_tokens=50), texts(30))
    assert sum(n for n, _ in sizes) == 30 and len(sizes) < 30
    assert all(n * longest <= 50 or n == 1 for n, longest in sizes)


@pytest.mark.parametrize("add_eos", [True, False])
def test_an_end_token_that_pads_is_still_read(add_eos: bool, tmp_path: Path) -> None:
    """The score is that of the last real token, alone or in a batch; transformers' would be
    another's.
    """
    model = opinionated(pad_token_id=None)
    model, tokenizer = load(
        save(model, tmp_path, characters(pad=None)), dtype=torch.float32, device="cpu"
    )
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id == 1
    responses = ["a", "ab[eos]cdefgh", "abcd[eos]", "b[eos][eos]", "abcdefghijkl"]
    found = scores(RewardModel(model, tokenizer, add_eos=add_eos), responses)
    for response, score in zip(responses, found, strict=True):
        text = f"abc\n{response}" + ("[eos]" if add_eos and not response.endswith("[eos]") else "")
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        alone = model.score(model.model(input_ids=ids).last_hidden_state)[0, -1, 0]
        assert score == pytest.approx(alone.item(), abs=1e-5)
        theirs = model(input_ids=ids).logits.item()
        assert (abs(theirs - score) < 1e-4) == (not text.endswith("[eos]"))


def test_the_prompt_counts_and_no_special_tokens_are_added() -> None:
    judge = RewardModel(opinionated(), characters())
    samples, prompts = ask(["b", "b", "ab"], ["ja", "jb", "j"])
    a, b, c = (g.score for g in judge.grade(samples, prompts))
    assert a == c != b
    assert judge.grade([], []) == []


class Rule:
    """Right where the response is "a"; "f" crashes it.

    ``says``: whether it tells right from wrong itself.
    """

    def __init__(self, says: bool = True) -> None:
        self.says, self.failures, self.closed = says, 0, False
        self.last_failure: str | None = None

    def grade(self, samples: Any, prompts: Any) -> list[Grade]:
        bad = [s[1] == "f" for s in samples]
        self.failures, self.last_failure = self.failures + sum(bad), "ValueError: f"
        return [
            Grade(0.0, failed=True) if f
            else Grade(float(s[1] == "a"), answer=s[1], correct=s[1] == "a" if self.says else None, format_ok=True)
            for s, f in zip(samples, bad, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("says", [True, False])
def test_a_rule_says_right_or_wrong_and_changes_no_score(says: bool) -> None:
    rule = Rule(says)
    judge = RewardModel(opinionated(), characters(), rule=rule)
    grades = judge.grade(*ask(["a", "b", "f"]))
    assert [g.score for g in grades] == scores(
        RewardModel(judge.model, judge.tokenizer), ["a", "b", "f"]
    )
    assert [(g.answer, g.correct, g.format_ok) for g in grades] == [("a", True, True), ("b", False, True), (None, False, None)]  # fmt: skip
    assert not any(g.failed for g in grades) and judge.failures == 1
    assert judge.last_failure == "only the rule failed, the model's score stands: ValueError: f"
    judge.close()
    assert rule.closed
    assert [g.correct for g in RewardModel(judge.model, judge.tokenizer).grade(*ask(["a"]))] == [
        None
    ]


def test_failures_score_0_and_are_told() -> None:
    model = opinionated()
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS.index("t")] = math.nan
    judge = RewardModel(model, characters(), rule=Rule())
    grades = judge.grade(*ask(["a", "abt", "b" * 60, "b"]))
    assert [g.failed for g in grades] == [False, True, True, False] and grades[1].score == grades[
        2
    ].score == 0
    assert grades[0].score == scores(RewardModel(model, characters()), ["a"])[0] != 0
    assert grades[1].answer == "abt" and judge.failures == 2
    assert (
        judge.last_failure
        == "sample 1 of 4 (data_source = test, response = 'abt'): the model's score is nan"
    )
    judge.grade(*ask(["a"]))
    judge.grade(*ask(["b" * 60]))
    assert judge.failures == 3
    assert judge.last_failure.endswith("): the text has 65 tokens, the model's limit is 64")
    empty = RewardModel(model, characters(), add_eos=False).grade(*ask([""], [""]))
    assert empty == [Grade(0.0, failed=True)]


# ----------------------------------------------------------------------------------------- training
def preferences(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Of two responses the one with a "q" is better."""
    r = random.Random(seed)
    pairs = []
    for prompt in texts(count, seed):
        worse, better = ("".join(r.choices("abcdefgh", k=r.randint(3, 12))) for _ in range(2))
        at = r.randrange(len(better))
        pairs.append((f"{prompt[:5]}\n", f"{better[:at]}q{better[at + 1 :]}", worse))
    return pairs


def learnt(pairs: Any = None, **more: Any) -> tuple[Any, dict[str, float]]:
    torch.manual_seed(1)
    model = new({"model_type": "qwen2", **SMALL})
    options = {"steps": 60, "batch_size": 32, "lr": 3e-3, "seed": 0} | more
    return model, train(model, characters(), pairs or preferences(400), **options)


def test_preferences_are_learnt_and_centred(tmp_path: Path) -> None:
    heard: list[str] = []
    model, found = learnt(notice=heard.append)
    assert set(found) == {"loss", "accuracy"} and found["accuracy"] >= 0.95 and found["loss"] < 0.3
    assert len(heard) == 5 and heard[0].startswith("reward model: step 12 of 60, loss 0.")
    judge, held = RewardModel(model, characters()), preferences(400)[360:]
    prompts = [p for p, _, _ in held]
    high, low = (
        torch.tensor([g.score for g in judge.grade(*ask([pair[k] for pair in held], prompts))])
        for k in (1, 2)
    )
    assert abs(float(torch.cat((high, low)).mean())) < 1e-5 and float(high.mean()) > 1
    assert found["accuracy"] == pytest.approx(float((high > low).float().mean()))
    # -log sigmoid(d) = log(1 + exp(-d))
    assert found["loss"] == pytest.approx(
        float(torch.log1p(torch.exp(-(high - low).double())).mean()), rel=1e-4
    )
    again = RewardModel(*load(save(model, tmp_path), dtype=torch.float32, device="cpu"))
    assert scores(again, ["aqa", "aba"]) == scores(judge, ["aqa", "aba"])


def test_nothing_learnt_is_log_2_and_no_accuracy() -> None:
    _, found = learnt(steps=0)
    assert found == {"loss": pytest.approx(math.log(2)), "accuracy": 0}


def test_the_seed_decides_every_bit() -> None:
    (a, x), (b, y), (c, _) = (learnt(seed=seed, steps=5) for seed in (3, 3, 4))
    assert x == y and a.config.reward_offset == b.config.reward_offset != c.config.reward_offset
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))


def test_held_out_pairs_teach_nothing() -> None:
    pairs = preferences(400)
    turned = pairs[:360] + [(prompt, worse, better) for prompt, better, worse in pairs[360:]]
    (a, x), (b, y) = learnt(steps=10), learnt(turned, steps=10)
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
def test_what_cannot_be_learnt(pairs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(opinionated(), characters(), pairs, steps=1, batch_size=2, lr=1e-3, seed=0)


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = opinionated()
    with torch.no_grad():
        model.score.weight.fill_(math.inf)
    with pytest.raises(
        TrainingError, match=r"the loss of step 1 is .*; lower reward.model.lr=0.001"
    ):
        train(model, characters(), preferences(20), steps=1, batch_size=2, lr=1e-3, seed=0)
