"""`embodied-ppo import-policy`: turn a trained policy of another library into a run.

Example: import-policy sb3 model.zip normalizer=vec_normalize.pkl experiment=halfcheetah
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import choose, show
from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import prepare

NAMES = ("sb3", "rsl_rl", "cleanrl")  # Libraries, which ``tools.import_policy.libraries`` reads
IMPORT_OPTIONS = ("normalizer", "critic")  # options that are read here and are no options of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_override_arguments(
        parser,
        "import-policy",
        metavar="LIBRARY FILE | option=value",
        meaning=f"{', '.join(NAMES)}; its checkpoint; normalizer=FILE of a library that keeps the"
        " normaliser of observations apart; critic=new for an untrained value function; then"
        " options of the run (for example experiment, env.id, run_dir)",
    )


def run(args: argparse.Namespace) -> None:
    """Import a policy; print the run, the options that follow from the file, and notes."""
    if len(args.overrides) < 2:
        raise UsageError(
            "import-policy needs a library and a file; write import-policy sb3 model.zip"
            " experiment=NAME"
        )
    library, file, *lines = args.overrides
    if library not in NAMES:
        hint = choose(library, list(NAMES), "known: ")
        raise UsageError(f"import-policy {library}: no such library; {hint}")
    if malformed := [line for line in lines if "=" not in line]:
        raise UsageError(f"{malformed[0]} is not of the form option=value")
    own = dict(x.split("=", 1) for x in lines if x.partition("=")[0] in IMPORT_OPTIONS)
    if own.get("critic", "new") != "new":
        raise UsageError(f"critic={own['critic']}: must be new; remove it to import the critic")
    lines = [line for line in lines if line.partition("=")[0] not in IMPORT_OPTIONS]
    loaded = prepare(args, lines, check=False)
    from embodied_ppo.tools.import_policy.imported_run import import_policy

    options = {"critic": "critic" not in own, "quiet": args.quiet}
    options["normalizer"] = Path(own["normalizer"]) if "normalizer" in own else None
    with output.stdout_to_stderr():
        result = import_policy(loaded, library, Path(file), **options)
    output.print_result(result, args, print_import)


def print_import(result: Mapping[str, Any]) -> None:
    """Print the options that follow from the file, the notes and the next commands."""
    options = [[name, show(value)] for name, value in result["options"].items()]
    output.table([["option", "from the file"], *options])
    print()
    for note in result["notes"]:
        print(f"note: {note}")
    print(f"run: {result['run_dir']}")
    print(f"evaluate: embodied-ppo evaluate checkpoint={result['run_dir']}")
    print(f"continue training: embodied-ppo train resume={result['run_dir']}")
