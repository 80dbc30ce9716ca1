"""Page of `embodied-ppo watch` with the responses of a run: browse, filter, compare two updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from embodied_ppo.evaluation.charts import mean, number, page_templates
from embodied_ppo.training import generations

PAGE = 50  # number of responses, or with a second update of prompts, on a page
TOKENS_SHOWN = 200  # number of tokens of a response whose numbers the page shows; the file has all
VERDICTS = {"right": True, "wrong": False, "failed": None}
FILTERS = ("all", *VERDICTS)


def render(run: str, label: str, folder: Path, query: Mapping[str, Sequence[str]]) -> str:
    """Return the page of a run.

    Args:
        run: The run, as addresses name it.
        label: Its name on the page.
        folder: Its directory.
        query: Parameters: at and other ("train 3", "eval 3"; other may be missing), q (a text in
            prompt or response), show (one of FILTERS), page (from 1).

    Raises:
        OSError: A file cannot be read.
    """
    files = generations.find(folder)
    names = [f"{kind} {update}" for kind, update in files]

    def parameter(name: str, default: str) -> str:
        return query.get(name, [default])[0]

    at, other = parameter("at", names[-1] if names else ""), parameter("other", "")
    shown = {"q": parameter("q", ""), "show": parameter("show", "all")}
    page = max(1, int(text)) if (text := parameter("page", "1")).isdecimal() else 1
    paths = dict(zip(names, files.values(), strict=True))
    lines = _filtered(paths.get(at, []), **shown)
    if other in paths:
        rows: Iterator[tuple[Any, ...]] = _pairs(lines, paths[other])
    else:
        rows = ((line["prompt"], line.get("ground_truth"), [line], None) for line in lines)
    # One row more than the page has says whether there is a next page.
    part = list(islice(rows, (page - 1) * PAGE, page * PAGE + 1))
    fields = {"run": run, "at": at, "other": other, **shown}

    def address(number: int) -> str:
        return f"?{urlencode({**fields, 'page': number})}"

    environment = page_templates("embodied_ppo.tools")
    environment.filters |= {"facts": _facts, "tokens": _tokens}
    return environment.get_template("generations.html.j2").render(
        label=label,
        names=names,
        filters=FILTERS,
        rows=part[:PAGE],
        page=page,
        before=address(page - 1) if page > 1 else None,
        after=address(page + 1) if len(part) > PAGE else None,
        **fields,
    )


def _filtered(files: Sequence[Path], q: str, show: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that contain ``q`` and have the verdict ``show``."""
    for line in generations.read(files):
        if q in line["prompt"] or q in line["response"]:
            if show not in VERDICTS or line.get("right") is VERDICTS[show]:
                yield line


def _pairs(lines: Iterator[dict[str, Any]], files: Sequence[Path]) -> Iterator[tuple[Any, ...]]:
    """Yield the prompts of ``lines`` that ``files`` have, too, with the responses of both."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["prompt_index"], line["prompt"]), []).append(line)
    others: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in generations.read(files):
        if (key := (line["prompt_index"], line["prompt"])) in groups:
            others.setdefault(key, []).append(line)
    for key in sorted(others):
        yield key[1], groups[key][0].get("ground_truth"), groups[key], others[key]


def _facts(line: Mapping[str, Any]) -> list[str]:
    """Return what is known about a response, as short texts."""
    values = {"score": line.get("score"), **(line.get("terms") or {})}
    values |= {f"mean {name}": mean(line.get(key) or ()) for name, key in NUMBERS.items()}
    known = [f"{name} {number(x)}" for name, x in values.items() if x is not None]
    return [*known, f"{len(line['tokens'])} tokens"]


# Name on the page -> key of a line with a number of each token.
NUMBERS = {"advantage": "advantage", "log-probability": "log_prob"}


def _tokens(line: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of the first tokens: index, token and its numbers."""
    columns = [line["tokens"], *(line.get(key) or [] for key in NUMBERS.values())]
    rows = islice(zip_longest(*columns), min(TOKENS_SHOWN, len(line["tokens"])))
    return [[str(i), *map(_cell, row)] for i, row in enumerate(rows)]


def _cell(x: float | None) -> str:
    """Format a number of a token."""
    return "–" if x is None else str(x) if isinstance(x, int) else number(x)
