"""Graders of responses: built-in ones, loading by name, conversion of results to ``Grade``.

A grader has the signature of verl's ``compute_score``: ``(data_source, solution_str, ground_truth,
extra_info) -> float | dict``, with ``prompt`` if it has a parameter of this name, or that of TRL's
reward functions, which grade a batch: ``(prompts, completions, **columns) -> list``.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib.util
import inspect
import logging
import math
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

# Worker processes import this module and start without torch: nothing here may import it.
from embodied_envs.base.errors import ConfigError, TrainingError, choose, one_line, shorten
from embodied_ppo.rollout.rewards import answers

if TYPE_CHECKING:
    from embodied_ppo.data.prompts import Prompt

# Called with the keywords data_source, solution_str, ground_truth (str) and extra_info (dict).
Grader: TypeAlias = Callable[..., Any]
# (data_source, response, ground_truth, extra_info).
Sample: TypeAlias = tuple[str, str, str, dict[str, Any]]
# Grade of a sample, and the cause if the grader failed.
Result: TypeAlias = "tuple[Grade, str | None]"
LARGEST = 1e30  # bound of a score's magnitude, so that it can be stored as float32
RETRY_S = 0.2  # time before the first repetition of a call, which doubles for the next, seconds
# Share of the responses of an update, or of an evaluation, up to which failures are masked.
LARGEST_FAILED_SHARE = 0.9
# Which boxes of a response ``math_verify`` reads.
BoxRule: TypeAlias = Literal["only", "last", "any"]


@dataclass(frozen=True)
class Grade:
    """Result of a grader for one response.

    Attributes:
        score: Reward; NaN if the grader failed, or returned None: it does not apply.
        answer: Normalised answer of the response, None if the grader returns none.
        correct: Whether the answer is correct, None if the grader does not return it.
        format_ok: Whether the format is the expected one, None if the grader does not return it.
        failed: The grader raised, exceeded its time limit or returned no score. Such a response is
            neither trained on nor part of a mean.
        extra: Other numbers of the result.
    """

    score: float
    answer: str | None = None
    correct: bool | None = None
    format_ok: bool | None = None
    failed: bool = False
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Return the grader's verdict, or whether the score is at least 1 if it has none."""
        return self.score >= 1 if self.correct is None else self.correct


FAILED = Grade(math.nan, failed=True)


# --------------------------------------------------------------------------------- built-in graders
_DIGITS = r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
# A sign counts unless a word character or ")" precedes it: 5-3 ends in 3, not in -3.
_ANYWHERE = re.compile(rf"(?:(?<![\w)])(?P<sign>[{answers.SIGNS}]?))?[$€£]?{_DIGITS}")


def _gold(ground_truth: str) -> str:
    """Return the normalised correct answer.

    Raises:
        ValueError: It is not a number.
    """
    number = answers.read_number(ground_truth)
    if number is None:
        raise ValueError(
            f"ground_truth = {ground_truth[:60]!r} is no number; use exact or math_verify"
        )
    return number


def _result(answer: str | None, correct: bool, **more: Any) -> dict[str, Any]:
    """Return a grader's dictionary."""
    return {"score": float(correct), "acc": correct, "pred": answer, **more}


