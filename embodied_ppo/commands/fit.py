"""`embodied-ppo fit`: rewrite a recipe for other devices, with smaller micro-batches."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.commands import arguments, output
from embodied_ppo.options.compose import PROGRAM, prepare

if TYPE_CHECKING:
    from embodied_ppo.tools.memory_fit import FittedRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "fit")
    parser.add_argument(
        "--devices",
        type=arguments.whole(1, 1024),
        metavar="N",
        required=True,
        help="number of devices of one machine",
    )
    parser.add_argument(
        "--out", metavar="DIR/experiment/NAME.yaml", help="file to write (default: stdout)"
    )


def run(args: argparse.Namespace) -> None:
    """Fit a recipe to fewer devices, write it, and print the changes."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    from embodied_ppo.options.placement_memory import memory_rows
    from embodied_ppo.tools import memory_fit
    from embodied_ppo.training.run_directory import replace_text

    file = None if args.out is None else output_file(args.out)
    fitted = memory_fit.fit(loaded.config, args.devices)
    flags = [*arguments.config_flags(args), "--devices", str(args.devices)]
    command = [PROGRAM, "fit", *args.overrides, *flags]
    content = memory_fit.format_yaml(fitted, shlex.join(command))
    train_command = None
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, content)
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
            "memory": memory_rows(fitted.plan, fitted.needs),
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
    valid_name = re.fullmatch(r"[\w .-]+", file.stem, re.ASCII)
    if file.suffix != ".yaml" or file.parent.name != "experiment" or not valid_name:
        raise ConfigError(
            f"--out {out}: write --out DIR/experiment/NAME.yaml; NAME has letters, digits and _ . -"
        )
    if file.exists():
        raise ConfigError(f"--out {out}: exists already; name another file")
    return file


def print_fitted(fitted: FittedRecipe, out: TextIO) -> None:
    """Print every changed option with the reason, and the sizes of an update."""
    from embodied_ppo.options import batch_sizes

    lines = [f"{x.option}: {show(x.old)} -> {show(x.new)}  ({x.why})" for x in fitted.changes]
    lines = lines or ["nothing has to change"]
    sizes = [f"  {line}" for line in batch_sizes.lines(fitted.config)]
    print("\n".join([*lines, *fitted.notes, "a run:", *sizes]), file=out)
