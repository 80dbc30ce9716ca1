"""The console command: text in, typed configs to ``build``, results to stdout, one line per error."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import resource
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo import __version__
from embodied_ppo.commands import output
from embodied_ppo.commands.supervisor import supervise
from embodied_ppo.config.compose import FLAGS, PRIMARY, PROGRAM, config_dir, multirun, prepare, quoted
from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    TrainingError,
    UsageError,
    choose,
    nearest,
    one_line,
    shortened,
    show,
)

if TYPE_CHECKING:  # torch is imported inside the commands: --help answers at once
    from embodied_ppo.config.loader import Loaded

SUPERVISED = ("train", "clone", "demos", "evaluate", "export", "plan", "tune", "fit")
"""Commands that run simulators, which may crash or hang."""
UNWELL, REFUSED, FAILED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: doctor found what the default recipes miss, nothing started, the run failed, interrupted after saving."""
RUNNING = (*PRIMARY, "tune")
"""Commands that load torch and simulators to run them."""
LEAST_ADDRESS_SPACE = 1_500_000 * 1024
"""Bytes. Measured: a run of experiment=cartpole aborts in glibc or libstdc++ with 1,200,000 kB, not with 1,300,000."""
OUT_OF_MEMORY = ("can't start new thread", "can't allocate memory", "Cannot allocate memory", "failed to map segment")
"""Texts of errors of threading, torch and the dynamic loader."""
MY_CONFIGS = "my_configs"
"""Folder for what a command writes to be read as a config, unless --config-dir names one."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        flag = message.rpartition("unrecognized arguments: ")[2].split(" ")[0]
        flags = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
        near = nearest(flag, flags)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        raise UsageError(f"{message}; {hint}")


# ----------------------------------------------------------------------------------------------------------- commands
def _train(args: argparse.Namespace) -> None:
    if args.multirun:
        return _sweep(args)
    loaded = prepare(args, args.overrides)
    _train_one(loaded, args, {})
    return None


def _sweep(args: argparse.Namespace) -> None:
    """Train one run per combination; a table by arm over seeds ends the text, also where a job failed."""
    results: list[dict[str, Any]] = []
    try:
        multirun(args, lambda *job: results.append(_train_one(*job)))
    finally:
        if not args.json and len(results) > 1:
            print()
            output.print_arms(results)


def _train_one(loaded: Loaded, args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Train, print and return the summary with ``extra``."""
    _say_aliases(loaded, args)
    if loaded.config.mode == "reasoning" and loaded.config.reward.path is None:
        from embodied_ppo.rewards import graders

        graders.check_exists(loaded.config.reward.grader)
    from embodied_ppo import run
    from embodied_ppo.training.logging import process_age_s

    # the first job of a sweep includes the start of the process, like a run without a sweep
    since_s = process_age_s() if extra.get("job") else 0.0
    explicit = loaded.deliberate({FLAGS})
    with _aside():
        summary = run.train(loaded.config, explicit=explicit, quiet=args.quiet, since_s=since_s)
    _print_result({**extra, **summary}, args)
    return {**extra, **summary}


