"""Report of an evaluation: report.json for programs and one self-contained HTML page."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import jinja2

from embodied_ppo.core import tree
from embodied_ppo.core.intervals import Z95, wilson_interval
from embodied_ppo.core.random import TRAINING_SEEDS
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult, deviation, mean_interval
from embodied_ppo.evaluation.video import Video

FORMAT = 1
"""Version of report.json; it changes when a field changes its meaning."""
FILES = ("report.json", "report.html", "robustness.json")
"""Names of the files of a report; the last exists if robustness was measured."""

EPISODES_SHOWN = 500
"""Number of rows of the page's table of episodes; report.json has all episodes."""

SAMPLE_SHOWN = 600
"""Characters of a sample's text on the page; report.json has the complete text."""

Unit: TypeAlias = Literal["env_steps", "tokens"]
"""Unit of training steps: env_steps for a robot policy, tokens for a language model.

The episodes of a language model are responses to prompts.
"""

TERMS: dict[Unit, dict[str, str]] = {
    "env_steps": {
        "task": "task",
        "episode": "episode",
        "measured": "evaluation episodes",
        "step": "step",
        "return": "return",
        "success": "success",
        "success rate": "success rate",
        "state": "initial state",
        "states": "states",
        "deterministic": "actions by the mode of the policy",
        "sampled": "actions sampled from the policy",
        "terminated": "ended by the task",
        "truncated": "by the time limit",
        "ended": "ended by",
        "by itself": "task",
        "cut": "time limit",
        "intervals": "mean return and length by Student's t, success by Wilson's score",
    },
    "tokens": {
        "task": "data source",
        "episode": "response",
        "measured": "responses",
        "step": "token",
        "return": "score",
        "success": "accuracy",
        "success rate": "accuracy",
        "state": "prompt",
        "states": "prompts",
        "deterministic": "greedy",
        "sampled": "sampled",
        "terminated": "stopped by itself",
        "truncated": "cut at the limit",
        "ended": "ended",
        "by itself": "by itself",
        "cut": "cut at the limit",
        "intervals": (
            "mean score and length by Student's t, accuracy by Wilson's score; several responses "
            "to one prompt are not independent"
        ),
    },
}
"""Terms of the page, by unit."""

CURVES: dict[Unit, tuple[tuple[str, tuple[str, ...], float | None], ...]] = {
    "env_steps": (
        ("Return", ("rollout/return", "eval/return"), None),
        ("Success rate", ("rollout/success", "eval/success"), None),
        ("Episode length", ("rollout/length", "eval/length"), None),
        ("Policy entropy", ("policy/entropy",), None),
        ("Approximate KL", ("policy/approx_kl",), None),
        ("Explained variance (cut at -1)", ("value/explained_variance",), -1.0),
    ),
    "tokens": (
        ("Score", ("rollout/return", "eval/return"), None),
        ("Accuracy", ("rollout/success", "eval/accuracy"), None),
        ("Response length", ("rollout/length", "eval/length"), None),
        ("Responses cut at the limit", ("rollout/truncated", "eval/truncated"), None),
        ("Policy entropy", ("policy/entropy",), None),
        ("Approximate KL", ("policy/approx_kl",), None),
        ("KL to the reference", ("kl/to_reference",), None),
        ("Explained variance (cut at -1)", ("value/explained_variance",), -1.0),
    ),
}
"""Charts: title, tags of metrics.jsonl, and the value below which a line is cut.

Absent tags are left out.
"""


# ------------------------------------------------------------------------------------------- report
@dataclass(frozen=True, slots=True)
class Report:
    """Files of a report, and the content of report.json."""

    json: Path
    html: Path
    content: dict[str, Any]
    robustness_json: Path | None = None


