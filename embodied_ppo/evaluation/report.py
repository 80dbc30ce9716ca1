"""Report of an evaluation: report.json for programs and one self-contained HTML page."""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import jinja2

from embodied_envs.base import tree
from embodied_envs.base.intervals import Z95, wilson_interval
from embodied_envs.base.random import TRAINING_SEEDS
from embodied_ppo.core.guarded_files import read_object, replace_file
from embodied_ppo.core.tables import tables
from embodied_ppo.evaluation import paired as paired_differences
from embodied_ppo.evaluation import robustness as robustness_card
from embodied_ppo.evaluation.charts import Chart, line_chart, page_templates
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult, deviation, mean_interval
from embodied_ppo.evaluation.video import Video
from embodied_ppo.training.run_files import METRICS, metric_rows

FORMAT = 1  # version of report.json; it changes when a field changes its meaning

EPISODES_SHOWN = 500  # number of rows of the page's table of episodes; report.json has all episodes

# Ranges of equal width of the values of a command, in each of which its error is reported.
COMMAND_RANGES = 8

POINTS = 300  # largest number of points of a line in a chart

SAMPLE_SHOWN = 600  # characters of a sample's text on the page; report.json has the complete text

# env_steps for a robot policy, tokens for a language model, whose episodes are responses.
Unit: TypeAlias = Literal["env_steps", "tokens"]

# Tags of metrics.jsonl in each chart of the page. Absent tags are left out.
CURVES: tuple[tuple[str, ...], ...] = tables(__file__)["curves"]


# ------------------------------------------------------------------------------------------- report
@dataclass(frozen=True, slots=True)
class Report:
    """Files of a report, the content of report.json, and kind -> path of all files."""

    json: Path
    html: Path
    content: dict[str, Any]
    files: dict[str, str | None]


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
    robustness: Mapping[str, Any] | None = None,
    paired: Mapping[str, Any] | None = None,
    constant_inputs: Sequence[str] = (),
    command: str = "",
) -> Report:
    """Write ``out``/report.json and ``out``/report.html atomically.

    With ``robustness`` and ``paired``, also ``out``/robustness.json and paired.json.

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
        robustness: Content of robustness.json, see ``evaluation.robustness``.
        paired: Content of paired.json, see ``evaluation.paired``.
        constant_inputs: Names of the policy's inputs that had one value in all of the training.
        command: Command that repeats the evaluation; only the page has it.

    Raises:
        ValueError: There is no task, a task has no episode, or a return is not finite.
    """
    if not results or not all(r.episodes for r in results):
        raise ValueError("a report needs at least one task with at least one episode")
    content = {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "update": update,
        unit: steps,
        "config_hash": config_hash,
        **_measurements(results, unit),
        "versions": dict(sorted(versions.items())),
        "config": tree.map(_json_value, config),
    }
    if results[0].diverged:
        content["overall"]["diverged"] = results[0].diverged
    if unit == "tokens":
        del content["seeds"]  # no simulator
    optional = {
        "evaluation": tree.map(_json_value, dict(options)),
        "task_files": task,
        "numbers": {name: x if math.isfinite(x) else None for name, x in extra.items()},
        "constant_inputs": list(constant_inputs),
        "samples": [dict(s) for s in samples],
    }
    content |= {name: x for name, x in optional.items() if x}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    page = template("report.html.j2").render(
        report=json.loads(text),
        steps=steps,
        language=unit == "tokens",
        charts=learning_curves(curves, unit),
        tracking_charts=tracking_charts(content["tasks"]),
        robustness=robustness,
        robustness_charts=[] if robustness is None else robustness_card.charts(robustness),
        robustness_rows=[] if robustness is None else robustness_card.rows(robustness),
        paired=paired,
        paired_rows=[] if paired is None else paired_differences.rows(paired),
        command=command,
        video=video,
        config=json.dumps(content["config"], indent=2, ensure_ascii=False),
        episodes_shown=EPISODES_SHOWN,
    )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    texts = {"report": ("report.html", page), "report_json": ("report.json", text + "\n")}
    for name, measured in (("robustness", robustness), ("paired", paired)):
        if measured is not None:
            measured_text = json.dumps(measured, indent=1, allow_nan=False) + "\n"
            texts[f"{name}_json"] = f"{name}.json", measured_text
    for name, file_text in texts.values():
        replace_file(out / name, file_text)
    files: dict[str, str | None] = {kind: str(out / name) for kind, (name, _) in texts.items()}
    return Report(out / "report.json", out / "report.html", content, files)


def _measurements(results: Sequence[EvaluationResult], unit: Unit) -> dict[str, Any]:
    """Return how the policy was evaluated, and its episodes with their statistics."""
    episodes = [e for r in results for e in r.episodes]
    seeds = [e.seed for e in episodes]
    return {
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
            "distinct_initial_states": sum(r.distinct_initial_states for r in results),
            "success": _success(episodes, unit),
            "success_at_end": _success_at_end(episodes),
        },
        "tasks": {r.task: statistics(r, unit) for r in results},
        "episodes": [{"task": r.task, **_episode(e)} for r in results for e in r.episodes],
    }


def _episode(e: Episode) -> dict[str, Any]:
    """Return the row of an episode."""
    fields = ("length", "success", "success_at_end", "ended", "initial_state")
    row = {"index": e.index, "seed": e.seed, "return": e.return_}
    row |= {name: getattr(e, name) for name in fields}
    return row if e.sentence is None else row | {"sentence": e.sentence}


