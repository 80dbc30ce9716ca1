"""`embodied-ppo experiments`: list the experiments.

Example: experiments --json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from embodied_ppo.commands import arguments, output
from embodied_ppo.options.config_folders import config_dir, shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_override_arguments(parser, "experiments")


def run(args: argparse.Namespace) -> None:
    """Print the name and the description of every experiment."""
    arguments.refuse_lines(args.overrides, args.command)
    rows = experiments(config_dir(args))
    table = [[row["name"], row["description"]] for row in rows]
    output.print_result(rows, args, lambda _: output.table(table))


def experiments(folder: str | None) -> list[dict[str, str]]:
    """Return name, description and file of every experiment, sorted by name.

    Args:
        folder: The user's folder of configs. An experiment there replaces the shipped experiment
            of the same name.
    """
    rows: dict[str, dict[str, str]] = {}
    for root in [shipped(), *([Path(folder)] if folder else [])]:
        group = root / "experiment"
        for file in sorted(group.rglob("*.yaml")):
            name = file.relative_to(group).with_suffix("").as_posix()
            rows[name] = {"name": name, "description": _description(file), "file": str(file)}
    return [rows[name] for name in sorted(rows)]


def _description(file: Path) -> str:
    """Return the option ``description`` of an experiment, else its first comment."""
    import yaml

    from embodied_ppo.options import loader

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
