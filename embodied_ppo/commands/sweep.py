"""Train the runs of a sweep, several at the same time; continue an interrupted sweep."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied_ppo.commands import compare, output
from embodied_ppo.commands.exit_codes import FAILED, INTERRUPTED
from embodied_ppo.config import batch_sizes
from embodied_ppo.config.compose import PROGRAM, SweepJob, override_lines, prepare, sweep_jobs
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import CheckpointError, ConfigError, EnvError, show
from embodied_ppo.training.logging import LINE_EVERY_S, bar_console, shows_bars
from embodied_ppo.training.process_pool import POLL_S, ProcessPool, last_line
from embodied_ppo.training.progress import Interrupts
from embodied_ppo.training.run_files import METRICS, SWEEP

FORMAT = 1
"""Version of sweep.json. Increase it when the meaning of a field changes."""
COMPARISON = "comparison"
"""Folder of the comparison in the folder of a sweep."""
TAGS = ("final_return", "final_success")
"""Results in summary.json that are shown for each run."""
CHECK_S = 1.0
"""Seconds between two readings of the metrics of running runs."""
LONGEST_ROW = 65_536
"""Bytes at the end of metrics.jsonl that are read to find its last row."""


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in some options.

    Attributes:
        folder: Folder of the sweep, absolute.
        working_directory: Folder in which the sweep was started; paths of options are relative to
            it.
        flags: Flags of the command line that choose the configs.
        jobs: The runs.
    """

    folder: Path
    working_directory: Path
    flags: Sequence[str]
    jobs: Sequence[SweepJob]


def run(args: argparse.Namespace) -> int:
    """Train the runs of a sweep that are not finished; print the results by method.

    Returns:
        The exit code: that of the first run that failed, or 0.

    Raises:
        ConfigError: A run, or the sweep to resume, is refused; nothing has been started.
        SystemExit: 130, after an interrupt has saved the checkpoints of all running runs.
    """
    sweep = _open(args)
    most = _most_jobs(sweep.jobs[0].loaded.config)
    size = min(args.jobs or most, len(sweep.jobs))
    from embodied_ppo.training.run_directory import locked

    with locked(sweep.folder, "hydra.sweep.dir"):
        _write(sweep)
        code = _train(sweep, size, args)
    results = [_result(job, summary) for job in sweep.jobs if (summary := _summary(job))]
    if results and not args.json:
        print_methods(results)
    if len({_method(result) for result in results}) > 1 and args.compare:
        _compare(sweep, args)
    return code


# ----------------------------------------------------------------------------------- list the runs
def _open(args: argparse.Namespace) -> Sweep:
    """Return the sweep of a command line, or the one that ``resume=FOLDER`` names."""
    resumed = [line for line in args.overrides if line.partition("=")[0].lstrip("+") == "resume"]
    if resumed:
        if len(args.overrides) > 1 or args.config_dir or args.config_name:
            other = next((line for line in args.overrides if line not in resumed), "--config-dir")
            raise ConfigError(
                f"{other}: a sweep continues with its own options; write"
                f" {PROGRAM} train --multirun {resumed[0]} only"
            )
        return _read(resumed[0].partition("=")[2].strip("'\""))
    folder, jobs = sweep_jobs(args)
    flags = []
    if args.config_dir is not None:
        flags += ["--config-dir", args.config_dir]
    if args.config_name is not None:
        flags += ["--config-name", args.config_name]
    return Sweep(folder.absolute(), Path.cwd(), flags, jobs)


