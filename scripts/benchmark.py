"""Shared parts of the benchmark scripts: commands, parts, timing, tables and stored results.

Import this module before torch and before our packages: it limits each process to one thread, and
lets the scripts run in a checkout that is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("embodied_envs") is None:  # the checkout is not installed
    _FOLDERS = [str(ROOT), str(ROOT / "envs")]
    sys.path += _FOLDERS
    _PATHS = [os.environ.get("PYTHONPATH"), *_FOLDERS]  # of the processes that a script starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))
RESULTS = ROOT / "docs" / "results"
Job = tuple[str, int]
"""Experiment or variant, and seed."""
T = TypeVar("T")


# ---------------------------------------------------------------------------------------- commands
def run_command(command: str, *options: str, cwd: Path | None = None) -> dict[str, Any]:
    """Run ``embodied-ppo COMMAND --json`` and return its result.

    Raises:
        SystemExit: The command failed; the message holds the end of its stderr.
    """
    line = [sys.executable, "-m", "embodied_ppo.commands.main", command, "--quiet", "--json"]
    process = subprocess.run([*line, *options], cwd=cwd, capture_output=True, text=True)
    if process.returncode:
        text = f"{command} {' '.join(options)}: exit {process.returncode}\n{process.stderr[-2000:]}"
        raise SystemExit(text)
    return json.loads(process.stdout)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def argument_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with those common arguments that have a default in ``defaults``.

    Args:
        description: The docstring of the script.
        defaults: Of ``seeds``, ``rounds``, ``runs`` (a folder) and ``json`` (a file or None).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if "seeds" in defaults:
        parser.add_argument("--seeds", type=int, default=defaults["seeds"])
        parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
        parser.add_argument("--override", action="append", default=[], help="option of every run")
    if "rounds" in defaults:
        parser.add_argument("--rounds", type=int, default=defaults["rounds"])
    if "runs" in defaults:
        parser.add_argument("--runs", type=Path, default=defaults["runs"], help="run directories")
    if "json" in defaults:
        parser.add_argument("--json", type=Path, default=defaults["json"], help="also write a file")
    return parser


def run_jobs(run: Callable[..., Any], jobs: Iterable[Job], number: int) -> Iterator[Any]:
    """Yield ``run(*job)`` of each job in order, with ``number`` jobs at the same time."""
    with ThreadPoolExecutor(number) as pool:
        yield from pool.map(lambda job: run(*job), jobs)


# ------------------------------------------------------------------------------------------- parts
class Report:
    """Figures and failures of one part of a benchmark, one line of JSON each."""

    def __init__(self, write: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Pass each line to ``write``; None: print it."""
        self.write = write or (lambda line: print(json.dumps(line), flush=True))

    def __call__(self, name: str, value: Any) -> None:
        """Report a figure; ``name`` ends with its unit."""
        self.write({"figure": name, "value": value})

    def attempt(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``; if it fails, report the cause and return None."""
        try:
            return call()
        # Any failure of one figure is recorded, and the next figure is measured.
        except Exception as error:
            from embodied_ppo.core.errors import one_line

            self.write({"failure": name, "message": one_line(error, kind=True)[:500]})
            return None


def run_part(command: Sequence[str], limit_s: float, on_line: Callable[[str], None]) -> str:
    """Run a command in a process of its own, which ends after ``limit_s`` with its children.

    Args:
        command: Command and arguments.
        limit_s: Time limit, seconds.
        on_line: Called with each line of standard output as it comes.

    Returns:
        "", or the reason of the failure: the time limit, or the end of standard error.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill(process.pid)

        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line)
            process.wait()
        finally:
            timer.cancel()
            _kill(process.pid)
            process.wait()
        if expired.is_set():
            return f"not finished after {limit_s:g} s"
        if process.returncode == 0:
            return ""
        errors.seek(0)
        return " ".join(errors.read()[-2000:].split()) or f"exit status {process.returncode}"


def _kill(pid: int) -> None:
    """Kill a process group, and the descendants of its leader that left the group."""
    pids, group = [pid], [pid]
    while group:
        parent = group.pop()
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                group += map(int, file.read_text().split())
        pids += group
    for child in set(pids) - {pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------ timing
def wait(device: Any) -> None:
    """Wait for the work of a torch device."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: Any) -> float:
    """Return the wall time of one call, including the work of the device."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Part of a GPU's name -> dense bfloat16 products, operations per second (data sheets)."""


def peak_flops(device: Any) -> float | None:
    """Return the entry of ``PEAKS`` for a torch device, None if it has none."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((x for key, x in PEAKS.items() if key in name), None)


def cpu_ms(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of each call in each round.

    The calls alternate within a round, because the speed of a shared machine changes within
    minutes. A first round warms up and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                times[name].append((time.process_time() - start) * 1e3)
    return times


# ---------------------------------------------------------------------------------------- printing
def print_header(columns: Sequence[str]) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(columns)
    print("|---" * len(columns) + "|", flush=True)


def print_row(cells: Iterable[str]) -> None:
    """Print one line of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


# -------------------------------------------------------------------------------- stored results
class Results:
    """Entries of a file below docs/results, or of any file named by an absolute path.

    An entry replaces the one with the same key. The file is replaced as a whole, so that it is
    complete at any time.
    """

    def __init__(self, name: str | Path, key: Sequence[str], order: Callable[[Any], Any]) -> None:
        self.file, self.key, self.order = RESULTS / name, key, order

    def load(self) -> list[dict[str, Any]]:
        """Return all entries."""
        return json.loads(self.file.read_text()) if self.file.exists() else []

    def save(self, entry: dict[str, Any]) -> None:
        """Add an entry in the place of the one with the same key."""
        others = [e for e in self.load() if any(e[name] != entry[name] for name in self.key)]
        entries = sorted([*others, entry], key=self.order)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_name(f"{self.file.name}.new")
        temporary.write_text("[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n")
        temporary.replace(self.file)


def commit() -> str:
    """Return the short hash of the checkout's commit, "" without a repository."""
    process = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return process.stdout.strip()


def provenance(options: Sequence[str]) -> dict[str, str]:
    """Return the command of a training run, the commit and the date."""
    return {
        "command": "embodied-ppo train " + " ".join(options),
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
