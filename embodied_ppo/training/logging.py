"""What a run tells: TensorBoard, metrics.jsonl, log.txt, and one console line or progress bar; and
the Timer.
"""

from __future__ import annotations

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
from typing import Any, Literal, TextIO

from tensorboard.compat.proto import summary_pb2

from embodied_ppo.core import watchdog
from embodied_ppo.core.types import Mean, Metrics
from embodied_ppo.training.health import Watch

Summary: Any = vars(summary_pb2)["Summary"]  # protobuf makes its classes at import

LINE_EVERY_S = 10.0
"""Seconds between progress lines where there is no terminal for a bar."""

CELL = 400
"""Longest text in a cell of a table, characters."""


class Timer:
    """Wall and CPU seconds by phase; phases do not nest.

    ``wall`` counts since the last ``take``, the rest the run.
    """

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.run_wall: dict[str, float] = defaultdict(float)
        self.phase: str | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        self.phase = phase
        try:
            yield
        finally:
            self.phase = None
            self.wall[phase] += time.perf_counter() - wall
            self.cpu[phase] += time.process_time() - cpu

    def take(self) -> Metrics:
        """time/<phase> in wall seconds since the last take."""
        metrics: Metrics = {f"time/{phase}_s": seconds for phase, seconds in self.wall.items()}
        for phase, seconds in self.wall.items():
            self.run_wall[phase] += seconds
        self.wall.clear()
        return metrics

    def total(self, phases: Iterable[str]) -> tuple[float, float]:
        """(wall, CPU) seconds of these phases in the whole run, up to the last take."""
        phases = list(phases)
        return sum(self.run_wall[p] for p in phases), sum(self.cpu[p] for p in phases)


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def process_age_s() -> float:
    """Seconds since this process was started (0 where the system does not say)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def numbers(metrics: Metrics) -> dict[str, float]:
    """Tags to plain finite-or-NaN floats."""
    return {
        tag: value.value if isinstance(value, Mean) else float(value)
        for tag, value in metrics.items()
    }


def finite(row: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: null."""
    return {tag: value if math.isfinite(value) else None for tag, value in row.items()}


