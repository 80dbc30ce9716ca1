"""`embodied-ppo tune`: find the fastest placement of a run and print the command that uses it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import FLAGS, PROGRAM, override_lines, prepare

if TYPE_CHECKING:
    from embodied_ppo.options.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "tune")


def run(args: argparse.Namespace) -> None:
    """Find the fastest placement, and print the command that uses it."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.tools import placement_search

    explicit = loaded.deliberate({FLAGS})
    with output.stdout_to_stderr():
        measured, refused = placement_search.search(
            loaded.config, explicit=explicit, quiet=args.quiet
        )
    overrides = [override for override in args.overrides if not _selects_placement(override)]
    overrides += placement_lines(measured[0].config, loaded.config)
    command = [PROGRAM, "train", *arguments.config_flags(args), *overrides]
    summary = {
        "placements": [candidate.summary() for candidate in measured],
        "refused": [{"placement": name, "reason": reason} for name, reason in refused.items()],
        "best": measured[0].name,
        "command": shlex.join(command),
    }
    output.print_result(summary, args, print_tuned)


def placement_lines(best: Config, original: Config) -> list[str]:
    """Return overrides with the options of a placement, also those that a config file sets.

    Args:
        best: Options of the run in the placement.
        original: Options of the run as given.
    """
    from embodied_ppo.options import loader
    from embodied_ppo.options.schema import ClusterConfig

    default, given = loader.dump(ClusterConfig()), loader.dump(original.cluster)
    options = {
        f"cluster.{name}": value
        for name, value in loader.dump(best.cluster).items()
        if value != default[name] or given[name] != default[name]
    }
    return [f"placement={best.placement}", *override_lines("train", options)]


def _selects_placement(override: str) -> bool:
    """Return whether an override sets an option that ``placement_lines`` sets."""
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
    print(f"\n{summary['best']}:\n\n{summary['command']}")
