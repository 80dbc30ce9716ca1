"""Whoever waits at the terminal: signals that ask a command to stop, and progress of what takes long."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from embodied_ppo.core import compile, watchdog
from embodied_ppo.training.logging import LINE_EVERY_S, Timer


def _signals() -> list[signal.Signals]:
    """Those that end a run: Ctrl-C, SIGTERM and, unless nohup has it ignored, a terminal that is closed."""
    known = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [s for s in known if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]


@contextmanager
def stop_signals(timer: Timer) -> Iterator[Callable[[], bool]]:
    """``_signals`` ask to stop after the update under way; a second one, one while evaluating, or while
    waiting for the compiler, at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if watchdog.is_repetition():
            return
        if asked or timer.phase == "evaluate" or compile.CompileSchedule.waiting:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {s: signal.signal(s, ask) for s in _signals()}
    except ValueError:  # not in the main thread: the caller keeps its signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """``_signals`` raise KeyboardInterrupt: at once, or where ``whole()`` ends; a second one at once."""

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}
        self._busy = self._asked = False

    def __enter__(self) -> Interrupts:
        with suppress(ValueError):  # not in the main thread: the caller keeps its signals
            self._before = {s: signal.signal(s, self._ask) for s in _signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if watchdog.is_repetition():
            return
        if not self._busy or self._asked:
            raise KeyboardInterrupt
        self._asked = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is not to be cut in two."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._asked:
            raise KeyboardInterrupt


class Progress:
    """Of what takes long beside training: a bar on a terminal, else a line every LINE_EVERY_S; on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._what, self._first, self._begun, self._told = "", 0, 0.0, 0.0

    def say(self, line: str) -> None:
        """A line, above the bar."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def advance(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total``."""
        if self.quiet:
            return
        now = time.perf_counter()
        if what != self._what:
            self._what, self._first, self._begun, self._told = what, done, now, now
            if sys.stderr.isatty():
                self._bar = self._bar or _bar()
                self._bar.add_task(what, total=total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=done)
        elif now - self._told >= LINE_EVERY_S:
            self._told = now
            left = (now - self._begun) / max(1, done - self._first) * (total - done)
            print(f"{what} {done}/{total}  {left:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.start()
    return bar