class Log:
    """Writers of one run, made when it starts: a refused run leaves no trace."""

    def __init__(
        self,
        run_dir: Path,
        *,
        total_updates: int,
        first_update: int = 0,
        unit: Literal["env_steps", "tokens"] = "env_steps",
        quiet: bool = False,
    ) -> None:
        """``first_update``: the updates that a resumed run has done already; what was written after
        them is dropped. ``unit``: what progress is counted in."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.total_updates, self.quiet = run_dir, total_updates, quiet
        threading.excepthook = _thread_failed
        self.unit, self.speed = (
            unit,
            f"speed/{unit}_per_s",
        )  # every update's row holds that tag, and no other row
        self._text: TextIO = open(run_dir / "log.txt", "a", buffering=1)  # noqa: SIM115
        watchdog.log_to(run_dir / "log.txt")
        self._open(first_update)
        self._bar = None
        self._last: dict[str, float] = {}
        self._evaluated_at = 0
        self._started = time.perf_counter()
        self._last_line = -math.inf
        self._watch = Watch()

    def _open(self, first_update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.first_update = first_update
        self._rows, purge_step = _open_rows(self.run_dir / "metrics.jsonl", first_update, self.unit)
        self.board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge_step)

    def rewind(self, first_update: int) -> None:
        """Forget what was written after an update: it is about to be repeated."""
        self.board.close()
        self._rows.close()
        self._open(first_update)
        self._watch = Watch()

    def row(self, update: int) -> dict[str, Any]:
        """What metrics.jsonl holds of an update; nothing where it was lost, or another run's
        directory has it.
        """
        rows = (
            json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
        )
        return next((row for row in rows if row["update"] == update), {})

    # ------------------------------------------------------------------------------------- messages
    def say(self, text: str, *, show: bool = True) -> None:
        """One line for the user, on stderr (unless they have seen it: not ``show``) and in
        log.txt.
        """
        with suppress(
            OSError
        ):  # a full disk: what is said is still shown, and metrics() tells of it
            self._text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if show and not self.quiet:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, file=sys.stderr, flush=True)

    # -------------------------------------------------------------------------------------- metrics
    def metrics(self, metrics: Metrics, *, update: int, steps: int) -> None:
        """One row of metrics.jsonl and one point in TensorBoard per tag. x axis: steps, in
        ``unit``.

        Raises OSError where the disk refuses.
        """
        row = numbers(metrics)
        values = [
            Summary.Value(tag=tag, simple_value=x) for tag, x in row.items() if math.isfinite(x)
        ]
        self._write(
            Summary(value=values), steps
        )  # one event: a tenth of the time of one for each tag
        if "time/save_s" in row:  # a resume starts here and does not write these points again
            self.board.flush()
        # The row comes last: a resumed run that finds it takes the update for complete.
        self._rows.write(json.dumps({"update": update, self.unit: steps} | finite(row)) + "\n")
        self._last |= row
        if self.speed in row:
            for trouble in self._watch.see(row):
                self.say(f"warning, update {update}: {trouble}")
                self.board.add_text("warnings", trouble, steps)
        if "eval/return" in row:
            self._evaluated_at = update
        if update <= self.first_update:  # before the training of this session
            self._started = time.perf_counter()
            return
        if self.speed not in row:  # an evaluation beside the training
            return
        if (
            update == self.first_update + 1 < self.total_updates
        ):  # whoever watches sees the time left after each
            ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + self._left(update)))
            self.say(
                f"update {update} is done; all {self.total_updates} will be at about {ends}",
                show=False,
            )
        if not self.quiet:
            self._show(update)

    def _left(self, update: int) -> float:
        """Seconds to the end, at the pace so far."""
        done = time.perf_counter() - self._started
        return done / max(1, update - self.first_update) * (self.total_updates - update)

    def _show(self, update: int) -> None:
        """The progress of training, after an update."""
        if self._bar is None and sys.stderr.isatty():
            self._bar = _progress_bar(self.total_updates, self.first_update)
            self._bar.start()
        robot = self.unit == "env_steps"
        tags, form = (
            ("rollout/return", "eval/return" if robot else "eval/accuracy"),
            ".1f" if robot else ".3f",
        )
        ret, evaluated = (_word(self._last.get(tag), form) for tag in tags)
        evaluated += f" (at {self._evaluated_at})" if evaluated != "-" else ""
        rate = _word(self._last.get(self.speed), ",.0f") + (" steps/s" if robot else " tokens/s")
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
            f"{_clock(self._left(update))} left",
            file=sys.stderr,
            flush=True,
        )

    def hyper_parameters(self, flat: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """TensorBoard's HPARAMS tab: options against final results."""
        plain = {
            k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flat.items()
        }
        self.board.add_hparams(plain, dict(results), run_name="hparams")

    def video(self, tag: str, path: str | Path, *, steps: int) -> None:
        """An mp4 into TensorBoard, as the animated GIF its image tab plays (every second frame, 10
        per second).
        """
        import imageio.v3 as imageio

        frames = imageio.imread(path)[::2]  # [T, H, W, 3]
        gif = imageio.imwrite("<bytes>", frames, extension=".gif", loop=0, duration=100)
        picture = Summary.Image(
            height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif
        )
        self._write(Summary(value=[Summary.Value(tag=tag, image=picture)]), steps)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], *, steps: int) -> None:
        """One row or more, of the same keys, into TensorBoard's text tab; a cell is cut to CELL
        characters.
        """
        head, *body = [
            " | ".join(map(_cell, row)) for row in (rows[0], *(row.values() for row in rows))
        ]
        lines = (head, " | ".join("---" for _ in rows[0]), *body)
        self.board.add_text(tag, "\n".join(f"| {line} |" for line in lines), steps)

    def _write(self, summary: Any, steps: int) -> None:
        writer = self.board.file_writer
        assert writer is not None
        writer.add_summary(summary, steps)

    def close(self) -> None:
        threading.excepthook = threading.__excepthook__
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for part in (self.board, self._rows, self._text):
            try:
                part.close()
            except OSError as error:
                print(f"{self.run_dir}: not written to the end ({error.strerror})", file=sys.stderr)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread, which prints what ``metrics`` raises after it: that is told
    once.
    """
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


def _cell(value: Any) -> str:
    """Text for a cell of a markdown table, which shows it as it is."""
    text = str(value)
    text = text if len(text) <= CELL else text[: CELL - 1] + "…"
    return "<br>".join(re.sub(r"[\\`*_\[\]<>&|~]", lambda m: f"&#{ord(m[0])};", text).splitlines())


def _word(value: float | None, form: str) -> str:
    """A number for people; "-" while there is none (no episode has finished yet)."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def _open_rows(path: Path, first_update: int, unit: str) -> tuple[TextIO, int | None]:
    """metrics.jsonl without rows after ``first_update`` (they are about to be repeated) and without
    a torn last line.

    Also the first step (in ``unit``) that TensorBoard has to forget; None where the rows that would
    tell are lost. A new run (``first_update`` 0) keeps nothing of one that was left in the
    directory before its first checkpoint.
    """
    kept: list[str] = []
    purge_step = None if first_update else 0
    if first_update and path.exists():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
                if row["update"] <= first_update:
                    purge_step = int(row[unit]) + 1
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)
    return open(path, "a", buffering=1), purge_step


def _progress_bar(total: int, done: int) -> Any:
    from rich.console import Console
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
        console=Console(stderr=True),
        transient=False,
    )
    bar.add_task("training", total=total, completed=done, ret="-", evaluated="-", rate="-")
    return bar


def _clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
