"""The simulator call under way in this process: which, since when, and its time limit.

The record lies in memory that a supervising parent shares (``supervisor``), so that the cause is
known although this process hangs in the call, crashes in it or is ended by it.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path

from embodied_ppo.core.errors import ProcessLost, TrainingError

CALLS = ("its constructor", "reset()", "step()")
"""What is called of a simulator, by the number in the record."""
SINCE, CALL, LIMIT, DONE, FORWARDED = range(5)
"""Places of ``numbers``: time (monotonic, s) at which the call began, 0 for none; its index in CALLS; the limit, s; 1
once the command has reported its end; signals that the supervisor sent on."""
_TEXT, _PATH = 64, 1024
"""Where the description and the path of the log begin, bytes."""

memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
numbers = memoryview(memory)[:_TEXT].cast("d")
numbers[LIMIT] = math.inf
supervised = False
"""Whether the parent of this process supervises it."""
_env_id, _during = "", ""


class _Call:
    """Context of one simulator call; costs 0.5 us."""

    def __init__(self, index: int) -> None:
        self.index = float(index)

    def __enter__(self) -> None:
        numbers[CALL] = self.index
        numbers[SINCE] = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is SystemExit:
            ended = f"{_subject()} called sys.exit({getattr(error, 'code', None)}){_when()}"
            numbers[SINCE] = 0.0
            raise TrainingError(f"{ended}; raise an exception that names the cause instead") from error
        numbers[SINCE] = 0.0


making, resetting, stepping = (_Call(i) for i in range(len(CALLS)))


def describe(*, env_id: str | None = None, during: str | None = None) -> None:
    """Note which environment is called from now on, and during what ("update 3")."""
    global _env_id, _during
    _env_id = _env_id if env_id is None else env_id
    _during = _during if during is None else during
    _write(_TEXT, f"{_env_id[:200]}\n{_during}", _PATH - _TEXT)


def limit(seconds: float | None) -> None:
    """Set the time limit of one call; None: no limit."""
    numbers[LIMIT] = math.inf if seconds is None else seconds


def log_to(path: Path) -> None:
    """Note the log that the supervisor adds its last line to."""
    _write(_PATH, str(path.absolute()), len(memory) - _PATH)


def log_path() -> Path | None:
    text = _read(_PATH)
    return Path(text) if text else None


def _write(at: int, text: str, room: int) -> None:
    data = text.encode(errors="replace")[: room - 1]
    memory[at : at + len(data) + 1] = data + b"\0"


def _read(at: int) -> str:
    return memory[at : memory.find(b"\0", at)].decode(errors="replace")


def _subject() -> str:
    return f"env.id={_read(_TEXT).partition(chr(10))[0]}: {CALLS[int(numbers[CALL])]}"


def _when() -> str:
    during = _read(_TEXT).partition("\n")[2]
    return f" ({during})" if during else ""


def overdue() -> str:
    """The message about a call that exceeds its limit; "": none does."""
    since, seconds = numbers[SINCE], numbers[LIMIT]
    if not since or time.monotonic() - since <= seconds:
        return ""
    return (
        f"{_subject()} has not returned for {seconds:g} s (env.step_timeout_s){_when()}; repair the simulator or "
        "raise the limit; resume continues from the last checkpoint"
    )


def wait_until_overdue() -> None:
    """Return never, but raise ProcessLost when a call exceeds its limit; for a thread of its own."""
    while not (message := overdue()):
        time.sleep(min(1.0, max(0.05, numbers[LIMIT] / 4)))
    raise ProcessLost(message)


def cause(ending: str) -> str:
    """The message about a process that ended without one; ``ending``: "was ended by SIGSEGV"."""
    if numbers[SINCE]:
        return f"{_subject()}: the process {ending}{_when()}; resume continues from the last checkpoint"
    return f"the process {ending}; resume continues from the last checkpoint, if there is one"


def command_pid() -> int:
    """The process that the user started: signals to it reach this one."""
    return os.getppid() if supervised else os.getpid()


_delivered = _requests = 0


def is_repetition() -> bool:
    """Whether the signal being handled repeats one that was handled; call it once in each handler.

    A signal to the process group reaches this process twice: directly, and through the supervisor.
    """
    global _delivered, _requests
    _delivered += 1
    forwarded = int(numbers[FORWARDED])
    requests = max(forwarded, _delivered - forwarded)
    known, _requests = _requests, max(_requests, requests)
    return requests <= known
