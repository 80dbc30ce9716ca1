"""Reward models: saving and loading, scores that depend on the text only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import options

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.rollout.rewards import reward_model
from embodied_ppo.rollout.rewards.graders import Sample
from embodied_ppo.rollout.rewards.reward_model import RewardModel, load

transformers = pytest.importorskip("transformers")
WORDS = ["[pad]", "[eos]", *"abcdefghijklmnopqrst", "\n", "?"]
SMALL: dict[str, Any] = options("""hidden_size=32 intermediate_size=64 num_hidden_layers=2
    num_attention_heads=4 num_key_value_heads=2 max_position_embeddings=64 pad_token_id=0
    bos_token_id=null eos_token_id=1""")
SMALL |= {"vocab_size": len(WORDS)}
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
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **more}, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
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
def test_a_loaded_model_gives_the_same_scores(kind: str, tmp_path) -> None:
    model = random_model(kind)
    before = scores(RewardModel(model, characters()), texts(9))
    loaded, tokenizer = load(save(model, tmp_path))
    assert not loaded.training and scores(RewardModel(loaded, tokenizer), texts(9)) == before
    assert max(before) - min(before) > 1


def test_scores_equal_those_of_transformers() -> None:
    """The padding token has its own id here, which transformers needs."""
    model, tokenizer = random_model(), characters()
    rows = [f"abc\n{text}[eos]" for text in texts(7)]
    inputs = tokenizer(rows, padding=True, padding_side="right", return_tensors="pt")
    expected = model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
    ).logits.squeeze(-1)
    result = torch.tensor(scores(RewardModel(model, tokenizer), texts(7)))
    torch.testing.assert_close(result, expected.detach())


def _causal(path: Path) -> None:
    fields = {k: v for k, v in SMALL.items() if k != "bos_token_id"}
    config = transformers.AutoConfig.for_model("qwen2", **fields)
    save(transformers.AutoModelForCausalLM.from_config(config), path)


def _labels(path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL, num_labels=3)
    save(transformers.AutoModelForSequenceClassification.from_config(config), path)


def _no_tokenizer(path: Path) -> None:
    random_model().save_pretrained(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_no_tokenizer, "tokenizer"),
        (_causal, "Qwen2ForCausalLM.*score.weight"),
        (_labels, "3 labels"),
    ],
)
def test_invalid_directories_are_refused(
    make: Callable[[Path], None], reason: str, tmp_path
) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match=rf"reward\.model\.path={tmp_path}.*{reason}"):
        load(str(tmp_path))


# ------------------------------------------------------------------------------------------- scores
def test_scores_do_not_depend_on_batches(monkeypatch) -> None:
    model, responses = random_model(), texts(30)
    expected = pytest.approx(scores(RewardModel(model, characters()), responses), abs=1e-5)
    for limit in (1, 100, 333):
        monkeypatch.setattr(reward_model, "BATCH_TOKENS", limit)
        assert scores(RewardModel(model, characters()), responses[::-1])[::-1] == expected


CHAT = "{% for m in messages %}[bos]{{ m['role'][0] }}\n{{ m['content'] }}[eos]{% endfor %}"


def with_bos(template: str | None) -> Any:
    """Return a tokenizer that writes [bos] before a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = characters()
    tokenizer.add_special_tokens({"bos_token": "[bos]"})
    special = [("[bos]", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[bos] $A", special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_prompt(text: str, prefix: str = "") -> Prompt:
    """Return a prompt of an actor with other markup, (...)."""
    messages = [{"role": "user", "content": text}]
    return Prompt((), f"(k:{text})(l:", "", "test", {}, 0, messages, prefix, True)


def test_a_conversation_is_written_by_the_template_of_the_reward_model(tmp_path) -> None:
    """As its publisher computes it: apply_chat_template, then the model."""
    model = random_model(vocab_size=len(WORDS) + 1)
    model, tokenizer = load(save(model, tmp_path, with_bos(CHAT)))
    judge = RewardModel(model, tokenizer, plain_text=True)
    prompts = [chat_prompt("abc"), chat_prompt("f", "k\n")]
    grades = judge.grade([("test", r, "", {}) for r in ("de", "g")], prompts)
    for prompt, response, grade in zip(prompts, ("de", "k\ng"), grades, strict=True):
        chat = [*prompt.messages, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
        single = model.score(model.model(input_ids=ids).last_hidden_state)[0, -1, 0]
        assert grade.score == pytest.approx(single.item(), abs=1e-5)
        assert ids[0].tolist().count(tokenizer.bos_token_id) == 2  # one for each message


def test_texts_of_a_reward_model_without_a_template() -> None:
    """It reads contents without foreign markup, its first token once, and its end token."""
    tokenizer = with_bos(None)
    bos, known = tokenizer.bos_token_id, {w: i for i, w in enumerate(WORDS)}

    def ids(text: str) -> list[int]:
        return [bos, *(known[c] for c in text), known["[eos]"]]

    model = random_model(vocab_size=len(WORDS) + 1)
    foreign = RewardModel(model, tokenizer, plain_text=True, foreign_tokens=["<|k|>"])
    assert foreign.encode(["<|k|>c"], [chat_prompt("ab")]) == [ids("ab\nc")]
    same = RewardModel(model, tokenizer)
    text = Prompt((), "[bos]ab", "", "test", {}, 0)
    assert same.encode(["c"], [text]) == [ids("abc")] == same.encode(["bc[eos]"], [_without(text)])


def _without(prompt: Prompt) -> Prompt:
    return replace(prompt, text="a")


def test_failures_have_no_score_and_are_reported() -> None:
    model = random_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS.index("t")] = math.nan
    judge = RewardModel(model, characters())
    grades = judge.grade(*batch(["a", "abt", "b" * 60, "b"]))
    assert [g.failed for g in grades] == [False, True, True, False]
    assert math.isnan(grades[1].score) and math.isnan(grades[2].score)
    # The products of one row and of four may be rounded differently.
    assert grades[0].score == pytest.approx(judge.grade(*batch(["a"]))[0].score, rel=1e-4) != 0
    assert judge.failures == 2
    sample = "sample 1 of 4 (data_source = test, ground_truth = '', response = 'abt')"
    assert judge.last_failure == f"{sample}: the model's score is nan"
    judge.grade(*batch(["a"]))
    judge.grade(*batch(["b" * 60]))
    assert judge.failures == 3
    assert str(judge.last_failure).endswith("): the text has 65 tokens, the model's limit is 64")