def _evaluate(args: argparse.Namespace) -> None:
    _refuse_words(args)
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import run

    with _aside():
        found = run.evaluate(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    _print_result(found, args)


def _refuse_words(args: argparse.Namespace) -> None:
    """A word alone is taken for a checkpoint, unless it is an option's name. Raises UsageError."""
    from embodied_ppo.config import loader
    from embodied_ppo.config.schema import OWN_OPTIONS

    for word in args.overrides:
        if "=" not in word and not word.startswith("~") and word not in loader.describe(OWN_OPTIONS[args.command]):
            raise UsageError(f"{word} is not of the form option=value; write checkpoint={word}")


def _demos(args: argparse.Namespace) -> None:
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import run

    with _aside():
        told = run.demos(loaded.config, quiet=args.quiet)
    if not args.json:  # there nested entries are shown, too
        told["families"] = ", ".join(f"{name} {count}" for name, count in told["families"].items()) or None
    _print_result(told, args)


def _clone(args: argparse.Namespace) -> None:
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import run

    with _aside():
        summary = run.clone(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    _print_result(summary, args)


def _export(args: argparse.Namespace) -> None:
    _refuse_words(args)
    loaded = prepare(args, args.overrides)
    from embodied_ppo import run

    with _aside():
        told = run.export(loaded.config.checkpoint, loaded.config.out)
    _print_result(told, args)


def _plan(args: argparse.Namespace) -> None:
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import run

    told = run.planned(loaded.config)
    if args.json:
        print(output.as_json(told))
    else:
        output.print_plan(told)


def _tune(args: argparse.Namespace) -> None:
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo.commands import tune

    home = Path(args.config_dir or MY_CONFIGS)
    file = tune.destination(home, loaded.config.name)
    with _aside():
        found = tune.search(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    tune.write(file, found, shlex.join([PROGRAM, "tune", *args.overrides]))
    args.config_dir, args.command = str(home), "train"
    words = [*(line for line in args.overrides if not _of_placement(line)), f"placement={file.stem}"]
    again, asked = prepare(args, words).config, found.config
    if (again.placement, again.cluster) != (asked.placement, asked.cluster):
        raise ConfigError(
            f"{file}: is written, but another file sets cluster, too, and both together are "
            f"{show(vars(again.cluster))}; take it out there"
        )
    named = ["--config-name", args.config_name] if args.config_name else []
    line = shlex.join([PROGRAM, "train", "--config-dir", str(home), *named, *words])
    told = found.told() | {"file": str(file), "command": line}
    if args.json:
        print(output.as_json(told))
    else:
        output.print_tuned(told)


def _of_placement(line: str) -> bool:
    """Whether an override is about what a tuned placement says."""
    from embodied_ppo.config.aliases import ALIASES

    key = line.lstrip("+~").partition("=")[0]
    paths = ALIASES[""].get(key, (key,))
    return any(path.partition(".")[0] in ("placement", "cluster") for path in paths)


def _fit(args: argparse.Namespace) -> None:
    loaded = prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo.commands import fit

    where = None if args.out is None else fit.destination(args.out)
    found = fit.fit(loaded.config, args.devices)
    named = ["--config-name", args.config_name] if args.config_name else []
    asked = [PROGRAM, "fit", *named, *args.overrides, "--devices", str(args.devices)]
    content = fit.text(found, shlex.join(asked))
    command = None
    if where is not None:
        file, folder, name = where
        fit.write(file, content)
        command = shlex.join([PROGRAM, "train", "--config-dir", folder, f"experiment={name}"])
    if args.json:
        changes = [vars(change) for change in found.changes]
        told = {"changes": changes, "notes": found.notes, "memory": found.memory, "file": args.out, "command": command}
        print(output.as_json(told | {"recipe": fit.settings(found.config)}))
    elif where is not None:
        output.print_fitted(found, sys.stdout)
        print(command)
    else:
        if not args.quiet:
            output.print_fitted(found, sys.stderr)
        print(content, end="")


def _doctor(args: argparse.Namespace) -> None:
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is not read by doctor; leave it out")
    from embodied_ppo.commands import doctor

    rows = doctor.examine()
    if args.json:
        print(output.as_json([vars(row) for row in rows]))
    else:
        output.print_rows(rows)
    if any(row.state == "problem" and row.needed for row in rows):
        raise SystemExit(UNWELL)


def _config(args: argparse.Namespace) -> None:
    if args.overrides and args.overrides[0] in PRIMARY:
        args.command = args.overrides.pop(0)
    elif args.config_name in PRIMARY:
        args.command = args.config_name
    loaded = prepare(args, args.overrides, check=args.command == "train", partial=True)
    rows = output.config_rows(loaded, only=args.only)
    if not rows:
        names = sorted({path.rpartition(".")[2] for path in output.config_rows(loaded)})
        near = nearest(args.only, names)
        hint = f"did you mean {near}?" if near else "leave --only out to see all"
        raise UsageError(f"--only {args.only}: no option mentions it; {hint}")
    _say_aliases(loaded, args)
    if loaded.missing and not args.quiet:
        print(
            f"yours to write, and until then nothing is checked: {', '.join(sorted(loaded.missing))}", file=sys.stderr
        )
    if args.json:
        print(output.as_json(rows))
    else:
        output.print_config(rows)


def _experiments(args: argparse.Namespace) -> None:
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is not read by experiments; leave it out")
    config_dir(args)
    found = output.experiments(args.config_dir)
    if args.json:
        print(output.as_json(found))
    else:
        output.table([[e["name"], e["description"]] for e in found])


def _import_config(args: argparse.Namespace) -> None:
    if len(args.overrides) != 2:
        raise UsageError(
            "import-config needs a framework and a file; write import-config verl FILE.yaml --out NEW.yaml"
        )
    from embodied_ppo.interop import convert

    peer, file = args.overrides
    told = convert.migrate(peer, file, args.out)
    if args.json:
        return print(output.as_json(told))
    if args.out is None:
        print(told["yaml"], end="")
    if not args.quiet:
        with contextlib.redirect_stdout(sys.stdout if args.out else sys.stderr):  # stdout is the experiment's
            output.print_migration(told)
    return None


def _watch(args: argparse.Namespace) -> None:
    from embodied_ppo.commands import watch

    with watch.listen(args.overrides or ["runs"], port=args.port) as server, contextlib.suppress(KeyboardInterrupt):
        print(output.as_json({"address": server.address}) if args.json else server.address, flush=True)
        if not args.quiet:
            print("Ctrl-C ends it", file=sys.stderr)
        server.serve_forever()


def _new_task(args: argparse.Namespace) -> None:
    from embodied_ppo.commands import new_task

    made = new_task.write(args.name, Path(args.mjcf), Path(args.out) if args.out else None)
    if args.json:
        told = {"files": list(map(str, made.files)), "assumed": made.assumed, "commands": made.commands}
        print(output.as_json(told))
    else:
        output.print_new_task(made.files, made.assumed, made.commands)


def _aside() -> contextlib.AbstractContextManager[object]:
    """Results alone go to stdout: what simulators, graders and Ray print meanwhile goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr)


def _say_aliases(loaded: Loaded, args: argparse.Namespace) -> None:
    for written, read in () if args.quiet else loaded.aliases:
        print(f"{written} is read as {read}", file=sys.stderr)


def _print_result(summary: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(output.as_json(summary), flush=True)
    else:
        output.print_summary(summary)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], str, str]] = {
    # name -> (function, one line, example)
    "train": (
        _train,
        "train a policy or, with mode=reasoning, a language model",
        "train experiment=quickstart seed=1 algorithm.gamma=0.98",
    ),
    "demos": (
        _demos,
        "record demonstrations of a task's scripted expert",
        "demos experiment=tabletop_token out=demos/reach episodes=2000",
    ),
    "clone": (
        _clone,
        "train a policy by cloning demonstrations only",
        "clone experiment=tabletop_token cloning.dataset=demos/reach",
    ),
    "evaluate": (_evaluate, "measure a checkpoint", "evaluate checkpoint=runs/NAME/DATE-SEED episodes=100"),
    "plan": (
        _plan,
        "show where a run's roles go and the memory they need",
        "plan placement=hybrid cluster.num_nodes=2",
    ),
    "tune": (
        _tune,
        "find the fastest placement on the devices there are",
        "tune experiment=tabletop_token cluster.devices_per_node=2",
    ),
    "watch": (_watch, "show runs on a local page, as they grow", "watch runs/NAME --port 8000"),
    "fit": (
        _fit,
        "rewrite a recipe for fewer devices; the same optimiser steps, in smaller parts",
        "fit experiment=tabletop_token --devices 1 --out my_configs/experiment/small.yaml",
    ),
    "doctor": (_doctor, "examine this machine: what works, what does not, the cure", "doctor"),
    "export": (_export, "write a language model for transformers", "export checkpoint=runs/NAME/DATE-SEED out=DIR"),
    "config": (_config, "show every option: value, who set it, meaning", "config experiment=quickstart --only gamma"),
    "experiments": (_experiments, "list the experiments", "experiments --json"),
    "import-config": (
        _import_config,
        "turn PPO options of RLinf, verl, ROLL or TRL into an experiment",
        "import-config verl ppo_trainer.yaml --out my_configs/experiment/mine.yaml",
    ),
    "new-task": (_new_task, "write a task for a robot of your own", "new-task my_robot --mjcf robot.xml"),
}


# -------------------------------------------------------------------------------------------------------------- texts
def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line, _) in COMMANDS.items())
    examples = "\n".join(f"  {PROGRAM} {example}" for _, _, example in COMMANDS.values())
    return (
        f"usage: {PROGRAM} COMMAND [--config-dir DIR] [--config-name NAME] [--quiet] [--json] [option=value ...]\n\n"
        f"PPO for robot policies in vectorised simulators, and for language models.\n\n"
        f"commands:\n{commands}\n\nexamples:\n{examples}\n\n"
        f"exit codes: 0 done, {UNWELL} doctor found a problem, "
        f"{REFUSED} refused (nothing started), {FAILED} the run failed, {INTERRUPTED} interrupted"
    )


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is no number >= 1")
    return int(text)


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Raises UsageError; SystemExit for --help."""
    name = argv[0]
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"{name}: no such {kind}; {choose(name, list(COMMANDS), 'commands: ')}")
    _, line, example = COMMANDS[name]
    own = output.own_options(name)
    parser = _Parser(
        prog=f"{PROGRAM} {name}",
        description=line,
        epilog="\n\n".join([*([own] if own else []), f"example: {PROGRAM} {example}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if name == "new-task":
        parser.add_argument("name", metavar="NAME", help="of the task's module; its class is in CamelCase")
        parser.add_argument("--mjcf", metavar="FILE", required=True, help="the robot, in MuJoCo's XML")
        parser.add_argument("--out", metavar="DIR", help="where to write (default: ./NAME)")
        parser.add_argument("--json", action="store_true", help="what was written and assumed as JSON")
        return parser.parse_args(list(argv[1:]))
    if name == "import-config":
        parser.add_argument(
            "overrides", nargs="*", metavar="FRAMEWORK FILE", help="rlinf, verl, roll or trl; its YAML or overrides"
        )
        parser.add_argument("--out", metavar="FILE", help="the experiment to write, a new file (default: stdout)")
    elif name == "watch":
        parser.add_argument("overrides", nargs="*", metavar="RUN", help="run directories, or folders of runs (runs)")
        parser.add_argument("--port", type=int, default=0, help="of the page (default: a free one)")
    else:
        see = f"see `{PROGRAM} config{f' {name}' if name in PRIMARY else ''}`"
        parser.add_argument("overrides", nargs="*", type=quoted, metavar="option=value", help=see)
        parser.add_argument("--config-dir", metavar="DIR", help="your own configs; searched before those that ship")
    parser.add_argument("--json", action="store_true", help="results as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(command="train" if name == "config" else name, config_name=None, multirun=False, only=None)
    if name not in ("experiments", "import-config", "watch", "doctor"):
        parser.add_argument("--config-name", metavar="NAME", help="primary config (default: the command's)")
    if name == "train":
        parser.add_argument("-m", "--multirun", action="store_true", help="one run per combination of a=1,2 b=3,4")
    if name == "fit":
        parser.add_argument("--devices", type=_count, metavar="N", required=True, help="devices of one machine")
        parser.add_argument("--out", metavar="DIR/experiment/NAME.yaml", help="file to write (default: to stdout)")
    if name == "config":
        parser.add_argument("--only", metavar="TEXT", help="options whose name or meaning holds this text")
    return parser.parse_intermixed_args(list(argv[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without ``argv`` the process's own, which is then supervised."""
    if argv is None:
        argv = sys.argv[1:]
        if argv and argv[0] in SUPERVISED and not {"-h", "--help"} & {*argv}:
            return supervise(lambda: _main(argv))
    return _main(list(argv))


def _main(argv: list[str]) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this (>&-): nobody reads
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        if not argv:
            raise UsageError(f"no command; commands: {', '.join(COMMANDS)}; see {PROGRAM} --help")
        if argv[0] in ("-h", "--help", "help") or argv == ["--version"]:
            print(f"{PROGRAM} {__version__}" if argv == ["--version"] else _help(), flush=True)
            return 0
        args = _parse_arguments(argv)
        try:
            sys.path.append(os.getcwd())  # where env.id=my_module:MyTask-v0 looks
        except FileNotFoundError as e:
            raise UsageError("the current folder has been deleted; change to one that is there") from e
        if argv[0] in RUNNING:
            _check_address_space()
        COMMANDS[argv[0]][0](args)
        sys.stdout.flush()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError as e:
        if argv[0] in PRIMARY:
            return _report(e)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever reads has read enough: .. | head
        return 0
    except Exception as e:  # the top of the program: whatever came this far becomes its last line and exit code
        return _report(e)
    return 0


def _check_address_space() -> None:
    """Refuse a limit (``ulimit -v``) under which the C libraries abort the process. Raises UsageError."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise UsageError(
            f"ulimit -v is {limit // 1024}: torch and its threads need at least {LEAST_ADDRESS_SPACE // 1024} kB of "
            "address space; raise it, or write ulimit -v unlimited"
        )


def _out_of_memory(error: BaseException) -> bool:
    """Whether the system refused memory or a thread, which libraries raise as different types."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, (RuntimeError, ImportError)):
        return any(text in str(error) for text in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def _report(error: Exception) -> int:
    """Print the last line, return the exit code."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)
        longest = max(path.split("/"), key=len)
        shown = path.replace(longest, f"{longest[:20]}..") if len(longest) > 255 else f"{path[:60]}.."
        limit = f"a part of it has {len(os.fsencode(longest))} bytes, the limit is 255" * (len(longest) > 255)
        error = UsageError(f"{shown}: is too long for a path ({limit or error.strerror}); shorten it")
    if isinstance(error, (UsageError, ConfigError, PlacementError, CheckpointError, EnvError)):
        print(shortened(f"error: {one_line(error)}"), file=sys.stderr)
        return REFUSED
    if _out_of_memory(error):
        error = TrainingError(
            f"out of memory ({one_line(error, kind=True)}); embodied-ppo plan tells what a run needs; lower "
            "env.num_envs or algorithm.horizon"
        )
    if not isinstance(error, TrainingError):
        traceback.print_exception(error)
        error = RuntimeError(one_line(error, kind=True))
    first, _, _ = str(error).partition("\n")  # what follows (stacks of other processes) the log has told
    print(f"error: {first}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
