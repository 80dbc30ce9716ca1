"""What a run tells: TensorBoard, metrics.jsonl, log.txt, and one console line or progress bar; and the Timer."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from embodied_ppo.types import Mean, Metrics


class Timer:
    """Wall and CPU seconds by phase; phases do not nest."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall[phase] += time.perf_counter() - wall
            self.cpu[phase] += time.process_time() - cpu

    def take(self) -> Metrics:
        """time/<phase> in wall seconds since the last take."""
        metrics: Metrics = {f"time/{phase}_s": seconds for phase, seconds in self.wall.items()}
        self.wall.clear()
        return metrics


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def numbers(metrics: Metrics) -> dict[str, float]:
    """Tags to plain finite-or-NaN floats."""
    return {tag: value.value if isinstance(value, Mean) else float(value) for tag, value in metrics.items()}


class Log:
    """Writers of one run. Nothing is written before the first call, so a refused run leaves no trace."""

    def __init__(self, run_dir: Path, *, total_updates: int, first_update: int = 0, quiet: bool = False) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.total_updates, self.quiet = run_dir, total_updates, quiet
        self._text: TextIO = open(run_dir / "log.txt", "a", buffering=1)
        self._rows = _open_rows(run_dir / "metrics.jsonl", first_update)
        from torch.utils.tensorboard import SummaryWriter

        purge = None if first_update == 0 else first_update + 1
        self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        self._bar = None
        self._last: dict[str, float] = {}
        self._started = time.perf_counter()
        self._last_line = 0.0

    # ------------------------------------------------------------------------------------------------- messages
    def say(self, text: str) -> None:
        """One line for the user, on stderr and in log.txt."""
        self._text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        if not self.quiet:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, markup=False)
            else:
                print(text, file=sys.stderr, flush=True)

    # -------------------------------------------------------------------------------------------------- metrics
    def metrics(self, metrics: Metrics, *, update: int, env_steps: int) -> None:
        """One row of metrics.jsonl and one point in TensorBoard per tag. x axis: environment steps."""
        row = numbers(metrics)
        self._rows.write(json.dumps({"update": update, "env_steps": env_steps} | _finite(row)) + "\n")
        for tag, value in row.items():
            if math.isfinite(value):
                self.board.add_scalar(tag, value, env_steps)
        self._last |= row
        self._show(update)

    def _show(self, update: int) -> None:
        if self.quiet:
            return
        if self._bar is None and sys.stderr.isatty():
            self._bar = _progress_bar(self.total_updates)
            self._bar.start()
        result = self._last.get("rollout/return", float("nan"))
        rate = self._last.get("speed/env_steps_per_s", float("nan"))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=update, ret=result, rate=rate)
            return
        now = time.perf_counter()
        if now - self._last_line < 10.0 and update < self.total_updates:
            return
        self._last_line = now
        left = (now - self._started) / max(1, update - self._first(update)) * (self.total_updates - update)
        print(
            f"update {update}/{self.total_updates}  return {result:.1f}  {rate:,.0f} steps/s  {_clock(left)} left",
            file=sys.stderr,
            flush=True,
        )

    def _first(self, update: int) -> int:
        if not hasattr(self, "_first_update"):
            self._first_update = update - 1
        return self._first_update

    def hyper_parameters(self, flat: Mapping[str, Any], results: Mapping[str, float]) -> None:
        """TensorBoard's HPARAMS tab: options against final results."""
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flat.items()}
        self.board.add_hparams(plain, dict(results), run_name="hparams")

    def video(self, tag: str, path: str | Path, *, env_steps: int) -> None:
        """An mp4 into TensorBoard, as the animated GIF its image tab plays (every second frame, 10 per second)."""
        import imageio.v3 as imageio
        from tensorboard.compat.proto.summary_pb2 import Summary

        frames = imageio.imread(path)[::2]  # [T, H, W, 3]
        gif = imageio.imwrite("<bytes>", frames, extension=".gif", loop=0, duration=100)
        picture = Summary.Image(height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif)
        writer = self.board.file_writer
        assert writer is not None
        writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), env_steps)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.board.close()
        self._rows.close()
        self._text.close()


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: null."""
    return {tag: value if math.isfinite(value) else None for tag, value in row.items()}


def _open_rows(path: Path, first_update: int) -> TextIO:
    """metrics.jsonl without rows after ``first_update`` (they are about to be repeated) and without a torn last line."""
    if path.exists():
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["update"] <= first_update:
                    kept.append(line)
            except (ValueError, KeyError):
                continue
        temporary = path.with_suffix(".new")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, path)
    return open(path, "a", buffering=1)


def _progress_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("return {task.fields[ret]:.1f}"),
        TextColumn("{task.fields[rate]:,.0f} steps/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=False,
    )
    bar.add_task("training", total=total, ret=float("nan"), rate=float("nan"))
    return bar


def _clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
