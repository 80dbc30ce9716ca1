"""`embodied-ppo fit`: rewrite a recipe for other devices, with smaller micro-batches."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import PROGRAM, prepare
from embodied_ppo.core.errors import ConfigError, show

if TYPE_CHECKING:
    from embodied_ppo.modes.memory_fit import FittedRecipe


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
    """Fit a recipe to fewer devices, write it, and print the changes."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.modes import memory_fit

    file = None if args.out is None else output_file(args.out)
    fitted = memory_fit.fit(loaded.config, args.devices)
    config_name = ["--config-name", args.config_name] if args.config_name else []
    command = [PROGRAM, "fit", *config_name, *args.overrides, "--devices", str(args.devices)]
    content = memory_fit.format_yaml(fitted, shlex.join(command))
    train_command = None
    if file is not None:
        try:
            output.write_atomically(file, content)
        except OSError as error:
            raise ConfigError(
                f"--out {file}: cannot be written ({error.strerror}); name another file"
            ) from error
        options = ["--config-dir", str(file.parent.parent), f"experiment={file.stem}"]
        train_command = shlex.join([PROGRAM, "train", *options])
    if args.json:
        summary = {
            "changes": [vars(change) for change in fitted.changes],
            "notes": fitted.notes,
            "memory": fitted.memory,
            "file": args.out,
            "command": train_command,
            "recipe": memory_fit.settings(fitted.config),
        }
        print(output.as_json(summary))
    elif file is not None:
        print_fitted(fitted, sys.stdout)
        print(train_command)
    else:
        if not args.quiet:
            print_fitted(fitted, sys.stderr)
        print(content, end="")


def output_file(out: str) -> Path:
    """Return the file DIR/experiment/NAME.yaml to write. Raises ConfigError."""
    file = Path(out)
    if file.suffix != ".yaml" or file.parent.name != "experiment":
        raise ConfigError(
            f"--out {out}: experiments are in a folder of that name; write --out"
            f" my_configs/experiment/{file.stem}.yaml"
        )
    if not re.fullmatch(r"[\w .-]+", file.stem, re.ASCII):
        raise ConfigError(
            f"--out {out}: no experiment can be called {file.stem!r}; letters, digits and _ . - can"
            " be used"
        )
    if file.exists():
        raise ConfigError(f"--out {out}: exists already; name another file")
    return file


def print_fitted(fitted: FittedRecipe, out: TextIO) -> None:
    """Print every changed option with the reason, and the sizes of an update."""
    lines = [f"{x.option}: {show(x.old)} -> {show(x.new)}  ({x.why})" for x in fitted.changes]
    lines = lines or ["nothing has to change"]
    sizes = [f"  {line}" for line in fitted.batch_sizes]
    print("\n".join([*lines, *fitted.notes, "a run:", *sizes]), file=out)
