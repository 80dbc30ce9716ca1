"""Log of a run: TensorBoard, metrics.jsonl, log.txt, console, trackers; timer of the phases."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from embodied_envs.base import watchdog
from embodied_ppo.core.compile import CompileSchedule
from embodied_ppo.core.guarded_files import replace_file
from embodied_ppo.core.types import Mean, Metrics
from embodied_ppo.training import generations
from embodied_ppo.training.health import HealthMonitor
from embodied_ppo.training.metrics_digest import MetricsDigest
from embodied_ppo.training.run_files import METRICS, metric_rows
from embodied_ppo.training.trackers import Status, Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LINE_EVERY_S = 10.0  # least interval of progress lines in seconds, if stderr is not a terminal

CELL = 400  # largest length of a table cell, in characters


class Timer:
    """Wall and CPU seconds by phase; phases must not nest.

    Attributes:
        wall: Wall seconds since the last ``take``.
        run_wall: Wall seconds of the run until the last ``take``.
        cpu: CPU seconds of the run.
        phase: The current phase, None outside.
    """

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.run_wall: dict[str, float] = defaultdict(float)
        self.phase: str | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure a block."""
        wall, cpu = time.perf_counter(), time.process_time()
        # The handler of signals reads the phase: an evaluation is interrupted at once.
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None
            self.wall[phase] += time.perf_counter() - wall
            self.cpu[phase] += time.process_time() - cpu

    def take(self) -> Metrics:
        """Return the metrics time/<phase>_s since the last call."""
        metrics: Metrics = {f"time/{phase}_s": seconds for phase, seconds in self.wall.items()}
        for phase, seconds in self.wall.items():
            self.run_wall[phase] += seconds
        self.wall.clear()
        return metrics

    def total(self, phases: Iterable[str]) -> tuple[float, float]:
        """Return (wall, CPU) seconds of these phases, wall until the last ``take``."""
        phases = list(phases)
        return sum(self.run_wall[p] for p in phases), sum(self.cpu[p] for p in phases)


def peak_rss_mb() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def process_age_s() -> float:
    """Return the seconds since the start of this process, 0 if the system does not report it."""
    try:
        # Field 22 is the start in clock ticks after boot. The name in field 2 may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return tag -> number; NaN for a mean without samples."""
    return {tag: x.value if isinstance(x, Mean) else float(x) for tag, x in metrics.items()}


def finite(row: Mapping[str, float]) -> dict[str, float | None]:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    return {tag: value if math.isfinite(value) else None for tag, value in row.items()}


