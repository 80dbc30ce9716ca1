"""Compare trained policies on the same initial states; write differences, intervals and a page.

A method is one run, or several runs that differ only in their seed, and perhaps their task.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.api import Run, path_text
from embodied_ppo.core import guarded_files
from embodied_ppo.core.tables import tables
from embodied_ppo.evaluation import checkpoint_evaluation, comparison, report
from embodied_ppo.evaluation.charts import Chart, line_chart
from embodied_ppo.evaluation.comparison import Scores
from embodied_ppo.options import loader
from embodied_ppo.options.compose import CALL, FLAGS, GIVEN, override_lines, prepare
from embodied_ppo.options.schema import Config, EvaluateConfig
from embodied_ppo.training import checkpoint, run_directory, run_files
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.trained_run import open_evaluated

METRICS = ("auto", "return", "success")

MOST_METHODS = 6  # largest number of methods, which is the number of colours of the page

FORMAT = 2  # Version of comparison.json. Increase it when the meaning of a field changes.

# Prefixes of the options that may differ between runs of one method.
NOT_OF_METHOD = ("seed", "run_dir", "resume", "name", "description", "evaluation.", "tracker")


@dataclass(frozen=True)
class ComparedRun:
    """A run of a method, with its newest checkpoint or the checkpoint that the user named.

    Attributes:
        path: Path that the user named, or a run in a folder that the user named.
        source: The checkpoint.
        run_dir: Run directory that contains the checkpoint.
        config: Options of the run.
        options: Dotted path -> value as text of the options that distinguish methods.
    """

    path: Path
    source: checkpoint.Checkpoint
    run_dir: Path
    config: Config
    options: Mapping[str, str]

    @property
    def task(self) -> str:
        """The task, or the name of a run without ``env.id``."""
        return self.options.get("env.id", self.config.name)


@dataclass
class ComparedMethod:
    """Runs that differ only in their seed and their task.

    Attributes:
        label: Name in tables: the path that the user named, or the options that differ.
        runs: The runs.
        reports: report.json of each run.
        scores: [S, E], see ``evaluation.comparison``.
    """

    label: str
    runs: Sequence[ComparedRun]
    reports: list[dict[str, Any]] = field(default_factory=list)
    scores: Scores = field(default_factory=lambda: np.zeros((0, 0)))

    def by_task(self) -> dict[str, ComparedMethod]:
        """Return the runs of each task as a method."""
        tasks: dict[str, ComparedMethod] = {}
        reports = self.reports or [{}] * len(self.runs)
        for trained_run, content in zip(self.runs, reports, strict=True):
            part = tasks.setdefault(trained_run.task, ComparedMethod(self.label, []))
            part.runs = [*part.runs, trained_run]
            part.reports.append(content)
        return tasks


def compare(
    *runs: str | Path | Run,
    metric: str = "auto",
    references: Mapping[str, Sequence[float]] | None = None,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate runs on the same initial states; write and return the comparison.

    Args:
        runs: At least two: runs, checkpoints, or folders of runs. Runs of a folder that differ only
            in their seed form one method.
        metric: Score of an episode: "return", "success", or "auto", which is success if the task
            reports it, otherwise the return.
        references: Task -> returns with the normalised scores 0 and 1, for runs of several tasks.
            None: the lowest and the highest mean return of the compared runs in each task.
        progress: Show progress on stderr.
        options: Options of ``embodied-ppo evaluate``: episodes, seed, env, ...; ``out`` is the
            directory of comparison.json and comparison.html, by default comparisons/DATE. The
            report of each evaluation is written into the directory of its run and reused by later
            comparisons.

    Returns:
        "methods", "differences" (mean, 95 % interval, probability, verdict), "options"
        that differ, and the paths of both files ("page", "json").

    Raises:
        ConfigError, CheckpointError, EnvError: The runs cannot be compared; no comparison is
            written.
    """
    lines = override_lines("evaluate", options)
    paths = [path_text(trained_run) for trained_run in runs]
    return compare_lines(
        paths, metric, lines, references=references, label=CALL, quiet=not progress
    )


