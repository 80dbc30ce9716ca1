"""`embodied-ppo new-task`: write a task for a robot from its MJCF."""

from __future__ import annotations

import argparse
from pathlib import Path

from embodied_ppo.commands import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", help="name of the task's module; the class is named in CamelCase"
    )
    parser.add_argument("--mjcf", metavar="FILE", required=True, help="MuJoCo XML of the robot")
    parser.add_argument("--out", metavar="DIR", help="folder to write to (default: ./NAME)")
    parser.add_argument("--json", action="store_true", help="print files and assumptions as JSON")


def run(args: argparse.Namespace) -> None:
    """Write the task and print the files, the assumptions and the next commands."""
    from embodied_ppo.tools import task_generator

    task = task_generator.write(args.name, Path(args.mjcf), Path(args.out) if args.out else None)
    if args.json:
        files = list(map(str, task.files))
        summary = {"files": files, "assumed": task.assumed, "commands": task.commands}
        print(output.as_json(summary))
        return
    titles = ("written", "assumed, change it there", "next")
    for title, lines in zip(titles, (task.files, task.assumed, task.commands), strict=True):
        print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
