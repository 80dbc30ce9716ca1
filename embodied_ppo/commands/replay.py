"""`embodied-ppo replay`: recreate the rollout and the minibatches of an update."""

from __future__ import annotations

import argparse
from pathlib import Path

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN update=N out=DIR",
        help="the run, the update (from 1), and the folder for update_N.pt and update_N.json",
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Recreate an update; print the path and the shapes of its tensors."""
    path, values, lines = arguments.split_run(args.items, "replay", ("update", "out"))
    update = arguments.whole_number(values, "update", "replay")
    if not values.get("out"):
        raise UsageError(
            "no out; write out=DIR, the folder for the tensors (embodied_ppo.replay returns them)"
        )
    if lines:
        raise UsageError(f"{lines[0]}: is not read by replay; leave it out")
    from embodied_ppo import api

    with output.stdout_to_stderr():
        replay = api.replay(path, update=update, out=values["out"], progress=not args.quiet)
    shapes = {name: list(x.shape) for name, x in replay.rollout.items()}
    content = {
        "file": str(Path(values["out"]) / f"update_{update:06d}.pt"),
        "update": update,
        "rollout": shapes,
        "minibatches": len(replay.minibatches),
        "exact": not replay.differences,
        "differences": replay.differences,
        "notes": replay.notes,
    }
    if args.json:
        print(output.as_json(content), flush=True)
        return
    output.table([["tensor", "shape"], *([name, str(x)] for name, x in shapes.items())])
    exact = "equal to the run" if content["exact"] else "NOT equal to the run"
    print(f"\n{len(replay.minibatches)} minibatches; metrics are {exact}")
    print(f"file: {content['file']}")
