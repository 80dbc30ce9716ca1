"""Final answers as people and policies write them: a table of results, and linear time."""

from __future__ import annotations

import random
import time
from decimal import Decimal

from run_helpers import tables

from embodied_ppo.rollout.rewards.answers import final_statement, read_number
from embodied_ppo.rollout.rewards.graders import gsm8k_numeric

# What follows the marker -> the number that it states, or None where it is no answer.
NUMERIC: dict[str, str | None] = tables(__file__)["numeric"]


def graded(answer: str, truth: str) -> tuple[float, str | None, bool]:
    result = gsm8k_numeric(solution_str=f"3 * 4 = 12, so\n####{answer}", ground_truth=truth)
    return result["score"], result["pred"], result["format"]


def test_numeric_answers() -> None:
    for answer, number in NUMERIC.items():
        for truth in {"12", "7", "36", "1234", number or "12"}:
            expected = float(truth == number), number, number is not None
            assert graded(answer, truth) == expected, answer


def test_random_numbers_in_every_format() -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = Decimal(rng.randrange(10 ** rng.randrange(1, 13))) / rng.choice((1, 1, 10, 100))
        sign = rng.choice(("", "-"))
        for written in (f"{value:f}", f"{value:,f}", f"{value:,f}".replace(",", " ")):
            for text in (
                sign + written,
                f"x = {sign}{written}",
                f"{sign}${written}.",
                f"{sign}{written} apples",
            ):
                number = read_number(text)
                assert number is not None and Decimal(number) == Decimal(f"{sign}{value}"), text
                assert read_number(f"{text} or {rng.randrange(100)}") is None, text


REPEATED: list[str] = tables(__file__)["repeated"]


def test_reading_takes_linear_time() -> None:
    """The time for repetitive responses is proportional to their length."""
    for text in REPEATED:
        text = text * (20_000 // len(text))
        start = time.process_time()
        for response in (f"#### {text}", f"#### 12{text}", f"#### {text}12 ^", f"{text}#### 12"):
            gsm8k_numeric(solution_str=response, ground_truth="12")
        assert time.process_time() - start < 2, text[:9]


def test_final_statement_is_one_paragraph() -> None:
    assert final_statement("#### a\n\nb 1\nc\n\nd 2") == " a\n\nb 1\nc"
    assert final_statement("no marker 1") is None and final_statement("#### a\n#### b") is None
