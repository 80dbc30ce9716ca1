"""Tests of prompt evaluation: hand-computed metrics, and pass@k by enumeration of subsets."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest

from embodied_envs.base.errors import TrainingError
from embodied_ppo.evaluation.prompt_evaluation import (
    PromptEvaluationResult,
    evaluate_prompts,
    majority,
    pass_at_k,
)
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.rewards.graders import FAILED, Grade
from embodied_ppo.training.logging import numbers
from tests.rollout.test_language_rollout import (
    ANSWERS,
    PROMPTS,
    FixedGraders,
    ScriptedGenerator,
    decode,
)


def right(answer: str) -> Grade:
    return Grade(1.0, answer=answer, correct=True, format_ok=True)


def wrong(answer: str | None) -> Grade:
    return Grade(0.25, answer=answer, correct=False, format_ok=answer is not None)


def evaluated(
    count: int, grades: list[Grade], temperature: float = 0.7, **options: Any
) -> PromptEvaluationResult:
    """Return the result of graded responses to the first ``count`` prompts."""
    sampling, generator = Sampling(4, temperature=temperature), ScriptedGenerator(ANSWERS, 4)
    graders = FixedGraders(grades)
    return evaluate_prompts(PROMPTS[:count], generator, graders, decode, sampling, **options)


def test_metrics_against_hand_computed_numbers() -> None:
    """Of four answers to each of two prompts, 3 and 1 are right."""
    grades = [right("a"), right("a"), wrong("b"), right("a")]
    grades += [wrong("c"), wrong("c"), right("d"), wrong(None)]
    generator = ScriptedGenerator(ANSWERS, 4)
    result = evaluate_prompts(
        PROMPTS[:2], generator, FixedGraders(grades), decode, Sampling(4, temperature=0.7), n=4
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


def test_failed_responses_are_in_no_mean() -> None:
    """Of four answers to each of two prompts, 2 of 2 and 1 of 3 graded ones are right."""
    grades = [right("a"), FAILED, right("b"), FAILED]
    grades += [wrong("c"), replace(right("d"), extra={"steps": 3.0}), wrong("c"), FAILED]
    result = evaluated(2, grades, n=4)
    metrics = numbers(result.metrics())
    assert metrics["eval/accuracy"] == pytest.approx((1 + 1 / 3) / 2)
    assert metrics["eval/return"] == pytest.approx((3 + 2 * 0.25) / 5)
    assert metrics["eval/grader_failures"] == 3 and metrics["eval/reward/steps"] == 3
    # Both prompts have two graded answers, none has four: 1 and 1 - C(2,2)/C(3,2) = 2/3.
    assert metrics["eval/pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert math.isnan(metrics["eval/pass@4"])
    assert [e.return_ for r in result.results() for e in r.episodes] == [1, 1, 0.25, 1, 0.25]
    assert len(result.samples()) == 5


def test_accuracy_of_each_data_source() -> None:
    result = evaluated(3, [right("a"), right("a"), wrong("b")])
    metrics = numbers(result.metrics())
    assert metrics["eval/accuracy/source 0"] == 1 and metrics["eval/accuracy/source 1"] == 0
    assert "eval/maj@1" not in metrics and "eval/pass@1" not in metrics
    # A source without a graded response has no result.
    result = evaluated(3, [right("a"), wrong("b"), FAILED])
    assert [r.task for r in result.results()] == ["source 0"]
    with pytest.raises(TrainingError, match="3 of 3 responses of the evaluation"):
        evaluated(3, [FAILED] * 3)


def test_results_have_the_form_of_episodes() -> None:
    grades = [wrong("a"), right("b"), right("c"), right("d"), wrong(None), wrong("e")]
    first, second = evaluated(3, grades, n=2, seed=5).results()  # prompts 0 and 1, prompt 2
    assert (first.task, second.task) == ("source 0", "source 1")
    assert not first.deterministic and first.seed == 5
    assert first.returns == [0.25, 1, 1, 1] and second.successes == [False, False]
    assert first.lengths == [3, 4, 1, 4] and second.lengths == [3, 4]
    assert [e.ended == "truncated" for e in first.episodes] == [False, True, False, False]
    assert first.distinct_initial_states == 2
    assert first.episodes[0].initial_state == hashlib.sha256(b"pp").hexdigest()
    assert evaluated(1, [right("a")], temperature=0.0).results()[0].deterministic


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


def test_majority() -> None:
    assert majority(["7", "8", "8"], [True, False, False]) is False
    assert majority(["7", "8", "7"], [True, False, True]) is True
    # The first answer wins a tie.
    assert majority(["7", "8"], [True, False]) is True
    assert majority(["8", "7"], [False, True]) is False
    # None wins only if there is no answer.
    assert majority([None, None, "7"], [False, False, True]) is True
    assert majority([None, None], [False, False]) is False
