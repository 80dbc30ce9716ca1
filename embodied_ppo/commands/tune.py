"""`embodied-ppo tune`: find the fastest placement of a run and write it as a config."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import FLAGS, PROGRAM, prepare
from embodied_ppo.core.errors import ConfigError, PlacementError, show

if TYPE_CHECKING:
    from embodied_ppo.modes.placement_search import TuningResult

OUTPUT_DIR = "my_configs"
"""Folder of configs to write the placement to, unless --config-dir names one."""
MAX_ROWS = 12
"""Largest number of placements in a table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "tune")


def run(args: argparse.Namespace) -> None:
    """Find the fastest placement, write it as a config, and print the command that uses it."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.modes import placement_search

    config_dir = Path(args.config_dir or OUTPUT_DIR)
    file = output_file(config_dir, loaded.config.name)
    explicit = loaded.deliberate({FLAGS})
    with output.stdout_to_stderr():
        result = placement_search.search(loaded.config, explicit=explicit, quiet=args.quiet)
    content = format_yaml(result, shlex.join([PROGRAM, "tune", *args.overrides]))
    output.write_atomically(file, content)

    # Compose the config that the printed command selects: other files may set the same options.
    args.config_dir, args.command = str(config_dir), "train"
    overrides = [override for override in args.overrides if not _selects_placement(override)]
    overrides.append(f"placement={file.stem}")
    conflict = f"{file}: is written, but another file sets cluster, too, and both together are"
    try:
        composed, best = prepare(args, overrides).config, result.config
    except (ConfigError, PlacementError) as error:
        raise ConfigError(f"{conflict} refused ({error}); remove it from that file") from error
    if (composed.placement, composed.cluster) != (best.placement, best.cluster):
        shown = show(vars(composed.cluster))
        raise ConfigError(f"{conflict} {shown}; remove it from that file")
    config_name = ["--config-name", args.config_name] if args.config_name else []
    command = [PROGRAM, "train", "--config-dir", str(config_dir), *config_name, *overrides]
    summary = result.summary() | {"file": str(file), "command": shlex.join(command)}
    if args.json:
        print(output.as_json(summary))
    else:
        print_tuned(summary)


def output_file(config_dir: Path, name: str) -> Path:
    """Return the file to write, in group ``placement`` of ``config_dir``. Raises ConfigError."""
    file = config_dir / "placement" / f"tuned_{re.sub(r'[^A-Za-z0-9_-]', '-', name)}.yaml"
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"{file}: cannot be written ({parent}); name another --config-dir")
    return file


def format_yaml(result: TuningResult, command: str) -> str:
    """Return the options of the best placement, complete enough to override those of other files.

    Args:
        result: Predictions and measurements.
        command: The command line, for the first comment.
    """
    import yaml

    from embodied_ppo.config import loader
    from embodied_ppo.config.schema import ClusterConfig

    clusters = (ClusterConfig(), result.config.cluster, result.original.cluster)
    default, best, original = map(loader.dump, clusters)
    always = ()
    if result.best.plan is not None:
        always = ("component_placement", "stages", "num_nodes", "devices_per_node")
    cluster = {
        name: value
        for name, value in best.items()
        if name in always or value != default[name] or original[name] != default[name]
    }
    settings = {"placement": result.config.placement} | ({"cluster": cluster} if cluster else {})
    seconds = min(result.measured_s.values())
    comment = f"# {command} ({date.today()}): {result.best.choice.name}, {seconds:.3g} s per update"
    return f"# @package _global_\n{comment}\n{yaml.safe_dump(settings, sort_keys=False)}"


def _selects_placement(override: str) -> bool:
    """Return whether an override sets an option that the tuned placement sets."""
    from embodied_ppo.config.aliases import ALIASES

    key = override.lstrip("+~").partition("=")[0]
    paths = ALIASES[""].get(key, (key,))
    return any(path.partition(".")[0] in ("placement", "cluster") for path in paths)


def print_tuned(summary: Mapping[str, Any]) -> None:
    """Print placements by predicted seconds, those refused, and the command that uses the best."""
    placements, refused = summary["placements"], summary["refused"]
    rows = [["predicted s", "collect", "update", "publish", "measured s", "GB", "placement"]]
    for i, row in enumerate(placements):
        if i < MAX_ROWS or row["measured_s"] is not None:
            predicted = [
                f"{row[f'{part}_s']:.3g}" for part in ("whole", "collect", "update", "publish")
            ]
            measured = "" if row["measured_s"] is None else f"{row['measured_s']:.3g}"
            rows.append([*predicted, measured, f"{row['memory_gb']:.3g}", row["placement"]])
    output.table(rows)
    if len(placements) > len(rows) - 1:
        print(f"and {len(placements) - len(rows) + 1} more (--json)")
    print()
    output.table([["refused", row["placement"], row["reason"]] for row in refused[:MAX_ROWS]])
    if len(refused) > MAX_ROWS:
        print(f"and {len(refused) - MAX_ROWS} more (--json)")
    # The command is one line, so that it can be copied.
    print(f"\n{summary['best']}: {summary['file']}\n\n{summary['command']}")