def write(
    out: Path | str,
    results: Sequence[EvaluationResult],
    *,
    checkpoint: str,
    update: int,
    steps: int,
    unit: Unit = "env_steps",
    config: Mapping[str, Any],
    config_hash: str,
    versions: Mapping[str, str],
    task: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, float] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
    curves: Iterable[Mapping[str, Any]] = (),
    video: Video | None = None,
    robustness: RobustnessSection | None = None,
) -> Report:
    """Write ``out``/report.json and ``out``/report.html atomically.

    With ``robustness``, also ``out``/robustness.json.

    report.json contains no date, duration or curve, so the same checkpoint and seed give the same
    bytes. The training steps are stored under the name of their unit. Numbers in ``extra`` that
    are not finite are stored as null, and options that are not finite as text ("inf"). Only a
    robot's report has ``seeds``.

    Args:
        out: Folder of the report.
        results: One result per task, in the order of display.
        checkpoint: Name of the checkpoint's folder.
        update: Update of the checkpoint.
        steps: Training steps until then, counted in ``unit``.
        unit: env_steps for a robot policy, tokens for a language model.
        config: Resolved configuration, representable in JSON.
        config_hash: Digest of the configuration.
        versions: Package -> version.
        task: Of a user's task: "hash" of its files as executed, "hash_in_training", and "files"
            (name -> sha256).
        samples: Responses to display, see ``prompts.PromptEvaluationResult.samples``.
        extra: Name -> further numbers, such as pass@4.
        options: Options of the evaluation, with which it can be repeated.
        curves: Rows of the run's metrics.jsonl.
        video: Video to embed, or the reason why there is none.
        robustness: Measured in changed environments (``evaluation.robustness``).

    Raises:
        ValueError: There is no task, a task has no episode, or a return is not finite.
    """
    if not results or not all(r.episodes for r in results):
        raise ValueError("a report needs at least one task with at least one episode")
    episodes = [e for r in results for e in r.episodes]
    seeds = [e.seed for e in episodes]
    states = {(r.task, e.initial_state) for r in results for e in r.episodes}
    content = {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "update": update,
        unit: steps,
        "config_hash": config_hash,
        "deterministic": all(r.deterministic for r in results),
        "temperature": results[0].temperature,
        "seed": results[0].seed,
        "seeds": {
            "first": min(seeds),
            "last": max(seeds),
            "training_below": TRAINING_SEEDS,
            "disjoint_from_training": min(seeds) >= TRAINING_SEEDS,
        },
        "overall": {
            "episodes": len(episodes),
            "distinct_initial_states": len(states),
            "success": _success(episodes, unit),
        },
        "tasks": {r.task: statistics(r, unit) for r in results},
        "episodes": [
            {
                "task": r.task,
                "index": e.index,
                "seed": e.seed,
                "return": e.return_,
                "length": e.length,
                "success": e.success,
                "ended": e.ended,
                "initial_state": e.initial_state,
            }
            for r in results
            for e in r.episodes
        ],
        "versions": dict(sorted(versions.items())),
        "config": tree.map(_json_value, config),
    }
    if options:
        content["evaluation"] = tree.map(_json_value, dict(options))
    if task is not None:
        content["task_files"] = dict(task)
    if unit == "tokens":
        del content["seeds"]  # no simulator
    if extra:
        content["numbers"] = {name: x if math.isfinite(x) else None for name, x in extra.items()}
    if samples:
        content["samples"] = [dict(s) for s in samples]
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    charts = learning_curves(curves, unit=unit)
    page = _render_page(
        json.loads(text),
        unit=unit,
        charts=charts,
        video=video,
        robustness=robustness,
    )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    json_file, html_file, robustness_file = (out / name for name in FILES)
    files = {json_file: text + "\n", html_file: page}
    if robustness is not None:
        files[robustness_file] = json.dumps(robustness.content, indent=1, allow_nan=False) + "\n"
    for file, file_text in files.items():
        # Renamed when complete: a reader sees the old file or the new one.
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(file_text, encoding="utf-8")
        temporary.replace(file)
    return Report(json_file, html_file, content, robustness_file if robustness else None)


