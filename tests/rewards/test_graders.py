"""Built-in graders against references and corrupted answers, and graders of users' files."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from embodied_ppo.core.types import ConfigError
from embodied_ppo.rewards import graders
from embodied_ppo.rewards.graders import GRADERS, Grade, as_grade, is_cheap
from embodied_ppo.rewards.worker_pool import GraderPool

SOURCE = "openai/gsm8k"
# Last lines in the style of GSM8K: the text before ####, and the correct answer as it is written.
SOLUTIONS = [
    line.rsplit("|", 1)
    for line in """\
Ida packs 12 crates a day for 6 days: 12*6=<<12*6=72>>72 crates.|72
The shelf holds 48/4=<<48/4=12>>12 jars per row.|12
She saves $15 x 52 = $<<15*52=780>>780.|780
In all that is 640 + 1,360 = <<640+1360=2000>>2,000 bricks.|2,000
The van costs $18,500 - $2,250 = $<<18500-2250=16250>>16,250.|16,250
The stadium sells 52,000 + 71,500 = <<52000+71500=123500>>123,500 tickets.|123,500
Three towers have 3*1,000,000 = <<3*1000000=3000000>>3,000,000 screws.|3,000,000
The temperature falls to 3 - 8 = <<3-8=-5>>-5 degrees.|-5
Tom owes 40 - 65 = <<40-65=-25>>-25 dollars.|-25
The account stands at 1,000 - 2,250 = <<1000-2250=-1250>>-1,250.|-1,250
Each gets 7/2 = <<7/2=3.5>>3.5 litres.|3.5
A pencil costs $3 / 12 = $<<3/12=.25>>0.25.|0.25
The mean is 1,001.5 / 1 = <<1001.5/1=1001.5>>1001.5 points.|1001.5
It rises by -0.75 * 2 = <<-0.75*2=-1.5>>-1.5 metres.|-1.5
Nobody is left: 9 - 9 = <<9-9=0>>0.|0
Only 5 - 4 = <<5-4=1>>1 cake remains.|1
He runs 3 * 4 = <<3*4=12>>12 miles, so 12 / 2 = <<12/2=6>>6 per day.|6
That makes 25% of 360 = <<360*.25=90>>90 degrees.|90
After 10% off: 50 * 0.9 = <<50*.9=45>>45 dollars.|45
The train needs 240/80 = <<240/80=3>>3 hours.|3
Half of 26 is <<26/2=13>>13 pages.|13
They pick 14 + 17 + 19 = <<14+17+19=50>>50 apples.|50
Per week: 7 * 24 = <<7*24=168>>168 hours.|168
The rope is 100 - 37 = <<100-37=63>>63 feet.|63
A dozen dozen are 12*12=<<12*12=144>>144 eggs.|144
The field has 30 * 45 = <<30*45=1350>>1350 square yards.|1350
The rent is 12 * 950 = <<12*950=11400>>11400 per year.|11400
Lee is 2*19 + 1 = <<2*19+1=39>>39 years old.|39
Two thirds of 99 is <<99*2/3=66>>66 students.|66
The bus makes 8 * 11 = <<8*11=88>>88 stops.|88
Ann has 101 - 1 = <<101-1=100>>100 stickers.|100
So 1000 / 8 = <<1000/8=125>>125 grams.|125
There are 365 - 52 = <<365-52=313>>313 working days.|313
The pool takes 20 * 60 = <<20*60=1200>>1200 minutes.|1200
He sells 17 * 3 = <<17*3=51>>51 lamps.|51
The bill is 84 * 1.25 = <<84*1.25=105>>105 dollars.|105
Every child gets 96/16 = <<96/16=6>>6 sweets.|6
The wall needs 4*250 = <<4*250=1000>>1000 tiles.|1000
In 5 years: 34 + 5 = <<34+5=39>>39.|39
Kim reads 27 * 14 = <<27*14=378>>378 pages.|378
The cat weighs 11 - 2 = <<11-2=9>>9 pounds.|9
The team scores 3*7 + 2*3 = <<3*7+2*3=27>>27 points.|27
The tank lasts 480/32 = <<480/32=15>>15 days.|15
She walks 0.5 * 14 = <<.5*14=7>>7 miles.|7
Total: 19 + 23 = <<19+23=42>>42.|42
It takes 36 / (4+2) = <<36/(4+2)=6>>6 trips.|6
So the profit is 900 - 655 = <<900-655=245>>245.|245
He needs 5*8 - 6 = <<5*8-6=34>>34 nails.|34
The school buys 24*31 = <<24*31=744>>744 books.|744
After tax: 200 * 1.07 = <<200*1.07=214>>214.|214
The two share 58 / 2 = <<58/2=29>>29.|29
The third has 180 - 95 - 40 = <<180-95-40=45>>45 degrees.|45
Bread costs 4*3.25 = <<4*3.25=13>>13 dollars.|13
The farm gives 16*75 = <<16*75=1200>>1200 litres.|1200
Per person: 1,080/9 = <<1080/9=120>>120.|120
He drives 65 * 5 = <<65*5=325>>325 miles.|325
The rest is 77 - 58 = <<77-58=19>>19.|19
The box holds 6*6*6 = <<6*6*6=216>>216 cubes.|216
There were 10,000 - 125 = <<10000-125=9875>>9,875 seats.|9,875
The ticket is 7 + 4*2 = <<7+4*2=15>>15 dollars.|15""".splitlines()
]
GSM8K = ("gsm8k_strict", "gsm8k_flexible", "gsm8k_numeric")


def score(name: str, response: str, truth: str) -> float:
    return GRADERS[name](SOURCE, response, truth, {})["score"]


def corrupted(gold: str, rng: random.Random) -> set[str]:
    """Return other numbers that look like ``gold`` (without commas)."""
    value, sign, body = Decimal(gold), "-" * gold.startswith("-"), gold.lstrip("-")
    numbers = {str(x) for x in (value + 1, value - 1, value * 10, -value, value + Decimal("0.5"))}
    numbers |= {f"{gold}7", f"{sign}1{body}", sign + body[::-1].strip(".")}
    digits = [i for i, c in enumerate(body) if c.isdigit()]
    if len(digits) > 1:
        drop = rng.choice(digits)
        numbers.add(sign + (body[:drop] + body[drop + 1 :]).strip("."))
    return {x for x in numbers if Decimal(x) != value}


# -------------------------------------------------------------------------------------------- GSM8K
@pytest.mark.parametrize("name", GSM8K)
def test_correct_answers_score_1_and_corrupted_ones_0(name: str) -> None:
    assert len(SOLUTIONS) == 60
    rng = random.Random(0)
    for text, written in SOLUTIONS:
        gold = written.replace(",", "")
        for truth in (gold, written):
            grade = as_grade(GRADERS[name](SOURCE, f"{text}\n#### {written}", truth, {}))
            assert (grade.score, grade.correct, grade.answer) == (1.0, True, gold), (text, truth)
        wrong = corrupted(gold, rng)
        assert len(wrong) >= 5
        for other in wrong:
            grade = as_grade(GRADERS[name](SOURCE, f"{text}\n#### {other}", gold, {}))
            assert (grade.score, grade.correct) == (0.0, False), (text, other)
        without_number = re.sub("[0-9]", "", text)
        grade = as_grade(GRADERS[name](SOURCE, without_number, gold, {}))
        assert (grade.score, grade.correct, grade.answer) == (0.0, False, None)


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
        ("#### 72.", 0, 1, 1),
        ("#### 72.00", 0, 1, 1),
        ("####72", 0, 1, 1),
        ("#### $72", 0, 1, 1),
        ("#### **72**", 0, 1, 1),
        (r"#### $\boxed{72}$", 0, 1, 1),
        ("#### 72 crates", 1, 1, 1),
        ("#### +72", 0, 1, 1),
        ("#### 72%", 1, 1, 1),
        ("#### 70\n#### 72", 1, 1, 1),
        ("#### 72\n#### 70", 0, 0, 0),
        ("#### 72\n#### done", 1, 1, 1),
        ("#### 72 and 5 more", 1, 0, 0),
        ("The answer is 72.", 0, 1, 0),
        ("#### -72", 0, 0, 0),
        ("#### \N{MINUS SIGN}72", 0, 0, 0),
        ("#### 72/5", 1, 0, 0),
        ("#### 72e3", 1, 0, 0),
        ("#### 72:30", 1, 0, 0),
        ("#### 0.72", 0, 0, 0),
        ("#### .72", 0, 0, 0),
        ("#### 7 2", 0, 0, 0),
        ("#### 72" + " " * 300, 0, 1, 1),
        ("100-72", 0, 1, 0),
        ("#### ", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_spellings_of_72(response: str, strict: float, flexible: float, numeric: float) -> None:
    assert [score(name, response, "72") for name in GSM8K] == [strict, flexible, numeric]
    assert verl_strict(response, "72") == strict
    grade = as_grade(GRADERS["gsm8k_numeric"](SOURCE, response, "72", {}))
    assert grade.format_ok == (grade.answer is not None) and (grade.format_ok or not numeric)


def test_numbers_are_compared_by_value() -> None:
    for written in ("#### -5", "#### -$5", "#### $-5", "#### -5.0", "####-5"):
        assert score("gsm8k_numeric", written, "-5") == 1 == score("gsm8k_flexible", written, "-5")
        assert score("gsm8k_numeric", written, "5") == 0
    assert score("gsm8k_numeric", "#### 1,234", "1234") == 1
    assert score("gsm8k_flexible", "so 1,234.", "1234") == 1
    assert score("gsm8k_numeric", "#### 0.1", "0.10") == 1
    assert score("gsm8k_numeric", "#### -0", "0") == 1
    digits = "123456789012345678901234567890"  # more digits than arithmetic of Decimal keeps
    assert score("gsm8k_numeric", f"#### {digits}1", f"{digits}2") == 0
    assert score("gsm8k_numeric", f"#### {digits}", digits) == 1
    for spelling in ("72", "72.0", "$72."):  # equal votes of maj@k
        result = GRADERS["gsm8k_numeric"](SOURCE, f"#### {spelling}", "72", {})
        assert as_grade(result).answer == "72"


def test_correct_answers_that_are_no_numbers() -> None:
    for name in ("gsm8k_numeric", "gsm8k_flexible"):
        pool = GraderPool(name, workers=0, timeout_s=1)
        assert pool.grade([(SOURCE, "#### 1", "seven", {})]) == [graders.FAILED]
        cause = "ground_truth = 'seven' is no number; use exact or math_verify"
        assert cause in str(pool.last_failure)


def test_exact_and_auto() -> None:
    assert score("exact", " a  b\n", "a b") == 1 and score("exact", "ab", "a b") == 0
    assert score("auto", "####72", "72") == 1  # GSM8K's grader is gsm8k_numeric
    message = r"data_source = 'mine' has no default grader; name one of auto, exact"
    with pytest.raises(ConfigError, match=message):
        GRADERS["auto"]("mine", "", "", {})


# ------------------------------------------------------------------------------- results of graders
@pytest.mark.parametrize(
    ("result", "grade"),
    [
        (0.5, Grade(0.5)),
        (2, Grade(2.0)),
        (True, Grade(1.0, correct=True)),
        (False, Grade(0.0, correct=False)),
        ({"score": -1}, Grade(-1.0)),
        ({"score": 1, "pred": " 7  8 ", "acc": 1.0, "format": 0}, Grade(1.0, "7 8", True, False)),
        ({"score": 1, "answer": 7, "correct": False}, Grade(1.0, "7", False)),
        ({"score": 1, "acc": 0.5, "pred": None}, Grade(1.0, None, False)),
        (
            {"score": 0.1, "steps": 3, "ok": True, "text": "x", "none": None},
            Grade(0.1, extra={"steps": 3.0, "ok": 1.0}),
        ),
    ],
)
def test_as_grade(result: Any, grade: Grade) -> None:
    assert as_grade(result) == grade


def test_scalars_of_numpy_and_torch() -> None:
    import numpy as np
    import torch

    assert as_grade(np.float32(0.5)) == Grade(0.5) == as_grade(torch.tensor(0.5))
    result = {"score": np.int64(1), "acc": np.bool_(True), "n": np.float64(2)}
    assert as_grade(result) == Grade(1.0, None, True, extra={"n": 2.0})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "result = 'None' of the grader is no finite number"),
        ("1", "result = '1' of the grader is no finite number"),
        (math.nan, "result = 'nan' of the grader is no finite number"),
        ((1.0, {}), "is no finite number"),
        ({"score": math.inf}, "score = 'inf' of the grader is no finite number"),
        ({"score": "1"}, "score = '1' of the grader is no finite number"),
        ({"reward": 1}, "has no 'score'; its keys: reward"),
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
number = 3

def short(solution, truth):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(GRADER_FILE)
    return f"{tmp_path}/rewards.py"


def test_graders_of_files(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample: dict[str, Any] = {"data_source": "", "ground_truth": "2", "extra_info": {}}
    for spec in (file, f"{file}:compute_score"):
        assert as_grade(graders.resolve(spec)(solution_str="2", **sample)).score == 2
    monkeypatch.syspath_prepend(str(Path(file).parent))
    assert graders.resolve("rewards:judge")(solution_str="2", **sample) is True


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gsm8k_strct",
            (
                r"grader = gsm8k_strct: no such grader; did you mean gsm8k_strict\? there are:"
                r" auto, exact"
            ),
        ),
        (
            "{dir}/reward.py",
            r"reward.py is no file; did you mean rewards.py\? in its folder: bad.py, ",
        ),
        (
            "{file}:compute_scor",
            r"compute_scor does not exist; did you mean compute_score\? in .*rewards.py: ",
        ),
        ("{file}:number", r"number is no function; in .*: "),
        (
            "{file}:short",
            r"(?s)rewards.py:short: .*; it is called with the keywords data_source, solution_str",
        ),
        (
            "{dir}/bad.py",
            r"bad.py cannot be imported \(ZeroDivisionError: division by zero, bad.py line 2\)",
        ),
        (
            "{dir}/missing_import.py",
            (
                r"missing_import.py cannot be imported \(ModuleNotFoundError: No module named"
                r" 'nowhere_to_be_found'"
            ),
        ),
        ("{dir}/syntax.py", r"syntax.py cannot be imported \(SyntaxError: .*syntax.py, line 1"),
        ("{dir}/quits.py", r"quits.py cannot be imported \(SystemExit: 1"),
        ("jsn:loads", r"grader = jsn:loads: no module jsn; did you mean json\? set PYTHONPATH"),
        ("json.decodr:x", r"no module json.decodr; did you mean decoder\?"),
        ("json:load", r"it is called with the keywords data_source"),
        ("builtins:dict", r"it is called with the keywords data_source"),
        ("json:lods", r"lods does not exist; did you mean loads\? in json: "),
    ],
)
def test_missing_and_broken_graders_are_refused(
    file: str, tmp_path: Path, spec: str, message: str
) -> None:
    broken = {
        "bad": "\n1 / 0",
        "missing_import": "import nowhere_to_be_found",
        "syntax": "def",
        "quits": "exit(1)",
    }
    for name, text in broken.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        graders.resolve(spec.format(file=file, dir=tmp_path))


def test_check_exists_refuses_missing_graders(file: str, tmp_path: Path) -> None:
    for spec in ("gsm8k_strct", f"{tmp_path}/reward.py", "jsn:loads", "os:path", "json:lods"):
        with pytest.raises(ConfigError, match=r"reward\.grader = "):
            graders.check_exists(spec)
    (tmp_path / "bad.py").write_text("1 / 0")
    for spec in ("exact", file, f"{tmp_path}/bad.py", "pytest:no_such_function"):
        graders.check_exists(spec)  # code of the user is not executed


@pytest.mark.slow
def test_the_command_refuses_a_missing_grader_without_loading_torch() -> None:
    code = (
        "import sys; from embodied_ppo.commands.main import main; code = main(['train',"
        " 'experiment=arithmetic', 'reward.grader=os:path']); print(code, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.split() == ["2", "False"] and "os:path: path is no function" in ran.stderr


def test_is_cheap() -> None:
    assert is_cheap("exact") and is_cheap("gsm8k_numeric") and is_cheap("auto")
    assert not is_cheap("math_verify") and not is_cheap("mine.py:f")
    assert GraderPool("gsm8k_strict", workers=None, timeout_s=1).count == 0


# -------------------------------------------------------------------------------------- math-verify
@pytest.mark.slow
def test_math_verify() -> None:
    pytest.importorskip("math_verify")
    cases = [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{1,234}", "1234", 1),
        (r"$x = 3\sqrt{2}$", r"\sqrt{18}", 1),
        (r"\boxed{(2,1)}", "(1,2)", 0),
        (r"\boxed{7}", "8", 0),
        ("no idea", "8", 0),
    ]
    pool = GraderPool("math_verify", workers=None, timeout_s=10)
    assert pool.count == 2
    grades = pool.grade([("math", response, truth, {}) for response, truth, _ in cases])
    pool.close()
    assert [g.score for g in grades] == [score for *_, score in cases] and pool.failures == 0
    assert grades[0].correct is True and grades[0].answer == "1/2" and grades[5].answer is None


# (correct answer, correct responses, wrong responses)
MATHEMATICS: list[tuple[str, list[str], list[str]]] = [
    (
        "7",
        [
            r"\boxed{7}",
            r"\boxed{7.0}",
            r"$\boxed{7}$.",
            r"\boxed 7",
            r"\fbox{7}",
            r"\boxed{\boxed{7}}",
            r"\boxed{x = 7}",
            r"\boxed{k = 7}",
            r"\boxed{3 + 4 = 7}",
            r"\boxed{\frac{14}{2}}",
            r"\boxed{\$7}",
            r"\boxed{7^\circ}",
            r"\boxed{7~\text{cm}}",
            r"\boxed{7 \text{ cm}^2}",
            r"\boxed{7}, which is \boxed{7.0}",
            "Half of the two is $7$.",
            "The answer is 7.",
        ],
        [
            r"\boxed{12} or \boxed{7}",
            r"\boxed{7} or \boxed{12}",
            r"\boxed{12}. No, \boxed{7}",
            r"\boxed{12} and much later \(\boxed{7}\)",
            r"\boxed{7} \boxed{",
            r"\boxed{7",
            r"\boxed{}",
            r"\boxed{12 \text{ or } 7}",
            r"\boxed{7 \text{ or so}}",
            r"\boxed{7 \text{ or } \boxed{12}}",
            r"\boxed{12, 7}",
            r"\boxed{\{7, 12\}}",
            r"\boxed{\pm 7}",
            r"\boxed{x=12 \lor x=7}",
            r"\boxed{12 \to 7}",
            r"\boxed{7 \approx 12}",
            r"\boxed{12 \mid 7}",
            r"\boxed{12 \not= 7}",
            r"\boxed{12 = 7}",
            r"\boxed{7 = 12}",
            r"\boxed{x = 12 = 7}",
            r"\boxed{x < 7}",
            r"\boxed{7 \text{ (12)}}",
            r"\boxed{7 \text{ million}}",
            r"\boxed{\text{not } 7}",
            r"\boxed{-7}",
            r"\boxed{\text{nan}}",
            r"\boxed{\frac{0}{0}}",
            r"\boxed{\infty}",
            r"\boxed{７}",
            rf"\boxed{{7{'+0' * 100_000}}}",
            "The answer is 7 or 12",
            "It is 7 million",
            "",
        ],
    ),
    (
        "50",
        [r"\boxed{50\%}", r"\boxed{50%}", r"\boxed{50 percent}", "50%"],
        [r"\boxed{0.5}", r"\boxed{5\%}"],
    ),
    ("0.5", [r"\boxed{0.5}", r"\boxed{\frac12}"], [r"\boxed{50\%}", "50%"]),
    (r"50\%", [r"\boxed{50\%}", r"\boxed{50}", "50%"], [r"\boxed{0.5}", r"\boxed{\frac{1}{2}}"]),
    ("1234", [r"\boxed{1{,}234}", r"\boxed{1\,234}", r"\boxed{1,\!234}"], [r"\boxed{1, 234}"]),
    (
        r"x=1 \text{ or } x=2",
        [r"\boxed{x=1 \text{ or } x=2}"],
        [r"\boxed{x=1}", r"\boxed{x=1}, \boxed{x=2}"],
    ),
    (r"7 \text{ million}", [r"\boxed{7 \text{ million}}"], []),
    (r"\text{negative}", [r"\boxed{\text{negative}}"], [r"\boxed{\text{positive}}"]),
]


def test_answers_in_latex() -> None:
    pytest.importorskip("math_verify")
    grader = graders.resolve("math_verify")
    for truth, right, wrong in MATHEMATICS:
        for response in right + wrong:
            sample = {"data_source": "", "ground_truth": truth, "extra_info": {}}
            grade = as_grade(grader(solution_str=response, **sample))
            is_right = response in right
            assert (grade.score, grade.correct) == (is_right, is_right), (truth, response)
    for response in (r"\boxed{7}, \boxed{12}", r"\boxed{7 \text{ million}}"):  # no votes of maj@n
        assert GRADERS["math_verify"]("", response, "12", {})["pred"] is None


def test_missing_math_verify_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    message = r"grader = math_verify: needs a package .*; pip install math-verify"
    with pytest.raises(ConfigError, match=message):
        graders.resolve("math_verify")


def test_large_scores_raise_and_other_numbers_that_are_not_finite_are_dropped() -> None:
    with pytest.raises(ValueError, match=r"score = '1e.39' of the grader is no finite number"):
        as_grade({"score": 1e39})
    assert as_grade({"score": 1.0, "time": math.nan, "k": 3}).extra == {"k": 3.0}
    assert as_grade({"score": 1.0, "pred": "a\ud800b"}).answer == "a?b"
