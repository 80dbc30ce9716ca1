"""Train, and continue after every disturbance: a kill, a full disk, a lost worker.

    disturbed_training.start() with the arguments FOLDER EVERY DISTURBANCES OPTION ..

Each attempt is forked from this process, which has imported torch. EVERY so many updates its memory
and descriptors are written to FOLDER/usage.jsonl. DISTURBANCES is JSON, {update: name}.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray_fork_server

from embodied_ppo.commands import main
from embodied_ppo.programs import runs

BALLAST = Path("ballast")


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def worker_pids(system: Any) -> list[int]:
    """Return the processes of the roles; in a local run those of simulators or graders."""
    if hasattr(system, "processes"):
        return [handle.pid for handle in system.processes.handles]
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def usage(system: Any) -> dict[str, float]:
    """Return memory, descriptors and threads of this process, and the size of the run."""
    files = [file.stat().st_size for file in Path("run").rglob("*") if not file.is_symlink()]
    return {
        "pid": os.getpid(),
        "rss_mb": rss_mb(os.getpid()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "workers_mb": sum(map(rss_mb, worker_pids(system))),
        "run_mb": sum(files) / 2**20,
    }


def disturb(name: str, system: Any) -> None:
    """Kill the command, fill the disk, or kill a worker."""
    if name == "disk":
        with suppress(OSError), open(BALLAST, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return
    # A run without workers is ended itself, which its supervisor reports. The kernel ends a run
    # whose supervisor was killed.
    worker = [*worker_pids(system), os.getpid()][0]
    os.kill(os.getppid() if name == "kill" else worker, signal.SIGKILL)
    if name == "kill":
        signal.pause()


def start() -> None:
    """Train until the run is complete; write the exit codes of all attempts to FOLDER/codes."""
    folder, every, events, *options = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    sys.argv = ["embodied-ppo", "train", "--quiet", "resume=auto", "run_dir=run", *options]
    disturbances: dict[str, str] = json.loads(events)
    log_update = runs.loop.evaluate_and_log

    def observed(system: Any, *arguments: Any, update: int) -> None:
        log_update(system, *arguments, update=update)
        if update % every == 0:
            with open(folder / "usage.jsonl", "a") as file:
                file.write(json.dumps({"update": update, **usage(system)}) + "\n")
        with suppress(FileNotFoundError, KeyError):  # an update is disturbed once and repeated
            name = disturbances[str(update)]
            (folder / str(update)).rmdir()
            disturb(name, system)

    runs.loop.evaluate_and_log = observed
    if any(option.startswith("placement=") for option in options):
        ray_fork_server.install()
    for update in disturbances:
        (folder / update).mkdir()
    codes: list[int] = []
    while 0 not in codes and len(codes) <= len(disturbances):
        if (attempt := os.fork()) == 0:
            sys.exit(main.main())
        codes.append(os.waitstatus_to_exitcode(os.waitpid(attempt, 0)[1]))
        with suppress(FileNotFoundError), open("run/.lock") as lock:  # a killed run may be ending
            fcntl.flock(lock, fcntl.LOCK_EX)
        BALLAST.unlink(missing_ok=True)
    (folder / "codes").write_text(" ".join(map(str, codes)))
