"""Built-in graders against references and corrupted answers, and graders of users' files."""

from __future__ import annotations

import asyncio
import math
import re
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_helpers import tables

from embodied_envs.base.errors import ConfigError
from embodied_ppo.rollout.rewards import graders
from embodied_ppo.rollout.rewards.graders import GRADERS, Grade, as_grade, is_cheap

SOURCE = "openai/gsm8k"
GSM8K = ("gsm8k_strict", "gsm8k_flexible", "gsm8k_numeric")


def score(name: str, response: str, truth: str) -> float:
    return grade(name, response, truth).score


def grade(name: str, response: str, truth: str) -> Grade:
    result = GRADERS[name](
        data_source=SOURCE, solution_str=response, ground_truth=truth, extra_info={}
    )
    return as_grade(result)


# -------------------------------------------------------------------------------------------- GSM8K


def verl_strict(solution: str, truth: str) -> float:
    """Return the score of verl/utils/reward_score/gsm8k.py."""
    answer = None
    for match in re.finditer(r"#### (-?[0-9.,]+)", solution[-300:]):
        answer = match.group(1).replace(",", "").replace("$", "")
    return 1.0 if answer is not None and answer == truth else 0.0


@pytest.mark.parametrize(
    ("response", "strict", "flexible", "numeric"),
    [
        ("#### 72", 1, 1, 1),
        ("#### $72", 0, 1, 1),
        ("#### **72**", 0, 1, 1),
        ("#### 70\n#### 72", 1, 1, 1),
        ("#### 72 and 5 more", 1, 0, 0),
        ("The answer is 72.", 0, 1, 0),
        ("#### 72e3", 1, 0, 0),
        ("#### 72" + " " * 300, 0, 1, 1),
        ("", 0, 0, 0),
    ],
)
def test_spellings_of_72(response: str, strict: float, flexible: float, numeric: float) -> None:
    assert [score(name, response, "72") for name in GSM8K] == [strict, flexible, numeric]
    assert verl_strict(response, "72") == strict
    g = grade("gsm8k_numeric", response, "72")
    assert g.format_ok == (g.answer is not None) and (g.format_ok or not numeric)


def test_numbers_are_compared_by_value() -> None:
    for written in ("#### -5", "#### $-5", "####-5.0"):
        assert score("gsm8k_numeric", written, "-5") == 1 == score("gsm8k_flexible", written, "-5")
    assert score("gsm8k_flexible", "so 1,234.", "1234") == 1
    digits = "123456789012345678901234567890"  # more digits than arithmetic of Decimal keeps
    assert score("gsm8k_numeric", f"#### {digits}1", f"{digits}2") == 0


def test_exact_and_auto() -> None:
    assert score("exact", " a  b\n", "a b") == 1 and score("exact", "ab", "a b") == 0
    assert score("auto", "####72", "72") == 1  # GSM8K's grader is gsm8k_numeric
    message = r"data_source = 'mine' has no default grader; name one of auto, exact"
    with pytest.raises(ConfigError, match=message):
        GRADERS["auto"](data_source="mine")


