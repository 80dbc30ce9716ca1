"""Interaction with the terminal: signals that stop a command, and progress bars."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from embodied_ppo.core import compile, watchdog
from embodied_ppo.training.logging import LINE_EVERY_S, Timer, bar_console, shows_bars


def _signals() -> list[signal.Signals]:
    """Return the signals that end a run: SIGINT, SIGTERM and, unless nohup ignores it, SIGHUP."""
    candidates = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [
        s for s in candidates if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN
    ]


@contextmanager
def stop_signals(timer: Timer) -> Iterator[Callable[[], bool]]:
    """Let a signal stop the run after the current update.

    A second signal, or one during an evaluation or while waiting for the compiler, raises
    KeyboardInterrupt at once.

    Yields:
        A function that returns whether a signal has arrived.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if watchdog.is_repetition():
            return
        if received or timer.phase == "evaluate" or compile.CompileSchedule.waiting:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {s: signal.signal(s, handle) for s in _signals()}
    except ValueError:  # not in the main thread: the caller keeps its signals
        before = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """Context in which signals raise KeyboardInterrupt.

    In an ``uninterrupted`` block the first signal raises it at the end of the block; a second one
    raises it at once.
    """

    def __init__(self) -> None:
        self._before: dict[Any, Any] = {}
        self._deferring = self._received = False

    def __enter__(self) -> Interrupts:
        with suppress(ValueError):  # not in the main thread: the caller keeps its signals
            self._before = {s: signal.signal(s, self._handle) for s in _signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if watchdog.is_repetition():
            return
        if not self._deferring or self._received:
            raise KeyboardInterrupt
        self._received = True

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Defer the first signal until the end of the block."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._received:
            raise KeyboardInterrupt


class Progress:
    """Progress of long tasks other than training, on stderr.

    It is a bar on a terminal, otherwise a line every LINE_EVERY_S seconds.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._task, self._first, self._start, self._last_line = "", 0, 0.0, 0.0

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def advance(self, task: str, completed: int, total: int) -> None:
        """Show the progress of a task.

        Args:
            task: Name; a new one starts a new bar.
            completed: Units that are completed.
            total: Units of the task.
        """
        if self.quiet:
            return
        now = time.perf_counter()
        if task != self._task:
            self._task, self._first, self._start, self._last_line = task, completed, now, now
            if shows_bars():
                self._bar = self._bar or _bar()
                self._bar.add_task(task, total=total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=completed)
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            remaining_s = (
                (now - self._start) / max(1, completed - self._first) * (total - completed)
            )
            print(
                f"{task} {completed}/{total}  {remaining_s:.0f} s left", file=sys.stderr, flush=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    """Start a progress bar of rich."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=bar_console())
    bar.start()
    return bar