def exact(*, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """Grade 1 if the response equals the correct answer up to white space."""
    answer = " ".join(solution_str.split())
    return _result(answer, answer == " ".join(ground_truth.split()))


def gsm8k_strict(*, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """Grade as verl's default for GSM8K.

    The last ``#### number`` of the last 300 characters is compared as text without commas. As in
    verl, ``#### 72.``, ``#### 72.00``, ``#### $72`` and ``####72`` do not equal 72; see
    ``gsm8k_numeric``.
    """
    # The expression and the limit of 300 characters are those of verl.
    matches = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
    answer = matches[-1].replace(",", "") if matches else None
    return _result(answer, answer == ground_truth.strip().replace(",", ""), format=bool(matches))


def gsm8k_flexible(*, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """Compare the value of the last number of the response, independent of the text around it.

    verl's version does not remove commas, keeps a full stop after the number and reads the last 300
    characters only.
    """
    matches = list(_ANYWHERE.finditer(solution_str))
    last = matches[-1] if matches else None
    answer = answers.spell_number(last["digits"], last["sign"] or "") if last else None
    return _result(answer, answer == _gold(ground_truth))


def gsm8k_numeric(*, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """Compare the value of the only number in the final statement.

    The statement is the paragraph after the last ``####``. ``#### 72.00``, ``####72``, ``#### $72``
    and ``#### x = 72`` equal 72. A statement with a second number, an operator, a range, an
    alternative or a magnitude (``72 or 7``, ``72/5``, ``72 million``) has no answer.
    """
    statement = answers.final_statement(solution_str)
    # Without a final statement there is no answer; numbers elsewhere do not count.
    answer = answers.read_number(statement) if statement is not None else None
    return _result(answer, answer == _gold(ground_truth), format=answer is not None)


def math_verify(
    *, solution_str: str, ground_truth: str, boxed: BoxRule = "only", **_: Any
) -> dict[str, Any]:
    """Compare as mathematical expressions, by package math-verify.

    The answer is the content of the boxes, or the last expression of a response without a box. A
    percent sign is a unit: ``\\boxed{50\\%}`` is 50 and not 0.5. Words and relations that the
    correct answer lacks (``7 \\text{ million}``, ``7 \\approx 12``) make an answer wrong.

    Args:
        boxed: "only": the boxes may contain only the correct answer, each of them is compared.
            "last": the last box is compared. "any": one correct box suffices.
    """
    # The correct answer, as math-verify reads it in a box.
    truth = answers.plain_latex(ground_truth)
    gold = _parse(truth if re.search(r"(?<!\\)\$|\\boxed", truth) else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(
            f"ground_truth = {ground_truth[:60]!r} cannot be read by math-verify; use exact"
        )
    response = answers.plain_latex(solution_str)
    boxes = answers.boxed_answers(response)
    if boxes:
        # Equal boxes state one answer.
        boxes = boxes[-1:] if boxed == "last" else boxes
        statements = {box: f"\\boxed{{{box}}}" for box in boxes}
    else:
        # Without a box: the last expression; only the end of the last line is searched for words.
        last = re.search(r"[0-9$\\].*\Z", response.rstrip().rpartition("\n")[2])
        statements = {last[0] if last else "": response}
    # A statement with words or relations that the truth lacks states something else.
    parsed = [
        [] if answers.adds_meaning(text, truth) else _parse(latex)
        for text, latex in statements.items()
    ]
    right = [_verify(gold, expressions) for expressions in parsed]
    correct = any(right) if boxed == "any" else all(right)
    # Several different boxes of a wrong response state no single answer.
    answer = parsed[right.index(True)] if correct else parsed[0] if len(parsed) == 1 else []
    return _result(str(answer[0]) if answer else None, correct)


def _parse(latex: str) -> list[Any]:
    """Parse with math-verify. Its time limits are off, because only a main thread supports them."""
    from math_verify import parse

    return parse(latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _verify(gold: list[Any], parsed: list[Any]) -> bool:
    """Compare two parsed expressions with math-verify."""
    from math_verify import verify

    return bool(parsed) and verify(gold, parsed, timeout_seconds=None)


# Default grader of each data_source.
DEFAULTS: dict[str, Grader] = {"openai/gsm8k": gsm8k_numeric}


def auto(*, data_source: str, **sample: Any) -> dict[str, Any]:
    """Grade with the default grader of the data source.

    Raises:
        ConfigError: The data source has none.
    """
    if data_source not in DEFAULTS:
        raise ConfigError(
            f"data_source = {data_source!r} has no default grader; name one of {', '.join(GRADERS)}"
        )
    return DEFAULTS[data_source](data_source=data_source, **sample)


_BUILT_IN = (auto, exact, gsm8k_strict, gsm8k_flexible, gsm8k_numeric, math_verify)
GRADERS: dict[str, Grader] = {
    **{grader.__name__: grader for grader in _BUILT_IN},
    "math_verify_last": partial(math_verify, boxed="last"),
    "math_verify_any": partial(math_verify, boxed="any"),
}


def is_math_verify(spec: str | Grader) -> bool:
    """Return whether a grader is ``math_verify``, whose parser can hang: ``9^{9^{9^9}}``."""
    grader = GRADERS.get(spec) if isinstance(spec, str) else spec
    # The variants for other boxes are partial functions of ``math_verify``.
    return getattr(grader, "func", grader) is math_verify


def is_cheap(spec: str | Grader) -> bool:
    """Return whether a grader is built in and too simple to crash or hang."""
    return isinstance(spec, str) and spec in GRADERS and not is_math_verify(spec)


# --------------------------------------------------------------------------------- graders by name
def resolve(spec: str | Grader, option: str = "reward.grader") -> Grader:
    """Return the grader that ``spec`` names, to be called with keywords.

    Args:
        spec: Name of a built-in grader, ``module:function``, ``/path/file.py:function``,
            ``/path/file.py`` (its ``compute_score``), or a function. Worker processes need a
            function that can be pickled.
        option: Path of the option, for messages.

    Raises:
        ConfigError: The grader does not exist or has another signature.
    """
    label = f"{option} = {spec}"
    grader = spec
    if isinstance(spec, str):
        grader = GRADERS[spec] if spec in GRADERS else _load(spec, label)
    assert callable(grader)
    keywords = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        # A wrong signature is refused before the first response is graded. That of TRL names
        # columns, which only the data can lack.
        if not is_batched(grader):
            keywords += ("prompt",) * reads_prompt(grader)
            inspect.signature(grader).bind(**dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{label}: {error}; it is called with the keywords {', '.join(keywords)}, or has a"
            " parameter completions as in TRL"
        ) from error
    if is_math_verify(grader):
        # It warns that its time limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        try:
            # Import now, outside the time limit of the first sample.
            grader(solution_str="1", ground_truth="1")
        except ImportError as error:
            raise ConfigError(
                f"{label}: needs a package ({error}); pip install math-verify"
            ) from error
    return grader


def is_async(grader: Grader) -> bool:
    """Return whether a grader is a coroutine function, or an object with an async ``__call__``."""
    method = getattr(grader, "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (grader, method)))


def is_batched(grader: Grader) -> bool:
    """Return whether a grader has the signature of TRL: one call grades a batch of responses."""
    return "completions" in inspect.signature(grader).parameters


def reads_prompt(grader: Grader) -> bool:
    """Return whether a grader reads prompts: texts, or messages to which a template applies."""
    return bool({"prompt", "completions"} & {*inspect.signature(grader).parameters})


def kind(grader: Grader) -> tuple[bool, bool, bool]:
    """Return whether a grader is async, grades batches and reads prompts."""
    return is_async(grader), is_batched(grader), reads_prompt(grader)


def check_exists(spec: str, option: str = "reward.grader") -> None:
    """Refuse a missing grader in milliseconds, before the run imports torch and transformers.

    Code of the user is not executed, so that a missing function is not found.

    Raises:
        ConfigError: The specification is invalid, or the file or package is missing.
    """
    if spec not in GRADERS:
        _locate(spec, f"{option} = {spec}")


def file_hashes(specs: Iterable[str | None]) -> dict[str, str]:
    """Return the SHA-256 of each file of the user that ``specs`` name. Raises ConfigError."""
    files = [x for x in specs if x and x.partition(":")[0].endswith(".py")]
    return {x: hashlib.sha256(Path(_locate(x, x)[0]).read_bytes()).hexdigest() for x in files}


def _locate(spec: str, label: str) -> tuple[str, str]:
    """Return the module or existing file, and the name of the function."""
    # A file without a function means its ``compute_score``, as in verl.
    source, _, name = (spec + ":compute_score" if spec.endswith(".py") else spec).rpartition(":")
    if not source or not name:
        names = choose(spec, list(GRADERS), "there are: ")
        raise ConfigError(f"{label}: no such grader; {names}, module:function and FILE.py:function")
    if source.endswith(".py"):
        path = Path(source).expanduser()
        if not path.is_file():
            files = [p.name for p in path.parent.glob("*.py")]
            hint = choose(path.name, sorted(files), "in its folder: ")
            raise ConfigError(f"{label}: {path} is no file; {hint}")
        return str(path), name
    # Only the top-level package is searched, because finding a submodule imports its parents.
    package = source.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(f"{label}: no module {package}; set PYTHONPATH, or name FILE.py:NAME")
    return source, name


def _load(spec: str, label: str) -> Grader:
    """Return the function ``spec`` of a module or file; ``label`` begins messages."""
    source, name = _locate(spec, label)
    try:
        if source.endswith(".py"):
            module_name = f"embodied_ppo_grader_{Path(source).stem}"
            module_spec: Any = importlib.util.spec_from_file_location(module_name, source)
            # Register the module before it is executed: dataclasses look it up by name.
            module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
        else:
            module = pkgutil.resolve_name(f"{source}:")
    except (Exception, SystemExit) as error:
        cause = _cause(error)
        raise ConfigError(f"{label}: {source} cannot be imported ({cause}); fix it") from error
    # A grader may also be an object with ``__call__``.
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = choose(name, names, f"in {source}: ")
        raise ConfigError(f"{label}: {name} is no function; {hint}")
    return function


# ---------------------------------------------------------------------------------------- one grade
def _cause(error: BaseException) -> str:
    """Return type, message and place of an exception in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    # The last line of the user's own code.
    frames = [f for f in frames if f.filename != __file__ and f.filename[0] != "<"]
    place = f", {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    return one_line(error, kind=True)[:300] + place


def _real(name: str, value: Any) -> float:
    """Convert a number of Python, NumPy or torch, or the text of a number.

    Raises:
        ValueError: It is not finite or too large.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    # In this form, the condition is also true for NaN.
    if not abs(number) < LARGEST:
        raise ValueError(
            f"{name} = {str(value)[:60]!r} of the grader is no finite number below {LARGEST:g}"
        )
    return number


def as_grade(result: Any) -> Grade:
    """Convert the result of a grader: a number, a bool, or a dictionary with "score".

    A dictionary may have "pred" or "answer", "acc" or "correct" (correct if >= 1) and "format". Its
    other numbers are stored in ``extra``; its other entries are dropped.

    Raises:
        ValueError: The result has another form.
    """
    if not isinstance(result, Mapping):
        score = _real("result", result)
        # True and 1 differ: only a bool, also NumPy's, states whether the answer is correct.
        is_bool = isinstance(result, bool) or str(getattr(result, "dtype", "")).endswith("bool")
        return Grade(score, correct=score >= 1 if is_bool else None)
    # verl's dictionary: score, then what is known by name, then other numbers.
    entries = dict(result)
    if "score" not in entries:
        keys = ", ".join(map(str, entries)) or "none"
        raise ValueError(f"the grader's dictionary has no 'score'; its keys: {keys}")

    def take(*names: str) -> Any:
        # All synonyms are removed from the entries, and the first one with a value counts.
        return next((v for v in [entries.pop(n, None) for n in names] if v is not None), None)

    score, answer = _real("score", entries.pop("score")), take("pred", "answer")
    correct, format_ok = take("acc", "correct"), take("format")
    # Answers are written to files as UTF-8, in which lone surrogates cannot be encoded.
    if answer is not None:
        answer = " ".join(str(answer).encode(errors="replace").decode().split())
    extra: dict[str, float] = {}
    for key, value in entries.items():
        if not isinstance(value, (str, bytes)):
            with suppress(ValueError):  # not a number
                extra[str(key)] = _real(str(key), value)
    return Grade(
        score,
        answer=answer,
        correct=None if correct is None else _real("acc", correct) >= 1,
        format_ok=None if format_ok is None else _real("format", format_ok) >= 1,
        extra=extra,
    )


def too_late(timeout_s: float | None) -> str:
    """Return the cause of a failure that exceeded the time limit."""
    return f"took longer than timeout_s = {timeout_s:g}"


def _keywords(sample: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a grader, which may change the dictionary."""
    source, response, truth, extra, *prompt = sample
    return dict(zip(("prompt",), prompt, strict=False)) | {
        "data_source": source,
        "solution_str": response,
        "ground_truth": truth,
        "extra_info": copy.deepcopy(extra),
    }


def grade_sample(grader: Grader, sample: Sequence[Any]) -> Result:
    """Return the grade of one sample, and the cause if the grader failed."""
    try:
        return as_grade(grader(**_keywords(sample))), None
    except (Exception, SystemExit) as error:
        # A failed grader masks this response and does not end the run.
        return FAILED, _cause(error)


def _columns(grader: Grader, samples: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a grader with TRL's signature, one list for each column.

    Prompts and completions are messages where a chat template made the prompt, else texts. The
    correct answer has the names under which data sets of TRL have it.
    """
    sources, responses, truths, extras, prompts = map(list, zip(*samples, strict=True))
    columns: dict[str, Any] = dict.fromkeys(("ground_truth", "answer", "solution"), truths)
    names = dict.fromkeys(name for extra in extras for name in extra)
    columns |= {name: [copy.deepcopy(extra.get(name)) for extra in extras] for name in names}
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for text, prompt in zip(responses, prompts, strict=True)
    ]
    columns |= {"data_source": sources, "prompts": prompts, "completions": completions}
    parameters = inspect.signature(grader).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {name: column for name, column in columns.items() if name in parameters}


def _results(value: Any, count: int) -> list[Result]:
    """Return the results of ``count`` responses, from a list with a number or None of each."""
    scores = list(value)
    if len(scores) != count:
        raise ValueError(f"the grader returned {len(scores)} scores of {count} responses")
    results: list[Result] = []
    for score in scores:
        try:
            results.append((Grade(math.nan) if score is None else as_grade(score), None))
        except ValueError as error:
            results.append((FAILED, _cause(error)))
    return results


@dataclass(frozen=True)
class Limits:
    """How a grader is called.

    Attributes:
        timeout_s: Time limit of one call, its repetitions included, seconds.
        retries: Number of times that a call of an async grader is repeated if it raises.
        concurrency: Largest number of calls of an async grader at the same time.
    """

    timeout_s: float
    retries: int = 0
    concurrency: int = 64


async def _call_async(grader: Grader, arguments: Mapping[str, Any], limits: Limits) -> Any:
    """Call an async grader, which is cancelled at the time limit; repeat a call that raises."""
    async with asyncio.timeout(limits.timeout_s) as limit:
        for attempt in range(limits.retries + 1):
            try:
                return await grader(**copy.deepcopy(dict(arguments)))
            except Exception as error:  # of the user's function, e.g. of its connection
                if attempt == limits.retries or limit.expired():
                    raise error
            await asyncio.sleep(RETRY_S * 2**attempt)


async def _grade_async(grader: Grader, samples: Sequence[Any], limits: Limits) -> list[Result]:
    """Return the results of one call of an async grader, of one sample or of a batch."""
    batched, count = is_batched(grader), len(samples)
    arguments = _columns(grader, samples) if batched else _keywords(samples[0])
    try:
        result = await _call_async(grader, arguments, limits)
        return _results(result, count) if batched else [(as_grade(result), None)]
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # not by the grader itself
            raise
        return [(FAILED, "the grader was cancelled")] * count
    except TimeoutError as error:
        # The limit has no cause of its own; a grader's own TimeoutError has its place.
        is_late = isinstance(error.__cause__, asyncio.CancelledError)
        return [(FAILED, too_late(limits.timeout_s) if is_late else _cause(error))] * count
    except (Exception, SystemExit) as error:
        return [(FAILED, _cause(error))] * count


def grade_batch(
    grader: Grader, samples: Sequence[Any], limits: Limits, runner: asyncio.Runner
) -> list[Result]:
    """Return the grade of each sample; an async grader grades all of them at the same time.

    Args:
        grader: The grader.
        samples: The samples; for a grader that reads prompts each ends with its prompt.
        limits: Limits of async graders.
        runner: Event loop of async graders.
    """
    batched = is_batched(grader)
    if not samples:
        return []
    if not is_async(grader):
        if not batched:
            return [grade_sample(grader, sample) for sample in samples]
        try:
            return _results(grader(**_columns(grader, samples)), len(samples))
        except (Exception, SystemExit) as error:
            return [(FAILED, _cause(error))] * len(samples)

    async def gather() -> list[Result]:
        calls = [samples] if batched else [[sample] for sample in samples]
        graded = await asyncio.gather(*(_grade_async(grader, x, limits) for x in calls))
        return [result for results in graded for result in results]

    return runner.run(gather())


# ------------------------------------------------------------------------------------------ batches
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


def first_failure(samples: Sequence[Sample], causes: Sequence[str | None]) -> str | None:
    """Return the first sample that has a cause of failure, with this cause, in one line."""
    for i, (sample, cause) in enumerate(zip(samples, causes, strict=True)):
        if cause is not None:
            source, response, truth, _ = sample
            return (
                f"sample {i} of {len(samples)} (data_source = {source}, ground_truth ="
                f" {truth[:30]!r}, response = {response[:30]!r}): {cause}"
            )
    return None


def refuse_failures(grades: Sequence[Grade], cause: str | None, unit: str) -> None:
    """Raise TrainingError if more than ``LARGEST_FAILED_SHARE`` of the responses failed.

    Args:
        grades: Grades of an update or an evaluation.
        cause: Sample and cause of a failure.
        unit: "update" or "evaluation".
    """
    # If nearly all responses fail, the grader has a defect that masking would hide.
    failed = sum(grade.failed for grade in grades)
    if failed > LARGEST_FAILED_SHARE * len(grades):
        raise TrainingError(
            f"reward: fix the grader, because {failed} of {len(grades)} responses of the {unit}"
            f" could not be graded (at most {LARGEST_FAILED_SHARE:.0%}): {shorten(str(cause), 190)}"
        )


MAX_EXTRAS = 100  # largest number of curves of a grader's other numbers


def extra_sums(grades: Sequence[Grade]) -> dict[str, tuple[float, int]]:
    """Return name -> sum and number of values of ``extra``, of the first ``MAX_EXTRAS`` names.

    Characters of a name that trackers refuse become ``_``. The names are sorted.
    """
    values: dict[str, list[float]] = {}
    for grade in grades:
        for name, value in grade.extra.items():
            values.setdefault(re.sub(r"[^\w.\-/]", "_", name)[:100], []).append(value)
    return {
        # fsum is exact, so the sum does not depend on the order of the responses.
        name: (math.fsum(values[name]), len(values[name]))
        for name in sorted(values)[:MAX_EXTRAS]
    }
