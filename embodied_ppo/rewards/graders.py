"""Graders of responses: built-in ones, loading by name, conversion of results to ``Grade``.

A grader has the signature of verl's ``compute_score``: ``(data_source, solution_str, ground_truth,
extra_info) -> float | dict``.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import math
import pkgutil
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

# Worker processes import this module and start without torch: nothing here may import it.
from embodied_ppo.core.errors import ConfigError, choose
from embodied_ppo.rewards import answers

if TYPE_CHECKING:
    from embodied_ppo.data.prompts import Prompt

Grader: TypeAlias = Callable[..., Any]
"""Called with the keywords data_source, solution_str, ground_truth (str) and extra_info (dict)."""
Sample: TypeAlias = tuple[str, str, str, dict[str, Any]]
"""(data_source, response, ground_truth, extra_info)."""
LARGEST = 1e30
"""Bound of a score's magnitude, so that it can be stored as float32."""


@dataclass(frozen=True)
class Grade:
    """Result of a grader for one response.

    Attributes:
        score: Reward.
        answer: Normalised answer of the response, None if the grader returns none.
        correct: Whether the answer is correct, None if the grader does not return it.
        format_ok: Whether the format is the expected one, None if the grader does not return it.
        failed: The grader raised, exceeded its time limit or returned no score. The score is 0.
        extra: Other numbers of the result.
    """

    score: float
    answer: str | None = None
    correct: bool | None = None
    format_ok: bool | None = None
    failed: bool = False
    extra: dict[str, float] = field(default_factory=dict)


FAILED = Grade(0.0, failed=True)


# --------------------------------------------------------------------------------- built-in graders
_SIGN = "(?P<sign>[-+\N{MINUS SIGN}]?)"
_DIGITS = r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
_ANYWHERE = re.compile(rf"(?:(?<![\w)]){_SIGN})?[$€£]?{_DIGITS}")
_GOLD = re.compile(rf"\s*{_SIGN}[$€£]?(?P<digits>{answers.NUMBER})\s*%?\s*")


def _number(match: re.Match[str]) -> str:
    """Return the normalised number of a match."""
    return answers.spell_number(match["digits"], match["sign"] or "")


def _gold(ground_truth: str) -> str:
    """Return the normalised correct answer.

    Raises:
        ValueError: It is not a number.
    """
    match = _GOLD.fullmatch(ground_truth)
    if not match:
        raise ValueError(
            f"ground_truth = {ground_truth[:60]!r} is no number; use exact or math_verify"
        )
    return _number(match)


def _result(answer: str | None, correct: bool, **more: Any) -> dict[str, Any]:
    """Return a grader's dictionary."""
    return {"score": float(correct), "acc": correct, "pred": answer, **more}


