"""Arguments that several commands share, and the checks of them."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import nearest, show
from embodied_ppo.commands import output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import PROGRAM, prepare, quoted
from embodied_ppo.options.config_folders import PRIMARY
from embodied_ppo.training.run_files import check_exists

if TYPE_CHECKING:
    from embodied_ppo.options.loader import Loaded


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
    primary = "primary config (default: the command's)"
    parser.add_argument("--config-name", metavar="NAME", help=primary)


def add_override_arguments(
    parser: argparse.ArgumentParser, command: str, metavar: str = "option=value", meaning: str = ""
) -> None:
    """Add option=value, --config-dir, --json and --quiet."""
    see = meaning or f"see `{PROGRAM} config{f' {command}' if command in PRIMARY else ''}`"
    parser.add_argument("overrides", nargs="*", type=quoted, metavar=metavar, help=see)
    folder = "folder of your own configs; searched before the shipped configs"
    parser.add_argument("--config-dir", metavar="DIR", help=folder)
    add_output_arguments(parser)


def add_port(parser: argparse.ArgumentParser) -> None:
    """Add --port of a page."""
    parser.add_argument("--port", type=int, default=0, help="of the page (default: a free one)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --quiet."""
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--quiet", action="store_true", help="print no progress to stderr")


def config_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of a command line that choose the configs."""
    flags = ["--config-dir", args.config_dir] if args.config_dir else []
    return flags + (["--config-name", args.config_name] if args.config_name else [])


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and low <= int(text[:18]) <= high):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low} to {high:,}")
        return int(text)

    return parse


def add_runs(parser: argparse.ArgumentParser, metavar: str, meaning: str) -> None:
    """Add runs and lines option=value, see ``split_runs``, and the arguments of the output."""
    parser.add_argument("items", nargs="*", metavar=metavar, help=meaning)
    add_output_arguments(parser)


def split_runs(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide arguments into runs and lines option=value."""
    # The folder of a sweep's job has an equals sign in its name.
    runs = [text for text in items if "=" not in text or os.path.exists(text)]
    return runs, [quoted(text) for text in items if text not in runs]


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
    own_lines = [x for x in items if x.partition("=")[0] in own_options and "=" in x]
    runs, lines = split_runs([x for x in items if x not in own_lines])
    if len(runs) != 1:
        given = f"{len(runs)} runs ({', '.join(runs)})" if runs else "no run"
        raise UsageError(f"{given}; write {PROGRAM} {command} RUN")
    check_run(runs[0])
    return runs[0], dict(line.split("=", 1) for line in own_lines), lines


def whole_number(
    values: Mapping[str, str], name: str, command: str, default: str | None = None
) -> int:
    """Return an option of ``split_run`` as a number. Raises UsageError."""
    text = values.get(name, default)
    if text is None:
        raise UsageError(f"no {name}; write {PROGRAM} {command} RUN {name}=N")
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name}={text}: is not a whole number from 0; write {name}=N")
    return int(text)


def refuse_lines(lines: Sequence[str], command: str) -> None:
    """Raise UsageError if a command is given an argument that it does not read."""
    if lines:
        raise UsageError(f"{command} ignores {lines[0]}; remove it")


def check_run(path: str) -> None:
    """Raise UsageError if the directory of a run does not exist, before torch is loaded."""
    if not os.path.exists(path):
        raise UsageError(f"{path}: does not exist; name the directory of a run")


def resolve(args: argparse.Namespace) -> Loaded:
    """Return the options of a command; check what they name before torch is loaded.

    Raises:
        UsageError: An argument has no ``=`` and is probably a checkpoint's path.
        ConfigError, PlacementError, CheckpointError: An option is refused, or the checkpoint that
            it names does not exist.
    """
    from embodied_ppo.options import loader
    from embodied_ppo.options.schema import OWN_OPTIONS

    if args.command in OWN_OPTIONS:
        options = loader.describe(OWN_OPTIONS[args.command])
        needed = "checkpoint" if "checkpoint" in options else "out"
        for text in args.overrides:
            if "=" not in text and not text.startswith("~") and text not in options:
                raise UsageError(f"{text} is not of the form option=value; write {needed}={text}")
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    # Those of a run that is resumed are checked when it needs them.
    if not getattr(loaded.config, "resume", None):
        for option in ("checkpoint", "teacher", "initial_policy"):
            if path := getattr(loaded.config, option, None):
                check_exists(path, option)
    return loaded


def describe_own_options(command: str) -> str:
    """Return the options that only this command has, with defaults and meanings, for its --help.

    The result is empty for a command without options of its own. Options inside a section are left
    out; the command ``config`` lists them.
    """
    from embodied_ppo.options.loader import describe
    from embodied_ppo.options.readers import readers
    from embodied_ppo.options.schema import OWN_OPTIONS

    if command not in OWN_OPTIONS:
        return ""
    cls = OWN_OPTIONS[command]
    rows = []
    for o in (option for option in describe(cls).values() if "." not in option.path):
        reader = readers(cls)[o.path]
        needed = "; ".join(condition.text for condition in reader.conditions)
        meaning = f"({reader.mode}) " if reader.mode else ""
        meaning += " ".join(o.meaning.split()) + (f" (with {needed})" if needed else "")
        rows.append([f"{o.path}={show(o.default)}", meaning])
    lines = output.layout(rows, min(120, shutil.get_terminal_size().columns) - 2)
    return "\n".join(["own options, with their defaults:", *(f"  {line}" for line in lines)])
