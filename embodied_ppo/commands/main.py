"""The console command: run the command's module, print one line per error, return an exit code.

To add a command, write its module (``add_arguments`` and ``run``) and add it to ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from embodied_envs.base import errors
from embodied_ppo import __version__
from embodied_ppo.commands import supervisor
from embodied_ppo.commands.arguments import Parser, describe_own_options
from embodied_ppo.commands.exit_codes import FAILED, INTERRUPTED, PROBLEM_FOUND, REFUSED
from embodied_ppo.core.errors import SELF_EXPLANATORY, UsageError
from embodied_ppo.options.compose import PROGRAM
from embodied_ppo.options.config_folders import PRIMARY

# Messages of threading, torch and the dynamic loader when memory is exhausted.
OUT_OF_MEMORY = (
    "can't start new thread",
    "Resource temporarily unavailable",  # of EnvPool: a thread
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",
)


# Each of them has a module, whose docstring has its description and an example.
COMMANDS = (
    *("train", "demos", "clone", "distill", "evaluate", "compare", "fork", "replay", "bisect"),
    *("verify", "plan", "watch", "play", "fit", "doctor", "export", "serve", "config"),
    *("experiments", "import-config", "import-policy", "new-task"),
)
# Commands of earlier versions -> what to write instead.
REMOVED = {
    "search": "write python scripts/examples/search_options.py, which uses Optuna",
    "tune": "write train --multirun --jobs 1 placement=local,fused (docs/placement.md)",
}
# Commands that run no simulators, which may crash or hang.
UNSUPERVISED = ("watch", "doctor", "config", "experiments", "import-config", "new-task")


# ---------------------------------------------------------------------------------------- arguments
def _description(name: str) -> tuple[str, str]:
    """Return what a command does, and an example, from its module, which is not imported."""
    with Path(__file__).with_name(f"{name.replace('-', '_')}.py").open(encoding="utf-8") as source:
        summary, _, example = (source.readline().strip() for _ in range(3))
    return summary.partition("`: ")[2].removesuffix("."), example.removeprefix("Example: ")


def _help() -> str:
    """Return the text of --help."""
    width, described = max(map(len, COMMANDS)), {name: _description(name) for name in COMMANDS}
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (text, _) in described.items())
    examples = "\n".join(f"  {PROGRAM} {example}" for _, example in described.values())
    return (
        f"usage: {PROGRAM} COMMAND [--config-dir DIR] [--config-name NAME] [--quiet] [--json] "
        f"[option=value ...]\n\n"
        f"PPO for robot policies in vectorised simulators, and for language models.\n\n"
        f"commands:\n{commands}\n\nexamples:\n{examples}\n\n"
        f"exit codes: 0 done, {PROBLEM_FOUND} doctor found a problem or verify a difference, "
        f"{REFUSED} refused (nothing started), {FAILED} the run failed, {INTERRUPTED} interrupted"
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the name of a command and its arguments.

    Returns:
        The arguments; ``command`` is the name, ``execute`` the function ``run`` of the module.

    Raises:
        UsageError: An argument is unknown or malformed.
        SystemExit: After --help.
    """
    name = argv[0]
    if name in REMOVED:
        raise UsageError(f"{REMOVED[name]}: {name} was removed")
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"{name}: no such {kind}; {errors.choose(name, COMMANDS, 'commands: ')}")
    # Only one module is imported, because --help must be fast.
    command = importlib.import_module(f"embodied_ppo.commands.{name.replace('-', '_')}")
    own, (summary, example) = describe_own_options(name), _description(name)
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        description=summary,
        epilog="\n\n".join([*([own] if own else []), f"example: {PROGRAM} {example}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.set_defaults(command=name, config_name=None, execute=command.run)
    return parser.parse_intermixed_args(list(argv[1:]))


# --------------------------------------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, report errors and return its exit code.

    Args:
        argv: The arguments. None selects those of the process, and then commands that run
            simulators are supervised by a parent process.
    """
    # While torch is imported, full collections are a tenth of the start. Those of young objects
    # stay frequent: closed simulators in reference cycles would otherwise accumulate in long runs.
    gc.set_threshold(700, 10, 100)
    own, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    if own and argv and argv[0] in COMMANDS and argv[0] not in UNSUPERVISED:
        if not {"-h", "--help"} & {*argv}:
            return supervisor.supervise(partial(main, argv))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process has closed it (>&-)
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        if not argv:
            raise UsageError(f"no command; commands: {', '.join(COMMANDS)}; see {PROGRAM} --help")
        if argv[0] in ("-h", "--help", "help") or argv == ["--version"]:
            print(f"{PROGRAM} {__version__}" if argv == ["--version"] else _help(), flush=True)
            return 0
        args = parse_arguments(argv)
        try:
            sys.path.append(os.getcwd())  # env.id=my_module:MyTask-v0 is imported from here
        except FileNotFoundError as e:
            message = "the current folder has been deleted; change to an existing one"
            raise UsageError(message) from e
        code = args.execute(args)
        sys.stdout.flush()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError as e:
        if argv[0] in PRIMARY:
            return _report(e)
        # The reader of the pipe has ended (.. | head), which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:  # the top of the program: every error has a last line and an exit code
        # ctypes replaces a KeyboardInterrupt in the conversion of an argument by its own error.
        return _interrupted() if supervisor.is_interrupted else _report(e)
    return code or 0


def _interrupted() -> int:
    print("error: interrupted", file=sys.stderr)
    return INTERRUPTED


def _out_of_memory(error: BaseException) -> bool:
    """Return whether the system refused memory or a thread; libraries raise different types."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (RuntimeError, ImportError)):
        return any(text in str(error) for text in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def _report(error: Exception) -> int:
    """Print the last line and return the exit code."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)
        longest = max(len(os.fsencode(part)) for part in path.split("/"))
        reason = f"a part of it has {longest} bytes, the limit is 255"
        error = UsageError(
            f"shorten the path {path}: it is too long"
            f" ({reason if longest > 255 else error.strerror})"
        )
    if isinstance(error, (UsageError, *SELF_EXPLANATORY)):
        print(errors.fit_message(f"error: {errors.one_line(error)}"), file=sys.stderr)
        return REFUSED
    if _out_of_memory(error):
        cause = errors.one_line(error, kind=True)
        error = errors.TrainingError(
            f"out of memory ({cause}); embodied-ppo plan shows what a run needs; lower env.num_envs"
            " or algorithm.horizon"
        )
    if not isinstance(error, errors.TrainingError):
        traceback.print_exception(error)
        error = RuntimeError(errors.one_line(error, kind=True))
    # The log has the other lines, such as stacks of other processes.
    first_line = str(error).partition("\n")[0]
    print(f"error: {first_line}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