class Log:
    """Files and console output of one run. It is created when the run has been accepted."""

    def __init__(
        self,
        run_dir: Path,
        *,
        total_updates: int,
        completed_updates: int = 0,
        unit: Literal["env_steps", "tokens"] = "env_steps",
        quiet: bool = False,
    ) -> None:
        """Open the files.

        Args:
            run_dir: Directory of the run.
            total_updates: Updates of the complete run.
            completed_updates: Updates that a resumed run has completed. Later rows are dropped.
            unit: Unit of progress.
            quiet: Whether nothing is printed.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.total_updates, self.quiet = run_dir, total_updates, quiet
        _hide_writer_failures()
        self.unit = unit
        # Tag that the rows of all updates have, and no other rows.
        self.speed = f"speed/{unit}_per_s"
        # Line-buffered files are complete up to the last line if the process is killed.
        self._text: TextIO = open(run_dir / "log.txt", "a", buffering=1)  # noqa: SIM115
        # If this process dies in a simulator, its supervisor appends the cause to the log.
        watchdog.log_to(run_dir / "log.txt")
        self._bar = None
        self._summary: Any = None
        try:
            from tensorboard.compat.proto import summary_pb2

            self._summary = vars(summary_pb2)["Summary"]  # protobuf creates its classes at import
        except ImportError as error:
            self.say(f"pip install tensorboard for its files: it is missing ({error})")
        # No trackers, until the caller starts those of the run.
        self.trackers = Trackers()
        self._open(completed_updates)
        self._last: dict[str, float] = {}
        self._evaluated_at = 0
        self._started, self._waited_s = time.perf_counter(), CompileSchedule.waited_s
        self._last_line = -math.inf
        self._monitor = HealthMonitor()

    def _open(self, completed_updates: int) -> None:
        """Open metrics.jsonl and TensorBoard after ``completed_updates``."""
        self.completed_updates = completed_updates
        path = self.run_dir / METRICS
        # A new run starts with an empty file: an earlier run in the same directory ended before its
        # first checkpoint. TensorBoard then drops all points, from step 0 on.
        lines, purge_step = list[bytes](), None if completed_updates else 0
        if completed_updates and path.exists():
            # Damaged lines are left out; ``verify`` reports missing rows.
            for line, row in metric_rows(self.run_dir):
                steps = None if row is None else row.get(self.unit)
                if row and steps is not None and (row["update"] or 0) <= completed_updates:
                    purge_step = int(steps) + 1
                    lines.append(line)
        replace_file(path, b"".join(line + b"\n" for line in lines))
        self._rows: TextIO = open(path, "a", buffering=1)  # noqa: SIM115
        generations.drop(self.run_dir, completed_updates)
        # A run that was killed after a checkpoint may not have logged the row of its update.
        is_logged = bool(completed_updates and self.row(completed_updates))
        self.digest = MetricsDigest(self.run_dir, completed_updates, is_logged=is_logged)
        self.board: SummaryWriter | None = None
        if self._summary is not None:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard drops the points of earlier sessions from ``purge_step`` on.
            folder = self.run_dir / "tensorboard"
            _wait_for_later_name(folder)
            self.board = SummaryWriter(str(folder), purge_step=purge_step)

    def rewind(self, completed_updates: int) -> None:
        """Drop the rows after an update, which the run will repeat."""
        if self.board is not None:
            self.board.close()
        self._rows.close()
        self.digest.close()
        self._open(completed_updates)
        # The new monitor does not know the dropped rows.
        self._monitor = HealthMonitor()

    def row(self, update: int) -> dict[str, Any]:
        """Return the row of an update in metrics.jsonl; empty if it has none."""
        rows = (row for _, row in metric_rows(self.run_dir) if row is not None)
        return next((row for row in rows if row["update"] == update), {})

    # ------------------------------------------------------------------------------------- messages
    def say(self, text: str, *, show: bool = True) -> None:
        """Write a line to log.txt and, if ``show``, to stderr."""
        with suppress(OSError):  # a full disk: the line is still printed, and ``metrics`` raises
            self._text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show and not self.quiet:
            print_line(text, self._bar)

    # -------------------------------------------------------------------------------------- metrics
    def metrics(self, metrics: Metrics, *, update: int, steps: int) -> None:
        """Write one row of metrics.jsonl, and one point per tag in TensorBoard and trackers.

        Args:
            metrics: Tag -> value.
            update: Number of completed updates.
            steps: Experience so far in ``unit``, the x axis of TensorBoard.

        Raises:
            OSError: Writing fails.
        """
        # Writing to an open file that was deleted raises no error, but the rows would be lost.
        if not (path := self.run_dir / METRICS).exists():
            raise FileNotFoundError(errno.ENOENT, "was removed while the run trained", str(path))
        row = numbers(metrics)
        # Curves cannot show NaN; metrics.jsonl has null instead.
        points = {tag: x for tag, x in row.items() if math.isfinite(x)}
        if self.board is not None:
            values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in points.items()]
            # One event for all tags takes a tenth of the time of one event per tag.
            assert self.board.file_writer is not None
            self.board.file_writer.add_summary(self._summary(value=values), steps)
            if "time/save_s" in row:  # a resumed run starts here and does not repeat these points
                self.board.flush()
        # Write the row last: for a resumed run an update with a row is complete.
        line = json.dumps({"update": update, self.unit: steps} | finite(row))
        # A digest without a row is dropped on resume; a row without a digest could not be verified.
        self.digest.add(update, line)
        self._rows.write(line + "\n")
        self.trackers.metrics(points, steps=steps)
        # The progress line shows the last value of each metric, as of an earlier evaluation.
        self._last |= row
        # Only the rows of updates have a speed; the monitor judges no others.
        if self.speed in row:
            for warning in self._monitor.add(row):
                self.say(f"warning, update {update}: {warning}")
                if self.board is not None:
                    self.board.add_text("warnings", warning, steps)
        if "eval/return" in row:
            self._evaluated_at = update
        if update <= self.completed_updates:  # before the training of this session
            self._started, self._waited_s = time.perf_counter(), CompileSchedule.waited_s
        elif self.speed in row and not self.quiet:  # no evaluation beside the training
            self._show(update)

    def _remaining_s(self, update: int) -> float:
        """Return the seconds to the end of the run at the mean speed so far.

        The wait for the compiler, which occurs once, does not count.
        """
        elapsed = time.perf_counter() - self._started - (CompileSchedule.waited_s - self._waited_s)
        return elapsed / max(1, update - self.completed_updates) * (self.total_updates - update)

    def _show(self, update: int) -> None:
        """Show the progress after an update."""
        # The bar starts with the first update, below the messages of the start.
        if self._bar is None and shows_bars():
            columns = ("return {task.fields[ret]}", "evaluation {task.fields[evaluated]}")
            self._bar = start_bar(*columns, "{task.fields[rate]}")
            done = self.completed_updates
            values = dict.fromkeys(("ret", "evaluated", "rate"), "-")
            self._bar.add_task("training", total=self.total_updates, completed=done, **values)
        robot = self.unit == "env_steps"
        score, digits = ("eval/return", ".1f") if robot else ("eval/accuracy", ".3f")
        ret = _format(self._last.get("rollout/return"), digits)
        evaluated = _format(self._last.get(score), digits)
        evaluated += f" (at {self._evaluated_at})" if evaluated != "-" else ""
        rate = _format(self._last.get(self.speed), ",.0f") + (" steps/s" if robot else " tokens/s")
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=update, ret=ret, evaluated=evaluated, rate=rate
            )
            return
        # Without a bar, print a line at intervals and one at the end.
        now = time.perf_counter()
        if now - self._last_line < LINE_EVERY_S and update < self.total_updates:
            return
        self._last_line = now
        print(
            f"update {update}/{self.total_updates}  return {ret}  evaluation {evaluated}  {rate}  "
            f"{timedelta(seconds=int(self._remaining_s(update)))} left",
            file=sys.stderr,
            flush=True,
        )

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], *, steps: int) -> None:
        """Write rows with equal keys to trackers, and to TensorBoard's text tab.

        The cells in TensorBoard are cut to CELL characters.
        """
        self.trackers.table(tag, rows, steps=steps)
        if self.board is None:
            return
        # The first line of the table has the names of the columns.
        head, *body = [
            " | ".join(map(_cell, row)) for row in (rows[0], *(row.values() for row in rows))
        ]
        lines = (head, " | ".join("---" for _ in rows[0]), *body)
        self.board.add_text(tag, "\n".join(f"| {line} |" for line in lines), steps)

    def close(self, status: Status = "finished") -> None:
        """Close the trackers, the files and the progress bar; ``status``: how the run ended."""
        # Trackers are closed first, because they may still write to the log.
        self.trackers.close(status)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        # On a full disk one file may fail to close, and the others are closed nevertheless.
        for part in (self.board, self._rows, self.digest, self._text):
            try:
                if part is not None:
                    part.close()
            except OSError as error:
                print(f"{self.run_dir}: not written to the end ({error.strerror})", file=sys.stderr)


def _wait_for_later_name(folder: Path) -> None:
    """Wait until a new event file's name follows those in ``folder``, for at most three seconds.

    TensorBoard reads the files in the order of their names, which begin with the second of their
    creation and end with the number of the process and of the file. It would drop the points of a
    run that is resumed within that second if, say, file 10 follows file 9.
    """
    names = (path.name.split(".") for path in folder.glob("events.out.tfevents.*"))
    latest = max((int(name[3]) for name in names if name[3].isdigit()), default=0)
    for _ in range(60):  # a clock that runs behind by more than this is left as it is
        if int(time.time()) > latest:
            break
        time.sleep(0.05)


@functools.cache
def _hide_writer_failures() -> None:
    """Print no traceback for an OSError of TensorBoard's writer thread: ``metrics`` raises it, too.

    The hook stays in place, because the thread may end after the error has closed the log.
    """
    # The hook of other threads and errors stays as it was.
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(args.exc_value, OSError)):
            previous(args)

    threading.excepthook = hook


def _cell(value: Any) -> str:
    """Escape a value for a cell of a markdown table."""
    text = str(value)
    text = text if len(text) <= CELL else text[: CELL - 1] + "…"
    # Markdown's special characters are escaped, and a line break would end the row.
    return "<br>".join(re.sub(r"[\\`*_\[\]<>&|~]", lambda m: f"&#{ord(m[0])};", text).splitlines())


def _format(value: float | None, spec: str) -> str:
    """Format a number; "-" for None and NaN (no episode has finished yet)."""
    return "-" if value is None or math.isnan(value) else format(value, spec)


def _is_notebook() -> bool:
    """Return whether stderr is the output of a notebook's cell."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


def shows_bars() -> bool:
    """Return whether stderr shows progress bars: a terminal, or the cell of a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def print_line(line: str, bar: Any) -> None:
    """Print a line to stderr, above the bar if there is one."""
    if bar is not None:
        bar.console.print(line, highlight=False, markup=False)
    else:
        print(line, file=sys.stderr, flush=True)


def start_bar(*columns: str) -> Any:
    """Return a progress bar of rich on stderr, which is shown from now on.

    Args:
        columns: Texts between the number of a task and its remaining time.
    """
    # Imported here, because most commands show no bar.
    from rich import progress
    from rich.console import Console

    # In a notebook a bar is a line that is overwritten; rich's own needs ipywidgets.
    notebook: dict[str, Any] = {"force_terminal": True, "force_jupyter": False, "width": 100}
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        *map(progress.TextColumn, columns),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True, **(notebook if _is_notebook() else {})),
    )
    bar.start()
    return bar
