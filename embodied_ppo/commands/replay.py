"""`embodied-ppo replay`: recreate the rollout and the minibatches of an update.

Example: replay runs/NAME/DATE-SEED update=40 out=DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_runs(
        parser,
        "RUN update=N out=DIR",
        "the run, the update (from 1), and the folder for update_N.pt",
    )


def run(args: argparse.Namespace) -> None:
    """Recreate an update; print the path and the shapes of its tensors."""
    path, values, lines = arguments.split_run(args.items, "replay", ("update", "out"))
    update = arguments.whole_number(values, "update", "replay")
    if not values.get("out"):
        hint = "write out=DIR, the folder for the tensors (embodied_ppo.replay returns them)"
        raise UsageError(f"no out; {hint}")
    arguments.refuse_lines(lines, "replay")
    from embodied_ppo.tools.update_replay import replay

    with output.stdout_to_stderr():
        result = replay(path, update=update, out=values["out"], progress=not args.quiet)
    shapes = {name: list(x.shape) for name, x in result.rollout.items()}
    content = {
        "file": str(Path(values["out"]) / f"update_{update:06d}.pt"),
        "update": update,
        "rollout": shapes,
        "minibatches": len(result.minibatches),
        "exact": not result.differences,
        "differences": result.differences,
        "notes": result.notes,
    }
    if args.json:
        print(output.as_json(content), flush=True)
        return
    output.table([["tensor", "shape"], *([name, str(x)] for name, x in shapes.items())])
    exact = "equal to the run" if content["exact"] else "NOT equal to the run"
    print(f"\n{len(result.minibatches)} minibatches; metrics are {exact}")
    print(f"file: {content['file']}")
