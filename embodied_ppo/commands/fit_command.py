"""Arguments and output of `embodied-ppo fit`; ``fit`` holds the search and imports torch."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, TextIO

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import PROGRAM, prepare
from embodied_ppo.core.errors import show

if TYPE_CHECKING:
    from embodied_ppo.commands.fit import Fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "fit")
    parser.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        required=True,
        help="number of devices of one machine",
    )
    parser.add_argument(
        "--out", metavar="DIR/experiment/NAME.yaml", help="file to write (default: stdout)"
    )


def _count(text: str) -> int:
    """Parse an integer >= 1."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Fit a recipe to fewer devices, write it, and print what changed."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.commands import fit

    destination = None if args.out is None else fit.destination(args.out)
    fitted = fit.fit(loaded.config, args.devices)
    config_name = ["--config-name", args.config_name] if args.config_name else []
    words = [PROGRAM, "fit", *config_name, *args.overrides, "--devices", str(args.devices)]
    content = fit.text(fitted, shlex.join(words))
    command = None
    if destination is not None:
        file, folder, name = destination
        fit.write(file, content)
        command = shlex.join([PROGRAM, "train", "--config-dir", folder, f"experiment={name}"])
    if args.json:
        summary = {
            "changes": [vars(change) for change in fitted.changes],
            "notes": fitted.notes,
            "memory": fitted.memory,
            "file": args.out,
            "command": command,
            "recipe": fit.settings(fitted.config),
        }
        print(output.as_json(summary))
    elif destination is not None:
        print_fitted(fitted, sys.stdout)
        print(command)
    else:
        if not args.quiet:
            print_fitted(fitted, sys.stderr)
        print(content, end="")


def print_fitted(fitted: Fitted, out: TextIO) -> None:
    """Print every changed option, old -> new with the reason, and the sizes of a run."""
    for change in fitted.changes:
        print(
            f"{change.option}: {show(change.old)} -> {show(change.new)}  ({change.why})", file=out
        )
    if not fitted.changes:
        print("nothing has to change", file=out)
    for note in fitted.notes:
        print(note, file=out)
    print("\n".join(["a run:", *(f"  {line}" for line in fitted.run)]), file=out)
