"""Robustness of a policy: its performance where one property differs from the training.

``plan`` lists the values of each property with the options of section env that set them,
``RobustnessSweep.measure`` evaluates the policy at each of them and returns the content of
robustness.json, ``charts`` draws it and ``rows`` prints it. Definitions, with the performance p
(success rate where the task reports success, otherwise mean return):

    p_n         performance in the evaluated environment itself, the nominal one
    p_0         0 for the success rate, the mean return of the untrained policy for returns
    below half  values with p < p_0 + (p_n - p_0) / 2
    retained    (p - p_0) / (p_n - p_0), limited to [0, 1]
    score       of a factor: mean of retained over its standard values; of a policy: mean over
                factors

The standard values do not depend on the training, so that scores of policies of one task are
comparable. Every value is measured with the same seeds. A policy whose success rate p_n is below
LEAST_SUCCESS has no score, because to retain failures is no robustness; nor has one whose return
p_n, or the lower end of its interval, is not above p_0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, TypeAlias

from embodied_envs import engines
from embodied_envs.base.errors import ConfigError, EnvError
from embodied_envs.base.random import env_seeds
from embodied_envs.types import VectorEnv
from embodied_ppo.core.tables import tables
from embodied_ppo.core.types import ProgressCallback
from embodied_ppo.evaluation.charts import Chart, line_chart, mean, number
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.options.schema import EnvConfig, EvaluateConfig
from embodied_ppo.rollout import environments
from embodied_ppo.training.progress import counter

FORMAT = 2  # version of robustness.json; it changes when a field changes its meaning

LEAST_SUCCESS = 0.5  # success rate in the nominal environment below which a policy has no score

DEFAULT_EPISODES = 20  # episodes at each value, where robustness_episodes is null

SLOW_TO_CREATE = ("torch", "mjlab", "libero", "warp", "maniskill", "simpler", "robocasa")
# Simulators that are not created to find out what they accept: they take long, or start once.
SLOW_TO_CREATE += ("robotwin", "calvin")

# ``environments.make_env`` with all arguments except the seeds.
Factory: TypeAlias = functools.partial[VectorEnv]

# Evaluates a policy in a changed environment, see ``RobustnessSweep.measure``.
EvaluateChanged: TypeAlias = Callable[[bool, Factory, int, Callable[[Any], None]], EvaluationResult]


# ------------------------------------------------------------------------------------------- values
# Properties that ranges of the domain randomisation set; options of realism set the others.
RANGES = ("mass", "friction", "motor_strength")
# Property of the environment -> unit and standard values: factors, or what 0 switches off.
PROPERTIES: dict[str, tuple[str, tuple[float, ...]]] = tables(__file__)["properties"]


@dataclass(frozen=True, slots=True)
class Factor:
    """Values of one property.

    Attributes:
        name: Name of the property.
        unit: Unit of the values.
        settings: Value, in increasing order -> options of section env that set it, as dotted paths
            below env; {}: the nominal environment has the value.
        scored: Values that count in the score.
        trained: Bounds of the value in the training.
    """

    name: str
    unit: str
    settings: Mapping[float, Mapping[str, Any]]
    scored: tuple[float, ...]
    trained: tuple[float, float]


def factor(
    name: str,
    env: EnvConfig,
    trained: EnvConfig,
    *,
    values: Sequence[float] | None = None,
    task_ranges: Mapping[str, Sequence[float]] = MappingProxyType({}),
    neutral: Mapping[str, Sequence[float]] = MappingProxyType({}),
    below: float = math.inf,
) -> Factor:
    """Return the values of the property ``name``: the standard ones and those of the training.

    Args:
        name: A name of PROPERTIES.
        env: The nominal environment.
        trained: The environment of the training.
        values: Values that replace them; all count in the score.
        task_ranges: Ranges of the task's own domain randomisation.
        neutral: Ranges with the same names that change nothing. They replace the task's where the
            nominal environment is not randomised.
        below: Values other than ``values`` are less than this (delays: an episode's time limit).
    """
    unit, standard = PROPERTIES[name]
    nominal, in_training = (_bounds(name, e, task_ranges) for e in (env, trained))
    scored = values or [v for v in standard if v < below]
    swept = {*scored, *(v for v in in_training if v < below and values is None)}
    if nominal[0] == nominal[1]:
        swept.add(nominal[0])
    settings: dict[float, Mapping[str, Any]] = {}
    for value in map(_plain, sorted(swept)):
        if nominal == (value, value):
            settings[value] = {}
        elif name in RANGES:
            settings[value] = with_ranges(env, neutral, {name: [value, value]})
        else:
            settings[value] = {f"realism.{name}": value}
    return Factor(name, unit, settings, tuple(map(_plain, scored)), in_training)


def with_ranges(
    env: EnvConfig, neutral: Mapping[str, Any], ranges: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of section env that add ``ranges`` to those of an environment.

    ``neutral`` are ranges that change nothing; they replace the task's where it is not randomised.
    """
    return {"randomize": True, "ranges": {**(env.ranges if env.randomize else neutral), **ranges}}


def _plain(x: float) -> float:
    """Return whole numbers as int: delays are, and messages are shorter."""
    return int(x) if float(x).is_integer() else x


def _bounds(
    name: str, env: EnvConfig, task_ranges: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Return the lowest and highest value that ``name`` takes in an environment."""
    value: Any = 1.0
    if name not in RANGES:
        value = getattr(env.realism, name) or 0.0
    elif env.randomize:
        value = {**task_ranges, **env.ranges}.get(name, 1.0)
    # One number, a range of numbers, or one of both for each observation.
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    numbers = [float(x) for v in values for x in (v if isinstance(v, list | tuple) else [v])]
    return min(numbers), max(numbers)


# ----------------------------------------------------------------------------------------- planning
def plan(
    options: EvaluateConfig, trained: EnvConfig, factory: Factory, nominal: VectorEnv
) -> RobustnessSweep:
    """Return what an evaluation with ``robustness=true`` measures beyond the nominal environment.

    Args:
        options: Options of the evaluation.
        trained: Environment of the training.
        factory: Creates the nominal environment.
        nominal: One such environment; it may be closed.

    Raises:
        ConfigError: A factor that is named cannot be changed, or there is none; more episodes per
            value than evaluated ones.
    """
    episodes = options.robustness_episodes
    if episodes is not None and episodes > options.episodes:
        raise ConfigError(
            f"robustness_episodes = {episodes}: at most episodes = {options.episodes}, whose first"
            " ones are those of the nominal environment; raise episodes"
        )
    env: EnvConfig = factory.keywords["config"]
    simulator = engines.simulator_of(env.ids[0], env.simulator, factory.keywords["device"])
    ranges = engines.task_ranges(env.title, env.kwargs)
    factors: list[Factor] = []
    left_out: dict[str, str] = {}
    for name in options.robustness_factors or PROPERTIES:
        try:
            f = factor(
                name,
                env,
                trained,
                values=options.robustness_values.get(name),
                task_ranges=ranges,
                neutral=engines.neutral_ranges(list(ranges)),
                below=nominal.max_episode_steps or math.inf,
            )
            changes = [changes for changes in f.settings.values() if changes]
            for change in changes:
                changed(factory, change)  # the types and bounds of options
            if changes and simulator not in SLOW_TO_CREATE:
                check_changed(changed(factory, changes[-1]), nominal)
            factors.append(f)
        except EnvError as error:
            if name in (*options.robustness_factors, *options.robustness_values):
                raise ConfigError(f"robustness_factors = {name}: {error}") from error
            left_out[name] = str(error)
    if not factors:
        raise ConfigError(f"robustness = true: env.id={env.id} allows no change; remove it")
    default = min(DEFAULT_EPISODES, options.episodes)
    return RobustnessSweep(tuple(factors), left_out, episodes or default, factory)


def changed(factory: Factory, changes: Mapping[str, Any]) -> Factory:
    """Return the factory of an environment with changed options.

    Args:
        factory: Factory of the nominal environment.
        changes: Options of section env, dotted paths below env.

    Raises:
        ConfigError: A value is out of bounds.
    """
    if not changes:
        return factory
    config = environments.changed_env(factory.keywords["config"], changes, "robustness_values")
    return functools.partial(factory, config=config)


def check_changed(factory: Factory, nominal: VectorEnv) -> None:
    """Create one changed environment and close it.

    Raises:
        EnvError: The simulator refuses the changes, or has other observations or actions.
    """
    with closing(factory(env_seeds(0, 0, 1))) as env:
        if (env.obs_spec, env.action_spec) != (nominal.obs_spec, nominal.action_spec):
            raise EnvError("its observations or actions differ from those of the evaluated one")


# -------------------------------------------------------------------------------------- measurement
@dataclass(frozen=True)
class RobustnessSweep:
    """What will be measured.

    Attributes:
        factors: Properties and their values.
        left_out: Name of a factor -> why it is not measured.
        episodes: Episodes at each value.
        factory: Creates the nominal environment.
    """

    factors: tuple[Factor, ...]
    left_out: Mapping[str, str]
    episodes: int
    factory: Factory

    @property
    def count(self) -> int:
        """Number of settings that differ from the nominal environment."""
        return sum(bool(changes) for f in self.factors for changes in f.settings.values())

    @property
    def lines(self) -> list[str]:
        """Return lines that state the size of the sweep and what is left out."""
        return [
            f"robustness: {self.count} settings of {', '.join(f.name for f in self.factors)} x"
            f" {self.episodes} episodes = {self.count * self.episodes} episodes, after those of the"
            " evaluation",
            *(f"robustness: {name} is left out: {why}" for name, why in self.left_out.items()),
        ]

    def measure(
        self, result: EvaluationResult, evaluate: EvaluateChanged, advance: ProgressCallback
    ) -> dict[str, Any]:
        """Return the content of robustness.json.

        Args:
            result: Evaluation of the policy in the nominal environment.
            evaluate: Evaluates the policy, or what it was before the training if the first
                argument is False. The others are the factory of the environments, the number of
                episodes and a function that is called with each of them.
            advance: Progress callback.
        """
        nominal = replace(result, episodes=result.episodes[: self.episodes])
        # A task that reports no success has the return of the untrained policy as its floor.
        needs_floor = nominal.successes is None
        on_episode = counter(advance, "robustness", (self.count + needs_floor) * self.episodes)

        def run(changes: Mapping[str, Any], trained: bool = True) -> EvaluationResult:
            return evaluate(trained, changed(self.factory, changes), self.episodes, on_episode)

        untrained = run({}, trained=False) if needs_floor else None
        return card(self.factors, nominal, run, untrained=untrained, left_out=self.left_out)


# -------------------------------------------------------------------------------------------- card
def card(
    factors: Sequence[Factor],
    nominal: EvaluationResult,
    evaluate: Callable[[Mapping[str, Any]], EvaluationResult],
    *,
    untrained: EvaluationResult | None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Evaluate the policy at each value; return the content of robustness.json.

    The definitions are in the module's docstring.

    Args:
        factors: Factors to measure.
        nominal: Episodes in the nominal environment.
        evaluate: Returns episodes with the same seeds in a changed environment. An EnvError becomes
            the reason why the value is not measured.
        untrained: Episodes of the untrained policy in the nominal environment; None: p_0 is 0.
        left_out: Name of a factor -> why it is not measured.
    """
    metric = "return" if nominal.successes is None else "success"
    p_n = _performance(nominal, metric)
    p_0 = None if untrained is None else _performance(untrained, metric)
    floor, top = 0.0 if p_0 is None else p_0["mean"], p_n["mean"]
    no_score = None
    if p_0 is None and top < LEAST_SUCCESS:
        no_score = f"its success rate is {top:.1%}, below {LEAST_SUCCESS:.0%}"
    elif p_0 is not None and (top <= floor or (p_n["ci95"] and p_n["ci95"][0] < floor)):
        no_score = f"its return {number(top)} is not above {number(floor)} of the untrained policy"

    def point(value: float, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the performance at a value."""
        p, retained, error = {"mean": None, "ci95": None}, None, None
        try:
            p = _performance(evaluate(changes), metric) if changes else p_n
        except EnvError as e:
            error = str(e)
        if p["mean"] is not None and no_score is None:
            retained = min(1.0, max(0.0, (p["mean"] - floor) / (top - floor)))
        options = {f"env.{path}": x for path, x in changes.items()}
        return {"value": value, "options": options, **p, "retained": retained, "error": error}

    rows = []
    for f in factors:
        points = [point(value, changes) for value, changes in f.settings.items()]
        scored = [p for p in points if p["value"] in f.scored]
        half = [p["value"] for p in points if p["retained"] is not None and p["retained"] < 0.5]
        row = {"name": f.name, "unit": f.unit, "trained": f.trained}
        row |= {"standard_values": list(f.scored), "points": points, "below_half": half}
        row |= {"score": mean(p["retained"] for p in scored)}
        rows.append(row | {"mean": mean(p["mean"] for p in scored)})
    return {
        "format": FORMAT,
        "metric": metric,
        "episodes": len(nominal.episodes),
        "seed": nominal.seed,
        "deterministic": nominal.deterministic,
        "nominal": p_n,
        "untrained": p_0,
        "threshold": None if no_score else floor + (top - floor) / 2,
        "no_score": no_score,
        "score": mean(row["score"] for row in rows),
        "factors": rows,
        "left_out": dict(left_out),
    }


def _performance(result: EvaluationResult, metric: str) -> dict[str, Any]:
    """Return mean and 95 % interval (null for one return)."""
    if metric == "success" and result.successes is None:  # some infos have it in successes only
        result = replace(result, episodes=(*(replace(e, success=False) for e in result.episodes),))
    values = result.returns if metric == "return" else map(float, result.successes or ())
    return {"mean": fmean(values), "ci95": result.intervals().get(f"eval/{metric}")}


# ------------------------------------------------------------------------------------------ display
def charts(content: Mapping[str, Any]) -> list[Chart]:
    """Return one chart per factor: performance with its interval."""
    metric, result = content["metric"], []
    for f in content["factors"]:
        points = [p for p in f["points"] if p["mean"] is not None]
        if points:
            line = [(p["value"], p["mean"]) for p in points]
            band = [(p["value"], *p["ci95"]) for p in points if p["ci95"]]
            result.append(line_chart(f["name"], f["unit"], {metric: line}, {metric: band}))
    return result


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return a table with a header row and one row for each factor.

    The last column has value:mean of each point; ! marks a value that could not be simulated.
    """

    def form(x: float | None, missing: str = "-") -> str:
        if x is None:
            return missing
        return f"{100 * x:.0f}%" if content["metric"] == "success" else number(x)

    table = [["factor", "trained", "below half", "score", f"mean {content['metric']}", "by value"]]
    for f in content["factors"]:
        score = "-" if f["score"] is None else f"{f['score']:.2f}"
        trained = " to ".join(dict.fromkeys(f"{x:.3g}" for x in f["trained"]))
        below = ", ".join(f"{x:.3g}" for x in f["below_half"]) or "-"
        points = " ".join(f"{p['value']:.3g}:{form(p['mean'], '!')}" for p in f["points"])
        table.append([f["name"], trained, below, score, form(f["mean"]), points])
    return table
