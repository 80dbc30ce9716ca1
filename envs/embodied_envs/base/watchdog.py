"""Record of the simulator call that is in progress in this process.

The record holds the kind of call, its start and its time limit. It is in memory shared with a
supervising parent process (``supervisor``). The parent can therefore report the cause even if this
process hangs in the call, crashes in it or is killed by it. There is one record, so that only one
thread of a process may call simulators at a time.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path

from embodied_envs.base.errors import ProcessLost, TrainingError

# Simulator calls, by their index in the record.
CALLS = ("its constructor", "reset()", "step()")
# Indices into ``numbers``.
#
# SINCE: monotonic time in seconds at which the call began, 0 without a call. CALL: index into
# CALLS. LIMIT: time limit of the call in seconds. EXIT_CODE_PLUS_ONE: exit code of the command plus
# 1, 0 while it runs. FORWARDED: number of signals that the supervisor forwarded.
SINCE, CALL, LIMIT, EXIT_CODE_PLUS_ONE, FORWARDED = range(5)
# Byte offsets of the description and of the path of the log.
_TEXT, _PATH = 64, 1024

memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
numbers = memoryview(memory)[:_TEXT].cast("d")
numbers[LIMIT] = math.inf
# Whether the parent process supervises this one.
supervised = False
_env_id, _during = "", ""


class _Call:
    """Context manager of one simulator call; costs 0.5 us."""

    def __init__(self, index: int) -> None:
        self.index = float(index)

    def __enter__(self) -> None:
        numbers[CALL] = self.index
        numbers[SINCE] = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is SystemExit:
            # SystemExit of user code would end the run without a message.
            message = f"{_subject()} called sys.exit({getattr(error, 'code', None)}){_phase()}"
            numbers[SINCE] = 0.0
            raise TrainingError(
                f"{message}; raise an exception that names the cause instead"
            ) from error
        numbers[SINCE] = 0.0


constructing, resetting, stepping = (_Call(i) for i in range(len(CALLS)))


def describe(*, env_id: str | None = None, during: str | None = None) -> None:
    """Record the environment of the following calls and the phase of the run ("update 3")."""
    global _env_id, _during
    _env_id = _env_id if env_id is None else env_id
    _during = _during if during is None else during
    _write(_TEXT, f"{_env_id[:200]}\n{_during}", _PATH - _TEXT)


def set_limit(seconds: float | None) -> None:
    """Set the time limit of one call in seconds; None: no limit."""
    numbers[LIMIT] = math.inf if seconds is None else seconds


def log_to(path: Path) -> None:
    """Record the path of the log to which the supervisor appends its last line."""
    _write(_PATH, str(path.absolute()), len(memory) - _PATH)


def clear() -> None:
    """Clear the description and the log: another run begins in this process."""
    describe(env_id="", during="")
    memory[_PATH] = 0


def log_path() -> Path | None:
    """Return the path set by ``log_to``, None if there is none."""
    text = _read(_PATH)
    return Path(text) if text else None


def _write(offset: int, text: str, capacity: int) -> None:
    """Store text as a null-terminated string of at most ``capacity`` bytes."""
    data = text.encode(errors="replace")[: capacity - 1]
    memory[offset : offset + len(data) + 1] = data + b"\0"


def _read(offset: int) -> str:
    """Return the null-terminated string at ``offset``."""
    return memory[offset : memory.find(b"\0", offset)].decode(errors="replace")


def _subject() -> str:
    return f"env.id={_read(_TEXT).partition(chr(10))[0]}: {CALLS[int(numbers[CALL])]}"


def _phase() -> str:
    during = _read(_TEXT).partition("\n")[2]
    return f" ({during})" if during else ""


# Start time of the call that was interrupted by Ctrl-Z, and the total length of its pauses (s).
_paused_call = _paused_s = 0.0


def exclude_pause(seconds: float) -> None:
    """Subtract a pause (Ctrl-Z) from the elapsed time of the current simulator call.

    Args:
        seconds: Time during which all processes of the command were stopped.
    """
    global _paused_call, _paused_s
    since = numbers[SINCE]
    _paused_s = seconds + (_paused_s if since == _paused_call else 0.0)
    _paused_call = since


def timeout_message() -> str:
    """Return the message about a call that exceeds its time limit, "" if there is none."""
    since, seconds = numbers[SINCE], numbers[LIMIT]
    paused_s = _paused_s if since == _paused_call else 0.0
    if not since or time.monotonic() - since - paused_s <= seconds:
        return ""
    return (
        f"{_subject()} has not returned for {seconds:g} s (env.step_timeout_s){_phase()}; repair"
        " the simulator or raise the limit; resume continues from the last checkpoint"
    )


def wait_for_timeout() -> None:
    """Block until a call exceeds its limit, then raise ProcessLost.

    Run it in a thread of its own.
    """
    while not (message := timeout_message()):
        time.sleep(min(1.0, max(0.05, numbers[LIMIT] / 4)))
    raise ProcessLost(message)


def exit_message(ending: str) -> str:
    """Return the message about a process that ended without an error message.

    Args:
        ending: How the process ended, e.g. "was ended by SIGSEGV".
    """
    hint = "resume continues from the last checkpoint"
    if numbers[SINCE]:
        return f"{_subject()}: the process {ending}{_phase()}; {hint}"
    return f"the process {ending}; {hint}, if there is one"


def command_pid() -> int:
    """Return the id of the process that the user started; signals to it reach this process."""
    return os.getppid() if supervised else os.getpid()


_delivered = _requests = 0


def is_repetition() -> bool:
    """Return whether the current signal repeats one that was already handled.

    Call it exactly once in each signal handler. A signal to the process group reaches this process
    twice: directly, and through the supervisor.
    """
    global _delivered, _requests
    _delivered += 1
    forwarded = int(numbers[FORWARDED])
    requests = max(forwarded, _delivered - forwarded)
    handled, _requests = _requests, max(_requests, requests)
    return requests <= handled
