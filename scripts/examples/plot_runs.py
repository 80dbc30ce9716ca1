"""Plot a metric of several runs over environment steps.

    python scripts/examples/plot_runs.py eval/return curves.png runs/quickstart/*

``metrics.jsonl`` in a run directory has one JSON object per update; docs/metrics.md explains the
tags. Updates without the metric (an evaluation happens every ``eval_every`` updates) are skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def curve(run_dir: Path, tag: str) -> tuple[list[float], list[float]]:
    """Return steps (tokens for a language model) and values of a metric."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [
        (row.get("env_steps", row.get("tokens")), row[tag])
        for row in rows
        if row.get(tag) is not None
    ]
    return [float(x) for x, _ in points], [float(y) for _, y in points]


def main(tag: str, out: str, run_dirs: Sequence[str]) -> None:
    """Write a picture with one curve for each run."""
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for run_dir in run_dirs:
        steps, values = curve(Path(run_dir), tag)
        axes.plot(steps, values, marker=".", label=Path(run_dir).name)
    axes.set_xlabel("steps")
    axes.set_ylabel(tag)
    axes.legend()
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
