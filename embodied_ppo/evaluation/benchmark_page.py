"""Compute the table and the page of tabletop-bench from result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from embodied_envs.base.intervals import wilson_interval
from embodied_ppo.evaluation import report
from embodied_ppo.evaluation.charts import line_chart

Results = Sequence[Mapping[str, Any]]
HEADERS = {
    "unseen_wording": "wording",
    "unseen_combination": "pairs",
    "unseen_colour": "colour",
}
"""Condition -> its short name in the table."""


def by_method(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """Group results by method, in order of the first result."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for content in results:
        groups.setdefault(content["method"], []).append(content)
    return groups


def summarize(results: Results, protocol: Any) -> dict[str, Any]:
    """Return the table of the conditions.

    Args:
        results: Contents of result files that ``check_result`` accepted.
        protocol: The module ``embodied_envs.tabletop_bench``.

    Returns:
        "table": rows of text; the first row is the header.
        "scores": method -> score, mean over seeds.
    """
    columns = [*protocol.CONDITIONS]
    table = [["method", "seeds", "score", *(HEADERS.get(c, c) for c in columns), "CPU s"]]
    scores: dict[str, float] = {}
    for method, contents in by_method(results).items():
        rates = [protocol.rates(content) for content in contents]
        cells = [_cell([r[name] for r in rates], None) for name in ("score", *columns)]
        seconds = [c["cpu_s"] for c in contents if c["cpu_s"] is not None]
        cpu_s = f"{fmean(seconds):.0f}" if seconds else "-"
        table.append([method, str(len(contents)), *cells, cpu_s])
        scores[method] = fmean(r["score"] for r in rates)
    return {"table": table, "scores": scores}


def _cell(rates: Sequence[float], interval: tuple[float, float] | None) -> str:
    """Return a rate as text: .812, with its interval or, for several seeds, with its range."""
    text = _rate(fmean(rates))
    if len(rates) > 1:
        return f"{text} ({_rate(min(rates))} to {_rate(max(rates))})"
    return text if interval is None else f"{text} ({_rate(interval[0])} to {_rate(interval[1])})"


def _rate(x: float) -> str:
    """Return a rate as text without the leading zero, such as .812."""
    return f"{x:.3f}".removeprefix("0")


# -------------------------------------------------------------------------------------------- page
def render(results: Results, summary: Mapping[str, Any], protocol: Any, trial: bool) -> str:
    """Return the HTML page, which has no script and loads no other file.

    Args:
        results: As in ``summarize``.
        summary: Result of ``summarize``.
        protocol: The module ``embodied_envs.tabletop_bench``.
        trial: Whether the results are those of a trial.
    """
    groups = by_method(results)
    columns = [*protocol.MEASUREMENTS]
    rows = []
    for method, contents in groups.items():
        cells = []
        for name in columns:
            counts = [c["measurements"][name] for c in contents]
            interval = wilson_interval(counts[0]["successes"], counts[0]["episodes"])
            cells.append(_cell([m["successes"] / m["episodes"] for m in counts], interval))
        rows.append((method, cells))
    curves = {
        method: [(float(x), float(y)) for x, y in contents[0]["curve"]]
        for method, contents in groups.items()
        if len(contents[0]["curve"]) > 1
    }
    title = f"Success on all families in training, seed {results[0]['seed']}"
    charts = [line_chart(title, "environment steps", curves)] if curves else []
    return report.template("benchmark.html.j2").render(
        protocol=protocol,
        trial=trial,
        summary=summary,
        columns=[HEADERS.get(name, name.removeprefix("train/")) for name in columns],
        rows=rows,
        charts=charts,
        conditions=protocol.CONDITIONS,
        results=results,
    )
