"""Compare trained policies on the same initial states; write differences, intervals and a page.

A method is one run, or several runs that differ only in their seed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from embodied_ppo import run
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core.errors import ConfigError, show
from embodied_ppo.evaluation import comparison, report
from embodied_ppo.evaluation.comparison import Scores
from embodied_ppo.modes.base import report_write_errors
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import replace_text, versions
from embodied_ppo.training.run_files import check_compared, find_runs, in_sweep_order

Metric: TypeAlias = Literal["auto", "return", "success"]
METRICS: tuple[str, ...] = get_args(Metric)

MOST_METHODS = 6
"""Largest number of methods, which is the number of colours of the page."""

MOST_RUNS = 200
"""Largest number of runs in all methods together."""

FORMAT = 1
"""Version of comparison.json. Increase it when the meaning of a field changes."""

NOT_OF_METHOD = ("seed", "run_dir", "resume", "name", "description", "evaluation.", "tracker")
"""Prefixes of the options that may differ between runs of one method."""

SAME_TASK = (
    *("env.id", "env.simulator", "env.max_episode_steps", "env.randomize", "env.ranges"),
    *("env.kwargs", "env.realism", "data.eval"),
)
"""Prefixes of the options that define the evaluated task; ``compare`` reports those that differ."""


@dataclass(frozen=True)
class TrainedRun:
    """A run of a method, with its newest checkpoint or the checkpoint that the user named.

    Attributes:
        path: Path that the user named, or a run in a folder that the user named.
        source: The checkpoint.
        run_dir: Run directory that contains the checkpoint.
        config: Options of the run.
        options: Dotted path -> value of the options that the run reads.
    """

    path: Path
    source: checkpoint.Checkpoint
    run_dir: Path
    config: Config
    options: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return self.config.seed

    def method_options(self) -> dict[str, str]:
        """Return the options that distinguish methods: dotted path -> value as text."""
        return {
            path: show(value)
            for path, value in self.options.items()
            if not path.startswith(NOT_OF_METHOD)
        }


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed, and their scores."""

    label: str
    runs: Sequence[TrainedRun]
    scores: Scores
    """[S, E], see ``evaluation.comparison``."""