def compare_lines(
    paths: Sequence[str],
    metric: Any,
    lines: Sequence[str],
    *,
    quiet: bool,
    references: Mapping[str, Sequence[float]] | None = None,
    label: str = FLAGS,
) -> dict[str, Any]:
    """Compare runs with lines option=value, see ``compare``."""
    if not paths:
        raise ConfigError("name at least two runs, or a folder of runs: there is none")
    given = {line.partition("=")[0].lstrip("+~") for line in lines}
    if ignored := sorted(given & {"checkpoint", "model"}):
        raise ConfigError(f"write the run without {ignored[0]}=: compare ignores this option")
    args = argparse.Namespace(command="evaluate", config_name=None, config_dir=None)
    lines = [*override_lines("evaluate", {"checkpoint": paths[0]}), *lines]
    loaded = prepare(args, lines, label=label)
    options: EvaluateConfig = loaded.config
    explicit = {*loaded.deliberate(GIVEN)} - {"checkpoint"}
    if metric not in METRICS:
        raise ConfigError(f"metric={show(metric)}: unknown; use one of {', '.join(METRICS)}")
    if options.episodes < 2:
        raise ConfigError("episodes=1: an interval needs at least 2 episodes; write episodes=100")
    options = replace(options, video=False)
    methods = _methods(paths)
    _check_same_tasks(methods, options)
    out = Path(options.out or Path("comparisons") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    run_directory.check_writable(out)
    progress = Progress(quiet)
    pairs = [(method, trained_run) for method in methods for trained_run in method.runs]
    for number, (method, trained_run) in enumerate(pairs, 1):
        progress.say(f"{number} of {len(pairs)}: {trained_run.source.path}")
        method.reports.append(_report(trained_run, options, explicit, quiet))
        if metric == "success" and method.reports[-1]["overall"]["success"] is None:
            raise ConfigError("metric=success: the task does not report success; use metric=return")
    if metric == "auto":
        every = all(r["overall"]["success"] is not None for m in methods for r in m.reports)
        metric = "success" if every else "return"
    if len(methods[0].by_task()) > 1:
        content = _content_of_tasks(methods, metric, options, references)
        profiles = {row["label"]: row["profile"] for row in content["methods"]}
        charts = [_chart("Share of runs above τ", "normalized score τ", profiles)]
    else:
        _set_scores(methods, metric)
        content = _content(methods, metric, options)
        charts = _curves(methods, content["mode"])
    page = report.template("comparison.html.j2").render(content=content, charts=charts)
    files = {"page": out / "comparison.html", "json": out / "comparison.json"}
    with run_directory.report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        guarded_files.replace_file(files["json"], json.dumps(content, indent=1) + "\n")
        guarded_files.replace_file(files["page"], page)
    return content | {name: str(file) for name, file in files.items()}


# ------------------------------------------------------------------------------------------ methods
def _methods(paths: Sequence[str]) -> list[ComparedMethod]:
    """Return the methods, without reports and scores."""
    methods: list[ComparedMethod] = []
    for path in paths:
        run_files.check_compared(path)
        folder = Path(path)
        run_dirs = run_files.find_runs([folder], links=True).values()  # none in a file
        # A link to a run in the same folder, such as "latest", is not another run.
        unique = {x.resolve(): x for x in run_dirs if x.resolve() != folder.resolve()}
        if not unique:
            methods.append(ComparedMethod(path, [_open(folder)]))
            continue
        opened = [*map(_open, run_files.in_sweep_order([*unique.values()]))]
        # Options that differ between tasks only, such as the number of environments, do not
        # distinguish methods.
        tasks = ComparedMethod(path, opened).by_task().values()
        of_tasks = [run_files.differing_options([x.options for x in part.runs]) for part in tasks]
        names = {row["option"] for rows in of_tasks for row in rows}
        runs_of: dict[tuple[str | None, ...], list[ComparedRun]] = {}
        for trained_run in opened:
            key = tuple(trained_run.options.get(name) for name in sorted(names))
            runs_of.setdefault(key, []).append(trained_run)
        for runs in runs_of.values():
            methods.append(ComparedMethod(path, sorted(runs, key=lambda x: x.config.seed)))
    if len(methods) < 2:
        raise ConfigError(
            f"{' '.join(paths)}: one method, and a comparison needs two; name runs, or folders of"
            " runs with different options"
        )
    if len(methods) > MOST_METHODS:
        raise ConfigError(
            f"{len(methods)} methods: at most {MOST_METHODS} are compared; name fewer folders"
        )
    _set_labels(methods)
    return methods


def _open(path: Path) -> ComparedRun:
    """Open the checkpoint of a run."""
    run = open_evaluated(str(path), "compare")
    options = {
        name: show(value)
        for name, value in loader.flat(loader.relevant(run.config)).items()
        if not name.startswith(NOT_OF_METHOD)
    }
    return ComparedRun(path, run.source, run.run_dir, run.config, options)


def _set_labels(methods: Sequence[ComparedMethod]) -> None:
    """Make the labels short and unique: relative paths, or the options that differ."""
    folders = [Path(method.label).absolute() for method in methods]
    common = os.path.commonpath([folder.parent for folder in folders])
    rows = run_files.differing_options([method.runs[0].options for method in methods])
    for i, method in enumerate(methods):
        method.label = os.path.relpath(folders[i], common)
        if folders.count(folders[i]) > 1 and rows:
            method.label = ", ".join(f"{row['option']}={row['values'][i]}" for row in rows)
    for label in {method.label for method in methods}:
        repeated = [method for method in methods if method.label == label][1:]
        for number, method in enumerate(repeated, 2):
            method.label = f"{label} ({number})"


def _check_same_tasks(methods: Sequence[ComparedMethod], options: EvaluateConfig) -> None:
    """Raise ConfigError if modes differ, or tasks or data that ``options`` do not replace."""
    several = any(len(method.by_task()) > 1 for method in methods)
    if several and "id" in options.env:
        raise ConfigError("remove env.id: runs of several tasks are compared in their own tasks")
    paths = ["mode", *(() if "id" in options.env else ("env.id",))]
    for path in (*paths, *(() if options.data else ("data.task", "data.eval"))):
        by_task = several and path == "env.id"
        names = [{x.task if by_task else str(x.options.get(path)) for x in m.runs} for m in methods]
        values = [", ".join(sorted(part)) for part in names]
        for method, value in zip(methods, values, strict=True):
            if value != values[0]:
                raise ConfigError(
                    f"{method.runs[0].path}: {path} is {value}, and {values[0]} in"
                    f" {methods[0].runs[0].path}; compare runs of the same tasks"
                )


# ------------------------------------------------------------------------------------------- scores
def _report(
    trained_run: ComparedRun, options: EvaluateConfig, explicit: Any, quiet: bool
) -> dict[str, Any]:
    """Return report.json of a run; evaluate the run if no current report exists."""
    run_options = replace(options, checkpoint=str(trained_run.source.path), out=None)
    folder = checkpoint_evaluation.report_dir(run_options, trained_run.source, trained_run.run_dir)
    file = folder / "report.json"
    try:
        content = report.read(file)
        task = content.get("task_files") or {}
        if (
            not options.allow_changed_task  # the user's files may have changed again
            # So may those of another task; of its own task, a run has copies.
            and task.get("hash") in (None, task.get("hash_in_training"))
            and content["format"] == report.FORMAT
            and content["versions"] == dict(sorted(run_directory.versions().items()))
            and content["config_hash"] == trained_run.source.manifest["config_hash"]
            and file.stat().st_mtime_ns
            >= max(x.stat().st_mtime_ns for x in _evaluated_files(trained_run, options))
        ):
            return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # there is none, or it is damaged or of another version
    written = checkpoint_evaluation.evaluate(run_options, explicit=explicit, quiet=quiet)
    return report.read(Path(written["report_json"]))


def _evaluated_files(trained_run: ComparedRun, options: EvaluateConfig) -> list[Path]:
    """Return the files that an evaluation reads: the checkpoint, and of a language model the data
    and graders that still exist.
    """
    c, manifest = trained_run.config, trained_run.source.path / checkpoint.MANIFEST
    graders = [options.grader or term.grader or "" for _, term in c.reward.all_terms]
    graders = [name.rpartition(":")[0] or name for name in graders]
    paths = [Path(name) for name in (*(options.data or c.data.eval), *graders) if name]
    files = [file for path in paths for file in (path, *path.glob("*")) if file.exists()]
    return [manifest, *files]


def _set_scores(methods: Sequence[ComparedMethod], metric: str) -> None:
    """Set the scores of each method. Raises ConfigError if the number of episodes differs.

    Prompts are paired by their text, or by place where the chat templates of the runs differ. Where
    responses could not be graded, only prompts with a score of every run are paired.
    """
    reports = [content for method in methods for content in method.reports]
    failed = any(content.get("numbers", {}).get("grader_failures") for content in reports)
    common = set.intersection(*(set(_scores(content, metric)) for content in reports))
    order = [key for key in _scores(reports[0], metric) if key in common]
    expected = len(order) if order or failed else len(_scores(reports[0], metric))
    for method in methods:
        rows = [_scores(content, metric) for content in method.reports]
        for trained_run, row in zip(method.runs, rows, strict=True):
            count = expected if failed else len(row)
            if count != expected or count < 2:
                raise ConfigError(
                    f"{trained_run.path}: has {count} episodes or prompts, and {expected} are to be"
                    f" paired with {methods[0].runs[0].path}; compare runs with the same data of"
                    " evaluation"
                )
        method.scores = np.array([[row[key] for key in order or row] for row in rows])


def _scores(content: Mapping[str, Any], metric: str) -> dict[Any, float]:
    """Return the score of each episode; for language models, the mean score of each prompt."""
    if "seeds" in content:
        return dict(enumerate(float(episode[metric]) for episode in content["episodes"]))
    prompts: dict[str, list[float]] = {}
    for episode in content["episodes"]:
        prompts.setdefault(episode["initial_state"], []).append(float(episode[metric]))
    return {prompt: float(np.mean(scores)) for prompt, scores in prompts.items()}


# ---------------------------------------------------------------------------------------- results
def _content(
    methods: Sequence[ComparedMethod], metric: str, options: EvaluateConfig
) -> dict[str, Any]:
    """Return the content of comparison.json."""
    binary = metric == "success" and all(set(np.unique(a.scores)) <= {0.0, 1.0} for a in methods)
    reference_run, rows = methods[0].runs[0], []
    for method in methods:
        runs, scores = [], method.scores
        for x, mean in zip(method.runs, scores.mean(1).tolist(), strict=True):
            run = {"run": str(x.run_dir), "checkpoint": x.source.path.name, "mean": mean}
            runs.append(run | {"seed": x.config.seed, "update": x.source.update})
        row = {"label": method.label, "mean": float(scores.mean()), "runs": runs}
        row["ci95"] = list(comparison.mean_interval(scores, binary=binary))
        row["interquartile_mean"] = comparison.interquartile_mean(scores.mean(1))
        row["interquartile_mean_ci95"] = [*comparison.interquartile_mean_interval(scores)]
        rows.append(row)
    differences, a = [], methods[0]
    for b in methods[1:]:
        result = comparison.difference(a.scores, b.scores, binary=binary)
        differences.append(_entry(a, b, result, comparison.win_rate(a.scores, b.scores)))
    return {
        "format": FORMAT,
        "mode": reference_run.config.mode,
        "task": show(options.env["id"]) if "id" in options.env else reference_run.task,
        "metric": metric,
        "episodes": methods[0].scores.shape[1],
        "seed": options.seed,
        "deterministic": options.deterministic,
        "methods": rows,
        "differences": differences,
        "options": run_files.differing_options([method.runs[0].options for method in methods]),
        "versions": dict(sorted(run_directory.versions().items())),
    }


def _entry(
    a: ComparedMethod, b: ComparedMethod, result: comparison.ScoreDifference, win_rate: float
) -> dict[str, Any]:
    """Return an entry of "differences"."""
    return {
        "a": a.label,
        "b": b.label,
        "mean": result.mean,
        "ci95": [result.low, result.high],
        "win_rate": win_rate,
        "decided": result.is_decided,
        "verdict": _verdict(a, b, result),
    }


def _verdict(a: ComparedMethod, b: ComparedMethod, result: comparison.ScoreDifference) -> str:
    """Return the result as a sentence."""
    numbers = f"{result.mean:+.4g} (95 %: {result.low:+.4g} to {result.high:+.4g})"
    if a.scores.shape == b.scores.shape and bool((a.scores == b.scores).all()):
        return f"{b.label} and {a.label} are equal in every episode of every run"
    advice = ""
    if min(len(a.runs), len(b.runs)) == 1:
        advice = (
            "; this holds for these checkpoints only, because other training seeds may differ:"
            " compare several runs of each method"
        )
    if result.is_decided:
        better, worse = (b, a) if result.mean > 0 else (a, b)
        return f"{better.label} is better than {worse.label}: {numbers}{advice}"
    return f"{b.label} against {a.label} is undecided: {numbers}{advice}"


# ----------------------------------------------------------------------------------- several tasks
def _content_of_tasks(
    methods: Sequence[ComparedMethod],
    metric: str,
    options: EvaluateConfig,
    references: Mapping[str, Sequence[float]] | None,
) -> dict[str, Any]:
    """Return the content of comparison.json for methods with runs of several tasks.

    Scores of methods and differences are normalised by two reference returns of each task; success
    is not. "tasks" has the comparison of each task.
    """
    parts = [method.by_task() for method in methods]
    tasks, contents, ranges = [*parts[0]], [], {}
    scores: list[list[Any]] = [[] for _ in methods]
    for task in tasks:
        compared = [part[task] for part in parts]
        _set_scores(compared, metric)
        contents.append(_content(compared, metric, options))
        means = np.concatenate([method.scores.mean(1) for method in compared])
        # Where all runs have the same return, the scores of all are 0.
        ends = (0.0, 1.0) if metric == "success" else (means.min(), means.max())
        ends = ends if ends[0] < ends[1] else (ends[0], ends[0] + 1)
        if metric != "success" and references is not None:
            if task not in references:
                raise ConfigError(f"references: add {task}: [LOW, HIGH]; it has no such task")
            ends = references[task]
        low, high = ranges[task] = [float(x) for x in ends]
        if not high > low:
            raise ConfigError(
                f"name references of {task}, LOW below HIGH, instead of {low}, {high}"
            )
        for runs, method in zip(scores, compared, strict=True):
            runs.append((method.scores.mean(1) - low) / (high - low))
    every = np.concatenate([x for runs in scores for x in runs])
    thresholds = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 51).tolist()
    rows, differences = [], []
    for i, (method, runs) in enumerate(zip(methods, scores, strict=True)):
        method.scores = np.concatenate(runs)[:, None]
        result = comparison.interquartile_mean_of_tasks(runs)
        row = {"label": method.label, "mean": float(method.scores.mean())}
        row["runs"] = [run for content in contents for run in content["methods"][i]["runs"]]
        row |= {"interquartile_mean": result.mean}
        row["interquartile_mean_ci95"] = [result.low, result.high]
        rows.append(row | {"profile": comparison.performance_profile(runs, thresholds)})
        if i:
            result = comparison.difference_of_tasks(scores[0], runs)
            rate = comparison.improvement_probability(scores[0], runs)
            differences.append(_entry(methods[0], method, result, rate))
    common = {k: v for k, v in contents[0].items() if k not in ("methods", "differences", "task")}
    common["metric"] = "success" if metric == "success" else "normalized return"
    common |= {"task": f"{len(tasks)} tasks", "tasks": contents, "references": ranges}
    return common | {"methods": rows, "differences": differences}