def _read(path: str) -> Sweep:
    """Read the sweep in a folder. Raises ConfigError."""
    folder = Path(path).absolute()
    file = folder / SWEEP
    try:
        content = json.loads(file.read_text())
        version = content["format"]
        if version != FORMAT:
            content = {"working_directory": ".", "flags": [], "runs": []}
        working_directory = Path(content["working_directory"])
        flags = [str(flag) for flag in content["flags"]]
        rows = [
            ([str(line) for line in row["overrides"]], dict(row["options"]), str(row["folder"]))
            for row in content["runs"]
        ]
        os.chdir(working_directory)
    except OSError as error:
        raise ConfigError(
            f"resume={path}: is not the folder of a sweep ({error.strerror}: {error.filename});"
            " a single run continues without --multirun"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: is damaged; start the sweep again") from error
    if version != FORMAT:
        raise ConfigError(
            f"{file}: has format {show(version)}, and this version reads {FORMAT}; start the sweep"
            " again"
        )
    chosen = argparse.ArgumentParser()
    chosen.add_argument("--config-dir")
    chosen.add_argument("--config-name")
    args = argparse.Namespace(command="train", **vars(chosen.parse_args(flags)))
    jobs = []
    for number, (lines, options, name) in enumerate(rows):
        loaded = prepare(args, lines)
        # Folders inside that of the sweep are relative to it, so that it can be moved.
        run_dir = folder / name
        loaded = replace(loaded, config=replace(loaded.config, run_dir=str(run_dir)))
        jobs.append(SweepJob(number, lines, options, run_dir, loaded))
    if not jobs:
        raise ConfigError(f"{file}: lists no run; start the sweep again")
    return Sweep(folder, working_directory, flags, jobs)


def _write(sweep: Sweep) -> None:
    """Write sweep.json."""
    from embodied_ppo.training.run_directory import replace_text

    content = {
        "format": FORMAT,
        "working_directory": str(sweep.working_directory),
        "flags": sweep.flags,
        "runs": [
            {
                "overrides": list(job.lines),
                "options": job.options,
                "folder": str(_relative(job.folder.absolute(), sweep.folder)),
            }
            for job in sweep.jobs
        ],
    }
    replace_text(sweep.folder / SWEEP, json.dumps(content, indent=1) + "\n")


def _relative(path: Path, folder: Path) -> Path:
    """Return a path relative to a folder that contains it, otherwise unchanged."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def _most_jobs(config: Config) -> int:
    """Return how many runs can use the cores or devices of this machine at the same time."""
    if config.placement != "local":
        return 1  # a run starts several processes and uses all devices
    if devices := _cuda_devices(config):
        return len(devices)
    if config.device.startswith("cuda"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, config.threads))


def _cuda_devices(config: Config) -> list[str]:
    """Return the CUDA devices over which single-device runs are distributed; [] for other runs."""
    if config.placement != "local" or config.device not in ("auto", "cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    return [name for name in names if torch.cuda.is_available()]


# ------------------------------------------------------------------------------------------- train
def _summary(job: SweepJob) -> dict[str, Any] | None:
    """Return summary.json of a finished run; None: it is not finished."""
    with suppress(OSError, ValueError):
        content = json.loads((job.folder / "summary.json").read_text())
        return content if isinstance(content, dict) else None
    return None


def _result(job: SweepJob, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with its position and options in the sweep."""
    return {"job": job.number, "overrides": _text(job), "options": job.options, **summary}


def _text(job: SweepJob) -> str:
    """Return the overrides of a run in one line."""
    return " ".join(line.lstrip("+") for line in job.lines)


def _command(job: SweepJob, flags: Sequence[str]) -> list[str]:
    """Return the command line that starts a run, or continues it from its newest checkpoint."""
    from embodied_ppo.training import checkpoint

    program = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--json", "--quiet"]
    (folder,) = override_lines("train", {"run_dir": str(job.folder.absolute())})
    if checkpoint.steps(job.folder / "checkpoints"):
        return [*program, folder.replace("run_dir=", "resume=", 1)]
    lines = [line for line in job.lines if line.partition("=")[0].lstrip("+") != "run_dir"]
    return [*program, *flags, *lines, folder]


def _train(sweep: Sweep, size: int, args: argparse.Namespace) -> int:
    """Train the runs that are not finished, ``size`` at the same time; return the exit code."""
    waiting = [job for job in sweep.jobs if _summary(job) is None]
    devices: list[str | None] = [*_cuda_devices(sweep.jobs[0].loaded.config)] or [None]
    running: dict[str, tuple[SweepJob, str | None]] = {}
    codes: dict[int, int] = {}
    display = SweepProgress(len(sweep.jobs), len(sweep.jobs) - len(waiting), quiet=args.quiet)
    if waiting:
        size = min(size, len(waiting))
        display.say(f"{sweep.folder}: {len(waiting)} of {len(sweep.jobs)} runs, {size} at a time")
    else:
        display.say(f"{sweep.folder}: all {len(sweep.jobs)} runs are finished")
    free_devices = [devices[i % len(devices)] for i in range(size)]
    if args.json:
        for job in sweep.jobs:
            if job not in waiting and (summary := _summary(job)):
                output.print_result(_result(job, summary), args)
    try:
        with Interrupts(), display, ProcessPool(size) as pool:
            while waiting or running:
                for name, code in pool.ended().items():
                    job, device = running.pop(name)
                    free_devices.append(device)
                    codes[job.number] = _finish(job, code, sweep, args)
                    display.finish(name, _summary(job))
                while waiting and pool.free:
                    job, device = waiting.pop(0), free_devices.pop(0)
                    name = _name(job, sweep)
                    running[name] = job, device
                    pool.start(
                        name,
                        _command(job, sweep.flags),
                        _log(job, sweep),
                        environment={} if device is None else {"CUDA_VISIBLE_DEVICES": device},
                        folder=sweep.working_directory,
                    )
                    display.start(name, job)
                display.update()
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(
            f"interrupted; continue with {PROGRAM} train --multirun resume={sweep.folder}",
            file=sys.stderr,
        )
        raise SystemExit(INTERRUPTED) from None
    return next((code for _, code in sorted(codes.items()) if code), 0)


def _finish(job: SweepJob, code: int, sweep: Sweep, args: argparse.Namespace) -> int:
    """Print the result of a run that has ended, or why it failed; return its exit code."""
    log, summary = _log(job, sweep), _summary(job)
    if code == 0 and summary is not None:
        log.unlink()
        if args.json:
            output.print_result(_result(job, summary), args)
        return 0
    cause = last_line(log, code).removeprefix("error: ")
    print(f"error: job {job.number} ({_text(job)}) failed: {cause}; see {log}", file=sys.stderr)
    return code if code > 0 else FAILED


def _name(job: SweepJob, sweep: Sweep) -> str:
    """Return the name of a run in messages: its folder."""
    return str(_relative(job.folder.absolute(), sweep.folder))


def _log(job: SweepJob, sweep: Sweep) -> Path:
    """Return the file with the output of a run's process, which is deleted when it succeeds."""
    return sweep.folder / f"job-{job.number}.log"


class SweepProgress:
    """Progress of a sweep on stderr: the runs that are training, and the number of finished runs.

    It is a bar for each run on a terminal, otherwise a line every LINE_EVERY_S seconds.
    """

    def __init__(self, total: int, finished: int, *, quiet: bool) -> None:
        """Show nothing yet.

        Args:
            total: Number of runs.
            finished: Number of runs that are finished.
            quiet: Whether nothing is shown.
        """
        self.total, self.finished, self.quiet = total, finished, quiet
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._running: dict[str, SweepJob] = {}
        self._checked = self._last_line = time.monotonic()

    def __enter__(self) -> SweepProgress:
        if shows_bars() and not self.quiet:
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
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=bar_console())
            self._bars.start()
            self._tasks["runs"] = self._bars.add_task(
                "runs", total=self.total, completed=self.finished, state=""
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def start(self, name: str, job: SweepJob) -> None:
        """Show a run that starts."""
        self._running[name] = job
        if self._bars is not None:
            total = batch_sizes.total_updates(job.loaded.config)
            self._tasks[name] = self._bars.add_task(name, total=total, state="")

    def finish(self, name: str, summary: Mapping[str, Any] | None) -> None:
        """Show the result of a run that has ended; ``summary`` is None if it failed."""
        del self._running[name]
        self.finished += 1
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.update(self._tasks["runs"], completed=self.finished)
        if summary is not None:
            tags = [tag for tag in TAGS if summary.get(tag) is not None]
            values = "  ".join(f"{tag} {summary[tag]:.4g}" for tag in tags)
            self.say(
                f"{name}: {values}  in {summary['wall_s']:.0f} s"
                f"  ({self.finished} of {self.total} runs)"
            )

    def update(self) -> None:
        """Show the updates that the running runs have completed."""
        now = time.monotonic()
        if self.quiet or now - self._checked < CHECK_S:
            return
        self._checked = now
        if self._bars is None and now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        cells = []
        for name, job in self._running.items():
            row = last_row(job.folder / METRICS)
            value = row.get("rollout/return", row.get("rollout/reward"))
            state = "" if value is None else f"return {value:.4g}"
            update = int(row.get("update", 0))
            if self._bars is not None:
                self._bars.update(self._tasks[name], completed=update, state=state)
            else:
                total = batch_sizes.total_updates(job.loaded.config)
                cells.append(f"{name} {update}/{total} {state}".rstrip())
        if self._bars is None:
            self.say(f"{self.finished} of {self.total} runs; {', '.join(cells)}")


def last_row(file: Path) -> dict[str, Any]:
    """Return the last complete row of metrics.jsonl, or {} if there is none."""
    with suppress(OSError, ValueError), file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LONGEST_ROW))
        lines = stream.read().split(b"\n")
        return dict(json.loads(lines[-2])) if len(lines) > 1 else {}
    return {}


