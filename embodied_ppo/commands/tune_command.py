"""Arguments and output of `embodied-ppo tune`; ``tune`` holds the search and imports torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import FLAGS, PROGRAM, prepare
from embodied_ppo.core.errors import ConfigError, show

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
    from embodied_ppo.commands import tune

    config_dir = Path(args.config_dir or OUTPUT_DIR)
    file = tune.destination(config_dir, loaded.config.name)
    explicit = loaded.deliberate({FLAGS})
    with output.stdout_to_stderr():
        result = tune.search(loaded.config, explicit=explicit, quiet=args.quiet)
    tune.write(file, result, shlex.join([PROGRAM, "tune", *args.overrides]))

    # Compose the config that the printed command selects: other files may set the same options.
    args.config_dir, args.command = str(config_dir), "train"
    words = [line for line in args.overrides if not _selects_placement(line)]
    words.append(f"placement={file.stem}")
    written, wanted = prepare(args, words).config, result.config
    if (written.placement, written.cluster) != (wanted.placement, wanted.cluster):
        raise ConfigError(
            f"{file}: is written, but another file sets cluster, too, and both together are "
            f"{show(vars(written.cluster))}; remove it from that file"
        )
    config_name = ["--config-name", args.config_name] if args.config_name else []
    command = [PROGRAM, "train", "--config-dir", str(config_dir), *config_name, *words]
    summary = result.told() | {"file": str(file), "command": shlex.join(command)}
    if args.json:
        print(output.as_json(summary))
    else:
        print_tuned(summary)


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
