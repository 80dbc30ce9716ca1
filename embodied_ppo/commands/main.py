"""The console command: run the command's module, print one line per error, return an exit code.

To add a command, write its module (``add_arguments`` and ``run``), then add an entry to
``COMMANDS`` and a case to ``load``.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from embodied_ppo import __version__
from embodied_ppo.commands.arguments import Parser, describe_own_options
from embodied_ppo.commands.exit_codes import FAILED, INTERRUPTED, PROBLEM_FOUND, REFUSED
from embodied_ppo.commands.supervisor import supervise
from embodied_ppo.config.compose import PRIMARY, PROGRAM
from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    TrainingError,
    UsageError,
    choose,
    one_line,
    shorten,
)

LOADING_TORCH = (
    *PRIMARY,
    *("compare", "fork", "replay", "bisect", "import-policy", "search", "tune", "verify"),
)
"""Commands that load torch and simulators to run them."""
MIN_ADDRESS_SPACE = 1_500_000 * 1024
"""Smallest allowed address space in bytes.

With experiment=cartpole, glibc or libstdc++ abort the process with 1,200,000 kB, but not with
1,300,000 kB."""
OUT_OF_MEMORY = (
    "can't start new thread",
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment",
)
"""Messages of threading, torch and the dynamic loader when memory is exhausted."""


class Command(Protocol):
    """The module of a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        ...

    def run(self, args: argparse.Namespace) -> int | None:
        """Run the command and print its result; return the exit code, None for 0."""
        ...


@dataclass(frozen=True)
class Entry:
    """A command in the table.

    Attributes:
        summary: One line for --help.
        example: Arguments of an example for --help.
        supervised: Whether the command runs simulators, which may crash or hang.
    """

    summary: str
    example: str
    supervised: bool = False


COMMANDS = {
    "train": Entry(
        "train a policy or, with mode=reasoning, a language model",
        "train experiment=quickstart seed=1 algorithm.gamma=0.98",
        supervised=True,
    ),
    "demos": Entry(
        "record demonstrations of a task's scripted expert",
        "demos experiment=tabletop_token out=demos/reach episodes=2000",
        supervised=True,
    ),
    "clone": Entry(
        "train a policy by cloning demonstrations only",
        "clone experiment=tabletop_token cloning.dataset=demos/reach",
        supervised=True,
    ),
    "distill": Entry(
        "train a student to act as a trained teacher, from other observations",
        "distill teacher=runs/NAME/DATE-SEED experiment=tabletop_pixels",
        supervised=True,
    ),
    "evaluate": Entry(
        "measure a checkpoint",
        "evaluate checkpoint=runs/NAME/DATE-SEED episodes=100",
        supervised=True,
    ),
    "compare": Entry(
        "compare trained policies on the same initial states",
        "compare runs/A runs/B episodes=100",
        supervised=True,
    ),
    "fork": Entry(
        "train a branch of a run from one of its updates, with changed options",
        "fork runs/NAME/DATE-SEED update=40 algorithm.lr=1e-4",
        supervised=True,
    ),
    "replay": Entry(
        "recreate the rollout and the minibatches of an update",
        "replay runs/NAME/DATE-SEED update=40 out=DIR",
        supervised=True,
    ),
    "bisect": Entry(
        "find the update, minibatch and samples where a condition on a metric first held",
        'bisect runs/NAME/DATE-SEED "policy/approx_kl > 0.1"',
        supervised=True,
    ),
    "verify": Entry(
        "re-execute updates and check a run against its recorded metrics and digests",
        "verify runs/NAME/DATE-SEED --updates 5",
        supervised=True,
    ),
    "search": Entry(
        "train several sets of options (trials), continue only the best third at each stage",
        "search experiment=hopper --budget 30min",
        supervised=True,
    ),
    "benchmark": Entry(
        "train and measure methods on tabletop-bench; a table and a page",
        "benchmark out=runs/benchmark methods=[clone,ppo_token]",
        supervised=True,
    ),
    "plan": Entry(
        "show the devices of a run's roles and the memory they need",
        "plan placement=hybrid cluster.num_nodes=2",
        supervised=True,
    ),
    "tune": Entry(
        "find the fastest placement on the available devices",
        "tune experiment=tabletop_token cluster.devices_per_node=2",
        supervised=True,
    ),
    "watch": Entry("show runs on a local page while they train", "watch runs/NAME --port 8000"),
    "fit": Entry(
        "rewrite a recipe for fewer devices; the same optimiser steps, in smaller parts",
        "fit experiment=tabletop_token --devices 1 --out my_configs/experiment/small.yaml",
        supervised=True,
    ),
    "doctor": Entry("check this machine: what works, what does not, the cure", "doctor"),
    "export": Entry(
        "write a robot policy for ONNX Runtime, or a language model for transformers",
        "export checkpoint=runs/NAME/DATE-SEED out=DIR",
        supervised=True,
    ),
    "config": Entry(
        "show every option: value, source, meaning",
        "config experiment=quickstart --only gamma",
    ),
    "experiments": Entry("list the experiments", "experiments --json"),
    "import-config": Entry(
        "turn PPO options of RLinf, verl, ROLL or TRL into an experiment",
        "import-config verl ppo_trainer.yaml --out my_configs/experiment/mine.yaml",
    ),
    "import-policy": Entry(
        "turn a trained policy of another library into a run",
        "import-policy sb3 model.zip normalizer=vec_normalize.pkl experiment=halfcheetah",
        supervised=True,
    ),
    "new-task": Entry("write a task for your own robot", "new-task my_robot --mjcf robot.xml"),
}
"""Name of each command -> entry. ``load`` imports the module."""


