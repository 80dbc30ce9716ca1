"""Robustness of a policy: its performance where one property differs from the training.

``factor`` and ``engine_factor`` list the values of one property with the options of section env
that set them, ``measure`` evaluates the policy at each of them, ``card`` computes the content of
robustness.json, ``charts`` draws it and ``rows`` prints it. Definitions, with the performance p
(success rate where the task reports success, otherwise mean return):

    p_n       performance in the evaluated environment itself, the nominal one
    p_0       0 for the success rate, the mean return of the untrained policy for returns
    collapse  going away from the nominal value, the first value with p < p_0 + (p_n - p_0) / 2; not
              determined if the 95 % interval there contains p_n
    retained  (p - p_0) / (p_n - p_0), limited to [0, 1]
    score     of a factor: mean of retained over its standard values; of a policy: mean over factors

The standard values do not depend on the training, so that scores of policies of one task are
comparable. Every value is measured with the same seeds. A policy has no score and no collapse where
its return is not above that of the untrained policy: p_0 is within the 95 % interval of p_n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from embodied_ppo.config.schema import EnvConfig
from embodied_ppo.core.types import EnvError
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.evaluation.report import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Chart,
    Line,
    RobustnessSection,
    Span,
    VerticalLine,
    number,
    short,
    ticks,
)

FORMAT = 1
"""Version of robustness.json; it changes when a field changes its meaning."""

ENGINE = "engine"
"""Name of the factor whose values are simulators."""

DEFAULT_EPISODES = 20
"""Episodes at each value, where robustness_episodes is null."""

Value: TypeAlias = float | str
"""A value of a factor: a number, or the name of a simulator."""


# ------------------------------------------------------------------------------------------- values
@dataclass(frozen=True, slots=True)
class Property:
    """A property of the environment that can be changed.

    Attributes:
        kind: "range" is a factor of domain randomisation, "steps" a delay of env.realism,
            "amount" another option of env.realism, for which 0 means none.
        unit: Unit of its values.
        values: Standard values.
    """

    kind: Literal["range", "steps", "amount"]
    unit: str
    values: tuple[float, ...]


PROPERTIES: dict[str, Property] = {
    "mass": Property("range", "factor", (0.5, 0.7, 0.85, 1, 1.2, 1.5, 2)),
    "friction": Property("range", "factor", (0.25, 0.5, 0.75, 1, 1.5, 2)),
    "motor_strength": Property("range", "factor", (0.5, 0.6, 0.7, 0.85, 1, 1.2)),
    "action_delay": Property("steps", "control steps", (0, 1, 2, 3, 4, 6)),
    "obs_delay": Property("steps", "control steps", (0, 1, 2, 3, 4, 6)),
    "obs_noise": Property("amount", "unit of the observation", (0, 0.01, 0.03, 0.1, 0.3)),
    "obs_dropout": Property("amount", "probability", (0, 0.1, 0.2, 0.4, 0.6)),
    "push_velocity": Property("amount", "m/s", (0, 0.25, 0.5, 1, 1.5, 2)),
}
"""Name of the factor -> what it changes; the option of section env.ranges or env.realism has the
same name."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a factor.

    Attributes:
        value: The value.
        changes: Options of section env that set it, as dotted paths below env; empty: the nominal
            environment has the value.
    """

    value: Value
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Factor:
    """Values of one property, in increasing order.

    Attributes:
        name: Name of the property, or ``ENGINE``.
        unit: Unit of the values.
        settings: The values and how they are set.
        scored: Values that count in the score.
        nominal: Bounds of the value in the nominal environment (equal: it is fixed); None for
            engines.
        trained: The same, in the training.
    """

    name: str
    unit: str
    settings: tuple[Setting, ...]
    scored: tuple[Value, ...]
    nominal: tuple[float, float] | None = None
    trained: tuple[float, float] | None = None


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
    """Return the values of the property ``name`` around those of the training.

    The default values are the standard ones; where the training had others, also its own and some
    beyond them.

    Args:
        name: A name of PROPERTIES.
        env: The nominal environment.
        trained: The environment of the training.
        values: Values that replace the default ones; all count in the score.
        task_ranges: Ranges of the task's own domain randomisation.
        neutral: Ranges with the same names that change nothing. They replace the task's where the
            nominal environment is not randomised.
        below: Default values are less than this (delays: the time limit of an episode).
    """
    p = PROPERTIES[name]
    nominal, in_training = (_bounds(name, e, task_ranges) for e in (env, trained))
    scored = sorted({float(v) for v in (p.values if values is None else values)})
    swept = set(scored)
    if values is None:
        swept |= {round(v, 6) for v in _around(p.kind, *in_training)}
        scored = [v for v in scored if v < below]
    if nominal[0] == nominal[1]:
        swept.add(nominal[0])
    settings = []
    for value in sorted(v for v in swept if values is not None or v < below):
        plain = _plain(value)
        if nominal == (value, value):
            changes = {}
        elif p.kind == "range":
            others = dict(env.ranges) if env.randomize else dict(neutral)
            changes = {"randomize": True, "ranges": {**others, name: [plain, plain]}}
        else:
            changes = {f"realism.{name}": plain}
        settings.append(Setting(plain, changes))
    return Factor(name, p.unit, tuple(settings), tuple(map(_plain, scored)), nominal, in_training)


def engine_factor(nominal: str, others: Mapping[str, Mapping[str, Any]]) -> Factor:
    """Return the factor whose values are simulators.

    Args:
        nominal: The evaluated simulator.
        others: Name -> options of section env, of other simulators that run the same task.
    """
    settings = (Setting(nominal, {}), *(Setting(name, c) for name, c in others.items()))
    return Factor(ENGINE, "simulator", settings, tuple(s.value for s in settings))


def _plain(x: float) -> float:
    """Return whole numbers as int: delays are, and messages are shorter."""
    return int(x) if float(x).is_integer() else x


def _bounds(
    name: str, env: EnvConfig, task_ranges: Mapping[str, Sequence[float]]
) -> tuple[float, float]:
    """Return the lowest and highest value that ``name`` takes in an environment."""
    if PROPERTIES[name].kind == "range":
        ranges = {**task_ranges, **env.ranges} if env.randomize else {}
        value: Any = ranges.get(name, 1.0)
    else:
        value = getattr(env.realism, name) or 0.0
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    numbers = [float(x) for v in values for x in (v if isinstance(v, list | tuple) else [v])]
    return min(numbers), max(numbers)


def _around(kind: str, low: float, high: float) -> Iterable[float]:
    """Return the bounds of the training and values beyond them; none for a simulator's default."""
    if kind == "range":
        if (low, high) == (1.0, 1.0):
            return ()
        below = 1 - 2 * (1 - low)
        return (below if below > 0 else low / 2, low, high, 1 + 2 * (high - 1))
    if high == 0:
        return ()
    if kind == "steps":
        return (low, high, math.ceil(1.5 * high), 2 * high)
    return (x for x in (low, high / 2, high, 2 * high, 4 * high))


