"""Log of a run: TensorBoard, metrics.jsonl, log.txt, console, trackers; timer of the phases."""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from embodied_ppo.core import watchdog
from embodied_ppo.core.types import Mean, Metrics
from embodied_ppo.training.health import HealthMonitor
from embodied_ppo.training.metrics_digest import MetricsDigest
from embodied_ppo.training.trackers import Status, Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LINE_EVERY_S = 10.0
"""Least interval of progress lines in seconds, if stderr is not a terminal."""

CELL = 400
"""Largest length of a table cell, in characters."""


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
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def process_age_s() -> float:
    """Return the seconds since the start of this process, 0 if the system does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return tag -> number; NaN for a mean without samples."""
    return {
        tag: value.value if isinstance(value, Mean) else float(value)
        for tag, value in metrics.items()
    }


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
        self.speed = f"speed/{unit}_per_s"
        """Tag that the rows of all updates have, and no other rows."""
        self._text: TextIO = open(run_dir / "log.txt", "a", buffering=1)  # noqa: SIM115
        watchdog.log_to(run_dir / "log.txt")
        self._bar = None
        self._summary, missing = _summary_class()
        if missing:
            self.say(
                f"no TensorBoard files are written: tensorboard is missing ({missing});"
                " pip install tensorboard. metrics.jsonl has all metrics"
            )
        self.trackers = Trackers()
        self._open(completed_updates)
        self._last: dict[str, float] = {}
        self._evaluated_at = 0
        self._started = time.perf_counter()
        self._last_line = -math.inf
        self._monitor = HealthMonitor()

    def _open(self, completed_updates: int) -> None:
        """Open metrics.jsonl and TensorBoard after ``completed_updates``."""
        self.completed_updates = completed_updates
        path = self.run_dir / "metrics.jsonl"
        self._rows, purge_step, damaged = _open_rows(path, completed_updates, self.unit)
        if damaged:
            self.say(f"{path.name}: damaged rows are left out: {', '.join(damaged)}")
        is_logged = bool(completed_updates and self.row(completed_updates))
        self.digest = MetricsDigest(self.run_dir, completed_updates, is_logged=is_logged)
        self.board: SummaryWriter | None = None
        if self._summary is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge_step)

    def rewind(self, completed_updates: int) -> None:
        """Drop the rows after an update, which the run will repeat."""
        if self.board is not None:
            self.board.close()
        self._rows.close()
        self.digest.close()
        self._open(completed_updates)
        self._monitor = HealthMonitor()

    def row(self, update: int) -> dict[str, Any]:
        """Return the row of an update in metrics.jsonl; empty if it has none."""
        rows = (
            json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
        )
        return next((row for row in rows if row["update"] == update), {})

    # ------------------------------------------------------------------------------------- messages
    def say(self, text: str, *, show: bool = True) -> None:
        """Write a line to log.txt and, if ``show``, to stderr."""
        with suppress(OSError):  # a full disk: the line is still printed, and ``metrics`` raises
            self._text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show and not self.quiet:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, file=sys.stderr, flush=True)

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
        row = numbers(metrics)
        points = {tag: x for tag, x in row.items() if math.isfinite(x)}
        if self.board is not None:
            values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in points.items()]
            # One event for all tags takes a tenth of the time of one event per tag.
            self._write(values, steps)
            if "time/save_s" in row:  # a resumed run starts here and does not repeat these points
                self.board.flush()
        # Write the row last: for a resumed run an update with a row is complete.
        line = json.dumps({"update": update, self.unit: steps} | finite(row))
        self.digest.add(update, line)
        self._rows.write(line + "\n")
        self.trackers.metrics(points, steps=steps)
        self._last |= row
        if self.speed in row:
            for warning in self._monitor.add(row):
                self.say(f"warning, update {update}: {warning}")
                if self.board is not None:
                    self.board.add_text("warnings", warning, steps)
        if "eval/return" in row:
            self._evaluated_at = update
        if update <= self.completed_updates:  # before the training of this session
            self._started = time.perf_counter()
            return
        if self.speed not in row:  # an evaluation beside the training
            return
        # Only the log file needs the estimate: the console shows the time left after each update.
        if update == self.completed_updates + 1 < self.total_updates:
            end = time.localtime(time.time() + self._remaining_s(update))
            self.say(
                f"update {update} is done; all {self.total_updates} will be at about"
                f" {time.strftime('%Y-%m-%d %H:%M', end)}",
                show=False,
            )
        if not self.quiet:
            self._show(update)

    def _remaining_s(self, update: int) -> float:
        """Return the seconds to the end of the run at the mean speed so far."""
        elapsed = time.perf_counter() - self._started
        return elapsed / max(1, update - self.completed_updates) * (self.total_updates - update)

    def _show(self, update: int) -> None:
        """Show the progress after an update."""
        if self._bar is None and shows_bars():
            self._bar = _progress_bar(self.total_updates, self.completed_updates)
            self._bar.start()
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
        now = time.perf_counter()
        if now - self._last_line < LINE_EVERY_S and update < self.total_updates:
            return
        self._last_line = now
        print(
            f"update {update}/{self.total_updates}  return {ret}  evaluation {evaluated}  {rate}  "
            f"{_clock(self._remaining_s(update))} left",
            file=sys.stderr,
            flush=True,
        )

    def hyper_parameters(self, flat: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """Write options and final results to TensorBoard's HPARAMS tab."""
        if self.board is None:
            return
        plain = {
            k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flat.items()
        }
        self.board.add_hparams(plain, dict(results), run_name="hparams")

    def video(self, tag: str, path: str | Path, *, steps: int) -> None:
        """Write an mp4 to trackers, and to TensorBoard as an animated GIF.

        The GIF has every second frame, at 10 frames per second.
        """
        self.trackers.video(tag, path, steps=steps)
        if self.board is None:
            return
        import imageio.v3 as imageio

        frames = imageio.imread(path)[::2]  # [T, H, W, 3]
        gif = imageio.imwrite("<bytes>", frames, extension=".gif", loop=0, duration=100)
        picture = self._summary.Image(
            height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif
        )
        self._write([self._summary.Value(tag=tag, image=picture)], steps)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], *, steps: int) -> None:
        """Write rows with equal keys to trackers, and to TensorBoard's text tab.

        The cells in TensorBoard are cut to CELL characters.
        """
        self.trackers.table(tag, rows, steps=steps)
        if self.board is None:
            return
        head, *body = [
            " | ".join(map(_cell, row)) for row in (rows[0], *(row.values() for row in rows))
        ]
        lines = (head, " | ".join("---" for _ in rows[0]), *body)
        self.board.add_text(tag, "\n".join(f"| {line} |" for line in lines), steps)

    def _write(self, values: list[Any], steps: int) -> None:
        """Write one event to TensorBoard, which must be there."""
        assert self.board is not None and self.board.file_writer is not None
        self.board.file_writer.add_summary(self._summary(value=values), steps)

    def close(self, status: Status = "finished") -> None:
        """Close the trackers, the files and the progress bar; ``status``: how the run ended."""
        self.trackers.close(status)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for part in (self.board, self._rows, self.digest, self._text):
            try:
                if part is not None:
                    part.close()
            except OSError as error:
                print(f"{self.run_dir}: not written to the end ({error.strerror})", file=sys.stderr)


