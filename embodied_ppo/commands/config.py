"""`embodied-ppo config`: show every option with its value, source and meaning.

Example: config experiment=quickstart --only gamma
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

from embodied_envs.base.errors import nearest, show
from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import prepare
from embodied_ppo.options.config_folders import PRIMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "config")
    parser.add_argument(
        "--only", metavar="TEXT", help="only options whose name or meaning contains this text"
    )


def run(args: argparse.Namespace) -> None:
    """Print the resolved options of train, or of the command named first."""
    args.command = "train"
    if args.overrides and args.overrides[0] in PRIMARY:
        args.command = args.overrides.pop(0)
    elif args.config_name in PRIMARY:
        args.command = args.config_name
    loaded = prepare(args, args.overrides, check=args.command == "train", partial=True)
    rows = config_rows(loaded, only=args.only)
    if not rows:
        names = sorted({path.rpartition(".")[2] for path in config_rows(loaded)})
        near = nearest(args.only, names)
        hint = f"did you mean {near}?" if near else "leave --only out to see all"
        raise UsageError(f"--only {args.only}: no option mentions it; {hint}")
    output.print_aliases(loaded, args)
    if loaded.missing and not args.quiet:
        names = ", ".join(sorted(loaded.missing))
        print(f"without a value, so nothing is checked: {names}", file=sys.stderr)
    output.print_result(rows, args, print_config)


def config_rows(loaded: Any, *, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Return path -> value, default, source, meaning, type and limit of every option.

    Options that only the other mode reads are left out unless they are set.

    Args:
        loaded: The resolved config with the origin of each option.
        only: Text that the path or the meaning must contain; None selects all options.
    """
    from embodied_ppo.options import loader, readers

    rows: dict[str, dict[str, Any]] = {}
    mode, values = getattr(loaded.config, "mode", None), loader.dump(loaded.config)
    for path, option in loader.describe(type(loaded.config)).items():
        if mode and readers.mode_of(path) not in (None, mode) and path not in loaded.origin:
            continue
        if only and only.lower() not in f"{path} {option.meaning}".lower():
            continue
        default = option.default
        rows[path] = {
            "value": "???" if path in loaded.missing else reduce(getitem, path.split("."), values),
            "default": list(default) if isinstance(default, tuple) else default,
            "source": loaded.origin.get(path, "default"),
            "meaning": option.meaning,
            "type": option.type,
            "limit": option.limit,
        }
    return rows


def print_config(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one table per section: name, value, source, meaning."""
    sections: dict[str, list[list[str]]] = {}
    for path, row in rows.items():
        section, _, name = path.rpartition(".")
        cells = [name, show(row["value"]), row["source"], " ".join(row["meaning"].split())]
        sections.setdefault(section, []).append(cells)
    for i, (section, table) in enumerate(sections.items()):
        if i:
            print()
        output.table(table, title=section or "run")