# -------------------------------------------------------------------------------------- measurement
Measured: TypeAlias = EvaluationResult | str
"""Episodes at one value, or the reason why it could not be simulated."""


def measure(
    factors: Iterable[Factor],
    nominal: EvaluationResult,
    evaluate: Callable[[Mapping[str, Any]], EvaluationResult],
) -> dict[str, list[Measured]]:
    """Evaluate the policy at each value; return factor -> episodes in the order of its settings.

    Args:
        factors: Factors to measure.
        nominal: Episodes in the nominal environment.
        evaluate: Returns episodes with the same seeds in a changed environment. An EnvError becomes
            the reason why the value is not measured.
    """

    def result(setting: Setting) -> Measured:
        if not setting.changes:
            return nominal
        try:
            return evaluate(setting.changes)
        except EnvError as error:
            return str(error)

    return {f.name: [result(s) for s in f.settings] for f in factors}


def settings_to_measure(factors: Iterable[Factor]) -> int:
    """Return the number of settings that differ from the nominal environment."""
    return sum(bool(s.changes) for f in factors for s in f.settings)


# -------------------------------------------------------------------------------------------- card
def card(
    factors: Sequence[Factor],
    measured: Mapping[str, Sequence[Measured]],
    *,
    nominal: EvaluationResult,
    untrained: EvaluationResult | None,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the content of robustness.json; the definitions are in the module's docstring.

    Args:
        factors: Factors that were measured.
        measured: Result of ``measure``.
        nominal: Episodes in the nominal environment.
        untrained: Episodes of the untrained policy there; None: p_0 is 0.
        left_out: Name of a factor or simulator -> why it was not measured.
    """
    metric = "return" if nominal.successes is None else "success"
    p_n = _performance(nominal, metric)
    p_0 = None if untrained is None else _performance(untrained, metric)
    floor = 0.0 if p_0 is None else p_0["mean"]
    lowest = p_n["mean"] if p_0 is None or p_n["ci95"] is None else p_n["ci95"][0]
    better = p_n["mean"] > floor and lowest >= floor
    threshold = floor + (p_n["mean"] - floor) / 2 if better else None
    rows = []
    for f in factors:
        points = []
        for setting, result in zip(f.settings, measured[f.name], strict=True):
            failed = isinstance(result, str)
            p = {"mean": None, "ci95": None} if failed else _performance(result, metric)
            points.append(
                {
                    "value": setting.value,
                    "options": {f"env.{path}": value for path, value in setting.changes.items()},
                    **p,
                    "retained": _retained(p["mean"], floor, p_n["mean"]) if better else None,
                    "error": result if failed else None,
                }
            )
        scored = [p for p in points if p["value"] in f.scored and p["error"] is None]
        rows.append(
            {
                "name": f.name,
                "unit": f.unit,
                "trained": f.trained,
                "nominal": f.nominal,
                "standard_values": list(f.scored),
                "points": points,
                "collapse": _collapse(f, points, p_n["mean"], threshold),
                "score": _mean(p["retained"] for p in scored),
                "mean": _mean(p["mean"] for p in scored),
            }
        )
    return {
        "format": FORMAT,
        "metric": metric,
        "episodes": len(nominal.episodes),
        "seed": nominal.seed,
        "deterministic": nominal.deterministic,
        "nominal": p_n,
        "untrained": p_0,
        "threshold": threshold,
        # Which simulators there are depends on the machine.
        "score": _mean(row["score"] for row in rows if row["name"] != ENGINE),
        "factors": rows,
        "left_out": dict(left_out),
    }


def _performance(result: EvaluationResult, metric: str) -> dict[str, Any]:
    """Return mean and 95 % interval (null for one return)."""
    tag = f"eval/{metric}"
    mean = fmean(result.returns if metric == "return" else map(float, result.successes or ()))
    return {"mean": mean, "ci95": result.intervals().get(tag)}


def _retained(p: float | None, floor: float, nominal: float) -> float | None:
    """Return (p - p_0) / (p_n - p_0) within [0, 1]; None where it is not defined."""
    if p is None or nominal <= floor:
        return None
    return min(1.0, max(0.0, (p - floor) / (nominal - floor)))


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers among ``values``; None without any."""
    numbers = [v for v in values if v is not None]
    return fmean(numbers) if numbers else None


def _collapse(
    f: Factor, points: Sequence[Mapping[str, Any]], p_n: float, threshold: float | None
) -> dict[str, Any]:
    """Return where the performance falls below the threshold.

    {"below": .., "above": ..} has for each direction, or null, "fails", the first value that is
    below the threshold; "holds", the measured value before it (null: there is none); "value", where
    the line between the two crosses the threshold (null: not determined, because the 95 % interval
    of "fails" contains p_n, or there is none). Of engines: {"fails": [names]}, without those whose
    interval contains p_n.
    """
    usable = [p for p in points if p["mean"] is not None]
    if f.nominal is None:
        below_half = (p for p in usable if threshold is not None and p["mean"] < threshold)
        return {"fails": [p["value"] for p in below_half if _excludes(p["ci95"], p_n)]}
    centre, is_fixed = sum(f.nominal) / 2, f.nominal[0] == f.nominal[1]

    def first(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        before = (centre, p_n) if is_fixed else None
        for p in candidates:
            value, mean = p["value"], p["mean"]
            if threshold is not None and mean < threshold:
                if not _excludes(p["ci95"], p_n):
                    holds = None if before is None else before[0]
                    return {"value": None, "holds": holds, "fails": value}
                if before is None:
                    return {"value": value, "holds": None, "fails": value}
                share = (before[1] - threshold) / (before[1] - mean)
                crossing = before[0] + share * (value - before[0])
                return {"value": round(crossing, 6), "holds": before[0], "fails": value}
            before = value, mean
        return None

    below = sorted((p for p in usable if p["value"] < centre), key=lambda p: -p["value"])
    above = [p for p in usable if p["value"] > centre]
    return {"below": first(below), "above": first(above)}


def _excludes(interval: Sequence[float] | None, x: float) -> bool:
    """Return whether there is an interval [low, high] that does not contain x."""
    return interval is not None and not interval[0] <= x <= interval[1]


# ------------------------------------------------------------------------------------------ display
def section(content: Mapping[str, Any]) -> RobustnessSection:
    """Return the section of the report page about robustness.json."""
    return RobustnessSection(content, charts(content), rows(content))


def charts(content: Mapping[str, Any]) -> list[Chart]:
    """Return one chart per factor: performance over its values, which have equal distances.

    All charts have the same vertical axis.
    """
    is_rate = content["metric"] == "success"
    points = [p for f in content["factors"] for p in f["points"] if p["mean"] is not None]
    reference = [content["nominal"]["mean"], content["threshold"] or content["nominal"]["mean"]]
    shown = [x for p in points for x in (p["mean"], *(p["ci95"] or ()))]
    y_ticks = [0, 0.25, 0.5, 0.75, 1] if is_rate else ticks(*_range([*shown, *reference]))
    scale = (BOTTOM - TOP) / (y_ticks[-1] - y_ticks[0])

    def y_of(y: float) -> float:
        return round(BOTTOM - (y - y_ticks[0]) * scale, 1)

    labels = [(y_of(y), f"{100 * y:g}%" if is_rate else short(y)) for y in y_ticks]
    half = None if content["threshold"] is None else y_of(content["threshold"])
    return [_chart(f, labels, y_of, half) for f in content["factors"]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _chart(
    f: Mapping[str, Any],
    y_ticks: list[tuple[float, str]],
    y_of: Callable[[float], float],
    half: float | None,
) -> Chart:
    """Return the chart of one factor."""
    values = [p["value"] for p in f["points"]]
    step = (RIGHT - LEFT - 36) / max(1, len(values) - 1)
    places = [round(LEFT + 18 + i * step, 1) for i in range(len(values))]
    usable = [(x, p) for x, p in zip(places, f["points"], strict=True) if p["mean"] is not None]
    dots = [(x, y_of(p["mean"])) for x, p in usable]
    whiskers = [(x, y_of(p["ci95"][1]), y_of(p["ci95"][0])) for x, p in usable if p["ci95"]]
    names = [_label(v) for v in values]
    line, band, spans, verticals = "", "", [], []
    if f["nominal"] is not None:
        line = "M" + " L".join(f"{x:g} {y:g}" for x, y in dots) if dots else ""
        corners = [(x, high) for x, high, _ in whiskers]
        corners += [(x, low) for x, _, low in reversed(whiskers)]
        band = "M" + " L".join(f"{x:g} {y:g}" for x, y in corners) + " Z" if whiskers else ""
        whiskers = []
        low, high = (_place(x, values, places) for x in f["trained"])
        label = f"trained with {_interval(f['trained'])}"
        spans = [Span(low - 3, high + 3, label)]
        for end in ("below", "above"):
            collapse = f["collapse"][end]
            if collapse is not None and collapse["value"] is not None:
                x = _place(collapse["value"], values, places)
                sign = "<" if end == "below" else ">"
                verticals.append(VerticalLine(x, f"{sign} {_label(collapse['value'])}"))
    return Chart(
        f["name"],
        f["unit"],
        list(zip(places, names, strict=True)),
        y_ticks,
        [Line(f["name"], line, dots)],
        [],
        band=band,
        whiskers=whiskers,
        spans=spans,
        verticals=verticals,
        half=half,
    )


def _place(x: float, values: Sequence[float], places: Sequence[float]) -> float:
    """Return the position of x between the values that enclose it; values outside at the ends."""
    if x <= values[0]:
        return places[0]
    for i in range(1, len(values)):
        if x <= values[i]:
            share = (x - values[i - 1]) / (values[i] - values[i - 1])
            return round(places[i - 1] + share * (places[i] - places[i - 1]), 1)
    return places[-1]


def _label(x: Value) -> str:
    """Format a value: 0.7 · 2 · 1.23 · warp."""
    return x if isinstance(x, str) else f"{x:.3g}"


def _interval(bounds: Sequence[float] | None) -> str:
    """Format bounds: 2 · 0 to 3 · -."""
    if bounds is None:
        return "-"
    low, high = map(_label, bounds)
    return low if low == high else f"{low} to {high}"


def collapse_text(f: Mapping[str, Any]) -> str:
    """Return where a factor's performance collapses: < 0.6, > 2.4 · warp · -.

    "> not determined": the 95 % interval at that value contains the nominal performance.
    """
    if f["nominal"] is None:
        return ", ".join(f["collapse"]["fails"]) or "-"
    ends = (("<", f["collapse"]["below"]), (">", f["collapse"]["above"]))
    texts = (
        f"{sign} {'not determined' if c['value'] is None else _label(c['value'])}"
        for sign, c in ends
        if c
    )
    return ", ".join(texts) or "-"


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Return a table with a header row, one row for each factor, and the policy's score."""
    form: Callable[[float], str] = (
        (lambda x: f"{100 * x:.0f}%") if content["metric"] == "success" else number
    )

    def curve(f: Mapping[str, Any]) -> str:
        """Format value:mean of each point; ! marks a value that could not be simulated."""
        return " ".join(
            f"{_label(p['value'])}:{'!' if p['mean'] is None else form(p['mean'])}"
            for p in f["points"]
        )

    table = [["factor", "trained", "below half", "score", f"mean {content['metric']}", "by value"]]
    for f in content["factors"]:
        score = "-" if f["score"] is None else f"{f['score']:.2f}"
        mean = "-" if f["mean"] is None else form(f["mean"])
        trained = _interval(f["trained"])
        table.append([f["name"], trained, collapse_text(f), score, mean, curve(f)])
    return table
