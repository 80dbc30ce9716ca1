"""Train the runs of a sweep, several at the same time; continue an interrupted sweep."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, show_path
from embodied_ppo.commands import arguments, compare, output, supervisor
from embodied_ppo.commands.exit_codes import FAILED, INTERRUPTED
from embodied_ppo.core import guarded_files
from embodied_ppo.options.compose import PROGRAM, override_lines, prepare
from embodied_ppo.options.rules.base import one_process
from embodied_ppo.options.schema import Config
from embodied_ppo.options.sweeps import SweepJob, sweep_jobs
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import locked
from embodied_ppo.training.run_files import SWEEP, find_runs

POLL_S = 0.2  # seconds between two checks whether a process has ended
FORMAT = 1  # Version of sweep.json. Increase it when the meaning of a field changes.
COMPARISON = "comparison"  # folder of the comparison in the folder of a sweep
TAGS = ("final_return", "final_success")  # results in summary.json that are shown for each run


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

    def name(self, job: SweepJob) -> str:
        """Return the folder of a run, relative to that of the sweep where it is inside."""
        path = job.folder.absolute()
        return str(path.relative_to(self.folder) if path.is_relative_to(self.folder) else path)

    def log(self, job: SweepJob) -> Path:
        """Return the file with the output of a run's process, deleted when it succeeds."""
        return self.folder / f"job-{job.number}.log"

    def write(self) -> None:
        """Write sweep.json."""
        runs = [
            {"overrides": list(job.lines), "options": job.options, "folder": self.name(job)}
            for job in self.jobs
        ]
        content = {"format": FORMAT, "working_directory": str(self.working_directory)}
        content |= {"flags": self.flags, "runs": runs}
        guarded_files.replace_file(self.folder / SWEEP, json.dumps(content, indent=1) + "\n")


def run(args: argparse.Namespace) -> int:
    """Train the runs of a sweep that are not finished; print the results by method.

    Returns:
        The exit code: that of the first run that failed, or 0.

    Raises:
        ConfigError: A run, or the sweep to resume, is refused; nothing has been started.
        SystemExit: 130, after an interrupt has saved the checkpoints of all running runs.
    """
    sweep = _open(args)
    with locked(sweep.folder, "hydra.sweep.dir"):
        sweep.write()
        code = _train(sweep, args)
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
    flags = arguments.config_flags(args)
    if not resumed:
        folder, jobs = sweep_jobs(args)
        # Their results would count as those of this sweep.
        for job in jobs:
            if _summary(job) is not None or checkpoint.steps(job.folder / "checkpoints"):
                hint = "name another folder, or continue the sweep with resume=FOLDER only"
                raise ConfigError(f"{hint}: {show_path(job.folder)} already contains a run")
        return Sweep(folder.absolute(), Path.cwd(), flags, jobs)
    if others := [*flags, *(line for line in args.overrides if line not in resumed)]:
        raise ConfigError(
            f"{others[0]}: a sweep continues with its own options; write {PROGRAM} train"
            f" --multirun {resumed[0]} only"
        )
    return _read(resumed[0].partition("=")[2].strip("'\""))


def _read(path: str) -> Sweep:
    """Read the sweep in a folder. Raises CheckpointError, ConfigError."""
    folder = Path(path).absolute()
    fields = {"format": int, "working_directory": str, "flags": list, "runs": list}
    hint = f"start the sweep again, or continue a single run without --multirun (resume={path})"
    with guarded_files.refusing_damage(folder / SWEEP, hint):
        content = guarded_files.read_object(folder / SWEEP, fields)
        rows = [
            guarded_files.check_fields(row, {"overrides": list, "options": dict, "folder": str})
            for row in content["runs"]
        ]
        if content["format"] != FORMAT or not rows:
            raise ValueError(f"lists no run of format {FORMAT}")
        os.chdir(content["working_directory"])
    flags = content["flags"]
    chosen = {"config_dir": None, "config_name": None}
    for flag, value in zip(flags[::2], flags[1::2], strict=False):
        chosen[flag.removeprefix("--").replace("-", "_")] = value
    args = argparse.Namespace(command="train", **chosen)
    jobs = []
    for number, row in enumerate(rows):
        # Folders inside that of the sweep are relative to it, so that it can be moved.
        run_dir, loaded = folder / row["folder"], prepare(args, row["overrides"])
        loaded = replace(loaded, config=replace(loaded.config, run_dir=str(run_dir)))
        jobs.append(SweepJob(number, row["overrides"], row["options"], run_dir, loaded))
    return Sweep(folder, Path.cwd(), flags, jobs)


def _most_jobs(config: Config) -> int:
    """Return how many runs can use the cores or devices of this machine at the same time."""
    if not one_process(config):
        return 1  # a run starts several processes and uses all devices
    if devices := _cuda_devices(config):
        return len(devices)
    if config.device.startswith("cuda"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, config.threads))