def _json_value(value: Any) -> Any:
    """Return an option's value; numbers that are not finite, which JSON does not have, as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def statistics(result: EvaluationResult, unit: Unit = "env_steps") -> dict[str, Any]:
    """Return the statistics of one task.

    ``ci95`` is [low, high]. For return and length it is null if there is one episode (language
    model: one prompt). ``success`` is null if the task does not report it. Responses to one prompt
    are not independent, so a language model's intervals are over prompts.
    """
    groups = _by_prompt(result.episodes) if unit == "tokens" else [[e] for e in result.episodes]
    return {
        "episodes": len(result.episodes),
        "distinct_initial_states": result.distinct_initial_states,
        "return": _summary(result.returns, [fmean(e.return_ for e in g) for g in groups]),
        "length": _summary(result.lengths, [fmean(e.length for e in g) for g in groups]),
        "success": _success(result.episodes, unit),
        "terminated": sum(e.ended == "terminated" for e in result.episodes),
        "truncated": sum(e.ended == "truncated" for e in result.episodes),
    }


def _by_prompt(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Group responses by the hash of their prompt."""
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.initial_state, []).append(e)
    return list(groups.values())


def _success(episodes: Sequence[Episode], unit: Unit) -> dict[str, Any] | None:
    """Return the success rate with its interval; None if a task does not report success."""
    successes = [e.success for e in episodes if e.success is not None]
    if len(successes) < len(episodes):
        return None
    count = sum(successes)
    z = Z95 * math.sqrt(_design_effect(episodes) if unit == "tokens" else 1.0)
    return {
        "count": count,
        "rate": count / len(episodes),
        "ci95": list(wilson_interval(count, len(episodes), z)),
        "ci95_method": "Wilson score",
    }


def _design_effect(episodes: Sequence[Episode]) -> float:
    """Return the design effect of several responses to one prompt (Kish 1965), at least 1.

        effect = V / (p(1-p) / N),    V = Σ over prompts (right - p · responses)² / N²

    V is the variance of the accuracy p of N responses. Wilson's interval depends on z²/N only, so
    the interval of N / effect responses is that of N responses with z · √effect.
    """
    groups, n = _by_prompt(episodes), len(episodes)
    if len(groups) == n:
        return 1.0
    p = sum(bool(e.success) for e in episodes) / n
    if p in (0.0, 1.0):
        return n / len(groups)
    variance = math.fsum((sum(bool(e.success) for e in g) - p * len(g)) ** 2 for g in groups) / n**2
    return max(1.0, variance * n / (p * (1 - p)))


def _summary(values: list[float], independent: list[float]) -> dict[str, Any]:
    """Return statistics of values; the interval is computed from ``independent`` values."""
    interval = mean_interval(independent)
    return {
        "mean": fmean(values),
        "ci95": list(interval) if interval else None,
        "ci95_method": "Student t",
        "std": deviation(values),
        "median": median(values),
        "min": min(values),
        "max": max(values),
    }


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return the template of a page, which is compiled once per process."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("embodied_ppo.evaluation", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "short": short, "cut": cut}
    return environment.get_template(name)


def _render_page(
    content: dict[str, Any],
    *,
    unit: Unit,
    charts: list[Chart],
    video: Video | None,
    robustness: RobustnessSection | None,
) -> str:
    """Render the page, which has no script and loads no other file."""
    histograms = {
        task: histogram([e["return"] for e in content["episodes"] if e["task"] == task], unit)
        for task in content["tasks"]
    }
    video_data = poster = None
    if video is not None and video.path is not None:
        video_data = base64.b64encode(video.path.read_bytes()).decode()
        poster = base64.b64encode(video.poster).decode()
    return template("report.html.j2").render(
        report=content,
        terms=TERMS[unit],
        steps=content[unit],
        language=unit == "tokens",
        numbers=content.get("numbers", {}),
        samples=content.get("samples", ()),
        histograms=histograms,
        charts=charts,
        robustness_section=robustness,
        video=video,
        video_data=video_data,
        poster=poster,
        config=json.dumps(content["config"], indent=2, ensure_ascii=False),
        episodes_shown=EPISODES_SHOWN,
    )