# ----------------------------------------------------------------------------------------- results
def _method(result: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the method of a run: the options that differ, except the seed."""
    return tuple((key, value) for key, value in result["options"].items() if key != "seed")


def print_methods(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the results of a sweep by method.

    Args:
        results: Summaries of runs, each with ``options``, those that differ between the runs.
    """
    methods: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for result in results:
        methods.setdefault(_method(result), []).append(result)
    tags = [tag for tag in TAGS if any(result.get(tag) is not None for result in results)]
    columns = [f"{tag} {part}" for tag in tags for part in ("mean", "std", "min", "max")]
    rows = [["method", "runs", *columns]]
    for method, runs in methods.items():
        cells = [", ".join(f"{key}={value}" for key, value in method) or "all", str(len(runs))]
        for tag in tags:
            values = [float(result[tag]) for result in runs if result.get(tag) is not None]
            extremes = (min(values), max(values)) if values else (math.nan, math.nan)
            mean = statistics.mean(values) if values else math.nan
            std = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
            cells += [f"{mean:.4g}", std, *(f"{x:.4g}" for x in extremes)]
        rows.append(cells)
    output.table(rows)


def _compare(sweep: Sweep, args: argparse.Namespace) -> None:
    """Compare the methods on the same initial states, if ``compare`` can compare them."""
    from embodied_ppo import api

    out = str(sweep.folder / COMPARISON)
    try:
        with output.stdout_to_stderr():
            lines = override_lines("evaluate", {"out": out})
            content = api.compare_paths([str(sweep.folder)], "auto", lines, quiet=args.quiet)
    except (ConfigError, CheckpointError, EnvError) as error:
        if not args.quiet:
            print(f"the methods are not compared: {error}", file=sys.stderr)
        return
    except KeyboardInterrupt:
        print(
            f"interrupted; all runs are finished; compare them with {PROGRAM} compare"
            f" {sweep.folder}",
            file=sys.stderr,
        )
        raise SystemExit(INTERRUPTED) from None
    if args.json:
        print(output.as_json({"comparison": content}), flush=True)
    else:
        print()
        compare.print_comparison(content)
