"""Interaction with the terminal: signals that stop a command, and progress bars."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from embodied_envs.base import watchdog
from embodied_envs.types import Say
from embodied_ppo.core import compile
from embodied_ppo.core.types import ProgressCallback
from embodied_ppo.training.logging import LINE_EVERY_S, Timer, print_line, shows_bars, start_bar


@contextmanager
def _signal_handler(handle: Callable[[], None]) -> Iterator[None]:
    """Call ``handle`` for SIGINT, SIGTERM and, unless nohup ignores it, SIGHUP."""
    is_interrupted = False

    def on_signal(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        # A signal to the process group arrives twice, directly and through the supervisor.
        if not watchdog.is_repetition():
            is_interrupted = True
            handle()
            is_interrupted = False

    # A command under nohup must survive the end of its terminal.
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before: dict[Any, Any] = {}
    with suppress(ValueError):  # not in the main thread: the caller keeps its signals
        before = {s: signal.signal(s, on_signal) for s in signals}
    try:
        yield
    except Exception as error:
        # ctypes replaces a KeyboardInterrupt in the conversion of an argument by its own error.
        if is_interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals(timer: Timer) -> Iterator[Callable[[], bool]]:
    """Let a signal stop the run after the current update.

    A second signal, or one during an evaluation or while waiting for the compiler, raises
    KeyboardInterrupt at once.

    Yields:
        A function that returns whether a signal has arrived.
    """
    is_stopping = False

    def handle() -> None:
        nonlocal is_stopping
        # An evaluation may take long, and the update before it is in a checkpoint already.
        if is_stopping or timer.phase == "evaluate" or compile.CompileSchedule.waiting:
            raise KeyboardInterrupt
        is_stopping = True

    with _signal_handler(handle):
        yield lambda: is_stopping


class Interrupts(ExitStack):
    """Context in which signals raise KeyboardInterrupt.

    In an ``uninterrupted`` block the first signal raises it at the end of the block; a second one
    raises it at once.
    """

    _deferring = _received = False

    def __enter__(self) -> Interrupts:
        self.enter_context(_signal_handler(self._handle))
        return self

    def _handle(self) -> None:
        # A second signal ends even a block that must not be interrupted.
        is_second, self._received = self._received, True
        if is_second or not self._deferring:
            raise KeyboardInterrupt

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Defer the first signal until the end of the block."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        # Also for a signal before the block whose KeyboardInterrupt was lost, in a destructor. This
        # is not in ``finally``, so that an error of the block is not replaced.
        if self._received:
            raise KeyboardInterrupt


class Progress(AbstractContextManager["Progress"]):
    """Progress of long tasks other than training, on stderr.

    It is a bar on a terminal, otherwise a line every LINE_EVERY_S seconds.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._task, self._first, self._start, self._last_line = "", 0, 0.0, 0.0

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self.quiet:
            print_line(line, self._bar)

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
            # A task that continues starts at ``completed``; those units took no time.
            self._task, self._first, self._start, self._last_line = task, completed, now, now
            if shows_bars():
                # All tasks share one display, with a bar for each.
                self._bar = self._bar or start_bar()
                self._bar.add_task(task, total=total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=completed)
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            # Mean duration of a unit so far, times the units that are missing.
            mean_s = (now - self._start) / max(1, completed - self._first)
            line = f"{task} {completed}/{total}  {mean_s * (total - completed):.0f} s left"
            print_line(line, None)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def counter(advance: ProgressCallback, task: str, total: int) -> Callable[[Any], None]:
    """Show the start of a task; return a function that counts one unit more in each call.

    Args:
        advance: Progress callback ``(task, completed, total)``.
        task: Name of the task.
        total: Units of the task.
    """
    completed = itertools.count(1)
    advance(task, 0, total)
    return lambda _: advance(task, next(completed), total)


class Messages:
    """Lines for the user; those before the log is open are kept and then written to it."""

    def __init__(
        self, show: Say, advance: ProgressCallback = lambda task, completed, total: None
    ) -> None:
        """Create an empty list of lines.

        Args:
            show: Shows a line to the user at once.
            advance: Progress callback ``(task, completed, total)``.
        """
        self.advance = advance
        self._show = show
        self._say: Say | None = None
        # Lines before the log is open, and whether they were shown.
        self._kept: list[tuple[str, bool]] = []
        self._notices: set[str] = set()

    def add(self, line: str) -> None:
        """Add a line to the log."""
        if self._say is None:
            self._kept.append((line, False))
        else:
            self._say(line)

    def notice(self, line: str) -> None:
        """Add a line to the log, each line once."""
        if line not in self._notices:
            self._notices.add(line)
            self.add(line)

    def progress(self, line: str) -> None:
        """Show a line at once: a slow step begins or ends."""
        if self._say is not None:
            self._say(line)
            return
        self._kept.append((line, True))
        self._show(line)

    def open(self, say: Say, note: Say | None = None) -> None:
        """Write the lines so far to the log, and all further ones.

        Args:
            say: Writes a line to the log and shows it.
            note: Writes a line that was shown to the log; None: as ``say``.
        """
        self._say = say
        for line, was_shown in self._kept:
            (note if note is not None and was_shown else say)(line)
