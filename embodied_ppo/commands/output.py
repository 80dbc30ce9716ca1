"""What the console command says: resolved options, experiments, plans, imported options, summaries."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from embodied_ppo.config.compose import shipped
from embodied_ppo.core.errors import show


def as_json(value: Any) -> str:
    """One line of strict JSON: numbers it has no word for (nan, inf) are null."""

    def plain(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {str(k): plain(v) for k, v in node.items()}
        if isinstance(node, (list, tuple)):
            return [plain(v) for v in node]
        return None if isinstance(node, float) and not math.isfinite(node) else node

    return json.dumps(plain(value), default=str, allow_nan=False)


def table(rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Aligned columns; on a terminal rich wraps the last one."""
    if not rows:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(title=title or None, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for i in range(len(rows[0])):
            grid.add_column(overflow="fold", style="bold" if i == 0 else None)
        for row in rows:
            grid.add_row(*(cell.replace("[", r"\[") for cell in row))
        Console().print(grid)
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    if title:
        print(title)
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(("  " if title else "") + "  ".join([*cells, row[-1]]).rstrip())


# -------------------------------------------------------------------------------------------------------- experiments
def experiments(config_dir: str | None) -> list[dict[str, str]]:
    """Name, description and file of every experiment; a file in ``config_dir`` hides a shipped one of the same name."""
    found: dict[str, dict[str, str]] = {}
    for root in [shipped(), *([Path(config_dir)] if config_dir else [])]:
        home = root / "experiment"
        for file in sorted(home.rglob("*.yaml")):
            name = file.relative_to(home).with_suffix("").as_posix()
            found[name] = {"name": name, "description": _description(file), "file": str(file)}
    return [found[name] for name in sorted(found)]


def _description(file: Path) -> str:
    """The option ``description`` of an experiment, else its first comment."""
    import yaml

    from embodied_ppo.config import loader

    try:
        text = file.read_text(encoding="utf-8")
        content = loader.plain_yaml(text)
    except UnicodeDecodeError:
        return "(not UTF-8)"
    except yaml.YAMLError:
        return "(broken YAML)"
    if isinstance(content, Mapping) and isinstance(content.get("description"), str):
        return " ".join(content["description"].split())
    comments = (line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#"))
    return next((c for c in comments if c and not c.startswith("@package")), "")


# ----------------------------------------------------------------------------------------------------------- new task
def print_new_task(files: Sequence[Path], assumed: Sequence[str], commands: Sequence[str]) -> None:
    """What was written, assumed about the model, and what to run next."""
    for title, lines in (("written", files), ("assumed, change it there", assumed), ("next", commands)):
        print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))