def read(file: Path) -> dict[str, Any]:
    """Return a report.json, which has texts of any length.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    return read_object(file, {"update": int, "overall": dict})


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
    numbers = {
        name: {"mean": fmean(means), "ci95": mean_interval(means)}
        for name, means in result.numbers().items()
    }
    tracking = command_errors(result.episodes)
    return {
        **({"numbers": numbers} if numbers else {}),
        **({"tracking": tracking} if tracking else {}),
        "episodes": len(result.episodes),
        "distinct_initial_states": result.distinct_initial_states,
        "return": _summary(result.returns, [fmean(e.return_ for e in g) for g in groups]),
        "length": _summary(result.lengths, [fmean(e.length for e in g) for g in groups]),
        "success": _success(result.episodes, unit),
        "success_at_end": _success_at_end(result.episodes),
        "terminated": sum(e.ended == "terminated" for e in result.episodes),
        "truncated": sum(e.ended == "truncated" for e in result.episodes),
    }


def command_errors(episodes: Sequence[Episode]) -> dict[str, list[dict[str, Any]]]:
    """Return command -> its error in COMMAND_RANGES ranges of its values, without empty ones.

    Mean of the steps of an episode with a value in the range, then of these episodes, with the
    interval (null for one episode). A command with one value has one range.
    """
    errors = {}
    for name in dict.fromkeys(k for e in episodes for k, row in e.tracking.items() if row):
        rows = [e.tracking.get(name, ()) for e in episodes]
        values = [value for row in rows for value, _, _ in row]
        low, width = min(values), (max(values) - min(values)) / COMMAND_RANGES

        def index(value: float, low: float = low, width: float = width) -> int:
            return min(int((value - low) / width), COMMAND_RANGES - 1) if width else 0

        errors[name] = []
        for k in range(COMMAND_RANGES):
            inside = [[(x, n) for value, x, n in row if index(value) == k] for row in rows]
            means = [sum(x * n for x, n in r) / sum(n for _, n in r) for r in inside if r]
            if means:
                bounds = [low + k * width, low + (k + 1) * width]
                part = {"range": bounds, "mean": fmean(means), "ci95": mean_interval(means)}
                errors[name].append(part | {"episodes": len(means)})
    return errors


def _by_prompt(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Group responses by the hash of their prompt."""
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.initial_state, []).append(e)
    return list(groups.values())


def _success(episodes: Sequence[Episode], unit: Unit) -> dict[str, Any] | None:
    """Return the success rate with its interval; None if a task does not report success."""
    if any(e.success is None for e in episodes):
        return None
    count = sum(bool(e.success) for e in episodes)
    z = Z95 * math.sqrt(_design_effect(episodes) if unit == "tokens" else 1.0)
    return {
        "count": count,
        "rate": count / len(episodes),
        "ci95": list(wilson_interval(count, len(episodes), z)),
        "ci95_method": "Wilson score",
    }


def _success_at_end(episodes: Sequence[Episode]) -> float | None:
    """Return the rate of success in the last step; None if a task does not report success."""
    flags = [e.success_at_end for e in episodes]
    return None if None in flags else sum(map(bool, flags)) / len(flags)


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


def template(name: str) -> jinja2.Template:
    """Return the template of a page, which is compiled once per process."""
    environment = page_templates("embodied_ppo.evaluation")
    environment.filters["cut"] = cut
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return environment.get_template(name)


def cut(text: str, length: int = SAMPLE_SHOWN) -> str:
    """Shorten to ``length`` characters: the beginning, …, and the end, which has the answer."""
    head = 2 * length // 3
    return text if len(text) <= length else f"{text[:head]} … {text[head + 3 - length :]}"


# ------------------------------------------------------------------------------------------- charts
def learning_curves(rows: Iterable[Mapping[str, Any]], unit: Unit) -> list[Chart]:
    """Return the charts of CURVES for which rows of metrics.jsonl have values.

    Args:
        rows: Rows of metrics.jsonl.
        unit: Unit of the x axis; rows without it are left out.
    """
    drawn = {unit, *itertools.chain(*CURVES)}
    # Rows have None, or NaN, for a mean without samples.
    rows = [
        {tag: x for tag, x in row.items() if tag in drawn and x is not None and math.isfinite(x)}
        for row in rows
    ]
    charts = []
    for tags in CURVES:
        series = {}
        for tag in tags:
            values = [(row[unit], row[tag]) for row in rows if unit in row and tag in row]
            if tag == "value/explained_variance":  # large negative values hide all others
                values = [(x, max(-1.0, y)) for x, y in values]
            # Average neighbours to at most POINTS points.
            size = math.ceil(len(values) / POINTS)
            parts = [values[k : k + size] for k in range(0, len(values), size or 1)]
            if parts:
                series[tag] = [(fmean(x for x, _ in p), fmean(y for _, y in p)) for p in parts]
        if series:
            label = "environment steps" if unit == "env_steps" else unit
            charts.append(line_chart(tags[0], label, series))
    return charts


def tracking_charts(tasks: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Return a chart of the errors of commands for each task that has commands of two values."""
    charts = []
    for task, content in tasks.items():
        series, bands = {}, {}
        for name, parts in content.get("tracking", {}).items():
            points = [(sum(part["range"]) / 2, part) for part in parts]
            if len(parts) > 1:
                series[name] = [(x, part["mean"]) for x, part in points]
                bands[name] = [(x, *part["ci95"]) for x, part in points if part["ci95"]]
        if series:
            title = "absolute error" if len(tasks) == 1 else f"{task}: absolute error"
            charts.append(line_chart(title, "command, in its unit", series, bands))
    return charts


def rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's metrics.jsonl; damaged, overlong and torn lines are left out."""
    if (run_dir / METRICS).is_file():
        yield from (row for _, row in metric_rows(run_dir) if row is not None)
