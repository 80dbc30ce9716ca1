"""Generated problems, their demonstrator and grader, and the character tokenizer."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from embodied_ppo.core.types import ConfigError
from embodied_ppo.data import prompts, synthetic_tasks
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.data.synthetic_tasks import TASKS, VOCABULARY, Problem, Task
from embodied_ppo.rewards import graders

ARITHMETIC, SCRATCHPAD = TASKS["arithmetic"], TASKS["scratchpad"]
TOKENIZER = synthetic_tasks.tokenizer()
SPLITS = {name: (task.problems("train"), task.problems("held_out")) for name, task in TASKS.items()}


def always() -> bool:
    return True


def score(task: Task, response: str, answer: str) -> float:
    return synthetic_tasks.grade(task.name, response, answer)["score"]


def needs_carry(a: int, b: int) -> bool:
    return a % 10 + b % 10 > 9 or a // 10 % 10 + b // 10 % 10 > 9


# -------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize(
    ("operands", "right", "forgetful"),
    [
        ((57, 68), "521", "510"),  # 125; forgetful: 7+8=15 -> 5, 5+6=11 -> 1, 0: 015
        ((5, 7), "210", "200"),  # 012; 5+7=12 -> 2, 0, 0: 002
        ((12, 34), "640", "640"),  # 046, nothing to carry
        ((99, 99), "891", "880"),  # 198; 18 -> 8, 18 -> 8, 0: 088
    ],
)
def test_arithmetic_by_hand(operands: tuple[int, int], right: str, forgetful: str) -> None:
    assert ARITHMETIC.write(operands, lambda: False) == right
    assert ARITHMETIC.write(operands, always) == forgetful


def test_scratchpad_by_hand() -> None:
    # 57+68 = 125, 125+90 = 215
    assert SCRATCHPAD.write((57, 68, 90), lambda: False) == "521;512#215"
    # without carries 57+68 = 15, 15+90 = 105 mod 10 in each digit: 5, 10 -> 0, 0: 5
    assert SCRATCHPAD.write((57, 68, 90), always) == "51;5#5"
    # the second sum only: 125 and 90: 5, 2+9=11 -> 1, 1: 115
    second = iter([False, True])
    assert SCRATCHPAD.write((57, 68, 90), lambda: next(second)) == "521;511#115"
    assert SCRATCHPAD.write((12, 34), always) == "64#46"
    problem = next(p for p in SPLITS["scratchpad"][0] if len(p.operands) == 3)
    assert problem.prompt == "{}+{}+{}=".format(*problem.operands)
    assert problem.answer == str(sum(problem.operands))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_problems(task: Task) -> None:
    train, held_out = SPLITS[task.name]
    assert (len(train), len(held_out)) == (task.train, task.held_out) and task.held_out == 1_000
    assert len({p.prompt for p in train} | {p.prompt for p in held_out}) == len(train) + len(
        held_out
    ), "disjoint"
    assert len({p.operands for p in train + held_out}) == len(train) + len(held_out)
    assert max(len(task.respond(p)) for p in train + held_out) + 1 == task.response_length
    if task is ARITHMETIC:
        assert len(train) + len(held_out) == 100 * 100
    else:
        shares = [sum(len(p.operands) == 2 for p in part) / len(part) for part in (train, held_out)]
        assert all(0.28 < share < 0.36 for share in shares), "both parts have as many twos"


def test_the_split_stays() -> None:
    """Figures of runs on it are comparable for ever."""
    found = {
        name: hashlib.sha256(json.dumps([p.prompt for p in held_out]).encode()).hexdigest()[:12]
        for name, (_, held_out) in SPLITS.items()
    }
    assert found == {"arithmetic": "ee2de61019f5", "scratchpad": "f9ddcbc73920"}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_who_forgets_nothing_is_right(task: Task) -> None:
    for p in SPLITS[task.name][1]:
        found = synthetic_tasks.grade(task.name, task.respond(p), p.answer)
        assert found == {"score": 1.0, "acc": True, "pred": p.answer, "format": True}
        again = synthetic_tasks.demonstrations(task, [p], 1, seed=0, forget=0.0)
        assert again == [(p.prompt, task.respond(p))]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_one_more_or_less_in_the_answer_is_wrong(task: Task) -> None:
    for p in SPLITS[task.name][1]:
        right = task.respond(p)
        for i in range(len(right) - len(p.answer), len(right)):
            other = str((int(right[i]) + 1) % 10)
            assert score(task, right[:i] + other + right[i + 1 :], p.answer) == 0
        for wrong in (
            right[:-1],
            right + "0",
            right + " ",
            "",
            " " + p.answer,
            right + "#",
            "#" + p.answer[::-1] + "#",
        ):
            assert score(task, wrong, p.answer) == 0, (p, wrong)


@pytest.mark.parametrize("chance", [None, 0.2])
def test_how_often_the_demonstrator_forgets(chance: float | None) -> None:
    """Seen where a carry is needed: 4 standard errors of sqrt(p (1 - p) / n) with n > 6,000 are
    below 0.025.
    """
    pairs = synthetic_tasks.demonstrations(
        ARITHMETIC, SPLITS["arithmetic"][0], 10_000, seed=1, forget=chance
    )
    seen = [
        response == ARITHMETIC.write((a, b), always)
        for prompt, response in pairs
        for a, b in [tuple(map(int, prompt[:-1].split("+")))]
        if needs_carry(a, b)
    ]
    assert (
        len(seen) > 6_000
        and abs(sum(seen) / len(seen) - (0.7 if chance is None else chance)) < 0.025
    )
    wrong = both = 0
    three = [
        p for p in SPLITS["scratchpad"][0] if len(p.operands) == 3 and needs_carry(*p.operands[:2])
    ]
    for prompt, response in synthetic_tasks.demonstrations(
        SCRATCHPAD, three, 8_000, seed=1, forget=chance
    ):
        a, b, c = map(int, prompt[:-1].split("+"))
        sums = [int(s[::-1]) for s in response.partition("#")[0].split(";")]
        assert len(sums) == 2 and int(response.partition("#")[2]) == sums[1]
        wrong += sums[0] != a + b
        both += sums[0] != a + b and needs_carry(sums[0], c) and sums[1] != sums[0] + c
    chance = 0.6 if chance is None else chance
    assert abs(wrong / 8_000 - chance) < 0.025
    assert 0 < both / wrong < chance, (
        "the second sum is forgotten independently, and seen where it needs a carry"
    )


def test_demonstrations_depend_on_the_seed_and_are_quick() -> None:
    train = SPLITS["scratchpad"][0]
    began = time.process_time()
    many = synthetic_tasks.demonstrations(SCRATCHPAD, train, 64_000, seed=0)
    assert time.process_time() - began < 3 and len(many) == 64_000
    assert synthetic_tasks.demonstrations(SCRATCHPAD, train, 100, seed=0) != many[:100], (
        "another count, another draw"
    )
    assert synthetic_tasks.demonstrations(SCRATCHPAD, train, 64_000, seed=0)[:100] == many[:100]
    assert synthetic_tasks.demonstrations(SCRATCHPAD, train, 64_000, seed=1)[:100] != many[:100]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_preferences(task: Task) -> None:
    train = SPLITS[task.name][0]
    answers = {p.prompt: p for p in train}
    found = synthetic_tasks.preferences(task, train, 4_000, seed=3)
    assert len(found) == 4_000 and found == synthetic_tasks.preferences(task, train, 4_000, seed=3)
    unfinished = forgetful = 0
    for prompt, better, worse in found:
        problem = answers[prompt]
        assert score(task, better, problem.answer) == 1 and score(task, worse, problem.answer) == 0
        assert worse and len(worse) < task.response_length
        unfinished += better.startswith(worse)
        forgetful += worse == task.write(problem.operands, always)
    assert 0.08 < unfinished / 4_000 < 0.12
    assert forgetful > 400, "the mistakes that the demonstrator makes are among them"


# ------------------------------------------------------------------------------------------- grader
def test_grades() -> None:
    grader = graders.resolve("embodied_ppo.data.synthetic_tasks:grade")

    def judged(source: str, response: str, truth: str) -> graders.Grade:
        made, cause = graders.judge(grader, (source, response, truth, {}))
        assert cause is None
        return made

    assert judged("arithmetic", "521", "521") == graders.Grade(1.0, "521", True, True)
    assert judged("arithmetic", "52", "521") == graders.Grade(0.0, "52", False, False)
    # what stands before the mark is not looked at
    assert judged("scratchpad", "123#215", "215") == graders.Grade(1.0, "215", True, True)
    assert judged("scratchpad", "1#2#215", "215") == graders.Grade(1.0, "215", True, False), (
        "two marks: no format"
    )
    assert judged("scratchpad", "521#512", "215") == graders.Grade(0.0, "512", False, True), (
        "the digits turned round"
    )
    assert judged("scratchpad", "215", "215") == graders.Grade(0.0, None, False, False)
    assert judged("scratchpad", "521#", "215") == graders.Grade(0.0, "", False, False)
    failed, cause = graders.judge(grader, ("gsm8k", "1", "1", {}))
    assert (
        failed.failed and cause is not None and "'gsm8k' is none of arithmetic, scratchpad" in cause
    )


# ------------------------------------------------------------------------------------------- tokens
def test_a_character_is_a_token(tmp_path: Path) -> None:
    assert len(VOCABULARY) == len(TOKENIZER) == 24
    TOKENIZER.save_pretrained(tmp_path)
    for tok in (TOKENIZER, AutoTokenizer.from_pretrained(tmp_path)):
        assert tok(VOCABULARY)["input_ids"] == list(range(24)), "nothing is added"
        assert tok.decode(list(range(24))) == VOCABULARY
        assert (tok.pad_token_id, tok.bos_token_id, tok.eos_token_id) == (
            synthetic_tasks.PAD,
            synthetic_tasks.BOS,
            synthetic_tasks.EOS,
        )
        assert tok.unk_token is None
        assert tok("57+68=")["input_ids"] == [8, 10, 13, 9, 11, 16]
        assert tok.decode([8, 5, 4, 2, 0], skip_special_tokens=True) == "521"


@given(st.text(VOCABULARY, max_size=40))
def test_texts_come_back(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text
    assert synthetic_tasks.encode([text], TOKENIZER) == [tuple(VOCABULARY.index(c) for c in text)]


def test_other_characters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token for 'a', 'é'"):
        synthetic_tasks.encode(["1+1=", "1aé"], TOKENIZER)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "12+34=", "answer": "640"}\n{"prompt": "what?", "answer": "640"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: the tokenizer refuses .what\?"):
        prompts.load_prompts(file, TOKENIZER, prompt_length=9, chat_template="auto", system=None)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_prompts(task: Task) -> None:
    found = prompts.task_prompts(task, "held_out", TOKENIZER)
    assert len(found) == task.held_out and [p.index for p in found] == list(range(task.held_out))
    p: Problem = SPLITS[task.name][1][7]
    ids = tuple(VOCABULARY.index(c) for c in p.prompt)
    assert found[7] == Prompt(ids, p.prompt, p.answer, task.name, {}, 7)
