"""How good a response is: graders, a pool of processes for those that may crash or hang, and evaluation's statistics.

A grader is verl's ``compute_score``: ``(data_source, solution_str, ground_truth, extra_info) -> float | dict``.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import os
import pkgutil
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from multiprocessing.connection import Connection, wait
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from embodied_ppo.errors import ConfigError, choose  # not from types: a worker starts without torch

Grader: TypeAlias = Callable[..., Any]
"""Called with the keywords data_source, solution_str, ground_truth (texts) and extra_info (a dictionary)."""
Sample: TypeAlias = tuple[str, str, str, dict[str, Any]]
"""(data_source, response, ground_truth, extra_info)."""
START_S = 120.0
"""How long a worker may take to load its grader, seconds."""


@dataclass(frozen=True)
class Grade:
    """What a grader says of one response.

    answer   what was read from the response, in one spelling; None: nothing, or the grader does not say
    correct  whether the answer is right, format_ok: whether it stood where it should; None: the grader does not say
    failed   the grader crashed, took too long or gave no score; score is 0 then
    extra    its other numbers
    """

    score: float
    answer: str | None = None
    correct: bool | None = None
    format_ok: bool | None = None
    failed: bool = False
    extra: dict[str, float] = field(default_factory=dict)


FAILED = Grade(0.0, failed=True)


# ---------------------------------------------------------------------------------------------------- built-in graders
_SIGN = "(?P<sign>[-+\N{MINUS SIGN}]?)"
_DIGITS = r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
_NO_NUMBER = r"(?P<more>[ \t]*/[ \t]*[0-9]|[eE:][-+]?[0-9])?"
_FINAL = re.compile(rf"####[ \t$€£*_=:\\]*(?:boxed\{{)?{_SIGN}[$€£\\]*{_DIGITS}{_NO_NUMBER}")
_ANYWHERE = re.compile(rf"(?:(?<![\w)]){_SIGN})?[$€£]?{_DIGITS}")
_GOLD = re.compile(rf"\s*{_SIGN}[$€£]?{_DIGITS}\s*%?\s*")


def _number(match: re.Match[str]) -> str:
    """One spelling per number: without commas, plus, and zeros that say nothing. Equal exactly if the Decimals are."""
    text = format(Decimal(match["digits"].replace(",", "")), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text == "0" or match["sign"] in (None, "", "+") else f"-{text}"


def _gold(ground_truth: str) -> str:
    match = _GOLD.fullmatch(ground_truth)
    if not match:
        raise ValueError(f"ground_truth = {ground_truth[:60]!r} is no number; use exact or math_verify")
    return _number(match)


def _verdict(answer: str | None, right: bool, **more: Any) -> dict[str, Any]:
    return {"score": float(right), "acc": right, "pred": answer, **more}


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """1 if the response is the true answer, but for white space."""
    answer = " ".join(solution_str.split())
    return _verdict(answer, answer == " ".join(ground_truth.split()))


def gsm8k_strict(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """verl's default for GSM8K: the last ``#### number`` of the last 300 characters, as text without commas.

    As there, ``#### 72.``, ``#### 72.00``, ``#### $72`` and ``####72`` are not 72: see ``gsm8k_numeric``.
    """
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str[-300:])
    answer = found[-1].replace(",", "") if found else None
    return _verdict(answer, answer == ground_truth.strip().replace(",", ""), format=bool(found))


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """The last number anywhere, whatever stands around it, by value.

    verl's does not remove commas, keeps a full stop behind the number and reads the last 300 characters only.
    """
    found = list(_ANYWHERE.finditer(solution_str))
    answer = _number(found[-1]) if found else None
    return _verdict(answer, answer == _gold(ground_truth))


def gsm8k_numeric(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """The number after the last ``####`` that has one, by value: ``#### 72.00``, ``####72`` and ``#### $72`` are 72.

    A fraction, a power of ten or a time of day (``3/4``, ``1e3``, ``5:30``) is no answer.
    """
    found = list(_FINAL.finditer(solution_str))
    answer = _number(found[-1]) if found and not found[-1]["more"] else None
    return _verdict(answer, answer == _gold(ground_truth), format=answer is not None)


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Equal as mathematics, by package math-verify; its own time limits are off: they need the main thread."""
    from math_verify import parse, verify

    wrapped = ground_truth if "$" in ground_truth or "\\boxed" in ground_truth else f"\\boxed{{{ground_truth}}}"
    gold = parse(wrapped, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"ground_truth = {ground_truth[:60]!r} cannot be read by math-verify; use exact")
    found = parse(solution_str, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    right = bool(found) and verify(gold, found, timeout_seconds=None)
    return _verdict(str(found[0]) if found else None, right)


def _format(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, pattern: re.Pattern):
    right = pattern.fullmatch(solution_str) is not None
    return {"score": float(right), "format": right}


def format_reward(pattern: str) -> Grader:
    """A grader: 1 where the pattern matches the whole response; ``.`` matches line ends too. Raises ConfigError."""
    try:
        return partial(_format, pattern=re.compile(pattern, re.DOTALL))
    except re.error as error:
        raise ConfigError(f"format pattern {pattern!r} is no regular expression ({error}); mend it") from error


DEFAULTS: dict[str, Grader] = {"openai/gsm8k": gsm8k_numeric}
"""data_source -> its grader, unless asked otherwise."""


def auto(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """The grader that DEFAULTS has for the data source. Raises ConfigError where there is none."""
    if data_source not in DEFAULTS:
        raise ConfigError(f"data_source = {data_source!r} has no grader of its own; name one of {', '.join(GRADERS)}")
    return DEFAULTS[data_source](data_source, solution_str, ground_truth, extra_info)


_BUILT_IN = (auto, exact, gsm8k_strict, gsm8k_flexible, gsm8k_numeric, math_verify)
GRADERS: dict[str, Grader] = {grader.__name__: grader for grader in _BUILT_IN}


def is_cheap(spec: str | Grader) -> bool:
    """Whether a grader is ours, and too simple to crash or hang."""
    return spec in GRADERS and spec != "math_verify"


# ------------------------------------------------------------------------------------------------------- by their name
def resolve(spec: str | Grader) -> Grader:
    """The grader that ``spec`` names, to be called with keywords; an async one runs on an event loop of its own.

    A built-in's name, ``module:function``, ``/path/file.py:function`` or ``/path/file.py`` (``compute_score`` in it),
    or the function itself (one that can be pickled, where it goes to worker processes). Raises ConfigError.
    """
    found, label = (spec, f"grader = {spec!r}") if callable(spec) else _named(spec)
    words = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        inspect.signature(found).bind(**dict.fromkeys(words))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label}: {error}; it is called with the keywords {', '.join(words)}") from error
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        return _synchronous(found)
    return found


def _synchronous(grader: Grader) -> Grader:
    import asyncio

    runner = asyncio.Runner()  # one loop: a grader's connections live in it

    def call(**sample: Any) -> Any:
        try:
            return runner.run(grader(**sample))
        except asyncio.CancelledError as error:  # no Exception, and nobody else's
            raise RuntimeError("the grader was cancelled") from error

    weakref.finalize(call, runner.close)
    return call


def _named(spec: str) -> tuple[Grader, str]:
    """The function and ``grader = name`` for messages."""
    label = f"grader = {spec}"
    if spec in GRADERS:
        if spec == "math_verify":
            logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that are off
            try:
                math_verify("", "1", "1")  # loads it, which is not the first sample's time
            except ImportError as error:
                raise ConfigError(f"{label}: needs a package ({error}); pip install math-verify") from error
        return GRADERS[spec], label
    place, _, name = (spec + ":compute_score" if spec.endswith(".py") else spec).rpartition(":")
    if not place or not name:
        there = choose(spec, list(GRADERS), "there are: ")
        raise ConfigError(f"{label}: no such grader; {there}, module:function and FILE.py:function")
    try:
        module = _file(Path(place).expanduser(), label) if place.endswith(".py") else _module(place, label)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{label}: {place} cannot be imported ({_cause(error)}); mend it") from error
    found = getattr(module, name, None)
    if not callable(found):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        what = "is no function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"{label}: {name} {what}; {choose(name, there, f'in {place}: ')}")
    return found, label


def _file(path: Path, label: str) -> ModuleType:
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*.py"))
        raise ConfigError(f"{label}: {path} is no file; {choose(path.name, there, 'in its folder: ')}")
    name = f"embodied_ppo_grader_{path.stem}"
    plan = importlib.util.spec_from_file_location(name, path)
    assert plan is not None and plan.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(plan)
    plan.loader.exec_module(module)
    return module


def _module(name: str, label: str) -> ModuleType:
    try:
        return pkgutil.resolve_name(f"{name}:")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # one that it imports
        above, _, last = str(error.name).rpartition(".")
        there = [m.name for m in pkgutil.iter_modules(sys.modules[above].__path__ if above else None)]
        near = "".join(f"did you mean {n}? " for n in difflib.get_close_matches(last, there, n=1))
        raise ConfigError(f"{label}: no module {error.name}; {near}set PYTHONPATH, or name FILE.py:NAME") from error


# ------------------------------------------------------------------------------------------------------------ one grade
def _cause(error: BaseException) -> str:
    """Type, text and place of an exception in one line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"]
    at = f", {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + at


def _real(name: str, value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value  # NumPy's and torch's scalars
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} = {str(value)[:60]!r} of the grader is no finite number")
    return float(value)


def as_grade(result: Any) -> Grade:
    """What a grader returned: a number, a bool, or a dictionary with "score".

    A dictionary may have "pred" or "answer", "acc" or "correct" (right where >= 1) and "format"; its other numbers go
    to ``extra``, its other entries nowhere. Raises ValueError for anything else.
    """
    if isinstance(result, bool):
        return Grade(float(result), correct=result)
    if not isinstance(result, Mapping):
        return Grade(_real("result", result))
    rest = dict(result)
    if "score" not in rest:
        raise ValueError(f"the grader's dictionary has no 'score'; its keys: {', '.join(map(str, rest)) or 'none'}")

    def take(*names: str) -> Any:
        return next((v for v in [rest.pop(n, None) for n in names] if v is not None), None)

    score, answer = _real("score", rest.pop("score")), take("pred", "answer")
    right, form = take("acc", "correct"), take("format")
    more = {str(k): v for k, v in rest.items() if isinstance(v, Real) or getattr(v, "shape", None) == ()}
    return Grade(
        score,
        answer=None if answer is None else " ".join(str(answer).split()),
        correct=None if right is None else _real("acc", right) >= 1,
        format_ok=None if form is None else _real("format", form) >= 1,
        extra={k: _real(k, v) for k, v in more.items()},
    )


def judge(grader: Grader, sample: Sample) -> tuple[Grade, str | None]:
    """The grade of one sample, and the cause where the grader failed."""
    source, response, truth, extra = sample
    try:
        result = grader(data_source=source, solution_str=response, ground_truth=truth, extra_info=extra)
        return as_grade(result), None
    except (Exception, SystemExit) as error:
        return FAILED, _cause(error)


# ----------------------------------------------------------------------------------------------------------------- pool
def _serve(spec: str | Grader, pipe: Connection) -> None:
    """A worker's life: None when its grader is loaded (or a text why not), then an answer to every sample."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # what a grader starts can be ended with it
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    try:
        grader = resolve(spec)
    except ConfigError as error:
        return pipe.send(str(error))
    pipe.send(None)
    with suppress(EOFError):
        while True:
            pipe.send(judge(grader, pipe.recv()))


class _Worker:
    """One process, and the sample it is at."""

    def __init__(self, spec: str | Grader) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, far), daemon=True, name="grader")
        self.process.start()
        far.close()
        self.ready = False
        self.sample: int | None = None
        self.deadline = time.monotonic() + START_S

    def stop(self, *, grace_s: float = 0.0) -> str:
        """End it and what it started; how it ended by itself if it did within ``grace_s``."""
        pid, process = self.process.pid, self.process
        assert pid is not None
        process.join(grace_s)
        code = process.exitcode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()
        self.pipe.close()
        if code is None:
            return "the worker stopped answering"
        return f"the worker died of {signal.Signals(-code).name}" if code < 0 else f"the worker exited with code {code}"