def _summary_class() -> tuple[Any, str]:
    """Return TensorBoard's class Summary and "", or None and why it cannot be imported."""
    try:
        from tensorboard.compat.proto import summary_pb2
    except ImportError as error:
        return None, str(error)
    return vars(summary_pb2)["Summary"], ""  # protobuf creates its classes at import


@functools.cache
def _hide_writer_failures() -> None:
    """Print no traceback for an OSError of TensorBoard's writer thread: ``metrics`` raises it, too.

    The hook stays in place, because the thread may end after the error has closed the log.
    """
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
    return "<br>".join(re.sub(r"[\\`*_\[\]<>&|~]", lambda m: f"&#{ord(m[0])};", text).splitlines())


def _format(value: float | None, spec: str) -> str:
    """Format a number; "-" for None and NaN (no episode has finished yet)."""
    return "-" if value is None or math.isnan(value) else format(value, spec)


def _open_rows(
    path: Path, completed_updates: int, unit: str
) -> tuple[TextIO, int | None, list[str]]:
    """Open metrics.jsonl without the rows after ``completed_updates`` and without damaged lines.

    A new run (``completed_updates`` 0) starts with an empty file: an earlier run in the same
    directory ended before its first checkpoint.

    Returns:
        The file; the first step (in ``unit``) that TensorBoard must drop, None if the rows up to
        ``completed_updates`` are lost; and the damaged lines among those rows, as text. An
        incomplete last line is not one of them: the run was killed while writing it, and writes it
        again.
    """
    lines: list[bytes] = []
    damaged: list[str] = []
    purge_step, update = None if completed_updates else 0, 0
    if completed_updates and path.exists():
        content = path.read_bytes()
        written = content.splitlines()
        for number, line in enumerate(written, 1):
            try:
                row = json.loads(line)
                update, step = int(row["update"]), int(row[unit])
                if update <= completed_updates:
                    purge_step = step + 1
                    lines.append(line)
            except (ValueError, KeyError, TypeError, OverflowError):
                if update < completed_updates and (
                    number < len(written) or content.endswith(b"\n")
                ):
                    damaged.append(f"line {number} (after update {update})")
    temporary = path.with_suffix(".new")
    temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    os.replace(temporary, path)
    return open(path, "a", buffering=1), purge_step, damaged


def _is_notebook() -> bool:
    """Return whether stderr is the output of a notebook's cell."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


def shows_bars() -> bool:
    """Return whether stderr shows progress bars: a terminal, or the cell of a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def bar_console() -> Any:
    """Return a console of rich on stderr for progress bars.

    In a notebook a bar is a line that is overwritten; rich's own needs ipywidgets.
    """
    from rich.console import Console

    if _is_notebook():
        return Console(stderr=True, force_terminal=True, force_jupyter=False, width=100)
    return Console(stderr=True)


def _progress_bar(total: int, done: int) -> Any:
    """Return a progress bar of training, which is not started."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("return {task.fields[ret]}"),
        TextColumn("evaluation {task.fields[evaluated]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=bar_console(),
        transient=False,
    )
    bar.add_task("training", total=total, completed=done, ret="-", evaluated="-", rate="-")
    return bar


def _clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