# ------------------------------------------------------------------------------------------- charts
# Title of a chart -> tags of metrics.jsonl, of which a run has one.
CURVES: dict[str, Any] = tables(__file__)["compared_curves"]


def _curves(methods: Sequence[ComparedMethod], mode: str) -> list[Chart]:
    """Return charts of the learning curves: median over runs of each method, with interval."""
    unit, label = ("tokens",) * 2 if mode == "reasoning" else ("env_steps", "environment steps")
    charts = []
    for title, tags in CURVES.items():
        curves = {}
        for method in methods:
            points = [
                [
                    (float(row[unit]), float(row[tag]))
                    for row in report.rows(trained_run.run_dir)
                    for tag in tags
                    if None not in (row.get(unit), row.get(tag))
                ]
                for trained_run in method.runs
            ]
            if len(curve := comparison.median_curve(points)) > 1:
                curves[method.label] = curve
        if curves:
            single = {method.label for method in methods if len(method.runs) == 1}
            charts.append(_chart(title, label, curves, single))
    return charts


def _chart(title: str, x_label: str, curves: Mapping[str, Any], single: Any = ()) -> Chart:
    """Return a chart of points (x, y, low, high); curves of ``single`` runs have no interval."""
    lines = {label: [(x, y) for x, y, _, _ in points] for label, points in curves.items()}
    bands = {k: [(x, *ends) for x, _, *ends in v] for k, v in curves.items() if k not in single}
    return line_chart(title, x_label, lines, bands)
