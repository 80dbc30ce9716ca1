"""Arguments that several commands share, and the checks of them."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied_ppo.config.compose import PRIMARY, PROGRAM, quoted
from embodied_ppo.core.errors import UsageError, nearest, show
from embodied_ppo.training.run_files import check_exists


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UsageError with the nearest valid flag."""

    def error(self, message: str) -> Any:
        flag = message.rpartition("unrecognized arguments: ")[2].split(" ")[0]
        flags = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
        near = nearest(flag, flags)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        raise UsageError(f"{message}; {hint}")


def add_config_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of a command that reads a configuration."""
    add_override_arguments(parser, command)
    parser.add_argument(
        "--config-name", metavar="NAME", help="primary config (default: the command's)"
    )


def add_override_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add option=value, --config-dir, --json and --quiet."""
    see = f"see `{PROGRAM} config{f' {command}' if command in PRIMARY else ''}`"
    parser.add_argument("overrides", nargs="*", type=quoted, metavar="option=value", help=see)
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        help="folder of your own configs; searched before the shipped configs",
    )
    add_output_arguments(parser)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --quiet."""
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress to stderr")


def split_run(
    items: Sequence[str], command: str, own_options: Sequence[str] = ()
) -> tuple[str, dict[str, str], list[str]]:
    """Return the run, the command's own options, and the other lines option=value.

    Args:
        items: Arguments of the command line.
        command: Name of the command, for messages.
        own_options: Names of the options that only this command has.

    Raises:
        UsageError: There is not exactly one run, or it does not exist.
    """
    # The folder of a sweep's job has an equals sign in its name.
    own_lines = [x for x in items if x.partition("=")[0] in own_options and "=" in x]
    other_items = [x for x in items if x not in own_lines]
    runs = [x for x in other_items if "=" not in x or Path(x).exists()]
    if len(runs) != 1:
        given = f"{len(runs)} runs ({', '.join(runs)})" if runs else "no run"
        raise UsageError(f"{given}; write {PROGRAM} {command} RUN ..")
    check_run(runs[0])
    values = dict(line.split("=", 1) for line in own_lines)
    return runs[0], values, [x for x in other_items if x not in runs]


def whole_number(values: Mapping[str, str], name: str, command: str) -> int:
    """Return an option of ``split_run`` as a number. Raises UsageError."""
    if name not in values:
        raise UsageError(f"no {name}; write {PROGRAM} {command} RUN {name}=N")
    if not values[name].isascii() or not values[name].isdigit():
        raise UsageError(f"{name}={values[name]}: is not a whole number from 0; write {name}=N")
    return int(values[name])


def check_run(path: str) -> None:
    """Raise UsageError if the directory of a run does not exist, before torch is loaded."""
    if not Path(path).exists():
        raise UsageError(f"{path}: does not exist; name the directory of a run")


def check_checkpoints(config: Any) -> None:
    """Check that the checkpoints that a config names exist, before torch is loaded.

    Those of a run that is resumed are checked when it needs them.

    Raises:
        CheckpointError: One does not exist.
    """
    if getattr(config, "resume", None):
        return
    for option in ("checkpoint", "teacher", "initial_policy"):
        if path := getattr(config, option, None):
            check_exists(path, option)


def reject_overrides(args: argparse.Namespace) -> None:
    """Raise UsageError if a command that reads no options is given one."""
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is not read by {args.command}; leave it out")


def reject_paths(args: argparse.Namespace) -> None:
    """Raise UsageError for an argument without ``=``, which is probably a checkpoint's path."""
    from embodied_ppo.config import loader
    from embodied_ppo.config.schema import OWN_OPTIONS

    options = loader.describe(OWN_OPTIONS[args.command])
    needed = "checkpoint" if "checkpoint" in options else "out"
    for text in args.overrides:
        if "=" not in text and not text.startswith("~") and text not in options:
            raise UsageError(f"{text} is not of the form option=value; write {needed}={text}")


def describe_own_options(command: str) -> str:
    """Return the options that only this command has, with defaults and meanings, for its --help.

    The result is empty for a command without options of its own. Options inside a section are left
    out; the command ``config`` lists them.
    """
    from embodied_ppo.config.loader import describe
    from embodied_ppo.config.schema import OWN_OPTIONS

    if command not in OWN_OPTIONS:
        return ""
    options = [o for o in describe(OWN_OPTIONS[command]).values() if "." not in o.path]
    rows = [(f"{o.path}={show(o.default)}", " ".join(o.meaning.split())) for o in options]
    name_width = max(len(name) for name, _ in rows)
    terminal_width = min(120, shutil.get_terminal_size().columns)
    meaning_width = max(40, terminal_width - name_width - 4)
    lines = ["own options, with their defaults:"]
    for name, meaning in rows:
        first, *others = textwrap.wrap(meaning, meaning_width, break_on_hyphens=False)
        lines.append(f"  {name:<{name_width}}  {first}")
        lines += [" " * (name_width + 4) + line for line in others]
    return "\n".join(lines)
