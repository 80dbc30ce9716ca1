"""Compute the table, the ranks and the page of tabletop-bench from result files."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from embodied_ppo.core.intervals import wilson_interval
from embodied_ppo.evaluation import report

Results = Sequence[Mapping[str, Any]]
HEADERS = {
    "unseen_wording": "wording",
    "unseen_combination": "pairs",
    "unseen_colour": "colour",
}
"""Condition -> its short name in the table."""


@dataclass(frozen=True)
class FamilyVideo:
    """Video of one family.

    Attributes:
        method: Name of the method whose policy acts.
        path: The mp4 file.
        sentences: Instruction of each episode.
    """

    method: str
    path: Path
    sentences: Sequence[str]


def by_method(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """Group results by method, in order of the first result."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for content in results:
        groups.setdefault(content["method"], []).append(content)
    return groups


def summarize(results: Results, protocol: Any) -> dict[str, Any]:
    """Return the table of the conditions and the agreement of the ranks.

    Args:
        results: Contents of result files that ``check_result`` accepted.
        protocol: The module ``embodied_envs.tabletop_bench``.

    Returns:
        "table": rows of text; the first row is the header.
        "scores": method -> score, mean over seeds.
        "ranks": seed -> method -> rank, for the seeds that all methods have.
        "rank_correlation": mean of Spearman's correlation over pairs of seeds; None for one seed or
            fewer than three methods.
    """
    groups, columns = by_method(results), [*protocol.CONDITIONS]
    header = ["method", "seeds", "score", *(HEADERS.get(c, c) for c in columns), "CPU s"]
    table = [header]
    for method, contents in groups.items():
        rates = [protocol.rates(content) for content in contents]
        cells = [_cell([r[name] for r in rates], None) for name in ("score", *columns)]
        table.append([method, str(len(contents)), *cells, _mean_cpu_s(contents)])
    scores = {
        method: {c["seed"]: protocol.rates(c)["score"] for c in contents}
        for method, contents in groups.items()
    }
    seeds = sorted(set.intersection(*(set(s) for s in scores.values()))) if scores else []
    ranks = {seed: _ranks({m: s[seed] for m, s in scores.items()}) for seed in seeds}
    return {
        "table": table,
        "scores": {method: fmean(s.values()) for method, s in scores.items()},
        "ranks": ranks,
        "rank_correlation": rank_correlation([list(r.values()) for r in ranks.values()]),
    }


def _mean_cpu_s(contents: Results) -> str:
    """Return the mean CPU seconds of the results that have them, as text."""
    seconds = [c["cpu_s"] for c in contents if c["cpu_s"] is not None]
    return f"{fmean(seconds):.0f}" if seconds else "-"


def _cell(rates: Sequence[float], interval: tuple[float, float] | None) -> str:
    """Return a rate as text: .812, with its interval or, for several seeds, with its range."""
    text = _rate(fmean(rates))
    if len(rates) > 1:
        return f"{text} ({_rate(min(rates))} to {_rate(max(rates))})"
    return text if interval is None else f"{text} ({_rate(interval[0])} to {_rate(interval[1])})"


def _rate(x: float) -> str:
    """Return a rate as text without the leading zero, such as .812."""
    return f"{x:.3f}".removeprefix("0")


def _ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the rank of each method, 1 for the largest score; ties share the mean rank."""
    values = list(scores.values())
    return {
        method: 1 + sum(v > x for v in values) + (sum(v == x for v in values) - 1) / 2
        for method, x in scores.items()
    }


def rank_correlation(ranks: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of Spearman's correlation over all pairs of rankings.

    Spearman's correlation is Pearson's correlation of the ranks: 1 for equal orders and -1 for
    opposite orders. A pair is left out if all methods of one ranking have the same rank.

    Args:
        ranks: One ranking for each seed, of the same methods in the same order.

    Returns:
        The mean; None with fewer than two rankings or three methods.
    """
    if len(ranks) < 2 or len(ranks[0]) < 3:
        return None
    values = []
    for a, b in itertools.combinations(ranks, 2):
        x, y = ([v - fmean(r) for v in r] for r in (a, b))
        norm = math.sqrt(sum(v * v for v in x) * sum(v * v for v in y))
        if norm > 0:
            values.append(sum(v * w for v, w in zip(x, y, strict=True)) / norm)
    return fmean(values) if values else None


# -------------------------------------------------------------------------------------------- page
def render(
    results: Results,
    summary: Mapping[str, Any],
    protocol: Any,
    videos: Mapping[str, FamilyVideo],
    trial: bool,
) -> str:
    """Return the HTML page, which has no script and loads no other file.

    Args:
        results: As in ``summarize``.
        summary: Result of ``summarize``.
        protocol: The module ``embodied_envs.tabletop_bench``.
        videos: Family -> video.
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
    charts = [report.line_chart(title, "environment steps", curves)] if curves else []
    return report.template("benchmark.html.j2").render(
        protocol=protocol,
        trial=trial,
        summary=summary,
        columns=[HEADERS.get(name, name.removeprefix("train/")) for name in columns],
        rows=rows,
        charts=charts,
        conditions=protocol.CONDITIONS,
        results=results,
        videos={
            family: (v, base64.b64encode(v.path.read_bytes()).decode())
            for family, v in videos.items()
        },
    )
