"""Several command lines at the same time, each in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from embodied_ppo.options.compose import override_lines

POLL_S = 0.2
"""Seconds between two checks whether a process has ended."""
PR_SET_PDEATHSIG = 1


class ProcessPool:
    """Processes that are ended, with time to save their state, at the end of the context."""

    def __init__(self, size: int) -> None:
        """Create a pool without processes.

        Args:
            size: Largest number of processes at the same time.
        """
        self.size = size
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        """Name -> process."""

    @property
    def free(self) -> int:
        """Number of processes that can be started now."""
        return self.size - len(self.running)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start a process.

        Args:
            name: Its name in ``running`` and in the result of ``ended``.
            command: Program and arguments.
            log: File to which stdout and stderr are appended; its folder is created.
            environment: Environment variables in addition to those of this process.
            folder: Working directory; None: use that of this process.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                cwd=folder,
                # Ctrl-C in the terminal would be a second signal, see ``__exit__``.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def ended(self) -> dict[str, int]:
        """Return name -> exit code of the processes that ended since the last call."""
        codes = {name: process.poll() for name, process in self.running.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name in ended:
            del self.running[name]
        return ended

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Send one signal to each process, and wait until all have ended.

        At the first signal a training run saves a checkpoint; at a second one it stops at once.
        """
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait()


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def train_command(run_dir: Path, flags: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return the command line that starts a run, or continues it from its newest checkpoint.

    Args:
        run_dir: Directory of the run.
        flags: Flags that choose the configs.
        lines: Overrides of a new run, besides its directory.
    """
    program = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--json", "--quiet"]
    (folder,) = override_lines("train", {"run_dir": str(run_dir.absolute())})
    if any((run_dir / "checkpoints").glob("step_[0-9]*")):
        return [*program, folder.replace("run_dir=", "resume=", 1)]
    return [*program, *flags, *lines, folder]


def last_line(log: Path, code: int) -> str:
    """Return the last line of a log, or a text with the exit code if the log is empty."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"