def _cuda_devices(config: Config) -> list[str]:
    """Return the CUDA devices over which single-device runs are distributed; [] for other runs."""
    if not one_process(config) or config.device not in ("auto", "cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    return [name for name in names if torch.cuda.is_available()]


# ------------------------------------------------------------------------------------------- train
def _summary(job: SweepJob) -> dict[str, Any] | None:
    """Return summary.json of a finished run; None: it is not finished."""
    with suppress(OSError, ValueError):
        return guarded_files.read_object(job.folder / "summary.json")
    return None


def _result(job: SweepJob, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with its position and options in the sweep."""
    lines = " ".join(line.lstrip("+") for line in job.lines)
    return {"job": job.number, "overrides": lines, "options": job.options, **summary}


def _train(sweep: Sweep, args: argparse.Namespace) -> int:
    """Train the runs that are not finished, several at a time; return the exit code."""
    total, waiting = len(sweep.jobs), [job for job in sweep.jobs if _summary(job) is None]
    configs = [job.loaded.config for job in waiting]
    size = max(1, min(args.jobs or min(map(_most_jobs, configs), default=1), len(waiting)))
    devices: list[str | None] = [*max(map(_cuda_devices, configs), key=len, default=())] or [None]
    free_devices = [devices[i % len(devices)] for i in range(size)]
    running: dict[int, tuple[subprocess.Popen[bytes], str | None]] = {}
    codes: dict[int, int] = {}

    say = Progress(args.quiet).say
    say(f"{sweep.folder}: {len(waiting)} of {total} runs, {size} at a time")
    say(f"follow them with {PROGRAM} watch {sweep.folder}")
    for job in sweep.jobs if args.json else ():
        if job not in waiting and (summary := _summary(job)):
            output.print_result(_result(job, summary), args)
    try:
        with Interrupts(), _ending(running):
            while waiting or running:
                for number, (process, device) in [*running.items()]:
                    if (code := process.poll()) is None:
                        continue
                    del running[number]
                    free_devices.append(device)
                    job = sweep.jobs[number]
                    codes[number] = _finish(job, code, sweep, args)
                    finished = total - len(waiting) - len(running)
                    if summary := _summary(job):
                        result = f"{sweep.name(job)}: {_results_line(summary)}"
                        say(f"{result}  ({finished} of {total} runs)")
                while waiting and free_devices:
                    job, device = waiting.pop(0), free_devices.pop(0)
                    running[job.number] = _start(job, sweep, device), device
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        hint = f"continue with {PROGRAM} train --multirun resume={sweep.folder}"
        print(f"interrupted; {hint}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    return next((code for _, code in sorted(codes.items()) if code), 0)


def _start(job: SweepJob, sweep: Sweep, device: str | None) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own, or continue it from its newest checkpoint."""
    (folder,) = override_lines("train", {"run_dir": str(job.folder.absolute())})
    lines = [x for x in job.lines if x.partition("=")[0].lstrip("+") != "run_dir"]
    arguments = [*sweep.flags, *lines, folder]
    if checkpoint.steps(job.folder / "checkpoints"):
        arguments = [folder.replace("run_dir=", "resume=", 1)]
    program = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--json", "--quiet"]
    single = bool(_cuda_devices(job.loaded.config))  # a run of several processes sees all devices
    with sweep.log(job).open("ab") as log:
        return subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device and single else {}),
            cwd=sweep.working_directory,
            # Ctrl-C in the terminal would be a second signal, see ``_ending``.
            start_new_session=True,
            preexec_fn=supervisor.end_with_parent if sys.platform == "linux" else None,
        )


@contextmanager
def _ending(running: Mapping[int, tuple[subprocess.Popen[bytes], str | None]]) -> Iterator[None]:
    """Send one signal to each process at the end of the block, and wait until all have ended.

    At the first signal a training run saves a checkpoint; at a second one it stops at once.
    """
    try:
        yield
    finally:
        for process, _ in running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            process.wait()


def _finish(job: SweepJob, code: int, sweep: Sweep, args: argparse.Namespace) -> int:
    """Print the result of a run that has ended, or why it failed; return its exit code."""
    log, summary = sweep.log(job), _summary(job)
    if code == 0 and summary is not None:
        log.unlink()
        if args.json:
            output.print_result(_result(job, summary), args)
        return 0
    last = (log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
    lines, cause = _result(job, {})["overrides"], last.removeprefix("error: ")
    print(f"error: job {job.number} ({lines}) failed: {cause}; see {log}", file=sys.stderr)
    return code if code > 0 else FAILED


def _results_line(summary: Mapping[str, Any]) -> str:
    """Return the results of a finished run as text."""
    tags = (*TAGS, "steps_per_s", "tokens_per_s")
    values = [f"{tag} {summary[tag]:.4g}" for tag in tags if summary.get(tag) is not None]
    return "  ".join([*values, f"in {summary['wall_s']:.0f} s"])


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
            cells += _statistics(r[tag] for r in runs if r.get(tag) is not None)
        rows.append(cells)
    output.table(rows)


def _statistics(numbers: Iterable[float]) -> list[str]:
    """Return mean, standard deviation, minimum and maximum as text."""
    values = list(numbers) or [math.nan]
    std = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
    low, high = min(values), max(values)
    return [f"{statistics.mean(values):.4g}", std, f"{low:.4g}", f"{high:.4g}"]


def _compare(sweep: Sweep, args: argparse.Namespace) -> None:
    """Compare the methods on the same initial states, if ``compare`` can compare them."""
    from embodied_ppo.tools.policy_comparison import compare_lines

    try:
        # A run that failed would count as one of its method, with its last checkpoint.
        for job in sweep.jobs:
            if _summary(job) is None and find_runs([job.folder]):
                hint = f"continue with resume={sweep.folder}, or remove the run and use compare"
                raise ConfigError(f"{hint}: {sweep.name(job)} has not finished")
        with output.stdout_to_stderr():
            lines = override_lines("evaluate", {"out": str(sweep.folder / COMPARISON)})
            content = compare_lines([str(sweep.folder)], "auto", lines, quiet=args.quiet)
    except (ConfigError, CheckpointError, EnvError) as error:
        if not args.quiet:
            print(f"the methods are not compared: {error}", file=sys.stderr)
        return
    if not args.json:
        print()
        compare.print_comparison(content)
    else:
        print(output.as_json({"comparison": content}), flush=True)
