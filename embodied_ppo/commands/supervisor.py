"""Run a command in a child process, so that crashes have a last line and an exit code, too.

A simulator may crash (SIGSEGV), call ``os._exit`` or hang while it holds the interpreter's lock,
and the kernel may end the process for lack of memory. Only another process can report these. The
child is forked before large imports: that takes about a millisecond and a few megabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from embodied_envs.base import watchdog
from embodied_ppo.commands.exit_codes import FAILED, INTERRUPTED

CHECK_S = 0.5  # interval of the checks of the simulator's time limit, seconds
# Interval of two checks above which the process group must have been stopped (Ctrl-Z), seconds.
PAUSE_S = 5.0
PR_SET_PDEATHSIG = 1
SI_KERNEL = 0x80  # origin of a signal from the terminal, which the whole process group receives
# Whether a command that handles no signals was interrupted in this process.
is_interrupted = False
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def supervise(run: Callable[[], int]) -> int:
    """Call ``run`` in a child process and return its exit code.

    A child that crashes or is ended is reported with exit code 3. The process is not forked under a
    debugger.
    """
    if sys.platform != "linux" or sys.gettrace() is not None:
        return run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed: None
            stream.flush()  # otherwise the child would write its content, too
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _supervised(run, parent)
    status, interrupted = _wait(child)
    if watchdog.numbers[watchdog.EXIT_CODE_PLUS_ONE]:
        return int(watchdog.numbers[watchdog.EXIT_CODE_PLUS_ONE]) - 1
    code = os.waitstatus_to_exitcode(status)
    if interrupted:  # the user sent a signal before the command handled signals
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    message = watchdog.timeout_message() or watchdog.exit_message(_ending(code))
    _append_to_log(f"failed: {message}")
    print(f"error: {message}", file=sys.stderr, flush=True)
    return FAILED


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def _supervised(run: Callable[[], int], parent: int) -> int:
    """Call ``run`` in the child process."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(FAILED)
    watchdog.supervised = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    code = run()
    # A crash at the exit of the interpreter does not change the result.
    watchdog.numbers[watchdog.EXIT_CODE_PLUS_ONE] = code + 1
    return code


def _interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt unless the same signal arrives a second time."""
    global is_interrupted
    if not watchdog.is_repetition():
        is_interrupted = True
        raise KeyboardInterrupt


def _wait(child: int) -> tuple[int, bool]:
    """Wait for the end of the child.

    Forwards signals that only this process received. Ends the child if its simulator exceeds the
    time limit.

    Returns:
        The status of the child, and whether a signal was received.
    """
    received = False
    checked = time.monotonic()
    while True:
        now = time.monotonic()
        if now - checked > PAUSE_S:
            watchdog.exclude_pause(now - checked)
        checked = now
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, received
        if watchdog.timeout_message():
            for pid in [child, *_descendants(child)]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            return os.waitpid(child, 0)[1], received
        info = signal.sigtimedwait({*SIGNALS, signal.SIGCHLD}, CHECK_S)
        # If a pause (SIGSTOP) outlasts the time limit, CPython returns an uninitialised siginfo.
        if info is not None and info.si_signo in SIGNALS:
            received = True
            if info.si_code != SI_KERNEL:
                watchdog.numbers[watchdog.FORWARDED] += 1
                os.kill(child, info.si_signo)


def _descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process started, recursively."""
    with contextlib.suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _ending(code: int) -> str:
    """Describe how a process ended, from its exit code."""
    if code >= 0:
        return f"was ended with exit code {code} (os._exit or a library's exit)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does so where memory runs out: see dmesg)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _append_to_log(text: str) -> None:
    """Append a line to the run's log.txt in the format of ``training.logging.Log``."""
    path = watchdog.log_path()
    if path is not None:
        with contextlib.suppress(OSError), open(path, "a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