def load(name: str) -> Command:
    """Import the module of a command; only one is imported, because --help must be fast."""
    match name:
        case "train":
            from embodied_ppo.commands import train as command
        case "demos":
            from embodied_ppo.commands import demos as command
        case "clone":
            from embodied_ppo.commands import clone as command
        case "distill":
            from embodied_ppo.commands import distill as command
        case "evaluate":
            from embodied_ppo.commands import evaluate as command
        case "compare":
            from embodied_ppo.commands import compare as command
        case "fork":
            from embodied_ppo.commands import fork as command
        case "replay":
            from embodied_ppo.commands import replay as command
        case "bisect":
            from embodied_ppo.commands import bisect as command
        case "verify":
            from embodied_ppo.commands import verify as command
        case "search":
            from embodied_ppo.commands import search as command
        case "benchmark":
            from embodied_ppo.commands import benchmark as command
        case "plan":
            from embodied_ppo.commands import plan as command
        case "tune":
            from embodied_ppo.commands import tune as command
        case "watch":
            from embodied_ppo.commands import watch as command
        case "fit":
            from embodied_ppo.commands import fit as command
        case "doctor":
            from embodied_ppo.commands import doctor as command
        case "export":
            from embodied_ppo.commands import export as command
        case "config":
            from embodied_ppo.commands import config as command
        case "experiments":
            from embodied_ppo.commands import experiments as command
        case "import-config":
            from embodied_ppo.commands import import_config as command
        case "import-policy":
            from embodied_ppo.commands import import_policy as command
        case "new-task":
            from embodied_ppo.commands import new_task as command
        case _:
            kind = "flag" if name.startswith("-") else "command"
            raise UsageError(
                f"{name}: no such {kind}; {choose(name, list(COMMANDS), 'commands: ')}"
            )
    return command


# ---------------------------------------------------------------------------------------- arguments
def _help() -> str:
    """Return the text of --help."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items())
    examples = "\n".join(f"  {PROGRAM} {entry.example}" for entry in COMMANDS.values())
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
    command, entry, own = load(name), COMMANDS[name], describe_own_options(name)
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        description=entry.summary,
        epilog="\n\n".join([*([own] if own else []), f"example: {PROGRAM} {entry.example}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.set_defaults(command=name, config_name=None, execute=command.run)
    return parser.parse_intermixed_args(list(argv[1:]))


# --------------------------------------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments. None selects those of the process, and then commands that run
            simulators are supervised by a parent process.
    """
    if argv is None:
        argv = sys.argv[1:]
        supervised = bool(argv) and argv[0] in COMMANDS and COMMANDS[argv[0]].supervised
        if supervised and not {"-h", "--help"} & {*argv}:
            return supervise(lambda: _main(argv))
    return _main(list(argv))


def _main(argv: list[str]) -> int:
    """Run a command; report errors and return its exit code."""
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
        if argv[0] in LOADING_TORCH:
            _check_address_space()
        code = args.execute(args)
        sys.stdout.flush()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError as e:
        if argv[0] in PRIMARY:
            return _report(e)
        # The reader of the pipe has ended (.. | head), which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as e:  # the top of the program: every error has a last line and an exit code
        return _report(e)
    return code or 0


def _check_address_space() -> None:
    """Raise UsageError for a limit (``ulimit -v``) with which the C libraries abort the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise UsageError(
            f"ulimit -v is {limit // 1024}: torch and its threads need at least "
            f"{MIN_ADDRESS_SPACE // 1024} kB of address space; raise it, or write ulimit -v "
            "unlimited"
        )


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
        error = _path_error(error)
    if isinstance(error, (UsageError, ConfigError, PlacementError, CheckpointError, EnvError)):
        print(shorten(f"error: {one_line(error)}"), file=sys.stderr)
        return REFUSED
    if _out_of_memory(error):
        error = TrainingError(
            f"out of memory ({one_line(error, kind=True)}); embodied-ppo plan shows what a run "
            "needs; lower env.num_envs or algorithm.horizon"
        )
    if not isinstance(error, TrainingError):
        traceback.print_exception(error)
        error = RuntimeError(one_line(error, kind=True))
    # The log has the other lines, such as stacks of other processes.
    first_line = str(error).partition("\n")[0]
    print(f"error: {first_line}", file=sys.stderr)
    return FAILED


def _path_error(error: OSError) -> UsageError:
    """Return the error of a path that is too long, with a shortened path."""
    path = str(error.filename)
    longest = max(path.split("/"), key=len)
    if len(longest) > 255:
        path = path.replace(longest, f"{longest[:20]}..")
        reason = f"a part of it has {len(os.fsencode(longest))} bytes, the limit is 255"
    else:
        path, reason = f"{path[:60]}..", error.strerror
    return UsageError(f"{path}: is too long for a path ({reason}); shorten it")


if __name__ == "__main__":
    sys.exit(main())
