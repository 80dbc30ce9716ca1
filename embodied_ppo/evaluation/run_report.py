"""Write the report of an evaluation of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embodied_ppo.evaluation import report
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, EvaluateConfig, EvaluationConfig
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_directory import versions

# Kind of file -> path of a file of a report; None: not written.
ReportFiles = dict[str, str | None]

# ``(result of an evaluation, checkpoint, folder)`` -> files of the report.
ReportWriter = Callable[[Any, checkpoint.Checkpoint, Path], ReportFiles]


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """An evaluated checkpoint, and where the report of its evaluation is written.

    Attributes:
        config: Options of the run; for a robot with the evaluated environment.
        source: The checkpoint.
        run_dir: Directory of the run, whose metrics are drawn. Its folder ``videos`` receives the
            mp4 of a report in ``reports``.
        out: Folder of the report.
        options: Options of the evaluation.
    """

    config: Config
    source: checkpoint.Checkpoint
    run_dir: Path
    out: Path
    options: EvaluationConfig | EvaluateConfig


def write_report(
    target: ReportTarget,
    results: Sequence[EvaluationResult],
    unit: Literal["env_steps", "tokens"],
    **sections: Any,
) -> ReportFiles:
    """Write report.json and report.html of an evaluation; return their paths.

    Args:
        target: Checkpoint and folder.
        results: One result per task.
        unit: Unit in which experience is counted.
        sections: Further arguments of ``report.write``.
    """
    source = target.source
    return report.write(
        target.out,
        results,
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest[unit]),
        unit=unit,
        config=loader.relevant(target.config) | {"run_dir": None},
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=report.rows(target.run_dir),
        options=evaluation_options(target.options),
        **sections,
    ).files


def evaluation_options(options: EvaluationConfig | EvaluateConfig) -> dict[str, Any]:
    """Return the options with which the content of report.json can be computed again."""
    without_effect = ("checkpoint", "model", "out", "num_envs", "video", "robustness", "paired")
    content = loader.dump(options)
    if isinstance(options, EvaluationConfig):
        del content["env"]  # which environments were used, not their options as in EvaluateConfig
    return {name: value for name, value in content.items() if not name.startswith(without_effect)}


def success_metric(config: Config) -> str:
    """Return the tag of the evaluation metric that is the share of successes."""
    return "eval/accuracy" if config.mode == "reasoning" else "eval/success"


def score_metric(config: Config) -> str:
    """Return the tag of the evaluation metric that decides which checkpoint is the best."""
    return "eval/accuracy" if config.mode == "reasoning" else "eval/return"