# ------------------------------------------------------------------------------------------ numbers
def number(x: float, like: float | None = None) -> str:
    """Format with at least four significant digits: 12,345 · 123.4 · 0.01235.

    Integers below 10^6 are written in full. With ``like``, use the number of decimals of that
    number.
    """
    size = abs(x if like is None else like)
    if (size == 0 or float(size).is_integer()) and float(x).is_integer() and abs(x) < 1e6:
        return f"{x:,.0f}"
    if not 1e-4 <= size < 1e6:
        return f"{x:.3e}"
    return f"{x:,.{max(0, 3 - math.floor(math.log10(size)))}f}"


def percent(x: float) -> str:
    """Format a fraction as a percentage with one decimal."""
    return f"{100 * x:.1f}%"


def cut(text: str, length: int = SAMPLE_SHOWN) -> str:
    """Shorten to ``length`` characters: the beginning, …, and the end, which has the answer."""
    head = 2 * length // 3
    return text if len(text) <= length else f"{text[:head]} … {text[head + 3 - length :]}"


def short(x: float) -> str:
    """Format the label of a tick: 0 · 0.05 · 250 · 1.5k · 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.4g}{unit}"
    return f"{x:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers that span [low, high].

    Their distance is 1, 2 or 5 times a power of ten.
    """
    if not high > low:
        margin = max(abs(low), 1.0) * 0.5
        low, high = low - margin, low + margin
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


# ------------------------------------------------------------------------------------------- charts
WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 350, 10, 180
"""Size of a chart and its axes, in SVG units."""


@dataclass(frozen=True, slots=True)
class Line:
    """Curve of a chart."""

    label: str
    path: str
    """SVG path data."""
    dots: list[tuple[float, float]]
    """Points, if there are few."""
    band: str = ""
    """SVG path data of the area between the ends of its intervals."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a histogram."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Span:
    """Range of x that is shaded."""

    low: float
    high: float
    label: str


@dataclass(frozen=True, slots=True)
class VerticalLine:
    """Vertical line with a label at its top."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart in SVG units for the template."""

    title: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    bars: list[Bar]
    mark: float | None = None
    """x of a vertical line."""
    band: str = ""
    """SVG path data of the area between the ends of intervals."""
    whiskers: Sequence[tuple[float, float, float]] = ()
    """x, upper and lower y of intervals."""
    spans: Sequence[Span] = ()
    verticals: Sequence[VerticalLine] = ()
    half: float | None = None
    """y of a dotted horizontal line."""


@dataclass(frozen=True, slots=True)
class RobustnessSection:
    """Section of the page about changed environments.

    Attributes:
        content: Content of robustness.json.
        charts: One chart per changed property.
        table: Rows of cells, the first is the header; the page leaves out the last column.
    """

    content: Mapping[str, Any]
    charts: Sequence[Chart]
    table: Sequence[Sequence[str]]


def learning_curves(
    rows: Iterable[Mapping[str, Any]], *, unit: Unit = "env_steps", points: int = 300
) -> list[Chart]:
    """Return the charts of CURVES for which the rows have values.

    Args:
        rows: Rows of metrics.jsonl.
        unit: Unit of the x axis; rows without it are drawn over updates.
        points: Largest number of points of a line; neighbours are averaged.
    """
    drawn = {unit, "update", *(tag for _, tags, _ in CURVES[unit] for tag in tags)}
    rows = [{tag: x for tag, x in row.items() if tag in drawn and _finite(x)} for row in rows]
    key = next((k for k in (unit, "update") if any(k in row for row in rows)), None)
    if key is None:
        return []
    charts = []
    for title, tags, floor in CURVES[unit]:
        series = {}
        for tag in tags:
            values = [
                (float(row[key]), float(row[tag])) for row in rows if key in row and tag in row
            ]
            if values:
                lowest = -math.inf if floor is None else floor
                series[tag] = _thin([(x, max(lowest, y)) for x, y in values], points)
        if series:
            charts.append(line_chart(title, key.replace("env_steps", "environment steps"), series))
    return charts


