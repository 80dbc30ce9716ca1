"""Templates of pages, their charts in SVG units, means, and the format of numbers on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

import jinja2


@functools.cache
def page_templates(package: str) -> jinja2.Environment:
    """Return the templates of HTML pages in a package's folder "templates"."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "short": short}
    return environment


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


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers among ``values``; None without any."""
    numbers = [x for x in values if x is not None]
    return fmean(numbers) if numbers else None


def percent(x: float) -> str:
    """Format a fraction as a percentage with one decimal."""
    return f"{100 * x:.1f}%"


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


LEFT, RIGHT, TOP, BOTTOM = 48, 350, 10, 180  # size of a chart and its axes, in SVG units


@dataclass(frozen=True, slots=True)
class Line:
    """Curve of a chart."""

    label: str
    # SVG path data.
    path: str
    # Points, if there are few.
    dots: list[tuple[float, float]]
    # SVG path data of the area between the ends of its intervals.
    band: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart in SVG units for the template."""

    title: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
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
    first = min(0.0, *xs)
    x_ticks = [x for x in ticks(first, max(xs)) if first <= x and (x <= max(xs) or max(xs) <= 0)]
    y_ticks = ticks(min(ys), max(ys))
    x_of = scale(first, max(max(xs), x_ticks[-1], 1e-9), LEFT, RIGHT)
    y_of = scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)
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
    )