def compare(
    paths: Sequence[str],
    options: EvaluateConfig,
    *,
    metric: Metric = "auto",
    explicit: Any = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate runs on the same initial states; write and return the comparison.

    Args:
        paths: Runs, checkpoints, or folders of runs. Runs of a folder that differ only in their
            seed form one method.
        options: Options of the evaluation; ``out`` is the directory of comparison.json and
            comparison.html, by default comparisons/DATE. The report of each evaluation is written
            into the directory of its run and reused by later comparisons.
        metric: Score of an episode; "auto" is success if the task reports it, otherwise the return.
        explicit: Options that the user set.
        quiet: Whether progress is hidden.

    Returns:
        Content of comparison.json, and the paths of both files ("page", "json").

    Raises:
        ConfigError, CheckpointError, EnvError: The runs cannot be compared; no comparison is
            written.
    """
    if metric not in METRICS:
        raise ConfigError(f"metric={show(metric)}: unknown; use one of {', '.join(METRICS)}")
    if options.episodes < 2:
        raise ConfigError("episodes=1: an interval needs at least 2 episodes; write episodes=100")
    options = replace(options, video=False)
    groups = _groups(paths)
    notes = _check_same_task([runs[0] for _, runs in groups], options)
    out = Path(options.out or Path("comparisons") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    with ExitStack() as cleanup:
        cleanup.callback(_remove_empty, [p for p in (out, *out.parents) if not p.exists()])
        with report_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        progress = Progress(quiet)
        reports: list[list[dict[str, Any]]] = []
        total, done = sum(len(runs) for _, runs in groups), 0
        for _, runs in groups:
            reports.append([])
            for trained_run in runs:
                progress.say(f"{done + 1} of {total}: {trained_run.source.path}")
                reports[-1].append(_report(trained_run, options, explicit, quiet))
                _check_metric(metric, reports[-1][-1])
                done += 1
        chosen = _metric(metric, reports)
        scores = _paired_scores(groups, reports, chosen)
        methods = [Method(label, runs, s) for (label, runs), s in zip(groups, scores, strict=True)]
        notes += _state_notes(reports)
        content = _content(methods, chosen, options, notes, reference_run=groups[0][1][0])
        files = _write(out, content, methods)
    return content | {"page": str(files[1]), "json": str(files[0])}


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those folders that are empty; children come before their parents."""
    for folder in folders:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


# ------------------------------------------------------------------------------------------ methods
def _groups(paths: Sequence[str]) -> list[tuple[str, list[TrainedRun]]]:
    """Return the label and the runs of each method."""
    groups: list[tuple[str, list[TrainedRun]]] = []
    for path in paths:
        check_compared(path)
        folder = Path(path)
        run_dirs = list(find_runs([folder], links=True).values()) if folder.is_dir() else []
        nested = [run_dir for run_dir in run_dirs if run_dir.resolve() != folder.resolve()]
        if not nested:
            groups.append((path, [_open(folder)]))
            continue
        runs_of: dict[tuple[tuple[str, str], ...], list[TrainedRun]] = {}
        for trained_run in map(_open, in_sweep_order(nested)):
            key = tuple(sorted(trained_run.method_options().items()))
            runs_of.setdefault(key, []).append(trained_run)
        for runs in runs_of.values():
            groups.append((path, sorted(runs, key=lambda x: x.seed)))
    if len(groups) < 2:
        raise ConfigError(
            f"{' '.join(paths)}: one method, and a comparison needs two; name runs, or folders of"
            " runs with different options"
        )
    if len(groups) > MOST_METHODS:
        raise ConfigError(
            f"{len(groups)} methods: at most {MOST_METHODS} are compared; name fewer folders"
        )
    if (count := sum(len(runs) for _, runs in groups)) > MOST_RUNS:
        raise ConfigError(f"{count} runs: at most {MOST_RUNS} are compared; name fewer folders")
    return _add_labels(groups)


def _open(path: Path) -> TrainedRun:
    """Open the checkpoint of a run."""
    source, run_dir, config = run.open_run(str(path), "compare")
    return TrainedRun(path, source, run_dir, config, loader.flat(loader.relevant(config)))


def _add_labels(
    groups: Sequence[tuple[str, list[TrainedRun]]],
) -> list[tuple[str, list[TrainedRun]]]:
    """Return the methods with short, unique labels: their paths, or the options that differ."""
    folders = [path for path, _ in groups]
    common = os.path.commonpath([Path(p).absolute().parent for p in folders])
    labels = [os.path.relpath(Path(p).absolute(), common) for p in folders]
    rows = option_differences([runs[0] for _, runs in groups])
    repeated = {label for label in labels if labels.count(label) > 1}
    for i, label in enumerate(labels):
        if label in repeated and rows:
            labels[i] = ", ".join(f"{row['option']}={row['values'][i]}" for row in rows)
    numbered = [
        f"{label} ({labels[: i + 1].count(label)})" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]
    return [(label, runs) for label, (_, runs) in zip(numbered, groups, strict=True)]


def option_differences(runs: Sequence[TrainedRun]) -> list[dict[str, Any]]:
    """Return the options that differ between runs, with the value in each run.

    Options that do not distinguish methods are left out. A value is None if the run does not read
    the option.
    """
    options = [trained_run.method_options() for trained_run in runs]
    names = dict.fromkeys(name for values in options for name in values)
    return [
        {"option": name, "values": [values.get(name) for values in options]}
        for name in names
        if len({values.get(name) for values in options}) > 1
    ]


def _check_same_task(runs: Sequence[TrainedRun], options: EvaluateConfig) -> list[str]:
    """Return notes about options of the environment that differ.

    Raises:
        ConfigError: The modes or the tasks differ.
    """
    first = runs[0]
    for trained_run in runs[1:]:
        for path in ("mode", "env.id"):
            values = [show(x.options.get(path)) for x in (first, trained_run)]
            if values[0] != values[1]:
                raise ConfigError(
                    f"{trained_run.path}: {path} is {values[1]}, and {values[0]} in {first.path};"
                    " compare runs of the same task"
                )
    changed = tuple(f"env.{path}" for path in loader.flat(options.env))
    notes = []
    for row in option_differences(runs):
        path = row["option"]
        if path.startswith(SAME_TASK) and not path.startswith(changed or ("\0",)):
            values = ", ".join(str(value) for value in dict.fromkeys(row["values"]))
            notes.append(
                f"the environments differ: {path} is {values}; with {path}=VALUE all runs are"
                " evaluated in the same environment"
            )
    return notes


# ------------------------------------------------------------------------------------------- scores
def _report(
    trained_run: TrainedRun, options: EvaluateConfig, explicit: Any, quiet: bool
) -> dict[str, Any]:
    """Return report.json of a run; evaluate the run if no current report exists."""
    run_options = replace(options, checkpoint=str(trained_run.source.path), out=None)
    file = run.report_dir(run_options, trained_run.source, trained_run.run_dir) / "report.json"
    try:
        content = json.loads(file.read_text())
        if (
            content["format"] == report.FORMAT
            and content["versions"] == dict(sorted(versions().items()))
            and content["config_hash"] == trained_run.source.manifest["config_hash"]
            and file.stat().st_mtime_ns
            >= (trained_run.source.path / checkpoint.MANIFEST).stat().st_mtime_ns
            and _is_complete(content)
        ):
            return content
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # there is none, or it is damaged or of another version
    written = run.evaluate(run_options, explicit=explicit, quiet=quiet)
    return json.loads(Path(written["report_json"]).read_text())


def _is_complete(content: Mapping[str, Any]) -> bool:
    """Return whether a report has all scores. Raises as ``_report`` catches it."""
    names = ("return", "success") if content["overall"]["success"] is not None else ("return",)
    episodes = content["episodes"]
    return len(episodes) == content["overall"]["episodes"] and all(
        isinstance(e["initial_state"], str) and math.isfinite(e[name])
        for e in episodes
        for name in names
    )


def _check_metric(metric: Metric, content: Mapping[str, Any]) -> None:
    """Raise ConfigError if a report does not have the score."""
    if metric == "success" and content["overall"]["success"] is None:
        raise ConfigError("metric=success: the task does not report success; use metric=return")


def _metric(
    metric: Metric, reports: Sequence[Sequence[Mapping[str, Any]]]
) -> Literal["return", "success"]:
    """Return the score of an episode; with "auto" success if all runs report it."""
    if metric != "auto":
        return metric
    every = all(r["overall"]["success"] is not None for of_method in reports for r in of_method)
    return "success" if every else "return"


def _paired_scores(
    groups: Sequence[tuple[str, Sequence[TrainedRun]]],
    reports: Sequence[Sequence[Mapping[str, Any]]],
    metric: str,
) -> list[Scores]:
    """Return the scores of each method, [S, E].

    Raises:
        ConfigError: A score is not finite, or the number of episodes differs.
    """
    scores = [[_scores(report, metric) for report in of_method] for of_method in reports]
    count, first = len(scores[0][0]), groups[0][1][0].path
    for (_, runs), rows in zip(groups, scores, strict=True):
        for trained_run, row in zip(runs, rows, strict=True):
            if len(row) != count:
                raise ConfigError(
                    f"{trained_run.path}: has {len(row)} episodes or prompts, and {first} has"
                    f" {count}; compare runs with the same data of evaluation"
                )
            if not all(map(math.isfinite, row)):
                raise ConfigError(
                    f"{trained_run.path}: an episode has a {metric} that is not finite; leave this"
                    " run out"
                )
    return [np.array(rows) for rows in scores]


def _scores(content: Mapping[str, Any], metric: str) -> list[float]:
    """Return the score of each episode; for language models, the mean score of each prompt."""
    if "seeds" in content:
        return [float(episode[metric]) for episode in content["episodes"]]
    prompts: dict[str, list[float]] = {}
    for episode in content["episodes"]:
        prompts.setdefault(episode["initial_state"], []).append(float(episode[metric]))
    return [float(np.mean(scores)) for scores in prompts.values()]


def _state_notes(reports: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a note if the first observations of paired episodes differ, otherwise nothing."""
    first = [e["initial_state"] for e in reports[0][0]["episodes"]]
    others = [
        [e["initial_state"] for e in r["episodes"]] for of_method in reports for r in of_method
    ]
    if all(states == first for states in others):
        return []
    return [
        "the first observations of paired episodes differ, because the runs read different"
        " observations; the simulator's seeds are the same"
    ]


# ---------------------------------------------------------------------------------------- results
def _content(
    methods: Sequence[Method],
    metric: Literal["return", "success"],
    options: EvaluateConfig,
    notes: list[str],
    *,
    reference_run: TrainedRun,
) -> dict[str, Any]:
    """Return the content of comparison.json."""
    binary = metric == "success" and all(set(np.unique(a.scores)) <= {0.0, 1.0} for a in methods)
    rows = []
    for method in methods:
        low, high = comparison.bootstrap(
            method.scores, lambda x: comparison.interquartile_mean(x.mean(1))
        )
        rows.append(
            {
                "label": method.label,
                "mean": float(method.scores.mean()),
                "ci95": list(comparison.mean_interval(method.scores, binary=binary)),
                "interquartile_mean": comparison.interquartile_mean(method.scores.mean(1)),
                "interquartile_mean_ci95": [float(low), float(high)],
                "runs": [
                    {
                        "run": str(trained_run.run_dir),
                        "checkpoint": trained_run.source.path.name,
                        "seed": trained_run.seed,
                        "update": trained_run.source.update,
                        "mean": float(scores.mean()),
                    }
                    for trained_run, scores in zip(method.runs, method.scores, strict=True)
                ],
            }
        )
    differences = [_difference(methods[0], method, binary=binary) for method in methods[1:]]
    return {
        "format": FORMAT,
        "mode": reference_run.config.mode,
        "task": str(reference_run.options.get("env.id") or reference_run.config.name),
        "metric": metric,
        "episodes": methods[0].scores.shape[1],
        "seed": options.seed,
        "deterministic": options.deterministic,
        "methods": rows,
        "differences": differences,
        "options": option_differences([method.runs[0] for method in methods]),
        "notes": notes,
        "versions": dict(sorted(versions().items())),
    }


def _difference(a: Method, b: Method, *, binary: bool) -> dict[str, Any]:
    """Return the difference of two methods, an entry of comparison.json."""
    result = comparison.difference(a.scores, b.scores, binary=binary)
    needed = None if result.is_decided else comparison.seeds_needed(a.scores, b.scores)
    return {
        "a": a.label,
        "b": b.label,
        "mean": result.mean,
        "ci95": [result.low, result.high],
        "ci95_unpaired": list(result.unpaired),
        "probability_b_better": result.probability,
        "win_rate": comparison.win_rate(a.scores, b.scores),
        "decided": result.is_decided,
        "runs_needed": needed,
        "verdict": _verdict(a, b, result, needed),
    }


def _verdict(a: Method, b: Method, result: comparison.Difference, needed: int | None) -> str:
    """Return the result as a sentence."""
    numbers = f"{result.mean:+.4g} (95 %: {result.low:+.4g} to {result.high:+.4g})"
    if a.scores.shape == b.scores.shape and bool((a.scores == b.scores).all()):
        return f"{b.label} and {a.label} are equal in every episode of every run"
    single = min(len(a.runs), len(b.runs)) == 1
    caution = (
        "; this holds for these checkpoints only, because other training seeds may differ: compare"
        " several runs of each method"
        if single
        else ""
    )
    if result.is_decided:
        better, worse = (b, a) if result.mean > 0 else (a, b)
        return f"{better.label} is better than {worse.label}: {numbers}{caution}"
    if single:
        advice = caution
    elif needed is None:
        advice = f"; not even {comparison.MOST_SEEDS} runs of each would decide it"
    elif needed == max(len(a.runs), len(b.runs)):
        advice = (
            "; the same number of runs would decide it in most cases: repeat it with other seeds"
        )
    else:
        more = needed - min(len(a.runs), len(b.runs))
        advice = (
            f"; {needed} runs of each ({more} more) would decide it with probability"
            f" {comparison.POWER:g}, if the difference stays the same"
        )
    return f"{b.label} against {a.label} is undecided: {numbers}{advice}"


# -------------------------------------------------------------------------------------------- files
def _write(out: Path, content: Mapping[str, Any], methods: Sequence[Method]) -> tuple[Path, Path]:
    """Write comparison.json and comparison.html; return their paths."""
    files = out / "comparison.json", out / "comparison.html"
    page = report.template("comparison.html.j2").render(
        content=content,
        charts=[*_curves(methods, content["mode"]), _profile(methods, content["metric"])],
    )
    with report_write_errors(out):
        replace_text(files[0], json.dumps(content, indent=1) + "\n")
        replace_text(files[1], page)
    return files


def _curves(methods: Sequence[Method], mode: str) -> list[report.Chart]:
    """Return charts of the learning curves: median over runs of each method, with interval."""
    unit = "tokens" if mode == "reasoning" else "env_steps"
    charts = []
    for title, tags in (
        ("Return in training", ("rollout/return",)),
        ("Success rate in training", ("rollout/success",)),
        ("Return of evaluations", ("eval/return",)),
        ("Success rate of evaluations", ("eval/success", "eval/accuracy")),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        bands: dict[str, list[tuple[float, float, float]]] = {}
        for method in methods:
            curve = comparison.median_curve(
                [_curve(trained_run, unit, tags) for trained_run in method.runs]
            )
            if len(curve) > 1:
                lines[method.label] = [(x, y) for x, y, _, _ in curve]
                if len(method.runs) > 1:
                    bands[method.label] = [(x, low, high) for x, _, low, high in curve]
        if lines:
            label = "tokens" if unit == "tokens" else "environment steps"
            charts.append(report.line_chart(title, label, lines, bands))
    return charts


def _curve(trained_run: TrainedRun, unit: str, tags: Sequence[str]) -> list[tuple[float, float]]:
    """Return the points (steps or tokens, value) of tags in the metrics of a run."""
    return [
        (float(row[unit]), float(row[tag]))
        for row in report.rows(trained_run.run_dir)
        for tag in tags
        if isinstance(row.get(unit), (int, float)) and isinstance(row.get(tag), (int, float))
    ]


def _profile(methods: Sequence[Method], metric: str) -> report.Chart:
    """Return the performance profiles: share of episodes, or of runs, with a score above x."""
    scores = [
        method.scores.mean(1, keepdims=True) if metric == "success" else method.scores
        for method in methods
    ]
    low, high = min(x.min() for x in scores), max(x.max() for x in scores)
    margin = 0.02 * (high - low) or 1.0
    thresholds = np.linspace(low - margin, high + margin, 60)
    lines: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for method, values in zip(methods, scores, strict=True):
        share: Callable[[Scores], Any] = lambda x: comparison.profile(x, thresholds)
        lines[method.label] = [*zip(thresholds.tolist(), share(values).tolist(), strict=True)]
        if len(method.runs) > 1:
            ends = comparison.bootstrap(values, share, replicates=300)
            bands[method.label] = [
                *zip(thresholds.tolist(), *(x.tolist() for x in ends), strict=True)
            ]
    subject = "Runs" if metric == "success" else "Episodes"
    return report.line_chart(f"{subject} with a {metric} above x", metric, lines, bands)
