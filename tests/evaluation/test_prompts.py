"""Tests of prompt evaluation: hand-computed metrics, and pass@k by enumeration of subsets."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest

from embodied_ppo.core.types import ConfigError
from embodied_ppo.evaluation.prompts import evaluate_prompts, majority, pass_at_k, standard_error
from embodied_ppo.rewards.graders import Grade
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.training.logging import numbers
from tests.rollout.test_language import ANSWERS, PROMPTS, ScriptedGenerator, decode


class FixedGrades:
    """Graders that return given grades."""

    failures, last_failure = 0, ""

    def __init__(self, grades: list[Grade]) -> None:
        self.grades = grades

    def grade(self, samples: Any, prompts: Any) -> list[Grade]:
        assert len(samples) == len(prompts) == len(self.grades)
        return self.grades

    def close(self) -> None: ...


def right(answer: str) -> Grade:
    return Grade(1.0, answer=answer, correct=True, format_ok=True)


def wrong(answer: str | None) -> Grade:
    return Grade(0.25, answer=answer, correct=False, format_ok=answer is not None)


def test_metrics_against_hand_computed_numbers() -> None:
    """Of four answers to each of two prompts, 3 and 1 are right."""
    grades = [right("a"), right("a"), wrong("b"), right("a")]
    grades += [wrong("c"), wrong("c"), right("d"), wrong(None)]
    generator = ScriptedGenerator(ANSWERS, 4)
    result = evaluate_prompts(
        PROMPTS[:2], generator, FixedGrades(grades), decode, Sampling(4, temperature=0.7), n=4
    )
    metrics = numbers(result.metrics())
    assert metrics["eval/accuracy"] == pytest.approx(0.5)
    assert metrics["eval/accuracy_error"] == pytest.approx(math.sqrt(0.25**2 * 2) / 2)
    assert metrics["eval/return"] == pytest.approx(0.625)
    assert metrics["eval/format"] == pytest.approx(7 / 8)
    # 1 - C(1,2)/C(4,2) = 1 and 1 - C(3,2)/C(4,2) = 1/2
    assert metrics["eval/pass@2"] == pytest.approx(0.75) and metrics["eval/pass@4"] == 1
    assert metrics["eval/maj@4"] == pytest.approx(0.5), "the majorities are a and c"
    assert metrics["eval/truncated"] == pytest.approx(2 / 8) and metrics["eval/length"] == 3
    assert not [tag for tag in metrics if tag.startswith("eval/accuracy/")], "there is one source"
    prompts, _, samples = generator.calls[0]
    assert len(prompts) == 8 and int(samples.min()) >= 1 << 40


def test_accuracy_of_each_data_source() -> None:
    result = evaluate_prompts(
        PROMPTS[:3:2],
        ScriptedGenerator(ANSWERS, 4),
        FixedGrades([right("a"), wrong("b")]),
        decode,
        Sampling(4),
    )
    metrics = numbers(result.metrics())
    assert metrics["eval/accuracy/source 0"] == 1 and metrics["eval/accuracy/source 1"] == 0
    assert "eval/maj@1" not in metrics and "eval/pass@1" not in metrics


def test_results_have_the_form_of_episodes() -> None:
    grades = [wrong("a"), right("b"), right("c"), right("d"), wrong(None), wrong("e")]
    result = evaluate_prompts(
        PROMPTS[:3],
        ScriptedGenerator(ANSWERS, 4),
        FixedGrades(grades),
        decode,
        Sampling(4),
        n=2,
        seed=5,
    )
    first, second = result.results()  # prompts 0 and 1, prompt 2
    assert (first.task, second.task) == ("source 0", "source 1")
    assert not first.deterministic and first.seed == 5
    assert [e.index for e in first.episodes] == [0, 1, 2, 3] and first.returns == [0.25, 1, 1, 1]
    assert first.successes == [False, True, True, True] and second.successes == [False, False]
    assert first.lengths == [3, 4, 1, 4] and second.lengths == [3, 4]
    assert [e.ended == "truncated" for e in first.episodes] == [False, True, False, False]
    assert first.distinct_initial_states == 2 and second.distinct_initial_states == 1
    assert first.episodes[0].initial_state == hashlib.sha256(b"pp").hexdigest()
    assert first.episodes[0].kind is None
    assert {e.seed for e in first.episodes} == {5}
    greedy = evaluate_prompts(
        PROMPTS[:1],
        ScriptedGenerator(ANSWERS, 4),
        FixedGrades([right("a")]),
        decode,
        Sampling(4, temperature=0.0),
    )
    assert greedy.results()[0].deterministic


def test_samples_for_the_report() -> None:
    """Of 12 answers 1, 4, 7 and 10 are right."""
    prompts = [PROMPTS[i % 4] for i in range(12)]
    grades = [right(str(i)) if i % 3 == 1 else wrong(None) for i in range(12)]
    result = evaluate_prompts(
        prompts, ScriptedGenerator(ANSWERS, 4), FixedGrades(grades), decode, Sampling(4)
    )
    assert result.samples(1)[0] == {
        "prompt": "pp",
        "response": "FG",
        "ground_truth": "",
        "answer": None,
        "score": 0.25,
        "right": False,
        "length": 3,
        "stopped": True,
        "data_source": "source 0",
    }
    assert [s["answer"] for s in result.samples(6)] == [None, "1", None, "4", "7", None]
    assert [s["right"] for s in result.samples(10)].count(True) == 4, "all right answers"
    assert len(result.samples()) == 12 and result.samples(0) == []
    all_right = evaluate_prompts(
        PROMPTS,
        ScriptedGenerator(ANSWERS, 4),
        FixedGrades([right(str(i)) for i in range(4)]),
        decode,
        Sampling(4),
    )
    assert [s["answer"] for s in all_right.samples(2)] == ["0", "2"]


# --------------------------------------------------------------------------------------- statistics
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 3 of the 6 pairs contain it
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                share = sum(any(i < c for i in s) for s in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)
    # C(10000, 5000) is larger than the largest float.
    exact = 1 - Decimal(math.comb(9990, 5000)) / Decimal(math.comb(10000, 5000))
    assert pass_at_k(10000, 10, 5000) == pytest.approx(float(exact), rel=1e-12)
    assert pass_at_k(7, 7, 1) == 1.0 and pass_at_k(7, 0, 7) == 0.0
    for n, c, k in ((4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)):
        with pytest.raises(ConfigError, match="pass@k"):
            pass_at_k(n, c, k)


def test_majority() -> None:
    assert majority(["7", "8", "8"], [True, False, False]) is False
    assert majority(["7", "8", "7"], [True, False, True]) is True
    # The first answer wins a tie.
    assert majority(["7", "8"], [True, False]) is True
    assert majority(["8", "7"], [False, True]) is False
    # None wins only if there is no answer.
    assert majority([None, None, "7"], [False, False, True]) is True
    assert majority([None, None], [False, False]) is False
    with pytest.raises(ConfigError, match="maj@k: 0 answers"):
        majority([], [])
    with pytest.raises(ConfigError, match="maj@k: 2 answers and 1 verdicts"):
        majority(["7", "8"], [True])


def test_standard_error() -> None:
    # p = 3/4, n = 4: sqrt(0.75 * 0.25 / 4)
    assert standard_error([1, 1, 1, 0]) == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    # deviations 1 and 1, n = 2
    assert standard_error([2.0, 4.0]) == pytest.approx(math.sqrt(1 / 2))
    assert math.isnan(standard_error([1.0])) and standard_error([5.0, 5.0]) == 0
