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

from embodied_envs.base.errors import ConfigError
from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import FLAGS, PROGRAM, prepare

if TYPE_CHECKING:
    from embodied_ppo.options.schema import Config
    from embodied_ppo.tools.placement_search import Candidate

OUTPUT_DIR = "my_configs"
"""Folder of configs to write the placement to, unless --config-dir names one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "tune")


def run(args: argparse.Namespace) -> None:
    """Find the fastest placement, write it as a config, and print the command that uses it."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.tools import placement_search

    config_dir = Path(args.config_dir or OUTPUT_DIR)
    file = output_file(config_dir, loaded.config.name)
    explicit = loaded.deliberate({FLAGS})
    with output.stdout_to_stderr():
        measured, refused = placement_search.search(
            loaded.config, explicit=explicit, quiet=args.quiet
        )
    content = format_yaml(
        measured[0], loaded.config, shlex.join([PROGRAM, "tune", *args.overrides])
    )
    output.write_atomically(file, content)

    overrides = [override for override in args.overrides if not _selects_placement(override)]
    overrides.append(f"placement={file.stem}")
    config_name = ["--config-name", args.config_name] if args.config_name else []
    command = [PROGRAM, "train", "--config-dir", str(config_dir), *config_name, *overrides]
    summary = {
        "placements": [candidate.summary() for candidate in measured],
        "refused": [{"placement": name, "reason": reason} for name, reason in refused.items()],
        "best": measured[0].name,
        "file": str(file),
        "command": shlex.join(command),
    }
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


def format_yaml(best: Candidate, original: Config, command: str) -> str:
    """Return the options of the best placement, complete enough to override those of other files.

    Args:
        best: The fastest placement.
        original: Options of the run as given.
        command: The command line, for the first comment.
    """
    import yaml

    from embodied_ppo.options import loader
    from embodied_ppo.options.schema import ClusterConfig

    default, given = loader.dump(ClusterConfig()), loader.dump(original.cluster)
    cluster = {
        name: value
        for name, value in loader.dump(best.config.cluster).items()
        if value != default[name] or given[name] != default[name]
    }
    settings = {"placement": best.config.placement} | ({"cluster": cluster} if cluster else {})
    comment = f"# {command} ({date.today()}): {best.name}, {best.seconds:.3g} s per update"
    return f"# @package _global_\n{comment}\n{yaml.safe_dump(settings, sort_keys=False)}"


def _selects_placement(override: str) -> bool:
    """Return whether an override sets an option that the tuned placement sets."""
    from embodied_ppo.options.aliases import ALIASES

    key = override.lstrip("+~").partition("=")[0]
    paths = ALIASES[""].get(key, (key,))
    return any(path.partition(".")[0] in ("placement", "cluster") for path in paths)


def print_tuned(summary: Mapping[str, Any]) -> None:
    """Print the placements, fastest first, those refused, and the command that uses the best."""
    rows = [["seconds per update", "GB", "placement"]]
    for row in summary["placements"]:
        rows.append([f"{row['measured_s']:.3g}", f"{row['memory_gb']:.3g}", row["placement"]])
    output.table(rows)
    print()
    refused = summary["refused"]
    output.table([["refused", row["placement"], row["reason"]] for row in refused])
    # The command is one line, so that it can be copied.
    print(f"\n{summary['best']}: {summary['file']}\n\n{summary['command']}")