# ------------------------------------------------------------------------------------------------------------- config
def config_rows(loaded: Any, *, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Path -> value, default, who set it, meaning, type and limit of every option (or those that mention ``only``).

    What only the other mode reads is left out unless somebody set it.
    """
    from embodied_ppo.config import loader, readers

    rows: dict[str, dict[str, Any]] = {}
    mode = getattr(loaded.config, "mode", None)
    for path, option in loader.describe(type(loaded.config)).items():
        if mode and readers.mode_of(path) not in (None, mode) and path not in loaded.origin:
            continue
        if only and only.lower() not in f"{path} {option.meaning}".lower():
            continue
        value = "???" if path in loaded.missing else attrgetter(path)(loaded.config)
        rows[path] = {
            "value": list(value) if isinstance(value, tuple) else value,
            "default": list(option.default) if isinstance(option.default, tuple) else option.default,
            "source": loaded.origin.get(path, "config.py"),
            "meaning": option.meaning,
            "type": option.type,
            "limit": option.limit,
        }
    return rows


def print_config(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One table per section: name, value, who set it, meaning."""
    grouped: dict[str, list[list[str]]] = {}
    for path, row in rows.items():
        section, _, name = path.rpartition(".")
        cells = [name, show(row["value"]), row["source"], " ".join(row["meaning"].split())]
        grouped.setdefault(section, []).append(cells)
    for i, (section, cells) in enumerate(grouped.items()):
        if i:
            print()
        table(cells, title=section or "run")


def own_options(command: str) -> str:
    """Options of a command that has some of its own, for its --help: name=default and meaning. Empty for others.

    Those of a section are left out: ``config`` shows them.
    """
    from embodied_ppo.config.loader import describe
    from embodied_ppo.config.schema import OWN_OPTIONS

    if command not in OWN_OPTIONS:
        return ""
    rows = {o.path: (f"{o.path}={show(o.default)}", o.meaning) for o in describe(OWN_OPTIONS[command]).values()}
    rows = [row for path, row in rows.items() if "." not in path]
    width = max(len(name) for name, _ in rows)
    room = max(40, min(120, shutil.get_terminal_size().columns) - width - 4)
    lines = []
    for name, meaning in rows:
        first, *rest = textwrap.wrap(" ".join(meaning.split()), room, break_on_hyphens=False)
        lines += [f"  {name:<{width}}  {first}", *(" " * (width + 4) + line for line in rest)]
    return "\n".join(["own options, with their defaults:", *lines])


# --------------------------------------------------------------------------------------------------------------- plan
def print_plan(told: Mapping[str, Any]) -> None:
    """Devices, memory, weights and arithmetic of a placement."""
    table(told["devices"])
    print()
    table(told["memory"])
    print()
    paths = list(told["weights"].values())
    rows = [["weights travel by", ", ".join(f"{path} ({paths.count(path)})" for path in dict.fromkeys(paths))]]
    rows += [[name, ", ".join(x) or "nobody" if isinstance(x, list) else f"{x:,}"] for name, x in told["facts"].items()]
    table(rows)


# ---------------------------------------------------------------------------------------------------------- migration
def print_migration(told: Mapping[str, Any]) -> None:
    """Theirs -> ours, and what has no counterpart, with the reason."""

    def theirs(row: Mapping[str, Any]) -> str:
        return f"{show(row['theirs'])} = {show(row['value'])}"

    mapped = [
        [theirs(row) + (" (their default)" if row["default"] else ""), f"{path} = {show(value)}"]
        for row in told["mapped"]
        for path, value in row["ours"].items()
    ]
    parts = [
        (f"mapped, {told['peer']} -> ours", mapped),
        ("mapped, but not exactly the same", [[theirs(row), row["why"]] for row in told["differences"]]),
        ("no meaning here", [[theirs(row), row["why"]] for row in told["meaningless"]]),
        ("refused", [[theirs(row), row["why"]] for row in told["refused"]]),
        ("unknown", [[theirs(row), row["why"]] for row in told["unknown"]]),
        ("yours to write", [[path, what] for path, what in told["to_write"].items()]),
        ("refused together", [["train would say", told["conflict"]]] if told["conflict"] else []),
    ]
    for title, rows in parts:
        if rows:
            table(rows, title=title)
            print()
    counts = [[name, str(len(told[name]))] for name in ("mapped", "meaningless", "refused", "unknown")]
    table([*counts, ["written", told["out"] or "to stdout"]])


# --------------------------------------------------------------------------------------------------------------- tune
SHOWN = 12
"""Placements in a table."""


def print_tuned(told: Mapping[str, Any]) -> None:
    """Placements by predicted seconds, what was refused, and what to do with the best."""
    found, refused = told["placements"], told["refused"]
    rows = [["predicted s", "collect", "update", "publish", "measured s", "GB", "placement"]]
    for i, row in enumerate(found):
        if i < SHOWN or row["measured_s"] is not None:
            seconds = [f"{row[f'{part}_s']:.3g}" for part in ("whole", "collect", "update", "publish")]
            took = "" if row["measured_s"] is None else f"{row['measured_s']:.3g}"
            rows.append([*seconds, took, f"{row['memory_gb']:.3g}", row["placement"]])
    table(rows)
    if len(found) > len(rows) - 1:
        print(f"and {len(found) - len(rows) + 1} more (--json)")
    print()
    table([["refused", row["placement"], row["reason"]] for row in refused[:SHOWN]])
    if len(refused) > SHOWN:
        print(f"and {len(refused) - SHOWN} more (--json)")
    print(f"\n{told['best']}: {told['file']}\n\n{told['command']}")  # one line, to be copied


# -------------------------------------------------------------------------------------------------------- fit, doctor
def print_fitted(fitted: Any, out: TextIO) -> None:
    """Every option that changed, old -> new and why; what a run consists of."""
    for change in fitted.changes:
        print(f"{change.option}: {show(change.old)} -> {show(change.new)}  ({change.why})", file=out)
    if not fitted.changes:
        print("nothing has to change", file=out)
    for note in fitted.notes:
        print(note, file=out)
    print("\n".join(["a run:", *(f"  {line}" for line in fitted.run)]), file=out)


def print_rows(rows: Sequence[Any]) -> None:
    """One line for each check of doctor; below a line that is not OK its cure."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.state.upper() if row.state == 'ok' else row.state:<7}  {row.name:<{width}}  {row.found}")
        if row.cure:
            print(f"{'':<7}  {'':<{width}}  cure: {row.cure}")
    broken = [row.name for row in rows if row.state == "problem" and row.needed]
    print(
        f"broken, and the default recipes need it: {', '.join(broken)}"
        if broken
        else "all that the default recipes need works"
    )


# -------------------------------------------------------------------------------------------------------------- sweep
def print_arms(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the results of a sweep by arm: the options that differ except the seed.

    Args:
        results: Summaries of runs, each with ``options``, those that differ between the runs.
    """
    arms: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for result in results:
        arm = tuple((key, value) for key, value in result["options"].items() if key != "seed")
        arms.setdefault(arm, []).append(result)
    tags = [tag for tag in ("final_return", "final_success") if any(r.get(tag) is not None for r in results)]
    columns = [f"{tag} {part}" for tag in tags for part in ("mean", "std", "min", "max")]
    rows = [["arm", "runs", *columns]]
    for arm, runs in arms.items():
        cells = [", ".join(f"{key}={value}" for key, value in arm) or "all", str(len(runs))]
        for tag in tags:
            values = [float(r[tag]) for r in runs if r.get(tag) is not None]
            numbers = [statistics.mean(values), min(values), max(values)] if values else [math.nan] * 3
            std = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
            mean, low, high = (f"{x:.4g}" for x in numbers)
            cells += [mean, std, low, high]
        rows.append(cells)
    table(rows)


# ------------------------------------------------------------------------------------------------------------ summary
def print_summary(summary: Mapping[str, Any]) -> None:
    """Numbers and words of a summary, one per line, with their intervals; other nested entries stay in the files."""
    flat = {k: v for k, v in summary.items() if not isinstance(v, (Mapping, list, tuple))}
    ends = {k: f" ({low:.6g} to {high:.6g}, 95 %)" for k, (low, high) in summary.get("ci95", {}).items()}
    told = {k: f"{v:.6g}" if isinstance(v, float) else "-" if v is None else str(v) for k, v in flat.items()}
    table([[k, text + ends.get(k, "")] for k, text in told.items()])