class GraderPool:
    """Grades batches, in worker processes that may crash or hang without harm to the rest."""

    def __init__(self, spec: str | Grader, *, workers: int | None, timeout_s: float) -> None:
        """``workers``: processes; 0: in this process and without time limit; None: 0 for a cheap grader, else 2.

        ``timeout_s``: limit of one sample, seconds. Raises ConfigError.
        """
        if workers is not None and workers < 0:
            raise ConfigError(f"workers = {workers} must be >= 0; 0 grades in this process")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s = {timeout_s:g} must be > 0; write 10")
        self.spec, self.timeout_s = spec, timeout_s
        self.count = workers if workers is not None else 0 if is_cheap(spec) else 2
        self.failures = 0
        """Samples whose grader failed, so far."""
        self.last_failure: str | None = None
        """The first failure of the last batch that had any."""
        self._workers: list[_Worker] = []
        self._closed = False
        self._here = None if self.count else resolve(spec)
        try:
            self._fill()
            while not all(worker.ready for worker in self._workers):
                for worker, message in self._events():
                    if isinstance(message, str):
                        raise ConfigError(message if message.startswith("grader =") else f"grader = {spec}: {message}")
                    worker.ready = True
        except BaseException:
            self.close()
            raise

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """One grade per sample, in their order."""
        assert not self._closed
        if self._here is not None:
            judged = [judge(self._here, sample) for sample in samples]
        else:
            judged = self._spread(samples)
        failed = [i for i, (_, cause) in enumerate(judged) if cause is not None]
        self.failures += len(failed)
        if failed:
            i = failed[0]
            source, response, truth, _ = samples[i]
            told = f"data_source = {source}, ground_truth = {truth[:60]!r}, response = {response[:60]!r}"
            self.last_failure = f"sample {i} of {len(samples)} ({told}): {judged[i][1]}"
        return [grade for grade, _ in judged]

    def close(self) -> None:
        """End every worker; may be called again."""
        self._closed = True
        while self._workers:
            self._workers.pop().stop()

    def _fill(self) -> None:
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self.spec))

    def _drop(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        return worker.stop(grace_s=grace_s)

    def _spread(self, samples: Sequence[Sample]) -> list[tuple[Grade, str | None]]:
        judged: dict[int, tuple[Grade, str | None]] = {}
        todo, trouble, starts = deque(range(len(samples))), "", 0
        try:
            while len(judged) < len(samples):
                if starts == 0 or (not self._workers and starts < 3):
                    starts += 1
                    self._fill()
                for worker in [w for w in self._workers if w.ready and w.sample is None][: len(todo)]:
                    try:
                        worker.pipe.send(samples[todo[0]])
                    except OSError:  # it died meanwhile: not this sample's doing
                        trouble = self._drop(worker)
                        continue
                    worker.sample, worker.deadline = todo.popleft(), time.monotonic() + self.timeout_s
                if not self._workers and starts == 3:
                    judged |= dict.fromkeys(todo, (FAILED, trouble))
                for worker, message in self._events():
                    i, worker.sample = worker.sample, None
                    if i is None:
                        worker.ready, trouble = True, message or ""
                    elif isinstance(message, str):
                        judged[i] = FAILED, message
                        self._fill()
                    else:
                        judged[i] = message
        finally:  # an interrupt: answers to this batch must not be taken for the next one's
            for worker in [w for w in self._workers if w.sample is not None]:
                self._drop(worker)
        return [judged[i] for i in range(len(samples))]

    def _events(self) -> Iterator[tuple[_Worker, Any]]:
        """Wait until a worker says something; those that end or are late are dropped, and a text says why."""
        busy = {w.pipe: w for w in self._workers if not w.ready or w.sample is not None}
        if not busy:
            return
        said = wait(list(busy), max(0.0, min(w.deadline for w in busy.values()) - time.monotonic()))
        for pipe, worker in busy.items():
            if pipe in said:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = self._drop(worker, grace_s=1.0)
                else:
                    if isinstance(message, str):
                        self._drop(worker)
                yield worker, message
            elif time.monotonic() > worker.deadline:
                self._drop(worker)
                limit = f"timeout_s = {self.timeout_s:g}" if worker.ready else f"{START_S:g} s to load"
                yield worker, f"took longer than {limit}"


# ----------------------------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    As 1 - prod over i = n-c+1 .. n of (1 - k/i), which neither overflows nor is biased. Raises ConfigError.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@k: k = {k} must be >= 1 and <= n = {n} samples; draw more, or ask for a smaller k")
    if not 0 <= c <= n:
        raise ConfigError(f"pass@k: c = {c} right ones must be >= 0 and <= n = {n}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is right (maj@k); of equally frequent ones the first seen.

    None (no answer) wins only where there is nothing else. Raises ConfigError.
    """
    if not answers or len(answers) != len(correct):
        raise ConfigError(f"maj@k: {len(answers)} answers and {len(correct)} verdicts must be as many, and >= 1")
    votes = Counter(answer for answer in answers if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None  # first seen first
    return bool(correct[answers.index(winner)])


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values: sqrt(Σ(x - mean)² / n²), sqrt(p(1-p)/n) for 0s and 1s; NaN below 2 values."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values)) / n