# ------------------------------------------------------------------------------- results of graders
@pytest.mark.parametrize(
    ("result", "grade"),
    [
        (0.5, Grade(0.5)),
        (Decimal("0.5"), Grade(0.5)),
        ({"score": " -2 ", "cost": Decimal(3), "list": [1]}, Grade(-2.0, extra={"cost": 3.0})),
        (True, Grade(1.0, correct=True)),
        ({"score": 1, "pred": " 7  8 ", "acc": 1.0, "format": 0}, Grade(1.0, "7 8", True, False)),
        (
            {"score": 0.1, "steps": 3, "ok": True, "text": "x", "none": None},
            Grade(0.1, extra={"steps": 3.0, "ok": 1.0}),
        ),
    ],
)
def test_as_grade(result: Any, grade: Grade) -> None:
    assert as_grade(result) == grade


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "None"),
        (10**400, "finite"),
        ({"score": math.inf}, "score.*inf"),
        ({"reward": 1}, "score.*reward"),
    ],
)
def test_invalid_results_raise(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_grade(result)


# --------------------------------------------------------------------------------- graders by name
GRADER_FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(solution_str)

class Judge:
    async def __call__(self, *, data_source, solution_str, ground_truth, extra_info):
        return solution_str == ground_truth

judge = Judge()
"""


@pytest.fixture
def file(tmp_path) -> str:
    (tmp_path / "rewards.py").write_text(GRADER_FILE)
    return f"{tmp_path}/rewards.py"


def test_graders_of_files(file: str, monkeypatch) -> None:
    sample: dict[str, Any] = {"data_source": "", "ground_truth": "2", "extra_info": {}}
    for spec in (file, f"{file}:compute_score"):
        assert as_grade(graders.resolve(spec)(solution_str="2", **sample)).score == 2
    assert [*graders.file_hashes([None, "exact", "os.python:judge", file])] == [file]
    monkeypatch.syspath_prepend(str(Path(file).parent))
    judge = graders.resolve("rewards:judge")
    assert graders.is_async(judge) and asyncio.run(judge(solution_str="2", **sample)) is True


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8k_strct", "gsm8k_strct.*gsm8k_strict"),
        ("{dir}/reward.py", r"reward\.py.*rewards\.py"),
        ("{file}:compute_scor", "compute_scor.*compute_score"),
        ("{dir}/bad.py", r"bad\.py.*ZeroDivisionError"),
        ("jsn:loads", "jsn.*PYTHONPATH"),
        ("json:load", "data_source"),
    ],
)
def test_missing_and_broken_graders_are_refused(
    file: str, tmp_path, spec: str, message: str
) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        graders.resolve(spec.format(file=file, dir=tmp_path))


# -------------------------------------------------------------------------------------- math-verify
# (correct answer, correct responses, wrong responses)
MATHEMATICS: list[tuple[str, list[str], list[str]]] = tables(__file__)["mathematics"]
MATHEMATICS[0][2].append(rf"\boxed{{7{'+0' * 100_000}}}")


def test_answers_in_latex() -> None:
    pytest.importorskip("math_verify")
    grader = graders.resolve("math_verify")
    for truth, right, wrong in MATHEMATICS:
        for response in right + wrong:
            sample = {"data_source": "", "ground_truth": truth, "extra_info": {}}
            g = as_grade(grader(solution_str=response, **sample))
            is_right = response in right
            assert (g.score, g.correct) == (is_right, is_right), (truth, response)
    for response in (r"\boxed{7}, \boxed{12}", r"\boxed{7 \text{ million}}"):  # no votes of maj@n
        assert grade("math_verify", response, "12").answer is None


@pytest.mark.parametrize(
    ("response", "only", "last", "any_box"),
    [
        (r"\boxed{7}", 1, 1, 1),
        (r"\boxed{12}, no, \boxed{7}", 0, 1, 1),
        (r"\boxed{7}, no, \boxed{12}", 0, 0, 1),
        (r"\boxed{7 \text{ million}}, \boxed{7}", 0, 1, 1),
        (r"\boxed{7} \boxed{", 0, 0, 1),
        ("The answer is 7.", 1, 1, 1),
    ],
)
def test_boxes_that_count(response: str, only: int, last: int, any_box: int) -> None:
    pytest.importorskip("math_verify")
    rules: dict[graders.BoxRule, int] = {"only": only, "last": last, "any": any_box}
    for rule, score in rules.items():
        grader = graders.resolve(partial(graders.math_verify, boxed=rule))
        assert grader(solution_str=response, ground_truth="7")["score"] == score, rule
    spec = partial(graders.math_verify, boxed="any")
    assert graders.is_math_verify(spec) and not is_cheap(spec)