def exact(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Grade 1 if the response equals the correct answer up to white space."""
    answer = " ".join(solution_str.split())
    return _result(answer, answer == " ".join(ground_truth.split()))


def gsm8k_strict(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Grade as verl's default for GSM8K.

    The last ``#### number`` of the last 300 characters is compared as text without commas. As in
    verl, ``#### 72.``, ``#### 72.00``, ``#### $72`` and ``####72`` do not equal 72; see
    ``gsm8k_numeric``.
    """
    matches = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
    answer = matches[-1].replace(",", "") if matches else None
    return _result(answer, answer == ground_truth.strip().replace(",", ""), format=bool(matches))


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Compare the value of the last number of the response, independent of the text around it.

    verl's version does not remove commas, keeps a full stop after the number and reads the last 300
    characters only.
    """
    matches = list(_ANYWHERE.finditer(solution_str))
    answer = _number(matches[-1]) if matches else None
    return _result(answer, answer == _gold(ground_truth))


def gsm8k_numeric(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Compare the value of the only number in the final statement.

    The statement is the paragraph after the last ``####``. ``#### 72.00``, ``####72``, ``#### $72``
    and ``#### x = 72`` equal 72. A statement with a second number, an operator, a range, an
    alternative or a magnitude (``72 or 7``, ``72/5``, ``72 million``) has no answer.
    """
    statement = answers.final_statement(solution_str)
    answer = answers.read_number(statement) if statement is not None else None
    return _result(answer, answer == _gold(ground_truth), format=answer is not None)


def math_verify(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Compare as mathematical expressions, by package math-verify.

    The answer is the content of all boxes, or the last expression of a response without a box.
    Several boxes are correct if each of them is. A percent sign is a unit: ``\\boxed{50\\%}`` is 50
    and not 0.5. Words and relations that the correct answer lacks (``7 \\text{ million}``, ``7
    \\approx 12``) make an answer wrong.
    """
    truth = answers.plain_latex(ground_truth)
    gold = _parse(truth if re.search(r"(?<!\\)\$|\\boxed", truth) else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(
            f"ground_truth = {ground_truth[:60]!r} cannot be read by math-verify; use exact"
        )
    boxes = list(dict.fromkeys(map(answers.plain_latex, answers.boxed_answers(solution_str))))
    if boxes:
        plain = not any(answers.adds_meaning(box, truth) for box in boxes)
        correct = plain and all(_is_equal(gold, truth, box) for box in boxes)
        parsed = _parse(f"\\boxed{{{boxes[-1]}}}") if correct or (plain and len(boxes) == 1) else []
    else:
        response = answers.plain_latex(solution_str)
        last = re.search(r"[0-9$\\].*\Z", response.rstrip().rpartition("\n")[2])
        parsed = [] if last and answers.adds_meaning(last[0], truth) else _parse(response)
        correct = _verify(gold, parsed)
    return _result(str(parsed[0]) if parsed else None, correct)


def _parse(latex: str) -> list[Any]:
    """Parse with math-verify. Its time limits are off, because only a main thread supports them."""
    from math_verify import parse

    return parse(latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _verify(gold: list[Any], parsed: list[Any]) -> bool:
    """Compare two parsed expressions with math-verify."""
    from math_verify import verify

    return bool(parsed) and verify(gold, parsed, timeout_seconds=None)


def _is_equal(gold: list[Any], truth: str, box: str) -> bool:
    """Return whether a box, and each constant side of an equation in it, equals the answer."""
    sides = [box, *answers.constant_sides(box, truth)]
    return all(_verify(gold, _parse(f"\\boxed{{{side}}}")) for side in sides)


DEFAULTS: dict[str, Grader] = {"openai/gsm8k": gsm8k_numeric}
"""Default grader of each data_source."""


def auto(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """Grade with the default grader of the data source.

    Raises:
        ConfigError: The data source has none.
    """
    if data_source not in DEFAULTS:
        raise ConfigError(
            f"data_source = {data_source!r} has no default grader; name one of {', '.join(GRADERS)}"
        )
    return DEFAULTS[data_source](data_source, solution_str, ground_truth, extra_info)


_BUILT_IN = (auto, exact, gsm8k_strict, gsm8k_flexible, gsm8k_numeric, math_verify)
GRADERS: dict[str, Grader] = {grader.__name__: grader for grader in _BUILT_IN}


def is_cheap(spec: str | Grader) -> bool:
    """Return whether a grader is built in and too simple to crash or hang."""
    return spec in GRADERS and spec != "math_verify"


# --------------------------------------------------------------------------------- graders by name
def resolve(spec: str | Grader) -> Grader:
    """Return the grader that ``spec`` names, to be called with keywords.

    An async grader runs on its own event loop.

    Args:
        spec: Name of a built-in grader, ``module:function``, ``/path/file.py:function``,
            ``/path/file.py`` (its ``compute_score``), or a function. Worker processes need a
            function that can be pickled.

    Raises:
        ConfigError: The grader does not exist or has another signature.
    """
    grader, label = (spec, f"reward.grader = {spec!r}") if callable(spec) else _named(spec)
    keywords = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        inspect.signature(grader).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{label}: {error}; it is called with the keywords {', '.join(keywords)}"
        ) from error
    method = getattr(grader, "__call__", None)  # noqa: B004
    is_async = any(map(inspect.iscoroutinefunction, (grader, method)))
    return _synchronous(grader) if is_async else grader


def _synchronous(grader: Grader) -> Grader:
    """Wrap an async grader in a function."""
    import asyncio

    runner = asyncio.Runner()  # one loop for all calls, because open connections belong to a loop

    def call(**sample: Any) -> Any:
        try:
            return runner.run(grader(**sample))
        except asyncio.CancelledError as error:  # not a subclass of Exception
            raise RuntimeError("the grader was cancelled") from error

    weakref.finalize(call, runner.close)
    return call


def _named(spec: str) -> tuple[Grader, str]:
    """Return the function that ``spec`` names, and ``reward.grader = name`` for messages."""
    label = f"reward.grader = {spec}"
    if spec in GRADERS:
        if spec == "math_verify":
            # It warns that its time limits are off.
            logging.getLogger("math_verify").setLevel(logging.ERROR)
            try:
                math_verify("", "1", "1")  # import now, outside the time limit of the first sample
            except ImportError as error:
                raise ConfigError(
                    f"{label}: needs a package ({error}); pip install math-verify"
                ) from error
        return GRADERS[spec], label
    source, name = _split(spec, label)
    try:
        if source.endswith(".py"):
            module = _file(Path(source).expanduser(), label)
        else:
            module = _module(source, label)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{label}: {source} cannot be imported ({_cause(error)}); fix it"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        problem = "is no function" if hasattr(module, name) else "does not exist"
        raise ConfigError(f"{label}: {name} {problem}; {choose(name, names, f'in {source}: ')}")
    return function, label


def check_exists(spec: str) -> None:
    """Refuse a missing grader in milliseconds, before the run imports torch and transformers.

    Code of the user is not executed. A missing function is therefore found in modules of the
    standard library only.

    Raises:
        ConfigError: The specification is invalid, or the file, module or function is missing.
    """
    if spec in GRADERS:
        return
    label = f"reward.grader = {spec}"
    source, _ = _split(spec, label)
    package = source.partition(".")[0]
    if source.endswith(".py"):
        _check_file(Path(source).expanduser(), label)
    elif package in sys.stdlib_module_names or (
        package not in sys.modules and importlib.util.find_spec(package) is None
    ):
        resolve(spec)


def _split(spec: str, label: str) -> tuple[str, str]:
    """Return the module or file, and the name of the function."""
    source, _, name = (spec + ":compute_score" if spec.endswith(".py") else spec).rpartition(":")
    if not source or not name:
        names = choose(spec, list(GRADERS), "there are: ")
        raise ConfigError(f"{label}: no such grader; {names}, module:function and FILE.py:function")
    return source, name


def _check_file(path: Path, label: str) -> None:
    """Check that a file of a grader exists."""
    if not path.is_file():
        files = choose(
            path.name, sorted(p.name for p in path.parent.glob("*.py")), "in its folder: "
        )
        raise ConfigError(f"{label}: {path} is no file; {files}")


def _file(path: Path, label: str) -> ModuleType:
    """Import a file."""
    _check_file(path, label)
    name = f"embodied_ppo_grader_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, label: str) -> ModuleType:
    """Import a module."""
    try:
        return pkgutil.resolve_name(f"{name}:")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports is missing
        parent, _, last = str(error.name).rpartition(".")
        paths = sys.modules[parent].__path__ if parent else None
        names = [m.name for m in pkgutil.iter_modules(paths)]
        hint = "".join(f"did you mean {n}? " for n in difflib.get_close_matches(last, names, n=1))
        raise ConfigError(
            f"{label}: no module {error.name}; {hint}set PYTHONPATH, or name FILE.py:NAME"
        ) from error


# ---------------------------------------------------------------------------------------- one grade
def _cause(error: BaseException) -> str:
    """Return type, message and place of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename != __file__ and f.filename[0] != "<"]
    place = f", {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    try:
        text = str(error)
    except Exception:  # __str__ of a user's exception class may raise anything
        text = "(its text cannot be read)"
    return " ".join(f"{type(error).__name__}: {text}".split())[:300] + place


def _real(name: str, value: Any) -> float:
    """Convert a number of Python, NumPy or torch.

    Raises:
        ValueError: It is not finite or too large.
    """
    value = value.item() if hasattr(value, "item") else value  # NumPy's and torch's scalars
    if not isinstance(value, Real) or not abs(float(value)) < LARGEST:
        raise ValueError(
            f"{name} = {str(value)[:60]!r} of the grader is no finite number below {LARGEST:g}"
        )
    return float(value)


def as_grade(result: Any) -> Grade:
    """Convert the result of a grader: a number, a bool, or a dictionary with "score".

    A dictionary may have "pred" or "answer", "acc" or "correct" (correct if >= 1) and "format". Its
    other numbers are stored in ``extra``; its other entries are dropped.

    Raises:
        ValueError: The result has another form.
    """
    if isinstance(result, bool):
        return Grade(float(result), correct=result)
    if not isinstance(result, Mapping):
        return Grade(_real("result", result))
    entries = dict(result)
    if "score" not in entries:
        keys = ", ".join(map(str, entries)) or "none"
        raise ValueError(f"the grader's dictionary has no 'score'; its keys: {keys}")

    def take(*names: str) -> Any:
        return next((v for v in [entries.pop(n, None) for n in names] if v is not None), None)

    score, answer = _real("score", entries.pop("score")), take("pred", "answer")
    correct, format_ok = take("acc", "correct"), take("format")
    if answer is not None:
        answer = " ".join(str(answer).encode(errors="replace").decode().split())
    extra = {
        str(k): float(v)
        for k, v in entries.items()
        if (isinstance(v, Real) or getattr(v, "shape", None) == ()) and math.isfinite(float(v))
    }
    return Grade(
        score,
        answer=answer,
        correct=None if correct is None else _real("acc", correct) >= 1,
        format_ok=None if format_ok is None else _real("format", format_ok) >= 1,
        extra=extra,
    )


def grade_sample(grader: Grader, sample: Sample) -> tuple[Grade, str | None]:
    """Return the grade of one sample, and the cause if the grader failed."""
    source, response, truth, extra = sample
    try:
        result = grader(
            data_source=source, solution_str=response, ground_truth=truth, extra_info=extra
        )
        return as_grade(result), None
    except (Exception, SystemExit) as error:
        return FAILED, _cause(error)


class Graders(Protocol):
    """Grades batches of samples: a pool of rule-based graders, or a reward model."""

    @property
    def failures(self) -> int:
        """Number of samples so far that could not be graded."""
        ...

    @property
    def last_failure(self) -> str | None:
        """Sample and cause of the most recent failure, None without failures."""

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """Return one grade per sample; prompts[i] is the prompt of samples[i]."""
        ...

    def close(self) -> None:
        """Release processes and memory."""


@dataclass(frozen=True)
class WithFormat:
    """Graders that add ``weight`` to the score of responses that match a pattern completely."""

    inner: Graders
    pattern: re.Pattern[str]
    weight: float

    @property
    def failures(self) -> int:
        """See ``Graders``."""
        return self.inner.failures

    @property
    def last_failure(self) -> str | None:
        """See ``Graders``."""
        return self.inner.last_failure

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """Grade as the inner graders; ``correct`` is the value without the format reward."""
        grades = []
        for sample, grade in zip(samples, self.inner.grade(samples, prompts), strict=True):
            matches = self.pattern.fullmatch(sample[1]) is not None and not grade.failed
            correct = grade.score >= 1 if grade.correct is None else grade.correct
            score = grade.score + self.weight * matches
            grades.append(replace(grade, score=score, correct=correct, format_ok=matches))
        return grades

    def close(self) -> None:
        """Close the inner graders."""
        self.inner.close()
