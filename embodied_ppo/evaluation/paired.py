"""Evaluation in pairs: the same episodes with and without each of several perturbations.

``plan`` returns the perturbed environments, ``compare`` the content of paired.json. Episode i has
the same seed, and so the same initial state, in both members of a pair; only the perturbation
differs. Therefore the interval is that of the mean of the differences of episodes
(``comparison.difference``), which is narrower than that of two independent means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied_envs import engines
from embodied_envs.base.errors import ConfigError, EnvError
from embodied_envs.types import VectorEnv
from embodied_ppo.core.tables import tables
from embodied_ppo.core.types import ProgressCallback
from embodied_ppo.evaluation import comparison, robustness
from embodied_ppo.evaluation.charts import number, percent
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.options.schema import EnvConfig, EvaluateConfig
from embodied_ppo.training.progress import counter

FORMAT = 1  # version of paired.json

# Name -> option of section env and its entries, in m, rad and factors as in ``tabletop_bench``.
PERTURBATIONS: dict[str, tuple[str, dict[str, Any]]] = tables(__file__)["perturbations"]

SEEN = ("camera", "light", "distractor")  # perturbations that only a policy with cameras observes


def plan(
    options: EvaluateConfig, factory: robustness.Factory, nominal: VectorEnv
) -> dict[str, robustness.Factory]:
    """Return the factory of each perturbed environment of ``options.paired``.

    Args:
        options: Options of the evaluation.
        factory: Creates the environment without perturbation.
        nominal: One such environment; it may be closed.

    Raises:
        ConfigError: The environment or the policy cannot have a perturbation.
    """
    names = options.paired
    if not names:
        return {}
    if options.episodes < 2 or len({*names}) < len(names):
        raise ConfigError(
            f"write each name once and episodes=2 or more: paired = [{', '.join(names)}],"
            f" episodes = {options.episodes}"
        )
    env: EnvConfig = factory.keywords["config"]
    perturbed: dict[str, robustness.Factory] = {}
    for name in names:
        try:
            if name in SEEN and not env.cameras:
                raise EnvError("the policy reads no camera")
            if name == "wording" and not nominal.instructions:
                raise EnvError("the policy reads no sentence")
            perturbed[name] = robustness.changed(factory, _changes(name, env))
            robustness.check_changed(perturbed[name], nominal)
        except EnvError as error:
            raise ConfigError(f"remove {name} from paired: {error}") from error
    return perturbed


def _changes(name: str, env: EnvConfig) -> dict[str, Any]:
    """Return the options of section env of a perturbation."""
    option, entries = PERTURBATIONS[name]
    if option == "kwargs":
        return {"kwargs": {**env.kwargs, **entries}}
    neutral = engines.neutral_ranges(list(engines.task_ranges(env.title, env.kwargs)))
    return robustness.with_ranges(env, neutral, entries)


def measure(
    perturbed: Mapping[str, robustness.Factory],
    nominal: EvaluationResult,
    evaluate: robustness.EvaluateChanged,
    advance: ProgressCallback,
) -> dict[str, Any] | None:
    """Return the content of paired.json; None without perturbations.

    Args:
        perturbed: Result of ``plan``.
        nominal: Episodes without perturbation.
        evaluate: See ``RobustnessSweep.measure``.
        advance: Progress callback.
    """
    if not perturbed:
        return None
    episodes = len(nominal.episodes)
    on_episode = counter(advance, "paired", len(perturbed) * episodes)
    results = {
        name: evaluate(True, factory, episodes, on_episode) for name, factory in perturbed.items()
    }
    return compare(nominal, results)


def compare(nominal: EvaluationResult, perturbed: Mapping[str, EvaluationResult]) -> dict[str, Any]:
    """Return the content of paired.json.

    Args:
        nominal: Episodes without perturbation.
        perturbed: Perturbation -> the same episodes with it.
    """
    binary = nominal.successes is not None

    def scores(result: EvaluationResult) -> comparison.Scores:
        """Return success or return of each episode, [1, E]; some infos have successes only."""
        successes = [bool(e.success) for e in result.episodes]
        return np.array([successes if binary else result.returns], dtype=np.float64)

    rows = []
    for name, result in perturbed.items():
        d = comparison.difference(scores(nominal), scores(result), binary=binary)
        row = {"name": name, "mean": float(scores(result).mean()), "difference": d.mean}
        rows.append(row | {"ci95": [d.low, d.high], "decided": d.is_decided})
    return {
        "format": FORMAT,
        "metric": "success" if binary else "return",
        "episodes": len(nominal.episodes),
        "seed": nominal.seed,
        "nominal": float(scores(nominal).mean()),
        "rows": rows,
    }


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return a table with a header row and one row for each perturbation."""
    show = percent if content["metric"] == "success" else number
    table = [["perturbation", "without", "with", "difference", "95 % interval"]]
    for r in content["rows"]:
        values = (content["nominal"], r["mean"], r["difference"])
        table.append([r["name"], *map(show, values), " to ".join(map(show, r["ci95"]))])
    return table


def undecided(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each perturbation whose interval contains 0."""
    return [
        f"{r['name']}: {content['episodes']} episodes show no difference, the interval contains 0"
        for r in content["rows"]
        if not r["decided"]
    ]
