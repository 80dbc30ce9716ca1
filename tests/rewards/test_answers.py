"""Final answers as people and policies write them: a table of results, and linear time."""

from __future__ import annotations

import random
import time
from decimal import Decimal

from embodied_ppo.rewards.answers import final_statement, read_number
from embodied_ppo.rewards.graders import GRADERS

# What follows the marker -> the number that it states, or None where it is no answer.
NUMERIC: dict[str, str | None] = {
    # ways to write one number
    " 12": "12",
    "12": "12",
    " 12.": "12",
    " 12.00": "12",
    " 012": "12",
    " +12": "12",
    " -12": "-12",
    " \N{MINUS SIGN}12": "-12",
    " .5": "0.5",
    " 0.50": "0.5",
    " -0": "0",
    " -0.0": "0",
    " 1,234": "1234",
    " 1 234": "1234",
    " 1\N{NO-BREAK SPACE}234\N{NO-BREAK SPACE}567": "1234567",
    " 1,234,567.50": "1234567.5",
    r" $1{,}234$": "1234",
    r" 1\,234": "1234",
    # labels before it
    " x = 12": "12",
    " Answer: 42": "42",
    " The answer is 42.": "42",
    " The answer is -42": "-42",
    " Final answer:\n42": "42",
    "\n42": "42",
    "\n\n42\n": "42",
    " Final answer\n\n42": "42",
    ": 42": "42",
    " = 42": "42",
    " Total_cost = $42": "42",
    # currency, percent and units
    " $12": "12",
    " -$12": "-12",
    " $-12": "-12",
    " US$ 12.50": "12.5",
    " 12€": "12",
    " £12 per week": "12",
    " $12/hour": "12",
    " 12%": "12",
    r" 12\%": "12",
    " 12 percent": "12",
    " 12 apples": "12",
    " 12 apples a day.": "12",
    " 12cm": "12",
    " 12 km/h": "12",
    " 12-inch pipes": "12",
    " 12 (twelfths of a foot)": "12",
    # markup
    " **12**": "12",
    "** 12": "12",
    " `12`": "12",
    r" $\boxed{12}$": "12",
    r" \(12\)": "12",
    r" \text{Answer: } 12 \text{ cm}": "12",
    " 12</answer>": "12",
    " 12<|im_end|>\n": "12",
    # the statement ends with its paragraph, and the last marker with a number counts
    " 12\n\nCheck: 3 * 4 = 12.": "12",
    " 7\n#### 12": "12",
    " 12 #### 7": "7",
    " 12\n#### done": "12",
    " 12\n#### seven": None,
    # several numbers, lists and alternatives
    " 12 or 7": None,
    " 12 or seven": None,
    " 12, 7": None,
    " 12\n7": None,
    " 12\nor 7": None,
    " 12 7": None,
    " 1 2": None,
    " 1,2": None,
    " 12,34": None,
    " 1,234,5": None,
    " 1.2.3": None,
    " 12; 7": None,
    " either 12": None,
    " 12 and 5 more": None,
    r" \boxed{1}\boxed{2}": None,
    " 1**2**": None,
    " 12 12": None,
    " 2x = 12": None,
    # operators, equations and fractions
    " 12^2": None,
    " 12²": None,
    " 12 * 3 = 36": None,
    " 3 * 4": None,
    " 12 + x": None,
    " 12 x": None,
    " 12x": None,
    " 12 = x": None,
    " 12/5": None,
    " 12 1/2": None,
    " 12½": None,
    " 12 and a half": None,
    r" \frac{1}{2}": None,
    r" \sqrt{12}": None,
    " square of 12": None,
    " 1e3": None,
    " 5:30": None,
    " 12!": None,
    # ranges, approximations and negations
    " 12-15": None,
    " 12 to 15": None,
    " more than 12": None,
    " <12": None,
    " ~12": None,
    " about 12": None,
    " ±12": None,
    " not 12": None,
    " isn't 12": None,
    " - 12": None,
    " --12": None,
    " minus 12": None,
    # magnitudes
    " 12 million": None,
    " 12k": None,
    " 12M": None,
    " 12 M": None,
    " 1.2 billion": None,
    " 12 dozen": None,
    " 12万": None,
    # no number
    "": None,
    " twelve": None,
    " nan": None,
    " inf": None,
    " １２": None,
    " ١٢": None,
    " 12 or ７": None,
    " 1\N{ZERO WIDTH SPACE}2": None,
    " 0x12": None,
    " $": None,
    " -": None,
    " .": None,
}


def graded(answer: str, truth: str) -> tuple[float, str | None, bool]:
    result = GRADERS["gsm8k_numeric"]("openai/gsm8k", f"3 * 4 = 12, so\n####{answer}", truth, {})
    return result["score"], result["pred"], result["format"]


def test_numeric_answers() -> None:
    assert len(NUMERIC) >= 100
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


REPEATED = [
    "9",
    "1 ",
    "1,",
    "1,234",
    ",234",
    ".",
    "#",
    "#### 1",
    "#### ",
    "\n",
    " ",
    "a ",
    "a",
    "-",
]
REPEATED += ["**", "<", "<b>", "\\", "{", "\\boxed{", "$", "=", "_", "(", "\N{NO-BREAK SPACE}", "é"]
REPEATED += ["١", "```", "\n \n", "/a", "-ab", "!"]


def test_reading_takes_linear_time() -> None:
    """The time for repetitive responses is proportional to their length."""
    for text in REPEATED:
        text = text * (20_000 // len(text))
        start = time.process_time()
        for response in (f"#### {text}", f"#### 12{text}", f"#### {text}12 ^", f"{text}#### 12"):
            GRADERS["gsm8k_numeric"]("openai/gsm8k", response, "12", {})
        assert time.process_time() - start < 2, text[:9]


def test_final_statement_is_one_paragraph() -> None:
    assert final_statement("#### a\n\nb 1\nc\n\nd 2") == " a\n\nb 1\nc"
    assert final_statement("no marker 1") is None and final_statement("#### a\n#### b") is None
