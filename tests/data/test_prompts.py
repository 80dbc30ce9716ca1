"""Prompts: layouts of files, the tokenizer, and the order of batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import tables

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.data.prompt_rows import GSM8K_SUFFIX, read_rows
from embodied_ppo.data.prompts import Prompt, Sampler, learnability, load_prompts
from embodied_ppo.options.schema import DataConfig

TABLES = tables(__file__)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
GSM8K = TABLES["gsm8k"]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(3)
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer with one token per character; [bos] is its first special token."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    words = ["[pad]", "[bos]", "[eos]", "[unk]", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    core.post_processor = TemplateProcessing(single="[bos] $A", special_tokens=[("[bos]", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[pad]",
        bos_token="[bos]",
        eos_token="[eos]",
        unk_token="[unk]",
    )


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


# ------------------------------------------------------------------------------------------ layouts
def test_gsm8k(tmp_path) -> None:
    rows = read_rows(write(tmp_path / "train.jsonl", GSM8K))
    assert [r.ground_truth for r in rows] == ["1200", "-5"]
    assert {(r.data_source, r.suffix) for r in rows} == {("openai/gsm8k", GSM8K_SUFFIX)}
    assert rows[1].prompt == GSM8K[1]["question"] and not rows[1].extra
    assert rows[1].location == f"{tmp_path}/train.jsonl:2"
    assert GSM8K_SUFFIX == ' Let\'s think step by step and output the final answer after "####".'


def test_plain_rows(tmp_path) -> None:
    sums = [{"prompt": "1+1=", "answer": x, "level": "easy"} for x in (2, 3.0, 1e-05)]
    row, *others = read_rows(write(tmp_path / "sums.jsonl", sums))
    assert [other.ground_truth for other in others] == ["3", "0.00001"]
    assert (row.prompt, row.ground_truth, row.data_source, row.suffix) == ("1+1=", "2", "sums", "")
    assert row.extra == {"level": "easy"}
    chat = [{"role": "user", "content": "hi"}]
    both = {"prompt": chat, "ground_truth": "a", "answer": "b", "data_source": "mine"}
    (row,) = read_rows(write(tmp_path / "both.jsonl", [both]))
    assert (row.ground_truth, row.data_source, row.prompt) == ("a", "mine", chat)
    (row,) = read_rows(tmp_path / "both.jsonl", answer_key="answer")
    assert row.ground_truth == "b"
    (row,) = read_rows(
        write(tmp_path / "own.jsonl", [{"problem": "p", "gold": "g"}]),
        prompt_key="problem",
        answer_key="gold",
    )
    assert (row.prompt, row.ground_truth, row.extra) == ("p", "g", {})


USER, SYSTEM = {"role": "user", "content": "q"}, {"role": "system", "content": "s"}
# Name of a layout -> row, prompt, correct answer.
LAYOUTS: dict[str, tuple[dict[str, Any], Any, str]] = TABLES["layouts"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_other_trainers(name: str, tmp_path) -> None:
    row, prompt, truth = LAYOUTS[name]
    (read,) = read_rows(write(tmp_path / "f.jsonl", [row]))
    assert (read.prompt, read.ground_truth) == (prompt, truth)
    assert read.response == ("a" if name.startswith("messages") else truth)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER]},
        {"prompt": "q", "chosen": "c", "rejected": "r"},
        {"prompt": [USER], "reward_model": {"ground_truth": " "}},
    ],
)
def test_rows_without_an_answer(row: dict[str, Any], tmp_path) -> None:
    file = write(tmp_path / "f.jsonl", [row])
    (read,) = read_rows(file, needs_answer=False)
    assert read.ground_truth == "" and read.prompt in ("q", [USER])
    with pytest.raises(ConfigError, match=r"f.jsonl:1: "):
        read_rows(file)


def test_verl_rows_in_every_format(tmp_path) -> None:
    expected = [([{"role": "user", "content": f"What is {i}+1?"}], str(i + 1)) for i in range(3)]
    array = tmp_path / "a.json"
    array.write_text(json.dumps(VERL, indent=1))
    for file in (write(tmp_path / "l.jsonl", VERL), array):
        rows = read_rows(str(file))
        assert [(r.prompt, r.ground_truth) for r in rows] == expected
        assert rows[2].extra == {"split": "train", "index": 2}
        assert rows[2].data_source == "openai/gsm8k"
    assert read_rows(array)[2].location == f"{array} row 2"


def test_parquet(tmp_path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(VERL * 50), file, row_group_size=40)
    rows = read_rows(file)
    assert len(rows) == 150 and [r.ground_truth for r in rows[:4]] == ["1", "2", "3", "1"]
    assert rows[149].extra == {"split": "train", "index": 2}
    assert rows[149].location == f"{file} row 149"
    assert rows[0].prompt == VERL[0]["prompt"]
    file.write_text("not parquet")
    with pytest.raises(ConfigError, match=r"train\.parquet"):
        read_rows(file)


def test_several_files_and_directories(tmp_path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": "1"}] * 2)
    write(tmp_path / "c.txt", [{"prompt": "c", "answer": "1"}])
    assert [r.prompt for r in read_rows(tmp_path)] == ["a", "a", "b", "b"]
    rows = read_rows({str(tmp_path / "c.txt"): 3.0, str(tmp_path): 0.5})
    assert "".join(str(r.prompt) for r in rows) == "caabb"
    assert [r.weight for r in rows] == [3, 0.5, 0.5, 0.5, 0.5]


def test_unusual_line_ends(tmp_path) -> None:
    """Covers a byte order mark, blank lines, line ends of Windows, and U+2028, which is none."""
    file = tmp_path / "odd.jsonl"
    rows = '{"prompt": "a\u2028b", "answer": "1"}', "", '{"prompt": "c", "answer": "2"}', ""
    file.write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    expected = [("a\u2028b", ":1"), ("c", ":3")]
    assert [(r.prompt, r.location[-2:]) for r in read_rows(file)] == expected


@pytest.mark.parametrize(("text", "named"), TABLES["invalid"])
def test_invalid_rows_are_refused(tmp_path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_rows(lines(tmp_path / "f.jsonl", text))


def test_invalid_paths_are_refused(tmp_path) -> None:
    write(tmp_path / "train.jsonl", GSM8K)
    with pytest.raises(ConfigError, match=r"trian\.jsonl.*train\.jsonl"):
        read_rows(tmp_path / "trian.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty"):
        read_rows(tmp_path / "empty")
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match=r"b\.jsonl.*UTF-8"):
        read_rows(tmp_path / "b.jsonl")


# ------------------------------------------------------------------------------------------ prompts
def load(file: Path, tokenizer: Any, **options: Any) -> tuple[list[Prompt], int]:
    """Return ``load_prompts`` with options of section ``data``."""
    length = options.pop("prompt_length", 200)
    return load_prompts(file, tokenizer, DataConfig(**options), prompt_length=length)


def test_plain_prompts(tokenizer: Any, tmp_path) -> None:
    rows = [{"prompt": p, "answer": "x", "level": 1} for p in ("1+1=", "10+10=", "2=")]
    prompts, dropped = load(write(tmp_path / "sums.jsonl", rows), tokenizer, prompt_length=5)
    assert dropped == 1 and [(p.index, p.text) for p in prompts] == [(0, "1+1="), (2, "2=")]
    first = prompts[0]
    assert first.ids == (1, *(4 + ord(c) - 32 for c in "1+1="))  # with the tokenizer's [bos]
    assert (first.ground_truth, first.data_source, first.extra) == ("x", "sums", {"level": 1})


def test_chat_prompts(chat_tokenizer: Any, tmp_path) -> None:
    file = write(tmp_path / "train.jsonl", GSM8K)
    prompts, dropped = load(file, chat_tokenizer)
    question = GSM8K[1]["question"] + GSM8K_SUFFIX
    text = f"<u>{question}|<a>"
    assert dropped == 0 and prompts[1].text == text
    assert chat_tokenizer.decode(prompts[1].ids).replace(" ", "") == text.replace(" ", "")
    assert prompts[1].ids[0] != 1
    chat = [{"role": "user", "content": question}]
    expected = chat_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert prompts[1].ids == tuple(expected["input_ids"])
    (plain, _), _ = load(file, chat_tokenizer, chat_template="never")
    assert plain.text == GSM8K[0]["question"] + GSM8K_SUFFIX and plain.ids[0] == 1


@pytest.mark.parametrize("prefix", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_start_of_a_response_that_the_template_writes(
    prefix: str, chat_tokenizer: Any, tmp_path
) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'].upper() }}: {{ m['content'] }}|{% endfor %}"
        f"{{% if add_generation_prompt %}}ASSISTANT: {prefix}{{% endif %}}"
    )
    file = write(tmp_path / "f.jsonl", [{"prompt": [SYSTEM, USER], "answer": "1"}])
    (prompt,), _ = load(file, chat_tokenizer)
    assert (prompt.prefix, prompt.messages) == (prefix, [SYSTEM, USER])
    assert prompt.text == f"SYSTEM: s|USER: q|ASSISTANT: {prefix}"
    (prompt,), _ = load(file, chat_tokenizer, chat_template="never")
    assert prompt.prefix == "" and not prompt.templated


def test_messages(chat_tokenizer: Any, tmp_path) -> None:
    messages = (("user", "a"), ("assistant", "b"), ("user", "c"))
    chat = [{"role": role, "content": content} for role, content in messages]
    file = write(tmp_path / "f.jsonl", [{"prompt": chat, "answer": "1"}])
    (prompt,), _ = load(file, chat_tokenizer, chat_template="always")
    assert prompt.text == "<u>a|<a>b|<u>c|<a>"
    (prompt,), _ = load(file, chat_tokenizer, chat_template="never")
    assert prompt.text == "a\nb\nc"


def test_prompts_that_do_not_fit_the_tokenizer_are_refused(tokenizer: Any, tmp_path) -> None:
    rows = [{"prompt": "12345678"[:n], "answer": "1"} for n in (8, 6, 7)]
    file = write(tmp_path / "f.jsonl", rows)
    message = (
        "prompt_length = 6: all 3 prompts are longer, the shortest has 7 tokens, the longest 9"
    )
    with pytest.raises(ConfigError, match=message):
        load(file, tokenizer, prompt_length=6)
    message = r"chat_template = always: the tokenizer has none; write chat_template=never"
    with pytest.raises(ConfigError, match=message):
        load(file, tokenizer, chat_template="always")


# ------------------------------------------------------------------------------------------ sampler
def test_an_epoch_has_every_row_once_in_a_new_order() -> None:
    sampler = Sampler(10, 4, seed=3)
    rows = [i for _ in range(15) for i in sampler.next()]  # 60 = 6 epochs
    epochs = [rows[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 6
    for number, epoch in enumerate(epochs):  # a function of (seed, epoch)
        generator = torch.Generator().manual_seed(sampling_key(3, "prompts", number))
        assert epoch == torch.randperm(10, generator=generator).tolist()
    assert rows[:10] != [i for _ in range(3) for i in Sampler(10, 4, seed=4).next()][:10]
    assert Sampler(10, 25, seed=3).next() == rows[:25]  # the batch does not change the order


def test_epoch_without_shuffling() -> None:
    sampler = Sampler(5, 2, seed=0, shuffle=False)
    assert sampler.epoch == 0 and [sampler.next() for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert sampler.epoch == pytest.approx(6 / 5)
    exact = Sampler(4, 4, seed=0)
    exact.next()
    assert exact.epoch == 1.0


def test_weights_are_the_mean_number_of_times_of_a_row_in_an_epoch() -> None:
    equal, plain = Sampler(4, 3, 5, weights=[1.0] * 4), Sampler(4, 3, 5)
    assert [equal.next() for _ in range(9)] == [plain.next() for _ in range(9)]
    assert equal.state() == plain.state()
    sampler, counts = Sampler(3, 1, 0, weights=[2.0, 1.0, 0.25]), []
    for epoch in range(400):
        rows = [sampler.next()[0]]
        while sampler.epoch < epoch + 1:
            rows += sampler.next()
        counts.append([rows.count(i) for i in range(3)])
    assert {tuple(x) for x in counts} == {(2, 1, 0), (2, 1, 1)}
    assert sum(x[2] for x in counts) == pytest.approx(100, abs=26)  # 3 standard deviations


def test_rows_are_drawn_by_the_variance_of_their_success() -> None:
    # Beta(1, 1), Beta(5, 5) and Beta(1, 9): 6 a b / ((a + b)(a + b + 1)).
    expected = [6 / (2 * 3), 6 * 25 / (10 * 11), 6 * 9 / (10 * 11)]
    wrong, right = torch.tensor([[0, 4, 8], [0, 4, 0]]).double()
    assert learnability(wrong, right).tolist() == pytest.approx(expected, rel=1e-14)
    sampler = Sampler(3, 3, 0, weights=[1.0, 2.0, 1.0], by_success=True)
    sampler.next(4)  # the epoch without results has row 1 twice
    sampler.record([1] * 8 + [2] * 8, [False] * 4 + [True] * 4 + [False] * 8)
    counts = torch.zeros(3)
    for epoch in range(1, 401):
        rows = sampler.next(1)
        while sampler.epoch < epoch + 1:
            rows += sampler.next(1)
        counts += torch.bincount(torch.tensor(rows), minlength=3)
    weights = torch.tensor([expected[0], 2 * expected[1], expected[2]])
    assert (counts / 400 - weights).abs().max() < 0.08
    # Earlier results count half: 4 + 1 right ones and 2 wrong ones.
    sampler.record([1, 1, 1], [True, True, True])
    assert sampler.state()["results"].tolist() == [[0, 2, 8], [0, 5, 0]]


@settings(max_examples=50)
@given(
    *(st.integers(1, 12), st.integers(1, 30), st.integers(0, 8), st.integers(0, 5), st.booleans()),
    st.sampled_from(["none", "weights", "success"]),
)
def test_resume(
    size: int, batch: int, before: int, after: int, shuffle: bool, weights: str
) -> None:
    options: dict[str, Any] = {} if weights == "none" else {"weights": [0.7 * size] * size}
    options |= {"by_success": weights == "success"}
    uninterrupted, first, second = (Sampler(size, batch, 7, shuffle, **options) for _ in range(3))
    for _ in range(before):
        rows = uninterrupted.next()
        assert first.next() == rows
        for sampler in (uninterrupted, first):
            sampler.record(rows, [i % 2 == 0 for i in rows])
    state = first.state()
    assert weights != "none" or all(type(v) is int for v in state.values())
    second.load_state(state)
    assert second.epoch == uninterrupted.epoch
    assert [second.next() for _ in range(after)] == [uninterrupted.next() for _ in range(after)]


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="size is 9, the state to continue has 10"):
        Sampler(9, 2, 0).load_state(Sampler(10, 2, 0).state())
    with pytest.raises(ConfigError, match="weighted is 1, the state to continue has 0"):
        Sampler(9, 2, 0, by_success=True).load_state(Sampler(9, 2, 0).state())
    with pytest.raises(ConfigError, match="checksum is 1, the state to continue has 2"):
        Sampler(9, 2, 0, checksum=1).load_state(Sampler(9, 2, 0, checksum=2).state())
