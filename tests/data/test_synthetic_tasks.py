"""Generated problems, their demonstrator and grader, and the character tokenizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

from embodied_ppo.data import prompts, synthetic_tasks
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.data.synthetic_tasks import TASKS, VOCABULARY, Problem, Task
from embodied_ppo.rollout.rewards import graders

ARITHMETIC, SCRATCHPAD = TASKS["arithmetic"], TASKS["scratchpad"]
TOKENIZER = synthetic_tasks.tokenizer()
SPLITS = {name: (task.problems("train"), task.problems("held_out")) for name, task in TASKS.items()}


def always() -> bool:
    return True


def grade(task: Task, response: str, answer: str) -> dict[str, Any]:
    return synthetic_tasks.grade(task.name, solution_str=response, ground_truth=answer)


def score(task: Task, response: str, answer: str) -> float:
    return grade(task, response, answer)["score"]


# -------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize(
    ("operands", "correct", "forgetful"),
    [
        ((57, 68), "521", "510"),  # 125; forgetful: 7+8=15 -> 5, 5+6=11 -> 1, 0: 015
        ((5, 7), "210", "200"),  # 012; 5+7=12 -> 2, 0, 0: 002
        ((12, 34), "640", "640"),  # 046, nothing to carry
        ((99, 99), "891", "880"),  # 198; 18 -> 8, 18 -> 8, 0: 088
    ],
)
def test_arithmetic_by_hand(operands: tuple[int, int], correct: str, forgetful: str) -> None:
    assert ARITHMETIC.write(operands, lambda: False) == correct
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
    problems = train + held_out
    assert len({p.prompt for p in problems}) == len(problems), "the parts are disjoint"
    assert len({p.operands for p in problems}) == len(problems)
    longest = max(len(task.write(p.operands, lambda: False)) for p in problems)
    assert longest + 1 == task.response_length
    if task is ARITHMETIC:
        assert len(problems) == 100 * 100
    else:
        shares = [sum(len(p.operands) == 2 for p in part) / len(part) for part in (train, held_out)]
        assert all(0.28 < share < 0.36 for share in shares), "both parts have as many pairs"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_responses_without_forgotten_carries_are_correct(task: Task) -> None:
    for p in SPLITS[task.name][1]:
        result = grade(task, task.write(p.operands, lambda: False), p.answer)
        assert result == {"score": 1.0, "acc": True, "pred": p.answer, "format": True}
        demonstrations = synthetic_tasks.demonstrations(replace(task, forget=0.0), [p], 1, seed=0)
        assert demonstrations == [(p.prompt, task.write(p.operands, lambda: False))]


# ------------------------------------------------------------------------------------------- grader
@pytest.mark.parametrize(
    ("source", "response", "truth", "expected"),
    [
        ("arithmetic", "521", "521", (1.0, "521", True, True)),
        ("arithmetic", "52", "521", (0.0, "52", False, False)),
        # The text before the mark is ignored; two marks are no valid format.
        ("scratchpad", "123#215", "215", (1.0, "215", True, True)),
        ("scratchpad", "1#2#215", "215", (1.0, "215", True, False)),
        ("scratchpad", "521#512", "215", (0.0, "512", False, True)),  # reversed digits
        ("scratchpad", "215", "215", (0.0, None, False, False)),
        ("scratchpad", "521#", "215", (0.0, "", False, False)),
    ],
)
def test_grades(source: str, response: str, truth: str, expected: tuple[Any, ...]) -> None:
    grader = graders.resolve(partial(synthetic_tasks.grade, source))
    result = graders.grade_sample(grader, (source, response, truth, {}))
    assert result == (graders.Grade(*expected), None)


# ------------------------------------------------------------------------------------------- tokens
def test_a_character_is_a_token(tmp_path) -> None:
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


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_prompts(task: Task) -> None:
    result = prompts.task_prompts(task, "held_out", TOKENIZER)
    assert len(result) == task.held_out and [p.index for p in result] == list(range(task.held_out))
    p: Problem = SPLITS[task.name][1][7]
    ids = tuple(VOCABULARY.index(c) for c in p.prompt)
    assert result[7] == Prompt(ids, p.prompt, p.answer, task.name, {}, 7)