MAX_LINE = 1 << 20
"""Longest line of metrics.jsonl that is read, bytes; rows usually have a few thousand."""


def rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl; damaged, overlong and torn lines are left out."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        return
    with open(file, "rb", buffering=MAX_LINE) as f:
        while line := f.readline(MAX_LINE):
            if not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = f.readline(MAX_LINE)
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _finite(x: Any) -> bool:
    """Return whether x is a number that fits in a float; JSON has integers of any size."""
    return isinstance(x, (int, float)) and abs(x) <= sys.float_info.max


def _thin(values: list[tuple[float, float]], points: int) -> list[tuple[float, float]]:
    """Average neighbours to at most ``points`` points."""
    size = math.ceil(len(values) / points)
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map from [low, high] to [start, end], rounded to 0.1."""
    return lambda x: round(start + (x - low) / (high - low) * (end - start), 1)


def line_chart(
    title: str,
    x_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    bands: Mapping[str, Sequence[tuple[float, float, float]]] = MappingProxyType({}),
) -> Chart:
    """Return a line chart.

    Args:
        title: Title.
        x_label: Label of the x axis.
        series: Label -> points (x, y).
        bands: Label -> (x, low, high), intervals that are shaded.
    """
    xs = [x for values in series.values() for x, _ in values]
    ys = [y for values in series.values() for _, y in values]
    ys += [y for band in bands.values() for _, *ends in band for y in ends]
    x_ticks = [x for x in ticks(min(0.0, *xs), max(xs)) if x <= max(xs) or max(xs) <= 0]
    y_ticks = ticks(min(ys), max(ys))
    x_of = _scale(min(0.0, *xs), max(max(xs), x_ticks[-1], 1e-9), LEFT, RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)
    lines = []
    for label, values in series.items():
        dots = [(x_of(x), y_of(y)) for x, y in values]
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in dots)
        band = bands.get(label, ())
        edge = [(x_of(x), y_of(high)) for x, _, high in band]
        edge += [(x_of(x), y_of(low)) for x, low, _ in reversed(band)]
        area = "M" + " L".join(f"{x:g} {y:g}" for x, y in edge) + " Z" if edge else ""
        lines.append(Line(label, path, dots if len(dots) <= 20 else [], area))
    return Chart(
        title,
        x_label,
        [(x_of(x), short(x)) for x in x_ticks],
        [(y_of(y), short(y)) for y in y_ticks],
        lines,
        [],
    )


def histogram(values: list[float], unit: Unit = "env_steps") -> Chart:
    """Return the histogram of returns, with a vertical line at the mean."""
    episodes, quantity = TERMS[unit]["episode"] + "s", TERMS[unit]["return"]
    bins = min(25, max(6, 2 * math.ceil(math.sqrt(len(values)))))
    edges = ticks(min(values), max(values), count=bins)
    counts = [0] * (len(edges) - 1)
    for value in values:  # a bin includes its lower edge; the last one its upper edge, too
        counts[min(len(counts) - 1, sum(value >= edge for edge in edges[1:]))] += 1
    y_ticks = [y for y in ticks(0, max(counts)) if float(y).is_integer()]
    x_of = _scale(edges[0], edges[-1], LEFT, RIGHT)
    y_of = _scale(0, max(y_ticks[-1], max(counts)), BOTTOM, TOP)
    bars = [
        Bar(
            x=x_of(low) + 0.5,
            y=y_of(count),
            width=round(max(1.0, x_of(high) - x_of(low) - 1), 1),
            height=round(BOTTOM - y_of(count), 1),
            label=(
                f"{count} of {len(values)} {episodes} with a {quantity} of {number(low)} to"
                f" {number(high)}"
            ),
        )
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    ]
    return Chart(
        f"{episodes.capitalize()} by {quantity}",
        f"{quantity} (dashed: the mean)",
        [(x_of(x), short(x)) for x in ticks(edges[0], edges[-1], 4) if edges[0] <= x <= edges[-1]],
        [(y_of(y), short(y)) for y in y_ticks],
        [],
        bars,
        mark=x_of(fmean(values)),
    )
